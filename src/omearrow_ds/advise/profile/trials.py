"""Other settings, really tried: each in turns with the settings at hand, so that a busy machine troubles all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

from omearrow_ds.advise.profile.loop import Duration, Loop, Run
from omearrow_ds.errors import OMEArrowDSError

NO_FASTER = 1.03  # what turns of a few tenths of a second do not tell from no gain
WORTH_IT = 1.1

Runs = Callable[[Duration], Run]


class Settings(NamedTuple):
    """What is tried: its name, how the command and a program ask for it, and in words what to do."""

    name: str
    options: str
    code: str
    advice: str


class Candidate(NamedTuple):
    """Settings, and how they are set up; what stands against them is told instead."""

    settings: Settings
    make: Callable[[], Loop]
    held_bytes: int = 0
    room: str = ""
    problem: str = ""
    extent: Callable[[], tuple[float, str]] = lambda: (1.0, "")  # all over what was set up, if that is only a part


@dataclass(frozen=True)
class Trial:
    """What was measured of other settings.

    Attributes
    ----------
    name, options, code, advice
        What was tried, as options of the command, as Python, and in words.
    setup_s
        Seconds that it takes once: decoding, converting; None if it was not measured.
    samples_per_s
        Median over the turns; None if it was not measured.
    gain
        That over the rate of the settings at hand.
    least_gain, most_gain
        The same within one turn: the least and the most of all turns, which is how sure the gain is.
    epoch_s
        Seconds of an epoch at that rate.
    break_even_epochs
        Whole epochs after which it has paid, counted against access on demand; None is never, or not known.
    clear
        Whether it was faster, or slower, than access on demand in every turn: else it is not known whether it pays.
    held_bytes
        What it takes of ``room``.
    room
        ``"memory"`` or ``"disk"``.
    note
        Why it was not measured, or only in part.
    """

    name: str
    options: str
    code: str
    advice: str
    setup_s: float | None = None
    samples_per_s: float | None = None
    gain: float | None = None
    least_gain: float | None = None
    most_gain: float | None = None
    epoch_s: float | None = None
    break_even_epochs: int | None = None
    clear: bool = True
    held_bytes: int = 0
    room: str = ""
    note: str = ""

    @property
    def worth_it(self) -> bool:
        """Whether it was clearly faster, in every turn."""
        return self.gain is not None and self.gain >= WORTH_IT and (self.least_gain or 0.0) > 1.0


@dataclass
class Turns:
    """Loops that run in turns.

    Parameters
    ----------
    duration
        Of one turn.
    rounds
        Turns of each.
    """

    duration: Duration
    rounds: int
    rates: dict[str, list[float]] = field(default_factory=dict)

    def run(self, loops: dict[str, Runs]) -> None:
        """Run all of them so often, each time in the other order than before."""
        self.rates = {name: [] for name in loops}
        for turn in range(self.rounds):
            for name in list(loops) if turn % 2 == 0 else reversed(loops):
                self.rates[name].append(loops[name](self.duration).samples_per_s)

    def rate(self, name: str) -> float:
        """Return the median rate, in samples a second."""
        return median(self.rates[name])

    def noise(self, name: str) -> float:
        """Return how far the least and the greatest rate lie apart, over the median."""
        return (max(self.rates[name]) - min(self.rates[name])) / self.rate(name)

    def gain(self, name: str, over: str) -> float:
        """Return how many times faster one was than another, by their medians, as they are shown beside each other."""
        return self.rate(name) / self.rate(over)

    def gains(self, name: str, over: str) -> list[float]:
        """Return how many times faster one was than another, turn by turn."""
        return [one / other for one, other in zip(self.rates[name], self.rates[over], strict=True)]


class SetUp(NamedTuple):
    """A candidate that is ready to run, or the error that it met."""

    candidate: Candidate
    loop: Loop | None
    seconds: float | None
    note: str


def set_up(candidates: Sequence[Candidate], stack: ExitStack) -> list[SetUp]:
    """Set up all candidates that nothing stands against; the stack ends their workers."""
    found = []
    for candidate in candidates:
        if candidate.problem:
            found.append(SetUp(candidate, None, None, candidate.problem))
            continue
        start = perf_counter()
        try:
            loop = stack.enter_context(candidate.make())
            factor, note = candidate.extent()
            seconds = (perf_counter() - start) * factor
            loop.warm_up()
        except (OMEArrowDSError, OSError) as error:
            found.append(SetUp(candidate, None, None, f"could not be set up: {error}"))
            continue
        found.append(SetUp(candidate, loop, seconds, note))
    return found


def result(ready: SetUp, turns: Turns, now: str, count: int) -> Trial:
    """Return what was measured of a candidate, ``now`` being the name of the settings at hand."""
    candidate = ready.candidate
    trial = Trial(*candidate.settings, held_bytes=candidate.held_bytes, room=candidate.room, note=ready.note)
    if ready.loop is None:
        return trial
    rate, gains = turns.rate(trial.name), turns.gains(trial.name, now)
    return replace(
        trial,
        setup_s=ready.seconds if candidate.room else None,
        samples_per_s=rate,
        gain=turns.gain(trial.name, now),
        least_gain=min(gains),
        most_gain=max(gains),
        epoch_s=count / rate,
    )


def is_clear(gains: Sequence[float]) -> bool:
    """Return whether turns agree on whether something is faster."""
    return min(gains) > 1.0 or max(gains) < NO_FASTER


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return after how many whole epochs it has paid to set up what makes them faster; None is never.

    Parameters
    ----------
    setup_s
        Seconds that it takes once.
    epoch_s
        Seconds of an epoch without it.
    gain
        How many times faster an epoch is with it.
    least_gain
        The same in the turn where it was least; if it was not faster there, it never pays.
    """
    if gain < NO_FASTER or least_gain <= 1.0:
        return None
    spared_s = epoch_s * (1 - 1 / gain)
    return max(1, -int(-setup_s // spared_s))
