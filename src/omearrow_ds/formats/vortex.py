"""Vortex file: the mapped file's rows, still encoded, are taken by number, of the pixel leaf only."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import placed_chunks
from omearrow_ds.errors import DecodeError
from omearrow_ds.formats._base import Array, ProcessLocal
from omearrow_ds.formats._leaf import LeafSource
from omearrow_ds.formats._table import as_arrays, find_image_column, unnest

if TYPE_CHECKING:
    import vortex

COMPRESSIONS = ("default", "zstd")
GROUPED = False
GROUPED = False
MAX_ROWS = 1024
MAX_BYTES = 16 * 2**20
_BLOCK_BYTES = 4 * 2**20
_DECODED_WHOLE = ("vortex.zstd", "vortex.pco")
_INLINE_BYTES = 12
_VIEWED = pa.list_(pa.struct([("pixel_bytes", pa.binary_view())]))
_OFFSET = pa.list_(pa.struct([("pixel_bytes", pa.large_binary())]))


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Vortex file, encoded as Vortex chooses, or by zstd where that is smaller."""
    import vortex.io  # noqa: PLC0415  # an optional backend

    options = vortex.io.VortexWriteOptions
    chosen = options.compact() if compression == "zstd" else options.default()
    batches = (batch for table in tables for batch in table.to_batches())
    chosen.write(pa.RecordBatchReader.from_batches(table_schema, batches), str(path))


Images = Array | list[Array]


class _Mapped:
    """The mapped file as one process holds it: fields as Vortex arrays that lie, still encoded, in the mapping."""

    def __init__(self, file: vortex.VortexFile) -> None:
        self.file = file
        self.parts: list[Images] | None = None
        self.starts: list[int] = []
        self._arrays: dict[str, vortex.Array] = {}

    def rows(self, name: str, expression: Callable[[], Any]) -> vortex.Array:
        """Return all rows of what ``expression`` makes, kept under ``name``."""
        if name not in self._arrays:
            self._arrays[name] = self.file.scan(expression()).read_all()
        return self._arrays[name]


class Source(LeafSource):
    """Images of a Vortex file.

    Raises
    ------
    FormatError
        If the file is no Vortex file, or holds a null or impossible image.
    ColumnError
        If no column is an OME-Arrow struct.
    """

    name = "vortex"
    errors = (OSError, ValueError, RuntimeError)
    unheld_types = (pa.types.is_duration, pa.types.is_interval)

    def __init__(self, path: Path) -> None:
        import vortex.expr  # noqa: PLC0415  # an optional backend

        self.path = path
        self._file = ProcessLocal(self._open)
        table_schema = self._file.get().file.to_arrow().schema
        self._column = find_image_column(table_schema, path)
        others = [name for name in table_schema.names if name != self._column.name]
        image = vortex.expr.column(self._column.name)
        info = self._read(vortex.expr.select(self._column.info_fields, image))
        columns = self._read(vortex.expr.select(others, vortex.expr.root()))
        self._set_header(unnest(info), unnest(columns))
        self._leaf = self._find_leaf(table_schema.field(self._column.name).type)
        self._all_placed = self._leaf is not None
        self.close()

    def _open(self) -> _Mapped:
        import vortex  # noqa: PLC0415  # an optional backend

        self._refuse_replaced()
        with self._reading():
            return _Mapped(vortex.open(str(self.path), memory_map=True))

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        self._file.close()

    def _read(self, expression: Any) -> pa.ChunkedArray:
        with self._reading():
            array = self._file.get().file.scan(expression).read_all().to_arrow_array()
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])

    def _find_leaf(self, image: pa.DataType) -> pa.Field | None:
        """Return the pixel leaf of the chunks if it is enough to tell every image."""
        found = self._leaf_and_places(image)
        if found is None:
            return None
        leaf, places = found
        stored = pa.concat_arrays(self._read(self._narrowed(places)).chunks)
        return leaf if placed_chunks(stored, self._expected(np.arange(len(self)))).all() else None

    def _narrowed(self, fields: list[pa.Field]) -> Any:
        """Return the expression for chunks of only these fields.

        No expression reaches below a list, but a cast to fewer fields leaves the others undecoded.
        """
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return vortex.expr.cast(self._expression("chunks"), vortex.DType.from_arrow(pa.list_(pa.struct(fields))))

    def _expression(self, field: str) -> Any:
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return vortex.expr.column(self._column.name)[field]

    def _rows(self, field: str) -> vortex.Array:
        """Return all rows of a field, still encoded."""
        with self._reading():
            return self._file.get().rows(field, partial(self._expression, field))

    def _pixel_rows(self, field: str) -> vortex.Array:
        """Return all rows of a field, still encoded; of the chunks of a plainly stored file their pixels alone."""
        if self._leaf is None or field != "chunks":
            return self._rows(field)
        with self._reading():
            return self._file.get().rows("pixels alone", partial(self._narrowed, [self._leaf]))

    def _mapped_parts(self) -> list[Images]:
        """Return the images where they lie in the mapped file, part by part, if none of them is encoded, else []."""
        mapped = self._file.get()
        if mapped.parts is None:
            found = list(self._find_mapped_parts())
            mapped.starts = list(accumulate(map(len, found), initial=0))
            mapped.parts = found if mapped.starts[-1] == len(self) else []
        return mapped.parts

    def _find_mapped_parts(self) -> Iterator[Images]:
        if self._leaf is None or not _holds(self._leaf.type, set(self._given_dtypes)):
            return
        start = 0
        for part in _parts(self._pixel_rows("chunks")):
            rows = np.arange(start, start + len(part))
            with self._reading():
                lists = _in_place(part, int(self._image_bytes[rows].sum()))
            if lists is None:
                return
            try:
                images = self._block(lists, rows).images()
            except DecodeError:  # the other images are to be had
                return
            yield images
            start += len(part)

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it is read-only."""
        parts = self._mapped_parts()
        if parts:
            starts = self._file.get().starts
            number = bisect.bisect_right(starts, index) - 1
            return parts[number][index - starts[number]]
        image = self._view_of_scalar(index)
        return super().view(index) if image is None else image

    def _view_of_scalar(self, index: int) -> Array | None:
        """Return one image of plainly stored bytes, or None if this is none.

        A scalar spares the Arrow arrays that `views` goes through; of bytes it makes one object a chunk.
        """
        if self._leaf is None or self._leaf.name != "pixel_bytes" or not self._native:
            return None
        with self._reading():
            chunks: Any = self._rows("chunks").scalar_at(int(index)).as_py()
        pieces = [chunk["pixel_bytes"] for chunk in chunks]
        share = int(self._image_bytes[index]) / len(pieces)
        if not all(isinstance(piece, bytes) and len(piece) == share for piece in pieces):
            return None
        shape, dtype = self._kinds[index]
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype).reshape(shape)

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they are read-only, of a mapped file views of it."""
        return list(map(self.view, indices.tolist())) if self._mapped_parts() else super().views(indices)

    def stacks(self) -> list[Array]:
        """Return all images as views of the mapped file, if uniform and stored there without an encoding, else []."""
        parts = self._mapped_parts()
        stacks = [part for part in parts if isinstance(part, np.ndarray)]
        uniform = len(stacks) == len(parts) and len({(stack.shape[1:], stack.dtype) for stack in stacks}) == 1
        return stacks if uniform else []

    def _fetch(self, field: str, indices: Array) -> list[pa.Array]:
        return self._taken(self._pixel_rows(field), indices)

    def _fetch_whole(self, indices: Array) -> list[pa.Array]:
        return self._taken(self._rows("chunks"), indices)

    def _taken(self, rows: vortex.Array, indices: Array) -> list[pa.Array]:
        """Return rows by number, taken: of rows that are sliced, Vortex 0.91 decodes the whole part they are of."""
        import vortex  # noqa: PLC0415  # an optional backend

        with self._reading():
            numbers = vortex.Array.from_arrow(pa.array(indices.tolist(), pa.uint64()))
            arrays = as_arrays(rows.take(numbers).to_arrow_array())
        return list(map(_without_views, arrays))

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        all_rows = self._pixel_rows(field)
        tree = all_rows.display_tree()
        step = self._rows_of(_BLOCK_BYTES)
        start = 0
        for part in _parts(all_rows):
            stop = start + len(part)
            if any(encoding in tree for encoding in _DECODED_WHOLE):
                with self._reading():
                    arrays = as_arrays(part.to_arrow_array())
                yield from map(_without_views, arrays)
            else:
                for first in range(start, stop, step):
                    yield from self._fetch(field, np.arange(first, min(first + step, stop)))
            start = stop


def _parts(rows: vortex.Array) -> list[vortex.Array]:
    """Return the parts that the file stores an array in, thousands of rows each."""
    import vortex  # noqa: PLC0415  # an optional backend

    return rows.chunks() if isinstance(rows, vortex.ChunkedArray) else [rows]


def _holds(leaf: pa.DataType, dtypes: set[np.dtype[Any]]) -> bool:
    """Whether pixels of all these dtypes stand in a leaf of this type as they do in memory."""
    if pa.types.is_list(leaf):
        return dtypes == {np.dtype(leaf.value_type.to_pandas_dtype())}
    return all(dtype.isnative for dtype in dtypes)


def _in_place(part: vortex.Array, pixel_bytes: int) -> pa.Array | None:
    """Return a part's lists of pixels if they lie in the mapped file as Arrow wants them, else None.

    Pixels that are decoded at each asking stand in other memory each time.
    """
    if part.nbytes < pixel_bytes:
        return None
    first, again = (_without_views(part.slice(0, 1).to_arrow_array()) for _ in range(2))
    if first.buffers()[-1].address != again.buffers()[-1].address:
        return None
    lists = _without_views(part.to_arrow_array())
    return lists if lists.buffers()[-1].address == first.buffers()[-1].address else None


def _without_views(lists: pa.Array) -> pa.Array:
    """Return lists of pixel bytes with offsets in place of Arrow's views, if the bytes lie end to end.

    A cast would copy the pixels.
    """
    if lists.type != _VIEWED:
        return lists
    pixels = lists.values.field(0)
    if not len(pixels) or lists.null_count + lists.values.null_count + pixels.null_count:
        return lists
    _, views, *data = pixels.buffers()
    found = np.frombuffer(views, np.uint32).reshape(-1, 4)[pixels.offset : pixels.offset + len(pixels)]
    lengths, starts = found[:, 0], found[:, 3]
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
