"""`Places`: windows of samples in images, around objects, on a grid, or at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch

from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.storage.objects import Objects
from omearrow_ds.text import count

Array = np.ndarray[Any, Any]


class CropOptions(TypedDict, total=False):
    """Keywords for the position of samples in images, documented in `omearrow_ds.OMEArrowDataset`."""

    objects: Any
    center: Sequence[str] | None
    box: Sequence[str] | bool | None
    crop: Literal["center", "random", "grid"] | None
    overlap: int | tuple[int, int] | None
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None
    resize: tuple[int, int] | None
    pad_to: tuple[int, int] | None


class Windows(NamedTuple):
    """Field, top, left, height and width of windows in pixels, (n,) int64 each; windows may extend beyond images."""

    fields: Array
    tops: Array
    lefts: Array
    heights: Array
    widths: Array


class Places:
    """One window per sample.

    ``pad`` is the padding beyond an image's edge: ``"constant"`` (0), ``"edge"`` or ``"reflect"``, see `numpy.pad`.
    ``dropped`` is the number of windows that were left out because they extend beyond an edge.
    """

    random = False  # Whether windows are drawn at each access, from torch's global generator.
    size: tuple[int, int] | None  # (height, width) of all windows, or None if they differ.

    def __init__(self, windows: Windows, pad: str, dropped: int = 0) -> None:
        self.pad, self.dropped = pad, dropped
        sides = np.stack(windows[3:])
        are_alike = sides.size > 0 and bool((sides == sides[:, :1]).all())
        self.size = (int(sides[0, 0]), int(sides[1, 0])) if are_alike else None
        fields, tops, lefts, heights, widths = (values.astype(np.int32) for values in windows)
        if self.size is not None:
            heights, widths = heights[:1], widths[:1]
        self._windows = Windows(fields, tops, lefts, heights, widths)

    def __len__(self) -> int:
        return len(self._windows.fields)

    @property
    def fields(self) -> Array:
        """(n,) int32, the image index of each sample."""
        return self._windows.fields

    @property
    def corners(self) -> tuple[Array, Array]:
        """(n,) int32 each, the top row and left column of each window in its image."""
        return self._windows.tops, self._windows.lefts

    def size_of(self, position: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        return int(self._windows.heights[position]), int(self._windows.widths[position])

    def within(self, shape: Sequence[int]) -> bool:
        """Whether all windows are inside images of ``shape`` (height, width)."""
        sides = zip(self.corners, self._windows[3:], shape, strict=True)
        return all(bool(((first >= 0) & (first + length <= size)).all()) for first, length, size in sides)

    def windows(self, positions: Sequence[int]) -> Windows:
        """Return the windows of samples in the order of ``positions``."""
        indices = np.asarray(positions, np.intp)
        if self.size is not None:
            sides = [np.full(len(indices), length) for length in self.size]
            return Windows._make([*[values[indices].astype(np.int64) for values in self._windows[:3]], *sides])
        return Windows._make([values[indices].astype(np.int64) for values in self._windows])


class RandomPlaces(Places):
    """One window per image at a random position inside the image, drawn at each access."""

    random = True

    def __init__(self, shapes: Array, size: tuple[int, int], pad: str | None, path: str) -> None:
        super().__init__(_centred(shapes, size, pad, path), pad or "constant")
        self._ranges = np.maximum(shapes[:, 3:] - size, 0) + 1

    def windows(self, positions: Sequence[int]) -> Windows:
        """Return random windows of images in the order of ``positions``; two numbers are always drawn per window."""
        centred = super().windows(positions)
        ranges = self._ranges[np.asarray(positions, np.intp)]
        drawn = torch.rand((len(ranges), 2), dtype=torch.float64).numpy()
        start = np.minimum((drawn * ranges).astype(np.int64), ranges - 1)
        tops, lefts = (
            np.where(values < 0, values, corner) for values, corner in zip(centred[1:3], start.T, strict=True)
        )
        return centred._replace(tops=tops, lefts=lefts)


def of_objects(objects: Objects, shapes: Array, size: tuple[int, int] | None, pad: str | None) -> tuple[Places, Array]:
    """Return the windows around objects, and a bool mask of the objects that have a window.

    A window of ``size`` has its center nearest to the object's, and of two equally near windows is the lower or right
    one: with pixel centers at integers, its first row is ``floor(y - (height - 1) / 2 + 0.5)``. A box counts by its
    center. Without ``size``, the window is the box. Raises `AxesError` if ``pad="shift"`` and an image is smaller than
    ``size``.
    """
    if size is None:
        assert objects.boxes is not None
        y0, y1, x0, x1 = objects.boxes.T
        windows = Windows(objects.fields, y0, x0, y1 - y0, x1 - x0)
        return Places(windows, "constant"), np.ones(len(y0), np.bool_)
    centers = objects.centers
    if centers is None:
        assert objects.boxes is not None
        centers = (objects.boxes[:, [0, 2]] + objects.boxes[:, [1, 3]] - 1) / 2
    corners = np.floor(centers - (np.asarray(size) - 1) / 2 + 0.5).astype(np.int64)
    room = shapes[objects.fields][:, 3:] - size  # Largest corner inside the image.
    keep_mask: Array = np.ones(len(corners), np.bool_)
    if pad == "shift":
        if (room < 0).any():
            field = int(objects.fields[int((room < 0).any(axis=1).argmax())])
            raise AxesError(
                f"{objects.where}: pad='shift' needs images of at least crop_size={size} but image {field} has "
                f"{shapes[field, 3]} x {shapes[field, 4]} pixels; pass another pad="
            )
        corners = np.clip(corners, 0, room)
    elif pad == "drop":
        keep_mask = np.min((corners >= 0) & (corners <= room), axis=1, initial=True)
    sizes = (np.full(int(keep_mask.sum()), length) for length in size)
    windows = Windows(objects.fields[keep_mask], *corners[keep_mask].T, *sizes)
    return Places(windows, pad if pad in ("edge", "reflect") else "constant", int((~keep_mask).sum())), keep_mask


def of_centres(shapes: Array, size: tuple[int, int], pad: str | None, path: str) -> Places:
    return Places(_centred(shapes, size, pad, path), pad or "constant")


def of_grid(shapes: Array, size: tuple[int, int], overlap: Any, pad: str | None, path: str) -> Places:
    """Return windows that cover each image, row by row.

    They begin ``size - overlap`` pixels apart. The last windows of a row or column are moved inside; with ``pad`` they
    extend beyond the edge. Raises `ArgumentError` if ``overlap`` is invalid or not smaller than a window; `AxesError`
    if an image is smaller than a window without ``pad``.
    """
    _centred(shapes, size, pad, path)
    overlaps = np.broadcast_to(_whole(overlap), 2).tolist()
    if any(not 0 <= count < length for count, length in zip(overlaps, size, strict=True)):
        raise ArgumentError(option="overlap", value=overlap, allowed=f"from 0 to less than crop_size={size}")
    corners: dict[tuple[int, int], Array] = {}  # (2, n) each
    for shape in dict.fromkeys((height, width) for height, width in shapes[:, 3:].tolist()):
        starts = [
            _starts(length, side, side - lap, inside=pad is None)
            for length, side, lap in zip(shape, size, overlaps, strict=True)
        ]
        corners[shape] = np.stack(np.meshgrid(*starts, indexing="ij")).reshape(2, -1)
    of_fields = [corners[height, width] for height, width in shapes[:, 3:].tolist()]
    counts = np.array([of_field.shape[1] for of_field in of_fields], np.int64)
    fields = np.repeat(np.arange(len(shapes)), counts)
    tops, lefts = np.concatenate([*of_fields, np.zeros((2, 0), np.int64)], axis=1)
    sizes = (np.full(len(fields), length) for length in size)
    return Places(Windows(fields, tops, lefts, *sizes), pad or "constant")


def _starts(length: int, size: int, step: int, *, inside: bool) -> Array:
    last = max(length - size, 0)
    starts = np.arange(0, last + step, step)
    return np.minimum(starts, last) if inside else starts


def _whole(overlap: Any) -> Array:
    whole = np.asarray(overlap)
    if whole.dtype.kind not in "iu" or whole.shape not in ((), (2,)):
        raise ArgumentError(option="overlap", value=overlap, allowed="a number of pixels, or two for height and width")
    return whole


def _centred(shapes: Array, size: tuple[int, int], pad: str | None, path: str) -> Windows:
    """Return the window in the middle of each image; raise `AxesError` if one is too small without ``pad``."""
    corners = (shapes[:, 3:] - size) // 2
    small = (corners < 0).any(axis=1)
    if small.any() and pad is None:
        first = int(small.argmax())
        height, width = shapes[first, 3:].tolist()
        raise AxesError(
            f"{path}: crop_size={size} is larger than image {first} of {height} x {width} pixels "
            f"({count(int(small.sum()), 'such image')}); lower crop_size, pass pad=, or remove the image"
        )
    sizes = (np.full(len(shapes), length) for length in size)
    return Windows(np.arange(len(shapes)), *corners.T, *sizes)
