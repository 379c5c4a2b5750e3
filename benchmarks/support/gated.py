"""Fixed collections that the gate measures on, so that two runs measure the same whatever the options say."""

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
_STORED_ONCE = "arrow"  # in which the numerous alone are: what grows with their number is above all formats
_OBJECTS = 64


def workloads_of(fmt: Format) -> list[str]:
    """Return the names of the `WORKLOADS` that are measured in a format."""
    return [name for name in WORKLOADS if name != "numerous" or fmt.name == _STORED_ONCE]


def gated_objects(path: Path, fmt: Format) -> pa.Table:
    """Return the objects of the large images, the same in every format."""
    with open_images(path, fmt.name) as source:
        large = WORKLOADS["large"]
        return table_of(source.image_ids, *scattered(_OBJECTS, len(source), large.shape, large.seed))


def working_clock(pids: Sequence[int] = ()) -> Callable[[], float]:
    """Return a clock of the seconds that cores worked for this process, its threads, and others by their ids.

    It is one of the seconds that pass where the system does not tell, or, as Windows, by the tick alone.
    """
    fine = time.get_clock_info("process_time").resolution <= 1e-6
    if not fine or (pids and sys.platform != "linux"):
        return time.perf_counter
    if not pids:
        return time.process_time
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *(~pid << 3 | 2 for pid in pids)]  # clock_getcpuclockid(3) of Linux
    return lambda: sum(map(time.clock_gettime, clocks))


class Collections:
    """The stored collections of the gate, in a folder of data; a context manager that lets go of what it used."""

    def __init__(self, root: Path) -> None:
        self._caches = {name: DataCache(root, workload) for name, workload in WORKLOADS.items()}

    def path(self, name: str, fmt: Format, encoding: str) -> Path:
        """Return the path of one of the `WORKLOADS` as it is stored, which is done now if it was not."""
        return self._caches[name].path(fmt, encoding)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self._caches.values():
            cache.close()
