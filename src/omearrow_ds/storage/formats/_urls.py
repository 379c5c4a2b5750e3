"""URLs in place of paths, and the interface that opens, reads, lists and copies objects at URLs for formats."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import Protocol, Self, TypeVar
from urllib.parse import quote

from omearrow_ds.errors import ArgumentError, OMEArrowDSError
from omearrow_ds.storage.byte_source import ObjectFile

SCHEMES = ("s3", "gs", "az", "abfs", "http", "https")
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(.*)", re.IGNORECASE | re.DOTALL)  # pathlib leaves one slash
Found = TypeVar("Found")


class Url(PosixPath):
    """A URL in place of a path: it prints as the URL, and never exists on this machine."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme.lower()}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002  # as pathlib has it
        return self

    @property
    def scheme(self) -> str:
        return str(self).partition(":")[0]

    @property
    def is_web(self) -> bool:
        """Whether the URL is on a web server, not in a bucket."""
        return self.scheme in ("http", "https")


def as_parsed(path: Path) -> str:
    """Return the form for libraries that parse URLs: bucket names are quoted, so that ``%41`` is not read as ``A``."""
    in_bucket = isinstance(path, Url) and not path.is_web
    return quote(str(path), safe=":/@") if in_bucket else str(path)


def url_of(path: str | os.PathLike[str]) -> Url | None:
    """Return a path as a URL, or None if it is a plain path; only a few schemes mark a URL."""
    # Raises `ArgumentError` if a URL has a password, a query, or ``..`` segments.
    text = os.fspath(path)
    match = _URL.fullmatch(text) if isinstance(text, str) and ":" in text else None  # takes 0.1 s for 1,000 paths
    if match is None:
        return None
    scheme, rest = match[1].lower(), match[2]
    host = rest.partition("/")[0]
    upwards = {".", ".."} & set(rest.split("/"))
    if not host or ("@" in host and scheme != "abfs") or set("?#\n\r") & set(rest) or upwards:
        problem = "expected SCHEME://HOST/NAMES without a password, a query or '..' segments"
        remedy = "remove these, and pass credentials as described in omearrow_ds.Storage"
        raise ArgumentError(f"{scheme}://{host.rpartition('@')[2]}/...: {problem}", remedy=remedy)
    return Url(f"{scheme}:/{rest}")


class Copy(Protocol):
    """A copy of an object on this machine, which exists as long as this instance."""

    path: Path


class ObjectReader(Protocol):
    """Picklable reader of objects in object stores and on web servers by URL; versions are sizes and ETags."""

    def open(self, url: str) -> ObjectFile:
        """Open an object; later reads raise an error if it has changed."""

    def read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        """Return a whole object, which may have been prefetched, of an expected version."""

    def expect(self, versions: Mapping[str, tuple[int, str] | None]) -> None:
        """Prefetch some of the whole objects that are read next, in this order."""

    def forget(self) -> None:
        """Drop the prefetched objects."""

    def inside(self, url: str) -> Mapping[str, tuple[int, str]]:
        """Return names and versions of all objects below a URL, at any depth."""

    def copied(self, url: str) -> tuple[Copy, tuple[int, str]]:
        """Return a copy of a whole object in the cache, and its version; raise an error without a cache."""

    def settings(self, url: str) -> dict[str, str]:
        """Return settings for a library with its own client; they may contain secrets, so do not store them."""

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return the server error behind an error of a library with its own client, without secrets, or None."""

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, retried after errors that `failed` classifies as transient."""
