"""`ZarrObjects`: a zarr store of objects on a server, with our own limits, retries and errors for requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.formats._detect import ZARR_FILES
from omearrow_ds.storage.formats._ranged import Objects

_DESCRIBING = (*ZARR_FILES, ".zmetadata")
_MOST_KEPT = 1024  # arrays and groups whose metadata is cached


class ZarrObjects(Store):
    """Read-only store of the objects below a URL.

    If ``complete``, a missing chunk raises an error, and is not replaced by the fill value.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, objects: Objects, url: str, *, complete: bool) -> None:
        super().__init__(read_only=True)
        self._objects, self._url, self._complete = objects, url, complete
        self._kept: dict[str, Any] = {}
        self._described = "", memoryview(b"")  # zarr reads a group's metadata twice

    def node(self, url: str, reading: AbstractContextManager[None]) -> Any:
        """Return the Zarr array or group at a URL below the root; Zarr version 3 is tried before version 2."""
        path = url.removeprefix(self._url).strip("/")
        with reading:
            try:
                return zarr.open(self, path=path, mode="r", zarr_format=3)
            except FileNotFoundError:
                return zarr.open(self, path=path, mode="r", zarr_format=2)

    def kept(self, what: str, made: Callable[[], Any]) -> Any:
        """Return the result of ``made``, cached under the key ``what``."""
        if what not in self._kept:
            if len(self._kept) > _MOST_KEPT:
                self._kept.clear()
            self._kept[what] = made()
        return self._kept[what]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrObjects) and self._url == other._url

    __hash__ = None  # type: ignore[assignment]  # like all classes that define equality

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a byte range of an object; None if the object does not exist."""
        try:
            data = await asyncio.to_thread(partial(self._read, key, byte_range))
        except MissingPathError:
            if self._complete and key.rpartition("/")[2] not in _DESCRIBING:
                raise FormatError(f"{self._url}/{key}: does not exist; restore the folder") from None
            return None
        return prototype.buffer.from_bytes(bytes(data))

    def _read(self, key: str, part: ByteRequest | None) -> memoryview:
        url = f"{self._url}/{key}"
        if isinstance(part, RangeByteRequest):
            return self._objects.part(url, part.start, part.end)
        if part is None and key.rpartition("/")[2] in _DESCRIBING:
            last, data = self._described
            if last != key:
                data = self._objects.part(url, 0, None)
                self._described = key, data
            return data
        if part is None:
            return self._objects.part(url, 0, None)
        opened = self._objects.open(url)
        assert isinstance(part, OffsetByteRequest | SuffixByteRequest)
        start = part.offset if isinstance(part, OffsetByteRequest) else max(0, opened.size_bytes - part.suffix)
        return opened.read_ranges([(start, opened.size_bytes)])[0]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return a byte range of each object; None for an object that does not exist."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        try:
            await asyncio.to_thread(partial(self._objects.part, f"{self._url}/{key}", 0, 1))
        except MissingPathError:
            return False
        return True

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse to write."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Refuse to delete."""
        raise NotImplementedError

    def list(self) -> AsyncIterator[str]:
        """Refuse to list."""
        raise NotImplementedError

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Refuse to list."""
        raise NotImplementedError

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Refuse to list."""
        raise NotImplementedError
