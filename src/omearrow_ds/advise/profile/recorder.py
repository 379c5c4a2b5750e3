"""`Recorder`: each moment of a thread counted for one stage, the innermost that is going on.

So stages need no sum that comes out right by luck: they share out all the time between start and stop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from omearrow_ds.advise.profile.stages import Stage

_TRIAL_CALLS = 2000
_TRIALS = 5


class Counts(NamedTuple):
    """What was recorded, by stage: seconds, calls, and calls of other stages made from it."""

    seconds: list[float]
    calls: list[int]
    nested: list[int]

    @classmethod
    def zero(cls) -> Counts:
        """Return counts of nothing."""
        return cls([0.0] * len(Stage), [0] * len(Stage), [0] * len(Stage))


class Recorder:
    """Counts the time of the thread that starts it, that outside of all stages for ``base``.

    Before a stage of ``finished`` ends, ``finish`` waits until a device has done what it was told.
    """

    def __init__(
        self, base: Stage, finish: Callable[[], object] | None = None, finished: tuple[Stage, ...] = ()
    ) -> None:
        self.counts = Counts.zero()
        self._stack: list[int] = [base]
        self._since = 0.0
        self._thread: int | None = None
        self._finish, self._finished = finish, finished

    def start(self) -> None:
        """Count from now on, in this thread."""
        self._thread = get_ident()
        self._since = perf_counter()

    def stop(self) -> None:
        """Count up to now, and no longer."""
        now = perf_counter()
        self.counts.seconds[self._stack[-1]] += now - self._since
        self._thread = None

    def timed(self, function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
        """Return a function that does the same, and counts its time for ``stage``, less that of stages within."""
        seconds, calls, nested = self.counts
        stack, finish = self._stack, self._finish if stage in self._finished else None

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._thread != get_ident():
                return function(*args, **kwargs)
            now = perf_counter()
            seconds[stack[-1]] += now - self._since
            self._since = now
            stack.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                if finish is not None:
                    finish()
                stack.pop()
                calls[stage] += 1
                nested[stack[-1]] += 1
                now = perf_counter()
                seconds[stage] += now - self._since
                self._since = now

        return timed


class ClockCost(NamedTuple):
    """What one recorded call costs: seconds counted for its own stage, and for the one that it is called from."""

    own_s: float
    outer_s: float

    @classmethod
    def measure(cls) -> ClockCost:
        """Measure it here and now."""
        return min((cls._trial() for _ in range(_TRIALS)), key=sum)

    @classmethod
    def _trial(cls) -> ClockCost:
        recorder = Recorder(Stage.OTHER)
        timed, plain = recorder.timed(_nothing, Stage.READ), _nothing
        start = perf_counter()
        for _ in range(_TRIAL_CALLS):
            plain()
        bare_s = perf_counter() - start
        recorder.start()
        for _ in range(_TRIAL_CALLS):
            timed()
        recorder.stop()
        own_s, outer_s = recorder.counts.seconds[Stage.READ], recorder.counts.seconds[Stage.OTHER]
        return cls(own_s / _TRIAL_CALLS, max(0.0, outer_s - bare_s) / _TRIAL_CALLS)

    def taken_off(self, counts: Counts) -> tuple[list[float], float]:
        """Return the seconds of each stage without what recording them cost, and that cost in all."""
        net, total_s = [], 0.0
        for seconds, calls, nested in zip(*counts, strict=True):
            cost_s = min(seconds, calls * self.own_s + nested * self.outer_s)
            net.append(seconds - cost_s)
            total_s += cost_s
        return net, total_s


def _nothing() -> None:
    return None
