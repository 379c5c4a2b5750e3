"""`ZarrObjects`: a zarr store of objects on a server, with our own limits, retries and errors for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.formats._detect import ZARR_FILES
from omearrow_ds.storage.formats._ranged import Objects

_METADATA_FILES = (*ZARR_FILES, ".zmetadata")
_MAX_CACHED_FILES = 4096  # Files of metadata.


class ZarrObjects(Store):
    """Read-only store of the objects below a URL.

    If ``complete``, a missing chunk raises an error, and is not replaced by the fill value.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, objects: Objects, url: str, *, complete: bool) -> None:
        super().__init__(read_only=True)
        self._objects, self._url, self._complete = objects, url, complete
        self._metadata: dict[str, memoryview | None] = {}

    def node(self, url: str) -> Any:
        """Return the array or group at a URL below the root; version 3 is tried first, with one request."""
        path = url.removeprefix(self._url).strip("/")
        try:
            return zarr.open(self, path=path, mode="r", zarr_format=3)
        except FileNotFoundError:
            return zarr.open(self, path=path, mode="r", zarr_format=2)

    def read(self, url: str) -> memoryview:
        """Return an object; metadata, also that it is missing, is cached. Raises `MissingPathError`."""
        if url.rpartition("/")[2] not in _METADATA_FILES:
            return self._objects.part(url, 0, None)
        metadata = self._metadata
        if url not in metadata:
            if len(metadata) >= _MAX_CACHED_FILES:
                self._metadata = metadata = {}
            try:
                metadata[url] = self._objects.part(url, 0, None)
            except MissingPathError:
                metadata[url] = None
        data = metadata[url]
        if data is None:
            raise MissingPathError(f"{url}: does not exist; restore it, or correct the URL")
        return data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrObjects) and self._url == other._url

    __hash__ = None  # type: ignore[assignment]  # like all classes that define equality

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it; None if it does not exist."""
        try:
            data = await asyncio.to_thread(partial(self._read, key, byte_range))
        except MissingPathError:
            if self._complete and key.rpartition("/")[2] not in _METADATA_FILES:
                raise FormatError(f"{self._url}/{key}: does not exist; restore the folder") from None
            return None
        return prototype.buffer.from_bytes(bytes(data))

    def _read(self, key: str, part: ByteRequest | None) -> memoryview:
        url = f"{self._url}/{key}"
        if isinstance(part, RangeByteRequest):
            return self._objects.part(url, part.start, part.end)
        if part is None:
            return self.read(url)
        opened = self._objects.open(url)
        assert isinstance(part, OffsetByteRequest | SuffixByteRequest)
        start = part.offset if isinstance(part, OffsetByteRequest) else max(0, opened.size_bytes - part.suffix)
        return opened.read_ranges([(start, opened.size_bytes)])[0]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of objects."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        try:
            await asyncio.to_thread(partial(self._objects.part, f"{self._url}/{key}", 0, 1))
        except MissingPathError:
            return False
        return True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    set = delete = list = list_prefix = list_dir = _refuse
