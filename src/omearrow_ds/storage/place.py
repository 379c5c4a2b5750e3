"""Target of a collection in parts: named files in a local folder or below a URL."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from omearrow_ds.errors import PathExistsError
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._detect import entries_below
from omearrow_ds.storage.index import write_index
from omearrow_ds.storage.joined import Known, look
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, Published, is_published
from omearrow_ds.storage.parts import Index, Open, PartsSource
from omearrow_ds.storage.publish import check_target, move, move_without_replacing

JOBS, PLAN, REPLACES = "jobs", "plan.json", "replaces"
_LOCK = "lock"


class Place(Protocol):
    """Storage of named files, such as ``"parts/00000-ab.arrow"``; picklable, and unused until the first access.

    Attributes
    ----------
    path
        Final path of the collection.
    replaces
        Hash of the existing manifest that the new one replaces, or None.
    begun
        Whether a collection is being made, as opposed to only cleanup being left.
    stands
        Whether a collection exists at the path, which may be one to be replaced.
    puts_whole
        Whether writes of files are atomic, even if a host crashes.
    """

    path: Path
    puts_whole: bool

    @property
    def replaces(self) -> str | None:
        """Hash of the manifest of the existing collection that the new one replaces, or None."""

    @property
    def begun(self) -> bool:
        """Whether a collection has been started but not yet published."""

    @property
    def stands(self) -> bool:
        """Whether a collection exists at the path."""

    @property
    def told_as(self) -> str:
        """Path to delete in order to start an unfinished collection again, for error messages."""

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if a collection exists and ``overwrite`` is false; an unfinished collection is allowed."""

    def refuse_format(self, fmt: Format) -> None:
        """Raise `ArgumentError` if parts of a format cannot be written to this place."""

    def begin(self, *, overwrite: bool) -> str | None:
        """Prepare for writing; return the hash of the manifest of an existing collection to be replaced, or None.

        Raises
        ------
        PathExistsError
            If a collection exists, and it must not be replaced.
        """

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files; None for a missing file."""

    def write_once(self, name: str, data: bytes) -> bool:
        """Write a file atomically if it does not exist; return False otherwise."""

    def commit(self, data: bytes) -> bool:
        """Write the manifest, which publishes the collection; return False if another process published one first."""

    def replacing(self, name: str) -> AbstractContextManager[Path]:
        """Return a context manager with a temporary file, which replaces the file ``name`` atomically at exit."""

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an image index, and return its hash and file name."""

    def made_at(self, name: str) -> AbstractContextManager[Path]:
        """Return a context manager with a temporary path at which a part is written, and which is removed at exit."""

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Move a finished part into the folder of parts."""

    def forget(self, name: str) -> None:
        """Remove the auxiliary files of a part after the collection was published."""

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return ids, shapes, dtypes and columns of the given parts."""

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return the storage layout of the images, and metadata of a few of them, as JSON values."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names of files in the folder ``parts`` or ``jobs``, with their sizes in bytes."""

    def remove(self, names: Collection[str]) -> None:
        """Remove files or parts; missing ones are ignored."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context manager with a lock on publishing; without locks, the first published manifest is valid."""

    def finish(self, index_file: str) -> None:
        """Move the collection to its final path, and remove all files except its parts, manifest and index."""


class Folder:
    """Local folder for a new collection in parts; it is hidden while another collection exists at the path.

    Parameters
    ----------
    path
        Final path of the collection.
    """

    puts_whole = False
    replaces: str | None = None  # A replacement is made in a hidden folder, not in place.

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.parent / f".{path.name[:200]}.making"
        hidden = self._hidden / path.name
        # The order matters: another process may begin it now.
        taken = os.path.lexists(path) and not (_is_empty(path) or is_unfinished(path))
        self._root = hidden if (hidden / JOBS).is_dir() or taken else path

    @property
    def told_as(self) -> str:
        """Path to delete in order to start an unfinished collection again, for error messages."""
        return str(self._root)

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if a collection exists and ``overwrite`` is false; an unfinished collection is allowed."""
        try:
            check_target(self.path, overwrite=overwrite)
        except PathExistsError:
            if not (_is_empty(self.path) or is_unfinished(self.path)):  # The order matters: another may begin it now.
                raise

    def refuse_format(self, fmt: Format) -> None:
        """Do nothing: a folder holds parts of any format."""

    @property
    def begun(self) -> bool:
        """Whether a collection has been started but not yet published."""
        return (self._root / JOBS).is_dir() and (self._root != self.path or is_unfinished(self.path))

    @property
    def stands(self) -> bool:
        """Whether a collection exists at the path."""
        return is_published(self.path)

    def begin(self, *, overwrite: bool) -> None:
        """Check the target path, and create the folders of jobs and parts."""
        if self._root != self.path:  # Another process may have published a collection since the last check.
            check_target(self.path, overwrite=overwrite)
        self._remove_replaced()
        (self._root / JOBS).mkdir(parents=True, exist_ok=True)
        (self._root / PARTS).mkdir(exist_ok=True)

    def _remove_replaced(self) -> None:
        """Remove a replaced collection that a killed publisher left behind."""
        if self._hidden.is_dir() and not (self._hidden / self.path.name / JOBS).is_dir():
            aside = self._hidden.with_name(f"{self._hidden.name}-{uuid.uuid4().hex[:12]}")
            self._hidden.rename(aside)  # Renamed first: another process may create a new one.
            shutil.rmtree(aside, ignore_errors=True)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""
        file = self._root / name
        return file.read_bytes() if file.is_file() else None

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files; None for a missing file."""
        return list(map(self.read, names))

    def write_once(self, name: str, data: bytes) -> bool:
        """Write a file atomically if it does not exist; return False otherwise."""
        temporary = self._temporary(name)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            move_without_replacing(temporary, self._root / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync((self._root / name).parent)
        return True

    def commit(self, data: bytes) -> bool:
        """Write the manifest, which publishes the collection; return False if a manifest exists already."""
        return self.write_once(MANIFEST, data)

    def _temporary(self, name: str) -> Path:
        """Return a temporary path for a file, in the folder of the jobs, which is removed at the end."""
        return self._root / JOBS / f".{Path(name).name}.{uuid.uuid4().hex[:12]}"

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yield the path of a temporary file, which replaces the file ``name`` atomically at exit."""
        temporary = self._temporary(name)
        try:
            yield temporary
            _sync(temporary)
            temporary.replace(self._root / name)
        finally:
            temporary.unlink(missing_ok=True)

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an image index, and return its hash and file name."""
        with self.replacing(INDEX) as file:
            return write_index(file, index), INDEX

    @contextmanager
    def made_at(self, name: str) -> Iterator[Path]:
        """Yield a temporary path at which a part is written, and which is removed at exit."""
        stem, dot, suffix = name.partition(".")
        temporary = self._root / JOBS / f"{stem}-{uuid.uuid4().hex[:12]}{dot}{suffix}"
        try:
            yield temporary
        finally:
            _remove(temporary)

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Move a finished part into the folder of parts."""
        del opening
        for each in entries_below(made) if made.is_dir() else ():
            _sync(Path(each.path))
        _sync(made)
        place = self._root / PARTS / name
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # Otherwise, a folder with equal bytes exists.
                raise
        _sync(place.parent)

    def forget(self, name: str) -> None:
        """Do nothing: parts in a local folder have no auxiliary files."""

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return ids, shapes, dtypes and columns of the given parts."""
        return [look(opening, self._root / PARTS / part.name) for part in parts]

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return the storage layout of the images, and metadata of a few of them, as JSON values."""
        files = [self._root / PARTS / part.name for part in parts]
        with PartsSource(self.path, fmt, files, index, opening) as source:
            return source.outline().as_json()

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names of files in the folder ``parts`` or ``jobs``, with their sizes in bytes."""
        sizes_bytes = {}
        for entry in (self._root / folder).iterdir() if (self._root / folder).is_dir() else ():
            try:
                sizes_bytes[entry.name] = size_of(entry)
            except FileNotFoundError:  # It was removed meanwhile.
                continue
        return sizes_bytes

    def remove(self, names: Collection[str]) -> None:
        """Remove files or parts; missing ones are ignored."""
        for name in names:
            _remove(self._root / name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lock on publishing if the file system has locks; otherwise, the first published manifest is valid."""
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
        """Move the collection to its final path, and remove all temporary files."""
        del index_file
        if self._root != self.path:
            move(self._root, self.path, overwrite=True)
        shutil.rmtree(self._hidden, ignore_errors=True)
        _remove(self.path / JOBS)  # Removed last: while it exists, the same command resumes the cleanup.


def is_unfinished(path: Path) -> bool:
    """Whether a collection in parts has been started at ``path`` but not yet published."""
    if not (path / JOBS).is_dir():
        return False
    begun = (path / JOBS / PLAN).is_file() or is_published(path)
    return begun or {entry.name for entry in path.iterdir()} <= {JOBS, PARTS}


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes."""
    return sum(each.stat().st_size for each in entries_below(path)) if path.is_dir() else path.stat().st_size


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
