"""Columns of text tables, and the rule for their types."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import FormatError

TYPES = {"integer": pa.int64(), "float": pa.float64(), "text": pa.string()}  # From narrow to wide.

_EXPECTED = {"integer": "an integer", "float": "a number"}

# Spellings of numbers.
_WHOLE = r"-?(?:0|[1-9][0-9]*)"
_FRACTION = r"-?(?:0|[1-9][0-9]*)?\.[0-9]+(?:[eE][+-]?[0-9]+)?|-?(?:0|[1-9][0-9]*)[eE]-[0-9]+"
_NOT_FINITE = r"-?(?i:inf|infinity|nan)"
_ANY_NUMBER = r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:inf|infinity|nan))"
_SPELLINGS = {pa.int64(): _WHOLE, pa.float64(): f"{_WHOLE}|{_FRACTION}|{_NOT_FINITE}"}  # From narrow to wide.
_BLANKS = " \t"
_FEW = 4
_EXACT, _LARGE = 2**53, 2.0**63  # Whole numbers below the first are exact in float64, and below the second fit int64.


def infer_type(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a text column to the first of the following types that fits all of its values.

    - int64: whole numbers without leading zeros that fit;
    - float64: whole numbers, and numbers with a fraction or a negative exponent; infinity and NaN;
    - text: all else. A column without values has Arrow's null type.
    """
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
    return None if _cast(large.filter(_match(large, _WHOLE)), pa.int64()) is None else numbers


def parse_as(kind: str, column: pa.ChunkedArray, table: str, name: str) -> pa.ChunkedArray:
    """Convert a text column to the type ``kind``, one of `TYPES`; ``+3``, ``007`` and ``1E5`` are valid numbers.

    Raises `FormatError` for a value of another type. ``table`` and ``name`` are those of its message.
    """
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
    raise FormatError(
        f"{table}: column {name!r} has {column[row].as_py()!r} in row {row}, expected {_EXPECTED[kind]}; correct it, "
        f"or drop the row"
    )


def _match(values: pa.ChunkedArray, spelling: str) -> pa.ChunkedArray:
    return pc.match_substring_regex(values, f"^(?:{spelling})$")


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """Return text as numbers; None if there are others, or some do not fit."""
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return None


def _trimmed(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text without the blanks around it, null if it has nothing else."""
    trimmed = pc.utf8_trim(values, _BLANKS)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
