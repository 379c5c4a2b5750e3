"""Pixels to samples: scaled into fresh memory, one at a time or gathered into one batch."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from omearrow_ds.kernels.compiled import worth
from omearrow_ds.kernels.gather import gather
from omearrow_ds.kernels.scaling import Array, Divisor, division, scale

_THREADED_BYTES = 8 * 2**20  # less gains nothing from threads


class DecodedRows:
    """Samples that lie decoded in memory, in one array or, of a store with several parts, in several.

    Parameters
    ----------
    parts
        Arrays (n, ...) that hold the samples in order; they may be strided views.
    divisors, dtype
        As for `scale`, one for all samples or one for each, and the samples' dtype.
    guard
        Called before each access to parts that lie in a mapped file, which may have been cut short.
    """

    def __init__(
        self,
        parts: Sequence[Array],
        divisors: Sequence[Divisor],
        dtype: np.dtype[Any],
        guard: Callable[[], object] | None = None,
    ) -> None:
        self._parts, self._guard = parts, guard
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))[:-1]
        self._shape, self._dtype = parts[0].shape[1:], dtype
        alone = len(divisors) == 1
        self._only = parts[0] if len(parts) == 1 else None
        self._divisor: Divisor = divisors[0]
        self._each = None if alone else divisors
        plain = isinstance(divisors[0], np.float32) and alone and parts[0].flags.c_contiguous and parts[0].flags.aligned
        self._flat = parts[0].reshape(len(parts[0]), -1) if plain and len(parts) == 1 and parts[0].size else None

    def _row(self, position: int) -> Array:
        part, first = self._only, 0
        if part is None:
            number = bisect.bisect_right(self._starts, position) - 1
            part, first = self._parts[number], self._starts[number]
        row: Array = part[position - first]
        return row

    def sample(self, position: int) -> Array:
        """Return one sample in memory of its own."""
        if self._guard is not None:
            self._guard()
        sample = np.empty(self._shape, self._dtype)
        if worth(sample.nbytes) and self._flat is not None:
            divide = division(self._flat.dtype)
            if divide is not None:
                divide(self._flat[position], sample.reshape(-1), self._divisor)
                return sample
        scale(self._row(position), self._divisor if self._each is None else self._each[position], sample)
        return sample

    def batch(self, positions: Sequence[int], samples: Array, threads: int = 1) -> None:
        """Write samples to ``samples``, stacked (n, ...), a share of them in each of ``threads`` if they are large."""
        if self._guard is not None:
            self._guard()
        part, divisor = self._only, self._divisor
        if part is not None and self._each is None:
            wanted = np.array(positions, np.int64)
            if samples.nbytes < _THREADED_BYTES:
                gather(part, wanted, samples, divisor)
                return
            in_shares(lambda share: gather(part, wanted[share], samples[share], divisor), samples, threads)
            return

        def fill(place: int) -> None:
            position = positions[place]
            scale(self._row(position), divisor if self._each is None else self._each[position], samples[place])

        one_by_one(fill, samples, threads)


def one_by_one(fill: Callable[[int], None], samples: Array, threads: int) -> None:
    """Call ``fill`` with the place of each sample; if they are large, share them out between ``threads``."""

    def fill_share(share: slice) -> None:
        for place in range(len(samples))[share]:
            fill(place)

    in_shares(fill_share, samples, threads)


def in_shares(fill: Callable[[slice], None], samples: Array, threads: int) -> None:
    """Call ``fill`` with a part of the places, and so on until it had all; in ``threads`` if samples are large."""
    shares = 1 if samples.nbytes < _THREADED_BYTES else min(threads, len(samples))
    if shares <= 1:
        fill(slice(None))
        return
    bounds = [len(samples) * number // shares for number in range(shares + 1)]
    list(_pool(os.getpid(), threads).map(fill, map(slice, bounds[:-1], bounds[1:])))  # an error is raised here


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of process ``pid``, this one; a forked child has not its parent's."""
    del pid
    return ThreadPoolExecutor(threads, "omearrow_ds-batch")
