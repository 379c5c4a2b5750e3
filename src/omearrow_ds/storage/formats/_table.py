"""Tables with images: `StoredTable`, which each table format implements, and `TableImages`, which reads any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import Expected, ImageBlock, codec_of_chunks
from omearrow_ds.codec.leaves import among, flags, is_list_view, is_text
from omearrow_ds.errors import ColumnError, DecodeError, FormatError, ImageColumnError, OMEArrowDSError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.byte_source import MappedFile, ObjectFile, version_fingerprint
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats import CHUNK_PREFIX, Format, get_format
from omearrow_ds.storage.formats._base import (
    BLOCK_BYTES,
    Array,
    Block,
    Details,
    Header,
    Images,
    crop_images,
    forwarded,
    is_uniform,
    local_files,
    read_distinct,
)
from omearrow_ds.storage.formats._columns import (
    ImageColumns,
    columns_and_checksums,
    columns_at_once,
    plain_columns,
    plain_schema,
)
from omearrow_ds.storage.formats._error_translation import MALFORMED, damaged
from omearrow_ds.storage.formats._file_guard import FileGuard, Fingerprint
from omearrow_ds.storage.formats._image_columns import (
    ImageColumn,
    ImagesOf,
    has_twins,
    image_columns,
    kinds_of,
)
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._urls import ObjectReader

Kind = tuple[tuple[int, ...], np.dtype[Any]]
_LEAVES = ("pixel_bytes", "pixels")
_OFFSETS = {pa.binary(): np.int32, pa.large_binary(): np.int64}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of a table.

    ``look`` reads only ids, shapes, dtypes and columns, and ``with_columns`` the columns without images. ``objects`` is
    the reader for a URL, None for local files. Opening a Lance dataset sets ``known``, its version and the fingerprint
    of its manifest; opening a DuckDB file sets ``variant``, the names of the schema and the table.
    """

    engine: str | None = None
    image_column: str | None = None
    with_columns: bool = True
    look: bool = False
    table: str | None = None
    objects: ObjectReader | None = None
    known: tuple[int, Fingerprint | None] | None = None
    variant: tuple[str, ...] = ()


class TableHeader:
    """Ids, shapes and dtypes of the images in a column, and the decoder of their pixels."""

    def __init__(self, guard: FileGuard, column: ImageColumn, subject: str, info: pa.Table) -> None:
        # ``info`` has the ``header_fields`` of the column. ``subject`` names the column in errors.
        self.guard, self.column, self._subject = guard, column, subject
        self.shapes, self.stored_dtypes, self.null = kinds_of(info, subject)
        self.dtypes = native(self.stored_dtypes)
        self.image_ids = read_ids(info)
        self.odd_order = _odd_chunk_orders(info)
        self.chunk_codec: str | None = None  # Codec that compresses each chunk, if the table knows it.

    @cached_property
    def image_bytes(self) -> Array:
        return image_bytes(self.shapes, self.dtypes)

    @cached_property
    def kinds(self) -> list[Kind]:
        """Shape and native dtype of each image; one tuple per image would take more memory than a small image."""
        known: dict[Kind, Kind] = {}
        kinds = zip(zip(*self.shapes.T.tolist(), strict=True), self.dtypes, strict=True)
        return [known.setdefault(kind, kind) for kind in kinds]

    @cached_property
    def is_native(self) -> bool:
        return self.stored_dtypes == self.dtypes

    def leaf_fields(self) -> tuple[pa.Field | None, list[pa.Field]]:
        """Return the pixel field of the chunks, or None if it cannot suffice for reading, and their other fields.

        If `placed_chunks` shows that the leaf suffices, the table sets ``is_placed``. Then `StoredTable.fetch` returns
        lists of structs with only this leaf for ``chunks``.
        """
        chunks = self.column.type.field(self.column.pixel_field).type
        if self.column.pixel_field != "chunks" or not pa.types.is_list(chunks) or self.odd_order.any():
            return None, []
        leaves = [field for field in chunks.value_type if field.name in _LEAVES]
        others = [field for field in chunks.value_type if field.name not in _LEAVES]
        suffices = len(leaves) == 1 and not is_list_view(leaves[0].type) and others and len(self.shapes)
        return (leaves[0] if suffices else None), others

    def decode(self, table: StoredTable, chunks: pa.Array, indices: Array) -> Array | list[Array]:
        """Return the images of rows from their ``chunks`` or ``planes`` in a table."""
        if table.is_placed and self.is_native and chunks.type.value_type.field(0).type in _OFFSETS:
            cut = _cut(chunks, self.image_bytes[indices], [self.kinds[row] for row in indices.tolist()])
            if cut is not None:
                return cut
        if len(chunks) != len(indices):
            raise table.rows_changed(len(chunks), len(indices))
        try:
            return self.block(table, chunks, indices).images()
        except OMEArrowDSError:
            raise
        except MALFORMED as error:
            raise damaged(self.guard.path, self.guard.label, error) from error

    def expected(self, indices: Array) -> Expected:
        dtypes = list(map(self.stored_dtypes.__getitem__, indices.tolist()))
        return Expected(self._subject, indices, self.shapes[indices], dtypes, self.odd_order[indices])

    def block(self, table: StoredTable, chunks: pa.Array, indices: Array) -> ImageBlock:
        """Return a block of the images of rows, which decodes single images on access."""

        def planes() -> pa.Array:
            if self.column.pixel_field == "planes":
                return chunks
            if "planes" not in self.column.fields:
                return pa.nulls(len(indices), schema.PLANES)
            return pa.concat_arrays(list(table.fetch("planes", indices)))

        placed = np.ones(len(indices), bool) if table.is_placed else None
        pieces = chunks if self.column.pixel_field == "chunks" else pa.nulls(len(indices))
        try:
            return ImageBlock(pieces, self.expected(indices), planes, placed)
        except MALFORMED as error:  # the result of a library for a damaged table may be inconsistent
            if isinstance(error, OMEArrowDSError) and str(self.guard.path) in str(error):
                raise
            problem = f"{self.guard.path}: pixels cannot be located: {error}; the file is damaged, restore it"
            raise DecodeError(problem) from error


class StoredTable(ABC):
    """Open file of a table format: its columns, and the pixels of its images.

    The constructor sets ``schema``. Then `TableImages` sets ``header``, and calls `locate`. Rows are sorted and
    distinct.
    """

    schema: pa.Schema  # Types of all columns as stored.
    header: TableHeader
    is_placed = False  # Whether every image is known to be plainly stored, so that only the pixel leaf is fetched.
    is_wide = False  # Whether columns are read on request.
    _cached_info: pa.Table | None = None

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        self.guard, self.path, self.options, self.objects = guard, guard.path, options, options.objects

    @abstractmethod
    def read_columns(self, names: list[str]) -> pa.Table:
        """Return columns as stored, in this order."""

    @abstractmethod
    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        """Return fields of an image column, and the other columns ``names``.

        ``fields`` are the column's ``info_fields``, or its ``header_fields``; only the leaves of the latter with id,
        shape, dtype and chunk order are required. The fields of a null image are null. A format without the option
        ``look`` may leave out ``names``.
        """

    @property
    def _info(self) -> pa.Table:
        """All fields of the image column without pixels, read at the first use of metadata."""
        # Two threads may both read it: a child forked meanwhile would wait for ever for a lock of `cached_property`.
        if self._cached_info is None:
            column = self.header.column
            self._cached_info = self.read_later(lambda: self.read_fields(column, column.info_fields)[0])
        return self._cached_info

    def read_later(self, read: Callable[[], pa.Table]) -> pa.Table:
        """Read a table with one row per image after opening; raise `FormatError` if the file changed since then."""
        num_images = len(self.header.image_ids)
        self.guard.refuse_changed()
        with self.guard.interpreting():
            table = read()
            table.validate(full=True)
        if len(table) != num_images:
            raise self.rows_changed(len(table), num_images)
        return table

    def metadata(self, index: int) -> dict[str, Any]:
        info = self._info
        try:
            return schema.metadata_of(info.slice(index, 1).to_pylist()[0])
        except MALFORMED as error:  # Such as text that is not UTF-8, or a time outside the range of datetime.
            problem = f"{self.path}: image {index}: metadata cannot be read: {error}; correct it"
            raise FormatError(problem, image=index) from error

    def locate(self) -> None:  # noqa: B027  # A format may locate images when they are read.
        """Find out how pixels are read, as far as this is done at opening."""

    @abstractmethod
    def fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        """Return ``chunks`` or ``planes`` of rows, as one or more arrays in order."""

    def read_images(self, rows: Sequence[int]) -> list[Array]:
        """Return images (T, C, Z, Y, X), which may be read-only views of a mapped file."""
        images: list[Array] = []
        indices = np.array(rows, np.int64)
        for chunks in self.fetch(self.header.column.pixel_field, indices) if len(indices) else []:
            of_chunks = indices[len(images) : len(images) + len(chunks)]
            images.extend(self.header.decode(self, chunks, of_chunks))
        if len(images) != len(indices):
            raise self.rows_changed(len(images), len(indices))
        return images

    @abstractmethod
    def layout(self) -> Stored:
        """Return how the file stores the image structs, without the codec of chunks."""

    def read_groups(self) -> Iterable[slice] | None:
        """Return the rows of each group for `Header.find_groups`; None for groups of a fixed size."""
        return None

    def stream(self) -> Iterator[Block]:
        for group in self.read_groups() or split_by_bytes(self.header.image_bytes, BLOCK_BYTES):
            yield group.start, self.read_images(range(group.start, group.stop))

    def mapped_stacks(self) -> Stacks | None:
        """Return images of one shape and dtype as views of the mapped file, or None if they cannot be views."""
        return None

    @property
    def decodes_in_threads(self) -> bool:
        """Whether two threads that read half of a batch each take at most 1 / 1.3 of the time of one."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; a later read opens them again."""

    def rows_changed(self, num_images: int, expected: int) -> FormatError:
        problem = f"{num_images:,} images were read, expected {expected:,}"
        return FormatError(f"{self.path}: {problem}; the file changed since it was opened, open it again")

    def refuse_damaged(self, index: int) -> None:
        """Raise `FormatError`, because the stored bytes of an image do not fit its shape and dtype."""
        self.read_images([index])  # Raises a more precise error if the format's library finds the fault.
        problem = f"{self.path}: image {index}: stored bytes do not match its shape; the file is damaged, restore it"
        raise FormatError(problem, image=index)


class TableImages(Images):
    """Images in a struct column of a table, which a `StoredTable` of its format reads.

    With the option ``look``, `looked` has the fields of the image column that give id, shape and dtype, and the
    columns, both as stored; images cannot be read then.
    """

    looked: tuple[pa.Table, pa.Table] | None = None
    stream = forwarded("table.stream")
    metadata = forwarded("table.metadata")
    close = forwarded("table.close")

    def __init__(
        self, name: str, table_type: type[StoredTable], errors: tuple[type[Exception], ...], path: Path, **options: Any
    ) -> None:
        self._options, self._errors, fmt = TableOptions(**options), errors, get_format(name)
        guard = FileGuard(path, fmt.label, errors)
        with guard.interpreting():
            self.table = table_type(guard, self._options)
            self._read_header(fmt, guard)

    def _read_header(self, fmt: Format, guard: FileGuard) -> None:
        """Read ids, shapes, dtypes and columns; raise `FormatError` if a size or dtype is missing or impossible."""
        table, options, path = self.table, self._options, guard.path
        with_images = image_columns(table.schema)
        column = _choose_column(table, with_images, options.image_column)
        other_images = list(filter(column.name.__ne__, with_images))
        subject = f"{path}, column {column.name!r}" if other_images else str(path)
        if not column.is_own and has_twins(column.type):
            problem = f"column {column.name!r} has a struct with two fields of the same name"
            raise FormatError(f"{path}: {problem}; rename one")
        names = table.schema.names if options.with_columns else []
        others = list(filterfalse(with_images.__contains__, names))
        early_names = columns_at_once(others)  # The others of a wide table are read on request.
        is_at_once = early_names is others
        look = options.look and is_at_once
        info, early = table.read_fields(column, column.header_fields, early_names)
        info.validate(full=True)
        early.validate(full=True)
        make_header = partial(
            Header,
            format=fmt,
            path=path,
            guard=guard,
            image_column=(column.name,),
            other_image_columns=tuple(other_images),
            variant=table.options.variant,
            find_groups=table.read_groups,
        )
        objects = options.objects
        self.details = Details(
            storage_info=partial(_storage_of, table),
            files=partial(local_files, path, guard) if objects is None else lambda: iter(()),
            size=(lambda: None) if objects is None else partial(_size_of_objects, fmt, guard, objects),
            image_columns=partial(_describe_columns, table, with_images),
            decodes_in_threads=lambda: table.decodes_in_threads,
        )
        if look:
            self.looked, shapes, known = (info, early), np.empty((0, 5), np.int64), ImageColumns(path, (), early)
            self.header = make_header(image_ids=(), shapes=shapes, dtypes=(), columns=known, row_count=0)
            table.close()
            return
        stored = table.header = TableHeader(guard, column, subject, info)
        is_read = early_names and early.column_names == early_names
        read = early if is_read else _read_columns(table, list(early_names))
        columns, checksums = columns_and_checksums(read, str(path))
        if not is_at_once:
            unread = [name for name in others if checksums is None or name != schema.CHECKSUM_COLUMN]
            columns = plain_schema(pa.schema(map(table.schema.field, unread)), str(path))
        if column.name != schema.COLUMN:  # Checksums belong to this package's image column.
            checksums = None
        image_ids = stored.image_ids
        self.header = make_header(
            image_ids=image_ids,
            shapes=stored.shapes,
            dtypes=stored.dtypes,
            columns=ImageColumns(path, image_ids, columns, partial(_read_columns, table), lambda: checksums),
            row_count=len(image_ids),
        )
        table.is_wide = not is_at_once
        table.locate()

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del out
        if regions is not None:
            return crop_images(self, rows, regions)
        return self.table.read_images(rows) if len(rows) == 1 else read_distinct(self.table.read_images, rows)

    def mapped_stacks(self) -> Stacks | None:
        return self.table.mapped_stacks() if is_uniform(self.header.shapes, self.header.dtypes) else None

    def __reduce__(self) -> tuple[Any, ...]:
        options, name = vars(self.table.options), self.header.format.name
        return partial(TableImages, name, type(self.table), self._errors, **options), (self.header.path,)


def _read_columns(table: StoredTable, names: list[str]) -> pa.Table:
    if not names:
        return pa.table({})
    return plain_columns(table.read_later(lambda: table.read_columns(names)), str(table.path))


def _storage_of(table: StoredTable) -> Stored:
    """Return the layout of a table, with the codec that compresses each chunk separately."""
    stored, header, rows = table.layout(), table.header, np.flatnonzero(~table.header.null)[:1]
    codec = header.chunk_codec
    if codec is None and len(rows) and not table.is_placed and header.column.encoding == "bytes":
        codec = codec_of_chunks(next(iter(table.fetch(header.column.pixel_field, rows))))
    if codec is None:
        return stored
    reading = f"each chunk is decompressed separately; {stored.reading}"
    return replace(stored, compression=f"{CHUNK_PREFIX}{codec}", in_place=False, reading=reading)


def _size_of_objects(fmt: Format, guard: FileGuard, objects: ObjectReader) -> tuple[int, int, int]:
    sizes = [(guard.fingerprint or (0,))[0]]
    if fmt.is_folder:
        sizes = [size_bytes for size_bytes, _ in objects.inside(str(guard.path)).values()]
    return len(sizes), sum(sizes), sum(sizes)


def _describe_columns(table: StoredTable, with_images: Mapping[str, ImageColumn]) -> list[ImagesOf]:
    columns = []
    for name, column in with_images.items():
        try:
            with table.guard.reading():
                info, _ = table.read_fields(column, column.header_fields)
            columns.append(ImagesOf.of(name, kinds_of(info, str(table.path))))
        except OMEArrowDSError as error:
            columns.append(ImagesOf(name, problem=str(error)))
    return columns


def _choose_column(table: StoredTable, candidates: Mapping[str, ImageColumn], requested: str | None) -> ImageColumn:
    """Return the requested image column or the default one, or raise `ColumnError` or `ImageColumnError`."""
    path, names = table.path, table.schema.names
    if len(set(names)) < len(names):
        twin, _ = Counter(names).most_common(1)[0]
        raise ColumnError(f"{path}: several columns have the name {twin!r}; rename all but one")
    default = [schema.COLUMN] if schema.COLUMN in candidates else list(candidates)
    if not candidates:
        types = ", ".join(f"{field.name}: {str(field.type)[:40]}" for field in table.schema)
        problem = f"no column is an OME-Arrow struct (with pixels_meta and chunks or planes) among {types}"
        raise ColumnError(f"{path}: {problem}; pass a table with images")
    if requested is None and len(default) > 1:
        problem = f"{len(candidates)} columns contain images: {_listed(table, candidates)}"
        remedy = "pass image_column= with the name of one, or of several to join them along C"
        raise ImageColumnError(f"{path}: {problem}; {remedy}", default)
    if requested is not None and requested not in candidates:
        problem = "is not an OME-Arrow struct" if requested in names else "does not exist"
        raise ColumnError(f"{path}: image_column={requested!r} {problem}; pass one of {_listed(table, candidates)}")
    return candidates[default[0] if requested is None else requested]


class CopiedFile(MappedFile):
    """The mapped copy of an object, which exists as long as the mapping."""

    def __init__(self, guard: FileGuard, objects: ObjectReader) -> None:
        self._copy, version = objects.copied(str(guard.path))
        guard.compare(version_fingerprint(version))
        super().__init__(self._copy.path)


def open_bytes(guard: FileGuard, objects: ObjectReader | None) -> MappedFile | ObjectFile:
    """Return the guarded file: memory-mapped, or as an object on a server."""
    if objects is None:
        with guard:
            return MappedFile(guard.path)
    file = objects.open(str(guard.path))
    guard.compare(version_fingerprint(file.version))
    return file


def _cut(lists: pa.Array, size_bytes: Array, kinds: Sequence[Kind]) -> Array | list[Array] | None:
    """Return the images of rows as views of the leaf's buffer, or None if the leaf has other types or sizes.

    For a few rows, `ImageBlock` takes longer to check each piece than the store to fetch them.
    """
    structs = lists.values
    pixels = structs.field(0)
    if not len(pixels) or lists.null_count + structs.null_count + pixels.null_count:
        return None
    _, offsets, data = pixels.buffers()
    bounds = np.frombuffer(offsets, _OFFSETS[pixels.type])[pixels.offset :]
    firsts = np.frombuffer(lists.buffers()[1], np.int32)[lists.offset : lists.offset + len(lists) + 1]
    starts, stops = bounds[firsts[:-1]], bounds[firsts[1:]]
    if (stops - starts != size_bytes).any():
        return None
    numbers = firsts[1:] - firsts[:-1]
    if (numbers != 1).any():
        inside = bounds[firsts[0] : firsts[-1] + 1]
        if (inside[1:] - inside[:-1] != np.repeat(size_bytes / numbers, numbers)).any():
            return None
    flat = np.frombuffer(data, np.uint8)
    shape, dtype = kinds[0]
    if kinds.count(kinds[0]) == len(kinds):
        return flat[starts[0] : stops[-1]].view(dtype).reshape(-1, *shape)
    spans = zip(starts.tolist(), stops.tolist(), kinds, strict=True)
    return [flat[start:stop].view(dtype).reshape(shape) for start, stop, (shape, dtype) in spans]


def _odd_chunk_orders(info: pa.Table) -> Array:
    """Return whether the chunks of each image are flattened in another order than ZYX, the only supported one."""
    none = np.zeros(len(info), bool)
    if "chunk_grid" not in info.column_names:
        return none
    grid = info["chunk_grid"].combine_chunks()
    if not pa.types.is_struct(grid.type):
        return flags(grid.is_valid())
    if "chunk_order" not in grid.type.names:
        return none
    orders = grid.field("chunk_order")
    if orders.type == pa.string() and set(pc.unique(orders).view(pa.binary()).to_pylist()) <= {b"ZYX", b"", None}:
        return none
    is_odd = flags(pc.and_(grid.is_valid(), orders.is_valid()))
    if is_text(orders.type):  # `utf8_upper` would raise an error for invalid UTF-8.
        is_odd &= ~among(pc.ascii_upper(orders.cast(pa.string())), ("ZYX", ""))
    return is_odd


def _listed(table: StoredTable, with_images: Mapping[str, ImageColumn]) -> str:
    return " and ".join(f"{column.name!r} ({column.text})" for column in _describe_columns(table, with_images))


def read_ids(info: pa.Table) -> list[str]:
    """Return the ids of images as text; an image without an id gets its row number."""
    ids: list[Any] = info["id"].to_pylist() if "id" in info.column_names else [None] * len(info)
    if None not in ids:
        return list(map(str, ids))
    return [str(row if image_id is None else image_id) for row, image_id in enumerate(ids)]


def native(dtypes: Sequence[np.dtype[Any]]) -> list[np.dtype[Any]]:
    """Return dtypes in the byte order of this machine."""
    if all(map(attrgetter("isnative"), set(dtypes))):
        return list(dtypes)
    known = {dtype: dtype.newbyteorder("=") for dtype in set(dtypes)}
    return list(map(known.__getitem__, dtypes))


def as_arrays(column: pa.ChunkedArray | pa.Array, field: str | None = None) -> list[pa.Array]:
    """Return the non-empty arrays of a column or, with ``field``, of that field of a struct column."""
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [array.field(field) if field else array for array in arrays if len(array)]


def as_reader(tables: Iterable[pa.Table], table_schema: pa.Schema) -> pa.RecordBatchReader:
    """Return tables, which may be created lazily, as a reader of record batches for a library that writes them."""
    batches = (_from_its_start(batch) for table in tables for batch in table.to_batches())
    return pa.RecordBatchReader.from_batches(table_schema, batches)


def _from_its_start(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose nested columns are not slices of their buffers, on which Lance, Vortex and DuckDB fail."""
    for index, column in enumerate(batch.columns):
        if column.offset and pa.types.is_nested(column.type):
            batch = batch.set_column(index, batch.field(index), pa.concat_arrays([column, column.slice(0, 0)]))
    return batch


def unnest(column: pa.ChunkedArray) -> pa.Table:
    """Return a struct column as a table of its fields; the fields of a null struct are null."""
    return pa.Table.from_batches(map(pa.RecordBatch.from_struct_array, column.chunks), pa.schema(list(column.type)))
