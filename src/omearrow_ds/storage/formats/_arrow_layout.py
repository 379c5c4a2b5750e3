"""Byte ranges of the buffers of an Arrow IPC file, pixels and others, which pyarrow does not expose.

A footer and the messages before record batches are flat buffers (https://arrow.apache.org/docs/format/Columnar.html).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.byte_source import ByteRange, ObjectFile
from omearrow_ds.storage.formats._image_columns import image_columns

_FOOTER_BYTES = 2**16  # size that covers most footers
_END_BYTES = 10  # the footer's length and the magic number
_MARK = b"ARROW1"
_DICTIONARIES, _BATCHES = 2, 3  # fields of a footer
_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3  # fields of a message, and of a record batch
_CONTINUES = b"\xff\xff\xff\xff"
_PIXELS = ("pixel_bytes", "pixels")
_BINARY = (pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string)
_PLAIN = (pa.types.is_primitive, pa.types.is_fixed_size_binary, pa.types.is_dictionary, pa.types.is_decimal)
_LISTS = (pa.types.is_list, pa.types.is_large_list)


class UnplacedError(FormatError):
    """Raised if buffers cannot be located, because batches are compressed or have columns of unsupported types."""


class ArrowLayout(NamedTuple):
    """Byte ranges of an Arrow file: those of the pixels per record batch, and those of everything else."""

    others: list[ByteRange]
    pixels: list[list[ByteRange]]


class _Block(NamedTuple):
    """A message: its offset, and the sizes of its header and its body."""

    start: int
    header_bytes: int
    body_bytes: int


def layout_of(file: ObjectFile, path: Path) -> ArrowLayout:
    """Return the byte ranges of the buffers of a file.

    Raises `FormatError` if it is not an Arrow IPC file, and `UnplacedError` if it is compressed, or has columns of an
    unsupported type.
    """
    end = bytes(file.read_tail(_FOOTER_BYTES)[-_END_BYTES:])
    if end[4:] != _MARK:
        raise FormatError(
            f"{path}: the end of an Arrow IPC file is missing; the file is incomplete or has another format, restore it"
        )
    footer_bytes = int.from_bytes(end[:4], "little")
    footer = bytes(file.read_tail(footer_bytes + _END_BYTES)[:footer_bytes])
    dictionaries, batches = (_blocks(footer, field) for field in (_DICTIONARIES, _BATCHES))
    known = [block.start for block in (*dictionaries, *batches)]
    others = [(0, min(known, default=file.size_bytes)), (file.size_bytes - footer_bytes - _END_BYTES, file.size_bytes)]
    others += [(block.start, block.start + block.header_bytes + block.body_bytes) for block in dictionaries]
    headers = [(block.start, block.start + block.header_bytes) for block in batches]
    file.cache_ranges([*others, *headers])
    table = pa.ipc.open_file(pa.PythonFile(file, mode="r")).schema
    columns = image_columns(table)
    of_pixels = [flag for field in table for flag in _flags(field, images=field.name in columns, path=path)]
    pixels: list[list[ByteRange]] = []
    for block, header in zip(batches, file.read_ranges(headers), strict=True):
        spans = _buffers(bytes(header), block.start + block.header_bytes, path)
        if len(spans) != len(of_pixels):
            problem = f"a record batch has {len(spans)} buffers, expected {len(of_pixels)}"
            raise FormatError(f"{path}: {problem}; the file is damaged, restore it")
        pixels.append([span for span, flag in zip(spans, of_pixels, strict=True) if flag and span[0] < span[1]])
        others += [span for span, flag in zip(spans, of_pixels, strict=True) if not flag and span[0] < span[1]]
    others += headers
    if any(not 0 <= start <= stop <= file.size_bytes for spans in (others, *pixels) for start, stop in spans):
        raise FormatError(
            f"{path}: {file.size_bytes:,} bytes are fewer than the footer requires; the file is truncated, restore it"
        )
    return ArrowLayout(others, pixels)


def _blocks(footer: bytes, field: int) -> list[_Block]:
    at = flat_field(footer, flat_offset(footer, 0), field)
    if at is None:
        return []
    vector = flat_offset(footer, at)
    (count,) = struct.unpack_from("<I", footer, vector)
    return [_Block(*struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number)) for number in range(count)]


def _buffers(header: bytes, body: int, path: Path) -> list[ByteRange]:
    """Return the byte ranges of the buffers of a record batch whose body starts at ``body``."""
    data = header[8:] if header.startswith(_CONTINUES) else header[4:]
    field_start = flat_field(data, flat_offset(data, 0), _HEADER)
    batch = 0 if field_start is None else flat_offset(data, field_start)
    vector_at = flat_field(data, batch, _BUFFERS)
    if flat_field(data, batch, _COMPRESSION) is not None:
        raise UnplacedError(path=path)
    vector = 0 if vector_at is None else flat_offset(data, vector_at)
    (count,) = struct.unpack_from("<I", data, vector) if vector else (0,)
    bounds = [struct.unpack_from("<qq", data, vector + 4 + 16 * number) for number in range(count)]
    return [(body + start, body + start + length) for start, length in bounds]


def _flags(field: pa.Field, *, images: bool, path: Path, pixels: bool = False) -> Iterator[bool]:
    """Yield for each buffer of a column whether it holds pixels, in the order of the buffers in the file."""
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    pixels |= images and field.name in _PIXELS
    children: list[pa.Field] = []
    if pa.types.is_null(kind):
        return
    if any(is_kind(kind) for is_kind in _BINARY):
        yield from (False, False, pixels)
    elif any(is_kind(kind) for is_kind in _LISTS):
        children = [kind.value_field]
        yield from (False, False)
    elif pa.types.is_map(kind):
        children = [pa.field("entries", pa.struct([kind.key_field, kind.item_field]))]
        yield from (False, False)
    elif pa.types.is_fixed_size_list(kind):
        children = [kind.value_field]
        yield False
    elif pa.types.is_struct(kind):
        children = list(kind)
        yield False
    elif any(is_kind(kind) for is_kind in _PLAIN):
        yield from (False, pixels)
    else:
        raise UnplacedError(path=path)
    for child in children:
        yield from _flags(child, images=images, path=path, pixels=pixels)


def flat_offset(data: bytes, at: int) -> int:
    """Return the target of the offset stored at a position of a flat buffer."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def flat_field(data: bytes, table: int, number: int) -> int | None:
    """Return the position of field ``number`` of a FlatBuffers table, or None if the field is missing."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, entries)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, entries + entry)[0])
    return table + offset if offset else None
