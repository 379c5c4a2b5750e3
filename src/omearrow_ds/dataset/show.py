"""`show`: random images of a collection as a grid of thumbnails with one contrast."""

from __future__ import annotations

import importlib.util
import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from omearrow_ds.axes import AXES, Array
from omearrow_ds.dataset.split import checked_seed
from omearrow_ds.errors import ArgumentError, BackendError
from omearrow_ds.options import SampleSettings, check_integer, check_path, refuse_unknown, refuse_value
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.formats._columns import unknown_column
from omearrow_ds.storage.formats._folder import natural_key
from omearrow_ds.storage.formats._pictures import (
    MAX_IMAGES,
    PERCENTILES,
    Pictures,
    PixelRange,
    Thumbnail,
    colours,
    composed,
    contrast,
    left_out,
    png,
    thumbnail,
)
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.protocol import ImageSource, OpenOptions, Paths, StrPath
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.storage.source import open_source, refuse_opening_again
from omearrow_ds.text import count

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from omearrow_ds.dataset.crop_boxes import DatasetOptions
    from omearrow_ds.dataset.samples import StoredSamples

_MOST_IMAGES = 1024
_WARNED = 3
SIZE = 192  # Size of a thumbnail; this and the following are in pixels.
_GAP, _LINE, _FONT, _LABEL, _LEAST, _NARROWEST = 8, 18, 13, 200, 480, 64
_PAPER, _INK, _FAINT = "#181818", "#ebebeb", "#a0a0a0"
_LETTERS, _LINES = 27, SIZE // _LINE  # Size of an error message in letters and lines.


@dataclass(frozen=True)
class Shown:
    """Result of `show`: a grid of thumbnails, which notebooks display.

    Attributes
    ----------
    path
        Path of the collection.
    png
        The picture as PNG bytes.
    images
        Per image of the picture, in reading order: ``row`` and ``column`` of the grid, ``index``, ``image_id``,
        ``group`` (value of ``by``, or None) and ``problem`` (None if it was read).
    channels
        Per channel: ``name``, ``color`` as ``#rrggbb``, and the stored values of black, ``low``, and of full
        brightness, ``high``.
    total
        Number of images in the collection.
    groups
        Number of distinct values of ``by``, or None without it.
    pixel_range
        Largest value of the uint16 images among the first 64 shown; None without one.
    """

    path: str
    png: bytes
    images: Sequence[dict[str, Any]]
    channels: Sequence[dict[str, Any]]
    total: int
    groups: int | None
    pixel_range: PixelRange | None

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a dictionary that `json.dumps` accepts, without the PNG."""
        named = {name: value for name, value in vars(self).items() if name != "png"}
        return {**named, "pixel_range": None if self.pixel_range is None else self.pixel_range.as_dict()}

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"<a picture of {len(self.images):,} of {count(self.total, 'image')} at {self.path!r}>"


def show(
    images: Paths | ImageSource | StoredSamples,
    out: StrPath | None = None,
    *,
    sample: int = 16,
    by: str | None = None,
    seed: int = 0,
    format: str | None = None,  # noqa: A002  # Public name.
    overwrite: bool = False,
    crop_size: tuple[int, int] | None = None,
    **options: Unpack[DatasetOptions],
) -> Shown:
    """Draw random images of a collection as a grid of thumbnails.

    Each channel has one contrast for all thumbnails.

    The first T and the middle Z are shown. Channels are colored by stain (DAPI blue, GFP green, RFP red), else red,
    green, blue, gray, cyan, magenta, yellow; a single channel is gray. Contrast is from percentile 1 to 99.8 over all
    thumbnails. An unreadable image is shown as its error, with a warning. Needs the extra ``show`` (Pillow).

    Parameters
    ----------
    images
        Path of a collection, an open source, or a dataset. Samples of a dataset are shown before normalization and
        transform.
    out
        ``None``, or the path of a PNG file to write.
    sample
        Number of random images, at most 1,024.
    by
        ``None``, or a column: each of its values gets a row with an equal number of images. If it has more values than
        ``sample``, random values get one image each.
    seed
        Seed of the random choice. The choice is equal on every machine.
    format
        See `open_images`.
    overwrite
        ``False``, or ``True`` to replace the file at ``out``.
    crop_size, **options
        See `open_images` and `OMEArrowDataset`, for example crops around ``objects``. ``channels`` chooses channels by
        name in every format.

    Returns
    -------
    Shown
        The grid. A notebook displays it; ``images`` and ``channels`` describe positions, colors and contrast.

    Raises
    ------
    BackendError
        If Pillow is not installed.
    ArgumentError
        If ``sample``, ``seed`` or a channel is invalid, or the collection is empty.
    ColumnError
        If the column ``by`` does not exist.
    PathExistsError
        If ``out`` exists and ``overwrite`` is False.
    OMEArrowDSError
        Errors of `open_images`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from omearrow_ds import show
    >>> grid = show("plate.arrow", "grid.png", sample=4, by="Metadata_Well")
    >>> Path("grid.png").is_file()
    True
    """
    if importlib.util.find_spec("PIL") is None:
        raise BackendError("show: Pillow is not installed; run pip install 'omearrow-ds[show]'")
    number = check_integer("sample", sample, 1, f"a number of images from 1 to {_MOST_IMAGES:,}", _MOST_IMAGES)
    random = np.random.RandomState(checked_seed(seed))  # Its stream is frozen, unlike that of a Generator.
    target = None if out is None else check_path("out", out).absolute()
    if target is not None:
        if target.suffix.lower() != ".png":
            refuse_value("out", out, allowed="a path that ends in .png")
        check_target(target, overwrite=overwrite, is_file=True)
    refuse_unknown(options, {*OpenOptions.__annotations__, *SampleSettings.__dataclass_fields__} - {"chosen"}, show)
    samples: dict[str, Any] = {"crop_size": crop_size, **options}
    channels = samples.pop("channels", None)
    opening: Any = {name: samples.pop(name) for name in OpenOptions.__annotations__ if name in samples}
    samples = {name: value for name, value in samples.items() if value is not None}
    with ExitStack() as opened:
        previewed: Any = images
        if is_path(images) and samples:
            from omearrow_ds.dataset.dataset import OMEArrowDatasetNumpy  # noqa: PLC0415  # Imports torch, which takes seconds.

            raw: dict[str, Any] = {"preload": False, "axes": AXES, "normalize": False}
            previewed = OMEArrowDatasetNumpy(images, format, **raw, **samples, **opening)
            opened.enter_context(previewed.source)
        elif is_path(images):
            previewed = opened.enter_context(CollectionSource(open_source(images, format, **opening)))
        else:
            refuse_opening_again(opening, "a source or a dataset")
            for name in samples:
                raise ArgumentError("applies only to paths", option=name, remedy="pass it to the dataset instead")
            if format is not None:
                refuse_value("format", format, "applies only to paths", "leave it out")
            if not hasattr(images, "_preview"):
                refuse_value("images", images, allowed="a path, an open source or a dataset")
        grid = _shown(previewed._preview(), number, by, random, channels)
    if target is not None:
        publish(target, lambda path: path.write_bytes(grid.png), overwrite=overwrite)
    return grid


def _shown(pictures: Pictures, sample: int, by: str | None, random: Any, channels: Sequence[str] | None) -> Shown:
    total = len(pictures.image_ids)
    if not total:
        raise ArgumentError("the collection is empty", path=pictures.path, remedy="pass a collection with images")
    rows, groups = _draw_sample(pictures, sample, by, random)
    grid = [(label, [thumbnail(pictures, index, SIZE, channels) for index in indices]) for label, indices in rows]
    thumbnails = [item for _, items in grid for item in items]
    broken = [item for item in thumbnails if item.problem is not None]
    if len(broken) == len(thumbnails) and channels is not None:
        problem = f"{thumbnails[0].image_id} {thumbnails[0].problem}"
        refuse_value("channels", list(channels), problem, path=pictures.path)
    for item in broken[:_WARNED]:
        more = f" ({len(broken):,} such images)" if len(broken) > 1 else ""
        warnings.warn(f"{item.image_id}: {item.problem}{more}", UserWarning, stacklevel=3)
    names, ranges = _channels([item for item in thumbnails if item.problem is None])
    shown_in = colours(names)
    channel_rows = [
        {"name": name, "color": "#" + "".join(f"{255 * part:02x}" for part in colour), "low": low, "high": high}
        for name, colour, (low, high) in zip(names, shown_in, ranges, strict=True)
    ]
    of_total = "" if len(thumbnails) == total else f"{len(thumbnails):,} of "
    heads = [f"{of_total}{count(total, 'image')} of {Path(pictures.path).name}", left_out(thumbnails)]
    pixel_range = PixelRange.join(item.pixel_range for item in thumbnails[:MAX_IMAGES])
    if pixel_range is not None and pixel_range.normalize is not None:
        heads.append(f"pixels: {pixel_range.text}")
    heads.append(f"contrast per channel over all images, percentiles {PERCENTILES[0]:g} to {PERCENTILES[1]:g}:")

    def content(item: Thumbnail) -> Array | str:
        if item.problem is not None:  # Paths without the prefix that is in the title.
            return item.problem.replace(f"{pictures.path}{os.sep}", "")
        return composed(item.planes, ranges, shown_in)

    tiles = [(label, [(item.image_id, content(item)) for item in items]) for label, items in grid]
    image_rows = [
        {
            "row": row,
            "column": column,
            "index": item.index,
            "image_id": item.image_id,
            "group": None if by is None else label,
            "problem": item.problem,
        }
        for row, (label, items) in enumerate(grid)
        for column, item in enumerate(items)
    ]
    picture = png(_draw(list(filter(None, heads)), channel_rows, tiles))
    return Shown(pictures.path, picture, image_rows, channel_rows, total, groups, pixel_range)


def _draw_sample(
    pictures: Pictures, sample: int, by: str | None, random: Any
) -> tuple[list[tuple[str, list[int]]], int | None]:
    """Return the rows of the grid, each a label and its image indices, and the number of groups."""
    if by is None:
        chosen = np.sort(random.permutation(len(pictures.image_ids))[:sample]).tolist()
        wide = math.ceil(math.sqrt(len(chosen)))
        return [("", chosen[start : start + wide]) for start in range(0, len(chosen), wide)], None
    if by not in pictures.schema.names:
        raise unknown_column(by, pictures.schema.names, pictures.path, " for by=")
    members: dict[str, list[int]] = {}
    for index, value in enumerate(pictures.column(by).to_pylist()):
        members.setdefault("(null)" if value is None else str(value), []).append(index)
    labels = sorted(members, key=natural_key)
    picked = [labels[number] for number in sorted(random.permutation(len(labels))[:sample].tolist())]
    num_per_row = max(1, sample // len(labels))
    rows = [(label, np.sort(random.permutation(members[label])[:num_per_row]).tolist()) for label in picked]
    return rows, len(labels)


def _channels(thumbnails: Sequence[Thumbnail]) -> tuple[list[str | None], list[tuple[float, float]]]:
    """Return the name of each channel, None if images differ, and its contrast over all images."""
    names: list[str | None] = []
    ranges = []
    for channel in range(max((len(item.planes) for item in thumbnails), default=0)):
        having = [item for item in thumbnails if channel < len(item.planes)]
        distinct = {item.names[channel] for item in having}
        names.append(distinct.pop() if len(distinct) == 1 else None)
        ranges.append(contrast(np.concatenate([item.planes[channel].ravel() for item in having])))
    return names, ranges


def _draw(
    heads: Sequence[str],
    channels: Sequence[Mapping[str, Any]],
    rows: Sequence[tuple[str, Sequence[tuple[str, Array | str]]]],
) -> Array:
    """Return a picture (y, x, 3), uint8, with lines of text, a legend of channels, and labeled rows of tiles."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415  # Optional.

    font = ImageFont.load_default(_FONT)
    labels = [_fitted(label, font, _LABEL) for label, _ in rows]
    left = _GAP + math.ceil(max(map(font.getlength, labels)))
    left += _GAP if left > _GAP else 0
    contents = [content for _, tiles in rows for _, content in tiles]
    sizes = [(SIZE, SIZE) if isinstance(content, str) else content.shape[:2] for content in contents]
    high, wide = np.max([(_LINE, _NARROWEST), *sizes], axis=0).tolist()
    width = max(_LEAST, left + max(len(tiles) for _, tiles in rows) * (wide + _GAP))
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
    for number, (label, (_, tiles)) in enumerate(zip(labels, rows, strict=True)):
        y = top + _GAP + number * (high + _LINE + _GAP)
        pen.text((_GAP, y + (high - _LINE) // 2), label, _INK, font)
        for column, (image_id, content) in enumerate(tiles):
            x = left + column * (wide + _GAP)
            if isinstance(content, str):
                pen.rectangle((x, y, x + SIZE - 1, y + SIZE - 1), None, _FAINT)
                for line, text in enumerate(textwrap.wrap(content, _LETTERS)[:_LINES]):
                    pen.text((x + 4, y + 4 + line * _LINE), _fitted(text, font, SIZE - _GAP), _INK, font)
            else:
                image.paste(Image.fromarray(content), (x, y))
            pen.text((x, y + high + 1), _fitted(image_id, font, wide), _FAINT, font)
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


def _fitted(text: str, font: FreeTypeFont | ImageFont, width: int) -> str:
    """Return a text that fits one line of ``width`` pixels, truncated with dots if needed."""
    fitted = text = "".join(letter if letter.isprintable() else "?" for letter in text[:_LABEL])
    while text and font.getlength(fitted) > width:
        text = text[:-1]
        fitted = f"{text}..."
    return fitted
