"""Samples gathered from images in memory, one at a time or into a batch, and scaled in the same pass."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from omearrow_ds.errors import ImageIndexError
from omearrow_ds.kernels.compiled import Loop, worth
from omearrow_ds.kernels.crops import crops, windows_by_loop
from omearrow_ds.kernels.scaling import COMPILED, FLOAT32, Array, Divisor, divided, divides, first_of, pixel_loop, scale
from omearrow_ds.kernels.stacks import Stacks

_ROW_BY_ROW_BYTES = 128 * 1024
_TOGETHER_BYTES = 2**22
_THREADED_BYTES = 8 * 2**20  # Smaller batches do not gain from threads.
_FROM_TYPES = ("int64 r", "int64 r", "float32 w", "float32", "int64")


class DecodedRows:
    """Samples of decoded images in memory.

    The arrays of ``stacks`` may be strided views; ``divisors`` are those of `scale`, one for all samples or one each.
    """

    def __init__(self, stacks: Stacks, divisors: Sequence[Divisor], dtype: np.dtype[Any]) -> None:
        self.stacks, self._dtype, self._shape = stacks, dtype, stacks.like.shape[1:]
        self._divisor: Divisor = divisors[0]
        self._divisors = None if len(divisors) == 1 else divisors
        self._sample_bytes, only = math.prod(self._shape) * dtype.itemsize, stacks.single_array
        self._is_divided = len(divisors) == 1 and isinstance(divisors[0], np.float32) and dtype == FLOAT32
        is_plain = only is not None and only.size > 0 and only.flags.c_contiguous and only.flags.aligned
        self._is_flat = is_plain and self._is_divided
        self._images: Any = stacks if only is None else only.reshape(len(only), -1) if self._is_flat else only

    @functools.cached_property
    def _divide(self) -> Loop | None:
        """Compiled loop that divides the flat pixels of an image, or None if no loop supports these images."""
        return pixel_loop(divided, self.stacks.like.dtype, "float32 w", "float32") if self._is_divided else None

    def sample(self, position: int) -> Array:
        sample, stacks = np.empty(self._shape, self._dtype), self.stacks
        if stacks.requests is not None:
            stacks.prepare_image(position)
        image, is_flat = self._images[position], self._is_flat
        divide = self._divide if worth(self._sample_bytes) else None
        if divide is not None and (is_flat or (image.flags.c_contiguous and image.flags.aligned)):
            divide(image if is_flat else image.reshape(-1), sample.reshape(-1), self._divisor)
            return sample
        divisor = self._divisor if self._divisors is None else self._divisors[position]
        scale(image, divisor, sample.reshape(-1) if is_flat else sample)
        return sample

    def batch(self, positions: Sequence[int] | Array, samples: Array, threads: int = 1) -> None:
        divisors, divisor, stacks = self._divisors, self._divisor, self.stacks
        indices = np.array(positions, np.int64)
        if stacks.needs_file_groups and stacks.write_in_file_groups(
            indices, samples, lambda group, out: self.batch(indices[group], out, threads)
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

    def crop(self, boxes: Sequence[Array], samples: Array, pad: str, threads: int) -> None:
        """Write boxes (fields, tops, lefts) of images of one size to ``samples`` (n, T, C, Z, Y, X)."""
        stacks = self.stacks
        if stacks.needs_file_groups and stacks.write_in_file_groups(
            boxes[0], samples, lambda group, out: self.crop([values[group] for values in boxes], out, pad, threads)
        ):
            return
        stacks.prepare(boxes[0], (boxes[1], samples.shape[-2]))

        def fill(share: slice) -> None:
            crops(stacks, [values[share] for values in boxes], samples[share], self._divisor, pad)

        fill_in_threads(fill, samples, threads)


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


def gather(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> None:
    """Write scaled samples at ``positions``, int64 (n,), to ``out`` (n, ...), float32 or of the dtype of the images.

    ``divisor`` is that of `scale`, the arrays of a `Scaling` have a sample's shape. Raises `ImageIndexError` if a
    position is not from 0 to N - 1.
    """
    if not out.size:
        return
    only, is_worth = stacks.single_array, worth(out.nbytes)
    if is_worth and only is not None and isinstance(divisor, np.float32):
        is_plain = only.flags.c_contiguous and divides(only, out)
        loop = pixel_loop(_divided_at, only.dtype, "int64 r", "float32 w", "float32") if is_plain else None
        if loop is not None and loop(only.reshape(-1), positions, out.reshape(-1), divisor):
            return
    if np.maximum.reduce(positions.view(np.uint64)) >= stacks.num_images:  # Negative positions become large.
        raise ImageIndexError(f"sample indices {positions.tolist()} are out of range for {stacks.num_images} samples")
    if is_worth and _by_loop(stacks, positions, out, divisor):
        return
    images: Any = stacks if only is None else only
    sample_bytes = out[:1].nbytes
    indices, is_overlaid = positions, only is None and stacks.has_equal_strides
    if is_overlaid:
        images, indices = stacks.overlaid_array(positions)
    is_contiguous = is_overlaid or (only is not None and only.flags.c_contiguous)
    if sample_bytes >= _ROW_BY_ROW_BYTES or not is_contiguous:
        # A gathered copy of large samples would be evicted from the CPU cache before it is scaled.
        for index, sample in zip(indices.tolist(), out, strict=True):
            scale(images[index], divisor, sample)
    elif is_overlaid:
        step = max(1, _TOGETHER_BYTES // sample_bytes)
        for first in range(0, len(out), step):
            some = slice(first, first + step)
            scale(images[indices[some]], divisor, out[some])
    elif divisor is None and out.dtype == images.dtype and out.flags.c_contiguous:
        images.take(positions, axis=0, out=out, mode="clip")  # All are in range, and "raise" would use a copy.
    else:
        scale(images.take(positions, axis=0), divisor, out)


def _by_loop(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> bool:
    """Write all samples by compiled loops; return False if loops do not support them, or NumPy is as fast."""
    like, contiguous = stacks.like, stacks.contiguous
    plain = contiguous and isinstance(divisor, np.float32) and out.flags.c_contiguous and out.flags.aligned
    plain = plain and like.dtype in COMPILED and out.dtype == FLOAT32
    if not plain and ((contiguous and divisor is None) or not 3 <= like.ndim <= 6):
        return False
    size, done = out[0].size, 0
    ones, shape = (1,) * (6 - like.ndim), like.shape[1:]
    for origin, which, origins in stacks.strided_groups(positions):
        if plain:
            loop = _loop_from(like.dtype, "r" if origin.flags.aligned else "unaligned")
            if loop is None:
                return False
            loop(first_of(origin), origins, which, out.reshape(-1), divisor, size)
        else:
            zeros, samples = np.zeros(len(which), np.int64), out.reshape(len(out), *ones, *shape)
            fields = origin.reshape(len(origin), *ones, *shape)
            if not windows_by_loop(fields, [origins, zeros, zeros], samples, divisor, 0, which):
                return False
        done += len(which)
    return done == len(out)


@functools.cache
def _loop_from(pixels: np.dtype[Any], access: str) -> Loop | None:
    """Return the loop of `_divided_from`; `pixel_loop` with all types takes 1 us more."""
    return pixel_loop(_divided_from, pixels, *_FROM_TYPES, access=access)


def _divided_at(stack: Any, positions: Any, out: Any, divisor: Any) -> bool:
    """Divide samples of one array into ``out``; return False if a position is out of range."""
    size = len(out) // len(positions)
    count = len(stack) // size
    for index in range(len(positions)):
        if positions[index] < 0 or positions[index] >= count:
            return False
        first, begin = positions[index] * size, index * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(stack[np.uintp(first + pixel)]) / divisor
    return True


def _divided_from(source: Any, origins: Any, into: Any, out: Any, divisor: Any, size: Any) -> None:
    """Divide samples of ``size`` pixels at offsets ``origins`` from ``source`` into positions ``into`` of ``out``."""
    for number in range(len(origins)):
        first, begin = origins[number], into[number] * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(source[np.uintp(first + pixel)]) / divisor
