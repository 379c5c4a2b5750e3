"""Sizes, times, counts and tables as people read them, and options as they type them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(n_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it: ``20.5 MB`` (decimal, as disks and the rest of it count)."""
    if n_bytes < 1000:
        return f"{int(n_bytes)} {'byte' if n_bytes == 1 else 'bytes'}"
    unit = 0
    while n_bytes >= 999.5 and unit < len(_SIZES) - 1:
        n_bytes /= 1000
        unit += 1
    return f"{n_bytes:.3g} {_SIZES[unit]}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: ``2.1 ms``, ``12.3 s``, ``4.17 min``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5995 else f"{seconds / 3600:,.3g} h"


def count(n: int, what: str) -> str:
    """Return a number of things: ``1 image``, ``12,000 images``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines: names and the words that come last to the left, the numbers between to the right.

    A row of two cells in a table of more is a name, and words that run over all other columns.
    """
    columns = max(map(len, rows))
    widths = [max((len(row[at]) for row in rows if len(row) == columns), default=0) for at in range(columns)]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for name, *numbers, last in rows:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)]
        lines.append("  ".join([name.ljust(widths[0]), *right, last]).rstrip())
    return lines


def as_keywords(options: Mapping[str, Any]) -> list[str]:
    """Return keywords of a function as they are typed in Python, without those that are None."""
    return [f"{name}={value!r}" for name, value in options.items() if value is not None]


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the same as words of a command line, where several values are an option each."""
    words = []
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [] if each is None else [f"--{name.replace('_', '-')}", str(each)]
    return words
