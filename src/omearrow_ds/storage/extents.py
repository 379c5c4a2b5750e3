"""Chunks of images in files, local or in an object store, and one reader of images and regions from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.byte_source import ByteRange, ChangedFileError, Copy, LocalFile

Array = np.ndarray[Any, Any]
Region = Sequence[int]  # Starts of some axes, then their stops.
Window = tuple[slice, ...]
Decode = Callable[[memoryview, int], Array]
Item = TypeVar("Item")
Result = TypeVar("Result")
_IMAGE_BYTES, _MAX_CACHED_BYTES = 500, 2**25  # Size of located chunks without their arrays, and limit of the cache.
_MIN_SKIPPED_BYTES = 2**13  # Unused bytes per row from which the rows of a region are read one by one.


class ChunkFile(Protocol):
    """File with chunks of images: `LocalFile` or `ObjectFile`."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""

    @property
    def cached_bytes(self) -> int:
        """Number of bytes of the file that are cached in memory."""

    @property
    def name(self) -> str:
        """Path or URL, for errors."""

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Return the bytes of ranges."""

    def read_into(self, reads: Sequence[tuple[int, Array]], copies: Sequence[Copy | None]) -> None:
        """Fill each array with bytes from its start offset, then copy its pixels, before the next array is filled.

        Raises `ChangedFileError` if the file is too short.
        """


class ChunkLayout(NamedTuple):
    """Chunk shape, dtype and decoder that several chunks have in common.

    Attributes
    ----------
    chunk_shape
        TCZYX.
    num_across
        Number of chunks along X.
    dtype
        Pixel dtype in the byte order of the file.
    pixel_dtype
        Pixel dtype in the byte order of this machine.
    decode
        Returns the pixels of a chunk (T, C, Z, Y, X) from its bytes and its number in its plane. None if each plane is
        one uncompressed chunk.
    """

    chunk_shape: tuple[int, ...]
    num_across: int
    dtype: np.dtype[Any]
    pixel_dtype: np.dtype[Any]
    decode: Decode | None = None


class ImageChunks(NamedTuple):
    """Byte ranges of the chunks of one image.

    Attributes
    ----------
    offsets, lengths
        (T, C, Z, Y * X) int64 in numbers of chunks, first byte and number of bytes of each. Without lengths, chunks are
        uncompressed planes.
    """

    layout: ChunkLayout
    file: ChunkFile
    offsets: Array
    lengths: Array | None = None


Locate = Callable[[int], ImageChunks | None]


@dataclass(slots=True)
class _FileReads:
    """Bytes of one file that requests need, and the arrays that these fill."""

    file: ChunkFile
    decode: Decode | None
    requests: list[int] = field(default_factory=list)
    reads: list[tuple[int, Array]] = field(default_factory=list)
    copies: list[Copy | None] = field(default_factory=list)  # After each read.
    band: Array | None = None  # Rows that are cropped; reads share it, so the processor's cache holds it.
    chunks: dict[tuple[int, int, int], list[tuple[Array, Window]]] = field(default_factory=dict)


_Request = tuple[ImageChunks, Region, Array, _FileReads]


class ExtentReader:
    """Reader of whole images and regions, which opens each file and decodes each chunk once per call.

    Parameters
    ----------
    errors
        Errors of locating and decoding after which the library of the format reads the image.
    max_parallel_files
        Number of files that are read at once.
    """

    def __init__(self, errors: tuple[type[Exception], ...] = (), max_parallel_files: int = 1) -> None:
        self._errors, self._max_parallel_files = errors, max_parallel_files
        self._cache: dict[Hashable, ImageChunks | None] = {}
        self._cached_bytes = 0

    def cached(self, key: Hashable, locate: Callable[[], ImageChunks | None]) -> ImageChunks | None:
        """Return the chunks cached under ``key``, or call ``locate`` and cache its result."""
        cache = self._cache
        if key not in cache:
            image = locate()
            if self._cached_bytes > _MAX_CACHED_BYTES:
                self.clear()
            self._cached_bytes += _IMAGE_BYTES
            if image is not None:
                self._cached_bytes += 2 * image.offsets.nbytes + image.file.cached_bytes
            self._cache[key] = image
            return image
        return cache[key]

    def clear(self) -> None:
        """Drop all cached chunks."""
        self._cache, self._cached_bytes = {}, 0

    def _forget(self, file: ChunkFile) -> bool:
        """Drop the cached chunks of a file; return False if it has none."""
        remaining = {key: image for key, image in self._cache.items() if image is None or image.file is not file}
        is_cached = len(remaining) < len(self._cache)
        self._cache = remaining
        return is_cached

    def read(
        self,
        locate: Locate,
        rows: Sequence[int],
        regions: Sequence[Region],
        images: Sequence[Array] | None = None,
    ) -> list[Array | None]:
        """Return one array per region, or None for each region that the library of the format must read.

        Parameters
        ----------
        locate
            Returns the chunks of an image, or None if the library of the format must read it; it may call `cached`.
        rows
            The image of each region, in any order, with repeats.
        regions
            Starts of T, C, Z, Y and X, then their stops; not empty.
        images
            Arrays to fill, contiguous and of the size of the regions; by default new ones.
        """
        arrays: list[Array | None] = [None] * len(rows) if images is None else [*images]
        changed = self._read_requests(range(len(rows)), locate, rows, regions, arrays)
        if changed:  # A file that was replaced is located once more.
            for request in changed:
                arrays[request] = None if images is None else images[request]
            self._read_requests(changed, locate, rows, regions, arrays)
        return arrays

    def _read_requests(
        self,
        requests: Sequence[int],
        locate: Locate,
        rows: Sequence[int],
        regions: Sequence[Region],
        arrays: list[Array | None],
    ) -> list[int]:
        """Fill the arrays of some requests; return the requests of files that changed since they were located."""
        images = self._locate_images(locate, rows if len(requests) == len(rows) else [rows[n] for n in requests])
        files: dict[int, _FileReads] = {}
        planes: list[_Request] = []
        chunked: list[_Request] = []
        for request in requests:
            image, region, array = images[rows[request]], regions[request], arrays[request]
            if image is None or region[5] > len(image.offsets):
                arrays[request] = None
                continue
            if array is None:
                t0, c0, z0, y0, x0, t1, c1, z1, y1, x1 = region
                array = np.empty((t1 - t0, c1 - c0, z1 - z0, y1 - y0, x1 - x0), image.layout.pixel_dtype)
                arrays[request] = array
            reads = files.get(id(image.file))
            if reads is None:
                reads = files[id(image.file)] = _FileReads(image.file, image.layout.decode)
            reads.requests.append(request)
            (planes if image.lengths is None else chunked).append((image, region, array, reads))
        if planes:
            _plan_planes(planes)
        if chunked:
            _plan_chunks(chunked)
        return self._in_parallel(partial(self._read_files, arrays), [*files.values()])

    def _locate_images(self, locate: Locate, rows: Sequence[int]) -> Mapping[int, ImageChunks | None]:
        """Return the chunks of images, cached or located now."""
        images: dict[Any, ImageChunks | None] = self._cache
        unknown = [row for row in dict.fromkeys(rows) if row not in images]
        if not unknown:
            return images
        located = self._in_parallel(partial(self._locate_all, locate), unknown)
        return {**dict(zip(unknown, located, strict=True)), **{row: images[row] for row in rows if row in images}}

    def _locate_all(self, locate: Locate, rows: Sequence[int]) -> list[ImageChunks | None]:
        """Return the chunks of images that are not cached."""
        images: list[ImageChunks | None] = []
        for row in rows:
            try:
                images.append(locate(row))
            except OMEArrowDSError:
                raise
            except self._errors:
                images.append(None)
        return images

    def _in_parallel(self, function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
        """Return the results of a function of some items, for all items; one call per thread has one item."""
        if self._max_parallel_files == 1 or len(items) <= 1:
            return function(items)
        with ThreadPoolExecutor(min(len(items), self._max_parallel_files), "omearrow-ds-chunks") as pool:
            return [result for results in pool.map(function, [[item] for item in items]) for result in results]

    def _read_files(self, arrays: list[Array | None], files: Sequence[_FileReads]) -> list[int]:
        """Read files and set arrays that cannot be read to None; return the requests of files that changed."""
        changed = []
        for reads in files:
            try:
                if reads.reads:
                    reads.file.read_into(reads.reads, reads.copies)
                if reads.chunks:
                    _decode_chunks(reads)
            except ChangedFileError:
                changed += reads.requests if self._forget(reads.file) else []
            except OMEArrowDSError:
                raise
            except self._errors:
                pass
            else:
                continue
            for request in reads.requests:
                arrays[request] = None
        return changed


def _plan_planes(requests: Iterable[_Request]) -> None:
    """Add the rows of uncompressed planes that requests need to the reads of their files.

    Whole rows are read into the array of a request, or into a band that is cropped. Rows of which little is needed are
    read one by one.
    """
    for image, region, array, reads in requests:
        t0, c0, z0, y0, x0, t1, c1, z1, _, x1 = region
        height, width = array.shape[3:]
        dtype, num_columns = image.layout.dtype, image.layout.chunk_shape[4]
        skipped_bytes = (num_columns - width) * dtype.itemsize
        by_row = skipped_bytes >= _MIN_SKIPPED_BYTES and isinstance(reads.file, LocalFile)
        is_direct = (not skipped_bytes or by_row) and dtype == array.dtype and array.flags.c_contiguous
        shape, row_bytes = (height, width if by_row else num_columns), num_columns * dtype.itemsize
        first_byte = y0 * row_bytes + (x0 * dtype.itemsize if by_row else 0)
        offsets = image.offsets[t0:t1, c0:c1, z0:z1, 0].ravel().tolist()
        for plane, offset in zip(array.reshape(-1, height, width), offsets, strict=True):
            target, copy, start = plane, None, offset + first_byte
            if not is_direct:
                band = reads.band
                if band is None or len(band) < height or band.shape[1] != shape[1] or band.dtype != dtype:
                    band = reads.band = np.empty(shape, dtype)
                target = band[:height]
                copy = plane, target if by_row else target[:, x0:x1]
            reads.reads += zip(count(start, row_bytes), target, strict=False) if by_row else [(start, target)]
            reads.copies += [*[None] * (len(reads.reads) - len(reads.copies) - 1), copy]


def _plan_chunks(requests: Iterable[_Request]) -> None:
    """Add the chunks that requests meet to the reads of their files."""
    for (layout, _, offsets, lengths), region, array, reads in requests:
        assert lengths is not None
        for (t, c, z, row, column), inner, outer in chunk_windows(region, layout.chunk_shape):
            number = row * layout.num_across + column
            start, length = offsets.item(t, c, z, number), lengths.item(t, c, z, number)
            reads.chunks.setdefault((start, start + length, number), []).append((array[outer], inner))


def _decode_chunks(reads: _FileReads) -> None:
    """Read and decode chunks, and copy their windows."""
    decode = reads.decode
    assert decode is not None
    ranges = [(start, stop) for start, stop, _ in reads.chunks]
    for ((start, stop, number), uses), data in zip(reads.chunks.items(), reads.file.read_ranges(ranges), strict=True):
        if len(data) < stop - start:
            raise ChangedFileError(f"{reads.file.name}: ends before the last byte of its pixels; restore the file")
        pixels = decode(data, number)
        for target, inner in uses:
            target[...] = pixels[inner]


def size_of(region: Region) -> list[int]:
    """Return the shape of a region, which lists the starts of all axes and then their stops."""
    rank = len(region) // 2
    return [stop - start for start, stop in zip(region[:rank], region[rank:], strict=True)]


def chunk_windows(region: Region, chunk_shape: Sequence[int]) -> list[tuple[tuple[int, ...], Window, Window]]:
    """Return the grid indices of each chunk that a region overlaps, and the overlap within chunk and region."""
    rank = len(chunk_shape)
    axes = []
    for start, stop, length in zip(region[:rank], region[rank:], chunk_shape, strict=True):
        first = start // length
        origin = first * length
        if stop <= origin + length:
            axes.append([(first, slice(start - origin, stop - origin), slice(0, stop - start))])
            continue
        ends = [(max(start, low), min(stop, low + length), low) for low in range(origin, stop, length)]
        axes.append(
            [
                (number, slice(low - origin, high - origin), slice(low - start, high - start))
                for number, (low, high, origin) in enumerate(ends, first)
            ]
        )
    return [tuple(zip(*use, strict=True)) for use in product(*axes)]
