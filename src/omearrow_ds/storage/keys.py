"""Tables that are joined to images: read from a table, frame or file, and matched with the images by key."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError, MetadataError
from omearrow_ds.storage.byte_source import LocalFile
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import (
    is_narrow,
    plain_columns,
    plain_schema,
    refuse_extensions,
    unknown_column,
)
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import NAMED_BY, ColumnTypes, TableFile, described

IMAGE_ID, IMAGE_NUMBER = "image_id", "ImageNumber"
_METADATA = "Metadata_"
_NUMBERED = ("site", "field", "number")  # Parts of column names whose text values are compared as numbers.
_WELL = re.compile(r"([A-Za-z]{1,2})0*([1-9][0-9]?)")
_NUM_EXAMPLES = 3
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")


class UnreadColumns(NamedTuple):
    """Columns of a Parquet file that are not read before they are requested."""

    file: TableFile
    fingerprint: tuple[int, ...]  # Fingerprint of the file when it was opened.
    column_schema: pa.Schema  # Names and plain types.

    def column_table(self, names: Sequence[str]) -> pa.Table:
        """Return columns with plain types; raise `FormatError` if the file was changed since it was opened."""
        path = self.file.path
        if LocalFile.as_it_is(path).fingerprint != self.fingerprint:
            raise FormatError(f"{path}: was changed since it was opened; open the images again")
        return plain_columns(self.file.read(names), str(path))


class InputTable(NamedTuple):
    """Table that a user passed as an option, with its name for error messages and its metadata."""

    table: pa.Table  # The table, with plain types.
    name: str  # Its name in errors.
    renamed: Mapping[str, str] = {}  # New names of columns by their names in CellProfiler.
    metadata: Mapping[bytes, bytes] = {}  # Metadata of its schema.
    is_text: bool = False  # Whether it is a file of text.
    unread: UnreadColumns | None = None  # Other columns.

    @property
    def subject(self) -> dict[str, Any]:
        """Field of errors about the table: its path, or the option that passed it."""
        return {"option": self.name.removesuffix("=")} if self.name.endswith("=") else {"path": self.name}

    def column_schema(self, read: pa.Schema) -> pa.Schema:
        """Return all columns in the order of the table; ``read`` are those that are not unread."""
        if self.unread is None:
            return read
        fields = {field.name: field for field in (*read, *self.unread.column_schema)}
        return pa.schema([fields[self.renamed.get(name, name)] for name in self.unread.file.names])


def table_file(table: Any, option: str) -> TableFile | None:
    """Return the file of a table that a user passed as a path in ``option``; None if ``table`` is not a path."""
    if not isinstance(table, str | os.PathLike):
        return None
    path = Path(table).absolute()
    if not path.is_file():
        raise missing(table, f"no such file; pass the path of a CSV or Parquet file as {option}=")
    return TableFile(path)


def read_input_table(source: Any, option: str, types: ColumnTypes, needed: Collection[str] | None = None) -> InputTable:
    """Return the table, frame or file that was passed as ``option``; ``types`` apply to columns of text tables.

    If ``needed`` is passed, only these columns and the metadata of CellProfiler are read from wide Parquet files.
    """
    file = table_file(source, option)
    name = f"{option}=" if file is None else str(file.path)
    wide = None if file is None or needed is None or file.is_text or is_narrow(file.names) else file
    if wide is not None:
        fingerprint, stored = LocalFile.as_it_is(wide.path).fingerprint, pq.read_schema(wide.path)
    else:
        table = _of_frame(source, option) if file is None else file.read(types=types.of_table(file))
        stored = table.schema
    if len(set(stored.names)) < len(stored):
        raise MetadataError(
            f"{name}: two columns have the same name; rename one", path=None if file is None else file.path
        )
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


def column_names_of(on: On | None) -> list[str]:
    """Return the columns of a table that ``on=`` names; other values than names are refused later."""
    values = on.values() if isinstance(on, Mapping) else [on] if isinstance(on, str) else on
    return [name for name in values if isinstance(name, str)] if isinstance(values, Iterable) else []


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
        raise MetadataError(
            f"cannot be converted to an Arrow table: {error}",
            option=option,
            remedy="pass columns of equal length, each of one type",
        ) from error
    raise ArgumentError(
        f"has the type {type(frame).__name__}",
        option=option,
        allowed="a pyarrow table, a pandas or polars frame, or the path of a CSV or Parquet file",
    )


def join_column_pairs(source: Images, joined: InputTable, on: On | None) -> list[tuple[str, str]]:
    """Return the pairs of columns to join by; each pair is a name in the source and a name in the table."""
    left_names, right_names, renamed = source.column_names, joined.table.column_names, joined.renamed
    if on is None:
        ours = source.column_table([name for name in left_names if name in right_names])
        common = [IMAGE_ID] if IMAGE_ID in right_names else _common_columns(ours, joined.table)
        if not common:
            raise ColumnError(
                f"has neither {IMAGE_ID!r} nor a {_METADATA}* column in common with {source.path}: the table has "
                f"{right_names[:20]}, the images have {left_names}",
                **joined.subject,
                remedy="pass on= with a common name, or on={NAME_IN_SOURCE: NAME_IN_TABLE}",
            )
        return [(name, name) for name in common]
    names = on if isinstance(on, Sequence | Mapping) and not isinstance(on, str) else [on]
    pairs = list(names.items()) if isinstance(names, Mapping) else [(name, name) for name in names]
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        raise ArgumentError(
            option="on",
            value=on,
            allowed="one or several column names, or a mapping from names in the source to names in the table",
        )
    if not isinstance(names, Mapping):
        pairs = [(left if left in left_names else renamed.get(left, left), right) for left, right in pairs]
    pairs = [(left, right if right in right_names else renamed.get(right, right)) for left, right in pairs]
    for left, right in pairs:
        for name, known, table in ((left, [IMAGE_ID, *left_names], source.path), (right, right_names, joined.name)):
            if name not in known:
                raise unknown_column(name, known, table, " for on=")
    return pairs


def _common_columns(left: pa.Table, right: pa.Table) -> list[str]:
    """Return the metadata columns of both tables, or else the image number; empty columns match nothing."""
    known = set(right.column_names)
    names = [name for name in left.column_names if name in known]
    is_empty = {name: any(table[name].null_count == len(table) for table in (left, right)) for name in names}
    metadata = [name for name in names if name.startswith(_METADATA) and not is_empty[name]]
    return metadata or [name for name in names if name == IMAGE_NUMBER]


class JoinKeys:
    """Join keys of ``images`` and of table ``rows``, encoded as int64 numbers; -1 is a key that contains a null.

    Without ``pairs`` of columns, all keys are equal. ``names`` is the name of the key in messages.
    """

    def __init__(self, source: Images, joined: InputTable, pairs: Sequence[tuple[str, str]]) -> None:
        self._columns: list[tuple[Callable[[Any], Any], tuple[pa.ChunkedArray, pa.ChunkedArray]]] = []
        self.names = " and ".join(f"{left!r}" for left, _ in pairs)
        self._source_path, self._joined = source.path, joined
        num_images = len(source)
        keys = np.zeros(num_images + len(joined.table), np.int64)
        is_null = np.zeros(len(keys), np.bool_)
        for left, right in pairs:
            ours = pa.chunked_array([pa.array(source.image_ids)]) if left == IMAGE_ID else source.column(left)
            theirs = joined.table[right]
            if pa.types.is_nested(ours.type) or pa.types.is_nested(theirs.type):
                raise ColumnError(
                    f"column {right!r} cannot be joined with {left!r}",
                    **joined.subject,
                    column=right,
                    remedy="pass strings, numbers or times",
                )
            normalize, known = _normalizer(left, ours.type, theirs.type), dict[Any, int]()
            codes = np.concatenate([_encode(column, normalize, known) for column in (ours, theirs)])
            is_null |= codes < 0
            keys = np.unique(keys * (len(known) + 1) + codes, return_inverse=True)[1].reshape(-1)
            self._columns.append((normalize, (ours, theirs)))
        keys[is_null] = -1
        self.images, self.rows = keys[:num_images], keys[num_images:]

    def refuse_duplicate_rows(self, noun: str, remedy: str) -> None:
        """Raise `MetadataError` if two rows, each of which is a ``noun``, have the same key."""
        twice = first_duplicate(self.rows)
        if twice is not None:
            raise MetadataError(
                f"{noun}s {twice[0]} and {twice[1]} have the same {self.names}, {self.describe(twice[1], row=True)}",
                **self._joined.subject,
                remedy=remedy,
            )

    def no_match(self, noun: str) -> MetadataError:
        """Return the error for a table where no row, each of which is a ``noun``, matches an image."""
        of_images, of_rows = (
            self.examples(np.flatnonzero(keys >= 0), row=is_row) or "none"
            for is_row, keys in enumerate((self.images, self.rows))
        )
        return MetadataError(
            f"no {noun} matches an image of {self._source_path} by {self.names}: images have {of_images}, {noun}s have "
            f"{of_rows}",
            **self._joined.subject,
            remedy="pass on= with columns that have equal values",
        )

    def warn(self, problem: str) -> None:
        warnings.warn(f"{self._joined.name}, joined by {self.names}: {problem}", UserWarning, stacklevel=3)

    def describe(self, index: int, *, row: bool | int) -> str:
        return ", ".join(repr(normalize(columns[row][index].as_py())) for normalize, columns in self._columns)

    def examples(self, indices: Array, *, row: bool | int) -> str:
        """Return the first few distinct keys of the given images or table rows as text, for messages."""
        first = np.sort(np.unique((self.rows if row else self.images)[indices], return_index=True)[1])
        keys = [self.describe(int(indices[position]), row=row) for position in first[:_NUM_EXAMPLES]]
        return "; ".join(keys) + (", ..." if len(first) > _NUM_EXAMPLES else "")


def _encode(column: pa.ChunkedArray, normalize: Callable[[Any], Any], known: dict[Any, int]) -> Array:
    """Return a column as codes of its normalized values, which are added to ``known``; -1 is null."""
    encoded = column.combine_chunks().dictionary_encode()
    values = map(normalize, encoded.dictionary.to_pylist())
    codes = np.array([*[known.setdefault(value, len(known)) for value in values], -1], np.int64)
    encoded_rows: Array = codes[encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)]
    return encoded_rows


def numbers_of(column: pa.ChunkedArray) -> Array:
    """Convert the numbers in a column, including numeric text, to float64; other values become NaN."""
    known = dict[Any, int]()
    codes = np.full(len(column), -1) if pa.types.is_nested(column.type) else _encode(column, _number, known)
    numbers: Array = np.array([*[value if isinstance(value, int | float) else np.nan for value in known], np.nan])
    return numbers[codes]


def first_duplicate(keys: Array) -> tuple[int, int] | None:
    """Return the indices of the first pair of equal keys, the smaller one first; None if all keys differ."""
    first = match_rows(keys, keys)
    repeated = np.flatnonzero((first >= 0) & (first < np.arange(len(keys))))
    return (int(first[repeated[0]]), int(repeated[0])) if len(repeated) else None


def match_rows(keys: Array, requests: Array) -> Array:
    """Return, as int64, the first index in ``keys`` of each requested key; -1 if the key is null or missing."""
    rows = pc.index_in(pa.array(requests), pa.array(keys)).fill_null(-1).to_numpy().astype(np.int64)
    return np.where(requests < 0, -1, rows)


def refuse_contradiction(source: Images, joined: InputTable, images: Array, rows: Array) -> None:
    """Raise `MetadataError` if an image and the table row with its id have different plates, wells or sites.

    Ids such as ``image-00000`` occur in many collections.
    """
    for name in set(NAMED_BY) & set(source.column_names) & set(joined.table.column_names):
        keys = JoinKeys(source, joined, [(name, name)])
        ours, theirs = keys.images[images], keys.rows[rows]
        differs = (ours >= 0) & (theirs >= 0) & (ours != theirs)
        if differs.any():
            image, row = int(images[differs][0]), int(rows[differs][0])
            raise MetadataError(
                f"row {row} has the id of image {source.image_ids[image]!r} of {source.path}, but {name} is "
                f"{keys.describe(row, row=True)} in the row and {keys.describe(image, row=False)} for the image",
                **joined.subject,
                remedy="pass on= with columns that identify the image",
            )


def _normalizer(name: str, left: pa.DataType, right: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that normalizes keys: wells B7 and B07 are equal, and sites 1, 1.0 and "1"."""
    if "well" in name.lower():
        return _well
    are_numbers = any(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (left, right))
    return _number if are_numbers or name.lower().endswith(_NUMBERED) else _text


def _text(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _well(value: Any) -> Any:
    match = _WELL.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if match is None else f"{match[1].upper()}{int(match[2]):02d}"


def _number(value: Any) -> Any:
    match = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if match is None else int(match[1])
