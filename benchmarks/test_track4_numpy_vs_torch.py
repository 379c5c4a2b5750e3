"""Track 4, NumPy vs torch: cost of a tensor in addition to a sample's array.

`OMEArrowDataset` does not copy: its tensor shares the memory of the sample's array by `torch.from_numpy`, called once
per sample or per batch. So the two datasets are measured in turns, and conversions separately, including a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import Datasets
from benchmarks.support.library import get_format
from benchmarks.support.paired import random_indices
from benchmarks.support.workload import NO_BATCH, Profile, Workload, trial_s
from benchmarks.tracks.numpy_vs_torch import of_a_sample
from omearrow_ds import Format, OMEArrowDataset, OMEArrowDatasetNumpy

Array = np.ndarray[Any, Any]

_TRIALS = 3
_BATCH_SIZE = 16
_LARGEST = {"float16": 1, "float32": 1, "uint8": 255, "int8": 127}  # Largest value of scaled pixels per dtype.

dtypes = pytest.mark.parametrize("dtype", _LARGEST)


@pytest.mark.track(4, "sample")
def test_sample(benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, profile: Profile) -> None:
    """One random ``dataset[i]`` on demand as a tensor; the array and the conversions are timed separately."""
    _measure(benchmark, profile, datasets.get(fmt, "on_demand"), _arrays(datasets, fmt, preload=False), seed)


@pytest.mark.track(4, "sample")
def test_preloaded_sample(benchmark: BenchmarkFixture, datasets: Datasets, seed: int, profile: Profile) -> None:
    """One random ``dataset[i]`` of preloaded pixels, which are the same for all formats."""
    fmt = get_format("arrow")
    _measure(benchmark, profile, datasets.get(fmt, "preloaded"), _arrays(datasets, fmt, preload=True), seed)


@pytest.mark.track(4, "convert")
@dtypes
@pytest.mark.parametrize("how", ["from_numpy", "copy", "batch"])
def test_convert(benchmark: BenchmarkFixture, dtype: str, how: str, workload: Workload, profile: Profile) -> None:
    """Conversion of one image of a dtype, or of 16 images in one array, from memory to a tensor."""
    images = _images(workload, dtype)
    if how not in (conversions := _conversions(images)):
        pytest.skip(NO_BATCH)
    convert, arrays, samples = conversions[how]
    rounds = profile.rounds_of_distribution(trial_s(lambda: convert(next(arrays)), _TRIALS))
    benchmark.pedantic(convert, setup=lambda: ((next(arrays),), {}), rounds=rounds)
    benchmark.extra_info.update(samples=samples, bytes=images[0].nbytes)


@pytest.mark.track(4, "to_device")
@pytest.mark.parametrize("device", ["cuda"])
@dtypes
def test_to_device(
    benchmark: BenchmarkFixture,
    dtype: str,
    device: str,
    workload: Workload,
    profile: Profile,
    pytestconfig: pytest.Config,
) -> None:
    """Copying the tensor of one image from pageable memory to the CUDA device, with synchronization."""
    if pytestconfig.getoption("device") != device:
        pytest.skip("measured with --device cuda")
    tensor = torch.from_numpy(_images(workload, dtype)[0])

    def copy() -> None:
        tensor.to(device)
        torch.cuda.synchronize()

    copy()
    benchmark.pedantic(copy, rounds=profile.rounds_of_distribution(trial_s(copy, _TRIALS)))
    benchmark.extra_info["bytes"] = tensor.nbytes


@pytest.mark.track(4, "to_device")
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", ["uint8"])
@pytest.mark.parametrize("how", ["pageable", "pinned", "on_device"])
def test_batch_to_device(
    benchmark: BenchmarkFixture, dtype: str, device: str, how: str, workload: Workload, pytestconfig: pytest.Config
) -> None:
    """Copying a tensor of 16 images to or on the CUDA device, with synchronization: upper limits of the speed."""
    if pytestconfig.getoption("device") != device:
        pytest.skip("no CUDA device: measured with --device cuda")
    images = _images(workload, dtype)
    if len({image.shape for image in images}) > 1:
        pytest.skip(NO_BATCH)
    batch = torch.from_numpy(np.stack(images))
    batch = {"pageable": batch, "pinned": batch.pin_memory(), "on_device": batch.to(device)}[how]
    on_device = torch.empty_like(batch, device=device)

    def copy() -> None:
        on_device.copy_(batch, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    benchmark.pedantic(copy, rounds=50)
    benchmark.extra_info.update(samples=len(images), bytes=images[0].nbytes)


def _arrays(datasets: Datasets, fmt: Format, *, preload: bool) -> OMEArrowDatasetNumpy:
    return OMEArrowDatasetNumpy(datasets.path(fmt), fmt.name, preload=preload, axes=datasets.axes(fmt))


def _measure(
    benchmark: BenchmarkFixture, profile: Profile, tensors: OMEArrowDataset, arrays: OMEArrowDatasetNumpy, seed: int
) -> None:
    """Measure samples of both datasets in turns, over all images in the same order, and then conversions.

    Other work between the two must be avoided: a copy there changes caches and memory for only one of them, which
    makes the same read 20 % faster or slower.
    """
    indices, ahead = random_indices(len(tensors), seed)
    numpy_s: list[float] = []

    def read_array() -> tuple[tuple[int], dict[str, Any]]:
        args = (next(ahead),)
        start = perf_counter()
        _array = arrays.__getitem__(*args)  # Same call as in pytest-benchmark, freed after timing.
        numpy_s.append(perf_counter() - start)
        return (next(indices),), {}

    size_bytes = tensors[next(indices)].nbytes
    pair_s = trial_s(lambda: (read_array(), tensors[next(indices)]), _TRIALS)
    numpy_s.clear()
    benchmark.pedantic(tensors.__getitem__, setup=read_array, rounds=profile.rounds_of_distribution(pair_s))
    alone: dict[str, Any] = {}
    for how, conversion in _conversions([arrays[index] for index in range(min(_BATCH_SIZE, len(arrays)))]).items():
        alone |= {f"{how}_{name}": value for name, value in _timed(conversion, profile).items()}
    benchmark.extra_info.update(numpy_s=numpy_s, alone=alone, samples=1, bytes=size_bytes)


class _Conversion(NamedTuple):
    """Function that creates a tensor, endless iterator of its arguments, and number of samples per call."""

    convert: Callable[[Array], torch.Tensor]
    arrays: Iterator[Array]
    samples: int


def _conversions(arrays: Sequence[Array]) -> dict[str, _Conversion]:
    """Return the conversions of samples to tensors; that of a batch only if all shapes are equal."""
    conversions = {
        "from_numpy": _Conversion(torch.from_numpy, cycle(arrays), 1),
        "copy": _Conversion(torch.tensor, cycle(arrays), 1),
    }
    if len({array.shape for array in arrays}) == 1:
        conversions["batch"] = _Conversion(torch.from_numpy, cycle([np.stack(arrays)]), len(arrays))
    return conversions


def _timed(conversion: _Conversion, profile: Profile) -> dict[str, float | None]:
    convert, arrays, samples = conversion
    seconds: list[float] = []
    for _ in range(profile.rounds_of_distribution(trial_s(lambda: convert(next(arrays)), _TRIALS))):
        array = next(arrays)
        start = perf_counter()
        _tensor = convert(array)
        seconds.append(perf_counter() - start)
    return of_a_sample(seconds, samples)


def _images(workload: Workload, dtype: str) -> list[Array]:
    """Return the first images, scaled to 0 ... 1 or to the largest value of the integer dtype."""
    images = list(islice(workload.images(), _BATCH_SIZE))
    scales = [_LARGEST[dtype] / (np.iinfo(image.dtype).max if image.dtype.kind in "iu" else 1) for image in images]
    return [(image * scale).astype(dtype) for image, scale in zip(images, scales, strict=True)]
