"""The files of results: their names, and how one is replaced as a whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUMMARY, GATE, SELFTEST, DRIFT = "pytest_benchmark_summary.json", "gate.json", "selftest.json", "drift.md"


def table_file(name: int | str) -> str:
    """Name the file of a track's table, or of one of limits."""
    return f"pytest_benchmark_{f'track{name}' if isinstance(name, int) else name}.parquet"


def figure_file(track: int) -> str:
    """Name the file of a track's figure."""
    return f"pytest_benchmark_track{track}.png"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name, and move what was written there over ``path``, if the block ends well."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # held by a run that is alive, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as held:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)  # what is written there by name is written into this file
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
