"""Rank statistics of a series of logarithms: the shift of its last runs relative to the runs before.

Wilcoxon's sum of ranks (Mann and Whitney) is computed for several divisions of the runs into before and after, some
with a gap for gradual changes. Ranks make the rate of false alarms equal for all distributions of noise, even with
heavy tails. Autocorrelation of successive runs widens the distribution of the sums, so they are corrected for that of
the series or the median series, if larger. `LIMIT` is set by simulation: `benchmarks.report.drift_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

LIMIT = 4.4  # Sum of ranks that means a shift, in its standard deviations.
LEAST = math.log(1.05)  # Smaller shifts are ignored.
LAST = 5  # Number of last runs that must still be slow.
_LEAST_NOISES = 1.5  # Smaller shifts, in standard deviations of a run, are ignored: a random walk reaches them.
_BEFORE, _AFTER, _GAP = (20, 40), (10, 12, 14, 16, 20, 26, 32, 40), (0, 20)
WINDOW = max(_BEFORE) + max(_AFTER) + max(_GAP)
_MOST_CORRELATED = 0.8
_NORMAL_95 = 1.96


class Division(NamedTuple):
    """Numbers of runs before, of runs after at the end, and of ignored runs between them."""

    before: int
    after: int
    gap: int

    @property
    def runs(self) -> int:
        """Total number of runs."""
        return sum(self)

    @property
    def most(self) -> float:
        """Largest sum of ranks, in its standard deviations: each run after is slower than each run before."""
        return math.sqrt(3 * self.before * self.after / (self.before + self.after + 1))

    def split(self, values: Array) -> tuple[Array, Array]:
        """Return the values before and after; runs are on the last axis."""
        return values[..., -self.runs : -self.after - self.gap], values[..., -self.after :]


DIVISIONS = tuple(Division(*runs) for runs in product(_BEFORE, _AFTER, _GAP) if Division(*runs).most > LIMIT)
NEEDED = min(division.runs for division in DIVISIONS)


class Shift(NamedTuple):
    """Logarithm of the ratio of runs after to runs before, and its 95 % interval.

    ``split`` is the number of runs since the shift, by the best separation of ranks.
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
    for index, division in enumerate(DIVISIONS):
        if division.runs <= values.shape[1]:
            block = above[:, -division.after :, -division.runs : -division.after - division.gap]
            scored[:, index] = standardised(block.sum(axis=(1, 2), dtype=np.int32), division.before, division.after)
    return scored


def standardised(signs: Any, before: int, after: int) -> Any:
    """Return sums of signs of all differences, in standard deviations for two samples of one distribution."""
    return signs / math.sqrt(before * after * (before + after + 1) / 3)


def shift_of(values: Array, sums: Array | None = None, common: float = 0.0) -> Shift | None:
    """Return the shift of one series, shape (runs,), or None without a drift.

    ``sums`` are its `scores`, if known. ``common`` is the usual `correlation` of successive runs.
    """
    scored = scores(values[None])[0] if sums is None else sums
    best, most, division = None, 0.0, DIVISIONS[0]
    for index in np.argsort(-scored):
        if scored[index] < max(LIMIT, most):  # The correction only reduces scores.
            break
        before, after = DIVISIONS[index].split(values)
        inflation = _inflation(max(correlation(before, after), common))
        if scored[index] / inflation < LIMIT or scored[index] / inflation <= most:
            continue
        shift = Shift(*between(before, after, inflation), split=0)
        wanders = _LEAST_NOISES * noise_of(before, after)
        still = np.median(after[-LAST:]) - np.median(before) >= LEAST / 2
        if shift.more >= max(LEAST, wanders) and shift.low > 0 and still:
            best, most, division = shift, scored[index] / inflation, DIVISIONS[index]
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
    """Return the median `correlation` of many series, corrected for the bias of short series."""
    known = [(correlation(values), len(values)) for values in series if len(values) >= NEEDED]
    return float(np.median([value + (1 + 3 * max(value, 0)) / runs for value, runs in known])) if known else 0.0


def _inflation(common: float) -> float:
    """Return the factor by which correlation widens the distribution of a sum of ranks."""
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
    """Return the number of runs after the split with the largest sum of ranks."""
    above = np.sign(np.subtract.outer(values, values))
    runs = len(values)
    sums = [standardised(above[-after:, :-after].sum(), runs - after, after) for after in range(1, runs)]
    return int(np.argmax(sums)) + 1


def noise_of(*parts: Array) -> float:
    """Return a robust standard deviation about the median of each part."""
    return float(1.4826 * np.median(np.abs(np.concatenate([part - np.median(part) for part in parts]))))
