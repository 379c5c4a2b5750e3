"""Store of a new collection in parts: named files in a local folder, or objects below a URL.

Both stores have the same members, are picklable, and are unused until the first access.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from omearrow_ds.errors import PathExistsError
from omearrow_ds.storage.bucket_store import BucketStore
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._detect import entries_below
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.manifest import INDEX, JOBS, PARTS, PLAN, is_published
from omearrow_ds.storage.publish import check_target, move, move_without_replacing
from omearrow_ds.storage.remote import Storage

_LOCK = "lock"


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
        """Remove files or folders; missing ones are ignored."""
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


PartsStore: TypeAlias = FolderStore | BucketStore


def parts_store(path: Path, storage: Storage | None) -> PartsStore:
    """Return the store of a collection in parts at a local path or URL."""
    return BucketStore(path, storage or Storage()) if isinstance(path, Url) else FolderStore(path)


def is_unfinished(path: Path) -> bool:
    """Whether a collection in parts has been started at ``path`` but not yet published."""
    if not (path / JOBS).is_dir():
        return False
    is_begun = (path / PLAN).is_file() or is_published(path)
    return is_begun or {entry.name for entry in path.iterdir()} <= {JOBS, PARTS}


def path_size(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes."""
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
