"""`ProfiledDataset`: a collection or dataset that is opened and checked for profiling."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from omearrow_ds.advise.profile.variants import on_demand, preloaded
from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.dataset.collection import Preload
from omearrow_ds.dataset.options import make_dataset
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, AxesError, MemoryLimitError
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import preload_limit_bytes
from omearrow_ds.storage.formats import get_format, of_suffix
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import refuse_opening_again

_AGAIN_S = 1.0  # Faster openings are repeated, as the first one in a process includes initialization of libraries.


@dataclass(frozen=True)
class ProfiledDataset:
    """The profiled dataset, and a variant of it that reads images on demand; both may be one object.

    ``open_s`` and ``preload_s`` are the seconds of opening and of decoding (None if nothing was decoded). ``opening``
    are the options that a path was opened with.
    """

    demand: StoredSamples
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
    """Open the data to profile; raise an error if it has no images, exceeds memory, or is a dataset with options."""
    if not isinstance(data, torch.utils.data.Dataset):
        named = of_suffix(str(data)) if format_name is None else get_format(format_name)
        if named is not None and not named.missing_backend:
            named.module()  # Imports before the clock starts, as they are not part of opening.
    start = perf_counter()
    if isinstance(data, StoredSamples):
        for option in (*options.chosen, *([] if format_name is None else ["format"])):
            raise ArgumentError("a dataset already has it", option=option, remedy="pass it only with a path")
        refuse_opening_again(opening, "a dataset")
        demand = on_demand(data)
        len(demand.source)  # Opens the source, which is lazy.
        is_preloaded = data.preloaded if preload is None else preload
    elif isinstance(data, torch.utils.data.Dataset):
        raise ArgumentError(
            f"is a {type(data).__name__}", option="data", remedy="pass a path or a dataset of this package"
        )
    else:
        demand = make_dataset(options, data, format_name, preload=False, **opening)
        if perf_counter() - start < _AGAIN_S:
            start = perf_counter()
            demand = make_dataset(options, data, format_name, preload=False, **opening)
        is_preloaded = False if preload is None else preload
    open_s = perf_counter() - start
    if not len(demand):
        raise ArgumentError("holds no images to profile", path=demand.path)
    problem = memory_problem(demand)
    if not is_preloaded or (is_preloaded == "auto" and problem):
        return ProfiledDataset(demand, demand, open_s, None, opening)
    if problem:
        raise MemoryLimitError(f"{demand.path}: preloading {problem}; pass preload=False or preload='auto'")
    start = perf_counter()
    dataset = preloaded(demand, progress=progress)
    return ProfiledDataset(demand, dataset, open_s, perf_counter() - start, opening)


def remarks(dataset: StoredSamples, workers: int, device: torch.device | None) -> tuple[str, ...]:
    """Return remarks on work that is counted for a stage in which users would not expect it."""
    lines = []
    image = None if dataset.preloaded else dataset.source.views([0])[0]
    if image is None:
        lines.append("No read stage: the pixels are decoded in memory.")
    elif not image.flags.writeable and not image.flags.owndata:
        lines.append(
            "Images are views of the store's memory: what of it is a mapped file is read where it is first touched, in "
            "normalize as a rule, or where small images are gathered, in select."
        )
    threads = torch.get_num_threads()
    if not workers and threads > 1:
        lines.append(f"Batches of 8 MiB and more are filled by {threads} threads: all of that is in normalize.")
    if device is not None and device.type == "cuda":
        lines.append("Each stage waited for the device; without clocks, copies and compute overlap.")
    return tuple(lines)


def memory_problem(dataset: StoredSamples) -> str:
    """Return why the decoded pixels exceed half of the available memory, or an empty string if they fit."""
    return over_limit_message(
        dataset.preload_bytes, "memory", preload_limit_bytes(), "half of the memory available now"
    )


def check_batches(dataset: StoredSamples, batch_size: int) -> None:
    if dataset.shape is None and batch_size > 1 and not dataset._has_user_code:
        raise AxesError(ragged(dataset))


def ragged(dataset: StoredSamples) -> str:
    height, width = (int(size) for size in dataset.source.shapes[:, 3:].min(axis=0))
    remedy = f"crop_size=({height}, {width}) or smaller"
    if dataset.objects is not None:
        remedy = "crop_size=, resize= or pad_to="
    return (
        f"{dataset.path}: samples differ in shape, so they make no batches; pass {remedy}, a transform that gives all "
        f"samples one shape, or batch_size=1"
    )
