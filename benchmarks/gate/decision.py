"""Decision rule of the gate: verdicts from paired rounds, symmetric in base and head.

In a round, a process of base and one of head measure a benchmark in turns of some milliseconds. Other programs disturb
the least value of each turn least. Its ratio to that of the adjacent turn cancels changes of the machine that last
longer than two turns, and the median of these ratios ignores changes that last for less than half of the turns.

Processes differ further, for example in their memory layout, so a round counts as one observation regardless of its
number of calls. The mean logarithm of the rounds' ratios is judged by a moderated t statistic (G. K. Smyth,
Statistical Applications in Genetics and Molecular Biology 3, 2004, article 3): its variance is averaged with the
usual variance of benchmarks, so five rounds that agree by chance do not look too certain.

About seventy benchmarks are each judged after every round, so a single verdict needs a high confidence:
a slowdown is confirmed at `ALARM`, while `EXCLUDED` would suffice to judge one benchmark once.
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

EXCLUDED = 0.05  # Probability beyond each end of the reported interval, which excludes changes outside it.
ALARM = 2e-6  # Probability beyond each end of the interval that confirms a change.
USUAL_NOISE = 0.03  # Usual standard deviation of a round's logarithm on a busy machine.
USUAL_ROUNDS = 6  # Weight of the usual noise, in degrees of freedom.
CONTROL_LIMIT = 0.03  # A larger change of a control, which runs no project code, means that the machine changed.
LEAST_ROUNDS = 5
MOST_ROUNDS = 31


class Verdict(StrEnum):
    """Verdict on one benchmark."""

    REGRESSION = "regression"
    NOT_RESOLVED = "not resolved"
    IMPROVED = "improved"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Change:
    """Change of head's time relative to base's.

    Attributes
    ----------
    ratio : float
        Geometric mean of the rounds' ratios head / base.
    low, high : float
        Interval of the ratio: it is above ``high``, and below ``low``, with a probability of 5 % each.
    surely_low, surely_high : float
        Wider interval, which must exclude 1 to confirm a change.
    rounds : int
        Number of ratios.
    """

    ratio: float
    low: float
    high: float
    surely_low: float
    surely_high: float
    rounds: int

    @classmethod
    def from_ratios(cls, ratios: Sequence[float]) -> Change:
        """Return the change estimated from the ratios of rounds.

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
        """Return the verdict for a threshold, 0.05 for 5 %.

        A regression is slower by more than the threshold, and ``surely_low`` is above 1; an improvement is the
        inverse. Otherwise the verdict is ok only if the whole interval is within the threshold on both sides.
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
        """Whether it is slower by more than the threshold, with the confidence for a single benchmark."""
        return self.ratio > 1 + threshold and self.low > 1


@cache
def quantile(free: int, tail: float) -> float:
    """Return the value that Student's t with ``free`` degrees of freedom exceeds with probability ``tail``."""
    return -float(stdtrit(free, tail))


def ratio_of_round(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the median ratio of head to base in a round, given the least value of each turn in order.

    If the numbers of turns differ, for example between versions of the benchmarks, the ratio of medians is returned.
    """
    if len(base) != len(head):
        return median(head) / median(base)
    return math.exp(median(math.log(after / before) for before, after in zip(base, head, strict=True)))
