"""The Zarr arrays that this package writes, chunk by chunk: described by zarr, their chunk files coded by numcodecs.

Every image is an array of its own, and opening one through zarr costs more than decoding it (at 100 x 100 pixels about
seven times as much). Arrays of one shape and dtype have the same description, byte for byte, so it is made and parsed
once. An array that is described in another way is left to zarr.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numcodecs
import numpy as np
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from omearrow_ds.axes import AXES, pixel_count
from omearrow_ds.formats._base import Array, damaged

_CHUNK_SIDE = 1024
_LEVEL = 0  # zstd's own default, 3
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class _Layout(NamedTuple):
    """Shape, dtype and chunk shape of an array of zstd-compressed chunks; each chunk's file and place in the array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    places: list[tuple[str, tuple[slice, ...]]]


def _places(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[tuple[str, tuple[slice, ...]]]:
    grid = [-(-size // length) for size, length in zip(shape, chunk, strict=True)]
    return [
        (
            "/".join(["c", *map(str, place)]),
            tuple(
                slice(number * length, min((number + 1) * length, size))
                for number, length, size in zip(place, chunk, shape, strict=True)
            ),
        )
        for place in np.ndindex(*grid)
    ]


class Layouts:
    """Writes and reads arrays (T, C, Z, Y, X), keeping the descriptions that it has met."""

    def __init__(self) -> None:
        self._codec = numcodecs.Zstd(level=_LEVEL)
        self._described: dict[tuple[tuple[int, ...], np.dtype[Any]], bytes] = {}
        self._layouts: dict[bytes, _Layout | None] = {}

    def write(self, path: Path, pixels: Array) -> None:
        """Write a new array at ``path``; chunks of zeros too, so that a missing chunk file is a fault."""
        key = (pixels.shape, pixels.dtype)
        if key not in self._described:
            self._described[key] = _describe(*key)
        layout = self._layout(self._described[key])
        assert layout is not None
        path.mkdir()
        (path / "zarr.json").write_bytes(self._described[key])
        for name, place in layout.places:
            part = pixels[place]
            chunk = np.ascontiguousarray(part) if part.shape == layout.chunk else _padded(part, layout.chunk)
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self._codec.encode(chunk.reshape(-1).view(np.uint8)))

    def read(self, path: Path) -> Array:
        """Return the array at ``path`` in memory of its own.

        Raises
        ------
        FormatError
            If a file of it is missing or damaged.
        """
        try:
            layout = self._layout((path / "zarr.json").read_bytes())
            return self._assembled(path, layout) if layout is not None else np.asarray(zarr.open_array(path)[...])
        except _DAMAGE as error:
            raise damaged(path, "OME-Zarr", error) from error

    def _assembled(self, path: Path, layout: _Layout) -> Array:
        pixels = np.empty(layout.shape, layout.dtype)
        chunk_bytes = pixel_count(layout.chunk) * layout.dtype.itemsize
        for name, place in layout.places:
            data = self._codec.decode((path / name).read_bytes())
            if len(data) != chunk_bytes:
                raise ValueError(f"chunk {name} holds {len(data)} bytes, expected {chunk_bytes}")
            chunk = np.frombuffer(data, layout.dtype).reshape(layout.chunk)
            pixels[place] = chunk[tuple(slice(size) for size in pixels[place].shape)]
        return pixels

    def _layout(self, description: bytes) -> _Layout | None:
        if description not in self._layouts:
            self._layouts[description] = _parse(json.loads(description))
        return self._layouts[description]


def _describe(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the ``zarr.json`` that zarr writes for an array."""
    files: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(files),
        shape=shape,
        dtype=dtype,
        chunks=(1, 1, 1, *(min(size, _CHUNK_SIDE) for size in shape[3:])),
        compressors=ZstdCodec(level=_LEVEL),
        dimension_names=list(AXES.lower()),
    )
    description: bytes = files["zarr.json"].to_bytes()
    return description


def _parse(description: dict[str, Any]) -> _Layout | None:
    """Return the layout of an array that is stored as `_describe` has it, or None if it is stored in another way."""
    shape, dtype = tuple(description["shape"]), np.dtype(description["data_type"]).newbyteorder("<")
    chunk = tuple(description["chunk_grid"]["configuration"]["chunk_shape"])
    names = ("chunk_key_encoding", "codecs", "chunk_grid")
    ours = json.loads(_describe(shape, dtype.newbyteorder("=")))
    same = all(description[name] == ours[name] for name in names)
    return _Layout(shape, dtype, chunk, _places(shape, chunk)) if same else None


def _padded(part: Array, shape: tuple[int, ...]) -> Array:
    chunk = np.zeros(shape, part.dtype)
    chunk[tuple(map(slice, part.shape))] = part
    return chunk
