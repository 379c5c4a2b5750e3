"""Rows of a mapped Vortex file, still encoded, and their pixels as Arrow arrays without a copy."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from omearrow_ds.storage.byte_source import MappedFile
from omearrow_ds.storage.formats._base import Array, group_by_part
from omearrow_ds.storage.formats._table import as_arrays

if TYPE_CHECKING:
    import vortex

_DECODED_WHOLE = ("vortex.zstd", "vortex.pco")
_INLINE_BYTES = 12
_VIEWED = pa.list_(pa.struct([("pixel_bytes", pa.binary_view())]))
_OFFSET = pa.list_(pa.struct([("pixel_bytes", pa.large_binary())]))
STAGES = {"Rows.take": "read+decode"}


class Rows:
    """All rows of a Vortex expression, not yet decoded, in the parts in which the mapped file stores them."""

    def __init__(self, array: vortex.Array) -> None:
        import vortex  # noqa: PLC0415  # an optional backend

        self.parts = array.chunks() if isinstance(array, vortex.ChunkedArray) else [array]
        self.starts = list(accumulate(map(len, self.parts), initial=0))

    def take(self, indices: Sequence[int]) -> list[pa.Array]:
        """Return rows by number; ``take`` is used because Vortex 0.91 decodes the whole part of a slice."""
        import vortex  # noqa: PLC0415  # an optional backend

        arrays = []
        for number, rows in group_by_part(self.starts, indices):
            positions = pa.array([row - self.starts[number] for row in rows], pa.uint64())
            arrays += as_arrays(self.parts[number].take(vortex.Array.from_arrow(positions)).to_arrow_array())
        return list(map(without_views, arrays))

    def scalar(self, index: int) -> vortex.Scalar:
        """Return one row."""
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
    rows: dict[str, Rows] = field(default_factory=dict)


def in_place(part: vortex.Array, pixel_bytes: int) -> pa.Array | None:
    """Return the pixel lists of a part if they are zero-copy views of the mapped file, else None.

    Pixels that are decoded at each access have another address each time.
    """
    if not len(part) or part.nbytes < pixel_bytes:
        return None
    first, again = (without_views(part.slice(0, 1).to_arrow_array()) for _ in range(2))
    if first.buffers()[-1].address != again.buffers()[-1].address:
        return None
    lists = without_views(part.to_arrow_array())
    return lists if lists.buffers()[-1].address == first.buffers()[-1].address else None


def without_views(lists: pa.Array) -> pa.Array:
    """Convert pixel lists from Arrow's binary view type to binary with offsets, if their bytes are contiguous.

    A cast would copy the pixels.
    """
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
    return pa.Array.from_buffers(
        _OFFSET, len(lists), [None, lists.buffers()[1]], offset=lists.offset, children=[chunks]
    )
