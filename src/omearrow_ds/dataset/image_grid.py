"""Grid of thumbnails with labels, drawn by Pillow because of its text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

Array = np.ndarray[Any, Any]
SIZE = 192  # Size of a thumbnail; this and the following are in pixels.
_GAP, _LINE, _FONT, _LABEL, _LEAST, _NARROWEST = 8, 18, 13, 200, 480, 64
_PAPER, _INK, _FAINT = "#181818", "#ebebeb", "#a0a0a0"
_LETTERS, _LINES = 27, SIZE // _LINE  # Size of an error message in letters and lines.


class Tile(NamedTuple):
    """Label and content of a tile of the grid: its picture (y, x, 3), uint8, or its error message."""

    label: str
    content: Array | str


def draw(
    heads: Sequence[str], channels: Sequence[Mapping[str, Any]], labels: Sequence[str], rows: Sequence[Sequence[Tile]]
) -> Array:
    """Return a picture (y, x, 3), uint8, with lines of text, a legend of channels, and labeled rows of tiles."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415  # Optional.

    font = ImageFont.load_default(_FONT)
    of_rows = [_fitted(label, font, _LABEL) for label in labels]
    left = _GAP + math.ceil(max(map(font.getlength, of_rows)))
    left += _GAP if left > _GAP else 0
    sizes = [tile.content.shape for row in rows for tile in row if not isinstance(tile.content, str)]
    high, wide = (SIZE, SIZE) if len(sizes) < sum(map(len, rows)) else map(max, list(zip(*sizes, strict=True))[:2])
    high, wide = max(high, _LINE), max(wide, _NARROWEST)
    width = max(_LEAST, left + max(map(len, rows)) * (wide + _GAP))
    legend = _legend(channels, font, width)
    top = _GAP + _LINE * (len(heads) + len({y for _, y, *_ in legend}))
    image = Image.new("RGB", (width, top + _GAP + len(rows) * (high + _LINE + _GAP)), _PAPER)
    pen = ImageDraw.Draw(image)
    for line, head in enumerate(heads):
        pen.text((_GAP, _GAP + line * _LINE), _fitted(head, font, width - 2 * _GAP), _INK, font)
    for x, line, text, colour in legend:
        y = _GAP + (len(heads) + line) * _LINE
        pen.rectangle((x, y + 3, x + 10, y + 13), colour, _FAINT)
        pen.text((x + 16, y), text, _INK, font)
    for number, (label, tiles) in enumerate(zip(of_rows, rows, strict=True)):
        y = top + _GAP + number * (high + _LINE + _GAP)
        pen.text((_GAP, y + (high - _LINE) // 2), label, _INK, font)
        for column, tile in enumerate(tiles):
            x = left + column * (wide + _GAP)
            if isinstance(tile.content, str):
                _complain(pen, font, (x, y), tile.content)
            else:
                image.paste(Image.fromarray(tile.content), (x, y))
            pen.text((x, y + high + 1), _fitted(tile.label, font, wide), _FAINT, font)
    return np.asarray(image)


def _legend(
    channels: Sequence[Mapping[str, Any]], font: FreeTypeFont | ImageFont, width: int
) -> list[tuple[int, int, str, str]]:
    """Return x position, line, text and color of the legend of each channel."""
    positions = []
    x, line = _GAP, 0
    for number, channel in enumerate(channels):
        name = number if channel["name"] is None else channel["name"]
        text = _fitted(f"{name}: {channel['low']:.5g} to {channel['high']:.5g}", font, width - 4 * _GAP)
        wide = math.ceil(font.getlength(text)) + 16 + 3 * _GAP
        if x > _GAP and x + wide > width:
            x, line = _GAP, line + 1
        positions.append((x, line, text, str(channel["color"])))
        x += wide
    return positions


def _complain(pen: ImageDraw, font: FreeTypeFont | ImageFont, corner: tuple[int, int], problem: str) -> None:
    x, y = corner
    pen.rectangle((x, y, x + SIZE - 1, y + SIZE - 1), None, _FAINT)
    for line, text in enumerate(textwrap.wrap(problem, _LETTERS)[:_LINES]):
        pen.text((x + 4, y + 4 + line * _LINE), _fitted(text, font, SIZE - _GAP), _INK, font)


def _fitted(text: str, font: FreeTypeFont | ImageFont, width: int) -> str:
    """Return a text that fits one line of ``width`` pixels, truncated with dots if needed."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text[:_LABEL])
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
