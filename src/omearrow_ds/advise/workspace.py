"""A private temporary folder for trials, on a disk with enough space."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omearrow_ds.errors import ArgumentError, MissingPathError

_PREFIX = "omearrow-ds-"
_SPARE_BYTES = 64_000_000  # Bytes that stay free on the disk, and overhead of small files.
_LEAST_BYTES = 1_000_000


@contextmanager
def workspace(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Create a folder in ``parent`` that only this user can enter, and remove it with its content at the end."""
    if parent is not None and not Path(parent).is_dir():
        raise MissingPathError("no such folder", option="work_dir", value=str(parent), remedy="create it")
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder completely, even if an interrupt arrives meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def most_sample_bytes(folder: Path, copies: int, wanted_bytes: int) -> int:
    """Return the maximum bytes of a sample that fits ``folder`` in ``copies`` copies, at most ``wanted_bytes``."""
    free_bytes = shutil.disk_usage(folder).free
    # Some formats store uncompressed lists of 16-bit values in twice their size.
    most_bytes = min(wanted_bytes, (free_bytes - _SPARE_BYTES) // (2 * copies))
    if most_bytes < min(_LEAST_BYTES, wanted_bytes):
        needed = 2 * copies * _LEAST_BYTES + _SPARE_BYTES
        raise ArgumentError(
            f"the disk has {free_bytes:,} free bytes, but {copies} copies of a sample need at least {needed:,}",
            option="work_dir",
            value=str(folder.parent),
            remedy="pass a folder on another disk, or fewer formats",
        )
    return most_bytes


def over_limit_message(n_bytes: int, resource: str, limit_bytes: int, limit_name: str) -> str:
    """Return an error text if ``n_bytes`` exceed the limit of a resource (memory or disk), else an empty string."""
    return (
        ""
        if n_bytes <= limit_bytes
        else f"needs {n_bytes:,} bytes of {resource} but the limit is {limit_bytes:,} ({limit_name})"
    )


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
