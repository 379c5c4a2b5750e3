"""Selected images of a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.kernels.stacks import SelectedStacks, Stacks
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats._base import Array, Block, Images, ImagesWrapper, PartLayout
from omearrow_ds.storage.formats._stored import Outline
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.row_filter import RowFilter

_BLOCK_BYTES = 2**26
_FEW = 8  # Whole parts are fetched if at least one of this number of images is selected.


class SelectedRows(ImagesWrapper):
    """Images at some sorted indices of another source, which is closed with this one.

    ``reopen`` opens the images again in another process; None selects them from the pickled source. ``condition`` is
    the text of the filter that selected the images; it is empty if null images were left out.
    """

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

    def outline(self) -> Outline:
        return self._source.outline()

    def mapped_stacks(self) -> Stacks | None:
        stacks = self._source.mapped_stacks()
        return None if stacks is None else SelectedStacks(stacks, self._selected)

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
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
        if not self._condition:  # Null images have no pixels, so reading all images reads no more.
            yield from self._stream_source()
            return
        if self.part_fetches is not None and self.part_layout is not None and not self._is_sparse:
            self.part_fetches.expect(np.flatnonzero(np.diff(self.part_layout.starts)).tolist())
        yield from super().stream()

    def _stream_source(self) -> Iterator[Block]:
        num_read = 0
        for start, images in self._source.stream():
            first, stop = np.searchsorted(self._selected, [start, start + len(images)])
            selected = self._selected[first:stop] - start
            for run in np.split(selected, np.flatnonzero(np.diff(selected) > 1) + 1) if len(selected) else []:
                yield num_read, images[run[0] : run[-1] + 1]
                num_read += len(run)


def filter_rows(source: Images, row_filter: RowFilter) -> Images:
    """Return a source of the images that a filter selects; see `RowFilter.choose` for errors."""
    return select_rows(source, row_filter.choose(source), row_filter.text)


def select_rows(source: Images, selected: Array, condition: str) -> Images:
    """Return a source of the images at sorted indices; ``condition`` is the text of the filter that selected them."""
    return source if len(selected) == len(source) else SelectedRows(source, selected, condition=condition)
