"""Torch's ``ConcatDataset`` with batched access, one call per inner dataset and batch."""

from __future__ import annotations

import bisect
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from omearrow_ds.dataset.copies import copy_with
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.errors import ArgumentError

_OURS = "omearrow_ds.dataset.samples"


class BatchedConcat(ConcatDataset[Any]):
    """``ConcatDataset`` with ``__getitems__``, whose datasets must have the same classes of targets."""

    def __init__(self, datasets: Iterable[Dataset[Any]]) -> None:
        super().__init__(datasets)
        refuse_mixed_classes(self)

    def __add__(self, other: Dataset[Any]) -> BatchedConcat:
        return BatchedConcat([self, other])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        count = len(self)
        if not all(-count <= index < count for index in indices):
            return [self[index] for index in indices]  # Raises torch's error.
        by_child: dict[int, tuple[list[int], list[int]]] = {}
        for sample_index, index in enumerate(indices):
            position = index + count if index < 0 else index
            child = bisect.bisect_right(self.cumulative_sizes, position)
            sample_indices, of_child = by_child.setdefault(child, ([], []))
            sample_indices.append(sample_index)
            of_child.append(position - (self.cumulative_sizes[child - 1] if child else 0))
        samples: list[Any] = [None] * len(indices)
        for child, (sample_indices, of_child) in by_child.items():
            for sample_index, sample in zip(sample_indices, _samples(self.datasets[child], of_child), strict=True):
                samples[sample_index] = sample
        return samples


def _samples(dataset: Any, indices: list[int]) -> Sequence[Any]:
    # Looked up in the class: a wrapper that forwards attributes would forward this too and skip its own __getitem__.
    if callable(getattr(type(dataset), "__getitems__", None)):
        samples: Sequence[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]


def batched(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a copy of a dataset in which `BatchedConcat` replaces each ``ConcatDataset``, also inside ``Subset``.

    Subclasses of ``ConcatDataset`` are not replaced, since they may create their own samples.
    """
    if type(dataset) in CONCATS:
        return BatchedConcat(map(batched, dataset.datasets))  # type: ignore[attr-defined]
    if type(dataset) is Subset:
        inner = batched(dataset.dataset)
        return dataset if inner is dataset.dataset else copy_with(dataset, dataset=inner)
    return dataset


CONCATS = (ConcatDataset, BatchedConcat)


def refuse_mixed_classes(dataset: Dataset[Any]) -> None:
    """Raise `ArgumentError` if the text targets of concatenated datasets have different classes.

    Datasets below ``Subset`` are compared too. Those with a ``__getitem__`` or a target function of the user are not.
    """
    first: Any = None
    for part in _parts(dataset):
        targets = getattr(part, "_targets", None)
        is_ours = getattr(getattr(type(part), "__getitem__", None), "__module__", None) == _OURS
        if not isinstance(targets, Targets) or not targets.listed or not is_ours:
            continue
        first = first or part
        if targets.classes != first.classes:
            difference = _first_difference(first.classes, targets.classes)
            raise ArgumentError(
                f"is {_text_of(targets.classes)}, but {first.path} has {_text_of(first.classes)}{difference}",
                path=part.path,  # type: ignore[attr-defined]
                option="classes",
                remedy="pass the same list to both datasets",
            )


def _parts(dataset: Dataset[Any]) -> Iterator[Dataset[Any]]:
    if type(dataset) in CONCATS:
        yield from chain.from_iterable(map(_parts, dataset.datasets))  # type: ignore[attr-defined]
    elif type(dataset) is Subset:
        yield from _parts(dataset.dataset)
    else:
        yield dataset


def _text_of(classes: Any) -> str:
    return "none" if classes is None else reprlib.repr(classes)


def _first_difference(first: Any, second: Any) -> str:
    """Return the first code with different texts, since the texts in a message may be truncated before it."""
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return ""
    codes = (code for code, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return "".join(f" (code {code} is {second[code]!r} instead of {first[code]!r})" for code in islice(codes, 1))
