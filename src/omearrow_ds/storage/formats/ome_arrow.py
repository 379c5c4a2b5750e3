"""ome-arrow's own dataset: a folder of three Parquet tables, of images, of pixel chunks, and of a chunk index.

pyarrow reads and writes it in the layout of ``ome_arrow.OMEArrowDataset`` and ``write_ome_arrow_dataset`` of ome-arrow
0.1.0 (https://github.com/WayScience/ome-arrow). Other metadata, columns and checksums are in an additional table, which
ome-arrow ignores.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import add, attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import Expected, new_image
from omearrow_ds.codec.encode import Image, binary, table_of
from omearrow_ds.codec.leaves import whole_numbers
from omearrow_ds.errors import DecodeError, FormatError, ImageError
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.byte_source import ByteSource, MappedFile
from omearrow_ds.storage.extents import Region, Regions, Targets, Window, file_windows, size_of, whole_windows
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import (
    Array,
    Block,
    Details,
    Header,
    Images,
    crop_images,
    local_files,
    read_distinct,
)
from omearrow_ds.storage.formats._columns import ImageColumns, columns_and_checksums
from omearrow_ds.storage.formats._detect import OME_ARROW_MANIFEST, OME_ARROW_TABLES, SIDECAR, SIDECAR_FORMAT_KEY
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._folder import link_refused
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import PIXELS_META, kinds_of
from omearrow_ds.storage.formats._parquet_pages import DictionaryPages, PageReader, Pages, find_pages
from omearrow_ds.storage.formats._stored import Stored, groups
from omearrow_ds.storage.formats.parquet import (
    CODECS,
    column_chunks,
    describe_codecs,
    is_encrypted,
    other_rows,
    page_options,
    pages_span,
)
from omearrow_ds.storage.image_extents import OtherLayoutError

_IMAGES, _CHUNKS, _INDEX = OME_ARROW_TABLES
_FILES = (*OME_ARROW_TABLES, OME_ARROW_MANIFEST, SIDECAR)
_AXES = ("t", "c", "z", "y", "x")
_POSITION_FIELDS = {name: pa.int32() for name in (*_AXES, *(f"shape_{axis}" for axis in _AXES))}
_IMAGE_FIELDS = {
    **dict.fromkeys(("image_id", "name", "image_type", "dtype"), pa.string()),
    **{f"size_{axis}": pa.int32() for axis in _AXES},
    "layout": pa.string(),
    **{f"chunk_{axis}": pa.int32() for axis in _AXES},
    **dict.fromkeys(("compression", "channels_json"), pa.string()),
}
_ID_FIELDS = {"image_id": pa.string(), "chunk_id": pa.int64()}
_CHUNK_FIELDS = {**_ID_FIELDS, **_POSITION_FIELDS, "dtype": pa.string(), "pixel_bytes": pa.large_binary()}
_ROW_FIELDS = {"row_group_id": pa.int32(), "row_index_in_group": pa.int32(), "fragment_path": pa.string()}
_INDEX_FIELDS = {**_ID_FIELDS, **_ROW_FIELDS, **_POSITION_FIELDS}
# Ids of ome-arrow and of this package, and metadata.
_LISTED = pa.struct([("image_id", pa.string()), ("id", pa.string()), *schema.METADATA])
_LAYOUT = "typed-chunk-dataset"
_KIND = {"type": schema.STRUCT_TAG, "version": schema.STRUCT_VERSION, "layout": _LAYOUT}
_TAGS = {f"ome.arrow.{name}": value for name, value in _KIND.items()}
_GROUP_ROWS, _GROUP_BYTES = 256, 2**24  # Limits of a row group of chunks, from `docs/explanation/layouts.md`.
_MOST_CHUNK_BYTES = 2**31 - 2**16  # Limit of a Parquet page, minus its levels.
_FEW_CHUNKS = "As few chunks per image as Parquet pages allow"
_BLOCK_BYTES = 2**24  # Decoded chunks, or images, that are in memory together while they are read.
ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


def _choose_chunk(image: Image, tile: tuple[int, int] | None) -> tuple[str, tuple[int, ...]]:
    """Return ome-arrow's name for a way to cut an image, and the shape of chunks: the largest for a Parquet page."""
    shape = image.pixels.shape
    ways = [("image", shape), ("volume", (1, 1, *shape[2:])), ("z-plane", (1, 1, 1, *shape[3:]))]
    for name, chunk in ways if tile is None else [("tile", (1, 1, 1, *map(min, shape[3:], tile)))]:
        if math.prod(chunk) * image.pixels.itemsize <= _MOST_CHUNK_BYTES:
            return name, chunk
    limit = f"{_MOST_CHUNK_BYTES:,} bytes, the limit of a Parquet page"
    problem = f"a plane or tile of {chunk[3:]} pixels exceeds {limit}"
    raise ImageError(f"image {image.image_id!r}: {problem}; pass a smaller chunk_shape=, or write another format")


class _ChunkWriter:
    """Writer of the table of chunks, one row group at a time; ``locations`` are the rows of the index."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self.locations = list[tuple[Any, ...]]()
        self._writer, self._pixels = writer, list[Array]()
        self._group, self._group_bytes = 0, 0

    def add(self, image: Image, image_id: str, chunk_shape: Sequence[int]) -> None:
        """Add an image under an id that is unique in the dataset; the pixels of a ``fleeting`` image are copied."""
        for start in itertools.product(*map(range, [0] * 5, image.pixels.shape, chunk_shape)):
            chunk = image.pixels[tuple(map(slice, start, map(add, start, chunk_shape)))]
            if self._pixels and self._group_bytes + chunk.nbytes > _GROUP_BYTES:
                self.flush()
            position = (*start, *chunk.shape)
            self.locations.append((image_id, len(self.locations), self._group, len(self._pixels), _CHUNKS, *position))
            self._pixels.append(chunk.copy() if image.fleeting else np.ascontiguousarray(chunk))
            self._group_bytes += chunk.nbytes
            if len(self._pixels) == _GROUP_ROWS:
                self.flush()

    def flush(self) -> None:
        """Write the pending chunks as a row group."""
        if not self._pixels:
            return
        index = _table(_INDEX_FIELDS, self.locations[-len(self._pixels) :])
        ends = np.cumsum([0, *(pixels.nbytes for pixels in self._pixels)])
        data = np.concatenate([pixels.reshape(-1).view(np.uint8) for pixels in self._pixels])
        dtypes = [pixels.dtype.name for pixels in self._pixels]
        columns = [*index.select([*_ID_FIELDS, *_POSITION_FIELDS]).columns, dtypes, binary(ends, data)]
        self._writer.write_table(pa.table(columns, schema=_schema(_CHUNK_FIELDS)), row_group_size=len(dtypes))
        self._pixels, self._group, self._group_bytes = [], self._group + 1, 0


def write_collection(
    images: Iterable[Image], columns: pa.Table, path: Path, compression: str, chunk_shape: tuple[int, int] | None = None
) -> None:
    """Write images, tiled or in as few chunks as possible, and a sidecar file into the new folder ``path``."""
    rows = list[tuple[Any, ...]]()
    listed, checksums, codec = [], [], None if compression == "none" else compression
    first: tuple[str, tuple[int, ...] | None] | None = None
    known = set[str]()
    chunks = _schema(_CHUNK_FIELDS)
    with pq.ParquetWriter(path / _CHUNKS, chunks, **page_options(compression, chunks, ["pixel_bytes"])) as file:
        writer = _ChunkWriter(file)
        for image in images:
            # ome-arrow finds chunks by the image's id. If several share one, as all images of CytoTable do, a number is
            # added; the sidecar has the id itself.
            image_id, numbers = image.image_id, itertools.count(len(rows))
            while image_id in known:
                image_id = f"{image.image_id}-{next(numbers)}"
            known.add(image_id)
            layout, chunk = _choose_chunk(image, chunk_shape)
            first = first or (layout, chunk)
            writer.add(image, image_id, chunk)
            metadata, pixels = image.metadata, image.pixels
            described = image_id, metadata["name"] or image.image_id, metadata["image_type"]
            stored = pixels.dtype.name, *pixels.shape, layout, *chunk, codec
            rows.append((*described, *stored, json.dumps(metadata["channels"])))
            listed.append({"image_id": image_id, "id": image.image_id, **image.metadata})
            checksums.append(image.checksum)
        writer.flush()
    first = first or ("image", None)
    _write_table(_table(_IMAGE_FIELDS, rows), path / _IMAGES)
    _write_table(_table(_INDEX_FIELDS, writer.locations), path / _INDEX)
    sidecar = table_of(schema.SIDECAR_COLUMN, pa.array(listed, _LISTED), columns, checksums)
    pq.write_table(sidecar.replace_schema_metadata({SIDECAR_FORMAT_KEY: b"ome_arrow"}), path / SIDECAR)
    manifest = {
        **_KIND,
        "image_count": len(rows),
        "chunk_count": len(writer.locations),
        "choice": {
            "layout": first[0],
            "chunk_shape": first[1],
            "compression": codec,
            "rationale": f"{'Tiles as requested' if chunk_shape else _FEW_CHUNKS}; written by omearrow-ds.",
        },
        "package_versions": {"numpy": np.__version__, "pyarrow": pa.__version__},
    }
    (path / OME_ARROW_MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _schema(fields: dict[str, pa.DataType]) -> pa.Schema:
    return pa.schema(fields, metadata=_TAGS)


def _table(fields: dict[str, pa.DataType], rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    by_column = zip(*rows, strict=True) if rows else itertools.repeat((), len(fields))
    arrays = [pa.array(values, kind) for values, kind in zip(by_column, fields.values(), strict=True)]
    return pa.table(arrays, schema=_schema(fields))


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=1)


class OMEArrowImages(Images):
    """Images of an ome-arrow dataset, whose chunks a `ChunkTable` reads."""

    def __init__(self, path: Path) -> None:
        fmt = get_format("ome_arrow")
        guard = self._guard = FileGuard(path, fmt.label, ERRORS)
        guard.files = [f"{path}/{name}" for name in _FILES]
        _refuse_other_folder(path)
        with guard, guard.interpreting():
            images = _read_table(guard, _IMAGES)
            _refuse_other_manifest(guard, len(images))
            stored_ids = images["image_id"]
            image_ids, shapes, dtypes = _read_kinds(images, path / _IMAGES)
            image_ids, self._records, columns = _read_records(guard, images, image_ids)
            self.header = header = Header(
                format=fmt,
                path=path,
                guard=guard,
                image_ids=image_ids,
                shapes=shapes,
                dtypes=dtypes,
                columns=columns,
                row_count=len(image_ids),
                find_groups=lambda: split_by_bytes(image_bytes(shapes, dtypes), _BLOCK_BYTES),
            )

        @cache
        def open_chunks() -> ChunkTable:  # At the first image: this takes 0.15 ms per row group.
            with guard, guard.interpreting():
                return ChunkTable(header, stored_ids)

        self._chunks = open_chunks  # It does not refer to this object, which is freed without the garbage collector.
        self.details = Details(
            storage_info=lambda: open_chunks().storage_info(), files=partial(local_files, path, guard)
        )

    def close(self) -> None:
        if self._chunks.cache_info().currsize:
            self._chunks().close()

    def __reduce__(self) -> tuple[Any, ...]:
        return OMEArrowImages, (self.header.path,)

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del out
        if not self._chunks().is_one_each:
            return self._read_regions(rows, regions or [None] * len(rows))
        if regions is not None:
            return crop_images(self, rows, regions)
        read = self._chunks().read
        return read(rows) if len(rows) == 1 else read_distinct(read, rows)

    def _read_regions(self, rows: Sequence[int], regions: Sequence[Region | None]) -> list[Array]:
        """Return regions, or whole images for None; each chunk is decoded once, `_BLOCK_BYTES` of them at a time."""
        table, header, uses = self._chunks(), self.header, dict[int, list[tuple[int, Window, Window]]]()
        arrays = []
        for number, (row, region) in enumerate(zip(rows, regions, strict=True)):
            chunk_rows, shape = table.rows_of(row), tuple(header.shapes[row].tolist())
            grid = shape, tuple(table.sizes[chunk_rows[0]].tolist()), (1,) * len(shape)
            windows = whole_windows(*grid) if region is None else file_windows(region, *grid)
            for index, _, inner, outer in windows:
                uses.setdefault(chunk_rows[index], []).append((number, inner, outer))
            size = shape if region is None else size_of(region)
            arrays.append(new_image(size, header.dtypes[row], f"{header.path}: image {row}"))
        sorted_rows = sorted(uses)
        itemsizes = [header.dtypes[owner].itemsize for owner in table.owners[sorted_rows].tolist()]
        for piece in split_by_bytes(table.sizes[sorted_rows].prod(axis=1) * itemsizes, _BLOCK_BYTES):
            for chunk_row, pixels in zip(sorted_rows[piece], table.read(sorted_rows[piece]), strict=True):
                for number, inner, outer in uses[chunk_row]:
                    arrays[number][outer] = pixels[inner]
        return arrays

    def stream(self) -> Iterator[Block]:
        return self._chunks().stream() if self._chunks().is_one_each else super().stream()

    def metadata(self, index: int) -> dict[str, Any]:
        with self._guard.interpreting():
            record = self._records[index].as_py()
            listed = record["channels"] if "channels" in record else json.loads(record.get("channels_json") or "[]")
            channels = [schema.channel_of(channel or {}) for channel in listed or []]
            fields = {name: record.get(name) for name in schema.METADATA_FIELDS} | {"channels": channels}
            metadata: dict[str, Any] = pa.scalar(fields, schema.METADATA).as_py()
        return metadata


def _refuse_other_folder(path: Path) -> None:
    """Raise `FormatError` if the tables are missing, or one of the files is a symbolic link."""
    if not path.is_dir():
        raise FormatError(f"{path}: is not a folder, expected an ome-arrow dataset; pass another format=")
    for name in _FILES:
        if (path / name).is_symlink():
            raise link_refused(path / name)
    missing = [name for name in (_IMAGES, _CHUNKS) if not (path / name).exists()]
    if missing:
        raise FormatError(f"{path}: {missing[0]} does not exist; restore the folder, or write it again")


def _refuse_other_manifest(guard: FileGuard, count: int) -> None:
    """Raise `FormatError` if the manifest, which is optional for ome-arrow, has another layout or image count."""
    file = guard.path / OME_ARROW_MANIFEST
    if not file.exists():
        return
    with guard.interpreting(file, "a manifest of ome-arrow"):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        layout, num_images = manifest["layout"], manifest.get("image_count", count)
    if layout != _LAYOUT or num_images != count:
        stated, expected = f"layout {layout!r} and {num_images} images", f"{_LAYOUT!r} and {count} as in {_IMAGES}"
        raise FormatError(f"{file}: states {stated}, expected {expected}; restore the folder")


def _read_table(guard: FileGuard, name: str) -> pa.Table:
    with guard.interpreting(guard.path / name, "a Parquet file"):
        table = pq.ParquetFile(guard.path / name).read()
        table.validate(full=True)
    return table


def _read_kinds(images: pa.Table, path: Path) -> tuple[list[str], Array, list[np.dtype[Any]]]:
    """Return ids, shapes and dtypes; raise `FormatError` if an id is not unique, or a value is invalid."""
    arrays = [images[name.replace("type", "dtype")].combine_chunks() for name in PIXELS_META]
    info = pa.table({"pixels_meta": pa.StructArray.from_arrays(arrays, PIXELS_META)})
    kinds = kinds_of(info, str(path))
    if kinds.null.any():
        raise FormatError(f"{path}: image {kinds.null.argmax()} has neither sizes nor a dtype; restore the file")
    ids = images["image_id"].to_pylist()
    if len(set(ids)) < len(ids):
        raise FormatError(f"{path}: image_id is not unique, so chunks cannot be assigned to images; correct it")
    image_ids = [str(row if image_id is None else image_id) for row, image_id in enumerate(ids)]
    return image_ids, kinds.shapes, [dtype.newbyteorder("=") for dtype in kinds.dtypes]


def _read_records(
    guard: FileGuard, images: pa.Table, image_ids: list[str]
) -> tuple[list[str], pa.StructArray, ImageColumns]:
    """Return ids, metadata and columns from the sidecar if it exists, else from ome-arrow's own table."""
    sidecar = guard.path / SIDECAR
    if sidecar.exists():
        table = _read_table(guard, SIDECAR)
        records = table[schema.SIDECAR_COLUMN].combine_chunks()
        if records.field("image_id").to_pylist() != images["image_id"].to_pylist():
            remedy = "restore it, or remove it to read the images without columns"
            raise FormatError(f"{sidecar}: does not list the same images as {_IMAGES}; {remedy}")
        image_ids = records.field("id").to_pylist()
        others = table.drop_columns(schema.SIDECAR_COLUMN)
    else:
        others = images.select([name for name in images.column_names if name not in _IMAGE_FIELDS])
        described = {"image_id", "name", "image_type", "channels_json"} & set(images.column_names)
        records = images.select(sorted(described)).to_struct_array().combine_chunks()
    columns, checksums = columns_and_checksums(others, str(guard.path))
    return image_ids, records, ImageColumns(guard.path, image_ids, columns, None, lambda: checksums)


class ChunkTable:
    """Table of chunks of an ome-arrow dataset, read from memory-mapped Parquet pages or, if that fails, by pyarrow.

    Chunks are located by their own columns: those of the index take as long to read, and could contradict them. Raises
    `FormatError` if the chunks of an image do not fill it.
    """

    def __init__(self, header: Header, image_ids: pa.ChunkedArray) -> None:
        self._header, self._path, self._guard = header, header.path, header.guard
        self._file = ProcessLocal(self._open)
        self._pages = ProcessLocal(self._open_reader)
        file = self._file.get()
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        self._leaf = paths.index("pixel_bytes")
        leaf = file.schema.column(self._leaf)
        self._levels = leaf.max_definition_level
        is_flat = not leaf.max_repetition_level and self._levels < 2
        self._has_pages = is_flat and not is_encrypted(self._pages.get().file, file)
        row_groups = [*map(file.metadata.row_group, range(file.num_row_groups))]
        self.starts = list(itertools.accumulate(map(attrgetter("num_rows"), row_groups), initial=0))
        leaves = {name: paths.index(name) for name in ("image_id", "dtype", *_POSITION_FIELDS) if name in paths}
        constants = _read_constants(row_groups, leaves, file.schema_arrow) if self._has_pages else {}
        chunks = file.read(columns=[name for name in leaves if name not in constants])
        if len(chunks) != self.starts[-1]:
            raise other_rows(self._path / _CHUNKS, len(chunks), self.starts[-1], "a column")
        for name, values in constants.items():
            chunks = chunks.append_column(name, values)
        positions = np.stack([whole_numbers(chunks[name].combine_chunks()) for name in _POSITION_FIELDS], axis=1)
        self.sizes = positions[:, 5:]
        # Image of each chunk; -1 if the table of images does not list it.
        self.owners = whole_numbers(pc.index_in(chunks["image_id"], value_set=image_ids).combine_chunks())
        if "dtype" in chunks.column_names:
            self._refuse_other_dtypes(chunks["dtype"].to_pylist())
        rows = np.lexsort((*positions[:, 4::-1].T, self.owners))
        rows = rows[np.searchsorted(self.owners[rows], 0) :]
        self._firsts = np.searchsorted(self.owners[rows], np.arange(len(header.shapes) + 1)).tolist()
        self._refuse_gaps(rows, positions[rows, :5])
        self._rows: list[int] = rows.tolist()
        is_sorted = len(rows) == len(positions) == len(header.shapes)
        self.is_one_each = is_sorted and bool((rows == np.arange(len(rows))).all())

    def rows_of(self, image: int) -> list[int]:
        """Return the rows of the chunks of an image in C order."""
        return self._rows[self._firsts[image] : self._firsts[image + 1]]

    def _refuse_other_dtypes(self, names: Sequence[str | None]) -> None:
        dtypes = self._header.dtypes
        valid_names = {dtype: (dtype.name, dtype.str) for dtype in set(dtypes)}
        for name, owner in zip(names, self.owners.tolist(), strict=True):
            if owner >= 0 and name not in valid_names[dtypes[owner]]:
                subject = f"{self._path}: image {owner} ({self._header.image_ids[owner]!r})"
                problem = f"dtype is {dtypes[owner]}, but a chunk has {name}"
                raise FormatError(f"{subject}: {problem}; the folder is damaged, restore it")

    def _refuse_gaps(self, rows: Array, starts: Array) -> None:
        """Raise `FormatError` unless the chunks of each image, sorted and with their ``starts``, fill it as a grid."""
        firsts, shapes = np.array(self._firsts), self._header.shapes
        counts = np.diff(firsts)
        good = counts > 0
        sizes, owners = self.sizes[rows], self.owners[rows]
        steps = np.ones_like(shapes)
        if len(rows):
            steps[good] = np.maximum.reduceat(sizes, firsts[:-1][good]).clip(1)
        step, left = steps[owners], shapes[owners] - starts
        fits = (starts >= 0) & (left > 0) & (starts % step == 0) & (sizes == np.minimum(step, left))
        twice = np.append((np.diff(starts, axis=0) == 0).all(axis=1) & (np.diff(owners) == 0), False)
        good &= np.bincount(owners[~fits.all(axis=1) | twice[: len(rows)]], minlength=len(shapes)) == 0
        good &= counts == (-(-shapes // steps)).prod(axis=1)
        if not good.all():
            bad = int(good.argmin())
            problem = f"{counts[bad]:,} chunks do not cover each pixel exactly once; the folder is damaged, restore it"
            raise FormatError(f"{self._path}: image {bad} ({self._header.image_ids[bad]!r}): {problem}")

    def _open(self) -> pq.ParquetFile:
        with self._guard:
            return pq.ParquetFile(self._path / _CHUNKS, memory_map=True, pre_buffer=False)

    def _open_reader(self) -> PageReader:
        with self._guard:
            return PageReader(MappedFile(self._path / _CHUNKS))

    def close(self) -> None:
        self._file.close()
        self._pages.close()

    def read(self, rows: Sequence[int]) -> list[Array]:
        """Return chunks, each with its shape, by their sorted rows in the table of chunks."""
        return self._pages.get().read(self, rows)

    def find_pages(self, file: ByteSource, number: int) -> Pages:
        if not self._has_pages:
            raise OtherLayoutError
        stored = self._file.get().metadata.row_group(number).column(self._leaf)
        of_group = slice(self.starts[number], self.starts[number + 1])
        owners = self.owners[of_group].tolist()
        if stored.file_path or -1 in owners or stored.compression not in ("UNCOMPRESSED", *CODECS):
            raise OtherLayoutError
        dtypes, sizes = [self._header.dtypes[owner] for owner in owners], self.sizes[of_group]
        span = pages_span(stored, levels=self._levels)
        expected = Expected(str(self._path), np.arange(of_group.start, of_group.stop), sizes, dtypes)
        if stored.has_dictionary_page:
            return DictionaryPages(file, span, stored.data_page_offset, expected)
        return find_pages(file, span, expected, np.ones(len(sizes), np.int64))

    def decode_group(self, number: int, rows: Sequence[int]) -> list[Array]:
        self._pages.get().file.refuse_changed()
        with self._guard.reading():
            table = self._file.get().read_row_group(number, columns=["pixel_bytes"], use_threads=False)
        num_expected = self.starts[number + 1] - self.starts[number]
        if len(table) != num_expected:
            raise other_rows(self._path / _CHUNKS, len(table), num_expected, f"row group {number}")
        column = table["pixel_bytes"].combine_chunks()
        return [self._chunk(row, column[row - self.starts[number]].as_buffer()) for row in rows]

    def _chunk(self, row: int, pixels: pa.Buffer | None) -> Array:
        owner = int(self.owners[row])
        dtype, shape = self._header.dtypes[owner], tuple(self.sizes[row].tolist())
        expected = math.prod(shape) * dtype.itemsize
        if pixels is None or pixels.size != expected:
            num_bytes = 0 if pixels is None else pixels.size
            problem = f"a chunk has {num_bytes:,} bytes of pixels, expected {expected:,} bytes"
            raise DecodeError(f"{self._path}: image {owner}: {problem}; the file is damaged, restore it")
        return np.frombuffer(pixels, dtype).reshape(shape)

    def storage_info(self) -> Stored:
        leaves = column_chunks(self._pages.get().file, self._file.get(), [self._leaf])
        compression = describe_codecs(leaves)
        layouts = "one per image" if self.is_one_each else f"of {len(self._header.shapes):,} images"
        row_groups = groups(self.starts, "row group").replace("image", "chunk")
        chunking = f"{self.starts[-1]:,} chunks, {layouts}, in {row_groups}"
        if not self._has_pages or not {leaf.compression for leaf in leaves} <= {"UNCOMPRESSED", *CODECS}:
            return Stored(None, compression, chunking, False, "by pyarrow, which decodes a row group per chunk")
        unit = "a row group" if any(leaf.has_dictionary_page for leaf in leaves) else "a page"
        reading = f"from the mapped file; {unit} is decompressed separately"
        if compression == "none":
            reading = "in place: from the mapped file"
        return Stored(None, compression, chunking, compression == "none", reading)

    def stream(self) -> Iterator[Block]:
        return self._pages.get().stream(self)


open_collection = OMEArrowImages


def _read_constants(
    row_groups: Sequence[pq.RowGroupMetaData], leaves: Mapping[str, int], stored: pa.Schema
) -> dict[str, pa.Array]:
    """Return columns with one value per row group from the footer's bounds: pyarrow takes 20 us per small page."""
    # ``leaves`` are indices of columns in the schema. Equal bounds are exact even if bounds may be truncated, because
    # the value is between them. `pa.array` is avoided: it would import pandas.
    counts, columns = [group.num_rows for group in row_groups], {}
    for name, leaf in leaves.items():
        kind, values = _CHUNK_FIELDS[name], list[Any]()
        for count, group in zip(counts, row_groups, strict=True):
            bounds = group.column(leaf).statistics
            is_full = bounds is not None and bounds.null_count == 0 and bounds.num_values == count
            value = bounds.min_raw if is_full else None
            if value is None or value != bounds.max_raw:
                break
            values.append(value)
        if len(values) < len(row_groups) or stored.field(name).type != kind:
            continue
        rows = np.repeat(np.array(values, object if kind == pa.string() else np.int32), counts)
        if kind == pa.string():
            ends = np.cumsum([0, *map(len, rows)])
            columns[name] = binary(ends, np.frombuffer(b"".join(rows), np.uint8)).cast(kind)
        else:
            columns[name] = pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])
    return columns
