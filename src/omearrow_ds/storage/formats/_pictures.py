"""Notebook view of collections: thumbnails with channels in colors, facts and columns, in one piece of HTML."""

from __future__ import annotations

import base64
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import Array
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.text import count
from omearrow_ds.text import size as in_units

HIGH = 4095  # Largest value of 12 bits.
MAX_IMAGES = 64
UINT16 = np.dtype(np.uint16)
_LARGEST = np.iinfo(UINT16).max
Facts = Sequence[tuple[str, str]]
_SIZE, _PICTURES, _ROWS, _COLUMNS, _KINDS = 128, 6, 3, 12, 4
_MOST_LETTERS, _MOST_NAMES = 60, 100
_UNREADABLE = (ValueError, OverflowError, LookupError, pa.ArrowException)  # for times that Python cannot represent
_CELL = 'style="text-align:left;vertical-align:top"'
Names = Sequence[str | None]
Colour = tuple[int, int, int]
PERCENTILES = (1.0, 99.8)  # contrast limits: values below are black, values above have full brightness
MOST_CHANNELS = 7  # the number of colors
_LARGEST_BYTES = 2**30  # largest image that is read for a thumbnail
_MAGNIFIED = 8  # maximum factor for images that are smaller than their thumbnail

# The usual colors of common stains; other channels get the remaining colors of ImageJ, in its order. A pattern
# is compared from the start of a word: ``DNA``, ``OrigDNA``, ``DAPI 0``.
_BLUE, _GREEN, _RED, _GREY = (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)
_COLOURS: tuple[Colour, ...] = (_RED, _GREEN, _BLUE, _GREY, (0, 1, 1), (1, 0, 1), (1, 1, 0))
_STAINS = (
    (_BLUE, re.compile(r"dapi|hoechst|dna|nucle(us|i)", re.IGNORECASE)),
    (_GREEN, re.compile(r"e?gfp|fitc|af488|alexa ?(fluor)? ?488|(?<![a-z])er(?![a-z])", re.IGNORECASE)),
    (_RED, re.compile(r"rfp|tritc|mcherry|tx ?red|texas|cy3|mito", re.IGNORECASE)),
)


class PixelRange(NamedTuple):
    """Largest value of a few uint16 images, and the scaling of 12-bit pixels."""

    largest: int
    num_images: int

    @classmethod
    def measure(cls, images: Iterable[Array], limit: int = _LARGEST) -> PixelRange | None:
        """Measure the uint16 images among the first 64, until a value exceeds ``limit``; None if no image is uint16."""
        largest = num_images = 0
        for image in islice(images, MAX_IMAGES):
            if image.dtype == UINT16:
                largest, num_images = max(largest, int(image.max(initial=0))), num_images + 1
            if largest > limit:
                break
        return cls(largest, num_images) if num_images else None

    @classmethod
    def join(cls, ranges: Iterable[PixelRange | None]) -> PixelRange | None:
        known = [pixel_range for pixel_range in ranges if pixel_range is not None]
        return cls(max(largest for largest, _ in known), sum(num for _, num in known)) if known else None

    @property
    def normalize(self) -> dict[str, int] | None:
        """Value of ``normalize=`` for 12-bit pixels; None if the images have larger values, or are black."""
        return {"low": 0, "high": HIGH} if 0 < self.largest <= HIGH else None

    @property
    def text(self) -> str:
        """Description of the largest value and, if this has at most 12 bits, the option that scales such images."""
        measured = f"largest value {self.largest:,} in {count(self.num_images, 'uint16 image')}"
        if self.normalize is None:
            return measured
        scaled = self.largest / _LARGEST
        return f'{measured}, {scaled:.2g} with normalize=True; pass normalize={{"low": 0, "high": {HIGH}}}'

    def as_dict(self) -> dict[str, Any]:
        return {"largest": self.largest, "images": self.num_images, "normalize": self.normalize}


class Pictures(NamedTuple):
    """Images to display: the images of a source, or the samples of a dataset before they are scaled."""

    path: str  # Path of the collection.
    image_ids: Sequence[str]
    schema: pa.Schema  # Names and types of the columns.
    column: Callable[[str], pa.ChunkedArray]  # Reads a column, one value per image.
    image_bytes: Array  # (N,) int64, decoded size of each image.
    image: Callable[[int], Array]  # Returns an image as (T, C, Z, Y, X), which is not modified.
    channels: Callable[[int], Names]  # Returns the channel names of an image.


@dataclass(frozen=True)
class Thumbnail:
    """Downsampled first time point and middle Z plane of an image."""

    index: int
    image_id: str
    shape: tuple[int, ...]  # (T, C, Z, Y, X) of the whole image.
    planes: Array  # (C, y, x) float64, means of square blocks of pixels; limited to the first `MOST_CHANNELS` channels.
    names: Names  # One per channel, or None.
    problem: str | None = None  # Why the image could not be read, with no planes then.
    pixel_range: PixelRange | None = None  # The range of all channels and planes.


def thumbnail(pictures: Pictures, index: int, size: int, channels: Sequence[str] | None = None) -> Thumbnail:
    """Downsample an image to at most ``size`` pixels in width and height; much smaller images are magnified."""
    # ``channels`` names the channels to show, in order, unnamed ones by number; None shows all.
    image_id = str(pictures.image_ids[index])

    def without(problem: str) -> Thumbnail:
        return Thumbnail(index, image_id, (), np.zeros((0, 0, 0)), (), problem)

    if pictures.image_bytes[index] > _LARGEST_BYTES:
        return without(f"too large for a preview: {in_units(int(pictures.image_bytes[index]))}")
    try:
        image = pictures.image(index)
        names = list[str | None]()
        with suppress(OMEArrowDSError, OSError):  # Pixels are shown without names.
            names += pictures.channels(index)
        names = names if len(names) == image.shape[1] else [None] * image.shape[1]
        known = [str(number) if name is None else name for number, name in enumerate(names)]
        if channels is not None and not set(channels) <= set(known):
            return without(f"has the channels {known}, expected {list(channels)}")
        indices = list(range(len(known))) if channels is None else [known.index(name) for name in channels]
        middle = image.shape[2] // 2
        planes = [_small(image[0, channel, middle], size) for channel in indices[:MOST_CHANNELS]]
    except (OMEArrowDSError, OSError, MemoryError) as error:
        return without(str(error) or type(error).__name__)
    shown_names, pixel_range = [names[channel] for channel in indices], PixelRange.measure([image])
    return Thumbnail(index, image_id, image.shape, np.stack(planes), shown_names, pixel_range=pixel_range)


def _small(plane: Array, size: int) -> Array:
    height, width = plane.shape
    step = max(1, -(-max(height, width) // size))
    down, across = min(step, height), min(step, width)
    rows, columns = height // down, width // across
    blocks = plane[: rows * down, : columns * across].reshape(rows, down, columns, across)
    with np.errstate(all="ignore"):  # pixels may be infinite
        small: Array = blocks.mean(axis=(1, 3), dtype=np.float64)
    times = min(size // max(rows, columns), _MAGNIFIED)
    return small if times < 2 else small.repeat(times, axis=0).repeat(times, axis=1)


def left_out(thumbnails: Sequence[Thumbnail]) -> str:
    """Describe the time points, Z planes and channels that thumbnails omit; empty if they show everything."""
    shapes = [[thumb.shape[0], thumb.shape[2], len(thumb.names)] for thumb in thumbnails if thumb.problem is None]
    sizes = np.array(shapes or [[1, 1, 1]]).max(axis=0)
    parts = (
        f"the first of {sizes[0]} T" if sizes[0] > 1 else "",
        f"the middle one of {sizes[1]} Z" if sizes[1] > 1 else "",
        f"the first {MOST_CHANNELS} of {sizes[2]} channels" if sizes[2] > MOST_CHANNELS else "",
    )
    return ", ".join(filter(None, parts))


def contrast(values: Array) -> tuple[float, float]:
    """Return the values shown as black and as full brightness; non-finite pixels are ignored."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = np.percentile(finite, PERCENTILES).tolist()
    if not low < high:  # few pixels differ from all others
        low, high = float(finite.min()), float(finite.max())
    return (low, high) if low < high else (low, float(np.nextafter(low, np.inf)))


def colours(names: Names) -> list[Colour]:
    """Return a color per channel, by its name if it is a known stain; a single channel is gray."""
    if len(names) == 1:
        return [_GREY]
    known: list[Colour | None] = []
    for name in names:
        stain = next((colour for colour, pattern in _STAINS if name and pattern.search(name)), None)
        known.append(None if stain in known else stain)
    others = iter([colour for colour in _COLOURS if colour not in known])
    return [colour or next(others) for colour in known]


def composed(planes: Array, ranges: Sequence[tuple[float, float]], shown_in: Sequence[Colour]) -> Array:
    """Return the sum of all channels (C, y, x), each with its contrast and color, as a uint8 RGB image (y, x, 3)."""
    light = np.zeros((*planes.shape[1:], 3))
    with np.errstate(all="ignore"):
        for plane, (low, high), colour in zip(planes, ranges, shown_in, strict=True):
            level = np.nan_to_num(np.clip((plane - low) / (high - low), 0, 1))
            light += level[..., None] * np.array(colour, np.float64)
    return np.round(np.clip(light, 0, 1) * 255).astype(np.uint8)


def png(picture: Array) -> bytes:
    """Return a uint8 RGB image (y, x, 3) as the bytes of a PNG file."""
    import imagecodecs  # noqa: PLC0415  # a backend

    return bytes(imagecodecs.png_encode(np.ascontiguousarray(picture), level=9))


def as_html(title: str, facts: Facts, pictures: Pictures) -> str:
    """Return HTML with a title, facts, a few images from all over the collection, and the first rows of the columns."""
    # It inherits the colors of the page, bright or dark, and escapes all text.
    last = len(pictures.image_ids) - 1
    indices = sorted({number * last // (_PICTURES - 1) for number in range(_PICTURES)}) if last >= 0 else []
    thumbnails = [thumbnail(pictures, index, _SIZE) for index in indices]
    descriptions = [*((name, _text(value)) for name, value in facts), ("channels", _legend(thumbnails))]
    rows = "".join(f"<tr><th {_CELL}>{name}</th><td {_CELL}>{value}</td></tr>" for name, value in descriptions if value)
    low, high = PERCENTILES
    contrasts = f"contrast of each image and channel by itself, percentiles {low:g} to {high:g}"
    remarks = ", ".join(filter(None, [left_out(thumbnails), contrasts]))
    parts = [
        f"<strong>{_text(title)}</strong>",
        f"<table>{rows}</table>",
        f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:8px 0">{"".join(map(_figure, thumbnails))}</div>',
        f"<div><small>{remarks}</small></div>" if thumbnails else "",
        _columns(pictures) if len(pictures.schema) else "",
    ]
    return f"<div>{''.join(parts)}</div>"


def kinds(values: Iterable[Any]) -> str:
    counts = Counter(values).most_common()
    texts = [str(value) if len(counts) == 1 else f"{value} ({number:,})" for value, number in counts[:_KINDS]]
    return ", ".join(texts) + (f", and {len(counts) - _KINDS:,} more" if len(counts) > _KINDS else "")


def shapes(sizes: Array) -> str:
    return f"{kinds(' x '.join(map(str, shape)) for shape in sizes.tolist())} (T x C x Z x Y x X)" if len(sizes) else ""


def _text(value: object, most: int | None = None) -> str:
    """Return any text, including a path of invalid UTF-8, as escaped HTML."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return escape(text if most is None or len(text) <= most else f"{text[: most - 1]}…")


def _legend(thumbnails: Sequence[Thumbnail]) -> str:
    distinct = {tuple(thumbnail.names) for thumbnail in thumbnails if thumbnail.problem is None}
    if len(distinct) != 1:
        return "not the same in all images" if distinct else ""
    (names,) = distinct
    labels = [_text(number if name is None else name, _MOST_LETTERS) for number, name in enumerate(names[:_MOST_NAMES])]
    labels += ["..."] if len(names) > _MOST_NAMES else []
    square = "display:inline-block;width:.7em;height:.7em;border:1px solid gray;background"
    rgb_values = [",".join(str(255 * part) for part in colour) for colour in colours(names[:MOST_CHANNELS])]
    swatches = [f'<span style="{square}:rgb({colour})"></span> ' for colour in rgb_values]
    return "&ensp;".join(swatch + name for swatch, name in zip_longest(swatches, labels, fillvalue=""))


def _figure(thumbnail: Thumbnail) -> str:
    name = _text(thumbnail.image_id, _MOST_LETTERS)
    if thumbnail.problem is None:
        planes = thumbnail.planes
        ranges = [contrast(plane) for plane in planes]
        picture = base64.b64encode(png(composed(planes, ranges, colours(thumbnail.names[:MOST_CHANNELS])))).decode()
        body = f'<img alt="{name}" src="data:image/png;base64,{picture}" style="max-width:none">'
    else:
        box = f"width:{_SIZE}px;max-height:{_SIZE}px;overflow:auto;border:1px solid gray;overflow-wrap:anywhere"
        body = f'<div style="{box}"><small>{_text(thumbnail.problem)}</small></div>'
    caption = f'<figcaption style="max-width:{_SIZE}px;overflow-wrap:anywhere"><small>{name}</small></figcaption>'
    return f'<figure style="margin:0">{body}{caption}</figure>'


def _columns(pictures: Pictures) -> str:
    fields = list(pictures.schema)
    ids = [str(image_id) for image_id in pictures.image_ids[:_ROWS]]
    columns = [["", "", *ids]]
    for field in fields[:_COLUMNS]:
        try:
            column = pictures.column(field.name)
        except OMEArrowDSError as error:  # The file is gone or was replaced; preloaded pixels can still be displayed.
            return f"<div><small>columns: {_text(error)}</small></div>"
        columns.append([field.name, str(field.type), *(_value(column, row) for row in range(len(ids)))])
    names, types, *rows = ([_text(cell, _MOST_LETTERS) for cell in row] for row in zip(*columns, strict=True))
    head = "".join(f"<th {_CELL}>{name}</th>" for name in names)
    cells = ([f"<em>{kind}</em>" for kind in types], *rows)
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{cell}</td>' for cell in row)}</tr>" for row in cells)
    table = f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
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
