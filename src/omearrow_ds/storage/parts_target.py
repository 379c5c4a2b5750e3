"""Collection in parts under construction: its plan, the records of finished parts, and its publication.

The folder ``jobs`` exists from start to end. It contains ``plan.json``, which the first process writes and all others
must match, and the image index and the record of each finished part, written in this order. A local collection that
replaces another one is made in a hidden folder next to it, and swapped with it at the end. Below a URL, new parts are
put next to the old ones, and only the manifest is replaced.
"""

from __future__ import annotations

import csv
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.array_utils import byte_bounds

from omearrow_ds.errors import FormatError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.storage.concat import Index, Open
from omearrow_ds.storage.formats._base import Array, Images, outline_of
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors
from omearrow_ds.storage.formats._stored import LOOKED_AT
from omearrow_ds.storage.hashes import digest_of, hash_of
from omearrow_ds.storage.manifest import (
    INDEX,
    JOBS,
    MANIFEST,
    PART_NAME,
    PARTS,
    PLAN,
    REPLACES,
    ByteRun,
    Manifest,
    PublishedPart,
)
from omearrow_ds.storage.parts_stores import PartsStore, path_size
from omearrow_ds.storage.published_parts import write_index
from omearrow_ds.storage.writing import options_of_layout
from omearrow_ds.text import count

_FAILED = "failed.csv"
_MAX_LISTED = 8
_MOST_RUNS = 64  # Limit per part, because the manifest describes all parts.
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
class PartRecord:
    part: PublishedPart
    failed: Sequence[Mapping[str, str]] = ()  # Id and error of each image that could not be read.
    outline: Mapping[str, Any] = field(default_factory=dict)  # Storage layout and metadata of a few images, as JSON.

    @classmethod
    def parse(cls, data: bytes, file: Path) -> Self:
        with translate_errors(file, "the record of a part", MALFORMED):
            record = json.loads(data)
            return cls(PublishedPart.parse(record["part"]), record["failed"], record["outline"])


@dataclass(frozen=True)
class PartsTarget:
    """Collection in parts that is not yet published; ``open_part`` is a picklable function that opens a part."""

    store: PartsStore
    open_part: Open

    @property
    def path(self) -> Path:
        return self.store.path

    @property
    def is_published(self) -> bool:
        """Whether the new collection is published, so that only cleanup is left."""
        return self._read_state()[1] is not None

    @property
    def plan(self) -> dict[str, Any] | None:
        """Description of the planned parts; None if no process has begun to make them."""
        return self._read_state()[0]

    def _read_state(self) -> tuple[dict[str, Any] | None, Manifest | None, str | None]:
        """Return the plan, the published manifest, and the hash of the manifest that it replaces; None if missing."""
        manifest_data, plan_data = self.store.read_files([MANIFEST, PLAN])
        plan, manifest = None, None
        if plan_data is not None:
            with translate_errors(self.path / PLAN, "the plan of a collection in parts", MALFORMED):
                plan = dict(json.loads(plan_data))
        replaced_hash = None if plan is None else plan.pop(REPLACES, None)
        if manifest_data is not None and digest_of(manifest_data) != replaced_hash:
            manifest = Manifest.parse(manifest_data, self.path / MANIFEST)
            plan = dict(manifest.made) if plan is None else plan
        return plan, manifest, replaced_hash

    def begin(self, plan: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin a new collection, or continue an unfinished one; raise `PathExistsError` if its plan differs."""
        with _write_errors(self.path):
            replaced_hash = self.store.begin(overwrite=overwrite)
            content = plan if replaced_hash is None else {**plan, REPLACES: replaced_hash}
            self.store.create(PLAN, json.dumps(content, indent=1).encode())
        difference = _difference(self.plan or {}, plan)
        if difference is not None:
            problem, remedy = difference
            remedy = f"{remedy} remove {self.store.removal_hint}, or choose another path"
            raise PathExistsError(f"contains unfinished parts made with {problem}", path=self.path, remedy=remedy)

    def finished_parts(self) -> set[int]:
        """Return the numbers of the finished parts, for atomic writes from object names only."""
        if not self.store.has_atomic_writes:
            return set(self.records())
        parts = {int(name.partition("-")[0]) for name in self.store.sizes(PARTS) if PART_NAME.fullmatch(name)}
        return {int(match[1]) for match in map(_RECORD.fullmatch, self.store.sizes(JOBS)) if match} & parts

    def records(self) -> dict[int, PartRecord]:
        """Return the records of finished parts by part number; records of missing or truncated parts are removed."""
        # Records are listed first: if parts were, a part that finishes in between would count as missing.
        files = self.store.sizes(JOBS)
        names = [f"{JOBS}/{name}" for name in sorted(files) if _RECORD.fullmatch(name)]
        contents = self.store.read_files(names)
        sizes_bytes, records = self.store.sizes(PARTS), {}
        for name, data in zip(names, contents, strict=True):
            if data is None:  # It was removed meanwhile.
                continue
            record = PartRecord.parse(data, self.path / name)
            part = record.part
            if sizes_bytes.get(part.name) == part.size_bytes and f"{part.name}.{INDEX}" in files:
                records[int(Path(name).stem)] = record
            else:
                self.store.remove([name])
        return records

    def add(self, number: int, path: Path, failed: Sequence[Mapping[str, str]]) -> PartRecord:
        """Add a part written to a temporary path, unless one with its number is recorded; return the first record."""
        with closing(self.open_part(path)) as source:
            name = f"{number:05d}-{hash_of(path)}{source.header.format.suffix}"
            runs = find_byte_runs(source) if "ranges" in source.header.format.remote_access else []
            part = PublishedPart(name, len(source), path_size(path), runs)
            record = PartRecord(part, failed, outline_of(source).as_json())
            starts = [*[0] * (number + 1), len(source)]  # All parts before it have no images in this index.
            with self.store.temporary(INDEX) as index_file:
                write_index(index_file, Index.of(source.header, starts))
                self.store.put(_index_name(name), index_file)
        self.store.put(f"{PARTS}/{name}", path)
        record_name = f"{JOBS}/{number:05d}.json"
        data = None
        with suppress(FileNotFoundError):  # The collection may be published meanwhile.
            if self.store.create(record_name, json.dumps(asdict(record)).encode()):
                return record
            data = self.store.read_files([record_name])[0]
        if data is not None:
            first = PartRecord.parse(data, self.path / record_name)
        else:
            self.store.remove([_index_name(name)])
            manifest = self.store.read_files([MANIFEST])[0]
            first = PartRecord(Manifest.parse(manifest or b"", self.path / MANIFEST).parts[number])
        if first.part.name != name:
            self.store.remove([f"{PARTS}/{name}"])
        return first

    def publish(self) -> None:
        """Publish the collection; raise `FormatError` if parts are missing, `PathExistsError` if it is published."""
        if self.plan is None or not self.store.is_begun:
            if self.store.has_collection:
                raise PathExistsError(f"{self.path}: is already published; open it")
            raise FormatError(f"{self.path}: is not an unfinished collection in parts; correct the path")
        with self.store.publisher_lock(), _write_errors(self.path):
            plan, manifest, replaced_hash = self._read_state()
            manifest = manifest or self._write_manifest(plan or {}, replaced_hash)
            part_names = {part.name for part in manifest.parts}
            names = filter(PART_NAME.fullmatch, self.store.sizes(PARTS))
            self.store.remove([f"{PARTS}/{name}" for name in names if name not in part_names])
            self.store.finish(manifest.index_file)
        if manifest.failed:
            number = len(manifest.failed)
            problem = f"{count(number, 'image')} {'is' if number == 1 else 'are'} unreadable and skipped"
            warnings.warn(f"{self.path}: {problem}; see the list in {self.path / _FAILED}", UserWarning, stacklevel=2)

    def _write_manifest(self, plan: Mapping[str, Any], replaced_hash: str | None) -> Manifest:
        records, total = self.records(), plan["parts"]
        missing = [number for number in range(total) if number not in records]
        if missing:
            self._refuse_published()
            listed = ", ".join(f"{number + 1}" for number in missing[:_MAX_LISTED])
            more = f" and {len(missing) - _MAX_LISTED:,} more" if len(missing) > _MAX_LISTED else ""
            problem = f"{count_written(len(records), total)} (missing part numbers: {listed}{more})"
            remedy = "run the command without --task to write missing parts, or repeat unfinished commands with --task"
            refuse(self.path, problem, remedy)
        written = [records[number] for number in range(total)]
        failed = [item for record in written for item in record.failed]
        if failed and not any(record.part.images for record in written):
            raise FormatError(f"{self.path}: no image is readable, e.g. {failed[0]['error']}; correct the source")
        parts = [record.part for record in written]
        with self.store.temporary(INDEX) as file:
            digest = write_index(file, self._read_index(parts))
            index_file = self.store.index_name.format(digest=digest)
            self.store.put(index_file, file)
        if failed:
            with self.store.temporary(_FAILED) as file:
                with file.open("w", newline="", encoding="utf-8") as text:
                    rows = csv.DictWriter(text, ["id", "error"])
                    rows.writeheader()
                    rows.writerows(failed)
                self.store.put(_FAILED, file)
        outline = _joined_outline([record.outline for record in written])
        form = plan["layout"]["format"]
        manifest = Manifest(form, parts, digest, plan, failed, outline=outline, index_file=index_file)
        if not self.store.create(MANIFEST, manifest.as_json().encode(), replaced_hash):
            raise PathExistsError(f"{self.path}: was published by another process; open it")
        return manifest

    def _read_index(self, parts: Sequence[PublishedPart]) -> pa.Table:
        names = [_index_name(part.name) for part in parts]
        tables = []
        for name, data in zip(names, self.store.read_files(names), strict=True):
            if data is None:
                self._refuse_published()
            with translate_errors(self.path / name, "the image index of a part", (pa.ArrowException, *MALFORMED)):
                tables.append(pq.ParquetFile(pa.BufferReader(data or b"")).read())
        return pa.concat_tables(tables).combine_chunks()

    def _refuse_published(self) -> None:
        """Raise `PathExistsError` if another process published the collection, and removed its records."""
        if self.is_published:
            raise PathExistsError(f"{self.path}: was published by another process; open it")

    def refuse_unfinished(self) -> NoReturn:
        """Raise the error for reading an unpublished collection, which states how many parts are finished."""
        number, total = len(self.finished_parts()), (self.plan or {"parts": 0})["parts"]
        remedy = "run the same conversion again to continue, or its unfinished commands with --task"
        if 0 < total <= number:
            remedy = f"run omearrow-ds publish {self.path}"
        refuse(self.path, count_written(number, total), remedy)


def find_byte_runs(source: Images) -> list[ByteRun]:
    """Return the offsets of images that a local file stores as in memory, with checksums; else an empty list."""
    checksums = source.header.columns.checksums
    stacks = None if checksums is None or checksums.null_count else source.mapped_stacks()
    if stacks is None or stacks.file is None:
        return []
    stacks.prepare(np.arange(len(stacks)))
    file = np.frombuffer(stacks.file, np.uint8)
    runs: list[ByteRun] = []
    for images in filter(len, stacks.arrays):
        low, high = byte_bounds(images)
        inside = file.ctypes.data <= low < high <= file.ctypes.data + file.size
        if not (inside and images.dtype.newbyteorder("<").isnative):
            return []
        run = ByteRun(low - file.ctypes.data, len(images), images.strides[0], 1, 0, *_pieces(images[0]))
        last = runs[-1] if runs else run._replace(images=0)
        apart = last.apart if last.times > 1 else run.start - last.start
        again = last._replace(times=last.times + 1, apart=apart)
        if run == last._replace(start=last.start + last.times * apart, times=1, apart=0):
            runs[-1] = again
        else:
            runs.append(run)
    return runs if len(runs) <= _MOST_RUNS else []


def _pieces(image: Array) -> tuple[int, int]:
    """Return the number of contiguous pieces of an image in C order, and the gap between two."""
    num_axes = next(num_axes for num_axes in range(image.ndim + 1) if image[(0,) * num_axes].flags.c_contiguous)
    gap = image.strides[num_axes - 1] - image[(0,) * num_axes].nbytes if num_axes else 0
    return math.prod(image.shape[:num_axes]), gap


def count_written(number: int, total: int) -> str:
    return f"{number:,} of {count(total, 'part')} {'is' if total == 1 else 'are'} written"


def _index_name(part_name: str) -> str:
    return f"{JOBS}/{part_name}.{INDEX}"


def _joined_outline(outlines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the storage layout of the first part, and the distinct metadata of a few images of all parts."""
    stored = outlines[0]["stored"]
    chunking = f"{len(outlines):,} parts, the first: {stored['chunking']}"
    metadata: list[Mapping[str, Any]] = []
    for outline in outlines:
        metadata += [values for values in outline["metadata"] if values not in metadata]
    return {"stored": {**stored, "chunking": chunking}, "metadata": metadata[:LOOKED_AT]}


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise `WriteError` for errors of the system, such as a full disk or a missing permission."""
    try:
        yield
    except OMEArrowDSError:
        raise
    except OSError as error:
        why = ": ".join(str(text) for text in (error.strerror or error, error.filename) if text)
        remedy = "correct the cause, and repeat the command to continue"
        raise WriteError(f"could not be written: {why}", path=path, remedy=remedy) from error


def _difference(begun: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the difference between two plans and how to continue, as texts; None if they are equal."""
    layouts = begun.get("layout", {}), plan["layout"]
    before, after = map(options_of_layout, layouts)
    for name in dict.fromkeys([*after, *before]):
        if before.get(name) != after.get(name):
            return f"{name}={before.get(name)!r}, not {after.get(name)!r}", "pass the same value to continue, or"
    before, after = begun.get("source", {}), plan["source"]
    changed = [aspect for name, aspect in _ASPECTS.items() if before.get(name) != after.get(name)]
    if changed:
        remedy = "repeat the previous command to continue; for another collection,"
        return f"a source with other {' and other '.join(changed)}", remedy
    if any(layouts[0].get(name) != layouts[1].get(name) for name in ("max_rows", "max_bytes")):
        return "defaults of another version of omearrow-ds", "use that version to continue, or"
    return None
