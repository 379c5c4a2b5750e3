"""Layout of a collection in parts: ``parts/``, ``index.parquet``, and ``parts.json``, which is written last.

A folder without ``parts.json`` is unpublished or incomplete, not a collection. Each part is an ordinary collection of
one of the formats, and never changes: its name contains a hash of its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.hashes import is_short
from omearrow_ds.storage.index import StoredIndex
from omearrow_ds.storage.parts_source import Open, PartsSource
from omearrow_ds.storage.ranged_part_source import Run

MANIFEST, INDEX, PARTS = "parts.json", "index.parquet", "parts"
JOBS, PLAN, REPLACES = "jobs", "jobs/plan.json", "replaces"  # Only while the collection is written.
SUFFIX = ".parts"
_VERSION = 2  # Names parts by SHA-256; version 1 names them by a shorter hash.
PART_NAME = re.compile(r"[0-9]{5,}-(?:[0-9a-f]{32}|[0-9a-f]{64})\.[A-Za-z0-9_.]+")
INDEX_NAME = re.compile(r"index(-[0-9a-f]{32})?\.parquet")


@dataclass(frozen=True)
class PublishedPart:
    """Entry for one part in ``parts.json``.

    Attributes
    ----------
    name
        File name of the part: its number, a hash of its bytes, and the suffix of its format.
    images, size_bytes
        Number of images in the part, and size of the files of the part.
    places
        Byte offsets of the images, if the part stores them as in memory.
    """

    name: str
    images: int
    size_bytes: int
    places: Sequence[Run] = ()

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Self:
        """Return the part entry that a JSON object describes."""
        runs = tuple(Run(*map(int, run)) for run in entry.get("places", ()))
        return cls(str(entry["name"]), int(entry["images"]), int(entry["size_bytes"]), runs)

    @property
    def hash(self) -> str:
        """Hash of the contents of the part, taken from the name of the part."""
        return hash_in(self.name)


def hash_in(name: str) -> str:
    """Return the hexadecimal digits of the hash in a part name that matches `PART_NAME`."""
    return name.partition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Manifest:
    """Contents of ``parts.json``.

    Attributes
    ----------
    format
        Name of the parts' format.
    parts
        Entries of all parts, in order.
    index
        Hash of ``index.parquet``, of 128 bits in hexadecimal digits.
    made
        Layout, seed and source of the collection.
    failed
        Images that could not be read and were left out: each ``{"id": ..., "error": ...}``.
    outline
        `Outline` as JSON, made of a few images at publication; may be empty.
    index_file
        Name of the index: below a URL it contains its hash, so that old and new index can coexist.
    """

    format: str
    parts: Sequence[PublishedPart]
    index: str
    made: Mapping[str, Any] = field(default_factory=dict)
    failed: Sequence[Mapping[str, str]] = ()
    outline: Mapping[str, Any] = field(default_factory=dict)
    index_file: str = INDEX

    def as_json(self) -> str:
        """Return the JSON text of the manifest, in version 1 if possible, because older readers refuse version 2."""
        version = 1 if all(is_short(part.hash) for part in self.parts) else _VERSION
        return json.dumps(asdict(self) | {"version": version}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the contents of ``parts.json`` in a folder; raise `FormatError` if they are invalid or too new."""
        file = folder / MANIFEST
        refuse_special(file)
        with translate_errors(file, "the manifest of a collection in parts", MALFORMED):
            data = file.read_bytes()
        return cls.parse(data, file)

    @classmethod
    def parse(cls, data: bytes, file: Path) -> Self:
        """Return the contents of ``parts.json`` from its bytes; see `read`."""
        with translate_errors(file, "the manifest of a collection in parts", MALFORMED):
            record = json.loads(data)
            if record["version"] > _VERSION:
                raise FormatError(f"{file}: has version {record['version']}, which is too new; update omearrow-ds")
            parts = list(map(PublishedPart.parse, record["parts"]))
            known = {part.name: record[part.name] for part in fields(cls) if part.name in record}
            manifest = cls(**{**known, "parts": parts})
        invalid = [part.name for part in parts if PART_NAME.fullmatch(part.name) is None or part.images < 0]
        invalid += [] if INDEX_NAME.fullmatch(manifest.index_file) else [manifest.index_file]
        if invalid:
            raise FormatError(
                f"{file}: {invalid[0]!r} is an invalid part or index name, or has a negative number of images; "
                f"restore it"
            )
        return manifest


class PublishedSource(PartsSource):
    """A published collection in parts; opening it reads ``parts.json`` and the index, for any number of parts."""

    def __init__(self, path: Path, opening: Open) -> None:
        self.path, self.guard = path, FileGuard(path, tracked=path / MANIFEST)
        self.guard.refuse_changed()
        manifest = self._manifest_of()
        images = [part.images for part in manifest.parts]
        self._stored_index = StoredIndex(self._index_of(manifest), manifest.index, images)
        index = self._stored_index.read()
        self.guard.refuse_changed()
        files = [path / PARTS / part.name for part in manifest.parts]
        super().__init__(path, get_format(manifest.format), files, index, opening)
        self.manifest = manifest
        self.image_column = (schema.COLUMN,) if self.format.kind == "table" else ()

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:  # type: ignore[override]  # Read lazily.
        self.guard.refuse_changed()
        return self._stored_index.checksums()

    @cached_property
    def column_schema(self) -> pa.Schema:
        self.guard.refuse_changed()
        return self._stored_index.column_schema

    def _read_columns(self, names: list[str]) -> pa.Table:
        self.guard.refuse_changed()
        return self._stored_index.columns(names)

    def _manifest_of(self) -> Manifest:
        return Manifest.read(self.path)

    def _index_of(self, manifest: Manifest) -> Path:
        """Return the local path of ``index.parquet``."""
        return self.path / manifest.index_file

    def _opened_part(self, number: int) -> Images:
        self.guard.refuse_changed()
        source = super()._opened_part(number)
        if source.image_ids != self.image_ids[self.starts[number] : self.starts[number + 1]]:
            source.close()
            raise FormatError(f"{self.parts[number]}: image ids differ from those in {INDEX}; restore the part")
        return source

    def stored_files(self) -> Iterator[Path]:
        yield self.path / MANIFEST
        yield self.path / self.manifest.index_file
        yield from super().stored_files()

    def __reduce__(self) -> tuple[Any, ...]:
        return PublishedSource, (self.path, self._open_part)


def is_published(path: Path) -> bool:
    """Whether a path is a folder that contains ``parts.json``, so that the collection in parts is complete."""
    return (path / MANIFEST).is_file()
