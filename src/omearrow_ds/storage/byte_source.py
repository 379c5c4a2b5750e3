"""Bytes of files: memory-mapped, opened for each read, or fetched by ranges from an object store.

Only this module distinguishes local files from objects; formats and `omearrow_ds.storage.extents` read a `ByteSource`.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from time import monotonic_ns
from typing import Any, ClassVar

import numpy as np

from omearrow_ds.errors import FormatError, OMEArrowDSError
from omearrow_ds.resources import read_ahead_bytes

Array = np.ndarray[Any, Any]
ByteRange = tuple[int, int]  # Start and stop, half-open.
Copy = tuple[Array, Array]  # Array to fill, and its pixels.
STATUS_NS = 10**6  # Time between two checks of the status of a file, which cost more than reading a small image.
HEAD_BYTES = 2**16  # Fetched from the start of an object when it is opened.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # No link, and no waiting for a pipe's writer.
_MAX_GAP_BYTES = 2**13  # Largest gap between ranges that are fetched by one request.
_MIN_READ_BYTES = 2**15  # Smallest cached read of a library, which reads headers in small steps.


class MappedFile:
    """Memory-mapped local file, with the map as ``file`` (a buffer for Arrow) and as uint8 ``data``.

    If it is truncated, touching the missing bytes ends the process (SIGBUS). Overwritten bytes appear in the map. A
    file that replaces it at its path does not. ``read_ahead_bytes`` are those that the disk reads per page fault.
    """

    lock: AbstractContextManager[Any] = nullcontext()  # Threads may read it at once.

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.name, self.size_bytes, self.read_ahead_bytes = str(path), len(self.file), read_ahead_bytes(status.st_dev)
        self.data: Array = np.frombuffer(self.file, np.uint8)
        self._view = self.data.data
        self._mapped_bytes, self._check_ns = self.size_bytes, 0
        self._file_number, self._modified_ns = (status.st_dev, status.st_ino), status.st_mtime_ns

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        data = self._view
        return [data[start:stop] for start, stop in ranges]

    def read_tail(self, num_bytes: int) -> memoryview:
        return self._view[max(0, self.size_bytes - num_bytes) :]

    def cache_ranges(self, ranges: Sequence[ByteRange]) -> None: ...

    def clear_cache(self) -> None: ...

    @contextmanager
    def read_at_random(self) -> Iterator[None]:
        """Within this context, read single pages instead of one read-ahead window per page fault."""
        self.file.madvise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            self.file.madvise(mmap.MADV_NORMAL)

    def refuse_changed(self, num_files: int = 1, now_ns: int = 0) -> None:
        """Raise `FormatError` if the file was resized or overwritten after it was mapped.

        ``now_ns`` is the time (`monotonic_ns`), 0 to read it.
        """
        # The length takes 0.4 us and is checked each time. The status takes 1.5 us and is checked once per millisecond
        # and file, or less often if ``num_files`` files are read together.
        if (now_ns or monotonic_ns()) >= self._check_ns:
            self._check_ns = monotonic_ns() + num_files * STATUS_NS
            try:
                status = os.stat(self.name)  # noqa: PTH116  # pathlib would double its cost
            except OSError:  # The file is gone, so it cannot be overwritten.
                status = None
            if status is not None and (status.st_dev, status.st_ino) == self._file_number:
                is_same = status.st_mtime_ns == self._modified_ns
                self._mapped_bytes = self._mapped_bytes if is_same else -1  # From now on.
        if self.file.size() != self._mapped_bytes:
            raise FormatError(f"{self.name}: was changed since it was opened; open it again")


class ChangedFileError(FormatError):
    """Error for a file that was changed after it was opened, or that ends before the last byte of its pixels."""


@dataclass(slots=True, eq=False)
class LocalFile:
    """Local file that is opened for each read, such as a TIFF file."""

    name: str  # Path, or a path relative to ``folder``.
    folder: OpenFolder | None  # Referenced so that no other folder gets its descriptor; None for a full path.
    # Size, modification time, device and inode, or the first of these, which reads compare.
    fingerprint: tuple[int, ...]
    cached_bytes: ClassVar[int] = 0

    @classmethod
    def as_it_is(cls, path: str | os.PathLike[str]) -> LocalFile:
        """Return a file with its current fingerprint; reading it raises an error after the file has changed."""
        status = os.stat(path)  # noqa: PTH116  # pathlib would double its cost
        return cls(str(path), None, (status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino))

    @property
    def size_bytes(self) -> int:
        return self.fingerprint[0]

    @property
    def modified_ns(self) -> int | None:
        return self.fingerprint[1] if len(self.fingerprint) > 1 else None

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Return the bytes of each range, read by one system call per range; see `read_into`."""
        arrays = [np.empty(stop - start, np.uint8) for start, stop in ranges]
        self.read_into([(start, array) for (start, _), array in zip(ranges, arrays, strict=True)])
        return [array.data for array in arrays]

    def read_into(self, reads: Sequence[tuple[int, Array]], copies: Sequence[Copy | None] = ()) -> None:
        """Fill each contiguous array with bytes of the file from its start offset, without an intermediate copy."""
        # After each array, its pixels are copied, so that reads may share one array. Raises `ChangedFileError` if the
        # file ends before, or has another fingerprint.
        descriptor = os.open(self.name, OPEN_FLAGS, dir_fd=None if self.folder is None else self.folder.descriptor)
        try:
            status = os.fstat(descriptor)
            fingerprint = status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
            if fingerprint[: len(self.fingerprint)] != self.fingerprint:
                raise ChangedFileError(f"{self.name}: was replaced or changed since it was opened; open it again")
            for (start, array), copy in zip_longest(reads, copies):
                if os.preadv(descriptor, [array.data], start) < array.nbytes:
                    raise ChangedFileError(f"{self.name}: the file ends before the last byte of its pixels; restore it")
                if copy is not None:
                    copy[0][...] = copy[1]
        finally:
            os.close(descriptor)


class OpenFolder:
    """Descriptor of an open folder, which is closed when the last reference to this instance is deleted, or earlier."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)


@dataclass
class _RangeCache:
    """State that all views of an object share; ``ranges`` is replaced, not modified, so that threads see one state."""

    ranges: list[tuple[int, memoryview]]
    last_error: OMEArrowDSError | None = None
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock)


class ObjectFile(io.RawIOBase):
    """Object in an object store, read by range requests through the interface of a seekable file.

    Threads may call `cache_ranges` and `read_ranges` at once; each sequential reader needs a copy from `reopen`.
    ``fetch`` returns the bytes of ranges, ``version`` is size and ETag, ``head`` are the first bytes, and ``name`` is
    the URL, for errors.
    """

    data = None
    modified_ns = None

    def __init__(
        self,
        fetch: Callable[[Sequence[ByteRange]], list[memoryview]],
        version: tuple[int, str],
        head: memoryview,
        name: str = "",
    ) -> None:
        super().__init__()
        self.name, self._fetch, self.version, self.size_bytes = name, fetch, version, version[0]
        self._position = 0
        self._cache = _RangeCache([(0, head)])

    def reopen(self) -> ObjectFile:
        """Return another view of the object, which starts reading at byte 0 and shares the cached ranges."""
        other = ObjectFile(self._fetch, self.version, memoryview(b""), self.name)
        other._cache = self._cache
        return other

    @property
    def cached_bytes(self) -> int:
        return sum(map(len, map(itemgetter(1), self._cache.ranges)))

    @property
    def last_error(self) -> OMEArrowDSError | None:
        """Last error that was raised while a library read the object, which may have ignored it; else None."""
        return self._cache.last_error

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock to hold while a library seeks and reads, because threads share the read position."""
        return self._cache.lock

    def read_at_random(self) -> AbstractContextManager[None]:
        """Do nothing: the object is not mapped."""
        return nullcontext()

    def refuse_changed(self, num_files: int = 1, now_ns: int = 0) -> None:
        """Do nothing: each request compares size and ETag of the object."""

    def cache_ranges(self, ranges: Sequence[ByteRange]) -> None:
        missing = [byte_range for byte_range in coalesced(ranges) if self._cached(*byte_range) is None]
        if missing:
            fetched = [(start, data) for (start, _), data in zip(missing, self._fetch(missing), strict=True)]
            self._cache.ranges = sorted([*self._cache.ranges, *fetched], key=itemgetter(0))

    def clear_cache(self) -> None:
        self._cache.ranges = [(0, memoryview(b""))]

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Return the bytes of each range; ranges that are not cached are fetched, but not added to the cache."""
        by_range = {byte_range: self._cached(*byte_range) for byte_range in ranges}
        missing = [byte_range for byte_range, data in by_range.items() if data is None]
        if missing:
            by_range |= zip(missing, self._fetch(missing), strict=True)
        return [data for byte_range in ranges if (data := by_range[byte_range]) is not None]

    def read_into(self, reads: Sequence[tuple[int, Array]], copies: Sequence[Copy | None] = ()) -> None:
        """Fill each array with bytes from its start offset; raise `ChangedFileError` if the object is too short."""
        ranges = [(start, start + array.nbytes) for start, array in reads]
        if any(not 0 <= start <= stop <= self.size_bytes for start, stop in ranges):
            raise ChangedFileError(f"{self.name}: the file ends before the last byte of its pixels; restore it")
        for (_, array), data, copy in zip_longest(reads, self.read_ranges(ranges), copies):
            array.reshape(-1).view(np.uint8)[...] = np.frombuffer(data, np.uint8)
            if copy is not None:
                copy[0][...] = copy[1]

    def read_tail(self, num_bytes: int) -> memoryview:
        """Return the last bytes, at most ``num_bytes``, and cache them."""
        tail = (max(0, self.size_bytes - num_bytes), self.size_bytes)
        self.cache_ranges([tail])
        return self.read_ranges([tail])[0]

    def _cached(self, start: int, stop: int) -> memoryview | None:
        ranges = self._cache.ranges
        first, data = ranges[bisect.bisect_right(ranges, start, key=itemgetter(0)) - 1]
        return data[start - first : stop - first] if stop <= first + len(data) else None

    def readinto(self, buffer: Any) -> int:
        try:
            return self._read_into(buffer)
        except OMEArrowDSError as error:
            self._cache.last_error = error
            raise

    def _read_into(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._position + len(target), self.size_bytes)
        if stop <= self._position:
            return 0
        if stop - self._position < _MIN_READ_BYTES and self._cached(self._position, stop) is None:
            self.cache_ranges([(self._position, min(self._position + _MIN_READ_BYTES, self.size_bytes))])
        (data,) = self.read_ranges([(self._position, stop)])
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = max(0, offset + origin)
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


ByteSource = MappedFile | ObjectFile


def version_fingerprint(version: tuple[int, str]) -> tuple[int, int]:
    """Return the size of an object and a hash of its ETag; sources store this pair as the fingerprint of the object."""
    return version[0], int.from_bytes(hashlib.blake2b(version[1].encode(), digest_size=16).digest())


def coalesced(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Return the ranges sorted by start, with overlapping and nearby ranges merged."""
    merged: list[ByteRange] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1] + _MAX_GAP_BYTES:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
