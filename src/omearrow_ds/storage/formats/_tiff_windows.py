"""Windows of TIFF files: of plain planes the rows, of others the strips or tiles that a window meets.

What tifffile finds in a file, half a millisecond, is kept as a `Plan`, for as long as the file is the same. Where
strips or tiles are compressed by what tifffile decodes by itself, the function that does it is tifffile's.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import tifffile

from omearrow_ds.storage.formats._ranged import Ranged, Span
from omearrow_ds.storage.formats._regions import Array, Box, by_cell, shape_of

Stamp = tuple[int, int, int, int]
Decode = Callable[[bytes, int], tuple[Any, tuple[int, ...], tuple[int, ...]]]
_CODECS = {"NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "ZSTD", "LZMA", "PACKBITS"}
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no waiting for a pipe's writer
_PLAN_BYTES, _MOST_BYTES = 500, 2**25  # of a plan, beside its places; and of those that are kept
_BY_ROW_BYTES = 2**13  # beside the window in each row of it, from which on its rows are read one by one


class Plan(NamedTuple):
    """Where the pixels of a file stand."""

    stamp: Stamp | None  # what tells the file from what is put in its place, or written over it; None where nobody asks
    dtype: np.dtype[Any]  # of the pixels, in the file's byte order
    # (T, C, Z, parts), where the parts of each plane start: the rows of tiles, or of strips, one after the other
    offsets: Array
    # as ``offsets``, their bytes; None where a plane is one part that is neither compressed nor cut
    sizes: Array | None
    part: tuple[int, int]  # rows and columns of a part
    across: int  # parts beside each other
    decode: Decode | None  # what tifffile decodes a part by


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells a file from another one, or from what it was."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(64)  # most images of a folder are alike
def plain(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Plan:
    """Return the plan of an image (T, C, Z, Y, X) that stands from ``offset`` on as it does in memory."""
    plane_bytes = shape[3] * shape[4] * dtype.itemsize
    starts = offset + plane_bytes * np.arange(math.prod(shape[:3]), dtype=np.int64)
    return Plan(None, dtype.newbyteorder("<"), starts.reshape(*shape[:3], 1), None, (shape[3], shape[4]), 1, None)


def plan(
    series: tifffile.TiffPageSeries, places: Array, side: Sequence[int], stamp: Stamp, decoders: dict[int, Decode]
) -> Plan | None:
    """Return the positions of the pixels of a series, or None if windows are to be cut out of whole images.

    ``places`` (T, C, Z) are the numbers of its planes, in the order of the series, ``side`` is their shape (Y, X).
    ``decoders`` maps the hash of pages to tifffile's function that decodes their strips or tiles.
    """
    key = series.keyframe
    if series.transform is not None:  # tifffile computes other values from the stored ones
        return None
    dtype = series.dtype.newbyteorder(key.parent.byteorder)
    if series.dataoffset is not None:
        starts = series.dataoffset + math.prod(side) * dtype.itemsize * np.arange(places.size, dtype=np.int64)
        return Plan(stamp, dtype, starts[places][..., None], None, (side[0], side[1]), 1, None)
    pages = [page for page in series.pages if page is not None and not page.is_virtual]
    if key.shape != tuple(side) or not _is_plain(key) or len(pages) != len(series.pages) or len(pages) != places.size:
        return None
    if any(page.keyframe is None or page.keyframe.hash != key.hash for page in pages):
        return None
    if key.is_final:
        starts = np.array([page.dataoffsets[0] for page in pages], np.int64)
        return Plan(stamp, dtype, starts[places][..., None], None, (side[0], side[1]), 1, None)
    part = (key.tilelength, key.tilewidth) if key.is_tiled else (min(key.rowsperstrip, side[0]), side[1])
    down, across = (-(-size // length) for size, length in zip(side, part, strict=True))
    placed = [(page.dataoffsets, page.databytecounts) for page in pages]
    if any(not len(starts) == len(sizes) == down * across for starts, sizes in placed):
        return None
    offsets, sizes = (np.array(each, np.int64)[places] for each in zip(*placed, strict=True))
    if not offsets.all() or not sizes.all():  # of a part that is not there, tifffile gives what stands for no data
        return None
    return Plan(stamp, dtype, offsets, sizes, part, across, decoders.setdefault(key.hash, key.decode))


def _is_plain(page: tifffile.TiffPage) -> bool:
    """Whether a page is (Y, X) in whole bytes per pixel, in parts that can be decoded one by one.

    A page with a predictor but without compression is not: tifffile decodes its strips by themselves to other values
    than the whole page if they are contiguous. libtiff ignores such a predictor.
    """
    return bool(
        page.samplesperpixel == 1
        and page.imagedepth == 1
        and page.tiledepth in (0, 1)
        and page.fillorder == 1
        and page.dtype is not None
        and page.bitspersample == 8 * page.dtype.itemsize
        and tifffile.COMPRESSION(page.compression).name in _CODECS
        and page.predictor in ((1,) if page.compression == tifffile.COMPRESSION.NONE else (1, 2, 3))
    )


class Plans:
    """Keeps the plan of each file, which may be that there is none, as long as the file is the same.

    Attributes
    ----------
    decoders
        For `plan`.
    """

    def __init__(self) -> None:
        self.decoders: dict[int, Decode] = {}
        self._known: dict[Hashable, Plan | None] = {}
        self._held_bytes = 0

    def read(
        self, key: Hashable, path: str, find: Callable[[Stamp], Plan | None], boxes: Sequence[Box]
    ) -> list[Array] | None:
        """Return the pixels of boxes of a file, or None if they must be cut out of the whole image.

        ``find(stamp)`` returns the plan, which is kept for ``key``.
        """
        for _ in range(2):  # A file that was replaced is planned once more.
            if key not in self._known:
                self._keep(key, find(stamp_of(os.stat(path))))  # noqa: PTH116  # pathlib is slow
            known = self._known[key]
            if known is None:
                return None
            descriptor = os.open(path, FLAGS)
            try:
                status = os.fstat(descriptor)
                if stamp_of(status) == known.stamp:
                    return read(known, boxes, descriptor, status.st_size)
            finally:
                os.close(descriptor)
            self._known.pop(key, None)
        return None

    def _keep(self, key: Hashable, found: Plan | None) -> None:
        if self._held_bytes > _MOST_BYTES:
            self._known.clear()
            self.decoders.clear()
            self._held_bytes = 0
        self._known[key] = found
        self._held_bytes += _PLAN_BYTES + (0 if found is None else 2 * found.offsets.nbytes)


def read(found: Plan, boxes: Sequence[Box], descriptor: int, size_bytes: int) -> list[Array] | None:
    """Return the pixels of boxes of an open file of so many bytes, or None if it does not have all of them."""
    if any(box[0].stop > len(found.offsets) for box in boxes):
        return None
    dtype = found.dtype.newbyteorder("=")
    windows = [np.empty(shape_of(box), dtype) for box in boxes]
    if found.sizes is None or found.decode is None:
        whole = all(_read_rows(descriptor, found, box, window) for box, window in zip(boxes, windows, strict=True))
        return windows if whole else None
    for (t, c, z, row, column), uses in by_cell(boxes, (1, 1, 1, *found.part)).items():
        number = row * found.across + column
        offset, part_bytes = int(found.offsets[t, c, z, number]), int(found.sizes[t, c, z, number])
        if offset < 0 or not 0 < part_bytes <= size_bytes - offset:
            return None
        data = os.pread(descriptor, part_bytes, offset)
        if len(data) < part_bytes:
            return None
        decoded, _, _ = found.decode(data, number)
        for window, (_, _, _, rows, columns), place in uses:
            windows[window][place] = decoded[0, rows, columns, 0]
    return windows


def read_ranged(found: Plan, boxes: Sequence[Box], file: Ranged) -> list[Array] | None:
    """As `read`, of a file of which ranges are fetched: the rows, strips or tiles that boxes meet, no others."""
    if any(box[0].stop > len(found.offsets) for box in boxes):
        return None
    spans: list[Span] = []
    if found.sizes is None or found.decode is None:
        row_bytes = found.part[1] * found.dtype.itemsize
        for box in boxes:
            starts = found.offsets[(*box[:3], 0)].ravel().tolist()
            spans += [(start + box[3].start * row_bytes, start + box[3].stop * row_bytes) for start in starts]
    else:
        for t, c, z, row, column in by_cell(boxes, (1, 1, 1, *found.part)):
            place = (t, c, z, row * found.across + column)
            spans.append((int(found.offsets[place]), int(found.offsets[place] + found.sizes[place])))
    if any(not 0 <= start < stop <= file.size_bytes for start, stop in spans):
        return None
    with tempfile.TemporaryFile() as sparse:  # as large as the file, of which what is read alone is there
        sparse.truncate(file.size_bytes)
        for (start, _), data in zip(spans, file.take(spans), strict=True):
            os.pwrite(sparse.fileno(), data, start)
        return read(found, boxes, sparse.fileno(), file.size_bytes)


def _read_rows(descriptor: int, found: Plan, box: Box, window: Array) -> bool:
    """Read what a box takes of plain planes; False if the file ends before."""
    y, x = box[3:]
    height, width = window.shape[3:]
    row_bytes = found.part[1] * found.dtype.itemsize
    beside_bytes = row_bytes - width * found.dtype.itemsize
    by_row = beside_bytes >= _BY_ROW_BYTES
    direct = not beside_bytes and found.dtype == window.dtype
    band = np.empty((height, width if by_row else found.part[1]), found.dtype)
    first_byte = y.start * row_bytes + (x.start * found.dtype.itemsize if by_row else 0)
    taken = band if by_row else band[:, x]
    starts = found.offsets[(*box[:3], 0)]
    for place, start in zip(product(*map(range, starts.shape)), starts.ravel().tolist(), strict=True):
        target = window[place] if direct else band
        at = start + first_byte
        rows = [(row, at + number * row_bytes) for number, row in enumerate(target)] if by_row else [(target, at)]
        for row, place_bytes in rows:
            if os.preadv(descriptor, [row.data], place_bytes) < row.nbytes:
                return False
        if not direct:
            window[place] = taken
    return True
