"""Requests for the pages of batches that a loader needs later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import Subset, get_worker_info

from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.kernels.page_requests import PageRequests


class ReadAhead:
    """Requests for the pages of later batches of one dataset, in the process that creates the batches.

    Parameters
    ----------
    dataset
        Dataset of the loader, also below ``Subset``.
    distance
        Number of batches from the next batch to the one whose pages are requested.
    """

    def __init__(self, dataset: Any, distance: int) -> None:
        self._dataset, self.distance = dataset, distance

    @property
    def requests(self) -> PageRequests | None:
        """Rule that decides whether pages are requested; None if no batch is read from a file."""
        samples = self._dataset.dataset if type(self._dataset) is Subset else self._dataset
        return samples._collection.page_requests if isinstance(samples, StoredSamples) else None

    def request(self, indices: Sequence[int] | None) -> None:
        """Request the pages of a batch; errors are ignored, as creating the batch raises them."""
        if indices is None:
            return
        dataset = self._dataset
        with suppress(OMEArrowDSError):
            if type(dataset) is Subset:
                indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
            dataset._collection.request_ahead(dataset._positions(indices))  # noqa: SLF001  # Of a base class.


class Announced:
    """Indices of a batch and of a later batch; on arrival, a worker requests the pages of the later batch."""

    def __init__(self, indices: Any, later: Any) -> None:
        self._sent = indices, later

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, self._sent


def _arrive(indices: Any, later: Any) -> Any:
    worker = get_worker_info()
    if worker is not None and later is not None:
        ahead = ReadAhead(worker.dataset, 0)
        if ahead.requests is not None and ahead.requests.num_remaining:
            ahead.request(later)
    return indices
