"""Variants of a dataset: the same samples with pixels kept in another way."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np

from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.storage.source import convert, open_source

Samples = TypeVar("Samples", bound=StoredSamples)


def on_demand(dataset: Samples) -> Samples:
    masks = dataset._mask_collection
    return dataset._with_reader(dataset._collection.on_demand(), None if masks is None else masks.on_demand())


def preloaded(dataset: Samples, folder: Path | None = None, *, progress: bool = False) -> Samples:
    """Return a copy with all images and masks decoded into memory, or into memory-mapped files in ``folder``."""
    masks = dataset._mask_collection
    masks = None if masks is None else masks.preloaded(folder, progress=progress)
    return dataset._with_reader(dataset._collection.preloaded(folder, progress=progress), masks)


def converted(dataset: Samples, file: Path, name: str) -> Samples:
    convert(dataset.source, file, name)
    return dataset._with_reader(dataset._collection.on_demand(open_source(file, name)))


def part_preloaded(dataset: Samples, most_s: float) -> Samples:
    """Decode the first images into memory for about ``most_s`` seconds, and return a dataset of these images.

    Masks stay as they are.
    """
    collection, source = dataset._collection, dataset._collection.verified_source
    start, images = perf_counter(), []
    for image in chain.from_iterable(block for _, block in source.blocks()):
        images.append(np.array(image))
        if perf_counter() - start > most_s and len(collection.samples_of(len(images))):
            break
    count = len(images)
    cache = PixelCache(source.shapes[:count], list(source.dtypes)[:count])
    for index, image in enumerate(images):
        cache[index][...] = image
    return dataset._with_reader(collection.first(count, cache.block))._subset_at(collection.samples_of(count))
