"""Fetches in threads that run before their results are needed, and fetches of whole parts into files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from omearrow_ds.errors import FormatError, OMEArrowDSError
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.hashes import part_hash
from omearrow_ds.storage.manifest import PARTS, PublishedPart
from omearrow_ds.storage.part_cache import PartCache, write_all
from omearrow_ds.storage.remote import ObjectStore

RANGED_BYTES = 2**25  # Larger parts are fetched in ranges.
_RANGE_BYTES, _NUM_RANGES = 2**24, 4  # Size and concurrency of ranges.
_READ_BYTES = 2**20
OnBytes = Callable[[int], None]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class FetchCancelledError(Exception):
    """Raised by a fetch that ends early because its result is no longer needed."""


class Prefetcher(Generic[Key, Value]):
    """Queue of fetches by threads, which are called ``name`` and stop early when the interpreter exits.

    At most ``max_running`` fetches run at a time, and ``max_ahead`` were begun but their results not taken. Without
    results, each `schedule` repeats finished fetches, and begins with one at a time: one more runs after each finished
    fetch.
    """

    def __init__(self, name: str, max_ahead: int, max_running: int, *, has_results: bool = True) -> None:
        self.max_ahead, self._name, self._max_running, self._has_results = max_ahead, name, max_running, has_results
        self._queue: dict[Key, Callable[[], Value]] = {}
        self._futures: dict[Key, Future[Value]] = {}  # Fetches whose results were not taken.
        self._started: set[Key] = set()  # Fetches that do not count as ahead.
        self._num_running, self._limit = 0, max_running
        self._lock = threading.Lock()

    def schedule(self, fetches: Mapping[Key, Callable[[], Value]]) -> None:
        """Begin fetches in this order; forget previous ones that are not among them, unless all are queued already."""
        with self._lock:
            if self._has_results and fetches.keys() <= self._futures.keys() | self._queue.keys():
                return
            self._futures = {
                key: future
                for key, future in self._futures.items()
                if key in fetches and (self._has_results or not future.done())
            }
            self._queue = {key: fetch for key, fetch in fetches.items() if key not in self._futures}
            self._started, self._limit = set(), self._max_running if self._has_results else 1
            self._begin_next()

    def start(self, key: Key) -> None:
        """Begin a fetch immediately because its result is needed now, and allow another one in its place."""
        with self._lock:
            fetch = self._queue.pop(key, None)
            if fetch is not None and self.is_wanted:
                self._begin(key, fetch)
            self._started.add(key)
            self._begin_next()

    def take(self, key: Key) -> Future[Value] | None:
        """Return the future of a begun fetch; None, and remove the fetch from the queue, if it has not begun."""
        with self._lock:
            self._queue.pop(key, None)
            future = self._futures.pop(key, None)
            self._started.discard(key)
            self._begin_next()
        return future

    @property
    def is_wanted(self) -> bool:
        """Whether results are still needed; running fetches should stop otherwise."""
        return self.max_ahead > 0 and threading.main_thread().is_alive()

    def _begin_next(self) -> None:
        while self._queue and self.is_wanted and self._num_running < self._limit:
            if len(self._futures.keys() - self._started) >= self.max_ahead:
                return
            key = next(iter(self._queue))
            self._begin(key, self._queue.pop(key))

    def _begin(self, key: Key, fetch: Callable[[], Value]) -> None:
        future = self._futures[key] = Future()
        self._num_running += 1
        threading.Thread(target=self._run, args=(future, fetch), name=self._name).start()

    def _run(self, future: Future[Value], fetch: Callable[[], Value]) -> None:
        report: Callable[[], Any] = partial(future.set_exception, FetchCancelledError())
        try:
            report = partial(future.set_result, fetch())
        except (OMEArrowDSError, OSError, FetchCancelledError) as error:  # The thread that takes the result raises it.
            report = partial(future.set_exception, error)
        finally:
            with self._lock:
                self._num_running -= 1
                self._limit = min(self._limit + 1, self._max_running)
                self._begin_next()
            report()

    def close(self) -> list[Future[Value]]:
        """Begin no more fetches, and return those whose results were not taken; running ones are not wanted anymore."""
        with self._lock:
            futures = list(self._futures.values())
            self._queue, self._futures, self.max_ahead = {}, {}, 0
            return futures


class DownloadProgress:
    """Reports progress of fetching parts to a callback; bytes that are fetched again are not counted."""

    def __init__(self, parts: Sequence[PublishedPart]) -> None:
        self.parts = parts
        self._missing_bytes: list[int] = []
        self._notify: Callable[[int], object] | None = None
        self._lock = threading.Lock()

    def start(self, notify: Callable[[int], object] | None) -> int:
        """Start to report numbers of fetched bytes to ``notify``, and return the total size of all parts in bytes."""
        with self._lock:
            self._notify, self._missing_bytes = notify, [part.size_bytes for part in self.parts]
            return sum(self._missing_bytes)

    def add_bytes(self, number: int, num_bytes: int) -> None:
        """Report more bytes of a part; bytes beyond its size, from a repeated fetch, are ignored."""
        with self._lock:
            if self._notify is not None:
                new_bytes = min(num_bytes, self._missing_bytes[number])
                self._missing_bytes[number] -= new_bytes
                self._notify(new_bytes)


def prefetch_part(
    remote: ObjectStore, cache: PartCache, progress: DownloadProgress, number: int, prefetcher: Prefetcher[int, None]
) -> None:
    """Fetch a part into the cache, unless the cache is full or another process fetches the part."""
    part = progress.parts[number]

    def on_bytes(num_bytes: int) -> None:
        if not prefetcher.is_wanted:
            raise FetchCancelledError
        progress.add_bytes(number, num_bytes)

    with suppress(BlockingIOError):  # The cache is full.
        pinned = cache.try_acquire(part.name, part.size_bytes, partial(fetch_part, remote, part, on_bytes))
        if pinned is not None:
            pinned.close()


def fetch_part(remote: ObjectStore, part: PublishedPart, on_bytes: OnBytes, descriptor: int) -> None:
    """Fetch a part into a file and compare its bytes with the hash in its name.

    ``on_bytes`` receives the number of bytes of each piece, and may raise an exception to abort.
    """
    name, digest = f"{PARTS}/{part.name}", part_hash(part.hash)

    def write(piece: memoryview) -> None:
        on_bytes(len(piece))
        digest.update(piece)
        write_all(descriptor, piece)

    if part.size_bytes <= RANGED_BYTES:
        remote.fetch(name, part.size_bytes, write)
    else:
        for start, stop in _fetch_ranges(remote, part, descriptor, on_bytes):
            for first in range(start, stop, _READ_BYTES):
                digest.update(os.pread(descriptor, min(_READ_BYTES, stop - first), first))
    if digest.hexdigest() != part.hash:
        raise FormatError(
            f"{remote.url}/{name}: the content does not match the hash in the file name; restore the file"
        )


def _fetch_ranges(remote: ObjectStore, part: PublishedPart, descriptor: int, on_bytes: OnBytes) -> Iterator[ByteRange]:
    """Fetch the ranges of a part concurrently, write them at their offsets, and yield them in file order."""
    ranges = Prefetcher[ByteRange, None]("omearrow-ds-range", _NUM_RANGES, _NUM_RANGES)

    def fetch(start: int, stop: int) -> None:
        offset = start

        def write(piece: memoryview) -> None:
            nonlocal offset
            if not ranges.max_ahead:  # Closed after an error.
                raise FetchCancelledError
            on_bytes(len(piece))
            write_all(descriptor, piece, offset)
            offset += len(piece)

        remote.fetch(f"{PARTS}/{part.name}", part.size_bytes, write, span=(start, stop))

    starts = range(0, part.size_bytes, _RANGE_BYTES)
    spans = [(start, min(start + _RANGE_BYTES, part.size_bytes)) for start in starts]
    ranges.schedule({span: partial(fetch, *span) for span in spans})
    try:
        for span in spans:
            future = ranges.take(span)
            if future is None:  # The main thread has ended, so nothing is prefetched.
                fetch(*span)
            else:
                future.result()
            yield span
    finally:
        wait(ranges.close())  # The descriptor is closed next.
