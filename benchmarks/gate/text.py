"""Readable text of numbers, times and tables."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap


def number(value: float) -> str:
    """Return a number as text with three digits, or as an integer from 100: ``1.15``, ``0.0213``, ``1,234``."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.5f}".rstrip("0").rstrip(".")


def duration(microseconds: float | None) -> str:
    """Return a time as text in s, ms or us, or ``"-"`` for None."""
    if microseconds is None:
        return "-"
    unit, size = next(((unit, size) for unit, size in (("s", 1e6), ("ms", 1e3)) if microseconds >= size), ("us", 1.0))
    return f"{number(microseconds / size)} {unit}"


def counted(count: int, noun: str) -> str:
    """Return a count and its noun as text: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most ``width``."""
    return wrap(text, width, subsequent_indent="  ")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, with the first and last column left-aligned and the columns between right-aligned.

    In a table of more columns, a row of two cells is a name and a text that spans all other columns.
    """
    columns = max(map(len, rows))
    rooms = [max((len(row[column]) for row in rows if len(row) == columns), default=0) for column in range(columns)]
    rooms[0] = max(len(row[0]) for row in rows)
    lines = []
    for name, *numbers, last in rows:
        right = [cell.rjust(room) for cell, room in zip(numbers, rooms[1:], strict=False)]
        lines.append("  ".join([name.ljust(rooms[0]), *right, last]).rstrip())
    return lines


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """Return rows as a Markdown table; ``rule`` sets the alignment of columns."""
    under = f"|{'|'.join(rule or ['---'] * len(heading))}|"
    line, *lines = (f"| {' | '.join(row)} |" for row in (heading, *rows))
    return "\n".join([line, under, *lines])
