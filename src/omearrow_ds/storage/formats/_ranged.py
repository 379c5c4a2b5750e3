"""Objects on servers, as formats see them: files of which ranges are fetched, and how such files are come by."""

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
HEAD_BYTES = 2**16  # of a file, fetched when it is opened
_GAP_BYTES = 2**13  # between spans that are one request
_AHEAD_BYTES = 2**15  # fetched at least where a library reads, and kept: it reads headers bit by bit


class _Shared:
    """What all views of a file have in common; ``held`` is made anew where it changes: threads look at one state."""

    def __init__(self, held: list[tuple[int, memoryview]]) -> None:
        self.held = held
        self.failed: OMEArrowDSError | None = None
        self.alone = threading.RLock()


class Ranged(io.RawIOBase):
    """An object as a file: what is read is fetched, and what is held is not fetched again.

    Threads may hold and take at once; whoever reads from place to place needs one `again`.

    Parameters
    ----------
    fetch
        Returns the bytes of spans.
    seen
        Its size in bytes, and what else tells it from another one.
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
        """Return the same file with a place of its own, at its beginning; what one holds, the other one has."""
        other = Ranged(self._fetch, self.seen, memoryview(b""))
        other._shared = self._shared
        return other

    @property
    def failed(self) -> OMEArrowDSError | None:
        """What a library that reads it was told by an error, and may have passed over; None if nothing was."""
        return self._shared.failed

    @failed.setter
    def failed(self, error: OMEArrowDSError) -> None:
        self._shared.failed = error

    @property
    def alone(self) -> AbstractContextManager[Any]:
        """Held while what threads cannot do at once is done with it: a library seeks and reads."""
        return self._shared.alone

    def hold(self, spans: Sequence[Span]) -> None:
        """Fetch what of spans is not held, and keep it."""
        missing = [span for span in coalesced(spans) if self._of_held(*span) is None]
        found = self._fetch(missing) if missing else []
        came = [(start, data) for (start, _), data in zip(missing, found, strict=True)]
        if came:
            self._shared.held = sorted([*self._shared.held, *came], key=itemgetter(0))

    def let_go(self) -> None:
        """Keep nothing of what is held."""
        self._shared.held = [(0, memoryview(b""))]

    def hold_end(self, size_bytes: int) -> memoryview:
        """Return so many bytes before the end, which are kept."""
        start = max(0, self.size_bytes - size_bytes)
        self.hold([(start, self.size_bytes)])
        return self.take([(start, self.size_bytes)])[0]

    def take(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return the bytes of spans; what is not held is fetched, and not kept."""
        found = {span: self._of_held(*span) for span in spans}
        missing = [span for span, data in found.items() if data is None]
        found |= zip(missing, self._fetch(missing) if missing else [], strict=True)
        return [data for span in spans if (data := found[span]) is not None]

    def _of_held(self, start: int, stop: int) -> memoryview | None:
        held = self._shared.held
        first, data = held[bisect.bisect_right(held, start, key=itemgetter(0)) - 1]
        return data[start - first : stop - first] if stop <= first + len(data) else None

    def readinto(self, buffer: Any) -> int:
        """Read what follows into a buffer."""
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
        """Go to a place."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence])
        return self._at

    def tell(self) -> int:
        """Return where it is."""
        return self._at

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Whether one can go to a place: one can."""
        return True


def stamp_of(seen: tuple[int, str]) -> tuple[int, int]:
    """Return what tells an object from another one as numbers, as a source keeps it."""
    return seen[0], int.from_bytes(hashlib.blake2b(seen[1].encode(), digest_size=16).digest())


class Copy(Protocol):
    """A copy of an object on this machine, there until it is closed."""

    path: Path

    def close(self) -> None:
        """Let go of it."""


class Objects(Protocol):
    """Objects by their URLs; it can be pickled, and is opened anew in each process."""

    def open(self, url: str) -> Ranged:
        """Open an object; one that changes afterwards is an error where it is read."""

    def read(self, url: str, seen: tuple[int, str] | None = None) -> memoryview:
        """Return a whole object, which may have been fetched ahead; ``seen`` is what `Ranged` and `inside` tell."""

    def part(self, url: str, start: int, stop: int | None) -> memoryview:
        """Return a part of an object; without ``stop`` all that follows."""

    def expect(self, wanted: Mapping[str, tuple[int, str] | None]) -> None:
        """Be told of whole objects that are read next, in this order: some are fetched ahead."""

    def inside(self, url: str) -> Mapping[str, tuple[int, str]]:
        """Return the names of what is below a URL, however deep, each with what tells it from another one."""

    def forget(self) -> None:
        """Let go of what was fetched ahead."""

    def copied(self, url: str) -> tuple[Copy, tuple[int, str]]:
        """Return a copy of a whole object, and what tells that from another one; who only looks at parts is refused."""

    def settings(self, url: str) -> dict[str, str]:
        """Return what a library with a client of its own is told; it may hold secrets: hand it over, do not keep it."""

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return what an error of such a library says of the server; None if it says nothing of it."""

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return what is read, tried again after errors of which `failed` says that they may pass."""


def coalesced(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order, those as one that overlap or are near each other."""
    runs: list[Span] = []
    for start, stop in sorted(spans):
        if runs and start <= runs[-1][1] + _GAP_BYTES:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((start, stop))
    return runs
