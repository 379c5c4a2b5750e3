"""Files that are not in the page cache, as in a first epoch of data larger than memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

_COUNTERS = Path("/proc/self/io")


class Cold:
    """Separate copy of a collection, because files mapped by another benchmark stay in memory.

    Raises
    ------
    pytest.skip.Exception
        If it cannot be read cold, with the reason.
    """

    def __init__(self, stored: Path, path: Path) -> None:
        shutil.copytree(stored, path) if stored.is_dir() else shutil.copy(stored, path)
        self.path, self._files = path, files_of(path)
        if reason := why_not(self._files):
            pytest.skip(reason)

    def drop(self) -> None:
        """Drop the files from the page cache; mapped pages stay there."""
        drop(self._files)


def drop(files: Iterable[Path]) -> None:
    """Drop files, already written to disk, from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def why_not(files: Sequence[Path]) -> str | None:
    """Return the reason why files cannot be read cold, or None, by trying it."""
    if not hasattr(os, "posix_fadvise") or not _COUNTERS.exists():
        return "this system does not drop files from its page cache, or does not count what is read of a disk"
    os.sync()  # Sync once, as syncing thousands of files before each round takes seconds.
    drop(files)
    before = read_bytes()
    stored = sum(len(file.read_bytes()) for file in files)
    if read_bytes() - before < stored / 2:
        return "the file system here reads nothing anew after posix_fadvise: it is memory, or has a cache of its own"
    return None


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or all files in a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def read_bytes() -> int:
    """Return the number of bytes that this process has read from disks."""
    lines = dict(line.split(": ") for line in _COUNTERS.read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])
