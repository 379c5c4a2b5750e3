"""Tables in files: Parquet, and text with commas or tabs between columns."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.text_columns import TYPES, infer_type, parse_as

CSV_SUFFIXES = (".csv", ".csv.gz")
TAB_SUFFIXES = (".tsv", ".txt")

_PARQUET = b"PAR1"
_HEAD_BYTES = 2**20
_BLOCK_BYTES = (2**20, 2**27)  # Least and most that pyarrow parses at once.
_MANY_ROWS = 10_000
_COLUMN_BYTES = 2**17  # Per column of a block: with few rows, the overhead of calls would dominate.

# Names that describe fields in tables of CellProfiler, with or without the suffix of a join.
_METADATA = re.compile(r"(?:Image_)?(Metadata_.+?)(_[xy])?")
NAMED_BY = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")


def is_csv(path: Path) -> bool:
    return path.name.lower().endswith(CSV_SUFFIXES)


class TableFile:
    """A table in a Parquet, CSV or TSV file; the suffix determines the file type and the separator of text.

    Messages name the table by ``where``, by default ``path``.
    """

    def __init__(self, path: Path, where: Path | None = None) -> None:
        name = path.name.lower()
        self.path, self._where = path, where or path
        self.is_text = name.endswith((*CSV_SUFFIXES, *TAB_SUFFIXES))
        self._delimiter = "\t" if name.endswith(TAB_SUFFIXES) else ","

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns; an empty list if the file is not a table.

        Raises `FormatError` if a text file has an unsupported encoding.
        """
        refuse_special(self.path)
        try:
            if self.is_text:
                return self._header()
            return list(pq.read_schema(self.path).names) if self._is_parquet() else []
        except (pa.ArrowException, csv.Error, OSError):
            return []

    def read(self, names: Sequence[str] | None = None, types: Mapping[str, str] | None = None) -> pa.Table:
        """Return the named columns, or all columns if no names are passed.

        Columns of text have the types of `omearrow_ds.storage.text_columns`. ``types`` override some columns,
        regardless of how their values are spelled. Raises `FormatError` if the file cannot be read, or a value does
        not have the requested type.
        """
        refuse_special(self.path)
        with refusing(self._where, "a table", (pa.ArrowException, *MALFORMED)):
            if not self.is_text:
                if not self._is_parquet():
                    kinds = ", ".join((*CSV_SUFFIXES, *TAB_SUFFIXES))
                    raise FormatError(
                        f"{self._where}: is neither Parquet nor a text table ({kinds}); save it as one of them"
                    )
                return pq.read_table(self.path, columns=None if names is None else list(names))
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
            head: bytes = stream.read(_HEAD_BYTES)
        return head

    @cached_property
    def _encoding(self) -> str:
        return "utf-16" if self._head().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"

    def _header(self) -> list[str]:
        decoder = codecs.getincrementaldecoder(self._encoding.replace("-8", "-8-sig"))("surrogateescape")
        lines = io.StringIO(decoder.decode(self._head()), newline="")  # The head may end within a character.
        # Arrow skips empty lines too.
        names = next(filter(None, csv.reader(lines, delimiter=self._delimiter)), [])
        if any("\0" in name for name in names):
            raise FormatError(
                f"{self._where}: contains NUL characters, like UTF-16 without a byte order mark; save it as UTF-8"
            )
        return names

    def _refuse_encoding(self) -> None:
        """Raise `FormatError` that names the first byte that is not text, if one exists."""
        with pa.input_stream(str(self.path)) as stream:
            content: bytes = stream.read()
        try:
            content.decode(self._encoding)
        except UnicodeDecodeError as error:
            byte, line = content[error.start], 1 + content.count(b"\n", 0, error.start)
            raise FormatError(
                f"{self._where}: byte {error.start:,} (0x{byte:02x}), in line {line}, is not valid "
                f"{self._encoding.upper()}; save the table as UTF-8, in Excel as 'CSV UTF-8'"
            ) from error

    def _read_text(self, header: Sequence[str], names: Sequence[str] | None, types: Mapping[str, str]) -> pa.Table:
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, include_columns=names
        )
        block_bytes = min(max(_BLOCK_BYTES[0], _COLUMN_BYTES * len(header)), _BLOCK_BYTES[1])
        read = pyarrow.csv.ReadOptions(encoding=self._encoding, block_size=block_bytes)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
        table = pyarrow.csv.read_csv(self.path, read, parse, convert)

        def typed(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
            return parse_as(types[name], column, str(self._where), name) if name in types else infer_type(column)

        workers = available_cores() if len(table) >= _MANY_ROWS else 1  # With few rows, threads wait for the GIL.
        with ThreadPoolExecutor(workers, "omearrow-ds-types") as pool:
            columns = list(pool.map(typed, table.column_names, table.columns))
        return pa.Table.from_arrays(columns, table.column_names)


class ColumnTypes(dict[str, str]):
    """Column types that ``column_types=`` passes for text tables, by column name.

    ``names`` are those of all columns of the text tables that were read so far. Raises `ArgumentError` if ``types`` is
    not a mapping of names to `TYPES`.
    """

    def __init__(self, types: Mapping[str, str] | None = None, names: Iterable[str] = ()) -> None:
        error = partial(ArgumentError, option="column_types")
        if not isinstance(types, Mapping | None):
            raise error(value=types, allowed="a mapping", remedy="pass e.g. {'code': 'text'}")
        for name, kind in (types or {}).items():
            if not isinstance(name, str) or kind not in TYPES:
                close = "".join(f"{match!r}, or " for match in difflib.get_close_matches(str(kind), TYPES, 1))
                remedy = f"pass {close}one of {', '.join(map(repr, TYPES))}"
                raise error(f"{kind!r} is not a type", value=name, remedy=remedy)
        super().__init__(types or {})
        self.names = set(names)

    @classmethod
    def of(cls, types: Mapping[str, str] | None) -> ColumnTypes:
        """Convert ``types`` to `ColumnTypes`; an instance is returned itself, with the names that it has recorded."""
        return types if isinstance(types, cls) else cls(types)

    def of_table(self, table: TableFile) -> dict[str, str]:
        names = table.names if table.is_text else []
        plain_names = {name: plain for plain, name in described(names).items()}
        self.names |= {*names, *plain_names.values()}
        by_plain_name = {name: self[plain] for name, plain in plain_names.items() if plain in self}
        return by_plain_name | {name: self[name] for name in names if name in self}

    def refuse_unknown(self) -> None:
        """Raise `ColumnError` if ``column_types=`` names a column that no text table read so far contains."""
        for name in sorted(self.keys() - self.names):
            close = difflib.get_close_matches(name, sorted(self.names), 3)
            remedy = f"pass {' or '.join(map(repr, close))}" if close else f"pass one of {sorted(self.names)[:20]}"
            remedy = remedy if self.names else "leave it out, because other tables store types"
            raise ColumnError(f"column_types={name!r}: no opened CSV or TSV table has this column; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnTypes, (dict(self), self.keys() & self.names)


def described(names: Sequence[str]) -> dict[str, str]:
    """Map CellProfiler names of columns that describe fields to actual names: ``Metadata_Well`` to ``Metadata_Well_x``.

    If several columns have one CellProfiler name, the exact name is preferred, then the left column of a join.
    """
    ranked: dict[str, tuple[tuple[bool, bool, bool], str]] = {}
    for name in names:
        match = _METADATA.fullmatch(name)
        if match is None and name != "ImageNumber":
            continue
        plain = name if match is None else match[1]
        if match is not None and match[2] and not name.startswith("Image_") and plain not in NAMED_BY:
            plain = name  # A position in x and y.
        rank = (name != plain, name.endswith("_y"), name.startswith("Image_"))
        ranked[plain] = min(ranked.get(plain, (rank, name)), (rank, name))
    return {plain: name for plain, (_, name) in ranked.items()}
