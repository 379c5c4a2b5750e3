"""What a first reader of the loader ran into."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy
from tests.support.strategies import image_of

pytestmark = pytest.mark.timeout(120)
loaders = pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])


@pytest.fixture
def dataset(stored):
    return OMEArrowDataset(stored("arrow", [image_of((64, 130), "uint16", number) for number in range(8)]))


class Wrapper(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index], index

    def __getitems__(self, indices):
        return list(zip(self.dataset.__getitems__(indices), indices, strict=True))


class Zeroed(OMEArrowDataset):
    def __getitems__(self, indices):
        return [sample * 0 for sample in super().__getitems__(indices)]


class Numbered(OMEArrowDataset):
    def __getitem__(self, index):
        return super().__getitem__(index), index


class NumberedArrays(OMEArrowDatasetNumpy):
    def __getitem__(self, index):
        return super().__getitem__(index), index


@loaders
def test_datasets_around_ours_get_samples(dataset, kind):
    wanted = torch.stack([dataset[0], dataset[1], dataset[2]])
    path = dataset.path
    for made in (Wrapper(dataset), Numbered(path), NumberedArrays(path)):
        images, numbers = next(iter(kind(made, 3, num_workers=0)))
        assert torch.equal(images, wanted)
        assert numbers.tolist() == [0, 1, 2]
    assert torch.equal(next(iter(kind(Zeroed(path), 3, num_workers=0))), wanted * 0)


def unsqueezed(samples):
    for sample in samples:
        sample.unsqueeze_(0)
    return default_collate(samples)


def transposed(samples):
    for sample in samples:
        sample.transpose_(1, 2)
    return default_collate(samples)


def replaced(samples):
    for sample in samples:
        sample.data = sample.data * 2
    return default_collate(samples)


def copied(samples):
    return default_collate(copy.deepcopy(samples))


@loaders
@pytest.mark.parametrize("collate", [unsqueezed, transposed, replaced, copied])
def test_samples_changed_in_place_stay_changed(dataset, kind, collate):
    found = next(iter(kind(dataset, 3, num_workers=0, collate_fn=collate)))
    assert torch.equal(found, collate([dataset[0], dataset[1], dataset[2]]))


def test_a_collate_function_sees_plain_tensors(dataset):
    samples = next(iter(OMEArrowDataLoader(dataset, 3, num_workers=0, collate_fn=lambda samples: samples)))
    assert type(samples) is list
    assert [type(sample) for sample in samples] == [torch.Tensor] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_can_be_nested(dataset, workers):
    loader = OMEArrowDataLoader(dataset, 3, num_workers=workers, timeout=60 if workers else 0)
    wanted = list(loader)
    assert [torch.equal(a, b) for a, b in zip(loader, loader, strict=True)] == [True] * 3
    assert [torch.equal(a, wanted[place]) for place, a in enumerate(loader) for _ in loader] == [True] * 9
    first = iter(loader)
    next(first)
    assert all(map(torch.equal, list(iter(loader)), wanted))
    assert torch.equal(next(first), wanted[1])


class Beginning(SequentialSampler):
    """Has another thread begin an epoch while one begins."""

    loader, other = None, None

    def __iter__(self):
        loader, self.loader = self.loader, None
        if loader is not None:
            self.other = ThreadPoolExecutor(1).submit(iter, loader)
            wait([self.other], 0.1)
        return super().__iter__()


def test_two_threads_can_begin_epochs_at_once(dataset):
    sampler = Beginning(dataset)
    loader = OMEArrowDataLoader(dataset, 3, sampler=sampler, num_workers=1, timeout=20)
    wanted = list(loader)
    sampler.loader = loader
    both = zip(iter(loader), sampler.other.result(60), wanted, strict=True)
    assert [torch.equal(mine, batch) and torch.equal(other, batch) for mine, other, batch in both] == [True] * 3


def test_loaders_can_be_copied(dataset):
    for loader in (OMEArrowDataLoader(dataset, 3), OMEArrowDataLoader(dataset, 3, num_workers=1)):
        assert torch.equal(next(iter(loader)), dataset_batch(dataset))
        for again in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert again.settings.keys() == loader.settings.keys()
            assert len(list(again)) == len(loader)
    assert torch.equal(next(iter(pickle.loads(pickle.dumps(OMEArrowDataLoader(dataset, 3))))), dataset_batch(dataset))


def dataset_batch(dataset):
    return torch.stack([dataset[0], dataset[1], dataset[2]])


def local(samples):
    class Local:
        pass

    return Local()


def test_a_batch_that_cannot_be_pickled_is_an_error(dataset):
    with pytest.raises(Exception, match=r"(?s)sending what collate_fn returned.*Local"):
        list(OMEArrowDataLoader(dataset, 3, num_workers=1, collate_fn=local, timeout=60))


def told(samples):
    return os.environ.get("OMEARROW_DS_TOLD")


def test_workers_know_the_environment(dataset, monkeypatch):
    list(OMEArrowDataLoader(dataset, 8, num_workers=1, timeout=60))
    monkeypatch.setenv("OMEARROW_DS_TOLD", "late")
    assert list(OMEArrowDataLoader(dataset, 8, num_workers=1, collate_fn=told, timeout=60)) == ["late"]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Prepared(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.made_by_worker_init_fn


def test_what_is_not_supported_says_so(dataset, monkeypatch):
    with pytest.raises(ArgumentError, match="no order that could be resumed"):
        OMEArrowDataLoader(Stream(), 2).state_dict()
    state = OMEArrowDataLoader(dataset, 2, shuffle=True).state_dict()
    with pytest.raises(ArgumentError, match="sampler was RandomSampler, is SequentialSampler"):
        OMEArrowDataLoader(dataset, 2).load_state_dict(state)
    monkeypatch.setattr("omearrow_ds.loader.settings.available_cores", lambda: 2)
    loader = OMEArrowDataLoader(Prepared(), 2, worker_init_fn=print)
    assert loader.num_workers == 2
    assert "worker_init_fn" in loader.settings["num_workers"].why
