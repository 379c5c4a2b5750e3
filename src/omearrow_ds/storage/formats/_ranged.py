"""Objects on servers as seen by formats: files whose byte ranges are fetched, and the interface that opens them."""

from __future__ import annotations

import bisect
import hashlib
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

from omearrow_ds.errors import OMEArrowDSError

Found = TypeVar("Found")
Span = tuple[int, int]  # start and stop, in bytes
HEAD_BYTES = 2**16  # fetched from the start of a file when it is opened
_GAP_BYTES = 2**13  # largest gap between spans that are fetched in one request
_AHEAD_BYTES = 2**15  # smallest cached read of a library, which reads headers in small steps


class _Shared:
    """State shared by all views of a file; ``held`` is replaced, not modified, so that threads see one state."""

    def __init__(self, held: list[tuple[int, memoryview]]) -> None:
        self.held = held
        self.failed: OMEArrowDSError | None = None
        self.alone = threading.RLock()


class Ranged(io.RawIOBase):
    """An object as a file: reads fetch missing byte ranges, and cached ranges are not fetched again.

    Threads may call `hold` and `take` at once; each sequential reader needs a copy from `again`.

    Parameters
    ----------
    fetch
        Returns the bytes of spans.
    seen
        Its size in bytes, and its fingerprint.
    head
        Its first bytes.
    """

    def __init__(
        self, fetch: Callable[[Sequence[Span]], list[memoryview]], seen: tuple[int, str], head: memoryview
    ) -> None:
        super().__init__()
        self._fetch, self.seen, self.size_bytes = fetch, seen, seen[0]
        self._at = 0
        self._shared = _Shared([(0, head)])

    def again(self) -> Ranged:
        """Return the same file with a separate position, at its start; both share the cached ranges."""
        other = Ranged(self._fetch, self.seen, memoryview(b""))
        other._shared = self._shared
        return other

    @property
    def failed(self) -> OMEArrowDSError | None:
        """The last error raised to a library that reads the file and may have ignored it; None without one."""
        return self._shared.failed

    @failed.setter
    def failed(self, error: OMEArrowDSError) -> None:
        self._shared.failed = error

    @property
    def alone(self) -> AbstractContextManager[Any]:
        """Lock for operations that threads cannot run at once, because a library seeks and reads."""
        return self._shared.alone

    def hold(self, spans: Sequence[Span]) -> None:
        """Fetch the spans that are not cached, and cache them."""
        missing = [span for span in coalesced(spans) if self._of_held(*span) is None]
        found = self._fetch(missing) if missing else []
        came = [(start, data) for (start, _), data in zip(missing, found, strict=True)]
        if came:
            self._shared.held = sorted([*self._shared.held, *came], key=itemgetter(0))

    def let_go(self) -> None:
        """Drop all cached ranges."""
        self._shared.held = [(0, memoryview(b""))]

    def hold_end(self, size_bytes: int) -> memoryview:
        """Return the last ``size_bytes`` bytes and cache them."""
        start = max(0, self.size_bytes - size_bytes)
        self.hold([(start, self.size_bytes)])
        return self.take([(start, self.size_bytes)])[0]

    def take(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return the bytes of spans; missing ones are fetched but not cached."""
        found = {span: self._of_held(*span) for span in spans}
        missing = [span for span, data in found.items() if data is None]
        found |= zip(missing, self._fetch(missing) if missing else [], strict=True)
        return [data for span in spans if (data := found[span]) is not None]

    def _of_held(self, start: int, stop: int) -> memoryview | None:
        held = self._shared.held
        first, data = held[bisect.bisect_right(held, start, key=itemgetter(0)) - 1]
        return data[start - first : stop - first] if stop <= first + len(data) else None

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer."""
        try:
            return self._read_into(buffer)
        except OMEArrowDSError as error:
            self.failed = error
            raise

    def _read_into(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._at + len(target), self.size_bytes)
        if stop <= self._at:
            return 0
        if stop - self._at < _AHEAD_BYTES and self._of_held(self._at, stop) is None:
            self.hold([(self._at, min(self._at + _AHEAD_BYTES, self.size_bytes))])
        (data,) = self.take([(self._at, stop)])
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence])
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


def stamp_of(seen: tuple[int, str]) -> tuple[int, int]:
    """Return the fingerprint of an object as numbers, the form that a source stores."""
    return seen[0], int.from_bytes(hashlib.blake2b(seen[1].encode(), digest_size=16).digest())


class Copy(Protocol):
    """A copy of an object on this machine, which exists until it is closed."""

    path: Path

    def close(self) -> None:
        """Release the copy."""


class Objects(Protocol):
    """Objects by URL; picklable, and reopened in each process."""

    def open(self, url: str) -> Ranged:
        """Open an object; reading it raises an error if it has changed since."""

    def read(self, url: str, seen: tuple[int, str] | None = None) -> memoryview:
        """Return a whole object, possibly prefetched; ``seen`` is the size and fingerprint of `Ranged` or `inside`."""

    def part(self, url: str, start: int, stop: int | None) -> memoryview:
        """Return a byte range of an object; without ``stop``, up to its end."""

    def expect(self, wanted: Mapping[str, tuple[int, str] | None]) -> None:
        """Take the whole objects that are read next, in this order; some of them are prefetched."""

    def inside(self, url: str) -> Mapping[str, tuple[int, str]]:
        """Return the names of all objects below a URL, at any depth, each with its size and fingerprint."""

    def forget(self) -> None:
        """Drop prefetched objects."""

    def copied(self, url: str) -> tuple[Copy, tuple[int, str]]:
        """Return a cached copy of a whole object, and its size and fingerprint; without a cache, raise an error."""

    def settings(self, url: str) -> dict[str, str]:
        """Return the settings for a library with its own client; they may hold secrets, so do not store them."""

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return the server error that an error of such a library reports; None if it reports none."""

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, retried after errors that `failed` classifies as transient."""


def coalesced(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order, with overlapping and close ones merged."""
    runs: list[Span] = []
    for start, stop in sorted(spans):
        if runs and start <= runs[-1][1] + _GAP_BYTES:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((start, stop))
    return runs
