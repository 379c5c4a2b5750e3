"""Fetches of whole parts on a server into files, with progress reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.hashes import part_hash
from omearrow_ds.storage.manifest import PARTS, Published
from omearrow_ds.storage.part_cache import Fetch, PartCache, write_all
from omearrow_ds.storage.prefetcher import FetchCancelledError, Prefetcher
from omearrow_ds.storage.remote import ObjectStore

RANGED_BYTES = 2**25  # Larger parts are fetched in ranges.
_RANGE_BYTES, _NUM_RANGES = 2**24, 4  # Size and concurrency of ranges.
_READ_BYTES = 2**20
OnBytes = Callable[[int], None]


class DownloadProgress:
    """Reports progress of fetching parts to a callback; bytes that are fetched again are not counted."""

    def __init__(self, parts: Sequence[Published]) -> None:
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

    pinned = cache.try_acquire(part.name, part.size_bytes, part_fetch(remote, part, on_bytes))
    if pinned is not None:
        pinned.close()


def part_fetch(remote: ObjectStore, part: Published, on_bytes: OnBytes) -> Fetch:
    """Return a function that fetches a part into a file and compares its bytes with the hash in its name.

    ``on_bytes`` receives the number of bytes of each piece, and may raise an exception to abort.
    """
    name = f"{PARTS}/{part.name}"

    def fetch(descriptor: int) -> None:
        digest = part_hash(part.hash)

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
            raise FormatError(f"{remote.url}/{name}: bytes differ from the hash in its name; restore it")

    return fetch


def _fetch_ranges(remote: ObjectStore, part: Published, descriptor: int, on_bytes: OnBytes) -> Iterator[ByteRange]:
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
