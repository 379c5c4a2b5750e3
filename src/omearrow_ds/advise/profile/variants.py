"""The same dataset with its pixels held in another way: a collection's pickled state says how to make it again."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.storage.source import convert, open_source

Samples = TypeVar("Samples", bound=StoredSamples)


def on_demand(dataset: Samples) -> Samples:
    """Return the dataset without pixels in memory, its store opened anew."""
    masks = None if dataset.mask_collection is None else _remade(dataset.mask_collection, None, cache=(False, None))
    return dataset.over(_remade(dataset.collection, None, cache=(False, None)), masks)


def preloaded(dataset: Samples, folder: Path | None = None, *, progress: bool = False) -> Samples:
    """Return the dataset with all pixels decoded, those of masks too, into memory or mapped files in ``folder``."""
    masks = dataset.mask_collection
    if masks is not None:
        masks = _remade(masks, folder, progress=progress, cache=(True, None))
    return dataset.over(_remade(dataset.collection, folder, progress=progress, cache=(True, None)), masks)


def converted(dataset: Samples, file: Path, name: str) -> Samples:
    """Return the dataset on demand from a new file of the format of that name."""
    convert(dataset.source, file, name)
    source = open_source(file, name)
    opening: dict[str, Any] = {"_opening": pickle.dumps(source), "_stamp": source.stamp, "path": file}
    return dataset.over(_remade(dataset.collection, None, cache=(False, None), **opening))


def part_preloaded(dataset: Samples, most_s: float) -> Samples:
    """Return a dataset of the collection's first images, as many as are decoded into memory until the time is over.

    Masks stay as they are.
    """
    source = dataset.collection.verified_source
    start, images = perf_counter(), []
    for image in _scanned(source):
        images.append(np.array(image))
        if perf_counter() - start > most_s and len(dataset.collection.samples_of(len(images))):
            break
    count = len(images)
    cache = PixelCache(source.shapes[:count], list(source.dtypes)[:count])
    for index, image in enumerate(images):
        cache[index][...] = image
    collection = dataset.collection
    first = dataset.over(_remade(collection, None, cache=(True, cache.block), **collection.first(count)))
    return first.picked(dataset.collection.samples_of(count))


def _scanned(source: Any) -> Iterator[np.ndarray[Any, Any]]:
    for _, images in source.blocks():
        yield from images


def _remade(collection: Collection, folder: Path | None, *, progress: bool = False, **changed: Any) -> Collection:
    """Return a collection from the state of one, some of which is changed."""
    state = collection.__getstate__()
    held = state["held"]._replace(cache_dir=folder, progress=progress)
    made = object.__new__(type(collection))
    made.__setstate__({**state, "held": held, **changed})
    return made
