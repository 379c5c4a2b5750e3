"""Track 0, storage: writing a collection, its size, and opening it with all pixels decoded."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import Datasets
from benchmarks.support.cold import Cold
from benchmarks.support.data import DataCache, disk_usage_of, encodings, library_encoding
from benchmarks.support.library import PixelCache, images_of
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format, OMEArrowDataset, open_images, write_images

_TRIAL_PART = 20  # The trial writes 1/20 of the images.


@pytest.mark.track(0, "write")
def test_write(
    benchmark: BenchmarkFixture, fmt: Format, encoding: str, images: list[Any], scratch: Path, profile: Profile
) -> None:
    """Writing all images from memory to a new path: hashing, encoding, writing and the final rename."""
    _skip_what_the_encoding_cannot_hold(encoding, images)
    numbers = count()
    write = partial(write_images, format=fmt.name, encoding=library_encoding(encoding))
    trial = images[: -(-len(images) // _TRIAL_PART)]
    few_s = trial_s(lambda: write(trial, scratch / f"trial{fmt.suffix}"))

    def new_path() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (images, scratch / f"{next(numbers)}{fmt.suffix}"), {}

    rounds = profile.whole.rounds(few_s * len(images) / len(trial))
    benchmark.pedantic(write, setup=new_path, rounds=rounds)
    _describe(benchmark, images, scratch / f"0{fmt.suffix}")


@pytest.mark.track(0, "preload")
def test_preload(
    benchmark: BenchmarkFixture,
    fmt: Format,
    encoding: str,
    images: list[Any],
    data: DataCache,
    datasets: Datasets,
    profile: Profile,
) -> None:
    """Opening a collection in the page cache, decoding all images into memory, and comparing checksums."""
    _skip_what_the_encoding_cannot_hold(encoding, images)
    path = data.path(fmt, encoding)
    preload = partial(OMEArrowDataset, path, fmt.name, preload=True, axes=datasets.axes(fmt))
    benchmark.pedantic(preload, rounds=profile.whole.rounds(trial_s(preload)))
    _describe(benchmark, images, path)


@pytest.mark.track(0, "preload_cold")
def test_preload_cold(
    benchmark: BenchmarkFixture, fmt: Format, images: list[Any], data: DataCache, scratch: Path, profile: Profile
) -> None:
    """Opening and decoding a collection that was dropped from the page cache, which adds the disk time."""
    cold = Cold(data.path(fmt, encodings(fmt)[0]), scratch / f"cold{fmt.suffix}")

    def preload() -> None:
        source: Any = open_images(cold.path, fmt.name)
        with source:
            PixelCache.load(images_of(source))

    cold.drop()
    benchmark.pedantic(preload, setup=cold.drop, rounds=profile.whole.rounds(trial_s(preload)))
    benchmark.extra_info["encoding"] = encodings(fmt)[0]
    _describe(benchmark, images, cold.path)


def _skip_what_the_encoding_cannot_hold(encoding: str, images: list[Any]) -> None:
    dtypes = {image.dtype.name for image in images}
    if encoding == "list" and not dtypes <= {"uint8", "uint16"}:
        pytest.skip(f"encoding 'list' holds uint8 and uint16 pixels, these are {', '.join(sorted(dtypes))}")


def _describe(benchmark: BenchmarkFixture, images: list[Any], path: Path) -> None:
    raw_bytes = sum(image.nbytes for image in images)
    benchmark.extra_info.update(images=len(images), raw_bytes=raw_bytes, **disk_usage_of(path))
