"""A collection in parts that is being made: its plan, what jobs have made, and the step that makes it a collection.

``jobs/`` is there from the first moment to the last: ``plan.json``, which the first process wrote and all others are
held to, and a record a part, written when the part is whole. What replaces a collection is made in a hidden folder
beside it, and changes places with it at the end.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from omearrow_ds.errors import FormatError, PathExistsError
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._detect import entries_below
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.joined import index_of, look
from omearrow_ds.storage.manifest import (
    INDEX,
    MANIFEST,
    PARTS,
    Manifest,
    Published,
    is_published,
    write_index,
)
from omearrow_ds.storage.parts import Open, PartsSource
from omearrow_ds.storage.publish import check_target, move, move_without_replacing
from omearrow_ds.text import count

JOBS, PLAN, FAILED = "jobs", "plan.json", "failed.csv"
_LOCK = "lock"
_LISTED = 8
_ASPECTS = {
    "format": "format",
    "images": "number of images",
    "chosen": "image column, table, level or channels",
    "known": "ids, shapes, dtypes, columns or checksums",
    "files": "files, by their names, sizes or times",
    "options": "options of the crops",
}


@dataclass(frozen=True)
class Record:
    """What a job made: a part, or less than was planned where images ``failed``: each ``{"id": ..., "error": ...}``."""

    part: Published
    failed: Sequence[Mapping[str, str]] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return what a file says."""
        with refusing(file, "the record of a part", MALFORMED):
            found = json.loads(file.read_bytes())
            return cls(Published(**found["part"]), found["failed"])


class Unfinished:
    """A folder that a collection in parts is made in.

    Attributes
    ----------
    path
        Where the collection is to stand.
    folder
        Where it is made: there, or in a hidden folder beside it while another one stands there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.parent / f".{path.name[:200]}.making"
        hidden = self._hidden / path.name
        taken = os.path.lexists(path) and not is_unfinished(path) and not _is_empty(path)
        self.folder = hidden if (hidden / JOBS).is_dir() or taken else path

    @property
    def published(self) -> bool:
        """Whether it is a collection, and only clearing up is left."""
        return is_published(self.folder)

    @property
    def plan(self) -> dict[str, Any] | None:
        """What the parts are made by; None if nobody has begun."""
        for file, within in ((self.folder / MANIFEST, "made"), (self.folder / JOBS / PLAN, None)):
            if file.is_file():
                with refusing(file, "the plan of a collection in parts", MALFORMED):
                    found = json.loads(file.read_bytes())
                    return dict(found if within is None else found[within])
        return None

    def begin(self, described: Mapping[str, Any]) -> None:
        """Make the folder, or go on with it.

        Raises
        ------
        PathExistsError
            If what is being made there is of another source or other options.
        """
        self._remove_replaced()
        (self.folder / JOBS).mkdir(parents=True, exist_ok=True)
        (self.folder / PARTS).mkdir(exist_ok=True)
        write_once(self.folder / JOBS / PLAN, json.dumps(described, indent=1))
        other = _difference(self.plan or {}, described)
        if other is not None:
            raise PathExistsError(
                f"{self.path}: is being made of {other}; the same command as before goes on with it; for another "
                f"one remove {self.folder}, or choose another path"
                if other.startswith("a source")
                else f"{self.path}: is being made with {other}; pass the same to go on with it, or remove "
                f"{self.folder}, or choose another path"
            )

    def _remove_replaced(self) -> None:
        """Remove the collection that was replaced by one whose publisher was killed then."""
        if self._hidden.is_dir() and not (self._hidden / self.path.name / JOBS).is_dir():
            aside = self._hidden.with_name(f"{self._hidden.name}-{uuid.uuid4().hex[:12]}")
            self._hidden.rename(aside)  # at once: another process may make a new one
            shutil.rmtree(aside, ignore_errors=True)

    def records(self) -> dict[int, Record]:
        """Return what is made, by the parts' numbers: a part that is gone or cut short is forgotten."""
        found = {}
        for file in sorted((self.folder / JOBS).glob("[0-9]*.json")):
            record = Record.read(file)
            if size_of(self.folder / PARTS / record.part.name) == record.part.size_bytes:
                found[int(file.stem)] = record
            else:
                file.unlink(missing_ok=True)
        return found

    def add(self, number: int, made: Path, record: Record) -> Record:
        """Move a part that is whole to the others, and record it; return the record that counts, which is the first.

        A second part of a number is removed.
        """
        place = self.folder / PARTS / record.part.name
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # a folder with the same bytes is there
                raise
            remove(made)
        _sync(place.parent)
        file = self.folder / JOBS / f"{number:05d}.json"
        try:
            if write_once(file, json.dumps(asdict(record))):
                return record
            first = Record.read(file)
        except FileNotFoundError:  # it was published meanwhile
            first = Record(Manifest.read(self.folder).parts[number])
        if first.part.name != record.part.name:
            remove(place)
        return first

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other publishers out, where the file system has locks; without, the first one's manifest counts."""
        other = PathExistsError(f"{self.path}: was published, or is being published, by somebody else")
        try:
            lock = (self.folder / JOBS / _LOCK).open("w")
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

    def publish(self, opening: Open) -> Manifest:
        """Make it a collection, once all parts are there; ``opening`` opens one of them.

        Raises
        ------
        FormatError
            If parts are missing, or no image could be read.
        PathExistsError
            If somebody else has published it.
        """
        plan = self.plan
        if plan is None or not (self.folder / JOBS).is_dir():
            done = "is published already" if is_published(self.path) else "is no collection in parts that was begun"
            raise (PathExistsError if is_published(self.path) else FormatError)(f"{self.path}: {done}")
        with self._alone():
            if not is_published(self.folder):
                self._complete(plan, opening)
            manifest = Manifest.read(self.folder)
            kept = {part.name for part in manifest.parts}
            for each in (self.folder / PARTS).iterdir():
                if each.name not in kept:
                    remove(each)
            if self.folder != self.path:
                move(self.folder, self.path, overwrite=True)
            shutil.rmtree(self._hidden, ignore_errors=True)
            remove(self.path / JOBS)  # last: while it is there, the same command clears up
        if manifest.failed:
            what = f"{count(len(manifest.failed), 'image')} could not be read and are left out"
            warnings.warn(f"{self.path}: {what}; they are listed in {self.path / FAILED}", UserWarning, stacklevel=2)
        return manifest

    def _complete(self, plan: Mapping[str, Any], opening: Open) -> None:
        """Write index and manifest."""
        records = self.records()
        self._refuse_missing(records, plan["parts"])
        made = [records[number] for number in range(plan["parts"])]
        failed = [each for record in made for each in record.failed]
        if failed and not any(record.part.images for record in made):
            raise FormatError(f"{self.path}: no image could be read, the first: {failed[0]['error']}; nothing is made")
        parts = [record.part for record in made]
        known = [look(opening, self.folder / PARTS / part.name) for part in parts]
        ids = list(chain.from_iterable(each.image_ids for each in known))
        index = index_of(known, ids, pa.concat_tables([each.columns for each in known]))
        with _replacing(self.folder / INDEX) as file:
            digest = write_index(file, index)
        if failed:
            with _replacing(self.folder / FAILED) as file, file.open("w", newline="", encoding="utf-8") as text:
                rows = csv.DictWriter(text, ["id", "error"])
                rows.writeheader()
                rows.writerows(failed)
        fmt, files = get_format(plan["layout"]["format"]), [self.folder / PARTS / each.name for each in parts]
        with PartsSource(self.path, fmt, files, index, opening) as source:
            outline = source.outline().as_json() if files else {}
        manifest = Manifest(fmt.name, parts, digest, plan, failed, outline=outline)
        if not write_once(self.folder / MANIFEST, manifest.as_json()):
            raise PathExistsError(f"{self.path}: was published by somebody else")

    def _refuse_missing(self, records: Mapping[int, Record], total: int) -> None:
        missing = [number for number in range(total) if number not in records]
        if not missing:
            return
        if is_published(self.folder):
            raise PathExistsError(f"{self.path}: was published by somebody else")
        listed = ", ".join(f"{number + 1}/{total}" for number in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED:,} more" if len(missing) > _LISTED else ""
        raise FormatError(
            f"{self.path}: {len(records):,} of {count(total, 'part')} are made; the command that began it makes the "
            f"others, or with --part {listed}{more} each of them"
        )


def is_unfinished(path: Path) -> bool:
    """Whether a path is that of a collection in parts that is being made, or was left so."""
    if not (path / JOBS).is_dir():
        return False
    begun = (path / JOBS / PLAN).is_file() or (path / MANIFEST).is_file()
    return begun or {each.name for each in path.iterdir()} <= {JOBS, PARTS}


def refuse_unfinished(path: Path) -> None:
    """Raise `FormatError` if a collection in parts is being made there, saying how far it is."""
    if not is_unfinished(path):
        return
    unfinished = Unfinished(path)
    plan = unfinished.plan or {"parts": 0}
    made = sum(1 for _ in (path / JOBS).glob("[0-9]*.json"))
    raise FormatError(
        f"{path}: {made:,} of {count(plan['parts'], 'part')} are made; the same command goes on with it, and "
        f"omearrow-ds publish ends it once all are there"
    )


def check_parts_target(path: Path, *, overwrite: bool) -> None:
    """Raise an error if a collection in parts must not be made at a path; one that is begun goes on."""
    try:
        check_target(path, overwrite=overwrite)
    except PathExistsError:
        if not (_is_empty(path) or is_unfinished(path)):  # in this order: another process may begin it now
            raise


def write_once(path: Path, text: str) -> bool:
    """Write a file that appears whole, unless there is one: then it stays, and this is False."""
    temporary = _temporary(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        move_without_replacing(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)
    return True


def _temporary(path: Path) -> Path:
    """Return where a file is written before it is moved: within the folder of the jobs, which goes at the end."""
    folder = path.parent if path.parent.name == JOBS else path.parent / JOBS
    return folder / f".{path.name}.{uuid.uuid4().hex[:12]}"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    temporary = _temporary(path)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """Have a part on the disk, whatever happens to the host."""
    for each in entries_below(path) if path.is_dir() else ():
        _sync(Path(each.path))
    _sync(path)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; -1 if there is none."""
    try:
        return sum(each.stat().st_size for each in entries_below(path)) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return -1


def remove(path: Path) -> None:
    """Remove a file or a folder; it may be gone."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _difference(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in words what differs between two descriptions of plans; None if nothing does."""
    before, after = begun.get("layout", {}), now["layout"]
    for name in dict.fromkeys([*after, *before]):
        if before.get(name) != after.get(name):
            return f"{name}={before.get(name)!r}, now it is {after.get(name)!r}"
    before, after = begun.get("source", {}), now["source"]
    changed = [said for name, said in _ASPECTS.items() if before.get(name) != after.get(name)]
    return f"a source with other {' and other '.join(changed)}" if changed else None
