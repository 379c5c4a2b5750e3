"""What the gate measures on: fixed collections, so that two runs measure the same whatever the options say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from benchmarks.data import DataCache
from benchmarks.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from omearrow_ds import Format

SMALL = Workload(256)
LARGE = Workload(32, (1, 1, 1, 512, 512))


class Collections:
    """The stored collections of the gate; a context manager that lets go of what it used.

    Parameters
    ----------
    root
        Folder of generated data.
    """

    def __init__(self, root: Path) -> None:
        self._caches = {"small": DataCache(root, SMALL), "large": DataCache(root, LARGE)}

    def path(self, size: str, fmt: Format, encoding: str) -> Path:
        """Return the path of the ``"small"`` or ``"large"`` collection, made now if it is not there."""
        return self._caches[size].path(fmt, encoding)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cache in self._caches.values():
            cache.close()
