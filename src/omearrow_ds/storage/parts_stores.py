"""Stores of a new collection in parts: named files in a local folder, or objects below a URL.

Both stores have the same members, are picklable, and are unused until the first access.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from omearrow_ds.errors import ArgumentError, MissingPathError, PathExistsError
from omearrow_ds.options import refuse_value
from omearrow_ds.storage import remote
from omearrow_ds.storage.formats import FILE_FORMAT_NAMES, Format
from omearrow_ds.storage.formats._detect import entries_below
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.manifest import INDEX, INDEX_NAME, JOBS, MANIFEST, PARTS, PLAN, REPLACES, is_published
from omearrow_ds.storage.publish import check_target, move, move_without_replacing, private_folder
from omearrow_ds.storage.remote import ObjectStore, RetryDeadline, Storage, describe

_LOCK = "lock"
_PIECE_BYTES = 2**23  # Larger objects are sent in requests of this size, each with its own retries.
_MAX_CONCURRENCY = 4  # Concurrent requests for the pieces of an object.
_MAX_REQUESTS = 16  # Concurrent requests for small objects.
_SLOWER, _SLOWEST_S = 4, 300  # Growth and limit of the timeout of a piece if the server answers: 28 KB/s.
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
_SILENT = "the server accepted no data"


class FolderStore:
    """Store of a new collection in parts in a local folder, which is hidden while another one exists at the path."""

    has_atomic_writes = False  # Whether no file can be incomplete, even after a host crashed.
    index_name = INDEX  # Name of the image index, which may contain its ``{digest}``.

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.parent / f".{path.name[:200]}.making"
        hidden = self._hidden / path.name
        # The order matters, because another process may begin the collection meanwhile.
        is_taken = os.path.lexists(path) and not (_is_empty(path) or is_unfinished(path))
        self._root = hidden if (hidden / JOBS).is_dir() or is_taken else path
        self.removal_hint = str(self._root)  # Path or objects to remove in order to start again, for errors.

    def check(self, fmt: Format, *, overwrite: bool) -> None:
        """Raise an error if parts of a format cannot be written here, or ``overwrite`` is needed to replace them."""
        del fmt  # A folder can contain parts of any format.
        try:
            check_target(self.path, overwrite=overwrite)
        except PathExistsError:
            if not (_is_empty(self.path) or is_unfinished(self.path)):  # See `__init__` for the order.
                raise

    @property
    def is_begun(self) -> bool:
        """Whether a collection has been started but not yet published, or cleanup is left."""
        return (self._root / JOBS).is_dir() and (self._root != self.path or is_unfinished(self.path))

    @property
    def has_collection(self) -> bool:
        """Whether a collection exists at the path, which may be one to be replaced."""
        return is_published(self.path)

    def begin(self, *, overwrite: bool) -> str | None:
        """Create the folders of jobs and parts; return the hash of a manifest that the new one replaces, or None."""
        if self._root != self.path:  # Another process may have published a collection since the last check.
            check_target(self.path, overwrite=overwrite)
        if self._hidden.is_dir() and not (self._hidden / self.path.name / JOBS).is_dir():
            # A killed publisher left the replaced collection. Another process may create a new one, so rename it first.
            leftover = self._hidden.with_name(f"{self._hidden.name}-{uuid.uuid4().hex[:12]}")
            self._hidden.rename(leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        (self._root / JOBS).mkdir(parents=True, exist_ok=True)
        (self._root / PARTS).mkdir(exist_ok=True)
        return None

    def read_files(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of files; None for a missing file."""
        files = [self._root / name for name in names]
        return [file.read_bytes() if file.is_file() else None for file in files]

    def create(self, name: str, data: bytes, replaced_hash: str | None = None) -> bool:
        """Write a file atomically if it does not exist, or has the hash ``replaced_hash``; return False otherwise."""
        del replaced_hash  # A replacement is made in a hidden folder.
        with self.temporary(name) as temporary:
            temporary.write_bytes(data)
            _sync(temporary)
            try:
                move_without_replacing(temporary, self._root / name)
            except FileExistsError:
                return False
        _sync((self._root / name).parent)
        return True

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """Yield a temporary path for a file or folder with the suffix of ``name``, which is removed at exit."""
        path = self._root / JOBS / f"new-{uuid.uuid4().hex[:12]}-{Path(name).name}"
        try:
            yield path
        finally:
            _remove(path)

    def put(self, name: str, path: Path) -> None:
        """Move a file or folder at a `temporary` path to its name; an existing file is replaced."""
        for entry in entries_below(path) if path.is_dir() else ():
            _sync(Path(entry.path))
        _sync(path)
        target = self._root / name
        try:
            path.replace(target)
        except OSError:
            if not target.is_dir():  # Otherwise, a folder with equal bytes exists.
                raise
        _sync(target.parent)

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names of files in the folder ``parts`` or ``jobs``, with their sizes in bytes."""
        sizes_bytes = {}
        for entry in (self._root / folder).iterdir() if (self._root / folder).is_dir() else ():
            with suppress(FileNotFoundError):  # It was removed meanwhile.
                sizes_bytes[entry.name] = path_size(entry)
        return sizes_bytes

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            _remove(self._root / name)

    @contextmanager
    def publisher_lock(self) -> Iterator[None]:
        """Lock publication if the file system has locks; otherwise, the first published manifest is valid."""
        other = PathExistsError(
            f"{self.path}: another process has published this collection, or is publishing it; choose another path"
        )
        try:
            lock = (self._root / JOBS / _LOCK).open("w")
        except FileNotFoundError:
            raise other from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise other from None
            except OSError:  # The file system does not support locks.
                pass
            if not os.fstat(lock.fileno()).st_nlink:
                raise other
            yield

    def finish(self, index_file: str) -> None:
        """Move the collection to its final path, and remove all files except its parts, manifest and index."""
        del index_file
        if self._root != self.path:
            move(self._root, self.path, overwrite=True)
        shutil.rmtree(self._hidden, ignore_errors=True)
        _remove(self.path / JOBS)  # Removed last: while it exists, the same command resumes the cleanup.


class BucketStore(ObjectStore):
    """Objects of a new collection in parts below a URL; parts are made in private local files, then uploaded.

    For methods, see `FolderStore`.
    """

    has_atomic_writes = True
    index_name = "index-{digest}.parquet"  # Readers of a replaced manifest keep their index.
    publisher_lock = nullcontext  # No lock is needed, because only the first manifest is valid.
    _option = "target_storage"
    _missing = "the object or its bucket does not exist; create the bucket"

    def __init__(self, url: Url, storage: Storage) -> None:
        if url.is_web:
            problem = "collections cannot be written to http:// and https:// URLs"
            remedy = "write to s3://, gs:// or az://, or write a local collection and copy it"
            raise ArgumentError(problem, path=url, remedy=remedy)
        super().__init__(url, storage)
        self.path: Path = url
        self.removal_hint = f"everything below {url}/{JOBS}"

    def check(self, fmt: Format, *, overwrite: bool) -> None:
        if fmt.is_folder:
            problem = f"parts of {fmt.label} are folders, which object stores cannot store"
            refuse_value("format", fmt.name, problem, f"pass one of {FILE_FORMAT_NAMES}", self.path)
        self.begin(overwrite=overwrite)

    @property
    def is_begun(self) -> bool:
        return self._read_file(PLAN) is not None

    @property
    def has_collection(self) -> bool:
        return self._read_file(MANIFEST) is not None

    def begin(self, *, overwrite: bool) -> str | None:
        manifest, plan = self.read_files([MANIFEST, PLAN])
        if manifest is None:
            return None
        digest = digest_of(manifest)
        if (plan is None or json.loads(plan).get(REPLACES) == digest) and not overwrite:
            remedy = "pass overwrite=True to replace it, or choose another URL"
            raise PathExistsError("already exists", path=self.path, remedy=remedy)
        return digest if plan is None else None

    def read_files(self, names: Sequence[str]) -> list[bytes | None]:
        self.client()
        with ThreadPoolExecutor(min(len(names), _MAX_REQUESTS) or 1) as threads:
            return list(threads.map(self._read_file, names))

    def _read_file(self, name: str) -> bytes | None:
        with suppress(MissingPathError):
            return bytes(self.read(name))
        return None

    def create(self, name: str, data: bytes, replaced_hash: str | None = None) -> bool:
        """See `FolderStore.create`; raise `FileNotFoundError` for a record after its collection was published."""
        store, subject = self.client(), f"{self.url}/{name}"
        from obstore.exceptions import BaseError  # noqa: PLC0415  # after the client, which reports its absence

        mode: Any = "create"
        if replaced_hash is not None:

            def read() -> tuple[bytes, str | None]:
                answer = store.get(name)
                return bytes(answer.bytes()), answer.meta.get("e_tag")

            content, tag = self.repeat(RetryDeadline(subject, _SILENT), read)
            if digest_of(content) != replaced_hash:
                return False
            mode = {"e_tag": tag}
        deadline = RetryDeadline(subject, _SILENT)

        def attempt() -> bool:
            try:
                store.put(name, data, mode=mode, use_multipart=False)
            except BaseError as error:
                if type(error).__name__ not in _CONFLICTS:
                    raise
                # An earlier try may have succeeded although its answer was lost.
                return deadline.num_tries > 1 and self.read(name) == data
            return True

        is_created = self.repeat(deadline, attempt)
        if is_created and name.startswith(f"{JOBS}/") and name != PLAN and not self.is_begun:
            self.remove([name])
            raise FileNotFoundError(name)
        return is_created

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
        deadline, read_s = RetryDeadline(f"{self.url}/{name}", _SILENT), remote.READ_S
        from obstore.exceptions import BaseError  # noqa: PLC0415  # after the client, which reports its absence

        def attempt() -> None:
            nonlocal read_s
            max_concurrency = _MAX_CONCURRENCY if read_s == remote.READ_S else 1
            try:
                with _ProgressFile(path, deadline) as file:
                    client = self.client(read_s, retries=True)
                    client.put(name, file, chunk_size=_PIECE_BYTES, max_concurrency=max_concurrency)
            except BaseError as error:
                if read_s < _SLOWEST_S and "timed out" in describe(error) and is_answering():
                    read_s *= _SLOWER
                    deadline.reset()
                raise

        def is_answering() -> bool:
            try:
                self.client().head(MANIFEST)
            except FileNotFoundError:
                return True
            except BaseError as error:
                return "status code" in str(error)
            return True

        self.repeat(deadline, attempt)

    def sizes(self, folder: str) -> Mapping[str, int]:
        return {name: version.size_bytes for name, version in self.listed(folder).items()}

    def remove(self, names: Collection[str]) -> None:
        def attempt() -> None:
            with suppress(FileNotFoundError):  # Some servers report missing objects; all others are still removed.
                self.client().delete(list(names))

        if names:
            self.repeat(RetryDeadline(str(self.url), _SILENT), attempt)

    def finish(self, index_file: str) -> None:
        deadline = RetryDeadline(str(self.url), _SILENT)
        objects = self.repeat(deadline, lambda: self.client().list_with_delimiter()["objects"])
        names = {item["path"] for item in objects} - {index_file}
        self.remove(list(filter(INDEX_NAME.fullmatch, names)))
        self.remove({f"{JOBS}/{name}" for name in self.sizes(JOBS)} - {PLAN})
        self.remove([PLAN])  # Removed last, so that the same command can resume the cleanup.


class _ProgressFile(io.FileIO):
    """File to be sent, which resets the deadline of its request whenever a piece is read."""

    def __init__(self, path: Path, deadline: RetryDeadline) -> None:
        super().__init__(path)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> Any:
        self._deadline.reset()
        return super().read(size)


PartsStore: TypeAlias = FolderStore | BucketStore


def parts_store(path: Path, storage: Storage | None) -> PartsStore:
    return BucketStore(path, storage or Storage()) if isinstance(path, Url) else FolderStore(path)


def is_unfinished(path: Path) -> bool:
    """Whether a collection in parts has been started at ``path`` but not yet published."""
    if not (path / JOBS).is_dir():
        return False
    is_begun = (path / PLAN).is_file() or is_published(path)
    return is_begun or {entry.name for entry in path.iterdir()} <= {JOBS, PARTS}


def path_size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in entries_below(path)) if path.is_dir() else path.stat().st_size


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
