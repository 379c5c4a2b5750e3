"""Parts of images: what a caller asks for as boxes of slices, and which cells of a grid a box meets."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.errors import AxesError, SelectError

Array = np.ndarray[Any, Any]
Box = tuple[slice, slice, slice, slice, slice]
Window = tuple[int, Box]
Cell = tuple[int, ...]
Use = tuple[int, tuple[slice, ...], tuple[slice, ...]]
Pick = int | str | slice | Sequence[int | str]


class Parts(NamedTuple):
    """A part of an image (T, C, Z, Y, X) of ``shape``: boxes of it, and of several boxes where each goes."""

    shape: tuple[int, ...]
    boxes: list[Box]
    places: list[tuple[slice, ...]]

    def joined(self, windows: Sequence[Array]) -> Array:
        """Return the part, of what the boxes hold, in memory of its own."""
        if len(windows) == 1:
            (window,) = windows
            own = window.flags.owndata and window.flags.writeable and window.flags.c_contiguous
            return window if own else np.array(window, order="C")
        image = np.empty(self.shape, windows[0].dtype)
        for place, window in zip(self.places, windows, strict=True):
            image[place] = window
        return image


def parts_of(
    shape: Sequence[int],
    region: Sequence[int] | None,
    picks: Mapping[str, Pick | None],
    names: Callable[[], Sequence[str | None]],
    where: str,
) -> Parts:
    """Return the part of an image that is asked for.

    Raises `AxesError` if the region is none, is empty or lies outside, or there is no such channel; `SelectError` if a
    pick leaves nothing, or is outside its axis.

    Parameters
    ----------
    shape
        Of the image (T, C, Z, Y, X).
    region
        ``(y0, y1, x0, x1)`` in pixels, ``y1`` and ``x1`` excluded; None is all.
    picks
        What is picked of the axes T, C and Z: an index, a slice, several indices; of C names too. None is all.
    names
        Gives the names of the channels.
    where
        Names the image in an error.
    """
    cuts = [_picked(axis, size, picks.get(axis), names, where) for axis, size in zip("TCZ", shape, strict=False)]
    cuts += [[side] for side in _sides(shape, region, where)]
    boxes: list[Box] = list(product(*cuts))  # type: ignore[arg-type]  # of five
    if len(boxes) == 1:
        return Parts(shape_of(boxes[0]), boxes, [])
    places = list(product(*map(_placed, cuts)))
    return Parts(tuple(place.stop for place in places[-1]), boxes, places)


def _sides(shape: Sequence[int], region: Sequence[int] | None, where: str) -> tuple[slice, slice]:
    if region is None:
        return slice(0, shape[3]), slice(0, shape[4])
    where = f"{where} of {shape[3]} x {shape[4]} pixels"
    try:
        y0, y1, x0, x1 = map(operator.index, region)
    except (TypeError, ValueError):
        raise AxesError(f"region={region!r}; it must be (y0, y1, x0, x1) in whole pixels") from None
    if y1 <= y0 or x1 <= x0:
        raise AxesError(f"{where}: region={region!r} is empty; it is (y0, y1, x0, x1), y1 and x1 excluded")
    if y0 < 0 or x0 < 0 or y1 > shape[3] or x1 > shape[4]:
        raise AxesError(
            f"{where}: region={region!r} reaches outside; it must lie within (0, {shape[3]}, 0, {shape[4]})"
        )
    return slice(y0, y1), slice(x0, x1)


def _picked(
    axis: str, size: int, pick: Pick | None, names: Callable[[], Sequence[str | None]], where: str
) -> list[slice]:
    """Return what is picked of an axis as slices, one where the indices rise in equal steps."""
    if pick is None:
        return [slice(0, size, 1)]
    if isinstance(pick, slice):
        try:
            indices = list(range(size)[pick])
        except (TypeError, ValueError) as error:
            raise AxesError(f"{where}: {axis}: {pick} takes nothing: {error}") from None
    else:
        several = pick if isinstance(pick, Sequence | np.ndarray) and not isinstance(pick, str) else [pick]
        indices = [_index(axis, size, each, names, where) for each in several]
    if not indices:
        raise SelectError(f"{where}: {pick!r} leaves nothing of {axis}, which has length {size}")
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and indices == list(range(indices[0], indices[-1] + 1, step)):
        return [slice(indices[0], indices[-1] + 1, step)]
    return [slice(index, index + 1, 1) for index in indices]


def _index(axis: str, size: int, given: Any, names: Callable[[], Sequence[str | None]], where: str) -> int:
    """Return an index, which may be given from the end, or by the name of a channel."""
    if isinstance(given, str) and axis == "C":
        known = list(names())
        if known.count(given) != 1 or len(known) != size:
            there = ", ".join(map(repr, known)) or "none of them has a name"
            what = "several channels are" if given in known else "no channel is"
            raise AxesError(f"{where}: {what} called {given!r}; pass an index; its {size} channels: {there}")
        return known.index(given)
    try:
        index = operator.index(given)
    except TypeError:
        raise AxesError(f"{where}: {given!r} is no index of {axis}; pass whole numbers or a slice") from None
    if isinstance(given, bool) or not -size <= index < size:
        raise SelectError(f"{where}: {given!r} is outside {axis}, which has length {size}")
    return index % size


def _placed(cuts: Sequence[slice]) -> list[slice]:
    """Return where what each slice takes goes, one after the other."""
    stops = accumulate(map(length_of, cuts), initial=0)
    return [slice(first, stop) for first, stop in pairwise(stops)]


def length_of(cut: slice) -> int:
    """Return how many indices a slice with a start and a stop takes."""
    length: int = cut.stop - cut.start
    return length if cut.step in (None, 1) else -(-length // cut.step)


def shape_of(box: Sequence[slice]) -> tuple[int, ...]:
    """Return the shape of what a box takes."""
    return tuple(map(length_of, box))


def within(cut: slice, first: int, stop: int) -> slice | None:
    """Return what a slice takes of the indices from ``first`` to ``stop - 1``, counted from there; None if nothing."""
    step = cut.step or 1
    taken = range(cut.start, cut.stop, step)
    low, high = bisect_left(taken, first), bisect_left(taken, stop)
    return slice(taken[low] - first, taken[high - 1] - first + 1, step) if low < high else None


def met(cut: slice, length: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield which cells of a row of cells of a length a slice meets: the number, what it takes of it, and to where."""
    done = 0
    if cut.stop <= length:
        yield 0, cut, slice(0, length_of(cut))
        return
    for number in range(cut.start // length, (cut.stop - 1) // length + 1):
        inside = within(cut, number * length, (number + 1) * length)
        if inside is not None:
            stop = done + length_of(inside)
            yield number, inside, slice(done, stop)
            done = stop


def by_image(wanted: Sequence[Window]) -> dict[int, list[int]]:
    """Return the places of windows, of which each is of an image, by the number of the image."""
    places: dict[int, list[int]] = {}
    for place, (index, _) in enumerate(wanted):
        places.setdefault(index, []).append(place)
    return places


def by_cell(boxes: Sequence[Sequence[slice]], cell: Sequence[int]) -> dict[Cell, list[Use]]:
    """Return the cells of a grid that boxes meet, each with which of the boxes do.

    A cell is told by its number along each axis. Each of its uses is the number of a box, what it takes of the cell,
    and where in what the box takes that goes.
    """
    cells: dict[Cell, list[Use]] = {}
    for number, box in enumerate(boxes):
        for here in product(*(list(met(cut, length)) for cut, length in zip(box, cell, strict=True))):
            at, inside, place = zip(*here, strict=True)
            cells.setdefault(at, []).append((number, inside, place))
    return cells
