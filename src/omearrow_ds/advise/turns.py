"""`Turns`: the one engine of all comparisons here, and the one notion of their noise, of ties and of doubt.

A machine is busy now and idle then, which troubles all turns of a round alike. So one figure is held against another of
the same round, the order of a round is the other way round than that before, and half a round counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from statistics import mean, median
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Figure = TypeVar("Figure")
Rounds = Mapping[int, float]  # a figure by the number of its round

LEAST_TIE, MOST_TIE = 1.03, 1.08  # how many times another something is, if they are tied: at quiet, and at any noise
WORTH_IT = 1.10  # less is a close call, and not worth to change a thing
_FEW_ROUNDS = 3  # with fewer the noise is not known
_NOISY = 0.5
_DISSENT = 8  # of so many rounds one may say otherwise


class Turns(Generic[Key, Figure]):
    """What takes turns, and what each came to in each round that it took part in.

    ``is_over`` tells whether there is no time for another turn; a round has one turn at least, whatever it says.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self.figures: dict[Key, dict[int, Figure]] = {}
        self.rounds = 0
        self._is_over = is_over

    def round(self, keys: Iterable[Key], take: Callable[[Key], Figure | None]) -> list[Key]:
        """Let each take its turn, and return those for which there was no time; ``None`` is no figure.

        The first round is kept as far as it came, a later one only as a whole.
        """
        figures: dict[Key, Figure] = {}
        late: list[Key] = []
        order = list(keys)
        for key in order if self.rounds % 2 == 0 else order[::-1]:
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
        """Take turns so often, or until the time is over."""
        order = list(keys)
        while self.rounds < most_rounds and not self.round(order, take) and not self._is_over():
            pass


def gain(one: Rounds, over: Rounds) -> float:
    """Return how many times another figure one is, by their medians, as they are shown beside each other."""
    return median(one.values()) / median(over.values())


def gains(one: Rounds, over: Rounds) -> list[float]:
    """Return the same round by round, of the rounds that both took part in."""
    return [one[number] / over[number] for number in sorted(one.keys() & over.keys())]


def noise(times_s: Iterable[float]) -> float:
    """Return how much longer half of the rounds took than the best, or more: 0.1 is 10 %."""
    times = list(times_s)
    return median(times) / min(times) - 1 if 0 < min(times) < inf else 0.0


def tie(rounds: int, *noises: float) -> float:
    """Return up to how many times another something is and yet is tied with it, by the mean of their noise."""
    return MOST_TIE if rounds < _FEW_ROUNDS else min(MOST_TIE, max(LEAST_TIE, 1 + mean(noises)))


def agree(rounds: Iterable[bool]) -> bool:
    """Return whether rounds say the same: by chance alone three do in 1 of 8 cases, five or more in 1 of 28 at most."""
    said = list(rounds)
    return said.count(False) <= len(said) // _DISSENT


def is_clear(ratios: Sequence[float]) -> bool:
    """Return whether gains agree on whether something is faster."""
    return agree(each > 1.0 for each in ratios) or agree(each < LEAST_TIE for each in ratios)


def doubt(rounds: int, noise: float) -> str:
    """Return why nothing is sure that so many rounds of so much noise say; "" if it may be."""
    if rounds < _FEW_ROUNDS:
        return f"not sure: the time allowed {'one round' if rounds == 1 else f'{rounds} rounds'} only; raise --seconds"
    if noise > _NOISY:
        return too_noisy(f"half of the rounds took {noise:.0%} longer than the best, or more")
    return ""


def too_noisy(why: str) -> str:
    """Return the words for a machine that keeps rounds from agreeing."""
    return f"not sure: the machine was too noisy, {why}; run it again when it is quiet"
