"""Images that lie in memory, in one array or several, and where each begins."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.errors import ArgumentError
from omearrow_ds.kernels.scaling import Array

Guard = Callable[[int], object]


class Located(NamedTuple):
    """Where some images lie: (n,) int64 addresses, good for as long as ``held`` is kept."""

    addresses: Array
    held: Any


class _Overlaid:
    """What NumPy takes for an array, and keeps."""

    __slots__ = ("__array_interface__", "held")

    def __init__(self, interface: dict[str, Any], held: object) -> None:
        self.__array_interface__, self.held = interface, held


class Stacks:
    """Images of one shape and dtype, in one array or several.

    Raises `ArgumentError` if arrays differ in shape or dtype.

    Parameters
    ----------
    arrays
        Arrays (n, ...) that hold the images in order; any strides.
    guard
        To be called before each access to arrays that lie in a mapped file, which may have been cut short, with the
        number of files that are looked at together.

    Attributes
    ----------
    like
        An array (n, ...) of the images' shape and dtype.
    alone
        The only array that there is; None where there are several.
    many
        Whether images are in more files than may be open at once.
    """

    many = False

    def __init__(self, arrays: Sequence[Array], guard: Guard | None = None) -> None:
        self._arrays, self.guard, self.like = arrays, guard, arrays[0]
        self.alone = arrays[0] if len(arrays) == 1 else None
        self._starts = [0, *itertools.accumulate(map(len, arrays))]
        self._origins: dict[int, tuple[Array, int]] = {}
        if len({(array.shape[1:], array.dtype) for array in arrays}) > 1:
            raise ArgumentError("images differ in shape or dtype")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Array:
        """Return an image, as a view."""
        if self.guard is not None:
            self.guard(1)
        number = bisect.bisect_right(self._starts, index) - 1
        image: Array = self._arrays[number][index - self._starts[number]]
        return image

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        """Return a part of each image, as ``cut`` makes a view of an array of them."""
        return Stacks([cut(array) for array in self._arrays], self.guard)

    def located(self, indices: Array) -> Located:
        """Return where some images lie."""
        if self.guard is not None:
            self.guard(1)
        return Located(self.addresses[indices], self._arrays)

    def by_turns(self, indices: Array, out: Array, write: Callable[[Array, Array], object]) -> bool:
        """Have ``write`` make a batch of no more files at a time than may be open; False if it is of no more at all.

        It is given the places of some of ``indices``, and where to write these samples.
        """
        turns = self._turns(indices)
        for places in turns:
            made = np.empty((len(places), *out.shape[1:]), out.dtype)
            write(places, made)
            out[places] = made
        return bool(turns)

    def _turns(self, indices: Array) -> list[Array]:  # noqa: ARG002  # of files that are opened it differs
        """Return the places of images that may be located together; none if all may be."""
        return []

    def overlaid(self, indices: Array) -> tuple[Array, Array]:
        """Return an array (n, ...) in which some images, `strided_alike`, are elements, and their numbers there.

        Of its other elements, which overlap and are anything, none must be looked at.
        """
        (addresses, held), like = self.located(indices), self.like
        first = int(np.minimum.reduce(addresses))
        numbers = addresses - first
        shape, strides = (int(np.maximum.reduce(numbers)) + 1, *like.shape[1:]), (1, *like.strides[1:])
        data = {"data": (first, True), "shape": shape, "strides": strides, "typestr": like.dtype.str, "version": 3}
        return np.asarray(_Overlaid(data, held)), numbers

    @functools.cached_property
    def addresses(self) -> Array:
        """(N,) int64, where in memory each image begins."""
        starts = (_address(array) + np.arange(len(array)) * array.strides[0] for array in self._arrays)
        return np.concatenate(list(starts))

    @functools.cached_property
    def strided_alike(self) -> bool:
        """Whether the pixels of all images follow each other in the same steps."""
        return all(same_steps(array, self.like) for array in self._arrays)

    @functools.cached_property
    def contiguous(self) -> bool:
        """Whether the pixels of each image lie side by side."""
        return self.strided_alike and bool(self.like[:1].flags.c_contiguous)

    def alike(self, indices: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yield what a loop over elements can go over at once: an image may begin at any byte.

        Each is an array (1, ...) to begin at, of which only shape, strides and address are meant, the places of
        ``indices`` that go with it, and how many elements after it each of these images begins. There is nothing where
        strides are no whole elements, or differ.
        """
        size = self.like.itemsize
        if not self.strided_alike or any(stride % size for stride in self.like.strides[1:]):
            return
        located = self.located(indices)
        origin, first = self._origin(int(located.addresses[0]) % size)
        after = located.addresses - first
        if not int(np.bitwise_or.reduce(after)) % size:  # sizes are powers of two
            yield origin, np.arange(len(after)), after // size
            return
        rests = located.addresses % size
        for rest in np.unique(rests).tolist():
            which = np.flatnonzero(rests == rest)
            origin, first = self._origin(rest)
            yield origin, which, (located.addresses[which] - first) // size

    def _origin(self, rest: int) -> tuple[Array, int]:
        """Return an array (1, ...) with the strides of an image, ``rest`` bytes after a whole number of elements.

        With it comes its address.
        """
        if rest not in self._origins:
            pixel = np.empty(2 * self.like.itemsize, np.uint8)[rest:][: self.like.itemsize].view(self.like.dtype)
            strides = (0, *self.like.strides[1:])
            origin = np.lib.stride_tricks.as_strided(pixel, (1, *self.like.shape[1:]), strides)
            self._origins[rest] = origin, _address(origin)
        return self._origins[rest]


def same_steps(array: Array, like: Array) -> bool:
    """Whether the pixels of an image follow each other in the same steps in both; an axis of length 1 has none."""
    both = zip(array.shape[1:], array.strides[1:], like.strides[1:], strict=True)
    return all(step == other for length, step, other in both if length > 1)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
