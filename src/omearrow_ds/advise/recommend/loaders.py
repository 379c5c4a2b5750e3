"""Scan of loader settings: workers, prefetching, batch size and start method."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from tqdm import tqdm

from omearrow_ds.advise.recommend.choices import PlanCost
from omearrow_ds.advise.recommend.trials import LayoutTrial
from omearrow_ds.advise.turns import MOST_TIE, WORTH_IT, InterleavedRounds
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.resources import available_cores
from omearrow_ds.text import count

_MIN_BATCHES, _MAX_BATCHES = 4, 200  # In an epoch of the scan.
_MOST_ROUNDS = 7


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
    """Loader settings and the seconds per sample in their fastest round, or None if only the start was timed.

    ``start_s`` includes the start of workers; ``ratio`` is ``sample_s`` divided by its value without workers.
    """

    settings: Settings
    sample_s: float | None
    start_s: float
    rounds: int
    ratio: float | None

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
    """Time an epoch of the plan ``row`` with each loader setting, and then with other start methods.

    ``start_methods`` are names of multiprocessing, tried with the best number of workers if that is not 0. They run the
    main script again in each worker, so it needs a ``__main__`` guard.
    """
    subject, num_samples = trial.subject, len(trial.indices)
    clock, batch_size = subject.clock, subject.batch_size
    half_time_s, settings = (clock() + deadline_s) / 2, grid(batch_size, available_cores())
    progress.reset(total=len(settings))
    progress.set_description("loader settings")
    dataset = trial.dataset(preload=row.plan.preload)
    batch_s = row.epoch_s * batch_size / (trial.factor * num_samples)
    num_batches = min(_MAX_BATCHES, max(_MIN_BATCHES, int(subject.part_s / 2 / max(batch_s, 1e-6))))
    epochs = range(-(-num_batches * batch_size // num_samples))
    order = [index for epoch in epochs for index in trial.order(epoch)][: num_batches * batch_size]
    loaders: dict[Settings, OMEArrowDataLoader] = {}

    def start(setting: Settings) -> float:
        """Run an epoch and return the seconds until its first batch."""
        start_s = clock()
        loaders[setting] = subject.loader(dataset, order, batch_size=setting.batch_size, **setting.keywords)
        batches = iter(loaders[setting])
        next(batches)
        first_s = clock() - start_s
        deque(batches, 0)
        progress.update()
        return first_s

    starts_s: dict[Settings, float] = {}
    for setting in settings:
        if not starts_s or clock() <= half_time_s:
            starts_s[setting] = start(setting)
    turns: InterleavedRounds[Settings, float] = InterleavedRounds(lambda: turns.rounds > 0 and clock() > deadline_s)
    turns.run(loaders, lambda setting: subject.timed(deque, loaders[setting], 0)[0] / len(order), _MOST_ROUNDS)
    loaders.clear()  # Ends their workers.
    first_s = min(turns.figures[settings[0]].values())
    timings = []
    for setting, times_s in turns.figures.items():
        least_s = min(times_s.values())
        timings.append(LoaderTiming(setting, least_s, starts_s[setting], turns.rounds, least_s / first_s))
    fastest = best(timings).settings
    for method in start_methods if fastest.num_workers else ():
        other = replace(fastest, start_method=method)
        timings.append(LoaderTiming(other, None, start(other), 0, None))
        loaders.clear()
    dataset.source.close()
    return timings


def best(timings: Sequence[LoaderTiming], work_s: float = inf) -> LoaderTiming:
    """Return the settings with the fewest workers, out of the fastest settings with the requested batch size.

    Workers must save more of ``work_s``, the time of all epochs without workers, than their start takes.
    """
    first = timings[0]
    ratios = {
        timing: timing.ratio
        for timing in timings
        if timing.ratio is not None
        and timing.settings.batch_size == first.settings.batch_size
        and (timing is first or work_s * (1 - timing.ratio) > timing.start_s)
    }
    least = min(ratios.values())
    if least * WORTH_IT > 1:
        return first
    near = [timing for timing, ratio in ratios.items() if ratio <= least * MOST_TIE]
    return min(near, key=lambda timing: (timing.settings.num_workers, timing.settings.prefetch_factor or 0))
