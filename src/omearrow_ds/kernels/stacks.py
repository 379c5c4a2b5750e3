"""Images in memory, their addresses, and requests for the pages of mapped files."""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, thread
from resource import RUSAGE_SELF, getrusage
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.kernels.scaling import Array

Guard = Callable[[int, int], object]
Rows = tuple[Array, int]  # (n,) int64, the first row of a window in each image, and its height, also beyond edges.
_PIECE_BYTES = 2**17  # Linux reads at most its read-ahead window per request, by default 128 kB; the rest would fault.
_GAP_BYTES = mmap.PAGESIZE
_PIDFD_OPEN, _PROCESS_MADVISE = 434, 440  # Numbers of system calls, equal on all architectures.
_MADV_POPULATE_READ = 22  # Since Linux 5.14; unlike a read, it raises no signal if the file was truncated.
_MAX_RANGES = 1024  # Ranges per system call.
_NUM_BATCHES = 16
_NUM_RECENT, _RECENT_NS = 16, 10**9  # Images of the last 16 requests are not requested again within a second.
_QUERY_NS = 10**6  # `getrusage` takes as long as scaling a small image, and a wait for a disk takes longer than this.


class ImageAddresses(NamedTuple):
    """Addresses of images, (n,) int64, and the object that keeps their memory alive.

    ``alignment`` is the remainder of all addresses modulo the item size, or None if it may differ.
    """

    addresses: Array
    owner: Any
    alignment: int | None = None


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

    ``is_checked`` (N,) bool are the images that were compared, and ``flags`` is the same memory as a `bytearray`, which
    returns a single value faster. ``num_unchecked`` counts the others, or fewer while several threads compare some; it
    is 0 only if none is left.
    """

    def __init__(self, addresses: Array, distances: Array, expected: Array, refuse: Callable[[int], object]) -> None:
        self.addresses, self.distances, self._refuse = addresses, distances, refuse
        self._expected, self.num_bytes = [row.tobytes() for row in expected], expected.shape[1]
        self.flags, self.num_unchecked = bytearray(len(addresses)), len(addresses)
        self.is_checked = np.frombuffer(self.flags, bool)

    def page_ranges(self, indices: Array) -> Array:
        """Return the page ranges of the bytes before the chunks of images that were not checked before."""
        starts = self.addresses[indices[~self.is_checked[indices]]][:, None] + self.distances
        return _page_ranges(starts.ravel(), self.num_bytes)

    def check(self, indices: Iterable[int]) -> None:
        """Compare the bytes before the chunks of images that were not checked before."""
        expected = self._expected
        for index in indices:
            if self.flags[index]:
                continue
            starts = (int(self.addresses[index]) + self.distances).tolist()
            stored = [ctypes.string_at(start, len(prefix)) for start, prefix in zip(starts, expected, strict=True)]
            if stored != expected:
                self._refuse(index)
            self.flags[index] = 1
            self.num_unchecked = self.num_unchecked - 1 if self.num_unchecked > 1 else self.flags.count(0)


class Stacks:
    """Images of one shape and dtype, in order in one or more ``arrays`` (n, ...) of any strides.

    ``guard`` is called before each access to arrays in a mapped file, with the number of files that are checked
    together and the time (`monotonic_ns`), and raises an error if the file was truncated or changed. ``prefixes`` are
    bytes to compare before the first use of an image. Pages of mapped files (``is_mapped``) may have to be read.
    ``file`` is the only mapped file of all images, or None.

    ``like`` is an array (n, ...) of the images' shape and dtype, and ``single_array`` the only array, or None.
    """

    needs_file_groups = False  # Whether images are in more files than may be open at once.

    def __init__(
        self,
        arrays: Sequence[Array],
        guard: Guard | None = None,
        prefixes: Prefixes | None = None,
        *,
        is_mapped: bool = False,
        file: mmap.mmap | None = None,
    ) -> None:
        self.arrays, self.guard, self.prefixes, self.like, self.file = arrays, guard, prefixes, arrays[0], file
        self.requests = PageRequests() if is_mapped else None
        self.single_array = arrays[0] if len(arrays) == 1 else None
        self._starts = [0, *itertools.accumulate(map(len, arrays))]
        self.num_images = self._starts[-1]
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

    def prepare(self, indices: Array, rows: Rows | None = None) -> None:
        """Request the pages of a batch if reads had to wait for the disk, and check its images before their first use.

        Call it once per batch, before its images, or the given rows of (T, C, Z, Y, X), are accessed. Raises
        `FormatError` if the file was changed, or if the bytes before the chunks of an image are wrong.
        """
        requests, prefixes, now_ns = self.requests, self.prefixes, monotonic_ns()
        if requests is not None and now_ns >= requests.query_ns and requests.is_needed(self._is_cold):
            request_pages(self.page_ranges(indices, rows))
        if self.guard is not None:
            self.guard(1, now_ns)
        if prefixes is not None and prefixes.num_unchecked and b"\0" in prefixes.is_checked[indices].tobytes():
            prefixes.check(indices.tolist())

    def prepare_image(self, index: int) -> None:
        """Prepare a single image of a mapped file, as `prepare` does for a batch."""
        requests, prefixes, now_ns = self.requests, self.prefixes, monotonic_ns()
        if requests is not None and now_ns >= requests.query_ns and requests.is_needed(self._is_cold):
            request_pages(self.page_ranges(np.array([index])))
        if self.guard is not None:
            self.guard(1, now_ns)
        if prefixes is not None and not prefixes.flags[index]:
            prefixes.check((index,))

    def _is_cold(self) -> bool:
        image = self[len(self) // 2]  # Opening may have read the beginning and the end of the file.
        middle = sum(length // 2 * stride for length, stride in zip(image.shape, image.strides, strict=True))
        return not is_resident(_address(image) + middle)

    def page_ranges(self, indices: Array, rows: Rows | None = None) -> Array:
        """Return the page ranges of images, or of rows of images (T, C, Z, Y, X); see `request_pages`.

        Images whose page ranges were returned recently are left out.
        """
        if rows is None:
            indices = self._drop_recent(indices)
            if self._image_range is not None:
                first, num_bytes = self._image_range
                return _page_ranges(self.addresses[indices] + first, num_bytes)
        ranges = _page_ranges_of_images(self.addresses[indices], self.like, rows)
        return ranges if self.prefixes is None else np.concatenate([ranges, self.prefixes.page_ranges(indices)])

    def _drop_recent(self, indices: Array) -> Array:
        """Return the images that were not requested recently, and record them as requested."""
        now_ns = monotonic_ns()
        # The copy is atomic: other threads may append meanwhile.
        recent = set().union(*(images for ns, images in tuple(self._recent) if now_ns - ns < _RECENT_NS))
        others = [index for index in indices.tolist() if index not in recent]
        self._recent.append((now_ns, others))
        return np.array(others, np.int64)

    @functools.cached_property
    def _image_range(self) -> tuple[int, int] | None:
        """Offset and length of the range of an image and the bytes before its chunks; None if it is not one range."""
        prefixes, addresses = self.prefixes, self.addresses
        if prefixes is None or not len(addresses) or addresses[0] != prefixes.addresses[0]:
            return None
        offsets, span_bytes = byte_ranges(self.like)
        first, stop = int(offsets[0]), int(offsets[0]) + span_bytes
        start = min(first, int(prefixes.distances.min(initial=first)))
        last = int(prefixes.distances.max(initial=start)) + prefixes.num_bytes
        is_one = len(offsets) == 1 and first - start <= _GAP_BYTES and last <= stop
        return (start, stop - start) if is_one else None

    def located(self, indices: Array) -> ImageAddresses:
        """Return the addresses of images; call `prepare` first, since this method does not check them."""
        return ImageAddresses(self.addresses[indices], self.arrays, self.alignment)

    def write_in_file_groups(self, indices: Array, out: Array, write: Callable[[Array, Array], object]) -> bool:
        """Create a batch file group by file group if the limit of open files requires it; return False otherwise.

        ``write`` gets the positions in ``indices`` of the images of a group, and the array for these samples.
        """
        groups = self._file_groups(indices)
        for positions in groups:
            samples = np.empty((len(positions), *out.shape[1:]), out.dtype)
            write(positions, samples)
            out[positions] = samples
        return bool(groups)

    def _file_groups(self, indices: Array) -> list[Array]:  # noqa: ARG002  # Used by subclasses that open files.
        """Return the positions of images whose files may be open at once; no groups if all files may be."""
        return []

    def overlaid_array(self, indices: Array) -> tuple[Array, Array]:
        """Return an array over the memory of images with equal strides, and the index of each image in it.

        Its other elements overlap and have undefined values, so they must not be read.
        """
        (addresses, owner, _), like = self.located(indices), self.like
        first = int(np.minimum.reduce(addresses))
        numbers = addresses - first
        shape, strides = (int(np.maximum.reduce(numbers)) + 1, *like.shape[1:]), (1, *like.strides[1:])
        data = {"data": (first, True), "shape": shape, "strides": strides, "typestr": like.dtype.str, "version": 3}
        return np.asarray(_ArrayInterface(data, owner)), numbers

    @functools.cached_property
    def addresses(self) -> Array:
        """(N,) int64, the address of each image."""
        return np.concatenate([_address(array) + np.arange(len(array)) * array.strides[0] for array in self.arrays])

    @functools.cached_property
    def has_equal_strides(self) -> bool:
        return all(same_strides(array, self.like) for array in self.arrays)

    @functools.cached_property
    def contiguous(self) -> bool:
        return self.has_equal_strides and bool(self.like[:1].flags.c_contiguous)

    @functools.cached_property
    def _has_item_strides(self) -> bool:
        """Whether images have equal strides, which are multiples of the item size."""
        return self.has_equal_strides and not any(stride % self.like.itemsize for stride in self.like.strides[1:])

    @functools.cached_property
    def alignment(self) -> int | None:
        """Remainder of the address of each image modulo the item size; None if images differ."""
        addresses, size = self.addresses, self.like.itemsize
        remainder = int(addresses[0]) % size if len(addresses) else 0
        return None if ((addresses - remainder) % size).any() else remainder

    def strided_groups(self, indices: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yield groups of images whose distances in memory are multiples of the item size.

        Each group is an array (n, ...) that only defines shape, strides and address, the positions of its images in
        ``indices``, and their offsets from this address in elements. Yields nothing if strides differ or are not
        multiples of the item size. The memory is valid only until the next group is requested.
        """
        size, array = self.like.itemsize, self.single_array
        if not self._has_item_strides:
            return
        if array is not None and not array.strides[0] % size:
            yield array, np.arange(len(indices)), indices * (array.strides[0] // size)
            return
        located = self.located(indices)  # Keeps the memory alive.
        yield from strided_groups(located.addresses, self.like, located.alignment)


class SelectedStacks(Stacks):
    """Images at the indices ``selected``, int64, of other stacks, without a copy."""

    def __init__(self, stacks: Stacks, selected: Array) -> None:
        super().__init__(stacks.arrays, stacks.guard)
        self._stacks, self._selected = stacks, selected
        self.requests, self.needs_file_groups = stacks.requests, stacks.needs_file_groups
        self.single_array, self.num_images = None, len(selected)

    def __getitem__(self, index: int) -> Array:
        return self._stacks[int(self._selected[index])]

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        stacks = SelectedStacks(self._stacks.cut(cut), self._selected)
        stacks.requests = self.requests
        return stacks

    def prepare(self, indices: Array, rows: Rows | None = None) -> None:
        self._stacks.requests = self.requests
        self._stacks.prepare(self._selected[indices], rows)

    def prepare_image(self, index: int) -> None:
        self._stacks.requests = self.requests
        self._stacks.prepare_image(int(self._selected[index]))

    def page_ranges(self, indices: Array, rows: Rows | None = None) -> Array:
        return self._stacks.page_ranges(self._selected[indices], rows)

    def located(self, indices: Array) -> ImageAddresses:
        return self._stacks.located(self._selected[indices])

    def _file_groups(self, indices: Array) -> list[Array]:
        return self._stacks._file_groups(self._selected[indices])  # noqa: SLF001  # Same base class.


def same_strides(array: Array, like: Array) -> bool:
    both = zip(array.shape[1:], array.strides[1:], like.strides[1:], strict=True)
    return all(step == other for length, step, other in both if length > 1)


def strided_groups(addresses: Array, like: Array, alignment: int | None = None) -> Iterator[tuple[Array, Array, Array]]:
    """Yield groups of images like ``like`` (n, ...), whose memory the caller keeps; see `Stacks.strided_groups`.

    ``alignment`` is described in `ImageAddresses`.
    """
    size, kind = like.itemsize, (like.dtype, like.shape[1:], like.strides[1:])
    remainder = int(addresses[0]) % size if alignment is None else alignment
    origin, first = _origin(remainder, *kind)
    distances = addresses - first
    if alignment is not None or not int(np.bitwise_or.reduce(distances)) % size:  # Item sizes are powers of two.
        yield origin, np.arange(len(distances)), distances // size
        return
    remainders = addresses % size
    for remainder in np.unique(remainders).tolist():
        positions = np.flatnonzero(remainders == remainder)
        origin, first = _origin(remainder, *kind)
        yield origin, positions, (addresses[positions] - first) // size


@functools.lru_cache(256)
def _origin(offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Array, int]:
    """Return an array (1, ...) with the strides of an image, and its address, ``offset`` modulo the item size."""
    pixel = np.empty(2 * dtype.itemsize, np.uint8)[offset:][: dtype.itemsize].view(dtype)
    origin = np.lib.stride_tricks.as_strided(pixel, (1, *shape), (0, *strides))
    return origin, _address(origin)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _page_ranges_of_images(addresses: Array, like: Array, rows: Rows | None) -> Array:
    """Return the page ranges of images like ``like`` (m, ...), or of ``rows`` of images like (m, T, C, Z, Y, X)."""
    if rows is not None:
        tops, num_rows = rows
        first_rows = np.clip(tops, 0, max(like.shape[4] - num_rows, 0))
        addresses, like = addresses + first_rows * like.strides[4], like[:, :, :, :, :num_rows]
    offsets, span_bytes = byte_ranges(like)
    return _page_ranges((addresses[:, None] + offsets).ravel(), span_bytes)


def byte_ranges(like: Array) -> tuple[Array, int]:
    """Return the offsets of the byte ranges of an image of ``like`` (m, ...), and the length of each range in bytes.

    Ranges are merged across gaps of up to one page.
    """
    offsets, span_bytes = np.zeros(1, np.int64), like.itemsize
    axes = zip(like.shape[1:], like.strides[1:], strict=True)
    for length, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if len(offsets) > 1 or abs(stride) > span_bytes + _GAP_BYTES:
            offsets = (offsets[:, None] + stride * np.arange(length)).ravel()
        else:
            span_bytes += (length - 1) * abs(stride)
            offsets += min((length - 1) * stride, 0)
    return offsets, span_bytes


def _page_ranges(starts: Array, num_bytes: int) -> Array:
    """Return byte ranges of one length as page ranges, each of which Linux reads with one request."""
    first_pages = starts - starts % mmap.PAGESIZE
    offsets = np.arange(0, num_bytes + mmap.PAGESIZE, _PIECE_BYTES)
    lengths = (starts + num_bytes - first_pages)[:, None] - offsets
    ranges: Array = np.stack([first_pages[:, None] + offsets, np.minimum(lengths, _PIECE_BYTES)], axis=2)[lengths > 0]
    return ranges


def request_pages(ranges: Array) -> None:
    """Ask Linux to read pages of mapped files: ranges (n, 2) int64, the address of a page and a length in bytes.

    One system call requests many ranges, or each requests one if the kernel does not permit this.
    """
    if not len(ranges):  # All pages were requested recently.
        return
    libc = _libc()
    process = libc.syscall(_PIDFD_OPEN, os.getpid(), 0, 0, 0, 0)
    for first in range(0, len(ranges), _MAX_RANGES):
        group = np.ascontiguousarray(ranges[first : first + _MAX_RANGES])
        call = (_PROCESS_MADVISE, process, group.ctypes.data, len(group), mmap.MADV_WILLNEED, 0)
        if libc.syscall(*call) < 0:
            for address, num_bytes in group.tolist():
                libc.madvise(address, num_bytes, mmap.MADV_WILLNEED)  # Only advice: errors do not matter.
    if process >= 0:
        os.close(process)


class PageThread:
    """Thread that requests pages, and maps those of the last request while the program uses a batch.

    A request takes as long as scaling an image of its size, and so do the page faults of an image in the page cache.
    Mapping waits for the disk, so it ends before the next request, and at exit.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "omearrow-ds-pages")
        self._requested: Array | None = None  # Page ranges of the last request.

    def request(self, ranges: Array) -> None:
        if len(ranges):
            self._requested = ranges
            self._executor.submit(request_pages, ranges)

    def map_requested(self) -> None:
        """Map the pages of the last request into the memory of this process, until the next request."""
        if self._requested is not None:
            self._executor.submit(self._map, self._requested)

    def _map(self, ranges: Array) -> None:
        for address, num_bytes in ranges.tolist():
            if self._requested is not ranges or thread._shutdown:  # noqa: SLF001  # An exit waits for this thread.
                return
            _libc().madvise(address, num_bytes, _MADV_POPULATE_READ)  # Only advice, as in `request_pages`.
        self._requested = None


@functools.lru_cache(1)
def _page_thread_of(pid: int) -> PageThread:  # noqa: ARG001  # A forked process has no threads.
    return PageThread()


def page_thread() -> PageThread:
    """Return the thread of this process that requests pages."""
    return _page_thread_of(os.getpid())


def request_files(paths: Iterable[str], max_bytes: int) -> None:
    """Ask Linux to read the first ``max_bytes`` of files that are not memory-mapped."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # Reading it raises the error.
        try:
            stop = min(os.fstat(descriptor).st_size, max_bytes)
            for first in range(0, stop, _PIECE_BYTES):
                os.posix_fadvise(descriptor, first, min(_PIECE_BYTES, stop - first), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def is_resident(address: int) -> bool:
    """Return whether the page at an address is in memory; True if the file belongs to another user."""
    page = ctypes.c_ubyte(1)
    _libc().mincore(address - address % mmap.PAGESIZE, 1, ctypes.byref(page))
    return bool(page.value & 1)


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.syscall.argtypes, library.syscall.restype = [ctypes.c_long] * 6, ctypes.c_long
    library.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return library
