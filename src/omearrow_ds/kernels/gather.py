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


def gather(stack: Array | Stacks, positions: Array, out: Array, divisor: Divisor) -> None:
    """Write scaled samples of a stack to ``out``.

    Raises `ImageIndexError` if an index is out of range; some samples may be written.

    Parameters
    ----------
    stack
        Samples (N, ...), in one array or several; any strides.
    positions
        Indices of the samples, int64 (n,), each from 0 to N - 1.
    out
        (n, ...): float32, or the dtype of ``stack`` to keep pixels unchanged.
    divisor
        See `omearrow_ds.kernels.scaling.scale`; the arrays of a `Scaling` have a sample's shape.
    """
    if isinstance(stack, Stacks):
        if stack.single_array is None:
            _of_several(stack, positions, out, divisor)
            return
        stack = stack.single_array
    if not out.size or (worth(out.nbytes) and _by_loop(stack, positions, out, divisor)):
        return
    if positions.min() < 0 or positions.max() >= len(stack):
        raise ImageIndexError(f"sample indices {positions.tolist()} are out of range for {len(stack)} samples")
    if not (stack.flags.c_contiguous and out[:1].nbytes < _ROW_BY_ROW_BYTES):
        # A gathered copy of large samples would be evicted from the CPU cache before it is scaled.
        for position, sample in zip(positions.tolist(), out, strict=True):
            scale(stack[position], divisor, sample)
    elif divisor is None and out.dtype == stack.dtype and out.flags.c_contiguous:
        stack.take(positions, axis=0, out=out, mode="clip")  # All are in range, and "raise" would use a copy.
    else:
        scale(stack.take(positions, axis=0), divisor, out)


def _by_loop(stack: Array, positions: Array, out: Array, divisor: Divisor) -> bool:
    """Write all samples by a compiled loop; return False if the loop does not support them, or NumPy is as fast."""
    contiguous = stack.flags.c_contiguous and out.flags.c_contiguous
    if contiguous and isinstance(divisor, np.float32) and divides(stack, out):
        loop = compiled(_gathered, _types_of(stack.dtype))
        if loop is None:
            return False
        outside = loop(stack.reshape(-1), positions, out.reshape(-1), divisor)
        if outside >= 0:
            raise ImageIndexError(f"sample index {positions[outside]} is out of range for {len(stack)} samples")
        return True
    if (contiguous and divisor is None) or not 3 <= stack.ndim <= 6 or 0 in stack.shape:
        return False
    shape = (1,) * (6 - stack.ndim), stack.shape[1:]
    fields, samples = stack.reshape(len(stack), *shape[0], *shape[1]), out.reshape(len(out), *shape[0], *shape[1])
    step, rest = divmod(fields.strides[0], fields.itemsize)
    if rest or positions.min() < 0 or positions.max() >= len(stack):
        return False
    zeros = np.zeros(len(positions), np.int64)
    return windows_by_loop(fields, [positions * step, zeros, zeros], samples, divisor, 0)


def _of_several(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> None:
    if not out.size:
        return
    if np.maximum.reduce(positions.view(np.uint64)) >= stacks.num_images:  # Negative indices become large.
        raise ImageIndexError(f"sample indices {positions.tolist()} are out of range for {stacks.num_images} samples")
    if worth(out.nbytes) and _several_by_loop(stacks, positions, out, divisor):
        return
    if not stacks.has_equal_strides:
        for position, sample in zip(positions.tolist(), out, strict=True):
            scale(stacks[position], divisor, sample)
        return
    images, indices = stacks.overlaid_array(positions)
    if out[:1].nbytes >= _ROW_BY_ROW_BYTES:
        for index, sample in zip(indices.tolist(), out, strict=True):
            scale(images[index], divisor, sample)
        return
    step = max(1, _TOGETHER_BYTES // out[:1].nbytes)
    for first in range(0, len(out), step):
        some = slice(first, first + step)
        scale(images[indices[some]], divisor, out[some])


def _several_by_loop(stacks: Stacks, positions: Array, out: Array, divisor: Divisor) -> bool:
    """Write all samples by compiled loops; return False if loops do not support them, or NumPy is as fast."""
    like = stacks.like
    if 0 in like.shape[1:] or not 3 <= like.ndim <= 6 or (divisor is None and stacks.contiguous):
        return False
    plain = isinstance(divisor, np.float32) and stacks.contiguous and out.flags.c_contiguous and out.flags.aligned
    plain = plain and like.dtype in COMPILED and out.dtype == FLOAT32
    size, done = out[0].size, 0
    for origin, which, origins in stacks.strided_groups(positions):
        if plain:
            loop = _gathering(like.dtype, aligned=origin.flags.aligned)
            if loop is None:
                return False
            loop(first_of(origin), origins, which, out.reshape(-1), divisor, size)
        else:
            ones, shape = (1,) * (6 - like.ndim), like.shape[1:]
            zeros, samples = np.zeros(len(which), np.int64), out.reshape(len(out), *ones, *shape)
            fields = origin.reshape(1, *ones, *shape)
            if not windows_by_loop(fields, [origins, zeros, zeros], samples, divisor, 0, which):
                return False
        done += len(which)
    return done == len(out)


@functools.cache
def _types_of(pixels: np.dtype[Any]) -> tuple[str, ...]:
    """Return the argument types of `_gathered`; the name of a dtype takes as long as scaling a small image."""
    return (f"{pixels.name} r", "int64 r", "float32 w", "float32")


@functools.cache
def _gathering(pixels: np.dtype[Any], *, aligned: bool) -> Loop | None:
    """Return a loop that divides aligned or unaligned pixels of a dtype; None without numba."""
    access = "r" if aligned else "unaligned"
    types = (f"{pixels.name} {access}", "int64 r", "int64 r", "float32 w", "float32", "int64")
    return compiled(_gathered_from, types)


def _gathered_from(source: Any, origins: Any, into: Any, out: Any, divisor: Any, size: Any) -> None:
    """Divide samples of ``size`` pixels at offsets ``origins`` from ``source`` into positions ``into`` of ``out``."""
    for number in range(len(origins)):
        first, begin = origins[number], into[number] * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(source[np.uintp(first + pixel)]) / divisor


def _gathered(stack: Any, positions: Any, out: Any, divisor: Any) -> int:
    """Divide samples into ``out``; return the index of the first position that is out of range, or -1."""
    size = len(out) // len(positions)
    count = len(stack) // size
    for index in range(len(positions)):
        if positions[index] < 0 or positions[index] >= count:
            return index
        first, begin = positions[index] * size, index * size
        for pixel in range(size):
            out[np.uintp(begin + pixel)] = np.float32(stack[np.uintp(first + pixel)]) / divisor
    return -1
