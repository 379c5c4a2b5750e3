"""Rank statistics of a series: by how much its last runs are above those before, in logarithms, if they are.

Wilcoxon's sum of ranks (Mann and Whitney), over several divisions of the runs into before and after, some with a gap
for what came bit by bit. Ranks make the rate of false alarms the same for every distribution of noise, whatever its
tails. What successive runs have in common (autocorrelation), of this series or of the middle one beside it, makes a
sum of ranks wider, and is taken into account. `LIMIT` is set by simulation: `benchmarks.report.drift_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

LIMIT = 4.4  # of a sum of ranks, in its standard deviations
LEAST = math.log(1.05)  # a shift of less is none, however sure
LAST = 5  # runs that must be slow still
_LEAST_NOISES = 1.5  # nor is one of less than so many standard deviations of a run, as what wanders reaches that
_BEFORE, _AFTER, _GAP = (20, 40), (10, 12, 14, 16, 20, 26, 32, 40), (0, 20)
WINDOW = max(_BEFORE) + max(_AFTER) + max(_GAP)
_MOST_CORRELATED = 0.8
_NORMAL_95 = 1.96


class Division(NamedTuple):
    """How many runs at the end are compared with how many before, and how many between count for neither."""

    before: int
    after: int
    gap: int

    @property
    def runs(self) -> int:
        """How many runs it takes."""
        return sum(self)

    @property
    def most(self) -> float:
        """The sum of ranks, in its standard deviations, where each run after is slower than each before."""
        return math.sqrt(3 * self.before * self.after / (self.before + self.after + 1))

    def of(self, values: Array) -> tuple[Array, Array]:
        """Return the values before and after, the last on the last axis."""
        return values[..., -self.runs : -self.after - self.gap], values[..., -self.after :]


DIVISIONS = tuple(Division(*each) for each in product(_BEFORE, _AFTER, _GAP) if Division(*each).most > LIMIT)
NEEDED = min(division.runs for division in DIVISIONS)


class Shift(NamedTuple):
    """By how much the runs after are slower than those before: logarithms of the ratio, and its 95 % interval.

    ``split`` is how many runs ago it came about, where ranks part best.
    """

    more: float
    low: float
    high: float
    split: int


def scores(values: Array) -> Array:
    """Return the sums of ranks of all `DIVISIONS` that fit, in standard deviations, at the end of each series.

    ``values`` has the shape (series, runs), the result (series, divisions); a division that does not fit has 0.
    """
    above = np.greater(values[:, :, None], values[:, None, :]).view(np.int8)
    above -= np.less(values[:, :, None], values[:, None, :]).view(np.int8)
    scored = np.zeros((len(values), len(DIVISIONS)))
    for at, division in enumerate(DIVISIONS):
        if division.runs <= values.shape[1]:
            block = above[:, -division.after :, -division.runs : -division.after - division.gap]
            scored[:, at] = standardised(block.sum(axis=(1, 2), dtype=np.int32), division.before, division.after)
    return scored


def standardised(signs: Any, before: int, after: int) -> Any:
    """Return sums of the signs of all differences in standard deviations of those of two like samples."""
    return signs / math.sqrt(before * after * (before + after + 1) / 3)


def shift_of(values: Array, sums: Array | None = None, common: float = 0.0) -> Shift | None:
    """Return how one series drifted, shape (runs,); None if it did not.

    ``sums`` are its `scores`, if they are known, ``common`` is the `correlation` of successive runs that is usual.
    """
    scored = scores(values[None])[0] if sums is None else sums
    best, most, division = None, 0.0, DIVISIONS[0]
    for at in np.argsort(-scored):
        if scored[at] < max(LIMIT, most):  # no correlation makes it more
            break
        before, after = DIVISIONS[at].of(values)
        inflation = _inflation(max(correlation(before, after), common))
        if scored[at] / inflation < LIMIT or scored[at] / inflation <= most:
            continue
        shift = Shift(*between(before, after, inflation), split=0)
        wanders = _LEAST_NOISES * noise_of(before, after)
        still = np.median(after[-LAST:]) - np.median(before) >= LEAST / 2
        if shift.more >= max(LEAST, wanders) and shift.low > 0 and still:
            best, most, division = shift, scored[at] / inflation, DIVISIONS[at]
    return best and best._replace(split=_split(values[-division.runs :]))


def correlation(*parts: Array) -> float:
    """Return the correlation of successive runs, by ranks within each part."""
    common = own = 0.0
    for part in parts:
        ranks = np.argsort(np.argsort(part)) - (len(part) - 1) / 2
        common += float((ranks[1:] * ranks[:-1]).sum())
        own += float((ranks * ranks).sum())
    return common / own


def usual_correlation(series: Iterable[Array]) -> float:
    """Return the `correlation` of the middle one of many series, made larger by what short series hide of it."""
    known = [(correlation(values), len(values)) for values in series if len(values) >= NEEDED]
    return float(np.median([each + (1 + 3 * max(each, 0)) / runs for each, runs in known])) if known else 0.0


def _inflation(common: float) -> float:
    """By what factor a sum of ranks is wider than that of independent runs."""
    bound = min(max(common, 0.0), _MOST_CORRELATED)
    return math.sqrt((1 + bound) / (1 - bound))


def between(before: Array, after: Array, inflation: float) -> tuple[float, float, float]:
    """Return Hodges' and Lehmann's estimate of the shift, and its interval by ranks (Moses)."""
    apart = np.sort(np.subtract.outer(after, before), axis=None)
    count = len(apart)
    room = _NORMAL_95 * inflation * math.sqrt(count * (len(before) + len(after) + 1) / 12)
    left_out = max(int(count / 2 - room), 0)
    return float(np.median(apart)), float(apart[left_out]), float(apart[-1 - left_out])


def _split(values: Array) -> int:
    """Return how many runs at the end are those after, where the sum of ranks is the largest."""
    above = np.sign(np.subtract.outer(values, values))
    runs = len(values)
    sums = [standardised(above[-after:, :-after].sum(), runs - after, after) for after in range(1, runs)]
    return int(np.argmax(sums)) + 1


def noise_of(*parts: Array) -> float:
    """Return a standard deviation about the middle of each part, which outliers do not move."""
    return float(1.4826 * np.median(np.abs(np.concatenate([part - np.median(part) for part in parts]))))
