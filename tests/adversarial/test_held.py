"""Samples that a user keeps do not change until they are dropped, in every way to keep them."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, default_collate

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.dataset import shared_memory
from omearrow_ds.dataset.batch import collate
from tests.support.emulated_frameworks import one_ahead
from tests.support.strategies import image_of

pytestmark = pytest.mark.timeout(180)
COUNT, SIZE = 40, 4
IMAGES = [image_of((1, 1, 1, 64, 130), "uint16", number) for number in range(COUNT)]
WANTED = [torch.from_numpy(image[0, :, 0].astype(np.float32) / np.float32(65535)) for image in IMAGES]
BOXES = [[[index, 1.0], [2.0, index]] for index in range(COUNT)]
HOLDS = {  # Ways to keep a part of a batch.
    "the batch": lambda batch: batch,
    "a sample": lambda batch: batch[1],
    "a slice": lambda batch: batch[:, :, 3:40:2, ::3],
    "a view": lambda batch: batch.view(-1, 65),
    "transposed": lambda batch: batch.permute(3, 2, 1, 0),
    "other bits": lambda batch: batch.view(torch.int32),
    "its samples": lambda batch: batch.unbind(),
    "numpy": lambda batch: batch.numpy(),
    "a row of numpy": lambda batch: batch.numpy()[1, 0, 5],
    "numpy's view": lambda batch: batch.numpy().view(np.uint16).reshape(2, -1),
    "numpy's window": lambda batch: np.lib.stride_tricks.as_strided(batch.numpy(), (2, 9), (8, 4)),
    "a buffer": lambda batch: memoryview(batch.numpy()),
    "numpy of a buffer": lambda batch: np.frombuffer(batch.numpy().data, np.uint8)[7:],
    "by dlpack": torch.from_dlpack,
    "numpy by dlpack": lambda batch: np.from_dlpack(batch)[1:],
    "detached": lambda batch: batch.detach()[0],
    "storage": lambda batch: torch.empty(0, dtype=batch.dtype).set_(batch.untyped_storage())[: batch.numel()],
    "a deep copy": copy.deepcopy,
    "a copy": copy.copy,
    "unpickled": lambda batch: pickle.loads(pickle.dumps(batch)),
}


@pytest.fixture(autouse=True)
def _small_batches_too(monkeypatch):
    """Reuse the memory of batches of any size, not only of those over 32 MiB."""
    monkeypatch.setattr(shared_memory, "_POOLED_BYTES", 0)


@pytest.fixture
def path(stored):
    return stored("arrow", IMAGES, columns={"number": range(COUNT), "boxes": BOXES})


def wanted_of(number):
    return torch.stack(WANTED[number * SIZE : (number + 1) * SIZE])


def same_values(actual, expected):
    if isinstance(actual, tuple):
        return all(map(same_values, actual, expected))
    return np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def hold_and_compare(ways, rng, *, epochs):
    """Keep random parts of batches, drop some, and compare the kept ones now and then."""
    parts = []
    for batches in rng.choices(ways, k=epochs):
        for number, batch in enumerate(batches()):
            names = rng.sample(sorted(HOLDS), rng.randint(0, 2))
            parts += [(name, number, HOLDS[name](batch)) for name in names]
            del batch
            rng.shuffle(parts)
            del parts[8:]
            changed = {name for name, number, part in parts if not same_values(part, HOLDS[name](wanted_of(number)))}
            assert not changed, f"changed while it was held: {changed}"


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.share(4, "seed", "preload")
def test_held_at_random(path, preload, seed):
    dataset, rng = OMEArrowDataset(path, preload=preload), random.Random(seed)
    ours, torchs = OMEArrowDataLoader(dataset, SIZE, num_workers=0), DataLoader(dataset, SIZE)
    some = Subset(dataset, range(COUNT))
    ways = [
        lambda: ours,
        lambda: one_ahead(ours),
        lambda: torchs,
        lambda: one_ahead(torchs),
        lambda: DataLoader(some, SIZE, collate_fn=lambda samples: default_collate([*samples])),
        lambda: OMEArrowDataLoader(some, SIZE, num_workers=0, collate_fn=torch.stack),
        lambda: map(collate, (dataset.__getitems__(range(k, k + SIZE)) for k in range(0, COUNT, SIZE))),
    ]
    hold_and_compare(ways, rng, epochs=4)


def test_held_at_random_of_workers(path):
    rng = random.Random(0)
    transformed = OMEArrowDataset(path, transform=negated_twice)
    loader = OMEArrowDataLoader(transformed, SIZE, num_workers=1, timeout=60)
    with_targets = OMEArrowDataLoader(OMEArrowDataset(path, target="boxes"), SIZE, num_workers=1, timeout=60)

    def images():
        for number, (batch, boxes) in enumerate(with_targets):
            assert boxes.tolist() == BOXES[number * SIZE : (number + 1) * SIZE]
            boxes.mul_(2)
            yield batch

    hold_and_compare([lambda: loader, lambda: one_ahead(loader), images], rng, epochs=5)


def negated_twice(image):
    return torch.neg(torch.neg(image))


@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.share(2, "kind", "preload")
def test_every_batch_of_an_epoch_can_be_kept(path, kind, preload):
    dataset = OMEArrowDataset(path, preload=preload)
    loader = kind(dataset, SIZE, num_workers=0)
    for take in HOLDS.values():
        parts = [take(batch) for batch in loader]
        assert all(same_values(part, take(wanted_of(number))) for number, part in enumerate(parts))
    weights, loss = torch.ones(1, requires_grad=True), 0
    for batch in loader:  # Only autograd's graph keeps it.
        loss = loss + (batch * weights).double().sum()
    loss.backward()
    assert weights.grad.item() == pytest.approx(torch.stack(WANTED).double().sum().item(), rel=1e-6)


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_threads_do_not_get_each_others_samples(path, kind):
    dataset = kind(path, preload=False, target="number")

    def work(seed):
        rng, samples = random.Random(seed), []
        for _ in range(25):
            samples += rng.sample(dataset.__getitems__(rng.choices(range(COUNT), k=SIZE)), 2)
            del samples[: rng.randint(0, 2)]
        return all(same_values(image, WANTED[number]) for image, number in samples)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("target", [None, "number"])
def test_samples_share_no_memory_with_what_is_collated_of_them(path, target):
    """This includes a user's ``collate_fn``, and samples that other code than a loader requests."""
    dataset = OMEArrowDataset(path, target=target)
    cached = []

    class Caching(Subset):
        def __getitems__(self, indices):
            cached.append(super().__getitems__(indices))
            return cached[-1]

    def two_views(samples):
        images = [default_collate(samples), collate(samples), default_collate(samples)]
        images = [collated if target is None else collated[0] for collated in images]
        images[0].mul_(0)
        images[1].add_(5)
        return images[2], [sample if target is None else sample[0] for sample in samples]

    for kind in (DataLoader, OMEArrowDataLoader):
        for source in (dataset, Subset(dataset, range(COUNT))):
            for batch, samples in kind(source, SIZE, num_workers=0, collate_fn=two_views):
                assert torch.equal(batch, torch.stack(samples))
        for number, batch in enumerate(kind(Caching(dataset, range(COUNT)), SIZE, num_workers=0)):
            images, cached_images = (
                (batch, cached[-1]) if target is None else (batch[0], [image for image, _ in cached[-1]])
            )
            images.mul_(0)
            assert same_values(tuple(cached_images), tuple(WANTED[number * SIZE : (number + 1) * SIZE]))
    assert type(dataset.__getitems__([0])[0] if target is None else dataset[0][0]) is torch.Tensor


@pytest.mark.parametrize("kind", [DataLoader, OMEArrowDataLoader])
def test_datasets_of_datasets_collate(path, kind):
    dataset = OMEArrowDataset(path)
    both = ConcatDataset([Subset(dataset, range(2)), Subset(Subset(dataset, range(1, COUNT)), range(1, 4))])
    assert same_values(tuple(next(iter(kind(both, 5, num_workers=0)))), tuple(WANTED[:5]))
    pair = next(iter(kind(StackDataset(dataset, Subset(dataset, range(COUNT))), 2, num_workers=0)))
    assert all(same_values(tuple(batch), tuple(WANTED[:2])) for batch in pair)
    nested = Subset(Subset(dataset, range(1, COUNT)), range(1, 4))
    assert same_values(tuple(next(iter(kind(nested, 3, num_workers=0)))), tuple(WANTED[2:5]))


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
@pytest.mark.parametrize("column", ["flat", "nested", "structs", "texts", "structs of lists", "maps"])
def test_a_target_is_the_users_own(stored, kind, column):
    columns = {
        "flat": [[float(index), 1.0] for index in range(4)],
        "nested": BOXES[:4],
        "structs": [{"a": [index], "b": {"c": index}} for index in range(4)],
        "texts": [["a", str(index)] for index in range(4)],
        "structs of lists": [[{"a": [index]}] for index in range(4)],
        "maps": pa.array([[("a", [index])] for index in range(4)], pa.map_(pa.string(), pa.list_(pa.int64()))),
    }
    path = stored("arrow", IMAGES[:4], columns=columns)
    dataset = kind(path, target=column)
    before = [repr(dataset[index][1]) for index in range(4)]
    for _ in range(2):
        for sample in (*(dataset[index] for index in range(4)), *dataset.__getitems__([0, 0, 3])):
            spoil(sample[1])
        first, second = (target for _, target in dataset.__getitems__([1, 1]))
        spoil(first)
        assert repr(second) == before[1]
        assert [repr(dataset[index][1]) for index in range(4)] == before


def spoil(target):
    """Change all mutable data of a value."""
    if isinstance(target, np.ndarray) and not target.dtype.hasobject:
        target[...] = np.zeros_like(target)
    elif isinstance(target, np.ndarray | list | tuple):
        for part in target:
            spoil(part)
        if isinstance(target, list):
            target.append("more")
    elif isinstance(target, dict):
        for part in target.values():
            spoil(part)
        target["more"] = 1


def doubled(samples):
    return [torch.from_numpy(boxes).mul_(2) for _, boxes in samples]


class Flipped(Subset):
    """Transform that changes a target in place."""

    __getitems__ = None

    def __getitem__(self, index):
        image, boxes = self.dataset[index]
        boxes[0] = -boxes[0]
        return image, boxes


@pytest.mark.parametrize("kind", [DataLoader, OMEArrowDataLoader])
def test_targets_are_right_in_every_epoch(path, kind):
    dataset, all_boxes = OMEArrowDataset(path, target="boxes"), np.array(BOXES)
    loader = kind(dataset, SIZE, collate_fn=doubled, num_workers=0)
    flipped = kind(Flipped(dataset, range(COUNT)), SIZE, num_workers=0)
    for _ in range(3):
        assert np.array_equal(np.concatenate([np.stack(batch) for batch in loader]), all_boxes * 2)
        epoch_boxes = np.concatenate([boxes.numpy() for _, boxes in flipped])
        assert np.array_equal(epoch_boxes, np.stack([-all_boxes[:, 0], all_boxes[:, 1]], axis=1))
