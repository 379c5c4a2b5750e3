"""What the sources share that can fetch the pixel leaf of a table alone, where all images are plainly stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import image_bytes
from omearrow_ds.codec.encode import ImageBlock
from omearrow_ds.codec.leaves import is_list_view
from omearrow_ds.codec.schema import PLANES
from omearrow_ds.errors import DecodeError
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.formats._table import TableSource

Kind = tuple[tuple[int, ...], np.dtype[Any]]

_LEAVES = ("pixel_bytes", "pixels")
_OFFSETS = {pa.binary(): np.int32, pa.large_binary(): np.int64}


class LeafSource(TableSource):
    """Images in a struct column of a table whose pixel leaf can be fetched without the rest of the chunks.

    A subclass sets ``_all_placed`` once it found with `_leaf_and_places` and `placed_chunks` that the leaf is enough;
    from then on `_fetch` and `_fetch_all` give lists of structs of the leaf alone for the field ``chunks``.
    """

    def _set_header(self, info: pa.Table, columns: pa.Table) -> None:
        super()._set_header(info, columns)
        self._image_bytes = image_bytes(self.shapes, self.dtypes)
        known: dict[Kind, Kind] = {}  # a tuple for each image would take more memory than a small image
        kinds = zip(zip(*self.shapes.T.tolist(), strict=True), self.dtypes, strict=True)
        self._kinds = [known.setdefault(kind, kind) for kind in kinds]
        self._native = self._given_dtypes == self.dtypes

    def _leaf_and_places(self, image: pa.DataType) -> tuple[pa.Field, list[pa.Field]] | None:
        """Return the pixel leaf of the image struct's chunks and their other fields; None if it cannot be enough."""
        chunks = image.field(self._column.pixel_field).type
        if self._column.pixel_field != "chunks" or not pa.types.is_list(chunks) or self._odd_order.any():
            return None
        leaves = [field for field in chunks.value_type if field.name in _LEAVES]
        places = [field for field in chunks.value_type if field.name not in _LEAVES]
        alone = len(leaves) == 1 and not is_list_view(leaves[0].type)
        return (leaves[0], places) if alone and places and len(self) else None

    def _rows_of(self, block_bytes: int) -> int:
        """Return how many images make about so many bytes."""
        return max(1, int(block_bytes * len(self) // max(1.0, self._image_bytes.sum(dtype=float))))

    def _image(self, lists: pa.Array, index: int) -> Array:
        """Return the image of ``index`` out of the one row that was fetched of it."""
        pixels = lists.values.field(0)
        shape, dtype = self._kinds[index]
        if len(pixels) == 1 and self._native and pixels.type in _OFFSETS and not pixels.null_count:
            data = pixels[0].as_buffer()
            if data.size == self._image_bytes[index]:
                return np.frombuffer(data, dtype).reshape(shape)
        return self._checked(lists, np.array([index]))[0]

    def _checked(self, lists: pa.Array, indices: Array) -> list[Array]:
        """Return the images of rows that were fetched; where the leaf is not enough, the whole chunks tell why."""
        try:
            return list(self._block(lists, indices).images())
        except DecodeError:
            whole = pa.concat_arrays(list(self._fetch_whole(indices)))
            with self._interpreting():
                block = ImageBlock(whole, self._expected(indices), partial(pa.nulls, len(indices), PLANES))
                return list(block.images())

    @abstractmethod
    def _fetch_whole(self, indices: Array) -> Iterable[pa.Array]:
        """Return the chunks of sorted, distinct rows with all their fields."""

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they are read-only."""
        if not self._all_placed or not self._native:
            return super().views(indices)
        images: list[Array] = []
        for lists in self._fetch("chunks", indices):
            rows = indices[len(images) : len(images) + len(lists)]
            cut = _cut(lists, self._image_bytes[rows], [self._kinds[row] for row in rows.tolist()])
            images += self._checked(lists, rows) if cut is None else cut
        return images


def _cut(lists: pa.Array, size_bytes: Array, kinds: Sequence[Kind]) -> list[Array] | None:
    """Return one image a row as a view of the leaf's buffer, or None if the leaf is no bytes or not of these sizes.

    Of a few rows, `ImageBlock` takes longer to look at each piece than the store to fetch them.
    """
    structs = lists.values
    pixels = structs.field(0)
    if pixels.type not in _OFFSETS or not len(pixels) or lists.null_count + structs.null_count + pixels.null_count:
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
    spans = zip(starts.tolist(), stops.tolist(), kinds, strict=True)
    return [flat[start:stop].view(dtype).reshape(shape) for start, stop, (shape, dtype) in spans]
