"""Pixel leaves of an OME-Arrow column: `ByteLeaf` for typed bytes, `ListLeaf` for lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import lib, types

from omearrow_ds.codec import schema
from omearrow_ds.errors import DecodeError

Array = np.ndarray[Any, Any]
NO_COMPRESSION = (None, "", "none")
_INT64_LIMIT = 2.0**63
_CAST_TYPES = (lib.Type_NA, lib.Type_FIXED_SIZE_BINARY, lib.Type_BINARY)  # Bytes to cast to large binary.
_TEXT_TYPES = (lib.Type_NA, lib.Type_STRING, lib.Type_LARGE_STRING, lib.Type_STRING_VIEW)
# Zero-copy array of numbers without nulls. Arrow's `to_numpy` would import pandas, which takes 0.3 s.
numbers: Callable[[pa.Array], Array] = np.from_dlpack


class ListLeaf:
    """Pixels as lists of numbers. Lists of a list view may be scattered; then each piece must be sliced separately."""

    _has_bytes = False  # Whether positions are those of bytes.
    _nulls: Array | None = None

    def __init__(self, structs: pa.StructArray, subject: str) -> None:
        lists = child(structs, "pixels", subject)
        self._valid = None if lists.null_count == 0 else flags(lists.is_valid())
        self._is_scattered = is_list_view(lists.type)
        self.starts, self.stops, values = list_bounds(lists, f"{subject}: pixels")
        self._nulls = flags(values.is_null()) if values.null_count else None
        self._data = _numbers(values, subject)

    def has(self, piece: int) -> bool:
        """Whether this leaf stores the pixels of the piece, that is, its value is not null."""
        return self._valid is None or bool(self._valid[piece])

    def holds(self, pieces: Array, counts: Array, itemsizes: Array) -> Array:
        """Return one bool per piece: whether it stores ``counts`` contiguous pixels without nulls, as `run` needs."""
        if self._is_scattered:
            return np.zeros(len(pieces), bool)
        good: Array = self.stops[pieces] - self.starts[pieces] == (counts * itemsizes if self._has_bytes else counts)
        if self._valid is not None:
            good &= self._valid[pieces]
        if self._nulls is not None:
            before = np.concatenate([[0], np.cumsum(self._nulls)])
            good &= before[self.stops[pieces]] == before[self.starts[pieces]]
        return good

    def run(self, first: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` pixels from the start of piece ``first``; stored bytes are viewed as ``dtype``."""
        start = self.starts[first]
        if self._has_bytes:
            return self._data[start : start + count * dtype.itemsize].view(dtype)
        return self._data[start : start + count]

    def piece(self, piece: int, count: int, dtype: np.dtype[Any], subject: str) -> Array:  # noqa: ARG002  # Of bytes.
        bounds = slice(self.starts[piece], self.stops[piece])
        if self._nulls is not None and self._nulls[bounds].any():
            raise DecodeError(f"{subject}: a pixel is null; correct the column")
        return self._data[bounds]


class ByteLeaf(ListLeaf):
    """Pixels as typed bytes: ``pixel_bytes`` with a dtype and a compression per piece.

    Scattered ones (views, a dictionary) are copied to be contiguous if they take at most ``decoded_bytes``. Otherwise
    each piece is read separately, as views can repeat small data.
    """

    _has_bytes = True

    def __init__(self, structs: pa.StructArray, subject: str, decoded_bytes: Callable[[], float]) -> None:
        payload = child(structs, "pixel_bytes", subject)
        viewed_bytes = _viewed_bytes(payload)
        self._is_scattered = viewed_bytes is not None and viewed_bytes > decoded_bytes()
        if (viewed_bytes is not None and not self._is_scattered) or payload.type.id in _CAST_TYPES:
            payload = payload.cast(pa.large_binary())
        if types.is_large_binary(payload.type):
            _, offsets, data = payload.buffers()
            bounds: Array = _from_buffer(offsets, np.int64, at_least=1)
            bounds = bounds[payload.offset : payload.offset + len(payload) + 1]
            self.starts, self.stops, self._data = bounds[:-1], bounds[1:], _from_buffer(data, np.uint8)
        elif self._is_scattered:
            self._payload = payload
        else:
            raise DecodeError(f"{subject}: pixel_bytes has the type {payload.type}, expected binary; cast it")
        self._valid = None if payload.null_count == 0 else flags(payload.is_valid())
        self._dtypes, self._compressions = (
            child(structs, name, subject) if structs.type.get_all_field_indices(name) else None
            for name in ("dtype", "compression")
        )

    def piece(self, piece: int, count: int, dtype: np.dtype[Any], subject: str) -> Array:
        name = _text(self._dtypes, piece, f"{subject}: dtype")
        stored = schema.pixel_dtype(name, subject, schema.CHUNK_DTYPES) if name else dtype
        compression = _text(self._compressions, piece, f"{subject}: compression")
        if self._is_scattered:
            scalar = self._payload[piece]
            scalar = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
            payload = np.frombuffer(scalar.as_buffer(), np.uint8)
        else:
            payload = self._data[self.starts[piece] : self.stops[piece]]
        if compression is not None and compression.strip().lower() not in NO_COMPRESSION:
            payload = decompress(payload, compression, count * stored.itemsize, subject)
        if len(payload) % stored.itemsize:
            problem = f"{len(payload):,} bytes are not a multiple of {stored.itemsize}, the size of {stored}"
            raise DecodeError(f"{subject}: {problem}; the file is damaged, restore it")
        return payload.view(stored)


def decompress(stored: Array, compression: str, size_bytes: int, subject: str) -> Array:
    """Return the decompressed bytes of ``stored``, which must be exactly ``size_bytes``.

    Most codecs of Arrow leave memory uninitialized if the length is too large, so decompression to less must fail.
    """
    data = pa.py_buffer(stored)
    try:
        codec = pa.Codec(compression)
        plain = codec.decompress(data, size_bytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"{compression!r} bytes cannot be decompressed: {error}"
        raise DecodeError(f"{subject}: {problem}; the file is damaged, restore it") from error
    if _decompresses_to_less(codec, data, size_bytes):
        problem = f"{compression!r} bytes decompress to fewer than {size_bytes:,} bytes"
        raise DecodeError(f"{subject}: {problem}; the file is damaged, restore it")
    return np.frombuffer(plain, np.uint8)


def _decompresses_to_less(codec: pa.Codec, data: pa.Buffer, size_bytes: int) -> bool:
    if codec.name == "zstd":  # It checks the length.
        return False
    try:
        if size_bytes == 1 and codec.name == "gzip":  # Decompression to 0 bytes always succeeds.
            return not pa.CompressedInputStream(pa.BufferReader(data), codec.name).read(1)
        codec.decompress(data, size_bytes - 1)
    except (pa.ArrowException, OSError):
        return False
    return True


def cast(pixels: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``pixels`` as native ``dtype``; values wrap or round like in ``ndarray.astype``."""
    if pixels.dtype == dtype and dtype.isnative:
        return pixels
    with np.errstate(invalid="ignore", over="ignore"):
        return pixels.astype(dtype.newbyteorder("="), copy=False)


def _numbers(values: pa.Array, subject: str) -> Array:
    """Return numbers as an array; floats become float64 like in Python, and nulls become 0."""
    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if types.is_null(kind):
        return np.zeros(len(values), np.uint16)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DecodeError(f"{subject}: pixels have the type {values.type}, expected numbers; correct the column")
    values = values.dictionary_decode() if types.is_dictionary(values.type) else values
    values = values.fill_null(False if types.is_boolean(kind) else 0) if values.null_count else values
    data = flags(values) if types.is_boolean(kind) else numbers(values)
    return data.astype(np.float64, copy=False) if types.is_floating(kind) else data


def flags(values: pa.Array) -> Array:
    return numbers(values.cast(pa.uint8())).astype(bool)


def among(column: pa.Array, texts: Collection[str | None]) -> Array:
    """Return one bool per row: whether its value is in ``texts``. All are False if the column is not of strings."""
    if not is_text(column.type):
        return np.zeros(len(column), bool)
    column = column if column.type == pa.string() else column.cast(pa.string())
    encoded = column.dictionary_encode(null_encoding="encode")
    encoded_texts = {text if text is None else text.encode() for text in texts}
    known = list(map(encoded_texts.__contains__, encoded.dictionary.cast(pa.binary()).to_pylist()))
    return np.array(known, bool)[numbers(encoded.indices)]


def whole_numbers(field: pa.Array) -> Array:
    """Return sizes or coordinates as int64; nulls, fractions, too large numbers and other types become negative."""
    field = field.dictionary_decode() if types.is_dictionary(field.type) else field
    if types.is_floating(field.type):
        values = field.to_numpy(zero_copy_only=False).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.where((values == np.floor(values)) & (abs(values) < _INT64_LIMIT), values, -1).astype(np.int64)
    if not (types.is_integer(field.type) or types.is_boolean(field.type)):
        return np.full(len(field), -1, np.int64)
    if field.null_count or not types.is_integer(field.type):
        field = pc.fill_null(field.cast(pa.int64(), safe=False), -1)
    return numbers(field).astype(np.int64, copy=False)


def child(structs: pa.StructArray, name: str, subject: str) -> pa.Array:
    """Return a field of structs, or raise `DecodeError` if it is missing or duplicated."""
    position = structs.type.get_field_index(name)
    if position < 0:
        names = ", ".join(field.name for field in structs.type) or "no fields"
        raise DecodeError(f"{subject}: expected exactly one field {name!r} among {names}; correct the column")
    return structs.field(position)


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a string type, a dictionary of strings, or null."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return kind.id in _TEXT_TYPES


def _text(column: pa.Array | None, row: int, name: str) -> str | None:
    if column is None:
        return None
    if not is_text(column.type):
        raise DecodeError(f"{name} has the type {column.type}, expected a string; correct the column")
    try:
        text: str | None = column[row].as_py()
    except UnicodeDecodeError as error:
        raise DecodeError(f"{name} is not UTF-8 text: {error}; correct the column") from error
    return text


def _viewed_bytes(payload: pa.Array) -> int | None:
    """Return the size in bytes that a dictionary or views of binary values would have if contiguous, else None."""
    kind = payload.type
    if types.is_dictionary(kind) and (types.is_binary(kind.value_type) or types.is_large_binary(kind.value_type)):
        lengths = pc.binary_length(payload.dictionary).take(payload.indices).cast(pa.int64())
        return pc.sum(lengths, min_count=0).as_py() or 0
    if not types.is_binary_view(kind):
        return None
    viewed: Array = _from_buffer(payload.buffers()[1], np.int32)[::4][payload.offset : payload.offset + len(payload)]
    return int(viewed.sum(dtype=np.int64))


def is_list_view(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list view, whose values may be scattered."""
    return bool(types.is_list_view(kind) or types.is_large_list_view(kind))


def _from_buffer(buffer: pa.Buffer | None, dtype: type, at_least: int = 0) -> Array:
    """Return an Arrow buffer as an array, or ``at_least`` zeros if it is missing or empty."""
    return np.frombuffer(buffer, dtype) if buffer is not None and buffer.size else np.zeros(at_least, dtype)


def list_bounds(lists: pa.Array, name: str) -> tuple[Array, Array, pa.Array]:
    """Return the start and stop of each list in the flat array of all list values, and this flat array."""
    if types.is_null(lists.type):
        starts = stops = np.zeros(len(lists), np.int64)
        return starts, stops, pa.nulls(0)
    if types.is_list(lists.type) or types.is_large_list(lists.type):
        offsets = numbers(lists.offsets)
        starts, stops = offsets[:-1], offsets[1:]
    elif types.is_fixed_size_list(lists.type):
        starts = (np.arange(len(lists)) + lists.offset) * lists.type.list_size
        stops = starts + lists.type.list_size
    elif is_list_view(lists.type):
        starts = numbers(lists.offsets)[: len(lists)]
        stops = starts + numbers(lists.sizes)[: len(lists)]
    else:
        raise DecodeError(f"{name} have the type {lists.type}, expected lists; correct the column")
    if lists.null_count:
        stops = np.where(flags(lists.is_valid()), stops, starts)
    return starts, stops, lists.values
