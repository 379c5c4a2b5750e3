"""`Control`: speed and load of the machine while benchmarks run, measured without project code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypedDict

import numpy as np

_CALLS = 5  # A sample is the shortest of these calls.
_THREAD, _MACHINE = Path("/proc/thread-self/schedstat"), Path("/proc/stat")
_STEAL = 7  # Index of the stolen ticks in the first line of /proc/stat.


class Controls(TypedDict):
    """Result of `Control`: the shortest sample of each task, and the share of time spent waiting.

    ``waited`` is the share of time in which the thread was ready, but another thread or guest used its core.
    """

    least_s: dict[str, float]
    waited: float


class Control:
    """Samples of two tasks: sorting numbers in the processor's caches, and scaling pixels into new memory."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._numbers = random.random(1 << 12, np.float32)
        self._pixels = random.integers(0, 2**16, 1 << 18, np.uint16)
        self._start = _scheduled()
        self.times_s: dict[str, list[float]] = {"compute": [], "memory": []}

    def compute(self) -> None:
        """Sort the numbers."""
        np.sort(self._numbers, kind="stable")

    def memory(self) -> None:
        """Scale the pixels."""
        np.true_divide(self._pixels, np.float32(65535), dtype=np.float32)

    def sample(self) -> None:
        """Time both tasks once, which takes some milliseconds."""
        for name, work in (("compute", self.compute), ("memory", self.memory)):
            self.times_s[name].append(min(_seconds(work) for _ in range(_CALLS)))

    def result(self) -> Controls:
        """Return the result since the start. Call it in the thread that created the control."""
        ran, waited, stolen, passed = (now - then for now, then in zip(_scheduled(), self._start, strict=True))
        shares = (waited / (ran + waited or 1), stolen / (passed or 1))
        return {
            "least_s": {name: min(times_s) for name, times_s in self.times_s.items() if times_s},
            "waited": max(shares),
        }


def _seconds(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _scheduled() -> tuple[int, int, int, int]:
    """Return the running and waiting time of this thread, and the stolen and total ticks of the machine."""
    try:
        ran, waited, _ = map(int, _THREAD.read_text(encoding="ascii").split())
        ticks = list(map(int, _MACHINE.read_text(encoding="ascii").splitlines()[0].split()[1:]))
    except OSError:  # Some kernels do not provide these files.
        return 0, 0, 0, 0
    return ran, waited, ticks[_STEAL], sum(ticks)
