"""Fixed collections for the gate, independent of options, so that all runs measure the same work."""

from __future__ import annotations

import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from benchmarks.support.cells import scattered, table_of
from benchmarks.support.data import DataCache
from benchmarks.support.workload import Workload
from omearrow_ds import open_images

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from omearrow_ds import Format

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "many": Workload(256),
        "few": Workload(16),
        "large": Workload(4, (1, 1, 1, 512, 512)),
        "numerous": Workload(20_000, (1, 1, 1, 8, 8)),
    }
)
_STORED_ONCE = "arrow"  # Only format of "numerous": the cost per number of images does not depend on the format.
_OBJECTS = 64


def workloads_of(fmt: Format) -> list[str]:
    """Return the names of the `WORKLOADS` that are measured in a format."""
    return [name for name in WORKLOADS if name != "numerous" or fmt.name == _STORED_ONCE]


def gated_objects(path: Path, fmt: Format) -> pa.Table:
    """Return the object table of the large images, with equal positions in all formats."""
    with open_images(path, fmt.name) as source:
        large = WORKLOADS["large"]
        return table_of(source.image_ids, *scattered(_OBJECTS, len(source), large.shape, large.seed))


def working_clock(pids: Sequence[int] = ()) -> Callable[[], float]:
    """Return a clock of the CPU time of this process, its threads, and other processes by their ids.

    It measures wall time instead if the system lacks CPU clocks, or if they are coarse, as on Windows.
    """
    fine = time.get_clock_info("process_time").resolution <= 1e-6
    if not fine or (pids and sys.platform != "linux"):
        return time.perf_counter
    if not pids:
        return time.process_time
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *(~pid << 3 | 2 for pid in pids)]  # clock_getcpuclockid(3) of Linux
    return lambda: sum(map(time.clock_gettime, clocks))


class Collections:
    """Stored collections of the gate, in a folder of data; a context manager that releases their locks."""

    def __init__(self, root: Path) -> None:
        self._caches = {name: DataCache(root, workload) for name, workload in WORKLOADS.items()}

    def path(self, name: str, fmt: Format, encoding: str) -> Path:
        """Return the path of the stored collection of one of the `WORKLOADS`, which is written if missing."""
        return self._caches[name].path(fmt, encoding)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self._caches.values():
            cache.close()
