"""State of a loader within an epoch: saved, resumed, rejected."""

from __future__ import annotations

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Subset, WeightedRandomSampler

from omearrow_ds import ArgumentError, OMEArrowDataLoader
from tests.support.errors import raises

COUNT = 23


def drawn(batches):
    return [np.asarray(numbers).tolist() for _, numbers in batches]


def make_loader(dataset, kind, workers, seed=11, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    sources = {
        "shuffle": lambda: {"shuffle": True, "generator": generator, "batch_size": 4},
        "in order": lambda: {"batch_size": 4},
        "random": lambda: {"sampler": RandomSampler(dataset, True, 50, generator=generator), "batch_size": 4},
        "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * COUNT, 40, generator=generator), "batch_size": 4},
        "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(dataset, generator=generator), 4, True)},
        "global": lambda: {"shuffle": True, "batch_size": 4},
        "one by one": lambda: {"shuffle": True, "generator": generator, "batch_size": None},
    }
    timeout = {"timeout": 60} if workers else {}
    return OMEArrowDataLoader(dataset, num_workers=workers, **timeout, **sources[kind](), **kwargs)


KINDS = ["shuffle", "in order", "random", "weighted", "batches", "global", "one by one"]


def saved(state):
    """Return a state after a round trip through a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), epochs=st.integers(0, 2), taken=st.integers(0, 12))
def test_loader_continues_as_uninterrupted_when_state_is_loaded(numbers, kind, epochs, taken):
    torch.manual_seed(1)
    loader = make_loader(numbers, kind, 0)
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    for _ in range(min(taken, len(loader))):
        next(batches)
    state = saved(loader.state_dict())
    left, following, third = drawn(batches), drawn(loader), drawn(loader)
    torch.manual_seed(99)
    again = make_loader(numbers, kind, 0, seed=99)
    again.load_state_dict(state)
    assert again.state_dict()["batches"] == state["batches"] == (taken if left else 0)
    assert again.state_dict()["epoch"] == state["epoch"] == epochs + (not left)
    resumed = drawn(again)
    if left:
        assert resumed == left
    if kind == "global":  # Later epochs use the global generator, which the loader must not seed.
        assert len(resumed) == len(left or following)
    else:
        assert resumed == (left or following)
        assert drawn(again) == (following if left else third)


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 2)], ids=str)
def test_an_epoch_is_resumed_whatever_the_workers(numbers, workers):
    first, second = workers
    loader = make_loader(numbers, "shuffle", first)
    list(loader)
    batches = iter(loader)
    delivered = [next(batches)[1].tolist() for _ in range(3)]
    state = saved(loader.state_dict())  # Workers are ahead of the delivered batches.
    assert state["batches"] == 3
    left = drawn(batches)
    assert sorted(itertools.chain(*delivered, *left)) == [*range(COUNT)]
    again = make_loader(numbers, "shuffle", second, seed=0)
    again.load_state_dict(state)
    assert drawn(again) == left
    assert drawn(again) == drawn(loader)


def test_leaving_an_epoch_begins_the_next(numbers):
    loader = make_loader(numbers, "shuffle", 0)
    next(iter(loader))
    assert len(drawn(loader)) == len(loader) == 6
    assert loader.state_dict()["batches"] == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 5])
def test_the_order_after_an_epoch_left_early_is_that_after_a_whole_one(numbers, workers, taken):
    whole = make_loader(numbers, "shuffle", 0)
    first, second = drawn(whole), drawn(whole)
    loader = make_loader(numbers, "shuffle", workers)
    batches = iter(loader)
    begun = [next(batches)[1].tolist() for _ in range(taken)]
    again = copy.deepcopy(loader)
    assert drawn(loader) == second
    if workers == 0:
        assert begun + drawn(batches) == first  # The iterator continues.
    assert len(drawn(again)) == len(first)


def test_a_state_of_another_loader_is_refused(numbers):
    state = make_loader(numbers, "shuffle", 0).state_dict()
    with raises(ArgumentError, mentions=("samples", 23, 5)):
        OMEArrowDataLoader(Subset(numbers, range(5)), 4, shuffle=True).load_state_dict(state)
    with raises(ArgumentError, mentions=("batch_size", 4, 8)):
        OMEArrowDataLoader(numbers, 8).load_state_dict(state)
    with raises(ArgumentError, mentions="generators"):
        OMEArrowDataLoader(numbers, 4, shuffle=True).load_state_dict(state)
    for other in ({}, {"version": 0}, None, {**state, "version": 1}):
        with raises(ArgumentError, mentions="OMEArrowDataLoader", remedy=False):
            OMEArrowDataLoader(numbers, 4).load_state_dict(other)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_what_has_no_state_says_so(numbers):
    with raises(ArgumentError, mentions="__getitem__"):
        OMEArrowDataLoader(Endless(), 2).state_dict()
    state = OMEArrowDataLoader(numbers, 2, shuffle=True).state_dict()
    with raises(ArgumentError, mentions=("sampler", "RandomSampler", "SequentialSampler")):
        OMEArrowDataLoader(numbers, 2).load_state_dict(state)
