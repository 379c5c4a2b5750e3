"""Track 1, one sample: ``dataset[i]`` in order or at random, plain, normalized or augmented, preloaded or on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import Datasets
from benchmarks.support.cold import Cold
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format, OMEArrowDataset

Touched = tuple[tuple[OMEArrowDataset, list[int]], dict[str, Any]]

_TRIALS = 3
_TOUCHED, _OPENINGS = 16, 4


@pytest.mark.track(1, "getitem")
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
@pytest.mark.parametrize("transform", ["none", "normalize", "augment"])
@pytest.mark.parametrize("order", ["sequential", "random"])
def test_getitem(
    benchmark: BenchmarkFixture,
    fmt: Format,
    order: str,
    transform: str,
    access: str,
    datasets: Datasets,
    seed: int,
    profile: Profile,
) -> None:
    """One ``dataset[i]`` with files in the page cache, until the tensor is returned."""
    dataset = datasets.get(fmt, access, transform)
    indices = _indices(order, len(dataset), seed)
    dataset[len(dataset) // 2]  # Opens files once.

    def next_index() -> tuple[tuple[int], dict[str, Any]]:
        return (next(indices),), {}

    rounds = profile.budget(access).rounds(trial_s(lambda: dataset[next(indices)], _TRIALS))
    benchmark.pedantic(dataset.__getitem__, setup=next_index, rounds=rounds)


@pytest.mark.track(1, "first_touch")
def test_first_touch(benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, profile: Profile) -> None:
    """Sixteen random ``dataset[i]`` on demand, of a collection just opened outside the timed section."""
    order = _indices("random", len(datasets.get(fmt, "on_demand")), seed)

    def fresh() -> Touched:
        return (datasets.get(fmt, "on_demand"), list(islice(order, _TOUCHED))), {}

    _time_touching(benchmark, fresh, profile)


@pytest.mark.track(1, "first_touch_cold")
def test_first_touch_cold(
    benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, scratch: Path, profile: Profile
) -> None:
    """Sixteen random ``dataset[i]`` of files dropped from the page cache, as in an epoch of data larger than memory."""
    cold = Cold(datasets.path(fmt), scratch / f"cold{fmt.suffix}")
    order = _indices("random", len(datasets.get(fmt, "on_demand")), seed)
    opened: list[OMEArrowDataset] = []

    def fresh() -> Touched:
        for dataset in opened:
            dataset.source.close()  # Mapped pages would stay in memory.
        cold.drop()
        opened[:] = [OMEArrowDataset(cold.path, fmt.name, preload=False, axes=datasets.axes(fmt))]
        return (opened[0], list(islice(order, _TOUCHED))), {}

    _time_touching(benchmark, fresh, profile)


def _time_touching(benchmark: BenchmarkFixture, fresh: Callable[[], Touched], profile: Profile) -> None:
    once_s = trial_s(lambda: _touch(*fresh()[0]))
    benchmark.pedantic(_touch, setup=fresh, rounds=profile.whole.rounds(once_s) * _OPENINGS)
    benchmark.extra_info.update(samples=_TOUCHED, order="random", transform="normalize", access="on_demand")


def _touch(dataset: OMEArrowDataset, indices: list[int]) -> None:
    for index in indices:
        dataset[index]


def _indices(order: str, count: int, seed: int) -> Iterator[int]:
    """Return an endless iterator that repeats all indices in one order."""
    return cycle(range(count) if order == "sequential" else np.random.default_rng(seed).permutation(count).tolist())
