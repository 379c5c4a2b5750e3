"""Batches of samples: a list that also holds its stacked tensors, so that collating copies nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map

from omearrow_ds.batch_memory import batch_array

Array = np.ndarray[Any, Any]


class FirstSample(torch.Tensor):
    """The first image of a `SampleBatch`; by its type ``default_collate`` finds that the batch is stacked already.

    Operations on it give plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001  # as Parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (self.as_subclass(torch.Tensor),)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class SampleBatch(list[Any]):
    """The samples of one batch, as a list that knows the tensor they were cut from."""

    _stacked: torch.Tensor | None = None
    _samples: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of_images(cls, images: torch.Tensor) -> Self:
        """Return the batch of images stacked along axis 0."""
        samples: list[torch.Tensor] = list(images.unbind(0))
        if samples:
            samples[0] = samples[0].as_subclass(FirstSample)
        batch = cls(samples)
        batch._stacked, batch._samples = images, tuple(samples)
        return batch

    @property
    def stacked(self) -> torch.Tensor | None:
        """The samples stacked, or None if the list was changed since it was made."""
        whole = self._stacked
        if whole is None or len(self) != len(self._samples) or not all(map(operator.is_, self, self._samples)):
            return None
        first, step = whole.data_ptr(), whole.stride(0) * whole.element_size() if len(self) else 0
        shape, strides = whole.shape[1:], whole.stride()[1:]
        for place, sample in enumerate(self):  # the same objects may have been changed in place
            moved = sample.data_ptr() != first + place * step
            if moved or sample.shape != shape or sample.stride() != strides or sample.requires_grad:
                return None
        return whole


class BatchIndices(list[int]):
    """The indices of one batch, asked for by a loader that collates with `collate`: it need not see the samples."""


class SampleIndices(list[int]):
    """The indices of one batch, asked for by a loader that collates otherwise: samples shall be plain tensors."""


class CollatedBatch(NamedTuple):
    """A batch as ``default_collate`` would give it."""

    batch: Any


def collate(samples: Sequence[Any]) -> Any:
    """Collate as ``torch.utils.data.default_collate`` does, without copying what is stacked already.

    In a loader's worker tensors are stacked where they are handed over without a copy.
    """
    if isinstance(samples, CollatedBatch):
        return samples.batch
    stacked = getattr(samples, "stacked", None)
    return collate_by_type(list(samples), collate_fn_map=_COLLATE) if stacked is None else stacked


def _collate_first(
    samples: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    stacked = getattr(samples, "stacked", None)
    return _stack(samples, collate_fn_map=collate_fn_map) if stacked is None else stacked


def _stack(
    samples: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    first = samples[0]
    if get_worker_info() is None or not all(_like(first, each) for each in samples):
        collated: torch.Tensor = _TORCHS_OWN(samples, collate_fn_map=collate_fn_map)
        return collated
    memory = batch_array((len(samples), *first.shape, first.element_size()), np.dtype(np.uint8))
    out = torch.from_numpy(memory).view(first.dtype).view(len(samples), *first.shape)
    return torch.stack([each.as_subclass(torch.Tensor) for each in samples], out=out)


def _like(first: torch.Tensor, each: torch.Tensor) -> bool:
    """Whether both are ordinary tensors of one shape and dtype."""
    ordinary = type(each) in _PLAIN and each.layout == torch.strided and each.device.type == "cpu"
    return ordinary and not each.requires_grad and each.shape == first.shape and each.dtype == first.dtype


_PLAIN = (torch.Tensor, FirstSample)
_TORCHS_OWN = default_collate_fn_map[torch.Tensor]
_COLLATE = {**default_collate_fn_map, FirstSample: _collate_first, torch.Tensor: _stack}
default_collate_fn_map.setdefault(FirstSample, _collate_first)
