"""ome-arrow's own dataset: a folder of three Parquet tables, of images, of pixel chunks, and of a chunk index.

pyarrow reads and writes it in the layout of ``ome_arrow.OMEArrowDataset`` and ``write_ome_arrow_dataset`` of ome-arrow
0.1.0 (https://github.com/WayScience/ome-arrow). Other metadata, columns and checksums are in an additional table, which
ome-arrow ignores.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import Expected, new_image
from omearrow_ds.codec.encode import Image, binary, prepend_column, with_checksums
from omearrow_ds.codec.leaves import whole_numbers
from omearrow_ds.errors import DecodeError, FormatError, ImageError
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.byte_source import ByteSource, MappedFile
from omearrow_ds.storage.extents import Region, Regions, Targets, Window, chunk_windows, size_of
from omearrow_ds.storage.formats._base import Array, Block, Images, crop_images, forwarded, group_by_part, read_distinct
from omearrow_ds.storage.formats._columns import columns_and_checksums
from omearrow_ds.storage.formats._detect import OME_ARROW_MANIFEST, OME_ARROW_TABLES, SIDECAR, SIDECAR_FORMAT_KEY
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._folder import link_refused
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import kinds_of
from omearrow_ds.storage.formats._parquet_headers import OtherPagesError
from omearrow_ds.storage.formats._parquet_pages import ColumnChunk, DictionaryPages, PageReader, Pages, find_pages
from omearrow_ds.storage.formats._stored import Stored, groups, joined
from omearrow_ds.storage.formats.parquet import CODECS, is_encrypted, page_options, pages_span

_IMAGES, _CHUNKS, _INDEX = OME_ARROW_TABLES
_FILES = (*OME_ARROW_TABLES, OME_ARROW_MANIFEST, SIDECAR)
_AXES = ("t", "c", "z", "y", "x")
_PLACE = {name: pa.int32() for name in (*_AXES, *(f"shape_{axis}" for axis in _AXES))}
_INDEXED = ["image_id", "chunk_id", *_PLACE]  # Columns of a chunk in the index and in its own table.
_IMAGE_FIELDS = {
    **dict.fromkeys(("image_id", "name", "image_type", "dtype"), pa.string()),
    **{f"size_{axis}": pa.int32() for axis in _AXES},
    "layout": pa.string(),
    **{f"chunk_{axis}": pa.int32() for axis in _AXES},
    **dict.fromkeys(("compression", "channels_json"), pa.string()),
}
_IDS = {"image_id": pa.string(), "chunk_id": pa.int64()}
_CHUNK_FIELDS = {**_IDS, **_PLACE, "dtype": pa.string(), "pixel_bytes": pa.large_binary()}
_ROW = {"row_group_id": pa.int32(), "row_index_in_group": pa.int32(), "fragment_path": pa.string()}
_INDEX_FIELDS = {**_IDS, **_ROW, **_PLACE}
# Ids of ome-arrow and of this package, and metadata.
_LISTED = pa.struct([("image_id", pa.string()), ("id", pa.string()), *schema.METADATA])
_LAYOUT = "typed-chunk-dataset"
_KIND = {"type": schema.STRUCT_TAG, "version": schema.STRUCT_VERSION, "layout": _LAYOUT}
_TAGS = {f"ome.arrow.{name}": value for name, value in _KIND.items()}
_GROUP_ROWS, _GROUP_BYTES = 256, 2**24  # of chunks, as in our Parquet: see `docs/explanation/layouts.md`
_MOST_CHUNK_BYTES = 2**31 - 2**16  # Limit of a Parquet page, minus its levels.
_FEW_CHUNKS = "As few chunks per image as Parquet pages allow"
_CHECKED_AHEAD = 512  # Row groups compared with the index at once.
_MOST_ALIKE_BYTES, _MOST_ALIKE = 2**9, 2**10  # of pages whose values are kept, and of how many of a column
_BLOCK_BYTES = 2**24  # Images assembled from several chunks.
ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


class _Chunking(NamedTuple):
    """ome-arrow's name for a way to cut images into chunks, and the shape (T, C, Z, Y, X) of its chunks."""

    name: str
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, image: Image, tile: tuple[int, int] | None) -> _Chunking:
        """Return the layout for ``tile`` or, if None, the layout with the largest chunks that fit in a Parquet page."""
        shape = image.pixels.shape
        ways = [("image", shape), ("volume", (1, 1, *shape[2:])), ("z-plane", (1, 1, 1, *shape[3:]))]
        for name, chunk in ways if tile is None else [("tile", (1, 1, 1, *map(min, shape[3:], tile)))]:
            if math.prod(chunk) * image.pixels.itemsize <= _MOST_CHUNK_BYTES:
                return cls(name, chunk)
        problem = (
            f"a plane or tile of {chunk[3:]} pixels exceeds {_MOST_CHUNK_BYTES:,} bytes, the limit of a Parquet page"
        )
        raise ImageError(f"image {image.image_id!r}: {problem}; pass a smaller chunk_shape=, or write another format")

    def starts(self, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the offset of each chunk in an image of the given shape."""
        return itertools.product(*(range(0, size, step) for size, step in zip(shape, self.chunk, strict=True)))


class _ChunkWriter:
    """Writes the table of chunks one row group at a time, and lists the location of each chunk for the index."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self.places: list[tuple[Any, ...]] = []
        self._writer, self._dtypes = writer, list[str]()
        self._pixels: list[Array] = []
        self._group, self._group_bytes = 0, 0

    def add(self, image: Image, image_id: str, layout: _Chunking) -> None:
        """Add an image under an id that is unique in the dataset; the pixels of a ``fleeting`` image are copied."""
        for start in layout.starts(image.pixels.shape):
            chunk = image.pixels[tuple(map(slice, start, map(add, start, layout.chunk)))]
            if self._pixels and self._group_bytes + chunk.nbytes > _GROUP_BYTES:
                self.flush()
            position = (*start, *chunk.shape)
            self.places.append((image_id, len(self.places), self._group, len(self._pixels), _CHUNKS, *position))
            self._pixels.append(chunk.copy() if image.fleeting else np.ascontiguousarray(chunk))
            self._dtypes.append(chunk.dtype.name)
            self._group_bytes += chunk.nbytes
            if len(self._pixels) == _GROUP_ROWS:
                self.flush()

    def flush(self) -> None:
        """Write the pending chunks as a row group."""
        if not self._pixels:
            return
        index = _table(_INDEX_FIELDS, self.places[-len(self._pixels) :])
        ends = np.cumsum([0, *(pixels.nbytes for pixels in self._pixels)])
        data = np.concatenate([pixels.reshape(-1).view(np.uint8) for pixels in self._pixels])
        columns = {**{name: index[name] for name in index.column_names if name in _CHUNK_FIELDS}, "dtype": self._dtypes}
        columns["pixel_bytes"] = binary(ends, data)
        table = pa.table([columns[name] for name in _CHUNK_FIELDS], schema=_schema(_CHUNK_FIELDS))
        self._writer.write_table(table, row_group_size=len(table))
        self._pixels, self._dtypes = [], []
        self._group, self._group_bytes = self._group + 1, 0


def write_collection(
    images: Iterable[Image], columns: pa.Table, path: Path, compression: str, chunk_shape: tuple[int, int] | None = None
) -> None:
    """Write images, tiled or in as few chunks as possible, and a sidecar file into the new folder ``path``.

    ome-arrow finds an image by its id. If several images share one, as all images of CytoTable do, a number is added to
    the id in ome-arrow's tables.
    """
    rows: list[tuple[Any, ...]] = []
    listed, checksums = [], []
    first: _Chunking | None = None
    known: set[str] = set()
    chunks = _schema(_CHUNK_FIELDS)
    with pq.ParquetWriter(path / _CHUNKS, chunks, **page_options(compression, chunks, ["pixel_bytes"])) as file:
        writer = _ChunkWriter(file)
        for image in images:
            # ome-arrow finds chunks by the image's id, so it must be unique; our own id is kept in the sidecar.
            numbered = (f"{image.image_id}-{number}" for number in itertools.count(len(rows)))
            image_id = next(
                unique_id for unique_id in itertools.chain([image.image_id], numbered) if unique_id not in known
            )
            known.add(image_id)
            layout = _Chunking.of(image, chunk_shape)
            first = first or layout
            writer.add(image, image_id, layout)
            rows.append((image_id, *_image_row(image, layout, compression)))
            listed.append({"image_id": image_id, "id": image.image_id, **image.metadata})
            checksums.append(image.checksum)
        writer.flush()
    _write_table(_table(_IMAGE_FIELDS, rows), path / _IMAGES)
    _write_table(_table(_INDEX_FIELDS, writer.places), path / _INDEX)
    sidecar = prepend_column(schema.SIDECAR_COLUMN, pa.array(listed, _LISTED), with_checksums(columns, checksums))
    pq.write_table(sidecar.replace_schema_metadata({SIDECAR_FORMAT_KEY: b"ome_arrow"}), path / SIDECAR)
    manifest = {
        **_KIND,
        "image_count": len(rows),
        "chunk_count": len(writer.places),
        "choice": {
            "layout": first.name if first else "image",
            "chunk_shape": first.chunk if first else None,
            "compression": _parquet_name(compression),
            "rationale": f"{'Tiles as requested' if chunk_shape else _FEW_CHUNKS}; written by omearrow-ds.",
        },
        "package_versions": {"numpy": np.__version__, "pyarrow": pa.__version__},
    }
    (path / OME_ARROW_MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _image_row(image: Image, layout: _Chunking, compression: str) -> tuple[Any, ...]:
    name, kind = image.metadata["name"] or image.image_id, image.metadata["image_type"]
    described = (_parquet_name(compression), json.dumps(image.metadata["channels"]))
    pixels = image.pixels
    return (name, kind, pixels.dtype.name, *pixels.shape, layout.name, *layout.chunk, *described)


def _parquet_name(compression: str) -> str | None:
    return None if compression == "none" else compression


def _schema(fields: dict[str, pa.DataType]) -> pa.Schema:
    return pa.schema(fields, metadata=_TAGS)


def _table(fields: dict[str, pa.DataType], rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    by_column = zip(*rows, strict=True) if rows else itertools.repeat((), len(fields))
    arrays = [pa.array(values, kind) for values, kind in zip(by_column, fields.values(), strict=True)]
    return pa.table(arrays, schema=_schema(fields))


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=1)


class _Grid(NamedTuple):
    """The rows of the table of chunks: offsets in the image, sizes, and the owning image or -1."""

    starts: Array
    sizes: Array
    owners: Array


class OMEArrowImages(Images):
    """Images of an ome-arrow dataset, whose chunks a `ChunkTable` reads.

    Raises `FormatError` if a table is missing, or an image is invalid.
    """

    name = "ome_arrow"
    storage_info = forwarded("_chunks.storage_info")
    close = forwarded("_chunks.close")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.guard = FileGuard(path, self.format.label, ERRORS)
        self.guard.files = [f"{path}/{name}" for name in _FILES]
        self._refuse_other_folder()
        with self.guard, self.guard.interpreting():
            images = self._table(_IMAGES)
            self._refuse_other_manifest(len(images))
            self._set_images(images)
            self._set_rest(images)
            index = self._table(_INDEX) if (path / _INDEX).exists() else None
            self._chunks = ChunkTable(self, images, index)
        self.close()

    def _refuse_other_folder(self) -> None:
        """Raise `FormatError` if the tables are missing, or one of the files is a symbolic link."""
        if not self.path.is_dir():
            raise FormatError(f"{self.path}: is not a folder, expected an ome-arrow dataset; pass another format=")
        for name in _FILES:
            if (self.path / name).is_symlink():
                raise link_refused(self.path / name)
        missing = [name for name in (_IMAGES, _CHUNKS) if not (self.path / name).exists()]
        if missing:
            raise FormatError(f"{self.path}: {missing[0]} does not exist; restore the folder, or write it again")

    def _refuse_other_manifest(self, count: int) -> None:
        """Raise `FormatError` if the manifest, which is optional for ome-arrow, has another layout or image count."""
        file = self.path / OME_ARROW_MANIFEST
        if not file.exists():
            return
        with self.guard.interpreting(file, "a manifest of ome-arrow"):
            manifest = json.loads(file.read_text(encoding="utf-8"))
            layout, num_images = manifest["layout"], manifest.get("image_count", count)
        if layout != _LAYOUT or num_images != count:
            problem = (
                f"states layout {layout!r} and {num_images} images, expected {_LAYOUT!r} and {count} as in {_IMAGES}"
            )
            raise FormatError(f"{file}: {problem}; restore the folder")

    def _table(self, name: str) -> pa.Table:
        with self.guard.interpreting(self.path / name, "a Parquet file"):
            table = pq.ParquetFile(self.path / name).read()
            table.validate(full=True)
        return table

    def _set_images(self, images: pa.Table) -> None:
        names = {**{f"size_{axis}": f"size_{axis}" for axis in _AXES}, "dtype": "type"}
        arrays = [images[name].combine_chunks() for name in names]
        info = pa.table({"pixels_meta": pa.StructArray.from_arrays(arrays, list(names.values()))})
        kinds = kinds_of(info, f"{self.path / _IMAGES}")
        if kinds.null.any():
            raise FormatError(
                f"{self.path / _IMAGES}: image {kinds.null.argmax()} has neither sizes nor a dtype; restore the file"
            )
        self.shapes, self.dtypes = kinds.shapes, [dtype.newbyteorder("=") for dtype in kinds.dtypes]
        ids = images["image_id"].to_pylist()
        self.image_ids = [str(row if image_id is None else image_id) for row, image_id in enumerate(ids)]
        if len(set(ids)) < len(ids):
            raise FormatError(
                f"{self.path / _IMAGES}: image_id is not unique, so chunks cannot be assigned to images; correct it"
            )
        described = ("name", "image_type", "channels_json")
        self._described = images.select([name for name in described if name in images.column_names])

    def _set_rest(self, images: pa.Table) -> None:
        """Set metadata, columns and checksums from the sidecar table, or from ome-arrow's own table without one."""
        self._listed: pa.Array | None = None
        if not (self.path / SIDECAR).exists():
            others = images.select([name for name in images.column_names if name not in _IMAGE_FIELDS])
            self.columns, self.checksums = columns_and_checksums(others, str(self.path))
            return
        table = self._table(SIDECAR)
        self._listed = table[schema.SIDECAR_COLUMN].combine_chunks()
        if self._listed.field("image_id").to_pylist() != images["image_id"].to_pylist():
            remedy = "restore it, or remove it to read the images without columns"
            raise FormatError(f"{self.path / SIDECAR}: does not list the same images as {_IMAGES}; {remedy}")
        self.image_ids = self._listed.field("id").to_pylist()
        others = table.drop_columns(schema.SIDECAR_COLUMN)
        self.columns, self.checksums = columns_and_checksums(others, str(self.path))

    def read_arrays(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del out
        if regions is None:
            return self._read_images(rows) if len(rows) == 1 else read_distinct(self._read_images, rows)
        return crop_images(self, rows, regions) if self._chunks.is_one_each else self._read_regions(rows, regions)

    def _read_images(self, rows: Sequence[int]) -> list[Array]:
        """Return the images of sorted, distinct rows; an image of one chunk is a view if it is mapped."""
        table = self._chunks
        if table.is_one_each:
            return table.read(rows)
        chunk_rows = sorted(chunk for row in rows for chunk in table.rows_of(row))
        chunks = dict(zip(chunk_rows, table.read(chunk_rows), strict=True))
        images = []
        for row in rows:
            of_image = table.rows_of(row)
            if len(of_image) == 1:
                images.append(chunks[of_image[0]])
                continue
            image = new_image(self.shapes[row].tolist(), self.dtypes[row], f"{self.path}: image {row}")
            for chunk_row, starts in zip(of_image, table.grid.starts[of_image].tolist(), strict=True):
                chunk = chunks[chunk_row]
                image[tuple(map(slice, starts, map(add, starts, chunk.shape)))] = chunk
            images.append(image)
        return images

    def _read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        """Return regions of images; each chunk is decoded once, a few at once unless they are mapped."""
        table, uses = self._chunks, dict[int, list[tuple[int, Window, Window]]]()
        arrays = []
        for number, (row, region) in enumerate(zip(rows, regions, strict=True)):
            chunk_rows = table.rows_of(row)
            chunk_shape = table.grid.sizes[chunk_rows[0]].tolist()
            grid = -(-self.shapes[row] // chunk_shape)
            for chunk, inner, outer in chunk_windows(region, chunk_shape):
                chunk_row = chunk_rows[int(np.ravel_multi_index(chunk, grid))]
                uses.setdefault(chunk_row, []).append((number, inner, outer))
            arrays.append(new_image(size_of(region), self.dtypes[row], f"{self.path}: image {row}"))
        sorted_rows = sorted(uses)
        pieces = [slice(None)]
        if sorted_rows and not self.is_in_place:
            pixels = table.grid.sizes[sorted_rows].prod(axis=1)
            sizes_bytes = pixels * [self.dtypes[owner].itemsize for owner in table.grid.owners[sorted_rows].tolist()]
            pieces = list(split_by_bytes(sizes_bytes, _BLOCK_BYTES))
        for piece in pieces:
            for chunk_row, pixels in zip(sorted_rows[piece], table.read(sorted_rows[piece]), strict=True):
                for number, inner, outer in uses[chunk_row]:
                    arrays[number][outer] = pixels[inner]
        return arrays

    def read_groups(self) -> Iterable[slice]:
        return split_by_bytes(image_bytes(self.shapes, self.dtypes), _BLOCK_BYTES)

    def stream(self) -> Iterator[Block]:
        return self._chunks.stream() if self._chunks.is_one_each else super().stream()

    def metadata(self, index: int) -> dict[str, Any]:
        with self.guard.interpreting():
            if self._listed is not None:
                record = self._listed[index].as_py()
            else:
                record = self._described.slice(index, 1).to_pylist()[0]
                record["channels"] = json.loads(record.pop("channels_json", None) or "[]")
            channels = [schema.channel_of(channel or {}) for channel in record["channels"] or []]
            fields = {name: record.get(name) for name in schema.METADATA_FIELDS} | {"channels": channels}
            metadata: dict[str, Any] = pa.scalar(fields, schema.METADATA).as_py()
        return metadata


class ChunkTable:
    """Table of chunks of an ome-arrow dataset, read from memory-mapped Parquet pages or, if that fails, by pyarrow.

    Chunk locations come from the index if it fits the table, and are compared with the table when a row group is first
    read. Raises `FormatError` if the chunks of an image do not fill it.
    """

    def __init__(self, images: OMEArrowImages, table: pa.Table, index: pa.Table | None) -> None:
        self._path, self._guard = images.path, images.guard
        self._shapes, self._dtypes, self._image_ids = images.shapes, images.dtypes, images.image_ids
        self._alike: dict[str, dict[Any, list[Any]]] = {}  # values of short pages, by column and bytes
        self._file = ProcessLocal(self._open)
        self._pages = ProcessLocal(self._open_reader)
        file = self._file.get()
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        self._leaf = paths.index("pixel_bytes")
        self._told_leaves = {name: paths.index(name) for name in (*_INDEXED, "dtype") if name in paths}
        leaf = file.schema.column(self._leaf)
        self._levels = leaf.max_definition_level
        self._cut = (
            not leaf.max_repetition_level and self._levels < 2 and not is_encrypted(self._pages.get().file, file)
        )
        counts = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
        self.starts = list(itertools.accumulate(counts, initial=0))
        chunks = None if index is None else self._ordered(index)
        self._unchecked = set(range(file.num_row_groups)) if chunks is not None else set[int]()
        if chunks is None:
            chunks = file.read(columns=["image_id", "chunk_id", "dtype", *_PLACE])
        if len(chunks) != self.starts[-1]:
            raise FormatError(
                f"{self._path / _CHUNKS}: the file has {len(chunks):,} rows, expected {self.starts[-1]:,}; restore it"
            )
        positions = np.stack([whole_numbers(chunks[name].combine_chunks()) for name in _PLACE], axis=1)
        owners = pc.index_in(chunks["image_id"], value_set=table["image_id"]).fill_null(-1).to_numpy()
        self.grid = _Grid(positions[:, :5], positions[:, 5:], owners)
        self._told = chunks.select(_INDEXED)
        if "dtype" in chunks.column_names:
            self._refuse_other_dtypes(chunks["dtype"].to_pylist(), owners)
        rows = np.lexsort((*self.grid.starts.T[::-1], owners))
        rows = rows[np.searchsorted(owners[rows], 0) :]
        self._firsts = np.searchsorted(owners[rows], np.arange(len(self._shapes) + 1)).tolist()
        self._refuse_gaps(rows)
        self._rows: list[int] = rows.tolist()
        self.is_one_each = len(rows) == len(owners) == len(self._shapes) and bool((rows == np.arange(len(rows))).all())

    def rows_of(self, image: int) -> list[int]:
        """Return the rows of the chunks of an image in C order."""
        return self._rows[self._firsts[image] : self._firsts[image + 1]]

    def _ordered(self, index: pa.Table) -> pa.Table | None:
        """Return the index in chunk order, or None unless it lists each chunk exactly once."""
        if set(_INDEX_FIELDS) - set(index.column_names) or len(index) != self.starts[-1]:
            return None
        number, row = (whole_numbers(index[name].combine_chunks()) for name in ("row_group_id", "row_index_in_group"))
        starts = np.array(self.starts)
        is_valid = (number >= 0) & (number < len(starts) - 1) & (row >= 0)
        rows = np.where(is_valid, starts[np.where(is_valid, number, 0)] + row, -1)
        is_valid &= rows < starts[np.where(is_valid, number + 1, 0)]
        whole = is_valid.all() and pc.all(pc.equal(index["fragment_path"], _CHUNKS)).as_py() is not False
        if not whole or not np.array_equal(np.sort(rows), np.arange(len(rows))):
            return None
        return index.take(pa.array(np.argsort(rows)))

    def _refuse_other_dtypes(self, names: Sequence[str | None], owners: Array) -> None:
        """Raise `FormatError` if chunks have another dtype than their images."""
        for name, owner in zip(names, owners.tolist(), strict=True):
            if owner >= 0 and name not in (self._dtypes[owner].name, self._dtypes[owner].str):
                subject = f"{self._path}: image {owner} ({self._image_ids[owner]!r})"
                problem = f"dtype is {self._dtypes[owner]}, but a chunk has {name}"
                raise FormatError(f"{subject}: {problem}; the folder is damaged, restore it")

    def _refuse_gaps(self, rows: Array) -> None:
        """Raise `FormatError` unless the sorted chunk ``rows`` of each image form a grid that fills it."""
        firsts = np.array(self._firsts)
        counts = np.diff(firsts)
        good = counts > 0
        starts, sizes, owners = (values[rows] for values in self.grid)
        steps = np.ones_like(self._shapes)
        if len(rows):
            steps[good] = np.maximum.reduceat(sizes, firsts[:-1][good]).clip(1)
        step, left = steps[owners], self._shapes[owners] - starts
        fits = (starts >= 0) & (left > 0) & (starts % step == 0) & (sizes == np.minimum(step, left))
        twice = np.append((np.diff(starts, axis=0) == 0).all(axis=1) & (np.diff(owners) == 0), False)
        good &= np.bincount(owners[~fits.all(axis=1) | twice[: len(rows)]], minlength=len(self._shapes)) == 0
        good &= counts == (-(-self._shapes // steps)).prod(axis=1)
        if not good.all():
            bad = int(good.argmin())
            problem = f"{counts[bad]:,} chunks do not cover each pixel exactly once; the folder is damaged, restore it"
            raise FormatError(f"{self._path}: image {bad} ({self._image_ids[bad]!r}): {problem}")

    def _open(self) -> pq.ParquetFile:
        with self._guard:
            return pq.ParquetFile(self._path / _CHUNKS, memory_map=True, pre_buffer=False)

    def _open_reader(self) -> PageReader:
        with self._guard:
            return PageReader(MappedFile(self._path / _CHUNKS), self._find_pages)

    def close(self) -> None:
        self._file.close()
        self._pages.close()

    def read(self, rows: Sequence[int]) -> list[Array]:
        """Return chunks, each with its shape, by their sorted rows in the table of chunks."""
        chunks: list[Array] = []
        pages = self._pages.get()
        parts = group_by_part(self.starts, rows)
        unchecked = [number for number, _ in parts if number in self._unchecked] if self._unchecked else []
        for first in range(0, len(unchecked), _CHECKED_AHEAD):
            self._check_groups(unchecked[first : first + _CHECKED_AHEAD])
        in_groups = [(number, [row - self.starts[number] for row in part]) for number, part in parts]
        for (number, part), read in zip(parts, pages.read(in_groups), strict=True):
            chunks += self._of_group(number, part) if read is None else read
        return chunks

    def _find_pages(self, file: ByteSource, number: int) -> Pages:
        """Return the pages of a row group of chunks; called once per row group and process."""
        if number in self._unchecked:
            self._check_groups(range(number, min(number + _CHECKED_AHEAD, len(self.starts) - 1)))
        self._check_group(number)
        if not self._cut:
            raise OtherPagesError
        stored = self._file.get().metadata.row_group(number).column(self._leaf)
        of_group = slice(self.starts[number], self.starts[number + 1])
        owners = self.grid.owners[of_group].tolist()
        if stored.file_path or -1 in owners or stored.compression not in ("UNCOMPRESSED", *CODECS):
            raise OtherPagesError
        dtypes = [self._dtypes[owner] for owner in owners]
        if stored.has_dictionary_page:
            start, codec = stored.dictionary_page_offset, CODECS.get(stored.compression)
            chunk = ColumnChunk(start, start + stored.total_compressed_size, len(owners), False, codec, self._levels)
            return DictionaryPages(file, chunk, stored.data_page_offset, self.grid.sizes[of_group].tolist(), dtypes)
        rows = np.arange(of_group.start, of_group.stop)
        expected = Expected(str(self._path), rows, self.grid.sizes[rows], dtypes)
        return find_pages(file, pages_span(stored, levels=self._levels), expected, np.ones(len(rows), np.int64))

    def _check_groups(self, numbers: Sequence[int]) -> None:
        """Compare row groups with the index, all at once; on a mismatch, `_check_group` later finds the fault.

        Equal page bytes hold equal values: with one chunk per row group, most pages are equal.
        """
        numbers = [number for number in numbers if number in self._unchecked]
        if not self._cut or len(self._told_leaves) <= len(_INDEXED) or not numbers:
            return
        try:
            stored = self._values_of(numbers)
        except ERRORS:
            return
        rows = np.concatenate([np.arange(*self.starts[number : number + 2]) for number in numbers])
        positions = np.concatenate([self.grid.starts[rows], self.grid.sizes[rows]], axis=1).T.tolist()
        expected = dict(zip(_PLACE, positions, strict=True))
        expected |= {name: self._told[name].take(pa.array(rows)).to_pylist() for name in ("image_id", "chunk_id")}
        dtypes = [self._dtypes[owner] for owner in self.grid.owners[rows].tolist()]
        names = {dtype: dtype.name for dtype in set(dtypes)}
        expected["dtype"] = [names[dtype] for dtype in dtypes]
        if stored == expected:
            self._unchecked.difference_update(numbers)

    def _values_of(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return the stored locations, ids and dtypes of the chunks of row groups, by column."""
        file, pages = self._file.get(), self._pages.get()
        pages.file.refuse_changed()
        stored = [file.metadata.row_group(number) for number in numbers]
        counts = [self.starts[number + 1] - self.starts[number] for number in numbers]
        keys: dict[str, list[Any]] = {}
        missing: dict[tuple[int, ...], list[str]] = {}
        for name, leaf in self._told_leaves.items():
            known = self._alike.setdefault(name, {})
            if len(known) > _MOST_ALIKE:
                known = self._alike[name] = {}
            keys[name] = [_key_of(pages.file, group.column(leaf), _MOST_ALIKE_BYTES) for group in stored]
            to_read = {key: position for position, key in enumerate(keys[name]) if key not in known}
            missing.setdefault(tuple(to_read.values()), []).append(name)
        by_column = {name: dict(self._alike[name]) for name in keys}
        for positions, names in missing.items():
            table = file.read_row_groups(
                [numbers[position] for position in positions], columns=names, use_threads=False
            )
            for name in names:
                values = iter(table[name].to_pylist())
                read = {
                    keys[name][position]: list(itertools.islice(values, counts[position])) for position in positions
                }
                by_column[name] |= read
                self._alike[name] |= {key: item for key, item in read.items() if isinstance(key, bytes)}
        return {name: [item for key in keys[name] for item in by_column[name][key]] for name in keys}

    def _check_group(self, number: int) -> None:
        """Raise `FormatError` if the chunks of a row group differ from the index; check each row group only once."""
        if number not in self._unchecked:
            return
        start, stop = self.starts[number : number + 2]
        table = self._read_group(number, [*_INDEXED, "dtype"])
        stored = table.select(_INDEXED)
        with self._guard.interpreting():
            same = stored.equals(self._told.slice(start, stop - start).cast(stored.schema))
        if not same:
            remedy = f"remove {_INDEX}, or write the folder again"
            raise FormatError(
                f"{self._path / _INDEX}: differs from the chunks in row group {number} of {_CHUNKS}; {remedy}"
            )
        self._refuse_other_dtypes(table["dtype"].to_pylist(), self.grid.owners[start:stop])
        self._unchecked.discard(number)

    def _read_group(self, number: int, columns: list[str]) -> pa.Table:
        self._pages.get().file.refuse_changed()  # pyarrow maps the file as well
        with self._guard.reading():
            table = self._file.get().read_row_group(number, columns=columns, use_threads=False)
        expected = self.starts[number + 1] - self.starts[number]
        if len(table) != expected:
            problem = f"row group {number} has {len(table):,} rows, but the footer states {expected:,}"
            raise FormatError(f"{self._path / _CHUNKS}: {problem}; the file is damaged, restore it")
        return table

    def _of_group(self, number: int, rows: Sequence[int]) -> list[Array]:
        """Return chunks of one row group, which pyarrow decodes as a whole."""
        column = self._read_group(number, ["pixel_bytes"])["pixel_bytes"].combine_chunks()
        return [self._chunk(row, column[row - self.starts[number]].as_buffer()) for row in rows]

    def _chunk(self, row: int, pixels: pa.Buffer | None) -> Array:
        owner = int(self.grid.owners[row])
        dtype, shape = self._dtypes[owner], tuple(self.grid.sizes[row].tolist())
        expected = math.prod(shape) * dtype.itemsize
        if pixels is None or pixels.size != expected:
            problem = (
                f"a chunk has {0 if pixels is None else pixels.size:,} bytes of pixels, expected {expected:,} bytes"
            )
            raise DecodeError(f"{self._path}: image {owner}: {problem}; the file is damaged, restore it")
        return np.frombuffer(pixels, dtype).reshape(shape)

    def storage_info(self) -> Stored:
        file = self._file.get()
        numbers = [] if is_encrypted(self._pages.get().file, file) else range(file.num_row_groups)
        leaves = [file.metadata.row_group(number).column(self._leaf) for number in numbers]
        codecs = [leaf.compression for leaf in leaves]
        compression = joined("none" if codec == "UNCOMPRESSED" else codec.lower() for codec in codecs)
        cut = self._cut and {*codecs} <= {"UNCOMPRESSED", *CODECS}
        layouts = "one per image" if self.is_one_each else f"of {len(self._shapes):,} images"
        row_groups = groups(self.starts, "row group").replace("image", "chunk")
        chunking = f"{self.starts[-1]:,} chunks, {layouts}, in {row_groups}"
        if cut:
            reading = "in place: from the mapped file" if compression == "none" else "from the mapped file"
            alone = "a row group" if any(leaf.has_dictionary_page for leaf in leaves) else "a page"
            reading += "" if compression == "none" else f"; {alone} is decompressed separately"
        else:
            reading = "by pyarrow, which decodes a row group per chunk"
        return Stored(None, compression, chunking, cut and compression == "none", reading)

    def stream(self) -> Iterator[Block]:
        """Yield all chunks, each of which is an image."""
        return self._pages.get().stream(self.starts, self._of_group)


open_collection = OMEArrowImages


def _key_of(file: ByteSource, stored: pq.ColumnChunkMetaData, max_bytes: int) -> bytes | object:
    """Return a key that short column chunks with equal values share; a unique object for longer ones."""
    start, num_bytes = stored.data_page_offset, stored.total_compressed_size
    if stored.has_dictionary_page:
        start = min(start, stored.dictionary_page_offset)
    if num_bytes > max_bytes or stored.file_path:
        return object()
    return f"{stored.num_values} {stored.compression} ".encode() + bytes(
        file.read_ranges([(start, start + num_bytes)])[0]
    )
