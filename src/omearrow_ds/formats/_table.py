"""What the sources of the six table formats share: the header, and images decoded from fetched chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds import schema
from omearrow_ds.codec import Expected, ImageBlock
from omearrow_ds.errors import ColumnError, DecodeError, FormatError, OMEArrowDSError
from omearrow_ds.formats._base import MALFORMED, Array, BaseSource, damaged
from omearrow_ds.leaves import child, is_text, optional, whole_numbers

_PIXEL_FIELDS = ("chunks", "planes")
_UNREAD_FIELDS = (*_PIXEL_FIELDS, "masks")
_PIXELS_LIMIT = 2.0**59
_SIZES = tuple(f"size_{axis}" for axis in "tczyx")
_OWN_TYPES = tuple(map(schema.image_struct, schema.ENCODINGS))


@dataclass(frozen=True)
class ImageColumn:
    """Where the images stand in a table: the struct column's name, the names of its fields, and its encoding."""

    name: str
    fields: tuple[str, ...]
    encoding: str

    @property
    def info_fields(self) -> list[str]:
        """Fields that describe an image, without the pixels."""
        return [name for name in self.fields if name not in _UNREAD_FIELDS]

    @property
    def pixel_field(self) -> str:
        """The field that pixels are read from first: chunks, where the struct has them."""
        return next(name for name in _PIXEL_FIELDS if name in self.fields)


def image_columns(table: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Return the OME-Arrow columns of a table by name, each with the names of its fields."""
    structs = {field.name: field.type for field in table if pa.types.is_struct(field.type)}
    fields = {name: tuple(field.name for field in kind) for name, kind in structs.items()}
    return {name: each for name, each in fields.items() if "pixels_meta" in each and set(each) & set(_PIXEL_FIELDS)}


def find_image_column(table: pa.Schema, path: Path) -> ImageColumn:
    """Return the OME-Arrow column of a table.

    Raises
    ------
    ColumnError
        If no column is an OME-Arrow struct, or several are and none has the name that this package writes.
    """
    fields = image_columns(table)
    images = list(fields)
    if len(images) > 1 and schema.COLUMN in images:
        images = [schema.COLUMN]
    if len(images) == 1:
        image = table.field(images[0]).type
        if image not in _OWN_TYPES and _has_twins(image):
            raise FormatError(f"{path}: column {images[0]!r} has a struct with two fields of one name; rename one")
        return ImageColumn(images[0], fields[images[0]], _encoding(image))
    if images:
        raise ColumnError(f"{path}: the columns {images} all hold images; rename one to {schema.COLUMN!r} to choose it")
    types = ", ".join(f"{field.name}: {str(field.type)[:40]}" for field in table)
    raise ColumnError(
        f"{path}: no column is an OME-Arrow struct (with pixels_meta and chunks or planes); it has {types}"
    )


def _encoding(image: pa.DataType) -> str:
    """Return how the struct holds pixels: those of chunks as ``"bytes"``, all others as ``"list"``."""
    chunks = image.field("chunks").type if image.get_field_index("chunks") >= 0 else pa.null()
    chunk = getattr(chunks, "value_type", pa.null())
    return "bytes" if pa.types.is_struct(chunk) and chunk.get_field_index("pixel_bytes") >= 0 else "list"


def holds_pixels(path: str, column: ImageColumn) -> bool:
    """Whether a leaf's path within a table is that of the pixels that are read first."""
    prefix = f"{column.name}.{column.pixel_field}."
    rest = path.removeprefix(prefix)
    return path.startswith(prefix) and (rest.endswith("pixel_bytes") or ".pixels." in f".{rest}.")


class TableSource(BaseSource):
    """Images in a struct column of a table; the formats add how its parts are fetched.

    A subclass's ``__init__`` calls `_set_header` with what it read beside the pixels.
    """

    _column: ImageColumn
    _info: pa.Table
    _all_placed = False  # True: every image is known to be plainly stored, and the pixel leaf alone is fetched

    @abstractmethod
    def _fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        """Return ``chunks`` or ``planes`` of sorted, distinct rows, as one or more arrays in order."""

    @abstractmethod
    def _fetch_all(self, field: str) -> Iterable[pa.Array]:
        """Return ``chunks`` or ``planes`` of all rows, in arrays of bounded size, in order."""

    def _set_header(self, info: pa.Table, columns: pa.Table) -> None:
        """Take ids, shapes and dtypes from ``info``, the image column's fields without pixels as a table.

        Raises
        ------
        FormatError
            If an image is null, or its sizes or dtype are missing or impossible.
        """
        with self._interpreting():
            for table in (info, columns):
                table.validate(full=True)
        pixels_meta = info["pixels_meta"].combine_chunks()
        null = pixels_meta.is_null().to_numpy(zero_copy_only=False)
        if null.any():
            msg = f"{self.path}: image {int(null.argmax())} is null or has no pixels_meta; leave it out"
            raise FormatError(msg)
        where = f"{self.path}: pixels_meta"
        if not pa.types.is_struct(pixels_meta.type):
            raise FormatError(f"{where} is of type {pixels_meta.type}; an OME-Arrow struct is needed")
        self.shapes = np.stack([whole_numbers(child(pixels_meta, name, where)) for name in _SIZES], axis=1)
        if (self.shapes <= 0).any():
            bad = int((self.shapes <= 0).any(axis=1).argmax())
            shape = self.shapes[bad].tolist()
            raise FormatError(f"{self.path}: image {bad} has the shape {shape}; sizes must be positive whole numbers")
        if (self.shapes.astype(float).prod(axis=1) >= _PIXELS_LIMIT).any():
            bad = int(self.shapes.astype(float).prod(axis=1).argmax())
            raise FormatError(f"{self.path}: image {bad} has the impossible shape {self.shapes[bad].tolist()}")
        self._given_dtypes = _dtypes(child(pixels_meta, "type", where), self.path)
        native = {dtype: dtype.newbyteorder("=") for dtype in set(self._given_dtypes)}
        self.dtypes = [native[dtype] for dtype in self._given_dtypes]
        with self._reading():
            ids = info["id"].to_pylist() if "id" in info.column_names else [None] * len(info)
        self.image_ids = [str(row if image_id is None else image_id) for row, image_id in enumerate(ids)]
        self._set_columns(columns)
        self._info = info
        self._odd_order = self._odd_chunk_orders()

    def _odd_chunk_orders(self) -> Array:
        """Return for each image whether its chunks are flattened in another order than ZYX, the only one supported."""
        none = np.zeros(len(self), bool)
        if "chunk_grid" not in self._info.column_names:
            return none
        grid = self._info["chunk_grid"].combine_chunks()
        given: Array = grid.is_valid().to_numpy(zero_copy_only=False)
        if not pa.types.is_struct(grid.type):
            return given
        orders = optional(grid, "chunk_order", f"{self.path}: chunk_grid")
        if orders is None:
            return none
        given &= orders.is_valid().to_numpy(zero_copy_only=False)
        if is_text(orders.type):
            texts = pc.ascii_upper(orders.cast(pa.string()))  # of text that is none of these, utf8_upper is an error
            given &= ~pc.is_in(texts, value_set=pa.array(["ZYX", ""])).to_numpy(zero_copy_only=False)
        return given

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, every field of ome-arrow's present."""
        row = self.index(index)
        try:
            record = self._info.slice(row, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is none, a time that no datetime can be
            raise FormatError(f"{self.path}: image {row}: its metadata cannot be read: {error}") from error
        with self._interpreting():
            return schema.metadata_of(record)

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only."""
        images: list[Array] = []
        for block in self._blocks(self._fetch(self._column.pixel_field, indices) if len(indices) else [], indices):
            try:
                images += [block[row] for row in range(len(block))]
            except OMEArrowDSError:
                raise
            except MALFORMED as error:
                raise damaged(self.path, self.format.label, error) from error
        return images

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""
        start = 0
        for block in self._blocks(self._fetch_all(self._column.pixel_field), np.arange(len(self))):
            try:
                images = block.images()
            except OMEArrowDSError:
                raise
            except MALFORMED as error:
                raise damaged(self.path, self.format.label, error) from error
            yield start, images
            start += len(block)

    def _blocks(self, arrays: Iterable[pa.Array], indices: Array) -> Iterator[ImageBlock]:
        done = 0
        for chunks in arrays:
            yield self._block(chunks, indices[done : done + len(chunks)])
            done += len(chunks)
        if done != len(indices):
            raise FormatError(f"{self.path}: {done} of {len(indices)} images came back; it changed since it was opened")

    def _expected(self, indices: Array) -> Expected:
        dtypes = [self._given_dtypes[index] for index in indices.tolist()]
        return Expected(str(self.path), indices, self.shapes[indices], dtypes, self._odd_order[indices])

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
        except MALFORMED as error:  # what a library made of a damaged file may contradict itself
            if isinstance(error, OMEArrowDSError) and str(self.path) in str(error):
                raise
            raise DecodeError(f"{self.path}: its pixels cannot be told from what is around them: {error}") from error


def _has_twins(kind: pa.DataType) -> bool:
    """Whether a struct anywhere in a type has two fields of one name."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names = {field.name for field in fields}
    return len(names) < len(fields) or any(_has_twins(field.type) for field in fields)


def _dtypes(names: pa.Array, path: Path) -> list[np.dtype[Any]]:
    if not is_text(names.type):
        raise FormatError(f"{path}: pixels_meta.type is of type {names.type}; a string such as 'uint16' is needed")
    if names.null_count:
        row = names.is_null().to_numpy(zero_copy_only=False).argmax()
        raise FormatError(f"{path}: image {row} has no pixel dtype in pixels_meta.type")
    encoded = names.cast(pa.string()).dictionary_encode()
    indices = encoded.indices.to_numpy()
    dtypes = []
    for code, name in enumerate(encoded.dictionary.cast(pa.binary()).to_pylist()):
        where = f"{path}: image {int((indices == code).argmax())}"
        dtypes.append(schema.pixel_dtype(name.decode(errors="replace"), where))
    return [dtypes[code] for code in indices]


def as_arrays(column: pa.ChunkedArray | pa.Array, field: str | None = None) -> list[pa.Array]:
    """Return the arrays of a column that hold rows, or those of a field of a struct column."""
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [array.field(field) if field else array for array in arrays if len(array)]


def as_reader(tables: Iterable[pa.Table], table_schema: pa.Schema) -> pa.RecordBatchReader:
    """Return tables, made as they are asked for, as the stream that a library writes from."""
    batches = (batch for table in tables for batch in table.to_batches())
    return pa.RecordBatchReader.from_batches(table_schema, batches)


def unnest(column: pa.ChunkedArray) -> pa.Table:
    """Return a struct column as a table of its fields; the fields of a null struct are null."""
    return pa.Table.from_batches(
        [pa.RecordBatch.from_struct_array(array) for array in column.chunks], pa.schema(list(column.type))
    )
