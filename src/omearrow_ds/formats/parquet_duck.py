"""Parquet by DuckDB: written by its COPY, read by its Parquet reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from omearrow_ds.formats import _sql

MAX_ROWS = _sql.MAX_ROWS
MAX_BYTES = _sql.MAX_BYTES


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path) -> None:
    """Write tables to a Parquet file with DuckDB, a row group each."""
    target = _sql.literal(str(path))
    options = f"FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE {MAX_ROWS}"
    with _sql.connect(threads=1) as connection:  # further threads only hold more images in memory
        _sql.run_on_tables(connection, tables, table_schema, f"COPY (SELECT * FROM incoming) TO {target} ({options})")


class Source(_sql.SqlSource):
    """Images of a Parquet file, read by DuckDB.

    Raises
    ------
    FormatError
        If the file is no Parquet file, or holds a null or impossible image.
    ColumnError
        If no column is an OME-Arrow struct.
    """

    name = "parquet_duck"
    _row_number = "file_row_number"

    def _connect(self) -> duckdb.DuckDBPyConnection:
        return _sql.connect()

    def _relation(self) -> str:
        return f"read_parquet({_sql.literal(str(self.path))})"
