"""Pages of the pixel leaf of a Parquet row group, from which images are read without pyarrow.

A Parquet library decodes a whole row group to read one image. A PLAIN-encoded value is stored as is: a byte array after
its length of 4 bytes, an unsigned 16-bit number in 4 bytes. So the page headers are parsed once per row group. Then the
offset of each image in an uncompressed page is known, and only the lengths before its chunks are compared. Other pages
are decompressed one by one, and checked: the lengths of their values match shape and dtype, none of them is null, and
they fill the page to its end.

Pages that are encrypted, damaged, or begin within an image raise `OtherLayoutError`: a Parquet library then reads the
page or reports the fault. Page checksums are not verified, like the default of such libraries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from omearrow_ds.codec.decode import Expected
from omearrow_ds.codec.leaves import cast, decompress
from omearrow_ds.storage.byte_source import ByteRange, ByteSource
from omearrow_ds.storage.formats._base import Array, group_by_part
from omearrow_ds.storage.formats._codecs import decompress_into
from omearrow_ds.storage.formats._parquet_headers import (
    BY_DICTIONARY,
    DICTIONARY,
    HEADER_BYTES,
    Page,
    header_reader,
    iter_pages,
    varint,
)
from omearrow_ds.storage.image_extents import ImageExtents, OtherLayoutError, PieceLayout

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


class PagedTable(Protocol):
    """Owner of a `PageReader`; ``starts`` are the first rows of its row groups, and the number of rows."""

    starts: list[int]

    def find_pages(self, file: ByteSource, number: int) -> Pages:
        """Return the pages of a row group, or raise `OtherLayoutError` if pyarrow must read it."""

    def decode_group(self, number: int, rows: Sequence[int]) -> list[Array]:
        """Return the images at sorted rows of a row group, which pyarrow decodes as a whole."""


class PageReader:
    """Images of the row groups of a Parquet file, read directly from pages if possible, else by pyarrow."""

    def __init__(self, file: ByteSource) -> None:
        self.file = file
        self._pages: dict[int, Pages | None] = {}

    def pages(self, table: PagedTable, number: int) -> Pages | None:
        """Return the pages of a row group; None if pyarrow must read them."""
        self.file.refuse_changed()
        if number not in self._pages:
            try:
                with self.file.read_at_random():  # Page headers are small and far apart.
                    self._pages[number] = table.find_pages(self.file, number)
            except OtherLayoutError:
                self._pages[number] = None
        return self._pages[number]

    def read(self, table: PagedTable, rows: Sequence[int]) -> list[Array]:
        """Return the images at sorted rows; ranges of all row groups are requested together."""
        parts = group_by_part(table.starts, rows)
        if len(parts) == 1:
            ((number, _),) = parts
            pages, start = self.pages(table, number), table.starts[number]
            in_group = [row - start for row in rows]
            data = [] if pages is None else self.file.read_ranges(pages.ranges(in_group))
            return self._read_group(table, number, rows, in_group, data)
        in_groups = [[row - table.starts[number] for row in of_group] for number, of_group in parts]
        pages_of = [self.pages(table, number) for number, _ in parts]
        located = zip(pages_of, in_groups, strict=True)
        ranges = [[] if pages is None else pages.ranges(in_group) for pages, in_group in located]
        stored = iter(self.file.read_ranges(list(itertools.chain.from_iterable(ranges))))
        images: list[Array] = []
        for (number, of_group), in_group, of_pages in zip(parts, in_groups, ranges, strict=True):
            data = list(itertools.islice(stored, len(of_pages)))
            images += self._read_group(table, number, of_group, in_group, data)
        return images

    def _read_group(
        self, table: PagedTable, number: int, rows: Sequence[int], in_group: Sequence[int], data: list[memoryview]
    ) -> list[Array]:
        pages = self._pages[number]
        if pages is not None:
            try:
                return pages.images(in_group, data)
            except OtherLayoutError:
                self._pages[number] = None
        return table.decode_group(number, rows)

    def stream(self, table: PagedTable) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield the first row and the images of each page; images that pages cannot provide are read by pyarrow."""
        for number, (start, stop) in enumerate(itertools.pairwise(table.starts)):
            first, pages, data = start, self.pages(table, number), self.file.data
            try:
                for images in () if pages is None or data is None else pages.stream(data):
                    yield first, images
                    first += len(images)
                    self.file.refuse_changed()
            except OtherLayoutError:
                self._pages[number] = None
            if first < stop:
                yield first, table.decode_group(number, range(first, stop))

    def stacks(self, table: PagedTable) -> list[Array] | None:
        """Return all images of a mapped file as views, without checks; None if any image cannot be a view."""
        arrays: list[Array] = []
        for number in range(len(table.starts) - 1):
            pages, data = self.pages(table, number), self.file.data
            if data is None or not isinstance(pages, PlainPages):
                return None
            of_group = pages.stacks(data, 0, len(pages.layouts))
            if of_group is None:
                return None
            arrays += of_group
        return arrays


def find_pages(
    file: ByteSource, chunk: ColumnChunk, expected: Expected, num_pieces: Array, piece_codec: str | None = None
) -> PlainPages | EncodedPages:
    """Return the pages of one row group, in which the chunks of an image have equal size and the order TCZYX."""
    # ``num_pieces`` is the number of chunks of each image, and ``piece_codec`` the codec of each chunk.
    if chunk.stop > file.size_bytes:
        raise OtherLayoutError
    if chunk.codec is None and not chunk.lists and piece_codec is None:
        _request_headers(file, chunk)
        return PlainPages(PageIndex(file, chunk, expected, num_pieces))
    file.cache_ranges([(chunk.start, chunk.stop)])
    return EncodedPages(file, chunk, expected, num_pieces, piece_codec)


def _request_headers(file: ByteSource, chunk: ColumnChunk) -> None:
    """Request the headers of all pages at once, assuming that their distance is that of the first two."""
    # It is for images of one shape. Other headers are read one by one, since each gives the offset of the next.
    if file.data is not None:
        return
    file.cache_ranges([(chunk.start, min(chunk.start + HEADER_BYTES, chunk.stop))])
    first_page = next(iter_pages(header_reader(file), chunk.start, chunk.stop, compressed=False), None)
    if first_page is None:
        raise OtherLayoutError
    starts = range(first_page.stop, chunk.stop, max(first_page.stop - chunk.start, HEADER_BYTES))
    ranges: list[ByteRange] = [(start, min(start + HEADER_BYTES, chunk.stop)) for start in starts]
    file.cache_ranges(ranges if len(ranges) <= _MAX_HEADERS else [(chunk.start, chunk.stop)])


class PageIndex:
    """Pages of a row group, and offsets of its images, which follow from shapes and dtypes without reading values."""

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
        self.pages = list(iter_pages(header_reader(file), chunk.start, chunk.stop, compressed=is_compressed))
        # A null image has one entry without a value. Each page begins with an image.
        num_entries = np.maximum(num_pieces * pixels if chunk.lists else num_pieces, 1)
        before_image = np.concatenate([[0], np.cumsum(num_entries)])
        before_page = np.concatenate([[0], np.cumsum([page.entries for page in self.pages])])
        first_rows = np.searchsorted(before_image, before_page)
        if not before_page[-1] == before_image[-1] == chunk.entries or (before_image[first_rows] != before_page).any():
            raise OtherLayoutError
        self.first_rows: list[int] = first_rows.tolist()  # One per page, then the number of images.

    def num_nulls(self, page: int) -> int:
        bounds = self.first_pieces[self.first_rows[page] : self.first_rows[page + 1] + 1]
        return int((bounds[:-1] == bounds[1:]).sum())

    def values_bytes(self, page: int) -> int:
        """Return the number of bytes of all values in a page, including the length before each value."""
        first, stop = (self.first_pieces[self.first_rows[number]] for number in (page, page + 1))
        return int(self.piece_stops[stop - 1] - self.starts[self.first_rows[page]]) if stop > first else 0


class PlainPages(ImageExtents):
    """Images of one row group whose pages store byte arrays uncompressed."""

    def __init__(self, index: PageIndex) -> None:
        starts = index.starts + _LENGTH.itemsize
        for number, page in enumerate(index.pages):
            first, stop = index.first_rows[number : number + 2]
            start = page.stop - index.values_bytes(number)
            fits = start == page.start + sum(page.level_bytes) if page.level_bytes else start > page.start
            if not fits or page.nulls not in (None, index.num_nulls(number)):
                raise OtherLayoutError
            starts[first:stop] += start - index.starts[first]
        super().__init__(starts, index.layouts)
        self.first_rows, self._only_layout = index.first_rows, index.only_layout

    def stream(self, data: Array) -> Iterator[Array | list[Array]]:
        for first, stop in itertools.pairwise(self.first_rows):
            if self._only_layout is not None and self._only_layout.num_pieces:
                self.check(data, first, stop)
                yield self.stack(data, first, stop)
            else:
                rows = range(first, stop)
                yield self.images(rows, [data.data[start:end] for start, end in self.ranges(rows)])


class EncodedPages(PageIndex):
    """Images of one row group in pages that are compressed, or hold lists of numbers or compressed chunks."""

    def __init__(
        self, file: ByteSource, chunk: ColumnChunk, expected: Expected, num_pieces: Array, piece_codec: str | None
    ) -> None:
        super().__init__(file, chunk, expected, num_pieces)
        self._chunk, self._expected, self._piece_codec = chunk, expected, piece_codec
        self._first_values: dict[int, int] = {}  # Offset of the values in each checked page that is not compressed.
        self._starts: list[int] = self.starts.tolist()

    def ranges(self, rows: Sequence[int]) -> list[ByteRange]:
        pages = [self.pages[number] for number, _ in group_by_part(self.first_rows, rows)]
        return [(page.start, page.stop) for page in pages]

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return images as views of decompressed pages, or as copies."""
        images: list[Array] = []
        for (page, of_page), data in zip(group_by_part(self.first_rows, rows), stored, strict=True):
            images.extend(self._images_of_page(page, of_page, np.frombuffer(data, np.uint8)))
        return images

    def stream(self, data: Array) -> Iterator[Array | list[Array]]:
        for page, rows in enumerate(itertools.starmap(range, itertools.pairwise(self.first_rows))):
            yield self._images_of_page(page, rows, data[self.pages[page].start : self.pages[page].stop])

    def _images_of_page(self, page: int, rows: Sequence[int], body: Array) -> Array | list[Array]:
        """Return images of a page, stacked if they are consecutive and stored alike."""
        try:
            first_value = self._first_values.get(page)
            if first_value is not None:
                values = body[first_value:]
            else:
                levels, values = _split(self.pages[page], self._chunk, body)
                if self._piece_codec is not None:
                    return self._decompress_pieces(page, rows, values)
                self._check(page, levels, values)
                if not self.pages[page].compressed:
                    self._first_values[page] = len(body) - len(values)
            origin, first, count = self._starts[self.first_rows[page]], rows[0], len(rows)
            if count == 1 or (self.only_layout is not None and rows[-1] - first == count - 1):
                return self._stack(values, self.layouts[first], self._starts[first] - origin, count)
            return [self._stack(values, self.layouts[row], self._starts[row] - origin, 1)[0] for row in rows]
        except _MALFORMED as error:
            raise OtherLayoutError from error

    def _stack(self, values: Array, layout: PieceLayout, start: int, count: int) -> Array:
        """Return ``count`` images whose first value starts at ``start`` of the values of a page."""
        if not self._chunk.lists:
            return layout.stack(values, start + layout.prefix_bytes, count)
        numbers: Array = np.ndarray(count * math.prod(layout.shape), _LIST_VALUE, values, start)
        return cast(numbers.astype(_LIST_PIXEL), layout.dtype).reshape(count, *layout.shape)

    def _check(self, page: int, levels: Array, values: Array) -> None:
        """Raise `OtherLayoutError` unless the values of a page are those of its images."""
        first_row, stop_row = self.first_rows[page : page + 2]
        bounds = self.first_pieces[first_row : stop_row + 1]
        is_null = bounds[:-1] == bounds[1:]
        is_valid = len(values) == self.values_bytes(page) and self.pages[page].nulls in (None, is_null.sum())
        pieces = slice(bounds[0], bounds[-1])
        sizes = self.piece_bytes[pieces]
        # Numbers have no length before them: the levels show that each list has one number per pixel of its chunk, and
        # a null image is one entry. Each byte array has its length before it, which must be that of the chunk.
        if is_valid and self._chunk.lists:
            counts = np.insert(sizes // _LIST_VALUE.itemsize, bounds[:-1][is_null] - bounds[0], 1)
            is_valid = _lists_start(levels, counts, bounds[:-1] - bounds[0] + np.cumsum(is_null) - is_null)
        elif is_valid:
            first_bytes = self.piece_stops[pieces] - sizes - self.starts[first_row]
            lengths = values[first_bytes[:, None] + np.arange(-_LENGTH.itemsize, 0)].view(_LENGTH)[:, 0]
            is_valid = (lengths == sizes).all()
        if not is_valid:
            raise OtherLayoutError

    def _decompress_pieces(self, page: int, rows: Sequence[int], values: Array) -> list[Array]:
        """Return images whose chunks are compressed separately; their sizes are only stored before their values."""
        ranges, stop = list[ByteRange](), 0
        first_piece, stop_piece = (self.first_pieces[self.first_rows[number]] for number in (page, page + 1))
        for _ in range(stop_piece - first_piece):
            start = stop + _LENGTH.itemsize
            stop = start + int.from_bytes(values[stop:start].tobytes(), "little")
            ranges.append((start, stop))
        if stop != len(values) or self.pages[page].nulls not in (None, self.num_nulls(page)):
            raise OtherLayoutError
        images = []
        for row in rows:
            layout, image_name = self.layouts[row], self._expected.where(row)
            first = self.first_pieces[row] - first_piece
            piece_bytes = layout.piece_pixels * layout.dtype.itemsize
            pieces = [
                decompress(values[start:stop], self._piece_codec or "", piece_bytes, image_name)
                for start, stop in ranges[first : first + layout.num_pieces]
            ]
            flat = np.concatenate(pieces) if len(pieces) != 1 else pieces[0]
            images.append(cast(flat.view(layout.dtype), layout.dtype).reshape(layout.shape))
        return images


class DictionaryPages(ImageExtents):
    """The chunks of one row group, one per row, each stored as an index into a PLAIN-encoded dictionary page.

    Parquet libraries write dictionaries by default. The page holds all values of the row group; it is decompressed as a
    whole, and not cached. ``chunk`` is not nested in a list; its data pages begin at ``data_start``.
    """

    def __init__(self, file: ByteSource, chunk: ColumnChunk, data_start: int, expected: Expected) -> None:
        self._codec, is_compressed = chunk.codec, chunk.codec is not None
        read, layouts = header_reader(file), _layouts(expected, np.ones(len(expected.dtypes), np.int64))
        pages = list(iter_pages(read, chunk.start, data_start, compressed=is_compressed, encodings=DICTIONARY))
        if len(pages) != 1:
            raise OtherLayoutError
        (self._page,) = pages
        # Values are stored back to back, so all lengths must be known. Every value of the dictionary must belong to a
        # row, because only the row's shape and dtype give its length.
        (stored,) = file.read_ranges([(data_start, chunk.stop)])
        numbers = _numbers(bytes(stored), chunk._replace(start=0, stop=0), len(layouts))
        sizes: dict[int, int] = {}
        for number, layout in zip(numbers, layouts, strict=True):
            if sizes.setdefault(number, layout.num_bytes) != layout.num_bytes:
                raise OtherLayoutError
        if not sizes or len(sizes) != self._page.entries or max(sizes) >= len(sizes):
            raise OtherLayoutError
        lengths = np.array([sizes[number] for number in range(len(sizes))])
        stops = np.cumsum(lengths + _LENGTH.itemsize)
        if self._page.plain_bytes != stops[-1]:
            raise OtherLayoutError
        super().__init__((stops - lengths)[list(numbers)], layouts)

    def ranges(self, rows: Sequence[int]) -> list[ByteRange]:
        """Return the byte range of the dictionary page, which is needed for any rows."""
        return [(self._page.start, self._page.stop)] if rows else []

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return the chunks of ``rows``: read-only views of the file, or of the decompressed dictionary."""
        try:
            values = _decompress(self._page, self._codec, np.frombuffer(stored[0], np.uint8), self._page.plain_bytes)
        except _MALFORMED as error:
            raise OtherLayoutError from error
        return super().images(rows, [values.data[start:stop] for start, stop in super().ranges(rows)])

    def stream(self, data: Array) -> Iterator[list[Array]]:
        yield self.images(range(len(self.layouts)), [data.data[self._page.start : self._page.stop]])


Pages: TypeAlias = PlainPages | EncodedPages | DictionaryPages


@lru_cache(1024)
def _numbers(stored: bytes, chunk: ColumnChunk, rows: int) -> tuple[int, ...]:
    """Return the numbers of ``rows`` values in the data pages of a dictionary."""
    # Files with one row per row group repeat the bytes of these pages many times.
    data, numbers = memoryview(stored), list[int]()
    read, compressed = (lambda start, stop: data[start:stop]), chunk.codec is not None
    pages = list(iter_pages(read, 0, len(data), compressed=compressed, encodings=BY_DICTIONARY))
    if sum(page.entries for page in pages) != rows:
        raise OtherLayoutError
    for page in pages:
        try:
            level, body = _split(page, chunk, np.frombuffer(data[page.start : page.stop], np.uint8))
            if chunk.levels and not _hybrid(level, page.entries, 1).all():  # one is null
                raise OtherLayoutError
            numbers += _hybrid(body[1:], page.entries, int(body[0])).tolist()
        except _MALFORMED as error:
            raise OtherLayoutError from error
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
                raise OtherLayoutError
            numbers[done : done + run] = int.from_bytes(data[position : position + size].tobytes(), "little")
            position += size
        if not run:
            raise OtherLayoutError
        done += run
    return numbers


def plain_layout(shape: tuple[int, ...], dtype: np.dtype[Any], num_pieces: int) -> PieceLayout:
    """Return the layout of an image in PLAIN-encoded byte arrays; 4 bytes with its length precede each array."""
    piece_bytes = math.prod(shape) // max(num_pieces, 1) * dtype.itemsize
    prefix = piece_bytes.to_bytes(max(_LENGTH.itemsize, -(-piece_bytes.bit_length() // 8)), "little")
    return PieceLayout(shape, dtype, num_pieces, (prefix,) * num_pieces)


def _layouts(expected: Expected, num_pieces: Array, *, has_prefixes: bool = True) -> list[PieceLayout]:
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


def _split(page: Page, chunk: ColumnChunk, body: Array) -> tuple[Array, Array]:
    """Return the first levels of a page (repetition levels, or else definition levels), and its values."""
    if page.level_bytes is not None:
        level_bytes = sum(page.level_bytes)
        values = _decompress(page, chunk.codec, body[level_bytes:], page.plain_bytes - level_bytes)
        return body[: page.level_bytes[0] if chunk.levels > 1 else level_bytes], values
    levels, values = list[Array](), _decompress(page, chunk.codec, body, page.plain_bytes)
    for _ in range(chunk.levels):  # Each is stored after its length.
        stop = _LENGTH.itemsize + int.from_bytes(values[: _LENGTH.itemsize].tobytes(), "little")
        if stop > len(values):
            raise OtherLayoutError
        levels.append(values[_LENGTH.itemsize : stop])
        values = values[stop:]
    return (levels or [values])[0], values


def _decompress(page: Page, codec: str | None, stored: Array, plain_bytes: int) -> Array:
    if not page.compressed or codec is None:
        return stored
    plain = np.empty(_LENGTH.itemsize + plain_bytes, np.uint8)[_LENGTH.itemsize :]  # Aligns pixels after a length.
    decompress_into(codec, stored, plain)
    return plain


def _lists_start(levels: Array, counts: Array, first_pieces: Array) -> bool:
    """Whether repetition levels encode lists of ``counts`` entries: 0 starts an image, 1 a chunk, 2 continues it."""
    starts = np.cumsum(counts) - counts
    expected = np.full(int(counts.sum()), 2, np.uint8)
    expected[starts] = 1
    expected[starts[first_pieces]] = 0
    return bool((_hybrid(levels, len(expected), 2, np.uint8) == expected).all())
