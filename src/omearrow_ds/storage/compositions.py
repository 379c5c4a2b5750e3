"""Compositions of images: selected rows, columns of a joined table, and label images of wide dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec.schema import DTYPES, LABEL_DTYPES
from omearrow_ds.errors import DecodeError
from omearrow_ds.kernels.stacks import SelectedStacks, Stacks
from omearrow_ds.resources import one_of
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats._base import Array, Block, Images, ImagesWrapper, PartLayout, forwarded
from omearrow_ds.storage.formats._columns import is_narrow
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.table_files import UnreadColumns

_FEW = 8  # Whole parts are fetched if at least one of this number of images is selected.


class SelectedRows(ImagesWrapper):
    """Images at some sorted indices of another source, which is closed with this one.

    ``reopen`` opens the images again in another process; None selects them from the pickled source. ``condition`` is
    the text of the filter that selected the images; it is empty if null images were left out.
    """

    outline = forwarded("_source.outline")

    def __init__(
        self, source: Images, selected: Array, reopen: partial[Images] | None = None, condition: str = ""
    ) -> None:
        super().__init__(source)
        self._selected, self._reopen, self._condition = selected, reopen, condition
        self.rows = source.rows[selected]
        self.image_ids = [source.image_ids[index] for index in selected.tolist()]
        self.shapes, self.dtypes = source.shapes[selected], [source.dtypes[index] for index in selected.tolist()]
        self.num_filtered = len(source) - len(selected) if condition else 0
        if condition:
            self.variant = (*source.variant, f"filter {condition}")

    def _read_columns(self, names: list[str]) -> pa.Table:
        return self._source.column_table(names).take(self._selected) if names else pa.table({})

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:  # type: ignore[override]  # Read lazily.
        checksums = self._source.checksums
        return None if checksums is None else checksums.take(self._selected)

    @property
    def _is_sparse(self) -> bool:
        """Whether so few images are selected that whole parts should not be fetched for them."""
        return len(self) * _FEW < len(self._source)

    @cached_property
    def part_layout(self) -> PartLayout | None:
        parted = self._source.part_layout
        if parted is None:
            return None
        starts = np.searchsorted(self._selected, parted.starts).tolist()
        digest = digest_of(parted.digest.encode() + self._selected.tobytes())
        window, mixed = (None, False) if self._is_sparse else (parted.window, parted.mixed)
        return PartLayout(starts, digest, window, mixed)

    def prefetch(self, rows: Sequence[int]) -> None:
        self._source.prefetch(self._selected[rows].tolist())

    def files_of(self, index: int) -> Sequence[str]:
        return self._source.files_of(int(self._selected[index]))

    def labels(self, name: str) -> tuple[Images, Array]:
        labels, label_of = self._source.labels(name)
        return labels, label_of[self._selected]

    def mapped_stacks(self) -> Stacks | None:
        stacks = self._source.mapped_stacks()
        return None if stacks is None else SelectedStacks(stacks, self._selected)

    def read_arrays(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        return self._source.read_arrays(self._selected[rows].tolist(), regions, out)

    def metadata(self, index: int) -> dict[str, Any]:
        return self._source.metadata(int(self._selected[index]))

    def mask_name_stems(self, index: int) -> list[str]:
        return self._source.mask_name_stems(int(self._selected[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is not None:
            return self._reopen, ()
        return SelectedRows, (self._source, self._selected, None, self._condition)

    def stream(self) -> Iterator[Block]:
        if self._condition:
            if self.part_fetches is not None and self.part_layout is not None and not self._is_sparse:
                self.part_fetches.expect(np.flatnonzero(np.diff(self.part_layout.starts)).tolist())
            yield from super().stream()
            return
        num_read = 0  # Null images have no pixels, so reading all images reads no more.
        for start, images in self._source.stream():
            first, stop = np.searchsorted(self._selected, [start, start + len(images)])
            selected = self._selected[first:stop] - start
            for run in np.split(selected, np.flatnonzero(np.diff(selected) > 1) + 1) if len(selected) else []:
                yield num_read, images[run[0] : run[-1] + 1]
                num_read += len(run)


def select_rows(source: Images, selected: Array, condition: str) -> Images:
    """Return a source of the images at sorted indices; ``condition`` is the text of the filter that selected them."""
    return source if len(selected) == len(source) else SelectedRows(source, selected, condition=condition)


class SourceWithColumns(ImagesWrapper):
    """A source with columns of a joined table: ``added``, or read from ``unread`` at ``rows``, null for absent rows."""

    read_arrays = forwarded("_source.read_arrays")
    read_groups = forwarded("_source.read_groups")
    mapped_stacks = forwarded("_source.mapped_stacks")
    stream = forwarded("_source.stream")
    outline = forwarded("_source.outline")

    def __init__(self, source: Images, added: pa.Table, unread: UnreadColumns | None, rows: pa.Array) -> None:
        super().__init__(source)
        self._added, self._unread, self._rows = added, unread, rows
        more = () if unread is None else unread.column_schema
        self.column_schema = pa.schema([*source.column_schema, *added.schema, *more])
        if is_narrow(self.column_names):
            self.columns = self._read_columns(self.column_names)

    def _read_columns(self, names: list[str]) -> pa.Table:
        known = set(self._source.column_names)
        added = [name for name in names if name not in known]
        table = self._added if self._unread is None else self._unread.column_table(added, self._added, self._rows)
        columns = self._source.column_table([name for name in names if name in known])
        return pa.table({name: (columns if name in known else table)[name] for name in names})

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceWithColumns, (self._source, self._added, self._unread, self._rows)


class LabelSource(ImagesWrapper):
    """Label images read as uint8 if stored as bool, as int32 if 64-bit; `DecodeError` for a label beyond int32."""

    read_groups = forwarded("_source.read_groups")

    def __init__(self, source: Images) -> None:
        super().__init__(source)
        self.dtypes = [LABEL_DTYPES.get(dtype, dtype) for dtype in source.dtypes]

    def read_arrays(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del out
        return list(map(self._narrow, rows, self._source.read_arrays(rows, regions)))

    @property
    def fills_out(self) -> bool:
        return False

    def _narrow(self, index: int, pixels: Array) -> Array:
        dtype = self.dtypes[index]
        if pixels.dtype.itemsize > dtype.itemsize:
            limits = np.iinfo(dtype)
            beyond = [label for label in (pixels.min(), pixels.max()) if not limits.min <= label <= limits.max]
            if beyond:
                label = f"the label {beyond[0]}, which exceeds {dtype}"
                raise DecodeError(
                    f"{self.path}: mask {index} ({self.image_ids[index]!r}) has {label}; use consecutive labels, "
                    f"e.g. with skimage.segmentation.relabel_sequential"
                )
        return pixels.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return LabelSource, (self._source,)


def with_label_dtypes(source: Images) -> Images:
    """Return a source of label images with dtypes that torch supports; ``source`` itself if it needs no conversion."""
    dtypes = source.dtypes[:1] if one_of(source.dtypes) else source.dtypes
    return source if LABEL_DTYPES.keys().isdisjoint(dtypes) else LabelSource(source)


def refuse_label_dtypes(source: Images) -> None:
    """Raise `DecodeError` if an image has a dtype that is supported only for label images."""
    dtypes = source.dtypes[:1] if one_of(source.dtypes) else source.dtypes
    if not LABEL_DTYPES.keys().isdisjoint(dtypes):
        index = next(index for index, dtype in enumerate(dtypes) if dtype in LABEL_DTYPES)
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise DecodeError(
            f"{source.path}: image {index} ({source.image_ids[index]!r}) has the dtype {source.dtypes[index].name!r}, "
            f"expected one of {names}; convert the image, or pass label images as masks=",
            image=index,
        )
