"""Layout of a collection in parts: ``parts/``, ``index.parquet``, and ``parts.json``, which is written last.

A folder without ``parts.json`` is unpublished or incomplete, not a collection. Each part is an ordinary collection of
one of the formats, and never changes: its name contains a hash of its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors

MANIFEST, INDEX, PARTS = "parts.json", "index.parquet", "parts"
JOBS, PLAN, REPLACES = "jobs", "jobs/plan.json", "replaces"  # Only while the collection is written.
SUFFIX = ".parts"
PLATE = "Metadata_Plate"  # Column whose values are never mixed in one part.
_VERSION = 2  # Names parts by SHA-256; version 1 names them by a shorter hash.
PART_NAME = re.compile(r"[0-9]{5,}-(?:[0-9a-f]{32}|[0-9a-f]{64})\.[A-Za-z0-9_.]+")
INDEX_NAME = re.compile(r"index(-[0-9a-f]{32})?\.parquet")


class ByteRun(NamedTuple):
    """Images at regular byte offsets in a file; each may consist of pieces with gaps, as in Parquet pages."""

    start: int  # Offset of the first image.
    images: int
    step: int  # Stride of the images.
    times: int = 1  # Number of repetitions of these images.
    apart: int = 0  # Stride of the repetitions.
    pieces: int = 1  # Number of equal pieces per image.
    gap: int = 0  # Bytes between two pieces.


@dataclass(frozen=True)
class PublishedPart:
    """Entry for one part in ``parts.json``."""

    name: str  # File name of the part: its number, a hash of its bytes, and the suffix of its format.
    images: int  # Number of images.
    size_bytes: int  # Size of the files of the part.
    places: Sequence[ByteRun] = ()  # Byte offsets of the images, if the part stores them as in memory.

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Self:
        runs = tuple(ByteRun(*map(int, run)) for run in entry.get("places", ()))
        return cls(str(entry["name"]), int(entry["images"]), int(entry["size_bytes"]), runs)

    @property
    def hash(self) -> str:
        """Hash of the contents of the part, in hexadecimal digits."""
        return self.name.partition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Manifest:
    """Contents of ``parts.json``."""

    format: str  # Name of the parts' format.
    parts: Sequence[PublishedPart]
    index: str  # Hash of ``index.parquet``, of 128 bits in hexadecimal digits.
    made: Mapping[str, Any] = field(default_factory=dict)  # Layout, seed and source of the collection.
    failed: Sequence[Mapping[str, str]] = ()  # Id and error of each image that could not be read and was left out.
    outline: Mapping[str, Any] = field(default_factory=dict)  # `Outline` as JSON, of a few images; may be empty.
    index_file: str = INDEX  # Below a URL, the name contains the hash, so that old and new index can coexist.

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"version": _VERSION}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the contents of ``parts.json`` in a folder; raise `FormatError` if they are invalid or too new."""
        file = folder / MANIFEST
        refuse_special(file)
        with translate_errors(file, "the manifest of a collection in parts", MALFORMED):
            return cls.parse(file.read_bytes(), file)

    @classmethod
    def parse(cls, data: bytes, file: Path) -> Self:
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
            problem = f"{invalid[0]!r} is an invalid part or index name, or has a negative number of images"
            refuse(file, problem, "restore it")
        return manifest


def is_published(path: Path) -> bool:
    return (path / MANIFEST).is_file()
