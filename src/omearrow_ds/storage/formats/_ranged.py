"""Objects in object stores as formats see them: an interface that opens, reads, lists and copies them by URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.byte_source import ObjectFile

Found = TypeVar("Found")


class Copy(Protocol):
    """A copy of an object on this machine, which exists until it is closed."""

    path: Path

    def close(self) -> None:
        """Release the copy."""


class Objects(Protocol):
    """Picklable reader of objects in object stores and on web servers by URL."""

    def open(self, url: str) -> ObjectFile:
        """Open an object; later reads raise an error if the object has changed."""

    def read(self, url: str, version: tuple[int, str] | None = None) -> memoryview:
        """Return a whole object, possibly prefetched; ``version`` is its expected size and ETag."""

    def part(self, url: str, start: int, stop: int | None) -> memoryview:
        """Return a byte range of an object; without ``stop``, up to its end."""

    def expect(self, wanted: Mapping[str, tuple[int, str] | None]) -> None:
        """Take the whole objects that are read next, in this order; some of them are prefetched."""

    def inside(self, url: str) -> Mapping[str, tuple[int, str]]:
        """Return the names of all objects below a URL, at any depth, each with its size and fingerprint."""

    def forget(self) -> None:
        """Drop prefetched objects."""

    def copied(self, url: str) -> tuple[Copy, tuple[int, str]]:
        """Return a copy of a whole object in the cache, with size and fingerprint; raise an error without a cache."""

    def settings(self, url: str) -> dict[str, str]:
        """Return the settings for a library with its own client; they may hold secrets, so do not store them."""

    def failed(self, url: str, error: BaseException) -> OMEArrowDSError | None:
        """Return the server error that caused the error of a library with its own client; None if none did."""

    def again(self, url: str, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, retried after errors that `failed` classifies as transient."""
