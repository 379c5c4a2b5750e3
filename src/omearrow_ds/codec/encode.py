"""Encoder of images as an OME-Arrow column, in both encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import ImageError

Array = np.ndarray[Any, Any]
_LIST_LIMIT = 2**31 - 1
_CODEC_LEVELS = {"zstd": 1}  # As ome-arrow's authors advise; higher levels take longer to save 1 % of the bytes.
_RESERVED = 2**26  # Initial elements of a group; pages that are not written to take no memory.
_NAMES = {dtype: dtype.name for dtype in schema.DTYPES}  # NumPy computes the name at each access.
_WIDEST_SCALAR = 16  # Bytes of a 128-bit decimal, the largest alignment of any type.


@dataclass(frozen=True)
class Image:
    """One image to store: pixels (T, C, Z, Y, X) in native byte order, id, OME metadata and checksum.

    The memory of ``fleeting`` pixels may be reused as soon as the next image is requested.
    """

    pixels: Array
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
        raise ImageError(
            f"{subject}: shape {pixels.shape} exceeds 2**15 - 1 channels or 2**31 - 1 pixels per axis; split the image"
        )
    if encoding == "list" and pixels.size > _LIST_LIMIT:
        raise ImageError(
            f"{subject}: {pixels.size:,} pixels exceed {_LIST_LIMIT:,}, the list limit; pass encoding='bytes'"
        )


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
    new_group = partial(_Group, encoding, max_rows, min(max_bytes, _LIST_LIMIT), written_at_once=written_at_once)
    for group in _grouped(images, new_group):
        count = len(group.images)
        rest = with_checksums(columns.slice(row, count), [image.checksum for image in group.images])
        yield beside(schema.COLUMN, group.encoded(chunk_codec), rest).combine_chunks()
        row += count


def beside(name: str, column: pa.Array, columns: pa.Table) -> pa.Table:
    """Return a table whose first column is ``column``, named ``name``, followed by ``columns``, which may be empty."""
    first = pa.table({name: column})
    return first if not columns.num_columns else columns.add_column(0, first.schema.field(0), column)


def aligned(columns: pa.Table) -> pa.Table:
    """Return ``columns`` with all buffers aligned to 16 bytes.

    Arrow allows unaligned buffers, for example in memory-mapped files, but Rust libraries panic on them.
    """
    for index, column in enumerate(columns.columns):
        buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
        if any(buffer.address % _WIDEST_SCALAR for buffer in buffers):
            moved = column.take(pa.array(np.arange(len(column))))
            columns = columns.set_column(index, columns.schema.field(index), moved)
    return columns


def with_checksums(columns: pa.Table, checksums: Sequence[str | None]) -> pa.Table:
    """Append the checksums of the images to ``columns`` as the last column, if the images have checksums."""
    if not checksums or checksums[0] is None:
        return columns
    column = pa.array(checksums, pa.string())
    if not columns.num_columns:
        return pa.table({schema.CHECKSUM_COLUMN: column})
    return columns.append_column(schema.CHECKSUM_COLUMN, column)


def _grouped(images: Iterable[Image], new_group: Callable[[], _Group]) -> Iterator[_Group]:
    group = new_group()
    for image in images:
        if group.images and group.nbytes + image.pixels.nbytes > group.max_bytes:
            yield group
            group = new_group()
        group.add(image)
        if len(group.images) == group.max_rows or group.alone:
            yield group
            group = new_group()
    if group.images:
        yield group


class _Group:
    """Images that become the rows of one table.

    Their pixels are copied to one buffer on arrival, so that the caller can reuse the memory. An image that fills the
    group and is not fleeting, or is written before the next is requested, is not copied; then ``alone`` is True.
    """

    def __init__(self, encoding: str, max_rows: int, max_bytes: int, *, written_at_once: bool) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.images: list[Image] = []
        self.nbytes = 0
        self.alone = False
        self._encoding, self._written_at_once = encoding, written_at_once
        self._dtype = np.dtype(np.uint8 if encoding == "bytes" else np.uint16)
        self._buffer, self._used = np.empty(0, self._dtype), 0

    def add(self, image: Image) -> None:
        stays = self._written_at_once or not image.fleeting
        self.alone = not self.images and stays and self._capacity(image.pixels) == 1
        if not self.alone:
            self._lay(image.pixels)
        self.images.append(image)
        self.nbytes += image.pixels.nbytes

    def _capacity(self, pixels: Array) -> int:
        """Return how many images of the size of ``pixels`` fit, at least 1."""
        return max(1, min(self.max_rows, self.max_bytes // pixels.nbytes))

    def _lay(self, pixels: Array) -> None:
        """Append pixels to the buffer, as bytes or widened to uint16."""
        as_bytes = self._encoding == "bytes"
        size = pixels.nbytes if as_bytes else pixels.size
        start, self._used = self._used, self._used + size
        if self._used > len(self._buffer):
            likely = min(size * self._capacity(pixels), _RESERVED)
            buffer = np.empty(max(self._used, 2 * len(self._buffer) or likely), self._dtype)
            buffer[:start] = self._buffer[:start]
            self._buffer = buffer
        target = self._buffer[start : self._used]
        (target.view(pixels.dtype) if as_bytes else target).reshape(pixels.shape)[...] = pixels

    def encoded(self, chunk_codec: str | None) -> pa.StructArray:
        """Return the images as an OME-Arrow struct array, with one chunk per time point and channel."""
        flat = self._buffer[: self._used]
        if self.alone:
            flat = np.require(self.images[0].pixels, requirements=("C", "A")).reshape(-1)
            flat = flat.view(self._dtype) if self._encoding == "bytes" else flat.astype(self._dtype, copy=False)
        return _struct_array(self.images, self._encoding, flat, chunk_codec)


def _struct_array(images: Sequence[Image], encoding: str, flat: Array, chunk_codec: str | None) -> pa.StructArray:
    struct = schema.image_struct(encoding)
    shapes = np.array([image.pixels.shape for image in images], np.int64).reshape(-1, 5)
    children = {
        "type": pa.array([schema.STRUCT_TAG] * len(images), pa.string()),
        "version": pa.array([schema.STRUCT_VERSION] * len(images), pa.string()),
        "id": pa.array([image.image_id for image in images], pa.string()),
        "pixels_meta": pa.array([_pixels_meta(image) for image in images], schema.PIXELS_META),
        "chunk_grid": pa.array([_chunk_grid(shape) for shape in shapes.tolist()], schema.CHUNK_GRID),
        "chunks": _encode_chunks(images, shapes, encoding, flat, chunk_codec),
        "planes": pa.array([[]] * len(images), schema.PLANES),
    }
    for name in ("name", "image_type", "acquisition_datetime"):
        children[name] = pa.array([image.metadata[name] for image in images], struct.field(name).type)
    arrays = [children.get(field.name, pa.nulls(len(images), field.type)) for field in struct]
    return pa.StructArray.from_arrays(arrays, fields=list(struct))


def _pixels_meta(image: Image) -> dict[str, Any]:
    shape = image.pixels.shape
    return {
        **{name: image.metadata[name] for name in (*schema.PHYSICAL_FIELDS, "channels")},
        "dimension_order": "XYCT" if shape[2] == 1 else "XYZCT",
        "type": _NAMES[image.pixels.dtype],
        **{f"size_{axis}": size for axis, size in zip("tczyx", shape, strict=True)},
    }


def _chunk_grid(shape: Sequence[int]) -> dict[str, Any]:
    sizes = {f"chunk_{axis}": size for axis, size in zip("tczyx", (1, 1, *shape[2:]), strict=True)}
    return {"order": "TCZYX", **sizes, "chunk_order": "ZYX"}


def _encode_chunks(
    images: Sequence[Image], shapes: Array, encoding: str, flat: Array, chunk_codec: str | None
) -> pa.ListArray:
    counts = shapes[:, 0] * shapes[:, 1]
    owners = np.repeat(np.arange(len(images)), counts)
    planes = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = {
        "t": planes // shapes[owners, 1],
        "c": planes % shapes[owners, 1],
        **dict.fromkeys("zyx", np.zeros(len(owners), np.int64)),
        **{f"shape_{axis}": shapes[owners, position] for position, axis in enumerate("zyx", start=2)},
    }
    chunk = schema.CHUNKS[encoding].value_type
    arrays = [pa.array(positions[name], chunk.field(name).type) for name in schema.CHUNK_PLACE]
    lengths = shapes[owners, 2:].prod(axis=1)
    if encoding == "bytes":
        names = [_NAMES[image.pixels.dtype] for image in images]
        itemsizes = np.array([image.pixels.itemsize for image in images], np.int64)[owners]
        offsets, compressions = _offsets(lengths * itemsizes, np.int64), pa.nulls(len(owners), pa.string())
        if chunk_codec is not None:
            compressions = pa.array([chunk_codec] * len(owners), pa.string())
            offsets, flat = _compressed(flat, offsets, chunk_codec)
        arrays += [pa.array([names[index] for index in owners], pa.string()), compressions, binary(offsets, flat)]
    else:
        offsets = pa.array(_offsets(lengths, np.int32))
        arrays.append(pa.ListArray.from_arrays(offsets, pa.array(flat)))
    chunks = pa.StructArray.from_arrays(arrays, fields=list(chunk))
    return pa.ListArray.from_arrays(pa.array(_offsets(counts, np.int32)), chunks)


def _offsets(lengths: Array, dtype: type) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def _compressed(flat: Array, offsets: Array, name: str) -> tuple[Array, Array]:
    """Compress the pieces of ``flat`` between ``offsets`` separately; return the new offsets and the joined bytes."""
    codec = pa.Codec(name, compression_level=_CODEC_LEVELS.get(name))
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    pieces = [np.frombuffer(codec.compress(flat[start:stop]), np.uint8) for start, stop in bounds]
    return _offsets(np.array([len(piece) for piece in pieces], np.int64), np.int64), np.concatenate([flat[:0], *pieces])


def binary(offsets: Array, data: Array) -> pa.Array:
    """Return an Arrow large binary array of ``data`` (uint8) with ``offsets`` (int64), without a copy."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
