"""Batches of samples that are handed over stacked, so that collating copies nothing, and `collate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds.dataset.handover import batch_array

Array = np.ndarray[Any, Any]


class CollatedBatch(NamedTuple):
    """A batch as ``default_collate`` would give it, in place of the samples."""

    batch: Any


def asked_for_whole() -> bool:
    """Whether who calls the caller's caller collates what it gets, and shows it to nobody before.

    That is torch's fetcher, of any loader whose ``collate_fn`` is torch's default or ours, also through a ``Subset``.
    Anybody else may keep samples, collate them twice, or write on them: these share no memory with a batch. Torch tells
    a dataset nothing of the loader, so this looks who is calling.
    """
    frame = sys._getframe(2)  # noqa: SLF001  # CPython's: `inspect` reads source files
    while frame.f_back is not None and (frame.f_code is _SUBSET or frame.f_globals["__name__"] == _CLOCK):
        frame = frame.f_back
    return frame.f_code is _FETCH and frame.f_locals["self"].collate_fn in (default_collate, collate)


def collate(samples: Sequence[Any]) -> Any:
    """Collate as ``torch.utils.data.default_collate`` does, without copying what is stacked already.

    In a loader's worker tensors are stacked where they are handed over without a copy.
    """
    return collate_by_type(samples, collate_fn_map=_COLLATE)


def _collated(samples: Sequence[CollatedBatch], **_: Any) -> Any:
    return samples[0].batch


def _listed(samples: Sequence[str], **_: Any) -> list[str]:
    return list(samples)


def _stack(
    samples: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    first = samples[0]
    if get_worker_info() is None or not all(_like(first, each) for each in samples):
        collated: torch.Tensor = _TORCHS_OWN(samples, collate_fn_map=collate_fn_map)
        return collated
    memory = batch_array((len(samples), *first.shape, first.element_size()), np.dtype(np.uint8))
    out = torch.from_numpy(memory).view(first.dtype).view(len(samples), *first.shape)
    return torch.stack(list(samples), out=out)


def _like(first: torch.Tensor, each: torch.Tensor) -> bool:
    """Whether both are ordinary tensors of one shape and dtype, with values to copy."""
    ordinary = type(each) is torch.Tensor and each.layout == torch.strided and each.device.type == "cpu"
    alike = ordinary and each.shape == first.shape and each.dtype == first.dtype
    return alike and each.numel() > 0 and not each.requires_grad and not each.is_quantized


_FETCH = _MapDatasetFetcher.fetch.__code__
_SUBSET = Subset.__getitems__.__code__
ASKERS = frozenset((_FETCH, _SUBSET))  # what torch asks for batches with, for the ``dataset`` of its ``self``
_CLOCK = "omearrow_ds.advise.profile.recorder"  # wraps what is timed
_TORCHS_OWN = default_collate_fn_map[torch.Tensor]
_COLLATE: dict[Any, Callable[..., Any]] = {
    **default_collate_fn_map,
    torch.Tensor: _stack,
    CollatedBatch: _collated,
    str: _listed,
}
default_collate_fn_map.setdefault(CollatedBatch, _collated)
