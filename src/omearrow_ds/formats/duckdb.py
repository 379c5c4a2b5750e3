"""DuckDB database file: images are the rows of one table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from omearrow_ds.errors import ColumnError, FormatError
from omearrow_ds.formats import _sql
from omearrow_ds.formats._table import image_columns

MAX_ROWS = _sql.MAX_ROWS
MAX_BYTES = _sql.MAX_BYTES
_TABLE = "images"
_DATABASE = "stored"
_ROW_GROUP_ROWS = 2048  # the fewest there can be: DuckDB holds a row group in memory until it is full


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path) -> None:
    """Write tables to the table ``images`` of a new database."""
    with _sql.connect() as connection:
        _attach(connection, path, f"(ROW_GROUP_SIZE {_ROW_GROUP_ROWS})")
        _sql.run_on_tables(connection, tables, table_schema, f"CREATE TABLE {_DATABASE}.{_TABLE} AS FROM incoming")


def _attach(connection: duckdb.DuckDBPyConnection, path: Path, options: str = "") -> None:
    """Attach a database file. Opening it directly would give the one that this process has open under its path."""
    connection.execute(f"ATTACH {_sql.literal(str(path))} AS {_DATABASE} {options}")


class Source(_sql.SqlSource):
    """Images of a DuckDB database: its table ``images``, or the only table that holds an OME-Arrow struct.

    Raises
    ------
    FormatError
        If the file is no DuckDB database, or holds a null or impossible image.
    ColumnError
        If no table, or more than one, has a column that is an OME-Arrow struct.
    """

    name = "duckdb"
    _row_number = "rowid"

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Refuse, beside what DuckDB refuses of columns, a path that it would misread."""
        super().refuse_target(path, columns)
        if "?" in str(path):
            raise FormatError(f"{path}: DuckDB takes what follows '?' in a path for options; choose a path without it")

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = _sql.connect()
        _attach(connection, self.path, "(READ_ONLY)")
        return connection

    def _relation(self) -> str:
        columns = "schema_name, table_name"
        query = f"SELECT {columns} FROM duckdb_tables() WHERE database_name = '{_DATABASE}' ORDER BY ALL"
        connection = self._connection.get()
        found = []
        for schema_name, table_name in connection.sql(query).fetchall():
            relation = f"{_DATABASE}.{_sql.identifier(schema_name)}.{_sql.identifier(table_name)}"
            if image_columns(connection.sql(f"SELECT * FROM {relation} LIMIT 0").to_arrow_table().schema):
                found.append(relation)
        chosen = [relation for relation in found if relation.endswith(f".{_sql.identifier(_TABLE)}")] or found
        if len(chosen) != 1:
            tables = (
                f"the tables {found} all hold images" if found else "no table has a column that is an OME-Arrow struct"
            )
            raise ColumnError(f"{self.path}: {tables}; one table of images is needed, {_TABLE!r} is taken first")
        return chosen[0]
