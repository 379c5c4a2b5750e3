"""Batches that are collated without a copy, also of concatenated datasets."""

from __future__ import annotations

import bisect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds.dataset.shared_memory import batch_array
from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.errors import ArgumentError, AxesError

_SHOWN = 4
_OURS = "omearrow_ds.dataset.samples"


class CollatedBatch(NamedTuple):
    """Collated batch that a dataset returns instead of samples, equal to the result of ``default_collate``."""

    batch: Any


def asked_for_whole(frame: FrameType) -> bool:
    """Whether the caller of ``__getitems__`` only collates the samples, so that a dataset may return a collated batch.

    That is torch's fetcher, with torch's or our ``collate_fn``, also through a ``Subset``. Other callers may keep
    samples or write to them. Torch does not pass the loader to a dataset, so this function inspects the call stack.
    """
    while frame.f_back is not None and (frame.f_code is _SUBSET or frame.f_globals["__name__"] == _CLOCK):
        frame = frame.f_back
    return frame.f_code is _FETCH and frame.f_locals["self"].collate_fn in COLLATES


def collate(samples: Sequence[Any]) -> Any:
    """Collate like torch, without copying stacked samples; workers stack in memory that is transferred uncopied."""
    return collate_by_type(samples, collate_fn_map=_COLLATE)


def collate_padded(samples: Sequence[Any]) -> Any:
    """Collate samples that differ in height and width by padding with zeros at the bottom and right.

    The last item of the batch is ``valid``, bool (B, H, W), True for pixels of the sample. For samples that are only
    images, the batch is ``(images, valid)``.
    """
    if isinstance(samples[0], CollatedBatch):
        items = _items(samples[0].batch)
        return [*items, torch.ones((len(items[0]), *items[0].shape[-2:]), dtype=torch.bool)]
    columns = list(map(list, zip(*map(_items, samples), strict=True)))
    valid = _padded([torch.ones(image.shape[-2:], dtype=torch.bool) for image in columns[0]])
    return [*(_padded(column) if _are_planes(column) else collate(column) for column in columns), valid]


def collate_listed(samples: Sequence[Any]) -> Any:
    """Collate samples that differ in height and width into lists of images and masks."""
    if isinstance(samples[0], CollatedBatch):
        batch = samples[0].batch
        columns = [list(item.unbind(0)) if _are_planes([item]) else item for item in _items(batch)]
        return columns if isinstance(batch, tuple | list) else columns[0]
    if not isinstance(samples[0], tuple | list):
        return list(samples)
    return [column if _are_planes(column) else collate(column) for column in map(list, zip(*samples, strict=True))]


def _items(sample: Any) -> Sequence[Any]:
    return sample if isinstance(sample, tuple | list) else (sample,)


def _are_planes(part: Sequence[Any]) -> bool:
    return all(isinstance(item, Tensor) and item.ndim >= 2 for item in part)


def _padded(images: Sequence[Tensor]) -> Tensor:
    """Return stacked images with the same number of axes, padded with zeros at the bottom and right."""
    first = images[0]
    shape = [max(sizes) for sizes in zip(*(image.shape for image in images), strict=True)]
    if any(image.shape[:-2] != first.shape[:-2] for image in images):
        problem = f"collate='pad': samples differ in more than height and width (largest {shape})"
        raise AxesError(f"{problem}; use collate='list'")
    out = _empty_batch((len(images), *shape), first).zero_()
    for padded, image in zip(out, images, strict=True):
        padded[..., : image.shape[-2], : image.shape[-1]] = image
    return out


def _empty_batch(shape: Sequence[int], sample: Tensor) -> Tensor:
    memory = batch_array((*shape, sample.element_size()), np.dtype(np.uint8))
    return torch.from_numpy(memory).view(sample.dtype).view(*shape)


def _stack(samples: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """Stack tensors like torch, in a worker in memory that is transferred without a copy."""
    first = samples[0]
    plain = (Tensor, torch.strided, "cpu", first.shape, first.dtype, False, False)
    if get_worker_info() is not None and first.numel() > 0 and {*map(_layout_of, samples)} == {plain}:
        return torch.stack(list(samples), out=_empty_batch((len(samples), *first.shape), first))
    if len({sample.shape for sample in samples}) > 1:
        shapes = ", ".join(str(tuple(sample.shape)) for sample in samples[:_SHOWN])
        problem = f"samples of one batch differ in shape: {shapes}; pass collate='pad' or 'list' to the loader"
        raise AxesError(f"{problem}, or crop_size= to the dataset (with box=, pad_to= or resize=)")
    stacked: Tensor = _TORCH_STACK(samples, collate_fn_map=collate_fn_map)
    return stacked


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
        positions, by_child = [index % count for index in indices], dict[int, list[int]]()
        for sample_index, position in enumerate(positions):
            by_child.setdefault(bisect.bisect_right(self.cumulative_sizes, position), []).append(sample_index)
        samples: list[Any] = [None] * len(indices)
        for child, sample_indices in by_child.items():
            dataset: Any = self.datasets[child]
            first = self.cumulative_sizes[child - 1] if child else 0
            of_child = [positions[sample_index] - first for sample_index in sample_indices]
            # Looked up in the class: a wrapper that forwards attributes would skip its own __getitem__.
            is_batched = callable(getattr(type(dataset), "__getitems__", None))
            created = dataset.__getitems__(of_child) if is_batched else [dataset[index] for index in of_child]
            for sample_index, sample in zip(sample_indices, created, strict=True):
                samples[sample_index] = sample
        return samples


def batched(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a copy of a dataset in which `BatchedConcat` replaces each ``ConcatDataset``, also inside ``Subset``."""
    if type(dataset) in CONCATS:  # Subclasses may create their own samples.
        return BatchedConcat(map(batched, dataset.datasets))  # type: ignore[attr-defined]
    if type(dataset) is Subset:
        inner = batched(dataset.dataset)
        return dataset if inner is dataset.dataset else copy_with(dataset, dataset=inner)
    return dataset


def refuse_mixed_classes(dataset: Dataset[Any]) -> None:
    """Raise `ArgumentError` if the text targets of concatenated datasets have different classes.

    Datasets below ``Subset`` are compared too. Those with a ``__getitem__`` or a target function of the user are not.
    """
    first: Any = None
    for part in parts_of(dataset):
        targets = getattr(part, "_targets", None)
        is_ours = getattr(getattr(type(part), "__getitem__", None), "__module__", None) == _OURS
        if not isinstance(targets, Targets) or not targets.listed or not is_ours:
            continue
        first = first or part
        if targets.classes != first.classes:
            own, others = ("none" if item is None else reprlib.repr(item) for item in (targets.classes, first.classes))
            problem = f"is {own}, but {first.path} has {others}{_first_difference(first.classes, targets.classes)}"
            remedy, path = "pass the same list to both datasets", part.path  # type: ignore[attr-defined]
            raise ArgumentError(problem, path=path, option="classes", remedy=remedy)


def parts_of(dataset: Dataset[Any]) -> Iterator[Dataset[Any]]:
    """Yield the datasets below torch's ``ConcatDataset`` and ``Subset``, or the dataset itself."""
    if type(dataset) in CONCATS:
        yield from chain.from_iterable(map(parts_of, dataset.datasets))  # type: ignore[attr-defined]
    elif type(dataset) is Subset:
        yield from parts_of(dataset.dataset)
    else:
        yield dataset


def _first_difference(first: Any, second: Any) -> str:
    if isinstance(first, tuple) and isinstance(second, tuple):
        for code, (one, other) in enumerate(zip(first, second, strict=False)):
            if one != other:
                return f" (code {code} is {other!r} instead of {one!r})"
    return ""


_layout_of = attrgetter("__class__", "layout", "device.type", "shape", "dtype", "requires_grad", "is_quantized")
CONCATS = (ConcatDataset, BatchedConcat)
COLLATES = (default_collate, collate, collate_padded, collate_listed)  # They do not expose samples.
_FETCH = _MapDatasetFetcher.fetch.__code__
_SUBSET = Subset.__getitems__.__code__
ASKERS = frozenset((_FETCH, _SUBSET))  # Torch code that requests batches of ``self.dataset``.
_CLOCK = "omearrow_ds.advise.profile.recorder"  # Wraps timed functions.
_TORCH_STACK = default_collate_fn_map[Tensor]
_COLLATE: dict[Any, Callable[..., Any]] = {
    **default_collate_fn_map,
    Tensor: _stack,
    CollatedBatch: lambda samples, **_: samples[0].batch,
    str: lambda samples, **_: list(samples),
}
default_collate_fn_map.setdefault(CollatedBatch, _COLLATE[CollatedBatch])
