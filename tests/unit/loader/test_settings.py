"""Settings that the loader chooses, their reasons, and arguments that it rejects."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

import omearrow_ds.loader.settings
from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset, convert, open_images, write_images
from omearrow_ds.loader.settings import BatchCost, _choose_num_workers
from tests.support.errors import raises, warns
from tests.unit.loader.test_checkpoint import drawn


class Slow(Dataset):
    """Slow samples that count accesses."""

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
        (100e-6, 640_000, 16, 0),  # Small images in memory.
        (20e-3, 16_000_000, 2, 2),
        (20e-3, 16_000_000, 64, 14),  # More workers would wait for the main process.
        (1.0, 16_000_000, 8, 8),
    ],
)
def test_what_handing_over_costs_is_counted(batch_s, batch_bytes, cores, workers):
    assert _choose_num_workers(BatchCost(batch_s, batch_s, batch_bytes), cores).value == workers


def test_what_only_workers_need_is_put_aside_without_them(numbers):
    worker_options = {
        "prefetch_factor": 4,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
        "timeout": 9,
    }
    loader = OMEArrowDataLoader(numbers, 4, **worker_options)
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
        with raises(ArgumentError, option="num_workers", remedy=False):
            OMEArrowDataLoader(numbers, num_workers=wrong)


@pytest.mark.parametrize("make", [str, Path, open_images, os.fsencode], ids=["str", "Path", "source", "bytes"])
def test_loader_refuses_a_path_or_source_as_dataset(path, make):
    with raises(ArgumentError, "dataset", mentions="OMEArrowDataset"):
        OMEArrowDataLoader(make(path))


@pytest.mark.parametrize("other", [None, 5, OMEArrowDataset, iter([1])], ids=["None", "integer", "class", "iterator"])
def test_loader_refuses_objects_without_samples_as_dataset(other):
    with raises(ArgumentError, "dataset", mentions="OMEArrowDataset"):
        OMEArrowDataLoader(other)


class OnlyBatches:
    """Samples that can only be requested by batch, which torch supports."""

    def __len__(self):
        return 3

    def __getattr__(self, name):
        if name != "__getitems__":
            raise AttributeError(name)
        return lambda indices: [torch.zeros(2, 2)] * len(indices)


@pytest.mark.parametrize(
    "samples", [[np.zeros((2, 2))] * 3, np.zeros((3, 2, 2)), torch.zeros(3, 2, 2), OnlyBatches()], ids=type
)
def test_loader_accepts_sequences_of_samples(samples):
    assert [tuple(batch.shape) for batch in OMEArrowDataLoader(samples, 2)] == [(2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("size", ["4", 0, 2.0, True], ids=repr)
def test_loader_refuses_a_batch_size_that_is_not_a_whole_number(numbers, size):
    with raises(ArgumentError, "batch_size", mentions="whole number from 1", remedy=False):
        OMEArrowDataLoader(numbers, size)


def test_loader_accepts_numpy_integers_as_batch_size(numbers):
    loader = OMEArrowDataLoader(numbers, np.int64(4))
    assert (type(loader.batch_size), len(loader)) == (int, 6)


def test_keywords_of_torch_pass_a_constructor_that_a_framework_replaced(numbers, monkeypatch):
    construct = DataLoader.__init__

    def replaced(*args, **kwargs):
        construct(*args, **kwargs)

    monkeypatch.setattr(DataLoader, "__init__", replaced)
    loader = OMEArrowDataLoader(numbers, 4, shuffle=True, num_workers=0)
    assert isinstance(loader.sampler, RandomSampler)


@pytest.mark.parametrize(
    ("name", "nearest"), [("batchsize", "batch_size"), ("shufle", "shuffle"), ("qqq", "num_workers")]
)
def test_loader_refuses_unknown_keywords_with_the_nearest_option(numbers, name, nearest):
    with raises(ArgumentError, name, mentions=["OMEArrowDataLoader", f"{name}=4", nearest]):
        OMEArrowDataLoader(numbers, **{name: 4})
    with pytest.raises(ValueError, match="unknown option"):  # In `DataLoader`, it is a TypeError.
        OMEArrowDataLoader(numbers, **{name: 4})


@pytest.mark.parametrize("device", ["tpu", "cpu:x", 1.5])
def test_loader_refuses_device_when_torch_does_not_know_it(numbers, device):
    with raises(ArgumentError, "device"):
        OMEArrowDataLoader(numbers, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_once(numbers):
    with raises(ArgumentError, option="device", mentions="CUDA"):
        OMEArrowDataLoader(numbers, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_cuda(numbers, workers):
    loader = OMEArrowDataLoader(numbers, 4, num_workers=workers, device="cuda")
    assert loader.pin_memory
    for (images, labels), (expected, numbered) in zip(loader, DataLoader(numbers, 4), strict=True):
        assert images.device.type == labels.device.type == "cuda"
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), numbered)


def test_little_shared_memory_is_foreseen(numbers, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(omearrow_ds.loader.settings.shutil, "disk_usage", lambda path: usage)
    with warns(UserWarning, path="/dev/shm", mentions=(100, 288, "--shm-size")):
        OMEArrowDataLoader(numbers, 4, num_workers=1, collate_fn=list)
    OMEArrowDataLoader(numbers, 4, num_workers=1)


def test_wrappers_can_make_the_loader_again(numbers):
    """Lightning makes the loader again from attributes named like its arguments, with another sampler."""
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


def test_parts_of_a_preloaded_dataset_get_no_workers(numbers):
    in_memory, read = numbers, OMEArrowDataset(numbers.path, preload=False)
    assert OMEArrowDataLoader(Subset(in_memory, [0, 1])).num_workers == 0
    assert OMEArrowDataLoader(ConcatDataset([in_memory, Subset(in_memory, [0])])).num_workers == 0
    assert "a batch of" in OMEArrowDataLoader(ConcatDataset([in_memory, read])).settings["num_workers"].why


class Prepared(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.made_by_worker_init_fn


def test_a_worker_init_fn_that_makes_what_samples_need_gets_its_workers(monkeypatch):
    monkeypatch.setattr(omearrow_ds.loader.settings, "available_cores", lambda: 2)
    loader = OMEArrowDataLoader(Prepared(), 2, worker_init_fn=print)
    assert loader.num_workers == 2
    assert "worker_init_fn" in loader.settings["num_workers"].why


@pytest.mark.parametrize("suffix", ["arrow", "parts"])
def test_nothing_is_not_shuffled(tmp_path, suffix):
    write_images([], tmp_path / "a.arrow", axes="YX")
    path = tmp_path / f"a.{suffix}"
    if suffix == "parts":
        convert(tmp_path / "a.arrow", path, "arrow", part_bytes=100)
    dataset = OMEArrowDataset(path)
    assert list(OMEArrowDataLoader(dataset)) == []
    with raises(ArgumentError, option="shuffle", path=path):
        OMEArrowDataLoader(dataset, shuffle=True)
