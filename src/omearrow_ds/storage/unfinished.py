"""Unpublished collections in parts: the plan, the records of finished parts, and the step that publishes them.

``jobs/`` exists from start to end. It holds ``plan.json``, which the first process writes and all others must match,
and one record per part, written when the part is complete. The replacement of a collection in a folder is made in a
hidden folder next to it, and swapped with it at the end. Below a URL, new parts are put next to the old ones, and
only the manifest is replaced.
"""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Self

import pyarrow as pa

from omearrow_ds.errors import FormatError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.joined import index_of
from omearrow_ds.storage.manifest import MANIFEST, PART_NAME, PARTS, Manifest, Published
from omearrow_ds.storage.parts import Open
from omearrow_ds.storage.place import JOBS, PLAN, REPLACES, Folder, Place
from omearrow_ds.storage.prefix import Prefix
from omearrow_ds.storage.remote import Storage
from omearrow_ds.text import count

FAILED = "failed.csv"
_LISTED = 8
_RECORD = re.compile(r"([0-9]+)\.json")
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
    """Result of a job: the finished part, and the images that could not be read, as ``{"id": ..., "error": ...}``."""

    part: Published
    failed: Sequence[Mapping[str, str]] = ()

    @classmethod
    def parse(cls, said: bytes, file: Path) -> Self:
        """Return the record that the bytes of a file contain."""
        with refusing(file, "the record of a part", MALFORMED):
            found = json.loads(said)
            return cls(Published.parse(found["part"]), found["failed"])


def place_of(path: Path, storage: Storage | None) -> Place:
    """Return the target of a collection in parts, which is a local folder or a URL."""
    return Prefix(path, storage or Storage()) if isinstance(path, Url) else Folder(path)


class Unfinished:
    """A collection in parts that is not yet published.

    Parameters
    ----------
    place
        Target of the collection.
    opening
        Picklable function that opens a part.
    """

    def __init__(self, place: Place, opening: Open) -> None:
        self.path, self.place, self._opening = place.path, place, opening

    @property
    def published(self) -> bool:
        """Whether the collection is published, so that only cleanup is left."""
        return self._manifest is not None

    @property
    def _manifest(self) -> Manifest | None:
        """Published manifest; None before publication, also if an old manifest will be replaced."""
        said = self.place.read(MANIFEST)
        if said is None or digest_of(said) == self.place.replaces:
            return None
        return Manifest.parse(said, self.path / MANIFEST)

    @property
    def plan(self) -> dict[str, Any] | None:
        """Description of the planned parts; None if no process has begun to make them."""
        said = self.place.read(f"{JOBS}/{PLAN}")
        if said is None:
            manifest = self._manifest
            return None if manifest is None else dict(manifest.made)
        with refusing(self.path / JOBS / PLAN, "the plan of a collection in parts", MALFORMED):
            return {name: value for name, value in json.loads(said).items() if name != REPLACES}

    def begin(self, described: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin a new collection, or continue an unfinished one.

        Raises
        ------
        PathExistsError
            If an unpublished collection has another source or other options, or an existing collection must not be
            replaced.
        """
        with _written(self.path):
            replaces = self.place.begin(overwrite=overwrite)
            content = described if replaces is None else {**described, REPLACES: replaces}
            self.place.write_once(f"{JOBS}/{PLAN}", json.dumps(content, indent=1).encode())
        other = _difference(self.plan or {}, described)
        if other is not None:
            raise PathExistsError(
                f"{self.path}: was started with {other}; repeat the previous command to continue; for another "
                f"collection, remove {self.place.told_as}, or choose another path"
                if other.startswith("a source")
                else f"{self.path}: was started with {other}; pass the same value to continue, or remove "
                f"{self.place.told_as}, or choose another path"
            )

    @property
    def made(self) -> set[int]:
        """Numbers of the finished parts, which are determined only from object names on a server."""
        if not self.place.puts_whole:
            return set(self.records())
        parts = {int(name.partition("-")[0]) for name in self.place.sizes(PARTS) if PART_NAME.fullmatch(name)}
        recorded = {int(name[1]) for name in map(_RECORD.fullmatch, self.place.sizes(JOBS)) if name}
        return recorded & parts

    def records(self) -> dict[int, Record]:
        """Return the records of finished parts by part number; records of missing or truncated parts are removed."""
        # Records are listed first: if parts were, a part that finishes in between would count as missing.
        names = sorted(name for name in self.place.sizes(JOBS) if _RECORD.fullmatch(name))
        told = self.place.read_all([f"{JOBS}/{name}" for name in names])
        sizes_bytes, found = self.place.sizes(PARTS), {}
        for name, said in zip(names, told, strict=True):
            if said is None:  # It was removed meanwhile.
                continue
            record = Record.parse(said, self.path / JOBS / name)
            if sizes_bytes.get(record.part.name) == record.part.size_bytes:
                found[int(name.partition(".")[0])] = record
            else:
                self.place.remove([f"{JOBS}/{name}"])
        return found

    def add(self, number: int, made: Path, record: Record) -> Record:
        """Add a complete part and its record; return the first record that was written for this part number.

        If another part with this number was recorded first, the new part is removed.
        """
        part, name = f"{PARTS}/{record.part.name}", f"{JOBS}/{number:05d}.json"
        self.place.take(made, record.part.name, self._opening)
        try:
            if self.place.write_once(name, json.dumps(asdict(record)).encode()):
                return record
            said = self.place.read(name)
        except FileNotFoundError:
            said = None
        if said is not None:
            first = Record.parse(said, self.path / name)
        else:  # It was published meanwhile.
            self.place.forget(record.part.name)
            first = Record(Manifest.parse(self.place.read(MANIFEST) or b"", self.path / MANIFEST).parts[number])
        if first.part.name != record.part.name:
            self.place.remove([part])
        return first

    def publish(self) -> Manifest:
        """Publish the collection if all of its parts exist.

        Raises
        ------
        FormatError
            If parts are missing, or no image could be read.
        PathExistsError
            If another process has published it.
        """
        plan = self.plan
        if plan is None or not self.place.begun:
            if self.place.stands:
                raise PathExistsError(f"{self.path}: is already published; open it")
            raise FormatError(f"{self.path}: is not an unfinished collection in parts; correct the path")
        with self.place.alone(), _written(self.path):
            manifest = self._manifest or self._completed(plan)
            part_names = {part.name for part in manifest.parts}
            orphans = [name for name in self.place.sizes(PARTS) if PART_NAME.fullmatch(name) and name not in part_names]
            self.place.remove([f"{PARTS}/{name}" for name in orphans])
            self.place.finish(manifest.index_file)
        if manifest.failed:
            number = len(manifest.failed)
            problem = f"{count(number, 'image')} {'is' if number == 1 else 'are'} unreadable and skipped"
            warnings.warn(
                f"{self.path}: {problem}; see the list in {self.path / FAILED}",
                UserWarning,
                stacklevel=2,
            )
        return manifest

    def _completed(self, plan: Mapping[str, Any]) -> Manifest:
        """Write index and manifest."""
        records = self.records()
        self._refuse_missing(records, plan["parts"])
        written = [records[number] for number in range(plan["parts"])]
        failed = [item for record in written for item in record.failed]
        if failed and not any(record.part.images for record in written):
            raise FormatError(f"{self.path}: no image is readable, e.g. {failed[0]['error']}; correct the source")
        parts = [record.part for record in written]
        known = self.place.known(parts, self._opening)
        ids = list(chain.from_iterable(item.image_ids for item in known))
        index = index_of(known, ids, pa.concat_tables([item.columns for item in known]))
        digest, index_file = self.place.put_index(index)
        if failed:
            with self.place.replacing(FAILED) as file, file.open("w", newline="", encoding="utf-8") as text:
                rows = csv.DictWriter(text, ["id", "error"])
                rows.writeheader()
                rows.writerows(failed)
        form = plan["layout"]["format"]
        outline = self.place.outline(get_format(form), parts, index, self._opening) if parts else {}
        manifest = Manifest(form, parts, digest, plan, failed, outline=outline, index_file=index_file)
        if not self.place.commit(manifest.as_json().encode()):
            raise PathExistsError(f"{self.path}: was published by another process; open it")
        return manifest

    def _refuse_missing(self, records: Mapping[int, Record], total: int) -> None:
        missing = [number for number in range(total) if number not in records]
        if not missing:
            return
        if self.published:
            raise PathExistsError(f"{self.path}: was published by another process; open it")
        listed = ", ".join(f"{number + 1}" for number in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED:,} more" if len(missing) > _LISTED else ""
        raise FormatError(
            f"{self.path}: {len(records):,} of {count(total, 'part')} {'is' if total == 1 else 'are'} written, but "
            f"the collection is still without part {listed}{more}; run the command without --task to write the missing "
            f"parts, or repeat the commands with --task that did not finish"
        )


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Raise `WriteError` for errors of the system, such as a full disk or a missing permission."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OMEArrowDSError):
            raise
        why = ": ".join(str(text) for text in (error.strerror or error, error.filename) if text)
        raise WriteError(
            f"{path}: could not be written: {why}; correct this, and repeat the command to continue"
        ) from error


def refuse_unfinished(parts_target: Place, opening: Open) -> NoReturn:
    """Raise `FormatError` for an unpublished collection; the message states how many parts are finished."""
    unfinished = Unfinished(parts_target, opening)
    plan = unfinished.plan or {"parts": 0}
    are = "is" if plan["parts"] == 1 else "are"
    raise FormatError(
        f"{parts_target.path}: {len(unfinished.made):,} of {count(plan['parts'], 'part')} {are} written; repeat the "
        f"command to continue, and run omearrow-ds publish after all parts are written"
    )


def _difference(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the difference between two plans as text; None if they are equal."""
    before, after = begun.get("layout", {}), now["layout"]
    for name in dict.fromkeys([*after, *before]):
        if before.get(name) != after.get(name):
            return f"{name}={before.get(name)!r}, not {after.get(name)!r}"
    before, after = begun.get("source", {}), now["source"]
    changed = [aspect for name, aspect in _ASPECTS.items() if before.get(name) != after.get(name)]
    return f"a source with other {' and other '.join(changed)}" if changed else None
