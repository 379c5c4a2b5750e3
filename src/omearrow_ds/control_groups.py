"""The control groups around this process: what a container or a batch job may use."""

from __future__ import annotations

import functools
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> dict[Path, int]:
    """Return the folders of this process's groups for a controller, each with its version, 1 or 2, the root last."""
    return _folders(_read(own), controller, root)


@functools.lru_cache
def _folders(own: bytes, controller: str, root: Path) -> dict[Path, int]:
    """As `control_groups`, of what the system says of the groups of a process."""
    found: dict[Path, int] = {}
    for line in own.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.lstrip("/")
            found |= dict.fromkeys([folder, *folder.parents], 1 if controllers else 2)
    folders = {folder: version for folder, version in found.items() if folder.is_relative_to(root) and folder != root}
    return {**folders, root / controller: 1, root: 2}  # the two are there in a container that hides its own path


def numbers(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file; none if it is not there, or says ``max``."""
    words = _read(file).split()
    return tuple(map(int, words)) if all(map(bytes.isdigit, words)) else ()


def number_named(file: Path, name: str) -> int:
    """Return the number that stands after ``name`` in a file of such lines, 0 if there is none."""
    lines = (line.split() for line in _read(file).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name.encode()]), 0)


def _read(file: Path) -> bytes:
    """Return what a file of the system holds, nothing if it is not there."""
    try:
        with file.open("rb", buffering=0) as raw:
            return raw.read() or b""
    except OSError:
        return b""
