"""Files of a collection, on this machine or in an object store, opened when they are first used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.byte_source import OPEN_FLAGS, LocalFile, ObjectFile
from omearrow_ds.storage.formats._detect import SIDECAR, StrPath, is_hidden, refuse_special
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import ObjectReader

_METADATA_BYTES = 4096  # Usual limit of files of metadata.
_MAX_FILE_BYTES = 2**24  # Limit for a file that is expected to be small.
_MAX_RECENT = 64  # Objects that stay open with their fetched headers.
_MAX_METADATA = 4096  # Files of metadata that are cached.


class FileSet:
    """Files on this machine by path; each read opens its file, and ``max_parallel_files`` reads run at once."""

    is_remote = False
    max_parallel_files = 1

    def open(self, path: StrPath) -> LocalFile | ObjectFile:
        """Return a file; reading it raises an error if it has changed."""
        return LocalFile.as_it_is(path)

    def read(self, path: StrPath, likely_bytes: int = _METADATA_BYTES) -> bytes | memoryview:
        """Return the bytes of a file, usually fewer than ``likely_bytes``; pathlib would take three times as long."""
        # Raises `OSError` if it cannot be read, or is a symbolic link; `ValueError` if it is far larger.
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            data = os.read(descriptor, likely_bytes)
            if len(data) < likely_bytes:
                return data
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > max(_MAX_FILE_BYTES, 2 * likely_bytes):
                raise ValueError(f"{path} has {size_bytes:,} bytes, expected fewer than {likely_bytes:,}")
            return data + os.read(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    read_metadata = read  # Each time, because another tool may have overwritten the file.

    def find_table(self, path: Path) -> Any:
        refuse_special(path)
        return path if path.is_file() else None

    def prefetch(self, paths: Iterable[Path]) -> None: ...

    @contextmanager
    def open_for_library(self, path: Path, *, is_whole: bool = False) -> Iterator[Any]:  # noqa: ARG002  # Only objects differ.
        """Return a path, or a seekable file that a library reads by ranges, unless all of its bytes are needed."""
        refuse_special(path)
        yield path

    def close(self) -> None:
        """Close files that stay open; the next read opens them again."""


class ObjectFileSet(FileSet):
    """Objects on servers by URL; each read compares size and ETag (``versions``). Recently used objects stay open."""

    is_remote = True
    max_parallel_files = 10

    def __init__(self, objects: ObjectReader, versions: dict[str, tuple[int, str]] | None = None) -> None:
        self.objects, self.versions = objects, versions or {}
        self._recent: ProcessLocal[dict[str, ObjectFile]] = ProcessLocal(dict)
        self._metadata: ProcessLocal[dict[str, memoryview | None]] = ProcessLocal(dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectFileSet, (self.objects, self.versions)

    def list_names(self, folder: Path, suffixes: tuple[str, ...]) -> list[str]:
        """Return the names of objects directly below a URL that have one of the suffixes."""
        below = self.objects.inside(str(folder))
        names = [name for name in below if "/" not in name and not is_hidden(name) and name.lower().endswith(suffixes)]
        self.versions |= {f"{folder}/{name}": below[name] for name in (*names, SIDECAR) if name in below}
        return names

    def find_table(self, path: Path) -> Any:
        """Return the bytes of a table; None if it does not exist, or is not among listed objects."""
        if self.versions and str(path) not in self.versions:
            return None
        try:
            return pa.py_buffer(self.read(path))
        except MissingPathError:
            return None

    def open(self, path: StrPath) -> ObjectFile:
        recent, url = self._recent.get(), os.fspath(path)
        opened = recent.pop(url, None) or self.objects.open(url)
        recent[url] = opened
        while len(recent) > _MAX_RECENT:
            recent.pop(next(iter(list(recent)), ""), None)  # A copy, because another thread may add one.
        if self.versions.setdefault(url, opened.version) != opened.version:
            raise FormatError(f"{url}: was replaced or changed since it was opened; open it again")
        return opened.reopen()

    @contextmanager
    def open_for_library(self, path: Path, *, is_whole: bool = False) -> Iterator[Any]:
        """Return a file; on exit, raise the error of a request that the library may have ignored."""
        if is_whole:
            data = self.read(path)
            yield ObjectFile(lambda _: [], (len(data), ""), data, str(path))
            return
        opened = self.open(path)
        try:
            yield opened
        finally:
            if opened.last_error is not None:
                self._recent.get().pop(str(path), None)
                raise opened.last_error

    def read(self, path: StrPath, likely_bytes: int = 0) -> memoryview:
        del likely_bytes  # The size is unknown until the object arrives.
        url = os.fspath(path)
        return self.objects.read(url, self.versions.get(url))

    def read_metadata(self, path: StrPath, likely_bytes: int = 0) -> memoryview:
        """Return a whole object, or raise `MissingPathError`; both results are cached."""
        cache, url = self._metadata.get(), os.fspath(path)
        if url not in cache:
            if len(cache) >= _MAX_METADATA:
                self._metadata.close()
                cache = self._metadata.get()
            try:
                cache[url] = self.read(url, likely_bytes)
            except MissingPathError:
                cache[url] = None
        data = cache[url]
        if data is None:
            raise MissingPathError(f"{url}: does not exist; restore it, or correct the URL")
        return data

    def prefetch(self, paths: Iterable[Path]) -> None:
        self.objects.expect({url: self.versions.get(url) for url in map(str, paths)})

    def close(self) -> None:
        self._recent.close()
        self._metadata.close()
        self.objects.forget()
