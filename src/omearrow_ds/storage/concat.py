"""Several collections that are read as one, opened lazily, a few at a time, and stacks of their images."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.kernels.stacks import ImageAddresses, PageRequests, Rows, Stacks, same_strides
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.byte_source import STATUS_NS
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats import Format, accompanying_files
from omearrow_ds.storage.formats._base import (
    Array,
    Block,
    Details,
    Header,
    Images,
    PartFetches,
    PartLayout,
    files_below,
    forwarded,
    group_by_part,
    is_uniform,
    name_stems,
)
from omearrow_ds.storage.formats._columns import ImageColumns
from omearrow_ds.storage.formats._detect import Paths
from omearrow_ds.storage.formats._file_guard import FileGuard, Fingerprint
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._stored import Outline, Stored
from omearrow_ds.storage.hashes import new_hash

OPEN_PARTS = 28  # Parts open at once: each has a descriptor or two, and a process may have 1,024.
_VIEWED_PARTS = 8  # With more parts, images are copied: each view keeps a file mapped, and a descriptor, after closing.
_VIEWED_BYTES = 2**20  # Streams copy only smaller parts: the 16 MiB of a writer can be views of very many of them.
Open = Callable[[Path], Images]
Cut = Callable[[Array], Array]
States = Sequence[Fingerprint | None] | None
_Part = tuple[Images, Stacks | None]


@dataclass(frozen=True)
class Index:
    """Image index of several collections, built without opening them; see `Header`.

    Without ``rows``, all images are included, in order. If ``columns`` is a schema, columns are read on request.
    """

    starts: Sequence[int]  # Index of the first image of each part, followed by the number of images.
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table | pa.Schema
    checksums: pa.ChunkedArray | None
    rows: Array | None = None

    @classmethod
    def of(cls, header: Header, starts: Sequence[int]) -> Index:
        """Return the index of the images of one collection, with all of its columns."""
        columns = header.columns
        return cls(starts, header.image_ids, header.shapes, header.dtypes, columns.table, columns.checksums)


class Parts:
    """The parts of a collection, of one format, of which at most ``max_open`` are open.

    ``open_part`` is a picklable function that opens one of the ``paths``. ``fingerprints`` are the states of the parts
    when ``index`` was built; None if changes are detected otherwise.
    """

    max_open = OPEN_PARTS
    reading: Callable[..., AbstractContextManager[None]] = nullcontext  # Context in which parts are read.

    def __init__(
        self,
        path: Path,
        fmt: Format,
        paths: Sequence[Path],
        index: Index,
        open_part: Open,
        fingerprints: States = None,
        guard: FileGuard | None = None,
    ) -> None:
        self.path, self.format, self.paths, self.index, self.open_part = path, fmt, paths, index, open_part
        self.starts, self._fingerprints = index.starts, fingerprints
        self.opened: dict[int, Images] = {}  # Open parts by number, the most recently used last.
        self.guard = guard or FileGuard(path)
        self.variant: tuple[str, ...] = ()  # See `Header`.
        if fingerprints is not None:
            self.guard.fingerprint = (_digest([*zip(map(str, paths), fingerprints, strict=True)]),)
            self.variant = (f"{_digest(list(map(str, paths))):x}",)

    @property
    def layout(self) -> PartLayout:
        """Properties for shuffling the images of the parts."""
        names = [part.name for part in self.paths]
        return PartLayout(self.starts, f"{_digest([names, list(map(int, self.starts))]):032x}")

    @property
    def fetches(self) -> PartFetches | None:
        """Fetches of whole parts from a server; None if parts are local."""
        return None

    @property
    def checksums(self) -> pa.ChunkedArray | None:
        """A checksum or a null per image; None if none is stored."""
        return self.index.checksums

    def read_columns(self, names: list[str]) -> pa.Table:
        """Return some columns; subclasses read them on request if the index has only their schema."""
        return self.index.columns.select(names)

    def get(self, number: int) -> Images:
        """Return a part, opened if it is closed; if too many are open, the least recently used one is closed."""
        images = self.opened.pop(number, None) or self._open_checked(number)
        self.opened[number] = images
        while len(self.opened) > self.max_open:
            self._close_oldest()
        return images

    def _close_oldest(self) -> int:
        """Close the least recently used part, and return its number; -1 if no part is open."""
        number = next(iter(list(self.opened)), -1)  # A copy, because another thread may add one.
        oldest = self.opened.pop(number, None)
        if oldest is not None:
            oldest.close()
        return number

    def _open_checked(self, number: int) -> Images:
        images, index = self._open(number), self.index
        header = images.header
        rows = slice(self.starts[number], self.starts[number + 1])
        known = None if self._fingerprints is None else self._fingerprints[number]
        if (
            header.format != self.format
            or (known is not None and header.guard.fingerprint != known)
            or not np.array_equal(header.shapes, index.shapes[rows])
            or list(header.dtypes) != list(index.dtypes[rows])
        ):
            images.close()
            problem = f"was replaced or changed since {self.path} was written"
            raise FormatError(problem, path=self.paths[number], remedy="open it again, or restore it")
        return images

    def _open(self, number: int) -> Images:
        return self.open_part(self.paths[number])

    def image_columns(self) -> list[ImagesOf]:
        columns: dict[str, ImagesOf] = {}
        for number in range(len(self.paths)):
            for column in self.get(number).details.image_columns():
                columns[column.name] = columns[column.name] + column if column.name in columns else column
        return list(columns.values())

    def files(self) -> Iterator[Path]:
        for part in self.paths:
            yield from files_below([part, *filter(Path.exists, accompanying_files(self.format, part))])

    def stored_size(self) -> tuple[int, int, int] | None:
        """Return the number of files, and their size and allocated size in bytes; None if these are local files."""
        return None

    def outline(self) -> Outline | None:
        """Return the storage layout without opening a part; None if a part must be opened."""
        return None

    def are_in_place(self) -> bool:
        """Return whether images of one shape and dtype are views of memory-mapped files."""
        number = next(number for number, (start, stop) in enumerate(pairwise(self.starts)) if stop > start)
        return self.get(number).mapped_stacks() is not None

    def close(self) -> None:
        """Close all parts; a later read opens them again."""
        while self.opened:
            self._close_oldest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.format, self.paths, self.index, self.open_part, self._fingerprints)


class Concat(Images):
    """Several collections of one format that are read as one collection."""

    close = forwarded("parts.close")

    def __init__(
        self,
        parts: Parts,
        requested_path: Paths | None = None,
        image_column: tuple[str, ...] = (),
        other_image_columns: tuple[str, ...] = (),
    ) -> None:
        self.parts, index = parts, parts.index
        self.header = Header(
            format=parts.format,
            path=parts.path,
            guard=parts.guard,
            image_ids=index.image_ids,
            shapes=index.shapes,
            dtypes=index.dtypes,
            columns=ImageColumns(
                parts.path, index.image_ids, index.columns, parts.read_columns, lambda: parts.checksums
            ),
            image_column=image_column,
            other_image_columns=other_image_columns,
            variant=parts.variant,
            selected_rows=index.rows,
            row_count=len(index.image_ids),
            requested_path=requested_path,
            find_part_layout=lambda: parts.layout,
            part_fetches=parts.fetches,
        )
        self.details = Details(
            storage_info=partial(_storage_of_parts, parts),
            files=parts.files,
            size=parts.stored_size,
            outline=parts.outline,
            image_columns=parts.image_columns,
            file_stems=lambda row: name_stems(*_find_image(parts, row)),
            fills_out=lambda: parts.format.is_folder and len(index.image_ids) > 0 and parts.get(0).details.fills_out(),
        )

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        order = sorted(range(len(rows)), key=rows.__getitem__)
        groups = group_by_part(self.parts.starts, [rows[position] for position in order])
        keep = np.asarray if len(groups) <= _VIEWED_PARTS else np.array
        arrays = dict[int, Array]()
        with self.parts.reading():
            for number, rows_of_part in groups:
                first = self.parts.starts[number]
                positions = order[len(arrays) : len(arrays) + len(rows_of_part)]
                of_regions = None if regions is None else [regions[position] for position in positions]
                of_out = None if out is None else [out[position] for position in positions]
                images = self.parts.get(number).read([row - first for row in rows_of_part], of_regions, of_out)
                arrays |= zip(positions, map(keep, images) if out is None else images, strict=True)
        return [arrays[position] for position in range(len(rows))]

    def mapped_stacks(self) -> Stacks | None:
        is_alike = len(self) > 0 and is_uniform(self.header.shapes, self.header.dtypes)
        return PartStacks(self.parts) if is_alike and self.parts.are_in_place() else None

    def stream(self) -> Iterator[Block]:
        num_parts = len(self.parts.paths)
        header = self.header
        if header.part_fetches is not None:
            header.part_fetches.expect(range(num_parts))
        for number, (first, stop) in enumerate(pairwise(self.parts.starts)):
            if stop == first:
                continue
            size_bytes = image_bytes(header.shapes[first:stop], header.dtypes[first:stop]).sum()
            # Views of many small files, which a writer collects, would exceed the limit of open files.
            is_copied = num_parts > _VIEWED_PARTS and size_bytes < _VIEWED_BYTES
            for start, images in self.parts.get(number).stream():
                yield first + start, list(map(np.array, images)) if is_copied else images

    def metadata(self, index: int) -> dict[str, Any]:
        part, row = _find_image(self.parts, index)
        return part.metadata(row)

    def __reduce__(self) -> tuple[Any, ...]:
        header = self.header
        return Concat, (self.parts, header.requested_path, header.image_column, header.other_image_columns)

    def __repr__(self) -> str:
        contents = f"{len(self)} images in {len(self.parts.paths)} parts"
        return f"<{self.header.format.label} source of {contents} at {os.fspath(self.header.path)!r}>"


def _storage_of_parts(parts: Parts) -> Stored:
    stored = parts.get(0).details.storage_info()
    return replace(stored, chunking=f"{len(parts.paths):,} parts, the first: {stored.chunking}")


def _find_image(parts: Parts, row: int) -> tuple[Images, int]:
    """Return the part of an image, and its row in the part."""
    number = bisect.bisect_right(parts.starts, row) - 1
    return parts.get(number), row - parts.starts[number]


def _digest(value: object) -> int:
    return int.from_bytes(new_hash(repr(value).encode(errors="surrogateescape")).digest())


class PartStacks(Stacks):
    """Images of one shape and dtype from all parts of a source.

    One array holds the address of each image, so that a batch of several parts is gathered in one loop. If the memory
    layout of a part differs from the others, its images are decoded on request. ``cut`` makes a view of images.
    """

    def __init__(self, parts: Parts, cut: Cut = np.asarray) -> None:
        shape = parts.index.shapes[0].tolist()
        super().__init__([cut(np.empty((1, *shape), parts.index.dtypes[0]))])  # Only its shape and strides are used.
        self.single_array, self.requests = None, PageRequests()
        self._all_parts, self._cut = parts, cut
        self._starts, self.num_images = list(parts.starts), parts.starts[-1]
        self._first = np.array(self._starts)
        self.needs_file_groups = len(self._starts) - 1 > parts.max_open
        self._table = np.empty(len(self), np.int64)  # Image addresses in open parts.
        self._checked_until_ns = np.zeros(len(self._starts) - 1, np.int64)  # Parts need no check until this time.
        self._is_checked = np.ones(len(self), bool)
        self._has_prefixes = False  # Whether an opened part has bytes to compare.
        self._parts = dict[int, _Part]()
        self._live_parts: Sequence[_Part] = ()  # A new list at each change, so that it is read without the lock.
        self.alignment, self._alignments = None, set[int | None]()  # Alignments of images in opened parts.
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Array:
        number = bisect.bisect_right(self._starts, index) - 1
        index -= self._starts[number]
        with self._lock:
            source, stacks = self._parts.get(number) or self._part(number)
        if stacks is None:
            image: Array = self._cut(source.read([index])[0][None])[0]
            return image
        stacks.prepare_image(index)
        return stacks[index]

    def cut(self, cut: Cut) -> Stacks:
        stacks = PartStacks(self._all_parts, lambda images: cut(self._cut(images)))
        stacks.requests = self.requests
        return stacks

    def _file_groups(self, indices: Array) -> list[Array]:
        most = self._all_parts.max_open
        parts, part_of = np.unique(self._first.searchsorted(indices, "right") - 1, return_inverse=True)
        num_groups = -(-len(parts) // most)
        return [np.flatnonzero(part_of // most == group) for group in range(num_groups)] if num_groups > 1 else []

    def located(self, indices: Array) -> ImageAddresses:
        """Open the parts of images, and return the memory addresses; files are checked at most once per millisecond."""
        numbers = self._first.searchsorted(indices, "right") - 1
        with self._lock:  # Another thread may close a part, and map it at another address.
            parts = self._open_parts(numbers)
            if self._has_prefixes:  # Compare bytes before the chunks of images at their first use in an open part.
                for number in np.unique(numbers[~self._is_checked[indices]]).tolist():
                    stacks = self._parts[number][1]
                    if stacks is not None and stacks.prefixes is not None:
                        stacks.prefixes.check((indices[numbers == number] - self._starts[number]).tolist())
                self._is_checked[indices] = True
            addresses, alignment = self._table[indices], self.alignment
            owners: list[object] = [parts, self._live_parts]
        for number, (source, stacks) in parts.items():
            if stacks is None:
                in_part = np.flatnonzero(numbers == number)
                arrays = source.read((indices[in_part] - self._starts[number]).tolist())
                images = [self._cut(np.ascontiguousarray(image)[None]) for image in arrays]
                addresses[in_part] = [Stacks([image]).addresses[0] for image in images]
                owners.append(images)
        return ImageAddresses(addresses, owners, alignment)

    def prepare(self, indices: Array, rows: Rows | None = None) -> None:
        if self.requests is not None and monotonic_ns() >= self.requests.query_ns:  # Requests need open parts.
            with self._lock:
                self._open_parts(self._first.searchsorted(indices, "right") - 1)
        super().prepare(indices, rows)

    def prepare_image(self, index: int) -> None:
        if self.requests is not None and monotonic_ns() >= self.requests.query_ns:
            self.prepare(np.array([index]))

    def _is_cold(self) -> bool:
        return any(stacks._is_cold() for _, stacks in self._live_parts if stacks is not None)  # noqa: SLF001  # Same class.

    def page_ranges(self, indices: Array, rows: Rows | None = None) -> Array:
        numbers, ranges = self._first.searchsorted(indices, "right") - 1, [np.empty((0, 2), np.int64)]
        with self._lock:
            for number in self._parts.keys() & set(numbers.tolist()):
                stacks, is_in_part = self._parts[number][1], numbers == number
                if stacks is not None:
                    rows_in_part = None if rows is None else (rows[0][is_in_part], rows[1])
                    ranges.append(stacks.page_ranges(indices[is_in_part] - self._starts[number], rows_in_part))
        return np.concatenate(ranges)

    def _open_parts(self, numbers: Array) -> dict[int, _Part]:
        """Return some parts, opened, and checked if their last check has expired; empty if no check is due."""
        now_ns = monotonic_ns()
        if np.minimum.reduce(self._checked_until_ns[numbers]) > now_ns:
            return {}
        numbers_read = set(numbers.tolist())
        if not numbers_read <= self._parts.keys():
            for number in numbers_read & self._parts.keys():
                self._part(number)  # Marks it as recently used, so that it is not closed.
        parts = {number: self._parts.get(number) or self._part(number) for number in numbers_read}
        for number, (_, stacks) in self._parts.items():  # All are checked together; otherwise every batch checks one.
            if stacks is not None and stacks.guard is not None:
                try:
                    stacks.guard(len(self._parts), now_ns)
                except FormatError:
                    if number in numbers_read:
                        raise
                else:
                    self._checked_until_ns[number] = now_ns + STATUS_NS
        return parts

    def _part(self, number: int) -> _Part:
        """Return a part, opened if it is not; release parts that were closed since the last call."""
        source, part = self._all_parts.get(number), self._parts.get(number)
        if part is not None and part[0] is source:
            return part
        for closed in self._parts.keys() - set(self._all_parts.opened):
            del self._parts[closed]
            self._checked_until_ns[closed] = 0
        stacks = source.mapped_stacks()
        if stacks is not None:
            stacks = stacks.cut(self._cut)
        if stacks is None or not stacks.has_equal_strides or not same_strides(stacks.like, self.like):
            stacks = None
        else:
            stacks.requests = None  # Requests of all parts are made together.
            rows = slice(self._starts[number], self._starts[number + 1])
            self._table[rows] = stacks.addresses
            if stacks.prefixes is not None:
                self._is_checked[rows], self._has_prefixes = False, True
        alignment = None if stacks is None else stacks.alignment
        self._alignments.add(alignment)
        self.alignment = alignment if len(self._alignments) == 1 else None
        self._parts[number] = source, stacks
        self._live_parts = list(self._parts.values())
        return source, stacks
