"""Fetches whole parts of a collection on a server into the cache: ahead, in the order that they are asked for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from omearrow_ds.errors import FormatError, OMEArrowDSError
from omearrow_ds.storage.formats._ranged import Span
from omearrow_ds.storage.hashes import part_hash
from omearrow_ds.storage.manifest import PARTS, Published
from omearrow_ds.storage.part_cache import Fetch, PartCache, write_all
from omearrow_ds.storage.remote import Remote

_RANGED_BYTES = 2**25  # larger parts are fetched in ranges
_RANGE_BYTES, _RANGES = 2**24, 4  # of which so many are fetched at once
_LARGE = 2  # parts in ranges that are fetched at once
_READ_BYTES = 2**20
Came = Callable[[int], None]


class Arrivals:
    """Counts the bytes of parts that come, each once, and tells of them."""

    def __init__(self, parts: Sequence[Published]) -> None:
        self._parts = parts
        self._left_bytes: list[int] = []
        self._came: Callable[[int], object] | None = None
        self._counting = threading.Lock()

    def tell(self, came: Callable[[int], object] | None) -> int:
        """Begin to count, and return how many bytes all parts are."""
        with self._counting:
            self._came, self._left_bytes = came, [each.size_bytes for each in self._parts]
            return sum(self._left_bytes)

    def more(self, number: int, count: int) -> None:
        """Count bytes of a part, of which some may have come before."""
        with self._counting:
            if self._came is not None:
                new = min(count, self._left_bytes[number])
                self._left_bytes[number] -= new
                self._came(new)


class Ahead:
    """Fetches the parts that are asked for next, each in a thread; who waits for one is told of what went wrong."""

    def __init__(
        self, remote: Remote, cache: PartCache, parts: Sequence[Published], count: int, arrivals: Arrivals
    ) -> None:
        self._remote, self._cache, self._parts, self._count = remote, cache, parts, count
        self._arrivals = arrivals
        self._most = _LARGE if any(part.size_bytes > _RANGED_BYTES for part in parts) else count
        self._coming: dict[int, None] = {}
        self._begun: set[int] = set()  # and not reached
        self._failed: dict[int, tuple[float, Exception]] = {}
        self._fetching: dict[int, threading.Thread] = {}
        self._at_once = 1
        self._looking = threading.Lock()

    def expect(self, numbers: Sequence[int]) -> None:
        """Begin with the first of these parts: it has the link to itself, and with each that came one more may come."""
        with self._looking:
            self._coming = {number: None for number in numbers if number not in self._fetching}
            self._begun, self._at_once = self._fetching.keys() & set(numbers), 1
            self._go_on()

    def reached(self, number: int) -> None:
        """Be told of a part that is used next: it is fetched at once, and another one may be."""
        with self._looking:
            self._begun.discard(number)
            if number in self._coming and self._wanted:
                self._begin(number)
            self._go_on()

    def taken(self, number: int, fetch: Fetch) -> Fetch:
        """Return what fetches a part that is opened now, unless a thread fails to while it is waited for."""
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
        """Whether anybody needs what is fetched: a program waits for its threads at its end."""
        return self._count > 0 and threading.main_thread().is_alive()

    def close(self) -> None:
        """Begin no other one, and leave those that are under way."""
        with self._looking:
            self._coming, self._count = {}, 0


class _Stopped(Exception):  # noqa: N818  # nothing is wrong
    """A part is not fetched to its end."""


def fetching(remote: Remote, part: Published, came: Came) -> Fetch:
    """Return what writes a part, and compares its bytes with the hash that its name has.

    ``came`` is told of bytes as they come, and may end it.
    """
    name = f"{PARTS}/{part.name}"

    def fetch(descriptor: int) -> None:
        digest = part_hash(part.hash)

        def sink(piece: memoryview) -> None:
            came(len(piece))
            digest.update(piece)
            write_all(descriptor, piece)

        if part.size_bytes <= _RANGED_BYTES:
            remote.fetch(name, part.size_bytes, sink)
        else:
            for start, stop in _Ranges(remote, part, descriptor, came).in_order():
                for first in range(start, stop, _READ_BYTES):
                    digest.update(os.pread(descriptor, min(_READ_BYTES, stop - first), first))
        if digest.hexdigest() != part.hash:
            raise FormatError(f"{remote.url}/{name}: its bytes are not those that it is named by; restore it")

    return fetch


class _Ranges:
    """Ranges of a part, which are written where they belong, several at once, each in a thread."""

    def __init__(self, remote: Remote, part: Published, descriptor: int, came: Came) -> None:
        self._remote, self._part, self._descriptor, self._came = remote, part, descriptor, came
        size_bytes = part.size_bytes
        self._spans = [(at, min(at + _RANGE_BYTES, size_bytes)) for at in range(0, size_bytes, _RANGE_BYTES)]
        self._left = iter(list(enumerate(self._spans)))  # threads share it
        self._ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._failed = False

    def in_order(self) -> Iterator[Span]:
        """Yield those that are there, each when those before it are; no thread is left when it ends."""
        threads = [threading.Thread(target=self._work, name="omearrow-ds-range") for _ in range(_RANGES)]
        there: set[int] = set()
        try:
            for thread in threads:
                thread.start()
            for number, span in enumerate(self._spans):
                while number not in there:
                    ended, error = self._ended.get()
                    if error is not None:
                        raise error
                    there.add(ended)
                yield span
        finally:
            self._failed = len(there) < len(self._spans)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()  # it writes to a descriptor that is closed next

    def _work(self) -> None:
        for number, (start, stop) in self._left:
            try:
                self._fetch(start, stop)
            except (OMEArrowDSError, OSError, _Stopped) as error:  # it is raised by who waits
                self._ended.put((number, error))
                return
            except BaseException as error:  # who waits must not wait for ever
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
