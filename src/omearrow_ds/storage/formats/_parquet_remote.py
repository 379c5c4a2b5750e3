"""Parquet files on servers: the footer and all columns but pixels are fetched at once, then the ranges of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
from omearrow_ds.storage.formats._ranged import Ranged, Span
from omearrow_ds.storage.formats._remote_table import UNMAPPED, RemoteTable, footer

_MARK_BYTES = 8  # the footer's length and the magic number
_UNKNOWN = object()  # other threads may clear what is known of row groups
_MOST_HEADERS = 2**10  # of a row group, that are fetched at once


class _Pages(MappedPages):
    """As `MappedPages`, of a file of which ranges are fetched."""

    def __init__(self, file: Ranged, chunks: Sequence[ColumnChunk]) -> None:
        self.mapping: Any = UNMAPPED
        self._file, self._chunks, self._bytes = file, chunks, Bytes(file)
        self.groups: dict[int, Any] = {}

    def cut(self, number: int, pages_of: PagesOf, method: str, *given: object) -> Any:
        """Return what a method of a row group's pages gives; or None."""
        try:
            pages = self.groups.get(number, _UNKNOWN)
            if pages is _UNKNOWN:
                chunk = self._chunks[number]
                if is_plain(chunk):
                    self._hold_headers(chunk)
                else:  # one image cannot be found without those before it
                    self.groups.clear()
                    self._file.let_go()
                    self._file.hold([(chunk.start, chunk.stop)])
                pages = self.groups[number] = pages_of(self._bytes, number)  # type: ignore[arg-type]  # cut as arrays are
            return None if pages is None else getattr(pages, method)(*given)
        except OtherPagesError:
            self.groups[number] = None
            return None

    def _hold_headers(self, chunk: ColumnChunk) -> None:
        """Fetch the headers of all pages at once, where they are as far from each other as the first two.

        Those of images of one shape are. The others are fetched one by one, as each tells where the next one is.
        """
        self._file.hold([(chunk.start, min(chunk.start + HEADER_BYTES, chunk.stop))])
        page = first_page(self._bytes, chunk.start, chunk.stop, compressed=False)  # type: ignore[arg-type]
        starts = range(page.stop, chunk.stop, max(page.stop - chunk.start, HEADER_BYTES))
        spans: list[Span] = [(start, min(start + HEADER_BYTES, chunk.stop)) for start in starts]
        self._file.hold(spans if len(spans) <= _MOST_HEADERS else [(chunk.start, chunk.stop)])


def is_plain(chunk: ColumnChunk) -> bool:
    """Whether images stand in the pages as they are."""
    return chunk.codec is None and not chunk.lists


class RemoteParquet(RemoteTable, ParquetSource):
    """Images of a Parquet file on a server.

    Of a plainly stored image its own bytes alone are fetched; of compressed ones, and of lists, the pixels of its row
    group.
    """

    takes = ("engine", "image_column")

    def _let_go(self) -> None:
        ParquetSource.close(self)
        self._object.get().let_go()

    def _open(self) -> pq.ParquetFile:
        with self._reading():
            file = self._object.get()
            footer(file, _MARK_BYTES, lambda mark: int.from_bytes(mark[:4], "little"))
            opened = pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=False)
            if self._info_unread:
                file.hold(_beside_pixels(opened.metadata))
        return opened

    @property
    def _info_unread(self) -> bool:
        return not hasattr(self, "_info")

    def _is_encrypted(self, file: pq.ParquetFile) -> bool:
        return footer_bytes(self._object.get()) != int(file.metadata.serialized_size)

    def _map(self) -> MappedPages:
        return _Pages(self._object.get(), self._chunks)

    def _read_group(self, number: int, field: str) -> list[pa.Array]:
        with self._object.get().alone:
            return super()._read_group(number, field)

    def _plain_pages(self, number: int) -> type[PixelPages]:
        return RangedPages if is_plain(self._chunks[number]) else PixelPages

    def views(self, indices: Sequence[int]) -> list[Array]:
        file = self._object.get()
        if len(indices) > 1 and self._chunks:
            pages = self._mapping.get()
            spans: list[Span] = []
            for number, rows in by_part(self._starts, indices):
                spans += pages.cut(number, self._pages_of, "spans", [row - self._starts[number] for row in rows]) or []
            file.hold(spans)  # of all row groups, several at once
        images = super().views(indices)
        file.let_go()
        return images


def _beside_pixels(metadata: pq.FileMetaData) -> list[Span]:
    """Return where all stands that is no pixels."""
    spans: list[Span] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for leaf in range(group.num_columns):
            column = group.column(leaf)
            if not {"pixel_bytes", "pixels"} & set(column.path_in_schema.split(".")):
                start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
                start = min(start, column.data_page_offset)
                spans.append((start, start + column.total_compressed_size))
    return spans
