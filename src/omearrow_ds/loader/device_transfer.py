"""Device transfer of batches, with integer pixels sent as stored and scaled on the device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, SequentialSampler, Subset
from torch.utils.data import default_collate as torch_collate

from omearrow_ds.dataset.batch import collate
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.cuda import DeviceIndices
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.shared_memory import BatchBufferPool
from omearrow_ds.dataset.stored_images import copy_with

NumberedBatch = tuple[int | None, Any]  # Number in the epoch, None for iterable datasets, and batch.
Fetch = Callable[[], NumberedBatch]  # Raises `StopIteration` after the last batch.
Move = Callable[[Fetch], NumberedBatch]  # Fetches a batch and returns it on a device.
IN_ORDER = (SequentialSampler, RandomSampler, DistributedSampler)  # They draw the whole order at the beginning.


def pixel_device(dataset: Any) -> torch.device | None:
    if isinstance(dataset, StoredSamples):
        return dataset.device
    attributes = getattr(dataset, "__dict__", {})  # Does not call properties of the user's class.
    several = attributes.get("datasets")
    inner = [attributes.get("dataset"), *(several if isinstance(several, list | tuple) else ())]
    return next(filter(None, (pixel_device(wrapped) for wrapped in inner if isinstance(wrapped, Dataset))), None)


class RawTransfer:
    """Transfer of batches as raw pixels of ``dataset``, which are normalized on the device.

    `stored_transfer_blocker` returns None for the original dataset. With ``pinned``, batches are in pinned memory.
    """

    def __init__(self, dataset: Any, device: torch.device, *, pinned: bool) -> None:
        samples, _ = unwrap(dataset)
        collection: Collection = samples._collection
        stored = collection.as_stored()
        self._device, self._pool = device, BatchBufferPool.pinned() if pinned else None
        if self._pool is not None:
            stored.pool = self._pool
        raw_samples = samples._with_reader(stored)
        self.dataset: Any = raw_samples if dataset is samples else copy_with(dataset, dataset=raw_samples)
        self._maker = functools.cache(functools.partial(collection.maker, device))

    def sent(self, batch: Any) -> None:
        """Record that a copy of a batch was enqueued in the current stream."""
        if self._pool is not None:
            self._pool.record_copy(_image(batch), torch.cuda.current_stream(self._device))

    def scaled(self, batch: Any) -> Any:
        pixels = _image(batch)
        samples = self._maker(tuple(pixels.shape[1:]))(pixels.reshape(-1), len(pixels))
        return samples if batch is pixels else type(batch)([samples, *batch[1:]])


def unwrap(dataset: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the dataset below a ``Subset`` and its indices, or the dataset itself and None."""
    return (dataset.dataset, dataset.indices) if type(dataset) is Subset else (dataset, None)


def _image(batch: Any) -> Tensor:
    image: Tensor = batch if isinstance(batch, Tensor) else batch[0]
    return image


def stored_transfer_blocker(dataset: Any, collate_fn: Any) -> str | None:
    """Return why a dataset cannot send raw pixels to the device, or None if it can."""
    samples, _ = unwrap(dataset)
    if type(samples) is not OMEArrowDataset or samples.device is not None:
        return "the dataset is not an OMEArrowDataset, or its pixels are on a device"
    if collate_fn not in (torch_collate, collate):
        return "collate_fn expects normalized samples"
    if samples._transform is not None:
        return "the transform receives normalized samples"
    is_cleared = samples._masks is not None and samples._masks.background is not None
    reason: str | None = samples._collection.early_scaling_reason(is_cleared=is_cleared)
    return reason


class DeviceBatchSampler:
    """Batches of a ``BatchSampler`` whose indices are sent to a device together when an epoch begins."""

    def __init__(self, sampler: BatchSampler, dataset: StoredSamples) -> None:
        self._sampler, self._dataset = sampler, dataset

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Sequence[int]]:
        batches, positions = list(self._sampler), self._dataset._all_positions()  # noqa: SLF001  # Its base class is ours.
        indices = np.array([*chain.from_iterable(batches)], np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(positions):
            return iter(batches)
        device_positions = torch.from_numpy(positions[indices]).to(self._dataset.device)
        parts = device_positions.split(self._sampler.batch_size)  # type: ignore[no-untyped-call]
        return map(DeviceIndices, batches, parts)


def add_device_indices(sampler: Any, dataset: Any) -> Any:
    """Return a batch sampler with indices on the device of the pixels, or ``sampler`` if it cannot be converted."""
    is_on_device = type(dataset) is OMEArrowDataset and dataset.device is not None and not dataset._is_random
    is_plain = type(sampler) is BatchSampler and type(sampler.sampler) in IN_ORDER
    return DeviceBatchSampler(sampler, dataset) if is_on_device and is_plain else sampler


def mover_to(
    device: torch.device | None, raw_transfer: RawTransfer | None = None, *, is_on_device: bool = False
) -> Move | None:
    """Return a function that fetches a batch and returns it on ``device``, or None if batches stay on the CPU.

    For a CUDA device, each batch is copied while the previous one is in use. ``is_on_device``: whether images are
    created on a device, so that only other items may have to be copied.
    """
    if device is None or (device.type == "cpu" and raw_transfer is None and not is_on_device):
        return None
    if device.type == "cuda" and not is_on_device:
        return _prefetch_copies(device, raw_transfer)

    def move(fetch: Fetch) -> NumberedBatch:
        number, batch = fetch()
        moved = map_tensors(batch, lambda tensor: tensor.to(device))
        return number, moved if raw_transfer is None else raw_transfer.scaled(moved)

    return move


def _prefetch_copies(device: torch.device, raw_transfer: RawTransfer | None) -> Move:
    """Return a function that copies batches from pinned memory in a separate stream, each while the previous is in use.

    The user's stream waits for the event after the copy of its batch, not for the copy of the next batch in the same
    side stream. So a program that synchronizes its own stream does not wait for the next copy.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead = deque[tuple[int | None, Any, torch.cuda.Event]]()

    def copy(number: int | None, batch: Any) -> None:
        with torch.cuda.stream(side):
            copied = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
            if raw_transfer is not None:
                raw_transfer.sent(batch)
                copied = raw_transfer.scaled(copied)
        ahead.append((number, copied, side.record_event()))

    def move(fetch: Fetch) -> NumberedBatch:
        # The first call starts two copies, later calls one: the copy of the next batch, before this one is returned.
        if not ahead:
            copy(*fetch())
        with suppress(StopIteration):  # After the last batch; after an error, the previous batch remains.
            copy(*fetch())
        number, batch, copied = ahead.popleft()
        using = torch.cuda.current_stream(device)
        using.wait_event(copied)

        def used(tensor: Tensor) -> Tensor:
            tensor.record_stream(using)  # Keeps its memory from a later copy while in use.
            return tensor

        return number, map_tensors(batch, used)

    return move


def map_tensors(batch: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``act`` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return act(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(value, act) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [map_tensors(value, act) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
