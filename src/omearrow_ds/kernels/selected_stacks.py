"""Selected images of stacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from omearrow_ds.kernels.page_requests import Rows
from omearrow_ds.kernels.scaling import Array
from omearrow_ds.kernels.stacks import ImageAddresses, Stacks


class SelectedStacks(Stacks):
    """Selected images of other stacks, without a copy.

    Parameters
    ----------
    stacks
        All images.
    selected
        Indices of the images, int64.
    """

    def __init__(self, stacks: Stacks, selected: Array) -> None:
        super().__init__(stacks.arrays, stacks.guard)
        self._stacks, self._selected = stacks, selected
        self.requests, self.many = stacks.requests, stacks.many
        self.single_array, self.num_images = None, len(selected)

    def __getitem__(self, index: int) -> Array:
        return self._stacks[int(self._selected[index])]

    def cut(self, cut: Callable[[Array], Array]) -> Stacks:
        """Return stacks of one region per image; see `Stacks.cut`."""
        stacks = SelectedStacks(self._stacks.cut(cut), self._selected)
        stacks.requests = self.requests
        return stacks

    def prepare(self, indices: Array | int, rows: Rows | None = None) -> None:
        """Request pages and check images before an access; see `Stacks.prepare`."""
        self._stacks.requests = self.requests
        selected = self._selected[indices]
        self._stacks.prepare(selected if isinstance(selected, np.ndarray) else int(selected), rows)

    def request(self, indices: Array, rows: Rows | None = None) -> None:
        """Request the pages of images; see `Stacks.request`."""
        self._stacks.request(self._selected[indices], rows)

    def located(self, indices: Array) -> ImageAddresses:
        """Return the addresses of images; see `Stacks.located`."""
        return self._stacks.located(self._selected[indices])

    def _turns(self, indices: Array) -> list[Array]:
        return self._stacks._turns(self._selected[indices])  # noqa: SLF001  # Same base class.
