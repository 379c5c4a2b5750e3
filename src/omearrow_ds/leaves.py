"""The two kinds of pixel leaf below an OME-Arrow column: typed bytes, and lists of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds import schema
from omearrow_ds.errors import DecodeError

Array = np.ndarray[Any, Any]
NO_COMPRESSION = (None, "", "none")


class ByteLeaf:
    """Pixels as typed bytes: ``pixel_bytes`` with a dtype and a compression for each piece."""

    def __init__(self, structs: pa.StructArray) -> None:
        payload = structs.field("pixel_bytes")
        if not (pa.types.is_binary(payload.type) or pa.types.is_large_binary(payload.type)):
            payload = payload.cast(pa.large_binary())
        self._valid = None if payload.null_count == 0 else payload.is_valid().to_numpy(zero_copy_only=False)
        offset_type = np.int64 if pa.types.is_large_binary(payload.type) else np.int32
        _, offsets, data = payload.buffers()
        bounds: Array = _from_buffer(offsets, offset_type, at_least=1)
        bounds = bounds[payload.offset : payload.offset + len(payload) + 1]
        self.starts, self.stops = bounds[:-1], bounds[1:]
        self._data = _from_buffer(data, np.uint8)
        names = {field.name for field in structs.type}
        self._dtypes = structs.field("dtype") if "dtype" in names else None
        self._compressions = structs.field("compression") if "compression" in names else None

    def has(self, piece: int) -> bool:
        """Whether the piece has pixels here."""
        return self._valid is None or bool(self._valid[piece])

    def holds(self, pieces: Array, counts: Array, itemsizes: Array) -> Array:
        """Return for each piece whether it holds ``counts`` pixels."""
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
        name = self._dtypes[piece].as_py() if self._dtypes is not None else None
        stored = schema.pixel_dtype(name, where) if name else dtype
        payload = self._data[self.starts[piece] : self.stops[piece]]
        compression = self._compressions[piece].as_py() if self._compressions is not None else None
        if compression is not None and compression.strip().lower() not in NO_COMPRESSION:
            try:
                data = pa.Codec(compression).decompress(pa.py_buffer(payload), count * stored.itemsize)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DecodeError(f"{where}: its {compression!r} bytes do not decompress: {error}") from error
            payload = np.frombuffer(data, np.uint8)
        if len(payload) % stored.itemsize:
            raise DecodeError(f"{where} holds {len(payload)} bytes, no whole number of {stored} pixels")
        return payload.view(stored)


class ListLeaf:
    """Pixels as lists of numbers."""

    def __init__(self, lists: pa.Array) -> None:
        self._valid = None if lists.null_count == 0 else lists.is_valid().to_numpy(zero_copy_only=False)
        self.starts, self.stops, values = list_bounds(lists)
        self._data: Array
        self._nulls = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
        self._data = values.fill_null(0).to_numpy(zero_copy_only=False) if values.null_count else values.to_numpy()

    def has(self, piece: int) -> bool:
        """Whether the piece has pixels here."""
        return self._valid is None or bool(self._valid[piece])

    def holds(self, pieces: Array, counts: Array, itemsizes: Array) -> Array:
        """Return for each piece whether it holds ``counts`` pixels, none of them null."""
        del itemsizes
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


def _from_buffer(buffer: pa.Buffer | None, dtype: type, at_least: int = 0) -> Array:
    """Return an Arrow buffer as an array; an absent or empty one as ``at_least`` zeros."""
    return np.frombuffer(buffer, dtype) if buffer is not None and buffer.size else np.zeros(at_least, dtype)


def list_bounds(lists: pa.Array) -> tuple[Array, Array, pa.Array]:
    """Return where each list of an array of any list type starts and stops in its flat child, and that child."""
    if pa.types.is_fixed_size_list(lists.type):
        starts = (np.arange(len(lists)) + lists.offset) * lists.type.list_size
        stops = starts + lists.type.list_size
    elif pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type):
        offsets = lists.offsets.to_numpy()
        starts, stops = offsets[:-1], offsets[1:]
    else:
        raise DecodeError(f"pixels stand in a column of type {lists.type}; an Arrow list is needed")
    if lists.null_count:
        stops = np.where(lists.is_valid().to_numpy(zero_copy_only=False), stops, starts)
    return starts, stops, lists.values
