"""A private temporary folder for trials, on a disk with enough space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from omearrow_ds.errors import MissingPathError


@contextmanager
def workspace(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Create a folder in ``parent`` that only this user can enter, and remove it with its content at the end."""
    if parent is not None and not Path(parent).is_dir():
        raise MissingPathError("no such folder", option="work_dir", value=str(parent), remedy="create it")
    folder = TemporaryDirectory(prefix="omearrow-ds-", dir=parent, ignore_cleanup_errors=True)
    try:
        with folder:
            yield Path(folder.name)
    finally:
        folder.cleanup()  # Again, because an interrupt can end the first removal.


def over_limit_message(n_bytes: int, resource: str, limit_bytes: int, limit_name: str) -> str:
    """Return an error text if ``n_bytes`` exceed the limit of a resource (memory or disk), else an empty string."""
    return (
        ""
        if n_bytes <= limit_bytes
        else f"needs {n_bytes:,} bytes of {resource} but the limit is {limit_bytes:,} ({limit_name})"
    )
