"""`InterleavedRounds`: rounds of measurements for all comparisons, with their noise, ties and certainty.

The load of a machine affects all measurements of a round alike. Values are therefore compared within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from statistics import mean, median
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Figure = TypeVar("Figure")
Rounds = Mapping[int, float]  # Measured value by round number.

LEAST_TIE, MOST_TIE = 1.03, 1.08  # Maximum ratio of tied values, without noise and with any noise.
WORTH_IT = 1.10  # A smaller gain is a close call that does not justify a change.
_FEW_ROUNDS = 3  # The noise of fewer rounds is unknown.
_NOISY = 0.5
_DISSENT = 8  # One of this number of rounds may disagree.


class InterleavedRounds(Generic[Key, Figure]):
    """Values measured in rounds, by key and round number, until ``is_over`` returns that the time is up."""

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self.figures: dict[Key, dict[int, Figure]] = {}
        self.rounds = 0
        self._is_over = is_over

    def round(self, keys: Iterable[Key], take: Callable[[Key], Figure | None]) -> list[Key]:
        """Measure each key once, in reverse order in every second round, and return the keys that came too late.

        A measured ``None`` is not recorded. An incomplete first round is kept, an incomplete later one is discarded.
        """
        figures, late = dict[Key, Figure](), list[Key]()
        for key in list(keys)[:: -1 if self.rounds % 2 else 1]:
            if figures and self._is_over():
                late.append(key)
            elif (figure := take(key)) is not None:
                figures[key] = figure
        if not (late and self.rounds):
            for key, figure in figures.items():
                self.figures.setdefault(key, {})[self.rounds] = figure
            self.rounds += 1
        return late

    def run(self, keys: Iterable[Key], take: Callable[[Key], Figure | None], most_rounds: int) -> None:
        """Measure all keys in rounds, until ``most_rounds`` rounds are complete or the time is up."""
        order = list(keys)
        while self.rounds < most_rounds and not self.round(order, take) and not self._is_over():
            pass


def gains(one: Rounds, over: Rounds) -> list[float]:
    return [one[number] / over[number] for number in sorted(one.keys() & over.keys())]


def noise(times_s: Iterable[float]) -> float:
    """Return how much slower the median round is than the fastest round, where 0.1 is 10 % slower."""
    times = list(times_s)
    return median(times) / min(times) - 1 if 0 < min(times) < inf else 0.0


def tie_ratio(rounds: int, *noises: float) -> float:
    """Return the ratio up to which two values count as equal; the ratio grows with their mean noise."""
    return MOST_TIE if rounds < _FEW_ROUNDS else min(MOST_TIE, max(LEAST_TIE, 1 + mean(noises)))


def mostly_agree(rounds: Iterable[bool]) -> bool:
    """Return whether almost all rounds are True; by chance, 3 rounds are in 1 of 8 cases, 5 in at most 1 of 28."""
    votes = list(rounds)
    return votes.count(False) <= len(votes) // _DISSENT


def doubt_note(rounds: int, noise: float) -> str:
    """Return why a result is uncertain (few rounds, or noise above 50 %), or an empty string if it is certain."""
    if rounds < _FEW_ROUNDS:
        return f"not sure: the time allowed only {'one round' if rounds == 1 else f'{rounds} rounds'}; raise --seconds"
    if noise > _NOISY:
        return too_noisy(f"half of the rounds took at least {noise:.0%} longer than the best")
    return ""


def too_noisy(why: str) -> str:
    return f"not sure: the machine was too noisy, {why}; run the command again on an idle machine"
