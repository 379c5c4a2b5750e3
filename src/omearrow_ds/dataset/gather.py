"""Samples of decoded images in memory, scaled one at a time or gathered into a batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from omearrow_ds.dataset.crop_boxes import CropBoxes
from omearrow_ds.kernels.compiled import tally, worth
from omearrow_ds.kernels.crops import crops
from omearrow_ds.kernels.gather import gather
from omearrow_ds.kernels.scaling import Array, Divisor, division, scale
from omearrow_ds.kernels.stacks import Stacks

_THREADED_BYTES = 8 * 2**20  # Smaller batches do not gain from threads.
STAGES = {
    "scale": "normalize",
    "gather": "normalize",
    "crops": "normalize",
    "fill_in_threads": "normalize",
    "DecodedRows.sample": "select",
    "DecodedRows.batch": "select",
}


class DecodedRows:
    """Samples of decoded images in memory.

    The arrays of ``stacks`` may be strided views; ``divisors`` are those of `scale`, one for all samples or one each.
    """

    def __init__(self, stacks: Stacks, divisors: Sequence[Divisor], dtype: np.dtype[Any]) -> None:
        self.stacks, self._dtype, self._shape = stacks, dtype, stacks.like.shape[1:]
        self._divisor: Divisor = divisors[0]
        self._divisors = None if len(divisors) == 1 else divisors
        only, is_divided = stacks.single_array, len(divisors) == 1 and isinstance(divisors[0], np.float32)
        self._images = stacks if only is None else only
        is_plain = only is not None and is_divided and only.flags.c_contiguous and only.flags.aligned
        self._flat = only.reshape(len(only), -1) if is_plain and only is not None and only.size else None

    def sample(self, position: int) -> Array:
        sample, stacks = np.empty(self._shape, self._dtype), self.stacks
        if stacks.requests is not None:
            stacks.prepare(position)
        if worth(sample.nbytes) and self._flat is not None:
            divide = division(self._flat.dtype)
            if divide is not None:
                divide(self._flat[position], sample.reshape(-1), self._divisor)
                return sample
        scale(self._images[position], self._divisor if self._divisors is None else self._divisors[position], sample)
        return sample

    def batch(self, positions: Sequence[int] | Array, samples: Array, threads: int = 1) -> None:
        """Write samples to ``samples`` (n, ...), divided among ``threads`` if they are large."""
        divisors, divisor, stacks = self._divisors, self._divisor, self.stacks
        indices = np.array(positions, np.int64)
        if stacks.many and stacks.in_open_file_groups(
            indices, samples, lambda turn, out: self.batch(indices[turn], out, threads)
        ):
            return
        if stacks.requests is not None:
            stacks.prepare(indices)
        if divisors is None and samples.nbytes < _THREADED_BYTES:
            gather(stacks, indices, samples, divisor)
            return

        def fill(share: slice) -> None:
            if divisors is None:
                gather(stacks, indices[share], samples[share], divisor)
                return
            for index, sample in zip(indices[share].tolist(), samples[share], strict=True):
                scale(stacks[index], divisors[index], sample)

        fill_in_threads(fill, samples, threads)

    def crop(self, boxes: CropBoxes, samples: Array, pad: str, threads: int) -> None:
        """Write boxes of images, which have one size, to ``samples`` (n, T, C, Z, Y, X)."""
        stacks, (fields, tops, lefts, *_) = self.stacks, boxes
        if stacks.many and stacks.in_open_file_groups(
            fields, samples, lambda turn, out: self.crop(CropBoxes(*(v[turn] for v in boxes)), out, pad, threads)
        ):
            return
        stacks.prepare(fields, (tops, samples.shape[-2]))

        def fill(share: slice) -> None:
            crops(stacks, fields[share], tops[share], lefts[share], samples[share], self._divisor, pad)

        fill_in_threads(fill, samples, threads)


def pending_jit_loops() -> tuple[str, ...]:
    """Return the module that prepares compiled loops if workers need these; this saves 0.7 s and 90 MB per worker."""
    return ("omearrow_ds.kernels.ready",) if tally().worth else ()


def fill_in_threads(fill: Callable[[slice], None], samples: Array, threads: int) -> None:
    """Call ``fill`` with slices that cover all positions, in ``threads`` if samples are large."""
    shares = 1 if samples.nbytes < _THREADED_BYTES else min(threads, len(samples))
    if shares <= 1:
        fill(slice(None))
        return
    bounds = [len(samples) * number // shares for number in range(shares + 1)]
    list(_pool(os.getpid(), threads).map(fill, map(slice, bounds[:-1], bounds[1:])))  # Raises errors of threads.


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process, ``pid``; a forked child does not have its parent's threads."""
    del pid
    return ThreadPoolExecutor(threads, "omearrow_ds-batch")
