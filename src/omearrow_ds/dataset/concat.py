"""Torch's ``ConcatDataset``, a batch of which is made by one call of each dataset that has some of it."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset


class BatchedConcat(ConcatDataset[Any]):
    """A ``ConcatDataset`` with ``__getitems__``."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices`` in that order."""
        count = len(self)
        if not all(-count <= index < count for index in indices):
            return [self[index] for index in indices]  # torch's own error
        by_child: dict[int, tuple[list[int], list[int]]] = {}
        for place, index in enumerate(indices):
            position = index + count if index < 0 else index
            child = bisect.bisect_right(self.cumulative_sizes, position)
            places, of_child = by_child.setdefault(child, ([], []))
            places.append(place)
            of_child.append(position - (self.cumulative_sizes[child - 1] if child else 0))
        samples: list[Any] = [None] * len(indices)
        for child, (places, of_child) in by_child.items():
            for place, sample in zip(places, _samples(self.datasets[child], of_child), strict=True):
                samples[place] = sample
        return samples


def _samples(dataset: Any, indices: list[int]) -> Sequence[Any]:
    # Of its class: what hands on what it has not itself has another's, which would pass over its own __getitem__.
    if callable(getattr(type(dataset), "__getitems__", None)):
        samples: Sequence[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]


def batched(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a dataset whose ``ConcatDataset`` are `BatchedConcat`, also below ``Subset``; what was given is as it was.

    Those of a class derived from torch's remain as they are: they may make samples of their own.
    """
    if type(dataset) in CONCATS:
        made = object.__new__(BatchedConcat)
        vars(made).update(vars(dataset), datasets=[batched(each) for each in dataset.datasets])  # type: ignore[attr-defined]
        return made
    if type(dataset) is Subset:
        inner = batched(dataset.dataset)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner  # type: ignore[attr-defined]
    return dataset


CONCATS = (ConcatDataset, BatchedConcat)
