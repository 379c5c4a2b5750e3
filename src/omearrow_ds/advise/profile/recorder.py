"""`Recorder`: the time of a thread by stage, where each moment counts for the innermost active stage.

The times of all stages therefore add up to the time between start and stop.
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
    """Seconds, number of calls, and number of calls to other stages, per stage."""

    seconds: list[float]
    calls: list[int]
    nested: list[int]

    @classmethod
    def zero(cls) -> Counts:
        return cls([0.0] * len(Stage), [0] * len(Stage), [0] * len(Stage))


class Recorder:
    """Clock of the thread that calls `start`; time outside of all stages counts for the stage ``base``.

    ``finish`` is called before a stage of ``finished`` ends, to wait for pending work of a device.
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
        self._thread = get_ident()
        self._since = perf_counter()

    def stop(self) -> None:
        """Stop recording, and count the time since the last call for the current stage."""
        now = perf_counter()
        self.counts.seconds[self._stack[-1]] += now - self._since
        self._thread = None

    def timed(self, function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
        """Wrap a function, so that its run time without the time of nested stages is counted for ``stage``."""
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
    """Seconds that one recorded call adds to the stage of the called function, and to the stage of its caller."""

    own_s: float
    outer_s: float

    @classmethod
    def measure(cls) -> ClockCost:
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
        """Return the seconds per stage without the cost of recording, and the sum of the subtracted cost."""
        net, total_s = [], 0.0
        for seconds, calls, nested in zip(*counts, strict=True):
            cost_s = min(seconds, calls * self.own_s + nested * self.outer_s)
            net.append(seconds - cost_s)
            total_s += cost_s
        return net, total_s


def _nothing() -> None:
    return None
