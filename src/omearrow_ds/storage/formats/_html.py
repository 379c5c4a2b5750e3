"""Notebook view of collections: facts, thumbnails and columns in one self-contained piece of HTML."""

from __future__ import annotations

import base64
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.formats._pictures import (
    MOST_CHANNELS,
    PERCENTILES,
    Array,
    Names,
    Pictures,
    Thumbnail,
    colours,
    composed,
    contrast,
    left_out,
    png,
    thumbnail,
)

Facts = Sequence[tuple[str, str]]
_SIZE, _PICTURES, _ROWS, _COLUMNS, _KINDS = 128, 6, 3, 12, 4
_MOST_LETTERS, _MOST_NAMES = 60, 100
_UNREADABLE = (ValueError, OverflowError, LookupError, pa.ArrowException)  # for times that Python cannot represent


def as_html(title: str, facts: Facts, pictures: Pictures) -> str:
    """Return HTML with a title, facts, a few images from all over the collection, and the first rows of the columns.

    It inherits the colors of the page, bright or dark, and escapes all text.
    """
    count = len(pictures.image_ids)
    indices = sorted({number * (count - 1) // (_PICTURES - 1) for number in range(_PICTURES)}) if count else []
    thumbnails = [thumbnail(pictures, index, _SIZE) for index in indices]
    descriptions = [*((name, _text(value)) for name, value in facts), ("channels", _legend(thumbnails))]
    rows = "".join(f"<tr><th {_CELL}>{name}</th><td {_CELL}>{value}</td></tr>" for name, value in descriptions if value)
    parts = [
        f"<strong>{_text(title)}</strong>",
        f"<table>{rows}</table>",
        f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:8px 0">{"".join(map(_figure, thumbnails))}</div>',
        f"<div><small>{_how(thumbnails)}</small></div>" if thumbnails else "",
        _columns(pictures) if len(pictures.schema) else "",
    ]
    return f"<div>{''.join(parts)}</div>"


_CELL = 'style="text-align:left;vertical-align:top"'


def kinds(values: Iterable[Any]) -> str:
    """Return the distinct values as text, most frequent first, with their counts if there is more than one."""
    counts = Counter(values).most_common()
    texts = [str(value) if len(counts) == 1 else f"{value} ({number:,})" for value, number in counts[:_KINDS]]
    return ", ".join(texts) + (f", and {len(counts) - _KINDS:,} more" if len(counts) > _KINDS else "")


def shapes(found: Array) -> str:
    """Return a description of shapes (N, 5)."""
    return f"{kinds(' x '.join(map(str, shape)) for shape in found.tolist())} (T x C x Z x Y x X)" if len(found) else ""


def _text(value: object, most: int | None = None) -> str:
    """Return any text, including a path of invalid UTF-8, as escaped HTML."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return escape(text if most is None or len(text) <= most else f"{text[: most - 1]}…")


def _legend(found: Sequence[Thumbnail]) -> str:
    distinct = {tuple(each.names) for each in found if each.problem is None}
    if len(distinct) != 1:
        return "not the same in all images" if distinct else ""
    return "&ensp;".join(_channels(distinct.pop()))


def _channels(names: Names) -> list[str]:
    told = [_text(number if name is None else name, _MOST_LETTERS) for number, name in enumerate(names[:_MOST_NAMES])]
    told += ["..."] if len(names) > _MOST_NAMES else []
    square = "display:inline-block;width:.7em;height:.7em;border:1px solid gray;background"
    shown = [",".join(str(255 * part) for part in colour) for colour in colours(names[:MOST_CHANNELS])]
    swatches = [f'<span style="{square}:rgb({colour})"></span> ' for colour in shown]
    return [swatch + name for swatch, name in zip_longest(swatches, told, fillvalue="")]


def _figure(each: Thumbnail) -> str:
    name = _text(each.image_id, _MOST_LETTERS)
    if each.problem is None:
        planes = each.planes
        ranges = [contrast(plane) for plane in planes]
        picture = base64.b64encode(png(composed(planes, ranges, colours(each.names[:MOST_CHANNELS])))).decode()
        shown = f'<img alt="{name}" src="data:image/png;base64,{picture}" style="max-width:none">'
    else:
        box = f"width:{_SIZE}px;max-height:{_SIZE}px;overflow:auto;border:1px solid gray;overflow-wrap:anywhere"
        shown = f'<div style="{box}"><small>{_text(each.problem)}</small></div>'
    caption = f'<figcaption style="max-width:{_SIZE}px;overflow-wrap:anywhere"><small>{name}</small></figcaption>'
    return f'<figure style="margin:0">{shown}{caption}</figure>'


def _how(found: Sequence[Thumbnail]) -> str:
    low, high = PERCENTILES
    contrasts = f"contrast of each image and channel by itself, percentiles {low:g} to {high:g}"
    return ", ".join(filter(None, [left_out(found), contrasts]))


def _columns(pictures: Pictures) -> str:
    fields = list(pictures.schema)
    ids = [str(image_id) for image_id in pictures.image_ids[:_ROWS]]
    cells = [("", "", ids)]
    for field in fields[:_COLUMNS]:
        try:
            column = pictures.column(field.name)
        except OMEArrowDSError as error:  # The file is gone or was replaced; preloaded pixels can still be displayed.
            return f"<div><small>columns: {_text(error)}</small></div>"
        values = [_value(column, row) for row in range(len(ids))]
        cells.append((field.name, str(field.type), values))
    names = "".join(f"<th {_CELL}>{_text(name, _MOST_LETTERS)}</th>" for name, _, _ in cells)
    types = "".join(f"<td {_CELL}><em>{_text(kind, _MOST_LETTERS)}</em></td>" for _, kind, _ in cells)
    rows = [
        "".join(f"<td {_CELL}>{_text(values[row], _MOST_LETTERS)}</td>" for *_, values in cells)
        for row in range(len(ids))
    ]
    body = "".join(f"<tr>{row}</tr>" for row in (types, *rows))
    table = f'<div style="overflow-x:auto"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
    others = fields[_COLUMNS : _COLUMNS + _MOST_NAMES]
    if not others:
        return table
    listed = ", ".join(f"{_text(other.name, _MOST_LETTERS)} ({_text(other.type, _MOST_LETTERS)})" for other in others)
    unlisted = len(fields) - _COLUMNS - len(others)
    more = f", and {unlisted:,} more" if unlisted else ""
    return f"{table}<details><summary>{len(fields) - _COLUMNS:,} more columns</summary>{listed}{more}</details>"


def _value(column: pa.ChunkedArray, row: int) -> str:
    try:
        value = column[row].as_py()
    except _UNREADABLE:
        return "(not a Python value)"
    return value if isinstance(value, str) else reprlib.repr(value)
