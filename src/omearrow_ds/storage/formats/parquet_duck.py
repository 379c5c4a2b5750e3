"""Parquet by DuckDB: written by its COPY; read page by page like any Parquet file, or by DuckDB itself.

DuckDB writes one page per row group, without an option for it: for random access to a compressed file, pass a small
``rows_per_group``. Measurements are in ``docs/explanation/layouts.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from omearrow_ds.storage.formats import duckdb as duckdb_file
from omearrow_ds.storage.formats import get_format, parquet
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._table import TableImages

UNSUPPORTED_TYPES = duckdb_file.UNSUPPORTED_TYPES
_ROW_NUMBER = "file_row_number"
_ASYNC_THREADS = 0  # with more, DuckDB 2.0 sometimes hangs if a COPY is interrupted
ERRORS = (*parquet.ERRORS, duckdb.Error)
_CODECS = {"none": "uncompressed", "lz4": "lz4_raw", "zstd": "zstd", "snappy": "snappy"}


def refuse_target(path: Path, columns: pa.Schema) -> None:
    """Refuse column names that differ only in case, and the name that DuckDB reserves for row numbers."""
    del path
    duckdb_file.refuse_names(columns, _ROW_NUMBER)


def write_collection(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Parquet file with DuckDB, without dictionaries; tables of equal length get a row group each."""
    remaining = iter(tables)
    first = next(remaining, table_schema.empty_table())
    options = {
        "FORMAT": "parquet",
        "COMPRESSION": _CODECS[compression],
        "DICTIONARY_SIZE_LIMIT": 0,
        "ROW_GROUP_SIZE": max(len(first), 1),
        # Later images may be larger than the first ones.
        "ROW_GROUP_SIZE_BYTES": max(first.nbytes, get_format("parquet_duck").writer.max_bytes),
    }
    listed = ", ".join(f"{name} {value}" for name, value in options.items())
    statement = f"COPY (SELECT * FROM incoming) TO {duckdb_file.literal(str(path))} ({listed})"
    # Further threads only hold more images in memory.
    with duckdb_file.connect(threads=1, async_threads=_ASYNC_THREADS, temp_directory=f"{path}.tmp") as connection:
        duckdb_file.run_on_tables(connection, itertools.chain([first], remaining), table_schema, statement)


class _ReadByDuckDB(duckdb_file.DuckDBTable):
    engine = "duckdb"
    _format_name = "parquet_duck"
    _row_number = _ROW_NUMBER

    def _key_column(self, table_schema: pa.Schema) -> str | None:
        del table_schema  # A Parquet file has no index.
        return None

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb_file.connect(async_threads=_ASYNC_THREADS)
        duckdb_file.lock(connection, str(self.path), duckdb_file.unglobbed(str(self.path)))
        return connection

    def _relation(self) -> str:
        # The path is a file name, not a pattern; folders such as ``well=A01`` in it are not columns.
        return f"read_parquet({duckdb_file.literal(duckdb_file.unglobbed(str(self.path)))}, hive_partitioning = false)"

    def layout(self) -> Stored:
        with closing(open_collection(self.path, image_column=self.header.column.name, with_columns=False)) as pages:
            stored = pages.details.storage_info()
        return replace(stored, in_place=False, reading="by DuckDB, which decodes a row group per image")


def open_collection(path: Path, **options: Any) -> TableImages:
    """Open a Parquet file; ``engine="duckdb"`` reads the images with DuckDB."""
    table_type = _ReadByDuckDB if options.get("engine") == "duckdb" else parquet.ParquetTable
    return TableImages("parquet_duck", table_type, ERRORS, path, **options)
