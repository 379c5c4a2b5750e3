"""Sample orders that are random within windows of images, so that each image is decoded once per window.

A random crop from a compressed store requires decoding its whole image. In a windowed order, the samples of ``window``
images precede those of other images, so a cache of ``window`` images decodes each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError
from omearrow_ds.options import check_integer

Array = np.ndarray[Any, Any]
_BATCHES = 200  # For measuring the quality of an order.


def windowed_order(fields: Array, window: int, generator: torch.Generator) -> Array:
    """Return all sample indices, in random order within random windows of images; ``fields`` has each image index."""
    distinct, of_sample = np.unique(fields, return_inverse=True)
    rank = torch.randperm(len(distinct), generator=generator).numpy()
    windows = rank[of_sample.reshape(-1)] // window
    within = torch.randperm(len(fields), generator=generator).numpy()
    return within[np.argsort(windows[within], kind="stable")]


class WindowedSampler(Sampler[int]):
    """Samples of a dataset in a `windowed_order` that differs per epoch.

    The order is drawn from ``generator``; None selects torch's global generator.
    """

    def __init__(self, dataset: StoredSamples, window: int, generator: torch.Generator | None) -> None:
        self.dataset, self.window, self.generator = dataset, window, generator
        self._fields = dataset.fields

    def __repr__(self) -> str:
        return f"WindowedSampler({len(self)} samples, within windows of {self.window} images)"

    def __len__(self) -> int:
        return len(self._fields)

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        if generator is None:  # Draws exactly one number, like RandomSampler.
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        yield from windowed_order(self._fields, self.window, generator).tolist()


class SharedWindowedSampler(DistributedSampler[Any]):
    """A rank's contiguous part of a `windowed_order` that all ranks share; each rank reads few of the images."""

    def __init__(self, dataset: StoredSamples, window: int, *, seed: int, drop_last: bool) -> None:
        super().__init__(dataset, seed=seed, drop_last=drop_last)
        self._fields, self._window = dataset.fields, window

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        whole = windowed_order(self._fields, self._window, generator)
        part = np.resize(whole, self.total_size)  # Repeats from the beginning, like DistributedSampler.
        yield from part[self.rank * self.num_samples :][: self.num_samples].tolist()


def check_shuffle_fields(dataset: Any, window: Any) -> StoredSamples:
    """Return the dataset; raise `ArgumentError` if its class or its cache does not support windowed shuffling."""
    check_integer("shuffle_fields", window, 1, "a number of images from 1, or None")
    if not isinstance(dataset, StoredSamples):
        raise ArgumentError(
            f"needs a dataset of this package, not {type(dataset).__name__}",
            option="shuffle_fields",
            remedy="leave it out",
        )
    collection = dataset._collection
    if not dataset.preloaded and not dataset.source.images.storage_info().in_place:
        largest = np.sort(collection.image_bytes)[-window:]
        needed, cache_bytes = int(largest.sum()), collection.options.cache_bytes
        if cache_bytes < needed:
            raise ArgumentError(
                f"the cache of {dataset.path} has {cache_bytes} bytes, but the images of a window need {needed}",
                option="shuffle_fields",
                value=window,
                remedy=f"create the dataset with cache_bytes={needed}, or preload it",
            )
    return dataset


def describe_shuffle(dataset: StoredSamples, window: int, batch_size: int | None) -> str:
    """Describe a windowed order, and compare it with a full shuffle."""
    text = f"random over {window} images at a time"
    if batch_size is None or min(batch_size, len(dataset)) < 2:
        return text
    order = windowed_order(dataset.fields, window, torch.Generator().manual_seed(0))
    return f"{text}: {describe_mixing(dataset.fields[order], batch_size, 'image')}"


def describe_mixing(groups: Array, batch_size: int, group_name: str) -> str:
    """Return the rate at which two samples of a batch share a group, in this order and in a full shuffle."""
    size = min(batch_size, len(groups))
    batches = np.sort(groups[: min(len(groups) // size, _BATCHES) * size].reshape(-1, size), axis=1)
    _, batch_counts = np.unique(np.arange(len(batches))[:, None] * (groups.max() + 1) + batches, return_counts=True)
    _, counts = np.unique(groups, return_counts=True)
    same = (batch_counts * (batch_counts - 1)).sum() / (batches.size * (size - 1))
    uniform = (counts * (counts - 1)).sum() / (len(groups) * (len(groups) - 1))
    return f"two samples of a batch come from one {group_name} in {same:.2%} of cases ({uniform:.2%} in a full shuffle)"
