"""Tables in files: Parquet, and text with commas or tabs between columns, whose types are inferred."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError, MetadataError, OMEArrowDSError
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.byte_source import LocalFile
from omearrow_ds.storage.formats._columns import is_narrow, plain_columns, plain_schema, refuse_extensions
from omearrow_ds.storage.formats._detect import missing, refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors
from omearrow_ds.text import nearest

CSV_SUFFIXES = (".csv", ".csv.gz")
TAB_SUFFIXES = (".tsv", ".txt")
_PARQUET = b"PAR1"
_HEAD_BYTES = 2**20
_BLOCK_BYTES = (2**20, 2**27)  # Least and most that pyarrow parses at once.
_MANY_ROWS = 10_000
_COLUMN_BYTES = 2**17  # Per column of a block: with few rows, the overhead of calls would dominate.

# Names that describe fields in tables of CellProfiler, with or without the suffix of a join.
_METADATA = re.compile(r"(?:Image_)?(Metadata_.+?)(_[xy])?|ImageNumber")
NAMED_BY = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")

TYPES = {"integer": pa.int64(), "float": pa.float64(), "text": pa.string()}  # From narrow to wide.
_EXPECTED = {"integer": "an integer", "float": "a number"}

# Spellings of numbers.
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_FRACTION = r"-?(?:0|[1-9][0-9]*)?\.[0-9]+(?:[eE][+-]?[0-9]+)?|-?(?:0|[1-9][0-9]*)[eE]-[0-9]+"
_NOT_FINITE = r"-?(?i:inf|infinity|nan)"
_ANY_NUMBER = r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:inf|infinity|nan))"
_SPELLINGS = {pa.int64(): _INTEGER, pa.float64(): f"{_INTEGER}|{_FRACTION}|{_NOT_FINITE}"}  # From narrow to wide.
_BLANKS = " \t"
_FEW = 4
_EXACT, _LARGE = 2**53, 2.0**63  # Whole numbers below the first are exact in float64, and below the second fit int64.


class TableFile:
    """A table in a Parquet, CSV or TSV file, by its suffix; messages name it ``shown_path``, by default ``path``."""

    def __init__(self, path: Path, shown_path: Path | None = None) -> None:
        name = path.name.lower()
        self.path, self.shown_path = path, shown_path or path
        self.is_text = name.endswith((*CSV_SUFFIXES, *TAB_SUFFIXES))
        self._delimiter = "\t" if name.endswith(TAB_SUFFIXES) else ","

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns; an empty list if the file is not a table."""
        refuse_special(self.path)
        try:
            if self.is_text:
                return self._header()
            return list(pq.read_schema(self.path).names) if self._is_parquet() else []
        except (pa.ArrowException, csv.Error, OSError):
            return []

    def read(self, names: Sequence[str] | None = None, types: Mapping[str, str] | None = None) -> pa.Table:
        """Return the named columns, by default all; text has types of `infer_type`, which ``types`` override."""
        refuse_special(self.path)
        with translate_errors(self.shown_path, "a table", (pa.ArrowException, *MALFORMED)):
            if not self.is_text:
                if not self._is_parquet():
                    kinds = ", ".join((*CSV_SUFFIXES, *TAB_SUFFIXES))
                    refuse(self.shown_path, f"is neither Parquet nor a text table ({kinds})", "save it as one of them")
                return pq.read_table(self.path, columns=names)
            try:
                header = self._header()
                "".join(header).encode()  # Raises an error if a name was not text.
                return self._read_text(header, names, types or {})
            except (pa.ArrowInvalid, UnicodeError):
                self._refuse_encoding()
                raise

    def _is_parquet(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(_PARQUET)) == _PARQUET

    def _head(self) -> bytes:
        with pa.input_stream(str(self.path)) as stream:  # Decompresses by the suffix.
            return bytes(stream.read(_HEAD_BYTES))

    @cached_property
    def _encoding(self) -> str:
        return "utf-16" if self._head().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"

    def _header(self) -> list[str]:
        decoder = codecs.getincrementaldecoder(self._encoding.replace("-8", "-8-sig"))("surrogateescape")
        lines = io.StringIO(decoder.decode(self._head()), newline="")  # The head may end within a character.
        # Arrow skips empty lines too.
        names = next(filter(None, csv.reader(lines, delimiter=self._delimiter)), [])
        if any("\0" in name for name in names):
            refuse(self.shown_path, "contains NUL, like UTF-16 without a byte order mark", "save it as UTF-8")
        return names

    def _refuse_encoding(self) -> None:
        with pa.input_stream(str(self.path)) as stream:
            content: bytes = stream.read()
        try:
            content.decode(self._encoding)
        except UnicodeDecodeError as error:
            byte, line = content[error.start], 1 + content.count(b"\n", 0, error.start)
            problem = f"byte {error.start:,} (0x{byte:02x}), in line {line}, is not valid {self._encoding.upper()}"
            remedy = "save the table as UTF-8, in Excel as 'CSV UTF-8'"
            raise FormatError(problem, path=self.shown_path, remedy=remedy) from error

    def _read_text(self, header: Sequence[str], names: Sequence[str] | None, types: Mapping[str, str]) -> pa.Table:
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, include_columns=names
        )
        block_bytes = min(max(_BLOCK_BYTES[0], _COLUMN_BYTES * len(header)), _BLOCK_BYTES[1])
        read = pyarrow.csv.ReadOptions(encoding=self._encoding, block_size=block_bytes)
        table = pyarrow.csv.read_csv(self.path, read, pyarrow.csv.ParseOptions(delimiter=self._delimiter), convert)

        def typed(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
            return parse_as(types[name], column, str(self.shown_path), name) if name in types else infer_type(column)

        workers = available_cores() if len(table) >= _MANY_ROWS else 1  # With few rows, threads wait for the GIL.
        with ThreadPoolExecutor(workers, "omearrow-ds-types") as pool:
            columns = list(pool.map(typed, table.column_names, table.columns))
        return pa.Table.from_arrays(columns, table.column_names)


class ColumnTypes(dict[str, str]):
    """Column types that ``column_types=`` passes for text tables; ``names`` are the columns of those read so far."""

    def __init__(self, types: Mapping[str, str] | None) -> None:
        error = partial(ArgumentError, option="column_types")
        if not isinstance(types, Mapping | None):
            raise error(value=types, allowed="a mapping", remedy="pass e.g. {'code': 'text'}")
        for name, kind in (types or {}).items():
            if not isinstance(name, str) or kind not in TYPES:
                close = "".join(f"{match!r}, or " for match in nearest(str(kind), TYPES, 1))
                remedy = f"pass {close}one of {', '.join(map(repr, TYPES))}"
                raise error(f"{kind!r} is not a type", value=name, remedy=remedy)
        super().__init__(types or {})
        self.names = set[str]()

    @classmethod
    def of(cls, types: Mapping[str, str] | None) -> ColumnTypes:
        """Convert ``types`` to `ColumnTypes`; an instance is returned itself, with the names that it has recorded."""
        return types if isinstance(types, cls) else cls(types)

    def of_table(self, table: TableFile) -> dict[str, str]:
        names = table.names if table.is_text else []
        by_plain_name = described(names)
        self.names |= {*names, *by_plain_name}
        types = {name: self[plain] for plain, name in by_plain_name.items() if plain in self}
        return types | {name: self[name] for name in names if name in self}

    def refuse_unknown(self) -> None:
        """Raise `ColumnError` if ``column_types=`` names a column that no text table read so far contains."""
        for name in sorted(self.keys() - self.names):
            close = nearest(name, sorted(self.names), 3)
            remedy = f"pass {' or '.join(map(repr, close))}" if close else f"pass one of {sorted(self.names)[:20]}"
            remedy = remedy if self.names else "leave it out, because other tables store types"
            raise ColumnError(f"column_types={name!r}: no opened CSV or TSV table has this column; {remedy}")


def described(names: Sequence[str]) -> dict[str, str]:
    """Map CellProfiler names of columns that describe fields to actual names: ``Metadata_Well`` to ``Metadata_Well_x``.

    If there are several, the exact name is preferred, then the left column of a join.
    """
    ranked: dict[str, tuple[tuple[bool, bool, bool], str]] = {}
    for match in filter(None, map(_METADATA.fullmatch, names)):
        name, plain = match[0], match[1] or match[0]
        if match[2] and not name.startswith("Image_") and plain not in NAMED_BY:
            plain = name  # A position in x and y.
        rank = (name != plain, name.endswith("_y"), name.startswith("Image_"))
        ranked[plain] = min(ranked.get(plain, (rank, name)), (rank, name))
    return {plain: name for plain, (_, name) in ranked.items()}


class UnreadColumns(NamedTuple):
    """Columns of a Parquet file that are not read before they are requested."""

    file: TableFile
    fingerprint: tuple[int, ...]  # Fingerprint of the file when it was opened.
    column_schema: pa.Schema  # Names and plain types.

    def column_table(self, names: Sequence[str], table: pa.Table, rows: pa.Array) -> pa.Table:
        """Return columns of ``table`` and, at ``rows``, of the file; raise `FormatError` if the file was changed."""
        present = set(table.column_names)
        later = [name for name in names if name not in present]
        if not later:
            return table.select(list(names))
        path = self.file.path
        if LocalFile.as_it_is(path).fingerprint != self.fingerprint:
            raise FormatError(f"{path}: was changed since it was opened; open the images again")
        unread = plain_columns(self.file.read(later), str(path)).take(rows)
        return pa.table({name: (table if name in present else unread)[name] for name in names})


class InputTable(NamedTuple):
    """Table that a user passed as an option, with its name for error messages and its metadata."""

    table: pa.Table  # The table, with plain types.
    name: str  # Its name in errors.
    renamed: Mapping[str, str] = {}  # New names of columns by their names in CellProfiler.
    metadata: Mapping[bytes, bytes] = {}  # Metadata of its schema.
    is_text: bool = False  # Whether it is a file of text.
    unread: UnreadColumns | None = None  # Other columns.

    def refuse(
        self, problem: str, remedy: str, kind: type[OMEArrowDSError] = MetadataError, column: str | None = None
    ) -> NoReturn:
        """Raise an error with the path of the table, or the option that passed it."""
        is_option = self.name.endswith("=")
        path, option = (None, self.name.removesuffix("=")) if is_option else (self.name, None)
        raise kind(problem, path=path, option=option, column=column, remedy=remedy)


def table_file(table: Any, option: str) -> TableFile | None:
    """Return the file of a table that a user passed as a path in ``option``; None if ``table`` is not a path."""
    if not isinstance(table, str | os.PathLike):
        return None
    path = Path(table).absolute()
    if not path.is_file():
        raise missing(table, f"no such file; pass the path of a CSV, TSV or Parquet file as {option}=")
    return TableFile(path)


def read_input_table(source: Any, option: str, types: ColumnTypes, needed: Collection[str] | None = None) -> InputTable:
    """Return the table, frame or file that was passed as ``option``; ``types`` apply to columns of text tables."""
    # If ``needed`` is passed, only these columns and the metadata of CellProfiler are read from wide Parquet files.
    file = table_file(source, option)
    name = f"{option}=" if file is None else str(file.path)
    wide = None if file is None or needed is None or file.is_text or is_narrow(file.names) else file
    if wide is not None:
        fingerprint, stored = LocalFile.as_it_is(wide.path).fingerprint, pq.read_schema(wide.path)
    else:
        table = _of_frame(source, option) if file is None else file.read(types=types.of_table(file))
        stored = table.schema
    if len(set(stored.names)) < len(stored):
        raise MetadataError(f"{name}: two columns have the same name; rename one", path=file.path if file else None)
    refuse_extensions(stored, name)
    renamed = {column: plain for plain, column in described(stored.names).items()}
    unread = None
    if wide is not None:
        at_once = {*renamed, *(needed or ())}
        later = pa.schema([field for field in stored if field.name not in at_once])
        unread = UnreadColumns(wide, fingerprint, plain_schema(later, name))
        table = wide.read([column for column in stored.names if column in at_once])
    plain = plain_columns(table.rename_columns([renamed.get(column, column) for column in table.column_names]), name)
    return InputTable(plain, name, renamed, stored.metadata or {}, file is not None and file.is_text, unread)


def _of_frame(frame: Any, option: str) -> pa.Table:
    try:
        if isinstance(frame, pa.Table | Mapping):
            return frame if isinstance(frame, pa.Table) else pa.table(dict(frame))
        if type(frame).__module__.partition(".")[0] == "pandas" and frame.ndim > 1:
            # A named index is a column too.
            is_named = any(name is not None for name in frame.index.names)
            return pa.Table.from_pandas(frame, preserve_index=is_named).replace_schema_metadata(None)
        if hasattr(frame, "__arrow_c_stream__") and getattr(frame, "ndim", 2) > 1:
            return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        problem, remedy = f"cannot be converted to an Arrow table: {error}", "pass columns of equal length and one type"
        raise MetadataError(problem, option=option, remedy=remedy) from error
    allowed = "a pyarrow table, a pandas or polars frame, or the path of a CSV, TSV or Parquet file"
    raise ArgumentError(f"has the type {type(frame).__name__}", option=option, allowed=allowed)


def infer_type(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a text column to int64, float64 or text (``docs/reference/column-types.md``); to null without values."""
    # Most text columns are recognized by their first values.
    first = [value.strip(_BLANKS) for value in column.slice(0, _FEW).to_pylist() if value is not None]
    for kind, spelling in _SPELLINGS.items():
        numbers = _spelled(column, kind) if all(re.fullmatch(spelling, text) for text in first if text) else None
        if numbers is not None:
            return pa.chunked_array([pa.nulls(len(column))]) if numbers.null_count == len(column) else numbers
    return column


def _spelled(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """Return text as numbers of a type; None if a value has another spelling, or is whole and beyond int64."""
    numbers = _cast(column, kind)
    if numbers is None:
        column = _trimmed(column)
        numbers = _cast(column, kind)
    if numbers is None or pc.index(_match(column, _SPELLINGS[kind]), False).as_py() >= 0:
        return None
    large = column.filter(pc.greater_equal(pc.abs(numbers), _LARGE)) if kind == pa.float64() else column[:0]
    return None if _cast(large.filter(_match(large, _INTEGER)), pa.int64()) is None else numbers


def parse_as(kind: str, column: pa.ChunkedArray, table: str, name: str) -> pa.ChunkedArray:
    """Convert a text column to a type of `TYPES`, also ``+3``, ``007`` and ``1E5``; raise `FormatError` for others."""
    if kind == "text":
        return column
    text = pc.utf8_ltrim(_trimmed(column), "+")
    is_valid = _match(_trimmed(column), _ANY_NUMBER)
    if pc.index(is_valid, False).as_py() < 0:
        integers = _cast(text, pa.int64()) if kind == "integer" else None
        if integers is not None:
            return integers
        numbers = text.cast(pa.float64())
        if kind == "float":
            return numbers
        is_valid = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), _EXACT))
    row = pc.index(is_valid, False).as_py()
    if row < 0:
        return numbers.cast(pa.int64())
    problem, remedy = f"column {name!r} has {column[row].as_py()!r} in row {row}", "correct it, or drop the row"
    raise FormatError(problem, path=table, column=name, allowed=_EXPECTED[kind], remedy=remedy)


def _match(values: pa.ChunkedArray, spelling: str) -> pa.ChunkedArray:
    return pc.match_substring_regex(values, f"^(?:{spelling})$")


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return None


def _trimmed(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text without the blanks around it, null if it has nothing else."""
    trimmed = pc.utf8_trim(values, _BLANKS)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
