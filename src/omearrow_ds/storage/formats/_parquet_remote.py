"""Parquet files on servers: footer and columns without pixels are fetched at opening, then ranges of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.storage.byte_source import ByteRange, ObjectFile
from omearrow_ds.storage.formats._base import Array, by_part
from omearrow_ds.storage.formats._parquet import MappedPages, PagesOf, ParquetSource, footer_bytes
from omearrow_ds.storage.formats._parquet_headers import OtherPagesError, first_page
from omearrow_ds.storage.formats._parquet_pages import (
    HEADER_BYTES,
    Bytes,
    ColumnChunk,
    PixelPages,
    RangedPages,
)
from omearrow_ds.storage.formats._remote_table import UNMAPPED, RemoteTable, footer

_MARK_BYTES = 8  # the footer's length and the magic number
_UNKNOWN = object()  # distinct from None; other threads may clear the cached row groups
_MOST_HEADERS = 2**10  # limit of page headers of a row group that are fetched at once


class _Pages(MappedPages):
    """See `MappedPages`; for a file whose byte ranges are fetched."""

    def __init__(self, file: ObjectFile, chunks: Sequence[ColumnChunk]) -> None:
        self.mapping: Any = UNMAPPED
        self._file, self._chunks, self._bytes = file, chunks, Bytes(file)
        self.groups: dict[int, Any] = {}

    def cut(self, number: int, pages_of: PagesOf, method: str, *given: object) -> Any:
        """Call a method of a row group's pages; None if they cannot be cut."""
        try:
            pages = self.groups.get(number, _UNKNOWN)
            if pages is _UNKNOWN:
                chunk = self._chunks[number]
                if is_plain(chunk):
                    self._hold_headers(chunk)
                else:  # an image cannot be located without those before it
                    self.groups.clear()
                    self._file.clear_cache()
                    self._file.cache_ranges([(chunk.start, chunk.stop)])
                pages = self.groups[number] = pages_of(self._bytes, number)  # type: ignore[arg-type]  # cut as arrays are
            return None if pages is None else getattr(pages, method)(*given)
        except OtherPagesError:
            self.groups[number] = None
            return None

    def _hold_headers(self, chunk: ColumnChunk) -> None:
        """Fetch the headers of all pages at once, assuming that their distance is that of the first two.

        It is for images of one shape. Other headers are fetched one by one, since each gives the offset of the next.
        """
        self._file.cache_ranges([(chunk.start, min(chunk.start + HEADER_BYTES, chunk.stop))])
        page = first_page(self._bytes, chunk.start, chunk.stop, compressed=False)  # type: ignore[arg-type]
        starts = range(page.stop, chunk.stop, max(page.stop - chunk.start, HEADER_BYTES))
        spans: list[ByteRange] = [(start, min(start + HEADER_BYTES, chunk.stop)) for start in starts]
        self._file.cache_ranges(spans if len(spans) <= _MOST_HEADERS else [(chunk.start, chunk.stop)])


def is_plain(chunk: ColumnChunk) -> bool:
    """Whether the pages store images as plain bytes."""
    return chunk.codec is None and not chunk.lists


class RemoteParquet(RemoteTable, ParquetSource):
    """Images of a Parquet file on a server.

    Plainly stored images are fetched by their own byte ranges; for compressed ones and lists, all pixels of the row
    group are fetched.
    """

    takes = ("engine", "image_column")

    def _let_go(self) -> None:
        ParquetSource.close(self)
        self._object.get().clear_cache()

    def _open(self) -> pq.ParquetFile:
        with self._reading():
            file = self._object.get()
            footer(file, _MARK_BYTES, lambda mark: int.from_bytes(mark[:4], "little"))
            opened = pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=False)
            if self._info_unread:
                file.cache_ranges(_beside_pixels(opened.metadata))
        return opened

    @property
    def _info_unread(self) -> bool:
        return not hasattr(self, "_info")

    def _is_encrypted(self, file: pq.ParquetFile) -> bool:
        return footer_bytes(self._object.get()) != int(file.metadata.serialized_size)

    def _map(self) -> MappedPages:
        return _Pages(self._object.get(), self._chunks)

    def _read_group(self, number: int, field: str) -> list[pa.Array]:
        with self._object.get().lock:
            return super()._read_group(number, field)

    def _plain_pages(self, number: int) -> type[PixelPages]:
        return RangedPages if is_plain(self._chunks[number]) else PixelPages

    def views(self, indices: Sequence[int]) -> list[Array]:
        file = self._object.get()
        if len(indices) > 1 and self._chunks:
            pages = self._mapping.get()
            spans: list[ByteRange] = []
            for number, rows in by_part(self._starts, indices):
                spans += pages.cut(number, self._pages_of, "spans", [row - self._starts[number] for row in rows]) or []
            file.cache_ranges(spans)  # over all row groups, in parallel
        images = super().views(indices)
        file.clear_cache()
        return images


def _beside_pixels(metadata: pq.FileMetaData) -> list[ByteRange]:
    """Return the byte ranges of all columns except pixels."""
    spans: list[ByteRange] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for leaf in range(group.num_columns):
            column = group.column(leaf)
            if not {"pixel_bytes", "pixels"} & set(column.path_in_schema.split(".")):
                start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
                start = min(start, column.data_page_offset)
                spans.append((start, start + column.total_compressed_size))
    return spans
