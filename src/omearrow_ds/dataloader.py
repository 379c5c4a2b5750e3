"""`OMEArrowDataLoader`: a torch DataLoader with the right defaults for stored images."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from omearrow_ds.batch import BatchIndices, collate

_WORKERS_AT_MOST = 4
_START_METHOD = "forkserver"
_PRELOADED_MODULES = ["torch", "pyarrow", "omearrow_ds"]


class OMEArrowDataLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` for `OMEArrowDataset` and `OMEArrowDatasetNumpy`.

    Parameters
    ----------
    dataset
        Dataset to load from.
    batch_size
        Samples a batch.
    num_workers
        ``"auto"``: none for a preloaded dataset, where handing batches over costs more than making them; else one for
        each core this process may use, at most 4.
    device
        Device that batches are delivered on; ``None`` leaves them on the CPU.
    **kwargs
        Passed to torch's DataLoader unchanged. With workers, ``persistent_workers`` defaults to True and
        ``multiprocessing_context`` to forkserver: a forked worker can hang or crash on a storage library's threads.

    Notes
    -----
    Workers that are not forked import the main script anew: it needs ``if __name__ == "__main__":`` around what it
    runs, and a transform or callable target has to be picklable (a function or object of a module, no lambda).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        *,
        num_workers: int | Literal["auto"] = "auto",
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        workers = _auto_workers(dataset) if num_workers == "auto" else num_workers
        if workers > 0:
            kwargs.setdefault("persistent_workers", True)
            if kwargs.get("multiprocessing_context") is None:
                kwargs["multiprocessing_context"] = _safe_context()
        if kwargs.get("collate_fn") is None and batch_size is not None:
            kwargs["collate_fn"] = collate
        super().__init__(dataset, batch_size, num_workers=workers, **kwargs)
        self.device = None if device is None else torch.device(device)

    @property
    def _index_sampler(self) -> Any:
        """What torch takes a batch's indices from; the data set is told where `collate` will get them."""
        sampler = super()._index_sampler
        return _Marked(sampler) if self.collate_fn is collate else sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Iterate over the batches, on ``device`` if one was given."""
        batches = super().__iter__()
        return batches if self.device is None else (_moved(batch, self.device) for batch in batches)


class _Marked:
    """A batch sampler's batches, as `BatchIndices`."""

    def __init__(self, sampler: Sampler[list[int]]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[BatchIndices]:
        return map(BatchIndices, self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as torch: a batch sampler has a length


def _auto_workers(dataset: Dataset[Any]) -> int:
    if _preloaded(dataset):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _WORKERS_AT_MOST)


def _preloaded(dataset: Any) -> bool:
    """Whether all pixels are in memory, also below ``Subset`` and ``ConcatDataset``."""
    if hasattr(dataset, "preloaded"):
        return bool(dataset.preloaded)
    parts = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return all(part is not None and _preloaded(part) for part in parts)


def _safe_context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context(_START_METHOD)
    context.set_forkserver_preload(_PRELOADED_MODULES)
    return context


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_moved(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
