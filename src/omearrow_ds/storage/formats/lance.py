"""Lance dataset: images are cut out of the pages of its data files, or rows taken by number, of the pixel leaf only.

Measured on 2026-11-21 with pylance 14.0.2, one core, warm cache, synthetic / NF1 images of uint16. Size is relative
to the pixels; one image, and each of a random batch of 16, to ``tifffile.imread`` of a 100 x 100 file; decoding all
into memory at hand to ``memcpy``:

| compression, encoding | images | size | one | batch | all |
|---|---|---|---|---|---|
| none, bytes (read in place) | 1,000 of 100 x 100 | 1.00 / 1.00 | 0.05 / 0.05 | 0.04 / 0.05 | 1.4 / 1.4 |
| | 10,000 of 100 x 100 | 1.00 / 1.00 | 0.04 / 0.05 | 0.04 / 0.04 | 2.3 / 2.1 |
| | 300 of 512 x 512 | 1.00 / 1.00 | 0.3 / 0.3 | 0.3 / 0.3 | 1.2 / 1.1 |
| zstd, bytes | 1,000 of 100 x 100 | 0.38 / 0.36 | 0.7 / 0.4 | 0.2 / 0.2 | 13 / 12 |
| | 10,000 of 100 x 100 | 0.38 / 0.36 | 0.5 / 0.6 | 0.2 / 0.2 | 20 / 20 |
| | 300 of 512 x 512 | 0.32 / 0.32 | 3.6 / 3.8 | 3.3 / 3.4 | 11 / 14 |
| none, list (packed bits) | 1,000 of 100 x 100 | 0.93 / 0.92 | 1.2 / 1.3 | 0.2 / 0.2 | 11 / 11 |
| | 10,000 of 100 x 100 | 0.93 / 0.92 | 0.8 / 0.7 | 0.2 / 0.2 | 18 / 18 |
| | 300 of 512 x 512 | 0.99 / 0.99 | 7.0 / 3.6 | 5.6 / 2.7 | 22 / 16 |

One and batch of zstd and lists were measured again on 2026-11-22, when sessions came to read them. Since then frames of
zstd are decompressed here: beside sessions one image takes 0.28 (512 x 512: 0.47) of the time, one of a batch 0.7.

lz4 gave zstd's bytes, compression does not touch lists, and a structural encoding of one's choice changed nothing.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.codec.encode import placed_chunks
from omearrow_ds.errors import ArgumentError, DecodeError, FormatError, MetadataError, OMEArrowDSError
from omearrow_ds.storage.formats._base import Array, ProcessLocal, Stamp, refusing
from omearrow_ds.storage.formats._detect import refuse_special_below
from omearrow_ds.storage.formats._image_columns import ImageColumn
from omearrow_ds.storage.formats._lance_files import (
    Sessions,
    WholeFile,
    open_file,
    open_session,
    page_encodings,
    take_rows,
    whole_files,
)
from omearrow_ds.storage.formats._lance_pages import PixelPages, Places, find_places
from omearrow_ds.storage.formats._leaf import LeafSource
from omearrow_ds.storage.formats._stored import Stored, groups, joined, lance_compression
from omearrow_ds.storage.formats._table import as_arrays, as_reader, unnest

if TYPE_CHECKING:
    import lance
    from lance.file import LanceFileReader
    from lance.fragment import FragmentSession

_BLOCK_BYTES = 2 * 2**20
_FILES_LIMIT = 64
_LAST_VERSION = 2**64 - 1  # newer versions come first in the order of their manifests' names


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Lance dataset; the bits of pixel lists are packed in any case."""
    import lance  # noqa: PLC0415  # an optional backend

    position = table_schema.get_field_index(schema.COLUMN)
    leaf = (schema.COLUMN, "chunks", "pixel_bytes")
    marked = _marked(table_schema.field(position), leaf, {"lance-encoding:compression": compression})
    lance.write_dataset(as_reader(tables, table_schema.set(position, marked)), str(path), mode="create")


def _marked(field: pa.Field, path: Sequence[str], metadata: dict[str, str]) -> pa.Field:
    """Return ``field`` with ``metadata`` at the field of ``path`` within it, which starts with its own name."""
    if len(path) == 1:
        return field.with_metadata(metadata)
    if pa.types.is_list(field.type):
        item = field.type.value_field
        return field.with_type(pa.list_(_marked(item, (item.name, *path[1:]), metadata)))
    fields = [_marked(each, path[1:], metadata) if each.name == path[1] else each for each in field.type]
    return field.with_type(pa.struct(fields))


class _File(NamedTuple):
    """A data file: its name and fragment, its first image, how many it has, and where they stand if that is known."""

    name: str
    fragment: int
    start: int
    rows: int
    places: Places | None


class Source(LeafSource):
    """Images of a Lance dataset.

    Parameters
    ----------
    path
        The dataset's folder.
    engine
        ``"pages"``, ``"lance"``, or None for the first that can read the dataset.
    image_column, with_columns
        As of `TableSource`.

    Raises
    ------
    FormatError
        If the folder is no Lance dataset, or holds an impossible image.
    ColumnError
        If no column is an OME-Arrow struct, or not the one asked for.
    ArgumentError
        If the engine is unknown or cannot read the dataset.
    """

    name = "lance"
    errors = (OSError, ValueError, RuntimeError)
    engines: ClassVar[tuple[str, ...]] = ("pages", "lance")
    unheld_types = (pa.types.is_interval,)

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Refuse what Lance reserves: names with a dot, and those of its own row columns."""
        super().refuse_target(path, columns)
        odd = [name for name in columns.names if "." in name or name.lower().startswith("_row")]
        if odd:
            msg = f"columns {odd}: Lance takes no name with a dot and none of its own ('_row...'); rename"
            raise MetadataError(msg)

    def __init__(
        self,
        path: Path,
        engine: str | None = None,
        image_column: str | None = None,
        known: tuple[int, Stamp | None] | None = None,
        *,
        with_columns: bool = True,
    ) -> None:
        if engine not in (None, *self.engines):
            raise ArgumentError(f"{path}: engine={engine!r}; {self.format.label} is read by {', '.join(self.engines)}")
        self.path = path
        self._how = {"engine": engine, "image_column": image_column, "with_columns": with_columns}
        self._version, self._stamp = (self._latest_version(), None) if known is None else known
        self._dataset = ProcessLocal(self._open)
        self._sessions = ProcessLocal(Sessions)
        self._mapped: ProcessLocal[dict[int, PixelPages]] = ProcessLocal(dict)
        dataset = self._dataset.get()
        others = self._choose(dataset.schema, image_column, with_columns=with_columns)
        info = self._read_info(self._column)
        self._set_header(info, self._read_all(others) if others else dataset.schema.empty_table().select([]))
        try:
            self._files = self._find_files(dataset)
        except self.errors:  # what Lance alone can read, it reads
            self._files, self._all_placed = [], False
        self._starts = [file.start for file in self._files]
        self.close()
        if engine == "pages" and len(self) and self.engine != engine:
            raise ArgumentError(
                f"{path}: engine='pages' reads pixels in pages that are uncompressed or zstd; pass engine=None"
            )

    def _read_info(self, column: ImageColumn) -> pa.Table:
        info = self._read_all([f"{column.name}.{name}" for name in column.info_fields])
        return unnest(info[column.name]).select(column.info_fields)

    def _read_all(self, columns: list[str]) -> pa.Table:
        """Return columns. Taken, not scanned: a panic of Lance 14 in a stream (a damaged page) ends the process."""
        dataset = self._dataset.get()
        with self._reading():
            return dataset.take(list(range(dataset.count_rows())), columns=columns)

    @property
    def engine(self) -> str:
        """What reads the pixels: ``"pages"`` of the mapped files, or ``"lance"``, which also helps where they fail."""
        return "pages" if self._files and all(file.places for file in self._files) else "lance"

    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""
        dataset = self._dataset.get()
        with self._reading():
            encodings = page_encodings(dataset, self.path, self._column)
            rows = [fragment.count_rows() for fragment in dataset.get_fragments()]
        plain = self.engine == "pages" and all(file.places and file.places.stops is None for file in self._files)
        if plain:
            reading = "in place: out of the mapped files"
        elif self.engine == "pages":
            reading = "out of the mapped files; each image is decompressed alone"
        else:
            reading = "by Lance, rows by number"
        chunking = f"{groups([0, *np.cumsum(rows).tolist()], 'fragment')}, file format {dataset.data_storage_version}"
        return Stored(self._column.encoding, joined(map(lance_compression, encodings)), chunking, plain, reading)

    def _find_files(self, dataset: lance.LanceDataset) -> list[_File]:
        """Return the data files, if each holds a fragment whole, and all images are plainly stored; else []."""
        image = dataset.schema.field(self._column.name).type
        found = self._leaf_and_places(image)
        files = [] if found is None else whole_files(dataset)
        if found is None or not 0 < len(files) <= _FILES_LIMIT:
            return []
        prefix = f"{self._column.name}.chunks.{image.field('chunks').type.value_field.name}"
        self._leaf = f"{prefix}.{found[0].name}"
        readers = [open_file(self.path, file.name) for file in files]
        if not all(reader.metadata().schema.equals(dataset.schema) for reader in readers):
            return []
        places = [f"{prefix}.{field.name}" for field in found[1]]
        stored = []
        for file, reader in zip(files, readers, strict=True):
            session = open_session(dataset, file.fragment, places)
            stored.append(pa.concat_arrays(take_rows(session, list(range(reader.num_rows())))))
        chunks = pa.concat_arrays(stored)
        if len(chunks) != len(self) or not placed_chunks(chunks, self._expected(np.arange(len(self)))).all():
            return []
        self._all_placed = True
        starts = np.cumsum([0, *map(len, stored)]).tolist()
        return [self._file(*each) for each in zip(files, starts, stored, readers, strict=False)]

    def _file(self, file: WholeFile, start: int, chunks: pa.Array, reader: LanceFileReader) -> _File:
        """Return a data file with the places of its images, if it stores them uncompressed, or each by zstd."""
        rows = slice(start, start + len(chunks))
        plain = _File(file.name, file.fragment, start, len(chunks), None)
        pieces = pc.list_value_length(chunks).fill_null(0).to_numpy()
        one_each = pieces.all() and (pieces == self.shapes[rows, :2].prod(axis=1)).all()  # a null image has none
        of_bytes = self._leaf.endswith(".pixel_bytes")
        if self._how["engine"] == "lance" or not self._native or not one_each or not of_bytes:
            return plain
        pages = reader.metadata().columns[file.columns[self._leaf]].pages
        path = self.path / "data" / file.name
        places = find_places(np.memmap(path, np.uint8, "r"), pages, self._image_bytes[rows], pieces)
        if places is None:
            return plain
        pixels = PixelPages(path, places, self._kinds, start)
        for row in sorted({0, len(chunks) // 2, len(chunks) - 1}):
            try:
                found = pixels.image(row)
            except DecodeError:  # damaged, or of another layout than it says: another one tells
                continue
            (lists,) = take_rows(self._open_session(file.fragment), [row])
            wanted = self._image(lists, start + row)
            same = found is not None and np.array_equal(found.view(np.uint8), wanted.view(np.uint8))
            return plain._replace(places=places) if same else plain
        return plain

    def _open_session(self, fragment: int) -> FragmentSession:
        return open_session(self._dataset.get(), fragment, [self._leaf])

    def _latest_version(self) -> int:
        """Return the version to open: from here on it alone is read, for others may write further ones."""
        import lance  # noqa: PLC0415  # an optional backend

        with refusing(self.path, self._label, self.errors):
            refuse_special_below(self.path)
            return int(lance.dataset(str(self.path)).version)

    def _open(self) -> lance.LanceDataset:
        import lance  # noqa: PLC0415  # an optional backend

        with self._opening():
            return lance.dataset(str(self.path), version=self._version)

    @cached_property
    def _told_by(self) -> Sequence[str]:
        """Paths of the version's manifest, by the two names that it may have: data files keep theirs for ever."""
        names = f"{_LAST_VERSION - self._version:020d}", str(self._version)
        return [f"{self.path}/_versions/{name}.manifest" for name in names]

    def failure(self, error: BaseException) -> OMEArrowDSError | None:
        """Return the error for what Lance raised where nothing is damaged; None where it may be."""
        if any(map(os.path.exists, self._told_by)):
            return super().failure(error)
        gone = f"was replaced or changed since it was opened: its version {self._version} is gone; open it again"
        return FormatError(f"{self.path}: {gone}")

    def close(self) -> None:
        """Let go of the dataset; a later read opens it again."""
        self._dataset.close()
        self._sessions.close()
        self._mapped.close()

    @property
    def pinned(self) -> dict[str, Any]:
        """The version, and what tells its manifest: another one, or the same of another dataset, is refused."""
        return {"known": (self._version, self._stamp)}

    def _session(self, number: int) -> FragmentSession:
        """Return this thread's session of the pixels in one data file."""
        sessions = self._sessions.get().of_file
        if number not in sessions:
            with self._opening():
                sessions[number] = self._open_session(self._files[number].fragment)
        return sessions[number]

    def _pages(self, number: int) -> PixelPages | None:
        """Return this process's mapped pages of one data file, if the images stand in them as they are."""
        file, mapped = self._files[number], self._mapped.get()
        if number not in mapped and file.places is not None:
            with self._opening():
                mapped[number] = PixelPages(self.path / "data" / file.name, file.places, self._kinds, file.start)
        return mapped.get(number)

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it is read-only."""
        if not self._files:
            return super().view(index)
        number = bisect.bisect_right(self._starts, index) - 1
        row = int(index) - self._starts[number]
        pages = self._pages(number)
        image = None if pages is None else pages.image(row)
        if image is not None:
            return image
        with self._reading():
            (lists,) = take_rows(self._session(number), [row])
        return self._image(lists, index)

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they are read-only."""
        return list(map(self.view, indices.tolist())) if self.engine == "pages" else super().views(indices)

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""
        if self.engine != "pages":
            yield from super().scan()
            return
        for number, file in enumerate(self._files):
            for first, count in self._blocks_of(file):
                pages = self._pages(number)
                stack = None if pages is None else pages.stack(first, count)
                start = file.start + first
                yield start, [self.view(index) for index in range(start, start + count)] if stack is None else stack

    def _blocks_of(self, file: _File) -> Iterator[tuple[int, int]]:
        """Yield first row and number of rows of the blocks that a data file is read in."""
        step = self._rows_of(_BLOCK_BYTES)
        for first in range(0, file.rows, step):
            yield first, min(step, file.rows - first)

    def _taken(self, field: str, indices: Array) -> list[pa.Array]:
        with self._reading():
            taken = self._dataset.get().take(indices.tolist(), columns=[f"{self._column.name}.{field}"])
        return as_arrays(taken[self._column.name], field)

    def _fetch_whole(self, indices: Array) -> list[pa.Array]:
        return self._taken("chunks", indices)

    def _fetch(self, field: str, indices: Array) -> Iterator[pa.Array]:
        if not self._files or field != "chunks":
            yield from self._taken(field, indices)
            return
        bounds = np.searchsorted(indices, [*self._starts, len(self)]).tolist()
        for number, (first, stop) in enumerate(pairwise(bounds)):
            if first < stop:
                rows = (indices[first:stop] - self._starts[number]).tolist()
                with self._reading():
                    arrays = take_rows(self._session(number), rows)
                yield from arrays

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        if not self._files or field != "chunks":
            step = self._rows_of(_BLOCK_BYTES)
            for start in range(0, len(self), step):
                yield from self._taken(field, np.arange(start, min(start + step, len(self))))
            return
        for number, file in enumerate(self._files):
            for first, count in self._blocks_of(file):
                with self._reading():
                    arrays = take_rows(self._session(number), list(range(first, first + count)))
                yield from arrays
