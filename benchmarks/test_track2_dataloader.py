"""Track 2, DataLoader: batches by batch size and number of workers, preloaded and on demand."""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.data import RandomSampler

from benchmarks.conftest import Datasets
from benchmarks.support.paired import stop_workers
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset

_TRIALS, _FIRSTS = 2, 3
_EPOCHS_HELD = 20  # Limit for preloaded pixels, whose epochs take some milliseconds.
_PREFETCHED = 2  # Torch's default prefetch_factor, in batches per worker.


@pytest.mark.track(2, "epoch")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # Intended.
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
def test_epoch(
    benchmark: BenchmarkFixture,
    fmt: Format,
    batch_size: int,
    workers: int,
    access: str,
    datasets: Datasets,
    seed: int,
    profile: Profile,
) -> None:
    """Time to get one batch of a shuffled epoch, after the batches that workers prefetched at the start."""
    dataset = datasets.batched(fmt, access)
    warmup = max(_TRIALS, _PREFETCHED * workers)
    most = max(10, len(dataset) // batch_size) * (_EPOCHS_HELD if access == "preloaded" else 1)
    first_batch_s = []
    for _ in range(_FIRSTS):  # Each loader starts its own workers.
        loader = _loader(dataset, batch_size, workers, seed, batches=1 + warmup + most)
        start = perf_counter()
        batches = iter(loader)
        try:
            next(batches)
            first_batch_s.append(perf_counter() - start)
            if len(first_batch_s) == _FIRSTS:
                batch_s = trial_s(partial(next, batches), warmup)
                rounds = min(most, profile.budget(access).rounds(batch_s))
                benchmark.pedantic(next, args=(batches,), rounds=rounds)
        finally:
            stop_workers(batches)
    benchmark.extra_info.update(images=rounds * batch_size, first_batch_ms=median(first_batch_s) * 1e3)


def _loader(dataset: OMEArrowDataset, batch_size: int, workers: int, seed: int, batches: int) -> OMEArrowDataLoader:
    """Return a loader of full, shuffled batches; a small dataset is shuffled and repeated."""
    generator = torch.Generator().manual_seed(seed)
    sampler = RandomSampler(dataset, num_samples=batches * batch_size, generator=generator)
    return OMEArrowDataLoader(dataset, batch_size, num_workers=workers, sampler=sampler, generator=generator)
