"""Order of samples in parts, for any division among ranks and any point of resumption."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset, write_images
from omearrow_ds.loader.samplers import WINDOW, OrderSpec, PartsSampler, Ranks
from omearrow_ds.storage.concat import OPEN_PARTS, Index
from omearrow_ds.storage.formats._base import PartLayout
from omearrow_ds.storage.jobs import PartitionOptions
from tests.support.errors import raises
from tests.support.parts import publish
from tests.support.strategies import image_of


def in_parts(sizes, fields=None):
    """The attributes of a dataset that the sampler reads."""
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    fields = np.arange(starts[-1]) if fields is None else np.array(fields, np.int64)
    return SimpleNamespace(_collection=SimpleNamespace(part_layout=PartLayout(starts, "digest")), fields=fields)


def samplers(dataset, plan, hosts, per_host, *, drop_last=False, epoch=0, consumed=0):
    samplers_of_ranks = []
    for rank in range(hosts * per_host):
        sampler = PartsSampler(dataset, plan, Ranks(rank, hosts * per_host, hosts), drop_last=drop_last)
        sampler.set_epoch(epoch)
        sampler.consumed = consumed
        samplers_of_ranks.append(sampler)
    return samplers_of_ranks


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any)
PLANS = st.builds(
    OrderSpec, st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans()
)
HOSTS = st.sampled_from([(hosts, per_host) for hosts in (1, 2) for per_host in (1, 2, 3, 4)])


@settings(deadline=None, max_examples=150)
@given(SIZES, PLANS, HOSTS, st.booleans(), st.integers(0, 3))
def test_all_ranks_have_every_sample_once_and_as_many(sizes, plan, hosts, drop_last, epoch):
    plan = plan._replace(nodes=hosts[0] * plan.nodes)
    ranks = hosts[0] * hosts[1]
    shares = [list(sampler) for sampler in samplers(in_parts(sizes), plan, *hosts, drop_last=drop_last, epoch=epoch)]
    counted = Counter(sample for share in shares for sample in share)
    assert len({len(share) for share in shares}) == 1
    if drop_last:
        assert max(counted.values(), default=1) == 1
        assert sum(sizes) - counted.total() == sum(sizes) % ranks
    else:
        assert set(counted) == set(range(sum(sizes)))
        assert counted.total() - sum(sizes) == -sum(sizes) % ranks


RUNS = st.lists(st.tuples(HOSTS, st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(SIZES, PLANS, RUNS, st.data())
def test_taken_up_by_other_ranks_each_sample_comes_once(sizes, plan, runs, data):
    plan, total = plan._replace(nodes=2 * plan.nodes), sum(sizes)
    order = list(samplers(in_parts(sizes), plan, 1, 1)[0])
    consumed, taken_before = 0, []
    for (hosts, per_host), batch_size, batches in runs:
        shares = [list(sampler) for sampler in samplers(in_parts(sizes), plan, hosts, per_host, consumed=consumed)]
        taken = [sample for share in shares for sample in share[: batches * batch_size]]
        consumed = min(consumed + hosts * per_host * batches * batch_size, total)
        taken_before += taken
        assert sorted(set(taken_before)) == sorted(order[:consumed])  # A prefix of the order of a single rank.
    hosts, per_host = data.draw(HOSTS)
    rest = [list(sampler) for sampler in samplers(in_parts(sizes), plan, hosts, per_host, consumed=consumed)]
    assert len(set(map(len, rest))) == 1
    left = Counter(sample for share in rest for sample in share)
    assert set(order[consumed:]) <= set(left)
    assert left.total() - (total - consumed) == -(total - consumed) % (hosts * per_host)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=4), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 5))
def test_a_host_reads_parts_of_its_own_and_at_most_those_at_its_ends(sizes, per_host, shuffle, seed):
    starts = np.cumsum(sizes)
    of_host: list[set[int]] = [set(), set()]
    for sampler in samplers(in_parts(sizes), OrderSpec(seed, 2, 2, shuffle), 2, per_host):
        numbers = np.searchsorted(starts, list(sampler)[: sum(sizes) // (2 * per_host)], side="right").tolist()
        of_host[sampler.ranks.rank // per_host] |= set(numbers)
    assert len(of_host[0] & of_host[1]) <= 1


def test_an_order_is_of_a_window_of_parts_wherever_it_is_and_another_one_each_epoch():
    sizes = [50] * 100
    sampler = samplers(in_parts(sizes), OrderSpec(3, 1, 5, True), 1, 1)[0]
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = sampler.share()
        orders.append(order.tolist())
        parts = [len(set(batch.tolist())) for batch in order[: 64 * 78].reshape(-1, 64) // 50]
        assert min(parts) >= 4
        assert max(parts) <= 2 * 5
        assert 5 <= np.mean(parts) <= 7.5
    assert orders[0] != orders[1]
    assert samplers(in_parts([5] * 10), OrderSpec(3, 1, 5, True), 1, 1)[0].share().tolist() != sorted(range(50))


@pytest.mark.parametrize(("parts", "nodes"), [(1, 1), (3, 1), (40, 1), (40, 2)])
def test_an_order_that_grows_begins_with_one_part_to_which_those_of_the_window_join(parts, nodes):
    sampler = samplers(in_parts([180] * parts), OrderSpec(3, nodes, 4, True, grows=True), 1, 1)[0]
    firsts = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        of_node = (sampler.share()[: 180 * parts // nodes * nodes] // 180).reshape(-1, nodes).T[0]
        batches = [len(set(of_node[first : first + 64].tolist())) for first in range(0, len(of_node) - 63, 64)]
        assert batches[0] == 1
        assert max(batches) <= 4 + 2
        assert parts < 40 or np.mean(batches[6:-6]) > 3.9
        firsts.append(sampler.share()[:64].tolist())
        parts_before = [set(of_node[:first].tolist()) for first in range(64, len(of_node), 64)]
        grown = [len(later) - len(before) for before, later in pairwise(parts_before)]
        assert max(grown, default=0) <= 2  # No part is read before it is needed.
    assert len({tuple(first) for first in firsts}) == 3


def test_the_order_stays_as_it_is():
    """States of older versions are resumed with this order."""
    sampler = samplers(in_parts([4, 0, 3, 5, 2, 4]), OrderSpec(7, 2, 1, True), 1, 1)[0]
    assert list(sampler) == RECORDED
    growing = samplers(in_parts([4, 0, 3, 5, 2, 4]), OrderSpec(7, 2, 2, True, grows=True), 1, 1)[0]
    assert list(growing) == RECORDED_GROWING


def test_what_a_launcher_tells():
    assert Ranks.from_environment(3, 4, {"LOCAL_WORLD_SIZE": "2"}) == Ranks(3, 4, 2)
    assert Ranks.from_environment(3, 4, {}) == Ranks(3, 4, 1)
    assert Ranks.from_environment(0, 1, {"LOCAL_WORLD_SIZE": "4"}) == Ranks(0, 1, 1)
    assert Ranks.from_environment(0, 5, {"LOCAL_WORLD_SIZE": "2"}) == Ranks(0, 5, 1)


@pytest.mark.parametrize("hosts", [[2, 2], [1], [4, 4, 4], [2, 4], [2, 1, 3], [1, 5]])
def test_ranks_are_refused_on_at_least_one_host_when_hosts_differ_in_their_number(hosts):
    """Otherwise ranks would divide different stretches, and images would be missing."""
    world_size, num_hosts = sum(hosts), []
    for per_host in hosts:
        numbers = {"LOCAL_WORLD_SIZE": per_host, "GROUP_WORLD_SIZE": len(hosts), "WORLD_SIZE": world_size}
        environment = {name: str(value) for name, value in numbers.items()}
        if per_host * len(hosts) == world_size:
            num_hosts.append(Ranks.from_environment(0, world_size, environment).hosts)
            continue
        with raises(ArgumentError, mentions=f"LOCAL_WORLD_SIZE={per_host}"):
            Ranks.from_environment(0, world_size, environment)
        assert Ranks.from_environment(0, world_size, {**environment, "LOCAL_WORLD_SIZE": ""}).hosts == 1
        # A process group of a subset of the ranks.
        assert Ranks.from_environment(0, per_host, environment) == Ranks(0, per_host, 1)
        num_hosts.append(None)
    assert (None in num_hosts) is (len(set(hosts)) > 1)
    assert None in num_hosts or set(num_hosts) == {len(hosts)}


RECORDED = [9, 10, 13, 11, 12, 4, 14, 5, 15, 6, 16, 2, 7, 0, 17, 3, 8, 1]
RECORDED_GROWING = [13, 11, 16, 4, 12, 5, 15, 10, 14, 2, 17, 6, 8, 3, 7, 0, 9, 1]
SIZES_ON_DISK = [5, 1, 11, 6]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    images = [image_of((1, 2, 1, 3, 4), "uint16", number) for number in range(sum(SIZES_ON_DISK))]
    return publish(tmp_path_factory.mktemp("order") / "plate.parts", images, SIZES_ON_DISK)


@pytest.fixture
def as_rank(monkeypatch):
    def choose(rank, ranks, per_host):
        for module in ("dataloader", "position", "settings"):
            monkeypatch.setattr(f"omearrow_ds.loader.{module}.rank_and_world_size", lambda: (rank, ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))

    return choose


def labels(loader):
    return [batch[-1].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_ranks_go_on_from_the_state_of_any(path, as_rank, workers):
    dataset = OMEArrowDataset(path, target="label", preload=False)
    states, labels_before = [], []
    for rank in range(4):
        as_rank(rank, 4, 2)
        loader = OMEArrowDataLoader(dataset, 2, shuffle=True, num_workers=workers if rank < 1 else 0)
        list(loader)
        batches = iter(loader)
        labels_before += next(batches)[1].tolist()
        states.append(loader.state_dict())
        del batches
    assert all(state == states[0] for state in states)
    assert states[0]["epoch"] == 1
    assert states[0]["consumed"] == 8
    assert all(isinstance(value, int | str) for value in states[0].values())
    for ranks, per_host in ((1, 1), (2, 1), (3, 3)):
        rest, after = [], []
        for rank in range(ranks):
            as_rank(rank, ranks, per_host)
            loader = OMEArrowDataLoader(dataset, 3, shuffle=True, num_workers=0)
            loader.load_state_dict(states[3])
            assert loader.state_dict() == states[0]
            rest += [label for batch in labels(loader) for label in batch]
            assert loader.state_dict() == {**states[0], "epoch": 2, "consumed": 0}
            after += [label for batch in labels(loader) for label in batch]
        assert set(labels_before) | set(rest) == set(range(23))
        assert len(labels_before) + len(rest) == 23 + -15 % ranks
        assert sorted(set(after)) == list(range(23))
    as_rank(0, 3, 1)
    with raises(ArgumentError, mentions=("2 hosts", 3)):
        OMEArrowDataLoader(dataset, 2, shuffle=True).load_state_dict(states[0])


def test_what_is_drawn_goes_on_too(path):
    dataset = OMEArrowDataset(path, transform=lambda image: torch.rand(()), preload=False)

    def make_loader(workers=0, seed=5):
        generator = torch.Generator().manual_seed(seed)
        return OMEArrowDataLoader(dataset, 4, shuffle=True, num_workers=workers, generator=generator)

    first = [drawn_batch.tolist() for drawn_batch in make_loader()]
    assert first == [drawn_batch.tolist() for drawn_batch in make_loader(2)]
    assert first != [drawn_batch.tolist() for drawn_batch in make_loader(seed=6)]
    loader, other = make_loader(), make_loader()
    batches = iter(loader)
    next(batches), next(batches)
    other.load_state_dict(loader.state_dict())
    assert [drawn_batch.tolist() for drawn_batch in other] == first[2:]


def test_views_crops_and_orders_without_chance(path, as_rank):
    dataset = OMEArrowDataset(path, target="label", preload=False)
    assert labels(OMEArrowDataLoader(dataset, 23)) == [list(range(23))]
    shares = []
    for rank in range(2):
        as_rank(rank, 2, 1)
        loader = OMEArrowDataLoader(dataset, 23)
        (share,) = labels(loader)
        shares.append(share)
        assert f"4 parts in stored order; rank {rank} of 2 ranks" in loader.settings["sampler"].why
    assert shares == [list(range(12)), [*range(12, 23), 22]]
    as_rank(0, 1, 1)
    train, _ = dataset.split((0.7, 0.3))
    for data in (train, OMEArrowDataset(path, target="label", crop="grid", crop_size=(2, 2), preload=False)):
        loader = OMEArrowDataLoader(data, 4, shuffle=True)
        loaded = [label for batch in labels(loader) for label in batch]
        assert Counter(loaded) == Counter(data[index][1] for index in range(len(data)))
        assert loaded != sorted(loaded)
        assert "random over all of 4 parts" in loader.settings["sampler"].why
    for data in (Subset(dataset, range(9)), ConcatDataset([dataset, dataset])):
        loader = OMEArrowDataLoader(data, 4, shuffle=True)
        assert len([label for batch in labels(loader) for label in batch]) == len(data)
        assert "hide the parts of a collection" in loader.settings["shuffle"].why


def test_states_of_others_are_refused(path, tmp_path):
    dataset = OMEArrowDataset(path, target="label")
    write_images([image_of((3, 4), "uint16", number) for number in range(23)], tmp_path / "one.arrow")
    one = OMEArrowDataLoader(OMEArrowDataset(tmp_path / "one.arrow"), 2, shuffle=True)
    loader = OMEArrowDataLoader(dataset, 2, shuffle=True)
    part, other = dataset.split((0.5, 0.5))
    state = OMEArrowDataLoader(part, 2, shuffle=True).state_dict()
    for given_state, into in (
        (one.state_dict(), loader),
        (loader.state_dict(), one),
        (OMEArrowDataLoader(dataset, 2).state_dict(), loader),
        (state, loader),
        (state, OMEArrowDataLoader(other, 2, shuffle=True)),
        (None, loader),
    ):
        with raises(ArgumentError, mentions="state", remedy=False):
            into.load_state_dict(given_state)


def test_many_parts_tell_how_they_are_mixed():
    assert 2 * WINDOW <= OPEN_PARTS
    sampler = samplers(in_parts([64] * 100), OrderSpec(0, 1, WINDOW, True), 1, 1)[0]
    assert "random over 14 of 100 parts at a time" in sampler.describe(64)
    same = float(sampler.describe(64).partition("from one part in ")[2].partition("%")[0])
    assert 4 < same < 8
    assert "0.98% in a full shuffle" in sampler.describe(64)


@pytest.mark.parametrize(("window", "grows"), [(WINDOW, False), (4, False), (4, True)])
def test_a_batch_of_permuted_parts_is_of_nearly_as_many_wells_as_one_of_all_images(window, grows):
    """96 wells of 100 crops each in 100 parts, permuted as by `convert(..., shuffle_seed=)`."""
    wells = np.repeat(np.arange(96), 100)
    shapes, dtypes = np.ones((len(wells), 5), np.int64), [np.dtype(np.uint8)] * len(wells)
    material = SimpleNamespace(index=Index([0, len(wells)], wells, shapes, dtypes, pa.table({}), None))

    def distinct(order):
        return np.mean([len(np.unique(batch)) for batch in order[: 64 * 150].reshape(-1, 64)])

    of_all = distinct(np.random.default_rng(0).permutation(wells))
    actual = {}
    for seed in (None, 0):
        written = wells[np.concatenate(PartitionOptions(96, seed).plan(material))]
        plan = OrderSpec(0, 1, window, True, grows)
        actual[seed] = distinct(written[samplers(in_parts([96] * 100), plan, 1, 1)[0].share()])
    assert actual[0] >= 0.9 * of_all
    assert actual[None] <= 0.6 * of_all  # The effect of the window without permuted parts.


def test_in_one_process_it_follows_torchs_seed(path):
    dataset = OMEArrowDataset(path, target="label")

    def seeded(seed):
        torch.manual_seed(seed)
        return labels(OMEArrowDataLoader(dataset, 4, shuffle=True, num_workers=0))

    assert seeded(1) == seeded(1) != seeded(2)
