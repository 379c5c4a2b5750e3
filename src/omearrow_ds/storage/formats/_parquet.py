"""`ParquetSource`: the base of both Parquet formats: images cut from memory-mapped pages, or read by pyarrow."""

from __future__ import annotations

import bisect
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec.decode import codec_of_chunks, placed_chunks
from omearrow_ds.codec.leaves import list_bounds
from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.kernels.stacks import Prefixes, Stacks
from omearrow_ds.storage.byte_source import MappedFile
from omearrow_ds.storage.formats._base import Array, Block, by_part
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn, holds_pixels
from omearrow_ds.storage.formats._parquet_headers import OtherPagesError
from omearrow_ds.storage.formats._parquet_pages import (
    LENGTH_BYTES,
    ColumnChunk,
    DictionaryPages,
    PackedPages,
    PixelPages,
)
from omearrow_ds.storage.formats._stored import Stored, groups, images_in, joined
from omearrow_ds.storage.formats._table import TableSource, as_arrays, unnest

Images = TypeVar("Images", bound=Array | list[Array])
PagesOf = Callable[[Array, int], PixelPages | DictionaryPages]
CODECS = {"SNAPPY": "snappy", "LZ4": "lz4", "ZSTD": "zstd"}
_MOST_GROUPS = 512  # limit of row groups whose pages are checked before the first sample: 0.25 ms each
_FEW_ROWS = 2**12
_PAGE_BYTES = 2**20
_SMALL_PAGE_BYTES = 2**12
_TAIL_BYTES = 8  # the footer's length and the magic number
_DEPTHS = {"BYTE_ARRAY": 1, "INT32": 2}  # nesting depth in lists of the pixels, by physical type
STAGES = {"ParquetSource._read_group": "read+decode"}


class MappedPages:
    """A memory-mapped Parquet file, and the readable pages of its pixel leaf in the row groups read so far."""

    def __init__(self, path: Path) -> None:
        self.mapping = MappedFile(path)
        self._data: Array = np.frombuffer(self.mapping.file, np.uint8)
        self.groups: dict[int, PixelPages | DictionaryPages | None] = {}

    def key_of(self, stored: pq.ColumnChunkMetaData, most_bytes: int) -> bytes | object:
        """Return a key that short column chunks with equal values share; a unique object for longer ones."""
        start, length = stored.data_page_offset, stored.total_compressed_size
        if stored.has_dictionary_page:
            start = min(start, stored.dictionary_page_offset)
        if length > most_bytes or stored.file_path:
            return object()
        return f"{stored.num_values} {stored.compression} ".encode() + self._data[start : start + length].tobytes()

    def cut(self, number: int, pages_of: PagesOf, method: str, *given: object) -> Any:
        """Call a method of a row group's pages, created by ``pages_of(data, number)``; None if they cannot be cut."""
        self.mapping.refuse_changed()
        try:
            if number not in self.groups:
                with self.mapping.read_at_random():  # Page headers are small and far apart.
                    self.groups[number] = pages_of(self._data, number)
            pages = self.groups[number]
            return None if pages is None else getattr(pages, method)(*given)
        except OtherPagesError:
            self.groups[number] = None
            return None

    def blocks(
        self, starts: Sequence[int], pages_of: PagesOf, of_group: Callable[[int, Sequence[int]], list[Array]]
    ) -> Iterator[Block]:
        """Yield the images of all row groups, which start at ``starts``, page by page, or by ``of_group``."""
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            done = start
            while done < stop:
                images = self.cut(number, pages_of, "stack", done - start)
                if images is None:
                    images = of_group(number, range(done, stop))
                yield done, images
                done += len(images)


class ParquetSource(TableSource):
    """Images of a Parquet file, cut out of its plainly stored pages, or else read by pyarrow.

    The file is mapped at the first image. Replacing it by another file is safe. If it is truncated in place, the next
    read raises an error, but a running read may then end the process, as with any memory-mapped file.

    Its ``engine`` is ``"pages"``, ``"pyarrow"``, or None for the first that can read the file.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (pa.ArrowException, OSError, UnicodeDecodeError)
    unheld_types: ClassVar[Sequence[Callable[[pa.DataType], bool]]] = (pa.types.is_interval,)
    engines: ClassVar[tuple[str, ...]] = ("pages", "pyarrow")
    looks = True

    def __init__(
        self,
        path: Path,
        engine: str | None = None,
        image_column: str | None = None,
        *,
        with_columns: bool = True,
        look: bool = False,
    ) -> None:
        self.path, self._look = path, look
        self._how = {"engine": engine, "image_column": image_column, "with_columns": with_columns}
        self._file = ProcessLocal(self._open)
        self._mapping = ProcessLocal(self._map)
        file = self._file.get()
        table_schema = file.schema_arrow  # parsed again at each access
        others = self._choose(table_schema, image_column, with_columns=with_columns)
        self._image = table_schema.field(self._column.name).type
        groups = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
        self._starts = list(itertools.accumulate(groups, initial=0))
        with self._reading():
            table = self._read_table([*_info_paths(self._column, told=look), *others])
        for rows in map(len, (table, *table.columns)):  # a damaged file may have columns of other lengths
            if rows != self._starts[-1]:
                raise self._other_rows(rows, self._starts[-1], "a column")
        self._set_header(unnest(table[self._column.name]), table.select(others))
        if look:
            self._let_go()
            return
        paths = _leaf_paths(file)
        self._pixel_paths = self._find_pixel_leaf(paths)
        self._all_placed = bool(self._pixel_paths) and self._codec is None
        self._chunks = [] if engine == "pyarrow" else self._find_chunks(file, paths)
        self._let_go()
        if engine == "pages" and len(self) and not self._chunks:
            raise ArgumentError(
                "the pixels are not in plainly encoded pages",
                path=path,
                option="engine",
                value=engine,
                remedy="pass engine=None",
            )

    def _read_info(self, column: ImageColumn) -> pa.Table:
        with self._reading():
            info = self._read_table(_info_paths(column))
        return unnest(info[column.name])

    def _read_table(self, columns: list[str]) -> pa.Table:
        """Return columns, or fields of them; few rows are read without threads, which would take longer to start."""
        file = self._file.get()
        return file.read(columns=columns, use_threads=file.metadata.num_rows > _FEW_ROWS)

    @property
    def engine(self) -> str:
        """Reader of the pixels: ``"pages"`` of the mapped file, or ``"pyarrow"``, which also reads other pages."""
        return "pages" if self._chunks else "pyarrow"

    def _find_pixel_leaf(self, paths: list[str]) -> list[str]:
        """Return the path of the pixel leaf if it suffices to read every image, because all are plainly stored."""
        self._codec: str | None = None  # codec of separately compressed chunks
        prefix = f"{self._column.name}.chunks."
        leaves = [path for path in paths if path.startswith(prefix)]
        pixels = [path for path in leaves if path.endswith(".pixel_bytes") or ".pixels." in path[len(prefix) :]]
        other_leaves = [path for path in leaves if path not in pixels]
        if len(pixels) != 1 or not other_leaves or not len(self) or self._has_list_views():
            return []
        with self._reading():
            column = self._read_table(other_leaves)[self._column.name].combine_chunks()
        chunks = pa.concat_arrays(as_arrays(column, "chunks"))
        if len(chunks) != len(self):
            raise self._other_rows(len(chunks), len(self), "a column")
        starts, stops, _ = list_bounds(chunks, f"{self.path}: chunks")
        self._pieces = stops - starts
        expected = self._expected(np.arange(len(self)))
        if placed_chunks(chunks, expected).all():
            return pixels
        self._codec = codec_of_chunks(chunks)
        return pixels if self._codec is not None and placed_chunks(chunks, expected, self._codec).all() else []

    def _is_encrypted(self, file: pq.ParquetFile) -> bool:
        return is_encrypted(self.path, file)

    def _has_list_views(self) -> bool:
        """Whether pyarrow reads the chunks, or the numbers in them, as list views, which need not be contiguous."""
        chunks = self._image.field("chunks").type
        kinds = {chunks.id, *[field.type.id for field in chunks.value_type]}
        return not kinds.isdisjoint((pa.lib.Type_LIST_VIEW, pa.lib.Type_LARGE_LIST_VIEW))

    def _find_chunks(self, file: pq.ParquetFile, paths: list[str]) -> list[ColumnChunk]:
        """Return the byte range of each row group's pixel leaf, or an empty list if its pages cannot be cut."""
        if not self._pixel_paths or self._odd_order.any() or self._is_encrypted(file):
            return []
        leaf = paths.index(self._pixel_paths[0])
        pixels = file.schema.column(leaf)
        lists = pixels.physical_type == "INT32"
        chunk = self._image.field("chunks").type.value_type
        if pixels.max_repetition_level != _DEPTHS.get(pixels.physical_type):
            return []
        if lists and self._codec is not None:
            return []
        if lists and chunk.field("pixels").type.value_type != pa.uint16():
            return []
        stored = [file.metadata.row_group(number).column(leaf) for number in range(file.num_row_groups)]
        codecs = {each.compression for each in stored}
        elsewhere = any(each.file_path for each in stored) or all(each.has_dictionary_page for each in stored)
        if elsewhere or not codecs <= {"UNCOMPRESSED", *CODECS}:
            return []
        return [pages_span(each, lists=lists) for each in stored]

    def stored_as(self) -> Stored:
        file = self._file.get()
        leaves = [number for number, path in enumerate(_leaf_paths(file)) if holds_pixels(path, self._column)]
        numbers = [] if self._is_encrypted(file) else range(file.num_row_groups)
        codecs = (file.metadata.row_group(number).column(leaf).compression for number in numbers for leaf in leaves)
        compression = joined("none" if codec == "UNCOMPRESSED" else codec.lower() for codec in codecs)
        chunking = groups(self._starts, "row group")
        plain = self.engine == "pages" and compression == "none"
        if plain:
            reading = "in place: out of the mapped file"
        elif self.engine == "pages":
            pages = self._mapping.get().cut(0, self._pages_of, "page_rows")
            sizes = [0] if pages is None else pages.tolist()
            what = "a page" if pages is None else f"a page of {images_in(sizes)}"
            reading = f"out of the mapped file; {'each image' if max(sizes) == 1 else what} is decompressed alone"
        else:
            reading = "by pyarrow, which decodes a row group for one image"
        return Stored(self._column.encoding, compression, chunking, plain, reading)

    def chunk_codec(self) -> str | None:
        return self._codec or super().chunk_codec()

    def _open(self) -> pq.ParquetFile:
        with self._opening():
            return pq.ParquetFile(pa.memory_map(str(self.path)), pre_buffer=False)  # by a path it takes 0.3 ms more

    def _map(self) -> MappedPages:
        with self._opening():
            return MappedPages(self.path)

    def _let_go(self) -> None:
        """Release the resources that were only needed to open it."""
        self.close()

    def close(self) -> None:
        self._file.close()
        self._mapping.close()

    def views(self, indices: Sequence[int]) -> list[Array]:
        images: list[Array] = []
        pages = self._mapping.get() if self._chunks else None
        for number, rows in by_part(self._starts, indices):
            first = self._starts[number]
            inside = [row - first for row in rows]
            found = None if pages is None else pages.cut(number, self._pages_of, "images", inside)
            images += self._of_group(number, rows) if found is None else found
        return images

    def blocks(self) -> Iterator[Block]:
        if not self._chunks:
            return super().blocks()
        return self._mapping.get().blocks(self._starts, self._pages_of, self._of_group)

    @property
    def mapping(self) -> MappedFile | None:
        plain = self._chunks and self._codec is None and len(self._starts) <= _MOST_GROUPS
        return self._mapping.get().mapping if plain else None

    def stacked(self) -> Stacks | None:
        mapping = self.mapping
        if not self.uniform or mapping is None:
            return None
        arrays: list[Array] = []
        for number, (start, stop) in enumerate(itertools.pairwise(self._starts)):
            row = start
            while row < stop:
                images = self._mapping.get().cut(number, self._pages_of, "unchecked_stack", row - start)
                if images is None:
                    return None
                arrays.append(images)
                row += len(images)
        return Stacks(arrays, mapping.refuse_changed, self._lengths_before(arrays), is_mapped=True) if arrays else None

    def _lengths_before(self, arrays: Sequence[Array]) -> Prefixes:
        """Return the 4-byte lengths that Parquet stores before each chunk."""
        num_chunks = int(self._pieces[0])
        chunk_bytes = arrays[0][0].nbytes // num_chunks
        distances = np.arange(num_chunks) * (chunk_bytes + LENGTH_BYTES) - LENGTH_BYTES
        expected = np.frombuffer(chunk_bytes.to_bytes(LENGTH_BYTES, "little"), np.uint8)
        addresses = Stacks(arrays).addresses
        return Prefixes(addresses, distances, np.tile(expected, (num_chunks, 1)), self.refuse_damaged)

    def _pages_of(self, data: Array, number: int) -> PixelPages:
        rows = np.arange(self._starts[number], self._starts[number + 1])
        pages = self._plain_pages(number) if self._codec is None else partial(PackedPages, codec=self._codec)
        return pages(data, self._chunks[number], self._expected(rows), self._pieces[rows])

    def _plain_pages(self, number: int) -> type[PixelPages]:  # noqa: ARG002  # of a server they differ
        return PixelPages

    def _of_group(self, number: int, rows: Sequence[int]) -> list[Array]:
        """Return images of one row group, which pyarrow decodes as a whole."""
        images: list[Array] = []
        start = self._starts[number]
        for array in self._read_group(number, self._column.pixel_field):
            here = rows[bisect.bisect_left(rows, start) : bisect.bisect_left(rows, start + len(array))]
            if here:
                block = self._block(array, np.arange(start, start + len(array)))
                images += [block[row - start] for row in here]
            start += len(array)
        return images

    def _read_group(self, number: int, field: str) -> list[pa.Array]:
        """Return ``chunks`` (only their pixels if plainly stored) or ``planes`` of a row group."""
        self._mapping.get().mapping.refuse_changed()  # pyarrow maps the file as well
        alone = self._all_placed and field == self._column.pixel_field
        paths = self._pixel_paths if alone else [f"{self._column.name}.{field}"]
        with self._reading():
            table = self._file.get().read_row_group(number, columns=paths, use_threads=False)
        arrays = as_arrays(table[self._column.name], field)
        num_read, num_expected = sum(map(len, arrays)), self._starts[number + 1] - self._starts[number]
        if num_read != num_expected:
            raise self._other_rows(num_read, num_expected, f"row group {number}")
        return arrays

    def _other_rows(self, num_rows: int, expected: int, part: str) -> FormatError:
        """Return the error for pages whose number of rows differs from the footer, which pyarrow does not check."""
        problem = f"{part} has {num_rows:,} rows, expected {expected:,} of the footer"
        return FormatError(f"{self.path}: {problem}; the file is damaged, restore it")

    def _fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        for number, rows in by_part(self._starts, indices.tolist()):
            places = pa.array(np.array(rows) - self._starts[number])
            yield pa.concat_arrays(self._read_group(number, field)).take(places)

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        for number in range(len(self._starts) - 1):
            yield from self._read_group(number, field)


def page_options(compression: str, table_schema: pa.Schema, pixels: Sequence[str]) -> dict[str, Any]:
    """Return writer options for pages that can be cut; if compressed, one image per page, which is read separately.

    ``pixels`` get no statistics: for images below 4 KiB, every page would repeat two of them. Checksums and nested
    columns get none either, because they are not filtered by range.
    """
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
    """Return the byte range of the pixel leaf of a row group; see `ColumnChunk`."""
    start, codec = stored.data_page_offset, CODECS.get(stored.compression)
    return ColumnChunk(start, start + stored.total_compressed_size, stored.num_values, lists, codec, levels)


def is_encrypted(path: Path, file: pq.ParquetFile) -> bool:
    """Whether a signature follows the footer: pyarrow 26 aborts when asked for the offset of an encrypted column."""
    with path.open("rb") as raw:
        return footer_bytes(raw) != int(file.metadata.serialized_size)


def footer_bytes(raw: IO[bytes] | io.RawIOBase) -> int:
    """Return the length of an open Parquet file's footer, which is stored after it."""
    raw.seek(-_TAIL_BYTES, os.SEEK_END)
    return int.from_bytes((raw.read(_TAIL_BYTES) or b"")[:4], "little")


def _info_paths(column: ImageColumn, *, told: bool = False) -> list[str]:
    return [f"{column.name}.{name}" for name in (column.told_fields if told else column.info_fields)]


def _leaf_paths(file: pq.ParquetFile) -> list[str]:
    columns = file.schema
    return [columns.column(number).path for number in range(len(columns))]
