"""The two kinds of pixel leaf below an OME-Arrow column: typed bytes, and lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.errors import DecodeError

Array = np.ndarray[Any, Any]
NO_COMPRESSION = (None, "", "none")
_INT64_LIMIT = 2.0**63
# Numbers, none null, where they lie: Arrow's own `to_numpy` would import pandas, which takes 0.3 s.
numbers: Callable[[pa.Array], Array] = np.from_dlpack


class ByteLeaf:
    """Pixels as typed bytes: ``pixel_bytes`` with a dtype and a compression for each piece.

    Bytes that stand end to end may be taken as one run. Others (views, a dictionary) are laid so if they are no more
    than ``decoded_bytes``, which the images take in any case; else each is taken alone: small data can view much.
    """

    def __init__(self, structs: pa.StructArray, where: str, decoded_bytes: Callable[[], float]) -> None:
        payload = child(structs, "pixel_bytes", where)
        flat = pa.types.is_null(payload.type) or pa.types.is_fixed_size_binary(payload.type)
        if flat or (_is_scattered(payload.type) and _viewed_bytes(payload) <= decoded_bytes()):
            payload = payload.cast(pa.large_binary())
        self._valid = None if payload.null_count == 0 else flags(payload.is_valid())
        self._scattered = None
        if pa.types.is_binary(payload.type) or pa.types.is_large_binary(payload.type):
            offset_type = np.int64 if pa.types.is_large_binary(payload.type) else np.int32
            _, offsets, data = payload.buffers()
            bounds: Array = _from_buffer(offsets, offset_type, at_least=1)
            bounds = bounds[payload.offset : payload.offset + len(payload) + 1]
            self.starts, self.stops = bounds[:-1], bounds[1:]
            self._data = _from_buffer(data, np.uint8)
        elif _is_scattered(payload.type):
            self._scattered = payload
        else:
            raise DecodeError(f"{where}: pixel_bytes is of type {payload.type}; Arrow binary is needed")
        self._dtypes, self._compressions = (optional(structs, name, where) for name in ("dtype", "compression"))

    def has(self, piece: int) -> bool:
        """Whether the piece has pixels here."""
        return self._valid is None or bool(self._valid[piece])

    def holds(self, pieces: Array, counts: Array, itemsizes: Array) -> Array:
        """Return for each piece whether it holds ``counts`` pixels, and stands right after the one before it."""
        if self._scattered is not None:
            return np.zeros(len(pieces), bool)
        good: Array = self.stops[pieces] - self.starts[pieces] == counts * itemsizes
        if self._valid is not None:
            good &= self._valid[pieces]
        return good

    def run(self, first: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` pixels from piece ``first`` on."""
        start = self.starts[first]
        return self._data[start : start + count * dtype.itemsize].view(dtype)

    def piece(self, piece: int, count: int, dtype: np.dtype[Any], where: str) -> Array:
        """Return one piece, decompressed."""
        name = _text(self._dtypes, piece, f"{where}: its dtype")
        stored = schema.pixel_dtype(name, where, schema.CHUNK_DTYPES) if name else dtype
        compression = _text(self._compressions, piece, f"{where}: its compression")
        payload = self._bytes_of(piece)
        if compression is not None and compression.strip().lower() not in NO_COMPRESSION:
            payload = decompress(payload, compression, count * stored.itemsize, where)
        if len(payload) % stored.itemsize:
            raise DecodeError(f"{where} holds {len(payload)} bytes, no whole number of {stored} pixels")
        return payload.view(stored)

    def _bytes_of(self, piece: int) -> Array:
        if self._scattered is None:
            return self._data[self.starts[piece] : self.stops[piece]]
        scalar = self._scattered[piece]
        scalar = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
        return np.frombuffer(scalar.as_buffer(), np.uint8)


def decompress(stored: Array, compression: str, size_bytes: int, where: str) -> Array:
    """Return the ``size_bytes`` that ``stored`` decompresses to, no more and no fewer.

    Given a length that is too large, most of Arrow's codecs leave the rest of the memory as it was. So they are asked
    for one byte less as well, which they must refuse. Raises `DecodeError` if Arrow has no such codec, or the bytes are
    not of it or of another length.
    """
    data = pa.py_buffer(stored)
    try:
        codec = pa.Codec(compression)
        plain = codec.decompress(data, size_bytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DecodeError(f"{where}: its {compression!r} bytes do not decompress: {error}") from error
    if _decompresses_to_less(codec, data, size_bytes):
        raise DecodeError(f"{where}: its {compression!r} bytes decompress to fewer than the {size_bytes} of its shape")
    return np.frombuffer(plain, np.uint8)


def _decompresses_to_less(codec: pa.Codec, data: pa.Buffer, size_bytes: int) -> bool:
    if codec.name == "zstd":  # says so itself
        return False
    try:
        if size_bytes == 1 and codec.name == "gzip":  # to no byte at all it decompresses anything
            return not pa.CompressedInputStream(pa.BufferReader(data), codec.name).read(1)
        codec.decompress(data, size_bytes - 1)
    except (pa.ArrowException, OSError):
        return False
    return True


class ListLeaf:
    """Pixels as lists of numbers."""

    def __init__(self, structs: pa.StructArray, where: str) -> None:
        lists = child(structs, "pixels", where)
        self._valid = None if lists.null_count == 0 else flags(lists.is_valid())
        self._scattered = is_list_view(lists.type)
        self.starts, self.stops, values = list_bounds(lists, f"{where}: pixels")
        self._nulls = flags(values.is_null()) if values.null_count else None
        self._data = _numbers(values, where)

    def has(self, piece: int) -> bool:
        """Whether the piece has pixels here."""
        return self._valid is None or bool(self._valid[piece])

    def holds(self, pieces: Array, counts: Array, itemsizes: Array) -> Array:
        """Return for each piece whether it holds ``counts`` pixels, none null, right after the piece before it."""
        del itemsizes
        if self._scattered:
            return np.zeros(len(pieces), bool)
        good: Array = self.stops[pieces] - self.starts[pieces] == counts
        if self._valid is not None:
            good &= self._valid[pieces]
        if self._nulls is not None:
            before = np.concatenate([[0], np.cumsum(self._nulls)])
            good &= before[self.stops[pieces]] == before[self.starts[pieces]]
        return good

    def run(self, first: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` pixels from piece ``first`` on."""
        del dtype
        return self._data[self.starts[first] : self.starts[first] + count]

    def piece(self, piece: int, count: int, dtype: np.dtype[Any], where: str) -> Array:
        """Return one piece."""
        del count, dtype
        bounds = slice(self.starts[piece], self.stops[piece])
        if self._nulls is not None and self._nulls[bounds].any():
            raise DecodeError(f"{where} has a null pixel")
        return self._data[bounds]


def cast(pixels: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``pixels`` as native ``dtype``, values wrapped or rounded as ``ndarray.astype`` does it."""
    if pixels.dtype == dtype and dtype.isnative:
        return pixels
    with np.errstate(invalid="ignore", over="ignore"):
        return pixels.astype(dtype.newbyteorder("="), copy=False)


def _numbers(values: pa.Array, where: str) -> Array:
    """Return numbers as they are in memory, nulls as any number; fractions as the float64 that Python makes of them."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.uint16)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DecodeError(f"{where}: its pixels are of type {values.type}; a list of numbers is needed")
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    values = values.fill_null(False if pa.types.is_boolean(kind) else 0) if values.null_count else values
    data = flags(values) if pa.types.is_boolean(kind) else numbers(values)
    return data.astype(np.float64, copy=False) if pa.types.is_floating(kind) else data


def flags(values: pa.Array) -> Array:
    """Return what is true and false, none null, as an array of its own."""
    return numbers(values.cast(pa.uint8())).astype(bool)


def among(column: pa.Array, texts: Collection[str | None]) -> Array:
    """Return for each text of a column, or null, whether it is one of ``texts``; of a column of others, none is."""
    if not is_text(column.type):
        return np.zeros(len(column), bool)
    encoded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    wanted = {text if text is None else text.encode() for text in texts}
    known = [text in wanted for text in encoded.dictionary.cast(pa.binary()).to_pylist()]
    return np.array(known, bool)[numbers(encoded.indices)]


def whole_numbers(field: pa.Array) -> Array:
    """Return sizes or coordinates as int64; what is null, of another type, too large or a fraction becomes negative."""
    field = field.dictionary_decode() if pa.types.is_dictionary(field.type) else field
    if pa.types.is_floating(field.type):
        values = field.to_numpy(zero_copy_only=False).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.where((values == np.floor(values)) & (abs(values) < _INT64_LIMIT), values, -1).astype(np.int64)
    if not (pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)):
        return np.full(len(field), -1, np.int64)
    if field.null_count or not pa.types.is_integer(field.type):
        field = pc.fill_null(field.cast(pa.int64(), safe=False), -1)
    return numbers(field).astype(np.int64, copy=False)


def child(structs: pa.StructArray, name: str, where: str) -> pa.Array:
    """Return a field of structs, or raise `DecodeError` if it is missing or there twice."""
    position = structs.type.get_field_index(name)
    if position < 0:
        names = ", ".join(field.name for field in structs.type)
        raise DecodeError(f"{where} needs one field {name!r}; it has {names or 'no field'}")
    return structs.field(position)


def optional(structs: pa.StructArray, name: str, where: str) -> pa.Array | None:
    """Return a field of structs, or None if they have none of this name."""
    return child(structs, name, where) if any(field.name == name for field in structs.type) else None


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are strings, or all null."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_null, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _text(column: pa.Array | None, row: int, what: str) -> str | None:
    if column is None:
        return None
    if not is_text(column.type):
        raise DecodeError(f"{what} is of type {column.type}; a string is needed")
    try:
        text: str | None = column[row].as_py()
    except UnicodeDecodeError as error:
        raise DecodeError(f"{what} is no text: {error}") from error
    return text


def _is_scattered(kind: pa.DataType) -> bool:
    """Whether bytes of this type need not stand end to end."""
    if pa.types.is_dictionary(kind):
        return bool(pa.types.is_binary(kind.value_type) or pa.types.is_large_binary(kind.value_type))
    return bool(pa.types.is_binary_view(kind))


def _viewed_bytes(payload: pa.Array) -> int:
    """Return how many bytes a scattered array would take end to end."""
    if pa.types.is_dictionary(payload.type):
        lengths = pc.binary_length(payload.dictionary).take(payload.indices).cast(pa.int64())
        return pc.sum(lengths, min_count=0).as_py() or 0
    views = payload.buffers()[1]
    viewed: Array = _from_buffer(views, np.int32)[::4][payload.offset : payload.offset + len(payload)]
    return int(viewed.sum(dtype=np.int64))


def is_list_view(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are views of lists, which need not stand end to end."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _from_buffer(buffer: pa.Buffer | None, dtype: type, at_least: int = 0) -> Array:
    """Return an Arrow buffer as an array; an absent or empty one as ``at_least`` zeros."""
    return np.frombuffer(buffer, dtype) if buffer is not None and buffer.size else np.zeros(at_least, dtype)


def list_bounds(lists: pa.Array, what: str) -> tuple[Array, Array, pa.Array]:
    """Return where each list of an array of any list type starts and stops in its flat child, and that child.

    Raises `DecodeError` if they are no lists; ``what`` names them.
    """
    if pa.types.is_fixed_size_list(lists.type):
        starts = (np.arange(len(lists)) + lists.offset) * lists.type.list_size
        stops = starts + lists.type.list_size
    elif pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type):
        offsets = numbers(lists.offsets)
        starts, stops = offsets[:-1], offsets[1:]
    elif is_list_view(lists.type):
        starts = numbers(lists.offsets)
        stops = starts + numbers(lists.sizes)
    elif pa.types.is_null(lists.type):
        starts = stops = np.zeros(len(lists), np.int64)
        return starts, stops, pa.nulls(0)
    else:
        raise DecodeError(f"{what} are of type {lists.type}; an Arrow list is needed")
    if lists.null_count:
        stops = np.where(flags(lists.is_valid()), stops, starts)
    return starts, stops, lists.values
