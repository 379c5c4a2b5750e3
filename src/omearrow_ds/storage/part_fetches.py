"""Fetches of whole parts on a server into the cache: prefetched in the order of requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from omearrow_ds.errors import FormatError, OMEArrowDSError
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.hashes import part_hash
from omearrow_ds.storage.manifest import PARTS, Published
from omearrow_ds.storage.part_cache import Fetch, PartCache, write_all
from omearrow_ds.storage.remote import Remote

_RANGED_BYTES = 2**25  # Larger parts are fetched in ranges.
_RANGE_BYTES, _RANGES = 2**24, 4  # Size and concurrency of ranges.
_LARGE = 2  # Maximum number of parts fetched in ranges at once.
_READ_BYTES = 2**20
Came = Callable[[int], None]


class Arrivals:
    """Reports progress of fetching parts to a callback; bytes that are fetched again are not counted."""

    def __init__(self, parts: Sequence[Published]) -> None:
        self._parts = parts
        self._left_bytes: list[int] = []
        self._came: Callable[[int], object] | None = None
        self._counting = threading.Lock()

    def tell(self, notify: Callable[[int], object] | None) -> int:
        """Start to report numbers of fetched bytes to ``notify``, and return the total size of all parts in bytes."""
        with self._counting:
            self._came, self._left_bytes = notify, [part.size_bytes for part in self._parts]
            return sum(self._left_bytes)

    def more(self, number: int, count: int) -> None:
        """Report ``count`` more bytes of a part; bytes beyond its size, from a repeated fetch, are ignored."""
        with self._counting:
            if self._came is not None:
                new = min(count, self._left_bytes[number])
                self._left_bytes[number] -= new
                self._came(new)


class Ahead:
    """Prefetches parts in threads; an error of a prefetch is raised when the part is opened."""

    def __init__(
        self, remote: Remote, cache: PartCache, parts: Sequence[Published], count: int, arrivals: Arrivals
    ) -> None:
        self._remote, self._cache, self._parts, self._count = remote, cache, parts, count
        self._arrivals = arrivals
        self._most = _LARGE if any(part.size_bytes > _RANGED_BYTES for part in parts) else count
        self._coming: dict[int, None] = {}
        self._begun: set[int] = set()  # Parts that were begun and not reached.
        self._failed: dict[int, tuple[float, Exception]] = {}
        self._fetching: dict[int, threading.Thread] = {}
        self._at_once = 1
        self._looking = threading.Lock()

    def expect(self, numbers: Sequence[int]) -> None:
        """Prefetch parts in this order: one part at first, and one more at the same time after each finished part."""
        with self._looking:
            self._coming = {number: None for number in numbers if number not in self._fetching}
            self._begun, self._at_once = self._fetching.keys() & set(numbers), 1
            self._go_on()

    def reached(self, number: int) -> None:
        """Fetch a part immediately because it is needed now, and allow another prefetch in its place."""
        with self._looking:
            self._begun.discard(number)
            if number in self._coming and self._wanted:
                self._begin(number)
            self._go_on()

    def taken(self, number: int, fetch: Fetch) -> Fetch:
        """Wait for a running prefetch; return a function that fetches the part, or raises the error of the prefetch."""
        with self._looking:
            self._coming.pop(number, None)
            self._begun.discard(number)
            coming = self._fetching.get(number)
            self._go_on()
        waiting_s = time.monotonic()
        if coming is not None:
            coming.join()

        def unless_failed(descriptor: int) -> None:
            failed_s, error = self._failed.pop(number, (-1.0, None))
            if error is not None and failed_s >= waiting_s:
                raise error
            fetch(descriptor)

        return unless_failed

    def _go_on(self) -> None:
        while self._coming and self._wanted and len(self._begun) < self._count:
            if len(self._fetching) >= min(self._count, self._most, self._at_once):
                return
            number = next(iter(self._coming))
            self._begun.add(number)
            self._begin(number)

    def _begin(self, number: int) -> None:
        del self._coming[number]
        thread = threading.Thread(target=self._fetch, args=(number,), name="omearrow-ds-fetch")
        self._fetching[number] = thread
        thread.start()

    def _fetch(self, number: int) -> None:
        part = self._parts[number]

        def came(count: int) -> None:
            if not self._wanted:
                raise _Stopped
            self._arrivals.more(number, count)

        try:
            held = self._cache.hold_if_room(part.name, part.size_bytes, fetching(self._remote, part, came))
            if held is not None:
                held.close()
        except (OMEArrowDSError, OSError) as error:
            self._failed[number] = time.monotonic(), error
        except _Stopped:
            pass
        finally:
            with self._looking:
                del self._fetching[number]
                self._at_once += 1
                self._go_on()

    @property
    def _wanted(self) -> bool:
        """Whether fetched parts are still needed: at exit, Python waits for running threads."""
        return self._count > 0 and threading.main_thread().is_alive()

    def close(self) -> None:
        """Stop prefetching; fetches that are already running continue."""
        with self._looking:
            self._coming, self._count = {}, 0


class _Stopped(Exception):  # noqa: N818  # It is not an error.
    """Raised to abort the fetch of a part."""


def fetching(remote: Remote, part: Published, on_bytes: Came) -> Fetch:
    """Return a function that fetches a part into a file and compares its bytes with the hash in its name.

    ``on_bytes`` receives the number of bytes of each piece, and may raise an exception to abort.
    """
    name = f"{PARTS}/{part.name}"

    def fetch(descriptor: int) -> None:
        digest = part_hash(part.hash)

        def sink(piece: memoryview) -> None:
            on_bytes(len(piece))
            digest.update(piece)
            write_all(descriptor, piece)

        if part.size_bytes <= _RANGED_BYTES:
            remote.fetch(name, part.size_bytes, sink)
        else:
            for start, stop in _Ranges(remote, part, descriptor, on_bytes).in_order():
                for first in range(start, stop, _READ_BYTES):
                    digest.update(os.pread(descriptor, min(_READ_BYTES, stop - first), first))
        if digest.hexdigest() != part.hash:
            raise FormatError(f"{remote.url}/{name}: bytes differ from the hash in its name; restore it")

    return fetch


class _Ranges:
    """Ranges of a part, fetched concurrently in threads, and written at their offsets."""

    def __init__(self, remote: Remote, part: Published, descriptor: int, came: Came) -> None:
        self._remote, self._part, self._descriptor, self._came = remote, part, descriptor, came
        size_bytes = part.size_bytes
        self._spans = [(at, min(at + _RANGE_BYTES, size_bytes)) for at in range(0, size_bytes, _RANGE_BYTES)]
        self._left = iter(list(enumerate(self._spans)))  # Threads share this iterator.
        self._ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._failed = False

    def in_order(self) -> Iterator[ByteRange]:
        """Yield the fetched byte ranges in file order; all threads have ended when the iterator ends."""
        threads = [threading.Thread(target=self._work, name="omearrow-ds-range") for _ in range(_RANGES)]
        arrived: set[int] = set()
        try:
            for thread in threads:
                thread.start()
            for number, span in enumerate(self._spans):
                while number not in arrived:
                    ended, error = self._ended.get()
                    if error is not None:
                        raise error
                    arrived.add(ended)
                yield span
        finally:
            self._failed = len(arrived) < len(self._spans)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()  # Its descriptor is closed next.

    def _work(self) -> None:
        for number, (start, stop) in self._left:
            try:
                self._fetch(start, stop)
            except (OMEArrowDSError, OSError, _Stopped) as error:  # The waiting thread raises it.
                self._ended.put((number, error))
                return
            except BaseException as error:  # Otherwise the other thread would wait forever.
                self._ended.put((number, error))
                raise
            self._ended.put((number, None))

    def _fetch(self, start: int, stop: int) -> None:
        at = start

        def sink(piece: memoryview) -> None:
            nonlocal at
            if self._failed:
                raise _Stopped
            self._came(len(piece))
            write_all(self._descriptor, piece, at)
            at += len(piece)

        self._remote.fetch(f"{PARTS}/{self._part.name}", self._part.size_bytes, sink, span=(start, stop))
