"""Zarr arrays in chunk files and shards, which are located by their metadata, read without zarr, and written.

Opening an array through zarr takes twenty times as long as decoding it. Metadata (``zarr.json`` or ``.zarray``) that
states only features implemented here gives a `ZarrArray`; zarr reads all other arrays. Metadata is read at each access,
because another tool may have overwritten the array: that takes 2 us warm. Asking for the file's time takes 1 us, and a
network file system may answer that from memory.

Chunks written here have one plane and, by default, at most 1,024 x 1,024 pixels. Their files are named ``c.0.0``, not
``c/0/0``: that halves the time of writing, and the 43 MB that 1,000 images took on disk, most of it folders.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import imagecodecs
import numpy as np
import zarr
from google_crc32c import value as crc32c
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore

from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema
from omearrow_ds.errors import FormatError, ImageError, MissingPathError, OMEArrowDSError
from omearrow_ds.resources import pixel_count
from omearrow_ds.storage.extents import Array, ChunkFiles, ChunkLayout, Shape, StoredBytes, chunk_windows
from omearrow_ds.storage.formats import _ngff
from omearrow_ds.storage.formats._codecs import decompress_into
from omearrow_ds.storage.formats._detect import ZARR_FILES
from omearrow_ds.storage.formats._error_translation import damaged
from omearrow_ds.storage.formats._file_set import FileSet, ObjectFileSet

CHUNK_SHAPE = (1024, 1024)
_SHUFFLE: Literal["bitshuffle"] = "bitshuffle"
_BLOCK_BYTES = 2**18
_LEVELS = {"zstd": 1, "lz4": 9}
_REMEMBERED = 1024
_SPARE_BYTES = 64  # A compressed chunk exceeds its pixels by less than this, if at all.
_MAX_CHUNKS = 2**16
_MAX_CHUNK_BYTES = 2**30

_ZARR3_FIELDS = "shape data_type chunk_grid chunk_key_encoding fill_value codecs attributes dimension_names"
_ZARR3_KEYS = frozenset(("zarr_format", "node_type", "storage_transformers", *_ZARR3_FIELDS.split()))
_UNCLEAR = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError)
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_SHARD_ENTRY = struct.Struct("<QQ")  # First byte and number of bytes of a chunk.
_MISSING_ENDS, _CHECKSUM_BYTES = (2**64 - 1, 2**65 - 2), 4


class ZarrArray(NamedTuple):
    """Chunks of an array whose axes are in the order TCZYX."""

    layout: ChunkLayout
    shape: Shape  # (T, C, Z, Y, X), 1 for axes that the array lacks.
    shard: Shape  # Number of chunks of a file along each axis.
    is_sharded: bool  # Whether the files are shards, which end with an index of their chunks.
    names: Sequence[str]  # Chunk files or shards in C order.
    compressor: str | None
    fill_value: Any  # Pixel value of missing chunks; None if only zarr knows it.
    chunk_bytes: int  # Number of bytes of decoded pixels.


def parse(description: bytes, axes: str | None = None) -> ZarrArray | None:
    """Return the chunks of an array from its metadata, or None if zarr must read it."""
    # Supported: a regular chunk grid in C order, little-endian, plain or compressed by Blosc or zstd, also in shards.
    # By default, ``axes`` are those that the names of its dimensions state, or that its rank implies.
    try:
        fields = json.loads(description)
        return _parse_zarr3(fields, axes) if fields["zarr_format"] == 3 else _parse_zarr2(fields, axes)
    except _UNCLEAR:
        return None


def _parse_zarr3(fields: dict[str, Any], axes: str | None) -> ZarrArray | None:
    grid, key = fields["chunk_grid"], fields["chunk_key_encoding"]
    file_shape = chunk_shape = grid["configuration"]["chunk_shape"]
    codecs, dtype = fields["codecs"], np.dtype(fields["data_type"])
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        index_order, *checksums = sharding["index_codecs"]
        is_checked = [codec["name"] for codec in checksums] == ["crc32c"]
        if len(codecs) > 1 or index_order != _LITTLE_ENDIAN or not is_checked or sharding["index_location"] != "end":
            return None
        codecs, chunk_shape = sharding["codecs"], sharding["chunk_shape"]
    to_bytes, *compressors = codecs
    is_known = (
        set(fields) <= _ZARR3_KEYS
        and fields["node_type"] == "array"
        and fields["data_type"] == dtype.name
        and grid["name"] == "regular"
        and key["name"] == "default"
        and not fields.get("storage_transformers")
        and (to_bytes == _LITTLE_ENDIAN or (to_bytes == {"name": "bytes"} and dtype.itemsize == 1))
        and len(compressors) <= 1
    )
    if not is_known:
        return None
    separator = key["configuration"]["separator"]
    compressor = compressors[0]["name"] if compressors else None
    axes = axes or _ngff.axes_named(fields.get("dimension_names"))
    sizes = fields["shape"], file_shape, chunk_shape
    return _array_of(sizes, axes, dtype, compressor, (f"c{separator}", separator), fields["fill_value"])


def _parse_zarr2(fields: dict[str, Any], axes: str | None) -> ZarrArray | None:
    dtype = np.dtype(fields["dtype"])
    if fields["zarr_format"] != 2 or fields["order"] != "C" or fields["filters"] or fields["dtype"] != dtype.str:
        return None
    compressor = fields["compressor"]["id"] if fields["compressor"] is not None else None
    sizes = fields["shape"], fields["chunks"], fields["chunks"]
    key = "", fields.get("dimension_separator", ".")
    return _array_of(sizes, axes, dtype, compressor, key, fields["fill_value"])


def _array_of(
    sizes: tuple[list[int], list[int], list[int]],
    axes: str | None,
    dtype: np.dtype[Any],
    compressor: str | None,
    key: tuple[str, str],
    fill_value: Any,
) -> ZarrArray | None:
    """Return the chunks of an array; ``sizes`` are shapes of array, file and chunk, ``key`` is prefix and separator."""
    rank = len(sizes[0])
    axes = axes or {2: "YX", 5: AXES}.get(rank, "")
    has_pixels = dtype in schema.DTYPES or dtype in schema.LABEL_DTYPES
    if not has_pixels or dtype != dtype.newbyteorder("<") or compressor not in (None, "blosc", "zstd"):
        return None
    has_axes = len(axes) == rank and axes == "".join(axis for axis in AXES if axis in axes)
    if not has_axes or key[1] not in ("/", ".") or min(map(min, sizes)) < 1:
        return None
    shape, file_shape, chunk_shape = (
        tuple(dict(zip(axes, lengths, strict=True)).get(axis, 1) for axis in AXES) for lengths in sizes
    )
    if any(size % length for size, length in zip(file_shape, chunk_shape, strict=True)):
        return None
    grid, shard = (
        tuple(-(-size // length) for size, length in zip(lengths, chunk_shape, strict=True))
        for lengths in (shape, file_shape)
    )
    chunk_bytes = pixel_count(chunk_shape) * dtype.itemsize
    if max(pixel_count(grid), pixel_count(shard)) > _MAX_CHUNKS or chunk_bytes > _MAX_CHUNK_BYTES:
        return None
    file_grid = tuple(-(-size // length) for size, length in zip(sizes[0], sizes[1], strict=True))
    has_fill = type(fill_value) is int or (type(fill_value) is float and dtype.kind == "f")
    return ZarrArray(
        ChunkLayout(chunk_shape, grid[4], dtype, dtype.newbyteorder("=")),
        shape,
        shard,
        sizes[1] is not sizes[2],
        _file_names(file_grid, *key),
        compressor,
        np.array(fill_value, dtype) if has_fill else None,
        chunk_bytes,
    )


@lru_cache(64)  # Most arrays of a folder have one grid, also if their metadata differ.
def _file_names(grid: Shape, prefix: str, separator: str) -> list[str]:
    return [prefix + separator.join(map(str, position)) for position in np.ndindex(*grid)]


def chunk_files(array: ZarrArray, folder: str, files: FileSet, *, can_miss_chunks: bool) -> ChunkFiles:
    """Return the chunks of an array in a folder or below a URL; a missing chunk is an error or the fill value."""
    can_miss_chunks = can_miss_chunks and array.fill_value is not None
    fetch = partial(fetch_chunks, array, folder, files, can_miss_chunks=can_miss_chunks)
    decode = partial(decode_chunk, array, folder)
    return ChunkFiles(folder, array.layout, array.shape, array.shard, array.fill_value, fetch, decode)


def fetch_chunks(
    array: ZarrArray, folder: str, files: FileSet, file_number: int, numbers: Collection[int], *, can_miss_chunks: bool
) -> list[StoredBytes | None]:
    """Return the bytes of chunks of a file, None for missing ones; `FileNotFoundError` if they must exist."""
    path = f"{folder}/{array.names[file_number]}"
    try:
        if not array.is_sharded:
            return [files.read(path, array.chunk_bytes + _SPARE_BYTES)]
        chunks = _read_shard(array, path, files, numbers)
    except FileNotFoundError:
        chunks = [None] * len(numbers)
    except OMEArrowDSError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(Path(path), "OME-Zarr", error) from error
    if None in chunks and not can_miss_chunks:
        raise FileNotFoundError(path)
    return chunks


def decode_chunk(array: ZarrArray, folder: str, file_number: int, data: StoredBytes, flat: Array) -> None:
    """Fill an array of bytes with a chunk's pixels; raise `FormatError` if it is damaged or of another size."""
    try:
        decompress_into(array.compressor, data, flat)
    except ValueError as error:
        raise damaged(Path(folder, array.names[file_number]), "OME-Zarr", error) from error


def _read_shard(array: ZarrArray, path: str, files: FileSet, numbers: Collection[int]) -> list[StoredBytes | None]:
    """Return the bytes of chunks of a shard, None for missing ones: all with one read, some after reading the index."""
    num_chunks = math.prod(array.shard)
    index_bytes = num_chunks * _SHARD_ENTRY.size + _CHECKSUM_BYTES
    if len(numbers) == num_chunks:
        data = memoryview(files.read(path, num_chunks * (array.chunk_bytes + _SPARE_BYTES) + index_bytes))
        size_bytes, index = len(data), data[max(0, len(data) - index_bytes) :]
    else:
        file = files.open(path)
        size_bytes = file.size_bytes
        (index,) = file.read_ranges([(max(0, size_bytes - index_bytes), size_bytes)])
    entries = index[:-_CHECKSUM_BYTES]
    if len(index) < index_bytes or crc32c(bytes(entries)) != int.from_bytes(index[-_CHECKSUM_BYTES:], "little"):
        raise ValueError("the index of the shard is damaged")
    located = (_SHARD_ENTRY.unpack_from(entries, number * _SHARD_ENTRY.size) for number in numbers)
    ranges = {number: (start, start + size) for number, (start, size) in zip(numbers, located, strict=True)}
    existing = {number: ends for number, ends in ranges.items() if ends != _MISSING_ENDS}
    if any(stop > size_bytes for _, stop in existing.values()):
        raise ValueError("a chunk ends after its shard")
    if len(numbers) == num_chunks:
        return [data[slice(*existing[number])] if number in existing else None for number in numbers]
    parts = dict(zip(existing, file.read_ranges([*existing.values()]), strict=True))
    return [parts.get(number) for number in numbers]


class Reader:
    """Finds arrays by their metadata, which is read each time; recent metadata is not parsed again."""

    def __init__(self, level: int, files: FileSet) -> None:
        self._level, self._files = level, files
        self._parse = lru_cache(_REMEMBERED)(parse)
        self._parse_group = lru_cache(_REMEMBERED)(partial(_level, level))

    def find_array(self, folder: str) -> ZarrArray | None:
        """Return the Zarr 3 array in a folder, or None if zarr must read it."""
        return self._parse(self._read(f"{folder}/zarr.json") or b"")

    def find_image(self, folder: str) -> tuple[str, ZarrArray] | None:
        """Return the folder and the array of the image in a folder; None if zarr must find or read it."""
        description, name = self._read(f"{folder}/zarr.json"), "zarr.json"
        if description is None:
            if self._read(f"{folder}/.zmetadata") is not None:
                return None  # zarr follows this file and ignores the files next to it.
            name, description = ".zarray", self._read(f"{folder}/.zarray")
        if description is None:
            description = self._read(f"{folder}/.zattrs") or b""
        array = self._parse(description)
        if array is None:
            path, axes = self._parse_group(description) or (None, None)
            if path is None:
                return None
            folder = f"{folder}/{path}"
            array = self._parse(self._read(f"{folder}/{name}") or b"", axes)
        elif self._level:
            return None
        elif name == ".zarray" and b"_ARRAY_DIMENSIONS" in (self._read(f"{folder}/.zattrs") or b""):
            return None  # Attributes name its dimensions, as xarray writes them.
        return None if array is None else (folder, array)

    def _read(self, path: str) -> bytes | None:
        """Return metadata: None if it is missing, no bytes if it cannot be read."""
        try:
            return bytes(self._files.read_metadata(path))
        except FileNotFoundError:
            return None
        except OMEArrowDSError:
            raise
        except (OSError, ValueError):
            return b""


def _level(level: int, description: bytes) -> tuple[str, str] | None:
    """Return the path and the axes of a level that a group names, or None if zarr must find it."""
    try:
        fields = json.loads(description)
        if fields.get("consolidated_metadata"):
            return None
        multiscale = _ngff.multiscales_of(fields["attributes"] if fields.get("node_type") == "group" else fields)
        path = PurePosixPath(_ngff.level_path(multiscale, "", level)) if multiscale else PurePosixPath("/")
        is_inside = not path.is_absolute() and ".." not in path.parts
        return (str(path), _ngff.axes_of(multiscale)) if multiscale and is_inside else None
    except _UNCLEAR:
        return None


def array_writer(compression: str, chunk_shape: tuple[int, int]) -> Callable[[Path, Array], None]:
    """Return a function that writes a new array (T, C, Z, Y, X) at a path, and caches the metadata of arrays."""
    describe = cache(partial(_describe, compression, chunk_shape))
    encode: Any = np.ndarray.tobytes
    if compression != "none":  # Blosc takes the size of a pixel from an array, which its type stubs do not know.
        settings: dict[str, Any] = {"shuffle": _SHUFFLE, "blocksize": _BLOCK_BYTES, "numthreads": 1}
        encode = partial(imagecodecs.blosc_encode, level=_LEVELS[compression], compressor=compression, **settings)

    def write(path: Path, pixels: Array) -> None:  # Chunks of zeros too, so that a missing chunk file is a fault.
        description, array = describe(pixels.shape, pixels.dtype)
        path.mkdir()
        (path / "zarr.json").write_bytes(description)
        shape, dtype = array.layout.chunk_shape, array.layout.dtype
        windows = chunk_windows([0, 0, 0, 0, 0, *pixels.shape], shape)
        for name, (_, _, window) in zip(array.names, windows, strict=True):
            part = pixels[window]
            missing = [(0, length - size) for length, size in zip(shape, part.shape, strict=True)]
            chunk = np.ascontiguousarray(part) if part.shape == shape else np.pad(part, missing)
            (path / name).write_bytes(encode(chunk.astype(dtype, copy=False)))

    return write


def _describe(
    compression: str, chunk_shape: tuple[int, int], shape: Shape, dtype: np.dtype[Any]
) -> tuple[bytes, ZarrArray]:
    """Return the ``zarr.json`` that zarr writes for an array, and its chunks."""
    codec = None
    if compression != "none":
        settings: dict[str, Any] = {"cname": compression, "clevel": _LEVELS[compression]}
        codec = BloscCodec(shuffle=_SHUFFLE, blocksize=_BLOCK_BYTES, **settings)
    files: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(files),
        shape=shape,
        dtype=dtype,
        chunks=(1, 1, 1, *map(min, shape[3:], chunk_shape)),
        compressors=codec,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=list(AXES.lower()),
    )
    description: bytes = files["zarr.json"].to_bytes()
    array = parse(description)
    if array is None:
        problem = f"an image of shape {shape} has more than {_MAX_CHUNKS:,} chunks of {chunk_shape}"
        raise ImageError(f"{problem}; pass a larger chunk_shape=")
    return description, array


_METADATA_FILES = (*ZARR_FILES, ".zmetadata")


class ZarrObjects(Store):
    """Read-only store of the objects below a URL; if ``complete``, a missing chunk is an error, not the fill value."""

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, files: ObjectFileSet, url: str, *, complete: bool) -> None:
        super().__init__(read_only=True)
        self._files, self._url, self._complete = files, url, complete

    def node(self, url: str) -> zarr.Array[Any] | zarr.Group:
        """Return the array or group at a URL below the root; version 3 is tried first, with one request."""
        path = url.removeprefix(self._url).strip("/")
        try:
            return zarr.open(self, path=path, mode="r", zarr_format=3)
        except FileNotFoundError:
            return zarr.open(self, path=path, mode="r", zarr_format=2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrObjects) and self._url == other._url

    __hash__ = None  # type: ignore[assignment]  # like all classes that define equality

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it; None if it does not exist."""
        try:
            data = await asyncio.to_thread(partial(self._read, key, byte_range))
        except MissingPathError:
            if self._complete and key.rpartition("/")[2] not in _METADATA_FILES:
                raise FormatError(f"{self._url}/{key}: does not exist; restore the folder") from None
            return None
        return prototype.buffer.from_bytes(bytes(data))

    def _read(self, key: str, part: ByteRequest | None) -> memoryview:
        url = f"{self._url}/{key}"
        if isinstance(part, RangeByteRequest):
            return self._files.open(url).read_ranges([(part.start, part.end)])[0]  # It compares the ETag.
        if isinstance(part, SuffixByteRequest):
            return self._files.open(url).read_tail(part.suffix)
        assert part is None
        is_metadata = key.rpartition("/")[2] in _METADATA_FILES
        return self._files.read_metadata(url) if is_metadata else self._files.read(url)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    exists = get_partial_values = set = delete = list = list_prefix = list_dir = _refuse
