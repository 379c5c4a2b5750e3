"""Compositions of images: selected rows, columns of a joined table, and label images of wide dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec.schema import DTYPES, LABEL_DTYPES
from omearrow_ds.errors import DecodeError
from omearrow_ds.kernels.stacks import SelectedStacks, Stacks
from omearrow_ds.resources import one_of
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats._base import Array, Block, Header, Images, ImagesWrapper, PartLayout, forwarded
from omearrow_ds.storage.formats._columns import ImageColumns, is_narrow
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.table_files import UnreadColumns

_FEW = 8  # Whole parts are fetched if at least one of this number of images is selected.


class SelectedRows(ImagesWrapper):
    """Images at some sorted indices of another source, which is closed with this one.

    ``reopen`` opens them in another process; None pickles the source. ``condition`` is the text of the filter, which is
    empty if null images were left out.
    """

    def __init__(
        self, source: Images, selected: Array, reopen: partial[Images] | None = None, condition: str = ""
    ) -> None:
        header, indices = source.header, selected.tolist()
        image_ids, stored = [header.image_ids[index] for index in indices], header.columns

        def find_checksums() -> pa.ChunkedArray | None:
            return None if stored.checksums is None else stored.checksums.take(selected)

        super().__init__(
            source,
            image_ids=image_ids,
            shapes=header.shapes[selected],
            dtypes=[header.dtypes[index] for index in indices],
            columns=ImageColumns(
                header.path,
                image_ids,
                stored.schema,
                lambda names: stored.select(names).take(selected) if names else pa.table({}),
                find_checksums,
            ),
            selected_rows=header.rows[selected],
            variant=(*header.variant, f"filter {condition}") if condition else header.variant,
            find_part_layout=partial(_part_layout_of, header, selected),
            find_groups=lambda: None,
        )
        details = source.details
        self.details = replace(
            details,
            file_stems=lambda row: details.file_stems(int(selected[row])),
            files_of=lambda row: details.files_of(int(selected[row])),
        )
        self._selected, self._reopen, self._condition = selected, reopen, condition
        self.num_filtered = len(source) - len(selected) if condition else 0

    def prefetch(self, rows: Sequence[int]) -> None:
        self.source.prefetch(self._selected[rows].tolist())

    def labels(self, name: str) -> tuple[Images, Array]:
        labels, label_of = self.source.labels(name)
        return labels, label_of[self._selected]

    def mapped_stacks(self) -> Stacks | None:
        stacks = self.source.mapped_stacks()
        return None if stacks is None else SelectedStacks(stacks, self._selected)

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        return self.source.read(self._selected[rows].tolist(), regions, out)

    def metadata(self, index: int) -> dict[str, Any]:
        return self.source.metadata(int(self._selected[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is not None:
            return self._reopen, ()
        return SelectedRows, (self.source, self._selected, None, self._condition)

    def stream(self) -> Iterator[Block]:
        if self._condition:
            fetches, layout = self.header.part_fetches, self.header.part_layout
            if fetches is not None and layout is not None and not _is_sparse(self._selected, self.source.header):
                fetches.expect(np.flatnonzero(np.diff(layout.starts)).tolist())
            yield from super().stream()
            return
        num_read = 0  # Null images have no pixels, so reading all images reads no more.
        for start, images in self.source.stream():
            first, stop = np.searchsorted(self._selected, [start, start + len(images)])
            selected = self._selected[first:stop] - start
            for run in np.split(selected, np.flatnonzero(np.diff(selected) > 1) + 1) if len(selected) else []:
                yield num_read, images[run[0] : run[-1] + 1]
                num_read += len(run)


def _is_sparse(selected: Array, header: Header) -> bool:
    """Return whether so few images are selected that whole parts should not be fetched for them."""
    return len(selected) * _FEW < len(header.image_ids)


def _part_layout_of(header: Header, selected: Array) -> PartLayout | None:
    """Return the properties of the parts that contain the images at sorted indices."""
    parted = header.part_layout
    if parted is None:
        return None
    starts = np.searchsorted(selected, parted.starts).tolist()
    digest = digest_of(parted.digest.encode() + selected.tobytes())
    window, mixed = (None, False) if _is_sparse(selected, header) else (parted.window, parted.mixed)
    return PartLayout(starts, digest, window, mixed)


def select_rows(source: Images, selected: Array, condition: str) -> Images:
    """Return a source of the images at sorted indices; ``condition`` is the text of the filter that selected them."""
    return source if len(selected) == len(source) else SelectedRows(source, selected, condition=condition)


class SourceWithColumns(ImagesWrapper):
    """A source with columns of a joined table: ``added``, or read from ``unread`` at ``rows``, null for absent rows."""

    read = forwarded("source.read")
    mapped_stacks = forwarded("source.mapped_stacks")
    stream = forwarded("source.stream")

    def __init__(self, source: Images, added: pa.Table, unread: UnreadColumns | None, rows: pa.Array) -> None:
        stored = source.header.columns

        def read(names: list[str]) -> pa.Table:
            known = set(stored.names)
            others = [name for name in names if name not in known]
            table = added if unread is None else unread.column_table(others, added, rows)
            columns = stored.select([name for name in names if name in known])
            return pa.table({name: (columns if name in known else table)[name] for name in names})

        more = () if unread is None else unread.column_schema
        schema = pa.schema([*stored.schema, *added.schema, *more])
        columns = ImageColumns(stored.path, stored.image_ids, schema, read, lambda: stored.checksums)
        if is_narrow(schema.names):
            _ = columns.table  # Read now.
        super().__init__(source, columns=columns)
        self._arguments = source, added, unread, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceWithColumns, self._arguments


class LabelSource(ImagesWrapper):
    """Label images read as uint8 if stored as bool, as int32 if 64-bit; `DecodeError` for a label beyond int32."""

    def __init__(self, source: Images) -> None:
        super().__init__(source, dtypes=[LABEL_DTYPES.get(dtype, dtype) for dtype in source.header.dtypes])
        self.details = replace(source.details, fills_out=bool)

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del out
        return list(map(self._narrow, rows, self.source.read(rows, regions)))

    def _narrow(self, index: int, pixels: Array) -> Array:
        header = self.header
        dtype = header.dtypes[index]
        if pixels.dtype.itemsize > dtype.itemsize:
            limits = np.iinfo(dtype)
            beyond = [label for label in (pixels.min(), pixels.max()) if not limits.min <= label <= limits.max]
            if beyond:
                problem = f"mask {index} ({header.image_ids[index]!r}) has the label {beyond[0]}, which exceeds {dtype}"
                remedy = "use consecutive labels, e.g. with skimage.segmentation.relabel_sequential"
                raise DecodeError(f"{header.path}: {problem}; {remedy}")
        return pixels.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return LabelSource, (self.source,)


def _has_label_dtypes(header: Header) -> bool:
    """Return whether an image has a dtype that is supported only for label images."""
    dtypes = header.dtypes
    return not LABEL_DTYPES.keys().isdisjoint(dtypes[:1] if one_of(dtypes) else dtypes)


def with_label_dtypes(source: Images) -> Images:
    """Return a source of label images with dtypes that torch supports; ``source`` itself if it needs no conversion."""
    return LabelSource(source) if _has_label_dtypes(source.header) else source


def refuse_label_dtypes(source: Images) -> None:
    """Raise `DecodeError` if an image has a dtype that is supported only for label images."""
    header = source.header
    if _has_label_dtypes(header):
        index = next(index for index, dtype in enumerate(header.dtypes) if dtype in LABEL_DTYPES)
        problem = f"image {index} ({header.image_ids[index]!r}) has the dtype {header.dtypes[index].name!r}"
        allowed, remedy = ", ".join(dtype.name for dtype in DTYPES), "convert it, or pass label images as masks="
        raise DecodeError(problem, path=header.path, image=index, allowed=f"one of {allowed}", remedy=remedy)
