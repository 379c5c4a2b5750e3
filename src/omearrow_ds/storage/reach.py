"""Objects by URL, in any bucket: opened with range requests, read whole and concurrently, or copied to the cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError
from omearrow_ds.storage import libraries
from omearrow_ds.storage.byte_source import HEAD_BYTES, ByteRange, ObjectFile, version_fingerprint
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.part_cache import Held, PartCache, write_all
from omearrow_ds.storage.remote import Remote, Seen, Storage

_AT_ONCE = 8  # Concurrent fetches of objects.
_AHEAD, _AHEAD_BYTES = 12, 2**28  # Limits of objects that are prefetched, or being prefetched.
_UNKNOWN_BYTES = 2**26  # Assumed size of an object until the first arrives.


Found = TypeVar("Found")
Copies = tuple[str | os.PathLike[str] | None, int | None]


class Reach:
    """Reads objects at URLs of several buckets or servers with the same `Storage`; see `Objects`.

    Parameters
    ----------
    storage
        Access to the servers of the objects.
    copies
        Folder and limit of the cache for copies of whole objects, as arguments of `PartCache.choose`; None for no
        copies.
    """

    def __init__(self, storage: Storage, copies: Copies | None = None) -> None:
        self.storage, self.copies = storage, copies
        self._remotes: dict[str, Remote] = {}
        self._coming: ProcessLocal[_Coming] = ProcessLocal(_Coming)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reach, (self.storage, self.copies)

    def remote(self, url: str) -> tuple[Remote, str]:
        """Return the reader of the bucket or web server of a URL, and the name of the object in it."""
        scheme, _, rest = url.partition("://")
        host, _, name = rest.partition("/")
        if scheme in ("http", "https"):  # Their object names are percent-encoded in URLs.
            name = unquote(name)
        bucket = f"{scheme}://{host}"
        if bucket not in self._remotes:
            self._remotes[bucket] = Remote(Url(f"{scheme}:/{host}"), self.storage)
        return self._remotes[bucket], name

    def open(self, url: str) -> ObjectFile:
        """Open an object for range requests, and fetch its first bytes."""
        remote, name = self.remote(url)
        (head,), version = remote.ranges(name, [(0, HEAD_BYTES)])

        def fetch(spans: Sequence[ByteRange]) -> list[memoryview]:
            return remote.ranges(name, spans, version)[0]

        return ObjectFile(fetch, version, head, url)

    def part(self, url: str, start: int, stop: int | None) -> memoryview:
        """Return the bytes of an object from ``start`` to ``stop``."""
        remote, name = self.remote(url)
        found = bytearray()
        remote.fetch(name, None, found.extend, span=(start, stop))
        return memoryview(found)

    def read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        """Return the bytes of a whole object, which may have been prefetched."""
        return self._coming.get().taken(url, partial(self._read, url, version))

    def _read(self, url: str, version: tuple[int, str] | None) -> memoryview:
        remote, name = self.remote(url)
        chunks = bytearray()
        remote.fetch(name, None, chunks.extend, version=None if version is None else Seen(*version))
        return memoryview(chunks)

    def expect(self, wanted: Mapping[str, tuple[int, str] | None]) -> None:
        """Prefetch whole objects that will be read next."""
        self._coming.get().expect({url: partial(self._read, url, seen) for url, seen in wanted.items()})

    def inside(self, url: str) -> Mapping[str, Seen]:
        """Return the names and versions of all objects below a URL."""
        remote, prefix = self.remote(url)
        objects = remote.listed(prefix)
        if not objects:
            raise MissingPathError(f"{url}: no object exists at or below this URL; correct the URL")
        return objects

    def forget(self) -> None:
        """Release prefetched objects."""
        self._coming.close()

    def copied(self, url: str) -> tuple[Held, Seen]:
        """Return a cached copy of the current version of an object, which is fetched if missing, and that version.

        Raises
        ------
        FormatError
            Without ``copies``, as when inspecting parts, which are fetched whole only by callers that know their hash.
        WriteError
            If the cache is full.
        """
        if self.copies is None:
            raise FormatError(f"{url}: byte ranges are not supported")
        remote, name = self.remote(url)
        (_, version), cache = remote.ranges(name, [(0, 1)]), PartCache.choose(*self.copies)
        which = repr((url, self.storage.endpoint, version_fingerprint(version))).encode()
        suffix = "".join(Url(url).suffixes[-1:]) or ".copy"

        def fetch(descriptor: int) -> bool:
            remote.fetch(name, version.size_bytes, partial(write_all, descriptor), version=version)
            return True  # The name is a hash of its URL, not of its bytes.

        return cache.hold(f"00000-{digest_of(which)}{suffix}", version.size_bytes, fetch), version

    def settings(self, url: str) -> dict[str, str]:
        """Return Lance's storage options for the server of a URL; see `omearrow_ds.storage.libraries`."""
        remote, _ = self.remote(url)
        remote.open()  # Raises the reason if the client cannot be opened.
        return libraries.settings(url, self.storage)

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return the server error that caused an error of Lance; None if no server error did."""
        remote, _ = self.remote(url)
        return libraries.failed(remote, url, error)

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, which uses Lance and is called again while the server does not answer."""
        return libraries.again(url, read)


class _Coming:
    """Prefetch queue of whole objects, in request order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE, "omearrow-ds-object")
        self._next: dict[str, Callable[[], memoryview]] = {}
        self._begun: dict[str, Future[memoryview]] = {}
        self._largest_bytes = _UNKNOWN_BYTES
        self._known = False
        self._looking = threading.Lock()  # Threads may share a source.

    def expect(self, fetches: dict[str, Callable[[], memoryview]]) -> None:
        """Start the fetches in order, and cancel previous fetches that are not among them."""
        with self._looking:
            if fetches.keys() <= self._begun.keys() | self._next.keys():  # All of them are already queued.
                return
            for url in self._begun.keys() - fetches.keys():
                self._begun.pop(url).cancel()
            self._next = {url: fetch for url, fetch in fetches.items() if url not in self._begun}
            self._go_on()

    def taken(self, url: str, fetch: Callable[[], memoryview]) -> memoryview:
        """Return a prefetched object, or fetch it now if its prefetch has not started."""
        with self._looking:
            self._next.pop(url, None)
            begun = self._begun.pop(url, None)
            self._go_on()
        data = fetch() if begun is None else begun.result()
        self._largest_bytes = max(self._largest_bytes, len(data)) if self._known else len(data) or 1
        self._known = True
        return data

    def _go_on(self) -> None:
        room = max(1, min(_AHEAD, _AHEAD_BYTES // self._largest_bytes))
        while self._next and len(self._begun) < room:
            url = next(iter(self._next))
            self._begun[url] = self._pool.submit(self._next.pop(url))
