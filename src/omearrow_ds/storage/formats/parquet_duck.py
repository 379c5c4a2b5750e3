"""Parquet by DuckDB: written by its COPY; read page by page as any Parquet file, or by DuckDB itself.

Measured 2026-11-21 as in ``parquet.py``, 100 x 100 uint16, encoding bytes: a random image on demand, and one of 16, in
units of one ``tifffile.imread`` (0.3 ms).

                                             pages                            duckdb
    images, compression, rows    write    open    one     16    all      open    one     16      all
    1,000    none    16         220 ms   28 ms  0.005  0.007   0 ms    130 ms     42    4.0    97 ms
             none   256         146 ms    7 ms  0.010  0.010   0 ms     41 ms     25    4.3    44 ms
             none  2048         121 ms    5 ms  0.011  0.008   0 ms     33 ms     52    4.7    53 ms
             zstd    16         461 ms   79 ms    1.4    1.1  31 ms    109 ms     55    5.6    97 ms
             zstd   256         172 ms    9 ms     21    6.6  28 ms     45 ms     55     12    72 ms
             zstd  2048         201 ms    8 ms    102    5.7  42 ms     55 ms    163     11   113 ms
    10,000   none    16        2004 ms  351 ms   0.32   0.12  63 ms    883 ms    406     24   710 ms
             none   256        1216 ms   43 ms   0.01   0.02   1 ms    142 ms     84     17   385 ms
             none  1024         875 ms   32 ms   0.01   0.01   0 ms    106 ms    101     31   743 ms

Hence 256 rows, uncompressed. DuckDB makes one page of a row group, and has no option for it: for random access to a
compressed file, pass a small ``group_rows``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from omearrow_ds.storage.formats import _sql, get_format
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._parquet import ParquetSource
from omearrow_ds.storage.formats._stored import Stored

_ASYNC_THREADS = 0  # with any, DuckDB 2.0 sometimes hangs where a COPY is interrupted
_CODECS = {"none": "uncompressed", "lz4": "lz4_raw", "zstd": "zstd", "snappy": "snappy"}


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Parquet file with DuckDB, a row group each where they are alike; no dictionaries."""
    remaining = iter(tables)
    first = next(remaining, table_schema.empty_table())
    options = {
        "FORMAT": "parquet",
        "COMPRESSION": _CODECS[compression],
        "DICTIONARY_SIZE_LIMIT": 0,
        "ROW_GROUP_SIZE": max(len(first), 1),
        # Later images may be larger than the first ones.
        "ROW_GROUP_SIZE_BYTES": max(first.nbytes, get_format(Source.name).max_bytes),
    }
    listed = ", ".join(f"{name} {value}" for name, value in options.items())
    statement = f"COPY (SELECT * FROM incoming) TO {_sql.literal(str(path))} ({listed})"
    # Further threads only hold more images in memory.
    with _sql.connect(threads=1, async_threads=_ASYNC_THREADS, temp_directory=f"{path}.tmp") as connection:
        _sql.run_on_tables(connection, itertools.chain([first], remaining), table_schema, statement)


class _ByPages(ParquetSource):
    name = "parquet_duck"
    engines = (*ParquetSource.engines, "duckdb")


class _ByDuckDB(_sql.SqlSource):
    name = "parquet_duck"
    engine = "duckdb"
    _row_number = "file_row_number"

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = _sql.connect(async_threads=_ASYNC_THREADS)
        _sql.lock(connection, str(self.path), _sql.unglobbed(str(self.path)))
        return connection

    def _relation(self) -> str:
        # The path is one file's name, no pattern; nor do folders in it called ``well=A01`` stand for columns.
        return f"read_parquet({_sql.literal(_sql.unglobbed(str(self.path)))}, hive_partitioning = false)"

    def stored_as(self) -> Stored:
        with _ByPages(self.path, image_column=self._column.name, with_columns=False) as pages:
            found = pages.stored_as()
        return replace(found, in_place=False, reading="by DuckDB, which decodes a row group for one image")


class Source(BaseSource):
    """Images of a Parquet file that DuckDB wrote, or any other tool.

    Parameters
    ----------
    path
        The file.
    how
        ``image_column`` and ``with_columns``, as of `TableSource`.
    engine
        ``"duckdb"``, ``"pages"`` (the mapped file's own pages) or ``"pyarrow"``; None for the fastest that can read it.

    Raises
    ------
    FormatError
        If the file is no Parquet file, or holds an impossible image.
    ColumnError
        If no column is an OME-Arrow struct, or not the one asked for.
    ArgumentError
        If the engine is unknown or cannot read the file.
    """

    name = "parquet_duck"
    engines = _ByPages.engines
    errors = (*_ByPages.errors, *_ByDuckDB.errors)
    unheld_types = _ByDuckDB.unheld_types

    def __init__(self, path: Path, engine: str | None = None, **how: Any) -> None:
        self._how = {"engine": engine, **how}
        self._reader = reader = _ByDuckDB(path, **how) if engine == "duckdb" else _ByPages(path, engine, **how)
        self.path, self.image_ids, self.columns = reader.path, reader.image_ids, reader.columns
        self.shapes, self.dtypes, self.checksums = reader.shapes, reader.dtypes, reader.checksums
        self.image_column, self.other_image_columns = reader.image_column, reader.other_image_columns
        self.null, self._stamp = reader.null, reader.stamp

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Refuse names that DuckDB cannot tell apart, and that of its row number."""
        _ByDuckDB.refuse_target(path, columns)

    @property
    def engine(self) -> str:
        """What reads the pixels: ``"duckdb"``, ``"pages"`` or ``"pyarrow"``."""
        return self._reader.engine

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it may be a read-only view of the mapped file."""
        return self._reader.view(index)

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the mapped file."""
        return self._reader.views(indices)

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, every field of ome-arrow's present."""
        return self._reader.metadata(index)

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""
        return self._reader.scan()

    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""
        return self._reader.stored_as()

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._reader.close()

    def image_columns(self) -> list[ImagesOf]:
        """Return what each image column of the table holds, without reading pixels."""
        return self._reader.image_columns()
