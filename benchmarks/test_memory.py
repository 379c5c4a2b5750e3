"""Memory of preloading, of an epoch on demand and of writing, each in a fresh process: see `benchmarks.support.memory`.

Without ``--num-images`` and ``--images``, the collection has a fixed size: 105 MB of 512 x 512 images,
524 MB with ``--profile full``. The targets are for 500 MB or more.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.report.ratios import held_against
from benchmarks.support.data import DataCache
from benchmarks.support.memory import STATUS, Measured, few_of, shifted
from benchmarks.support.workload import DIFFERING, NO_BATCH, Profile, Workload, common_size
from omearrow_ds import Format, write_images

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc, which this system has not")

_BATCH_SIZE = 16
_IMAGES, _SHAPE = {"quick": 200, "full": 1000}, (1, 1, 1, 512, 512)


@pytest.mark.limit("memory", "write")
def test_write(benchmark: BenchmarkFixture, fmt: Format, stored: Stored) -> None:
    """Writing images from a generator."""
    _measure(benchmark, stored, "write", stored.new_path(fmt), fmt.name, stored.few, stored.count)


@pytest.mark.limit("memory", "preload")
def test_preload(benchmark: BenchmarkFixture, fmt: Format, stored: Stored) -> None:
    """Decoding every image of an open collection into one block."""
    _measure(benchmark, stored, "preload", stored.path(fmt), fmt.name)


@pytest.mark.limit("memory", "epoch")
def test_epoch(benchmark: BenchmarkFixture, fmt: Format, stored: Stored) -> None:
    """A shuffled epoch of batches of 16 on demand, in the process itself."""
    if stored.image_shape == DIFFERING:
        pytest.skip(NO_BATCH)
    _measure(benchmark, stored, "epoch", stored.path(fmt), fmt.name, _BATCH_SIZE)


@pytest.mark.limit("memory", "workers")
@pytest.mark.parametrize("format_name", ["arrow"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers(benchmark: BenchmarkFixture, fmt: Format, stored: Stored) -> None:
    """A shuffled epoch of batches of 16 with four workers that map the preloaded pixels; memory of the workers."""
    if stored.image_shape == DIFFERING:
        pytest.skip(NO_BATCH)
    _measure(benchmark, stored, "workers", stored.path(fmt), fmt.name, _BATCH_SIZE)


def _measure(benchmark: BenchmarkFixture, stored: Stored, operation: str, *arguments: Any) -> None:
    with Measured(operation, *arguments) as measured:
        benchmark.pedantic(measured.run, rounds=1)
    figures = measured.figures
    benchmark.extra_info.update(figures, images=stored.count, image_shape=stored.image_shape)
    benchmark.extra_info.update(held_against(operation, figures["growth_bytes"], figures["decoded_bytes"]))


class Stored:
    """Collection of ``count`` `shifted` images, stored in the last requested format."""

    def __init__(self, workload: Workload, count: int, folder: Path) -> None:
        self.few = few_of(workload)
        self.count = count
        self.image_shape = common_size(image.shape for image in self.few)
        self._folder = folder

    def path(self, fmt: Format) -> Path:
        """Return its path in a format, and write it if missing."""
        path = self._path(fmt)
        if not path.exists():
            write_images(shifted(self.few, self.count), self.new_path(fmt), fmt.name)
        return path

    def new_path(self, fmt: Format) -> Path:
        """Return the path to write it to, and remove the collection in all formats."""
        for other in self._folder.iterdir():
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        return self._path(fmt)

    def _path(self, fmt: Format) -> Path:
        return self._folder / f"images{fmt.suffix}"


@pytest.fixture(scope="module")
def stored(pytestconfig: pytest.Config, workload: Workload, profile: Profile, data: DataCache) -> Iterator[Stored]:
    """Yield the collection of memory benchmarks."""
    if pytestconfig.getoption("num_images") is None and workload.folder is None:
        workload = Workload(_IMAGES[profile.name], _SHAPE, seed=workload.seed)
    count = workload.count or sum(1 for _ in workload.images())
    with tempfile.TemporaryDirectory(prefix=".memory-", dir=data.folder) as folder:
        yield Stored(workload, count, Path(folder))
