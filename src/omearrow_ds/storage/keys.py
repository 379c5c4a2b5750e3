"""Tables that are joined to images: read from a table, frame or file, and matched with the images by key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.formats._columns import plain_columns, refuse_extensions
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import ColumnTypes, TableFile, described

IMAGE_ID, IMAGE_NUMBER = "image_id", "ImageNumber"
_METADATA = "Metadata_"
_NUMBERED = ("site", "field", "number")  # Parts of column names whose text values are compared as numbers.
_WELL = re.compile(r"([A-Za-z]{1,2})0*([1-9][0-9]?)")
_PLACES = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")
_SHOWN = 3
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")


class Given(NamedTuple):
    """A table that the caller passed, with its name in errors and its metadata."""

    table: pa.Table  # The table, with plain types.
    where: str  # Its name in errors.
    renamed: Mapping[str, str]  # New names of columns by their names in CellProfiler.
    metadata: Mapping[bytes, bytes]  # Metadata of its schema.
    is_text: bool = False  # Whether it is a file of text.


def table_file(given: Any, option: str) -> TableFile | None:
    """Return the table file at the path that was passed as ``option``, or None if ``given`` is not a path.

    Raises `MissingPathError` if the file does not exist.
    """
    if not isinstance(given, str | os.PathLike):
        return None
    path = Path(given).absolute()
    if not path.is_file():
        raise missing(given, f"no such file; pass as {option}= a table, a frame, or the path of a CSV or Parquet file")
    return TableFile(path)


def read_given(given: Any, option: str, types: ColumnTypes) -> Given:
    """Return the table, frame or file that was passed as ``option``; ``types`` apply to columns of text tables.

    Raises `ArgumentError` for other values; `MissingPathError` if the file does not exist; `FormatError` if the file
    cannot be read; `MetadataError` if two columns have one name, or types are not supported.
    """
    file = table_file(given, option)
    where = f"{option}=" if file is None else str(file.path)
    table = _of_frame(given, option) if file is None else file.read(types=types.of_table(file))
    if len(set(table.column_names)) < table.num_columns:
        raise MetadataError(f"{where}: has two columns of one name; rename one")
    metadata = table.schema.metadata or {}
    refuse_extensions(table.schema, where)
    renamed = {name: plain for plain, name in described(table.column_names).items()}
    table = table.rename_columns([renamed.get(name, name) for name in table.column_names])
    return Given(plain_columns(table, where), where, renamed, metadata, file is not None and file.is_text)


def _of_frame(given: Any, option: str) -> pa.Table:
    try:
        if isinstance(given, pa.Table | Mapping):
            return given if isinstance(given, pa.Table) else pa.table(dict(given))
        if type(given).__module__.partition(".")[0] == "pandas" and given.ndim > 1:
            # A named index is a column too.
            named = any(name is not None for name in given.index.names)
            return pa.Table.from_pandas(given, preserve_index=named).replace_schema_metadata(None)
        if hasattr(given, "__arrow_c_stream__") and getattr(given, "ndim", 2) > 1:
            return pa.table(given)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise MetadataError(f"{option}= cannot be made an Arrow table: {error}") from error
    allowed = "a pyarrow table, a pandas or polars frame, or the path of a CSV or Parquet file"
    raise ArgumentError(f"is a {type(given).__name__}", option=option, allowed=allowed)


def pairs_of(source: BaseSource, given: Given, on: On | None) -> list[tuple[str, str]]:
    """Return the pairs of columns to join by; each pair is a name in the source and a name in the table.

    Raises `ArgumentError` if ``on`` is invalid; `ColumnError` if a column does not exist, or if ``on`` is
    None and the source and the table have no column in common.
    """
    own, theirs, renamed = source.columns.column_names, given.table.column_names, given.renamed
    if on is None:
        if IMAGE_ID in theirs:
            return [(IMAGE_ID, IMAGE_ID)]
        common = [name for name in own if name.startswith(_METADATA) and name in theirs]
        empty = {name for name in common if _is_empty(source.columns[name]) or _is_empty(given.table[name])}
        common = [name for name in common if name not in empty]  # Nulls match nothing.
        common = common or [name for name in own if name == IMAGE_NUMBER and name in theirs]
        if not common:
            raise ColumnError(
                f"{given.where}: has neither {IMAGE_ID!r} nor a {_METADATA}* column in common with {source.path}: one "
                f"has {theirs[:20]}, the other {own}; pass on= with a name that both have, or on={{'ours': 'theirs'}}"
            )
        return [(name, name) for name in common]
    names = on if isinstance(on, Sequence | Mapping) and not isinstance(on, str) else [on]
    pairs = list(names.items()) if isinstance(names, Mapping) else [(name, name) for name in names]
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        raise ArgumentError(
            option="on", value=on, allowed="the name of a column, several, or a mapping of ours to theirs"
        )
    if not isinstance(names, Mapping):
        pairs = [(left if left in own else renamed.get(left, left), right) for left, right in pairs]
    pairs = [(left, right if right in theirs else renamed.get(right, right)) for left, right in pairs]
    for left, right in pairs:
        if left != IMAGE_ID and left not in own:
            raise ColumnError(
                f"{source.path}: no column {left!r} to join on; there are {[IMAGE_ID, *own]}", column=left
            )
        if right not in theirs:
            raise ColumnError(f"{given.where}: no column {right!r} to join on; there are {theirs[:20]}", column=right)
    return pairs


def _is_empty(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count == len(column))


class Keys:
    """Join keys of images and of table rows, encoded so that equal keys are equal integers.

    Raises `ColumnError` if values of a column cannot be compared.

    Attributes
    ----------
    images, rows
        (n,) int64 each, -1 if a part of the key is null.
    names
        Name of the key in messages.
    """

    def __init__(self, source: BaseSource, given: Given, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: list[list[Any]] = []
        self._codes: list[tuple[Array, Array]] = []
        self.names = " and ".join(f"{left!r}" for left, _ in pairs)
        both = np.zeros(len(source) + len(given.table), np.int64)
        null = np.zeros(len(both), np.bool_)
        for left, right in pairs:
            own = pa.chunked_array([pa.array(source.image_ids)]) if left == IMAGE_ID else source.columns[left]
            other = given.table[right]
            if pa.types.is_nested(own.type) or pa.types.is_nested(other.type):
                raise ColumnError(
                    f"{given.where}: {right!r} cannot be joined with {left!r}: keys are texts, numbers or times"
                )
            same, known = _comparable(left, own.type, other.type), dict[Any, int]()
            ours, theirs = (_coded(column, same, known) for column in (own, other))
            self._values.append(list(known))
            self._codes.append((ours, theirs))
            codes = np.concatenate([ours, theirs])
            null |= codes < 0
            both = np.unique(both * (len(known) + 1) + codes, return_inverse=True)[1].reshape(-1)
        both[null] = -1
        self.images, self.rows = both[: len(source)], both[len(source) :]

    def told(self, index: int, *, row: bool) -> str:
        """Return the join key of an image or of a table row, as text."""
        codes = [pair[row][index] for pair in self._codes]
        return ", ".join(
            repr(None if code < 0 else values[code]) for values, code in zip(self._values, codes, strict=True)
        )


def _coded(column: pa.ChunkedArray, same: Callable[[Any], Any], known: dict[Any, int]) -> Array:
    """Return a column as codes of its normalized values, which are added to ``known``; -1 is null."""
    encoded = column.combine_chunks().dictionary_encode()
    distinct = [same(value) for value in encoded.dictionary.to_pylist()]
    number = np.array([*(known.setdefault(value, len(known)) for value in distinct), -1], np.int64)
    codes: Array = number[encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)]
    return codes


def numbers_of(column: pa.ChunkedArray) -> Array:
    """Return the numbers of a column, including numeric text, as float64; other values become NaN."""
    if pa.types.is_nested(column.type):
        return np.full(len(column), np.nan)
    encoded = column.combine_chunks().dictionary_encode()
    values = [_number(value) for value in encoded.dictionary.to_pylist()]
    known = np.array([value if isinstance(value, int | float) else np.nan for value in [*values, None]], np.float64)
    numbers: Array = known[encoded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)]
    return numbers


def first_equal(keys: Array) -> tuple[int, int] | None:
    """Return the indices of the first repeated key: where it first occurs, and where it repeats; None if all differ."""
    order = np.argsort(keys, kind="stable")
    again = order[1:][(keys[order[1:]] == keys[order[:-1]]) & (keys[order[1:]] >= 0)]
    if not len(again):
        return None
    second = int(again.min())
    return int(np.flatnonzero(keys == keys[second])[0]), second


def places(keys: Array, wanted: Array) -> Array:
    """Return (n,) int64, the index in ``keys`` of each key in ``wanted``; -1 if that key is null or missing."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    found = order[at]
    return np.where((keys[found] == wanted) & (wanted >= 0), found, -1)


def refuse_contradiction(source: BaseSource, given: Given, images: Array, rows: Array) -> None:
    """Raise `MetadataError` if an image and the table row with its id have different plates, wells or sites.

    Ids such as ``image-00000`` occur in many collections.
    """
    for name in set(_PLACES) & set(source.columns.column_names) & set(given.table.column_names):
        keys = Keys(source, given, [(name, name)])
        ours, theirs = keys.images[images], keys.rows[rows]
        wrong = (ours >= 0) & (theirs >= 0) & (ours != theirs)
        if wrong.any():
            image, row = int(images[wrong][0]), int(rows[wrong][0])
            raise MetadataError(
                f"{given.where}: row {row} has the id {source.image_ids[image]!r} of an image of {source.path}, but "
                f"{name} {keys.told(row, row=True)}, where the image has {keys.told(image, row=False)}; pass on= with "
                f"columns that say what belongs together"
            )


def some_keys(keys: Keys, numbers: Array, *, row: bool) -> str:
    """Return the first few distinct keys of the given images or table rows, as text."""
    of = (keys.rows if row else keys.images)[numbers]
    first = np.sort(np.unique(of, return_index=True)[1])
    shown = [keys.told(int(numbers[number]), row=row) for number in first[:_SHOWN]]
    return "; ".join(shown) + (", ..." if len(first) > _SHOWN else "")


def _comparable(name: str, ours: pa.DataType, theirs: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that normalizes keys: wells B7 and B07 are equal, and sites 1, 1.0 and "1"."""
    if "well" in name.lower():
        return _well
    numbers = any(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (ours, theirs))
    return _number if numbers or name.lower().endswith(_NUMBERED) else _text


def _text(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _well(value: Any) -> Any:
    found = _WELL.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if found is None else f"{found[1].upper()}{int(found[2]):02d}"


def _number(value: Any) -> Any:
    found = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if found is None else int(found[1])
