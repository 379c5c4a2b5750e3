"""Columns in plain Arrow types: a format stores the values of a column, not its Arrow layout.

Columns are converted when written, and when read from files of any writer, so all formats return the same types.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import lib

from omearrow_ds.codec.schema import CHECKSUM_COLUMN
from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError

_DEPTH = 12  # Vortex allocates terabytes for lists nested 32 deep, and ends the process
_MOST_LISTED, _NEAREST = 20, 3  # Column names in an error.
MAX_COLUMNS_AT_ONCE = 64  # Columns of wider tables are read on request, those of others when a table is opened.
_DECIMAL128_DIGITS, _DECIMAL256_DIGITS = 38, 76
_LISTS = (lib.Type_LIST, lib.Type_LARGE_LIST, lib.Type_FIXED_SIZE_LIST, lib.Type_LIST_VIEW, lib.Type_LARGE_LIST_VIEW)
_TEXTS = (lib.Type_LARGE_STRING, lib.Type_STRING_VIEW)
_BYTES = (lib.Type_LARGE_BINARY, lib.Type_BINARY_VIEW, lib.Type_FIXED_SIZE_BINARY)
_OF_TIMES = {pa.date64(): pa.date32(), pa.time32("s"): pa.time64("us"), pa.time32("ms"): pa.time64("us")}
_STORED_EXTENSIONS = ("arrow.uuid", "arrow.json", "arrow.bool8", "arrow.fixed_shape_tensor")


class ColumnReader:
    """Columns read on request; a subclass sets ``table``, or sets ``schema`` and implements `_read`."""

    path: Path
    image_ids: Sequence[str]

    @cached_property
    def table(self) -> pa.Table:
        """All columns, read at the first access."""
        return self._read(self.names)

    @cached_property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column without reading the others."""
        table = vars(self).get("table")
        return table[name] if table is not None and name in table.column_names else self.select([name])[name]

    def select(self, names: Sequence[str]) -> pa.Table:
        """Return the named columns in the order of ``names`` without reading other columns."""
        if isinstance(names, str) or len(set(names)) < len(names):
            allowed, remedy = "a list of distinct column names", "pass each name once"
            raise ArgumentError(option="names", value=names, allowed=allowed, remedy=remedy)
        known = self.names
        unknown = set(names).difference(known)
        if unknown:
            raise unknown_column(next(name for name in names if name in unknown), known, self.path)
        table = vars(self).get("table")
        return self._read(list(names)) if table is None else table.select(list(names))

    def _read(self, names: list[str]) -> pa.Table:
        return self.table.select(names)


class ImageColumns(ColumnReader):
    """Columns and checksums of the images of a collection.

    ``columns`` are those that were read at opening, or their schema if ``read`` returns existing columns on request.
    """

    def __init__(
        self,
        path: Path,
        image_ids: Sequence[str],
        columns: pa.Table | pa.Schema,
        read: Callable[[list[str]], pa.Table] | None = None,
        find_checksums: Callable[[], pa.ChunkedArray | None] = lambda: None,
    ) -> None:
        self.path, self.image_ids, self._find_checksums = path, image_ids, find_checksums
        if isinstance(columns, pa.Table):
            self.table = columns
        else:
            self.schema, self._read = columns, read  # type: ignore[assignment, method-assign]

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:
        """A string or a null per image; None if no checksums are stored."""
        return self._find_checksums()


def is_narrow(names: Sequence[str]) -> bool:
    """Whether a table has so few columns that all of them are read when it is opened."""
    return len(names) <= MAX_COLUMNS_AT_ONCE


def columns_at_once(names: Sequence[str]) -> Sequence[str]:
    """Return the columns that are read when a table is opened: all, or only checksums of a wide table."""
    return names if len(names) <= MAX_COLUMNS_AT_ONCE else [name for name in names if name == CHECKSUM_COLUMN]


def unknown_column(name: object, known: Sequence[str], path: Path | str, use: str = "") -> ColumnError:
    """Return the error for a missing column; its message lists all columns if they are few, else similar names."""
    listed = list(known)
    if len(known) > _MOST_LISTED:
        listed = difflib.get_close_matches(str(name), known, _NEAREST, cutoff=0)
    share = "" if len(listed) == len(known) else f", the most similar of {len(known):,} columns"
    remedy = f"choose one of {listed}{share}" if listed else "pass columns= or pattern=, as images have no columns"
    return ColumnError(f"{path}: no column {name!r}{use}", column=str(name), remedy=remedy)


def plain_columns(columns: pa.Table, subject: str) -> pa.Table:
    """Return ``columns`` with plain Arrow types; ``subject`` names the table in errors.

    Times are in UTC and in µs, or in ns if they were; decimals have 128 bits if they have up to 38 digits. Maps become
    lists of ``key`` and ``value``, UUIDs bytes, JSON text, and tensors lists. Raises `MetadataError` for other types.
    """
    plain, arrays = plain_schema(columns.schema, subject), []
    for field, column in zip(plain, columns.columns, strict=True):
        if field.type.equals(column.type, check_metadata=True):  # Names of list items too, as Parquet changes them.
            arrays.append(column)
            continue
        try:
            arrays.append(pa.chunked_array([_plain(chunk) for chunk in column.chunks], field.type))
        except pa.ArrowException as error:
            problem = f"column {field.name!r}: {column.type} values cannot be converted to {field.type}: {error}"
            raise MetadataError(f"{subject}: {problem}; correct them", column=field.name) from error
    return pa.Table.from_arrays(arrays, schema=plain) if arrays else columns


def plain_schema(stored: pa.Schema, subject: str) -> pa.Schema:
    """Return the schema that `plain_columns` would return; raise `MetadataError` for a type without a plain form."""
    plain = []
    for field in stored:
        kind = _plain_type(field.type)
        if kind is None:
            bad = next(kind for kind in all_types(field.type) if _has_no_plain_form(kind))
            problem = f"column {field.name!r}: the type {bad} is not supported"
            raise MetadataError(f"{subject}: {problem}; cast it, or leave the column out", column=field.name)
        plain.append(pa.field(field.name, kind))
    return pa.schema(plain)


@functools.lru_cache(256)  # Thousands of columns share a few types.
def _plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the plain Arrow type for the values of ``kind``, or None if it does not exist."""
    return None if any(map(_has_no_plain_form, all_types(kind))) else _plain(pa.nulls(0, kind)).type


def columns_and_checksums(columns: pa.Table, where: str) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return the `plain_columns` without our own column of checksums, and that column or None."""
    plain = plain_columns(columns, where)
    if CHECKSUM_COLUMN not in plain.column_names or plain[CHECKSUM_COLUMN].type != pa.string():
        return plain, None
    return plain.drop_columns(CHECKSUM_COLUMN), plain[CHECKSUM_COLUMN]


def refuse_extensions(columns: pa.Schema, subject: str) -> None:
    """Raise `MetadataError` for Arrow extension types, whose meaning would be lost."""
    for field in columns:
        for kind in all_types(field.type):
            if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in _STORED_EXTENSIONS:
                remedy = "pass its storage array to store only the values"
                problem = f"{subject}: column {field.name!r}: type {kind.extension_name!r} cannot be stored; {remedy}"
                raise MetadataError(problem, column=field.name)


def refuse_types(columns: pa.Schema, unheld: Sequence[Callable[[pa.DataType], bool]], label: str, subject: str) -> None:
    """Raise `MetadataError` for types that the format ``label`` cannot store, or that no format can read back."""
    for field in columns:
        error, column = partial(MetadataError, column=field.name), f"{subject}: column {field.name!r}"
        if "\0" in field.name:
            raise error(f"{column}: its name contains NUL, which many formats cannot store; rename it")
        if _depth(field.type) > _DEPTH:
            raise error(f"{column} has more than {_DEPTH} nested levels; flatten it")
        for kind in all_types(field.type):
            if any(test(kind) for test in unheld):
                raise error(f"{column}: {label} cannot store the type {kind}; cast it first")
            names = [child.name for child in kind] if pa.types.is_struct(kind) else ["-"]
            if not all(names) or "\0" in "".join(names) or not 0 < len(names) == len(set(names)):
                problem = f"a struct has the fields {names}, expected distinct names without NUL; rename them"
                raise error(f"{column}: {problem}")


def all_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        yield from all_types(kind.storage_type)
    elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        yield from all_types(kind.value_type)
    else:
        for number in range(kind.num_fields):
            yield from all_types(kind.field(number).type)


def _depth(kind: pa.DataType) -> int:
    return 1 + max((_depth(kind.field(number).type) for number in range(kind.num_fields)), default=0)


def _has_no_plain_form(kind: pa.DataType) -> bool:
    permuted = isinstance(kind, pa.FixedShapeTensorType) and (kind.permutation or []) != sorted(kind.permutation or [])
    too_long = pa.types.is_decimal(kind) and _digits(kind) > _DECIMAL256_DIGITS
    return bool(pa.types.is_union(kind) or permuted or too_long)


def _digits(kind: pa.DataType) -> int:
    """Return how many digits a decimal needs before and after its point."""
    return int(max(kind.precision - min(kind.scale, 0), kind.scale))


def _plain(array: pa.Array) -> pa.Array:
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _plain(_nested(array))
    if isinstance(kind, pa.BaseExtensionType):
        return array.storage.cast(pa.bool_()) if kind.extension_name == "arrow.bool8" else _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary).take(array.indices)  # take does not support views
    if pa.types.is_run_end_encoded(kind):
        positions = np.arange(array.offset, array.offset + len(array))
        return _plain(array.values).take(pa.array(np.searchsorted(array.run_ends.to_numpy(), positions, side="right")))
    if pa.types.is_map(kind):
        entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        return _plain(array.cast(pa.list_(entry)))
    if kind.id in _LISTS:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        return _listed(lengths, _plain(array.flatten()), array)
    if pa.types.is_struct(kind):
        arrays = [_plain(array.field(number)) for number in range(kind.num_fields)]
        fields = [pa.field(name, values.type) for name, values in zip(kind.names, arrays, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())
    plain = _plain_scalar(kind)
    return array if plain == kind else array.cast(plain)


def _plain_scalar(kind: pa.DataType) -> pa.DataType:
    if kind.id in _TEXTS:
        return pa.string()
    if kind.id in _BYTES:
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns" if kind.unit == "ns" else "us", None if kind.tz is None else "UTC")
    if pa.types.is_decimal(kind):
        digits = _digits(kind)
        decimal = pa.decimal128 if digits <= _DECIMAL128_DIGITS else pa.decimal256
        return decimal(digits, max(kind.scale, 0))
    return _OF_TIMES.get(kind, kind)


def _listed(lengths: np.ndarray[Any, Any], values: pa.Array, array: pa.Array) -> pa.Array:
    """Return lists of contiguous values with these lengths; rows are null as in ``array``."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid(f"{offsets[-1]:,} list values exceed the limit of {np.iinfo(np.int32).max:,} per column")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=array.is_null())


def _nested(array: pa.FixedShapeTensorArray) -> pa.Array:
    shape, values = array.type.shape, array.storage.flatten()
    rows = len(array) - array.null_count
    for axis in range(len(shape) - 1, 0, -1):
        count = rows * math.prod(shape[:axis])
        values = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * shape[axis], pa.int32()), values)
    lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), shape[0], 0)
    return _listed(lengths, values, array)
