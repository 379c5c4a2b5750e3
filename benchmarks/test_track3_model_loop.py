"""Track 3, model loop: steps of training and inference, and their share of waiting for data.

The model computes on one core, or on the CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.data import RandomSampler

from benchmarks.conftest import Datasets
from benchmarks.support.library import get_format
from benchmarks.support.model import Trainer
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset

MakeModel = Callable[[Sequence[int]], torch.nn.Module]

BATCH_SIZE = 16
_WARMUP_STEPS = 2


# On a busy machine, threads that wait for each other make a step 3 to 40 times longer; two cores shorten it by 20 %.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def loop(fmt: Format, device: str, access: str, datasets: Datasets, seed: int, model: MakeModel, steps: int) -> _Loop:
    """Return the batches and the model of a benchmark."""
    return _Loop(datasets.batched(fmt, access), device, seed, model, steps)


@pytest.mark.track(3, "train")
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
def test_train_step(benchmark: BenchmarkFixture, loop: _Loop) -> None:
    """One training step: waiting for the batch on the device, forward, backward and optimizer, all kernels done."""
    loop.run(benchmark, loop.trainer.train)


@pytest.mark.track(3, "inference")
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
def test_inference_step(benchmark: BenchmarkFixture, loop: _Loop) -> None:
    """One inference step: waiting for the batch on the device, and forward, all kernels done."""
    loop.run(benchmark, loop.trainer.inference)


@pytest.mark.track(3, "train")
@pytest.mark.parametrize("access", ["on_device"])
def test_train_step_on_device(
    benchmark: BenchmarkFixture, device: str, access: str, datasets: Datasets, seed: int, model: MakeModel, steps: int
) -> None:
    """One training step with pixels stored on the CUDA device, where the batch is also created."""
    if device != "cuda":
        pytest.skip("no CUDA device: measured with --device cuda")
    fmt = get_format("arrow")
    preloaded = datasets.batched(fmt, "preloaded")
    dataset = OMEArrowDataset(datasets.path(fmt), fmt.name, preload=device, axes=datasets.axes(fmt))
    assert (access, dataset.shape) == ("on_device", preloaded.shape)
    loop = _Loop(dataset, device, seed, model, steps)
    loop.run(benchmark, loop.trainer.train)


class _Loop:
    """Shuffled batches of this process, and a model; each step records its wait for the batch.

    A step ends with a device synchronization, so the next wait is only for data.
    """

    def __init__(self, dataset: OMEArrowDataset, device: str, seed: int, model: MakeModel, steps: int) -> None:
        assert dataset.shape is not None
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(dataset, num_samples=(_WARMUP_STEPS + steps) * BATCH_SIZE, generator=generator)
        loader = OMEArrowDataLoader(dataset, BATCH_SIZE, num_workers=0, device=device, sampler=sampler)
        self.trainer = Trainer(dataset.shape, BATCH_SIZE, device, seed, model)
        self._batches: Iterator[torch.Tensor] = iter(loader)
        self._wait_for_device: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._steps = steps
        self._wait_s: list[float] = []

    def run(self, benchmark: BenchmarkFixture, compute: Callable[[torch.Tensor], None]) -> None:
        """Measure the steps; those before them warm up the model and the file handles."""

        def step() -> None:
            start = perf_counter()
            batch = next(self._batches)
            self._wait_for_device()
            self._wait_s.append(perf_counter() - start)
            compute(batch)
            self._wait_for_device()

        for _ in range(_WARMUP_STEPS):
            step()
        self._wait_s.clear()
        benchmark.pedantic(step, rounds=self._steps)
        benchmark.extra_info.update(wait_s=self._wait_s, images=self._steps * BATCH_SIZE)
