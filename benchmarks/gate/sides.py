"""The two sides of the gate: their trees in a temporary folder, and its removal."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from benchmarks.gate.processes import CannotCompareError, Command, end_of, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ORIGINS = """
import importlib.util, json, pathlib, sys
found = [importlib.util.find_spec(name).origin for name in sys.argv[2:]]
pathlib.Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
"""
_PREFIX, _IN_USE = "omearrow-ds-gate-", ".in-use"
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}  # Git must not prompt or change the index.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2**30  # noqa: S108  # In memory, so writes do not wait for a disk.


@dataclass(frozen=True, slots=True)
class Side:
    """Version to compare: ``"base"`` or ``"head"``, and a readable label of its commit or folder.

    Its files are in ``tree``, with the package in ``src``. It runs the benchmark files of ``suite`` with ``python``, on
    data that it writes itself.
    """

    name: str
    label: str
    tree: Path
    suite: Path
    python: Path
    data: Path

    def command(self, words: Sequence[str], log: Path, *, core: int | None = None) -> Command:
        """Return ``python WORDS`` as a process in the suite's folder, with the package of this side's tree."""
        # The user's PYTEST_ADDOPTS would change the measurement, and perhaps for only one side.
        left_out = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        mine = {"PYTHONPATH": str(self.tree / "src"), "PYTHONHASHSEED": "0", "TMPDIR": str(self.data.parent)}
        return Command([str(self.python), *words], self.suite, log, environment | mine, core)

    def check_import(self, log: Path) -> None:
        """Check that its processes import the package from its tree, not an installed one.

        Raises
        ------
        CannotCompareError
            If they do not, or if the tree does not have a package.
        """
        packages = sorted(file.parent.name for file in (self.tree / "src").glob("*/__init__.py"))
        if not packages:
            raise CannotCompareError(f"{self.name} ({self.label}) has no package in src/")
        output_file = log.with_suffix(".json")
        if run(self.command(["-c", _ORIGINS, str(output_file), *packages], log)):
            raise CannotCompareError(f"{self.name} ({self.label}) does not start\n{end_of(log)}")
        origins = json.loads(output_file.read_text(encoding="utf-8"))
        expected = [str(self.tree / "src" / name / "__init__.py") for name in packages]
        if origins != expected:
            raise CannotCompareError(f"{self.name} would import {', '.join(origins)}, not {', '.join(expected)}")


@contextmanager
def workplace(root: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder and remove it afterwards; first remove folders left by killed runs.

    Without a root it is in memory if more than 1 GiB is free there, else in the folder of temporary files.
    """
    for lock_file in [file for parent in {root or _MEMORY, _disk()} for file in parent.glob(f"{_PREFIX}*/{_IN_USE}")]:
        _remove_if_left(lock_file)
    if root is None:
        in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
        root = _MEMORY if in_memory else _disk()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    try:
        with FileLock(folder / _IN_USE):
            yield folder
    finally:
        _remove(folder)


def _disk() -> Path:
    return Path(tempfile.gettempdir())


def _remove_if_left(lock_file: Path) -> None:
    try:
        if lock_file.parent.lstat().st_uid == os.getuid():  # Do not trust folders of other users.
            with FileLock(lock_file, timeout=0):
                _remove(lock_file.parent)
    except (Timeout, OSError):  # In use, or already removed.
        return


def _remove(folder: Path) -> None:
    """Remove a workplace, and git's entries of worktrees in it."""
    for pointer in folder.glob("*/.git"):
        entry = Path(pointer.read_text(encoding="utf-8").removeprefix("gitdir:").strip())
        if entry.parent.name == "worktrees":  # .git/worktrees/NAME belongs to only this worktree.
            shutil.rmtree(entry, ignore_errors=True)
            with suppress(OSError):
                entry.parent.rmdir()  # Git also removes the empty folder.
    shutil.rmtree(folder, ignore_errors=True)


def git(repository: Path, *words: str) -> str:
    """Return the output of a git command.

    Raises
    ------
    CannotCompareError
        If git is missing or the command fails, with git's message.
    """
    program = shutil.which("git")
    if program is None:
        raise CannotCompareError("the gate needs git, and finds none")
    # The user's hooks must not run in the temporary worktree, and commands must not wait for a password.
    command = [program, "-C", str(repository), "-c", f"core.hooksPath={os.devnull}", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(  # noqa: S603  # The arguments are our own.
        command, capture_output=True, text=True, check=False, env=environment | _QUIET
    )
    if done.returncode:
        raise CannotCompareError(f"git {' '.join(words)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def check_out(repository: Path, ref: str, folder: Path) -> str:
    """Check out a commit into a temporary worktree, and return a readable label."""
    commit = git(repository, "rev-parse", "--verify", f"{ref}^{{commit}}").strip()
    git(repository, "worktree", "add", "--detach", "--force", str(folder), commit)
    return f"{ref} ({commit[:10]})" if not commit.startswith(ref) else commit[:10]


def copy_tree(repository: Path, folder: Path) -> str:
    """Copy a working tree with its changes, but without ignored files, and return a readable label.

    With a copy, the tree can be edited meanwhile, and both sides are on the same disk.
    """
    listed = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in dict.fromkeys(filter(None, listed.split("\0"))):
        source, target = repository / name, folder / name
        if source.is_file() or source.is_symlink():  # Deleted files are still listed.
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    commit = git(repository, "rev-parse", "HEAD").strip()[:10]
    return f"{commit} and uncommitted changes" if git(repository, "status", "--porcelain").strip() else commit


def share_equal_files(one: Path, other: Path) -> int:
    """Replace files in ``other`` by hard links to equal files in ``one``, and return their number.

    The position of a file in memory changes its read time by up to 10 %, in all rounds of a run.
    """
    originals = {_identity(file, one): file for file in _files(one)}
    shared = 0
    for file in _files(other):
        same = originals.get(_identity(file, other))
        if same is not None:
            file.unlink()
            file.hardlink_to(same)
            shared += 1
    return shared


def move_in_memory(folder: Path) -> None:
    """Rewrite each file in ``folder`` that the sides do not share, so its position in memory varies between rounds."""
    for file in _files(folder):
        if file.stat().st_nlink == 1:
            copy = file.with_name(f"{file.name}.copy")
            shutil.copy2(file, copy)
            copy.replace(file)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


def _identity(file: Path, folder: Path) -> tuple[str, str, bytes]:
    """Return collection, name and hash of a file; equal images may be in several collections."""
    return file.relative_to(folder).parts[0], file.name, hashlib.blake2b(file.read_bytes()).digest()
