"""The control groups around this process: what a container or a batch job may use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> list[Path]:
    """Return the folders of this process's groups for a controller, from its own to the root; versions 2 and 1."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    found = [root, root / controller]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            folder = (root / controller if controllers else root) / path.lstrip("/")
            found += [folder, *(each for each in folder.parents if each.is_relative_to(root))]
    return list(dict.fromkeys(found))


def numbers(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file; none if it is not there, or says ``max``."""
    try:
        words = file.read_text(encoding="ascii").split()
    except OSError:
        return ()
    return tuple(int(word) for word in words) if all(word.isdecimal() for word in words) else ()


def number_named(file: Path, name: str) -> int:
    """Return the number that stands after ``name`` in a file of such lines, 0 if there is none."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    words = next((words for line in lines if (words := line.split())[:1] == [name]), ["", "0"])
    return int(words[1])
