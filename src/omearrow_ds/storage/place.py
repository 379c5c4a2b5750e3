"""The place that a collection in parts is made in: files by their names, in a folder of this machine or below a URL."""

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
    """Files by their names, as ``"parts/00000-ab.arrow"``. It can be pickled, and costs nothing until it is asked.

    Attributes
    ----------
    path
        Where the collection is to stand.
    replaces
        Hash of the manifest that stands where the new one is to stand, and is to be replaced; None if none is.
    begun
        Whether a collection is being made, or only clearing up is left.
    stands
        Whether a collection stands there, which may be one that is to be replaced.
    puts_whole
        Whether a file is there whole or not at all, also where a host stopped.
    """

    path: Path
    puts_whole: bool

    @property
    def replaces(self) -> str | None:
        """Hash of the manifest that is to be replaced."""

    @property
    def begun(self) -> bool:
        """Whether a collection is being made."""

    @property
    def stands(self) -> bool:
        """Whether a collection stands there."""

    @property
    def told_as(self) -> str:
        """What to remove, to begin anew."""

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if nothing must be made there; what is begun goes on."""

    def refuse_format(self, fmt: Format) -> None:
        """Raise `ArgumentError` if parts of a format cannot be there."""

    def begin(self, *, overwrite: bool) -> str | None:
        """Make it ready to be written to; return the hash of the manifest that is to be replaced in its place.

        Raises
        ------
        PathExistsError
            If there is one, and it is not to be replaced.
        """

    def read(self, name: str) -> bytes | None:
        """Return what a file holds; None if there is none."""

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what files hold."""

    def write_once(self, name: str, data: bytes) -> bool:
        """Write a file that appears whole, unless there is one: then that stays, and this is False."""

    def commit(self, data: bytes) -> bool:
        """Write the manifest, unless another one than is to be replaced is there: then this is False."""

    def replacing(self, name: str) -> AbstractContextManager[Path]:
        """Give a file to write, which is put in a name's place when it is whole."""

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an index, and return its hash and how it is called."""

    def made_at(self, name: str) -> AbstractContextManager[Path]:
        """Give where a part may be made; what is left there goes."""

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Put a part that was made among the parts."""

    def forget(self, name: str) -> None:
        """Remove what was put beside a part, for who publishes, after somebody has."""

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return what is known of parts."""

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return what a look at a few images tells of all, as JSON keeps it."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return what is in ``parts`` or ``jobs``, and how many bytes each is."""

    def remove(self, names: Collection[str]) -> None:
        """Remove files, or parts; they may be gone."""

    def alone(self) -> AbstractContextManager[None]:
        """Keep other publishers out, where that can be; where not, the first one's manifest counts."""

    def finish(self, index_file: str) -> None:
        """Let it stand where it is to stand, with nothing beside but the index that counts."""


class Folder:
    """A folder of this machine, or a hidden one beside it while another collection stands there.

    Parameters
    ----------
    path
        Where the collection is to stand.
    """

    puts_whole = False
    replaces: str | None = None  # it is made beside what it replaces

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.parent / f".{path.name[:200]}.making"
        hidden = self._hidden / path.name
        # In this order: another process may begin it now.
        taken = os.path.lexists(path) and not (_is_empty(path) or is_unfinished(path))
        self._root = hidden if (hidden / JOBS).is_dir() or taken else path

    @property
    def told_as(self) -> str:
        """What to remove, to begin anew."""
        return str(self._root)

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if nothing must be made there; what is begun goes on."""
        try:
            check_target(self.path, overwrite=overwrite)
        except PathExistsError:
            if not (_is_empty(self.path) or is_unfinished(self.path)):  # in this order: another may begin it now
                raise

    def refuse_format(self, fmt: Format) -> None:
        """Do nothing: a folder holds parts of any format."""

    @property
    def begun(self) -> bool:
        """Whether a collection is being made."""
        return (self._root / JOBS).is_dir() and (self._root != self.path or is_unfinished(self.path))

    @property
    def stands(self) -> bool:
        """Whether a collection stands there."""
        return is_published(self.path)

    def begin(self, *, overwrite: bool) -> None:
        """Make it ready to be written to."""
        if self._root != self.path:  # a collection may have come since it was looked at
            check_target(self.path, overwrite=overwrite)
        self._remove_replaced()
        (self._root / JOBS).mkdir(parents=True, exist_ok=True)
        (self._root / PARTS).mkdir(exist_ok=True)

    def _remove_replaced(self) -> None:
        """Remove the collection that was replaced by one whose publisher was killed then."""
        if self._hidden.is_dir() and not (self._hidden / self.path.name / JOBS).is_dir():
            aside = self._hidden.with_name(f"{self._hidden.name}-{uuid.uuid4().hex[:12]}")
            self._hidden.rename(aside)  # at once: another process may make a new one
            shutil.rmtree(aside, ignore_errors=True)

    def read(self, name: str) -> bytes | None:
        """Return what a file holds; None if there is none."""
        file = self._root / name
        return file.read_bytes() if file.is_file() else None

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what files hold."""
        return list(map(self.read, names))

    def write_once(self, name: str, data: bytes) -> bool:
        """Write a file that appears whole, unless there is one: then that stays, and this is False."""
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
        """Write the manifest, unless there is one: then this is False."""
        return self.write_once(MANIFEST, data)

    def _temporary(self, name: str) -> Path:
        """Return where a file is written before it is moved: within the folder of the jobs, which goes at the end."""
        return self._root / JOBS / f".{Path(name).name}.{uuid.uuid4().hex[:12]}"

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Give a file to write, which is put in a name's place when it is whole."""
        temporary = self._temporary(name)
        try:
            yield temporary
            _sync(temporary)
            temporary.replace(self._root / name)
        finally:
            temporary.unlink(missing_ok=True)

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an index, and return its hash and how it is called."""
        with self.replacing(INDEX) as file:
            return write_index(file, index), INDEX

    @contextmanager
    def made_at(self, name: str) -> Iterator[Path]:
        """Give where a part may be made; what is left there goes."""
        stem, dot, suffix = name.partition(".")
        made = self._root / JOBS / f"{stem}-{uuid.uuid4().hex[:12]}{dot}{suffix}"
        try:
            yield made
        finally:
            _remove(made)

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Move a part that was made to the parts."""
        del opening
        for each in entries_below(made) if made.is_dir() else ():
            _sync(Path(each.path))
        _sync(made)
        place = self._root / PARTS / name
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # a folder with the same bytes is there
                raise
        _sync(place.parent)

    def forget(self, name: str) -> None:
        """Do nothing: nothing was put beside it."""

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return what is known of parts."""
        return [look(opening, self._root / PARTS / part.name) for part in parts]

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return what a look at a few images tells of all, as JSON keeps it."""
        files = [self._root / PARTS / each.name for each in parts]
        with PartsSource(self.path, fmt, files, index, opening) as source:
            return source.outline().as_json()

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return what is in a folder, and how many bytes each is."""
        found = {}
        for each in (self._root / folder).iterdir() if (self._root / folder).is_dir() else ():
            try:
                found[each.name] = size_of(each)
            except FileNotFoundError:  # it went meanwhile
                continue
        return found

    def remove(self, names: Collection[str]) -> None:
        """Remove files, or parts; they may be gone."""
        for name in names:
            _remove(self._root / name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other publishers out, where the file system has locks; without, the first one's manifest counts."""
        other = PathExistsError(f"{self.path}: was published, or is being published, by somebody else")
        try:
            lock = (self._root / JOBS / _LOCK).open("w")
        except FileNotFoundError:
            raise other from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise other from None
            except OSError:  # no locks here
                pass
            if not os.fstat(lock.fileno()).st_nlink:
                raise other
            yield

    def finish(self, index_file: str) -> None:
        """Let it stand where it is to stand, with nothing beside."""
        del index_file
        if self._root != self.path:
            move(self._root, self.path, overwrite=True)
        shutil.rmtree(self._hidden, ignore_errors=True)
        _remove(self.path / JOBS)  # last: while it is there, the same command clears up


def is_unfinished(path: Path) -> bool:
    """Whether a path is that of a collection in parts that is being made, or was left so."""
    if not (path / JOBS).is_dir():
        return False
    begun = (path / JOBS / PLAN).is_file() or is_published(path)
    return begun or {each.name for each in path.iterdir()} <= {JOBS, PARTS}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
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
