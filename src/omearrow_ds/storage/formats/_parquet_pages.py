"""Data pages of a memory-mapped Parquet column chunk, from which images are cut by offset.

A Parquet library decodes a whole row group to read one image. A PLAIN-encoded value is stored as is: a byte array after
its length of 4 bytes, an unsigned 16-bit number in 4 bytes. So the page headers are parsed once per row group, and each
page is checked before the first image is cut from it: the lengths of its values match shape and dtype, none of them is
null, and they fill the page to its end. Compressed pages are decompressed one by one.

Other pages (dictionary-encoded, encrypted, damaged, with a fraction of an image) raise `OtherPagesError`: a Parquet
library then reads the page or reports the fault. Page checksums are not verified, like the default of such libraries.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.codec.decode import Expected
from omearrow_ds.codec.leaves import cast, decompress
from omearrow_ds.storage.byte_source import ObjectFile
from omearrow_ds.storage.formats._codecs import decompress_into
from omearrow_ds.storage.formats._parquet_headers import OtherPagesError, Page, data_pages, dictionary_page, varint

Array = np.ndarray[Any, Any]

HEADER_BYTES = 256  # limit per page in fetched ranges; larger headers, with statistics of other writers, are rejected
_LENGTH = np.dtype("<u4")
LENGTH_BYTES = _LENGTH.itemsize  # Before each value of bytes.
_LIST_VALUE = np.dtype("<i4")
_LIST_PIXEL = np.dtype(np.uint16)  # an Arrow reader also keeps the low half of a value outside of the range
_MALFORMED = (IndexError, TypeError, ValueError, MemoryError)
STAGES = {"PixelPages.images": "decode", "PackedPages.images": "decode"}


class ColumnChunk(NamedTuple):
    """The pixel leaf of one row group: its byte range, its number of values, and whether these are items of lists.

    ``levels`` is the number of level kinds before the values of a page: 2, 1 (definition levels only) or 0.
    """

    start: int
    stop: int
    entries: int
    lists: bool
    codec: str | None
    levels: int = 2


class _Values(NamedTuple):
    """The checked values of a page, and their offset among those of the row group."""

    data: Array
    origin: int


class _Kind(NamedTuple):
    """Properties that images share: shape, stored dtype, number of chunks, and pixels per chunk."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: int
    pixels: int


class PixelPages:
    """The images of one row group, with chunks of one size in TCZYX order.

    Raises `OtherPagesError` if the pages have an unsupported layout; `images` and `stack` may raise it too.

    Parameters
    ----------
    mapped
        The file's bytes.
    chunk
        Byte range of the row group's pixel leaf.
    expected
        Shapes and dtypes of the images.
    pieces
        Number of chunks of each image.
    """

    def __init__(self, mapped: Array, chunk: ColumnChunk, expected: Expected, pieces: Array) -> None:
        self._mapped, self._chunk = mapped, chunk
        self._kinds = _kinds(expected, pieces)
        # Size of each chunk's value in bytes, from shape and dtype, and its end offset including the length before it.
        # So the offset of an image is known without reading the values before it.
        self._pieces = np.concatenate([[0], np.cumsum(pieces)])
        pixels = expected.shapes.prod(axis=1) // np.maximum(pieces, 1)
        itemsizes = 4 if chunk.lists else np.array([dtype.itemsize for dtype in expected.dtypes], np.int64)
        self._sizes = np.repeat(pixels * itemsizes, pieces)
        self._ends = np.cumsum(self._sizes + (0 if chunk.lists else _LENGTH.itemsize))
        before = np.concatenate([[0], self._ends])[self._pieces[:-1]]
        self._starts = (before + (0 if chunk.lists else _LENGTH.itemsize)).tolist()
        self._pages = data_pages(mapped, chunk.start, chunk.stop, compressed=chunk.codec is not None)
        # A null image has one entry without a value.
        self._firsts = self._first_images(np.maximum(pieces * pixels if chunk.lists else pieces, 1))
        self._checked: dict[int, _Values] = {}

    def _first_images(self, entries: Array) -> list[int]:
        """Return the index of the first image of each page, followed by the number of images."""
        # Every page must begin with an image, or one would span two of them.
        before_image = np.concatenate([[0], np.cumsum(entries)])
        before_page = np.concatenate([[0], np.cumsum([page.entries for page in self._pages])])
        firsts = np.searchsorted(before_image, before_page)
        whole = before_page[-1] == before_image[-1] == self._chunk.entries
        if not whole or (before_image[firsts] != before_page).any():
            raise OtherPagesError
        numbers: list[int] = firsts.tolist()
        return numbers

    def page_rows(self) -> Array:
        """Return how many images start in each page."""
        return np.diff(self._firsts)

    def images(self, rows: Sequence[int]) -> list[Array]:
        """Return the images of sorted ``rows``: read-only views of the file, or of decompressed pages."""
        images = []
        held = -1
        for row in rows:
            number = bisect.bisect_right(self._firsts, row) - 1
            if number != held:
                values, held = self._values(number), number
            images.append(self._cut(values, row))
        return images

    def spans(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges to fetch for images of ``rows``: the pages that contain them."""
        numbers = sorted({bisect.bisect_right(self._firsts, row) - 1 for row in rows})
        return [(self._pages[number].start, self._pages[number].stop) for number in numbers]

    def stack(self, row: int) -> Array | list[Array]:
        """Return the images from ``row`` to the end of its page, stacked (n, T, C, Z, Y, X) if they are alike."""
        number = bisect.bisect_right(self._firsts, row) - 1
        stop = self._firsts[number + 1]
        if any(kind is not self._kinds[row] for kind in self._kinds[row:stop]):
            return self.images(range(row, stop))
        return self._cut(self._values(number), row, stop - row)

    def unchecked_stack(self, row: int) -> Array | None:
        """Return the images that `stack` returns, without reading values; None if they are not alike, or are copies."""
        number = bisect.bisect_right(self._firsts, row) - 1
        page, kind, stop = self._pages[number], self._kinds[row], self._firsts[number + 1]
        if page.compressed or self._chunk.lists or any(each is not kind for each in self._kinds[row:stop]):
            return None
        if not kind.pieces:
            return None
        start = self._values_start(number)
        values = _Values(self._mapped[start : page.stop], self._starts[self._firsts[number]] - _LENGTH.itemsize)
        return self._cut(values, row, stop - row)

    def _values_start(self, number: int) -> int:
        """Return where the values of an uncompressed page of byte arrays start, as its size and header require."""
        page, first, stop = self._pages[number], self._firsts[number], self._firsts[number + 1]
        origin = self._starts[first] - _LENGTH.itemsize
        has_values = self._pieces[stop] > self._pieces[first]
        start = page.stop - (int(self._ends[self._pieces[stop] - 1]) - origin if has_values else 0)
        num_nulls = int((self._pieces[first + 1 : stop + 1] == self._pieces[first:stop]).sum())
        fits = start == page.start + sum(page.level_bytes) if page.level_bytes else start > page.start
        if not fits or page.nulls not in (None, num_nulls):
            raise OtherPagesError
        return start

    def _cut(self, values: _Values, row: int, *count: int) -> Array:
        """Return the image of ``row``, or ``count`` images from there on stacked."""
        shape, dtype, pieces, pixels = self._kinds[row]
        if not pieces:
            return np.empty((*count, *shape), dtype.newbyteorder("="))
        start = self._starts[row] - values.origin
        pieces *= math.prod(count)
        if self._chunk.lists:
            flat: Array = np.ndarray(pieces * pixels, _LIST_VALUE, values.data, start).astype(_LIST_PIXEL)
        else:
            strides = (pixels * dtype.itemsize + _LENGTH.itemsize, dtype.itemsize)
            flat = np.ndarray((pieces, pixels), dtype, values.data, start, strides)
        return cast(flat, dtype).reshape(*count, *shape)

    def _values(self, number: int) -> _Values:
        """Return the values of a page, checked at its first use, or each time that it is decompressed."""
        if number in self._checked:
            return self._checked[number]
        page = self._pages[number]
        try:
            levels, data = self._split(page)
            values = _Values(data, self._checked_origin(number, page.nulls, levels, data))
        except _MALFORMED as error:
            raise OtherPagesError from error
        if not page.compressed:
            self._checked[number] = values
        return values

    def _split(self, page: Page) -> tuple[Array, Array]:
        """Return the repetition levels and the values of a page."""
        body = self._mapped[page.start : page.stop]
        if page.level_bytes is None:
            body = self._plain(page, body, page.plain_bytes)
            levels = [body[:0]]
            for _ in range(self._chunk.levels):
                level, body = _prefixed(body)
                levels.append(level)
            return levels[-self._chunk.levels], body
        level_bytes = sum(page.level_bytes)
        return body[: page.level_bytes[0]], self._plain(page, body[level_bytes:], page.plain_bytes - level_bytes)

    def _plain(self, page: Page, stored: Array, plain_bytes: int) -> Array:
        if not page.compressed or self._chunk.codec is None:
            return stored
        plain = np.empty(plain_bytes, np.uint8)
        decompress_into(self._chunk.codec, stored, plain)
        return plain

    def _checked_origin(self, number: int, nulls: int | None, levels: Array, data: Array) -> int:
        """Return the offset of a page's values among those of the row group, after checking each of them."""
        bounds = self._pieces[self._firsts[number] : self._firsts[number + 1] + 1]
        pieces = slice(bounds[0], bounds[-1])
        sizes, ends = self._sizes[pieces], self._ends[pieces]
        null = bounds[:-1] == bounds[1:]
        origin: int = self._starts[self._firsts[number]] - (0 if self._chunk.lists else _LENGTH.itemsize)
        good = len(data) == (ends[-1] - origin if len(ends) else 0) and nulls in (None, null.sum())
        # Numbers have no length before them: the levels show that each list has one number per pixel of its chunk, and
        # a null image is one entry. Each byte array has its length before it, which must be that of the chunk.
        if good and self._chunk.lists:
            counts = np.insert(sizes // _LIST_VALUE.itemsize, bounds[:-1][null] - bounds[0], 1)
            good = _lists_start(levels, counts, bounds[:-1] - bounds[0] + np.cumsum(null) - null)
        elif good:
            good = _lengths_stand(data, ends - sizes - origin, sizes)
        if not good:
            raise OtherPagesError
        return origin


class RangedPages(PixelPages):
    """Images of one row group in fetched byte ranges; only plain pages are supported, and only images are fetched.

    Checks only the lengths before the chunks of these images, and that the page is as long as its values.
    """

    def __init__(self, mapped: Bytes, chunk: ColumnChunk, expected: Expected, pieces: Array) -> None:
        super().__init__(mapped, chunk, expected, pieces)  # type: ignore[arg-type]  # it is cut as an array is
        self._file = mapped.file

    def images(self, rows: Sequence[int]) -> list[Array]:
        return [
            self._image(row, data) for row, data in zip(rows, self._file.read_ranges(self.spans(rows)), strict=True)
        ]

    def spans(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of images in the file."""
        return [self._span(row) for row in rows]

    def stack(self, row: int) -> Array | list[Array]:
        return self.images(range(row, self._firsts[bisect.bisect_right(self._firsts, row)]))

    def _span(self, row: int) -> tuple[int, int]:
        """Return the byte range of an image, starting at the length before its first chunk."""
        number = bisect.bisect_right(self._firsts, row) - 1
        start = self._values_start(number) + self._starts[row] - self._starts[self._firsts[number]]
        _, dtype, pieces, pixels = self._kinds[row]
        return start, start + pieces * (pixels * dtype.itemsize + _LENGTH.itemsize)

    def _image(self, row: int, data: memoryview) -> Array:
        shape, dtype, pieces, pixels = self._kinds[row]
        stored = np.frombuffer(data, np.uint8)
        size_bytes = pixels * dtype.itemsize
        each = stored.reshape(pieces, _LENGTH.itemsize + size_bytes) if pieces else stored.reshape(0, _LENGTH.itemsize)
        if (np.ascontiguousarray(each[:, : _LENGTH.itemsize]).view(_LENGTH) != size_bytes).any():
            raise OtherPagesError
        flat = np.ascontiguousarray(each[:, _LENGTH.itemsize :]).view(dtype)
        return cast(flat, dtype).reshape(shape)


class Bytes:
    """Fetched byte ranges of a file, sliced like an array; page headers are limited to `HEADER_BYTES`.

    Attributes
    ----------
    file
            The file.
    """

    def __init__(self, file: ObjectFile) -> None:
        self.file = file

    def __getitem__(self, span: slice) -> Array:
        (data,) = self.file.read_ranges([(span.start, span.stop)])
        return np.frombuffer(data, np.uint8)

    @property
    def data(self) -> _Headers:
        """The same bytes, for parsing headers."""
        return _Headers(self.file)


class _Headers:
    def __init__(self, file: ObjectFile) -> None:
        self._file = file

    def __getitem__(self, span: slice) -> memoryview:
        (data,) = self._file.read_ranges([(span.start, min(span.stop, span.start + HEADER_BYTES))])
        return data


class PackedPages(PixelPages):
    """Images of one row group with separately compressed chunks, whose sizes are only stored before their values."""

    def __init__(self, mapped: Array, chunk: ColumnChunk, expected: Expected, pieces: Array, codec: str) -> None:
        super().__init__(mapped, chunk, expected, pieces)
        self._codec, self._expected = codec, expected
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def images(self, rows: Sequence[int]) -> list[Array]:
        images = []
        for row in rows:
            number = bisect.bisect_right(self._firsts, row) - 1
            values, (shape, dtype, pieces, pixels) = self._values(number), self._kinds[row]
            first = self._pieces[row] - self._pieces[self._firsts[number]]
            where, size_bytes = self._expected.where(row), pixels * dtype.itemsize
            parts = [
                decompress(values.data[start:stop], self._codec, size_bytes, where)
                for start, stop in self._spans[number][first : first + pieces]
            ]
            flat = np.concatenate(parts) if len(parts) != 1 else parts[0]
            images.append(cast(flat.view(dtype), dtype).reshape(shape))
        return images

    def stack(self, row: int) -> list[Array]:
        return self.images(range(row, self._firsts[bisect.bisect_right(self._firsts, row)]))

    def _checked_origin(self, number: int, nulls: int | None, levels: Array, data: Array) -> int:
        del levels  # lists of bytes have one for each chunk, and the chunks are counted
        bounds = self._pieces[self._firsts[number] : self._firsts[number + 1] + 1]
        at, spans = 0, []
        for _ in range(bounds[-1] - bounds[0]):
            start = at + _LENGTH.itemsize
            at = start + int.from_bytes(data[at:start].tobytes(), "little")
            spans.append((start, at))
        if at != len(data) or nulls not in (None, (bounds[:-1] == bounds[1:]).sum()):
            raise OtherPagesError
        self._spans[number] = spans
        return 0


class DictionaryPages:
    """The chunks of one row group, one per row, as indices into a PLAIN-encoded dictionary page.

    Parquet libraries write dictionaries by default. The dictionary page holds all values of the row group and is
    decompressed as a whole; it is not cached. Raises `OtherPagesError` if the pages have an unsupported layout;
    `images` and `stack` may raise it too.

    Parameters
    ----------
    mapped
        The file's bytes.
    chunk
        Byte range of the row group's pixel leaf with its dictionary; the leaf is not nested in a list.
    data_start
        Offset of its data pages.
    shapes, dtypes
        Shapes and dtypes of the chunks.
    """

    def __init__(
        self,
        mapped: Array,
        chunk: ColumnChunk,
        data_start: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        compressed = chunk.codec is not None
        self._mapped, self._codec = mapped, chunk.codec
        self._page = dictionary_page(mapped, chunk.start, data_start, compressed=compressed)
        self._shapes, self._dtypes = shapes, dtypes
        # Values are stored back to back, so all lengths must be known. Every value of the dictionary must belong to a
        # row, because only the row's shape and dtype give its length.
        numbers = _numbers(mapped[data_start : chunk.stop].tobytes(), chunk.codec, chunk.levels, len(shapes))
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

    def images(self, rows: Sequence[int]) -> list[Array]:
        """Return the chunks of ``rows``: read-only views of the file, or of the decompressed dictionary."""
        values = self._mapped[self._page.start : self._page.stop]
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

    def stack(self, row: int) -> list[Array]:
        """Return the chunks from ``row`` on."""
        return self.images(range(row, len(self._shapes)))


@lru_cache(1024)
def _numbers(stored: bytes, codec: str | None, levels: int, rows: int) -> tuple[int, ...]:
    """Return the numbers of ``rows`` values in the data pages of a dictionary.

    Files with one row per row group repeat the bytes of these pages many times.
    """
    mapped = np.frombuffer(stored, np.uint8)
    found: list[int] = []
    pages = data_pages(mapped, 0, len(mapped), compressed=codec is not None, by_dictionary=True)
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
            found += _hybrid(body[1:], page.entries, int(body[0])).tolist()
        except _MALFORMED as error:
            raise OtherPagesError from error
    return tuple(found)


def _hybrid(data: Array, count: int, width: int) -> Array:
    """Return ``count`` numbers of ``width`` bits, stored as runs of one number and groups of eight packed ones."""
    numbers = np.empty(count, np.int64)
    done = at = 0
    while done < count:
        head, at = varint(data.data, at)
        run = min(head >> 1, count)
        if head & 1:  # groups of eight, packed from the lowest bit on; the last group may hold more than are wanted
            size = run * width
            bits = np.unpackbits(data[at : at + size], bitorder="little")[: 8 * size].reshape(-1, max(width, 1))
            at += size
            found = bits[: count - done] @ (1 << np.arange(max(width, 1)))
            run = len(found) if width else min(8 * run, count - done)
            numbers[done : done + run] = found if width else 0
        else:
            size = -(-width // 8)
            numbers[done : done + run] = int.from_bytes(data[at : at + size].tobytes(), "little")
            at += size
        if not run:
            raise OtherPagesError
        done += run
    return numbers


def _kinds(expected: Expected, pieces: Array) -> list[_Kind]:
    """Return the kind of each image; images that are alike share one object."""
    kinds: dict[tuple[Any, ...], _Kind] = {}
    found = []
    for shape, dtype, number in zip(expected.shapes.tolist(), expected.dtypes, pieces.tolist(), strict=True):
        key = (*shape, dtype, number)
        if key not in kinds:
            kinds[key] = _Kind(tuple(shape), dtype, number, math.prod(shape) // max(number, 1))
        found.append(kinds[key])
    return found


def _prefixed(body: Array) -> tuple[Array, Array]:
    """Return the bytes after a length prefix of 4 bytes, and the rest."""
    stop = _LENGTH.itemsize + int.from_bytes(body[: _LENGTH.itemsize].tobytes(), "little")
    if stop > len(body):
        raise OtherPagesError
    return body[_LENGTH.itemsize : stop], body[stop:]


def _lengths_stand(data: Array, starts: Array, lengths: Array) -> bool:
    """Whether the length before each value is correct."""
    before = starts[:, None] + np.arange(-_LENGTH.itemsize, 0)
    return bool((data[before].view(_LENGTH)[:, 0] == lengths).all())


def _lists_start(levels: Array, counts: Array, first_pieces: Array) -> bool:
    """Whether repetition levels encode lists of ``counts`` entries: 0 starts an image, 1 a chunk, 2 continues it."""
    starts = np.cumsum(counts) - counts
    wanted = np.full(int(counts.sum()), 2, np.uint8)
    wanted[starts] = 1
    wanted[starts[first_pieces]] = 0
    return bool((_levels(levels, len(wanted)) == wanted).all())


def _levels(data: Array, count: int) -> Array:
    """Return ``count`` levels of 2 bits, stored as runs of one level and groups of eight packed ones."""
    levels = np.empty(count, np.uint8)
    done = at = 0
    while done < count:
        head, at = varint(data.data, at)
        run = head >> 1
        if head & 1:
            bits = np.unpackbits(data[at : at + 2 * run], bitorder="little")[: 2 * (count - done)]
            at += 2 * run
            run = len(bits) // 2
            levels[done : done + run] = bits[::2] + 2 * bits[1::2]
        else:
            levels[done : done + run] = data[at]
            at += 1
        done += run
    return levels
