"""Begin and end of epochs, epochs chosen by a framework, and errors that look like an end."""

from __future__ import annotations

import gc
import os
import weakref
from itertools import islice, product

import numpy as np
import pytest
import torch

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, write_images
from tests.support.errors import find_problems, raises, warns
from tests.support.strategies import slow_except

COUNT, BATCH_SIZE = 26, 4
NUM_BATCHES = -(-COUNT // BATCH_SIZE)
FAILING = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images whose pixels and column are the image number, in one file and in parts."""
    folder = tmp_path_factory.mktemp("epochs")
    images = [np.full((1, 4, 4), number, np.uint16) for number in range(COUNT)]
    write_images(images, folder / "one.arrow", axes="CYX", columns={"number": list(range(COUNT))})
    convert(folder / "one.arrow", folder / "many.parts", part_bytes=4 * 4 * 2 * 5)
    return folder


PATHS = ["one.arrow", "many.parts"]
PATHS_AND_WORKERS = pytest.mark.parametrize(
    ("path", "workers"), slow_except([("one.arrow", 2), ("many.parts", 0)], product(PATHS, [0, 2])), indirect=["path"]
)


@pytest.fixture(params=PATHS)
def path(folder, request):
    """Path of one file, or of a folder of parts."""
    return folder / request.param


def open_images(path, **options):
    return OMEArrowDataset(path, preload=False, **{"normalize": False, "target": "number", **options})


def make_loader(path, workers=0, seed=3, transform=None, **options):
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(seed), **options}
    if workers:
        options["timeout"] = 60
    return OMEArrowDataLoader(open_images(path, transform=transform), BATCH_SIZE, num_workers=workers, **options)


def numbers_of(batches):
    return [batch[1].tolist() for batch in batches]


def add_noise(image):
    return image.double() + torch.rand(())


def until_the_end(loader):
    return list(loader)


def with_zip(loader):
    return [batch for _, batch in zip(range(len(loader)), loader, strict=False)]


def with_next(loader):
    batches = iter(loader)
    return [next(batches) for _ in range(len(loader))]


def with_two_batches(loader):
    return list(islice(loader, 2))


LOOPS = [until_the_end, with_zip, with_next, with_two_batches]


@PATHS_AND_WORKERS
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.share(2, "workers", "loop")
def test_iteration_has_another_order_and_other_draws_however_the_last_one_ended(path, loop, workers):
    torch.manual_seed(0)
    loader = make_loader(path, workers, transform=add_noise)
    epochs = [loop(loader) for _ in range(4)]
    noises = [[(images[:, 0, 0, 0] - numbers).tolist() for images, numbers in epoch] for epoch in epochs]
    assert len({str(numbers_of(epoch)) for epoch in epochs}) == 4
    assert len({str(noise) for noise in noises}) == 4


@PATHS_AND_WORKERS
def test_state_is_the_next_epoch_when_the_last_batch_was_delivered(path, workers):
    loader = make_loader(path, workers)
    batches = iter(loader)
    for _ in range(NUM_BATCHES):
        next(batches)
    state = loader.state_dict()
    continued = make_loader(path, seed=99)
    continued.load_state_dict(state)
    following = [numbers_of(loader) for _ in range(2)]
    assert [numbers_of(continued) for _ in range(2)] == following
    assert sorted(number for batch in following[0] for number in batch) == list(range(COUNT))
    assert next(batches, None) is None


@pytest.mark.parametrize("delivered", [0, 2, NUM_BATCHES])
def test_dataset_is_freed_without_garbage_collection_when_its_loader_is_deleted(path, delivered):
    dataset = open_images(path)
    freed = weakref.ref(dataset)
    gc.collect()
    gc.disable()
    try:
        list(islice(OMEArrowDataLoader(dataset, BATCH_SIZE, num_workers=0, shuffle=True), delivered))
        del dataset
        assert freed() is None
    finally:
        gc.enable()


class Endless:
    """A sampler of batches without a length."""

    def __init__(self):
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        shift = self.epochs
        return iter([[(first + shift) % COUNT, first] for first in range(0, COUNT, 2)])


def test_epoch_ends_at_stop_iteration_when_the_batch_sampler_has_no_length(folder):
    loader = OMEArrowDataLoader(open_images(folder / "one.arrow"), num_workers=0, batch_sampler=Endless())
    batches = iter(loader)
    first = numbers_of(islice(batches, COUNT // 2))
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (0, COUNT // 2)
    assert next(batches, None) is None
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    assert len(first) == len(numbers_of(loader)) == COUNT // 2
    assert loader.state_dict()["epoch"] == 2


class TestChosenEpoch:
    """An epoch set after a state was loaded."""

    @pytest.fixture
    def whole(self, path):
        """Orders of three uninterrupted epochs."""
        loader = make_loader(path)
        return [numbers_of(loader) for _ in range(3)]

    @pytest.fixture
    def continued(self, path):
        """Return a function that makes a loader from the state after some batches of the first epoch."""

        def load(delivered):
            loader = make_loader(path)
            list(islice(loader, delivered))
            again = make_loader(path, seed=99)
            again.load_state_dict(loader.state_dict())
            return again

        return load

    @pytest.mark.parametrize("how", ["by the program", "of the sampler", "of the sampler, after iter"])
    def test_loader_discards_the_saved_epoch_when_another_one_is_chosen(self, whole, continued, how):
        loader = continued(2)
        with warns(UserWarning, option="set_epoch", mentions=("epoch 0", 2, NUM_BATCHES)) as caught:
            batches = iter(loader) if "after iter" in how else None  # As Lightning does in its first epoch.
            (loader.sampler if "sampler" in how else loader).set_epoch(1)
            assert numbers_of(batches or loader) == whole[1]
        assert len(caught) == 1
        assert numbers_of(loader) == whole[2]

    @pytest.mark.parametrize("delivered", [0, 2, NUM_BATCHES])
    def test_loader_continues_without_a_warning_when_the_saved_epoch_is_chosen(self, whole, continued, delivered):
        loader = continued(delivered)
        ended = delivered == NUM_BATCHES
        loader.set_epoch(1 if ended else 0)
        assert numbers_of(loader) == (whole[1] if ended else whole[0][delivered:])

    def test_loader_does_not_warn_when_the_saved_epoch_was_not_begun(self, continued):
        loader = continued(0)
        loader.set_epoch(1)
        assert len(numbers_of(loader)) == NUM_BATCHES


def pids(samples):
    return os.getpid(), torch.tensor([number for _, number in samples])


class TestPersistentWorkers:
    """A framework may create an iterator per epoch while it still references the last one."""

    def epochs(self, loader, taken):
        """Return batches of three epochs; each iterator stays referenced until the next exists, as in Lightning."""
        batches = iter(loader)
        for epoch in range(3):
            if epoch:
                batches = iter(loader)
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            yield [next(batches) for _ in range(taken)]

    @pytest.mark.parametrize("path", slow_except(["many.parts"], PATHS), indirect=True)
    @pytest.mark.parametrize("taken", [2, NUM_BATCHES])
    def test_workers_stay_when_iterators_are_made_again(self, path, taken):
        loader = make_loader(path, 2, collate_fn=pids)
        epochs = list(self.epochs(loader, taken))
        assert len({pid for epoch in epochs for pid, _ in epoch}) == 2
        assert len({str(numbers_of(epoch)) for epoch in epochs}) == 3

    @pytest.mark.parametrize("path", slow_except(["many.parts"], PATHS), indirect=True)
    def test_epoch_continues_in_other_workers_when_another_one_took_them(self, path):
        loader, alone = make_loader(path, 2, collate_fn=pids), make_loader(path)
        first = iter(loader)
        begun = [next(first), next(first)]
        second = list(loader)
        rest = list(first)
        assert [numbers_of(begun + rest), numbers_of(second)] == [numbers_of(alone) for _ in range(2)]
        assert len({pid for pid, _ in begun + second}) == 2


def ragged(samples):
    return torch.nested.nested_tensor([image.float().flatten()[: 1 + number % 5] for image, number in samples])


def jagged(samples):
    images = [image.float().flatten()[: 1 + number % 5] for image, number in samples]
    return torch.nested.nested_tensor(images, layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [ragged, pytest.param(jagged, marks=pytest.mark.slow)])  # The import takes 10 s.
def test_workers_return_nested_tensors(folder, collate_fn, workers):
    loader = make_loader(folder / "one.arrow", workers, shuffle=False, collate_fn=collate_fn)
    batches = list(loader)
    assert all(batch.is_nested for batch in batches)
    rows = [row.tolist() for batch in batches for row in batch.unbind()]
    assert rows == [[number] * (1 + number % 5) for number in range(COUNT)]


def exhausted_transform(image):
    return next(iter(())) if image.flatten()[0] == FAILING else image


def exhausted_target(row):
    return next(iter(())) if row["number"] == FAILING else row["number"]


def exhausted_collate(samples):
    return next(iter(())) if FAILING in (number for _, number in samples) else samples


class TestStopIteration:
    """StopIteration in a sample would end the epoch early and lose samples."""

    @PATHS_AND_WORKERS
    @pytest.mark.parametrize("batch_size", [BATCH_SIZE, None])
    @pytest.mark.parametrize("option", ["transform", "target"])
    @pytest.mark.share(2, "workers", "batch_size", "option")
    def test_loader_names_the_sample_when_a_function_raises_it(self, path, option, batch_size, workers):
        function = {"transform": exhausted_transform, "target": exhausted_target}[option]
        dataset = open_images(path, **{option: function})
        with pytest.raises(RuntimeError) as caught:
            list(OMEArrowDataLoader(dataset, batch_size, num_workers=workers))
        if workers:  # Torch returns the message of a worker's error together with its cause.
            error = str(caught.value)
            assert "\nStopIteration\n" in error.partition("The above exception was the direct cause")[0]
            error = error.rpartition("RuntimeError: ")[2]
        else:
            assert isinstance(caught.value.__cause__, StopIteration)
            error = str(caught.value)
        assert find_problems(error, path=path, mentions=(option, FAILING, "StopIteration")) == []

    @PATHS_AND_WORKERS
    def test_loader_names_the_samples_when_collate_fn_raises_it(self, path, workers):
        loader = OMEArrowDataLoader(
            open_images(path), BATCH_SIZE, num_workers=workers, collate_fn=exhausted_collate, shuffle=False
        )
        delivered = []
        with raises(RuntimeError, option="collate_fn", mentions=(FAILING, "StopIteration")) as caught:
            delivered.extend(loader)
        assert isinstance(caught.value.__cause__, StopIteration)
        assert len(delivered) == FAILING // BATCH_SIZE
        assert loader.state_dict()["epoch"] == 0
