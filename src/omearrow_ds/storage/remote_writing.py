"""Atomic writes of objects to a server."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage import remote
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.remote import Remote, RetryDeadline, Storage, opened_client

_PIECE_BYTES = 2**23  # Larger objects are sent in requests of this size, each with its own retries.
_MAX_CONCURRENCY = 4
_SLOWER, _SLOWEST_S = 4, 300  # Growth and limit of the timeout of a piece if the server answers: 28 KB/s.
_RETRIES = {"max_retries": 12, "retry_timeout": timedelta(seconds=10)}  # Settings per piece.
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
_SILENT = "nothing was accepted"


class RemoteWriter(Remote):
    """Objects below a URL, for reading and writing.

    Parameters
    ----------
    url
        The folder; servers of plain HTTP are read-only.
    storage
        Access to the server.

    Raises
    ------
    ArgumentError
        If the server of the URL is read-only.
    """

    _option = "target_storage"
    _missing = "the object or its bucket does not exist; create the bucket"

    def __init__(self, url: Url, storage: Storage) -> None:
        if url.scheme in ("http", "https"):
            raise ArgumentError(
                "this URL is read-only",
                path=url,
                remedy="write to s3://, gs:// or az://, or to this machine and copy it",
            )
        super().__init__(url, storage)
        self._sender: ProcessLocal[Any] = ProcessLocal(self._opened_sender)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteWriter, (self.url, self.storage)

    def _opened_sender(self) -> Any:
        return opened_client(self.url, self.storage, retries=_RETRIES)

    def put(self, name: str, data: bytes | Path) -> None:
        """Write or replace an object; a large object is sent in several concurrent pieces.

        If a piece takes longer than the timeout of a silent server, but the server answers small requests, the link
        is slow: the object is then sent piece by piece with longer timeouts.

        Raises
        ------
        StorageError
            If the server accepts nothing for 30 s, or refuses it.
        """
        store, deadline, read_s = self._sender.get(), RetryDeadline(f"{self.url}/{name}"), remote.READ_S
        from obstore import put  # noqa: PLC0415  # after the client, which reports its absence

        def attempt() -> None:
            max_concurrency = _MAX_CONCURRENCY if read_s == remote.READ_S else 1
            with io.BytesIO(data) if isinstance(data, bytes) else _ProgressFile(data, deadline) as file:
                put(store, name, file, chunk_size=_PIECE_BYTES, max_concurrency=max_concurrency)

        def allow_more_time() -> None:
            nonlocal store, read_s
            if read_s < _SLOWEST_S and self._answers():
                read_s *= _SLOWER
                store = opened_client(self.url, self.storage, read_s=read_s, retries=_RETRIES)
                deadline.reset()

        self.repeat(deadline, attempt, _SILENT, on_timeout=allow_more_time)

    def create(self, name: str, data: bytes, replaced_hash: str | None = None) -> bool:
        """Write a small object if it does not exist, or has the hash ``replaced_hash``; return False otherwise."""
        store, deadline = self._store.get(), RetryDeadline(f"{self.url}/{name}")
        from obstore import get, put  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        def read() -> tuple[bytes, str | None]:
            answer = get(store, name)
            return bytes(answer.bytes()), answer.meta.get("e_tag")

        mode: Any = "create"
        if replaced_hash is not None:
            content, tag = self.repeat(RetryDeadline(deadline.subject), read, _SILENT)
            if digest_of(content) != replaced_hash:
                return False
            mode = {"e_tag": tag}

        def attempt() -> bool:
            try:
                put(store, name, data, mode=mode, use_multipart=False)
            except BaseError as error:
                if type(error).__name__ not in _CONFLICTS:
                    raise
                # An earlier try may have succeeded although its answer was lost.
                return deadline.num_tries > 1 and self.read(name) == data
            return True

        return self.repeat(deadline, attempt, _SILENT)

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names and sizes in bytes of the objects in a folder; ``""`` is the folder at the URL itself."""
        store = self._store.get()
        from obstore import list as list_objects  # noqa: PLC0415
        from obstore import list_with_delimiter  # noqa: PLC0415

        def attempt() -> dict[str, int]:
            if folder:
                objects = [item for batch in list_objects(store, f"{folder}/") for item in batch]
            else:
                objects = list(list_with_delimiter(store)["objects"])
            return {item["path"].removeprefix(f"{folder}/"): int(item["size"]) for item in objects}

        return self.repeat(RetryDeadline(f"{self.url}/{folder}"), attempt, _SILENT)

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; missing objects are ignored."""
        store = self._store.get()
        from obstore import delete  # noqa: PLC0415

        def attempt() -> None:
            with suppress(FileNotFoundError):  # Some servers report missing objects; all others are still removed.
                delete(store, list(names))

        if names:
            self.repeat(RetryDeadline(str(self.url)), attempt, _SILENT)

    def _answers(self) -> bool:
        """Whether the server answers a small request."""
        from obstore import head  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        try:
            head(self._store.get(), "parts.json")
        except FileNotFoundError:
            return True
        except BaseError as error:
            return "status code" in str(error)
        return True


class _ProgressFile(io.FileIO):
    """File to be sent, which resets the deadline of its request whenever a piece is read."""

    def __init__(self, path: Path, deadline: RetryDeadline) -> None:
        super().__init__(path)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> Any:
        """Return the next bytes of the file, and record that the upload makes progress."""
        self._deadline.reset()
        return super().read(size)
