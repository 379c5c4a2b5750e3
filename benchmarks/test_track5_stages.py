"""Track 5, stages and preload: time per stage of an epoch, and number of epochs until preloading pays off."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import Datasets
from benchmarks.support.library import (
    Breakdown,
    Loop,
    break_even_epochs,
    preloaded,
)
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format

BATCH_SIZE = 16


@pytest.fixture(autouse=True)
def _on_one_core(one_core: None) -> None:
    """Measure stages on one thread, because parallel threads would hide the cost of a pass."""


@pytest.mark.track(5, "epoch")
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
def test_stages(benchmark: BenchmarkFixture, fmt: Format, access: str, datasets: Datasets, profile: Profile) -> None:
    """One shuffled epoch in batches of 16, without workers, after an epoch with a timer around each stage."""
    dataset, breakdowns = datasets.batched(fmt, access), list[Breakdown]()
    with Loop(dataset, BATCH_SIZE) as loop:
        loop.warm_up()
        rounds = profile.whole.rounds(trial_s(lambda: loop.record(epochs=1)) + trial_s(lambda: loop.run(epochs=1)))
        benchmark.pedantic(
            lambda: loop.run(epochs=1), setup=lambda: breakdowns.append(loop.record(epochs=1)), rounds=rounds
        )
    rows = [row for breakdown in breakdowns for row in breakdown.stages]
    stage_s = {row.stage: [other.total_s for other in rows if other.stage == row.stage] for row in rows}
    benchmark.extra_info.update(images=len(dataset), stage_s=stage_s)


@pytest.mark.track(5, "preload")
def test_preload_pays(benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, profile: Profile) -> None:
    """Decoding all images of an open collection into memory, after one epoch on demand and one preloaded."""
    dataset = datasets.batched(fmt, "on_demand")
    epochs_s: dict[str, list[float]] = {"on_demand_s": [], "preloaded_s": []}
    with Loop(dataset, BATCH_SIZE) as demand, Loop(preloaded(dataset), BATCH_SIZE) as cached:

        def epochs() -> None:
            for seconds, loop in zip(epochs_s.values(), (demand, cached), strict=True):
                start = perf_counter()
                loop.run(epochs=1)
                seconds.append(perf_counter() - start)

        demand.warm_up()
        cached.warm_up()
        rounds = profile.whole.rounds(trial_s(epochs) + trial_s(lambda: preloaded(dataset)))
        for seconds in epochs_s.values():
            seconds.clear()
        benchmark.pedantic(preloaded, args=(dataset,), setup=epochs, rounds=rounds)
    demand_s, cached_s = epochs_s.values()
    gains = [one / other for one, other in zip(demand_s, cached_s, strict=True)]
    if benchmark.stats is not None:  # None if benchmarks are disabled.
        gain = median(demand_s) / median(cached_s)
        pays = break_even_epochs(benchmark.stats.stats.median, median(demand_s), gain, min(gains))
        benchmark.extra_info.update(images=len(dataset), break_even_epochs=pays, **epochs_s)
