"""Data page headers of a Parquet column chunk: the byte range and encoding of each page's values.

Parquet libraries do not expose them. A header is a struct in Thrift's compact protocol; only the parts that page
headers use are read here. All other content raises `OtherLayoutError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from omearrow_ds.storage.byte_source import ByteSource
from omearrow_ds.storage.image_extents import OtherLayoutError

ReadRange = Callable[[int, int], memoryview]

HEADER_BYTES = 256  # Limit of headers in objects; larger ones, with statistics of other writers, are rejected.
_HEADER_LIMIT_BYTES = 2**20
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_FIELD_OF_PAGE = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}
_RLE = 3
# Encodings of values, of indices of a dictionary, and of its values; 2 is the former name of two others.
PLAIN, BY_DICTIONARY, DICTIONARY = (0,), (2, 8), (0, 2)
_VARINT_BITS = 64
_INT32_LIMIT = 2**31
_BOOLEANS, _INTEGERS, _BINARY, _STRUCT = (1, 2), (4, 5, 6), 8, 12  # field types of Thrift's compact protocol
_MALFORMED = (IndexError, KeyError, TypeError, ValueError)


def header_reader(file: ByteSource) -> ReadRange:
    """Return a function that reads the bytes of a page header between a start and a stop offset."""
    if file.data is not None:
        data = file.data.data
        return lambda start, stop: data[start : min(start + _HEADER_LIMIT_BYTES, stop)]
    return lambda start, stop: file.read_ranges([(start, min(start + HEADER_BYTES, stop))])[0]


class Page(NamedTuple):
    """Body of a data page and its number of entries; pages of version 2 also state their level bytes and nulls."""

    start: int
    stop: int
    plain_bytes: int
    entries: int
    level_bytes: tuple[int, int] | None
    nulls: int | None
    compressed: bool


def varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return a number of Thrift's compact protocol, and its end."""
    value = data[position]
    shift = 7
    while value >> shift:  # the top bit of the last byte states that the number continues
        if shift > _VARINT_BITS:
            raise OtherLayoutError
        position += 1
        value = value - (1 << shift) + (data[position] << shift)
        shift += 7
    return value, position + 1


def _struct(data: memoryview, position: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct of Thrift's compact protocol by number, and its end."""
    # Only the types in page headers are supported; binary fields are skipped.
    fields: dict[int, Any] = {}
    number = 0
    while head := data[position]:
        step, kind = head >> 4, head & 0x0F
        number += step
        position += 1
        if not step:  # the number would follow, which no page header needs
            raise OtherLayoutError
        if kind in _INTEGERS:
            value, position = varint(data, position)
            fields[number] = (value >> 1) ^ -(value & 1)
        elif kind in _BOOLEANS:
            fields[number] = kind == _BOOLEANS[0]
        elif kind == _BINARY:
            length, position = varint(data, position)
            position += length
        elif kind == _STRUCT and depth < 3:
            fields[number], position = _struct(data, position, depth + 1)
        else:
            raise OtherLayoutError
    return fields, position + 1


def iter_pages(
    read: ReadRange, start: int, stop: int, *, compressed: bool, encodings: tuple[int, ...] = PLAIN
) -> Iterator[Page]:
    """Yield the pages that fill a column chunk from ``start`` to ``stop``: data pages, or those of a dictionary."""
    # Raises `OtherLayoutError` if there are other pages, or the encoding of values is not one of ``encodings``.
    try:
        while start < stop:
            header, length = _struct(read(start, stop), 0)
            page = _page(header, start + length, encodings, compressed=compressed)
            if not start < page.start <= page.stop <= stop:
                raise OtherLayoutError
            yield page
            start = page.stop
    except _MALFORMED as error:
        raise OtherLayoutError from error


def _page(header: dict[int, Any], start: int, encodings: tuple[int, ...], *, compressed: bool) -> Page:
    kind, plain_bytes, stored_bytes = header[1], header[2], header[3]
    fields = header[_FIELD_OF_PAGE[kind]]
    entries, encoding = fields[1], fields[4 if kind == _DATA_PAGE_V2 else 2]
    known = encoding in encodings and (kind == _DICTIONARY_PAGE) == (encodings == DICTIONARY)
    level_bytes = nulls = None
    if kind == _DATA_PAGE:
        known = known and fields[3] == fields[4] == _RLE
    elif kind == _DATA_PAGE_V2:
        nulls, level_bytes = fields[2], (fields[6], fields[5])
        known = known and min(nulls, *level_bytes) >= 0
        compressed &= fields.get(7, True)
    known = known and 0 < entries < _INT32_LIMIT and 0 <= plain_bytes < _INT32_LIMIT
    if not known or (plain_bytes != stored_bytes and not compressed):
        raise OtherLayoutError
    return Page(start, start + stored_bytes, plain_bytes, entries, level_bytes, nulls, compressed)
