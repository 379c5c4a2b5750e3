"""Requests for pages of memory-mapped files before they are read."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from resource import RUSAGE_SELF, getrusage
from time import monotonic_ns
from typing import Any

import numpy as np

from omearrow_ds.kernels.scaling import Array

_NUM_BATCHES = 16
QUERY_NS = 10**6  # `getrusage` takes as long as scaling a small image, and a wait for a disk takes longer than this.
_PIECE_BYTES = 2**17  # Linux reads at most its read-ahead window per request, by default 128 kB; the rest would fault.
_GAP_BYTES = mmap.PAGESIZE


class PageRequests:
    """Rule that decides for which batches pages are requested.

    A page fault reads one read-ahead window, and the thread waits for it. Requests for all images of a batch let the
    disk read them together. Requests for pages in the page cache cost up to a third of dividing these images.
    Therefore pages are requested for the first batch, and for 16 batches after the process read from a disk. Races
    between threads only shift when requests begin or end.

    Attributes
    ----------
    num_reads
        Major page faults and block inputs (`getrusage`) of the process at the last query; -1 before the first.
    num_remaining
        Number of batches whose pages are requested even if `num_reads` does not change.
    query_ns
        Time (`monotonic_ns`) of the next query.
    """

    def __init__(self) -> None:
        self.num_reads, self.num_remaining, self.query_ns = -1, 0, 0

    def count(self, num_reads: int) -> None:
        """Update the counters for a batch whose pages are requested."""
        has_read = 0 <= self.num_reads < num_reads
        self.num_remaining = _NUM_BATCHES if has_read else max(self.num_remaining - 1, 0)
        self.num_reads = num_reads
        if self.num_remaining:
            self.query_ns = 0

    def is_needed(self) -> bool:
        """Return whether to request the files of a batch that are not memory-mapped, and count the batch if so."""
        if monotonic_ns() < self.query_ns:
            return False
        usage, self.query_ns = getrusage(RUSAGE_SELF), monotonic_ns() + QUERY_NS
        num_reads = usage.ru_majflt + usage.ru_inblock
        is_needed = self.num_remaining > 0 or num_reads != self.num_reads
        if is_needed:
            self.count(num_reads)
        return is_needed


def request(addresses: Array, like: Array, rows: tuple[Array, int] | None) -> None:
    """Request the pages of images.

    Parameters
    ----------
    addresses
        (n,) int64, the first byte of each image.
    like
        Array (m, ...) with the shape and strides of the images, any axes.
    rows
        For images (T, C, Z, Y, X) of which only some rows are read: (n,) int64, the first row in each image, and the
        number of rows, also outside of the image; None for whole images.
    """
    if rows is None:
        request_ranges(*_whole_ranges(addresses, like))
    else:
        request_ranges(*_row_ranges(addresses, like, *rows))


def _whole_ranges(addresses: Array, like: Array) -> tuple[Array, Array]:
    """Return first byte and length of the ranges of whole images, merged across gaps of up to one page."""
    gaps: list[tuple[int, int]] = []
    low_bytes, span_bytes = 0, like.itemsize
    axes = zip(like.shape[1:], like.strides[1:], strict=True)
    for length, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if gaps or abs(stride) > span_bytes + _GAP_BYTES:
            gaps.append((length, stride))
        else:
            span_bytes += (length - 1) * abs(stride)
            low_bytes += min((length - 1) * stride, 0)
    starts = (addresses[:, None] + low_bytes + _offsets(gaps)).ravel()
    return starts, np.full(len(starts), span_bytes)


def _row_ranges(addresses: Array, like: Array, tops: Array, num_rows: int) -> tuple[Array, Array]:
    """Return the ranges of some rows of each plane."""
    height, stride = like.shape[4], like.strides[4]
    first, last = np.clip(tops, 0, height - 1), np.clip(tops + num_rows - 1, 0, height - 1)
    low, high = np.minimum(first * stride, last * stride), np.maximum(first * stride, last * stride)
    width_bytes = (like.shape[5] - 1) * like.strides[5]
    row_bytes = abs(width_bytes) + like.itemsize
    offsets = _offsets(zip(like.shape[1:4], like.strides[1:4], strict=True))
    starts = (addresses + low + min(width_bytes, 0))[:, None] + offsets
    return starts.ravel(), np.repeat(high - low + row_bytes, len(offsets))


def _offsets(axes: Iterable[tuple[int, int]]) -> Array:
    """Return the byte offsets of all elements of an array, given (length, stride) of each axis."""
    offsets = np.zeros(1, np.int64)
    for length, stride in axes:
        offsets = (offsets[:, None] + stride * np.arange(length)).ravel()
    return offsets


def request_ranges(starts: Array, num_bytes: Array) -> None:
    """Request byte ranges in pieces, each of which Linux reads with one request."""
    madvise = _madvise()
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


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return function
