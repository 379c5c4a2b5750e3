"""Regions of TIFF files: rows of uncompressed planes, or the strips or tiles that a region meets.

Positions of pixels in a file are kept as a `Plan` while the file is unchanged, since tifffile takes 0.5 ms to find
them. Strips and tiles are decoded by tifffile's functions.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import tifffile

from omearrow_ds.storage.byte_source import ByteRange, ObjectFile
from omearrow_ds.storage.formats._regions import Array, Region, size_of, uses_by_chunk

Stamp = tuple[int, int, int, int]
Decode = Callable[[bytes, int], tuple[Any, tuple[int, ...], tuple[int, ...]]]
_CODECS = {"NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "ZSTD", "LZMA", "PACKBITS"}
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no waiting for a pipe's writer
_PLAN_BYTES, _MOST_BYTES = 500, 2**25  # size of a plan without its arrays, and limit of all cached plans
_BY_ROW_BYTES = 2**13  # skipped bytes per row from which rows of a region are read one by one


class Plan(NamedTuple):
    """The locations of the pixels of a file."""

    stamp: Stamp | None  # fingerprint of the file, which changes if it is replaced or overwritten; None if unchecked
    dtype: np.dtype[Any]  # pixel dtype in the file's byte order
    # (T, C, Z, parts), start offsets of the parts of each plane: tiles or strips in row-major order
    offsets: Array
    # sizes in bytes, shaped like ``offsets``; None if each plane is one uncompressed contiguous part
    sizes: Array | None
    part: tuple[int, int]  # rows and columns of a part
    across: int  # parts per row of parts
    decode: Decode | None  # tifffile's function that decodes a part


def stamp_of(status: os.stat_result) -> Stamp:
    """Return a fingerprint of a file, which changes if it is replaced or overwritten."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(64)  # most images of a folder are alike
def plain(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Plan:
    """Return the plan of an image (T, C, Z, Y, X) whose pixels are stored as in memory, starting at ``offset``."""
    plane_bytes = shape[3] * shape[4] * dtype.itemsize
    starts = offset + plane_bytes * np.arange(math.prod(shape[:3]), dtype=np.int64)
    return Plan(None, dtype.newbyteorder("<"), starts.reshape(*shape[:3], 1), None, (shape[3], shape[4]), 1, None)


def plan(
    series: tifffile.TiffPageSeries, places: Array, side: Sequence[int], stamp: Stamp, decoders: dict[int, Decode]
) -> Plan | None:
    """Return the positions of the pixels of a series, or None if regions must be cut out of whole images.

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
    if not offsets.all() or not sizes.all():  # for missing parts, tifffile returns the nodata value
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
    """Caches the plan of each file, or None without a plan, while the file is unchanged.

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
        self, key: Hashable, path: str, find: Callable[[Stamp], Plan | None], regions: Sequence[Region]
    ) -> list[Array] | None:
        """Return regions of a file, or None if they must be cut out of the whole image.

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
                    return read(known, regions, descriptor, status.st_size)
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


def read(plan: Plan, regions: Sequence[Region], descriptor: int, size_bytes: int) -> list[Array] | None:
    """Return regions of an open file of ``size_bytes``, or None if it does not have all of their pixels."""
    if any(region[5] > len(plan.offsets) for region in regions):
        return None
    dtype = plan.dtype.newbyteorder("=")
    arrays = [np.empty(size_of(region), dtype) for region in regions]
    if plan.sizes is None or plan.decode is None:
        is_whole = all(map(partial(_read_rows, descriptor, plan), regions, arrays))
        return arrays if is_whole else None
    for (t, c, z, row, column), uses in uses_by_chunk(regions, (1, 1, 1, *plan.part)).items():
        number = row * plan.across + column
        offset, part_bytes = int(plan.offsets[t, c, z, number]), int(plan.sizes[t, c, z, number])
        if offset < 0 or not 0 < part_bytes <= size_bytes - offset:
            return None
        data = os.pread(descriptor, part_bytes, offset)
        if len(data) < part_bytes:
            return None
        decoded, _, _ = plan.decode(data, number)
        for region, (_, _, _, rows, columns), target in uses:
            arrays[region][target] = decoded[0, rows, columns, 0]
    return arrays


def read_ranged(plan: Plan, regions: Sequence[Region], file: ObjectFile) -> list[Array] | None:
    """Return regions, like `read`, from a file on a server; only their rows, strips or tiles are fetched."""
    if any(region[5] > len(plan.offsets) for region in regions):
        return None
    spans: list[ByteRange] = []
    if plan.sizes is None or plan.decode is None:
        row_bytes = plan.part[1] * plan.dtype.itemsize
        for t0, c0, z0, y0, _, t1, c1, z1, y1, _ in regions:
            starts = plan.offsets[t0:t1, c0:c1, z0:z1, 0].ravel().tolist()
            spans += [(start + y0 * row_bytes, start + y1 * row_bytes) for start in starts]
    else:
        for t, c, z, row, column in uses_by_chunk(regions, (1, 1, 1, *plan.part)):
            part = (t, c, z, row * plan.across + column)
            spans.append((int(plan.offsets[part]), int(plan.offsets[part] + plan.sizes[part])))
    if any(not 0 <= start < stop <= file.size_bytes for start, stop in spans):
        return None
    with tempfile.TemporaryFile() as sparse:  # As large as the file, but with the fetched ranges only.
        sparse.truncate(file.size_bytes)
        for (start, _), data in zip(spans, file.read_ranges(spans), strict=True):
            os.pwrite(sparse.fileno(), data, start)
        return read(plan, regions, sparse.fileno(), file.size_bytes)


def _read_rows(descriptor: int, plan: Plan, region: Region, array: Array) -> bool:
    """Read a region of uncompressed planes into an array of its shape; return False if the file is too short."""
    t0, c0, z0, y0, x0, t1, c1, z1, _, x1 = region
    height, width = array.shape[3:]
    itemsize, num_columns = plan.dtype.itemsize, plan.part[1]
    skipped_bytes = (num_columns - width) * itemsize
    by_row = skipped_bytes >= _BY_ROW_BYTES
    is_direct = not skipped_bytes and plan.dtype == array.dtype
    band = np.empty((height, width if by_row else num_columns), plan.dtype)
    pixels = band if by_row else band[:, x0:x1]
    first_byte = (y0 * num_columns + (x0 if by_row else 0)) * itemsize
    offsets = plan.offsets[t0:t1, c0:c1, z0:z1, 0].ravel().tolist()
    for plane, offset in zip(array.reshape(-1, height, width), offsets, strict=True):
        target, start = plane if is_direct else band, offset + first_byte
        reads = zip(target, count(start, num_columns * itemsize), strict=False) if by_row else [(target, start)]
        for row, row_start in reads:
            if os.preadv(descriptor, [row.data], row_start) < row.nbytes:
                return False
        if not is_direct:
            plane[...] = pixels
    return True
