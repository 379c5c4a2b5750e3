"""Encoder of images as an OME-Arrow column, in both encodings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import Array
from omearrow_ds.codec import schema
from omearrow_ds.errors import ImageError

_LIST_LIMIT = 2**31 - 1
_CODEC_LEVELS = {"zstd": 1}  # As ome-arrow's authors advise; higher levels take longer to save 1 % of the bytes.
_RESERVED = 2**26  # Initial elements of a group; pages that are not written to take no memory.
_NAMES = {dtype: dtype.name for dtype in schema.DTYPES}  # NumPy computes the name at each access.
_GRID = {"order": "TCZYX", "chunk_t": 1, "chunk_c": 1, "chunk_order": "ZYX"}
_GRID_SIZES = tuple(f"chunk_{axis}" for axis in "zyx")
_SIZES = tuple(f"size_{axis}" for axis in "tczyx")
_WIDEST_SCALAR = 16  # Bytes of a 128-bit decimal, the largest alignment of any type.


@dataclass(slots=True)
class Image:
    """One image to store; the memory of ``fleeting`` pixels may be reused as soon as the next image is requested."""

    pixels: Array  # (T, C, Z, Y, X), in native byte order.
    image_id: str
    metadata: Mapping[str, Any]
    checksum: str | None = None
    fleeting: bool = False


def check_image(image: Image, encoding: str, subject: str) -> None:
    pixels = image.pixels
    allowed = schema.LIST_DTYPES if encoding == "list" else schema.DTYPES
    if pixels.dtype not in allowed:
        names = ", ".join(dtype.name for dtype in allowed)
        remedy = "pass encoding='bytes'" if pixels.dtype in schema.DTYPES else "convert the image first"
        problem = f"dtype {pixels.dtype} cannot be stored with encoding={encoding!r}, expected {names}"
        raise ImageError(f"{subject}: {problem}; {remedy}")
    if pixels.shape[1] > np.iinfo(np.int16).max or max(pixels.shape) > _LIST_LIMIT:
        problem = f"shape {pixels.shape} exceeds 2**15 - 1 channels or 2**31 - 1 pixels per axis"
        raise ImageError(f"{subject}: {problem}; split the image")
    if encoding == "list" and pixels.size > _LIST_LIMIT:
        problem = f"{pixels.size:,} pixels exceed {_LIST_LIMIT:,}, the list limit"
        raise ImageError(f"{subject}: {problem}; pass encoding='bytes'")


def encode_tables(
    images: Iterable[Image],
    columns: pa.Table,
    encoding: str,
    *,
    max_rows: int,
    max_bytes: int,
    written_at_once: bool = False,
    chunk_codec: str | None = None,
) -> Iterator[pa.Table]:
    """Yield tables of at most ``max_rows`` images and about ``max_bytes`` of pixels, the image column first.

    Row ``i`` of ``columns`` belongs to image ``i``. A table never exceeds the limit of one Arrow list. With
    ``written_at_once``, the caller writes each table before it requests the next, so a large image is not buffered.

    With a ``chunk_codec`` of Arrow, each chunk of encoding bytes is compressed separately, like in ome-arrow.
    """
    row, columns = 0, aligned(columns)
    for group, flat in _grouped(images, encoding, max_rows, min(max_bytes, _LIST_LIMIT), written_at_once):
        structs, checksums = _struct_array(group, encoding, flat, chunk_codec), [image.checksum for image in group]
        yield table_of(schema.COLUMN, structs, columns.slice(row, len(group)), checksums).combine_chunks()
        row += len(group)


def table_of(name: str, first: pa.Array, columns: pa.Table, checksums: Sequence[str | None]) -> pa.Table:
    """Return a table of a first column, other ``columns``, which may be empty, and checksums, if images have them."""
    arrays = {name: first, **dict(zip(columns.column_names, columns.columns, strict=True))}
    if checksums and checksums[0] is not None:
        arrays[schema.CHECKSUM_COLUMN] = pa.array(checksums, pa.string())
    return pa.table(arrays)


def aligned(columns: pa.Table) -> pa.Table:
    """Return ``columns`` with buffers aligned to 16 bytes, because Rust libraries panic on others."""
    for index, column in enumerate(columns.columns):
        buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
        if any(buffer.address % _WIDEST_SCALAR for buffer in buffers):
            moved = column.take(pa.array(np.arange(len(column))))
            columns = columns.set_column(index, columns.schema.field(index), moved)
    return columns


def _grouped(
    images: Iterable[Image], encoding: str, max_rows: int, max_bytes: int, written_at_once: bool
) -> Iterator[tuple[list[Image], Array]]:
    """Yield the images of each table, and their pixels in one flat array, as bytes or widened to uint16.

    Pixels are copied on arrival, so that the caller can reuse the memory, unless one image fills a table.
    """
    as_bytes, dtype = encoding == "bytes", np.dtype(np.uint8 if encoding == "bytes" else np.uint16)
    group: list[Image] = []
    buffer, used, group_bytes = np.empty(0, dtype), 0, 0
    for image in images:
        pixels = image.pixels
        if group and (len(group) == max_rows or group_bytes + pixels.nbytes > max_bytes):
            yield group, buffer[:used]
            group, buffer, used, group_bytes = [], np.empty(0, dtype), 0, 0
        num_fitting = max(1, min(max_rows, max_bytes // pixels.nbytes))
        if not group and num_fitting == 1 and (written_at_once or not image.fleeting):
            flat = np.require(pixels, requirements=("C", "A")).reshape(-1)
            yield [image], flat.view(dtype) if as_bytes else flat.astype(dtype, copy=False)
            continue
        size = pixels.nbytes if as_bytes else pixels.size
        if used + size > len(buffer):
            larger = np.empty(max(used + size, 2 * len(buffer) or min(size * num_fitting, _RESERVED)), dtype)
            larger[:used] = buffer[:used]
            buffer = larger
        target = buffer[used:][:size]
        (target.view(pixels.dtype) if as_bytes else target).reshape(pixels.shape)[...] = pixels
        group.append(image)
        used, group_bytes = used + size, group_bytes + pixels.nbytes
    if group:
        yield group, buffer[:used]


def _struct_array(images: Sequence[Image], encoding: str, flat: Array, chunk_codec: str | None) -> pa.StructArray:
    """Return images as an OME-Arrow struct array, with one chunk per time point and channel."""
    struct, count = schema.image_struct(encoding), len(images)
    arrays = {
        "type": pa.repeat(schema.STRUCT_TAG, count),
        "version": pa.repeat(schema.STRUCT_VERSION, count),
        "id": pa.array([image.image_id for image in images], pa.string()),
        "pixels_meta": pa.array([*map(_pixels_meta, images)], schema.PIXELS_META),
        "chunk_grid": pa.array(
            [_GRID | dict(zip(_GRID_SIZES, image.pixels.shape[2:], strict=True)) for image in images], schema.CHUNK_GRID
        ),
        "chunks": _encode_chunks(images, encoding, flat, chunk_codec),
        "planes": pa.array([[]] * count, schema.PLANES),
        "masks": pa.nulls(count),
    }
    for field in struct:
        if field.name not in arrays:
            arrays[field.name] = pa.array([image.metadata[field.name] for image in images], field.type)
    return pa.StructArray.from_arrays([arrays[name] for name in struct.names], fields=list(struct))


def _pixels_meta(image: Image) -> dict[str, Any]:
    """Return sizes, dtype and metadata of the pixels; Arrow ignores keys that are not fields."""
    shape = image.pixels.shape
    order = "XYCT" if shape[2] == 1 else "XYZCT"
    sizes = dict(zip(_SIZES, shape, strict=True))
    return {**image.metadata, **sizes, "dimension_order": order, "type": _NAMES[image.pixels.dtype]}


def _encode_chunks(images: Sequence[Image], encoding: str, flat: Array, chunk_codec: str | None) -> pa.ListArray:
    shapes = np.array([image.pixels.shape for image in images], np.int64).reshape(-1, 5)
    counts, chunk = shapes[:, 0] * shapes[:, 1], schema.CHUNKS[encoding].value_type
    owners = np.repeat(np.arange(len(images)), counts)
    planes = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    zeros, (_, size_c, *sizes) = np.zeros(len(owners), np.int64), shapes.T.take(owners, axis=1)
    positions = [planes // size_c, planes % size_c, zeros, zeros, zeros, *sizes]
    arrays = [pa.array(values, kind) for values, kind in zip(positions, schema.CHUNK_PLACE.values(), strict=True)]
    lengths = sizes[0] * sizes[1] * sizes[2]
    if encoding == "bytes":
        names, itemsizes = zip(*((_NAMES[image.pixels.dtype], image.pixels.itemsize) for image in images), strict=True)
        offsets, compressions = _offsets(lengths * np.array(itemsizes)[owners]), pa.nulls(len(owners), pa.string())
        if chunk_codec is not None:
            compressions = pa.repeat(chunk_codec, len(owners))
            offsets, flat = _compressed(flat, offsets, chunk_codec)
        dtypes = pa.array([names[owner] for owner in owners.tolist()], pa.string())
        arrays += [dtypes, compressions, binary(offsets, flat)]
    else:
        arrays.append(pa.ListArray.from_arrays(pa.array(_offsets(lengths), pa.int32()), pa.array(flat)))
    chunks = pa.StructArray.from_arrays(arrays, fields=list(chunk))
    return pa.ListArray.from_arrays(pa.array(_offsets(counts), pa.int32()), chunks)


def _offsets(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def _compressed(flat: Array, offsets: Array, name: str) -> tuple[Array, Array]:
    """Compress the pieces of ``flat`` between ``offsets`` separately; return the new offsets and the joined bytes."""
    codec = pa.Codec(name, compression_level=_CODEC_LEVELS.get(name))
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    pieces = [np.frombuffer(codec.compress(flat[start:stop]), np.uint8) for start, stop in bounds]
    return _offsets(np.array([*map(len, pieces)])), np.concatenate([flat[:0], *pieces])


def binary(offsets: Array, data: Array) -> pa.Array:
    """Return an Arrow large binary array of ``data`` (uint8) with ``offsets`` (int64), without a copy."""
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
