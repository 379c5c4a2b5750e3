"""Track 6, cells: batches of crops from large fields, with or without masks, preloaded and on demand."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.support.cells import Cells
from benchmarks.support.library import HAS_OBJECTS
from benchmarks.support.paired import batched
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format

pytestmark = pytest.mark.skipif(not HAS_OBJECTS, reason="this version cuts no crops around objects")

_BATCH, _TRIALS = 64, 2


@pytest.mark.track(6, "cells")
@pytest.mark.parametrize("access", ["preloaded", "on_demand"])
@pytest.mark.parametrize("sample", ["crop", "mask"])
def test_cells(
    benchmark: BenchmarkFixture, fmt: Format, sample: str, access: str, cells: Cells, seed: int, profile: Profile
) -> None:
    """A batch of 64 crops of random objects by ``dataset.__getitems__``, of files in the page cache."""
    dataset = cells.dataset(fmt, masked=sample == "mask", preload=access == "preloaded")
    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    batches = batched(cycle(order), _BATCH)
    first = dataset.__getitems__(next(batches))  # Opens files once.

    def next_batch() -> tuple[tuple[list[int]], dict[str, Any]]:
        return (next(batches),), {}

    rounds = profile.budget(access).rounds(trial_s(lambda: dataset.__getitems__(next(batches)), _TRIALS))
    benchmark.pedantic(dataset.__getitems__, setup=next_batch, rounds=rounds)
    image = first[0][0] if sample == "mask" else first[0]
    shape = " x ".join(map(str, image.shape))
    benchmark.extra_info.update(batch_size=_BATCH, crop_shape=shape, objects=len(dataset), **cells.properties)
