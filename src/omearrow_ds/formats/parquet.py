"""Parquet by pyarrow: of a plainly stored file only the pixel leaf is read, a row group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import placed_chunks
from omearrow_ds.formats._base import Array, ProcessLocal
from omearrow_ds.formats._table import TableSource, as_arrays, find_image_column, unnest

MAX_ROWS = 16
MAX_BYTES = 16 * 2**20


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path) -> None:
    """Write tables to a Parquet file, a row group each, uncompressed: random access decodes a whole row group."""
    with pq.ParquetWriter(path, table_schema, compression="none", use_dictionary=False) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(len(table), 1))


class Source(TableSource):
    """Images of a Parquet file, read by pyarrow.

    Raises
    ------
    FormatError
        If the file is no Parquet file, or holds a null or impossible image.
    ColumnError
        If no column is an OME-Arrow struct.
    """

    name = "parquet"
    errors = (pa.ArrowException, OSError)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ProcessLocal(self._open, lambda file: file.close())
        file = self._file.get()
        self._column = find_image_column(file.schema_arrow, path)
        groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])
        others = [name for name in file.schema_arrow.names if name != self._column.name]
        info_paths = [f"{self._column.name}.{name}" for name in self._column.info_fields]
        with self._reading():
            info = file.read(columns=info_paths)[self._column.name]
            columns = file.read(columns=others).select(others)
        self._set_header(unnest(info), columns)
        self._pixel_paths = self._find_pixel_leaf(file)
        self._all_placed = bool(self._pixel_paths)
        self.close()

    def _find_pixel_leaf(self, file: pq.ParquetFile) -> list[str]:
        """Return the path of the pixel leaf if it is enough to tell every image, because all are plainly stored."""
        prefix = f"{self._column.name}.chunks."
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        leaves = [path for path in paths if path.startswith(prefix)]
        pixels = [path for path in leaves if path.endswith(".pixel_bytes") or ".pixels." in path[len(prefix) :]]
        places = [path for path in leaves if path not in pixels]
        if len(pixels) != 1 or not places:
            return []
        with self._reading():
            column = file.read(columns=places)[self._column.name].combine_chunks()
        chunks = pa.concat_arrays(as_arrays(column, "chunks")) if len(self) else None
        placed = chunks is not None and placed_chunks(chunks, self._expected(np.arange(len(self)))).all()
        return pixels if placed else []

    def _open(self) -> pq.ParquetFile:
        self._refuse_replaced()
        with self._reading():
            return pq.ParquetFile(self.path, memory_map=True, pre_buffer=False)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._file.close()

    def _read_group(self, number: int, field: str) -> list[pa.Array]:
        """Return ``chunks`` (of a plainly stored file their pixels alone) or ``planes`` of a row group."""
        alone = self._all_placed and field == self._column.pixel_field
        paths = self._pixel_paths if alone else [f"{self._column.name}.{field}"]
        with self._reading():
            table = self._file.get().read_row_group(number, columns=paths, use_threads=False)
        return as_arrays(table[self._column.name], field)

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``, decoded a row group at a time."""
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        images: list[Array] = []
        for number in np.unique(groups).tolist():
            start = int(self._starts[number])
            for array in self._read_group(number, self._column.pixel_field):
                first, stop = np.searchsorted(indices, (start, start + len(array)))
                if first < stop:
                    block = self._block(array, np.arange(start, start + len(array)))
                    images += [block[row] for row in (indices[first:stop] - start).tolist()]
                start += len(array)
        return images

    def _fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(groups).tolist():
            rows = pa.array(indices[groups == number] - self._starts[number])
            yield pa.concat_arrays(self._read_group(number, field)).take(rows)

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        for number in range(len(self._starts) - 1):
            yield from self._read_group(number, field)
