"""TCZYX arithmetic: input axes, sample axes, selections and crops."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omearrow_ds.errors import AxesError, ImageError, SelectError

Array = np.ndarray[Any, Any]
AXES = "TCZYX"
_LONGEST = 2**24
Pick = int | slice | Sequence[int]


def to_tczyx(image: Array, axes: str | None, subject: str) -> Array:
    """Return ``image`` with axes ``axes`` as a view or copy (T, C, Z, Y, X); ``subject`` names it in errors."""
    axes = {2: "YX", 5: AXES}.get(image.ndim) if axes is None else axes
    if axes is None:
        remedy = "pass axes=, e.g. axes='CYX'" if image.ndim > 2 else "pass a list of images, e.g. [image]"
        raise ImageError(f"{subject}: the axes of a {image.ndim}-D image are unknown; {remedy}")
    check_axes(axes)
    if image.ndim != len(axes):
        problem = f"{subject}: shape {image.shape} has {image.ndim} axes but axes={axes!r} has {len(axes)}"
        raise ImageError(f"{problem}; correct axes=")
    if 0 in image.shape:
        raise ImageError(f"{subject}: shape {image.shape} has no pixels; remove the image")
    order = [axes.index(axis) for axis in AXES if axis in axes]
    shape = tuple(image.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES)
    return image.transpose(order).reshape(shape)


def check_axes(axes: str) -> None:
    """Raise `AxesError` unless ``axes`` names distinct axes of TCZYX."""
    if not isinstance(axes, str) or not axes or set(axes) - set(AXES) or len(set(axes)) != len(axes):
        raise AxesError(f"axes={axes!r}: expected distinct letters of {AXES!r}, e.g. 'CYX'")


def checked_size(size: Any, option: str = "crop_size") -> tuple[int, int]:
    """Return (height, width) as whole numbers from 1, or raise `AxesError`, which names the option."""
    try:
        height, width = map(operator.index, size)
    except (TypeError, ValueError):
        allowed = "(height, width) in whole pixels"
        remedy = f"pass ({size}, {size})" if hasattr(size, "__index__") else "pass e.g. (64, 64)"
        raise AxesError(option=option, value=size, allowed=allowed, remedy=remedy) from None
    if not (1 <= height <= _LONGEST and 1 <= width <= _LONGEST):
        raise AxesError(option=option, value=size, allowed=f"height and width from 1 to {_LONGEST:,}")
    return height, width


@dataclass(frozen=True)
class Cut:
    """Transform from images or stacks (..., T, C, Z, Y, X) of one shape to samples of ``shape``.

    Applies slices, then picks, a reshape to ``lengths``, and a transpose to ``order``.
    """

    slices: tuple[slice, ...]
    picks: tuple[tuple[int, Array], ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...] | None
    shape: tuple[int, ...]

    def __call__(self, pixels: Array) -> Array:
        """Cut ``pixels`` (..., T, C, Z, Y, X) to (..., *shape), as a view if possible."""
        index: tuple[Any, ...] = (..., *self.slices)
        pixels = pixels[index]
        for axis, pick in self.picks:
            pixels = np.take(pixels, pick, axis=axis - len(AXES))
        lead = pixels.shape[: pixels.ndim - len(AXES)]
        pixels = pixels.reshape(lead + self.lengths)
        if self.order is not None:
            pixels = pixels.transpose((*range(len(lead)), *(len(lead) + axis for axis in self.order)))
        return pixels


@dataclass(frozen=True)
class SampleAxes:
    """Axes, selection and center crop of samples; raises `AxesError` for arguments that fit no image."""

    axes: str = "CYX"  # Axes of a sample, in its order.
    select: Mapping[str, Pick] | None = None  # {"C": [0, 2], "Z": slice(10, 20), "T": 0}; an integer leaves length 1.
    crop_size: tuple[int, int] | None = None  # (height, width) of a center crop, in pixels.

    def __post_init__(self) -> None:
        check_axes(self.axes)
        for axis in self.select or {}:
            if not isinstance(axis, str) or axis not in tuple(AXES):
                raise AxesError(f"select={self.select!r}: unknown axis {axis!r}, expected letters of {AXES!r}")
        # A copy, as each worker process evaluates it again, and changes by the caller must not affect samples.
        object.__setattr__(self, "select", {axis: _own(axis, pick) for axis, pick in (self.select or {}).items()})
        if self.crop_size is not None:
            object.__setattr__(self, "crop_size", checked_size(self.crop_size))

    def cut(self, shape: Sequence[int], subject: str) -> Cut:
        """Return the cut for images of ``shape`` (T, C, Z, Y, X); ``subject`` names the image in an error."""
        select, sizes_of = self.select or {}, zip(AXES, map(int, shape), strict=True)
        indices = {axis: _resolve(axis, size, select.get(axis, slice(None)), subject) for axis, size in sizes_of}
        if self.crop_size is not None:
            sizes = len(indices["Y"]), len(indices["X"])
            if self.crop_size[0] > sizes[0] or self.crop_size[1] > sizes[1]:
                problem = f"crop_size={self.crop_size} is larger than the image of {sizes[0]} x {sizes[1]} pixels"
                raise AxesError(f"{subject}: {problem}; lower crop_size, or remove the image")
            for axis, size, length in zip("YX", sizes, self.crop_size, strict=True):
                start = (size - length) // 2
                indices[axis] = indices[axis][start : start + length]
        slices, picks = [slice(0, None, 1)] * len(AXES), []
        for position, (axis, chosen) in enumerate(indices.items()):
            if isinstance(chosen, range):
                slices[position] = slice(chosen.start, chosen.stop if chosen.stop >= 0 else None, chosen.step)
            else:
                picks.append((position, np.asarray(chosen)))
            if axis not in self.axes and len(chosen) != 1:
                more = "".join(letter for letter in AXES if letter in self.axes or letter == axis)
                problem = f"axes={self.axes!r} drops axis {axis} of length {len(chosen)}"
                raise AxesError(f"{subject}: {problem}; pass select={{{axis!r}: 0}} or axes={more!r}")
        present = [axis for axis in AXES if axis in self.axes]
        order = None if self.axes == "".join(present) else tuple(map(present.index, self.axes))
        lengths, shape_of_samples = (tuple(len(indices[axis]) for axis in axes) for axes in (present, self.axes))
        return Cut(tuple(slices), tuple(picks), lengths, order, shape_of_samples)


def _own(axis: str, pick: Any) -> slice | int | list[int]:
    """Return a copy of a pick as a slice, an integer or a list."""
    if isinstance(pick, slice):
        return pick
    try:
        picked = np.asarray(pick)
    except ValueError:
        picked = np.array("")
    if picked.ndim > 1 or (picked.size and picked.dtype.kind not in "iu"):
        raise AxesError(f"select={{{axis!r}: {pick!r}}}: expected an integer, a slice or a list of integers")
    own: int | list[int] = picked.tolist()
    return own


def _resolve(axis: str, size: int, pick: Pick, subject: str) -> Sequence[int]:
    """Return the selected indices of an axis of length ``size``: a range if they are regular, otherwise a list."""
    if isinstance(pick, slice):
        try:
            chosen = range(size)[pick]
        except (TypeError, ValueError) as error:
            raise AxesError(f"select={{{axis!r}: {pick}}}: invalid slice: {error}; pass a slice of integers") from None
        if not chosen:
            problem = f"select={{{axis!r}: {pick}}} is empty on axis {axis} of length {size}"
            raise SelectError(f"{subject}: {problem}; select an index")
        return chosen
    indices = [pick] if isinstance(pick, int) else pick
    if not indices or not all(-size <= index < size for index in indices):
        problem = f"select={{{axis!r}: {pick!r}}} exceeds axis {axis} of length {size}"
        raise SelectError(f"{subject}: {problem}; select smaller indices")
    indices = [index % size for index in indices]
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    regular = range(indices[0], indices[0] + step * len(indices), step) if step else range(0)
    return regular if list(regular) == indices else indices
