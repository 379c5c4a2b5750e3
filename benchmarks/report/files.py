"""Names of result files, and their atomic replacement."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUMMARY, GATE, SELFTEST, DRIFT = "pytest_benchmark_summary.json", "gate.json", "selftest.json", "drift.md"


def table_file(name: int | str) -> str:
    """Return the file name of a track's table, or of a comparison table."""
    return f"pytest_benchmark_{f'track{name}' if isinstance(name, int) else name}.parquet"


def figure_file(track: int) -> str:
    """Return the file name of a track's figure."""
    return f"pytest_benchmark_track{track}.png"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to ``path`` if the block ends without an exception."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # A running process has locked it, or it is gone.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as output:
        with suppress(OSError):  # Some file systems have no locks.
            fcntl.flock(output, fcntl.LOCK_EX)  # Writing to the path later keeps this inode.
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
