"""Base class of sources that fetch only the pixel leaf of a table if all images are plainly stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec.leaves import is_list_view
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.formats._table import TableSource

Kind = tuple[tuple[int, ...], np.dtype[Any]]

_LEAVES = ("pixel_bytes", "pixels")
_OFFSETS = {pa.binary(): np.int32, pa.large_binary(): np.int64}
STAGES = {"_cut": "decode"}


class LeafSource(TableSource):
    """Images in a struct column of a table; only the leaf column of the pixels is fetched, without the rest of a chunk.

    A subclass sets ``_all_placed`` if `_leaf_and_places` and `placed_chunks` show that the leaf suffices. Then `_fetch`
    returns lists of structs with only the leaf for the field ``chunks``.
    """

    def _set_header(self, info: pa.Table, columns: pa.Schema, early: pa.Table | None = None) -> None:
        super()._set_header(info, columns, early)
        if self._look:
            return
        self._image_bytes = image_bytes(self.shapes, self.dtypes)
        known: dict[Kind, Kind] = {}  # one tuple per image would take more memory than a small image
        kinds = zip(zip(*self.shapes.T.tolist(), strict=True), self.dtypes, strict=True)
        self._kinds = [known.setdefault(kind, kind) for kind in kinds]
        self._native = self._given_dtypes == self.dtypes

    def _leaf_and_places(self, image: pa.DataType) -> tuple[pa.Field, list[pa.Field]] | None:
        """Return the pixel leaf of the image struct's chunks and their other fields; None if it cannot suffice."""
        chunks = image.field(self._column.pixel_field).type
        if self._column.pixel_field != "chunks" or not pa.types.is_list(chunks) or self._odd_order.any():
            return None
        leaves = [field for field in chunks.value_type if field.name in _LEAVES]
        places = [field for field in chunks.value_type if field.name not in _LEAVES]
        alone = len(leaves) == 1 and not is_list_view(leaves[0].type)
        return (leaves[0], places) if alone and places and len(self) else None

    def _rows_of(self, block_bytes: int) -> int:
        """Return the number of images in about ``block_bytes``."""
        return max(1, int(block_bytes * len(self) // max(1.0, self._image_bytes.sum(dtype=float))))

    def _images(self, chunks: pa.Array, indices: Array) -> Array | list[Array]:
        cut = None
        if self._all_placed and self._native and chunks.type.value_type.field(0).type in _OFFSETS:
            cut = _cut(chunks, self._image_bytes[indices], [self._kinds[row] for row in indices.tolist()])
        return super()._images(chunks, indices) if cut is None else cut


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
