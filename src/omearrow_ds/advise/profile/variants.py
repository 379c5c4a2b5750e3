"""The same dataset with its pixels held in another way: a collection's pickled state says how to make it again."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.storage.source import convert, open_source

Samples = TypeVar("Samples", bound=StoredSamples)


def on_demand(dataset: Samples) -> Samples:
    """Return the dataset without pixels in memory, its store opened anew."""
    return _made(dataset, None, cache=(False, None))


def preloaded(dataset: Samples, folder: Path | None = None, *, progress: bool = False) -> Samples:
    """Return the dataset with all pixels decoded, into memory or into a mapped file in ``folder``."""
    return _made(dataset, folder, progress=progress, cache=(True, None))


def converted(dataset: Samples, file: Path, name: str) -> Samples:
    """Return the dataset on demand from a new file of the format of that name."""
    convert(dataset.source, file, name)
    source = open_source(file, name)
    opening: dict[str, Any] = {"_opening": pickle.dumps(source), "_stamp": source.stamp, "path": file}
    return _made(dataset, None, cache=(False, None), **opening)


def part_preloaded(dataset: Samples, most_s: float) -> Samples:
    """Return a dataset of the collection's first images, as many as are decoded into memory until the time is over."""
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
    first = _made(dataset, None, cache=(True, cache.block), **dataset.collection.first(count))
    return first.picked(dataset.collection.samples_of(count))


def _scanned(source: Any) -> Iterator[np.ndarray[Any, Any]]:
    for _, images in source.blocks():
        yield from images


def _made(dataset: Samples, folder: Path | None, *, progress: bool = False, **changed: Any) -> Samples:
    """Return a dataset of the same type over a collection from the state of one, some of which is changed."""
    state = dataset.collection.__getstate__()
    held = state["held"]._replace(cache_dir=folder, progress=progress)
    made = object.__new__(type(dataset.collection))
    made.__setstate__({**state, "held": held, **changed})
    return dataset.over(made)
