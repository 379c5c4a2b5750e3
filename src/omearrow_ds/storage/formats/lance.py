"""Lance dataset: images are read from the pages of its data files, or by row number through Lance.

Measurements are in ``docs/explanation/layouts.md``. lz4 produced the bytes of zstd, compression does not affect lists,
and choosing a structural encoding had no effect.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from lance.fragment import FragmentSession

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import placed_chunks
from omearrow_ds.codec.leaves import list_bounds
from omearrow_ds.errors import ArgumentError, DecodeError, FormatError, MetadataError, MissingPathError, OMEArrowDSError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.resources import split_by_bytes
from omearrow_ds.storage.byte_source import MappedFile, version_fingerprint
from omearrow_ds.storage.formats._base import BLOCK_BYTES, Array, Block, group_by_part
from omearrow_ds.storage.formats._detect import entries_below, refuse_special
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn
from omearrow_ds.storage.formats._lance_pages import (
    Client,
    DataFile,
    PixelPages,
    find_places,
    open_file,
    open_session,
    pixel_bytes,
    take_rows,
    whole_files,
)
from omearrow_ds.storage.formats._stored import Stored, groups, join_names
from omearrow_ds.storage.formats._table import StoredTable, TableImages, TableOptions, as_arrays, as_reader, unnest
from omearrow_ds.storage.formats._urls import Found, ObjectReader, as_parsed
from omearrow_ds.storage.image_extents import OtherLayoutError

_BLOCK_BYTES = 2 * 2**20
_FILES_LIMIT = 64
_LARGE_BYTES = 4096  # a chunk of pixels that Lance, by a wide margin, stores in a separate block
_ODD_PAGES = "its pages have a layout that this version does not know"
_NOT_FOUND = re.compile(r"(?:LanceError\(IO\): )?Not found: ([^,]+)")
_LAST_VERSION = 2**64 - 1  # newer versions come first in the order of their manifests' names
_MOST_NAMES = 5  # Column names in an error.
UNSUPPORTED_TYPES = (pa.types.is_interval,)
ERRORS = (OSError, ValueError, RuntimeError)


def refuse_target(path: Path, columns: pa.Schema) -> None:
    """Refuse column names that Lance reserves (``_row...``) or cannot read back (with a dot or a backtick)."""
    odd = [name for name in columns.names if set(".`") & set(name) or name.lower().startswith("_row")]
    if odd:
        more = f" and {len(odd) - _MOST_NAMES:,} more" if len(odd) > _MOST_NAMES else ""
        problem = f"{path}: Lance column names cannot contain a dot or a backtick, or begin with '_row'"
        raise MetadataError(f"{problem}; rename {', '.join(map(repr, odd[:_MOST_NAMES]))}{more}")


def write_collection(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Lance dataset; Lance packs the bits of pixel lists even without compression."""
    position = table_schema.get_field_index(schema.COLUMN)
    marked = _marked(table_schema.field(position), {"lance-encoding:compression": compression})
    lance.write_dataset(as_reader(tables, table_schema.set(position, marked)), str(path), mode="create")


def _marked(field: pa.Field, metadata: dict[str, str]) -> pa.Field:
    """Return ``field`` with ``metadata`` at its field ``pixel_bytes``."""
    if field.name == "pixel_bytes":
        return field.with_metadata(metadata)
    if pa.types.is_list(field.type):
        return field.with_type(pa.list_(_marked(field.type.value_field, metadata)))
    is_struct = pa.types.is_struct(field.type)
    return field.with_type(pa.struct([_marked(child, metadata) for child in field.type])) if is_struct else field


def _explain(
    objects: ObjectReader | None, version: int | None, guard: FileGuard, error: BaseException
) -> OMEArrowDSError | None:
    """Return the error if Lance failed for another reason than damage; pass None for an unknown version."""
    if objects is None:
        if version is None or any(map(os.path.exists, guard.files)):
            return guard.find_change()
        return _removed(guard.path, version)
    cause, missing = objects.failed(str(guard.path), error), _NOT_FOUND.match(str(error))
    try:
        if cause is None and version is not None:
            _compare_manifest(objects, version, guard)
    except OMEArrowDSError as changed:
        cause = changed
    if cause is None and version is None and "was not found" in str(error):
        cause = MissingPathError(f"{guard.path}: no Lance dataset exists at this URL; correct the URL")
    elif cause is None and missing is not None:
        cause = FormatError(f"{guard.path}: file {missing[1]} does not exist; restore it")
    if cause is not None:
        raise cause from None  # Lance's own message may repeat a server's text about credentials
    return None


def _compare_manifest(objects: ObjectReader, version: int, guard: FileGuard) -> None:
    """Raise `FormatError` if the manifest of a version on a server is not the one that was opened first."""
    for url in guard.files:
        with suppress(MissingPathError):
            guard.compare(version_fingerprint(objects.open(url).version))
            return
    raise _removed(guard.path, version)


def _removed(path: Path, version: int) -> FormatError:
    return FormatError(f"{path}: version {version} was removed since it was opened; open it again")


class _DatasetVersion:
    """One version of a Lance dataset, by default the latest; others may write further versions, which are not read."""

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        self._guard, self._objects, self._url = guard, options.objects, str(guard.path)
        guard.explain = partial(_explain, self._objects, None)
        self.number, guard.fingerprint = (self._find_latest(), None) if options.known is None else options.known
        # Paths of the version's manifest, under its two possible names; data files never change their names.
        names = f"{_LAST_VERSION - self.number:020d}", str(self.number)
        guard.files = [f"{self._url}/_versions/{name}.manifest" for name in names]
        guard.explain = partial(_explain, self._objects, self.number)

    @property
    def client(self) -> Client:
        """Storage options of Lance's own client for the server; None on this machine."""
        return None if self._objects is None else self._objects.settings(self._url)

    def again(self, read: Callable[[], Found]) -> Found:
        """Return the result of ``read``, which is called again while a server does not answer."""
        return read() if self._objects is None else self._objects.again(self._url, read)

    def _load(self, guard: AbstractContextManager[None], version: int | None) -> lance.LanceDataset:
        def read() -> lance.LanceDataset:
            with guard:
                return lance.dataset(as_parsed(self._guard.path), version=version, storage_options=self.client)

        return self.again(read)

    def _find_latest(self) -> int:
        for entry in entries_below(self._guard.path) if self._objects is None else ():
            if not entry.is_file():
                refuse_special(entry)
        return int(self._load(self._guard.reading(), None).version)

    def open(self) -> lance.LanceDataset:
        dataset = self._load(self._guard, self.number)
        if self._objects is not None:
            _compare_manifest(self._objects, self.number, self._guard)
        return dataset


class LanceTable(StoredTable):
    """Lance dataset; on a server, Lance's own client fetches only the pixels of the requested rows.

    Opening fixes the version and the fingerprint of the manifest; Lance never overwrites data files. The engine
    ``"lance"`` also reads images that ``"pages"`` of the mapped files cannot.
    """

    _has_mark = False  # whether the pixels have the mark that `write` gives them

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        super().__init__(guard, options)
        self._engine = options.engine if self.objects is None else "lance"
        self._version = _DatasetVersion(guard, options)
        self._dataset = ProcessLocal(self._version.open)
        self._sessions = ProcessLocal(threading.local)  # Each reads the pixels of the data file of its number.
        self._mapped: ProcessLocal[dict[int, PixelPages]] = ProcessLocal(dict)
        self.schema = self._dataset.get().schema  # Lance converts it at each access.

    def locate(self) -> None:
        num_images = len(self.header.image_ids)
        try:
            self._files = self._version.again(self._find_files)
        except ERRORS:  # then Lance reads the rows
            self._files, self.is_placed = [], False
        self._starts = [*(file.start for file in self._files), num_images]
        self.engine = "pages" if self._files and all(file.locations for file in self._files) else "lance"
        if self.options.known is None and self._is_odd():
            msg = f"{self.path}: is read by Lance, several times more slowly, as {_ODD_PAGES}; write it again"
            warnings.warn(msg, stacklevel=4)
        self.options = replace(self.options, known=(self._version.number, self.guard.fingerprint))
        self.close()
        if self._engine == "pages" and num_images and self.engine != "pages":
            problem = "needs pixel pages that are uncompressed or compressed with zstd"
            raise ArgumentError(problem, path=self.path, option="engine", value="pages", remedy="pass engine=None")

    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        del names
        info = self._read_all([f"{column.name}.{name}" for name in fields])
        return unnest(info[column.name]).select(fields), pa.table({})

    def read_columns(self, names: list[str]) -> pa.Table:
        return self._read_all(names).select(names)

    def _read_all(self, columns: list[str]) -> pa.Table:
        """Return columns by take, not scan: a panic of Lance 14 in a stream (a damaged page) ends the process."""
        dataset = self._dataset.get()

        def take() -> pa.Table:
            with self.guard.reading():
                return dataset.take(list(range(dataset.count_rows())), columns=columns)

        return self._version.again(take)

    def layout(self) -> Stored:
        dataset = self._dataset.get()

        def read() -> tuple[list[int], str]:
            with self.guard.reading():
                rows = [fragment.count_rows() for fragment in dataset.get_fragments()]
                starts = [0, *np.cumsum(rows).tolist()]
                return starts, self._compression(starts)

        starts, compression = self._version.again(read)
        plain = self.engine == "pages" and compression == "none"
        if self.objects is not None:
            reading = "by Lance, by row number, from a dataset on a server"
        elif plain:
            reading = "in place: from the mapped files"
        elif self.engine == "pages":
            reading = "from the mapped files; each image is decompressed separately"
        else:
            reading = f"by Lance, by row number{f': {_ODD_PAGES}' if self._is_odd() else ''}"
        chunking = f"{groups(starts, 'fragment')}, file format {dataset.data_storage_version}"
        return Stored(self.header.column.encoding, compression, chunking, plain, reading)

    def _compression(self, starts: Sequence[int]) -> str:
        if self.engine == "pages":
            locations = (file.locations for file in self._files)
            return join_names("none" if pages is None or pages.stops is None else "zstd" for pages in locations)
        sizes = pixel_bytes(self._dataset.get(), self.path, self.header.column, self._version.client)
        decoded_bytes = sum(self.header.image_bytes[starts[number] : starts[number + 1]].sum() for number in sizes)
        return "compressed" if sum(sizes.values()) < decoded_bytes else "none"

    def _is_odd(self) -> bool:
        """Whether `write` wrote several images with pixels large enough to be read in place, but they are not."""
        header, is_ours = self.header, bool(self._files) and self._has_mark
        if not is_ours or len(header.image_ids) < 2 or self.engine == (self._engine or "pages"):
            return False
        is_large = bool((header.image_bytes >= _LARGE_BYTES * header.shapes[:, :2].prod(axis=1)).all())
        return is_large and self._compression(self._starts) == "none"

    def _find_files(self) -> list[DataFile]:
        """Return the data files if each holds a whole fragment and all images are plainly stored; else []."""
        dataset, (leaf, others) = self._dataset.get(), self.header.leaf_fields()
        files = [] if leaf is None else whole_files(dataset)
        if leaf is None or not 0 < len(files) <= _FILES_LIMIT:
            return []
        self._has_mark = leaf.name == "pixel_bytes" and bool(leaf.metadata)
        prefix = f"{self.header.column.name}.chunks.{self.header.column.type.field('chunks').type.value_field.name}"
        self._leaf = f"{prefix}.{leaf.name}"
        other_leaves = [f"{prefix}.{field.name}" for field in others]
        stored = []
        with nullcontext() if self.objects is None else self.guard.reading():
            readers = [open_file(self.path, file.name, self._version.client) for file in files]
            if not all(reader.metadata().schema.equals(dataset.schema) for reader in readers):
                return []
            for file, reader in zip(files, readers, strict=True):
                session = open_session(dataset, file.fragment, other_leaves)
                stored.append(pa.concat_arrays(take_rows(session, list(range(reader.num_rows())))))
        chunks, indices = pa.concat_arrays(stored), np.arange(len(self.header.image_ids))
        if len(chunks) != len(indices) or not placed_chunks(chunks, self.header.expected(indices)).all():
            return []
        self.is_placed = True
        starts = np.cumsum([0, *map(len, stored)]).tolist()
        return list(map(self._file, files, starts, stored, readers))

    def _file(self, file: DataFile, start: int, chunks: pa.Array, reader: LanceFileReader) -> DataFile:
        """Return a data file, with the locations of its images if it stores them uncompressed, or each with zstd."""
        rows, file = slice(start, start + len(chunks)), file._replace(start=start)
        starts, stops, _ = list_bounds(chunks, f"{self.path}: chunks")
        pieces = stops - starts
        one_each = pieces.all() and (pieces == self.header.shapes[rows, :2].prod(axis=1)).all()  # a null image has none
        of_bytes = self._leaf.endswith(".pixel_bytes")
        if self._engine == "lance" or not self.header.is_native or not one_each or not of_bytes:
            return file
        pages = reader.metadata().columns[file.columns[self._leaf]].pages
        path = self.path / "data" / file.name
        mapping = MappedFile(path)
        with mapping.read_at_random():  # The offsets of each page follow its values.
            locations = find_places(mapping.data, pages, self.header.image_bytes[rows], pieces)
        if locations is None:
            return file
        pixels = PixelPages(path, locations, self.header.kinds, start)
        for row in sorted({0, len(chunks) // 2, len(chunks) - 1}):
            try:
                (image,) = pixels.images([row])
            except DecodeError:  # damaged, or of another layout than stated: the next row decides
                continue
            except OtherLayoutError:
                break
            (lists,) = take_rows(open_session(self._dataset.get(), file.fragment, [self._leaf]), [row])
            (expected,) = self.header.decode(self, lists, np.array([start + row]))
            same = np.array_equal(image.view(np.uint8), expected.view(np.uint8))
            return file._replace(locations=locations) if same else file
        return file

    def close(self) -> None:
        self._dataset.close()
        self._sessions.close()
        self._mapped.close()

    def _session(self, number: int) -> FragmentSession:
        """Return this thread's session of the pixels in one data file."""

        def read() -> FragmentSession:
            with self.guard:
                return open_session(self._dataset.get(), self._files[number].fragment, [self._leaf])

        session = vars(self._sessions.get())[str(number)] = self._version.again(read)
        return session

    def _pages(self, number: int) -> PixelPages:
        """Return this process's mapped pages of one data file, whose images can be read from them."""
        mapped = self._mapped.get()
        if number not in mapped:
            file = self._files[number]
            assert file.locations is not None
            with self.guard:
                path = self.path / "data" / file.name
                mapped[number] = PixelPages(path, file.locations, self.header.kinds, file.start)
        return mapped[number]

    def read_images(self, rows: Sequence[int]) -> list[Array]:
        if self.engine != "pages":
            return super().read_images(rows)
        images: list[Array] = []
        for number, in_file in group_by_part(self._starts, rows):
            pages, start = self._mapped.get().get(number) or self._pages(number), self._starts[number]
            try:
                images += pages.images([row - start for row in in_file])
            except OtherLayoutError:
                images += super().read_images(in_file)
        return images

    def mapped_stacks(self) -> Stacks | None:
        is_single = self.engine == "pages" and len(self._files) == 1
        return self._pages(0).mapped_stacks(self.refuse_damaged) if is_single else None

    def read_groups(self) -> Iterable[slice]:
        return split_by_bytes(self.header.image_bytes, _BLOCK_BYTES if self.objects is None else BLOCK_BYTES)

    def stream(self) -> Iterator[Block]:
        if self.engine != "pages":
            yield from super().stream()
            return
        sizes_bytes = self.header.image_bytes
        step = max(1, int(_BLOCK_BYTES * len(sizes_bytes) // max(1.0, sizes_bytes.sum(dtype=float))))
        for number, (start, stop) in enumerate(pairwise(self._starts)):
            for first in range(start, stop, step):
                last = min(first + step, stop)
                stack = self._pages(number).stack(first - start, last - first)
                yield first, self.read_images(range(first, last)) if stack is None else stack

    def fetch(self, field: str, indices: Array, *, is_repeated: bool = False) -> list[pa.Array]:
        if self.objects is not None and not is_repeated:
            return self._version.again(partial(self.fetch, field, indices, is_repeated=True))
        if not self._files or field != "chunks":
            with self.guard.reading():
                taken = self._dataset.get().take(indices.tolist(), columns=[f"{self.header.column.name}.{field}"])
            return as_arrays(taken[self.header.column.name], field)
        arrays = []
        for number, rows in group_by_part(self._starts, indices.tolist()):
            session = vars(self._sessions.get()).get(str(number)) or self._session(number)
            start = self._starts[number]
            with self.guard.reading():
                arrays += take_rows(session, [row - start for row in rows])
        return arrays


open_collection = partial(TableImages, "lance", LanceTable, ERRORS)
