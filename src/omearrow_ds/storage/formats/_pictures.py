"""Thumbnails of images: one downsampled plane of each, with its channels composed in colors, as PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.formats._pixel_range import PixelRange
from omearrow_ds.text import size as in_units

Array = np.ndarray[Any, Any]
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


@dataclass(frozen=True)
class Pictures:
    """Images to display: the images of a source, or the samples of a dataset before they are scaled."""

    path: str  # Path of the collection.
    image_ids: Sequence[str]  # One id per image.
    schema: pa.Schema  # Names and types of the columns.
    column: Callable[[str], pa.ChunkedArray]  # Reads a column, one value per image.
    image_bytes: Array  # (N,) int64, decoded size of each image
    image: Callable[[int], Array]  # returns an image as (T, C, Z, Y, X), which is not modified
    channels: Callable[[int], Names]  # returns the channel names of an image


@dataclass(frozen=True)
class Thumbnail:
    """Downsampled first time point and middle Z plane of an image."""

    # index, image_id: identify the image
    index: int
    image_id: str
    shape: tuple[int, ...]  # (T, C, Z, Y, X) of the whole image
    # (C, y, x) float64, for each channel the means of square blocks of pixels, in stored values; limited to the
    # first `MOST_CHANNELS` channels
    planes: Array
    names: Names  # names of the channels, None for one without
    problem: str | None = None  # why the image could not be read, with no planes then
    pixel_range: PixelRange | None = None  # The range of all channels and planes.


def thumbnail(pictures: Pictures, index: int, size: int, channels: Sequence[str] | None = None) -> Thumbnail:
    """Downsample an image to at most ``size`` pixels in width and height; much smaller images are magnified.

    ``channels`` names the channels to show, in order, unnamed ones by number; None shows all.
    """
    image_id = str(pictures.image_ids[index])

    def without(problem: str) -> Thumbnail:
        return Thumbnail(index, image_id, (), np.zeros((0, 0, 0)), (), problem)

    if pictures.image_bytes[index] > _LARGEST_BYTES:
        return without(f"too large for a preview: {in_units(int(pictures.image_bytes[index]))}")
    try:
        image = pictures.image(index)
        names = _names(pictures, index, image.shape[1])
        known = [str(number) if name is None else name for number, name in enumerate(names)]
        if channels is not None and not set(channels) <= set(known):
            return without(f"has the channels {known}, expected {list(channels)}")
        indices = list(range(len(known))) if channels is None else [known.index(name) for name in channels]
        middle = image.shape[2] // 2
        planes = [_small(image[0, channel, middle], size) for channel in indices[:MOST_CHANNELS]]
    except (OMEArrowDSError, OSError, MemoryError) as error:
        return without(str(error) or type(error).__name__)
    shown_names = [names[channel] for channel in indices]
    return Thumbnail(
        index, image_id, image.shape, np.stack(planes), shown_names, pixel_range=PixelRange.measure([image])
    )


def _names(pictures: Pictures, index: int, size_c: int) -> list[str | None]:
    """Return the names of an image's channels, or None for each if they cannot be read but the pixels can."""
    try:
        names = list(pictures.channels(index))
    except (OMEArrowDSError, OSError):
        names = []
    return names if len(names) == size_c else [None] * size_c


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
    whole = [picture for picture in thumbnails if picture.problem is None]
    shapes = [[picture.shape[0], picture.shape[2], len(picture.names)] for picture in whole]
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
    found: list[Colour | None] = []
    for name in names:
        told = next((colour for colour, stain in _STAINS if name and stain.search(name)), None)
        found.append(None if told in found else told)
    left = iter([colour for colour in _COLOURS if colour not in found])
    return [colour or next(left) for colour in found]


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
