"""`LayoutRounds`, measurements of all layouts that may be the fastest, and `scan`, measurements of loader settings."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from omearrow_ds.advise.recommend.choices import LoadingPlan, PlanCost, ReadBudget, StorageLayout, ranked
from omearrow_ds.advise.recommend.sample import Clock, Sample
from omearrow_ds.advise.turns import MOST_TIE, WORTH_IT, InterleavedRounds, noise
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import available_cores, over_limit_message
from omearrow_ds.storage.formats._base import Array, Images, stored_size
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.source import write_images
from omearrow_ds.storage.verified import verified_where_stored
from omearrow_ds.text import count

Access = Literal["random", "sequential"]
Result = TypeVar("Result")
_REOPENED_S = 0.5  # A collection that takes longer to open is opened once.
_MOST_ROUNDS, _MOST_LOADER_ROUNDS = 9, 7
_MIN_BATCHES, _MAX_BATCHES = 4, 200  # In an epoch of the scan of loader settings.
_SCREENED_PART = 8  # Every eighth image of the sample suffices to find layouts that cannot win.
_FEWEST_SCREENED = 16
_STAYING = (3.0, 2.0, 1.5, 1.3)  # Maximum cost of layouts that stay, as a multiple of the best, by round.
_LEAST_STAYING = 3
_ROUNDS_TO_AFFORD = 3
_FIRST_READS = 3
_TIME_IS_UP = "not measured: the time was up; raise --seconds, or name fewer formats"


class PlanTiming(NamedTuple):
    """Times of one plan in one round, in seconds; all except ``batch_s`` are for the whole collection."""

    convert_s: float
    open_s: float
    epoch_s: float
    batch_s: float

    def total_s(self, epochs: int) -> float:
        return self.convert_s + self.open_s + epochs * self.epoch_s


Timings = tuple[PlanTiming, PlanTiming]  # On demand, and preloaded.


def plan_costs(
    layout: StorageLayout, timings: Mapping[int, Timings], size_bytes: int, images: int, task: ReadBudget
) -> list[PlanCost]:
    """Return two costs of a layout, computed from timings by round: with images read on demand, and preloaded."""
    costs = []
    on_disk = "" if layout.as_it_is else over_limit_message(size_bytes, "disk", task.disk_bytes, task.disk_why)
    in_memory = over_limit_message(task.decoded_bytes, "memory", task.memory_bytes, "the memory budget")
    for preload, why_not in ((False, on_disk), (True, on_disk or in_memory)):
        by_round = {number: pair[preload] for number, pair in timings.items()}
        least = PlanTiming(*map(min, zip(*by_round.values(), strict=True)))
        totals_s = {number: timing.total_s(task.epochs) for number, timing in by_round.items()}
        unmeasured = "an epoch from memory could not be measured: no other format could be tried"
        reason = unmeasured if least.epoch_s == inf else why_not or None
        plan, rounds = LoadingPlan(layout, preload), (noise(totals_s.values()), len(timings), images, totals_s)
        costs.append(PlanCost(plan, size_bytes, *least, least.total_s(task.epochs), *rounds, reason))
    return costs


class Subject(NamedTuple):
    """Collection to measure, as a sample, and the settings for reading batches."""

    sample: Sample
    opening: OpenOptions
    access: Access
    batch_size: int
    settings: SampleSettings
    part_s: float  # An epoch that takes longer is estimated from its first batches.
    clock: Clock

    @property
    def source(self) -> Images:
        return self.sample.origin.source

    def timed(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> tuple[float, Result]:
        start_s = self.clock()
        result = function(*arguments, **options)
        return self.clock() - start_s, result

    def loader(self, dataset: OMEArrowDataset, order: Sequence[int], **settings: Any) -> OMEArrowDataLoader:
        if dataset.shape is None:
            settings["collate_fn"] = list  # Images of different shapes cannot be stacked.
        return OMEArrowDataLoader(dataset, sampler=order, **settings)

    def scan_s(self, take: Callable[[int, Array], Any]) -> float:
        """Pass the first images to ``take``, and return the estimated seconds for all images of the collection."""
        start_s, read_bytes = self.clock(), 0
        for first, images in verified_where_stored(self.source).stream():  # Like `convert` and preloading.
            for index, image in enumerate(images, start=first):
                take(index, image)
                read_bytes += image.nbytes
            is_enough = not self.sample.complete and read_bytes >= self.sample.size_bytes
            if is_enough or self.clock() - start_s > self.part_s:
                break
        return (self.clock() - start_s) * float(self.sample.lengths.sum()) / read_bytes


class LayoutTrial:
    """Measurement of the existing collection, or of one layout of the sample, which is written to ``folder``.

    Measured values are scaled to the whole collection: an epoch by ``factor``, one-time work and sizes by ``once``, and
    images on demand by ``growth``, because some readers decode several rows to return one.
    """

    def __init__(self, subject: Subject, layout: StorageLayout, folder: Path) -> None:
        self.subject, self.layout, self.size_bytes, self.is_ragged = subject, layout, 0, False
        self._slow: tuple[float, OMEArrowDataset] | None = None
        sample, origin, num_decoded = subject.sample, subject.sample.origin, 1
        images = np.asarray(sample.indices)
        if layout.as_it_is:
            self.path, self.once, crops = subject.source.header.path, 1.0, {**origin.options, **subject.opening}
            if subject.access == "sequential":  # Neighbors, as in a whole epoch.
                images = np.arange(len(images)) + (len(subject.source) - len(images)) // 2
        else:
            self.path, self.once = folder / f"images{layout.format.suffix}", sample.factor
            crops = origin.remap_to_copies(sample.indices)
            num_decoded = dict(layout.format.writer.rows_per_block).get(str(layout.compression), 1)
        self.growth = min(num_decoded, sample.whole_count) / min(num_decoded, len(sample.images))
        numbers = origin.within(images)
        numbers = numbers if len(numbers) else origin.within(sample.indices)
        self.indices, self.fields = numbers if layout.as_it_is else np.arange(len(numbers)), origin.fields[numbers]
        self.factor = len(origin.fields) / len(numbers)
        if origin.objects is None and layout.as_it_is:
            self.factor = float(sample.lengths.sum() / sample.lengths[images].sum())
        elif origin.objects is None:  # Regions or tiles.
            self.indices = self.fields = np.arange(len(sample.images))
            self.factor = sample.factor
        self.options: dict[str, Any] = {**subject.settings.chosen, **crops}

    def order(self, number: int) -> list[int]:
        """Return the order of samples in the epoch ``number``."""
        is_random, random = self.subject.access == "random", np.random.default_rng(number)
        order: list[int] = (in_turn(self.indices, self.fields, random) if is_random else self.indices).tolist()
        return order

    def dataset(self, *, preload: bool) -> OMEArrowDataset:
        header = self.subject.source.header
        path = header.requested_path or header.path if self.layout.as_it_is else self.path
        dataset = OMEArrowDataset(path, self.layout.format.name, preload=preload, progress=False, **self.options)
        self.is_ragged = dataset.shape is None
        return dataset

    def measure(self, number: int, read_s: float) -> Timings:
        """Measure round ``number``, and return the times with images read on demand and with preloaded images.

        ``read_s`` are the seconds of reading the collection, a part of every conversion. An epoch of preloaded images
        is infinite if it is not measured. Raises `OMEArrowDSError` if the layout cannot store the images.
        """
        subject, layout, as_it_is = self.subject, self.layout, self.layout.as_it_is
        convert_s, memory_s, sample = 0.0, inf, subject.sample
        if not as_it_is:
            shutil.rmtree(self.path.parent, ignore_errors=True)
            self.path.parent.mkdir()
            options = {"metadata": sample.metadata, "columns": sample.columns, **layout.write_options}
            write_s, _ = subject.timed(write_images, sample.images, self.path, layout.format.name, **options)
            convert_s = read_s + write_s * self.once
        opened_s, dataset = self._slow or subject.timed(self.dataset, preload=False)
        if as_it_is and opened_s >= _REOPENED_S:
            self._slow = opened_s, dataset
        first_s, epoch_s, batch_s = self._epoch(dataset, number)
        self.size_bytes = self.size_bytes or round(stored_size(dataset.source.images)[2] * self.once)
        if self._slow is None:
            dataset.source.close()
        if self._slow is not None or (as_it_is and not sample.complete):
            preload_s = opened_s + subject.scan_s(lambda _, image: np.array(image))
        else:
            preload_s, preloaded = subject.timed(self.dataset, preload=True)
            memory_s = self._epoch(preloaded, number)[1] * self.factor
        open_s, batch_s = opened_s + max(0.0, first_s - batch_s), batch_s * self.growth
        on_demand = PlanTiming(convert_s, open_s * self.once, epoch_s * self.factor * self.growth, batch_s)
        return on_demand, PlanTiming(convert_s, preload_s * self.once, memory_s, batch_s)

    def _epoch(self, dataset: OMEArrowDataset, number: int) -> tuple[float, float, float]:
        """Return the seconds of the first batch, of an epoch (estimated from its first batches), and of a batch."""
        subject, clock, num_read, batch_size = self.subject, self.subject.clock, 0, self.subject.batch_size
        # With random access, few images would repeat in a batch, as they rarely do in a large collection.
        size = min(batch_size, len(np.unique(self.fields))) if subject.access == "random" else batch_size
        loader = subject.loader(dataset, self.order(number), batch_size=size, num_workers=0)
        first_s, _ = subject.timed(lambda: next(iter(loader)))
        start_s = clock()
        for batch in loader:
            num_read += len(batch)
            if clock() - start_s > subject.part_s:
                break
        sample_s = (clock() - start_s) / num_read
        return first_s, sample_s * len(self.indices), sample_s * min(num_read, batch_size)


def in_turn(samples: Array, fields: Array, random: np.random.Generator) -> Array:
    """Return samples in random order, where each pass takes one crop per image, so that repetitions are rare."""
    order = random.permutation(len(samples))
    numbers = defaultdict[int, Iterator[int]](itertools.count)
    turns = [next(numbers[field]) for field in fields[order].tolist()]
    ordered: Array = samples[order[np.argsort(turns, kind="stable")]]
    return ordered


@dataclass
class LayoutRounds:
    """Measurements of layouts until ``deadline_s``: the cost of each plan, and the trials of the measured layouts."""

    subject: Subject
    task: ReadBudget
    folder: Path
    deadline_s: float
    progress: tqdm
    costs: dict[LoadingPlan, PlanCost] = field(default_factory=dict)
    trials: dict[StorageLayout, LayoutTrial] = field(default_factory=dict)
    _read_s: float = inf  # Minimum so far; reading is the same part of every conversion.
    _took_s: dict[StorageLayout, float] = field(default_factory=dict)

    def run(self, layouts: Iterable[StorageLayout]) -> None:
        """Measure every layout once, in a part of a large sample; then those that may still be the best."""
        whole = self.subject
        turns = InterleavedRounds[StorageLayout, Timings](lambda: whole.clock() > self.deadline_s)
        step = _SCREENED_PART if len(whole.sample.images) >= _SCREENED_PART * _FEWEST_SCREENED else 1
        live = list(layouts)
        for number in range(_MOST_ROUNDS):
            subject = whole if number or step == 1 else whole._replace(sample=whole.sample.part(step))
            if number == 1 and step > 1:
                turns.figures.clear()
                self.trials.clear()
            num_images = len(subject.sample.images)
            self.progress.reset(total=len(live))
            self.progress.set_description(f"round {number + 1}: {len(live)} ways to store {num_images:,} images")
            for _ in range(1 if number else _FIRST_READS):
                self._read_s = min(self._read_s, subject.scan_s(lambda index, _: whole.source.metadata(index)))
            late = turns.round(live, partial(self._measure, subject, number))
            for layout in late if number == 0 else ():
                self._leave_out(layout, _TIME_IS_UP)
            current = {layout: by_round for layout, by_round in turns.figures.items() if number in by_round}
            epochs_s = [by_round[number][1].epoch_s for by_round in current.values()]
            memory_s = median([epoch_s for epoch_s in epochs_s if epoch_s < inf] or [inf])
            for layout, by_round in current.items():
                on_demand, preloaded = by_round[number]  # An epoch from memory does not depend on the layout.
                by_round[number] = on_demand, preloaded._replace(epoch_s=memory_s)
                costs = plan_costs(layout, by_round, self.trials[layout].size_bytes, num_images, self.task)
                self.costs |= {cost.plan: cost for cost in costs}
            if late:
                break
            live = self._remaining(live, number, step)
            next_s = sum(self._took_s[layout] for layout in live)
            if not live or (number and whole.clock() + next_s > self.deadline_s):
                break

    def trial_for(self, plan: LoadingPlan) -> LayoutTrial | None:
        """Return a trial with which to measure a plan, or None; preloaded pixels are equal in all trials."""
        if plan.preload and plan.layout.as_it_is:
            return next((trial for layout, trial in self.trials.items() if not layout.as_it_is), None)
        return self.trials.get(plan.layout)

    def _leave_out(self, layout: StorageLayout, why: str) -> None:
        plan = LoadingPlan(layout, preload=False)
        self.costs[plan] = PlanCost(plan, why_not=why)

    def _measure(self, subject: Subject, number: int, layout: StorageLayout) -> Timings | None:
        """Measure a layout, or leave it out and return None if it cannot store the images."""
        self.progress.update()
        folder = self.folder / "-".join((layout.format.name, layout.encoding, str(layout.compression)))
        trial = self.trials.get(layout) or LayoutTrial(subject, layout, folder)
        is_warm = any((one.format, one.as_it_is) == (layout.format, layout.as_it_is) for one in self._took_s)
        try:
            if not is_warm:  # The first use of a library includes import and initialization.
                LayoutTrial(subject, layout, folder).measure(number, 0.0)
            self._took_s[layout], timing = subject.timed(trial.measure, number, self._read_s)
        except OMEArrowDSError as error:
            if layout.as_it_is:
                raise
            self._leave_out(layout, str(error).replace(f"{trial.path}: ", ""))
            return None
        self.trials[layout] = trial
        return timing

    def _remaining(self, live: Sequence[StorageLayout], number: int, step: int) -> list[StorageLayout]:
        """Return the existing files, and the layouts near the best; after round 0, only those that time allows."""
        rows: dict[StorageLayout, PlanCost] = {}
        for row in ranked(self.costs.values()):
            if row.rounds and row.plan.layout in live:
                rows.setdefault(row.plan.layout, row)
        limit_s = next((row.total_s for row in rows.values()), inf) * _STAYING[min(number, len(_STAYING) - 1)]
        left_s = inf if number else (self.deadline_s - self.subject.clock()) / _ROUNDS_TO_AFFORD
        remaining: list[StorageLayout] = []
        for layout, row in rows.items():
            left_s -= self._took_s[layout] * step
            is_near = len(remaining) < _LEAST_STAYING or (row.total_s <= limit_s and left_s >= 0)
            if (row.why_not is None and is_near) or layout.as_it_is:
                remaining.append(layout)
        return remaining


@dataclass(frozen=True)
class Settings:
    """Settings of a loader; ``start_method=None`` selects the default start method of `OMEArrowDataLoader`."""

    num_workers: int
    batch_size: int
    prefetch_factor: int | None = None
    start_method: str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords that configure `OMEArrowDataLoader` with these settings, without its default values."""
        of_workers = {"prefetch_factor": self.prefetch_factor, "multiprocessing_context": self.start_method}
        chosen = {name: value for name, value in of_workers.items() if self.num_workers and value not in (None, 2)}
        return {"num_workers": self.num_workers, **chosen}

    @property
    def label(self) -> str:
        workers = f", prefetch {self.prefetch_factor or 2}, started by {self.start_method or 'this package'}"
        return f"{count(self.num_workers, 'worker')}, batches of {self.batch_size}{workers if self.num_workers else ''}"


@dataclass(frozen=True)
class LoaderTiming:
    """Loader settings and the seconds per sample in their fastest round, or None if only the start was timed."""

    settings: Settings
    sample_s: float | None
    start_s: float  # Includes the start of workers.
    rounds: int
    ratio: float | None  # The seconds per sample divided by those without workers.

    def apply(self, row: PlanCost, epochs: int) -> PlanCost:
        """Return the cost that a plan has with these settings; ``row`` is its cost without workers."""
        if not self.settings.num_workers or self.ratio is None:
            return row
        gained_s = epochs * row.epoch_s * (1 - self.ratio) - self.start_s
        totals_s = {number: max(0.0, total_s - gained_s) for number, total_s in row.totals_s.items()}
        total_s = max(0.0, row.total_s - gained_s)
        return replace(row, epoch_s=row.epoch_s * self.ratio, total_s=total_s, totals_s=totals_s)


def grid(batch_size: int, cores: int) -> list[Settings]:
    """Return the loader settings to scan; the first ones have no workers and the requested ``batch_size``."""
    settings = [Settings(0, batch_size), Settings(0, 4 * batch_size)]
    if cores == 1:
        return settings  # A worker would compete with this process for the core.
    workers = [number for number in (1, 2, 4, 8, 16) if number < cores] + [cores]
    return [*settings, *(Settings(number, batch_size, 2) for number in workers), Settings(cores, batch_size, 4)]


def scan(
    trial: LayoutTrial, row: PlanCost, deadline_s: float, progress: tqdm, start_methods: Sequence[str] = ()
) -> list[LoaderTiming]:
    """Time an epoch of the plan ``row`` with each loader setting, and then with other start methods."""
    subject, clock, batch_size = trial.subject, trial.subject.clock, trial.subject.batch_size
    half_time_s, settings = (clock() + deadline_s) / 2, grid(batch_size, available_cores())
    progress.reset(total=len(settings))
    progress.set_description("loader settings")
    dataset = trial.dataset(preload=row.plan.preload)
    batch_s = row.epoch_s * batch_size / (trial.factor * len(trial.indices))
    num_batches = min(_MAX_BATCHES, max(_MIN_BATCHES, int(subject.part_s / 2 / max(batch_s, 1e-6))))
    endless = itertools.chain.from_iterable(map(trial.order, itertools.count()))
    order = [*itertools.islice(endless, num_batches * batch_size)]
    loaders: dict[Settings, OMEArrowDataLoader] = {}

    def start(setting: Settings) -> float:
        start_s = clock()
        loaders[setting] = subject.loader(dataset, order, batch_size=setting.batch_size, **setting.keywords)
        batches = iter(loaders[setting])
        next(batches)
        first_s = clock() - start_s
        deque(batches, 0)
        progress.update()
        return first_s

    starts_s = {setting: start(setting) for setting in settings if not loaders or clock() <= half_time_s}
    turns: InterleavedRounds[Settings, float] = InterleavedRounds(lambda: turns.rounds > 0 and clock() > deadline_s)
    turns.run(loaders, lambda setting: subject.timed(deque, loaders[setting], 0)[0] / len(order), _MOST_LOADER_ROUNDS)
    loaders.clear()  # Ends their workers.
    least_s = {setting: min(times_s.values()) for setting, times_s in turns.figures.items()}
    timings = [
        LoaderTiming(setting, sample_s, starts_s[setting], turns.rounds, sample_s / least_s[settings[0]])
        for setting, sample_s in least_s.items()
    ]
    fastest = best(timings).settings
    for other in [replace(fastest, start_method=name) for name in start_methods if fastest.num_workers]:
        timings.append(LoaderTiming(other, None, start(other), 0, None))
        loaders.clear()
    dataset.source.close()
    return timings


def best(timings: Sequence[LoaderTiming], work_s: float = inf) -> LoaderTiming:
    """Return the settings with the fewest workers, out of the fastest settings with the requested batch size.

    Workers must save more of ``work_s``, the time of all epochs without workers, than their start takes.
    """
    first = timings[0]
    alike = [(timing, timing.ratio) for timing in timings if timing.settings.batch_size == first.settings.batch_size]
    ratios = [(one, ratio) for one, ratio in alike if ratio and (one is first or work_s * (1 - ratio) > one.start_s)]
    least = min(ratio for _, ratio in ratios)
    if least * WORTH_IT > 1:
        return first
    near = [timing for timing, ratio in ratios if ratio <= least * MOST_TIE]
    return min(near, key=lambda timing: (timing.settings.num_workers, timing.settings.prefetch_factor or 0))
