"""What the gate measures: fixed work a round, so that the shortest round is the same work on both sides.

Left out of a plain run; ``pytest benchmarks -m gate`` runs them. Each is a public call, repeated often enough for a
round to be milliseconds, on 256 images of 100 x 100 or 32 of 512 x 512, in the page cache, whatever the workload's
options say.
"""

from __future__ import annotations

import shutil
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks.data import encodings, library_encoding
from benchmarks.gated import SMALL, Collections
from benchmarks.model import Trainer
from benchmarks.workload import trial_s
from omearrow_ds import FORMATS, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy, write_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

    from omearrow_ds import Format

_FORMATS = {fmt.name: fmt for fmt in FORMATS}
_BUDGET_S, _ROUNDS = 0.15, (7, 300)
_SAMPLES, _BATCH, _STEP_BATCH, _WORKER_BATCH = 32, 16, 8, 32
_WRITTEN = 64

in_memory = pytest.mark.parametrize("format_name", ["arrow"])  # preloaded, all formats are held in one way
mapped = pytest.mark.parametrize("format_name", ["arrow", "parquet", "tiff"])
tables = pytest.mark.parametrize("format_name", ["parquet", "arrow", "lance"])


@pytest.fixture(scope="module")
def stored(pytestconfig: pytest.Config) -> Iterator[Collections]:
    """Give the collections."""
    with Collections(pytestconfig.getoption("data").absolute()) as collections:
        yield collections


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: how two share a busy machine is no property of the code."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.gate("control", "control")
def test_control(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Reading a fixed file and sorting its numbers: no code of the project."""
    file, size = tmp_path / "numbers", 1 << 17
    file.write_bytes(np.random.default_rng(0).integers(0, 2**16, size, np.uint16).tobytes())

    def work() -> None:
        with open(file, "rb") as opened:  # noqa: PTH123  # no pathlib in the clock either
            np.sort(np.frombuffer(opened.read(), np.uint16).astype(np.float32), kind="stable")

    _measure(benchmark, work)


@pytest.mark.gate(0, "write")
def test_write(benchmark: BenchmarkFixture, fmt: Format, tmp_path: Path) -> None:
    """Writing 64 images, which are in memory, to a new path."""
    images = [image for image, _ in zip(SMALL.images(), range(_WRITTEN), strict=False)]
    numbers, write = count(), partial(write_images, format=fmt.name, encoding=library_encoding(encodings(fmt)[0]))

    def new_path() -> tuple[tuple[Any, ...], dict[str, Any]]:
        for old in tmp_path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return (images, tmp_path / f"{next(numbers)}{fmt.suffix}"), {}

    write(*new_path()[0])
    rounds = _rounds(trial_s(lambda: write(*new_path()[0])))
    benchmark.pedantic(write, setup=new_path, rounds=rounds)
    benchmark.extra_info["calls"] = 1


@pytest.mark.gate(0, "preload")
def test_preload(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Opening 256 images and decoding them into memory."""
    _measure(benchmark, partial(OMEArrowDataset, stored.path("small", fmt, encodings(fmt)[0]), fmt.name, preload=True))


@tables
@pytest.mark.gate(0, "preload_list")
def test_preload_list(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """The same of encoding list."""
    _measure(benchmark, partial(OMEArrowDataset, stored.path("small", fmt, "list"), fmt.name, preload=True))


@mapped
@pytest.mark.gate(0, "preload_large")
def test_preload_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """The same of 32 images of 512 x 512."""
    _measure(benchmark, partial(OMEArrowDataset, stored.path("large", fmt, encodings(fmt)[0]), fmt.name, preload=True))


@pytest.mark.gate(1, "getitem")
def test_getitem(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]``, on demand, of 32 random images."""
    _measure_samples(benchmark, _dataset(stored, "small", fmt, preload=False))


@mapped
@pytest.mark.gate(1, "getitem_large")
def test_getitem_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """The same of images of 512 x 512."""
    _measure_samples(benchmark, _dataset(stored, "large", fmt, preload=False))


@in_memory
@pytest.mark.gate(1, "getitem_preloaded")
def test_getitem_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]``, preloaded, of all images in random order."""
    _measure_samples(benchmark, _dataset(stored, "small", fmt, preload=True), samples=8 * _SAMPLES)


@pytest.mark.gate(2, "epoch")
def test_epoch(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An epoch in batches of 16 random images, on demand, no workers."""
    _measure_epoch(benchmark, _dataset(stored, "small", fmt, preload=False))


@in_memory
@pytest.mark.gate(2, "epoch_preloaded")
def test_epoch_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """The same, preloaded."""
    _measure_epoch(benchmark, _dataset(stored, "small", fmt, preload=True))


@in_memory
@pytest.mark.gate(2, "epoch_preloaded_large")
def test_epoch_preloaded_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """The same of images of 512 x 512."""
    _measure_epoch(benchmark, _dataset(stored, "large", fmt, preload=True))


@in_memory
@pytest.mark.gate(2, "epoch_worker")
def test_epoch_worker(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An epoch in batches of 32, preloaded, from one worker that is there."""
    _measure_epoch(benchmark, _dataset(stored, "small", fmt, preload=True), _WORKER_BATCH, workers=1)


@in_memory
@pytest.mark.gate(3, "train")
def test_train(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A training step on a batch of 8, preloaded: waiting for it, forward, backward and optimiser."""
    dataset = _dataset(stored, "small", fmt, preload=True)
    assert dataset.shape is not None
    trainer = Trainer(dataset.shape, _STEP_BATCH, "cpu", seed=0)
    batches = iter(_loader(dataset, _STEP_BATCH, epochs=1 + _ROUNDS[1]))
    _measure(benchmark, lambda: trainer.train(next(batches)))


@mapped
@pytest.mark.gate(3, "inference")
def test_inference(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An inference step on a batch of 8, on demand: waiting for it, and forward."""
    dataset = _dataset(stored, "small", fmt, preload=False)
    assert dataset.shape is not None
    trainer = Trainer(dataset.shape, _STEP_BATCH, "cpu", seed=0)
    batches = iter(_loader(dataset, _STEP_BATCH, epochs=1 + _ROUNDS[1]))
    _measure(benchmark, lambda: trainer.inference(next(batches)))


@mapped
@pytest.mark.gate(4, "numpy_sample")
def test_numpy_sample(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]`` as an array, on demand, and its copy as a tensor, of 32 random images."""
    dataset = OMEArrowDatasetNumpy(stored.path("small", fmt, encodings(fmt)[0]), fmt.name, preload=False)
    _measure_samples(benchmark, dataset, lambda index: torch.tensor(dataset[index]))


def _dataset(stored: Collections, size: str, fmt: Format, *, preload: bool) -> OMEArrowDataset:
    return OMEArrowDataset(stored.path(size, fmt, encodings(fmt)[0]), fmt.name, preload=preload)


def _order(length: int, samples: int) -> list[int]:
    """Return random indices, each as often as the others."""
    order: list[int] = np.random.default_rng(0).permutation(length).tolist()
    return (order * -(-samples // length))[:samples]


def _measure_samples(
    benchmark: BenchmarkFixture,
    dataset: Any,
    get: Callable[[int], object] | None = None,
    samples: int = _SAMPLES,
) -> None:
    get, order = get or dataset.__getitem__, _order(len(dataset), samples)

    def work() -> None:
        for index in order:
            get(index)

    _measure(benchmark, work, len(order))


def _measure_epoch(
    benchmark: BenchmarkFixture, dataset: OMEArrowDataset, batch_size: int = _BATCH, workers: int = 0
) -> None:
    loader = _loader(dataset, batch_size, workers=workers)
    _measure(benchmark, lambda: _drain(loader), len(loader))


def _loader(dataset: OMEArrowDataset, batch_size: int, epochs: int = 1, workers: int = 0) -> OMEArrowDataLoader:
    """Return a loader whose epochs are all in one random order, ``epochs`` times the data set long."""
    return OMEArrowDataLoader(
        dataset,
        batch_size,
        num_workers=workers,
        sampler=_order(len(dataset), len(dataset) * epochs),
        persistent_workers=workers > 0,
    )


def _drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _measure(benchmark: BenchmarkFixture, work: Callable[[], object], calls: int = 1) -> None:
    """Measure a round of fixed work, which calls the library ``calls`` times, after two that open and warm all."""
    work()
    benchmark.pedantic(work, rounds=_rounds(trial_s(work)))
    benchmark.extra_info["calls"] = calls


def _rounds(once_s: float) -> int:
    return int(min(max(_BUDGET_S / once_s, _ROUNDS[0]), _ROUNDS[1]))
