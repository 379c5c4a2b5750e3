"""The two sides of the gate: their trees, environments and processes, and that nothing of them stays behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PREFIX, _IN_USE = "omearrow-ds-gate-", ".in-use"
_TIMEOUT_S = 900  # of one process, and of making an environment: more is a hang
_GRACE_S = 5.0  # from asking a process group to end to making it
_SHOWN_LINES = 30


class CannotCompareError(Exception):
    """The sides cannot be compared; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Side:
    """One version.

    Attributes
    ----------
    name : str
        ``"base"`` or ``"head"``.
    label : str
        Which commit or folder it is, for people.
    tree : pathlib.Path
        Its files; the package is in ``src``.
    suite : pathlib.Path
        The tree whose benchmark files it runs.
    python : pathlib.Path
        Interpreter of its environment.
    data : pathlib.Path
        Folder of the data that it writes itself.
    """

    name: str
    label: str
    tree: Path
    suite: Path
    python: Path
    data: Path

    def run(self, words: Sequence[str], log: Path, *, core: int | None = None) -> int:
        """Run ``python WORDS`` in a fresh process in the suite's folder and return its exit status.

        Parameters
        ----------
        words
            Arguments.
        log
            File of its output.
        core
            Number of the core that it is kept on, None for all.

        Raises
        ------
        CannotCompareError
            If it takes longer than a benchmark process ever should.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.tree / "src"), "PYTHONHASHSEED": "0"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        try:
            return run([str(self.python), *words], self.suite, log, environment, core)
        except subprocess.TimeoutExpired:
            raise CannotCompareError(f"{self.name} did not end within {_TIMEOUT_S} s:\n{end_of(log)}") from None

    def check_import(self, log: Path) -> None:
        """Make sure that its processes take the package from its tree, not an installed one.

        Raises
        ------
        CannotCompareError
            If they do not, or there is no package.
        """
        packages = sorted(file.parent.name for file in (self.tree / "src").glob("*/__init__.py"))
        if not packages:
            raise CannotCompareError(f"{self.name} ({self.label}) has no package in src/")
        code = "import importlib.util, sys; print(*(importlib.util.find_spec(name).origin for name in sys.argv[1:]))"
        self.run(["-c", code, *packages], log)
        origins = log.read_text(encoding="utf-8").split()
        wanted = [str(self.tree / "src" / name / "__init__.py") for name in packages]
        if origins != wanted:
            raise CannotCompareError(f"{self.name} would import {' '.join(origins)}, not {' '.join(wanted)}")


def run(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], core: int | None = None
) -> int:
    """Run a command in a process group of its own, which never outlives this call; return its exit status.

    Raises
    ------
    subprocess.TimeoutExpired
        After 15 minutes.
    """
    allowed = None if core is None or not hasattr(os, "sched_setaffinity") else {core}

    def keep_on_core() -> None:
        if allowed is not None:
            os.sched_setaffinity(0, allowed)

    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # our own words
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the group
            preexec_fn=keep_on_core,  # noqa: PLW1509  # this process has no threads
        )
        try:
            return process.wait(_TIMEOUT_S)
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process group: asked first, then made to."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(f"    {line}" for line in lines)


@contextmanager
def workplace() -> Iterator[Path]:
    """Give a folder that is gone afterwards, whatever happens; what killed runs left goes now."""
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_IN_USE}"):
        _remove_if_left(lock_file)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with FileLock(folder / _IN_USE):
            yield folder
    finally:
        _remove(folder)


def _remove_if_left(lock_file: Path) -> None:
    try:
        with FileLock(lock_file, timeout=0):
            _remove(lock_file.parent)
    except (Timeout, OSError):  # in use, or another user's
        return


def _remove(folder: Path) -> None:
    """Remove a workplace, and what git knows of worktrees in it."""
    for pointer in folder.glob("*/.git"):
        if pointer.is_file():
            repository = Path(pointer.read_text(encoding="utf-8").removeprefix("gitdir:").strip())
            shutil.rmtree(repository, ignore_errors=True)  # .git/worktrees/NAME, which is this worktree's alone
            with suppress(OSError):
                repository.parent.rmdir()  # as git does with the last one
    shutil.rmtree(folder, ignore_errors=True)


def git(repository: Path, *words: str) -> str:
    """Return what a git command says.

    Raises
    ------
    CannotCompareError
        If it fails, with git's own words.
    """
    program = shutil.which("git")
    if program is None:
        raise CannotCompareError("the gate needs git, and finds none")
    # No hook of the user's runs in the temporary worktree, nor any command that waits for a password.
    command = [program, "-C", str(repository), "-c", f"core.hooksPath={os.devnull}", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(  # noqa: S603  # our own words
        command, capture_output=True, text=True, check=False, env={**environment, "GIT_TERMINAL_PROMPT": "0"}
    )
    if done.returncode:
        raise CannotCompareError(f"git {' '.join(words)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def check_out(repository: Path, ref: str, folder: Path) -> str:
    """Check a commit out into a temporary worktree; return which one, for people."""
    commit = git(repository, "rev-parse", "--verify", f"{ref}^{{commit}}").strip()
    git(repository, "worktree", "add", "--detach", "--force", str(folder), commit)
    return f"{ref} ({commit[:10]})" if not commit.startswith(ref) else commit[:10]


def copy_tree(repository: Path, folder: Path) -> str:
    """Copy a working tree as it is now, changes included, ignored files left out; return what it is, for people.

    It is copied so that it may be worked on meanwhile, and so that both sides lie on the same disk.
    """
    if not repository.is_dir():
        raise CannotCompareError(f"--head {repository}: no such folder, and no commit of this repository")
    listed = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in dict.fromkeys(filter(None, listed.split("\0"))):
        source, target = repository / name, folder / name
        if source.is_file() or source.is_symlink():  # a deleted one is still listed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    commit = git(repository, "rev-parse", "HEAD").strip()[:10]
    return f"{commit} and uncommitted changes" if git(repository, "status", "--porcelain").strip() else commit


def environments(base: Path, head: Path, folder: Path) -> tuple[Path, Path]:
    """Return the interpreters of both sides: this one for both, unless their pins differ.

    Where they differ, a side whose pins this environment does not meet gets its own.
    """
    here = Path(sys.executable)
    if pins(base) == pins(head):
        return here, here
    ours, theirs = (
        here if meets(pins(tree)) else _make_environment(tree, folder / f"{name}-environment")
        for name, tree in (("base", base), ("head", head))
    )
    return ours, theirs


def pins(tree: Path) -> frozenset[Requirement]:
    """Return what a tree needs to run its benchmarks: its pins, its requirements, and those of its extra ``bench``."""
    found = [line.partition("#")[0].strip() for line in _lines(tree / "constraints.txt")]
    project = tomllib.loads("\n".join(_lines(tree / "pyproject.toml"))).get("project", {})
    found += project.get("dependencies", [])
    extras, wanted = project.get("optional-dependencies", {}), ["bench"]
    own = re.compile(rf"{re.escape(project.get('name', ''))}\[(.*)\]")
    for extra in wanted:  # grows while it is gone through
        for line in extras.get(extra, []):
            if match := own.fullmatch(line.strip()):
                wanted += [name for name in map(str.strip, match[1].split(",")) if name not in wanted]
            else:
                found.append(line)
    return frozenset(Requirement(line) for line in found if line)


def meets(requirements: frozenset[Requirement]) -> bool:
    """Whether this environment has what is required, in such versions; a pin of what is absent binds nothing."""
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
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        *constraints,
        "--editable",
        ".[bench]",
    ]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        if run(command, tree, log, os.environ):
            raise CannotCompareError(f"no environment could be made for {tree.name}:\n{end_of(log)}")
    return python
