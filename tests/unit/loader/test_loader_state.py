"""The loader's settings, and its place in an epoch: kept, resumed, refused."""

from __future__ import annotations

import io
import itertools
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

import omearrow_ds.loader.settings
from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.loader.settings import Cost, _worth
from omearrow_ds.resources import _quotas, available_cores
from tests.support.strategies import image_of

COUNT = 23


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A dataset whose target is the sample's number."""
    from omearrow_ds import write_images

    path = tmp_path_factory.mktemp("numbers") / "images.arrow"
    write_images([image_of((2, 3), "uint16", n) for n in range(COUNT)], path, columns={"number": [*range(COUNT)]})
    return OMEArrowDataset(path, target="number")


def drawn(batches):
    return [np.asarray(numbers).tolist() for _, numbers in batches]


def made(dataset, kind, workers, seed=11, **kwargs):
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
    """Return a state as a checkpoint holds it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), epochs=st.integers(0, 2), taken=st.integers(0, 12))
def test_a_resumed_epoch_has_the_batches_that_were_left(numbers, kind, epochs, taken):
    torch.manual_seed(1)
    loader = made(numbers, kind, 0)
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    for _ in range(min(taken, len(loader))):
        next(batches)
    state = saved(loader.state_dict())
    left, following = drawn(batches), drawn(loader)
    torch.manual_seed(99)
    again = made(numbers, kind, 0, seed=99)
    again.load_state_dict(state)
    assert again.state_dict()["batches"] == state["batches"]
    resumed = drawn(again)
    if kind != "global":
        assert resumed == left
        assert drawn(again) == following
    else:  # the epochs after it are drawn from the program's generator, which is not the loader's to set
        assert resumed == left


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 2)], ids=str)
def test_an_epoch_is_resumed_whatever_the_workers(numbers, workers):
    first, second = workers
    loader = made(numbers, "shuffle", first)
    list(loader)
    batches = iter(loader)
    seen = [next(batches)[1].tolist() for _ in range(3)]
    state = saved(loader.state_dict())  # workers are ahead of what was delivered
    assert state["batches"] == 3
    left = drawn(batches)
    assert sorted(itertools.chain(*seen, *left)) == [*range(COUNT)]
    again = made(numbers, "shuffle", second, seed=0)
    again.load_state_dict(state)
    assert drawn(again) == left
    assert drawn(again) == drawn(loader)


def test_leaving_an_epoch_begins_the_next(numbers):
    loader = made(numbers, "shuffle", 0)
    next(iter(loader))
    assert len(drawn(loader)) == len(loader) == 6
    assert loader.state_dict()["batches"] == 0


def test_a_state_of_another_loader_is_refused(numbers):
    state = made(numbers, "shuffle", 0).state_dict()
    with pytest.raises(ArgumentError, match="samples was 23, is 5"):
        OMEArrowDataLoader(Subset(numbers, range(5)), 4, shuffle=True).load_state_dict(state)
    with pytest.raises(ArgumentError, match="batch_size was 4, is 8"):
        OMEArrowDataLoader(numbers, 8).load_state_dict(state)
    with pytest.raises(ArgumentError, match="other generators"):
        OMEArrowDataLoader(numbers, 4, shuffle=True).load_state_dict(state)
    for other in ({}, {"version": 0}, None, {**state, "version": 1}):
        with pytest.raises(ArgumentError, match="no state of an OMEArrowDataLoader"):
            OMEArrowDataLoader(numbers, 4).load_state_dict(other)


class Slow(Dataset):
    """Samples that take long to make, counting who asks."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 100

    def __getitem__(self, index):
        import time

        time.sleep(self.seconds)
        return torch.rand(4) + random.random() + np.random.random()


class Quick(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(6))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_auto_takes_workers_where_they_pay(numbers, monkeypatch):
    monkeypatch.setattr(omearrow_ds.loader.settings, "available_cores", lambda: 4)
    for plain in (numbers, Subset(numbers, [1]), ConcatDataset([numbers, Subset(numbers, [0, 2])])):
        loader = OMEArrowDataLoader(plain, 4)
        assert loader.num_workers == 0
        assert "in memory" in loader.settings["num_workers"].why
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = OMEArrowDataLoader(Slow(0.005), 8)
    assert loader.num_workers == 4
    assert re.search(r"a batch of 0\.000128 MB takes [\d.]+ ms", loader.settings["num_workers"].why)
    assert (states[0] == torch.get_rng_state()).all()
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert OMEArrowDataLoader(Quick(), 8).num_workers == 0
    assert OMEArrowDataLoader(Endless(), 2).num_workers == 0
    assert OMEArrowDataLoader(Subset(numbers, []), 2).num_workers == 0
    monkeypatch.setattr(omearrow_ds.loader.settings, "available_cores", lambda: 1)
    assert OMEArrowDataLoader(Slow(0.005), 8).num_workers == 0


@pytest.mark.parametrize(
    ("batch_s", "batch_bytes", "cores", "workers"),
    [
        (100e-6, 640_000, 16, 0),  # small images from memory
        (20e-3, 16_000_000, 2, 2),
        (20e-3, 16_000_000, 64, 14),  # more would wait for the loader's process
        (1.0, 16_000_000, 8, 8),
    ],
)
def test_what_handing_over_costs_is_counted(batch_s, batch_bytes, cores, workers):
    assert _worth(Cost(batch_s, batch_s, batch_bytes), cores).value == workers


def test_what_only_workers_need_is_put_aside_without_them(numbers):
    given = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "spawn", "timeout": 9}
    loader = OMEArrowDataLoader(numbers, 4, **given)
    assert len(list(loader)) == 6
    assert loader.settings["prefetch_factor"] == (None, "no workers")
    with pytest.raises(ValueError, match="prefetch_factor"):
        OMEArrowDataLoader(numbers, 4, num_workers=0, prefetch_factor=4)


def test_settings_say_why(numbers):
    loader = OMEArrowDataLoader(numbers, 4, num_workers=1, drop_last=True)
    assert {name: setting.value for name, setting in loader.settings.items()}.items() >= {
        "batch_size": 4,
        "num_workers": 1,
        "persistent_workers": True,
        "prefetch_factor": 2,
        "pin_memory": False,
        "device": None,
        "drop_last": True,
    }.items()
    assert (loader.persistent_workers, loader.prefetch_factor, loader.pin_memory) == (True, 2, False)
    for name, (_, why) in loader.settings.items():
        assert f"  {name}=" in repr(loader)
        assert why
        assert why in repr(loader)
    with pytest.raises(TypeError):
        loader.settings["num_workers"] = 3
    for wrong in (-1, 1.5, "many", True, None):
        with pytest.raises(ArgumentError, match="num_workers="):
            OMEArrowDataLoader(numbers, num_workers=wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_once(numbers):
    with pytest.raises(ArgumentError, match="no CUDA device here"):
        OMEArrowDataLoader(numbers, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_cuda(numbers, workers):
    loader = OMEArrowDataLoader(numbers, 4, num_workers=workers, device="cuda")
    assert loader.pin_memory
    for (images, labels), (wanted, numbered) in zip(loader, DataLoader(numbers, 4), strict=True):
        assert images.device.type == labels.device.type == "cuda"
        assert torch.equal(images.cpu(), wanted)
        assert torch.equal(labels.cpu(), numbered)


def test_little_shared_memory_is_foreseen(numbers, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(omearrow_ds.loader.settings.shutil, "disk_usage", lambda path: usage)
    with pytest.warns(UserWarning, match=r"/dev/shm has 100 bytes free, and 1 workers may need 288 .*--shm-size"):
        OMEArrowDataLoader(numbers, 4, num_workers=1, collate_fn=list)
    OMEArrowDataLoader(numbers, 4, num_workers=1)


def test_cores_are_those_of_the_control_group(tmp_path, monkeypatch):
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    inner = tmp_path / "fs" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert _quotas(tmp_path / "fs", own) == []
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert _quotas(tmp_path / "fs", own) == [1.5]
    own.write_text("4:cpu,cpuacct:/job\n3:memory:/other\n")
    job = tmp_path / "fs" / "cpu" / "job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert _quotas(tmp_path / "fs", own) == []
    (job / "cpu.cfs_quota_us").write_text("300000\n")
    assert _quotas(tmp_path / "fs", own) == [3.0]
    assert _quotas(tmp_path / "nothing", Path("/nothing")) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("omearrow_ds.resources._quotas", lambda: [5.9])
    assert available_cores() == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_cores() == 1


def test_wrappers_can_make_the_loader_again(numbers):
    """As Lightning does: from the attributes that its arguments have, with another sampler."""
    loader = OMEArrowDataLoader(numbers, 4, shuffle=True, num_workers=1, device="cpu", drop_last=True)
    names = ("batch_size", "num_workers", "device", "collate_fn", "pin_memory", "drop_last", "timeout", "generator")
    workers = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    arguments = {name: getattr(loader, name) for name in (*names, *workers)}
    again = type(loader)(loader.dataset, **arguments, sampler=range(8))
    assert drawn(again) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    foreign = DataLoader(loader.dataset, **{name: arguments[name] for name in arguments if name != "device"})
    assert len(drawn(foreign)) == 5
    batches = iter(loader)
    assert len(batches) == len(loader) == 5
    assert batches._num_workers == 1
