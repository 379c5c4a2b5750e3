"""Files that the page cache does not hold, as those of a first epoch of more data than memory are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

_COUNTERS = Path("/proc/self/io")


class Cold:
    """A copy of a collection at a place of its own, as what another benchmark has mapped stays in memory.

    Raises
    ------
    pytest.skip.Exception
        Where it cannot be read cold, with the reason.
    """

    def __init__(self, stored: Path, path: Path) -> None:
        shutil.copytree(stored, path) if stored.is_dir() else shutil.copy(stored, path)
        self.path, self._files = path, files_of(path)
        if reason := why_not(self._files):
            pytest.skip(reason)

    def drop(self) -> None:
        """Have the page cache let go of it; what is mapped stays there."""
        drop(self._files)


def drop(files: Iterable[Path]) -> None:
    """Have the page cache let go of files that are written out."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def why_not(files: Sequence[Path]) -> str | None:
    """Say why files cannot be read cold, or None: it is tried."""
    if not hasattr(os, "posix_fadvise") or not _COUNTERS.exists():
        return "this system does not drop files from its page cache, or does not count what is read of a disk"
    os.sync()  # once for all: to write out each of thousands of files, and again before each round, takes seconds
    drop(files)
    before = read_bytes()
    stored = sum(len(file.read_bytes()) for file in files)
    if read_bytes() - before < stored / 2:
        return "the file system here reads nothing anew after posix_fadvise: it is memory, or has a cache of its own"
    return None


def files_of(path: Path) -> list[Path]:
    """Return a file, or all in a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def read_bytes() -> int:
    """Return the bytes that this process caused to be read from disks."""
    lines = dict(line.split(": ") for line in _COUNTERS.read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])
