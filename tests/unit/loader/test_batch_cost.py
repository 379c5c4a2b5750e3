"""The trial of ``num_workers="auto"``: no side effects, and no workers if results would differ."""

from __future__ import annotations

import functools
import multiprocessing
import random
import re
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.loader import batch_cost
from tests.support.errors import raises
from tests.unit.loader.conftest import COUNT

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # 4 may pay on a busy machine.
]


def draw(*_):
    """Draw from all three generators that transforms use."""
    return torch.tensor([random.random(), np.random.randn(), float(torch.rand(()))], dtype=torch.float64)


class Own(Dataset):
    """A wrapper that draws random numbers itself."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return draw(), self.dataset[index][1]


def states():
    numpys = np.random.get_state(legacy=False)
    numpys["state"]["key"] = numpys["state"]["key"].tolist()
    return torch.get_rng_state().tolist(), random.getstate(), numpys


class Counting:
    """A callable that counts its calls in an attribute, a list and an array."""

    def __init__(self):
        self.calls, self.seen, self.sums = 0, [], np.zeros(3)

    def __call__(self, image):
        self.calls += 1
        self.seen.append(float(image.sum()))
        self.sums += 1
        return image


def of_main(source):
    """Return a ``__main__`` module with this code; like a script or a notebook cell, it cannot be imported."""
    main = types.ModuleType("__main__")
    exec(source, vars(main))
    return main


@pytest.fixture
def tried(monkeypatch):
    """Return a function that makes a loader with automatic settings."""
    monkeypatch.setattr("omearrow_ds.loader.settings.available_cores", lambda: 4)
    return functools.partial(OMEArrowDataLoader, batch_size=4)


def test_a_trial_leaves_no_trace(path, tried):
    counting, before = Counting(), states()
    calls = []
    for dataset in (
        OMEArrowDataset(path, preload=False, transform=counting, target=calls.append),
        Subset(OMEArrowDataset(path, transform=lambda image: calls.append(counting(image))), range(9)),
        Own(OMEArrowDataset(path, transform=functools.partial(map, counting), target="number")),
    ):
        assert "a batch of" in tried(dataset).settings["num_workers"].why
        assert (counting.calls, counting.seen, counting.sums.tolist(), calls) == (0, [], [0, 0, 0], [])
    assert states() == before


def test_a_trial_leaves_the_main_script_alone(path, tried):
    main = of_main("""
calls = [0]
class Class:
    total = 0
    def __call__(self, image):
        Class.total += 1
        calls[0] += 1
        return image
made = Class()
method, names = Class.__call__, Class.__call__.__globals__
""")
    loader = tried(OMEArrowDataset(path, transform=main.made))
    assert "a batch of" in loader.settings["num_workers"].why
    assert (main.calls, main.Class.total) == ([0], 0)
    assert main.Class.__call__ is main.method
    assert main.method.__globals__ is main.names is vars(main)


class Holding:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, image):
        raise AssertionError("this was called")


class OfItsClass(Holding):
    """State shared by the class, as in MONAI's ``Randomizable``."""

    R = np.random.RandomState(3)


class Unpicklable(Holding):
    def __reduce__(self):
        raise RuntimeError("this stays here")


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (lambda: np.random.default_rng(1), "copy a random generator.*Generator"),
        (lambda: np.random.RandomState(1), "copy a random generator.*RandomState"),
        (lambda: random.Random(1), "copy a random generator.*Random"),
        (torch.Generator, "copy a random generator.*Generator"),
        (
            lambda: {"deep": [functools.partial(np.random.default_rng(1).normal, 3)]},
            "copy a random generator.*Generator",
        ),
        (lambda: OfItsClass(1), "copy a random generator.*OfItsClass.R"),
        (threading.Lock, "cannot be sent to workers.*lock"),
        (lambda: Unpicklable(1), "cannot be sent to workers: this stays here"),
    ],
)
def test_auto_is_none_where_workers_would_draw_otherwise_or_not_start(path, tried, held, why):
    transform = Holding(held())
    for dataset in (
        OMEArrowDataset(path, transform=transform),
        OMEArrowDataset(path, preload=False, target=transform),
        OMEArrowDataset(path, transform=lambda image: transform(image) + 1),
        Own(Subset(OMEArrowDataset(path, transform=transform, target="number"), [1, 2])),
    ):
        chosen = tried(dataset).settings["num_workers"]
        assert chosen.value == 0
        assert re.search(why, chosen.why)
    assert tried(OMEArrowDataset(path), collate_fn=transform).num_workers == 0


def test_auto_is_none_where_a_modules_generator_is_near(path, tried, monkeypatch):
    module = types.ModuleType("augmenting")
    exec("import numpy\nrng = numpy.random.default_rng(2)\ndef near(image): return image + rng.random()", vars(module))
    monkeypatch.setitem(sys.modules, "augmenting", module)
    before = str(module.rng.bit_generator.state)
    chosen = tried(OMEArrowDataset(path, transform=module.near)).settings["num_workers"]
    assert chosen.value == 0
    assert "augmenting.rng" in chosen.why
    assert str(module.rng.bit_generator.state) == before
    assert "a batch of" in tried(OMEArrowDataset(path, transform=draw)).settings["num_workers"].why


def test_copies_share_data_and_what_is_meant_to_be_shared(path):
    class Data(Dataset):
        large, small = np.zeros(2**20), torch.zeros(3)
        dataset = OMEArrowDataset(path, transform=Counting(), target="number")
        lock = multiprocessing.get_context("spawn").Lock()

    original = Data()
    vars(original).update({name: getattr(Data, name) for name in ("large", "small", "dataset", "lock")})
    copy = batch_cost.copy_for_trial(original)
    assert copy.large is original.large
    assert copy.lock is original.lock
    assert copy.small is not original.small
    assert copy.dataset._collection.cache is original.dataset._collection.cache
    assert copy.dataset._collection.plan is original.dataset._collection.plan
    assert copy.dataset._transform is not original.dataset._transform
    assert torch.equal(copy.dataset[3][0], original.dataset[3][0])


def test_a_generator_of_ones_own_goes_to_workers(path):
    """Each worker gets a copy of the state: torch would share a tensor that is freed before the worker has it."""
    own = torch.Generator().manual_seed(4)
    dataset = OMEArrowDataset(path, transform=lambda image: torch.rand((), generator=own))
    expected = torch.rand(COUNT, generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.cat(list(OMEArrowDataLoader(dataset, 4, num_workers=1, timeout=60))), expected)
    assert own.initial_seed() == 4
    assert torch.equal(torch.rand(1, generator=own), expected[:1])


def test_a_daemonic_process_has_no_workers(path, tried, monkeypatch):
    """Workers of multiprocessing.Pool and Dask, for example."""
    dataset = OMEArrowDataset(path, preload=False, transform=Holding(None))
    elsewhere = OMEArrowDataLoader(dataset, 4, num_workers=2)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    chosen = tried(dataset).settings["num_workers"]
    assert (chosen.value, "daemonic" in chosen.why) == (0, True)
    assert OMEArrowDataLoader(dataset, 4, num_workers=0).num_workers == 0
    with raises(ArgumentError, option="num_workers", mentions=("num_workers=2", "'auto'")):
        OMEArrowDataLoader(dataset, 4, num_workers=2)
    with raises(ArgumentError, option="num_workers", mentions="num_workers=2"):
        iter(elsewhere)
