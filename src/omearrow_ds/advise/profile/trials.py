"""`Trial`: other settings, measured in turns with the current ones, and datasets that store pixels in another way."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.turns import LEAST_TIE, WORTH_IT, Rounds, gains, median_ratio, mostly_agree
from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.dataset.collection import Preload
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, MemoryLimitError, OMEArrowDSError
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import available_cores, preload_limit_bytes
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import convert, open_source, refuse_opening_again
from omearrow_ds.text import as_flags, as_keywords, duration

Samples = TypeVar("Samples", bound=StoredSamples)
_REPEATED_S = 3.0  # Faster openings are repeated, as the first one in a process includes imports of libraries.
ON_DEMAND, PRELOAD = "on demand", "preload"
WAYS = (ON_DEMAND, PRELOAD, "cache_dir", "arrow")  # Trials that differ in the location of pixels.
_CONVERTED = "images.arrow"
_MOST_WORKERS = 4
_LARGER = 4


@dataclass(frozen=True)
class Trial:
    """Settings that differ from the current ones, and the measurement of a loop with these settings."""

    name: str
    options: str = ""  # Flags of the command.
    code: str = ""  # Python code of the settings.
    advice: str = ""  # The settings as a sentence.
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

    def measured(self, rates: Mapping[str, Rounds], now: str, images: int) -> Trial:
        """Return a copy with results computed from the rates of all trials; ``now`` has the current settings."""
        own, demand = rates.get(self.name), rates.get(ON_DEMAND)
        if own is None:
            return self
        rate, ratios = median(own.values()), gains(own, rates[now])
        ratio = median_ratio(own, rates[now])
        trial = replace(self, samples_per_s=rate, gain=ratio, epoch_s=images / rate)
        trial = replace(trial, least_gain=min(ratios), most_gain=max(ratios))
        if demand is None or self.setup_s is None:
            return trial
        ratios, epoch_s = gains(own, demand), images / median(demand.values())
        epochs = break_even_epochs(self.setup_s, epoch_s, median_ratio(own, demand), min(ratios))
        # The rounds agree on a speedup, or on its absence.
        clear = mostly_agree(ratio > 1.0 for ratio in ratios) or mostly_agree(ratio < LEAST_TIE for ratio in ratios)
        return replace(trial, break_even_epochs=epochs, clear=clear)


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return the number of epochs after which faster epochs have saved the setup time, or None if they never do.

    ``epoch_s`` is an epoch without the setup, ``gain`` the median speedup, and ``least_gain`` the speedup of the worst
    round. A setup that was not faster in every round never pays.
    """
    if gain < LEAST_TIE or least_gain <= 1.0:
        return None
    return max(1, -int(-setup_s // (epoch_s * (1 - 1 / gain))))


Candidate = tuple[Trial, Callable[[], Loop]]  # The function is not called if the trial has a note.


def find_candidates(
    plain: Loop, opening: OpenOptions, decode_s: float, limit_s: float, folder: Path
) -> Iterator[Candidate]:
    """Yield the settings to try, in increasing order of costs other than time, such as memory or disk space.

    ``plain`` is the loop with the current settings, whose data was opened with ``opening``. Decoding all pixels takes
    ``decode_s``; files are not written if that exceeds ``limit_s``. ``folder`` is for temporary files.
    """
    demand, now, large = on_demand(plain.dataset), plain.loader.num_workers, plain.batch_size * _LARGER
    size, has_user_code = demand.preload_bytes, demand._has_user_code
    workers = now if has_user_code else 0  # Without user code, a copy is faster than transfer between processes.
    note = over_limit_message(size, "disk", shutil.disk_usage(folder).free, f"the free space in {folder.parent}")
    if not note and decode_s > limit_s:
        note = f"not tried: decoding all images takes about {duration(decode_s)}; raise seconds= to try it"

    def preload() -> Loop:
        dataset = preloaded(demand) if decode_s <= limit_s else part_preloaded(demand, limit_s / 4)
        return replace(plain, dataset=dataset, num_workers=workers, batch_size=min(plain.batch_size, len(dataset)))

    if plain.dataset.preloaded:
        trial = Trial(ON_DEMAND, "--preload no", "OMEArrowDataset(path, preload=False)", "Read on demand")
        yield trial, lambda: replace(plain, dataset=demand)
    else:
        code, problem = "OMEArrowDataset(path, preload=True)", memory_problem(demand)
        trial = Trial(PRELOAD, "--preload yes", code, "Preload all pixels", held_bytes=size, room="memory")
        yield replace(trial, note=problem), preload
    code, advice = "OMEArrowDataset(path, preload=True, cache_dir=FOLDER)", "Keep decoded pixels in a mapped file"
    trial = Trial("cache_dir", code, code, f"{advice} (cache_dir=)", held_bytes=size, room="disk", note=note)
    yield trial, lambda: replace(plain, dataset=preloaded(demand, folder), num_workers=workers)
    if demand.source.images.mapped_stacks() is None:  # The pixels are not mapped yet.
        command = shlex.join(["omearrow-ds", "convert", "PATH", _CONVERTED, *as_flags(opening)])
        code = f"convert({', '.join(['path', repr(_CONVERTED), *as_keywords(opening)])})"
        trial = replace(trial, name="arrow", options=command, code=code, advice="Convert to Arrow IPC")
        yield trial, lambda: replace(plain, dataset=converted(demand, folder / _CONVERTED))
    if now or not plain.dataset.preloaded or has_user_code:  # Otherwise samples are only copied from memory.
        number = 0 if now else min(available_cores(), _MOST_WORKERS)
        advice = f"Create batches in {number} workers" if number else "Create batches without workers"
        code = f"OMEArrowDataLoader(dataset, {plain.batch_size}, num_workers={number})"
        yield Trial("workers", f"--workers {number}", code, advice), lambda: replace(plain, num_workers=number)
    if len(plain.dataset) >= large and plain.dataset.shape is not None:
        code, advice = f"OMEArrowDataLoader(dataset, {large})", "Use larger batches if training allows it"
        trial = Trial("batch", f"--batch-size {large}", code, advice)
        yield trial, lambda: replace(plain, num_workers=now, batch_size=large)


def set_up(candidates: Iterable[Candidate], images: int, stack: ExitStack) -> tuple[list[Trial], dict[str, Loop]]:
    """Return all trials, and by name the loops of those that can be measured, which ``stack`` closes.

    If a loop has only a part of the images, its setup time is scaled to all of them.
    """
    trials, loops = [], {}
    for trial, make in candidates:
        note = trial.note
        setup_s = None
        try:
            if not note:
                start = perf_counter()
                loop = stack.enter_context(make())
                setup_s = (perf_counter() - start) * images / len(loop.dataset) if trial.room else None
                loop.warm_up()
                loops[trial.name] = loop
                note = "" if (count := len(loop.dataset)) == images else f"estimated from the first {count:,} images"
        except (OMEArrowDSError, OSError) as error:
            setup_s, note = None, f"could not be set up: {error}"
        trials.append(replace(trial, setup_s=setup_s, note=note))
    return trials, loops


class ProfiledDataset(NamedTuple):
    """The profiled dataset, seconds of opening it, and the options that a path was opened with.

    ``current`` is the trial of the current location of pixels.
    """

    dataset: StoredSamples
    open_s: float
    opening: OpenOptions
    current: Trial


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
    elif not is_path(data):
        raise ArgumentError(
            f"has the type {type(data).__name__}", option="data", remedy="pass a path or a dataset of this package"
        )
    chosen: dict[str, Any] = {**options.chosen, **opening, "preload": False, "progress": False}
    for _ in range(2):
        start = perf_counter()
        demand = on_demand(data) if isinstance(data, StoredSamples) else OMEArrowDataset(data, format_name, **chosen)
        len(demand.source)  # Opens the source of a dataset, which is lazy.
        open_s = perf_counter() - start
        if open_s > _REPEATED_S:
            break
    if not len(demand):
        raise ArgumentError("the collection is empty", path=demand.path, remedy="pass a collection with images")
    problem = memory_problem(demand)
    if not preload or (preload == "auto" and problem):
        return ProfiledDataset(demand, open_s, opening, Trial(ON_DEMAND, setup_s=0.0))
    if problem:
        raise MemoryLimitError(f"{demand.path}: preloading {problem}; pass preload=False or preload='auto'")
    start = perf_counter()
    dataset = preloaded(demand, progress=progress)
    setup_s, size = perf_counter() - start, demand.preload_bytes
    return ProfiledDataset(dataset, open_s, opening, Trial(PRELOAD, setup_s=setup_s, held_bytes=size, room="memory"))


def memory_problem(dataset: StoredSamples) -> str:
    """Return why the decoded pixels exceed half of the available memory, or an empty string if they fit."""
    return over_limit_message(dataset.preload_bytes, "memory", preload_limit_bytes(), "half of the available memory")


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
