"""Crops of images: the pixels to read for each box, and samples made of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from omearrow_ds.axes import Cut
from omearrow_ds.kernels.crops import places_of
from omearrow_ds.kernels.scaling import Array, Divisor, Scaling, scale
from omearrow_ds.storage.formats._regions import PickedRegion, spans_of

STAGES = {"scale": "normalize"}


class PlaneSelection(NamedTuple):
    """T, C and Z of an image that samples show.

    ``slices`` with positive steps are read, as the regions of ``picked``. ``order`` and then ``picks`` bring the pixels
    that were read into the order of samples.
    """

    slices: tuple[slice, ...]
    order: tuple[slice, ...]
    picks: tuple[tuple[int, Array], ...]
    picked: PickedRegion

    @classmethod
    def of(cls, cut: Cut, shape: Sequence[int]) -> Self:
        slices, order = [], []
        for part, size in zip(cut.slices[:3], shape, strict=False):
            rising = part if part.step > 0 else slice(0, size, 1)
            slices.append(slice(rising.start, size if rising.stop is None else rising.stop, rising.step))
            order.append(slice(None) if part.step > 0 else part)
        spans = [spans_of(range(part.start, part.stop, part.step)) for part in slices]
        return cls(tuple(slices), tuple(order), cut.picks, PickedRegion.from_spans(spans))


class PlacedBox(NamedTuple):
    """Box in an image, and the image pixels that it contains."""

    field: int  # Index of the image.
    sides: tuple[int, int, int, int]  # First row and column of the pixels that are read, and those after the last.
    pixels: tuple[slice | Array, slice | Array]  # Rows and columns of the image; arrays if some are repeated.
    target: tuple[Any, ...] | None = None  # Part of the box that these pixels fill, if zeros are around them.

    def write(self, region: Array, selection: PlaneSelection, divisor: Divisor, out: Array) -> None:
        """Scale the pixels that were read into a sample, both (T, C, Z, Y, X)."""
        region = region[selection.order]
        for axis, pick in selection.picks:
            region = np.take(region, pick, axis=axis)
        if self.target is not None:
            out[...] = 0
            out = out[self.target]
        rows, columns = self.pixels
        if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
            region = region[..., rows - self.sides[0], :][..., columns - self.sides[1]]
        scale(region, divisor.at(rows, columns) if isinstance(divisor, Scaling) else divisor, out)


def place_box(box: Sequence[int], shape: Array, pad: str) -> PlacedBox:
    """Return a box of field, top, left, height and width in an image of ``shape`` (T, C, Z, Y, X)."""
    field, top, left, height, width = box
    size_y, size_x = shape[3:].tolist()
    bottom, right = top + height, left + width
    if top >= 0 and left >= 0 and bottom <= size_y and right <= size_x:
        return PlacedBox(field, (top, left, bottom, right), (slice(top, bottom), slice(left, right)))
    if pad == "constant":
        y0, x0, y1, x1 = max(top, 0), max(left, 0), min(bottom, size_y), min(right, size_x)
        target = (..., slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
        return PlacedBox(field, (y0, x0, y1, x1), (slice(y0, y1), slice(x0, x1)), target)
    rows, columns = (
        np.arange(size)[places_of(first, length, size, pad)]
        for first, length, size in ((top, height, size_y), (left, width, size_x))
    )
    sides = int(rows.min()), int(columns.min()), int(rows.max()) + 1, int(columns.max()) + 1
    return PlacedBox(field, sides, (rows, columns))


def write_boxes(
    placed: Sequence[PlacedBox],
    regions: Sequence[Array],
    selections: Sequence[PlaneSelection],
    divisors: Sequence[Divisor],
    targets: Sequence[Array] | Array,
    positions: Iterable[int],
) -> None:
    """Write the boxes at some positions to ``targets``, each (T, C, Z, Y, X)."""
    for position in positions:
        box = placed[position]
        box.write(regions[position], selections[box.field], divisors[box.field], targets[position])
