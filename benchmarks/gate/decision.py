"""The gate's rule: from the times of paired rounds to a verdict. Pure arithmetic, symmetric in base and head.

Of each round, one process of base and one of head, the ratio of the shortest times is taken: the minimum is the
statistic that other programs on the machine disturb least. The estimate is the median of the rounds' ratios; its
interval has order statistics as ends, so it assumes no distribution (H. A. David and H. N. Nagaraja, *Order
Statistics*, 3rd edition, 2003, section 7.1).

A machine that others share disturbs whole rounds, of one side more than of the other, and what both sides reach in
their best rounds does not know of it. So a slowdown is also excluded where the least of all rounds excludes it; the
ends of its interval leave the best round of base or of head out. It never shows one: most rounds must agree on that.

Where a library hands work to threads of its own, a process draws lots of how they take turns, and the ratio of two
processes is mostly that: there the least of all rounds is all that is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COVERAGE = 0.93  # of the interval, at least: what the range of five rounds has (0.9375)
SUSPICIOUS = 0.025  # an estimate further off than this is measured again
CONTROL_LIMIT = 0.03  # the control runs no code of the project: where it moves by more, the machine did
LEAST_ROUNDS = 5  # fewer have no interval of that coverage
MOST_ROUNDS = 31
_ROUNDS_OF_ALL = 11  # after which only what decides the verdict is measured again: what may be slower


class Verdict(StrEnum):
    """What is said of one benchmark."""

    REGRESSION = "regression"
    NOT_RESOLVED = "not resolved"
    IMPROVED = "improved"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Change:
    """How head's time compares with base's.

    Attributes
    ----------
    ratio : float
        Median of the rounds' ratios head / base; of an even number the geometric mean of the middle two, so that
        swapping the sides gives the reciprocal.
    low, high : float
        Interval of that median.
    rounds : int
        How many ratios there were.
    least_low, least_high : float
        Interval of the ratio of the least of all rounds. Where that alone is compared, ``ratio``, ``low`` and ``high``
        are of it too.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    least_low: float
    least_high: float

    @classmethod
    def of(cls, base_s: Sequence[float], head_s: Sequence[float], *, least: bool = False) -> Change:
        """Compare the shortest time of base and of head in each round, or the least of all rounds.

        Raises
        ------
        ValueError
            If a time is not positive and finite, or the sides differ in rounds or have fewer than `LEAST_ROUNDS`.
        """
        times = [*base_s, *head_s]
        if len(base_s) != len(head_s) or len(base_s) < LEAST_ROUNDS:
            raise ValueError(f"{len(base_s)} rounds of base, {len(head_s)} of head; {LEAST_ROUNDS} or more are needed")
        if not all(time > 0 and math.isfinite(time) for time in times):
            raise ValueError(f"times must be positive and finite, not {min(times)} ... {max(times)} s")
        (base, next_base, *_), (head, next_head, *_) = sorted(base_s), sorted(head_s)
        low, high = head / next_base, next_head / base
        if least:
            return cls(head / base, low, high, len(base_s), low, high)
        ratios = sorted(head / base for base, head in zip(base_s, head_s, strict=True))
        left_out = ends_left_out(len(ratios))
        return cls(median(ratios), ratios[left_out], ratios[-1 - left_out], len(ratios), low, high)

    def verdict(self, threshold: float) -> Verdict:
        """Judge by a threshold, 0.05 for 5 %.

        A regression is slower by more than the threshold, with the whole interval slower; an improvement is its mirror
        image. What is neither is ok only if the estimate and a whole interval lie within the threshold, on both sides.
        """
        most = 1 + threshold
        if self.ratio > most and self.low > 1:
            return Verdict.REGRESSION
        if self.ratio < 1 / most and self.high < 1:
            return Verdict.IMPROVED
        intervals = ((self.low, self.high), (self.least_low, self.least_high))
        within = any(1 / most <= low and high <= most for low, high in intervals)
        return Verdict.OK if within and not self.moved(threshold) else Verdict.NOT_RESOLVED

    def may_be_slower(self, threshold: float) -> bool:
        """Whether a regression of more than the threshold is not excluded."""
        return max(self.ratio, min(self.high, self.least_high)) > 1 + threshold

    def moved(self, limit: float) -> bool:
        """Whether the estimate is off by more than ``limit``, to either side."""
        return not 1 / (1 + limit) <= self.ratio <= 1 + limit

    def is_suspicious(self, threshold: float) -> bool:
        """Whether more rounds are wanted before it is judged."""
        return self.moved(SUSPICIOUS) or self.verdict(threshold) is not Verdict.OK

    def is_open(self, threshold: float) -> bool:
        """Whether another round of it is wanted: where it is suspicious, after eleven where it may be slower."""
        return self.is_suspicious(threshold) if self.rounds < _ROUNDS_OF_ALL else self.may_be_slower(threshold)


def median(ordered: Sequence[float]) -> float:
    """Return the median of sorted positive values, by the geometric mean where two are in the middle."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else math.sqrt(ordered[middle - 1] * ordered[middle])


def ends_left_out(count: int) -> int:
    """Return how many values at each end of ``count`` lie outside the narrowest interval of `COVERAGE` or more.

    The k-th smallest and k-th largest enclose the median with the probability 1 - 2 * sum(C(n, j), j < k) / 2^n.
    """
    outside = accumulate(math.comb(count, below) for below in range(count // 2 + 1))
    within = [left for left, tail in enumerate(outside) if 1 - 2 * tail / 2**count >= COVERAGE]
    if not within:
        raise ValueError(f"{count} rounds have no interval of {COVERAGE:.0%}; {LEAST_ROUNDS} have")
    return within[-1]
