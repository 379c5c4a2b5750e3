"""DuckDB database file: images are the rows of one table with an indexed key.

DuckDB decodes a vector of 2,048 rows to fetch one by row number. With an index on a key it fetches single rows, if they
are uncompressed: its zstd packs a vector into one frame. ``"none"`` therefore disables only zstd and adds the key,
which the view ``images`` omits. ``"zstd"`` leaves the choice to DuckDB, has no key, and suits archives that are read in
order.
Writing holds up to 2,048 images twice: the smallest row group and its encoded copy. Measurements are in
``docs/explanation/layouts.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import (
    ColumnError,
    FormatError,
    MemoryLimitError,
    MetadataError,
    OMEArrowDSError,
    PathExistsError,
)
from omearrow_ds.storage.formats import accompanying_files, get_format
from omearrow_ds.storage.formats._base import Array, Block
from omearrow_ds.storage.formats._error_translation import first_line
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn, image_columns
from omearrow_ds.storage.formats._stored import Stored, groups, join_names
from omearrow_ds.storage.formats._table import StoredTable, TableImages, TableOptions, as_arrays, as_reader

_TABLE = "images"
_KEYED_TABLE = "omearrow_ds_images"
_DATABASE = "stored"
_KEY = "omearrow_ds_row"
_ROW_NUMBER = "rowid"
UNSUPPORTED_TYPES = (pa.types.is_float16, pa.types.is_duration, pa.types.is_interval, pa.types.is_decimal256)
_KEY_FIELD = pa.field(_KEY, pa.int64())
_VECTOR_ROWS = 2048  # Minimum number of rows that DuckDB decodes together.
_ROW_GROUP_ROWS = _VECTOR_ROWS  # Minimum; DuckDB holds a row group in memory until it is full.
_PIECE_BYTES = 16 * 2**20  # Per query.
# Small batches reuse memory: 1,000 images of 100 x 100 took 36 ms in one batch, 18 in five, 24 in sixty-three.
_STREAMED_BYTES = 4 * 2**20
_SCANNED_PIECE_BYTES = 2**30  # Without a key, each query decodes all vectors of its images.
_SCANNED_BYTES = 64 * 2**20
_SPARE_BYTES = 32 * 2**20
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
_FAILURES = {
    "Conflicting lock is held": ("is open for writing in another process", "close it in that process, or copy it"),
    "Unique file handle conflict": ("is open for writing in this process", "close that connection first"),
    "replaying WAL file": ("its log (.wal) is damaged or from another database", "restore the log, or remove it"),
}
ERRORS: tuple[type[Exception], ...] = (duckdb.Error, pa.ArrowException, OSError)


def connect(**settings: int | str) -> duckdb.DuckDBPyConnection:
    """Return a connection to a new in-memory database, which installs and loads no extension."""
    return duckdb.connect(":memory:", config={**_CONFIG, **settings})


def lock(connection: duckdb.DuckDBPyConnection, *paths: str) -> None:
    """Restrict a connection permanently to attached databases and ``paths``, and disable the network."""
    allowed = f"SET allowed_paths = [{', '.join(map(literal, paths))}]"
    connection.execute(f"{allowed}; SET enable_external_access = false; SET lock_configuration = true")


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
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
        problem = f"DuckDB ran out of memory: {first_line(error)}"
        return MemoryLimitError(f"{guard.path}: {problem}; use a machine with more memory")
    return guard.find_change() or find_lock(guard.path, error)


def find_lock(path: Path, error: BaseException) -> FormatError | None:
    """Return the error for a database that is locked, or whose log is not its own; else None."""
    for text, (problem, remedy) in _FAILURES.items():
        if text in str(error):
            return FormatError(f"{path}: {problem}: {first_line(error)}; {remedy}")
    return None


def refuse_target(path: Path, columns: pa.Schema) -> None:
    """Refuse columns that DuckDB cannot store, and paths that DuckDB would misread or has open."""
    refuse_names(columns, _ROW_NUMBER, _KEY)
    _refuse_misread(path)
    if not path.is_file():
        return
    with connect() as connection:
        try:
            _attach(connection, path, "(READ_ONLY)")
        except duckdb.Error as error:  # The file may be of any other kind.
            used = find_lock(path, error)
            if used is not None:  # Its log would be left next to the new file.
                raise PathExistsError(str(used)) from error


def write_collection(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables as the relation ``images``; raise `duckdb.Error` unless the file holds every row."""
    num_rows, is_keyed = 0, compression == "none"

    def counted() -> Iterator[pa.Table]:
        """Yield the tables, with row numbers as the last column if rows have a key."""
        nonlocal num_rows
        for table in tables:
            keys = pa.array(np.arange(num_rows, num_rows + len(table)))
            num_rows += len(table)
            yield table.append_column(_KEY_FIELD, keys) if is_keyed else table

    with connect(threads=1, temp_directory=f"{path}.tmp") as connection:
        connection.execute("SET write_buffer_row_group_count = 1")
        # Nobody sees the file before it is complete, and a log of the last rows would take three times their memory.
        _attach(connection, path, f"(ROW_GROUP_SIZE {_ROW_GROUP_ROWS}, RECOVERY_MODE no_wal_writes)")
        connection.execute(f"USE {_DATABASE}")  # or the view would store the attached database name
        if is_keyed:  # Without zstd, with an index of the key; ``images`` is a view that omits the key.
            connection.execute("SET disabled_compression_methods = 'zstd'")
        stored, name = (table_schema.append(_KEY_FIELD), _KEYED_TABLE) if is_keyed else (table_schema, _TABLE)
        run_on_tables(connection, counted(), stored, f"CREATE TABLE {name} AS FROM incoming")
        if is_keyed:
            connection.execute(f"CREATE UNIQUE INDEX {_KEY} ON {_KEYED_TABLE} ({_KEY})")
            connection.execute(f"CREATE VIEW {_TABLE} AS SELECT * EXCLUDE ({_KEY}) FROM {_KEYED_TABLE}")
        connection.execute(f"CHECKPOINT {_DATABASE}")  # closing would write too, but hide that it failed
        # Reattached in the same instance, because creating one would take 20 ms.
        connection.execute(f"USE memory; DETACH {_DATABASE}")
        _attach(connection, path, "(READ_ONLY)")
        lock(connection)
        (rows,) = connection.execute(f"SELECT count(*) FROM {_DATABASE}.{_TABLE}").fetchall()[0]
        if rows != num_rows:  # as when version 2.0 wrote a table of structs in several steps without a log
            raise duckdb.Error(f"{rows} of {num_rows} rows were written")


def _attach(connection: duckdb.DuckDBPyConnection, path: Path, options: str) -> None:
    """Attach a database file. Opening it directly would return the one that this process has open at its path."""
    connection.execute(f"ATTACH {literal(str(path))} AS {_DATABASE} {options}")


def _quoted(names: Sequence[str]) -> str:
    """Return the qualified SQL name of a table of the attached database, from its schema's name and its own."""
    return ".".join(map(identifier, (_DATABASE, *names)))


def _called(names: Sequence[str]) -> set[str]:
    """Return the lowercase names that select a table; a table with keys is also selected by its view's name."""
    schema_name, *own = (name.lower() for name in names)
    own += [_TABLE] if own == [_KEYED_TABLE] else []
    return {*own, *(f"{schema_name}.{name}" for name in own)}


def _refuse_misread(path: Path) -> None:
    if "?" in str(path) or "\\" in str(path):
        problem = "DuckDB cannot open a path with '?' or a backslash"
        raise FormatError(f"{path}: {problem}; rename it, or choose another path")


class DuckDBTable(StoredTable):
    """Table of a DuckDB file: the requested one, else ``images`` (or the table of that view), else the only table.

    An internal column numbers the rows; a key of the writer finds rows without a scan.
    """

    _format_name = "duckdb"
    _row_number = _ROW_NUMBER
    _keyed = False  # Whether single rows are found by a key.
    _frugal = True  # Whether the memory of a connection is limited if rows are found by a key.

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        super().__init__(guard, options)
        guard.files = list(map(str, accompanying_files(get_format(self._format_name), self.path)))
        guard.explain = explain
        self._connection = ProcessLocal(self._open)
        self._from = self._relation()
        stored = self._query("SELECT *", "LIMIT 0").schema
        if self._row_number in map(str.lower, stored.names):
            problem = f"{self.path}: column {self._row_number!r} hides DuckDB's row numbers; rename it"
            raise ColumnError(problem, column=self._row_number)
        self._key = self._key_column(stored)
        self.schema = stored if self._key is None else stored.remove(stored.get_field_index(self._key))

    def locate(self) -> None:
        self._image = identifier(self.header.column.name)
        self._largest_bytes = int(self.header.image_bytes.max(initial=1))
        # Images that DuckDB decodes together in a scan.
        self._vector_bytes = min(_VECTOR_ROWS, len(self.header.image_ids)) * self._largest_bytes
        self._set_rows(self._key)
        self.close()

    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        del names
        image = identifier(column.name)
        listed = ", ".join(f"{image}.{field} AS {field}" for field in map(identifier, fields))
        is_frugal = self._frugal
        table = self._query(f"SELECT {listed}", f"ORDER BY {self._row_number}")
        if self._frugal != is_frugal:  # Large metadata may need more memory than images.
            self._frugal = is_frugal
            self.close()
        return table, pa.table({})

    def read_columns(self, names: list[str]) -> pa.Table:
        return self._query(f"SELECT {', '.join(map(identifier, names))}", f"ORDER BY {self._row_number}")

    def _set_rows(self, key: str | None) -> None:
        """Set the number that selects each image: its key if all have one, else the engine's row number."""
        self._selector = self._row_number if key is None else identifier(key)
        self._keyed = key is not None
        rows = self._query(f"SELECT {self._selector} AS key", f"ORDER BY {self._row_number}")["key"]
        if rows.null_count:
            self._set_rows(None)
            return
        self._rows = rows.to_numpy()
        self._absent = int(self._rows.min(initial=0)) - 2
        # A scan does not read the index, and would not detect that it is truncated.
        if self._keyed and len(self._rows):
            self._query("SELECT 1", f"WHERE {self._selector} = {self._rows[-1]}")

    def _open(self) -> duckdb.DuckDBPyConnection:
        with self.guard:
            return self._connect()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        _refuse_misread(self.path)
        connection = connect(threads=1)  # more were never faster, and each holds a row group of images
        _attach(connection, self.path, "(READ_ONLY)")
        lock(connection)  # from here on, only this database can be read
        if self._keyed and self._frugal:  # or DuckDB would in time cache the whole file, like the page cache
            connection.execute(f"SET memory_limit = '{self._working_bytes()}B'")
        return connection

    def close(self) -> None:
        self._connection.close()

    def _query(self, select: str, rest: str) -> pa.Table:
        while True:
            is_limited = self._frugal and self._keyed
            try:
                with self.guard:  # Each query opens a Parquet file; one cursor per query keeps threads apart.
                    return self._connection.get().cursor().sql(f"{select} FROM {self._from} {rest}").to_arrow_table()
            except MemoryLimitError:
                if not is_limited:
                    raise
                self._use_more()

    def _use_more(self) -> None:
        """Remove the memory limit, now and at each later opening."""
        self._frugal = False
        self._connection.get().cursor().execute("RESET memory_limit")

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
            problem = "no table has a column that is an OME-Arrow struct"
            raise ColumnError(f"{self.path}: {problem}; pass a database with images")
        table = self.options.table
        requested = (_TABLE if table is None else table).lower()
        chosen = [names for names in tables if requested in _called(names)]
        if table is None and not chosen:
            chosen = tables
        if len(chosen) != 1:
            listed = ", ".join(repr(".".join(names)) for names in chosen or tables)
            several = f"{len(chosen)} tables contain images; pass table= with one of"
            none = f"table={table!r} is not a table with images; pass one of"
            raise ColumnError(f"{self.path}: {several if chosen else none} {listed}")
        self.options = replace(self.options, variant=chosen[0])
        return _quoted(chosen[0])

    def layout(self) -> Stored:
        table = _quoted(self.options.variant)
        kind = "BLOB" if self.header.column.encoding == "bytes" else "USMALLINT"
        of_column = f"FROM pragma_storage_info({literal(table)}) WHERE column_name = ?"
        pixels = f"SELECT lower(compression) {of_column} AND segment_type = '{kind}'"
        rows = f"SELECT sum(count)::BIGINT {of_column} AND column_path LIKE '[%, 0]' AND column_path NOT LIKE '%, %, %'"
        name = [self.header.column.name]
        with self.guard.reading():
            connection = self._connection.get().cursor()
            codecs = [codec for (codec,) in connection.execute(pixels, name).fetchall()]
            sizes = connection.execute(f"{rows} GROUP BY row_group_id ORDER BY row_group_id", name).fetchall()
        compression = join_names("none" if codec == "uncompressed" else codec for codec in codecs)
        chunking = groups(np.cumsum([0, *(size for (size,) in sizes)]).tolist(), "row group")
        reading = (
            "by DuckDB, each image separately, through an index"
            if self._keyed
            else f"by DuckDB, which decodes up to {_VECTOR_ROWS:,} images to read one"
        )
        return Stored(self.header.column.encoding, compression, chunking, in_place=False, reading=reading)

    def _key_column(self, table_schema: pa.Schema) -> str | None:
        """Return the name of the key column, or None if a column of this name lacks the index that we write."""
        if _KEY not in table_schema.names or not pa.types.is_integer(table_schema.field(_KEY).type):
            return None
        query = (
            "SELECT expressions FROM duckdb_indexes() WHERE is_unique AND "
            "(database_name, schema_name, table_name, index_name) = (?, ?, ?, ?)"
        )
        names = [_DATABASE, *self.options.variant, _KEY]
        with self.guard.reading():
            indexes = self._connection.get().cursor().execute(query, names).fetchall()
        return _KEY if (f"[{_KEY}]",) in indexes else None

    def _working_bytes(self) -> int:
        """Return the memory that reading a keyed table needs; a growing list temporarily exists twice."""
        scan_bytes = 5 * self._vector_bytes if self._vector_bytes <= _SCANNED_BYTES else 0
        return _SPARE_BYTES + 4 * max(self._largest_bytes, _PIECE_BYTES) + scan_bytes + 64 * len(self.header.image_ids)

    def _condition(self, rows: Array) -> str:
        numbers = rows.tolist()
        if self._keyed and len(rows) > 1:  # DuckDB turns consecutive numbers into a range, and scans for it.
            numbers.append(self._absent)
        return f"WHERE {self._selector} IN ({', '.join(map(str, numbers))})"

    def fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        max_rows = max(1, (_PIECE_BYTES if self._keyed else _SCANNED_PIECE_BYTES) // self._largest_bytes)
        pixels = f"{self._image}.{identifier(field)} AS pixels"
        for start in range(0, len(indices), max_rows):
            rows = self._rows[indices[start : start + max_rows]]
            table = self._query(f"SELECT {self._selector} AS key, {pixels}", self._condition(rows))
            keys = table["key"].to_numpy()
            if not np.array_equal(keys, rows):
                by_key = np.argsort(keys)
                if not np.array_equal(keys[by_key], np.sort(rows)):
                    problem = "DuckDB returned other rows than requested"
                    raise FormatError(f"{self.path}: {problem}; the file changed, open it again")
                table = table.take(by_key[np.argsort(np.argsort(rows))])
            yield from as_arrays(table["pixels"])

    def stream(self) -> Iterator[Block]:
        """Yield all images by one scan, which is faster than reading rows by number."""
        num_read, num_images = 0, len(self.header.image_ids)
        for chunks in self._scan(self.header.column.pixel_field):
            indices = np.arange(num_read, min(num_read + len(chunks), num_images))
            yield num_read, self.header.decode(self, chunks, indices)
            num_read += len(chunks)
        if num_read != num_images:
            raise self.rows_changed(num_read, num_images)

    def _scan(self, field: str) -> Iterator[pa.Array]:
        """Yield ``chunks`` or ``planes`` of all rows, in arrays of limited size, in order."""
        num_read, is_limited = 0, self._frugal and self._keyed
        if not self._keyed or self._vector_bytes <= _SCANNED_BYTES:
            rows = max(1, min(_VECTOR_ROWS, _STREAMED_BYTES // self._largest_bytes))
            pixels = f"{self._image}.{identifier(field)}"
            try:
                with self.guard:
                    query = self._connection.get().cursor().sql(f"SELECT {pixels} AS pixels FROM {self._from}")
                    for batch in query.to_arrow_reader(rows):
                        self.guard.refuse_changed()  # before yielding data of another file
                        for array in as_arrays(batch.column(0)):
                            yield array
                            num_read += len(array)
            except MemoryLimitError:
                if not is_limited:
                    raise
                self._use_more()
        if self._keyed and num_read < len(self.header.image_ids):
            yield from self.fetch(field, np.arange(num_read, len(self.header.image_ids)))


open_collection = partial(TableImages, "duckdb", DuckDBTable, ERRORS)
