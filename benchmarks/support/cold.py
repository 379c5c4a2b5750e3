"""Files that the page cache does not hold, as those of a first epoch of more data than memory are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

_COUNTERS = Path("/proc/self/io")


def drop(path: Path) -> None:
    """Write a file, or all of a folder, out, and have the page cache let go of it; what is mapped stays there."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def copy_of(stored: Path, path: Path) -> None:
    """Copy a collection to a place of its own, as what another benchmark has mapped stays in memory.

    Raises
    ------
    pytest.skip.Exception
        Where it cannot be read cold, with the reason.
    """
    shutil.copytree(stored, path) if stored.is_dir() else shutil.copy(stored, path)
    if reason := why_not(path):
        pytest.skip(reason)


def why_not(path: Path) -> str | None:
    """Say why what is at ``path`` cannot be read cold, or None: it is tried."""
    if not hasattr(os, "posix_fadvise") or not _COUNTERS.exists():
        return "this system does not drop files from its page cache, or does not count what is read of a disk"
    drop(path)
    before = _read_bytes()
    for file in _files(path):
        file.read_bytes()
    stored = sum(file.stat().st_size for file in _files(path))
    if _read_bytes() - before < stored / 2:
        return "the file system here reads nothing anew after posix_fadvise: it is memory, or has a cache of its own"
    return None


def _files(path: Path) -> Iterator[Path]:
    return iter([path]) if path.is_file() else (file for file in path.rglob("*") if file.is_file())


def _read_bytes() -> int:
    lines = dict(line.split(": ") for line in _COUNTERS.read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])
