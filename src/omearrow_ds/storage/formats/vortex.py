"""Vortex file: pixels of the requested rows are read from the memory-mapped file, still encoded.

zstd suits archives that are preloaded: reading one image decodes its block of 8,192 rows. Vortex creates these blocks
for any input, holds them while writing, and cannot store bytes unencoded.
Measurements are in ``docs/explanation/layouts.md``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import vortex
import vortex.io
from vortex import expr

from omearrow_ds.codec.decode import placed_chunks
from omearrow_ds.errors import DecodeError, FormatError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import MappedFile
from omearrow_ds.storage.formats._base import Array, Block, group_by_part, split_groups
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn
from omearrow_ds.storage.formats._stored import Stored, groups, join_names
from omearrow_ds.storage.formats._stream import Stream
from omearrow_ds.storage.formats._table import (
    CopiedFile,
    StoredTable,
    TableImages,
    TableOptions,
    as_arrays,
    as_reader,
    unnest,
)

_BLOCK_BYTES = 4 * 2**20
_MANY = 64  # From this number of images, Arrow arrays cost less than scalars.
UNSUPPORTED_TYPES = (pa.types.is_duration, pa.types.is_interval)
_DECODED_WHOLE = ("vortex.zstd", "vortex.pco")
_VIEWED = pa.list_(pa.struct([("pixel_bytes", pa.binary_view())]))
_OFFSET = pa.list_(pa.struct([("pixel_bytes", pa.large_binary())]))
_INLINE_BYTES = 12
ERRORS = (OSError, ValueError, RuntimeError)


def write_collection(tables: Stream[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Vortex file with the encodings that Vortex chooses, including zstd if ``compression`` is zstd.

    Vortex is called in a separate thread, because otherwise the main thread would handle Ctrl-C only at the end.
    """
    options = vortex.io.VortexWriteOptions
    chosen = options.compact() if compression == "zstd" else options.default()
    with ThreadPoolExecutor(1, "vortex-write") as thread:
        writing = thread.submit(chosen.write, as_reader(tables, table_schema), str(path))
        try:
            writing.result()
        except BaseException:
            tables.stop()
            raise


class Rows:
    """All rows of a Vortex expression, not yet decoded, in the parts in which the mapped file stores them."""

    def __init__(self, array: vortex.Array) -> None:
        self.parts = array.chunks() if isinstance(array, vortex.ChunkedArray) else [array]
        self.starts = list(accumulate(map(len, self.parts), initial=0))

    def take(self, indices: Sequence[int]) -> list[pa.Array]:
        """Return rows by number; ``take`` is used because Vortex 0.91 decodes the whole part of a slice."""
        arrays = []
        for number, rows in group_by_part(self.starts, indices):
            positions = pa.array([row - self.starts[number] for row in rows], pa.uint64())
            arrays += as_arrays(self.parts[number].take(vortex.Array.from_arrow(positions)).to_arrow_array())
        return list(map(without_views, arrays))

    def scalar(self, index: int) -> vortex.Scalar:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.parts[number].scalar_at(index - self.starts[number])

    @cached_property
    def decoded_whole(self) -> list[bool]:
        """For each part, whether reading one row decodes the whole part."""
        trees = (part.display_tree() for part in self.parts)
        return [any(encoding in tree for encoding in _DECODED_WHOLE) for tree in trees]


@dataclass
class OpenVortexFile:
    """Vortex file that a process has mapped, with cached rows and images."""

    file: vortex.VortexFile
    mapping: MappedFile
    images: list[Array | list[Array]] | None = None
    rows: dict[tuple[str, int], Rows] = field(default_factory=dict)


def in_place(part: vortex.Array, pixel_bytes: int) -> pa.Array | None:
    """Return the pixel lists of a part if they are zero-copy views of the mapped file, else None."""
    # Pixels that are decoded at each access have another address each time.
    if not len(part) or part.nbytes < pixel_bytes:
        return None
    first, again = (without_views(part.slice(0, 1).to_arrow_array()) for _ in range(2))
    if first.buffers()[-1].address != again.buffers()[-1].address:
        return None
    lists = without_views(part.to_arrow_array())
    return lists if lists.buffers()[-1].address == first.buffers()[-1].address else None


def without_views(lists: pa.Array) -> pa.Array:
    """Convert pixel lists from Arrow's binary view type to binary with offsets, if their bytes are contiguous."""
    # A cast would copy the pixels.
    if lists.type != _VIEWED:
        return lists
    pixels = lists.values.field(0)
    if not len(pixels) or lists.null_count + lists.values.null_count + pixels.null_count:
        return lists
    _, views, *data = pixels.buffers()
    view_fields = np.frombuffer(views, np.uint32).reshape(-1, 4)[pixels.offset : pixels.offset + len(pixels)]
    lengths, starts = view_fields[:, 0], view_fields[:, 3]
    bounds = np.empty(len(pixels) + 1, np.int64)
    bounds[:-1] = starts
    bounds[-1] = int(starts[-1]) + int(lengths[-1])
    if len(data) != 1 or (lengths <= _INLINE_BYTES).any() or (bounds[1:] - bounds[:-1] != lengths).any():
        return lists
    flat = pa.Array.from_buffers(pa.large_binary(), len(pixels), [None, pa.py_buffer(bounds), data[0]])
    chunks = pa.Array.from_buffers(_OFFSET.value_type, len(pixels), [None], children=[flat])
    return pa.Array.from_buffers(_OFFSET, len(lists), [None, lists.buffers()[1]], 0, lists.offset, [chunks])


def _expression(column: ImageColumn, field: str, leaves: Sequence[pa.Field]) -> Any:
    """Return the expression for a field or, of chunks, for only these leaves."""
    # No expression reaches below a list, but a cast to fewer fields leaves the others undecoded.
    expression = expr.column(column.name)[field]
    return expr.cast(expression, vortex.DType.from_arrow(pa.list_(pa.struct(leaves)))) if leaves else expression


class VortexTable(StoredTable):
    """Vortex file; an object is copied to the cache, because Vortex 0.91 would fetch it once per process."""

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        super().__init__(guard, options)
        self._file = ProcessLocal(self._open)
        self.schema = self._file.get().file.to_arrow().schema

    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        of_images = expr.select(fields, expr.column(column.name))
        packed = expr.pack({"fields": of_images, "columns": expr.select(list(names), expr.root())})
        table = unnest(self._read(packed))  # By one scan.
        return unnest(table["fields"]), unnest(table["columns"])

    def locate(self) -> None:
        self._leaf = self._find_leaf()
        self.is_placed = self._leaf is not None
        self.close()

    def read_columns(self, names: list[str]) -> pa.Table:
        return unnest(self._read(expr.select(names, expr.root()))).select(names)

    def _open(self) -> OpenVortexFile:
        with self.guard:
            mapping = MappedFile(self.path) if self.objects is None else CopiedFile(self.guard, self.objects)
            return OpenVortexFile(vortex.open(mapping.name, memory_map=True), mapping)

    def layout(self) -> Stored:
        rows = self._rows(self.header.column.pixel_field)
        decoded = [self.header.image_bytes[start:stop].sum() for start, stop in pairwise(rows.starts)]
        packed = (part.nbytes < size_bytes for part, size_bytes in zip(rows.parts, decoded, strict=True))
        compression = join_names("compressed" if is_packed else "none" for is_packed in packed)
        plain = bool(self._mapped_images())
        if plain:
            reading = "in place: from the mapped file"
        elif any(rows.decoded_whole):
            reading = "by Vortex, which decodes a part of the file per image"
        else:
            reading = "by Vortex, each image separately"
        copied = "" if self.objects is None else "from a fetched copy of the object: "
        chunking = groups(rows.starts, "part")
        return Stored(self.header.column.encoding, compression, chunking, plain, f"{copied}{reading}")

    def close(self) -> None:
        self._file.close()

    def _read(self, expression: Any) -> pa.ChunkedArray:
        mapped = self._file.get()
        mapped.mapping.refuse_changed()
        with self.guard.reading():
            array = mapped.file.scan(expression).read_all().to_arrow_array()
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])

    def _find_leaf(self) -> pa.Field | None:
        """Return the pixel leaf of the chunks if it suffices to read every image."""
        leaf, others = self.header.leaf_fields()
        if leaf is None:
            return None
        try:
            stored = pa.concat_arrays(self._read(_expression(self.header.column, "chunks", others)).chunks)
        except FormatError:  # columns that Vortex cannot narrow are read whole
            return None
        return leaf if placed_chunks(stored, self.header.expected(np.arange(len(stored)))).all() else None

    def _rows(self, field: str, *, is_whole: bool = False) -> Rows:
        """Return all rows of a field, cached; only the pixels of plainly stored chunks, unless ``is_whole``."""
        leaves = () if is_whole or self._leaf is None or field != "chunks" else (self._leaf,)
        mapped, key = self._file.get(), (field, len(leaves))
        if key not in mapped.rows:
            expression = _expression(self.header.column, field, leaves)
            with self.guard.reading():
                mapped.rows[key] = Rows(mapped.file.scan(expression).read_all())
        return mapped.rows[key]

    def _mapped_images(self) -> list[Array | list[Array]]:
        """Return the images as views of the mapped file, part by part, if none of them is encoded, else []."""
        mapped = self._file.get()
        mapped.mapping.refuse_changed()
        if mapped.images is None:
            images = list(self._find_mapped_images())
            mapped.images = images if sum(map(len, images)) == len(self.header.image_ids) else []
        return mapped.images

    def _find_mapped_images(self) -> Iterator[Array | list[Array]]:
        leaf, dtypes = self._leaf, set(self.header.stored_dtypes)
        if leaf is None:
            return
        stored = {np.dtype(leaf.type.value_type.to_pandas_dtype())} if pa.types.is_list(leaf.type) else dtypes
        if stored != dtypes or not self.header.is_native:  # Pixels are not stored as they are in memory.
            return
        pixels = self._rows("chunks")
        for part, (start, stop) in zip(pixels.parts, pairwise(pixels.starts), strict=True):
            indices = np.arange(start, stop)
            with self.guard.reading():
                lists = in_place(part, int(self.header.image_bytes[indices].sum()))
            if lists is None:
                return
            try:
                images = self.header.block(self, lists, indices).images()
            except DecodeError:  # the other images can still be read
                return
            yield images

    def _images_of_scalars(self, indices: Sequence[int]) -> list[Array] | None:
        """Return images of plainly stored bytes, or None if one is stored in another way."""
        # A scalar avoids the Arrow arrays, which cost more than dozens of small images; bytes are one object per chunk.
        if self._leaf is None or self._leaf.name != "pixel_bytes" or not self.header.is_native:
            return None
        rows = self._rows("chunks", is_whole=True)
        images = []
        with self.guard.reading():
            for index in indices:
                chunks: Any = rows.scalar(index).as_py()
                pieces = [chunk["pixel_bytes"] for chunk in chunks or ()]
                if not pieces:  # The image is null.
                    return None
                share = int(self.header.image_bytes[index]) / len(pieces)
                if not all(isinstance(piece, bytes) and len(piece) == share for piece in pieces):
                    return None
                shape, dtype = self.header.kinds[index]
                pixels = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                images.append(np.frombuffer(pixels, dtype).reshape(shape))
        return images

    def read_images(self, rows: Sequence[int]) -> list[Array]:
        mapped = self._mapped_images()
        if not mapped and len(rows) == 1:
            image = self._images_of_scalars(rows)  # Any encoding: only this image is decoded.
            return super().read_images(rows) if image is None else image
        pixels = self._rows(self.header.column.pixel_field)
        parts = group_by_part(pixels.starts, rows)
        if mapped:
            return [mapped[number][row - pixels.starts[number]] for number, in_part in parts for row in in_part]
        images: list[Array] = []
        for number, in_part in parts:
            is_few = len(in_part) < _MANY and not pixels.decoded_whole[number]
            few = self._images_of_scalars(in_part) if is_few else None
            images += super().read_images(in_part) if few is None else few
        return images

    def read_groups(self) -> Iterable[slice]:
        rows = self._rows(self.header.column.pixel_field)
        return split_groups(rows.starts, rows.decoded_whole, self.header.image_bytes, _BLOCK_BYTES)

    def stream(self) -> Iterator[Block]:
        # Rows are read by `take`, because scalars would need a second scan, which holds more memory.
        mapped = self._mapped_images()
        if mapped:
            yield from zip(self._rows("chunks").starts, mapped, strict=False)
            return
        for group in self.read_groups():
            yield group.start, super().read_images(range(group.start, group.stop))

    def mapped_stacks(self) -> Stacks | None:
        images, mapping = self._mapped_images(), self._file.get().mapping
        arrays = [part for part in images if isinstance(part, np.ndarray)]
        if not arrays or len(arrays) < len(images):
            return None
        return Stacks(arrays, mapping.refuse_changed, is_mapped=True, file=mapping.file)

    def fetch(self, field: str, indices: Array) -> list[pa.Array]:
        rows = self._rows(field)
        with self.guard.reading():
            return rows.take(indices.tolist())


open_collection = partial(TableImages, "vortex", VortexTable, ERRORS)
