"""Collections of many files: no more than 64 descriptors are open at any time."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from omearrow_ds import (
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    open_images,
    stats,
    write_images,
)
from omearrow_ds.dataset.batch import collate
from tests.support.loops import made_by
from tests.support.strategies import image_of, slow_except

PARTS, DESCRIPTORS = 66, 64
FORMATS = ["arrow", "parquet", "vortex"]
ORDER = np.random.default_rng(0).permutation(PARTS).tolist()


def image(number: int, *, ragged: bool = False) -> np.ndarray:
    return image_of((1, 2, 1, 6 + ragged * number % 3, 8), "uint16", number)


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Limit this process to 64 more descriptors; opening one more is an error."""
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in range(before[0]) if number not in used)
    limit = [next(free) for _ in range(DESCRIPTORS)][-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that writes a folder of files of a format with one image each, of one shape or of three."""

    @cache
    def write(suffix: str, *, ragged: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(suffix)
        for number in range(PARTS):
            path, ids = folder / f"{number:03d}.{suffix}", {"image_ids": [f"id-{number}"], "columns": {"n": [number]}}
            write_images([image(number, ragged=ragged)], path, **ids)
        OMEArrowDataset(folder, preload=False)[0]  # Libraries keep some files open after their first use.
        return folder

    return write


def check(samples: object, order: list[int]) -> None:
    for number, sample in zip(order, samples, strict=True):
        np.testing.assert_array_equal(np.asarray(sample), image(number)[0, :, 0])


@pytest.mark.parametrize(("name", "which"), slow_except([("arrow", "numba")], product(FORMATS, ["numpy", "numba"])))
def test_batches_of_any_parts_that_are_kept(folder_of, name, which):
    alike = folder_of(name)
    with made_by(which), few_descriptors():
        dataset = OMEArrowDataset(alike, preload=False, normalize=False)
        check(collate(dataset.__getitems__(ORDER)), ORDER)
        check([dataset[number] for number in ORDER], ORDER)
        check(OMEArrowDatasetNumpy(alike, preload=False, normalize=False).__getitems__(ORDER), ORDER)
        batches = list(DataLoader(Subset(dataset, ORDER), 40))
        check(torch.cat(batches), ORDER)
        shuffled = list(OMEArrowDataLoader(dataset, 7, shuffle=True, num_workers=0))
        assert len(torch.cat(shuffled)) == PARTS
        halves = OMEArrowDataset(alike, preload=False, normalize=False, crop_size=(4, 4))
        np.testing.assert_array_equal(
            collate(halves.__getitems__(ORDER)), [image(number)[0, :, 0, 1:5, 2:6] for number in ORDER]
        )


@pytest.mark.parametrize(("name", "which"), slow_except([("parquet", "numba")], product(FORMATS, ["numpy", "numba"])))
def test_crops_and_cached_images_of_any_parts(folder_of, name, which):
    alike, ragged = folder_of(name), folder_of(name, ragged=True)
    cells = pa.table({"image_id": [f"id-{n}" for n in range(PARTS)], "y": [2.5] * PARTS, "x": [3.5] * PARTS})
    with made_by(which), few_descriptors():
        for folder in (alike, ragged):
            crops = OMEArrowDataset(
                folder, preload=False, normalize=False, objects=cells, center=("y", "x"), crop_size=(2, 2)
            )
            want = [image(number, ragged=folder is ragged)[0, :, 0, 2:4, 3:5] for number in ORDER]
            np.testing.assert_array_equal(collate(crops.__getitems__(ORDER)), want)
        cached = OMEArrowDataset(ragged, preload=False, normalize=False, cache_bytes=2**30)
        cached_samples = [(cached[number], *cached.__getitems__([number])) for number in ORDER]
        for number, samples in zip(ORDER, cached_samples, strict=True):
            for sample in samples:
                np.testing.assert_array_equal(sample, image(number, ragged=True)[0, :, 0])
        assert cached.cache_info.images == PARTS


@pytest.mark.parametrize("name", slow_except(["parquet"], FORMATS))
def test_images_of_a_source_that_are_kept_and_all_that_reads_through(folder_of, tmp_path, name):
    alike, ragged = folder_of(name), folder_of(name, ragged=True)
    with few_descriptors():
        source = open_images(alike)
        read = [(source.read(number), source.read(number, region=(0, 2, 0, 3))) for number in ORDER]
        for number, (whole, part), taken in zip(ORDER, read, source.take(ORDER), strict=True):
            for actual, want in ((whole, image(number)), (taken, image(number)), (part, image(number)[..., :2, :3])):
                np.testing.assert_array_equal(actual, want)
        stats(alike)
        convert(ragged, tmp_path / "all.arrow")
        write_images(source.take(range(PARTS)), tmp_path / "again.arrow")
        check(OMEArrowDataset(alike, normalize=False), list(range(PARTS)))
        check(OMEArrowDataset(alike, preload=False, verify=True, normalize=False).__getitems__(ORDER), ORDER)
        source.metadata(3)
        repr(source.columns)
