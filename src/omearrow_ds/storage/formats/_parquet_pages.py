"""Pages of the pixel leaf of a Parquet row group, from which images are read without pyarrow.

A Parquet library decodes a whole row group to read one image. A PLAIN-encoded value is stored as is: a byte array after
its length of 4 bytes, an unsigned 16-bit number in 4 bytes. So the page headers are parsed once per row group. Then the
offset of each image in an uncompressed page is known, and only the lengths before its chunks are compared. Other pages
are decompressed one by one, and checked: the lengths of their values match shape and dtype, none of them is null, and
they fill the page to its end.

Pages that are encrypted, damaged, or begin within an image raise `OtherPagesError`: a Parquet library then reads the
page or reports the fault. Page checksums are not verified, like the default of such libraries.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod

import numpy as np

from omearrow_ds.codec.decode import Expected
from omearrow_ds.codec.leaves import cast, decompress
from omearrow_ds.storage.byte_source import ByteRange, ByteSource
from omearrow_ds.storage.formats._codecs import decompress_into
from omearrow_ds.storage.formats._parquet_headers import (
    HEADER_BYTES,
    OtherPagesError,
    Page,
    dictionary_page,
    header_reader,
    iter_data_pages,
    varint,
)
from omearrow_ds.storage.image_extents import ImageExtents, OtherLayoutError, PieceLayout

Array = np.ndarray[Any, Any]

_LENGTH = np.dtype("<u4")
_LIST_VALUE = np.dtype("<i4")
_LIST_PIXEL = np.dtype(np.uint16)  # an Arrow reader also keeps the low half of a value outside of the range
_MAX_HEADERS = 2**10  # Page headers of a row group that are requested one by one.
_MALFORMED = (IndexError, TypeError, ValueError, MemoryError)


class ColumnChunk(NamedTuple):
    """Byte range and number of values of the pixels of one row group, and whether the values are list items.

    ``codec`` is the compression of pages; ``levels`` is the number of level kinds before the values of a page: 2, 1
    (definition levels only) or 0.
    """

    start: int
    stop: int
    entries: int
    lists: bool
    codec: str | None
    levels: int = 2


class PageReader:
    """Images of a Parquet file whose pages are read directly.

    The method ``locate`` returns the pages of a row group; it raises `OtherPagesError` if pyarrow must read them.
    """

    def __init__(self, file: ByteSource, locate: Callable[[ByteSource, int], Pages]) -> None:
        self.file, self._locate = file, WeakMethod(locate)  # Its owner owns this reader.
        self._pages: dict[int, Pages | None] = {}

    def pages(self, number: int) -> Pages | None:
        """Return the pages of a row group; None if pyarrow must read them."""
        self.file.refuse_changed()
        if number not in self._pages:
            locate = self._locate()
            assert locate is not None
            try:
                with self.file.read_at_random():  # Page headers are small and far apart.
                    self._pages[number] = locate(self.file, number)
            except OtherPagesError:
                self._pages[number] = None
        return self._pages[number]

    def read(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[list[Array] | None]:
        """Return the images at sorted rows of each row group; None for a row group that pyarrow must read.

        Ranges of all row groups are requested together.
        """
        if len(parts) == 1:
            (number, rows), file = parts[0], self.file
            pages = self.pages(number)
            try:
                return [None if pages is None else pages.images(rows, file.read_ranges(pages.ranges(rows)))]
            except OtherPagesError:
                self._pages[number] = None
                return [None]
        located = [(number, rows, self.pages(number)) for number, rows in parts]
        ranges = [[] if pages is None else pages.ranges(rows) for _, rows, pages in located]
        stored = iter(self.file.read_ranges(list(itertools.chain.from_iterable(ranges))))
        images: list[list[Array] | None] = []
        for (number, rows, pages), of_rows in zip(located, ranges, strict=True):
            data = list(itertools.islice(stored, len(of_rows)))
            try:
                images.append(None if pages is None else pages.images(rows, data))
            except OtherPagesError:
                self._pages[number] = None
                images.append(None)
        return images

    def stream(
        self, starts: Sequence[int], read_group: Callable[[int, Sequence[int]], list[Array]]
    ) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield the first row and the images of each page; images that pages cannot provide are read by pyarrow.

        Row groups begin at rows ``starts``; ``read_group(number, rows)`` reads rows by pyarrow.
        """
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            first, pages, data = start, self.pages(number), self.file.data
            try:
                for images in () if pages is None or data is None else pages.stream(data):
                    yield first, images
                    first += len(images)
                    self.file.refuse_changed()
            except OtherPagesError:
                self._pages[number] = None
            if first < stop:
                yield first, read_group(number, range(first, stop))

    def stacks(self, num_groups: int) -> list[Array] | None:
        """Return all images of a mapped file as views, without checks; None if any image cannot be a view."""
        arrays: list[Array] = []
        for number in range(num_groups):
            pages, data = self.pages(number), self.file.data
            of_group = pages.stacks(data) if isinstance(pages, PlainPages) and data is not None else None
            if of_group is None:
                return None
            arrays += of_group
        return arrays


def find_pages(
    file: ByteSource, chunk: ColumnChunk, expected: Expected, num_pieces: Array, piece_codec: str | None = None
) -> PlainPages | EncodedPages:
    """Return the pages of one row group, in which the chunks of an image have equal size and the order TCZYX.

    ``num_pieces`` is the number of chunks of each image, and ``piece_codec`` the codec of each chunk.
    """
    if chunk.stop > file.size_bytes:
        raise OtherPagesError
    is_plain = chunk.codec is None and not chunk.lists and piece_codec is None
    if is_plain:
        _request_headers(file, chunk)
    else:
        file.cache_ranges([(chunk.start, chunk.stop)])
    index = _PageIndex(file, chunk, expected, num_pieces)
    return PlainPages(index) if is_plain else EncodedPages(index, chunk, expected, piece_codec)


def _request_headers(file: ByteSource, chunk: ColumnChunk) -> None:
    """Request the headers of all pages at once, assuming that their distance is that of the first two.

    It is for images of one shape. Other headers are read one by one, since each gives the offset of the next.
    """
    if file.data is not None:
        return
    file.cache_ranges([(chunk.start, min(chunk.start + HEADER_BYTES, chunk.stop))])
    first_page = next(iter_data_pages(header_reader(file), chunk.start, chunk.stop, compressed=False), None)
    if first_page is None:
        raise OtherPagesError
    starts = range(first_page.stop, chunk.stop, max(first_page.stop - chunk.start, HEADER_BYTES))
    ranges: list[ByteRange] = [(start, min(start + HEADER_BYTES, chunk.stop)) for start in starts]
    file.cache_ranges(ranges if len(ranges) <= _MAX_HEADERS else [(chunk.start, chunk.stop)])


class _PageIndex:
    """Pages of a row group, and offsets of its images among the values of the row group.

    The size of each chunk follows from shape and dtype, so the offset of an image is known without reading the values
    before it.
    """

    def __init__(self, file: ByteSource, chunk: ColumnChunk, expected: Expected, num_pieces: Array) -> None:
        prefix_bytes = 0 if chunk.lists else _LENGTH.itemsize
        pixels = expected.shapes.prod(axis=1) // np.maximum(num_pieces, 1)
        itemsizes = 4 if chunk.lists else np.array([dtype.itemsize for dtype in expected.dtypes], np.int64)
        self.layouts = _layouts(expected, num_pieces, has_prefixes=not chunk.lists)
        self.first_pieces = np.concatenate([[0], np.cumsum(num_pieces)])
        self.piece_bytes = np.repeat(pixels * itemsizes, num_pieces)
        self.piece_stops = np.cumsum(self.piece_bytes + prefix_bytes)
        self.starts: Array = np.concatenate([[0], self.piece_stops])[self.first_pieces[:-1]]  # With the first length.
        self.only_layout = self.layouts[0] if len(set(map(id, self.layouts))) == 1 else None
        is_compressed = chunk.codec is not None
        self.pages = list(iter_data_pages(header_reader(file), chunk.start, chunk.stop, compressed=is_compressed))
        # A null image has one entry without a value.
        self.first_rows = self._first_rows(np.maximum(num_pieces * pixels if chunk.lists else num_pieces, 1), chunk)

    def _first_rows(self, num_entries: Array, chunk: ColumnChunk) -> list[int]:
        """Return the first image of each page, followed by the number of images; each page begins with an image."""
        before_image = np.concatenate([[0], np.cumsum(num_entries)])
        before_page = np.concatenate([[0], np.cumsum([page.entries for page in self.pages])])
        first_rows = np.searchsorted(before_image, before_page)
        if not before_page[-1] == before_image[-1] == chunk.entries or (before_image[first_rows] != before_page).any():
            raise OtherPagesError
        rows: list[int] = first_rows.tolist()
        return rows

    def page_of(self, row: int) -> int:
        """Return the index of the page that contains an image."""
        return bisect.bisect_right(self.first_rows, row) - 1

    def num_nulls(self, page: int) -> int:
        """Return the number of null images of a page."""
        bounds = self.first_pieces[self.first_rows[page] : self.first_rows[page + 1] + 1]
        return int((bounds[:-1] == bounds[1:]).sum())

    def values_bytes(self, page: int) -> int:
        """Return the number of bytes of all values in a page, including the length before each value."""
        first, stop = (self.first_pieces[self.first_rows[number]] for number in (page, page + 1))
        return int(self.piece_stops[stop - 1] - self.starts[self.first_rows[page]]) if stop > first else 0


class PlainPages:
    """Images of one row group whose pages store byte arrays uncompressed."""

    def __init__(self, index: _PageIndex) -> None:
        starts = index.starts + _LENGTH.itemsize
        for number, page in enumerate(index.pages):
            first, stop = index.first_rows[number : number + 2]
            start = page.stop - index.values_bytes(number)
            fits = start == page.start + sum(page.level_bytes) if page.level_bytes else start > page.start
            if not fits or page.nulls not in (None, index.num_nulls(number)):
                raise OtherPagesError
            starts[first:stop] += start - index.starts[first]
        self.first_rows, self._extents = index.first_rows, ImageExtents(starts, index.layouts)
        self._layout = index.only_layout
        self._is_native = all(dtype.isnative for dtype in {layout.dtype for layout in index.layouts})
        self.ranges = self._extents.ranges  # From the length before the first chunk.

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return images as read-only views of the file, or as copies in native byte order."""
        try:
            images = self._extents.images(rows, stored)
        except OtherLayoutError as error:
            raise OtherPagesError from error
        return images if self._is_native else [cast(image, image.dtype) for image in images]

    def stream(self, data: Array) -> Iterator[Array | list[Array]]:
        """Yield the images of each page."""
        for first, stop in itertools.pairwise(self.first_rows):
            if self._layout is not None and self._layout.num_pieces:
                try:
                    self._extents.check(data, first, stop)
                except OtherLayoutError as error:
                    raise OtherPagesError from error
                yield cast(self._extents.stack(data, first, stop), self._layout.dtype)
            else:
                rows = range(first, stop)
                yield self.images(rows, [data.data[start:end] for start, end in self.ranges(rows)])

    def stacks(self, data: Array) -> list[Array] | None:
        """Return one array per page with its images; None if images differ in shape or dtype, or cannot be views."""
        layout = self._layout
        if layout is None or layout.strides is None or not layout.dtype.isnative:
            return None
        return [self._extents.stack(data, first, stop) for first, stop in itertools.pairwise(self.first_rows)]


class EncodedPages:
    """Images of one row group in pages that are compressed, or hold lists of numbers or compressed chunks."""

    def __init__(self, index: _PageIndex, chunk: ColumnChunk, expected: Expected, piece_codec: str | None) -> None:
        self._index, self._chunk, self._expected, self._piece_codec = index, chunk, expected, piece_codec
        self.first_rows = index.first_rows
        self._first_values: dict[int, int] = {}  # Offset of the values in each checked page that is not compressed.
        self._starts: list[int] = index.starts.tolist()

    def ranges(self, rows: Sequence[int]) -> list[ByteRange]:
        """Return the byte ranges of the pages of sorted ``rows``."""
        pages = self._index.pages
        return [(pages[number].start, pages[number].stop) for number, _ in self._by_page(rows)]

    def _by_page(self, rows: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Group sorted rows by page."""
        first_rows, first, last = self.first_rows, rows[0], rows[-1]
        page, stop = self._index.page_of(first), last + 1
        if last < first_rows[page + 1]:
            return [(page, rows)]
        if stop - first > len(rows):
            return [(number, list(of_page)) for number, of_page in itertools.groupby(rows, self._index.page_of)]
        groups: list[tuple[int, Sequence[int]]] = []
        while first < stop:
            end = min(stop, first_rows[page + 1])
            if first < end:
                groups.append((page, range(first, end)))
            first, page = end, page + 1
        return groups

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return images as views of decompressed pages, or as copies."""
        images: list[Array] = []
        for (page, of_page), data in zip(self._by_page(rows), stored, strict=True):
            try:
                images.extend(self._images_of_page(page, of_page, np.frombuffer(data, np.uint8)))
            except _MALFORMED as error:
                raise OtherPagesError from error
        return images

    def stream(self, data: Array) -> Iterator[Array | list[Array]]:
        """Yield the images of each page."""
        for page, rows in enumerate(itertools.starmap(range, itertools.pairwise(self._index.first_rows))):
            body = data[self._index.pages[page].start : self._index.pages[page].stop]
            try:
                yield self._images_of_page(page, rows, body)
            except _MALFORMED as error:
                raise OtherPagesError from error

    def _images_of_page(self, page: int, rows: Sequence[int], body: Array) -> Array | list[Array]:
        """Return images of a page, stacked if they are consecutive and stored alike."""
        first_value = self._first_values.get(page)
        if first_value is not None:
            values = body[first_value:]
        else:
            levels, values = self._split(self._index.pages[page], body)
            if self._piece_codec is not None:
                return self._decompress_pieces(page, rows, values)
            self._check(page, levels, values)
            if not self._index.pages[page].compressed:
                self._first_values[page] = len(body) - len(values)
        layouts, starts = self._index.layouts, self._starts
        origin, first, count = starts[self._index.first_rows[page]], rows[0], len(rows)
        if count == 1 or (self._index.only_layout is not None and rows[-1] - first == count - 1):
            return self._stack(values, layouts[first], starts[first] - origin, count)
        return [self._stack(values, layouts[row], starts[row] - origin, 1)[0] for row in rows]

    def _stack(self, values: Array, layout: PieceLayout, start: int, count: int) -> Array:
        """Return ``count`` images whose first value starts at ``start`` of the values of a page."""
        if not self._chunk.lists:
            return cast(layout.stack(values, start + layout.prefix_bytes, count), layout.dtype)
        numbers: Array = np.ndarray(count * math.prod(layout.shape), _LIST_VALUE, values, start)
        return cast(numbers.astype(_LIST_PIXEL), layout.dtype).reshape(count, *layout.shape)

    def _split(self, page: Page, body: Array) -> tuple[Array, Array]:
        """Return the repetition levels and the values of a page."""
        if page.level_bytes is None:
            body = self._decompress(page, body, page.plain_bytes)
            levels = [body[:0]]
            for _ in range(self._chunk.levels):
                level, body = _prefixed(body)
                levels.append(level)
            return levels[-self._chunk.levels], body
        level_bytes = sum(page.level_bytes)
        values = self._decompress(page, body[level_bytes:], page.plain_bytes - level_bytes)
        return body[: page.level_bytes[0]], values

    def _decompress(self, page: Page, stored: Array, plain_bytes: int) -> Array:
        if not page.compressed or self._chunk.codec is None:
            return stored
        plain = np.empty(plain_bytes, np.uint8)
        decompress_into(self._chunk.codec, stored, plain)
        return plain

    def _check(self, page: int, levels: Array, values: Array) -> None:
        """Raise `OtherPagesError` unless the values of a page are those of its images."""
        index = self._index
        bounds = index.first_pieces[index.first_rows[page] : index.first_rows[page + 1] + 1]
        is_null = bounds[:-1] == bounds[1:]
        is_valid = len(values) == index.values_bytes(page) and index.pages[page].nulls in (None, is_null.sum())
        pieces = slice(bounds[0], bounds[-1])
        sizes = index.piece_bytes[pieces]
        # Numbers have no length before them: the levels show that each list has one number per pixel of its chunk, and
        # a null image is one entry. Each byte array has its length before it, which must be that of the chunk.
        if is_valid and self._chunk.lists:
            counts = np.insert(sizes // _LIST_VALUE.itemsize, bounds[:-1][is_null] - bounds[0], 1)
            is_valid = _lists_start(levels, counts, bounds[:-1] - bounds[0] + np.cumsum(is_null) - is_null)
        elif is_valid:
            origin = index.starts[index.first_rows[page]]
            is_valid = _have_lengths(values, index.piece_stops[pieces] - sizes - origin, sizes)
        if not is_valid:
            raise OtherPagesError

    def _decompress_pieces(self, page: int, rows: Sequence[int], values: Array) -> list[Array]:
        """Return images whose chunks are compressed separately; their sizes are only stored before their values."""
        index, ranges, stop = self._index, list[ByteRange](), 0
        first_piece = index.first_pieces[index.first_rows[page]]
        for _ in range(index.first_pieces[index.first_rows[page + 1]] - first_piece):
            start = stop + _LENGTH.itemsize
            stop = start + int.from_bytes(values[stop:start].tobytes(), "little")
            ranges.append((start, stop))
        if stop != len(values) or index.pages[page].nulls not in (None, index.num_nulls(page)):
            raise OtherPagesError
        images = []
        for row in rows:
            layout, image_name = index.layouts[row], self._expected.where(row)
            first = index.first_pieces[row] - first_piece
            piece_bytes = layout.piece_pixels * layout.dtype.itemsize
            pieces = [
                decompress(values[start:stop], self._piece_codec or "", piece_bytes, image_name)
                for start, stop in ranges[first : first + layout.num_pieces]
            ]
            flat = np.concatenate(pieces) if len(pieces) != 1 else pieces[0]
            images.append(cast(flat.view(layout.dtype), layout.dtype).reshape(layout.shape))
        return images


class DictionaryPages:
    """The chunks of one row group, one per row, each stored as an index into a PLAIN-encoded dictionary page.

    Parquet libraries write dictionaries by default. The dictionary page holds all values of the row group and is
    decompressed as a whole; it is not cached. Raises `OtherPagesError` if the pages have an unsupported layout;
    `images` and `stack` may raise it too.

    ``chunk`` is the byte range of the row group's pixel leaf with its dictionary, which is not nested in a list; its
    data pages begin at ``data_start``.
    """

    def __init__(
        self,
        file: ByteSource,
        chunk: ColumnChunk,
        data_start: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        compressed = chunk.codec is not None
        self._codec, self.first_rows = chunk.codec, [0, len(shapes)]
        self._page = dictionary_page(header_reader(file), chunk.start, data_start, compressed=compressed)
        self._shapes, self._dtypes = shapes, dtypes
        # Values are stored back to back, so all lengths must be known. Every value of the dictionary must belong to a
        # row, because only the row's shape and dtype give its length.
        (stored,) = file.read_ranges([(data_start, chunk.stop)])
        numbers = _numbers(bytes(stored), chunk.codec, chunk.levels, len(shapes))
        sizes: dict[int, int] = {}
        for number, shape, dtype in zip(numbers, shapes, dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            if sizes.setdefault(number, size) != size:
                raise OtherPagesError
        if not sizes or len(sizes) != self._page.entries or max(sizes) >= len(sizes):
            raise OtherPagesError
        self._lengths = [sizes[number] for number in range(len(sizes))]
        stops = list(itertools.accumulate(length + _LENGTH.itemsize for length in self._lengths))
        if self._page.plain_bytes != stops[-1]:
            raise OtherPagesError
        self._first_bytes = [stop - length for stop, length in zip(stops, self._lengths, strict=True)]
        self._starts = [self._first_bytes[number] for number in numbers]

    def ranges(self, rows: Sequence[int]) -> list[ByteRange]:
        """Return the byte range of the dictionary page, which is needed for any rows."""
        return [(self._page.start, self._page.stop)] if rows else []

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return the chunks of ``rows``: read-only views of the file, or of the decompressed dictionary."""
        values = np.frombuffer(stored[0], np.uint8)
        if self._codec is not None:
            plain = np.empty(_LENGTH.itemsize + self._page.plain_bytes, np.uint8)[_LENGTH.itemsize :]  # aligns pixels
            try:
                decompress_into(self._codec, values, plain)
            except _MALFORMED as error:
                raise OtherPagesError from error
            values = plain
        data = values.data
        for first, length in zip(self._first_bytes, self._lengths, strict=True):
            if int.from_bytes(data[first - _LENGTH.itemsize : first], "little") != length:
                raise OtherPagesError
        return [np.ndarray(self._shapes[row], self._dtypes[row], values, self._starts[row]) for row in rows]

    def stream(self, data: Array) -> Iterator[list[Array]]:
        """Yield all chunks."""
        rows = range(len(self._shapes))
        yield self.images(rows, [data.data[start:stop] for start, stop in self.ranges(rows)])


Pages: TypeAlias = PlainPages | EncodedPages | DictionaryPages


@lru_cache(1024)
def _numbers(stored: bytes, codec: str | None, levels: int, rows: int) -> tuple[int, ...]:
    """Return the numbers of ``rows`` values in the data pages of a dictionary.

    Files with one row per row group repeat the bytes of these pages many times.
    """
    mapped = np.frombuffer(stored, np.uint8)
    numbers: list[int] = []
    pages = list(
        iter_data_pages(
            lambda start, stop: mapped.data[start:stop],
            0,
            len(mapped),
            compressed=codec is not None,
            by_dictionary=True,
        )
    )
    if sum(page.entries for page in pages) != rows:
        raise OtherPagesError
    for page in pages:
        try:
            body = mapped[page.start : page.stop]
            head = sum(page.level_bytes or ())
            if page.compressed and codec is not None:
                plain = np.empty(page.plain_bytes - head, np.uint8)
                decompress_into(codec, body[head:], plain)
                body = np.concatenate([body[:head], plain])
            if levels:
                level, body = _prefixed(body) if page.level_bytes is None else (body[:head], body[head:])
                if not _hybrid(level, page.entries, 1).all():  # one is null
                    raise OtherPagesError
            numbers += _hybrid(body[1:], page.entries, int(body[0])).tolist()
        except _MALFORMED as error:
            raise OtherPagesError from error
    return tuple(numbers)


def _hybrid(data: Array, count: int, width: int, dtype: type = np.int64) -> Array:
    """Return ``count`` numbers of ``width`` bits, stored as runs of one number and groups of eight packed ones."""
    numbers: Array = np.empty(count, dtype)
    done = position = 0
    while done < count:
        head, position = varint(data.data, position)
        run = min(head >> 1, count)
        if head & 1:  # groups of eight, packed from the lowest bit on; the last group may hold more than are wanted
            size = run * width
            bits = np.unpackbits(data[position : position + size], bitorder="little").reshape(-1, max(width, 1))
            position += size
            unpacked = bits[: count - done] @ (1 << np.arange(max(width, 1), dtype=dtype))
            run = len(unpacked) if width else min(8 * run, count - done)
            numbers[done : done + run] = unpacked if width else 0
        else:
            size = -(-width // 8)
            if position + size > len(data):
                raise OtherPagesError
            numbers[done : done + run] = int.from_bytes(data[position : position + size].tobytes(), "little")
            position += size
        if not run:
            raise OtherPagesError
        done += run
    return numbers


def plain_layout(shape: tuple[int, ...], dtype: np.dtype[Any], num_pieces: int) -> PieceLayout:
    """Return the layout of an image in PLAIN-encoded byte arrays; 4 bytes with its length precede each array."""
    piece_bytes = math.prod(shape) // max(num_pieces, 1) * dtype.itemsize
    prefix = piece_bytes.to_bytes(max(_LENGTH.itemsize, -(-piece_bytes.bit_length() // 8)), "little")
    return PieceLayout(shape, dtype, num_pieces, (prefix,) * num_pieces)


def _layouts(expected: Expected, num_pieces: Array, *, has_prefixes: bool) -> list[PieceLayout]:
    """Return the layout of each image; images that are stored alike share one object."""
    by_kind: dict[tuple[Any, ...], PieceLayout] = {}
    layouts = []
    for shape, dtype, count in zip(expected.shapes.tolist(), expected.dtypes, num_pieces.tolist(), strict=True):
        kind = (*shape, dtype, count)
        if kind not in by_kind:
            layout = plain_layout(tuple(shape), dtype, count)
            by_kind[kind] = layout if has_prefixes else replace(layout, prefixes=())
        layouts.append(by_kind[kind])
    return layouts


def _prefixed(body: Array) -> tuple[Array, Array]:
    """Return the bytes after a length prefix of 4 bytes, and the rest."""
    stop = _LENGTH.itemsize + int.from_bytes(body[: _LENGTH.itemsize].tobytes(), "little")
    if stop > len(body):
        raise OtherPagesError
    return body[_LENGTH.itemsize : stop], body[stop:]


def _have_lengths(data: Array, starts: Array, lengths: Array) -> bool:
    """Whether the length before each value is correct."""
    before = starts[:, None] + np.arange(-_LENGTH.itemsize, 0)
    return bool((data[before].view(_LENGTH)[:, 0] == lengths).all())


def _lists_start(levels: Array, counts: Array, first_pieces: Array) -> bool:
    """Whether repetition levels encode lists of ``counts`` entries: 0 starts an image, 1 a chunk, 2 continues it."""
    starts = np.cumsum(counts) - counts
    expected = np.full(int(counts.sum()), 2, np.uint8)
    expected[starts] = 1
    expected[starts[first_pieces]] = 0
    return bool((_hybrid(levels, len(expected), 2, np.uint8) == expected).all())
