"""Regions of images as starts and stops of their axes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.errors import AxesError, SelectError
from omearrow_ds.storage.extents import Array, Region, Shape

Span = tuple[int, int]  # First index, and the one after the last.
ReadNames = Callable[[], Sequence[str | None]]  # Returns the names of the channels.
Pick = int | str | slice | Sequence[int | str]


class PickedRegion(NamedTuple):
    """Selected part of an image (T, C, Z, Y, X), which consists of one or more regions."""

    shape: Shape
    regions: list[Region]
    targets: list[tuple[slice, ...]]  # Slices of the part that each region fills; none if there is one region.

    @classmethod
    def from_spans(cls, spans: Sequence[Sequence[Span]]) -> PickedRegion:
        """Return the part of an image that consists of the given spans along each axis."""
        combined = (zip(*pairs, strict=True) for pairs in product(*spans))
        regions: list[Region] = [[*starts, *stops] for starts, stops in combined]
        if len(regions) == 1:
            starts, stops = regions[0][: len(spans)], regions[0][len(spans) :]
            return cls(tuple(map(operator.sub, stops, starts)), regions, [])
        lengths = [[stop - start for start, stop in axis] for axis in spans]
        targets = [[slice(*ends) for ends in pairwise(accumulate(axis, initial=0))] for axis in lengths]
        return cls(tuple(map(sum, lengths)), regions, list(product(*targets)))

    def join(self, arrays: Sequence[Array]) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        part = np.empty((*self.shape, *arrays[0].shape[len(self.shape) :]), arrays[0].dtype)
        for target, pixels in zip(self.targets, arrays, strict=True):
            part[target] = pixels
        return part


def pick_region(
    shape: Sequence[int],
    region: Sequence[int] | None,
    picks: Mapping[str, Pick | None],
    channel_names: ReadNames,
    subject: str,
) -> PickedRegion:
    """Return the part of an image (T, C, Z, Y, X) that a caller chooses; errors name the image ``subject``."""
    # ``region`` is ``(y0, y1, x0, x1)`` in pixels, ``y1`` and ``x1`` excluded. ``picks`` are indices of the axes T, C
    # and Z: one, several, or a slice; for C names too. None is the whole plane or axis. Raises `AxesError` if the
    # region is malformed, empty or outside the image, or a channel is unknown; `SelectError` if a pick is empty or
    # outside.
    sizes = zip("TCZ", shape[:3], strict=True)
    spans = [_picked_spans(axis, size, picks.get(axis), channel_names, subject) for axis, size in sizes]
    return PickedRegion.from_spans([*spans, *([side] for side in _sides(shape, region, subject))])


def _sides(shape: Sequence[int], region: Sequence[int] | None, subject: str) -> tuple[Span, Span]:
    if region is None:
        return (0, shape[3]), (0, shape[4])
    subject = f"{subject} of {shape[3]} x {shape[4]} pixels"
    try:
        y0, y1, x0, x1 = map(operator.index, region)
    except (TypeError, ValueError):
        raise AxesError(f"region={region!r}: expected (y0, y1, x0, x1) in whole pixels; pass four integers") from None
    if y1 <= y0 or x1 <= x0:
        raise AxesError(f"{subject}: region={region!r} is empty; pass (y0, y1, x0, x1) with y0 < y1 and x0 < x1")
    if y0 < 0 or x0 < 0 or y1 > shape[3] or x1 > shape[4]:
        limits = f"(0, {shape[3]}, 0, {shape[4]})"
        raise AxesError(f"{subject}: region={region!r} exceeds the image; pass a region within {limits}")
    return (y0, y1), (x0, x1)


def _picked_spans(axis: str, size: int, pick: Pick | None, channel_names: ReadNames, subject: str) -> list[Span]:
    if pick is None:
        return [(0, size)]
    if isinstance(pick, slice):
        try:
            indices = list(range(size)[pick])
        except (TypeError, ValueError) as error:
            raise AxesError(f"{subject}: {axis}: {pick} is not a valid slice: {error}; pass integers") from None
    else:
        several = pick if isinstance(pick, Sequence | np.ndarray) and not isinstance(pick, str) else [pick]
        indices = [_index(axis, size, one, channel_names, subject) for one in several]
    if not indices:
        raise SelectError(f"{subject}: {pick!r} selects nothing along {axis} of length {size}; pass at least one index")
    return spans_of(indices)


def spans_of(indices: Sequence[int]) -> list[Span]:
    runs = np.split(np.asarray(indices), np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def _index(axis: str, size: int, pick: Any, channel_names: ReadNames, subject: str) -> int:
    """Return an index from the front of an index from either end, or of the name of a channel."""
    if isinstance(pick, str) and axis == "C":
        names = list(channel_names())
        if names.count(pick) != 1 or len(names) != size:
            known = ", ".join(map(repr, names)) or "without names"
            problem = f"{'several channels have' if pick in names else 'no channel has'} the name {pick!r}"
            raise AxesError(f"{subject}: {problem} among {size} channels ({known}); pass an index")
        return names.index(pick)
    try:
        index = operator.index(pick)
    except TypeError:
        raise AxesError(f"{subject}: {pick!r} is not an index of {axis}; pass integers or a slice") from None
    if isinstance(pick, bool) or not -size <= index < size:
        problem = f"{pick!r} is out of range for {axis} of length {size}"
        raise SelectError(f"{subject}: {problem}; pass an index below {size}")
    return index % size


def slices_of(region: Region) -> tuple[slice, ...]:
    rank = len(region) // 2
    return tuple(map(slice, region[:rank], region[rank:]))


def rows_to_positions(rows: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions in ``rows`` of each distinct row."""
    positions: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        positions.setdefault(row, []).append(position)
    return positions
