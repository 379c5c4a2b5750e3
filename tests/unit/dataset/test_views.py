"""Views: samples equal those of the dataset bit for bit, without copies of pixels."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    default_collate,
    random_split,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    ImageIndexError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    write_images,
)
from omearrow_ds.dataset.batch import BatchedConcat, CollatedBatch, batched
from omearrow_ds.dataset.samples import StoredSamples
from tests.support.errors import raises
from tests.support.strategies import image_of

COUNT = 24
preloads = pytest.mark.parametrize("preload", [True, False], ids=["preloaded", "on-demand"])
kinds = pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
loaders = pytest.mark.parametrize("loader", [DataLoader, OMEArrowDataLoader])


@pytest.fixture(scope="module", params=["arrow", pytest.param("tiffs", marks=pytest.mark.slow)])
def path(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("views") / f"images.{request.param}"
    columns = {
        "number": range(COUNT),
        "plate": [f"p{n % 4}" for n in range(COUNT)],
        "label": ["control" if n % 4 else "drug" for n in range(COUNT)],
        "holes": [None, *range(1, COUNT)],
    }
    write_images([image_of((20, 30), "uint16", n) for n in range(COUNT)], file, columns=columns)
    return file


def equal(one, two):
    """Whether samples, or lists of samples, are equal bit for bit."""
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(equal, one, two))
    return np.array_equal(np.asarray(one), np.asarray(two)) and type(one) is type(two)


@preloads
@kinds
@pytest.mark.parametrize("options", [{}, {"target": "plate", "return_ids": True}], ids=["images", "targets"])
def test_samples_are_those_of_the_dataset(path, kind, preload, options):
    dataset = kind(path, preload=preload, **options)
    views = dataset.split((0.5, 0.25, 0.25), by="plate", seed=1)
    numbers = [view.columns["number"].to_pylist() for view in views]
    assert sorted(chain(*numbers)) == list(range(COUNT))
    for view, picked in zip(views, numbers, strict=True):
        assert type(view) is kind
        assert len(view) == len(picked) == view.columns.num_rows
        assert view.image_ids == [dataset.image_ids[n] for n in picked]
        assert (view.shape, view.nbytes, view.classes) == (dataset.shape, len(view) * 20 * 30 * 2, dataset.classes)
        assert f"{len(view)} of {COUNT} images" in repr(view)
        for samples in (view, pickle.loads(pickle.dumps(view))):
            assert equal([samples[i] for i in range(len(samples))], [dataset[n] for n in picked])
            assert equal(samples[-1], dataset[picked[-1]])
            assert equal(samples[np.int64(1)], dataset[picked[1]])
            order = [2, 0, -1, 2]
            assert equal(samples.__getitems__(order), dataset.__getitems__([picked[i] for i in order]))
            for index in (len(samples), -len(samples) - 1, 1.0, None):
                with pytest.raises(ImageIndexError):
                    samples[index]
                with pytest.raises(ImageIndexError):
                    samples.__getitems__([0, index])
    again = views[0].split((0.5, 0.5), seed=3)
    assert sorted(chain(*(part.columns["number"].to_pylist() for part in again))) == sorted(numbers[0])
    assert equal(again[1][0], dataset[again[1].columns["number"][0].as_py()])


@preloads
def test_views_share_all_and_hold_no_pixels(path, preload):
    dataset = OMEArrowDataset(path, preload=preload)
    train, test = dataset.split((0.5, 0.5))
    again = pickle.loads(pickle.dumps([train, test, train.with_transform(None)]))
    for views in ([dataset, train, test], again):
        assert len({id(view._collection) for view in views}) == 1
    assert len(pickle.dumps(train)) < len(pickle.dumps(dataset)) + 500
    if preload:
        other = pickle.loads(pickle.dumps(test))
        dataset._collection.cache.block.bytes[:] = 7
        for view in (train, test, *again, other):
            assert set(np.unique(np.asarray(view[0] * 65535).round())) == {7 * 257}


@preloads
def test_a_view_outlives_its_dataset(path, preload):
    dataset = OMEArrowDataset(path, preload=preload)
    expected, gone = dataset[3].clone(), weakref.ref(dataset)
    view = dataset.split((0.5, 0.5))[0].split((1.0,))[0]
    index = view.columns["number"].to_pylist().index(3) if 3 in view.columns["number"].to_pylist() else None
    whole = dataset.with_transform(None)
    del dataset
    gc.collect()
    assert gone() is None
    assert torch.equal(whole[3], expected)
    assert index is None or torch.equal(view[index], expected)


@preloads
def test_each_view_has_a_transform_of_its_own(path, preload):
    plain = OMEArrowDataset(path, preload=preload, target="label")
    flipped = plain.with_transform(torch.neg)
    train, test = flipped.split((0.5, 0.5))
    test = test.with_transform(None)
    number = train.columns["number"][2].as_py()
    assert torch.equal(train[2][0], -plain[number][0])
    assert torch.equal(test[0][0], plain[test.columns["number"][0].as_py()][0])
    assert torch.equal(flipped.__getitems__([4])[0][0], -plain[4][0])
    assert not plain.with_transform(None)._has_user_code
    assert train._has_user_code
    for (one, labels), (two, _) in zip(DataLoader(train, 4), DataLoader(test, 4), strict=True):
        assert one.max() <= 0 <= two.min()
        assert labels.dtype == torch.int64
    with raises(ArgumentError, option="transform", mentions=3, remedy=False):
        plain.with_transform(3)
    with raises(ArgumentError, option="transform", mentions="with_transform", remedy=False):
        test.transform = torch.neg
    assert not hasattr(OMEArrowDatasetNumpy(path), "with_transform")


def test_subclasses_have_views_of_their_own(path):
    class Negative(OMEArrowDataset):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.factor = -2

        def __getitem__(self, index):
            return self.factor * super().__getitem__(index)

    dataset = Negative(path)
    view = dataset.split((0.5, 0.5))[0]
    assert type(view) is Negative
    assert torch.equal(view.__getitems__([1])[0], dataset[view.columns["number"][1].as_py()])


@preloads
def test_a_batch_of_a_view_is_made_whole(path, preload, monkeypatch):
    view = OMEArrowDataset(path, preload=preload, target="number").split((0.5, 0.5))[1]
    collated = []
    monkeypatch.setattr(OMEArrowDataset, "_collated", lambda *a: collated.append(a) or CollatedBatch("whole"))
    fetch = _MapDatasetFetcher(view, True, default_collate, False).fetch
    assert fetch([0, 2, 1]) == "whole"
    assert _MapDatasetFetcher(Subset(view, [3, 2, 1, 0]), True, default_collate, False).fetch([0, 2]) == "whole"


class Plain(Dataset):
    """A dataset without ``__getitems__``."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((1, 20, 30), -1.0 - index)


class Handing(Plain):
    """A wrapper that delegates missing attributes, including ``__getitems__``, which bypasses its ``__getitem__``."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


@preloads
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.share(2, "preload", "workers")
def test_concatenated_datasets_make_batches_at_once(path, preload, workers, monkeypatch):
    dataset = OMEArrowDataset(path, preload=preload)
    train, test = dataset.split((0.5, 0.5))
    halves = random_split(train, [6, 6], generator=torch.Generator().manual_seed(1))
    nested = Subset(ConcatDataset([test, ConcatDataset([halves[0], Plain()])]), [*range(0, 20, 2), *range(15)])
    whole = ConcatDataset([nested, Handing(dataset), halves[1], dataset])
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    expected = [torch.stack([whole[index] for index in order[i : i + 8]]) for i in range(0, len(order), 8)]
    before = [list(vars(concatenated)) for concatenated in (whole, nested, nested.dataset)]
    one, many = [], []
    get, gets = OMEArrowDataset.__getitem__, OMEArrowDataset.__getitems__

    def getitems(self, indices):
        many.append(len(indices))
        return gets(self, indices)

    loader = OMEArrowDataLoader(whole, 8, sampler=order, num_workers=workers)
    with monkeypatch.context() as patched:
        if not workers:
            patched.setattr(StoredSamples, "__getitem__", lambda self, index: one.append(index) or get(self, index))
            patched.setattr(OMEArrowDataset, "__getitems__", getitems)
        batches = list(loader)
    assert equal(batches, expected)
    if not workers:
        of_ours = sum(1 for index in order if not whole[index].min() < 0)
        assert not one
        assert sum(many) == of_ours
        assert len(many) <= 4 * len(expected)
    assert loader.dataset is whole
    assert type(whole) is ConcatDataset is type(nested.dataset)
    assert [list(vars(concatenated)) for concatenated in (whole, nested, nested.dataset)] == before


def test_concatenated_batches_are_torchs(path):
    dataset = OMEArrowDataset(path, target="number")
    train, test = dataset.split((0.5, 0.5))
    joined, torchs = train + test, ConcatDataset([train, test])
    assert isinstance(joined, BatchedConcat)
    for indices in ([3, 20, -1, 3], []):
        assert equal(joined.__getitems__(indices), [torchs[index] for index in indices])
    for index, error in ((COUNT, IndexError), (-COUNT - 1, ValueError)):
        for concatenated in (joined, batched(torchs)):
            with pytest.raises(error):
                concatenated.__getitems__([0, index])

    class Own(ConcatDataset):
        def __getitem__(self, index):
            return "own"

    own = Own([train])
    assert batched(own) is own
    assert batched(dataset) is dataset
    subset = Subset(dataset, [1])
    assert batched(subset) is subset


def test_auto_takes_no_workers_for_what_is_in_memory(path):
    train, test = OMEArrowDataset(path).split((0.5, 0.5))
    for dataset in (train, train + test, ConcatDataset([test, Subset(train, [1, 2])])):
        assert OMEArrowDataLoader(dataset, 4).settings["num_workers"].why.startswith("auto: copying pixels in memory")
    augmented = ConcatDataset([train.with_transform(torch.neg), test])
    assert equal(list(OMEArrowDataLoader(augmented, 4)), list(DataLoader(augmented, 4)))


@preloads
@loaders
@pytest.mark.share(2, "preload", "loader")
def test_workers_make_the_same_of_views(path, preload, loader):
    dataset = OMEArrowDataset(path, preload=preload, target="number", return_ids=True)
    train, test = dataset.split((0.75, 0.25), stratify="label")
    for view in (train, test.with_transform(torch.neg)):
        batches = list(OMEArrowDataLoader(view, 4, num_workers=2))
        for (images, numbers, ids), (others, of_others, ids_of_others) in zip(batches, loader(view, 4), strict=True):
            assert torch.equal(images, others)
            assert torch.equal(numbers, of_others)
            assert list(ids) == list(ids_of_others)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_of_views_resume(path, workers):
    view = OMEArrowDataset(path, target="number").split((0.75, 0.25))[0]

    def loader(sampled):
        torch.manual_seed(3)
        sampler = view.balanced_sampler("label", 30, seed=5) if sampled else None
        return OMEArrowDataLoader(view, 4, shuffle=None if sampled else True, sampler=sampler, num_workers=workers)

    for sampled in (False, True):
        whole = [numbers.tolist() for _, numbers in loader(sampled)]
        begun, left = loader(sampled), []
        epoch = iter(begun)
        first = [next(epoch)[1].tolist() for _ in range(2)]
        state = begun.state_dict()
        del epoch
        other = loader(sampled)
        other.load_state_dict(state)
        left = [numbers.tolist() for _, numbers in other]
        assert first + left == whole


def test_a_balanced_sampler_draws_every_value_equally_often(path):
    dataset = OMEArrowDataset(path)
    sampler = dataset.balanced_sampler("label", 20_000, seed=1)
    labels = np.array(dataset.columns["label"].to_pylist())
    drawn = labels[list(sampler)]
    assert 0.48 < (drawn == "drug").mean() < 0.52
    assert (labels == "drug").mean() == 0.25
    assert list(dataset.balanced_sampler("label", seed=1)) == list(dataset.balanced_sampler("label", seed=1))
    assert list(dataset.balanced_sampler("label", seed=1)) != list(dataset.balanced_sampler("label", seed=2))
    assert len(dataset.balanced_sampler("label")) == COUNT
    assert len(list(dataset.balanced_sampler("label", np.int64(3), np.uint8(1)))) == 3
    for options in ({"num_samples": 0}, {"num_samples": 2.5}, {"seed": "x"}, {"seed": -1}, {"column": None}):
        with raises(ArgumentError, option=next(iter(options)), remedy=False):
            dataset.balanced_sampler(**{"column": "label", **options})
    with raises(ColumnError, option="column", path=path, mentions=("'holes'", "sample 0")):
        dataset.balanced_sampler("holes")
    with raises(ColumnError, option="column", path=path, mentions="'lable'", remedy=False):
        dataset.balanced_sampler("lable")


def test_ranks_share_a_view_out(path):
    view = OMEArrowDataset(path, target="number").split((0.5, 0.5))[0]
    drawn_numbers = []
    for rank in range(2):
        sampler = DistributedSampler(view, num_replicas=2, rank=rank)
        drawn_numbers += [
            int(number) for _, numbers in OMEArrowDataLoader(view, 2, sampler=sampler) for number in numbers
        ]
    assert sorted(drawn_numbers) == view.columns["number"].to_pylist()


@preloads
def test_views_are_read_in_threads(path, preload):
    dataset = OMEArrowDataset(path, preload=preload, target="number")
    views = dataset.split((0.25, 0.25, 0.25, 0.25))
    wrong = []

    def read(view):
        numbers = view.columns["number"].to_pylist()
        for _ in range(20):
            batch = view.__getitems__(list(range(len(view))))
            wrong.extend(number for (_, number), own in zip(batch, numbers, strict=True) if number != own)

    threads = [threading.Thread(target=read, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_error_says_which_sample_of_the_view(path):
    view = OMEArrowDataset(path).split((0.5, 0.5))[0].with_transform(lambda image: 1 / 0)
    for act in (lambda: view[5], lambda: view.__getitems__([5, 1])):
        with pytest.raises(ZeroDivisionError) as caught:
            act()
        assert "creating sample 5 of a view of " in caught.value.__notes__[0]


@preloads
def test_images_of_several_shapes(tmp_path, preload):
    images = [image_of((4 + n % 2, 6), "uint8" if n % 3 else "uint16", n) for n in range(8)]
    write_images(images, tmp_path / "images.parquet", columns={"odd": [n % 2 for n in range(8)]})
    dataset = OMEArrowDataset(tmp_path / "images.parquet", preload=preload)
    even, odd = dataset.split((0.5, 0.5), by="odd")
    if even.columns["odd"][0].as_py():
        even, odd = odd, even
    assert dataset.shape is None
    assert (even.shape, odd.shape) == ((1, 4, 6), (1, 5, 6))
    assert even.nbytes + odd.nbytes == dataset.nbytes == sum(image.nbytes for image in images)
    assert next(iter(DataLoader(odd, 4))).shape == (4, 1, 5, 6)
