"""Track 4, numpy vs torch: what a tensor costs on top of a sample's array.

Converting means ``torch.tensor(array)``: a tensor of its own memory, as a sample must be that its user may write on.
`torch.from_numpy` shares the array's memory and would cost next to nothing, whatever the size.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks.workload import trial_s
from omearrow_ds import OMEArrowDatasetNumpy

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from benchmarks.conftest import Datasets
    from benchmarks.workload import Profile, Workload
    from omearrow_ds import Format

_TRIALS = 3
DTYPES = ("float16", "float32", "uint8")


@pytest.mark.track(4, "sample")
def test_sample(benchmark: BenchmarkFixture, fmt: Format, datasets: Datasets, seed: int, profile: Profile) -> None:
    """One normalised sample, on demand and at random: reading it as an array, then copying that to a tensor."""
    dataset = OMEArrowDatasetNumpy(datasets.path(fmt), fmt.name, preload=False, axes=datasets.axes(fmt))
    indices = cycle(np.random.default_rng(seed).permutation(len(dataset)).tolist())
    numpy_s: list[float] = []

    def sample(index: int) -> torch.Tensor:
        start = perf_counter()
        array = dataset[index]
        numpy_s.append(perf_counter() - start)
        return torch.tensor(array)

    def next_index() -> tuple[tuple[int], dict[str, Any]]:
        return (next(indices),), {}

    size_bytes = sample(next(indices)).nbytes
    rounds = profile.rounds_of_samples(trial_s(lambda: sample(next(indices)), _TRIALS))
    numpy_s.clear()
    benchmark.pedantic(sample, setup=next_index, rounds=rounds)
    benchmark.extra_info.update(numpy_s=numpy_s, bytes=size_bytes)


@pytest.mark.track(4, "convert")
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_convert(benchmark: BenchmarkFixture, dtype: str, device: str, workload: Workload, profile: Profile) -> None:
    """Copying one image's array, which is in memory, to a tensor of the same dtype."""
    array = _array(workload, dtype)
    copy = partial(torch.tensor, array, device=device)
    benchmark.pedantic(copy, rounds=profile.rounds_of_samples(trial_s(copy, _TRIALS)))
    benchmark.extra_info["bytes"] = array.nbytes


@pytest.mark.track(4, "to_device")
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_to_device(
    benchmark: BenchmarkFixture,
    dtype: str,
    device: str,
    workload: Workload,
    profile: Profile,
    pytestconfig: pytest.Config,
) -> None:
    """Copying one image's tensor from pageable memory to the CUDA device, until it is there."""
    if pytestconfig.getoption("device") != device:
        pytest.skip("measured with --device cuda")
    tensor = torch.from_numpy(_array(workload, dtype))

    def copy() -> None:
        tensor.to(device)
        torch.cuda.synchronize()

    copy()
    benchmark.pedantic(copy, rounds=profile.rounds_of_samples(trial_s(copy, _TRIALS)))
    benchmark.extra_info["bytes"] = tensor.nbytes


def _array(workload: Workload, dtype: str) -> np.ndarray[Any, Any]:
    """Return the first image, scaled to 0 ... 1 or, for uint8, to 0 ... 255."""
    image = next(iter(workload.images()))
    scaled = image / (np.iinfo(image.dtype).max if image.dtype.kind in "iu" else 1)
    return (scaled * 255 if dtype == "uint8" else scaled).astype(dtype)
