"""Several collections that are read as one, opened lazily, a few at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._base import (
    Array,
    Block,
    Images,
    PartLayout,
    files_below,
    group_by_part,
    is_uniform,
)
from omearrow_ds.storage.formats._file_guard import FileGuard, Fingerprint
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.hashes import digest_of, new_hash
from omearrow_ds.storage.part_stacks import PartStacks

OPEN_PARTS = 28  # Parts open at once: each has a descriptor or two, and a process may have 1,024.
_VIEWED_PARTS = 8  # With more parts, images are copied: each view keeps a file mapped, and a descriptor, after closing.
_VIEWED_BYTES = 2**20  # Smaller parts are copied too: a writer holds some 16 MiB of images, from very many of them.
Open = Callable[[Path], Images]
Keep = Callable[[Array], Array]


@dataclass(frozen=True)
class Index:
    """Image index of several collections, built without opening them.

    Attributes
    ----------
    starts
        Index of the first image of each part, followed by the number of images.
    image_ids, shapes, dtypes, columns, checksums, rows
        See `omearrow_ds.storage.formats._base.Images`. ``rows`` may be None for all images in order, ``columns``
        and ``checksums`` None if read lazily.
    """

    starts: Sequence[int]
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table | None
    checksums: pa.ChunkedArray | None
    rows: Array | None = None


class PartsSource(Images):
    """Several collections of one format that are read as one collection.

    Parameters
    ----------
    path
        Folder that contains the collections.
    fmt
        Format of the collections.
    parts
        Paths of the collections, in order.
    index
        Image index of the collections.
    opening
        Picklable function that opens a collection.
    fingerprints
        State of each when ``index`` was built; None if changes are detected otherwise.
    """

    _open_parts = OPEN_PARTS

    def __init__(
        self,
        path: Path,
        fmt: Format,
        parts: Sequence[Path],
        index: Index,
        opening: Open,
        fingerprints: Sequence[Fingerprint | None] | None = None,
    ) -> None:
        self.path, self._format, self.parts, self._open_part = path, fmt, parts, opening
        self._index, self._fingerprints = index, fingerprints
        self.starts = index.starts
        self.image_ids, self.shapes, self.dtypes = index.image_ids, index.shapes, index.dtypes
        if index.columns is not None:
            self.columns = index.columns
        if index.checksums is not None:
            self.checksums = index.checksums
        if index.rows is not None:
            self.rows = index.rows
        self._opened: dict[int, Images] = {}  # In LRU order, the most recently used last.
        if fingerprints is not None:
            self.guard = FileGuard(path)
            self.guard.fingerprint = (_digest([*zip(map(str, parts), fingerprints, strict=True)]),)
            self.variant = (f"{_digest(list(map(str, parts))):x}",)

    @property
    def format(self) -> Format:
        return self._format

    @cached_property
    def part_layout(self) -> PartLayout:
        description = repr([[part.name for part in self.parts], list(map(int, self.starts))])
        return PartLayout(self.starts, digest_of(description.encode(errors="surrogateescape")))

    @property
    def most_open(self) -> int:
        """Maximum number of parts open at once."""
        return self._open_parts

    @property
    def opened(self) -> Iterable[int]:
        """Numbers of the parts that are open."""
        return list(self._opened)

    def part(self, number: int) -> Images:
        """Return a part, which is opened if it is closed; if too many are open, the least recently used one is closed.

        Raises
        ------
        FormatError
            If the part has changed since the index was built.
        """
        source = self._opened.pop(number, None) or self._opened_part(number)
        self._opened[number] = source
        while len(self._opened) > self._open_parts:
            self._close_oldest()
        return source

    def _close_oldest(self) -> None:
        number = next(iter(list(self._opened)), -1)  # A copy, because another thread may add one.
        oldest = self._opened.pop(number, None)
        if oldest is not None:
            oldest.close()
            self._closed(number)

    def _closed(self, number: int) -> None:
        """Do nothing; subclasses release resources of a part that was closed."""

    def _opened_part(self, number: int) -> Images:
        path = self.parts[number]
        source = self._open_number(number)
        images = slice(self.starts[number], self.starts[number + 1])
        known = None if self._fingerprints is None else self._fingerprints[number]
        if (
            source.format != self._format
            or (known is not None and source.guard.fingerprint != known)
            or not np.array_equal(source.shapes, self.shapes[images])
            or list(source.dtypes) != list(self.dtypes[images])
        ):
            source.close()
            raise FormatError(
                f"{path}: was replaced or changed since {self.path} was written; open it again, or restore it"
            )
        return source

    def _open_number(self, number: int) -> Images:
        return self._open_part(self._file_of(number))

    def _file_of(self, number: int) -> Path:
        """Return the local path of a part."""
        return self.parts[number]

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[Images, list[int], Keep]]:
        """Yield the parts of sorted indices, with the indices in each, and a function that keeps views or copies."""
        groups = group_by_part(self.starts, indices)
        keep = np.asarray if len(groups) <= _VIEWED_PARTS else np.array
        for number, indices_of_part in groups:
            first = self.starts[number]
            yield self.part(number), [index - first for index in indices_of_part], keep

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
        order = sorted(range(len(rows)), key=rows.__getitem__)
        arrays: dict[int, Array] = {}
        for part, part_rows, keep in self._by_part([rows[position] for position in order]):
            positions = order[len(arrays) : len(arrays) + len(part_rows)]
            of_regions = None if regions is None else [regions[position] for position in positions]
            of_out = None if out is None else [out[position] for position in positions]
            images = part.read_arrays(part_rows, of_regions, of_out)
            arrays |= zip(positions, map(keep, images) if out is None else images, strict=True)
        return [arrays[position] for position in range(len(rows))]

    @property
    def fills_out(self) -> bool:
        return self.format.in_folder and len(self) > 0 and self.part(0).fills_out

    def mapped_stacks(self) -> Stacks | None:
        number = next((number for number, (start, stop) in enumerate(pairwise(self.starts)) if stop > start), None)
        if number is None or not is_uniform(self) or self.part(number).mapped_stacks() is None:
            return None
        return PartStacks(self)

    def stream(self) -> Iterator[Block]:
        if self.part_fetches is not None:
            self.part_fetches.expect(range(len(self.parts)))
        for number, (first, stop) in enumerate(pairwise(self.starts)):
            if stop == first:
                continue
            size_bytes = image_bytes(self.shapes[first:stop], self.dtypes[first:stop]).sum()
            # Views of many small files, which a writer collects, would exceed the limit of open files.
            is_copied = len(self.parts) > _VIEWED_PARTS and size_bytes < _VIEWED_BYTES
            for start, images in self.part(number).stream():
                yield first + start, list(map(np.array, images)) if is_copied else images

    def _place(self, index: int) -> tuple[Images, int]:
        ((part, (row,), _),) = self._by_part([index])
        return part, row

    def metadata(self, index: int) -> dict[str, Any]:
        part, here = self._place(index)
        return part.metadata(here)

    def mask_name_stems(self, index: int) -> list[str]:
        part, row = self._place(index)
        return list(dict.fromkeys([self.image_ids[index], *part.mask_name_stems(row)]))

    def storage_info(self) -> Stored:
        stored = self.part(0).storage_info()
        return replace(stored, chunking=f"{len(self.parts):,} parts, the first: {stored.chunking}")

    def stored_files(self) -> Iterator[Path]:
        for part in self.parts:
            yield from files_below([part, *filter(Path.exists, self._format.files_beside(part))])

    def close(self) -> None:
        while self._opened:
            self._close_oldest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._format, self.parts, self._index, self._open_part, self._fingerprints)

    def __repr__(self) -> str:
        return (
            f"<{self.format.label} source of {len(self)} images in {len(self.parts)} parts at {os.fspath(self.path)!r}>"
        )


def _digest(said: object) -> int:
    return int.from_bytes(new_hash(repr(said).encode(errors="surrogateescape")).digest())
