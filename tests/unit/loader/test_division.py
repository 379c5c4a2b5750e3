"""Samples are divided among ranks once; frameworks' changes to a loader are imitated in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from omearrow_ds import ArgumentError, OMEArrowDataLoader
from omearrow_ds.loader.settings import SharedBatches
from tests.support.emulated_frameworks import EMULATED, RANKS, Shard, Wrapper, store
from tests.support.errors import raises, warns
from tests.support.frameworks import check_rows, summary

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]
RANK = """
import sys
from pathlib import Path
import torch
from tests.support.frameworks import run_rank

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
run_rank(folder, with_frameworks=False, init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
"""
DIVIDES_AGAIN = (
    "a wrapper",
    "Accelerate",
    "Accelerate, split",
    "Accelerate, even",
    "Accelerate, disp",
    "Accelerate, skip",
)


@pytest.fixture(scope="module")
def rows(programs, tmp_path_factory):
    """Run every program on two ranks, and return the samples of each rank."""
    folder = tmp_path_factory.mktemp("division")
    store(folder)
    started = [programs.start(RANK, folder, rank, has_workers=True) for rank in range(RANKS)]
    for done in [program.wait() for program in started]:
        assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder)


def test_frameworks_see_each_image_in_each_epoch(rows):
    assert {name.partition(": ")[0] for name in rows} >= set(EMULATED)
    check_rows(rows)


def test_division_is_warned_of_once_when_it_is_undone(rows):
    for name, row in rows.items():
        again = name.startswith(DIVIDES_AGAIN) and "made early" not in name and "not prepared" not in name
        on_rank_0 = "dispatch" in name  # Only this rank makes batches.
        assert row["warnings"] == ([1, int(not on_rank_0)] if again else [0, 0]), name


@pytest.fixture
def as_rank(monkeypatch):
    """Return a function that makes torch.distributed report a rank without other processes."""

    def choose(rank, ranks):
        for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": ranks}.items():
            monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)

    return choose


def test_sampler_has_the_share_of_its_rank_and_batches_have_all(numbers, as_rank):
    shares, whole = [], set()
    for rank in range(3):
        as_rank(rank, 3)
        loader = OMEArrowDataLoader(numbers, 4, shuffle=True, num_workers=0)
        shares.append(list(loader.sampler))
        assert len(loader.sampler) == len(shares[-1]) == 8
        assert len(loader) == 2
        with warns(UserWarning, mentions=("divides samples among ranks", "accelerator.prepare")) as caught:
            whole |= {str(list(loader.batch_sampler)) for _ in range(2)}
        assert len(caught) == 1
        assert len(loader.batch_sampler) == 6
    assert len(whole) == 1
    assert sorted({index for share in shares for index in share}) == [*range(23)]


def test_loader_divides_once_when_a_batch_sampler_of_another_is_given(numbers, as_rank):
    """Lightning passes such a sampler for predictions."""
    delivered = []
    for rank in range(2):
        as_rank(rank, 2)
        loader = OMEArrowDataLoader(numbers, 4, shuffle=True, num_workers=0)
        again = OMEArrowDataLoader(numbers, num_workers=0, batch_sampler=SharedBatches(loader.sampler, 4, False))
        assert len(again) == len(loader) == 3
        batches = [batch.tolist() for _, batch in again]
        assert batches == [batch.tolist() for _, batch in loader]
        shard = Shard(loader.batch_sampler, 2, rank, split=False, even=True)
        with warns(UserWarning, mentions=("divides samples among ranks", "accelerator.prepare")):
            delivered += [
                number
                for _, batch in OMEArrowDataLoader(numbers, num_workers=0, batch_sampler=shard)
                for number in batch
            ]
    assert sorted({int(number) for number in delivered}) == [*range(23)]
    assert len(delivered) == 24


def test_loader_refuses_a_batch_sampler_that_divides_shares(numbers, as_rank):
    as_rank(0, 2)
    shares = BatchSampler(DistributedSampler(numbers, 2, 0), 4, False)
    with raises(ArgumentError, option="batch_sampler"):
        OMEArrowDataLoader(numbers, num_workers=0, batch_sampler=Shard(shares, 2, 0, split=False, even=True))
    assert len(OMEArrowDataLoader(numbers, num_workers=0, batch_sampler=shares)) == 3


def test_sampler_of_a_window_is_divided_when_a_wrapper_divides_it(numbers, as_rank):
    """The order depends on each process's generator, and the loader is made before the process group."""
    early = OMEArrowDataLoader(numbers, 4, shuffle_fields=5, num_workers=0)
    drawn_numbers = []
    for rank in range(2):
        torch.manual_seed(rank)
        as_rank(rank, 2)
        wrapper = Wrapper(early.sampler, num_replicas=2, rank=rank)
        drawn_numbers += [
            number for _, batch in OMEArrowDataLoader(numbers, 4, sampler=wrapper, num_workers=0) for number in batch
        ]
    assert sorted({int(number) for number in drawn_numbers}) == [*range(23)]
    assert len(drawn_numbers) == 24
