"""Samples gathered from a stack into a batch, and scaled in the same pass."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from omearrow_ds.errors import ImageIndexError
from omearrow_ds.kernels.compiled import Loop, compiled, worth
from omearrow_ds.kernels.crops import windows_by_loop
from omearrow_ds.kernels.scaling import COMPILED, FLOAT32, Array, Divisor, divides, first_of, scale
from omearrow_ds.kernels.stacks import Stacks

_ROW_BY_ROW_BYTES = 128 * 1024
_TOGETHER_BYTES = 2**22


def gather(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> None:
    """Write scaled samples of a stack to ``out``; raise `ImageIndexError` if an index is out of range.

    Parameters
    ----------
    stacks
        Samples, each with 1 to 5 axes; any strides.
    positions
        Indices of the samples, int64 (n,), each from 0 to N - 1.
    out
        (n, ...): float32, or the dtype of ``stacks`` to keep pixels unchanged.
    divisor
        See `omearrow_ds.kernels.scaling.scale`; the arrays of a `Scaling` have a sample's shape.
    """
    if not out.size:
        return
    if np.maximum.reduce(positions.view(np.uint64)) >= stacks.num_images:  # Negative indices become large.
        raise ImageIndexError(f"sample indices {positions.tolist()} are out of range for {stacks.num_images} samples")
    if worth(out.nbytes) and _by_loop(stacks, positions, out, divisor):
        return
    stack, is_small = stacks.single_array, out[:1].nbytes < _ROW_BY_ROW_BYTES
    if stack is not None and is_small and stack.flags.c_contiguous:
        if divisor is None and out.dtype == stack.dtype and out.flags.c_contiguous:
            stack.take(positions, axis=0, out=out, mode="clip")  # All are in range, and "raise" would use a copy.
        else:
            scale(stack.take(positions, axis=0), divisor, out)
    elif stack is None and is_small and stacks.has_equal_strides:
        images, indices = stacks.overlaid_array(positions)
        step = max(1, _TOGETHER_BYTES // out[:1].nbytes)
        for first in range(0, len(out), step):
            some = slice(first, first + step)
            scale(images[indices[some]], divisor, out[some])
    else:  # A gathered copy of large samples would be evicted from the CPU cache before it is scaled.
        samples: Array | Stacks = stacks if stack is None else stack
        if stack is None and stacks.has_equal_strides:
            samples, positions = stacks.overlaid_array(positions)
        for position, scaled in zip(positions.tolist(), out, strict=True):
            scale(samples[position], divisor, scaled)


def _by_loop(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> bool:
    """Write all samples by compiled loops; return False if loops do not support them, or NumPy is as fast."""
    only = stacks.single_array
    if only is not None and only.flags.c_contiguous and isinstance(divisor, np.float32) and divides(only, out):
        loop = _gathering_one(only.dtype)
        if loop is not None:
            loop(only.reshape(-1), positions, out.reshape(-1), divisor)
        return loop is not None
    like, is_contiguous = stacks.like, stacks.contiguous and out.flags.c_contiguous
    if divisor is None and is_contiguous:
        return False
    is_plain = is_contiguous and isinstance(divisor, np.float32) and like.dtype in COMPILED and out.dtype == FLOAT32
    is_written = False
    for origin, which, origins in stacks.strided_groups(positions):
        if is_plain and out.flags.aligned:
            loop = _gathering(like.dtype, aligned=origin.flags.aligned)
            if loop is None:
                return False
            loop(first_of(origin), origins, which, out.reshape(-1), divisor, out[0].size)
        else:
            ones, shape = (1,) * (6 - like.ndim), like.shape[1:]
            zeros, samples = np.zeros(len(which), np.int64), out.reshape(len(out), *ones, *shape)
            fields = origin.reshape(len(origin), *ones, *shape)
            if not windows_by_loop(fields, [origins, zeros, zeros], samples, divisor, 0, which):
                return False
        is_written = True
    return is_written


@functools.cache
def _gathering_one(pixels: np.dtype[Any]) -> Loop | None:
    """Return a loop for one contiguous array, which takes 8 µs less per batch; None without numba."""
    return compiled(_gathered_one, (f"{pixels.name} r", "int64 r", "float32 w", "float32"))


def _gathered_one(stack: Any, positions: Any, out: Any, divisor: Any) -> None:
    size = len(out) // len(positions)
    for index in range(len(positions)):
        first, begin = positions[index] * size, index * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(stack[np.uintp(first + pixel)]) / divisor


@functools.cache
def _gathering(pixels: np.dtype[Any], *, aligned: bool) -> Loop | None:
    """Return a loop that divides aligned or unaligned pixels of a dtype; None without numba."""
    access = "r" if aligned else "unaligned"
    types = (f"{pixels.name} {access}", "int64 r", "int64 r", "float32 w", "float32", "int64")
    return compiled(_gathered, types)


def _gathered(source: Any, origins: Any, into: Any, out: Any, divisor: Any, size: Any) -> None:
    """Divide samples of ``size`` pixels at offsets ``origins`` from ``source`` into positions ``into`` of ``out``."""
    for number in range(len(origins)):
        first, begin = origins[number], into[number] * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(source[np.uintp(first + pixel)]) / divisor
