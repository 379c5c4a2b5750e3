"""Scan of loader settings: workers, prefetching, batch size and start method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from tqdm import tqdm

from omearrow_ds.advise.recommend.trials import AccessPattern
from omearrow_ds.advise.turns import MOST_TIE, WORTH_IT, InterleavedRounds
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.text import count

_BATCHES = (4, 200)  # Minimum and maximum number of batches of an epoch of the scan.
_MOST_ROUNDS = 7
_BATCH_TIMES = 4


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
        keywords: dict[str, Any] = {"num_workers": self.num_workers}
        if self.num_workers and self.prefetch_factor not in (None, 2):
            keywords["prefetch_factor"] = self.prefetch_factor
        if self.num_workers and self.start_method is not None:
            keywords["multiprocessing_context"] = self.start_method
        return keywords

    @property
    def label(self) -> str:
        words = [count(self.num_workers, "worker"), f"batches of {self.batch_size}"]
        if self.num_workers:
            words.append(f"prefetch {self.prefetch_factor or 2}")
            words.append(f"started by {self.start_method or 'this package'}")
        return ", ".join(words)


@dataclass(frozen=True)
class LoaderTiming:
    """Loader settings and their fastest round in seconds per sample; None if only the start of workers was timed.

    ``start_s`` includes the start of workers; ``ratio`` is ``sample_s`` divided by its value without workers.
    """

    settings: Settings
    sample_s: float | None
    start_s: float
    rounds: int
    ratio: float | None


def grid(batch_size: int, cores: int) -> list[Settings]:
    """Return the loader settings to scan; the first ones have no workers and the requested ``batch_size``."""
    settings = [Settings(0, batch_size), Settings(0, _BATCH_TIMES * batch_size)]
    if cores == 1:
        return settings  # A worker would compete with this process for the core.
    workers = [number for number in (1, 2, 4, 8, 16) if number < cores] + [cores]
    return [*settings, *(Settings(number, batch_size, 2) for number in workers), Settings(cores, batch_size, 4)]


def scan(
    dataset: OMEArrowDataset,
    indices: Sequence[int],
    use: AccessPattern,
    deadline_s: float,
    progress: tqdm,
    start_methods: Sequence[str] = (),
    fields: Array | None = None,
) -> list[LoaderTiming]:
    """Time an epoch of ``indices`` per loader setting, in rounds until the deadline; then time other start methods.

    ``fields`` are the image indices of crops, None for images. ``start_methods`` are names of multiprocessing, tried
    with the best number of workers if that is not 0. They run the main script again in each worker, so it needs a
    ``__main__`` guard.
    """
    start_s = use.clock()
    settings = grid(use.batch_size, available_cores())
    progress.reset(total=len(settings))
    progress.set_description("loader settings")
    order = _order(dataset, indices, use, fields)
    loaders: dict[Settings, OMEArrowDataLoader] = {}
    starts_s: dict[Settings, float] = {}
    for setting in settings:
        if loaders and use.clock() - start_s > (deadline_s - start_s) / 2:
            break
        loaders[setting], starts_s[setting] = _started(dataset, order, use, setting)
        progress.update()
    turns: InterleavedRounds[Settings, float] = InterleavedRounds(lambda: turns.rounds > 0 and use.clock() > deadline_s)
    turns.run(loaders, lambda setting: _timed(loaders[setting], use) / len(order), _MOST_ROUNDS)
    loaders.clear()  # Ends their workers.
    least_s = {setting: min(times_s.values()) for setting, times_s in turns.figures.items()}
    scanned = [
        LoaderTiming(setting, sample_s, starts_s[setting], turns.rounds, sample_s / least_s[settings[0]])
        for setting, sample_s in least_s.items()
    ]
    chosen = best(scanned)
    if chosen.settings.num_workers:
        for method in start_methods:
            other = replace(chosen.settings, start_method=method)
            scanned.append(LoaderTiming(other, None, _started(dataset, order, use, other)[1], 0, None))
    return scanned


def best(scanned: Sequence[LoaderTiming], work_s: float = inf) -> LoaderTiming:
    """Return the settings with the fewest workers among the fastest ones that use the requested batch size.

    Workers must save more of ``work_s``, the time of all epochs without workers, than their start takes.
    """
    batch_size = scanned[0].settings.batch_size
    open_to_choice = [
        (timing, timing.ratio)
        for timing in scanned
        if timing.ratio is not None
        and timing.settings.batch_size == batch_size
        and (not timing.settings.num_workers or work_s * (1 - timing.ratio) > timing.start_s)
    ]
    least = min(ratio for _, ratio in open_to_choice)
    if least * WORTH_IT > 1:
        return scanned[0]
    near = [timing for timing, ratio in open_to_choice if ratio <= least * MOST_TIE]
    return min(near, key=lambda timing: (timing.settings.num_workers, timing.settings.prefetch_factor or 0))


def _started(
    dataset: OMEArrowDataset, order: Sequence[int], use: AccessPattern, settings: Settings
) -> tuple[OMEArrowDataLoader, float]:
    """Return a loader after one epoch, and the seconds until its first batch."""
    start_s = use.clock()
    keywords = {**settings.keywords, "batch_size": settings.batch_size}
    loader = use.loader(dataset, order, **keywords)
    batches = iter(loader)
    next(batches)
    first_s = use.clock() - start_s
    for _ in batches:
        pass
    return loader, first_s


def _timed(loader: OMEArrowDataLoader, use: AccessPattern) -> float:
    start_s = use.clock()
    for _ in loader:
        pass
    return use.clock() - start_s


def _order(dataset: OMEArrowDataset, indices: Sequence[int], use: AccessPattern, fields: Array | None) -> list[int]:
    """Return sample indices for enough batches to measure; few samples are repeated."""
    once = use.order(indices, 0, fields)
    batch = (once * (1 + use.batch_size // len(once)))[: use.batch_size]
    loader = use.loader(dataset, batch)
    batch_s = median(_timed(loader, use) for _ in range(3))
    min_batches, max_batches = _BATCHES
    num_samples = use.batch_size * int(min(max_batches, max(min_batches, use.part_s / 2 / max(batch_s, 1e-6))))
    order: list[int] = []
    epoch = 0
    while len(order) < num_samples:
        order += use.order(indices, epoch, fields)
        epoch += 1
    return order[:num_samples]
