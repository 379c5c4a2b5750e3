"""The gate's rule: from paired rounds to a verdict. Pure arithmetic, symmetric in base and head.

A round is a process of base and one of head that measure a benchmark in turns of some milliseconds. The least of each
turn is what other programs disturb least; its ratio to that of the turn beside it knows of no mood of the machine that
lasts longer than two turns; and the middle one of these ratios knows of none that lasts for less than half of them.

Processes differ by more than that, as by where their memory lies, so a round counts as one observation, however many
calls it has. Of the logarithms of the rounds' ratios the mean is judged by a moderated t statistic (G. K. Smyth,
Statistical Applications in Genetics and Molecular Biology 3, 2004, article 3): their variance is averaged with the
usual one of benchmarks, so that five rounds that agree by chance look no more certain than they are.

What is said of one of seventy benchmarks, and looked at after each round, must be far surer than what is said of one:
a slowdown is shown at `ALARM`, where a single look at a single benchmark would be content with `EXCLUDED`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import fmean, median
from typing import TYPE_CHECKING

from scipy.special import stdtrit

if TYPE_CHECKING:
    from collections.abc import Sequence

EXCLUDED = 0.05  # the probability left beyond each end of the interval that is shown, and excludes
ALARM = 2e-6  # and beyond each end of the one that shows a change
USUAL_NOISE = 0.03  # standard deviation of a round's logarithm that is usual among benchmarks on a busy machine, and
USUAL_ROUNDS = 6  # as how many degrees of freedom that counts
CONTROL_LIMIT = 0.03  # the control runs no code of the project: where it moves by more, the machine did
LEAST_ROUNDS = 5
MOST_ROUNDS = 31


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
        Geometric mean of the rounds' ratios head / base.
    low, high : float
        Interval of it: slower than ``high``, or faster than ``low``, it is in one of twenty cases each.
    surely_low, surely_high : float
        As wide an interval as a change must be outside of to be shown.
    rounds : int
        How many ratios there were.
    """

    ratio: float
    low: float
    high: float
    surely_low: float
    surely_high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Change:
        """Judge the ratios of rounds.

        Raises
        ------
        ValueError
            If a ratio is not positive and finite, or there are fewer than `LEAST_ROUNDS`.
        """
        if len(ratios) < LEAST_ROUNDS:
            raise ValueError(f"{len(ratios)} rounds; {LEAST_ROUNDS} or more are needed")
        if not all(ratio > 0 and math.isfinite(ratio) for ratio in ratios):
            raise ValueError(f"ratios must be positive and finite, not {min(ratios)} ... {max(ratios)}")
        logs = [math.log(ratio) for ratio in ratios]
        middle, free = fmean(logs), len(logs) - 1 + USUAL_ROUNDS
        squares = math.fsum((log - middle) ** 2 for log in logs) + USUAL_ROUNDS * USUAL_NOISE**2
        error = math.sqrt(squares / free / len(logs))
        reach, surely = (error * quantile(free, tail) for tail in (EXCLUDED, ALARM))
        return cls(
            ratio=math.exp(middle),
            low=math.exp(middle - reach),
            high=math.exp(middle + reach),
            surely_low=math.exp(middle - surely),
            surely_high=math.exp(middle + surely),
            rounds=len(logs),
        )

    def verdict(self, threshold: float) -> Verdict:
        """Judge by a threshold, 0.05 for 5 %.

        A regression is slower by more than the threshold, and surely slower; an improvement is its mirror image. What
        is neither is ok only if the whole interval lies within the threshold, on both sides.
        """
        most = 1 + threshold
        if self.ratio > most and self.surely_low > 1:
            return Verdict.REGRESSION
        if self.ratio < 1 / most and self.surely_high < 1:
            return Verdict.IMPROVED
        return Verdict.OK if 1 / most <= self.low and self.high <= most else Verdict.NOT_RESOLVED

    def may_be_slower(self, threshold: float) -> bool:
        """Whether a regression of more than the threshold is not excluded."""
        return self.high > 1 + threshold

    def seems_slower(self, threshold: float) -> bool:
        """Whether it is slower by more than the threshold, as sure as is asked of one benchmark."""
        return self.ratio > 1 + threshold and self.low > 1


@cache
def quantile(free: int, tail: float) -> float:
    """Return what Student's t of so many degrees of freedom exceeds with a probability."""
    return -float(stdtrit(free, tail))


def ratio_of_round(base: Sequence[float], head: Sequence[float]) -> float:
    """Return head's ratio to base in a round, of the least value of each turn, in their order.

    Where one side had more turns, as of another version of the benchmarks, what they come to as a whole is compared.
    """
    if len(base) != len(head):
        return median(head) / median(base)
    return math.exp(median(math.log(after / before) for before, after in zip(base, head, strict=True)))
