"""Batches on their way to a device: integer pixels as they are stored, which become those of samples there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from omearrow_ds.dataset.batch import collate
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.cuda import DeviceIndices, recorded
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.handover import PinnedPool
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.windows import Windows

Numbered = tuple[int | None, Any]  # a batch, after its number in the epoch; an iterable dataset's have none
STAGES = {"apply": "transfer"}
IN_ORDER = (SequentialSampler, RandomSampler, DistributedSampler)  # draw all that they draw when they begin


def lies_on(dataset: Any) -> torch.device | None:
    """Return the device that a dataset's pixels lie on, or those of one that it holds, as torch's ``Subset`` does."""
    if isinstance(dataset, StoredSamples):
        return dataset.device
    held = getattr(dataset, "__dict__", {})  # of a program's: no property of it is asked
    several = held.get("datasets")
    inner = [held.get("dataset"), *(several if isinstance(several, list | tuple) else ())]
    found = (lies_on(each) for each in inner if isinstance(each, Dataset))
    return next((device for device in found if device is not None), None)


class RawTransfer:
    """Batches that are sent as raw pixels, and normalized on the device.

    ``dataset`` is an `OMEArrowDataset`, or a ``Subset`` of one, of which `why_not` says nothing; ``pinned`` whether
    batches are made in page-locked memory, for a copy that goes on beside the program.

    Attributes
    ----------
    dataset : Dataset
        The same samples of pixels as they are stored.
    """

    def __init__(self, dataset: Any, device: torch.device, *, pinned: bool) -> None:
        samples = _inner(dataset)
        collection: Collection = samples._collection
        stored = collection.as_stored()
        self._device, self._pool = device, PinnedPool() if pinned else None
        if self._pool is not None:
            stored.pool = self._pool
        raw_samples = samples._with_reader(stored)
        self.dataset: Any = raw_samples
        if dataset is not samples:
            self.dataset = copy.copy(dataset)
            self.dataset.dataset = raw_samples
        self._maker = functools.cache(functools.partial(collection.maker, device))

    def sent(self, batch: Any) -> None:
        """Note that a copy of a batch was asked for, of the stream in use."""
        if self._pool is not None:
            self._pool.note(_image(batch), functools.partial(recorded, self._device))

    def scaled(self, batch: Any) -> Any:
        """Return a batch on the device with the pixels that samples have."""
        pixels = _image(batch)
        made = self._maker(tuple(pixels.shape[1:]))(pixels.reshape(-1), len(pixels), Windows())
        return made if batch is pixels else type(batch)([made, *batch[1:]])


def _inner(dataset: Any) -> Any:
    return dataset.dataset if type(dataset) is Subset else dataset


def _image(batch: Any) -> torch.Tensor:
    """Return the images of a batch, the first that there is of a sample."""
    image: torch.Tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return image


def why_not(dataset: Any, collate_fn: Any) -> str | None:
    """Return the reason why a dataset cannot send raw pixels, or None."""
    samples = _inner(dataset)
    if type(samples) is not OMEArrowDataset or samples.device is not None:
        return "the dataset is none of this package's, or lies on a device"
    if collate_fn not in (default_collate, collate):
        return "collate_fn is given samples"
    reason: str | None = samples._early_scaling_reason
    return reason


class Sent:
    """The batches of a ``BatchSampler``, whose indices are sent to a device together when an epoch begins."""

    def __init__(self, sampler: BatchSampler, count: int, device: torch.device) -> None:
        self._sampler, self._count, self._device = sampler, count, device

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Sequence[int]]:
        order, size = list(self._sampler.sampler), self._sampler.batch_size
        here = np.asarray(order, np.int64)
        known = len(here) == 0 or 0 <= here.min() <= here.max() < self._count
        there = torch.from_numpy(here).to(self._device)
        for first in range(0, len(order) - (len(order) % size if self._sampler.drop_last else 0), size):
            part = slice(first, first + size)
            yield DeviceIndices(order[part], there[part]) if known else order[part]


def sampled(sampler: Any, dataset: Any) -> Any:
    """Return a sampler of batches whose indices lie where the pixels do, where its order is drawn when it begins."""
    device = dataset.device if type(dataset) is OMEArrowDataset else None
    plain = type(sampler) is BatchSampler and type(sampler.sampler) in IN_ORDER
    return Sent(sampler, len(dataset), device) if device is not None and plain and not dataset._is_random else sampler


def on_device(
    batches: Iterator[Numbered], device: torch.device, raw_transfer: RawTransfer | None = None, *, there: bool = False
) -> Iterator[Numbered]:
    """Yield batches on ``device``; to a CUDA device each is copied while the program has the one before.

    ``there``: images are made on a device, and what is beside them alone may have to be copied.
    """
    if device.type == "cuda" and not there:
        return _CopiedAhead(batches, device, raw_transfer)
    if device.type == "cpu" and raw_transfer is None and not there:
        return batches
    move = functools.partial(_moved, device, raw_transfer)
    return map(move, batches)  # goes on after an error, as a generator would not


def _moved(device: torch.device, raw_transfer: RawTransfer | None, numbered: Numbered) -> Numbered:
    number, batch = numbered
    moved = apply(batch, lambda tensor: tensor.to(device))
    return number, moved if raw_transfer is None else raw_transfer.scaled(moved)


class _CopiedAhead:
    """Batches copied on a stream of their own, from pinned memory, each while the program has the one before.

    The program's stream waits for the copy that it is given, by the event after it: not for the next one, which is
    under way on the same stream. So a program that waits for its own work each time does not wait for that copy.
    """

    def __init__(self, batches: Iterator[Numbered], device: torch.device, raw_transfer: RawTransfer | None) -> None:
        self._batches, self._device, self._raw_transfer = batches, device, raw_transfer
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead: list[tuple[int | None, Any, torch.cuda.Event]] = []

    def __iter__(self) -> Iterator[Numbered]:
        return self

    def __next__(self) -> Numbered:
        # The first time two copies are begun, from then on one: that of the next batch, before this one is given.
        if not self._ahead:
            self._copy()
        with suppress(StopIteration):  # after the last one; after an error the one before it is still here
            self._copy()
        number, batch, copied = self._ahead.pop(0)
        using = torch.cuda.current_stream(self._device)
        using.wait_event(copied)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(using)  # lest its memory is given to a later copy while it is in use
            return tensor

        return number, apply(batch, used)

    def _copy(self) -> None:
        number, batch = next(self._batches)
        with torch.cuda.stream(self._side):
            copied = apply(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            if self._raw_transfer is not None:
                self._raw_transfer.sent(batch)
                copied = self._raw_transfer.scaled(copied)
        self._ahead.append((number, copied, self._side.record_event()))


def apply(batch: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with ``act`` done to every tensor in its tuples, lists and mappings."""
    if isinstance(batch, torch.Tensor):
        return act(batch)
    if isinstance(batch, dict):
        return {name: apply(value, act) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [apply(value, act) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
