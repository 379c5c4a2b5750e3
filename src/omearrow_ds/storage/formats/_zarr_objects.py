"""`ZarrObjects`: a zarr store of objects on a server, with our own limits, retries and errors for requests."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.formats._detect import ZARR_FILES
from omearrow_ds.storage.formats._file_set import ObjectFileSet

_METADATA_FILES = (*ZARR_FILES, ".zmetadata")


class ZarrObjects(Store):
    """Read-only store of the objects below a URL.

    If ``complete``, a missing chunk raises an error, and is not replaced by the fill value.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, files: ObjectFileSet, url: str, *, complete: bool) -> None:
        super().__init__(read_only=True)
        self._files, self._url, self._complete = files, url, complete

    def node(self, url: str) -> zarr.Array[Any] | zarr.Group:
        """Return the array or group at a URL below the root; version 3 is tried first, with one request."""
        path = url.removeprefix(self._url).strip("/")
        try:
            return zarr.open(self, path=path, mode="r", zarr_format=3)
        except FileNotFoundError:
            return zarr.open(self, path=path, mode="r", zarr_format=2)

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
            return self._files.objects.part(url, part.start, part.end)
        if part is None:
            is_metadata = key.rpartition("/")[2] in _METADATA_FILES
            return self._files.read_metadata(url) if is_metadata else self._files.read(url)
        opened = self._files.open(url)
        assert isinstance(part, OffsetByteRequest | SuffixByteRequest)
        start = part.offset if isinstance(part, OffsetByteRequest) else max(0, opened.size_bytes - part.suffix)
        return opened.read_ranges([(start, opened.size_bytes)])[0]

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        try:
            await asyncio.to_thread(partial(self._files.objects.part, f"{self._url}/{key}", 0, 1))
        except MissingPathError:
            return False
        return True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_partial_values = set = delete = list = list_prefix = list_dir = _refuse
