"""Atomic writes of objects to a server."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from omearrow_ds.errors import ArgumentError, MissingPathError
from omearrow_ds.storage import remote
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.remote import Patience, Remote, Storage, opened_client

_PIECE_BYTES = 2**23  # Larger objects are sent in requests of this size, each with its own retries.
_AT_ONCE = 4
_SLOWER, _SLOWEST_S = 4, 300  # Growth and limit of the timeout of a piece if the server answers: 28 KB/s.
_RETRIES = {"max_retries": 12, "retry_timeout": timedelta(seconds=10)}  # Settings per piece.
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
Found = TypeVar("Found")


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
        store, patience, read_s = self._sender.get(), Patience(f"{self.url}/{name}"), remote.READ_S
        from obstore import put  # noqa: PLC0415  # after the client, which reports its absence

        def attempt() -> bool:
            nonlocal store, read_s
            at_once = _AT_ONCE if read_s == remote.READ_S else 1
            with io.BytesIO(data) if isinstance(data, bytes) else _Watched(data, patience) as file:
                put(store, name, file, chunk_size=_PIECE_BYTES, max_concurrency=at_once)
            return True

        def slow() -> None:
            nonlocal store, read_s
            if read_s < _SLOWEST_S and self._answers():
                read_s *= _SLOWER
                store = opened_client(self.url, self.storage, read_s=read_s, retries=_RETRIES)
                patience.got_on()

        self._insist(attempt, patience, slow)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object if it does not exist; return False if it exists."""
        return self._conditional(name, data, "create")

    def replace(self, name: str, data: bytes, digest: str) -> bool:
        """Replace a small object whose hash is ``digest``; return False if the object has another hash."""
        from obstore import get  # noqa: PLC0415

        def found() -> tuple[bytes, str | None]:
            answer = get(self._store.get(), name)
            return bytes(answer.bytes()), answer.meta.get("e_tag")

        said, tag = self._insist(found, Patience(f"{self.url}/{name}"))
        return digest_of(said) == digest and self._conditional(name, data, {"e_tag": tag})

    def _conditional(self, name: str, data: bytes, mode: Any) -> bool:
        store, patience = self._store.get(), Patience(f"{self.url}/{name}")
        from obstore import put  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        def attempt() -> bool:
            try:
                put(store, name, data, mode=mode, use_multipart=False)
            except BaseError as error:
                if type(error).__name__ not in _CONFLICTS:
                    raise
                return patience.tries > 1 and self.read(name) == data  # An earlier try succeeded; its answer was lost.
            return True

        return self._insist(attempt, patience)

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names and sizes in bytes of the objects in a folder; ``""`` is the folder at the URL itself."""
        from obstore import list as listed  # noqa: PLC0415
        from obstore import list_with_delimiter  # noqa: PLC0415

        def attempt() -> dict[str, int]:
            store = self._store.get()
            if folder:
                listed_objects = [item for some in listed(store, f"{folder}/") for item in some]
            else:
                listed_objects = list(list_with_delimiter(store)["objects"])
            return {item["path"].removeprefix(f"{folder}/"): int(item["size"]) for item in listed_objects}

        return self._insist(attempt, Patience(f"{self.url}/{folder}"))

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; missing objects are ignored."""
        from obstore import delete  # noqa: PLC0415

        def attempt() -> None:
            try:
                delete(self._store.get(), list(names))
            except FileNotFoundError:  # Some servers report missing objects; all others are still removed.
                return

        if names:
            self._insist(attempt, Patience(str(self.url)))

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

    def _insist(
        self, attempt: Callable[[], Found], patience: Patience, slow: Callable[[], None] = lambda: None
    ) -> Found:
        """Return the result of an attempt, retried while the server may still answer; ``slow`` handles silence."""
        from obstore.exceptions import BaseError  # noqa: PLC0415

        while True:
            patience.begin()
            try:
                result = attempt()
            except FileNotFoundError:
                self._answered = True
                raise MissingPathError(
                    f"{patience.where}: the object or its bucket does not exist; create the bucket"
                ) from None
            except BaseError as error:
                problem = self.refuse_final(patience.where, error)
            else:
                self._answered = True
                return result
            if "timed out" in problem:
                slow()
            patience.wait(problem, "nothing was accepted")


class _Watched(io.FileIO):
    """A file to be sent, which records progress whenever a piece is read."""

    def __init__(self, path: Path, patience: Patience) -> None:
        super().__init__(path)
        self._patience = patience

    def read(self, size: int | None = -1, /) -> Any:
        """Return the next bytes of the file, and record that the upload makes progress."""
        self._patience.got_on()
        return super().read(size)
