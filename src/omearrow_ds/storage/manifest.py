"""Our own layout of a collection in parts: ``parts/``, ``index.parquet``, and ``parts.json``, which is written last.

A folder without ``parts.json`` is no collection: what is there is still being made, or was left. Each part is an
ordinary collection of one of the formats, and never changes: its name has a hash of its bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.formats._columns import plain_columns
from omearrow_ds.storage.formats._detect import entries_below, refuse_special
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.parts import Index, Open, PartsSource
from omearrow_ds.storage.texts import Texts

MANIFEST, INDEX, PARTS = "parts.json", "index.parquet", "parts"
SUFFIX = ".parts"
_VERSION = 1
_BLOCK_BYTES = 2**20
PART_NAME = re.compile(r"[0-9]{5,}-[0-9a-f]{32}\.[A-Za-z0-9_.]+")
INDEX_NAME = re.compile(r"index(-[0-9a-f]{32})?\.parquet")
_SIZES = tuple(f"size_{axis}" for axis in "tczyx")
_STRUCT = pa.struct(
    [
        ("id", pa.string()),
        ("part", pa.int32()),
        ("row", pa.int64()),
        *((name, pa.int32()) for name in _SIZES),
        ("dtype", pa.string()),
        ("checksum", pa.string()),
    ]
)


@dataclass(frozen=True)
class Published:
    """A part, as ``parts.json`` names it.

    Attributes
    ----------
    name
        In the folder of the parts: its number, a hash of its bytes, the suffix of its format.
    images, size_bytes
        How many images it has, and how large its files are.
    """

    name: str
    images: int
    size_bytes: int

    @property
    def hash(self) -> str:
        """The hash of its bytes, which its name has."""
        return self.name.partition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Manifest:
    """What ``parts.json`` says.

    Attributes
    ----------
    format
        Name of the parts' format.
    parts
        All of them, in order.
    index
        Hash of ``index.parquet``, of 128 bits in hexadecimal digits.
    made
        How it was made: layout, seed, source.
    failed
        Images that could not be read and were left out: each ``{"id": ..., "error": ...}``.
    outline
        What a look at a few images told when it was made, as JSON keeps an `Outline`; nothing if nobody looked.
    index_file
        How the index is called: below a URL by its hash, so that another one can be put beside it.
    """

    format: str
    parts: Sequence[Published]
    index: str
    made: Mapping[str, Any] = field(default_factory=dict)
    failed: Sequence[Mapping[str, str]] = ()
    version: int = _VERSION
    outline: Mapping[str, Any] = field(default_factory=dict)
    index_file: str = INDEX

    def as_json(self) -> str:
        """Return the text of ``parts.json``."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what ``parts.json`` in a folder says.

        Raises
        ------
        FormatError
            If it is damaged, of a newer version, or names anything but a part.
        """
        file = folder / MANIFEST
        refuse_special(file)
        with refusing(file, "the manifest of a collection in parts", MALFORMED):
            said = file.read_bytes()
        return cls.parse(said, file)

    @classmethod
    def parse(cls, said: bytes, file: Path) -> Self:
        """As `read`, of the bytes of ``parts.json``."""
        with refusing(file, "the manifest of a collection in parts", MALFORMED):
            found = json.loads(said)
            if found["version"] > _VERSION:
                raise FormatError(f"{file}: is of version {found['version']}; a newer omearrow-ds reads it")
            parts = [
                Published(str(each["name"]), int(each["images"]), int(each["size_bytes"])) for each in found["parts"]
            ]
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            manifest = cls(**{**known, "parts": parts})
        odd = next((each.name for each in parts if PART_NAME.fullmatch(each.name) is None), None)
        odd = odd or (None if INDEX_NAME.fullmatch(manifest.index_file) else manifest.index_file)
        if odd is not None or min((each.images for each in parts), default=0) < 0:
            raise FormatError(
                f"{file}: {odd!r} is no name of a part or an index, or images are fewer than none; restore it"
            )
        return manifest


class PublishedSource(PartsSource):
    """A folder with ``parts.json``: opening it reads two files, however many parts there are.

    Parameters
    ----------
    path
        The folder.
    opening
        Opens a part; it can be pickled.
    """

    def __init__(self, path: Path, opening: Open) -> None:
        self.path = path
        self._refuse_replaced()
        manifest = self._manifest_of()
        index = read_index(self._index_of(manifest), manifest)
        self._refuse_replaced()
        files = [path / PARTS / each.name for each in manifest.parts]
        super().__init__(path, get_format(manifest.format), files, index, opening)
        self.manifest = manifest
        self.image_column = (schema.COLUMN,) if self.format.kind == "table" else ()

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:  # type: ignore[override]  # read when it is asked for
        return read_checksums(self._index_of(self.manifest), self.manifest)

    def _manifest_of(self) -> Manifest:
        return Manifest.read(self.path)

    def _index_of(self, manifest: Manifest) -> Path:
        """Return where ``index.parquet`` is on this machine."""
        return self.path / manifest.index_file

    @cached_property
    def _looked_at(self) -> str:
        return f"{self.path}/{MANIFEST}"

    def _opened_part(self, number: int) -> BaseSource:
        self._refuse_replaced()
        source = super()._opened_part(number)
        if source.image_ids != self.image_ids[self.starts[number] : self.starts[number + 1]]:
            source.close()
            raise FormatError(f"{self.parts[number]}: has other images than {INDEX} says, by their ids; restore it")
        return source

    def stored_files(self) -> Iterator[Path]:
        yield self.path / MANIFEST
        yield self.path / self.manifest.index_file
        yield from super().stored_files()

    def __reduce__(self) -> tuple[Any, ...]:
        return PublishedSource, (self.path, self._open_part)


def digest_of(said: bytes) -> str:
    """Return the hash of bytes, as parts and the index are named by: of 128 bits, in hexadecimal digits."""
    return hashlib.blake2b(said, digest_size=16).hexdigest()


def is_published(path: Path) -> bool:
    """Whether a path is that of a collection in parts that is complete."""
    return (path / MANIFEST).is_file()


def write_index(path: Path, index: Index) -> str:
    """Write ``index.parquet`` to ``path``, and return its hash."""
    pq.write_table(_as_table(index), path, compression="zstd")
    return _hash_of([path], path.parent)


def index_hash(index: Index) -> str:
    """Return the hash of all that an index says, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    with pa.PythonFile(_Hashed(digest), mode="w") as sink:
        pq.write_table(_as_table(index), sink, compression="none", use_dictionary=False)
    return digest.hexdigest()


class _Hashed(io.RawIOBase):
    """A file whose bytes are hashed and not kept."""

    def __init__(self, digest: hashlib.blake2b) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return memoryview(data).nbytes


def _as_table(index: Index) -> pa.Table:
    numbers, rows = _places(index.starts)
    names = pa.array([dtype.name for dtype in index.dtypes], pa.string())
    none = pa.nulls(len(numbers), pa.string())
    checksums = none if index.checksums is None else index.checksums.combine_chunks()
    sizes = [pa.array(size, pa.int32()) for size in index.shapes.T]
    ids = pa.array(index.image_ids, pa.string())
    each = [ids, pa.array(numbers, pa.int32()), pa.array(rows, pa.int64()), *sizes, names, checksums]
    images = pa.StructArray.from_arrays(each, fields=list(_STRUCT))
    columns = index.columns.combine_chunks()
    return pa.table({schema.SIDECAR_COLUMN: images, **{name: columns[name] for name in columns.column_names}})


def read_index(file: Path, manifest: Manifest) -> Index:
    """Return what an ``index.parquet`` says.

    Raises
    ------
    FormatError
        If it is not the one that ``parts.json`` was written with, or contradicts it.
    MissingPathError
        If it is not there.
    """
    with _opened_index(file, manifest) as opened:
        arrow = opened.schema_arrow
        if arrow.field(schema.SIDECAR_COLUMN).type != _STRUCT:
            raise FormatError(f"{file}: its column {schema.SIDECAR_COLUMN!r} is of another type than ours; restore it")
        starts = list(accumulate((each.images for each in manifest.parts), initial=0))
        for name, wanted in zip(("part", "row"), _places(starts), strict=True):
            if not np.array_equal(_numbers(opened, name), wanted):
                raise FormatError(f"{file}: its images are not those of the parts in {MANIFEST}; restore it")
        shapes, dtypes = _shapes_of(opened), _dtypes_of(opened)
        ids = _said(opened, "id")
        columns = plain_columns(opened.read([name for name in arrow.names if name != schema.SIDECAR_COLUMN]), str(file))
        if ids.null_count:
            raise FormatError(f"{file}: an image has no id; restore it")
    return Index(starts, Texts(ids), shapes, dtypes, columns, None)


def read_checksums(file: Path, manifest: Manifest) -> pa.ChunkedArray | None:
    """Return the checksums that an ``index.parquet`` has, which are half of it; None if it has none."""
    with _opened_index(file, manifest) as opened:
        sums = _said(opened, "checksum")
    return None if sums.null_count == len(sums) else pa.chunked_array([sums])


@contextmanager
def _opened_index(file: Path, manifest: Manifest) -> Iterator[pq.ParquetFile]:
    """Give an ``index.parquet``, if it is the one that ``parts.json`` was written with."""
    if not file.exists():
        raise MissingPathError(f"{file}: is missing, and {MANIFEST} beside it names it; restore it")
    refuse_special(file)
    with refusing(file, "the index of a collection in parts", (pa.ArrowException, *MALFORMED)):
        if _hash_of([file], file.parent) != manifest.index:
            raise FormatError(f"{file}: is not the one that {MANIFEST} beside it was written with; restore it")
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            yield opened
    pa.default_memory_pool().release_unused()  # a hundred bytes an image


def _said(index: pq.ParquetFile, name: str) -> pa.Array:
    """Return what an index says of the images, a field at a time: there may be millions."""
    table = index.read([f"{schema.SIDECAR_COLUMN}.{name}"])
    return table[schema.SIDECAR_COLUMN].combine_chunks().field(name)


def _numbers(index: pq.ParquetFile, name: str) -> Array:
    """Return a field of whole numbers; Arrow's ``to_numpy`` would import pandas, which takes 0.3 s and 50 MB."""
    return np.from_dlpack(_said(index, name))


def _shapes_of(index: pq.ParquetFile) -> Array:
    """Return the shapes of the images: where they are alike, a view of one."""
    found = []
    for name in _SIZES:
        sizes = _numbers(index, name)
        alike = len(sizes) > 0 and (sizes == sizes[0]).all()
        found.append(sizes[:1] if alike else sizes)
    count = index.metadata.num_rows
    if all(len(sizes) == 1 for sizes in found):
        return np.broadcast_to(np.array([[int(sizes[0]) for sizes in found]], np.int64), (count, len(found)))
    return np.column_stack([np.broadcast_to(sizes, count) for sizes in found]).astype(np.int64)


def _dtypes_of(index: pq.ParquetFile) -> list[np.dtype[Any]]:
    names = _said(index, "dtype").dictionary_encode()
    known = [np.dtype(name) for name in names.dictionary.to_pylist()]
    return known * len(names) if len(known) == 1 else [known[code] for code in np.from_dlpack(names.indices).tolist()]


def _places(starts: Sequence[int]) -> tuple[Array, Array]:
    """Return the part of each image, and its row there."""
    parts = np.repeat(np.arange(len(starts) - 1), [stop - start for start, stop in pairwise(starts)])
    return parts, np.arange(len(parts)) - np.array(starts, np.int64)[parts]


def hash_of(path: Path) -> str:
    """Return the hash of a part: of its bytes, or of the names and bytes of all files in its folder."""
    if not path.is_dir():
        return _hash_of([path], path.parent)
    return _hash_of(sorted(Path(entry) for entry in entries_below(path)), path, named=True)


def _hash_of(files: Sequence[Path], folder: Path, *, named: bool = False) -> str:
    """Return the BLAKE2b, of 128 bits in hexadecimal digits, of the bytes of files, and of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for each in files:
        if named:
            said = f"{each.relative_to(folder).as_posix()} {each.stat().st_size}\n"
            digest.update(said.encode(errors="surrogateescape"))
        with each.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
