"""Requests for pages of memory-mapped files before they are read."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from omearrow_ds.kernels.scaling import Array

Rows = tuple[Array, int]  # (n,) int64, the first row of a window in each image, and its height, also beyond edges.
_PIECE_BYTES = 2**17  # Linux reads at most its read-ahead window per request, by default 128 kB; the rest would fault.
GAP_BYTES = mmap.PAGESIZE


def request(addresses: Array, like: Array, rows: Rows | None) -> None:
    """Request the pages of images.

    ``addresses`` (n,) int64 are the first bytes of the images. ``like`` is an array (m, ...) with their shape and
    strides, of any axes, or (m, T, C, Z, Y, X) if only ``rows`` are requested.
    """
    if rows is not None:
        tops, num_rows = rows
        first_rows = np.clip(tops, 0, max(like.shape[4] - num_rows, 0))
        addresses, like = addresses + first_rows * like.strides[4], like[:, :, :, :, :num_rows]
    offsets, span_bytes = byte_ranges(like)
    starts = (addresses[:, None] + offsets).ravel()
    request_ranges(starts, np.full(len(starts), span_bytes))


def byte_ranges(like: Array) -> tuple[Array, int]:
    """Return the offsets of the byte ranges of an image of ``like`` (m, ...), and the length of each range in bytes.

    Ranges are merged across gaps of up to one page.
    """
    offsets, span_bytes = np.zeros(1, np.int64), like.itemsize
    axes = zip(like.shape[1:], like.strides[1:], strict=True)
    for length, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if len(offsets) > 1 or abs(stride) > span_bytes + GAP_BYTES:
            offsets = (offsets[:, None] + stride * np.arange(length)).ravel()
        else:
            span_bytes += (length - 1) * abs(stride)
            offsets += min((length - 1) * stride, 0)
    return offsets, span_bytes


def request_ranges(starts: Array, num_bytes: Array) -> None:
    """Request byte ranges in pieces, each of which Linux reads with one request."""
    madvise = _libc().madvise
    aligned = starts - starts % mmap.PAGESIZE
    for start, stop in zip(aligned.tolist(), (starts + num_bytes).tolist(), strict=True):
        for first in range(start, stop, _PIECE_BYTES):
            madvise(first, min(_PIECE_BYTES, stop - first), mmap.MADV_WILLNEED)  # Only advice: errors do not matter.


def request_files(paths: Iterable[str], max_bytes: int) -> None:
    """Ask Linux to read the first ``max_bytes`` of files that are not memory-mapped."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # Reading it raises the error.
        try:
            stop = min(os.fstat(descriptor).st_size, max_bytes)
            for first in range(0, stop, _PIECE_BYTES):
                os.posix_fadvise(descriptor, first, min(_PIECE_BYTES, stop - first), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def is_resident(address: int) -> bool:
    """Return whether the page at an address is in memory; True if the file belongs to another user."""
    page = ctypes.c_ubyte(1)
    _libc().mincore(address - address % mmap.PAGESIZE, 1, ctypes.byref(page))
    return bool(page.value & 1)


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return library
