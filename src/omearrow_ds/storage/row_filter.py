"""Row filters: conditions on columns, evaluated with the null logic of SQL."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial, reduce
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.axes import Array
from omearrow_ds.errors import ArgumentError, ColumnError, SelectError
from omearrow_ds.options import refuse_value
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.text import nearest

Values = Any  # Arrow array or scalar.
IMAGE_ID = "image_id"
_ROW = "\0row"  # No stored column has a NUL in its name.
_NUM_SHOWN = 20
_UNKNOWN = re.compile(r"No match for FieldRef\.Name\((.*?)\) in ", re.DOTALL)
_COMPARE = {"==": pc.equal, "!=": pc.not_equal}
_COMPARE |= {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_INT64_LIMIT = 2**63
_INT_OR_UINT = pa.decimal128(20, 0)
_JOIN = {"and": pc.and_kleene, "or": pc.or_kleene}

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<name>"(?:[^"]|"")+")
    | (?P<keyword>(?i:and|or|not|in|is|null|true|false)(?!\w))
    | (?P<word>[^\W\d]\w*)
    | (?P<symbol>==|!=|<=|>=|[<>(),])
    | (?P<end>\Z)
    | (?P<unknown>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_MAX_DEPTH = 100
_EXAMPLE = "write e.g. \"dose > 1 and treatment in ('DMSO', 'TAXOL')\""
_EQUALITY = 'write "==" for equal, and "!=" for not equal'
_EXPRESSION = "compare with ==, !=, <, <=, >, >= or in; for others, pass a pyarrow.compute.Expression in Python"
_REMEDIES = {  # By the token that is not expected.
    "=": _EQUALITY,
    "&": 'write "and"',
    "|": 'write "or"',
    "!": 'write "not"',
    "~": 'write "not"',
    "[": "write values in parentheses, e.g. dose in (1, 2)",
    "null": 'write "is null" or "is not null"',
    "between": "write two comparisons, e.g. dose >= 1 and dose <= 2",
    **dict.fromkeys(("like", "contains", "startswith", "+", "-", "*", "/", "%", "."), _EXPRESSION),
}


Value = Decimal | str | bool
Error = partial[ColumnError]
# Whether a condition is true for each row of a table, null if unknown; a null scalar if all are unknown.
Condition = Callable[[pa.Table, Error], Values]


class Column(NamedTuple):
    name: str


class _Parser:
    """Recursive descent parser of one text: ``or`` binds less than ``and``, and ``and`` less than ``not``."""

    def __init__(self, text: str) -> None:
        matches = ((str(match.lastgroup), match) for match in _TOKEN.finditer(text))
        # Kind, text and position of each token; the text of keywords is in lower case.
        self._tokens = [
            (kind, match[kind].lower() if kind == "keyword" else match[kind], match.start(kind) + 1)
            for kind, match in matches
        ]
        self._index = self._depth = 0
        self.names: dict[str, None] = {}  # Columns of the condition, in order.

    def parse(self) -> Condition:
        condition = self._parse_operation()
        if self._tokens[self._index][0] != "end":
            self._fail('"and", "or" or the end')
        return condition

    def _accept(self, *texts: str) -> str | None:
        """Return the next token if it is one of these symbols or keywords, and go to the one after it."""
        kind, text, _ = self._tokens[self._index]
        if kind not in ("symbol", "keyword") or text not in texts:
            return None
        self._index += 1
        return text

    def _expect(self, text: str) -> None:
        if self._accept(text) is None:
            self._fail(f'"{text}"')

    def _fail(self, expected: str) -> NoReturn:
        kind, text, character = self._tokens[self._index]
        previous = f' after "{self._tokens[self._index - 1][1]}"' if self._index else ""
        remedy = _REMEDIES.get(text.lower(), _EXAMPLE)
        if text == ">" and previous.endswith('"<"'):
            remedy = _EQUALITY
        elif text in ("'", '"'):
            remedy = f"close the string or name with {text}, and double each {text} inside it"
        elif kind == "unknown" and remedy == _EXAMPLE:
            remedy = "write strings in 'single quotes', and names with spaces or symbols in \"double quotes\""
        raise ArgumentError(option="filter", allowed=f"{expected}{previous} at character {character}", remedy=remedy)

    def _parse_operation(self, operator: str = "or") -> Condition:
        parse = partial(self._parse_operation, "and") if operator == "or" else self._parse_negation
        parts = [parse()]
        while self._accept(operator):
            parts.append(parse())
        if len(parts) == 1:
            return parts[0]
        return lambda *rows: reduce(_JOIN[operator], (part(*rows) for part in parts))

    def _parse_negation(self) -> Condition:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"at most {_MAX_DEPTH} nested parentheses and negations")
        if self._accept("not"):
            condition = _negate(self._parse_negation())
        elif self._accept("("):
            condition = self._parse_operation()
            self._expect(")")
        else:
            condition = self._parse_predicate()
        self._depth -= 1
        return condition

    def _parse_predicate(self) -> Condition:
        left, start = self._parse_operand("a column"), self._index
        operator = self._accept(*_COMPARE)
        if operator is not None:
            right = self._parse_operand("a value")
            if isinstance(left, Column):
                return partial(_compare, operator, left.name, right)
            if isinstance(right, Column):
                return partial(_compare, _MIRRORED.get(operator, operator), right.name, left)
            self._index = start
            self._fail("a comparison with a column")
        if not isinstance(left, Column):
            self._fail('a comparison such as "=="')
        name, has_is = left.name, self._accept("is")
        is_negated = self._accept("not") is not None
        if has_is:
            self._expect("null")
            predicate: Condition = lambda table, _: pc.is_null(table[name])  # noqa: E731  # One expression.
        elif is_negated or self._tokens[self._index][1] == "in":
            self._expect("in")
            predicate = partial(_is_in, name, self._parse_values())
        else:
            predicate = partial(_compare, "==", name, True)
        return _negate(predicate) if is_negated else predicate

    def _parse_values(self) -> list[Value]:
        self._expect("(")
        values: list[Value] = []
        while not values or self._accept(","):
            value = self._parse_operand("a value")
            if isinstance(value, Column):
                self._index -= 1
                self._fail("a number or a string in 'single quotes'")
            values.append(value)
        self._expect(")")
        return values

    def _parse_operand(self, expected: str) -> Column | Value:
        kind, text, _ = self._tokens[self._index]
        if kind not in ("number", "text", "name", "word") and text not in ("true", "false"):
            self._fail(expected)
        self._index += 1
        match kind:
            case "number":
                return Decimal(text)
            case "text":
                return text[1:-1].replace("''", "'")
            case "keyword":
                return text == "true"
        column = Column(text[1:-1].replace('""', '"') if kind == "name" else text)
        self.names[column.name] = None
        return column


class RowFilter:
    """Condition that selects rows of a table; its ``text`` identifies the condition in all processes."""

    def __init__(self, condition: Any) -> None:
        self.condition, self._parsed = condition, None
        if isinstance(condition, str):
            parser = _Parser(condition)
            self.text, self._parsed, self._names = condition.strip(), parser.parse(), list(parser.names)
        elif isinstance(condition, pc.Expression):
            self.text = str(condition)
            if "..." in self.text:  # Arrow shortens long lists of values.
                _, (serialized,) = condition.__reduce__()
                self.text += f" [{hashlib.blake2b(serialized, digest_size=8).hexdigest()}]"
        else:
            refuse_value("filter", condition, allowed="a string or a pyarrow.compute.Expression", remedy=_EXAMPLE)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowFilter, (self.condition,)

    def choose(self, rows: ColumnReader) -> Array:
        """Return the sorted indices of the rows for which the condition is true; rows with null are not selected."""
        # Only the columns of the condition are read. Ids are the column ``image_id``, unless there is another one.
        known = rows.names
        if self._parsed is not None:
            names = self._names
        elif "FieldPath(" in self.text:
            problem, remedy = "a column is referred to by its number", "use pyarrow.compute.field('name')"
            refuse_value("filter", self.text, problem, remedy)
        else:  # The text has the name of each column of the expression, and possibly names of others.
            names = [name for name in dict.fromkeys([*known, IMAGE_ID]) if name in self.text]
        error = partial(ColumnError, path=rows.path, option="filter")
        unknown = next((name for name in names if name not in known and name != IMAGE_ID), None)
        if unknown is not None:
            raise _unknown_column(unknown, known, error)
        table = {name: rows.column(name) for name in names if name in known}
        if len(table) < len(names):
            table[IMAGE_ID] = pa.chunked_array([pa.array(list(rows.image_ids), pa.string())])
        if self._parsed is None:  # Ids of objects are texts that are made when they are requested.
            table[_ROW] = np.arange(len(rows.image_ids))
        chosen = self._choose(pa.table(table), known, error)
        if not len(chosen):
            remedy = "correct the condition, or leave it out"
            raise SelectError("matches no row", path=rows.path, option="filter", value=self.text, remedy=remedy)
        return chosen

    def _choose(self, table: pa.Table, known: Sequence[str], error: Error) -> Array:
        try:
            if self._parsed is None:
                return np.asarray(table.filter(self.condition)[_ROW])
            values = self._parsed(table, error)
        except pa.ArrowException as failure:
            unknown = _UNKNOWN.search(str(failure))
            if unknown is not None:
                raise _unknown_column(unknown[1], known, error) from None
            if self._parsed is None:
                remedy = "correct the expression, or cast a column in it"
                raise error(str(failure), value=self.text, remedy=remedy) from failure
            raise error(str(failure), remedy="compare it with another value") from failure
        if isinstance(values, pa.Scalar):  # Null for each row.
            return np.zeros(0, np.int64)
        return np.flatnonzero(pc.fill_null(values, fill_value=False))


def _unknown_column(name: str, known: Sequence[str], error: Error) -> ColumnError:
    """Return the error for a column that does not exist; it names the columns with the most similar names."""
    columns = ", ".join(map(repr, nearest(name, reversed(known), 3) or [*known[:_NUM_SHOWN], IMAGE_ID]))
    remedy = f"use {columns}, or write a string in 'single quotes'"
    return error(f"no column {name!r} exists", column=name, remedy=remedy)


def _negate(condition: Condition) -> Condition:
    return lambda *rows: pc.invert(condition(*rows))


def _is_in(name: str, values: Sequence[Value], table: pa.Table, error: Error) -> Values:
    if pa.types.is_string(table[name].type) and all(isinstance(text, str) for text in values):
        texts = pa.array(values, pa.string())
        return pc.if_else(pc.is_null(table[name]), None, pc.is_in(table[name], value_set=texts))
    return reduce(pc.or_kleene, (_compare("==", name, value, table, error) for value in values))


def _compare(operator: str, name: str, other: Column | Value, table: pa.Table, error: Error) -> Values:
    stored = table[name]
    if isinstance(other, Column):
        values, described = table[other.name], f"column {other.name!r}"
    else:
        values = _as_scalar(other, stored.type)
        described = str(other) if isinstance(other, Decimal) else repr(other)
    if pa.types.is_null(stored.type) or pa.types.is_null(values.type):
        return pa.scalar(None, pa.bool_())
    kind = _kind(stored.type)
    if kind != _kind(values.type) or kind == "other":
        problem = f"column {name!r} is {stored.type} but {described} is {values.type}"
        raise error(problem, column=name, remedy="write strings in 'single quotes', and numbers without quotes")
    return _COMPARE[operator](*_with_one_type(stored, values))


def _kind(kind: pa.DataType) -> str:
    """Return the group of types that can be compared with each other."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_string(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "truth value"
    return "time" if pa.types.is_date(kind) or pa.types.is_timestamp(kind) else "other"


def _as_scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    """Return a value as a scalar to compare with a column of type ``kind``; exact unless the column is floating."""
    if isinstance(value, str) and _kind(kind) == "time":
        return pa.scalar(value).cast(pa.timestamp("ns" if pa.types.is_timestamp(kind) else "us")).cast(kind)
    if not isinstance(value, Decimal):
        return pa.scalar(value)
    if pa.types.is_floating(kind):
        return pa.scalar(float(value)).cast(kind, safe=False)
    if abs(value) < _INT64_LIMIT and value == int(value) and not pa.types.is_uint64(kind):
        return pa.scalar(int(value))
    has_38_digits = value.adjusted() < 20 and int(value.as_tuple().exponent) >= -18
    return pa.scalar(value if has_38_digits and _kind(kind) == "number" else float(value))


def _with_one_type(left: pa.ChunkedArray, right: Values) -> tuple[Values, Values]:
    """Return numbers in a type that holds the values of both, and other values unchanged."""
    types = left.type, right.type
    if any(map(pa.types.is_floating, types)):
        return left.cast(pa.float64(), safe=False), right.cast(pa.float64(), safe=False)
    if any(map(pa.types.is_uint64, types)) and types[0] != types[1] and not pa.types.is_decimal(right.type):
        return left.cast(_INT_OR_UINT), right.cast(_INT_OR_UINT)
    return left, right
