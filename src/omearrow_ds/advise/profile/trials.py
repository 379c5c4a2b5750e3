"""`Trial`: other settings, measured in alternation with the current ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.turns import LEAST_TIE, WORTH_IT, Rounds, gains, is_clear, median_ratio
from omearrow_ds.errors import OMEArrowDSError


@dataclass(frozen=True)
class Trial:
    """Settings that differ from the current ones, and the measurement of a loop with these settings.

    Attributes
    ----------
    name, options, code, advice
        The settings: a name, options of the command, Python code, and a sentence.
    setup_s
        Seconds of one-time work, such as decoding or converting; None if not measured.
    samples_per_s
        Median rate over the rounds; None if not measured.
    gain
        ``samples_per_s`` divided by the rate of the current settings.
    least_gain, most_gain
        Minimum and maximum gain of single rounds, as a measure of certainty.
    epoch_s
        Seconds of an epoch at that rate.
    break_even_epochs
        Whole epochs after which the setup pays, compared with access on demand; None if never or unknown.
    clear
        Whether the rounds agree that it is faster, or not faster, than access on demand.
    held_bytes
        Bytes used of ``room``.
    room
        ``"memory"`` or ``"disk"``.
    note
        Why it was not measured, or only on a part of the images.
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
        """Whether this trial was at least 10 % faster than the current settings, and faster in every round."""
        return self.gain is not None and self.gain >= WORTH_IT and (self.least_gain or 0.0) > 1.0

    def measured(self, rates: Rounds, now: Rounds, images: int) -> Trial:
        """Return a copy of this trial with its rate, and its gain over the rates ``now`` of the current settings."""
        rate, by_turn = median(rates.values()), gains(rates, now)
        return replace(
            self,
            samples_per_s=rate,
            gain=median_ratio(rates, now),
            least_gain=min(by_turn),
            most_gain=max(by_turn),
            epoch_s=images / rate,
        )

    def paid(self, rates: Rounds, demand: Rounds, images: int) -> Trial:
        """Return a copy of this trial with the epochs after which its setup pays, compared with access on demand."""
        if self.setup_s is None:
            return self
        by_turn, epoch_s = gains(rates, demand), images / median(demand.values())
        epochs = break_even_epochs(self.setup_s, epoch_s, median_ratio(rates, demand), min(by_turn))
        return replace(self, break_even_epochs=epochs, clear=is_clear(by_turn))


class PreparedLoop(NamedTuple):
    """A loop ready to run. For a loop over a part of the images, ``factor`` scales its setup time to all images."""

    loop: Loop
    factor: float = 1.0
    note: str = ""


class Candidate(NamedTuple):
    """Settings to try, and the function that creates their loop; it is not called if ``trial.note`` is not empty."""

    trial: Trial
    make: Callable[[], PreparedLoop]


def prepare_loops(candidates: Iterable[Candidate], stack: ExitStack) -> list[tuple[Trial, Loop | None]]:
    """Return each trial with its loop, or with None if the trial has a note. ``stack`` closes the loops."""
    ready: list[tuple[Trial, Loop | None]] = []
    for trial, make in candidates:
        if trial.note:
            ready.append((trial, None))
            continue
        start = perf_counter()
        try:
            prepared = make()
            loop = stack.enter_context(prepared.loop)
            setup_s = (perf_counter() - start) * prepared.factor if trial.room else None
            loop.warm_up()
        except (OMEArrowDSError, OSError) as error:
            ready.append((replace(trial, note=f"could not be set up: {error}"), None))
        else:
            ready.append((replace(trial, setup_s=setup_s, note=prepared.note), loop))
    return ready


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return the number of epochs after which faster epochs have saved the setup time, or None if they never do.

    ``epoch_s`` is an epoch without the setup, ``gain`` the median speedup, and ``least_gain`` the speedup of the worst
    round. A setup that was not faster in every round never pays.
    """
    if gain < LEAST_TIE or least_gain <= 1.0:
        return None
    spared_s = epoch_s * (1 - 1 / gain)
    return max(1, -int(-setup_s // spared_s))
