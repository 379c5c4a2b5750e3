"""Zarr arrays in folders, read and written chunk file by chunk file.

Opening an array through zarr takes twenty times as long as decoding it. Metadata (``zarr.json`` or ``.zarray``) that
states only features implemented here gives a `Layout`; zarr reads all other arrays. Metadata is read at each access,
because another tool may have overwritten the array: that takes 2 us warm. Asking for the file's time takes 1 us, and a
network file system may answer that from memory.

Chunks written here have one plane and, by default, at most 1,024 x 1,024 pixels. Their files are named ``c.0.0``, not
``c/0/0``: that halves the time of writing, and the 43 MB that 1,000 images took on disk, most of it folders.
"""

from __future__ import annotations

import json
import os
import struct
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import imagecodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec
from zarr.storage import MemoryStore

from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.errors import ImageError
from omearrow_ds.resources import pixel_count
from omearrow_ds.storage.formats import _ngff
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.formats._codecs import decompress_into

CHUNK_SHAPE = (1024, 1024)
_SHUFFLE: Literal["bitshuffle"] = "bitshuffle"
_BLOCK_BYTES = 2**18
_LEVELS = {"zstd": 1, "lz4": 9}
_REMEMBERED = 1024
_SPARE_BYTES = 64  # a compressed chunk exceeds its pixels by less than this, if at all
_MAX_CHUNKS = 2**16
_MAX_CHUNK_BYTES = 2**30
_MOST_BYTES = 2**24  # limit for metadata, and for a chunk that is expected to be small

# Its type stubs do not know arrays, without which Blosc would not know the size of a pixel.
_blosc_encode: Any = imagecodecs.blosc_encode

_ZARR3_FIELDS = "shape data_type chunk_grid chunk_key_encoding fill_value codecs attributes dimension_names"
_ZARR3_KEYS = frozenset(("zarr_format", "node_type", "storage_transformers", *_ZARR3_FIELDS.split()))
_UNCLEAR = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no waiting for a pipe's writer
STAGES = {"read_into": "decode", "contents": "read"}


class Layout(NamedTuple):
    """Shape, dtype and chunk shape of an array, the compressor, and each chunk's file and location in the array.

    ``axes`` come from the names of its dimensions, None without them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    compressor: str | None
    places: list[tuple[str, tuple[slice, ...]]]
    axes: str | None = None


class Found(NamedTuple):
    """Folder and layout of the array of one level, and its axes if the array or its group names them."""

    folder: str
    layout: Layout
    axes: str | None


def parse(description: bytes) -> Layout | None:
    """Return the layout of an array from its metadata, or None if zarr must interpret it.

    Supported: a regular chunk grid in C order, little-endian, one file per chunk, plain or compressed by Blosc or zstd.
    """
    try:
        found = json.loads(description)
        return _parse_zarr3(found) if found["zarr_format"] == 3 else _parse_zarr2(found)
    except _UNCLEAR:
        return None


def _parse_zarr3(found: dict[str, Any]) -> Layout | None:
    grid, key = found["chunk_grid"], found["chunk_key_encoding"]
    to_bytes, *compressors = found["codecs"]
    dtype = np.dtype(found["data_type"])
    little = to_bytes == {"name": "bytes", "configuration": {"endian": "little"}}
    plain = (
        set(found) <= _ZARR3_KEYS
        and found["node_type"] == "array"
        and found["data_type"] == dtype.name
        and grid["name"] == "regular"
        and key["name"] == "default"
        and not found.get("storage_transformers")
        and (little or (to_bytes == {"name": "bytes"} and dtype.itemsize == 1))
        and len(compressors) <= 1
    )
    separator = key["configuration"]["separator"]
    chunk = grid["configuration"]["chunk_shape"]
    compressor = compressors[0]["name"] if compressors else None
    layout = _layout(found["shape"], dtype, chunk, compressor, f"c{separator}", separator) if plain else None
    return layout and layout._replace(axes=_ngff.axes_named(found.get("dimension_names")))


def _parse_zarr2(found: dict[str, Any]) -> Layout | None:
    dtype = np.dtype(found["dtype"])
    plain = found["zarr_format"] == 2 and found["order"] == "C" and not found["filters"] and found["dtype"] == dtype.str
    compressor = found["compressor"]["id"] if found["compressor"] is not None else None
    separator = found.get("dimension_separator", ".")
    return _layout(found["shape"], dtype, found["chunks"], compressor, "", separator) if plain else None


def _layout(
    shape: list[int], dtype: np.dtype[Any], chunk: list[int], compressor: str | None, prefix: str, separator: str
) -> Layout | None:
    has_pixels = dtype in schema.DTYPES or dtype in schema.LABEL_DTYPES
    known = has_pixels and dtype == dtype.newbyteorder("<") and compressor in (None, "blosc", "zstd")
    if not known or separator not in ("/", ".") or not shape or min(*shape, *chunk) < 1:
        return None
    grid = [-(-size // length) for size, length in zip(shape, chunk, strict=True)]
    if pixel_count(grid) > _MAX_CHUNKS or pixel_count(chunk) * dtype.itemsize > _MAX_CHUNK_BYTES:
        return None
    places = []
    for number in np.ndindex(*grid):
        starts = [place * length for place, length in zip(number, chunk, strict=True)]
        stops = [min(start + length, size) for start, length, size in zip(starts, chunk, shape, strict=True)]
        places.append((prefix + separator.join(map(str, number)), tuple(map(slice, starts, stops))))
    return Layout(tuple(shape), dtype.newbyteorder("<"), tuple(chunk), compressor, places)


def read_into(folder: str, layout: Layout, image: Array) -> None:
    """Decode the Zarr array in ``folder`` into ``image``, without an intermediate copy if the array is a single chunk.

    Raises `OSError` if a chunk file is missing; `ValueError` if one is damaged.
    """
    whole = layout.chunk == layout.shape and image.dtype == layout.dtype and image.flags.c_contiguous
    chunk = image if whole else new_image(layout.chunk, layout.dtype, folder)
    flat = chunk.reshape(-1).view(np.uint8)
    for name, location in layout.places:
        decode_into(f"{folder}/{name}", layout, flat)
        if not whole:
            part = image[location]
            part[...] = chunk[tuple(map(slice, part.shape))]


def decode_into(path: str, layout: Layout, flat: Array) -> None:
    """Decode the chunk in the file ``path`` into ``flat``, an array of its bytes; see `read_into` for errors."""
    data = contents(path, flat.size + _SPARE_BYTES)
    # Blosc trusts its header, and would read beyond the end of a truncated file.
    blosc = layout.compressor == "blosc"
    if blosc and (len(data) < 16 or struct.unpack_from("<4xI4xI", data) != (flat.size, len(data))):
        raise ValueError(f"{path} has {len(data):,} bytes, which are not a Blosc chunk of {flat.size:,} bytes")
    if layout.compressor is not None:
        decompress_into(layout.compressor, data, flat)
    elif len(data) == flat.size:
        flat[...] = np.frombuffer(data, np.uint8)
    else:
        raise ValueError(f"{path} has {len(data):,} bytes, expected {flat.size:,}")


def read(array: Found) -> Array | None:
    """Return the decoded array; None if a chunk file is missing, so that only zarr can read the array.

    A chunk of unexpected size is not passed to zarr, which would decompress it at any size. Raises `OSError` or
    `ValueError` if a chunk cannot be read, or is damaged.
    """
    image = new_image(array.layout.shape, array.layout.dtype, array.folder)
    try:
        read_into(array.folder, array.layout, image)
    except FileNotFoundError:
        return None
    return image


def contents(path: str, likely_bytes: int = 4096) -> bytes:
    """Return the bytes of a file, three times as fast as pathlib if they are fewer than ``likely_bytes``.

    Raises `OSError` if it cannot be read, or is a symbolic link; `ValueError` if it is far larger.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        data = os.read(descriptor, likely_bytes)
        if len(data) < likely_bytes:
            return data
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > max(_MOST_BYTES, 2 * likely_bytes):
            raise ValueError(f"{path} has {size_bytes:,} bytes, expected fewer than {likely_bytes:,}")
        return data + os.read(descriptor, size_bytes)
    finally:
        os.close(descriptor)


class Reader:
    """Finds the Zarr arrays of images; metadata files are read at each access, but parsed only if they are new."""

    def __init__(self, level: int = 0) -> None:
        self._level = level
        self._parse = lru_cache(_REMEMBERED)(parse)
        self._parse_group = lru_cache(_REMEMBERED)(partial(_level, level))

    def layout(self, folder: str) -> Layout | None:
        """Return the layout of the Zarr 3 array in ``folder``, or None if only zarr can read the array."""
        return self._parse(contents(f"{folder}/zarr.json"))

    def find(self, folder: str) -> Found | None:
        """Return the array of the image in ``folder``, from any software; None if only zarr can find the array."""
        try:
            description, name = self._description(folder)
            layout = self._parse(description)
            if layout is not None:
                unclear = self._level or (name == ".zarray" and _names_dimensions(folder))
                return None if unclear else Found(folder, layout, layout.axes)
            level = self._parse_group(description)
            if level is None:
                return None
            folder = f"{folder}/{level[0]}"
            layout = self._parse(contents(f"{folder}/{name}"))
        except (OSError, ValueError):
            return None
        return None if layout is None else Found(folder, layout, level[1])

    def _description(self, folder: str) -> tuple[bytes, str]:
        """Return the metadata of the node in ``folder``, and the name of an array's metadata file."""
        try:
            return contents(f"{folder}/zarr.json"), "zarr.json"
        except FileNotFoundError:
            if Path(folder, ".zmetadata").exists():
                raise  # zarr follows this file and ignores the files next to it
            name = ".zarray" if Path(folder, ".zarray").exists() else ".zattrs"
            return contents(f"{folder}/{name}"), ".zarray"


def _names_dimensions(folder: str) -> bool:
    """Whether the attributes of a Zarr 2 array name its dimensions, as xarray writes them."""
    try:
        return b"_ARRAY_DIMENSIONS" in contents(f"{folder}/.zattrs")
    except FileNotFoundError:
        return False


def _level(level: int, description: bytes) -> tuple[str, str] | None:
    """Return the path and the axes of a level that a group names, or None if zarr must find it."""
    try:
        found = json.loads(description)
        if found.get("consolidated_metadata"):
            return None
        multiscale = _ngff.multiscales_of(found["attributes"] if found.get("node_type") == "group" else found)
        path = PurePosixPath(_ngff.level_path(multiscale, "", level)) if multiscale else PurePosixPath("/")
        inside = not path.is_absolute() and ".." not in path.parts
        return (str(path), _ngff.axes_of(multiscale)) if multiscale and inside else None
    except _UNCLEAR:
        return None


class Writer:
    """Writes arrays (T, C, Z, Y, X), compressed or not, and reuses the metadata of arrays of equal shape and dtype."""

    def __init__(self, compression: str, chunk_shape: tuple[int, int]) -> None:
        self._compression, self._chunk_shape = compression, chunk_shape
        self._described: dict[tuple[tuple[int, ...], np.dtype[Any]], tuple[bytes, Layout]] = {}

    def write(self, path: Path, pixels: Array) -> None:
        """Write a new array at ``path``; chunks of zeros are written too, so that a missing chunk file shows damage."""
        key = (pixels.shape, pixels.dtype)
        if key not in self._described:
            self._described[key] = self._describe(*key)
        description, layout = self._described[key]
        path.mkdir()
        (path / "zarr.json").write_bytes(description)
        for name, location in layout.places:
            part = pixels[location]
            chunk = np.ascontiguousarray(part) if part.shape == layout.chunk else _padded(part, layout.chunk)
            (path / name).write_bytes(self._encode(chunk.astype(layout.dtype, copy=False)))

    def _encode(self, chunk: Array) -> bytes:
        if self._compression == "none":
            return chunk.tobytes()
        settings = {"level": _LEVELS[self._compression], "compressor": self._compression}
        encoded: bytes = _blosc_encode(chunk, shuffle=_SHUFFLE, blocksize=_BLOCK_BYTES, numthreads=1, **settings)
        return encoded

    def _describe(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[bytes, Layout]:
        """Return the ``zarr.json`` that zarr writes for an array, and its layout."""
        codec = None
        if self._compression != "none":
            settings: dict[str, Any] = {"cname": self._compression, "clevel": _LEVELS[self._compression]}
            codec = BloscCodec(shuffle=_SHUFFLE, blocksize=_BLOCK_BYTES, **settings)
        files: dict[str, Any] = {}
        zarr.create_array(
            MemoryStore(files),
            shape=shape,
            dtype=dtype,
            chunks=(1, 1, 1, *map(min, shape[3:], self._chunk_shape)),
            compressors=codec,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=list(AXES.lower()),
        )
        description: bytes = files["zarr.json"].to_bytes()
        layout = parse(description)
        if layout is None:
            problem = f"an image of shape {shape} has more than {_MAX_CHUNKS:,} chunks of {self._chunk_shape}"
            raise ImageError(f"{problem}; pass a larger chunk_shape=")
        return description, layout


def _padded(part: Array, shape: tuple[int, ...]) -> Array:
    chunk = np.zeros(shape, part.dtype)
    chunk[tuple(map(slice, part.shape))] = part
    return chunk
