"""Human-readable sizes, times, counts and tables, and options as Python code or flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

RATES = "write bits/s such as 1Gb or 1Gbit, or bytes/s such as 100MB"
TIMES = "write a time such as 20ms or 0.1s"
_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(n_bytes: float) -> str:
    """Return a number of bytes in a suitable decimal unit: ``20.5 MB``."""
    if n_bytes < 1000:
        return f"{int(n_bytes)} {'byte' if n_bytes == 1 else 'bytes'}"
    unit = 0
    while n_bytes >= 999.5 and unit < len(_SIZES) - 1:
        n_bytes /= 1000
        unit += 1
    return f"{n_bytes:.3g} {_SIZES[unit]}"


def duration(seconds: float) -> str:
    """Return a time in a suitable unit: ``2.1 ms``, ``12.3 s``, ``4.17 min``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5995 else f"{seconds / 3600:,.3g} h"


def as_rate(text: str) -> float | None:
    """Return bytes/s from a string such as ``1Gb``, ``1Gbit/s`` (bits) or ``100MB`` (bytes), None if it is invalid."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(b|bit|B)(?:ps|/s)?", text.strip())
    if match is None:
        return None
    return float(match[1]) * 1000.0 ** " kMGT".index(match[2] or " ") / (1 if match[3] == "B" else 8)


def as_seconds(text: str) -> float | None:
    """Return seconds from a string such as ``20ms`` or ``0.5s``, or None if it is invalid."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)", text.strip())
    return None if match is None else float(match[1]) * {"ms": 1e-3, "s": 1.0}.get(match[2], 1e-6)


def count(n: int, noun: str) -> str:
    """Return a number of things: ``1 image``, ``12,000 images``, ``2 batches``."""
    return f"{n:,} {noun}{'' if n == 1 else 'es' if noun.endswith('tch') else 's'}"


def nearest(name: str, known: Iterable[str], limit: int) -> list[str]:
    """Return at most ``limit`` known names that are similar to a name, ignoring upper and lower case."""
    by_lower = {other.lower(): other for other in known}
    return [by_lower[lower] for lower in difflib.get_close_matches(name.lower(), by_lower, limit)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines; the first and last columns are left-aligned, the columns between right-aligned.

    In a row of only two cells, the second one spans all other columns.
    """
    num_columns, first = max(map(len, rows)), max(len(name) for name, *_ in rows)
    columns = zip(*(row for row in rows if len(row) == num_columns), strict=True)
    _, *widths = [max(map(len, cells)) for cells in columns]
    lines = ([name.ljust(first), *map(str.rjust, numbers, widths), last] for name, *numbers, last in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


class PythonName(str):
    """Name in Python code, which `as_keywords` writes without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def as_keywords(options: Mapping[str, Any]) -> list[str]:
    """Return options as Python keywords, without those that are None."""
    return [f"{name}={value!r}" for name, value in options.items() if value is not None]


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line, with one flag per item for lists and mappings."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = [f"{key}={item}" for key, item in value.items()] if isinstance(value, Mapping) else value
        for item in values if isinstance(values, list | tuple) else [values]:
            if is_dataclass(item):  # A record of options, such as `Storage`.
                words += as_flags(vars(item))
            elif item is not None and item is not False:
                words += [flag] if item is True else [flag, str(item)]
    return words
