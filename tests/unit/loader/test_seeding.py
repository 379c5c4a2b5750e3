"""Random numbers of a seeded run: the same for any number of workers, and after resuming."""

from __future__ import annotations

import functools
import itertools
import operator
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.loader.epoch import BorrowedGenerators, EpochBatchSampler
from omearrow_ds.loader.position import EpochProgress, LoaderPosition
from tests.support.strategies import slow_except
from tests.unit.loader.conftest import COUNT
from tests.unit.loader.test_batch_cost import Own, draw, states

pytestmark = pytest.mark.timeout(120)


def drawing_collate(samples):
    return default_collate([(draw(), number) for _, number in samples])


class Derived(OMEArrowDataset):
    def __getitem__(self, index):
        return draw(), super().__getitem__(index)[1]


def wrong_seed(worker):
    np.random.seed(worker)
    torch.manual_seed(7)


MADE = {
    "transform": lambda path: (OMEArrowDataset(path, transform=draw, target="number"), {}),
    "target": lambda path: (OMEArrowDataset(path, target=lambda row: (draw(), row["number"])), {}),
    "collate": lambda path: (OMEArrowDataset(path, target="number"), {"collate_fn": drawing_collate}),
    "derived": lambda path: (Derived(path, target="number"), {}),
    "own": lambda path: (Own(OMEArrowDataset(path, target="number")), {"worker_init_fn": wrong_seed}),
    "parts": lambda path: (
        ConcatDataset(
            [Subset(OMEArrowDataset(path, transform=draw, target="number"), range(s, COUNT, 2)) for s in (0, 1)]
        ),
        {},
    ),
}


def batches_of(loader):
    """Return the drawn numbers of each batch by its sample numbers."""
    drawn_by_numbers = {}
    for batch in loader:
        drawn, numbers = batch if isinstance(batch[1], torch.Tensor) else batch[1]
        drawn_by_numbers[tuple(numbers.tolist())] = drawn.flatten().tolist()
    return drawn_by_numbers


def epochs_of(kind, path, workers, count=2, *, own=False, **kwargs):
    torch.manual_seed(31)
    dataset, more = MADE[kind](path)
    kwargs |= {"generator": torch.Generator().manual_seed(5)} if own else {}
    kwargs |= {"timeout": 60} if workers not in (0, "auto") else {}
    loader = OMEArrowDataLoader(dataset, 4, shuffle=True, num_workers=workers, **more, **kwargs)
    return [batches_of(loader) for _ in range(count)]


@pytest.mark.parametrize("kind", slow_except(["transform", "collate", "own", "parts"], MADE))
def test_samples_do_not_depend_on_who_makes_them(path, kind):
    expected = epochs_of(kind, path, 0)
    drawn = [value for epoch in expected for batch in epoch.values() for value in batch]
    assert len(set(drawn)) == len(drawn) == 2 * 3 * COUNT
    assert epochs_of(kind, path, 2) == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("own", "way"),
    [
        (False, {"workers": 3, "in_order": False}),
        pytest.param(False, {"workers": 4}, marks=pytest.mark.slow),
        pytest.param(True, {"workers": "auto"}, marks=pytest.mark.slow),
        (True, {"workers": 1, "persistent_workers": False}),
    ],
)
def test_nor_on_how_many_and_in_what_order(path, monkeypatch, own, way):
    monkeypatch.setattr("omearrow_ds.loader.settings.available_cores", lambda: 4)
    assert epochs_of("transform", path, **way, own=own) == epochs_of("transform", path, 0, own=own)


def test_the_order_is_drawn_when_an_epoch_is_begun(path):
    """The draw must not wait for the first batch, as the program may draw in between."""
    orders = []
    for workers in (0, 1):
        torch.manual_seed(3)
        batches = iter(OMEArrowDataLoader(MADE["transform"](path)[0], 4, shuffle=True, num_workers=workers))
        torch.rand(workers + 1)
        orders.append(batches_of(batches))
    assert orders[0] == orders[1]


@settings(deadline=None, max_examples=30)
@given(taken=st.integers(0, 4), epochs=st.integers(0, 2), own=st.booleans())
def test_a_resumed_epoch_draws_what_was_left(path, taken, epochs, own):
    def make_loader(seed):
        options = {"generator": torch.Generator().manual_seed(seed)} if own else {}
        torch.manual_seed(seed)
        return OMEArrowDataLoader(MADE["transform"](path)[0], 4, shuffle=True, num_workers=0, **options)

    loader = make_loader(1)
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    batches_of(itertools.islice(batches, taken))
    state = loader.state_dict()
    left, following, third = batches_of(batches), batches_of(loader), batches_of(loader)
    again = make_loader(2)
    again.load_state_dict(state)
    if left:
        assert batches_of(again) == left
    if own:
        assert batches_of(again) == following
        assert batches_of(again) == third


@pytest.mark.parametrize("workers", [0, 2])
def test_the_programs_generators_are_left_alone(path, workers):
    np.random.seed(1)
    np.random.randn()  # `randn` makes pairs: the second half is next.
    before = states()
    options = {"generator": torch.Generator().manual_seed(1), "num_workers": workers}
    for _ in OMEArrowDataLoader(MADE["transform"](path)[0], 4, shuffle=True, **options):
        assert states() == before
    loader = OMEArrowDataLoader(OMEArrowDataset(path, transform=failing), 4, **options)
    with pytest.raises(ValueError, match="odd"):
        list(loader)
    assert states() == before
    assert before[2]["has_gauss"] == 1


def failing(image):
    draw()
    raise ValueError("an odd image")


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), normals=st.integers(0, 3), within=st.integers(0, 3))
def test_lent_generators_go_on(seed, normals, within):
    """Equal to NumPy's own stream without the interruption."""
    generators = BorrowedGenerators()

    def stream(*, lend):
        np.random.seed(seed)
        drawn = [np.random.randn() for _ in range(normals)]
        if lend:
            generators.borrow(seed.to_bytes(32, "little"))
            np.random.randn(within)
            generators.restore()
        return [*drawn, *np.random.randn(3), np.random.rand()]

    assert stream(lend=True) == stream(lend=False)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_generators_of_the_program_are_restored_after_the_last_of_several_threads(data):
    """In any order of beginnings and ends of batches."""
    before, generator = states(), np.random.get_bit_generator()
    borrowed, num_begun, num_restored = BorrowedGenerators(), 0, 0
    count = data.draw(st.integers(1, 4))
    while num_restored < count:
        if num_begun < count and (num_begun == num_restored or data.draw(st.booleans())):
            borrowed.borrow(bytes(32))
            num_begun += 1
            draw()
        else:
            borrowed.restore()
            num_restored += 1
    assert np.random.get_bit_generator() is generator
    assert states() == before


def test_loader_does_not_seed_batches_without_random_numbers(path, monkeypatch):
    """Seeding takes time."""
    monkeypatch.setattr("omearrow_ds.loader.epoch.epoch_seed", None)
    for dataset in (OMEArrowDataset(path), OMEArrowDataset(path, preload=False, target="number")):
        for size in (4, None):
            assert len(list(OMEArrowDataLoader(Subset(dataset, range(8)), size, num_workers=0))) == 8 // (size or 1)


# Delivered batches


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(0, 9))
def test_epoch_resumes_with_the_batches_that_were_not_delivered(data, count):
    """Delivered in any order, over any number of resumptions."""
    progress, delivered = EpochProgress(), []
    while True:
        position = LoaderPosition(progress=progress)
        order = EpochBatchSampler(range(count), position, [], workers=True, seed_source=operator.itemgetter(0))
        left = list(order)
        assert sorted([*delivered, *left]) == [*range(count)]
        assert left == sorted(left)
        if not left:
            break
        numbers = [progress.waiting[key][0] for key in range(len(left))]
        assert numbers == left
        for number in data.draw(st.permutations(left))[: data.draw(st.integers(1, len(left)))]:
            progress.deliver(number)
            delivered.append(number)
        progress = EpochProgress(0, progress.batches, set(progress.ahead), states=progress.states, resumed=True)
    assert progress.batches == count
    assert not progress.ahead


@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_order_nothing_is_lost_or_repeated(path, tmp_path, workers):
    """A slow worker makes the first batch the last."""
    gate = tmp_path / "gate"

    def make_loader(workers, seed, **kwargs):
        options = {"generator": torch.Generator().manual_seed(seed), "collate_fn": functools.partial(gated, gate)}
        dataset = OMEArrowDataset(path, target="number")
        return OMEArrowDataLoader(dataset, 2, num_workers=workers, **options, **kwargs)

    loader = make_loader(2, 1, in_order=False, timeout=60)
    batches = iter(loader)
    delivered = batches_of(itertools.islice(batches, 3))
    state = loader.state_dict()
    assert (0, 1) not in delivered
    assert (state["batches"], len(state["ahead"])) == (0, 3)
    gate.touch()
    left = batches_of(batches)
    again = make_loader(workers, 2, **({"in_order": False, "timeout": 60} if workers else {}))
    again.load_state_dict(state)
    assert again.state_dict()["ahead"] == state["ahead"]
    assert batches_of(again) == left
    assert delivered | left == batches_of(make_loader(0, 1))


def gated(gate, samples):
    while not gate.exists() and any(number == 1 for _, number in samples):
        time.sleep(0.002)
    return drawing_collate(samples)


class Odd(Dataset):
    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in self.odd:
            raise ValueError("odd")
        return index


@pytest.mark.parametrize("given", [{"num_workers": 0}, {"num_workers": 0, "device": "meta"}, {"num_workers": 1}])
def test_a_batch_that_failed_is_left_when_an_epoch_goes_on(given):
    loader = OMEArrowDataLoader(Odd({2}), 1, **given)
    batches = iter(loader)
    assert [next(batches) is not None for _ in range(2)] == [True, True]
    with pytest.raises(ValueError, match="odd"):
        next(batches)
    next(batches)
    state = loader.state_dict()
    assert len(list(batches)) == 2
    again = OMEArrowDataLoader(Odd(()), 1, num_workers=0)
    again.load_state_dict(state)
    assert torch.cat(list(again)).tolist() == [2, 4, 5]
