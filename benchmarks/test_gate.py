"""Gated benchmarks, with short rounds of equal work.

Other programs disturb nearly every round of 20 ms, but few rounds of 0.2 ms, so the shortest of some hundreds
is the code's own time. Each round uses the same few images from the page cache. Only ``pytest benchmarks -m gate``
runs these benchmarks. Options of the workload do not affect them.
"""

from __future__ import annotations

import shutil
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.gate.baton import TURNS, baton, in_turns, least_of_turns
from benchmarks.support import library
from benchmarks.support.cells import SIDE
from benchmarks.support.data import encodings, library_encoding
from benchmarks.support.gated import WORKLOADS, Collections, gated_objects, working_clock
from benchmarks.support.library import PixelCache, images_of
from benchmarks.support.memory import CLEAR, held
from benchmarks.support.model import Trainer
from benchmarks.support.paired import stop_workers
from benchmarks.support.workload import trial_s
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy, convert, open_images, write_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

    from omearrow_ds import Format

_BUDGET_S, _LONG_BUDGET_S, _ROUNDS = 0.15, 0.4, (TURNS, 1000)  # Long for processes and for opening.
_SAMPLES, _BATCH, _STEP_BATCH, _EPOCH_BATCH, _WORKER_BATCH = 8, 16, 2, 12, 32
_CROPS = 64
_BEFORE = 3  # Untimed rounds.
_WHOLE_VECTORS = ("duckdb",)  # Reading one row decodes 2,048, so one sample per round is enough.

pytestmark = pytest.mark.usefixtures("one_thread")  # Two threads on a busy machine would add noise.
in_memory = pytest.mark.parametrize("format_name", ["arrow"])  # Preloaded pixels are the same for all formats.
mapped = pytest.mark.parametrize("format_name", ["arrow", "parquet", "tiff"])
opened_fast = pytest.mark.parametrize("format_name", ["arrow", "parquet", "tiff", "ome_zarr"])
listed = pytest.mark.parametrize("format_name", ["parquet", "arrow", "lance"])


@pytest.fixture(scope="module")
def stored(pytestconfig: pytest.Config) -> Iterator[Collections]:
    """Yield the collections of the gate."""
    with Collections(pytestconfig.getoption("data").absolute()) as collections:
        yield collections


@pytest.fixture(scope="module", autouse=True)
def _begin() -> None:
    """Wait until the other side has started."""
    baton()


@pytest.mark.gate("control", "compute")
def test_control_compute(benchmark: BenchmarkFixture) -> None:
    """Sorting fixed numbers that fit in the processor's caches, without code of the project."""
    numbers = np.random.default_rng(0).random(1 << 12, np.float32)
    _measure(benchmark, lambda: np.sort(numbers, kind="stable"))


@pytest.mark.gate("control", "memory")
def test_control_memory(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Reading a fixed file into new memory and scaling it into new memory, without code of the project."""
    file = tmp_path / "numbers"
    file.write_bytes(np.random.default_rng(0).integers(0, 2**16, 1 << 18, np.uint16).tobytes())
    _measure(benchmark, lambda: np.fromfile(file, np.uint16) / np.float32(65535))


@pytest.mark.gate(0, "write")
def test_write(benchmark: BenchmarkFixture, fmt: Format, tmp_path: Path) -> None:
    """Writing 16 images from memory to a new path."""
    images = list(WORKLOADS["few"].images())
    numbers, write = count(), partial(write_images, format=fmt.name, encoding=library_encoding(encodings(fmt)[0]))

    def new_path() -> tuple[tuple[Any, ...], dict[str, Any]]:
        for old in tmp_path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return (images, tmp_path / f"{next(numbers)}{fmt.suffix}"), {}

    write(*new_path()[0])
    rounds = _rounds(trial_s(lambda: write(*new_path()[0])), _LONG_BUDGET_S)
    _take_turns(benchmark, write, rounds, setup=new_path)


@opened_fast
@pytest.mark.gate(0, "open")
def test_open(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Opening 16 images and closing them."""
    path = stored.path("few", fmt, encodings(fmt)[0])
    _measure(benchmark, lambda: open_images(path, fmt.name).close())


@pytest.mark.gate(0, "preload")
def test_preload(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Decoding 16 images of an open collection into one block."""
    _measure_preload(benchmark, stored.path("few", fmt, encodings(fmt)[0]), fmt)


@in_memory
@pytest.mark.gate(0, "memory")
def test_memory(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Peak memory in bytes of decoding 4 images of 512 x 512 eight times, with all results kept."""
    if not CLEAR.exists():
        pytest.skip("peaks of memory are read from /proc, which this system has not")
    source: Any = open_images(stored.path("large", fmt, encodings(fmt)[0]), fmt.name)
    grown = []

    def work() -> None:
        CLEAR.write_text("5", encoding="ascii")  # Resets the peak, see proc(5).
        before = held()
        caches = [PixelCache.load(images_of(source)) for _ in range(8)]
        grown.append(held().peak_bytes - before.resident_bytes)
        caches.clear()

    with source:
        _measure(benchmark, work, calls=8)
    benchmark.extra_info["bytes"] = min(grown)


@listed
@pytest.mark.gate(0, "preload_list")
def test_preload_list(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Decoding 16 images of the encoding list into one block."""
    _measure_preload(benchmark, stored.path("few", fmt, "list"), fmt)


@mapped
@pytest.mark.gate(0, "preload_large")
def test_preload_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Decoding 4 images of 512 x 512 into one block."""
    _measure_preload(benchmark, stored.path("large", fmt, encodings(fmt)[0]), fmt)


@pytest.mark.gate(1, "getitem")
def test_getitem(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]``, on demand, of 8 random images of 256."""
    _measure_samples(benchmark, _dataset(stored, "many", fmt, preload=False), fmt)


@mapped
@pytest.mark.gate(1, "getitem_large")
def test_getitem_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]``, on demand, of 4 images of 512 x 512."""
    _measure_samples(benchmark, _dataset(stored, "large", fmt, preload=False), fmt)


@pytest.mark.parametrize("format_name", ["arrow", "tiff"])
@pytest.mark.gate(1, "first_touch")
def test_first_touch(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 8 random images of 256, on demand, of a new dataset from which no image was read before."""
    path = stored.path("many", fmt, encodings(fmt)[0])
    chosen = _chosen(range(WORKLOADS["many"].count or 0), _SAMPLES)

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        return (OMEArrowDataset(path, fmt.name, preload=False),), {}

    def work(dataset: Any) -> None:
        dataset.__getitems__(chosen)

    work(*fresh()[0])
    rounds = _rounds(trial_s(lambda: work(*fresh()[0]), _BEFORE - 1), _LONG_BUDGET_S)
    _take_turns(benchmark, work, rounds, setup=fresh)


@in_memory
@pytest.mark.gate(1, "getitem_numerous")
def test_getitem_numerous(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]`` of 8 random images of 20,000 of 8 x 8, dominated by costs that grow with the number of images."""
    _measure_samples(benchmark, _dataset(stored, "numerous", fmt, preload=False), fmt)


@in_memory
@pytest.mark.gate(1, "getitem_preloaded")
def test_getitem_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]``, preloaded, of 8 random images of 256."""
    _measure_samples(benchmark, _dataset(stored, "many", fmt, preload=True), fmt)


@pytest.mark.gate(2, "batch")
def test_batch(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 16 random images of 256 from the loader, on demand, no workers."""
    _measure_batches(benchmark, _dataset(stored, "many", fmt, preload=False))


@in_memory
@pytest.mark.gate(2, "batch_parts")
def test_batch_parts(benchmark: BenchmarkFixture, fmt: Format, stored: Collections, tmp_path: Path) -> None:
    """A batch of 16 random images of 256 in 8 parts from the loader, on demand, no workers."""
    if not library.HAS_PARTS:
        pytest.skip("this version has no collections in parts")
    parts: Any = {"part_bytes": 32 * 20_000}  # 32 images per part.
    convert(stored.path("many", fmt, encodings(fmt)[0]), tmp_path / "images.parts", fmt.name, **parts)
    _measure_batches(benchmark, OMEArrowDataset(tmp_path / "images.parts", preload=False))


@in_memory
@pytest.mark.gate(2, "batch_preloaded")
def test_batch_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 16 random images of 256 from the loader, preloaded, no workers."""
    _measure_batches(benchmark, _dataset(stored, "many", fmt, preload=True))


@in_memory
@pytest.mark.gate(2, "batch_preloaded_large")
def test_batch_preloaded_large(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 2 images of 512 x 512, preloaded, no workers; larger batches would depend on shared caches."""
    _measure_batches(benchmark, _dataset(stored, "large", fmt, preload=True), _STEP_BATCH)


@in_memory
@pytest.mark.gate(2, "epoch_preloaded")
def test_epoch_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An epoch of two batches of 8, preloaded, no workers; mainly the overhead of an epoch."""
    _measure_epochs(benchmark, _dataset(stored, "few", fmt, preload=True), _SAMPLES)


@in_memory
@pytest.mark.gate(2, "epoch_many")
def test_epoch_many(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An epoch of 22 batches of 12, on demand, no workers; each round includes calls that are occasionally slow."""
    _measure_epochs(benchmark, _dataset(stored, "many", fmt, preload=False), _EPOCH_BATCH)


@in_memory
@pytest.mark.gate(2, "epoch_many_preloaded")
def test_epoch_many_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An epoch of 22 batches of 12, preloaded, no workers."""
    _measure_epochs(benchmark, _dataset(stored, "many", fmt, preload=True), _EPOCH_BATCH)


@in_memory
@pytest.mark.gate(2, "batch_worker")
def test_batch_worker(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """Eight batches of 32 random images of 256, preloaded, from one running worker that prefetches two."""
    dataset = _dataset(stored, "many", fmt, preload=True)
    _measure_batches(benchmark, dataset, _WORKER_BATCH, workers=1, batches_a_round=8)


@in_memory
@pytest.mark.gate(3, "train")
def test_train(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A training step on a batch of 2, preloaded: waiting for it, forward, backward and optimizer."""
    dataset = _dataset(stored, "many", fmt, preload=True)
    _measure_batches(benchmark, dataset, _STEP_BATCH, step=_trainer(dataset).train)


@in_memory
@pytest.mark.gate(3, "inference")
def test_inference(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """An inference step on a batch of 2, on demand: waiting for it, and forward."""
    dataset = _dataset(stored, "many", fmt, preload=False)
    _measure_batches(benchmark, dataset, _STEP_BATCH, step=_trainer(dataset).inference)


@mapped
@pytest.mark.gate(4, "numpy_sample")
def test_numpy_sample(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """``dataset[i]`` as an array, on demand, of 8 random images of 256."""
    dataset = OMEArrowDatasetNumpy(stored.path("many", fmt, encodings(fmt)[0]), fmt.name, preload=False)
    _measure_samples(benchmark, dataset, fmt)


@pytest.mark.parametrize("format_name", ["arrow", "tiff"])
@pytest.mark.gate(6, "cells")
def test_cells(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 64 crops of 64 x 64 out of 4 images of 512 x 512, on demand."""
    _measure_crops(benchmark, stored, fmt, _CROPS, preload=False)


@in_memory
@pytest.mark.gate(6, "cells_preloaded")
def test_cells_preloaded(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 64 crops of 64 x 64 from 4 images of 512 x 512, preloaded."""
    _measure_crops(benchmark, stored, fmt, _CROPS, preload=True)


@in_memory
@pytest.mark.gate(6, "cells_masked")
def test_cells_masked(benchmark: BenchmarkFixture, fmt: Format, stored: Collections) -> None:
    """A batch of 32 crops of 64 x 64, each with a mask of the same size, preloaded."""
    masks = stored.path("large", fmt, encodings(fmt)[0])
    _measure_crops(benchmark, stored, fmt, _CROPS // 2, preload=True, masks=masks)


def _measure_crops(
    benchmark: BenchmarkFixture, stored: Collections, fmt: Format, batch_size: int, **options: Any
) -> None:
    if not library.HAS_OBJECTS:
        pytest.skip("this version cuts no crops around objects")
    path = stored.path("large", fmt, encodings(fmt)[0])
    dataset: Any = OMEArrowDataset(path, fmt.name, objects=gated_objects(path, fmt), crop_size=(SIDE, SIDE), **options)
    chosen = list(range(batch_size))
    _measure(benchmark, lambda: dataset.__getitems__(chosen))


def _measure_preload(benchmark: BenchmarkFixture, path: Path, fmt: Format) -> None:
    source: Any = open_images(path, fmt.name)
    with source:
        _measure(benchmark, partial(PixelCache.load, images_of(source)))


def _dataset(stored: Collections, name: str, fmt: Format, *, preload: bool) -> OMEArrowDataset:
    return OMEArrowDataset(stored.path(name, fmt, encodings(fmt)[0]), fmt.name, preload=preload)


def _trainer(dataset: OMEArrowDataset) -> Trainer:
    assert dataset.shape is not None
    return Trainer(dataset.shape, _STEP_BATCH, "cpu", seed=0)


def _chosen(dataset: Any, number: int) -> list[int]:
    """Return random indices."""
    chosen: list[int] = np.random.default_rng(0).permutation(len(dataset))[:number].tolist()
    return chosen


def _measure_samples(benchmark: BenchmarkFixture, dataset: Any, fmt: Format) -> None:
    chosen = _chosen(dataset, 1 if fmt.name in _WHOLE_VECTORS else _SAMPLES)

    def work() -> None:
        for index in chosen:
            dataset[index]

    _measure(benchmark, work, len(chosen))


def _measure_epochs(benchmark: BenchmarkFixture, dataset: OMEArrowDataset, batch_size: int) -> None:
    loader = OMEArrowDataLoader(dataset, batch_size, num_workers=0, shuffle=True)
    _measure(benchmark, lambda: [None for _ in loader], len(loader))


def _measure_batches(
    benchmark: BenchmarkFixture,
    dataset: OMEArrowDataset,
    batch_size: int = _BATCH,
    *,
    workers: int = 0,
    batches_a_round: int = 1,
    step: Callable[[Any], object] = id,
) -> None:
    chosen = _chosen(dataset, batch_size)
    order = chosen * ((_ROUNDS[1] + _BEFORE) * batches_a_round)
    batches = iter(OMEArrowDataLoader(dataset, len(chosen), num_workers=workers, sampler=order))

    def work() -> None:
        for _ in range(batches_a_round):
            step(next(batches))

    pids = [worker.pid for worker in getattr(batches, "_workers", ())]  # Torch lacks a public name.
    try:
        _measure(benchmark, work, batches_a_round, _LONG_BUDGET_S if workers else _BUDGET_S, pids)
    finally:
        stop_workers(batches)


def _measure(
    benchmark: BenchmarkFixture,
    work: Callable[[], object],
    calls: int = 1,
    budget_s: float = _BUDGET_S,
    pids: Sequence[int] = (),
) -> None:
    """Measure rounds of ``work``, which calls the library ``calls`` times, after untimed warm-up rounds."""
    work()
    rounds = _rounds(trial_s(work, _BEFORE - 1), budget_s)
    _take_turns(benchmark, work, rounds, calls, pids=pids)


def _take_turns(
    benchmark: BenchmarkFixture,
    work: Callable[..., object],
    rounds: int,
    calls: int = 1,
    setup: Callable[[], Any] = tuple,
    pids: Sequence[int] = (),
) -> None:
    """Measure in turns with the other side, and pass the turn to it.

    ``pids`` are the ids of worker processes.
    """
    rounds = baton().agreed(benchmark.name, rounds)
    worked_s, now_s = [], working_clock(pids)

    def working(*args: Any, **kwargs: Any) -> object:
        begun_s = now_s()
        done = work(*args, **kwargs)
        worked_s.append(now_s() - begun_s)
        return done

    benchmark.pedantic(working, setup=in_turns(rounds, setup), rounds=rounds)
    baton().hand_over()
    benchmark.extra_info.update(calls=calls, worked_s=least_of_turns(worked_s))


def _rounds(once_s: float, budget_s: float) -> int:
    return int(min(max(budget_s / once_s, _ROUNDS[0]), _ROUNDS[1]))
