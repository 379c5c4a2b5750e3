"""Stacked images of several parts, read in place from their files, which are opened lazily."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from omearrow_ds.errors import FormatError
from omearrow_ds.kernels.page_requests import Rows
from omearrow_ds.kernels.scaling import Array
from omearrow_ds.kernels.stacks import Guard, ImageAddresses, PageRequests, Stacks, same_strides
from omearrow_ds.storage.byte_source import STATUS_NS
from omearrow_ds.storage.formats._base import Images


class Parts(Protocol):
    """A `omearrow_ds.storage.parts_source.PartsSource` whose images have one shape and dtype."""

    starts: Sequence[int]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]

    @property
    def most_open(self) -> int:
        """Maximum number of parts open at once."""

    @property
    def opened(self) -> Iterable[int]:
        """Numbers of the parts that are open."""

    def part(self, number: int) -> Images:
        """Return a part, which is opened if it is closed."""


class _Part(NamedTuple):
    source: Images
    stacks: Stacks | None
    guard: Guard | None = None


def _whole(images: Array) -> Array:
    return images


class PartStacks(Stacks):
    """Images of one shape and dtype from all parts of a source.

    One array holds the address of each image, so that a batch of several parts is gathered in one loop. If the memory
    layout of a part differs from the others, its images are decoded on request.

    Parameters
    ----------
    source
        The parts.
    cut
        Makes a view of an array of images.
    """

    def __init__(self, source: Parts, cut: Callable[[Array], Array] = _whole) -> None:
        shape = source.shapes[0].tolist()
        super().__init__([cut(np.empty((1, *shape), source.dtypes[0]))])  # Only its shape and strides are used.
        self.single_array, self.requests = None, PageRequests()
        self._source, self._cut = source, cut
        self._starts, self.num_images = list(source.starts), source.starts[-1]
        self._first = np.array(self._starts)
        self.many = len(self._starts) - 1 > source.most_open
        self._table = np.empty(len(self), np.int64)  # Image addresses in open parts.
        self._good_ns = np.zeros(len(self._starts) - 1, np.int64)  # Time until which a part needs no check.
        self._is_checked = np.ones(len(self), bool)
        self._has_prefixes = False  # Whether an opened part has bytes to compare.
        self._parts: dict[int, _Part] = {}
        self._held: Sequence[_Part] = ()
        self._looking = threading.Lock()

    def __getitem__(self, index: int) -> Array:
        number = bisect.bisect_right(self._starts, index) - 1
        index -= self._starts[number]
        with self._looking:
            part = self._parts.get(number) or self._part(number)
        if part.stacks is None:
            image: Array = self._cut(part.source.read_arrays([index])[0][None])[0]
            return image
        part.stacks.prepare(index)
        return part.stacks[index]

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        """Return stacks that contain the same region of each image; see `Stacks.cut`."""
        stacks = PartStacks(self._source, lambda images: cut(self._cut(images)))
        stacks.requests = self.requests
        return stacks

    def _turns(self, indices: Array) -> list[Array]:
        most = self._source.most_open
        parts, part_of = np.unique(self._first.searchsorted(indices, "right") - 1, return_inverse=True)
        turns = -(-len(parts) // most)
        return [np.flatnonzero(part_of // most == turn) for turn in range(turns)] if turns > 1 else []

    def located(self, indices: Array) -> ImageAddresses:
        """Open the parts of images, and return the memory addresses; files are checked at most once per millisecond."""
        numbers = self._first.searchsorted(indices, "right") - 1
        with self._looking:  # Another thread may close a part, and map it at another address.
            parts = self._open_parts(numbers)
            if self._has_prefixes:
                self._check_first_use(indices, numbers)
            addresses = self._table[indices]
            owners: list[object] = [parts, self._held]
        for number, part in parts.items():
            if part.stacks is None:
                in_part = np.flatnonzero(numbers == number)
                arrays = part.source.read_arrays((indices[in_part] - self._starts[number]).tolist())
                images = [self._cut(np.ascontiguousarray(image)[None]) for image in arrays]
                addresses[in_part] = [Stacks([image]).addresses[0] for image in images]
                owners.append(images)
        return ImageAddresses(addresses, owners)

    def prepare(self, indices: Array | int, rows: Rows | None = None) -> None:
        if self.requests is not None and monotonic_ns() >= self.requests.query_ns:  # Requests need open parts.
            with self._looking:
                self._open_parts(self._first.searchsorted(np.atleast_1d(indices), "right") - 1)
        super().prepare(indices, rows)

    def _is_cold(self) -> bool:
        return any(stacks._is_cold() for _, stacks, _ in self._held if stacks is not None)  # noqa: SLF001  # Same class.

    def request(self, indices: Array, rows: Rows | None = None) -> None:
        """Request that the system reads the memory pages of images whose parts are open; see `Stacks.request`."""
        numbers = self._first.searchsorted(indices, "right") - 1
        with self._looking:
            for number in self._parts.keys() & set(numbers.tolist()):
                stacks, is_in_part = self._parts[number].stacks, numbers == number
                if stacks is not None:
                    rows_in_part = None if rows is None else (rows[0][is_in_part], rows[1])
                    stacks.request(indices[is_in_part] - self._starts[number], rows_in_part)

    def _check_first_use(self, indices: Array, numbers: Array) -> None:
        """Compare the bytes before the chunks of images that were not used since their part was opened."""
        for number in np.unique(numbers[~self._is_checked[indices]]).tolist():
            stacks = self._parts[number].stacks
            if stacks is not None and stacks.prefixes is not None:
                stacks.prefixes.check((indices[numbers == number] - self._starts[number]).tolist())
        self._is_checked[indices] = True

    def _open_parts(self, numbers: Array) -> dict[int, _Part]:
        """Return some parts, opened, and checked if their last check has expired; empty if no check is due."""
        now_ns = monotonic_ns()
        if np.minimum.reduce(self._good_ns[numbers]) > now_ns:
            return {}
        numbers_read = set(numbers.tolist())
        if not numbers_read <= self._parts.keys():
            for number in numbers_read & self._parts.keys():
                self._part(number)  # Marks it as recently used, so that it is not closed.
        parts = {number: self._parts.get(number) or self._part(number) for number in numbers_read}
        for number, part in self._parts.items():  # All are checked together; otherwise every batch would check one.
            if part.guard is not None:
                try:
                    part.guard(len(self._parts))
                except FormatError:
                    if number in numbers_read:
                        raise
                else:
                    self._good_ns[number] = now_ns + STATUS_NS
        return parts

    def _part(self, number: int) -> _Part:
        """Return a part, opened if it is not; release parts that were closed since the last call."""
        source, part = self._source.part(number), self._parts.get(number)
        if part is not None and part.source is source:
            return part
        opened = set(self._source.opened)
        for closed in [closed for closed in self._parts if closed not in opened]:
            del self._parts[closed]
            self._good_ns[closed] = 0
        stacks = source.mapped_stacks()
        if stacks is not None:
            stacks = stacks.cut(self._cut)
        if stacks is None or not stacks.has_equal_strides or not same_strides(stacks.like, self.like):
            part = _Part(source, None)
        else:
            part = _Part(source, stacks, stacks.guard)
            stacks.requests = None  # Requests of all parts are made together.
            rows = slice(self._starts[number], self._starts[number + 1])
            self._table[rows] = stacks.addresses
            if stacks.prefixes is not None:
                self._is_checked[rows], self._has_prefixes = False, True
        self._parts[number] = part
        self._held = list(self._parts.values())
        return part
