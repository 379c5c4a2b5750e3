"""Requests for the pages of batches that a loader needs later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import Subset, get_worker_info

from omearrow_ds.errors import OMEArrowDSError


class ReadAhead:
    """Requests for the pages of later batches of one dataset, in the process that creates the batches.

    ``distance`` is the number of batches from the next batch to the one whose pages are requested if `requests` says
    that reads wait.
    """

    def __init__(self, dataset: Any, distance: int) -> None:
        self._samples, self._positions = unwrap(dataset)
        self.distance, self.requests = distance, self._samples._collection.page_requests

    def request(self, indices: Sequence[int] | None) -> None:
        """Request the pages of a batch; errors are ignored, as creating the batch raises them."""
        if indices is None:
            return
        with suppress(OMEArrowDSError):
            if self._positions is not None:
                indices = [self._positions[index] for index in indices]
            self._samples._collection.request_ahead(self._samples._positions(indices))  # noqa: SLF001  # Its base class is ours.


def unwrap(dataset: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the dataset below a ``Subset`` and its indices, or the dataset itself and None."""
    return (dataset.dataset, dataset.indices) if type(dataset) is Subset else (dataset, None)


def request_in_worker(indices: Sequence[int] | None) -> None:
    """Request the pages of a later batch of this worker, if reads wait."""
    worker = get_worker_info()
    if worker is not None:
        ahead = ReadAhead(worker.dataset, 0)
        if ahead.requests.num_remaining:
            ahead.request(indices)
