"""Decoder of OME-Arrow columns: images as slices of Arrow buffers.

Offsets give the position of the pixels of an image, so that no pixel becomes a Python object. The reference result is
that of ``ome_arrow.to_numpy``. A row whose chunks are contiguous in TCZYX order is *dense*: its pixels are one slice of
the flat buffer, and are not copied. All other rows are assembled piece by piece, with the checks of
``ome_arrow.to_numpy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.codec.leaves import (
    NO_COMPRESSION,
    Array,
    ByteLeaf,
    ListLeaf,
    among,
    cast,
    child,
    is_text,
    list_bounds,
    whole_numbers,
)
from omearrow_ds.errors import DecodeError, MemoryLimitError
from omearrow_ds.resources import available_bytes, image_bytes, pixel_count

_ASKED_BYTES = 2**28  # A query of the free memory takes longer than a small image.


def new_image(shape: Sequence[int], dtype: np.dtype[Any], subject: object, *, zeros: bool = False) -> Array:
    size_bytes = math.prod(shape) * dtype.itemsize
    left_bytes = available_bytes() if size_bytes > _ASKED_BYTES else size_bytes
    if size_bytes > left_bytes:
        problem = f"an image of shape {tuple(shape)} {dtype} needs {size_bytes:,} bytes but {left_bytes:,} are free"
        remedy = "restore the file if the shape is wrong, or use a machine with more memory"
        raise MemoryLimitError(f"{subject}: {problem}; {remedy}")
    return np.zeros(shape, dtype) if zeros else np.empty(shape, dtype)


@dataclass(frozen=True)
class Expected:
    """Images to decode."""

    path: str
    indices: Array  # Row of each image in the table.
    shapes: Array  # (n, 5).
    dtypes: Sequence[np.dtype[Any]]  # In the byte order of the table; they apply to chunks without a dtype.
    odd_order: Array | None = None  # Whether the chunks of an image are flattened in another order than ZYX.

    def where(self, row: int) -> str:
        return f"{self.path}: image {int(self.indices[row])}"


class ImageBlock:
    """Images of one Arrow array, each of which is decoded when its row is accessed.

    ``planes`` returns the planes of rows without chunks. With ``placed``, the structs need only the pixel leaf.
    """

    def __init__(
        self, chunks: pa.Array, expected: Expected, planes: Callable[[], pa.Array], placed: Array | None = None
    ) -> None:
        self._expected = expected
        self._planes = planes
        self._pieces = _Pieces(chunks, "chunks", expected)
        self._odd_order = np.zeros(len(expected.dtypes), bool) if expected.odd_order is None else expected.odd_order
        self._pixels_alone = placed is not None
        placed = self._pieces.placed() if placed is None else placed
        self._counts = expected.shapes.prod(axis=1)
        self._dense: Array = placed & ~self._odd_order & self._pieces.filled(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, row: int) -> Array:
        """Return the image of ``row`` (T, C, Z, Y, X); a dense one is a read-only view of the Arrow buffer."""
        dtype, shape = self._expected.dtypes[row], self._expected.shapes[row]
        pieces = self._pieces
        first = pieces.starts[row]
        # A dense image is one slice. Other images are assembled from chunks, or from planes without chunks. If
        # `placed_chunks` found the chunks complete, an image that is not dense has missing pixels.
        if self._dense[row]:
            return cast(pieces.leaf.run(first, int(self._counts[row]), dtype), dtype).reshape(shape)
        if not self._counts[row]:  # A null image.
            return np.empty(shape, dtype.newbyteorder("="))
        if first == pieces.stops[row]:
            pieces = self._plane_pieces
            if pieces.starts[row] == pieces.stops[row]:
                raise DecodeError(f"{self._expected.where(row)}: neither chunks nor planes are stored; remove the row")
        elif self._odd_order[row]:
            raise DecodeError(f"{self._expected.where(row)}: expected chunk_order 'ZYX'; write the image again")
        elif self._pixels_alone:
            problem = f"pixels are null, or fewer than the {self._counts[row]:,} pixels of the image shape"
            raise DecodeError(f"{self._expected.where(row)}: {problem}; the file is damaged, restore it")
        return pieces.assemble(row, shape, dtype, self._expected.where(row))

    @cached_property
    def _plane_pieces(self) -> _Pieces:
        return _Pieces(self._planes(), "planes", self._expected)

    def images(self) -> Array | list[Array]:
        """Return all images, as one view (n, T, C, Z, Y, X) if `stack` can create it, otherwise as a list."""
        stack = self.stack()
        return [self[row] for row in range(len(self))] if stack is None else stack

    def stack(self) -> Array | None:
        """Return all images as one view (n, T, C, Z, Y, X), or None if they are scattered or differ."""
        shapes, dtypes = self._expected.shapes, self._expected.dtypes
        if not len(self) or not self._dense.all() or (shapes != shapes[0]).any() or len(set(dtypes)) > 1:
            return None
        pieces = self._pieces
        if (pieces.stops[:-1] != pieces.starts[1:]).any():
            return None
        run = pieces.leaf.run(pieces.starts[0], int(self._counts.sum()), dtypes[0])
        return cast(run, dtypes[0]).reshape(len(self), *shapes[0])


def placed_chunks(chunks: pa.Array, expected: Expected, codec: str | None = None) -> Array:
    """Return one bool per row: whether its chunks are uncompressed, equal in size, and form the image in TCZYX order.

    With a ``codec``, they must be compressed by it. ``chunks`` needs only the small fields of the chunk structs.
    """
    return _Pieces(chunks, "chunks", expected).placed(codec)


def codec_of_chunks(chunks: pa.Array) -> str | None:
    """Return the codec that compresses all chunks, or None if chunks are uncompressed or use several codecs."""
    structs = chunks.flatten()
    names = structs.field("compression") if structs.type.get_field_index("compression") >= 0 else pa.nulls(0)
    codecs = pc.unique(names.cast(pa.string())).to_pylist() if is_text(names.type) else []
    return codecs[0] if len(codecs) == 1 and codecs[0] not in NO_COMPRESSION else None


class _Pieces:
    """Flattened chunks or planes of all rows: their positions in the images, and their pixels in flat buffers.

    Row ``i`` owns the pieces ``starts[i]`` to ``stops[i]``. Planes cover Y and X completely.
    """

    def __init__(self, lists: pa.Array, name: str, expected: Expected) -> None:
        self._expected, self._name, self._where = expected, name, f"{expected.path}: {name}"
        self.starts, self.stops, structs = list_bounds(lists, self._where)
        if pa.types.is_null(structs.type):  # Inferred type of lists that are all empty.
            structs = pa.nulls(len(structs), pa.struct([]))
        if not pa.types.is_struct(structs.type):
            raise DecodeError(f"{self._where} have the type {lists.type}, expected lists of structs; correct them")
        self._structs = structs
        self._names = {field.name for field in structs.type}
        if len(self._names) < structs.type.num_fields:
            raise DecodeError(f"{self._where} have several fields of the same name; rename all but one")

    @cached_property
    def _bytes(self) -> ByteLeaf | None:
        if "pixel_bytes" not in self._names or self._name == "planes":  # Planes have only pixels.
            return None
        shapes, dtypes = self._expected.shapes, self._expected.dtypes
        return ByteLeaf(self._structs, self._where, lambda: float(image_bytes(shapes, dtypes).sum(dtype=float)))

    @cached_property
    def _values(self) -> ListLeaf | None:
        return ListLeaf(self._structs, self._where) if "pixels" in self._names else None

    @property
    def leaf(self) -> ByteLeaf | ListLeaf:
        leaf = self._bytes or self._values
        if leaf is None:
            names = ", ".join(sorted(self._names)) or "no field"
            raise DecodeError(f"{self._where} have the fields {names}, expected pixel_bytes or pixels; correct them")
        return leaf

    @cached_property
    def _positions(self) -> dict[str, Array]:
        """Positions and shapes of all pieces by field; invalid values become negative, which all checks reject."""
        names = schema.CHUNK_PLACE if self._name == "chunks" else "tcz"
        return {name: whole_numbers(child(self._structs, name, self._where)) for name in names}

    def placed(self, codec: str | None = None) -> Array:
        rows, pieces = self._owners
        if not len(rows) or not set(schema.CHUNK_PLACE) <= self._names or self._structs.null_count:
            return np.zeros(len(self.starts), bool)
        number, shapes = self.stops - self.starts, self._expected.shapes
        planes = shapes[:, :3].prod(axis=1)
        _, size_c, size_z, size_y, size_x = np.maximum(shapes[rows], 1).T
        size = planes[rows] // number[rows]  # Planes per chunk.
        first = (pieces - self.starts[rows]) * size
        t_and_c, z = np.divmod(first, size_z)
        good = (size > 0) & (z + size <= size_z) & (size * number[rows] == planes[rows])
        expected = (*np.divmod(t_and_c, size_c), z, 0, 0, size, size_y, size_x)
        for stored, values in zip(self._positions.values(), expected, strict=True):
            good &= stored[pieces] == values
        good &= self._plain(pieces, rows, NO_COMPRESSION if codec is None else (codec,))
        placed: Array = (number > 0) & (np.bincount(rows, ~good, len(number)) == 0)
        placed |= planes == 0  # A null image has no pieces.
        return placed

    def _plain(self, pieces: Array, rows: Array, compression: Sequence[str | None]) -> Array:
        """Return one bool per piece: whether it has a listed compression, and the dtype that its row has."""
        good = np.ones(len(pieces), bool)
        if "compression" in self._names:
            compressions = self._structs.field("compression")
            if compressions.null_count < len(compressions):
                good &= among(compressions, compression)[pieces]
        if "dtype" in self._names:
            dtypes = self._expected.dtypes
            kinds = set(dtypes)
            for dtype in kinds:
                of_dtype = np.array([other == dtype for other in dtypes])[rows] if len(kinds) > 1 else slice(None)
                name = dtype.name if dtype.isnative else dtype.str
                good[of_dtype] &= among(self._structs.field("dtype"), (name, None))[pieces[of_dtype]]
        return good

    def filled(self, counts: Array) -> Array:
        """Return one bool per row: whether its pieces are equal in size and have ``counts`` pixels and no nulls."""
        rows, pieces = self._owners
        number = self.stops - self.starts
        if not len(rows):
            return number > 0
        share = counts // np.maximum(number, 1)
        itemsizes = np.fromiter(map(attrgetter("itemsize"), self._expected.dtypes), np.int64)
        wrong = ~self.leaf.holds(pieces, share[rows], itemsizes[rows])
        filled: Array = (number > 0) & (share * number == counts) & (np.bincount(rows, wrong, len(number)) == 0)
        return filled

    @cached_property
    def _owners(self) -> tuple[Array, Array]:
        """Return the row and index of each piece, in row order."""
        counts = self.stops - self.starts
        rows = np.repeat(np.arange(len(counts)), counts)
        return rows, np.arange(len(rows)) + (self.starts - np.cumsum(counts) + counts)[rows]

    def assemble(self, row: int, shape: Array, dtype: np.dtype[Any], subject: str) -> Array:
        """Assemble the image of ``row`` from its pieces in stored order; pixels that no piece covers are 0."""
        image = new_image(shape.tolist(), dtype.newbyteorder("="), subject, zeros=True)
        for number, piece in enumerate(range(self.starts[row], self.stops[row])):
            name = f"{subject}: {self._name.removesuffix('s')} {number}"
            if not self._structs[piece].is_valid:
                raise DecodeError(f"{name} is null; the file is damaged, restore it")
            target = self._target(piece, shape, name)
            count = pixel_count(image[target].shape)
            image[target] = cast(self._payload(piece, count, dtype, name), dtype).reshape(image[target].shape)
        return image

    def _target(self, piece: int, shape: Array, subject: str) -> tuple[int | slice, ...]:
        """Return the index of a piece in its image, with the checks of ``ome_arrow.to_numpy``."""
        sizes = shape.tolist()
        stored = {name: int(values[piece]) for name, values in self._positions.items()}
        starts = [stored.get(axis, 0) for axis in "tczyx"]
        whole = (1, 1, 1, *sizes[3:])  # Of planes, which cover Y and X.
        lengths = [stored.get(f"shape_{axis}", length) for axis, length in zip("tczyx", whole, strict=True)]
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        if min(starts) < 0 or min(lengths) < 1 or any(stop > size for stop, size in zip(stops, sizes, strict=True)):
            position = " ".join(f"{axis}={start}" for axis, start in zip("tczyx", starts, strict=True))
            negative = " (-1 can also mean null or not an integer)" if -1 in (*starts, *lengths) else ""
            raise DecodeError(
                f"{subject}: {position} of shape {tuple(lengths[2:])}{negative} is outside the image of shape "
                f"{tuple(sizes)}; restore the file"
            )
        return starts[0], starts[1], *map(slice, starts[2:], stops[2:])

    def _payload(self, piece: int, count: int, dtype: np.dtype[Any], subject: str) -> Array:
        for leaf in (self._bytes, self._values):
            if leaf is not None and leaf.has(piece):
                payload = leaf.piece(piece, count, dtype, subject)
                if len(payload) != count:
                    problem = f"{subject} has {len(payload):,} pixels, expected {count:,}"
                    raise DecodeError(f"{problem}; the file is damaged, restore it")
                return payload
        raise DecodeError(f"{subject}: pixels are null; the file is damaged, restore it")
