"""Workers: their startup time, and ``num_workers="auto"`` compared with the best of all settings.

These run on all cores with several processes, as in a real program.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.data import RandomSampler

from benchmarks.conftest import Datasets
from benchmarks.support.paired import drain, note
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # Intended.

_BATCH = 16
_BATCHES = 40
_GRID = {"quick": (0, 1, 2), "full": (0, 1, 2, 4)}
_PROMPT_S = 0.2
_LONG_S = 0.05
_ROUNDS = {"quick": 3, "full": 7}


@pytest.mark.limit("reference", "auto_preloaded")
@pytest.mark.parametrize("format_name", ["arrow"])
def test_auto_preloaded(
    benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, profile: Profile
) -> None:
    """A shuffled epoch, at most 40 batches, of preloaded pixels with ``num_workers="auto"``; time per batch."""
    _against_the_grid(benchmark, datasets.batched(fmt, "preloaded"), datasets.image_shape(fmt), seed, profile)


@pytest.mark.limit("reference", "auto_on_demand")
def test_auto_on_demand(
    benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, profile: Profile
) -> None:
    """A shuffled epoch, at most 40 batches, on demand with ``num_workers="auto"``; time per batch."""
    _against_the_grid(benchmark, datasets.batched(fmt, "on_demand"), datasets.image_shape(fmt), seed, profile)


def _against_the_grid(
    benchmark: BenchmarkFixture, dataset: OMEArrowDataset, image_shape: str, seed: int, profile: Profile
) -> None:
    """Measure an epoch with each number of workers in turns; the best of them is the reference.

    The order rotates with each round, because a previous epoch of four workers affects caches and cores.
    """

    def loader(workers: Any) -> OMEArrowDataLoader:
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(dataset, num_samples=_BATCH * _BATCHES, generator=generator)
        return OMEArrowDataLoader(dataset, _BATCH, num_workers=workers, sampler=sampler)

    loaders = {workers: loader(workers) for workers in (*_GRID[profile.name], "auto")}
    for loader_of_count in loaders.values():
        drain(loader_of_count)  # Starts workers and opens files.
    once_s = {workers: trial_s(partial(drain, loader_of_count)) for workers, loader_of_count in loaders.items()}
    auto = loaders.pop("auto")
    seconds: dict[Any, list[float]] = {workers: [] for workers in loaders}
    order = deque(loaders)

    def measure_others() -> tuple[tuple[Any, ...], dict[str, Any]]:
        order.rotate()
        for workers in order:
            _warm_up(loaders[workers], once_s[workers])
            start = perf_counter()
            drain(loaders[workers])
            seconds[workers].append((perf_counter() - start) / _BATCHES)
        if benchmark.stats is not None:
            benchmark.stats.iterations = _BATCHES
        _warm_up(auto, once_s["auto"])
        return (auto,), {}

    benchmark.pedantic(drain, setup=measure_others, rounds=profile.pair.rounds(sum(once_s.values())))
    if benchmark.stats is not None:
        best = min(seconds, key=lambda workers: min(seconds[workers]))
        note(benchmark, seconds[best], image_shape)
        grid = {f"workers{workers}_us": min(times) * 1e6 for workers, times in seconds.items()}
        labels = {"reference": f"{best} workers", "engine": f"{auto.num_workers} workers"}
        benchmark.extra_info.update(grid, **labels, batch_size=_BATCH, images=len(dataset))


def _warm_up(loader: OMEArrowDataLoader, once_s: float) -> None:
    """Run an untimed epoch to warm the processor's caches, unless epochs are so long that this is negligible."""
    if once_s < _LONG_S:
        drain(loader)


@pytest.mark.limit("reference", "first_batch")
def test_first_batch(benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, profile: Profile) -> None:
    """From ``iter(loader)`` to the first batch of two new workers; other workers were started before."""
    dataset = datasets.batched(fmt, "on_demand")
    iterators: list[Any] = []

    def loader() -> tuple[tuple[Any, ...], dict[str, Any]]:
        iterators.clear()
        return (OMEArrowDataLoader(dataset, _BATCH, num_workers=2), iterators), {}

    _first(*loader()[0])
    benchmark.pedantic(_first, setup=loader, rounds=_ROUNDS[profile.name])
    iterators.clear()
    note(benchmark, [_PROMPT_S], datasets.image_shape(fmt))


@pytest.mark.limit("reference", "start")
@pytest.mark.parametrize("format_name", ["arrow"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_start(
    benchmark: BenchmarkFixture, fmt: Format, start_method: str, datasets: Datasets, profile: Profile
) -> None:
    """From ``iter(loader)`` to the first batch of two new workers, compared with a start method of Python."""
    dataset = datasets.batched(fmt, "on_demand")
    iterators: list[Any] = []
    theirs_s: list[float] = []

    def measure_theirs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        iterators.clear()
        start = perf_counter()
        _first(OMEArrowDataLoader(dataset, _BATCH, num_workers=2, multiprocessing_context=start_method), iterators)
        theirs_s.append(perf_counter() - start)
        iterators.clear()
        return (OMEArrowDataLoader(dataset, _BATCH, num_workers=2), iterators), {}

    measure_theirs()  # Starts the server processes.
    _first(OMEArrowDataLoader(dataset, _BATCH, num_workers=2), iterators)
    theirs_s.clear()
    benchmark.pedantic(_first, setup=measure_theirs, rounds=_ROUNDS[profile.name])
    iterators.clear()
    note(benchmark, theirs_s, datasets.image_shape(fmt))
    benchmark.extra_info.update(reference=f"Python's {start_method}")


def _first(loader: OMEArrowDataLoader, iterators: list[Any]) -> None:
    batches = iter(loader)
    next(batches)
    iterators.append(batches)  # Workers are stopped outside the timed section.
