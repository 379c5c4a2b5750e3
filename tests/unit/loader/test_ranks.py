"""Many ranks over gloo on one machine, each with its share of the samples."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.support.strategies import image_of

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]
COUNT = 11

RANK = """
import json, sys, warnings
import torch, torch.distributed as dist
from torch.utils.data import RandomSampler
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset

path, out, held, rank, ranks = sys.argv[1:]
dataset = OMEArrowDataset(path, target="n", cache_dir=held)
early = OMEArrowDataLoader(dataset, 2)
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=int(rank), world_size=int(ranks))

def epoch(loader):
    return [n for _, numbers in loader for n in numbers.tolist()]

found = {"cached": dataset._collection.cache.block.writable is False}
plain = OMEArrowDataLoader(dataset, 2)
found["in order"] = [epoch(plain), epoch(plain)]
found["length"] = len(plain)
found["why"] = plain.settings["sampler"].why
workers = {"num_workers": 2, "timeout": 60} if rank == "1" else {"num_workers": 0}
shuffled = OMEArrowDataLoader(dataset, 2, shuffle=True, **workers)
found["shuffled"] = [epoch(shuffled) for _ in range(3)]
shuffled.set_epoch(1)
found["epoch 1"] = [epoch(shuffled), epoch(shuffled)]
seeded = torch.Generator().manual_seed(8)
found["dropped"] = epoch(OMEArrowDataLoader(dataset, 1, shuffle=True, drop_last=True, generator=seeded))
found["own sampler"] = epoch(OMEArrowDataLoader(dataset, 2, sampler=range(4)))
half = OMEArrowDataLoader(dataset, 1, shuffle=True)
epoch(half)
batches = iter(half)
seen = [int(next(batches)[1]) for _ in range(2)]
state = half.state_dict()
left = epoch(batches)
again = OMEArrowDataLoader(dataset, 1, shuffle=True)
again.load_state_dict(state)
found["resumed"] = [left, epoch(again), epoch(half), epoch(again)]
def drawing():
    drawn = OMEArrowDataset(path, target="n", transform=lambda image: torch.rand(()))
    return OMEArrowDataLoader(drawn, 1, shuffle=True)

torch.manual_seed(4)
loader, again = drawing(), drawing()
batches = iter(loader)
found["drawn"] = [float(next(batches)[0]) for _ in range(2)]
states = [None] * dist.get_world_size()
dist.all_gather_object(states, loader.state_dict())
again.load_state_dict(states[0])
found["drawn on"] = [[float(image) for image, _ in each] for each in (batches, again)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["early"] = epoch(early)
found["warned"] = [str(each.message) for each in caught if each.category is UserWarning]
json.dump(found, open(f"{out}/{rank}.json", "w"))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request, programs, tmp_path_factory):
    """Run every case on all ranks at once, and return the results per rank."""
    from omearrow_ds import write_images

    folder = tmp_path_factory.mktemp("ranks")
    write_images(
        [image_of((4, 5), "uint16", n) for n in range(COUNT)], folder / "images.arrow", columns={"n": [*range(COUNT)]}
    )
    words = folder / "images.arrow", folder, folder / "held"
    started = [
        programs.start(RANK, *words, rank, request.param, has_workers=rank == 1) for rank in range(request.param)
    ]
    for done in [program.wait() for program in started]:
        assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def shares(count, **kwargs):
    samplers = [DistributedSampler(range(COUNT), count, rank, **kwargs) for rank in range(count)]
    return lambda epoch: [(sampler.set_epoch(epoch), list(sampler))[1] for sampler in samplers]


def test_each_rank_has_the_share_of_a_distributed_sampler(ranks):
    expected = shares(len(ranks), shuffle=False)(0)
    assert [rank["in order"] for rank in ranks] == [[share, share] for share in expected]
    assert {rank["length"] for rank in ranks} == {-(-len(expected[0]) // 2)}
    assert all(f"rank {n} of {len(ranks)} ranks" in rank["why"] for n, rank in enumerate(ranks))


def test_together_they_have_all_and_the_padding_is_the_first(ranks):
    for kind in ("in order", "shuffled"):
        for epoch in range(2):
            orders = [rank[kind][epoch] for rank in ranks]
            assert len(set(map(len, orders))) == 1
            together = sorted(sample for share in orders for sample in share)
            assert set(together) == set(range(COUNT))
            assert len(together) == -(-COUNT // len(ranks)) * len(ranks)
            assert len(set(map(tuple, orders))) == len(ranks)


def test_the_order_changes_with_the_epoch(ranks):
    expected = shares(len(ranks), shuffle=True)
    for number, rank in enumerate(ranks):
        assert rank["shuffled"] == [expected(epoch)[number] for epoch in range(3)]
        assert rank["epoch 1"] == [expected(1)[number]] * 2  # The epoch that was set.


def test_a_tail_is_dropped_on_request_and_the_generator_seeds_the_order(ranks):
    expected = shares(len(ranks), shuffle=True, seed=8, drop_last=True)(0)
    assert [rank["dropped"] for rank in ranks] == expected
    assert len({sample for share in expected for sample in share}) == COUNT // len(ranks) * len(ranks)


def test_a_sampler_of_ones_own_is_left_alone(ranks):
    assert all(rank["own sampler"] == [0, 1, 2, 3] for rank in ranks)


def test_ranks_resume(ranks):
    for rank in ranks:
        left, resumed, following, followed = rank["resumed"]
        assert resumed == left
        assert followed == following


def test_ranks_draw_different_numbers_and_resume_from_the_state_of_one(ranks):
    """All ranks have the same torch seed here."""
    drawn = [value for rank in ranks for value in (*rank["drawn"], *rank["drawn on"][0])]
    assert len(set(drawn)) == len(drawn) == len(ranks) * -(-COUNT // len(ranks))
    assert all(left == resumed for left, resumed in (rank["drawn on"] for rank in ranks))


def test_a_loader_made_too_early_is_warned_of(ranks):
    for rank in ranks:
        assert rank["early"] == [*range(COUNT)]
        (message,) = rank["warned"]
        assert "created for 1 ranks" in message


def test_all_map_one_block(ranks):
    assert all(rank["cached"] for rank in ranks)
