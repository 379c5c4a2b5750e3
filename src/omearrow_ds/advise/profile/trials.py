"""Other settings, really tried: each in turns with the settings at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.turns import LEAST_TIE, WORTH_IT, Rounds, gain, gains, is_clear
from omearrow_ds.errors import OMEArrowDSError


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

    def measured(self, rates: Rounds, now: Rounds, images: int) -> Trial:
        """Return it with what its turns came to beside those of the settings at hand."""
        rate, by_turn = median(rates.values()), gains(rates, now)
        return replace(
            self,
            samples_per_s=rate,
            gain=gain(rates, now),
            least_gain=min(by_turn),
            most_gain=max(by_turn),
            epoch_s=images / rate,
        )

    def paid(self, rates: Rounds, demand: Rounds, images: int) -> Trial:
        """Return it with the epochs after which it has paid, its turns held against those of access on demand."""
        if self.setup_s is None:
            return self
        by_turn, epoch_s = gains(rates, demand), images / median(demand.values())
        epochs = break_even_epochs(self.setup_s, epoch_s, gain(rates, demand), min(by_turn))
        return replace(self, break_even_epochs=epochs, clear=is_clear(by_turn))


class Made(NamedTuple):
    """A loop that is set up; where only a part of the images is in it, all would take ``factor`` times as long."""

    loop: Loop
    factor: float = 1.0
    note: str = ""


class Candidate(NamedTuple):
    """Settings to try, and how they are set up; a note that their trial has before tells what stands against them."""

    trial: Trial
    make: Callable[[], Made]


def set_up(candidates: Iterable[Candidate], stack: ExitStack) -> list[tuple[Trial, Loop | None]]:
    """Set up all that nothing stands against, and return the loops; the stack ends their workers."""
    ready: list[tuple[Trial, Loop | None]] = []
    for trial, make in candidates:
        if trial.note:
            ready.append((trial, None))
            continue
        start = perf_counter()
        try:
            made = make()
            loop = stack.enter_context(made.loop)
            setup_s = (perf_counter() - start) * made.factor if trial.room else None
            loop.warm_up()
        except (OMEArrowDSError, OSError) as error:
            ready.append((replace(trial, note=f"could not be set up: {error}"), None))
        else:
            ready.append((replace(trial, setup_s=setup_s, note=made.note), loop))
    return ready


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return after how many whole epochs it has paid to set up what makes them faster; None is never.

    An epoch takes ``epoch_s`` without it, and ``gain`` times less with it; in the turn where that was least,
    ``least_gain``: where it was not faster in each turn, it never pays.
    """
    if gain < LEAST_TIE or least_gain <= 1.0:
        return None
    spared_s = epoch_s * (1 - 1 / gain)
    return max(1, -int(-setup_s // spared_s))
