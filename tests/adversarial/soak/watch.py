"""Resources of a process, and whether they grow: a slope with a calibrated confidence interval."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

_SHARED = Path("/dev/shm")
_BLOCKS = 30
_LEAST_BLOCKS = 12
_MALLOC_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
# Two-sided 99 % quantiles of Student's t by degrees of freedom; in between, the previous, wider one is used.
_T99 = {1: 63.66, 2: 9.92, 3: 5.84, 4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 10: 3.17, 12: 3.05, 15: 2.95, 20: 2.85}


@dataclass(frozen=True)
class Held:
    """Resources of the process and its children at one time."""

    private_bytes: int
    allocated_bytes: int
    shared_bytes: int
    children_bytes: int
    descriptors: int
    threads: int
    children: int
    shm_files: int

    @classmethod
    def now(cls) -> Held:
        """Measure after a garbage collection and after free memory was released."""
        gc.collect()
        allocated = _allocated_after_trim()
        private, shared = _memory(os.getpid())
        children = psutil.Process().children(recursive=True)
        return cls(
            private_bytes=private,
            allocated_bytes=allocated,
            shared_bytes=shared,
            children_bytes=sum(_memory(child.pid)[0] for child in children),
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208
            children=len(children),
            shm_files=sum(1 for _ in _SHARED.iterdir()),
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class _Malloc(ctypes.Structure):
    """Result of glibc's ``mallinfo2`` for all arenas; ``uordblks`` and ``hblkhd`` (mapped) are in use."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC_FIELDS)


def _allocated_after_trim() -> int:
    """Release glibc's free memory, and return the allocated bytes; without glibc return 0."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Malloc
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _memory(pid: int) -> tuple[int, int]:
    """Return the private bytes of a process, and its share of shared memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Private_Clean"] + sizes["Private_Dirty"], sizes.get("Pss_Shmem", 0)


@dataclass(frozen=True)
class Slope:
    """A straight line through a series: its rise per unit, and the 99 % interval."""

    per_unit: float
    low: float
    high: float
    blocks: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def slope(positions: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Fit a line to a series, or return None if it is too short.

    The line is fitted to the medians of up to 30 blocks of equal size, which ignore peaks within a case. Residuals of
    neighboring blocks are correlated, because memory is kept for a while. This correlation widens the interval and
    lowers its degrees of freedom, but never narrows the interval.
    """
    count = min(_BLOCKS, len(values) // 2)
    if count < _LEAST_BLOCKS:
        return None
    x = np.array([statistics.median(part) for part in np.array_split(np.asarray(positions, float), count)])
    y = np.array([statistics.median(part) for part in np.array_split(np.asarray(values, float), count)])
    x = x - x.mean()
    spread = float(x @ x)
    if spread == 0:
        return None
    rise = float(x @ (y - y.mean())) / spread
    left = y - y.mean() - rise * x
    total = float(left @ left)
    after_next = float(left[1:] @ left[:-1]) / total if total else 0.0
    correlation = min(0.9, max(0.0, after_next + 2 / count))  # The estimate is biased low by about 2 / count.
    effective = max(3.0, count * (1 - correlation) / (1 + correlation))
    error = math.sqrt(total / (count - 2) / spread * count / effective)
    return Slope(rise, rise - _t99(effective - 2) * error, rise + _t99(effective - 2) * error, count)


def _t99(freedom: float) -> float:
    return next((quantile for least, quantile in sorted(_T99.items(), reverse=True) if freedom >= least), _T99[1])


def grown(values: Sequence[int]) -> int:
    """Return the growth of a fluctuating count: its minimum late in the series less its maximum early on."""
    quarter = len(values) // 4
    return min(values[-quarter:]) - max(values[:quarter]) if quarter else 0


def after_warm_up(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the series without its first third, in which libraries start and caches fill."""
    return series[len(series) // 3 :]
