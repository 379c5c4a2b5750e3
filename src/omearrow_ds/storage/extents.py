"""Chunks of images in files, local or in an object store, and one reader of images and regions from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count, product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from omearrow_ds.codec.decode import new_image
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.byte_source import ChangedFileError, Copy, LocalFile, ObjectFile

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Region = Sequence[int]  # Starts of some axes, then their stops.
Regions = Sequence[Region] | None  # None for whole images.
Targets = Sequence[Array] | None  # Contiguous arrays to fill; None for new ones.
Window = tuple[slice, ...]
_FileWindow = tuple[int, int, Window, Window]  # File number, chunk number, window of the chunk and of the region.
ChunkFile = LocalFile | ObjectFile
Decode = Callable[[memoryview, int], Array]
StoredBytes = bytes | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")
_IMAGE_BYTES, _MAX_CACHED_BYTES = 500, 2**25  # Size of located chunks without their arrays, and limit of the cache.
_MIN_SKIPPED_BYTES = 2**13  # Unused bytes per row from which the rows of a region are read one by one.


class ChunkLayout(NamedTuple):
    """Chunk shape, dtype and decoder that several chunks have in common."""

    chunk_shape: Shape  # TCZYX.
    num_across: int  # Number of chunks along X.
    dtype: np.dtype[Any]  # In the byte order of the file.
    pixel_dtype: np.dtype[Any]  # In the byte order of this machine.
    # Returns the pixels (T, C, Z, Y, X) of a chunk with this number in its plane; None for uncompressed planes.
    decode: Decode | None = None


class ImageChunks(NamedTuple):
    """First byte and number of bytes of the chunks (T, C, Z, Y * X) of an image; no lengths if they are planes."""

    layout: ChunkLayout
    file: ChunkFile
    offsets: Array
    lengths: Array | None = None


@lru_cache(64)  # Most images of a folder are alike.
def plane_layout(dtype: np.dtype[Any], side: tuple[int, int]) -> ChunkLayout:
    return ChunkLayout((1, 1, 1, *side), 1, dtype, dtype.newbyteorder("="))


@lru_cache(64)
def consecutive_planes(shape: Shape, dtype: np.dtype[Any], first_byte: int) -> tuple[ChunkLayout, Array]:
    """Return layout and offsets of the planes of an uncompressed image (T, C, Z, Y, X) at ``first_byte``."""
    plane_bytes = math.prod(shape[3:]) * dtype.itemsize
    offsets = first_byte + plane_bytes * np.arange(math.prod(shape[:3]), dtype=np.int64).reshape(*shape[:3], 1)
    return plane_layout(dtype, (shape[3], shape[4])), offsets


class ChunkFiles(NamedTuple):
    """Chunks of one image in several files, each with one chunk or, if it is a shard, with a grid of chunks."""

    name: str  # Path or URL, for errors.
    layout: ChunkLayout
    shape: Shape  # (T, C, Z, Y, X).
    shard: Shape  # Number of chunks of a file along each axis.
    fill_value: Any  # Pixel value of missing chunks.
    # Returns the bytes of chunks of a file, None for missing ones; numbers of the file and in the file are in C order.
    fetch: Callable[[int, Collection[int]], list[StoredBytes | None]]
    decode: Callable[[int, StoredBytes, Array], None]  # Fills an array of bytes with the pixels of a chunk of a file.


Located = ImageChunks | ChunkFiles
_ChunksByFile = dict[int, dict[int, list[tuple[Array, Window]]]]
Locate = Callable[[int], Located | None]


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


@dataclass(slots=True)
class _ChunkReads:
    """Regions of one image that requests need, and the arrays that these fill."""

    image: ChunkFiles
    requests: list[int]
    regions: list[tuple[Region, Array]]
    files: _ChunksByFile | None = None  # Grouped when they are read, so that few windows exist at once.
    scratch: tuple[Array, Array] | None = None  # Pixels of a chunk, and the same as bytes.

    def group(self) -> _ChunksByFile:
        """Return the windows that the regions need, by file and chunk number."""
        image = self.image
        files: _ChunksByFile = {}
        grid = image.shape, image.layout.chunk_shape, image.shard
        for region, array in self.regions:
            windows = whole_windows(*grid) if array.shape == image.shape else file_windows(region, *grid)
            for file, chunk, inner, outer in windows:
                files.setdefault(file, {}).setdefault(chunk, []).append((array[outer], inner))
        return files

    def split(self) -> list[_ChunkReads]:
        return [_ChunkReads(self.image, self.requests, [], {file: chunks}) for file, chunks in self.group().items()]

    def fill(self) -> None:
        """Read and decode the chunks; the bytes of a chunk are released before the next file is read."""
        for file, chunks in (self.files or self.group()).items():
            stored = self.image.fetch(file, chunks)
            for uses in reversed(chunks.values()):
                self._fill_chunk(file, stored.pop(), uses)
        self.scratch = None

    def _fill_chunk(self, file: int, data: StoredBytes | None, uses: list[tuple[Array, Window]]) -> None:
        """Decode a chunk, directly into an array that has its shape, and copy its windows."""
        image = self.image
        if data is None:
            for target, _ in uses:
                target[...] = image.fill_value
            return
        pixels, layout = uses[0][0], image.layout
        if pixels.flags.c_contiguous and pixels.shape == layout.chunk_shape and pixels.dtype == layout.dtype:
            image.decode(file, data, pixels.reshape(-1).view(np.uint8))
            uses = uses[1:]
        else:
            if self.scratch is None:
                pixels = new_image(layout.chunk_shape, layout.dtype, image.name)
                self.scratch = pixels, pixels.reshape(-1).view(np.uint8)
            pixels, flat = self.scratch
            image.decode(file, data, flat)
        for target, inner in uses:
            target[...] = pixels[inner]


_Request = tuple[ImageChunks, Region, Array, _FileReads]


class ExtentReader:
    """Reader of whole images and regions, which opens each file and decodes each chunk once per call.

    After ``errors`` of locating and decoding, the library of the format reads the image.
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
        self._cache, self._cached_bytes = {}, 0

    def read(
        self, locate: Locate, rows: Sequence[int], regions: Sequence[Region], images: Targets = None
    ) -> list[Array | None]:
        """Return one array per region, or None for each region that the library of the format must read."""
        # ``locate`` returns the chunks of an image, or None if the library must read it; it may call `cached`. ``rows``
        # is the image of each region, in any order, with repeats. ``images`` are contiguous arrays to fill, by default
        # new ones.
        arrays: list[Array | None] = [None] * len(rows) if images is None else [*images]
        located = self._locate_images(locate, rows)
        if len(rows) == 1 and self._max_parallel_files == 1:
            image = located[rows[0]]
            if isinstance(image, ChunkFiles):  # Without grouping of requests.
                pixels = np.empty(size_of(regions[0]), image.layout.pixel_dtype) if arrays[0] is None else arrays[0]
                arrays[0] = pixels
                self._read_files(arrays, [_ChunkReads(image, [0], [(regions[0], pixels)])])
                return arrays
        changed = self._read_requests(range(len(rows)), located, rows, regions, arrays)
        if changed:  # A file that was replaced is located once more.
            for request in changed:
                arrays[request] = None if images is None else images[request]
            located = self._locate_images(locate, [rows[request] for request in changed])
            self._read_requests(changed, located, rows, regions, arrays)
        return arrays

    def _read_requests(
        self,
        requests: Sequence[int],
        images: Mapping[int, Located | None],
        rows: Sequence[int],
        regions: Sequence[Region],
        arrays: list[Array | None],
    ) -> list[int]:
        """Fill the arrays of some requests; return the requests of files that changed since they were located."""
        files: dict[int, _FileReads] = {}
        chunk_files: dict[int, _ChunkReads] = {}
        planes: list[_Request] = []
        chunked: list[_Request] = []
        for request in requests:
            image, region, array = images[rows[request]], regions[request], arrays[request]
            if image is None or (isinstance(image, ImageChunks) and region[5] > len(image.offsets)):
                arrays[request] = None
                continue
            if array is None:
                t0, c0, z0, y0, x0, t1, c1, z1, y1, x1 = region
                array = np.empty((t1 - t0, c1 - c0, z1 - z0, y1 - y0, x1 - x0), image.layout.pixel_dtype)
                arrays[request] = array
            if isinstance(image, ChunkFiles):
                chunk_reads = chunk_files.setdefault(id(image), _ChunkReads(image, [], []))
                chunk_reads.requests.append(request)
                chunk_reads.regions.append((region, array))
                continue
            reads = files.get(id(image.file))
            if reads is None:
                reads = files[id(image.file)] = _FileReads(image.file, image.layout.decode)
            reads.requests.append(request)
            (planes if image.lengths is None else chunked).append((image, region, array, reads))
        if planes:
            _plan_planes(planes)
        if chunked:
            _plan_chunks(chunked)
        reads_by_file: list[_FileReads | _ChunkReads] = [*files.values(), *chunk_files.values()]
        if self._max_parallel_files > 1:
            reads_by_file = [*files.values(), *chain.from_iterable(map(_ChunkReads.split, chunk_files.values()))]
        return self._in_parallel(partial(self._read_files, arrays), reads_by_file)

    def _locate_images(self, locate: Locate, rows: Sequence[int]) -> Mapping[int, Located | None]:
        images: Mapping[Any, Located | None] = self._cache
        if len(rows) == 1:
            return images if rows[0] in images else {rows[0]: self._locate_all(locate, rows)[0]}
        unknown = [row for row in dict.fromkeys(rows) if row not in images]
        if not unknown:
            return images
        located = self._in_parallel(partial(self._locate_all, locate), unknown)
        return {**dict(zip(unknown, located, strict=True)), **{row: images[row] for row in rows if row in images}}

    def _locate_all(self, locate: Locate, rows: Sequence[int]) -> list[Located | None]:
        images: list[Located | None] = []
        for row in rows:
            try:
                images.append(locate(row))
            except OMEArrowDSError:
                raise
            except self._errors:
                images.append(None)
        return images

    def _in_parallel(self, function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
        """Return the results for all items: of one call, or of one call per item in threads."""
        if self._max_parallel_files == 1 or len(items) <= 1:
            return function(items)
        with ThreadPoolExecutor(min(len(items), self._max_parallel_files), "omearrow-ds-chunks") as pool:
            return [result for results in pool.map(function, [[item] for item in items]) for result in results]

    def _read_files(self, arrays: list[Array | None], files: Sequence[_FileReads | _ChunkReads]) -> list[int]:
        """Read files and set arrays that cannot be read to None; return the requests of files that changed."""
        changed = []
        for reads in files:
            try:
                if isinstance(reads, _ChunkReads):
                    reads.fill()
                    continue
                if reads.reads:
                    reads.file.read_into(reads.reads, reads.copies)
                if reads.chunks:
                    _decode_chunks(reads)
            except ChangedFileError:
                cache, file = self._cache, reads.file if isinstance(reads, _FileReads) else None
                self._cache = {key: image for key, image in cache.items() if image is None or image.file is not file}
                if len(self._cache) < len(cache):
                    changed += reads.requests
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
    """Add the rows of uncompressed planes that requests need to the reads of their files."""
    # Whole rows are read into the array of a request or a band that is cropped; rows of which little is needed, singly.
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
        for plane, offset in zip(array.reshape(len(offsets), height, width), offsets, strict=True):
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
    for (layout, _, offsets, lengths), region, array, reads in requests:
        assert lengths is not None
        for (t, c, z, row, column), inner, outer in chunk_windows(region, layout.chunk_shape):
            number = row * layout.num_across + column
            start, length = offsets.item(t, c, z, number), lengths.item(t, c, z, number)
            reads.chunks.setdefault((start, start + length, number), []).append((array[outer], inner))


@lru_cache(16)  # Most images of a folder are alike.
def whole_windows(shape: Shape, chunk_shape: Shape, shard: Shape) -> list[_FileWindow]:
    """Return the chunks of an image; see `file_windows`."""
    return file_windows([0, 0, 0, 0, 0, *shape], shape, chunk_shape, shard)


def file_windows(region: Region, shape: Shape, chunk_shape: Shape, shard: Shape) -> list[_FileWindow]:
    """Return file number, number in the file, chunk window and region window of each chunk that a region overlaps."""
    windows = []
    for position, inner, outer in chunk_windows(region, chunk_shape):
        file_number = chunk_number = 0
        for index, size, length, chunks in zip(position, shape, chunk_shape, shard, strict=True):
            file_number = file_number * -(-size // (length * chunks)) + index // chunks
            chunk_number = chunk_number * chunks + index % chunks
        windows.append((file_number, chunk_number, inner, outer))
    return windows


def _decode_chunks(reads: _FileReads) -> None:
    decode = reads.decode
    assert decode is not None
    ranges = [(start, stop) for start, stop, _ in reads.chunks]
    for ((start, stop, number), uses), data in zip(reads.chunks.items(), reads.file.read_ranges(ranges), strict=True):
        if len(data) < stop - start:
            raise ChangedFileError(f"{reads.file.name}: the file ends before the last byte of its pixels; restore it")
        pixels = decode(data, number)
        for target, inner in uses:
            target[...] = pixels[inner]


def size_of(region: Region) -> list[int]:
    """Return the shape of a region, which lists the starts of all axes and then their stops."""
    rank = len(region) // 2
    return [stop - start for start, stop in zip(region[:rank], region[rank:], strict=True)]


def chunk_windows(region: Region, chunk_shape: Sequence[int]) -> list[tuple[Shape, Window, Window]]:
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
