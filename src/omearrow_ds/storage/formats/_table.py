"""`TableSource`: the base of the six table formats: the header, and images decoded from fetched chunks or leaves."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import Expected, ImageBlock, codec_of_chunks
from omearrow_ds.codec.leaves import among, flags, is_list_view, is_text
from omearrow_ds.errors import ColumnError, DecodeError, FormatError, ImageColumnError, OMEArrowDSError
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.byte_source import MappedFile, ObjectFile, version_fingerprint
from omearrow_ds.storage.formats import CHUNK_PREFIX, get_format
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import is_narrow, plain_columns, plain_schema
from omearrow_ds.storage.formats._error_translation import MALFORMED, damaged
from omearrow_ds.storage.formats._file_guard import FileGuard, Fingerprint
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn, ImagesOf, image_columns, kinds_of, refuse_twins
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._urls import Objects

Kind = tuple[tuple[int, ...], np.dtype[Any]]
_LEAVES = ("pixel_bytes", "pixels")
_OFFSETS = {pa.binary(): np.int32, pa.large_binary(): np.int64}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options with which a table is opened.

    ``look`` reads only ids, shapes, dtypes and columns, ``with_columns`` also the columns without images. ``objects``
    reads the objects of a URL. ``known`` is the version of a Lance dataset, and the fingerprint of its manifest.
    """

    engine: str | None = None
    image_column: str | None = None
    with_columns: bool = True
    look: bool = False
    table: str | None = None
    objects: Objects | None = None
    known: tuple[int, Fingerprint | None] | None = None


class TableSource(Images):
    """Images in a struct column of a table; subclasses implement how its parts are fetched.

    The constructor takes `TableOptions`. It calls `_read_header`, which calls `_choose`, and then `_set_header` with
    the fields of the images and the columns' schema.
    """

    errors: ClassVar[tuple[type[Exception], ...]]
    # Fields of the image column that give id, shape and dtype, and the columns, both as stored.
    looked: tuple[pa.Table, pa.Table] | None = None
    null: Array  # Whether the row of each image is null; such an image has no pixels, and each of its sizes is 0.
    _column: ImageColumn
    _subject: str  # In errors.
    _info: pa.Table
    _all_placed = False  # True: every image is known to be plainly stored, and only the pixel leaf is fetched

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self._options = path, TableOptions(**options)
        self.guard = FileGuard(path, get_format(self.name).label, self.errors)
        self._objects = self._options.objects
        self.fetches, self._look = self._objects is not None, self._options.look
        self._bytes = ProcessLocal(partial(_open_bytes, self.guard, self._objects))
        with self.guard.interpreting():
            self._read_header()

    @abstractmethod
    def _read_header(self) -> None:
        """Read ids, shapes, dtypes and columns."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **{**vars(self._options), **self.version}), (self.path,)

    def stored_files(self) -> Iterator[Path]:
        if self._objects is None:
            yield from super().stored_files()

    def stored_size(self) -> tuple[int, int, int]:
        if self._objects is None:
            return super().stored_size()
        size_bytes = (self.guard.fingerprint or (0,))[0]
        return 1, size_bytes, size_bytes

    @property
    def version(self) -> dict[str, Any]:
        """Further keyword arguments that reopen the same version, for a path with several versions."""
        return {}

    @property
    def mapping(self) -> MappedFile | None:
        """Memory-mapped file that contains the images of `mapped_stacks`; None without such images."""
        return None

    @abstractmethod
    def _fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        """Return ``chunks`` or ``planes`` of sorted, distinct rows, as one or more arrays in order."""

    @abstractmethod
    def _read_info(self, column: ImageColumn) -> pa.Table:
        """Return the fields of an image column without pixels as a table; those of a null image are null."""

    @abstractmethod
    def _layout(self) -> Stored:
        """Return how the file stores the image structs, without the codec of chunks."""

    def storage_info(self) -> Stored:
        stored, codec = self._layout(), self._chunk_codec()
        if codec is None:
            return stored
        reading = f"each chunk is decompressed separately; {stored.reading}"
        return replace(stored, compression=f"{CHUNK_PREFIX}{codec}", in_place=False, reading=reading)

    def _chunk_codec(self) -> str | None:
        """Return the codec that compresses each chunk separately, or None."""
        rows = np.flatnonzero(~self.null)[:1]
        if self._all_placed or not len(rows) or self._column.encoding != "bytes":
            return None
        return codec_of_chunks(next(iter(self._fetch(self._column.pixel_field, rows))))

    def _choose(self, table: pa.Schema) -> list[str]:
        """Set the requested image column, and return the names of the columns without images.

        Raises `ColumnError` if it is missing, or two columns have one name; `ImageColumnError` if none is requested,
        there are several, and none has our default name.
        """
        requested = self._options.image_column
        twins = Counter(table.names).most_common(1)
        if twins and twins[0][1] > 1:
            raise ColumnError(f"{self.path}: several columns have the name {twins[0][0]!r}; rename all but one")
        candidates = self._image_columns = image_columns(table)
        default = [schema.COLUMN] if schema.COLUMN in candidates else list(candidates)
        if not candidates:
            types = ", ".join(f"{field.name}: {str(field.type)[:40]}" for field in table)
            problem = f"no column is an OME-Arrow struct (with pixels_meta and chunks or planes) among {types}"
            raise ColumnError(f"{self.path}: {problem}; pass a table with images")
        if requested is None and len(default) > 1:
            problem = f"{len(candidates)} columns contain images: {_listed(self)}"
            remedy = "pass image_column= with the name of one, or of several to join them along C"
            raise ImageColumnError(f"{self.path}: {problem}; {remedy}", default)
        if requested is not None and requested not in candidates:
            problem = "is not an OME-Arrow struct" if requested in table.names else "does not exist"
            raise ColumnError(f"{self.path}: image_column={requested!r} {problem}; pass one of {_listed(self)}")
        self._column = candidates[default[0] if requested is None else requested]
        self.image_column = (self._column.name,)
        others = list(candidates)
        others.remove(self._column.name)
        self.other_image_columns = tuple(others)
        self._subject = f"{self.path}, column {self._column.name!r}" if others else str(self.path)
        refuse_twins(self._column, self.path)
        return [name for name in table.names if name not in candidates] if self._options.with_columns else []

    def image_columns(self) -> list[ImagesOf]:
        columns = []
        for name, column in self._image_columns.items():
            try:
                columns.append(ImagesOf.of(name, kinds_of(self._read_info(column), str(self.path))))
            except OMEArrowDSError as error:
                columns.append(ImagesOf(name, problem=str(error)))
        return columns

    @abstractmethod
    def _read_stored(self, names: list[str]) -> pa.Table:
        """Return columns as stored, in this order."""

    def _read_columns(self, names: list[str]) -> pa.Table:
        if not names:
            return pa.table({})
        self.guard.refuse_changed()
        with self.guard.interpreting():
            columns = self._read_stored(names)
            columns.validate(full=True)
        if len(columns) != len(self):
            raise rows_changed(self.path, len(columns), len(self))
        return plain_columns(columns, str(self.path))

    def _set_column_schema(self, stored: pa.Schema, early: pa.Table) -> None:
        """Set names and types of the columns, and read checksums and narrow tables, unless ``early`` has them.

        Checksums are not among the columns.
        """
        plain = plain_schema(stored, str(self.path))
        index, checksums = plain.get_field_index(schema.CHECKSUM_COLUMN), list[str]()
        if index >= 0 and plain.field(index).type == pa.string():
            plain = plain.remove(index)
            if self._column.name == schema.COLUMN:  # Checksums belong to this package's image column.
                checksums = [schema.CHECKSUM_COLUMN]
        self.column_schema = plain
        is_at_once = len(early.column_names) >= len(stored) or is_narrow(stored.names)
        names = [*checksums, *(plain.names if is_at_once else ())]
        if names and set(names) <= set(early.column_names):
            columns = plain_columns(early.select(names), str(self.path))
        else:
            columns = self._read_columns(names)
        if checksums:
            self.checksums = columns[schema.CHECKSUM_COLUMN]
        if is_at_once:
            self.columns = columns.select(plain.names)

    def _set_header(self, info: pa.Table, columns: pa.Schema, early: pa.Table | None = None) -> None:
        """Set ids, shapes and dtypes from ``info``, the image column's fields without pixels as a table.

        ``columns`` is the stored schema of the other columns; ``early`` has those that were read with ``info``: all of
        them to look. Raises `FormatError` if the sizes or the dtype of an image are missing or impossible.
        """
        early = pa.table({}) if early is None else early
        for table in (info, early):
            table.validate(full=True)
        if self._look:
            self.looked = info, early
            return
        self.shapes, self._given_dtypes, self.null = kinds_of(info, self._subject)
        self.dtypes = native(self._given_dtypes)
        self.image_ids = named(ids_of(info))
        self._set_column_schema(columns, early)
        self._info = info
        self._odd_order = _odd_chunk_orders(info)

    def metadata(self, index: int) -> dict[str, Any]:
        try:
            record = self._info.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a time outside the range of datetime
            raise FormatError(
                f"{self.path}: image {index}: metadata cannot be read: {error}; correct it", image=index
            ) from error
        with self.guard.interpreting():
            return schema.metadata_of(record)

    def _read_images(self, rows: Sequence[int]) -> list[Array]:
        images: list[Array] = []
        indices = np.array(rows, np.int64)
        for chunks in self._fetch(self._column.pixel_field, indices) if len(indices) else []:
            images.extend(self._images(chunks, indices[len(images) : len(images) + len(chunks)]))
        if len(images) != len(indices):
            raise rows_changed(self.path, len(images), len(indices))
        return images

    @cached_property
    def _image_bytes(self) -> Array:
        return image_bytes(self.shapes, self.dtypes)

    @cached_property
    def _kinds(self) -> list[Kind]:
        """Shape and native dtype of each image; one tuple per image would take more memory than a small image."""
        known: dict[Kind, Kind] = {}
        kinds = zip(zip(*self.shapes.T.tolist(), strict=True), self.dtypes, strict=True)
        return [known.setdefault(kind, kind) for kind in kinds]

    @cached_property
    def _is_native(self) -> bool:
        return self._given_dtypes == self.dtypes

    def _leaf_fields(self) -> tuple[pa.Field | None, list[pa.Field]]:
        """Return the pixel leaf of the image struct's chunks, or None if it cannot suffice, and their other fields.

        If `placed_chunks` shows that it suffices, ``_all_placed`` is True, and `_fetch` returns lists of structs with
        only the leaf for the field ``chunks``.
        """
        chunks = self._column.type.field(self._column.pixel_field).type
        if self._column.pixel_field != "chunks" or not pa.types.is_list(chunks) or self._odd_order.any():
            return None, []
        leaves = [field for field in chunks.value_type if field.name in _LEAVES]
        others = [field for field in chunks.value_type if field.name not in _LEAVES]
        suffices = len(leaves) == 1 and not is_list_view(leaves[0].type) and others and len(self)
        return (leaves[0] if suffices else None), others

    def _images(self, chunks: pa.Array, indices: Array) -> Array | list[Array]:
        if self._all_placed and self._is_native and chunks.type.value_type.field(0).type in _OFFSETS:
            cut = _cut(chunks, self._image_bytes[indices], [self._kinds[row] for row in indices.tolist()])
            if cut is not None:
                return cut
        if len(chunks) != len(indices):
            raise rows_changed(self.path, len(chunks), len(indices))
        try:
            return self._block(chunks, indices).images()
        except OMEArrowDSError:
            raise
        except MALFORMED as error:
            raise damaged(self.path, self.guard.label, error) from error

    def _expected(self, indices: Array) -> Expected:
        dtypes = [self._given_dtypes[index] for index in indices.tolist()]
        return Expected(self._subject, indices, self.shapes[indices], dtypes, self._odd_order[indices])

    def _block(self, chunks: pa.Array, indices: Array) -> ImageBlock:
        def planes() -> pa.Array:
            if self._column.pixel_field == "planes":
                return chunks
            if "planes" not in self._column.fields:
                return pa.nulls(len(indices), schema.PLANES)
            return pa.concat_arrays(list(self._fetch("planes", indices)))

        placed = np.ones(len(indices), bool) if self._all_placed else None
        pieces = chunks if self._column.pixel_field == "chunks" else pa.nulls(len(indices))
        try:
            return ImageBlock(pieces, self._expected(indices), planes, placed)
        except MALFORMED as error:  # the result of a library for a damaged file may be inconsistent
            if isinstance(error, OMEArrowDSError) and str(self.path) in str(error):
                raise
            raise DecodeError(
                f"{self.path}: pixels cannot be located: {error}; the file is damaged, restore it"
            ) from error


class CopiedFile(MappedFile):
    """The mapped copy of an object, which exists as long as the mapping."""

    def __init__(self, guard: FileGuard, objects: Objects) -> None:
        self._copy, version = objects.copied(str(guard.path))
        guard.compare(version_fingerprint(version))
        super().__init__(self._copy.path)


def _open_bytes(guard: FileGuard, objects: Objects | None) -> MappedFile | ObjectFile:
    """Return the file of a guard mapped, or as an object."""
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
    if all(kind is kinds[0] for kind in kinds):
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
    is_odd = flags(pc.and_(grid.is_valid(), orders.is_valid()))
    if is_text(orders.type):  # `utf8_upper` would raise an error for invalid UTF-8.
        is_odd &= ~among(pc.ascii_upper(orders.cast(pa.string())), ("ZYX", ""))
    return is_odd


def _listed(source: TableSource) -> str:
    return " and ".join(f"{images.name!r} ({images.text})" for images in source.image_columns())


def rows_changed(path: Path, num_images: int, expected: int) -> FormatError:
    """Return the error for a file that contains another number of images than when it was opened."""
    problem = f"{num_images:,} images were read, expected {expected:,}"
    return FormatError(f"{path}: {problem}; the file changed since it was opened, open it again")


def by_ranges(stored: Stored) -> Stored:
    """Return the storage of an object whose pixels are read by ranges, from that of a local file."""
    return replace(stored, in_place=False, reading="by byte ranges of an object on a server")


def refuse_damaged(source: TableSource, index: int) -> None:
    """Raise `FormatError`, because the stored bytes of an image do not fit its shape and dtype."""
    source.read_arrays([index])  # Raises a more precise error if the format's library finds the fault.
    problem = f"{source.path}: image {index}: stored bytes do not match its shape; the file is damaged, restore it"
    raise FormatError(problem, image=index)


def ids_of(info: pa.Table) -> list[Any]:
    """Return the stored id of each image, or None for an image without an id."""
    return info["id"].to_pylist() if "id" in info.column_names else [None] * len(info)


def named(ids: Iterable[Any]) -> list[str]:
    """Return the ids of images as text; an image without an id gets its row number."""
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
    """Return a batch whose nested columns begin at the start of their buffers.

    Lance, Vortex and DuckDB fail on a slice of a column of nested structs.
    """
    for place, column in enumerate(batch.columns):
        if column.offset and pa.types.is_nested(column.type):
            batch = batch.set_column(place, batch.field(place), pa.concat_arrays([column, column.slice(0, 0)]))
    return batch


def unnest(column: pa.ChunkedArray) -> pa.Table:
    """Return a struct column as a table of its fields; the fields of a null struct are null."""
    return pa.Table.from_batches(map(pa.RecordBatch.from_struct_array, column.chunks), pa.schema(list(column.type)))
