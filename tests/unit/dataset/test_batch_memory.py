"""Batches from workers: correct, valid while they are referenced, and in memory that is reused."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.dataset.batch import collate
from omearrow_ds.dataset.shared_memory import BatchBufferPool, _allocate_private, _allocate_shared, batch_array
from tests.support.strategies import image_of

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="batches are handed over by torch on this system"),
]
LARGE = (1, 1, 1, 64, 130)


@pytest.fixture
def images(stored):
    return stored("arrow", [image_of(LARGE, "uint16", number) for number in range(40)], columns={"n": [*range(40)]})


def all_right(dataset, batches, size=2):
    for number, batch in enumerate(batches):
        expected = [dataset[index] for index in range(number * size, number * size + len(batch))]
        assert torch.equal(batch, torch.stack(expected))


@pytest.mark.parametrize(("workers", "transform"), [(1, torch.neg), (2, None)])
def test_batches_that_are_kept_stay_as_they_are(images, workers, transform):
    dataset = OMEArrowDataset(images, transform=transform)
    loader = OMEArrowDataLoader(dataset, 2, num_workers=workers, timeout=60)
    batches = [*loader, *loader]
    all_right(dataset, batches[:20])
    all_right(dataset, batches[20:])
    row = iter(loader)
    rows = [next(row)[1, 0, 5] for _ in range(20)]  # Each keeps only a row of its batch alive.
    del row
    for number, _ in enumerate(loader):
        if number % 10 == 0:
            gc.collect()
    assert all(torch.equal(part, dataset[2 * number + 1][0, 5]) for number, part in enumerate(rows))


def test_a_batch_is_the_users_own(images):
    dataset = OMEArrowDataset(images)
    loader = OMEArrowDataLoader(dataset, 2, num_workers=1, timeout=60)
    for _ in range(3):
        for number, batch in enumerate(loader):
            all_right(dataset, [batch]) if number == 0 else None
            array = batch.numpy()
            array[...] = -1
            del batch
            assert (array == -1).all()


def test_memory_is_used_again(images):
    dataset = OMEArrowDataset(images)
    loader = OMEArrowDataLoader(dataset, 2, num_workers=1, timeout=60)
    batches = iter(loader)
    next(batches)
    worker = psutil.Process(batches._workers[0].pid)
    for _ in range(3):
        for batch in loader:
            del batch
    blocks = [descriptor for descriptor in os.listdir(f"/proc/{worker.pid}/fd") if is_block(worker.pid, descriptor)]  # noqa: PTH208
    assert 1 <= len(blocks) <= 6


def is_block(pid, descriptor):
    try:
        return "omearrow_ds-batch" in os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return False


def whole(samples):
    images, numbers = zip(*samples, strict=True)
    return {
        "images": torch.stack(images),
        "pair": (torch.tensor(numbers), ["a"]),
        "half": torch.stack(images)[:, :, :9],
    }


def test_what_a_collate_function_makes_is_handed_over_too(images):
    dataset = OMEArrowDataset(images, target="n")
    for number, batch in enumerate(OMEArrowDataLoader(dataset, 2, num_workers=1, collate_fn=whole, timeout=60)):
        expected = torch.stack([dataset[2 * number][0], dataset[2 * number + 1][0]])
        assert torch.equal(batch["images"], expected)
        assert torch.equal(batch["half"], expected[:, :, :9])
        assert batch["pair"][0].tolist() == [2 * number, 2 * number + 1]
        maps = Path("/proc/self/maps").read_text()
        assert "omearrow_ds-batch" in maps
        assert "/torch_" not in maps  # torch's own allocations in /dev/shm.


def test_empty_tensors_are_stacked_in_a_worker(monkeypatch):
    """A batch without boxes, for example."""
    monkeypatch.setattr("omearrow_ds.dataset.batch.get_worker_info", object)  # As in a worker.
    for shape, dtype in (((0,), torch.float64), ((0, 4), torch.int16), ((3, 0), torch.bool)):
        stacked = collate([(torch.ones(2), torch.empty(shape, dtype=dtype))] * 2)[1]
        assert (stacked.shape, stacked.dtype) == ((2, *shape), dtype)


FORKING = """
import os, sys, torch
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.dataset.batch import collate

dataset = OMEArrowDataset(sys.argv[1])
batches = iter(OMEArrowDataLoader(dataset, 2, num_workers=1, timeout=60))
first = next(batches)
release, released = os.pipe()
child = os.fork()
if child == 0:
    os.read(release, 1)
    os._exit(0 if torch.equal(first, torch.stack([dataset[0], dataset[1]])) else 1)
del first
for _ in batches:
    pass
os.write(released, b".")
print("kept" if os.waitpid(child, 0)[1] == 0 else "changed", flush=True)
"""
COMING_THROUGH = """
import itertools, warnings
from omearrow_ds.dataset import shared_memory

warnings.simplefilter("error")
shared_memory.enable_shared_memory_transfer()
every = []
dtypes = [torch.uint8, torch.uint16, torch.float32, torch.bfloat16, torch.bool, torch.complex64]
for dtype, shape in itertools.product(dtypes, [(), (0, 3), (5,), (20, 30, 40)]):
    tensor = (torch.arange(24_000) % 2)[: torch.Size(shape).numel()].view(shape).to(dtype)
    tensor = tensor.transpose(0, -1) if tensor.ndim > 1 else tensor
    every += [tensor, tensor.conj(), torch._neg_view(tensor)] if dtype.is_complex else [tensor]
    every += [tensor.conj().imag] if dtype.is_complex else []
for tensor in every:
    rebuild, arguments = shared_memory._reduce_tensor(tensor)
    received = rebuild(*arguments)
    assert received.resolve_conj().resolve_neg().tolist() == tensor.tolist(), (tensor.dtype, tensor.shape)
    assert received.dtype == tensor.dtype
print("all equal")
"""


def test_a_forked_child_keeps_what_it_inherited_and_any_tensor_comes_through(programs, images):
    """A separate process, as Lance warns of every fork once imported."""
    done = programs.run(FORKING + COMING_THROUGH, images, has_workers=True)
    assert done.stdout == "kept\nall equal\n", done.stderr


KEPT = [
    lambda array: None,
    lambda array: array,
    lambda array: array.view(np.int8)[None].reshape(-1, 1).view(np.uint8),
    lambda array: array[: len(array) // 2 + 1 : 2],
    lambda array: torch.from_numpy(array)[None],
    lambda array: torch.from_numpy(array.view(np.int8)).view(torch.uint8).numpy()[:9],
    lambda array: np.asarray(memoryview(array)[1:]),
]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from(KEPT)), min_size=1, max_size=30),
    st.sampled_from([_allocate_private, _allocate_shared]),
)
def test_no_two_arrays_in_use_share_memory(requests, allocate):
    pool = BatchBufferPool(allocate)
    retained = []
    for number, (size, keep) in enumerate(requests):
        array = pool.take(size)
        array[:] = number % 251
        assert len(array) == size
        retained.append((number, keep(array)))
        if retained[-1][1] is None:
            retained.pop()
        del array
        assert all((item == value % 251).all() for value, item in retained)


def test_buffer_is_free_only_after_each_receiver_has_released_it():
    buffer = _allocate_shared(100)
    array = buffer.take(100)
    first, second = buffer.add_transfer(), buffer.add_transfer()
    del array
    assert not buffer.is_free
    buffer._release_flags[first] = 1
    assert not buffer.is_free
    buffer._release_flags[second] = 1
    assert buffer.is_free
    buffer.take(50)
    assert buffer.is_free
    assert buffer.add_transfer() == 0
    assert not buffer.is_free


def test_outside_a_worker_a_batch_is_plain_memory():
    assert batch_array((3, 4), np.dtype(np.float32)).flags.owndata
