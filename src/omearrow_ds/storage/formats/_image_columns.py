"""Image columns of a table: their detection, and the ids, shapes and dtypes of their images."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.codec.leaves import Array, child, flags, is_text, numbers, whole_numbers
from omearrow_ds.errors import FormatError
from omearrow_ds.text import count

_PIXEL_FIELDS = ("chunks", "planes")
_UNREAD_FIELDS = (*_PIXEL_FIELDS, "masks")
_PIXELS_LIMIT = 2.0**59
PIXELS_META = (*(f"size_{axis}" for axis in "tczyx"), "type")  # fields that define shape and dtype
_HEADER_FIELDS = ("id", "pixels_meta", "chunk_grid")
# Leaves of these fields in `OWN_TYPES` with id, shape, dtype and chunk order.
HEADER_LEAVES = ("id", *(f"pixels_meta.{name}" for name in PIXELS_META), "chunk_grid.chunk_order")
OWN_TYPES = tuple(map(schema.image_struct, schema.ENCODINGS))


@dataclass(frozen=True)
class ImageColumn:
    """Name, struct field names and struct type of an image column of a table."""

    name: str
    fields: tuple[str, ...]
    type: pa.DataType
    header_fields: tuple[str, ...]  # Names of the fields with id, shape, dtype and chunk order.
    info_fields: tuple[str, ...]  # Names of the fields that describe an image: all fields without pixels.
    is_own: bool  # Whether the type is one of `OWN_TYPES`.

    @property
    def encoding(self) -> str:
        """Pixel encoding: ``"bytes"`` for chunks of bytes, else ``"list"``."""
        chunks = self.type.field("chunks").type if "chunks" in self.fields else pa.null()
        chunk = getattr(chunks, "value_type", pa.null())
        return "bytes" if pa.types.is_struct(chunk) and chunk.get_field_index("pixel_bytes") >= 0 else "list"

    @property
    def pixel_field(self) -> str:
        """Name of the field whose pixels are read first: ``chunks`` if present, else ``planes``."""
        return "chunks" if "chunks" in self.fields else "planes"


class Kinds(NamedTuple):
    """Shapes (n, 5) and dtypes of images, and which are null: these have sizes of 0 and the dtype of another image."""

    shapes: Array
    dtypes: list[np.dtype[Any]]
    null: Array


@dataclass(frozen=True)
class ImagesOf:
    """Numbers of images, nulls, shapes and dtypes in an image column."""

    name: str  # the column's
    # images, nulls: rows with an image, and rows without
    images: int = 0
    nulls: int = 0
    # shapes, dtypes: each (T, C, Z, Y, X) and each pixel dtype with the number of its images, the most frequent first
    shapes: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None  # why the contents cannot be read, else None

    @classmethod
    def of(cls, name: str, kinds: Kinds) -> ImagesOf:
        """Count the images and nulls in the column ``name``, and the images of each shape and dtype."""
        rows = np.flatnonzero(~kinds.null).tolist()
        shapes = Counter(map(tuple, kinds.shapes[rows].tolist()))
        dtypes = Counter(kinds.dtypes[row].name for row in rows)
        nulls = int(kinds.null.sum())
        return cls(name, len(rows), nulls, dict(shapes.most_common()), dict(dtypes.most_common()))

    def __add__(self, other: ImagesOf) -> ImagesOf:
        shapes = dict((Counter(self.shapes) + Counter(other.shapes)).most_common())
        dtypes = dict((Counter(self.dtypes) + Counter(other.dtypes)).most_common())
        counts = self.images + other.images, self.nulls + other.nulls
        return ImagesOf(self.name, *counts, shapes, dtypes, self.problem or other.problem)

    @property
    def text(self) -> str:
        """Description such as ``3 images, 1 x 1 x 1 x 72 x 84 and 2 other shapes, uint16, 0 nulls``."""
        if self.problem is not None:
            return self.problem
        shapes = [" x ".join(map(str, shape)) for shape in self.shapes][:1]
        shapes += [count(len(self.shapes) - 1, "other shape")] if len(self.shapes) > 1 else []
        kinds = [" and ".join(group) for group in (shapes, self.dtypes) if group]
        return ", ".join([count(self.images, "image"), *kinds, count(self.nulls, "null")])


def image_columns(table: pa.Schema) -> dict[str, ImageColumn]:
    """Return the columns of a table that are OME-Arrow structs, by name."""
    columns = {}
    for column in table:
        names = tuple(column.type.names) if pa.types.is_struct(column.type) else ()
        if "pixels_meta" in names and set(names) & set(_PIXEL_FIELDS):
            header_fields = tuple(filter(names.__contains__, _HEADER_FIELDS))
            info_fields = tuple(filterfalse(_UNREAD_FIELDS.__contains__, names))
            is_own = column.type in OWN_TYPES
            columns[column.name] = ImageColumn(column.name, names, column.type, header_fields, info_fields, is_own)
    return columns


@functools.lru_cache(16)  # Many third-party files share one type.
def has_twins(kind: pa.DataType) -> bool:
    """Whether an image struct, or a struct nested in it, has two fields with the same name."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names = {field.name for field in fields}
    return len(names) < len(fields) or any(has_twins(field.type) for field in fields)


def holds_pixels(path: str, column: ImageColumn) -> bool:
    """Whether the leaf column ``path`` stores the pixels that are read first; see `ImageColumn.pixel_field`."""
    prefix = f"{column.name}.{column.pixel_field}."
    rest = path.removeprefix(prefix)
    return path.startswith(prefix) and (rest.endswith("pixel_bytes") or ".pixels." in f".{rest}.")


def kinds_of(info: pa.Table, subject: str) -> Kinds:
    """Return shapes, dtypes and nulls of the images from ``info``, the image column's fields without pixels."""
    # An image is null if its row is null, or if all fields of its shape and dtype are: some formats store a null struct
    # as one of nulls. Raises `FormatError` if an image's sizes or dtype are missing or impossible.
    pixels_meta = info["pixels_meta"].combine_chunks()
    meta = f"{subject}: pixels_meta"
    if not pa.types.is_struct(pixels_meta.type):
        raise FormatError(f"{meta} has the type {pixels_meta.type}, expected an OME-Arrow struct; correct the column")
    field_indices = list(map(pixels_meta.type.get_field_index, PIXELS_META))
    if min(field_indices) < 0:
        child(pixels_meta, PIXELS_META[field_indices.index(-1)], meta)  # Raises an error.
    fields = list(map(pixels_meta.field, field_indices))
    null = flags(pixels_meta.is_null()) if pixels_meta.null_count else np.zeros(len(info), bool)
    if all(map(attrgetter("null_count"), fields)):
        null |= np.logical_and.reduce([flags(field.is_null()) for field in fields])
    *sizes, names = fields
    shapes = np.empty((len(info), len(sizes)), np.int64)
    for axis, size in enumerate(sizes):
        is_plain = pa.types.is_integer(size.type) and not size.null_count
        shapes[:, axis] = numbers(size) if is_plain else whole_numbers(size)
    if null.any():
        shapes[null] = 0
    is_small, is_large = (shapes <= 0).any(axis=1) & ~null, shapes.prod(axis=1, dtype=float) >= _PIXELS_LIMIT
    for is_bad, problem in ((is_small, "expected positive integers"), (is_large, "2**59 pixels or more")):
        if is_bad.any():
            shape = f"image {is_bad.argmax()} has the shape {shapes[is_bad.argmax()].tolist()}"
            raise FormatError(f"{subject}: {shape}, {problem}; correct pixels_meta")
    if not is_text(names.type):
        problem = f"pixels_meta.type is {names.type}, expected a string"
        raise FormatError(f"{subject}: {problem}; write dtypes such as 'uint16'")
    missing = flags(names.is_null()) & ~null if names.null_count else null[:0]
    if missing.any():
        problem = f"image {missing.argmax()}: pixels_meta.type is null, expected a dtype"
        raise FormatError(f"{subject}: {problem}; correct it")
    names = names if names.type == pa.string() else names.cast(pa.string())
    encoded = names.dictionary_encode(null_encoding="encode")
    codes = np.where(null, -1, numbers(encoded.indices))
    dtypes = {}
    for code, name in enumerate(encoded.dictionary.view(pa.binary()).to_pylist()):
        rows = codes == code
        if rows.any():
            dtypes[code] = schema.pixel_dtype(name.decode(errors="replace"), f"{subject}: image {int(rows.argmax())}")
    dtypes[-1] = next(iter(dtypes.values()), schema.DTYPES[0])
    return Kinds(shapes, list(map(dtypes.__getitem__, codes.tolist())), null)
