"""Objects by URL, in any bucket: opened with range requests, read whole and concurrently, or copied to the cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError
from omearrow_ds.storage.byte_source import HEAD_BYTES, ObjectFile, version_fingerprint
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.part_cache import PartCache, PinnedFile, write_all
from omearrow_ds.storage.prefetcher import Prefetcher
from omearrow_ds.storage.remote import (
    ObjectStore,
    ObjectVersion,
    RetryDeadline,
    Storage,
    TransientError,
    keys_of,
    settings_of_s3,
)

_MAX_RUNNING = 8  # Concurrent fetches of objects.
_MAX_AHEAD, _MAX_AHEAD_BYTES = 12, 2**28  # Limits of objects that are prefetched, or being prefetched.
_FIRST_AHEAD = 4  # Until the size of an object is known.
_LANCE_SCHEMES = {"s3": "aws", "gs": "google", "az": "azure"}
_LANCE_LIMITS = {  # Without a byte for 28 s, in four tries, a request fails.
    "connect_timeout": "5s",
    "read_timeout": "7s",
    "timeout": "1day",  # Limit of the whole request: a slow link is not an error.
    "client_max_retries": "3",
    "client_retry_timeout": "28",
    "download_retry_count": "0",  # Retries of all tries above.
}
_SERVER_ERROR = re.compile(r"status code|Generic (S3|GCS|MicrosoftAzure) error|HTTP error|error sending request")
Found = TypeVar("Found")
Copies = tuple[str | os.PathLike[str] | None, int | None]


class BucketReader:
    """Reads objects at URLs of several buckets or servers with the same `Storage`; see `Objects`.

    ``copies`` are folder and limit of the cache for copies of whole objects, as arguments of `PartCache.choose`.
    """

    def __init__(self, storage: Storage, copies: Copies | None = None) -> None:
        self.storage, self.copies = storage, copies
        self._remotes: dict[str, ObjectStore] = {}
        self._prefetcher = ProcessLocal(
            partial(Prefetcher[str, memoryview], "omearrow-ds-object", _FIRST_AHEAD, _MAX_RUNNING)
        )
        self._largest_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketReader, (self.storage, self.copies)

    def remote(self, url: str) -> tuple[ObjectStore, str]:
        """Return the reader of the bucket or web server of a URL, and the name of the object in it."""
        scheme, _, rest = url.partition("://")
        host, _, name = rest.partition("/")
        if scheme in ("http", "https"):  # Their object names are percent-encoded in URLs.
            name = unquote(name)
        bucket = f"{scheme}://{host}"
        if bucket not in self._remotes:
            self._remotes[bucket] = ObjectStore(Url(f"{scheme}:/{host}"), self.storage)
        return self._remotes[bucket], name

    def open(self, url: str) -> ObjectFile:
        """Open an object for range requests, and fetch its first bytes."""
        remote, name = self.remote(url)
        (head,), version = remote.ranges(name, [(0, HEAD_BYTES)])
        return ObjectFile(lambda ranges: remote.ranges(name, ranges, version)[0], version, head, url)

    def part(self, url: str, start: int, stop: int | None) -> memoryview:
        """Return the bytes of an object from ``start`` to ``stop``."""
        remote, name = self.remote(url)
        return remote.read(name, span=(start, stop))

    def read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        """Return the bytes of a whole object, which may have been prefetched."""
        prefetcher = self._prefetcher.get()
        future = prefetcher.take(url)
        data = self._read(url, version) if future is None else future.result()
        self._largest_bytes = max(self._largest_bytes, len(data), 1)
        prefetcher.max_ahead = max(1, min(_MAX_AHEAD, _MAX_AHEAD_BYTES // self._largest_bytes))
        return data

    def _read(self, url: str, version: tuple[int, str] | None) -> memoryview:
        remote, name = self.remote(url)
        return remote.read(name, version=None if version is None else ObjectVersion(*version))

    def expect(self, versions: Mapping[str, tuple[int, str] | None]) -> None:
        """Prefetch whole objects that will be read next."""
        self._prefetcher.get().schedule({url: partial(self._read, url, version) for url, version in versions.items()})

    def inside(self, url: str) -> Mapping[str, ObjectVersion]:
        """Return the names and versions of all objects below a URL."""
        remote, prefix = self.remote(url)
        objects = remote.listed(prefix)
        if not objects:
            raise MissingPathError(f"{url}: no object exists at or below this URL; correct the URL")
        return objects

    def forget(self) -> None:
        """Release prefetched objects."""
        self._prefetcher.get().close()
        self._prefetcher.close()

    def copied(self, url: str) -> tuple[PinnedFile, ObjectVersion]:
        """Return a cached copy of the current version of an object, which is fetched if missing, and that version."""
        if self.copies is None:  # When parts are inspected, which are fetched whole only by their hash.
            raise FormatError(f"{url}: byte ranges are not supported")
        remote, name = self.remote(url)
        (_, version), cache = remote.ranges(name, [(0, 1)]), PartCache.choose(*self.copies)
        identity = repr((url, self.storage.endpoint, version_fingerprint(version))).encode()
        suffix = "".join(Url(url).suffixes[-1:]) or ".copy"

        def fetch(descriptor: int) -> bool:
            remote.fetch(name, version.size_bytes, partial(write_all, descriptor), version=version)
            return True  # The name is a hash of its URL, not of its bytes.

        return cache.acquire(f"00000-{digest_of(identity)}{suffix}", version.size_bytes, fetch), version

    def settings(self, url: str) -> dict[str, str]:
        """Return Lance's ``storage_options``; they may contain the secret keys of a profile and must not be stored."""
        self.remote(url)[0].client()  # Raises the reason if the client cannot be opened.
        kind = _LANCE_SCHEMES.get(url.partition(":")[0])
        if kind is None:
            raise FormatError(
                f"{url}: Lance reads only {', '.join(f'{scheme}://' for scheme in _LANCE_SCHEMES)}; pass such a URL, "
                f"or copy the dataset to this machine"
            )
        options = dict(_LANCE_LIMITS)
        if self.storage.anonymous:
            options[f"{kind}_skip_signature"] = "true"
        if kind == "aws":
            config, provider = settings_of_s3(self.storage)
            options |= {f"aws_{name}": str(config[name]) for name in ("endpoint", "region") if name in config}
            options["allow_http"] = str(options.get("aws_endpoint", "").startswith("http:")).lower()
            options |= {} if provider is None else {f"aws_{name}": value for name, value in keys_of(provider).items()}
        return options

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return the server error that caused an error of Lance, without secrets; None if no server error did."""
        if not isinstance(error, Exception) or _SERVER_ERROR.search(str(error)) is None:
            return None
        try:
            return TransientError(self.remote(url)[0].refuse_final(url, error))
        except OMEArrowDSError as final:
            return final

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, which uses Lance and is called again while the server does not answer."""
        return self.remote(url)[0].repeat(RetryDeadline(url), read, "no response")
