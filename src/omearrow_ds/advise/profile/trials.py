"""`Trial`: other settings, measured in turns with the current ones, and datasets that store pixels in another way."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.turns import LEAST_TIE, WORTH_IT, Rounds, gains, is_clear, median_ratio
from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.dataset.collection import Preload
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, AxesError, MemoryLimitError, OMEArrowDSError
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import available_cores, preload_limit_bytes
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import convert, open_source, refuse_opening_again
from omearrow_ds.text import as_flags, as_keywords, duration

Samples = TypeVar("Samples", bound=StoredSamples)
_REPEATED_S = 3.0  # Faster openings are repeated, as the first one in a process includes imports of libraries.
NOW = "now"  # Key of the current settings in rounds.
ON_DEMAND, PRELOAD = "on demand", "preload"
WAYS = (ON_DEMAND, PRELOAD, "cache_dir", "arrow")  # Trials that differ in the location of pixels.
_MOST_WORKERS = 4
_LARGER = 4


@dataclass(frozen=True)
class Trial:
    """Settings that differ from the current ones, and the measurement of a loop with these settings."""

    name: str
    options: str  # Flags of the command.
    code: str  # Python code of the settings.
    advice: str  # The settings as a sentence.
    setup_s: float | None = None  # One-time work, such as decoding or converting; None if not measured.
    samples_per_s: float | None = None  # Median rate over the rounds; None if not measured.
    gain: float | None = None  # That rate divided by the rate of the current settings.
    least_gain: float | None = None  # Minimum of single rounds.
    most_gain: float | None = None  # Maximum of single rounds.
    epoch_s: float | None = None
    break_even_epochs: int | None = None  # Epochs that pay the setup, compared with access on demand; None if never.
    clear: bool = True  # Whether the rounds agree that it is faster, or not faster, than access on demand.
    held_bytes: int = 0  # Bytes of `room` that it uses.
    room: str = ""  # "memory" or "disk".
    note: str = ""  # Why it was not measured, or only on a part of the images.

    @property
    def worth_it(self) -> bool:
        """Whether this trial was at least 10 % faster than the current settings, and faster in every round."""
        return self.gain is not None and self.gain >= WORTH_IT and (self.least_gain or 0.0) > 1.0

    def measured(self, rates: Mapping[str, Rounds], images: int) -> Trial:
        """Return a copy of this trial with results computed from the rates of all trials."""
        own, now, demand = rates.get(self.name), rates[NOW], rates.get(ON_DEMAND)
        if own is None:
            return self
        rate, ratios = median(own.values()), gains(own, now)
        trial = replace(
            self,
            samples_per_s=rate,
            gain=median_ratio(own, now),
            least_gain=min(ratios),
            most_gain=max(ratios),
            epoch_s=images / rate,
        )
        if demand is None or self.setup_s is None:
            return trial
        ratios, epoch_s = gains(own, demand), images / median(demand.values())
        epochs = break_even_epochs(self.setup_s, epoch_s, median_ratio(own, demand), min(ratios))
        return replace(trial, break_even_epochs=epochs, clear=is_clear(ratios))


Candidate = tuple[Trial, Callable[[], Loop]]  # The function is not called if the trial has a note.


def find_candidates(
    plain: Loop, opening: OpenOptions, decode_s: float, limit_s: float, folder: Path
) -> Iterator[Candidate]:
    """Yield the settings to try, in increasing order of costs other than time, such as memory or disk space.

    ``plain`` is the loop with the current settings, whose data was opened with ``opening``. Decoding all pixels takes
    ``decode_s``; files are not written if that exceeds ``limit_s``. ``folder`` is for temporary files.
    """
    demand, name = on_demand(plain.dataset), "images.arrow"
    # Without user code, a copy from memory is faster than transfer between processes.
    workers = plain.loader.num_workers if demand._has_user_code else 0
    size, free = demand.preload_bytes, shutil.disk_usage(folder).free
    note = over_limit_message(size, "disk", free, f"the free space in {folder.parent}")
    if not note and decode_s > limit_s:
        note = f"not tried: decoding all images takes about {duration(decode_s)}; raise seconds= to try it"

    def preload() -> Loop:
        if decode_s <= limit_s:
            return replace(plain, dataset=preloaded(demand), num_workers=workers)
        part = part_preloaded(demand, limit_s / 4)
        return replace(plain, dataset=part, num_workers=workers, batch_size=min(plain.batch_size, len(part)))

    if plain.dataset.preloaded:
        trial = Trial(ON_DEMAND, "--preload no", "OMEArrowDataset(path, preload=False)", "Read on demand")
        yield trial, lambda: replace(plain, dataset=demand)
    else:
        code, problem = "OMEArrowDataset(path, preload=True)", memory_problem(demand)
        trial = Trial(PRELOAD, "--preload yes", code, "Preload all pixels", held_bytes=size, room="memory")
        yield replace(trial, note=problem), preload
    code = "OMEArrowDataset(path, preload=True, cache_dir=FOLDER)"
    trial = Trial("cache_dir", code, code, "Keep decoded pixels in a mapped file (cache_dir=)")
    trial = replace(trial, held_bytes=size, room="disk", note=note)
    yield trial, lambda: replace(plain, dataset=preloaded(demand, folder), num_workers=workers)
    if demand.source.images.stacked() is None:  # The pixels are not mapped yet.
        command = shlex.join(["omearrow-ds", "convert", "PATH", name, *as_flags(opening)])
        code = f"convert({', '.join(['path', repr(name), *as_keywords(opening)])})"
        trial = replace(trial, name="arrow", options=command, code=code, advice="Convert to Arrow IPC")
        yield trial, lambda: replace(plain, dataset=converted(demand, folder / name))
    yield from _find_loader_candidates(plain)


def _find_loader_candidates(plain: Loop) -> Iterator[Candidate]:
    dataset, now, size = plain.dataset, plain.loader.num_workers, plain.batch_size * _LARGER
    if now or not dataset.preloaded or dataset._has_user_code:  # Otherwise samples are only copied from memory.
        number = 0 if now else min(available_cores(), _MOST_WORKERS)
        advice = f"Create batches in {number} workers" if number else "Create batches without workers"
        code = f"OMEArrowDataLoader(dataset, {plain.batch_size}, num_workers={number})"
        yield Trial("workers", f"--workers {number}", code, advice), lambda: replace(plain, num_workers=number)
    if len(dataset) >= size and dataset.shape is not None:
        code, advice = f"OMEArrowDataLoader(dataset, {size})", "Use larger batches if training allows it"
        trial = Trial("batch", f"--batch-size {size}", code, advice)
        yield trial, lambda: replace(plain, num_workers=now, batch_size=size)


def set_up(candidate: Candidate, images: int, stack: ExitStack) -> tuple[Trial, Loop | None]:
    """Return a trial and its loop, which ``stack`` closes, or None as the loop if the trial cannot be measured.

    If the loop has only a part of the images, its setup time is scaled to all of them.
    """
    trial, make = candidate
    if trial.note:
        return trial, None
    start = perf_counter()
    try:
        loop = stack.enter_context(make())
        setup_s = perf_counter() - start
        loop.warm_up()
    except (OMEArrowDSError, OSError) as error:
        return replace(trial, note=f"could not be set up: {error}"), None
    count = len(loop.dataset)
    note = f"estimated from the first {count:,} images" if count < images else ""
    return replace(trial, setup_s=setup_s * images / count if trial.room else None, note=note), loop


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return the number of epochs after which faster epochs have saved the setup time, or None if they never do.

    ``epoch_s`` is an epoch without the setup, ``gain`` the median speedup, and ``least_gain`` the speedup of the worst
    round. A setup that was not faster in every round never pays.
    """
    if gain < LEAST_TIE or least_gain <= 1.0:
        return None
    spared_s = epoch_s * (1 - 1 / gain)
    return max(1, -int(-setup_s // spared_s))


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
            raise ArgumentError("does not apply to a dataset", option=option, remedy="pass it only with a path")
        refuse_opening_again(opening, "a dataset")
        preload = data.preloaded if preload is None else preload
    elif isinstance(data, torch.utils.data.Dataset):
        remedy = "pass a path or a dataset of this package"
        raise ArgumentError(f"has the type {type(data).__name__}", option="data", remedy=remedy)
    for _ in range(2):
        start = perf_counter()
        if isinstance(data, StoredSamples):
            demand = on_demand(data)
        else:
            chosen: dict[str, Any] = {**options.chosen, **opening}
            demand = OMEArrowDataset(data, format_name, preload=False, progress=False, **chosen)
        len(demand.source)  # Opens the source of a dataset, which is lazy.
        open_s = perf_counter() - start
        if open_s > _REPEATED_S:
            break
    if not len(demand):
        raise ArgumentError("the collection is empty", path=demand.path, remedy="pass a collection with images")
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
    return over_limit_message(dataset.preload_bytes, "memory", preload_limit_bytes(), "half of the available memory")


def refuse_ragged(dataset: StoredSamples) -> None:
    """Raise `AxesError` if the stored samples differ in shape."""
    if dataset.shape is None:
        height, width = (int(size) for size in dataset.source.shapes[:, 3:].min(axis=0))
        remedy = f"crop_size=({height}, {width}) or smaller"
        if dataset.objects is not None:
            remedy = "crop_size=, resize= or pad_to="
        raise AxesError(
            f"{dataset.path}: samples differ in shape and cannot be stacked; pass {remedy}, a transform that returns "
            f"equal shapes, or batch_size=1"
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
    for image in chain.from_iterable(block for _, block in source.stream()):
        images.append(np.array(image))
        if perf_counter() - start > most_s and len(collection.samples_of(len(images))):
            break
    count = len(images)
    cache = PixelCache(source.shapes[:count], list(source.dtypes)[:count])
    for index, image in enumerate(images):
        cache[index][...] = image
    return dataset._with_reader(collection.first(count, cache.block))._subset_at(collection.samples_of(count))
