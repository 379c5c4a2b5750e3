"""Crop boxes of samples in images: around objects, in the center, on a grid or at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple, Self, TypedDict, cast

import numpy as np
import pyarrow as pa
import torch

from omearrow_ds.axes import Cut, checked_size
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.kernels.crops import crop, places_of
from omearrow_ds.kernels.scaling import Divisor, Scaling, scale
from omearrow_ds.options import PADS, SampleSettings, check_choice
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.objects import CropRows, Objects, ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.text import count

Boxes = Array  # (5, n) int64: image, top, left, height and width in pixels; boxes may extend beyond images.


class CropOptions(TypedDict, total=False):
    objects: Any
    center: Sequence[str] | None
    box: Sequence[str] | bool | None
    crop: Literal["center", "random", "grid"] | None
    overlap: int | tuple[int, int] | None
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None
    resize: tuple[int, int] | None
    pad_to: tuple[int, int] | None


class DatasetOptions(OpenOptions, CropOptions, total=False):
    """Keywords of a dataset in addition to its signature: options of opening and positions of samples."""


def split_options(options: DatasetOptions) -> tuple[dict[str, Any], OpenOptions]:
    names = CropOptions.__annotations__
    opening = {name: value for name, value in options.items() if value is not None or name not in names}
    crops = {name: opening.pop(name) for name in names if name in opening}
    return crops, cast(OpenOptions, opening)


class PlacedBox(NamedTuple):
    """Box in an image, or up to a pixel beyond it, and the region of the image that it shows."""

    field: int  # Index of the image.
    sides: tuple[int, int, int, int]  # First row and column of the region, and those after the last.
    corner: tuple[int, int]  # First row and column of the box, counted from those of the region.
    is_inside: bool  # Whether the box equals the region.

    @classmethod
    def of(cls, box: Sequence[int], shape: Array, pad: str) -> Self:
        field, top, left, height, width = box
        size_y, size_x = shape[3:].tolist()
        y0, x0 = min(max(top, 0), size_y - 1), min(max(left, 0), size_x - 1)  # A region has at least one pixel.
        y1, x1 = max(min(top + height, size_y), y0 + 1), max(min(left + width, size_x), x0 + 1)
        is_inside = (y0, x0, y1, x1) == (top, left, top + height, left + width)
        if pad in ("edge", "reflect") and not is_inside:  # A box beyond the image shows its edge.
            rows = np.arange(size_y)[places_of(top, height, size_y, pad)]
            columns = np.arange(size_x)[places_of(left, width, size_x, pad)]
            y0, x0, y1, x1 = int(rows.min()), int(columns.min()), int(rows.max()) + 1, int(columns.max()) + 1
        return cls(field, (y0, x0, y1, x1), (top - y0, left - x0), is_inside)

    def write(self, region: Array, divisor: Divisor, out: Array, pad: str) -> None:
        y0, x0, y1, x1 = self.sides
        divisor = divisor.at(slice(y0, y1), slice(x0, x1)) if isinstance(divisor, Scaling) else divisor
        if pad != "constant" and not self.is_inside:
            crop(region, *self.corner, out, divisor, pad)
            return
        if not self.is_inside:  # Without further calls.
            out[...] = 0
            top, left = self.corner
            out = out[..., max(-top, 0) : max(y1 - y0 - top, 0), max(-left, 0) : max(x1 - x0 - left, 0)]
            if not out.size:  # The box is beyond the image.
                return
        scale(region, divisor, out)


def shown_indices(cut: Cut, shape: Sequence[int]) -> list[Array]:
    """Return the indices along each axis of an image of ``shape`` that a cut shows, in its order."""
    indices = [np.arange(size)[part] for part, size in zip(cut.slices, shape, strict=True)]
    for axis, pick in cut.picks:
        indices[axis] = indices[axis][pick]
    return indices


class CropResize(NamedTuple):
    """Conversion of crops to one ``size`` (height, width), either by scaling or by padding with zeros on all sides."""

    size: tuple[int, int]
    scales: bool

    def __call__(self, crop: Array, sample: Array, *, smooth: bool) -> None:
        """Write a crop to a sample, both (T, C, Z, Y, X); scaling is bilinear if ``smooth``, else by nearest pixel."""
        if not self.scales:
            sample[...] = 0
            top, left = ((to - length) // 2 for to, length in zip(self.size, crop.shape[3:], strict=True))
            sample[..., top : top + crop.shape[3], left : left + crop.shape[4]] = crop
        elif smooth:
            stack = torch.from_numpy(crop.reshape(1, -1, *crop.shape[3:]))
            scaled = torch.nn.functional.interpolate(stack, self.size, mode="bilinear", antialias=True)
            sample[...] = scaled.numpy().reshape(sample.shape)
        else:
            sides = zip(self.size, crop.shape[3:], strict=True)
            y, x = ((2 * np.arange(to) + 1) * length // (2 * to) for to, length in sides)  # Pixel centers.
            sample[...] = crop[..., y, :][..., x]

    def moved(self, pixel: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
        """Return the row and column in the sample of the pixel that was at ``pixel`` in a crop of ``shape``."""
        sides = zip(pixel, shape, self.size, strict=True)
        y, x = (
            (2 * coordinate + 1) * to // (2 * length) if self.scales else coordinate + (to - length) // 2
            for coordinate, length, to in sides
        )
        return y, x


@dataclass(frozen=True, eq=False)
class CropWindows:
    """One crop box per sample."""

    corners: Array  # (3, n) int32: image, top and left.
    sizes: Array  # (2, n) int32: height and width; (2, 1) if all are equal.
    pad: str = "constant"  # Pixels beyond an image's edge: constant (0), edge or reflect, see `numpy.pad`.
    num_dropped: int = 0  # Number of boxes that were left out because they extend beyond an edge.
    # (N, 2), the number of rows and columns at which a box is drawn at each access, from torch's global generator; None
    # for fixed boxes.
    ranges: Array | None = None
    rows: CropRows | None = None  # Ids and columns of crops, or None for those of the images.
    resize: CropResize | None = None

    def __post_init__(self) -> None:
        sizes = self.sizes[:, :1] if (self.sizes == self.sizes[:, :1]).all() else self.sizes
        for name, values in (("corners", self.corners), ("sizes", sizes)):
            object.__setattr__(self, name, values.astype(np.int32, copy=False))

    def __len__(self) -> int:
        return len(self.corners[0])

    @cached_property
    def box_size(self) -> tuple[int, int] | None:
        """(height, width) of all boxes, or None if they differ."""
        return self.size_of(0) if self.sizes.shape[1] == 1 else None

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of all samples, or None if they differ."""
        return self.box_size if self.resize is None else self.resize.size

    def size_of(self, position: int) -> tuple[int, int]:
        height, width = self.sizes[:, position if self.sizes.shape[1] > 1 else 0].tolist()
        return height, width

    def are_inside(self, shape: Sequence[int]) -> bool:
        first = self.corners[1:]
        return bool(((first >= 0) & (first + self.sizes <= np.reshape(shape, (2, 1)))).all())

    def take(self, positions: Sequence[int] | Array) -> Boxes:
        """Return the boxes of samples; for each random box, two numbers are drawn."""
        indices = np.asarray(positions, np.intp)
        boxes = np.empty((5, len(indices)), np.int64)
        boxes[:3] = self.corners.take(indices, axis=1)
        boxes[3:] = self.sizes if self.box_size is not None else self.sizes.take(indices, axis=1)
        if self.ranges is not None:
            ranges = self.ranges[indices]
            drawn = torch.rand((len(ranges), 2), dtype=torch.float64).numpy()
            corners = np.minimum((drawn * ranges).astype(np.int64), ranges - 1).T
            boxes[1:3] = np.where(boxes[1:3] < 0, boxes[1:3], corners)
        return boxes


def make_crops(source: Images, options: SampleSettings, settings: ObjectSettings) -> tuple[Images, CropWindows]:
    """Return the crops that options select, and the source of their images; refuse options or sizes that do not fit."""
    _refuse(options)
    size = None if options.crop_size is None else checked_size(options.crop_size)
    if options.objects is None:
        assert size is not None
        return source, _crops_without_objects(source, size, options)
    source, located = settings.open(source, options.objects, options.center, options.box)
    crops, is_inside = boxes_around_objects(located, source.header.shapes, size, options.pad)
    rows = CropRows.of_objects(source.header.columns, located.keep(is_inside))
    option, sample_size = ("pad_to", options.pad_to) if options.resize is None else ("resize", options.resize)
    if sample_size is None:
        return source, replace(crops, rows=rows)
    resize = CropResize(checked_size(sample_size, option), options.resize is not None)
    if resize.scales and options.normalize is False:
        problem = "scaled crops are floats, but normalize=False keeps the stored dtype"
        raise ArgumentError(problem, option="resize", remedy="leave out one of them")
    too_large = (crops.sizes > np.reshape(resize.size, (2, 1))).any(axis=0)
    if too_large.any() and not resize.scales:
        position = int(too_large.argmax())
        height, width = crops.size_of(position)
        problem = f"{rows.path}: the box of {rows.image_ids[position]!r} has {height} x {width} pixels"
        raise AxesError(f"{problem} but pad_to={resize.size}; raise pad_to, or pass resize= instead")
    return source, replace(crops, rows=rows, resize=resize)


def _crops_without_objects(source: Images, size: tuple[int, int], options: SampleSettings) -> CropWindows:
    header = source.header
    pad, shapes = options.pad, header.shapes
    margins = shapes[:, 3:] - size
    too_small = (margins < 0).any(axis=1)
    if too_small.any() and pad is None:
        first = int(too_small.argmax())
        height, width = shapes[first, 3:].tolist()
        problem = f"crop_size={size} is larger than image {first} of {height} x {width} pixels"
        num_images = count(int(too_small.sum()), "such image")
        raise AxesError(f"{header.path}: {problem} ({num_images}); lower crop_size, pass pad=, or remove the image")
    if options.crop != "grid":
        centered = _boxes_of_size(np.arange(len(shapes)), margins // 2, size, pad)
        return replace(centered, ranges=np.maximum(margins, 0) + 1) if options.crop == "random" else centered
    tiles = _grid_boxes(shapes, size, 0 if options.overlap is None else options.overlap, pad)
    fields, tops, lefts = tiles.corners
    columns = pa.table({"crop_y": tops, "crop_x": lefts})
    name_tiles = partial(_tile_ids, tiles.corners, header.image_ids)
    return replace(tiles, rows=CropRows(header.columns, columns, fields, name_tiles))


def _tile_ids(corners: Array, image_ids: Sequence[str]) -> list[str]:
    return [f"{image_ids[field]}:{top},{left}" for field, top, left in corners.T.tolist()]


def boxes_around_objects(
    objects: Objects, shapes: Array, size: tuple[int, int] | None, pad: str | None
) -> tuple[CropWindows, Array]:
    """Return the boxes around objects, and a bool mask of the objects that have a box.

    A box of ``size`` has its center nearest to the object's, and of two equally near boxes is the lower or right one:
    with pixel centers at integers, its first row is ``floor(y - (height - 1) / 2 + 0.5)``. A box of an object counts by
    its center. Without ``size``, it is the box of the sample. Raises `AxesError` if a box cannot be shifted inside.
    """
    if size is None:
        y0, y1, x0, x1 = objects.positions.T
        return CropWindows(np.stack([objects.fields, y0, x0]), np.stack([y1 - y0, x1 - x0])), np.ones(len(y0), np.bool_)
    centers = objects.positions
    if objects.are_boxes:
        centers = (centers[:, [0, 2]] + centers[:, [1, 3]] - 1) / 2
    corners = np.floor(centers - (np.asarray(size) - 1) / 2 + 0.5).astype(np.int64)
    largest = shapes[objects.fields][:, 3:] - size  # Largest corner inside the image.
    too_small = (largest < 0).any(axis=1)
    if pad == "shift" and too_small.any():
        field = int(objects.fields[too_small.argmax()])
        image = f"image {field} has {shapes[field, 3]} x {shapes[field, 4]} pixels"
        problem = f"pad='shift' needs images of at least crop_size={size} but {image}"
        raise AxesError(f"{objects.joined.name}: {problem}; pass another pad=")
    corners = np.clip(corners, 0, largest) if pad == "shift" else corners
    are_inside = ((corners >= 0) & (corners <= largest)).all(axis=1)
    keep_mask: Array = np.logical_or(are_inside, pad != "drop")
    crops = _boxes_of_size(objects.fields[keep_mask], corners[keep_mask], size, pad)
    return replace(crops, num_dropped=int((~keep_mask).sum())), keep_mask


def _boxes_of_size(fields: Array, corners: Array, size: tuple[int, int], pad: str | None) -> CropWindows:
    sizes = np.broadcast_to(np.reshape(size, (2, 1)), (2, len(fields)))
    return CropWindows(np.stack([fields, *corners.T]), sizes, pad if pad in ("edge", "reflect") else "constant")


def _grid_boxes(shapes: Array, size: tuple[int, int], overlap: Any, pad: str | None) -> CropWindows:
    """Return boxes that cover each image, row by row.

    They begin ``size - overlap`` pixels apart. The last boxes of a row or column are moved inside; with ``pad`` they
    extend beyond the edge. Raises `ArgumentError` if ``overlap`` is invalid or not smaller than a box.
    """
    overlaps = np.asarray(overlap)
    if overlaps.dtype.kind not in "iu" or overlaps.shape not in ((), (2,)):
        raise ArgumentError(option="overlap", value=overlap, allowed="a number of pixels, or two for height and width")
    if not ((overlaps >= 0) & (overlaps < size)).all():
        raise ArgumentError(option="overlap", value=overlap, allowed=f"from 0 to less than crop_size={size}")

    @cache
    def corners_in(*plane: int) -> Array:
        axes = []
        for length, side, step in zip(plane, size, (np.asarray(size) - overlaps).tolist(), strict=True):
            last = max(length - side, 0)
            firsts = np.arange(0, last + step, step)
            axes.append(np.minimum(firsts, last) if pad is None else firsts)
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)

    corners = [corners_in(*plane) for plane in shapes[:, 3:].tolist()]
    fields = np.repeat(np.arange(len(shapes)), np.array(list(map(len, corners)), np.int64))
    return _boxes_of_size(fields, np.concatenate([*corners, np.zeros((0, 2), np.int64)]), size, pad)


def check_needed(other: str, is_passed: Any, **options: Any) -> None:
    """Raise `ArgumentError` if one of ``options`` is passed without another option, which it needs."""
    for name, value in options.items():
        if value is not None and not is_passed:
            raise ArgumentError(f"needs {other}", option=name, value=value, remedy=f"pass {other} or leave it out")


def _refuse(options: SampleSettings) -> None:
    crop, box, has_objects = options.crop, options.box, options.objects is not None
    if options.pad is not None and not has_objects:
        check_choice("pad", options.pad, PADS[:3], ", or None without objects=")
    sizes = {"resize": options.resize, "pad_to": options.pad_to}
    check_needed("objects=", has_objects, center=options.center, box=box, **sizes)
    check_needed("crop='grid'", crop == "grid", overlap=options.overlap)
    check_needed("box=", box, **sizes)
    if has_objects and crop not in (None, "center"):
        raise ArgumentError("objects= sets the position of crops", option="crop", value=crop, remedy="leave it out")
    if options.crop_size is None and not box:
        remedy = "pass height and width" + (", or the columns of box=" if has_objects else "")
        raise ArgumentError("the size of crops is missing", option="crop_size", remedy=remedy)
    passed = [(name, size) for name, size in {"crop_size": options.crop_size, **sizes}.items() if size is not None]
    if len(passed) > 1:
        problem, (option, value) = f"{passed[1][0]}= also sets the size of samples", passed[0]
        raise ArgumentError(problem, option=option, value=value, remedy="pass only one of them")
