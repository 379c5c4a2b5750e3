"""`SqlSource`: the base of both DuckDB formats: the connection, quoting, and a source over one relation."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import duckdb
import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import ColumnError, FormatError, MemoryLimitError, MetadataError, OMEArrowDSError
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.formats._base import Array, Block
from omearrow_ds.storage.formats._error_translation import first_line
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn
from omearrow_ds.storage.formats._table import TableSource, as_arrays, as_reader, rows_changed

VECTOR_ROWS = 2048  # minimum number of rows that DuckDB decodes together
# Small batches reuse memory: 1,000 images of 100 x 100 took 36 ms in one batch, 18 in five, 24 in sixty-three.
STREAMED_BYTES = 4 * 2**20
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
    "allowed_configs": ["memory_limit"],  # even if locked
    "arrow_large_buffer_size": True,  # otherwise, result batches and chunks of 2 GiB would fail
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
    "temp_directory": "",  # DuckDB's own choice is .tmp in the working folder
}
UNSUPPORTED_TYPES = (pa.types.is_float16, pa.types.is_duration, pa.types.is_interval, pa.types.is_decimal256)
STAGES = {"SqlSource._query": "read+decode"}


def connect(**settings: int | str) -> duckdb.DuckDBPyConnection:
    """Return a connection to a new in-memory database, which installs and loads no extension."""
    return duckdb.connect(":memory:", config={**_CONFIG, **settings})


def lock(connection: duckdb.DuckDBPyConnection, *paths: str) -> None:
    """Restrict a connection permanently to attached databases and ``paths``, and disable the network."""
    allowed = f"SET allowed_paths = [{', '.join(map(literal, paths))}]"
    connection.execute(f"{allowed}; SET enable_external_access = false; SET lock_configuration = true")


def identifier(name: str) -> str:
    """Return ``name`` quoted as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return ``text`` quoted as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def unglobbed(path: str) -> str:
    """Return ``path`` escaped for DuckDB's glob patterns: each special character becomes a character class."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


def run_on_tables(
    connection: duckdb.DuckDBPyConnection, tables: Iterable[pa.Table], table_schema: pa.Schema, statement: str
) -> None:
    """Run an SQL statement, in which the name ``incoming`` refers to the rows of all tables."""
    connection.register("incoming", as_reader(tables, table_schema))
    connection.execute(statement)


def refuse_names(columns: pa.Schema, *reserved: str) -> None:
    """Raise an error for column names that differ only in case, or have one of the ``reserved`` lowercase names."""
    taken = {*reserved, schema.COLUMN, schema.CHECKSUM_COLUMN}
    for name in columns.names:
        if name.lower() in taken:
            msg = f"column {name!r}: DuckDB reserves this name, or another column has it (ignoring case); rename it"
            raise MetadataError(msg)
        taken.add(name.lower())


def explain(guard: FileGuard, error: BaseException) -> OMEArrowDSError | None:
    """Return the error if DuckDB failed for a reason other than a damaged file; None if the file may be damaged."""
    if isinstance(error, duckdb.OutOfMemoryException):
        return MemoryLimitError(
            f"{guard.path}: DuckDB ran out of memory: {first_line(error)}; use a machine with more memory"
        )
    return guard.find_change()


class SqlSource(TableSource):
    """Images of one table, view or file that DuckDB reads; an internal column numbers the rows.

    A subclass defines `_connect`, `_relation` (an SQL expression) and ``_row_number`` (the internal column).
    """

    errors = (duckdb.Error, pa.ArrowException, OSError)
    _explain = staticmethod(explain)
    _row_number: ClassVar[str]
    _selector: str | None = None  # column that selects rows; None until it is known

    def __init__(self, path: Path, image_column: str | None = None, *, with_columns: bool = True) -> None:
        self._set_file(path, None, image_column=image_column, with_columns=with_columns)
        self.guard.files = list(map(str, self.format.files_beside(path)))
        self.guard.explain = self._explain
        self._connection = ProcessLocal(self._open)
        self._from = self._relation()
        table_schema = self._query("SELECT *", "LIMIT 0").schema
        if self._row_number in map(str.lower, table_schema.names):
            raise ColumnError(
                f"{path}: column {self._row_number!r} hides DuckDB's row numbers; rename it",
                column=self._row_number,
            )
        others = self._choose(table_schema, image_column, with_columns=with_columns)
        self._image = identifier(self._column.name)
        key = self._key_column(table_schema)
        columns = pa.schema([table_schema.field(name) for name in others if name != key])
        self._set_header(self._read_info(self._column), columns)
        self._set_rows(key)
        self.close()

    def _read_info(self, column: ImageColumn) -> pa.Table:
        image, names = identifier(column.name), map(identifier, column.info_fields)
        return self._query(f"SELECT {', '.join(f'{image}.{name} AS {name}' for name in names)}", self._in_order)

    def _read_stored(self, names: list[str]) -> pa.Table:
        return self._query(f"SELECT {', '.join(map(identifier, names))}", self._in_order)

    @property
    def _in_order(self) -> str:
        return f"ORDER BY {self._row_number}"

    @abstractmethod
    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection."""

    @abstractmethod
    def _relation(self) -> str:
        """Return the relation to select from, as SQL."""

    def _key_column(self, table_schema: pa.Schema) -> str | None:
        """Return the writer's own column that finds rows without a scan, if it exists."""
        del table_schema
        return None

    def _set_rows(self, key: str | None) -> None:
        """Set the number that selects each image: its key if all have one, else the engine's row number."""
        self._selector = self._row_number if key is None else identifier(key)
        rows = self._query(f"SELECT {self._selector} AS key", self._in_order)["key"]
        if rows.null_count:
            self._set_rows(None)
            return
        self._rows = rows.to_numpy()
        self._absent = int(self._rows.min(initial=0)) - 2
        if self._keyed and len(self):  # a scan does not read the index, and would not detect that it is truncated
            self._query("SELECT 1", f"WHERE {self._selector} = {self._rows[-1]}")

    @property
    def _keyed(self) -> bool:
        """Whether single rows are found by a key."""
        return self._selector not in (None, self._row_number)

    def _open(self) -> duckdb.DuckDBPyConnection:
        with self.guard:
            return self._connect()

    def close(self) -> None:
        self._connection.close()

    def _query(self, select: str, rest: str) -> pa.Table:
        with self.guard:  # each query opens a Parquet file; one cursor per query keeps threads apart
            return self._connection.get().cursor().sql(f"{select} FROM {self._from} {rest}").to_arrow_table()

    def _wanted(self, rows: Array) -> str:
        numbers = rows.tolist()
        if self._keyed and len(rows) > 1:  # DuckDB turns consecutive numbers into a range, and scans for it
            numbers.append(self._absent)
        return f"WHERE {self._selector} IN ({', '.join(map(str, numbers))})"

    def _fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        rows = self._rows[indices]
        pixels = f"{self._image}.{identifier(field)} AS pixels"
        table = self._query(f"SELECT {self._selector} AS key, {pixels}", self._wanted(rows))
        keys = table["key"].to_numpy()
        if np.array_equal(keys, rows):
            return as_arrays(table["pixels"])
        by_key = np.argsort(keys)
        if not np.array_equal(keys[by_key], np.sort(rows)):
            raise FormatError(
                f"{self.path}: DuckDB returned other rows than requested; the file changed, open it again"
            )
        return as_arrays(table["pixels"].take(by_key[np.argsort(np.argsort(rows))]))

    def stream(self) -> Iterator[Block]:
        """Yield all images by one scan, which is faster than reading rows by number."""
        num_read = 0
        for chunks in self._scan(self._column.pixel_field):
            yield num_read, self._images(chunks, np.arange(num_read, min(num_read + len(chunks), len(self))))
            num_read += len(chunks)
        if num_read != len(self):
            raise rows_changed(self.path, num_read, len(self))

    def _scan(self, field: str) -> Iterator[pa.Array]:
        """Yield ``chunks`` or ``planes`` of all rows, in arrays of limited size, in order."""
        rows = max(1, min(VECTOR_ROWS, STREAMED_BYTES // self._image_bytes))
        query = f"SELECT {self._image}.{identifier(field)} AS pixels FROM {self._from}"
        with self.guard:
            for batch in self._connection.get().cursor().sql(query).to_arrow_reader(rows):
                self.guard.refuse_changed()  # before yielding data of another file
                yield from as_arrays(batch.column(0))

    @cached_property
    def _image_bytes(self) -> int:
        return int(image_bytes(self.shapes, self.dtypes).max(initial=1))
