"""Parquet: images are cut from memory-mapped pages, or read by pyarrow.

It is written by pyarrow, in a layout that allows reading one image of a page (``docs/explanation/layouts.md``).
Uncompressed by default; row groups large enough for a small footer, but small for readers that decode a whole one. If
compressed, one image per page: preloading is half as fast as from pages of 1 MiB, and random access gains most.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import codec_of_chunks, placed_chunks
from omearrow_ds.codec.leaves import is_list_view, list_bounds
from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import ByteRange, ByteSource, MappedFile, ObjectFile
from omearrow_ds.storage.formats._base import BLOCK_BYTES, Array, Block, group_by_part, split_groups
from omearrow_ds.storage.formats._columns import columns_at_once
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import HEADER_LEAVES, ImageColumn, holds_pixels
from omearrow_ds.storage.formats._parquet_pages import ColumnChunk, PageReader, Pages, find_pages, plain_layout
from omearrow_ds.storage.formats._stored import Stored, groups, images_in, join_names
from omearrow_ds.storage.formats._table import StoredTable, TableImages, TableOptions, as_arrays, open_bytes, unnest
from omearrow_ds.storage.image_extents import stack_images

CODECS = {"SNAPPY": "snappy", "LZ4": "lz4", "ZSTD": "zstd"}
UNSUPPORTED_TYPES = (pa.types.is_interval,)
_MOST_GROUPS = 512  # limit of row groups whose pages are checked before the first sample: 0.25 ms each
_FEW_ROWS = 2**12
_PAGE_BYTES = 2**20
_SMALL_PAGE_BYTES = 2**12
_FOOTER_BYTES = 2**16  # size that covers most footers
_TAIL_BYTES = 8  # the footer's length and the magic number
_DEPTHS = {"BYTE_ARRAY": 1, "INT32": 2}  # nesting depth in lists of the pixels, by physical type
ERRORS: tuple[type[Exception], ...] = (pa.ArrowException, OSError, UnicodeDecodeError)


def write_collection(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write each table as a row group of a Parquet file; a compressed file has one image per page."""
    options = page_options(compression, table_schema, [schema.CHECKSUM_COLUMN])
    with pq.ParquetWriter(path, table_schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(len(table), 1))


@dataclass(frozen=True)
class _PixelLeaf:
    paths: Sequence[str] = ()  # Its path if it suffices to read every image, as all are stored plainly or by one codec.
    num_pieces: Array | None = None  # (n,) int64, number of chunks of each image.
    codec: str | None = None  # Codec of chunks that are compressed separately.
    chunks: Sequence[ColumnChunk] = ()  # One per row group; empty if pages cannot be cut.


class ParquetTable(StoredTable):
    """Parquet file whose images are read directly from its pages if possible, else by pyarrow.

    The file is mapped at the first image. If it is truncated in place, the next read raises an error, but a running one
    may end the process, as with any memory-mapped file.
    """

    _located_leaf: _PixelLeaf | None = None

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        super().__init__(guard, options)
        self._file = ProcessLocal(self._open)
        self._reader = ProcessLocal(lambda: PageReader(open_bytes(guard, options.objects)))
        file = self._file.get()
        self.schema = file.schema_arrow  # Parsed again at each access.
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        self.starts = list(itertools.accumulate(map(attrgetter("num_rows"), groups), initial=0))

    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        leaves = HEADER_LEAVES if column.is_own and fields == column.header_fields else fields
        table = self._read_whole([*[f"{column.name}.{leaf}" for leaf in leaves], *names])
        if self.objects is None and fields == column.info_fields:
            self._file.close()
        return unnest(table[column.name]), table.select(names)

    def locate(self) -> None:
        """Locate pixels at opening if the file is at a URL, while its header is cached, or if the engine needs them."""
        must_cut = self.options.engine == "pages"
        leaf = self._leaf if must_cut or self.objects is not None else None
        if must_cut and leaf is not None and not leaf.chunks and self.starts[-1]:
            problem = "needs plainly encoded pixel pages"
            raise ArgumentError(problem, path=self.path, option="engine", value="pages", remedy="pass engine=None")
        if self.objects is not None:
            _ = self._info  # Its ranges are cached as well.
            self._reader.get().file.clear_cache()
        elif must_cut:
            self._reader.close()
        if self.objects is None or not self.is_wide:  # The footer of a wide table is large.
            self._file.close()

    def _read_whole(self, paths: list[str]) -> pa.Table:
        """Return columns, or fields of them, with the number of rows that the footer states."""
        # Few rows are read without threads, which would take longer to start.
        file = self._file.get()
        table = file.read(columns=paths, use_threads=self.starts[-1] > _FEW_ROWS)
        for num_rows in map(len, (table, *table.columns)):  # A damaged file may have columns of other lengths.
            if num_rows != self.starts[-1]:
                raise other_rows(self.path, num_rows, self.starts[-1], "a column")
        return table

    def read_columns(self, names: list[str]) -> pa.Table:
        file = self._reader.get().file if self.objects is not None else None
        with self.guard.reading():
            if isinstance(file, ObjectFile):
                file.cache_ranges(_ranges_of(self._file.get().metadata, names))
            return self._read_whole(names).select(names)

    @property
    def _leaf(self) -> _PixelLeaf:
        """Pixel leaf, which is located at the first use, because this takes as long as opening the file."""
        # Two threads may both locate it: a child forked meanwhile would wait for ever for a lock.
        if self._located_leaf is not None:
            return self._located_leaf
        with self.guard.interpreting():
            file = self._file.get()
            paths = _leaf_paths(file)
            leaf = self._find_pixel_leaf(paths)
            if leaf.paths and self.options.engine != "pyarrow" and not is_encrypted(self._reader.get().file, file):
                column, odd_order = self.header.column, bool(self.header.odd_order.any())
                chunks = [] if odd_order else _find_chunks(file, paths.index(leaf.paths[0]), column, leaf.codec)
                leaf = replace(leaf, chunks=chunks)
        if leaf.chunks and self.objects is None:
            self._file.close()
        self.is_placed, self.header.chunk_codec = bool(leaf.paths) and leaf.codec is None, leaf.codec
        self._located_leaf = leaf
        return leaf

    def _find_pixel_leaf(self, paths: list[str]) -> _PixelLeaf:
        """Return the pixel leaf without its chunks."""
        column = self.header.column
        prefix = f"{column.name}.chunks."
        leaves = [path for path in paths if path.startswith(prefix)]
        pixels = [path for path in leaves if path.endswith(".pixel_bytes") or ".pixels." in path[len(prefix) :]]
        other_leaves = [path for path in leaves if path not in pixels]
        num_images = self.starts[-1]
        if len(pixels) != 1 or not other_leaves or not num_images:
            return _PixelLeaf()
        if _has_list_views(column.type.field("chunks").type):  # They need not be contiguous.
            return _PixelLeaf()
        chunks = pa.concat_arrays(as_arrays(self._read_whole(other_leaves)[column.name], "chunks"))
        starts, stops, _ = list_bounds(chunks, f"{self.path}: chunks")
        expected, codec = self.header.expected(np.arange(num_images)), None
        if not placed_chunks(chunks, expected).all():
            codec = codec_of_chunks(chunks)
            if codec is None or not placed_chunks(chunks, expected, codec).all():
                return _PixelLeaf()
        return _PixelLeaf(pixels, stops - starts, codec)

    def layout(self) -> Stored:
        file, column = self._file.get(), self.header.column
        leaves = [number for number, path in enumerate(_leaf_paths(file)) if holds_pixels(path, column)]
        compression = describe_codecs(column_chunks(self._reader.get().file, file, leaves))
        # Pages are read directly, unless only pyarrow can read them.
        plain = bool(self._leaf.chunks) and compression == "none"
        reading = "in place: from the mapped file" if plain else "by pyarrow, which decodes a row group per image"
        if self._leaf.chunks and not plain:
            pages = self._reader.get().pages(self, 0)
            sizes = np.diff(getattr(pages, "first_rows", [0, 0])).tolist()
            unit = "a page" if pages is None else f"a page of {images_in(sizes)}"
            reading = f"from the mapped file; {'each image' if max(sizes) == 1 else unit} is decompressed separately"
        stored = Stored(column.encoding, compression, groups(self.starts, "row group"), plain, reading)
        return stored if self.objects is None else stored.by_ranges()

    def _open(self) -> pq.ParquetFile:
        if self.objects is None:
            with self.guard:  # A second map, next to that of `_reader`, reads fewer cold pages.
                return pq.ParquetFile(pa.memory_map(str(self.path)), pre_buffer=False)
        file = self._reader.get().file
        assert isinstance(file, ObjectFile)
        with self.guard.reading():
            footer_bytes = int.from_bytes(file.read_tail(_FOOTER_BYTES)[-_TAIL_BYTES:][:4], "little")
            file.read_tail(footer_bytes + _TAIL_BYTES)
            opened = pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=False)
            if not hasattr(self, "header"):
                images = [field.name for field in opened.schema_arrow if pa.types.is_struct(field.type)]
                others = [name for name in opened.schema_arrow.names if name not in images]
                file.cache_ranges(_ranges_of(opened.metadata, [*images, *columns_at_once(others)]))
        return opened

    def close(self) -> None:
        self._file.close()
        self._reader.close()

    @property
    def decodes_in_threads(self) -> bool:
        return bool(self._leaf.chunks) and self.objects is None  # Pyarrow would decode a row group in each thread.

    def read_images(self, rows: Sequence[int]) -> list[Array]:
        if not self._leaf.chunks:
            parts = group_by_part(self.starts, rows)
            return [image for number, of_group in parts for image in self.decode_group(number, of_group)]
        reader = self._reader.get()
        images = reader.read(self, rows)
        if self.objects is not None:
            reader.file.clear_cache()
        return images

    def read_groups(self) -> Iterable[slice] | None:
        if self.objects is not None:
            return None
        are_whole = [not self._leaf.chunks] * (len(self.starts) - 1)  # Pyarrow decodes whole row groups.
        return split_groups(self.starts, are_whole, self.header.image_bytes, BLOCK_BYTES)

    def stream(self) -> Iterator[Block]:
        return self._reader.get().stream(self) if self.objects is None and self._leaf.chunks else super().stream()

    def mapped_stacks(self) -> Stacks | None:
        leaf, reader = self._leaf, self._reader.get()
        plain = leaf.chunks and leaf.codec is None and len(self.starts) <= _MOST_GROUPS
        arrays = reader.stacks(self) if plain and self.objects is None else None
        if not arrays or leaf.num_pieces is None or not isinstance(reader.file, MappedFile):
            return None
        layout = plain_layout(arrays[0].shape[1:], arrays[0].dtype, int(leaf.num_pieces[0]))
        return stack_images(arrays, layout, reader.file, self.refuse_damaged)

    def find_pages(self, file: ByteSource, number: int) -> Pages:
        rows, leaf = np.arange(self.starts[number], self.starts[number + 1]), self._leaf
        assert leaf.num_pieces is not None
        return find_pages(file, leaf.chunks[number], self.header.expected(rows), leaf.num_pieces[rows], leaf.codec)

    def decode_group(self, number: int, rows: Sequence[int]) -> list[Array]:
        images: list[Array] = []
        start = self.starts[number]
        for array in self._read_group(number, self.header.column.pixel_field):
            stop = start + len(array)
            in_array = rows[bisect.bisect_left(rows, start) : bisect.bisect_left(rows, stop)]
            if in_array:
                block = self.header.block(self, array, np.arange(start, stop))
                is_whole = len(in_array) == len(array)
                images.extend(block.images() if is_whole else [block[row - start] for row in in_array])
            start = stop
        return images

    def _read_group(self, number: int, field: str) -> list[pa.Array]:
        """Return ``chunks`` (only their pixels if plainly stored) or ``planes`` of a row group."""
        file = self._reader.get().file
        file.refuse_changed()  # pyarrow maps the file as well
        leaf, column = self._leaf, self.header.column
        alone = self.is_placed and field == column.pixel_field
        paths = list(leaf.paths) if alone else [f"{column.name}.{field}"]
        with file.lock, self.guard.reading():
            table = self._file.get().read_row_group(number, columns=paths, use_threads=False)
        arrays = as_arrays(table[column.name], field)
        num_read, num_expected = sum(map(len, arrays)), self.starts[number + 1] - self.starts[number]
        if num_read != num_expected:
            raise other_rows(self.path, num_read, num_expected, f"row group {number}")
        return arrays

    def fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        for number, rows in group_by_part(self.starts, indices.tolist()):
            positions = pa.array(np.array(rows) - self.starts[number])
            yield pa.concat_arrays(self._read_group(number, field)).take(positions)


open_collection = partial(TableImages, "parquet", ParquetTable, ERRORS)


@lru_cache(16)  # Many files share one type.
def _has_list_views(lists: pa.DataType) -> bool:
    return any(map(is_list_view, (lists, *(field.type for field in lists.value_type))))


def _find_chunks(file: pq.ParquetFile, leaf: int, column: ImageColumn, codec: str | None) -> list[ColumnChunk]:
    """Return the byte range of each row group's pixel leaf, or an empty list if its pages cannot be cut."""
    pixels, chunk = file.schema.column(leaf), column.type.field("chunks").type.value_type
    lists = pixels.physical_type == "INT32"
    if pixels.max_repetition_level != _DEPTHS.get(pixels.physical_type):
        return []
    if lists and (codec is not None or chunk.field("pixels").type.value_type != pa.uint16()):
        return []
    stored = [file.metadata.row_group(number).column(leaf) for number in range(file.num_row_groups)]
    is_elsewhere = any(part.file_path for part in stored) or all(part.has_dictionary_page for part in stored)
    if is_elsewhere or not {part.compression for part in stored} <= {"UNCOMPRESSED", *CODECS}:
        return []
    return [pages_span(part, lists=lists) for part in stored]


def other_rows(path: Path, num_rows: int, expected: int, part: str) -> FormatError:
    """Return the error for pages whose number of rows differs from the footer, which pyarrow does not check."""
    problem = f"{part} has {num_rows:,} rows, but the footer states {expected:,}"
    return FormatError(f"{path}: {problem}; the file is damaged, restore it")


def page_options(compression: str, table_schema: pa.Schema, pixels: Sequence[str]) -> dict[str, Any]:
    """Return writer options for pages from which single images can be read; a compressed page has one image."""
    # ``pixels`` get no statistics: for images below 4 KiB, every page would repeat two of them. Checksums and nested
    # columns get none either, because they are not filtered by range.
    return {
        "compression": compression,
        "use_dictionary": False,
        "data_page_version": "2.0",  # a page of version 1 may end within an image
        "data_page_size": _PAGE_BYTES if compression == "none" else _SMALL_PAGE_BYTES,
        "write_batch_size": 1,  # rows between checks of the page size
        "write_statistics": [
            field.name for field in table_schema if not pa.types.is_nested(field.type) and field.name not in pixels
        ],
    }


def pages_span(stored: pq.ColumnChunkMetaData, *, lists: bool = False, levels: int = 2) -> ColumnChunk:
    """Return the byte range of a leaf of a row group, with its dictionary; see `ColumnChunk`."""
    start, codec = stored.data_page_offset, CODECS.get(stored.compression)
    if stored.has_dictionary_page:
        start = min(start, stored.dictionary_page_offset)
    return ColumnChunk(start, start + stored.total_compressed_size, stored.num_values, lists, codec, levels)


def is_encrypted(file: ByteSource, opened: pq.ParquetFile) -> bool:
    """Whether the file is encrypted: pyarrow 26 aborts when it is asked for the offset of an encrypted column."""
    footer_bytes = int.from_bytes(file.read_tail(_TAIL_BYTES)[:4], "little")
    return footer_bytes != int(opened.metadata.serialized_size)


def column_chunks(source: ByteSource, file: pq.ParquetFile, leaves: Sequence[int]) -> list[pq.ColumnChunkMetaData]:
    """Return the column chunks of leaves; none of an encrypted file."""
    numbers = [] if is_encrypted(source, file) else range(file.num_row_groups)
    return [file.metadata.row_group(number).column(leaf) for number in numbers for leaf in leaves]


def describe_codecs(chunks: Iterable[pq.ColumnChunkMetaData]) -> str:
    return join_names(chunk.compression.lower().replace("uncompressed", "none") for chunk in chunks)


def _ranges_of(metadata: pq.FileMetaData, names: Sequence[str]) -> list[ByteRange]:
    """Return the byte ranges of columns, without the pixels of image columns."""
    flat, nested = set(names), tuple(f"{name}." for name in names)
    ranges: list[ByteRange] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for leaf in range(group.num_columns):
            column = group.column(leaf)
            path = column.path_in_schema
            is_named = path in flat or path.startswith(nested)
            if is_named and not {"pixel_bytes", "pixels"} & set(path.split(".")):
                ranges.append(pages_span(column)[:2])
    return ranges


def _leaf_paths(file: pq.ParquetFile) -> list[str]:
    return [leaf.path for leaf in file.schema]
