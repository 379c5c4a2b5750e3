"""Objects of a new collection in parts below a URL, each written atomically."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from omearrow_ds.errors import ArgumentError, MissingPathError, PathExistsError
from omearrow_ds.storage import remote
from omearrow_ds.storage.formats import FORMATS, Format
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.manifest import INDEX_NAME, JOBS, MANIFEST, PLAN, REPLACES
from omearrow_ds.storage.publish import private_folder
from omearrow_ds.storage.remote import ObjectStore, RetryDeadline, Storage

_PIECE_BYTES = 2**23  # Larger objects are sent in requests of this size, each with its own retries.
_MAX_CONCURRENCY = 4  # Concurrent requests for the pieces of an object.
_MAX_REQUESTS = 16  # Concurrent requests for small objects.
_SLOWER, _SLOWEST_S = 4, 300  # Growth and limit of the timeout of a piece if the server answers: 28 KB/s.
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
_SILENT = "the server accepted no data"


class BucketStore(ObjectStore):
    """Objects of a new collection in parts below a URL; parts are made in private local files, then uploaded.

    For methods without description, see `omearrow_ds.storage.parts_stores.FolderStore`. Servers of plain HTTP are
    read-only, which is an `ArgumentError`.
    """

    has_atomic_writes = True
    index_name = "index-{digest}.parquet"  # Readers of a replaced manifest keep their index.
    _option = "target_storage"
    _missing = "the object or its bucket does not exist; create the bucket"

    def __init__(self, url: Url, storage: Storage) -> None:
        if url.scheme in ("http", "https"):
            raise ArgumentError(
                "collections cannot be written to http:// and https:// URLs",
                path=url,
                remedy="write to s3://, gs:// or az://, or write a local collection and copy it",
            )
        super().__init__(url, storage)
        self.path: Path = url
        self.removal_hint = f"everything below {url}/{JOBS}"

    def check(self, fmt: Format, *, overwrite: bool) -> None:
        if fmt.in_folder:
            names = ", ".join(other.name for other in FORMATS if not other.in_folder)
            raise ArgumentError(
                f"parts of {fmt.label} are folders, which object stores cannot store",
                path=self.path,
                option="format",
                value=fmt.name,
                remedy=f"pass one of {names}",
            )
        self.begin(overwrite=overwrite)

    @property
    def is_begun(self) -> bool:
        return self.read_files([PLAN]) != [None]

    @property
    def has_collection(self) -> bool:
        return self.read_files([MANIFEST]) != [None]

    def begin(self, *, overwrite: bool) -> str | None:
        manifest, plan = self.read_files([MANIFEST, PLAN])
        if manifest is None:
            return None
        digest = digest_of(manifest)
        is_replaced = plan is None or json.loads(plan).get(REPLACES) == digest
        if is_replaced and not overwrite:
            raise PathExistsError(
                f"{self.path}: already exists; pass overwrite=True to replace it, or choose another URL"
            )
        return digest if plan is None else None

    def read_files(self, names: Sequence[str]) -> list[bytes | None]:
        self.client()
        with ThreadPoolExecutor(min(len(names), _MAX_REQUESTS) or 1) as threads:
            return list(threads.map(self._read_file, names))

    def _read_file(self, name: str) -> bytes | None:
        try:
            return bytes(self.read(name))
        except MissingPathError:
            return None

    def create(self, name: str, data: bytes, replaced_hash: str | None = None) -> bool:
        """See `FolderStore.create`; raise `FileNotFoundError` for a record after its collection was published."""
        if not self._create(name, data, replaced_hash):
            return False
        if name.startswith(f"{JOBS}/") and name != PLAN and not self.is_begun:
            self.remove([name])
            raise FileNotFoundError(name)
        return True

    def _create(self, name: str, data: bytes, replaced_hash: str | None) -> bool:
        store, deadline = self.client(), RetryDeadline(f"{self.url}/{name}")
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

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        with private_folder(Path(tempfile.gettempdir()), f"omearrow-ds-{os.getuid()}-") as folder:
            yield folder / Path(name).name

    def put(self, name: str, path: Path) -> None:
        """Upload a file, which replaces an existing object; a large file is sent in several concurrent pieces.

        If a piece takes longer than the timeout of a silent server, but the server answers small requests, the link
        is slow: the file is then sent piece by piece with longer timeouts.
        """
        self.client()
        deadline, read_s = RetryDeadline(f"{self.url}/{name}"), remote.READ_S
        from obstore import put  # noqa: PLC0415  # after the client, which reports its absence

        def attempt() -> None:
            max_concurrency = _MAX_CONCURRENCY if read_s == remote.READ_S else 1
            with _ProgressFile(path, deadline) as file:
                client = self.client(read_s, retries=True)
                put(client, name, file, chunk_size=_PIECE_BYTES, max_concurrency=max_concurrency)

        def allow_more_time() -> None:
            nonlocal read_s
            if read_s < _SLOWEST_S and self._answers():
                read_s *= _SLOWER
                deadline.reset()

        self.repeat(deadline, attempt, _SILENT, on_timeout=allow_more_time)

    def _answers(self) -> bool:
        """Whether the server answers a small request."""
        from obstore import head  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        try:
            head(self.client(), MANIFEST)
        except FileNotFoundError:
            return True
        except BaseError as error:
            return "status code" in str(error)
        return True

    def sizes(self, folder: str) -> Mapping[str, int]:
        return {name: version.size_bytes for name, version in self.listed(folder).items()}

    def remove(self, names: Collection[str]) -> None:
        store = self.client()
        from obstore import delete  # noqa: PLC0415

        def attempt() -> None:
            with suppress(FileNotFoundError):  # Some servers report missing objects; all others are still removed.
                delete(store, list(names))

        if names:
            self.repeat(RetryDeadline(str(self.url)), attempt, _SILENT)

    def publisher_lock(self) -> AbstractContextManager[None]:
        """Do nothing: no lock is needed, because only the first manifest is valid."""
        return nullcontext()

    def finish(self, index_file: str) -> None:
        """Remove temporary objects; the plan is removed last, so that the same command can resume the cleanup."""
        store = self.client()
        from obstore import list_with_delimiter  # noqa: PLC0415

        objects = self.repeat(RetryDeadline(str(self.url)), lambda: list_with_delimiter(store)["objects"], _SILENT)
        others = [item["path"] for item in objects if item["path"] != index_file]
        self.remove([name for name in others if INDEX_NAME.fullmatch(name)])
        self.remove([f"{JOBS}/{name}" for name in self.sizes(JOBS) if f"{JOBS}/{name}" != PLAN])
        self.remove([PLAN])


class _ProgressFile(io.FileIO):
    """File to be sent, which resets the deadline of its request whenever a piece is read."""

    def __init__(self, path: Path, deadline: RetryDeadline) -> None:
        super().__init__(path)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> Any:
        """Return the next bytes of the file, and record that the upload makes progress."""
        self._deadline.reset()
        return super().read(size)
