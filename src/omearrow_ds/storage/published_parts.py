"""Published collections in parts, and their ``index.parquet``: one row per image, with columns read lazily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.leaves import numbers
from omearrow_ds.errors import MissingPathError
from omearrow_ds.storage.concat import Concat, Index, Open, Parts
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import plain_columns, plain_schema
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors
from omearrow_ds.storage.formats._file_guard import FileGuard, Fingerprint
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.hashes import file_hash, new_hash
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, Manifest

_NUM_STRINGS = 2**16  # Strings converted together when all are iterated.
_SIZES = tuple(f"size_{axis}" for axis in "tczyx")
_STRUCT = pa.struct(
    [
        ("id", pa.string()),
        ("part", pa.int32()),
        ("row", pa.int64()),
        *((name, pa.int32()) for name in _SIZES),
        ("dtype", pa.string()),
        ("checksum", pa.string()),
    ]
)


def write_index(path: Path, index: Index | pa.Table) -> str:
    """Write an image index, or a table read from one, to the Parquet file ``path``; return the hash of the file."""
    pq.write_table(_as_table(index) if isinstance(index, Index) else index, path, compression="zstd")
    return file_hash(path)


def index_hash(index: Index) -> str:
    """Return a hash of the contents of an image index; equal indexes have the same hash in every process."""
    digest = new_hash()
    # A file whose bytes are hashed and not stored; `bool` is a function without effect.
    hashed = SimpleNamespace(write=digest.update, close=bool, flush=bool, closed=False)
    with pa.PythonFile(hashed, mode="w") as sink:
        pq.write_table(_as_table(index), sink, compression="none", use_dictionary=False)
    return digest.hexdigest()


def _as_table(index: Index) -> pa.Table:
    parts, rows = _part_rows(index.starts)
    dtypes = pa.array([dtype.name for dtype in index.dtypes], pa.string())
    checksums = pa.nulls(len(parts), pa.string()) if index.checksums is None else index.checksums.combine_chunks()
    sizes = [pa.array(size, pa.int32()) for size in index.shapes.T]
    ids = pa.array(index.image_ids, pa.string())
    values = [ids, pa.array(parts, pa.int32()), pa.array(rows, pa.int64()), *sizes, dtypes, checksums]
    images = pa.StructArray.from_arrays(values, fields=list(_STRUCT))
    columns = index.columns.combine_chunks()
    return pa.table({schema.SIDECAR_COLUMN: images, **{name: columns[name] for name in columns.column_names}})


class PublishedParts(Parts):
    """Parts of a published collection; only ``parts.json`` and the index are read, for any number of parts.

    ``guard`` detects changes of the manifest.
    """

    def __init__(self, path: Path, open_part: Open, manifest: Manifest, guard: FileGuard) -> None:
        self.path, self.guard, self.manifest = path, guard, manifest
        self._hashed: Fingerprint = ()  # Status of the index file whose hash was compared.
        index = self._read_index()
        guard.refuse_changed()
        files = [path / PARTS / part.name for part in manifest.parts]
        super().__init__(path, get_format(manifest.format), files, index, open_part, guard=guard)

    def find_index(self) -> Path:
        """Return the local path of the image index."""
        return self.path / self.manifest.index_file

    def images(self) -> Concat:
        return Concat(self, image_column=(schema.COLUMN,) if self.format.kind == "table" else ())

    def _read_index(self) -> Index:
        """Return the image index; columns and checksums, which are large, are read on request."""
        with self._open_index() as (index, file):
            if index.schema_arrow.field(schema.SIDECAR_COLUMN).type != _STRUCT:
                refuse(file, f"column {schema.SIDECAR_COLUMN!r} has an unexpected type", "restore the file")
            starts = list(accumulate((part.images for part in self.manifest.parts), initial=0))
            for name, expected in zip(("part", "row"), _part_rows(starts), strict=True):
                if not np.array_equal(numbers(_read_field(index, name)), expected):
                    refuse(file, "images differ from the parts in parts.json", "restore the file")
            ids = _read_field(index, "id")
            if ids.null_count:
                refuse(file, "an image id is null", "restore the file")
            fields = [field for field in index.schema_arrow if field.name != schema.SIDECAR_COLUMN]
            columns = plain_schema(pa.schema(fields), str(file))
            return Index(starts, LazyStrings(ids), _shapes_of(index), _dtypes_of(index), columns, None)

    @contextmanager
    def _open_index(self) -> Iterator[tuple[pq.ParquetFile, Path]]:
        """Yield the open index and its path; the hash of a file is compared with the manifest at its first use."""
        self.guard.refuse_changed()
        file = self.find_index()
        if not file.exists():
            raise MissingPathError(f"{file}: does not exist, but parts.json lists it; restore it")
        refuse_special(file)
        with translate_errors(file, "the index of a collection in parts", (pa.ArrowException, *MALFORMED)):
            status = file.stat()
            fingerprint = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if fingerprint != self._hashed and file_hash(file) != self.manifest.index:
                refuse(file, "differs from the file that parts.json lists", "restore it")
            self._hashed = fingerprint
            with pq.ParquetFile(file, pre_buffer=False) as index:
                yield index, file
        pa.default_memory_pool().release_unused()  # This frees a hundred bytes per image.

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:
        with self._open_index() as (index, _):
            sums = _read_field(index, "checksum")
        return None if sums.null_count == len(sums) else pa.chunked_array([sums])

    def read_columns(self, names: list[str]) -> pa.Table:
        with self._open_index() as (index, file):
            return plain_columns(index.read(names).select(names), str(file))

    def _open_checked(self, number: int) -> Images:
        self.guard.refuse_changed()
        images = super()._open_checked(number)
        if images.header.image_ids != self.index.image_ids[self.starts[number] : self.starts[number + 1]]:
            images.close()
            refuse(self.paths[number], f"image ids differ from those in {INDEX}", "restore the part")
        return images

    def image_columns(self) -> list[ImagesOf]:
        return []  # There is one, and summarizing it would open all parts.

    def files(self) -> Iterator[Path]:
        yield self.path / MANIFEST
        yield self.find_index()
        yield from super().files()

    def __reduce__(self) -> tuple[Any, ...]:
        return open_published, (self.path, self.open_part)


def open_published(path: Path, open_part: Open) -> PublishedParts:
    guard = FileGuard(path, tracked=path / MANIFEST)
    guard.refuse_changed()
    return PublishedParts(path, open_part, Manifest.read(path), guard)


def _read_field(index: pq.ParquetFile, name: str) -> pa.Array:
    """Return one field of an index, read separately because there may be millions of images."""
    table = index.read([f"{schema.SIDECAR_COLUMN}.{name}"])
    return table[schema.SIDECAR_COLUMN].combine_chunks().field(name)


def _shapes_of(index: pq.ParquetFile) -> Array:
    """Return the shapes of the images, as a view of one shape if they are equal."""
    columns, count = [numbers(_read_field(index, name)) for name in _SIZES], index.metadata.num_rows
    columns = [sizes[:1] if count and (sizes == sizes[0]).all() else sizes for sizes in columns]
    if all(len(sizes) == 1 for sizes in columns):
        return np.broadcast_to(np.column_stack(columns).astype(np.int64), (count, len(columns)))
    return np.column_stack([np.broadcast_to(sizes, count) for sizes in columns]).astype(np.int64)


def _dtypes_of(index: pq.ParquetFile) -> list[np.dtype[Any]]:
    names = _read_field(index, "dtype").dictionary_encode()
    known = [np.dtype(name) for name in names.dictionary.to_pylist()]
    return known * len(names) if len(known) == 1 else [known[code] for code in numbers(names.indices).tolist()]


def _part_rows(starts: Sequence[int]) -> tuple[Array, Array]:
    """Return the part of each image, and its row in the part."""
    parts = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return parts, np.arange(len(parts)) - np.array(starts, np.int64)[parts]


class LazyStrings(Sequence[str]):
    """Sequence of the strings in an Arrow array without nulls, equal to any sequence of the same strings."""

    def __init__(self, array: pa.StringArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int | slice) -> Any:
        return LazyStrings(self._array[index]) if isinstance(index, slice) else self._array[index].as_py()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _NUM_STRINGS):
            yield from self._array.slice(first, _NUM_STRINGS).to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyStrings):
            return bool(self._array.equals(other._array))
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # Not hashable, like a list.

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:  # noqa: A002  # Arrow's name
        return self._array if type in (None, self._array.type) else self._array.cast(type)

    def __repr__(self) -> str:
        examples: list[Any] = self._array[:3].to_pylist()
        return f"<{len(self):,} texts: {', '.join(map(repr, examples))}{', ...' if len(self) > len(examples) else ''}>"
