"""`OMEArrowDataLoader` and torch's loader: an epoch equals direct access, with and without workers."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, default_collate

from omearrow_ds import AxesError, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.loader.device_transfer import mover_to
from tests.support.errors import raises
from tests.support.strategies import NAMES_OR_LONG, RAGGED, image_of, images_of, same

UNIFORM = [((1, 2, 1, 6, 7), "uint16")] * 7
preloads = pytest.mark.parametrize("preload", [True, False], ids=["preloaded", "on-demand"])


def direct(dataset, batches):
    return [torch.stack([dataset[index] for index in batch]) for batch in batches]


def equal(batches, expected):
    batches = list(batches)
    return len(batches) == len(expected) and all(
        type(batch) is torch.Tensor and same(batch.numpy(), other.numpy())
        for batch, other in zip(batches, expected, strict=True)
    )


def test_it_is_a_torch_dataloader(stored):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)))
    loader = OMEArrowDataLoader(dataset, batch_size=4)
    assert isinstance(loader, DataLoader)
    assert loader.num_workers == 0
    assert len(loader) == 2
    assert loader.dataset is dataset
    assert OMEArrowDataLoader(dataset, 4, num_workers=0, drop_last=True, device="cpu").drop_last
    on_demand = OMEArrowDataset(dataset.path, preload=False)
    assert OMEArrowDataLoader(on_demand, num_workers=1).persistent_workers


@pytest.mark.parametrize("name", NAMES_OR_LONG)
@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
@pytest.mark.share(2, "name", "preload", "kind")
def test_an_epoch_equals_direct_access(stored, name, preload, kind):
    dataset = OMEArrowDataset(stored(name, images_of(UNIFORM)), preload=preload)
    expected = direct(dataset, [[0, 1, 2], [3, 4, 5], [6]])
    loader = kind(dataset, batch_size=3, num_workers=0)
    assert equal(loader, expected)
    assert equal(loader, expected)


@preloads
def test_an_epoch_of_workers_equals_direct_access(stored, preload):
    """Batches too small for a shared block; test_workers has larger ones in every format."""
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)), preload=preload)
    loader = OMEArrowDataLoader(dataset, batch_size=3, num_workers=2, timeout=60)
    assert equal(loader, direct(dataset, [[0, 1, 2], [3, 4, 5], [6]]))


def doubled(batch):
    return torch.stack(batch) * 2


def changed(batch):
    batch[1] = batch[1] * 0
    return default_collate(batch)


def reordered(batch):
    batch[1], batch[2] = batch[2], batch[1]
    return default_collate(batch)


def shortened(batch):
    del batch[2]
    return default_collate(batch)


@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
def test_a_collate_function_gets_a_list_of_tensors(stored, preload, kind):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)), preload=preload)
    a, b, c = (dataset[index] for index in range(3))
    for collate, expected in [
        (doubled, [a * 2, b * 2, c * 2]),
        (changed, [a, b * 0, c]),
        (reordered, [a, c, b]),
        (shortened, [a, b]),
        (lambda batch: default_collate(batch[:2]), [a, b]),
        (lambda batch: default_collate([sample + 1 for sample in batch]), [a + 1, b + 1, c + 1]),
        (
            lambda batch: torch.stack(sorted(batch, key=lambda sample: -float(sample.sum()))),
            sorted((a, b, c), key=lambda sample: -float(sample.sum())),
        ),
    ]:
        loader = kind(Subset(dataset, range(3)), batch_size=3, collate_fn=collate, num_workers=0)
        assert equal(loader, [torch.stack(expected)])
    (batch,) = kind(Subset(dataset, range(3)), batch_size=3, collate_fn=list, num_workers=0)
    assert [type(sample + 0) for sample in batch] == [torch.Tensor] * 3


def test_samples_cross_processes_one_by_one(stored):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)))
    loader = OMEArrowDataLoader(dataset, batch_size=4, collate_fn=list, num_workers=1, timeout=60)
    samples = [sample for batch in loader for sample in batch]
    assert all(same(sample.numpy(), dataset[index].numpy()) for index, sample in enumerate(samples))
    assert len(samples) == len(dataset)


@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
def test_targets_collate(stored, preload, kind):
    columns = {"label": range(7), "score": np.arange(7) / 4, "well": list("abcdefg"), "features": [[1.0, 2.0]] * 7}
    path = stored("parquet", images_of(UNIFORM), columns=columns)
    for target, expected in [
        ("label", torch.tensor([3, 4, 5])),
        ("score", torch.tensor([0.75, 1.0, 1.25], dtype=torch.float64)),
        ("features", torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64)),
        (lambda row: row["label"] * 2, torch.tensor([6, 8, 10])),
    ]:
        dataset = OMEArrowDataset(path, preload=preload, target=target)
        images, targets = list(kind(dataset, batch_size=3, num_workers=0))[1]
        assert same(images.numpy(), np.stack([dataset[index][0] for index in (3, 4, 5)]))
        assert torch.equal(targets, expected)
        assert targets.dtype == expected.dtype
    for encode_targets, expected in ((True, [0, 1, 2]), (False, ["a", "b", "c"])):
        dataset = OMEArrowDataset(path, preload=preload, target="well", encode_targets=encode_targets)
        _, wells = next(iter(kind(dataset, batch_size=3, num_workers=0)))
        assert list(wells) == expected


@preloads
def test_torchs_own_arguments_mean_the_same(stored, preload):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)), preload=preload)
    plain = [dataset[index] for index in range(len(dataset))]
    for make in (
        lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
        lambda: {"batch_size": 3, "drop_last": True},
        lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)},
        lambda: {"batch_sampler": [[6, 0], [1, 1, 1]]},
        lambda: {"batch_size": 2, "sampler": [5, 1, 1]},
        lambda: {"batch_size": None},
        dict,
    ):
        assert equal(OMEArrowDataLoader(dataset, num_workers=0, **make()), list(DataLoader(plain, **make())))


@preloads
def test_transforms_may_change_the_shape(stored, preload):
    dataset = OMEArrowDataset(
        stored("parquet", images_of(UNIFORM)), preload=preload, transform=lambda sample: sample.mean((1, 2))
    )
    (batch,) = OMEArrowDataLoader(dataset, batch_size=7, num_workers=0)
    assert batch.shape == (7, 2)
    assert equal([batch], direct(dataset, [range(7)]))


@preloads
def test_ragged_images_load_one_by_one(stored, preload):
    dataset = OMEArrowDataset(stored("parquet", images_of(RAGGED)), preload=preload, axes="TCZYX")
    batches = list(OMEArrowDataLoader(dataset, num_workers=0))
    assert equal(batches, [dataset[index][None] for index in range(len(dataset))])
    with raises(AxesError, option="collate", mentions=("(1, 1, 1, 5, 7)", "(1, 3, 1, 4, 6)")):
        list(OMEArrowDataLoader(dataset, batch_size=2, num_workers=0))


def test_numpy_datasets_collate_to_tensors(stored):
    dataset = OMEArrowDatasetNumpy(stored("parquet", images_of(UNIFORM)))
    (batch,) = OMEArrowDataLoader(dataset, batch_size=7, num_workers=0)
    assert same(batch.numpy(), np.stack([dataset[index] for index in range(7)]))


@preloads
def test_batches_share_no_memory_with_the_dataset(stored, preload):
    dataset = OMEArrowDataset(stored("parquet", [image_of((6, 7))] * 4), preload=preload, normalize=False)
    loader = OMEArrowDataLoader(dataset, batch_size=2, num_workers=0)
    before = [batch.clone() for batch in loader]
    for batch in loader:
        batch.zero_()
    assert equal(loader, before)


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def pairs(samples):
    images, labels = zip(*samples, strict=True)
    return Pair(torch.stack(images), torch.tensor(labels))


@pytest.mark.parametrize("collate", [None, pairs])
def test_batches_arrive_on_the_device(stored, collate):
    """The meta device holds no data: this shows without a GPU that every tensor of a batch was moved."""
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM), columns={"label": [*range(7)]}), target="label")
    for images, labels in OMEArrowDataLoader(dataset, 2, device="meta", collate_fn=collate):
        assert images.device.type == labels.device.type == "meta"
    for batch in OMEArrowDataLoader(dataset, 2, collate_fn=pairs, device="cpu"):
        assert isinstance(batch, Pair)


class Clock:
    """The order of operations in CUDA streams; `before` has all operations that precede each one."""

    def __init__(self):
        self.using, self.side = Stream(self, "using"), None
        self.current = self.using
        self.before = {}

    def do(self, name, stream):
        """Append an operation to a stream, after all that the stream has done or waited for."""
        self.before[name] = frozenset(stream.done)
        stream.done |= {name}

    @contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before


class Stream:
    def __init__(self, clock, name):
        self.clock, self.name, self.done = clock, name, set()

    def record_event(self):
        return frozenset(self.done)

    def wait_event(self, event):
        self.done |= event

    def wait_stream(self, other):
        self.done |= other.done


class OnHost(torch.Tensor):
    """A tensor that records its copies and the streams that use it."""

    def to(self, device, *, non_blocking):
        assert (device.type, non_blocking) == ("cuda", True)
        copy = self.clone().as_subclass(OnHost)
        copy.clock, copy.number, copy.users = self.clock, self.number, []
        self.clock.do(f"copy {self.number}", self.clock.current)
        return copy

    def record_stream(self, stream):
        self.users.append(stream.name)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def side(device):
        clock.side = Stream(clock, "side")
        return clock.side

    monkeypatch.setattr(torch.cuda, "Stream", side)
    monkeypatch.setattr(torch.cuda, "stream", clock.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: clock.current)
    return clock


def on_host(clock, number):
    tensor = torch.full((2,), number).as_subclass(OnHost)
    tensor.clock, tensor.number = clock, number
    return tensor


def moved(batches, *args, **kwargs):
    """Return an iterator over batches that `mover_to` moves."""
    move = mover_to(*args, **kwargs)
    return iter(lambda: move(batches.__next__), None)


def test_a_batch_waits_for_its_own_copy_alone(clock):
    """The streams only record their order, so no GPU is needed."""
    batches = ((number, (on_host(clock, number), "a label")) for number in range(4))
    for number, (index, (batch, label)) in enumerate(moved(batches, torch.device("cuda"))):
        assert (index, label, batch.tolist(), batch.users) == (number, "a label", [number] * 2, ["using"])
        clock.do(f"step {number}", clock.using)
        assert {f"copy {number}", *(f"step {earlier}" for earlier in range(number))} <= clock.before[f"step {number}"]
        assert f"copy {number + 1}" not in clock.before[f"step {number}"]
        if number < 3:
            assert f"copy {number + 1}" in clock.side.done  # Copied before this batch was delivered.
            assert not any(done.startswith("step") for done in clock.before[f"copy {number + 1}"])
    assert number == 3


def test_copies_go_on_after_an_error(clock):
    items = iter([0, 1, None, 3])

    def fetch():
        item = next(items)
        if item is None:
            raise ValueError("odd")
        return item, on_host(clock, item)

    outcomes, move = [], mover_to(torch.device("cuda"))
    for _ in range(6):
        try:
            outcomes.append(move(fetch)[1].tolist()[0])
        except ValueError:
            outcomes.append("error")
        except StopIteration:
            outcomes.append("end")
    assert outcomes == [0, "error", 1, 3, "end", "end"]


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


@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
def test_datasets_around_ours_get_samples(dataset, kind):
    expected = torch.stack([dataset[0], dataset[1], dataset[2]])
    path = dataset.path
    for wrapped in (Wrapper(dataset), Numbered(path), NumberedArrays(path)):
        images, numbers = next(iter(kind(wrapped, 3, num_workers=0)))
        assert torch.equal(images, expected)
        assert numbers.tolist() == [0, 1, 2]
    assert torch.equal(next(iter(kind(Zeroed(path), 3, num_workers=0))), expected * 0)


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


@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
@pytest.mark.parametrize("collate", [unsqueezed, transposed, replaced, copied])
def test_samples_changed_in_place_stay_changed(dataset, kind, collate):
    batch = next(iter(kind(dataset, 3, num_workers=0, collate_fn=collate)))
    assert torch.equal(batch, collate([dataset[0], dataset[1], dataset[2]]))


def test_a_collate_function_sees_plain_tensors(dataset):
    samples = next(iter(OMEArrowDataLoader(dataset, 3, num_workers=0, collate_fn=lambda samples: samples)))
    assert type(samples) is list
    assert [type(sample) for sample in samples] == [torch.Tensor] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_can_be_nested(dataset, workers):
    loader = OMEArrowDataLoader(dataset, 3, num_workers=workers, timeout=60 if workers else 0)
    batches = list(loader)
    assert [torch.equal(a, b) for a, b in zip(loader, loader, strict=True)] == [True] * 3
    assert [torch.equal(a, batches[index]) for index, a in enumerate(loader) for _ in loader] == [True] * 9
    first = iter(loader)
    next(first)
    assert all(map(torch.equal, list(iter(loader)), batches))
    assert torch.equal(next(first), batches[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_ended_gives_no_batch_of_the_next(dataset, workers):
    loader = OMEArrowDataLoader(dataset, 3, num_workers=workers, timeout=60 if workers else 0)
    ended = iter(loader)
    expected = list(ended)
    assert list(ended) == []
    assert loader.state_dict()["epoch"] == 1
    going_on = iter(loader)
    batches = [next(going_on), *ended, *going_on, *ended]
    assert len(batches) == 3
    assert all(map(torch.equal, batches, expected))
    assert loader.state_dict()["epoch"] == 2


class Beginning(SequentialSampler):
    """A sampler that begins an epoch in another thread while one begins."""

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
    expected = list(loader)
    sampler.loader = loader
    both = zip(iter(loader), sampler.other.result(60), expected, strict=True)
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
