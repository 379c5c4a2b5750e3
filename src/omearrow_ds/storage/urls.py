"""Objects and collections at URLs: opened with range requests, read whole and concurrently, or copied to the cache."""

from __future__ import annotations

import fnmatch
import os
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from omearrow_ds.errors import ArgumentError, MissingPathError, OMEArrowDSError
from omearrow_ds.options import refuse_options
from omearrow_ds.storage.byte_source import HEAD_BYTES, ObjectFile, version_fingerprint
from omearrow_ds.storage.formats import FILE_FORMAT_NAMES, FORMATS, Format, get_format, of_suffix
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES, ZARR_FILES, is_hidden
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._folder import natural_key
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.part_cache import PartCache, PinnedFile, write_all
from omearrow_ds.storage.part_files import has_hidden
from omearrow_ds.storage.protocol import Paths
from omearrow_ds.storage.remote import ObjectStore, ObjectVersion, RetryDeadline, Storage, TransientError, s3_settings
from omearrow_ds.storage.tables import open_with

_MAX_RUNNING = 8  # Concurrent fetches of objects.
_MAX_AHEAD, _MAX_AHEAD_BYTES = 12, 2**28  # Limits of objects that are prefetched, or being prefetched.
_FIRST_AHEAD = 4  # Until the size of an object is known.
_LANCE_SCHEMES = {"s3": "aws", "gs": "google", "az": "azure"}
_LANCE_KEYS = {"access_key_id": "access_key_id", "secret_access_key": "secret_access_key", "token": "session_token"}
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
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Copies = tuple[str | os.PathLike[str] | None, int | None]
_MAGIC = re.compile(r"[*\[]")  # A question mark is not a wildcard in URLs.


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
        """Queue fetches in this order, and drop other queued ones; do nothing if all of them are queued already."""
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
            if key in self._queue and self.is_wanted:
                self._begin(key)
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
            self._begin(next(iter(self._queue)))

    def _begin(self, key: Key) -> None:
        future = self._futures[key] = Future()
        self._num_running += 1
        threading.Thread(target=self._run, args=(future, self._queue.pop(key)), name=self._name).start()

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


class BucketReader:
    """Reads objects at URLs of several buckets or servers with the same `Storage`; for methods, see `ObjectReader`.

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
        remote, name = self.remote(url)
        (head,), version = remote.ranges(name, [(0, HEAD_BYTES)])
        return ObjectFile(lambda ranges: remote.ranges(name, ranges, version)[0], version, head, url)

    def read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        prefetcher = self._prefetcher.get()
        future = prefetcher.take(url)
        data = self._read(url, version) if future is None else future.result()
        self._largest_bytes = max(self._largest_bytes, len(data), 1)
        prefetcher.max_ahead = max(1, min(_MAX_AHEAD, _MAX_AHEAD_BYTES // self._largest_bytes))
        return data

    def _read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        remote, name = self.remote(url)
        return remote.read(name, version=None if version is None else ObjectVersion(*version))

    def expect(self, versions: Mapping[str, tuple[int, str] | None]) -> None:
        self._prefetcher.get().schedule({url: partial(self._read, url, version) for url, version in versions.items()})

    def inside(self, url: str) -> Mapping[str, ObjectVersion]:
        remote, prefix = self.remote(url)
        objects = remote.listed(prefix)
        if not objects:
            raise MissingPathError(f"{url}: no object exists at or below this URL; correct the URL")
        return objects

    def forget(self) -> None:
        self._prefetcher.get().close()
        self._prefetcher.close()

    def copied(self, url: str) -> tuple[PinnedFile, ObjectVersion]:
        if self.copies is None:  # When parts are inspected, which are fetched whole only by their hash.
            refuse(url, "byte ranges are not supported", "")
        remote, name = self.remote(url)
        (_, version), cache = remote.ranges(name, [(0, 1)]), PartCache.choose(*self.copies)
        identity = repr((url, self.storage.endpoint, version_fingerprint(version))).encode()
        suffix = "".join(Url(url).suffixes[-1:]) or ".copy"

        def fetch(descriptor: int) -> bool:
            remote.fetch(name, version.size_bytes, partial(write_all, descriptor), version=version)
            return True  # The name is a hash of its URL, not of its bytes.

        return cache.acquire(f"00000-{digest_of(identity)}{suffix}", version.size_bytes, fetch), version

    def settings(self, url: str) -> dict[str, str]:
        self.remote(url)[0].client()  # Raises the reason if the client cannot be opened.
        kind = _LANCE_SCHEMES.get(url.partition(":")[0])
        if kind is None:
            problem = f"Lance reads only {', '.join(f'{scheme}://' for scheme in _LANCE_SCHEMES)}"
            refuse(url, problem, "pass such a URL, or copy the dataset to this machine")
        options = dict(_LANCE_LIMITS)
        if self.storage.anonymous:
            options[f"{kind}_skip_signature"] = "true"
        if kind == "aws":
            config, provider = s3_settings(self.storage)
            options |= {f"aws_{name}": str(config[name]) for name in ("endpoint", "region") if name in config}
            options["allow_http"] = str(options.get("aws_endpoint", "").startswith("http:")).lower()
            keys = {} if provider is None else provider()
            options |= {f"aws_{name}": keys[key] for key, name in _LANCE_KEYS.items() if keys.get(key)}
        return options

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        if not isinstance(error, Exception) or _SERVER_ERROR.search(str(error)) is None:
            return None
        try:
            return TransientError(self.remote(url)[0].refuse_final(url, error))
        except OMEArrowDSError as final:
            return final

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        return self.remote(url)[0].repeat(RetryDeadline(url, "no response"), read)


def refuse_cache(url: Path, reach: BucketReader) -> None:
    options = dict(zip(("part_cache", "part_cache_bytes"), reach.copies or (), strict=False))
    passed = {name: value for name, value in options.items() if value is not None}
    refuse_options(passed, f"applies only to parts (NAME.parts), Vortex and compressed Arrow files, not to {url}")


def open_stored_url(
    url: Path, format_name: str | None = None, *, reach: BucketReader, skip_errors: bool = False, **options: Any
) -> Images:
    """Open a collection at a URL that is not in parts, or one part of such a collection."""
    fmt = _format_at(url, reach) if format_name is None else get_format(format_name)
    if not fmt.remote_access:
        known = ", ".join(other.name for other in FORMATS if other.remote_access)
        remedy = f"copy it to this machine, or convert it to parts (NAME.parts) of {FILE_FORMAT_NAMES}"
        refuse(url, f"{fmt.label} cannot be read from URLs, only {known}", remedy)
    if "whole" not in fmt.remote_access:
        refuse_cache(url, reach)
    others = {name: value for name, value in options.items() if value and name not in ("nulls", *fmt.url_options)}
    refuse_options(others, f"not supported for {fmt.label} at a URL ({url})")
    return open_with(fmt, url, objects=reach, skip_errors=skip_errors and "skip_errors" in fmt.open_options, **options)


def _format_at(url: Path, reach: BucketReader) -> Format:
    """Return the format at a URL, by its suffix, or otherwise by the names below it."""
    if url.name.lower().endswith(TIFF_SUFFIXES):
        return get_format("tiff")
    fmt = of_suffix(url.name)
    if fmt is not None:
        return fmt
    names = [name for name in reach.inside(str(url)) if name in ZARR_FILES or not is_hidden(name)]
    first = {name.partition("/")[0] for name in names}
    if any("/" not in name and name.lower().endswith(TIFF_SUFFIXES) for name in names):
        return get_format("tiff")
    if "_versions" in first:
        return get_format("lance")
    if not any(name.rpartition("/")[2] in ZARR_FILES and name.count("/") < 2 for name in names):
        contents = ", ".join(map(repr, sorted(first)[:5])) or "hidden files"
        remedy = "pass the URL of a folder with images, format= with a name, or pattern= for images in subfolders"
        refuse(url, f"contains no images that can be read from URLs, but {contents}", remedy)
    return get_format("ome_zarr")


def urls_of(paths: Paths, reach: BucketReader) -> list[Url] | None:
    """Return the URLs in a list, or those that match a glob; None if ``paths`` are local or the name of an object."""
    if isinstance(paths, str | os.PathLike):
        text = str(url_of(paths))
        fixed = _MAGIC.split(text)[0].rpartition("/")[0]
        names = [f"{fixed}/{name}" for name in reach.inside(fixed)]
        if any(name == text or name.startswith(f"{text}/") for name in names):
            return None
        steps = text.split("/")
        visible = (name for name in names if not has_hidden(name.split("/"), steps))
        matches = sorted((name for name in visible if _fits(name.split("/"), steps)), key=natural_key)
        if not matches:
            raise MissingPathError(f"{text}: no object matches the pattern; correct the pattern")
        return list(filter(None, map(url_of, matches)))
    known = list(filter(None, map(url_of, paths)))
    if known and len(known) < len(paths):
        raise ArgumentError(f"{paths!r}: expected only URLs or only local paths", remedy="copy the other files")
    return known or None


def _fits(names: Sequence[str], steps: Sequence[str]) -> bool:
    """Whether the names of folders and object in a path match the steps of a glob."""
    if not steps:
        return not names
    if steps[0] == "**":
        return any(_fits(names[first:], steps[1:]) for first in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], steps[0]) and _fits(names[1:], steps[1:])
