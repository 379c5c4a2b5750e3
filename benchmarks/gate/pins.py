"""Environment of a side: the current one, unless pins differ and it does not meet them."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from benchmarks.gate.processes import CannotCompareError, Command, end_of, run


def environments(base: Path, head: Path, folder: Path) -> tuple[Path, Path]:
    """Return the interpreters of both sides: the current one if their pins are equal.

    If they differ, a side whose pins the current environment does not meet gets a new environment.
    """
    current = Path(sys.executable)
    if pins(base) == pins(head):
        return current, current
    ours, theirs = (
        current if meets(pins(tree)) else _make_environment(tree, folder / f"{name}-environment")
        for name, tree in (("base", base), ("head", head))
    )
    return ours, theirs


def pins(tree: Path) -> frozenset[Requirement]:
    """Return the requirements of a tree's benchmarks: its pins, its dependencies, and those of its extra ``bench``."""
    requirements = [line.partition("#")[0].strip() for line in _lines(tree / "constraints.txt")]
    project = tomllib.loads("\n".join(_lines(tree / "pyproject.toml"))).get("project", {})
    requirements += project.get("dependencies", [])
    extras, extra_names = project.get("optional-dependencies", {}), ["bench"]
    own = re.compile(rf"{re.escape(project.get('name', ''))}\[(.*)\]")
    for extra in extra_names:  # The loop appends to it.
        for line in extras.get(extra, []):
            if match := own.fullmatch(line.strip()):
                extra_names += [name for name in map(str.strip, match[1].split(",")) if name not in extra_names]
            else:
                requirements.append(line)
    try:
        return frozenset(Requirement(line) for line in requirements if line)
    except InvalidRequirement as error:
        raise CannotCompareError(f"{tree}: its pins must be plain requirements: {error}") from error


def meets(requirements: frozenset[Requirement]) -> bool:
    """Whether this environment meets the requirements; pins of packages that are not installed are ignored."""
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not str(requirement.specifier).startswith("=="):
                return False
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                return False
    return True


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _make_environment(tree: Path, folder: Path) -> Path:
    print(f"The pins differ: making an environment for {tree.name}, some minutes", flush=True)
    log, python = folder.with_suffix(".log"), folder / "bin" / "python"
    constraints = ["--constraint", "constraints.txt"] if (tree / "constraints.txt").is_file() else []
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    make = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    for command in (make, [*pip, *constraints, "--editable", ".[bench]"]):
        if run(Command(command, tree, log)):
            raise CannotCompareError(f"no environment could be made for {tree.name}:\n{end_of(log)}")
    return python
