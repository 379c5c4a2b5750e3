"""`Turns`: the one engine of all comparisons here: what is compared takes turns, and is compared round by round.

A machine is busy now and idle then, which troubles all turns of a round alike. So one figure is held against another of
the same round, the order of a round is the other way round than that before, and half a round counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Figure = TypeVar("Figure")
Rounds = Mapping[int, float]  # a figure by the number of its round

NO_FASTER = 1.03  # what turns of a few tenths of a second do not tell from no gain
FEW_ROUNDS = 3  # with fewer the noise is not known


class Turns(Generic[Key, Figure]):
    """What takes turns, and what each came to in each round that it took part in.

    Parameters
    ----------
    is_over
        Whether there is no time for another turn; a round has one turn at least, whatever it says.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self.figures: dict[Key, dict[int, Figure]] = {}
        self.rounds = 0
        self._is_over = is_over

    def round(self, keys: Iterable[Key], take: Callable[[Key], Figure | None]) -> list[Key]:
        """Let each take its turn, and return those for which there was no time; ``None`` is no figure.

        The first round is kept as far as it came, a later one only as a whole.
        """
        found: dict[Key, Figure] = {}
        late: list[Key] = []
        order = list(keys)
        for key in order if self.rounds % 2 == 0 else order[::-1]:
            if found and self._is_over():
                late.append(key)
            elif (figure := take(key)) is not None:
                found[key] = figure
        if not (late and self.rounds):
            for key, figure in found.items():
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


def spread(figures: Rounds) -> float:
    """Return how far the least and the greatest lie apart, over the median."""
    return (max(figures.values()) - min(figures.values())) / median(figures.values())


def is_clear(found: Sequence[float]) -> bool:
    """Return whether gains agree on whether something is faster."""
    return min(found) > 1.0 or max(found) < NO_FASTER
