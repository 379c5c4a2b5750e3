"""Batches of samples: a list that also holds its stacked tensors, so that collating copies nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

Array = np.ndarray[Any, Any]


class FirstSample(torch.Tensor):
    """The first image of a `SampleBatch`; by its type ``default_collate`` finds that the batch is stacked already.

    Operations on it give plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001  # as Parameter


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
        unchanged = len(self) == len(self._samples) and all(map(operator.is_, self, self._samples))
        return self._stacked if unchanged else None


class BatchIndices(list[int]):
    """The indices of one batch, asked for by a loader that collates with `collate`: it need not see the samples."""


class CollatedBatch(NamedTuple):
    """A batch as ``default_collate`` would give it."""

    batch: Any


def collate(samples: Sequence[Any]) -> Any:
    """Collate as ``torch.utils.data.default_collate`` does, without copying what is stacked already."""
    if isinstance(samples, CollatedBatch):
        return samples.batch
    stacked = getattr(samples, "stacked", None)
    return default_collate(list(samples)) if stacked is None else stacked


def _collate_first(
    samples: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    del collate_fn_map
    stacked = getattr(samples, "stacked", None)
    return torch.stack(list(samples)) if stacked is None else stacked


default_collate_fn_map.setdefault(FirstSample, _collate_first)
