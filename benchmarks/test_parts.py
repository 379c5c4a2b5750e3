"""Collections in parts compared with one file: opening, an epoch on demand, and conversion by an engine.

The start of an engine and the check for equal pixels are outside the timed section.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.conftest import Datasets
from benchmarks.support.data import DataCache
from benchmarks.support.library import HAS_PARTS
from benchmarks.support.paired import Compare, Side, drain
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset, convert, open_images

pytestmark = pytest.mark.skipif(not HAS_PARTS, reason="this version has no collections in parts")
_PARTS, _BATCH, _MADE = 20, 64, 8
_FULL = pytest.mark.full  # Writes many collections of small files.
mapped = pytest.mark.parametrize("format_name", ["arrow", "parquet", "vortex"])


@pytest.fixture(scope="module")
def folder(data: DataCache) -> Iterator[Path]:
    """Yield an empty folder on the disk of the data."""
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=data.folder) as scratch:
        yield Path(scratch)


@pytest.fixture
def parts(fmt: Format, datasets: Datasets, folder: Path) -> Path:
    """Return the path of the collection converted to about 20 parts."""
    path = folder / f"{fmt.name}.parts"
    if not path.exists():
        convert(datasets.path(fmt), path, fmt.name, part_bytes=_part_bytes(datasets, fmt, _PARTS))
    return path


@mapped
@pytest.mark.usefixtures("one_core")
@pytest.mark.limit("reference", "parts_open")
def test_open(compare: Compare, fmt: Format, datasets: Datasets, parts: Path) -> None:
    """Opening a collection in 20 parts, and closing it."""
    whole = datasets.path(fmt)
    ours, reference = (Side(lambda path: open_images(path).close(), repeat(path)) for path in (parts, whole))
    compare(ours, reference, datasets.image_shape(fmt), fmt.name)


@mapped
@pytest.mark.usefixtures("one_core")
@pytest.mark.limit("reference", "parts_epoch")
def test_epoch(compare: Compare, fmt: Format, datasets: Datasets, parts: Path, seed: int) -> None:
    """A shuffled epoch on demand, in batches of 64 without workers; time per image."""
    whole = datasets.batched(fmt, "on_demand")
    split = OMEArrowDataset(parts, preload=False, axes=datasets.axes(fmt))
    assert torch.equal(split[len(split) - 1], whole[len(whole) - 1]), "the parts have other pixels"
    sides = []
    for dataset in (split, whole):
        generator = torch.Generator().manual_seed(seed)
        loader = OMEArrowDataLoader(dataset, _BATCH, shuffle=True, generator=generator)
        sides.append(Side(drain, repeat(loader), len(dataset)))
    ours, reference = sides
    shape = datasets.image_shape(fmt)
    compare(ours, reference, shape, fmt.name, batch_size=_BATCH, images=len(whole))


@pytest.mark.limit("reference", "parts_convert")
@pytest.mark.parametrize(
    "format_name", [pytest.param("ome_zarr", marks=_FULL), "parquet", pytest.param("vortex", marks=_FULL)]
)  # The library of the last format uses threads.
@pytest.mark.parametrize("workers", [pytest.param(1, marks=_FULL), 2])
def test_convert(compare: Compare, fmt: Format, workers: int, datasets: Datasets, scratch: Path) -> None:
    """Conversion to 8 parts by a pool of running processes, compared with one process."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    _compare_with_loop(compare, fmt, pool, f"pool of {workers}", datasets, scratch)


@_FULL
@pytest.mark.limit("reference", "parts_convert_dask")
@pytest.mark.parametrize("format_name", ["parquet"])
@pytest.mark.parametrize("workers", [1, 2])
def test_convert_by_dask(compare: Compare, fmt: Format, workers: int, datasets: Datasets, scratch: Path) -> None:
    """Conversion to 8 parts by a running Dask cluster of processes, compared with one process."""
    _compare_with_loop(compare, fmt, _dask(workers), f"dask of {workers}", datasets, scratch)


def _compare_with_loop(
    compare: Compare,
    fmt: Format,
    engine: AbstractContextManager[Executor],
    name: str,
    datasets: Datasets,
    scratch: Path,
) -> None:
    """Compare conversion by an engine with a loop in this process; the name ends with the number of cores."""
    workers = int(name.rpartition(" ")[2])
    source = datasets.path(fmt)
    part_bytes = _part_bytes(datasets, fmt, _MADE)
    if len(os.sched_getaffinity(0)) < workers:
        pytest.skip(f"this machine has fewer than {workers} cores")
    with engine as executor:
        numbers = (scratch / f"{number}.parts" for number in count())
        make = partial(convert, source, format=fmt.name, part_bytes=part_bytes)
        by_engine, by_loop = Side(partial(make, executor=executor), numbers, once=True), Side(make, numbers, once=True)
        compare(by_engine, by_loop, datasets.image_shape(fmt), name, engine=name, workers=workers)


@contextmanager
def _dask(workers: int) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster with ``workers`` processes."""
    distributed = pytest.importorskip("distributed")
    before = dict(os.environ)  # A cluster changes memory and thread settings in it.
    how = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
    try:
        with distributed.LocalCluster(**how) as cluster, distributed.Client(cluster) as client:
            yield client.get_executor()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _part_bytes(datasets: Datasets, fmt: Format, parts: int) -> int:
    """Return the bytes per part for a number of parts, at least the largest image."""
    with open_images(datasets.path(fmt), fmt.name) as source:
        sizes: Any = [shape.prod() * dtype.itemsize for shape, dtype in zip(source.shapes, source.dtypes, strict=True)]
        return int(max(*sizes, -(-sum(sizes) // parts)))
