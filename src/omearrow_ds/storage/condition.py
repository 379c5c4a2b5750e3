"""Conditions on columns: their syntax tree, and the parser of their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import NoReturn

from omearrow_ds.errors import ArgumentError

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
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_MIRRORED = MappingProxyType({"<": ">", "<=": ">=", ">": "<", ">=": "<="})
_MAX_DEPTH = 100
_EXAMPLE = "write e.g. \"dose > 1 and treatment in ('DMSO', 'TAXOL')\""
_EQUALITY = 'write "==" for equal, and "!=" for not equal'
_EXPRESSION = (
    "compare with ==, !=, <, <=, >, >= or in; for other conditions, pass a pyarrow.compute.Expression in Python"
)
_REMEDIES = MappingProxyType(  # By the token that is not expected.
    {
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
)


Value = Decimal | str | bool


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    name: str


@dataclass(frozen=True)
class Predicate:
    """Comparison of a column with a value or another column, or ``in`` with several values, or ``is null``."""

    operator: str
    column: str
    others: tuple[Column | Value, ...] = ()


@dataclass(frozen=True)
class Operation:
    """Combination of several conditions by ``and`` or ``or``, or ``not`` of one."""

    operator: str
    parts: tuple[Condition, ...]


Condition = Predicate | Operation


def parse_condition(text: str) -> Condition:
    """Return the syntax tree of a condition."""
    return _Parser(text).parse()


def columns_of(condition: Condition) -> list[str]:
    """Return the names of the columns in a condition; a column that occurs several times is repeated."""
    if isinstance(condition, Operation):
        return [name for part in condition.parts for name in columns_of(part)]
    return [condition.column, *(other.name for other in condition.others if isinstance(other, Column))]


class _Parser:
    """Recursive descent parser of one text: ``or`` binds less than ``and``, and ``and`` less than ``not``."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_TOKEN.finditer(text))
        self._index = self._depth = 0

    @property
    def _kind(self) -> str:
        return str(self._tokens[self._index].lastgroup)

    def _text(self, index: int | None = None) -> str:
        """Return the text of a token, by default of the next one; keywords in lower case."""
        token = self._tokens[self._index if index is None else index]
        kind = str(token.lastgroup)
        return token[kind].lower() if kind == "keyword" else token[kind]

    def parse(self) -> Condition:
        condition = self._parse_operation()
        if self._kind != "end":
            self._fail('"and", "or" or the end')
        return condition

    def _accept(self, *texts: str) -> str | None:
        """Return the next token if it is one of these symbols or keywords, and go to the one after it."""
        text = self._text()
        if self._kind not in ("symbol", "keyword") or text not in texts:
            return None
        self._index += 1
        return text

    def _expect(self, text: str) -> None:
        if self._accept(text) is None:
            self._fail(f'"{text}"')

    def _fail(self, expected: str) -> NoReturn:
        text, previous = self._text(), f' after "{self._text(self._index - 1)}"' if self._index else ""
        remedy = _REMEDIES.get(text.lower(), _EXAMPLE)
        if text == ">" and previous.endswith('"<"'):
            remedy = _EQUALITY
        elif text in ("'", '"'):
            remedy = f"close the string or name with {text}, and double each {text} inside it"
        elif self._kind == "unknown" and remedy == _EXAMPLE:
            remedy = "write strings in 'single quotes', and names with spaces or symbols in \"double quotes\""
        character = self._tokens[self._index].start(self._kind) + 1
        raise ArgumentError(option="filter", allowed=f"{expected}{previous} at character {character}", remedy=remedy)

    def _parse_operation(self, operator: str = "or") -> Condition:
        parts = [self._parse_operation("and") if operator == "or" else self._parse_negation()]
        while self._accept(operator):
            parts.append(self._parse_operation("and") if operator == "or" else self._parse_negation())
        return parts[0] if len(parts) == 1 else Operation(operator, tuple(parts))

    def _parse_negation(self) -> Condition:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"at most {_MAX_DEPTH} nested parentheses and negations")
        if self._accept("not"):
            condition: Condition = Operation("not", (self._parse_negation(),))
        elif self._accept("("):
            condition = self._parse_operation()
            self._expect(")")
        else:
            condition = self._parse_predicate()
        self._depth -= 1
        return condition

    def _parse_predicate(self) -> Condition:
        left, start = self._parse_operand("a column"), self._index
        operator = self._accept(*_COMPARISONS)
        if operator is not None:
            right = self._parse_operand("a value")
            if isinstance(left, Column):
                return Predicate(operator, left.name, (right,))
            if isinstance(right, Column):
                return Predicate(_MIRRORED.get(operator, operator), right.name, (left,))
            self._index = start
            self._fail("a comparison with a column")
        if not isinstance(left, Column):
            self._fail('a comparison such as "=="')
        if self._accept("is"):
            is_negated = self._accept("not") is not None
            self._expect("null")
            predicate = Predicate("is null", left.name)
        else:
            is_negated = self._accept("not") is not None
            if not is_negated and self._text() != "in":
                return Predicate("==", left.name, (True,))
            self._expect("in")
            predicate = Predicate("in", left.name, self._parse_values())
        return Operation("not", (predicate,)) if is_negated else predicate

    def _parse_values(self) -> tuple[Value, ...]:
        self._expect("(")
        values: list[Value] = []
        while not values or self._accept(","):
            value = self._parse_operand("a value")
            if isinstance(value, Column):
                self._index -= 1
                self._fail("a number or a string in 'single quotes'")
            values.append(value)
        self._expect(")")
        return tuple(values)

    def _parse_operand(self, expected: str) -> Column | Value:
        kind, text = self._kind, self._text()
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
        return Column(text[1:-1].replace('""', '"') if kind == "name" else text)
