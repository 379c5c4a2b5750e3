"""DuckDB database file: images are the rows of one table with an indexed key.

DuckDB decodes a vector of 2,048 rows to fetch one by row number. With an index on a key it fetches single rows, if they
are uncompressed: its zstd packs a vector into one frame. ``"none"`` therefore disables only zstd and adds the key,
which the view ``images`` omits. ``"zstd"`` leaves the choice to DuckDB, has no key, and suits archives that are read in
order.
Writing holds up to 2,048 images twice: the smallest row group and its encoded copy. Measurements are in
``docs/explanation/layouts.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ColumnError, FormatError, MemoryLimitError, OMEArrowDSError, PathExistsError
from omearrow_ds.storage.formats import _sql
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.formats._error_translation import first_line
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._image_columns import image_columns
from omearrow_ds.storage.formats._stored import Stored, groups, joined

_TABLE = "images"
_KEYED_TABLE = "omearrow_ds_images"
_DATABASE = "stored"
_KEY = "omearrow_ds_row"
_ROW_NUMBER = "rowid"
UNSUPPORTED_TYPES = _sql.UNSUPPORTED_TYPES
_KEY_FIELD = pa.field(_KEY, pa.int64())
_ROW_GROUP_ROWS = _sql.VECTOR_ROWS  # Minimum; DuckDB holds a row group in memory until it is full.
_PIECE_BYTES = 16 * 2**20  # Per query.
_SCANNED_PIECE_BYTES = 2**30  # Without a key, each query decodes all vectors of its images.
_SCANNED_BYTES = 64 * 2**20
_SPARE_BYTES = 32 * 2**20
_FAILURES = {
    "Conflicting lock is held": ("is open for writing in another process", "close it in that process, or copy it"),
    "Unique file handle conflict": ("is open for writing in this process", "close that connection first"),
    "replaying WAL file": ("its log (.wal) is damaged or from another database", "restore the log, or remove it"),
}


def refuse_target(path: Path, columns: pa.Schema) -> None:
    """Refuse columns that DuckDB cannot store, and paths that DuckDB would misread or has open."""
    _sql.refuse_names(columns, _ROW_NUMBER, _KEY)
    _refuse_misread(path)
    _refuse_in_use(path)


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a new database as the relation ``images``.

    Raises `duckdb.Error` if DuckDB cannot write, or the file does not hold every row.
    """
    with _sql.connect(threads=1, temp_directory=f"{path}.tmp") as connection:
        connection.execute("SET write_buffer_row_group_count = 1")
        # Nobody sees the file before it is complete, and a log of the last rows would take three times their memory.
        _attach(connection, path, f"(ROW_GROUP_SIZE {_ROW_GROUP_ROWS}, RECOVERY_MODE no_wal_writes)")
        counted = _Counted(tables)
        if compression == "none":
            _write_keyed(connection, counted, table_schema)
        else:
            _sql.run_on_tables(connection, counted, table_schema, f"CREATE TABLE {_DATABASE}.{_TABLE} AS FROM incoming")
        connection.execute(f"CHECKPOINT {_DATABASE}")  # closing would write too, but hide that it failed
        # Reattached in the same instance, because creating one would take 20 ms.
        connection.execute(f"USE memory; DETACH {_DATABASE}")
        _attach(connection, path, "(READ_ONLY)")
        _sql.lock(connection)
        (rows,) = connection.execute(f"SELECT count(*) FROM {_DATABASE}.{_TABLE}").fetchall()[0]
        if rows != counted.rows:  # as when version 2.0 wrote a table of structs in several steps without a log
            raise duckdb.Error(f"{rows} of {counted.rows} rows were written")


class _Counted:
    """Tables, and the number of their rows so far, from which keys are numbered."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self.rows = 0
        self._tables = tables

    def __iter__(self) -> Iterator[pa.Table]:
        for table in self._tables:
            self.rows += len(table)
            yield table

    def with_keys(self) -> Iterator[pa.Table]:
        """Yield the tables, each with the row numbers appended as the last column."""
        for table in self:
            yield table.append_column(_KEY_FIELD, pa.array(np.arange(self.rows - len(table), self.rows)))


def _write_keyed(connection: duckdb.DuckDBPyConnection, tables: _Counted, table_schema: pa.Schema) -> None:
    """Write tables without zstd, with a key and its index; ``images`` is a view that omits the key."""
    connection.execute("SET disabled_compression_methods = 'zstd'")
    connection.execute(f"USE {_DATABASE}")  # or the view would store the attached database name
    stored = table_schema.append(_KEY_FIELD)
    _sql.run_on_tables(connection, tables.with_keys(), stored, f"CREATE TABLE {_KEYED_TABLE} AS FROM incoming")
    connection.execute(f"CREATE UNIQUE INDEX {_KEY} ON {_KEYED_TABLE} ({_KEY})")
    connection.execute(f"CREATE VIEW {_TABLE} AS SELECT * EXCLUDE ({_KEY}) FROM {_KEYED_TABLE}")


def _attach(connection: duckdb.DuckDBPyConnection, path: Path, options: str = "") -> None:
    """Attach a database file. Opening it directly would return the one that this process has open at its path."""
    connection.execute(f"ATTACH {_sql.literal(str(path))} AS {_DATABASE} {options}")


def _quoted(names: Sequence[str]) -> str:
    """Return the qualified SQL name of a table of the attached database, from its schema's name and its own."""
    return ".".join(map(_sql.identifier, (_DATABASE, *names)))


def _called(names: Sequence[str]) -> set[str]:
    """Return the lowercase names that select a table; a table with keys is also selected by its view's name."""
    schema_name, *own = (name.lower() for name in names)
    own += [_TABLE] if own == [_KEYED_TABLE] else []
    return {*own, *(f"{schema_name}.{name}" for name in own)}


def _refuse_misread(path: Path) -> None:
    """Refuse a path that DuckDB would misread."""
    if "?" in str(path) or "\\" in str(path):
        problem = "DuckDB cannot open a path with '?' or a backslash"
        raise FormatError(f"{path}: {problem}; rename it, or choose another path")


def _explain(guard: FileGuard, error: BaseException) -> OMEArrowDSError | None:
    """Return the error if DuckDB failed for a reason other than a damaged file; None if the file may be damaged."""
    return _sql.explain(guard, error) or _not_had(guard.path, error)


def _not_had(path: Path, error: BaseException) -> FormatError | None:
    """Return the error for a database that is locked, or whose log is not its own; else None."""
    for text, (problem, remedy) in _FAILURES.items():
        if text in str(error):
            return FormatError(f"{path}: {problem}: {first_line(error)}; {remedy}")
    return None


def _refuse_in_use(path: Path) -> None:
    """Raise `PathExistsError` if a database is open for writing: its log would be left next to the new file."""
    if not path.is_file():
        return
    with _sql.connect() as connection:
        try:
            _attach(connection, path, "(READ_ONLY)")
        except duckdb.Error as error:  # the file may be of any other kind
            if _not_had(path, error):
                raise PathExistsError(str(_not_had(path, error))) from error


class Source(_sql.SqlSource):
    """Images of a DuckDB table: the requested one, else ``images`` (or the table of that view), else the only table.

    Raises `ColumnError` if the requested table does not exist, or if none was requested and the choice is ambiguous.
    """

    name = "duckdb"
    _row_number = _ROW_NUMBER
    _explain = staticmethod(_explain)
    _frugal = True

    def __init__(
        self, path: Path, image_column: str | None = None, *, with_columns: bool = True, table: str | None = None
    ) -> None:
        self._table = table
        super().__init__(path, image_column, with_columns=with_columns)
        self._how["table"] = table
        self.variant = (self._schema_name, self._table_name)

    def _connect(self) -> duckdb.DuckDBPyConnection:
        _refuse_misread(self.path)
        connection = _sql.connect(threads=1)  # more were never faster, and each holds a row group of images
        _attach(connection, self.path, "(READ_ONLY)")
        _sql.lock(connection)  # from here on, only this database can be read
        if self._keyed and self._frugal:  # or DuckDB would in time cache the whole file, like the page cache
            connection.execute(f"SET memory_limit = '{self._working_bytes()}B'")
        return connection

    def _use_more(self) -> None:
        """Remove the memory limit, now and at each later opening."""
        self._frugal = False
        self._connection.get().cursor().execute("RESET memory_limit")

    def _query(self, select: str, rest: str) -> pa.Table:
        limited = self._keyed and self._frugal
        try:
            return super()._query(select, rest)
        except MemoryLimitError:
            if not limited:
                raise
        self._use_more()
        return super()._query(select, rest)

    def _relation(self) -> str:
        query = f"SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = '{_DATABASE}' ORDER BY ALL"
        connection = self._connection.get()
        with self.guard.reading():
            tables = [
                names
                for names in connection.sql(query).fetchall()
                if image_columns(connection.sql(f"SELECT * FROM {_quoted(names)} LIMIT 0").to_arrow_table().schema)
            ]
        if not tables:
            raise ColumnError(
                f"{self.path}: no table has a column that is an OME-Arrow struct; pass a database with images"
            )
        requested = (_TABLE if self._table is None else self._table).lower()
        chosen = [names for names in tables if requested in _called(names)]
        if self._table is None and not chosen:
            chosen = tables
        if len(chosen) != 1:
            listed = ", ".join(repr(".".join(names)) for names in chosen or tables)
            several = f"{len(chosen)} tables contain images; pass table= with one of"
            none = f"table={self._table!r} is not a table with images; pass one of"
            raise ColumnError(f"{self.path}: {several if chosen else none} {listed}")
        self._schema_name, self._table_name = chosen[0]
        return _quoted(chosen[0])

    def _layout(self) -> Stored:
        table = _quoted((self._schema_name, self._table_name))
        kind = "BLOB" if self._column.encoding == "bytes" else "USMALLINT"
        of_column = f"FROM pragma_storage_info({_sql.literal(table)}) WHERE column_name = ?"
        pixels = f"SELECT lower(compression) {of_column} AND segment_type = '{kind}'"
        rows = f"SELECT sum(count)::BIGINT {of_column} AND column_path LIKE '[%, 0]' AND column_path NOT LIKE '%, %, %'"
        name = [self._column.name]
        with self.guard.reading():
            connection = self._connection.get().cursor()
            codecs = [codec for (codec,) in connection.execute(pixels, name).fetchall()]
            sizes = connection.execute(f"{rows} GROUP BY row_group_id ORDER BY row_group_id", name).fetchall()
        compression = joined("none" if codec == "uncompressed" else codec for codec in codecs)
        chunking = groups(np.cumsum([0, *(size for (size,) in sizes)]).tolist(), "row group")
        reading = (
            "by DuckDB, each image separately, through an index"
            if self._keyed
            else f"by DuckDB, which decodes up to {_sql.VECTOR_ROWS:,} images to read one"
        )
        return Stored(self._column.encoding, compression, chunking, in_place=False, reading=reading)

    def _key_column(self, table_schema: pa.Schema) -> str | None:
        """Return the name of the key if it has the index that `write` creates; else it is an ordinary column."""
        if _KEY not in table_schema.names or not pa.types.is_integer(table_schema.field(_KEY).type):
            return None
        query = (
            "SELECT expressions FROM duckdb_indexes() WHERE is_unique AND "
            "(database_name, schema_name, table_name, index_name) = (?, ?, ?, ?)"
        )
        names = [_DATABASE, self._schema_name, self._table_name, _KEY]
        with self.guard.reading():
            indexes = self._connection.get().cursor().execute(query, names).fetchall()
        return _KEY if (f"[{_KEY}]",) in indexes else None

    def _vector_bytes(self) -> int:
        """Return the size of the images that DuckDB decodes together in a scan."""
        return min(_sql.VECTOR_ROWS, len(self)) * self._image_bytes

    def _working_bytes(self) -> int:
        """Return the memory that reading a keyed table needs; a growing list temporarily exists twice."""
        scan_bytes = 5 * self._vector_bytes() if self._scanned else 0
        return _SPARE_BYTES + 4 * max(self._image_bytes, _PIECE_BYTES) + scan_bytes + 64 * len(self)

    @property
    def _scanned(self) -> bool:
        """Whether all images are read by a scan: not if its vectors are large and images can be read by key."""
        return not self._keyed or self._vector_bytes() <= _SCANNED_BYTES

    def _fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        piece_bytes = _PIECE_BYTES if self._keyed else _SCANNED_PIECE_BYTES
        rows, fetch = max(1, piece_bytes // self._image_bytes), super()._fetch
        return chain.from_iterable(
            fetch(field, indices[start : start + rows]) for start in range(0, len(indices), rows)
        )

    def _scan(self, field: str) -> Iterator[pa.Array]:
        done, limited = 0, self._keyed and self._frugal
        if self._scanned:
            try:
                for array in super()._scan(field):
                    yield array
                    done += len(array)
            except MemoryLimitError:
                if not limited:
                    raise
                self._use_more()
        if done < len(self) and self._keyed:
            yield from self._fetch(field, np.arange(done, len(self)))
