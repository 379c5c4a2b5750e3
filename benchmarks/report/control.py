"""`Control`: the speed of the machine while benchmarks run, and their share of it; nothing of the project is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypedDict

import numpy as np

_CALLS = 5  # of a sample, which is the shortest of them
_THREAD, _MACHINE = Path("/proc/thread-self/schedstat"), Path("/proc/stat")
_STEAL = 7  # of the numbers of /proc/stat's first line


class Controls(TypedDict):
    """What `Control` found: the shortest sample of each work, and how much of the machine it had to wait for.

    ``waited`` is the share of its time that the thread was ready to run and another had its core, or another guest the
    host's.
    """

    least_s: dict[str, float]
    waited: float


class Control:
    """Sorting numbers that fit in the processor's caches, and scaling pixels into fresh memory; samples are kept."""

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
        """Time both once: some milliseconds."""
        for name, work in (("compute", self.compute), ("memory", self.memory)):
            self.times_s[name].append(min(_seconds(work) for _ in range(_CALLS)))

    def told(self) -> Controls:
        """Return what was found since the beginning, by the thread that began."""
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
    """Return what this thread ran and waited, and what of the machine's ticks were stolen, and all of them."""
    try:
        ran, waited, _ = map(int, _THREAD.read_text(encoding="ascii").split())
        ticks = list(map(int, _MACHINE.read_text(encoding="ascii").splitlines()[0].split()[1:]))
    except OSError:  # a kernel that does not say
        return 0, 0, 0, 0
    return ran, waited, ticks[_STEAL], sum(ticks)
