"""Profiled datasets: opened and checked, and variants of them with pixels kept in another way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.dataset.collection import Preload
from omearrow_ds.dataset.options import make_dataset
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, AxesError, MemoryLimitError
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import preload_limit_bytes
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import convert, open_source, refuse_opening_again

Samples = TypeVar("Samples", bound=StoredSamples)
_REPEATED_S = 3.0  # Faster openings are repeated, as the first one in a process includes imports of libraries.


@dataclass(frozen=True)
class ProfiledDataset:
    """The profiled dataset, with the options that a path was opened with.

    ``open_s`` and ``preload_s`` are the seconds of opening and of decoding (None if nothing was decoded).
    """

    dataset: StoredSamples
    open_s: float
    preload_s: float | None
    opening: OpenOptions


def open_samples(
    data: Paths | StoredSamples,
    format_name: str | None,
    options: SampleSettings,
    preload: Preload | None,
    opening: OpenOptions,
    *,
    progress: bool,
) -> ProfiledDataset:
    """Open the data to profile; raise an error if no images exist, memory is too small, or options conflict."""
    if isinstance(data, StoredSamples):
        for option in (*options.chosen, *([] if format_name is None else ["format"])):
            raise ArgumentError("cannot be changed for a dataset", option=option, remedy="pass it only with a path")
        refuse_opening_again(opening, "a dataset")
        preload = data.preloaded if preload is None else preload
    elif isinstance(data, torch.utils.data.Dataset):
        remedy = "pass a path or a dataset of this package"
        raise ArgumentError(f"is a {type(data).__name__}", option="data", remedy=remedy)
    for _ in range(2):
        start = perf_counter()
        if isinstance(data, StoredSamples):
            demand = on_demand(data)
        else:
            demand = make_dataset(options, data, format_name, preload=False, **opening)
        len(demand.source)  # Opens the source of a dataset, which is lazy.
        open_s = perf_counter() - start
        if open_s > _REPEATED_S:
            break
    if not len(demand):
        raise ArgumentError("holds no images to profile", path=demand.path)
    problem = memory_problem(demand)
    if not preload or (preload == "auto" and problem):
        return ProfiledDataset(demand, open_s, None, opening)
    if problem:
        raise MemoryLimitError(f"{demand.path}: preloading {problem}; pass preload=False or preload='auto'")
    start = perf_counter()
    dataset = preloaded(demand, progress=progress)
    return ProfiledDataset(dataset, open_s, perf_counter() - start, opening)


def memory_problem(dataset: StoredSamples) -> str:
    """Return why the decoded pixels exceed half of the available memory, or an empty string if they fit."""
    return over_limit_message(
        dataset.preload_bytes, "memory", preload_limit_bytes(), "half of the memory available now"
    )


def refuse_ragged(dataset: StoredSamples) -> None:
    """Raise `AxesError` if the stored samples differ in shape."""
    if dataset.shape is None:
        height, width = (int(size) for size in dataset.source.shapes[:, 3:].min(axis=0))
        remedy = f"crop_size=({height}, {width}) or smaller"
        if dataset.objects is not None:
            remedy = "crop_size=, resize= or pad_to="
        raise AxesError(
            f"{dataset.path}: samples differ in shape and cannot be stacked; pass {remedy}, a transform that gives "
            f"all samples one shape, or batch_size=1"
        )


def on_demand(dataset: Samples) -> Samples:
    masks = dataset._mask_collection
    return dataset._with_reader(dataset._collection.on_demand(), None if masks is None else masks.on_demand())


def preloaded(dataset: Samples, folder: Path | None = None, *, progress: bool = False) -> Samples:
    """Return a copy with all images and masks decoded into memory, or into memory-mapped files in ``folder``."""
    masks = dataset._mask_collection
    masks = None if masks is None else masks.preloaded(folder, progress=progress)
    return dataset._with_reader(dataset._collection.preloaded(folder, progress=progress), masks)


def converted(dataset: Samples, file: Path) -> Samples:
    convert(dataset.source, file)
    return dataset._with_reader(dataset._collection.on_demand(open_source(file)))


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
