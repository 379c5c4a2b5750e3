"""Images in memory, in one or more arrays, and their addresses."""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from resource import RUSAGE_SELF, getrusage
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.kernels.page_requests import GAP_BYTES, Rows, byte_ranges, is_resident, request, request_ranges
from omearrow_ds.kernels.scaling import Array

Guard = Callable[[int], object]
_NUM_BATCHES = 16
_NUM_RECENT, _RECENT_NS = 16, 10**9  # Images of the last 16 requests are not requested again within a second.
_QUERY_NS = 10**6  # `getrusage` takes as long as scaling a small image, and a wait for a disk takes longer than this.


class ImageAddresses(NamedTuple):
    """Addresses of images, (n,) int64, and the object ``owner`` that keeps their memory alive."""

    addresses: Array
    owner: Any


class _ArrayInterface:
    """Array interface that keeps a reference to the owner of its memory."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__, self.owner = interface, owner


class PageRequests:
    """Rule that decides for which batches pages are requested.

    A page fault reads one read-ahead window, and the thread waits for it. Requests for all images of a batch let the
    disk read them together. Requests for pages in the page cache cost up to a third of dividing these images.
    Therefore pages are requested for 16 batches after the process read from a disk. Races between threads only shift
    when requests begin or end. ``num_remaining`` counts the batches whose pages are requested, including the current
    one, and ``query_ns`` is the time (`monotonic_ns`) of the next query.
    """

    def __init__(self) -> None:
        self._num_reads, self.num_remaining, self.query_ns = -1, 0, 0

    def is_needed(self, is_cold: Callable[[], bool] = bool) -> bool:
        """Return whether to request the pages of a batch; call this once per batch, but not before the time `query_ns`.

        ``is_cold`` returns whether the first batch has to be read from a disk.
        """
        usage, previous = getrusage(RUSAGE_SELF), self._num_reads
        self._num_reads = usage.ru_majflt + usage.ru_inblock
        has_waited = self._num_reads != previous if previous >= 0 else is_cold()
        self.num_remaining = _NUM_BATCHES if has_waited else max(self.num_remaining - 1, 0)
        self.query_ns = 0 if self.num_remaining else monotonic_ns() + _QUERY_NS
        return self.num_remaining > 0


class Prefixes:
    """Check of memory-mapped images: the bytes before each chunk must equal expected bytes.

    ``addresses`` (N,) int64 are the first pixels of the images, ``distances`` (K,) int64 the offsets from there to the
    bytes before each of the K chunks of an image, and ``expected`` (K, W) uint8 the values of these bytes. ``refuse``
    is called with the index of an image whose bytes differ, and raises the error.

    ``is_checked`` (N,) bool and the `bytearray` ``flags``, one byte of which is read faster, are the images that were
    compared. ``num_unchecked`` counts the others, or fewer while several threads compare some; it is 0 only if none is
    left.
    """

    def __init__(self, addresses: Array, distances: Array, expected: Array, refuse: Callable[[int], object]) -> None:
        self._addresses, self._distances, self._refuse = addresses, distances, refuse
        self._expected = [row.tobytes() for row in expected]
        self.flags, self.num_unchecked = bytearray(len(addresses)), len(addresses)
        self.is_checked = np.frombuffer(self.flags, bool)

    def request(self, indices: Array) -> None:
        """Request the pages that `check` will read for images that it has not checked."""
        starts = self._addresses[indices[~self.is_checked[indices]]][:, None] + self._distances
        request_ranges(starts.ravel(), np.full(starts.size, len(self._expected[0])))

    def page_range(self, addresses: Array, like: Array) -> tuple[int, int] | None:
        """Return offset and length of the bytes of an image and before its chunks.

        Return None if they are several ranges, or if ``addresses`` are those of regions.
        """
        offsets, span_bytes = byte_ranges(like)
        first, stop = int(offsets[0]), int(offsets[0]) + span_bytes
        start = min(first, int(self._distances.min(initial=first)))
        last = int(self._distances.max(initial=start)) + len(self._expected[0])
        are_whole = len(addresses) > 0 and addresses[0] == self._addresses[0]
        is_one = are_whole and len(offsets) == 1 and first - start <= GAP_BYTES and last <= stop
        return (start, stop - start) if is_one else None

    def check(self, indices: Iterable[int]) -> None:
        """Compare the bytes before the chunks of images that were not checked before."""
        expected = self._expected
        for index in indices:
            if self.flags[index]:
                continue
            starts = (int(self._addresses[index]) + self._distances).tolist()
            stored = [ctypes.string_at(start, len(prefix)) for start, prefix in zip(starts, expected, strict=True)]
            if stored != expected:
                self._refuse(index)
            self.flags[index] = 1
            self.num_unchecked = self.num_unchecked - 1 if self.num_unchecked > 1 else self.flags.count(0)


class Stacks:
    """Images of one shape and dtype, in one array or several.

    Parameters
    ----------
    arrays
        Arrays (n, ...) that hold the images in order; any strides.
    guard
        Called before each access to arrays in a mapped file, with the number of files that are checked together;
        raises an error if the file was truncated or changed.
    prefixes
        Bytes to compare before the first use of an image, or None.
    is_mapped
        Whether the arrays are views of a mapped file, whose pages may have to be read.

    Attributes
    ----------
    like
        An array (n, ...) of the images' shape and dtype.
    arrays
        Arrays that hold the images in order.
    single_array
        The only array, or None if there are several.
    num_images
        Number of images.
    many
        Whether images are in more files than may be open at once.
    """

    many = False

    def __init__(
        self,
        arrays: Sequence[Array],
        guard: Guard | None = None,
        prefixes: Prefixes | None = None,
        *,
        is_mapped: bool = False,
    ) -> None:
        self.arrays, self.guard, self.prefixes, self.like = arrays, guard, prefixes, arrays[0]
        self.requests = PageRequests() if is_mapped else None
        self.single_array = arrays[0] if len(arrays) == 1 else None
        self._starts = [0, *itertools.accumulate(map(len, arrays))]
        self.num_images = self._starts[-1]
        self._origins: dict[int, tuple[Array, int]] = {}
        self._recent: deque[tuple[int, list[int]]] = deque(maxlen=_NUM_RECENT)  # Times and images of requests.

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> Array:
        """Return an image as a view, which `prepare` checks."""
        number = bisect.bisect_right(self._starts, index) - 1
        image: Array = self.arrays[number][index - self._starts[number]]
        return image

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        """Return stacks of a region of each image; ``cut`` returns this region as a view of an array of images."""
        stacks = Stacks([cut(array) for array in self.arrays], self.guard, self.prefixes)
        stacks.requests = self.requests
        return stacks

    def prepare(self, indices: Array | int, rows: Rows | None = None) -> None:
        """Request the pages of a batch if reads had to wait for the disk, and check its images before their first use.

        Call it once per batch, before its images, or the given rows of (T, C, Z, Y, X), are accessed. Waits of reads
        are queried once per millisecond. Raises `FormatError` if the file was changed, or if the bytes before the
        chunks of an image are wrong.
        """
        requests, prefixes = self.requests, self.prefixes
        if requests is not None and monotonic_ns() >= requests.query_ns and requests.is_needed(self._is_cold):
            self.request(np.atleast_1d(indices), rows)
        if self.guard is not None:
            self.guard(1)
        if prefixes is not None and prefixes.num_unchecked:
            if isinstance(indices, int):
                if not prefixes.flags[indices]:
                    prefixes.check((indices,))
            elif b"\0" in prefixes.is_checked[indices].tobytes():
                prefixes.check(indices.tolist())

    def _is_cold(self) -> bool:
        image = self[len(self) // 2]  # Opening may have read the beginning and the end of the file.
        middle = sum(length // 2 * stride for length, stride in zip(image.shape, image.strides, strict=True))
        return not is_resident(_address(image) + middle)

    def request(self, indices: Array, rows: Rows | None = None) -> None:
        """Request the pages of images, or of rows of images (T, C, Z, Y, X), unless they were requested recently."""
        if rows is None:
            indices = self._drop_recent(indices)
            if self._page_range is not None:
                first, num_bytes = self._page_range
                request_ranges(self.addresses[indices] + first, np.full(len(indices), num_bytes))
                return
        request(self.addresses[indices], self.like, rows)
        if self.prefixes is not None:
            self.prefixes.request(indices)

    def _drop_recent(self, indices: Array) -> Array:
        """Return the images that were not requested recently, and record them as requested."""
        now_ns = monotonic_ns()
        # The copy is atomic: other threads may append meanwhile.
        recent = set().union(*(images for ns, images in tuple(self._recent) if now_ns - ns < _RECENT_NS))
        others = [index for index in indices.tolist() if index not in recent]
        self._recent.append((now_ns, others))
        return np.array(others, np.int64)

    @functools.cached_property
    def _page_range(self) -> tuple[int, int] | None:
        """Offset and length of the only byte range of an image, if this contains the bytes before its chunks."""
        return None if self.prefixes is None else self.prefixes.page_range(self.addresses, self.like)

    def located(self, indices: Array) -> ImageAddresses:
        """Return the addresses of images; call `prepare` first, since this method does not check them."""
        return ImageAddresses(self.addresses[indices], self.arrays)

    def in_open_file_groups(self, indices: Array, out: Array, write: Callable[[Array, Array], object]) -> bool:
        """Create a batch in several groups if the limit of open files requires it; return False if one group is enough.

        ``write`` gets the positions in ``indices`` of each turn, and the array for these samples.
        """
        turns = self._turns(indices)
        for positions in turns:
            samples = np.empty((len(positions), *out.shape[1:]), out.dtype)
            write(positions, samples)
            out[positions] = samples
        return bool(turns)

    def _turns(self, indices: Array) -> list[Array]:  # noqa: ARG002  # Used by subclasses that open files.
        """Return the positions of images per turn, or an empty list if one turn is enough."""
        return []

    def overlaid_array(self, indices: Array) -> tuple[Array, Array]:
        """Return an array over the memory of the images, and the index of each image in it.

        The stacks must have equal strides (`has_equal_strides`).

        Its other elements overlap and have undefined values, so they must not be read.
        """
        (addresses, owner), like = self.located(indices), self.like
        first = int(np.minimum.reduce(addresses))
        numbers = addresses - first
        shape, strides = (int(np.maximum.reduce(numbers)) + 1, *like.shape[1:]), (1, *like.strides[1:])
        data = {"data": (first, True), "shape": shape, "strides": strides, "typestr": like.dtype.str, "version": 3}
        return np.asarray(_ArrayInterface(data, owner)), numbers

    @functools.cached_property
    def addresses(self) -> Array:
        """(N,) int64, the address of each image."""
        starts = (_address(array) + np.arange(len(array)) * array.strides[0] for array in self.arrays)
        return np.concatenate(list(starts))

    @functools.cached_property
    def has_equal_strides(self) -> bool:
        return all(same_strides(array, self.like) for array in self.arrays)

    @functools.cached_property
    def contiguous(self) -> bool:
        return self.has_equal_strides and bool(self.like[:1].flags.c_contiguous)

    def strided_groups(self, indices: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yield groups of images whose distances in memory are multiples of the item size.

        Each group is an array (n, ...) that only defines shape, strides and address, the positions of its images in
        ``indices``, and their offsets from this address in elements. Yields nothing if strides differ or are not
        multiples of the item size. The memory is valid only until the next group is requested.
        """
        size, only = self.like.itemsize, self.single_array
        if not self.has_equal_strides or any(stride % size for stride in self.like.strides[1:]):
            return
        if only is not None and not only.strides[0] % size:
            yield only, np.arange(len(indices)), indices * (only.strides[0] // size)
            return
        located = self.located(indices)
        origin, first = self._origin(int(located.addresses[0]) % size)
        after = located.addresses - first
        if not int(np.bitwise_or.reduce(after)) % size:  # Item sizes are powers of two.
            yield origin, np.arange(len(after)), after // size
            return
        rests = located.addresses % size
        for rest in np.unique(rests).tolist():
            which = np.flatnonzero(rests == rest)
            origin, first = self._origin(rest)
            yield origin, which, (located.addresses[which] - first) // size

    def _origin(self, rest: int) -> tuple[Array, int]:
        """Return an array (1, ...) with the strides of an image, and its address.

        The address modulo the item size is ``rest``.
        """
        if rest not in self._origins:
            pixel = np.empty(2 * self.like.itemsize, np.uint8)[rest:][: self.like.itemsize].view(self.like.dtype)
            strides = (0, *self.like.strides[1:])
            origin = np.lib.stride_tricks.as_strided(pixel, (1, *self.like.shape[1:]), strides)
            self._origins[rest] = origin, _address(origin)
        return self._origins[rest]


class SelectedStacks(Stacks):
    """Selected images of other stacks, without a copy.

    Parameters
    ----------
    stacks
        All images.
    selected
        Indices of the images, int64.
    """

    def __init__(self, stacks: Stacks, selected: Array) -> None:
        super().__init__(stacks.arrays, stacks.guard)
        self._stacks, self._selected = stacks, selected
        self.requests, self.many = stacks.requests, stacks.many
        self.single_array, self.num_images = None, len(selected)

    def __getitem__(self, index: int) -> Array:
        return self._stacks[int(self._selected[index])]

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        """Return stacks of one region per image; see `Stacks.cut`."""
        stacks = SelectedStacks(self._stacks.cut(cut), self._selected)
        stacks.requests = self.requests
        return stacks

    def prepare(self, indices: Array | int, rows: Rows | None = None) -> None:
        """Request pages and check images before an access; see `Stacks.prepare`."""
        self._stacks.requests = self.requests
        selected = self._selected[indices]
        self._stacks.prepare(selected if isinstance(selected, np.ndarray) else int(selected), rows)

    def request(self, indices: Array, rows: Rows | None = None) -> None:
        """Request the pages of images; see `Stacks.request`."""
        self._stacks.request(self._selected[indices], rows)

    def located(self, indices: Array) -> ImageAddresses:
        """Return the addresses of images; see `Stacks.located`."""
        return self._stacks.located(self._selected[indices])

    def _turns(self, indices: Array) -> list[Array]:
        return self._stacks._turns(self._selected[indices])  # noqa: SLF001  # Same base class.


def same_strides(array: Array, like: Array) -> bool:
    """Whether an image has the same strides in ``array`` as in ``like``, ignoring axes of length 1."""
    both = zip(array.shape[1:], array.strides[1:], like.strides[1:], strict=True)
    return all(step == other for length, step, other in both if length > 1)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
