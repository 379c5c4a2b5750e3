"""OME-Arrow column <-> arrays, both encodings: the only place that encodes or decodes pixels.

Decoding works on the flat buffers below an Arrow array: offsets say where an image's pixels lie, and no Python object
is made of a pixel. What ``ome_arrow.to_numpy`` gives is the definition of right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds import schema
from omearrow_ds.decode import Expected, ImageBlock, placed_chunks
from omearrow_ds.errors import ImageError

__all__ = [
    "Expected",
    "Image",
    "ImageBlock",
    "beside",
    "check_image",
    "encode",
    "encode_tables",
    "placed_chunks",
    "with_checksums",
]

Array = np.ndarray[Any, Any]
_LIST_LIMIT = 2**31 - 1
_WIDEST_SCALAR = 16  # bytes, of a 128-bit decimal; an address that it divides suits every type


@dataclass(frozen=True)
class Image:
    """One image to be stored: pixels (T, C, Z, Y, X) of native byte order, its id, its OME metadata, its checksum."""

    pixels: Array
    image_id: str
    metadata: Mapping[str, Any]
    checksum: str | None = None


def check_image(image: Image, encoding: str, where: str) -> None:
    """Raise `ImageError` if ``encoding`` cannot hold the image exactly."""
    pixels = image.pixels
    allowed = schema.LIST_DTYPES if encoding == "list" else schema.DTYPES
    if pixels.dtype not in allowed:
        names = ", ".join(dtype.name for dtype in allowed)
        remedy = "; use encoding='bytes'" if pixels.dtype in schema.DTYPES else "; convert it first"
        raise ImageError(
            f"{where}: dtype {pixels.dtype} cannot be stored with encoding={encoding!r}, only {names}{remedy}"
        )
    if pixels.shape[1] > np.iinfo(np.int16).max or max(pixels.shape) > _LIST_LIMIT:
        raise ImageError(f"{where}: shape {pixels.shape} exceeds OME-Arrow's sizes (C: int16, others: int32)")
    if encoding == "list" and pixels.size > _LIST_LIMIT:
        raise ImageError(f"{where}: {pixels.size} pixels exceed one Arrow list; use encoding='bytes'")


def encode_tables(
    images: Iterable[Image], columns: pa.Table, encoding: str, *, max_rows: int, max_bytes: int
) -> Iterator[pa.Table]:
    """Yield tables of at most ``max_rows`` images and about ``max_bytes`` of pixels, the image column first.

    Row ``i`` of ``columns`` goes with image ``i``. A batch never exceeds what one Arrow list can hold.
    """
    row, columns = 0, aligned(columns)
    for batch in _batches(images, max_rows, min(max_bytes, _LIST_LIMIT)):
        column = encode(batch, encoding)
        rest = with_checksums(columns.slice(row, len(batch)), [image.checksum for image in batch])
        yield beside(schema.COLUMN, column, rest).combine_chunks()
        row += len(batch)


def beside(name: str, column: pa.Array, columns: pa.Table) -> pa.Table:
    """Return a table of ``column`` under ``name`` and then ``columns``, which may have no column at all."""
    first = pa.table({name: column})
    return first if not columns.num_columns else columns.add_column(0, first.schema.field(0), column)


def aligned(columns: pa.Table) -> pa.Table:
    """Return ``columns`` with each buffer where a scalar of any type may lie.

    Arrow lets buffers lie anywhere, and those of a mapped file may; libraries written in Rust panic over them.
    """
    for place, column in enumerate(columns.columns):
        buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
        if any(buffer.address % _WIDEST_SCALAR for buffer in buffers):
            moved = column.take(pa.array(np.arange(len(column))))
            columns = columns.set_column(place, columns.schema.field(place), moved)
    return columns


def with_checksums(columns: pa.Table, checksums: Sequence[str | None]) -> pa.Table:
    """Return ``columns`` with a last one of the images' checksums, if they have any."""
    if not checksums or checksums[0] is None:
        return columns
    column = pa.array(checksums, pa.string())
    if not columns.num_columns:
        return pa.table({schema.CHECKSUM_COLUMN: column})
    return columns.append_column(schema.CHECKSUM_COLUMN, column)


def _batches(images: Iterable[Image], max_rows: int, max_bytes: int) -> Iterator[list[Image]]:
    batch: list[Image] = []
    held_bytes = 0
    for image in images:
        if batch and (len(batch) == max_rows or held_bytes + image.pixels.nbytes > max_bytes):
            yield batch
            batch, held_bytes = [], 0
        batch.append(image)
        held_bytes += image.pixels.nbytes
    if batch:
        yield batch


def encode(images: Sequence[Image], encoding: str) -> pa.StructArray:
    """Return the images as an OME-Arrow struct array, one chunk for each (t, c), whole in Z, Y and X."""
    struct = schema.image_struct(encoding)
    shapes = np.array([image.pixels.shape for image in images], np.int64).reshape(-1, 5)
    children = {
        "type": pa.array([schema.STRUCT_TAG] * len(images), pa.string()),
        "version": pa.array([schema.STRUCT_VERSION] * len(images), pa.string()),
        "id": pa.array([image.image_id for image in images], pa.string()),
        "pixels_meta": pa.array([_pixels_meta(image) for image in images], schema.PIXELS_META),
        "chunk_grid": pa.array([_chunk_grid(shape) for shape in shapes.tolist()], schema.CHUNK_GRID),
        "chunks": _encode_chunks(images, shapes, encoding),
        "planes": pa.array([[]] * len(images), schema.PLANES),
    }
    for name in ("name", "image_type", "acquisition_datetime"):
        children[name] = pa.array([image.metadata[name] for image in images], struct.field(name).type)
    arrays = [children.get(field.name, pa.nulls(len(images), field.type)) for field in struct]
    return pa.StructArray.from_arrays(arrays, fields=list(struct))


def _pixels_meta(image: Image) -> dict[str, Any]:
    size_t, size_c, size_z, size_y, size_x = image.pixels.shape
    return {
        **{name: image.metadata[name] for name in (*schema.PHYSICAL_FIELDS, "channels")},
        "dimension_order": "XYCT" if size_z == 1 else "XYZCT",
        "type": image.pixels.dtype.name,
        "size_x": size_x,
        "size_y": size_y,
        "size_z": size_z,
        "size_c": size_c,
        "size_t": size_t,
    }


def _chunk_grid(shape: Sequence[int]) -> dict[str, Any]:
    _, _, size_z, size_y, size_x = shape
    sizes = {"chunk_t": 1, "chunk_c": 1, "chunk_z": size_z, "chunk_y": size_y, "chunk_x": size_x}
    return {"order": "TCZYX", **sizes, "chunk_order": "ZYX"}


def _encode_chunks(images: Sequence[Image], shapes: Array, encoding: str) -> pa.ListArray:
    counts = shapes[:, 0] * shapes[:, 1]
    each = np.repeat(np.arange(len(images)), counts)
    number = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = {
        "t": number // shapes[each, 1],
        "c": number % shapes[each, 1],
        **dict.fromkeys("zyx", np.zeros(len(each), np.int64)),
        **{f"shape_{axis}": shapes[each, position] for position, axis in enumerate("zyx", start=2)},
    }
    chunk = schema.CHUNKS[encoding].value_type
    arrays = [pa.array(places[name], chunk.field(name).type) for name in schema.CHUNK_PLACE]
    lengths = shapes[each, 2:].prod(axis=1)
    if encoding == "bytes":
        names = [image.pixels.dtype.name for image in images]
        itemsizes = np.array([image.pixels.itemsize for image in images], np.int64)[each]
        arrays += [
            pa.array([names[index] for index in each], pa.string()),
            pa.nulls(len(each), pa.string()),
            _binary(_offsets(lengths * itemsizes, np.int64), _flat(images, np.uint8)),
        ]
    else:
        offsets = pa.array(_offsets(lengths, np.int32))
        arrays.append(pa.ListArray.from_arrays(offsets, pa.array(_flat(images, np.uint16))))
    chunks = pa.StructArray.from_arrays(arrays, fields=list(chunk))
    return pa.ListArray.from_arrays(pa.array(_offsets(counts, np.int32)), chunks)


def _offsets(lengths: Array, dtype: type) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def _flat(images: Sequence[Image], dtype: type) -> Array:
    """Return the images' pixels end to end: their bytes (uint8), or their values widened to uint16."""
    flat = (np.require(image.pixels, requirements=("C", "A")).reshape(-1) for image in images)
    if dtype is np.uint8:
        flat = (pixels.view(np.uint8) for pixels in flat)
    parts = list(flat)
    return np.concatenate(parts, dtype=dtype) if len(parts) != 1 else parts[0].astype(dtype, copy=False)


def _binary(offsets: Array, data: Array) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
