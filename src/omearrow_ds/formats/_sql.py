"""What the two DuckDB formats share: the connection, quoting, and a source over one relation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import duckdb
import pyarrow as pa

from omearrow_ds import schema
from omearrow_ds.errors import ColumnError, MetadataError
from omearrow_ds.formats._base import Array, ProcessLocal
from omearrow_ds.formats._table import TableSource, as_arrays, find_image_column

MAX_ROWS = 16
MAX_BYTES = 16 * 2**20
_BATCH_ROWS = 2048
_BATCH_BYTES = 2**28
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


def connect(**settings: int) -> duckdb.DuckDBPyConnection:
    """Return a connection to a database of its own in memory, which installs and loads no extension."""
    return duckdb.connect(":memory:", config={**_CONFIG, **settings})


def identifier(name: str) -> str:
    """Return ``name`` quoted as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return ``text`` quoted as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def run_on_tables(
    connection: duckdb.DuckDBPyConnection, tables: Iterable[pa.Table], table_schema: pa.Schema, statement: str
) -> None:
    """Run ``statement``, in which ``incoming`` is the stream of all tables."""
    batches = (batch for table in tables for batch in table.to_batches())
    connection.register("incoming", pa.RecordBatchReader.from_batches(table_schema, batches))
    connection.execute(statement)


class SqlSource(TableSource):
    """Images of one relation that DuckDB reads, its rows numbered by a column of the engine's own.

    A subclass gives `_connect`, `_relation` (an SQL expression) and ``_row_number`` (the engine's column).
    """

    errors = (duckdb.Error,)
    unheld_types = (pa.types.is_float16, pa.types.is_duration, pa.types.is_interval, pa.types.is_decimal256)
    _row_number: ClassVar[str]

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Refuse names that DuckDB cannot tell apart, and that of its row number."""
        super().refuse_target(path, columns)
        taken = {cls._row_number, schema.COLUMN}
        for name in columns.names:
            if name.lower() in taken:
                msg = f"column {name!r}: DuckDB has or sees one of that name (capitals do not count); rename it"
                raise MetadataError(msg)
            taken.add(name.lower())

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = ProcessLocal(self._open, lambda connection: connection.close())
        self._from = self._relation()
        table_schema = self._query("SELECT *", "LIMIT 0").schema
        if self._row_number in map(str.lower, table_schema.names):
            raise ColumnError(f"{path}: its column {self._row_number!r} hides DuckDB's row numbers; rename it")
        self._column = find_image_column(table_schema, path)
        self._image = identifier(self._column.name)
        fields = ", ".join(
            f"{self._image}.{identifier(name)} AS {identifier(name)}" for name in self._column.info_fields
        )
        others = [name for name in table_schema.names if name != self._column.name]
        order = f"ORDER BY {self._row_number}"
        info = self._query(f"SELECT {fields}, {self._row_number} AS omearrow_ds_row", order)
        self._rows = info["omearrow_ds_row"].to_numpy()
        columns = self._query(f"SELECT {', '.join(map(identifier, others))}", order) if others else pa.table({})
        self._set_header(info.drop_columns("omearrow_ds_row"), columns)
        self.close()

    @abstractmethod
    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection."""

    @abstractmethod
    def _relation(self) -> str:
        """Return what to select from, as SQL."""

    def _open(self) -> duckdb.DuckDBPyConnection:
        self._refuse_replaced()
        with self._reading():
            return self._connect()

    def close(self) -> None:
        """Close the connection; a later read opens it again."""
        self._connection.close()

    def _query(self, select: str, rest: str) -> pa.Table:
        self._refuse_replaced()
        with self._reading():  # a cursor a query, so that threads do not meet on one connection
            return self._connection.get().cursor().sql(f"{select} FROM {self._from} {rest}").to_arrow_table()

    def _fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        rows = self._rows[indices]
        span = f"WHERE {self._row_number} IN ({', '.join(map(str, rows.tolist()))}) ORDER BY {self._row_number}"
        return as_arrays(self._query(f"SELECT {self._image}.{identifier(field)} AS pixels", span)["pixels"])

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        image_bytes = int(self.shapes.prod(axis=1).max(initial=1)) * 8
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // image_bytes))
        query = f"SELECT {self._image}.{identifier(field)} AS pixels FROM {self._from}"
        self._refuse_replaced()
        with self._reading():
            for batch in self._connection.get().cursor().sql(query).to_arrow_reader(rows):
                yield from as_arrays(batch.column(0))
