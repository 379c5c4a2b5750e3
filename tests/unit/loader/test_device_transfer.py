"""Batches transferred as raw pixels in pinned memory: on the device they equal the samples of the CPU."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, write_images
from omearrow_ds.dataset import shared_memory
from omearrow_ds.dataset.shared_memory import BatchBufferPool, batch_array
from tests.support.devices import CUDA, DEVICES, examples, stand_in
from tests.support.strategies import image_of
from tests.unit.loader.test_dataloader import clock, moved, on_host  # noqa: F401  # the fixture

SHAPE, COUNT = (1, 3, 1, 9, 12), 7


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "stand-in":  # torch cannot pin memory without a driver.
        monkeypatch.setattr(shared_memory, "_allocate_pinned", shared_memory._allocate_private)
    return stand_in(monkeypatch, request.param)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("transfer"), {}
    for dtype in ("uint8", "uint16", "int8", "int16", "uint32", "float32"):
        paths[dtype] = folder / f"{dtype}.arrow"
        images = [image_of(SHAPE, dtype, number) for number in range(COUNT)]
        write_images(images, paths[dtype], columns={"number": [*range(COUNT)]})
    return paths


def parts_of(batch):
    return batch if isinstance(batch, list | tuple) else [batch]


def delivered(dataset, device, **loading):
    if not torch.cuda.is_available():  # torch warns that it cannot pin memory.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
    loader = OMEArrowDataLoader(dataset, 3, device=device, generator=torch.Generator().manual_seed(2), **loading)
    return loader, [[part.cpu() if isinstance(part, torch.Tensor) else part for part in parts_of(b)] for b in loader]


def equal(mine, other, ulp=0):
    assert len(mine) == len(other)
    for parts, parts_of_other in zip(mine, other, strict=True):
        for part, expected in zip(parts, parts_of_other, strict=True):
            if not isinstance(part, torch.Tensor):
                assert part == expected
                continue
            assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
            assert part.numpy().tobytes() == expected.numpy().tobytes()


CROPS = {
    "whole": {},
    "centre": {"crop_size": (5, 4)},
    "turned": {"axes": "YXC", "select": {"Y": slice(None, None, -1), "C": [2, 0]}},
    "tiles": {"crop_size": (4, 4), "crop": "grid"},
    "random": {"crop_size": (4, 5), "crop": "random"},
    "padded": {"crop_size": (12, 14), "crop": "center", "pad": "constant"},
    "padded channels": {"crop_size": (12, 14), "crop": "center", "pad": "constant", "select": {"C": [2, 2, 0]}},
    "edged": {"crop_size": (12, 14), "crop": "center", "pad": "edge"},
}
SCALED = [True, {"mean": [30, 20, 10], "std": [3, 4, 7]}, {"low": 3, "high": 80}]


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_raw_transfer_gives_the_samples_of_the_cpu(device, stores, data):
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "int8", "int16"]))
    name, normalize = data.draw(st.sampled_from(sorted(CROPS))), data.draw(st.sampled_from(SCALED))
    options = {**CROPS[name], "normalize": normalize}
    if data.draw(st.booleans()):
        options |= {"target": "number", "return_ids": True}
    if data.draw(st.booleans()):
        options["illumination"] = [1 + np.arange(108, dtype=np.float32).reshape(9, 12)] * 3
    dataset = OMEArrowDataset(stores[dtype], preload=data.draw(st.booleans()), **options)
    if data.draw(st.booleans()):
        dataset = Subset(dataset, [4, 1, 1, 0, 6])
    loader, mine = delivered(dataset, device, shuffle=data.draw(st.booleans()), num_workers=0)
    lit = "illumination" in options
    scaled_first = ("crop" in options and lit) or (name.startswith("padded") and (normalize is not True or lit))
    assert loader.settings["transfer"].value == ("normalized" if scaled_first else "raw-pinned")
    equal(mine, delivered(dataset, None, shuffle=isinstance(loader.sampler, torch.utils.data.RandomSampler))[1])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"transform": abs}, "the transform receives normalized samples"),
        ({"normalize": False}, "of the stored dtype"),
        ({"dtype": "uint32"}, "uint32 is not smaller than float32"),
        ({"dtype": "float32"}, "float32 is not smaller"),
    ],
    ids=str,
)
def test_transfer_is_normalized_when_pixels_are_scaled_first(device, stores, options, why):
    store = stores[options.pop("dtype", "uint16")]
    dataset = OMEArrowDataset(store, **options)
    loader, mine = delivered(dataset, device)
    assert (loader.settings["transfer"].value, why in loader.settings["transfer"].why) == ("normalized", True)
    equal(mine, delivered(dataset, None)[1])


def test_pixels_are_normalized_before_transfer_if_other_code_uses_samples(device, stores):
    class Derived(OMEArrowDataset):
        pass

    plain = OMEArrowDataset(stores["uint16"])
    loaders = [
        ("collate_fn", delivered(plain, device, collate_fn=list)[0]),
        ("not an OMEArrowDataset", delivered(Derived(stores["uint16"]), device)[0]),
        ("not an OMEArrowDataset", delivered(ConcatDataset([plain, plain]), device)[0]),
    ]
    for reason, loader in loaders:
        setting = loader.settings["transfer"]
        assert (setting.value, reason in setting.why) == ("normalized", True)


def test_transfer_is_raw_for_objects_and_masks(device, stores):
    table = pd.DataFrame({"number": [0, 6, 2], "Location_Center_Y": [4, 5, 1], "Location_Center_X": [5, 6, 2]})
    options = {"objects": table, "on": "number", "crop_size": (4, 4), "pad": "edge"}
    dataset = OMEArrowDataset(stores["uint16"], **options, masks=stores["uint8"])
    loader, mine = delivered(dataset, device)
    assert loader.settings["transfer"].value == "raw-pinned"
    equal(mine, delivered(dataset, None)[1])
    assert [part.dtype for part in mine[0]] == [torch.float32, torch.uint8]


@pytest.mark.parametrize("pin_memory", [False, True, None])
def test_buffers_are_pinned_unless_the_program_says_otherwise(device, stores, pin_memory):
    if pin_memory and device.type == "cpu":
        pytest.skip("torch locks no pages without a CUDA device")
    options = {} if pin_memory is None else {"pin_memory": pin_memory}
    loader, mine = delivered(OMEArrowDataset(stores["uint16"]), device, **options)
    assert loader.settings["transfer"].value == ("raw-pinned" if pin_memory is None else "raw")
    assert loader.pin_memory is bool(pin_memory)
    equal(mine, delivered(OMEArrowDataset(stores["uint16"]), None)[1])


def test_workers_hand_stored_pixels_over(device, stores):
    options = {"pin_memory": False} if device.type == "cpu" else {}
    dataset = OMEArrowDataset(stores["uint16"], preload=False)
    loader, mine = delivered(dataset, device, num_workers=1, shuffle=True, **options)
    assert loader.settings["transfer"].value == "raw"
    equal(mine, delivered(dataset, None, shuffle=True)[1])
    loader._iterator = None


def test_a_loader_that_has_sent_pixels_is_pickled_and_resumed(device, stores):
    dataset = OMEArrowDataset(stores["uint16"])
    loader, mine = delivered(dataset, device, shuffle=True)
    assert len(list(pickle.loads(pickle.dumps(loader)))) == len(mine)
    first, second = (OMEArrowDataLoader(dataset, 3, shuffle=True, device=device) for _ in range(2))
    epoch = iter(first)
    next(epoch)
    second.load_state_dict(first.state_dict())
    equal([parts_of(batch.cpu()) for batch in epoch], [parts_of(batch.cpu()) for batch in second])


class Stream:
    """Stream that returns an event as recorded."""

    def __init__(self, event=None):
        self.event = event

    def record_event(self, before):
        assert self.event is not None, "the tensor is not in a buffer of the pool"
        return self.event


class Event:
    """An event that the test completes."""

    def __init__(self):
        self.done = False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


def test_a_pinned_buffer_waits_for_its_copy(monkeypatch):
    monkeypatch.setattr(shared_memory, "_allocate_pinned", shared_memory._allocate_private)
    pool, event = BatchBufferPool.pinned(), Event()
    array = batch_array((100_000,), np.dtype(np.uint16), pool)
    address = array.ctypes.data
    pool.record_copy(torch.from_numpy(array), Stream(event))
    del array
    other = batch_array((100_000,), np.dtype(np.uint16), pool)
    assert other.ctypes.data != address
    event.done = True
    assert batch_array((100_000,), np.dtype(np.uint16), pool).ctypes.data == address
    pool.record_copy(torch.zeros(3), Stream())


def test_a_program_far_ahead_waits_for_its_copies(monkeypatch):
    monkeypatch.setattr(shared_memory, "_allocate_pinned", shared_memory._allocate_private)
    pool, events = BatchBufferPool.pinned(), [Event() for _ in range(20)]
    for event in events:
        pool.record_copy(torch.from_numpy(batch_array((50_000,), np.dtype(np.uint16), pool)), Stream(event))
        assert len(pool.buffers) <= shared_memory._MAX_PENDING_COPIES
    assert [event.done for event in events] == [number < 16 for number in range(20)]


def test_pixels_are_scaled_in_the_stream_of_their_copy(clock):  # noqa: F811
    """The streams only record their order."""

    class RawTransfer:
        def sent(self, batch):
            assert clock.current is clock.side
            clock.do(f"event {batch.number}", clock.side)

        def scaled(self, batch):
            clock.do(f"scale {batch.number}", clock.current)
            return batch

    batches = ((number, on_host(clock, number)) for number in range(3))
    for number, (_, batch) in enumerate(moved(batches, torch.device("cuda"), RawTransfer())):
        clock.do(f"step {number}", clock.using)
        assert {f"copy {number}", f"scale {number}"} <= clock.before[f"step {number}"]
        assert f"scale {number + 1}" not in clock.before[f"step {number}"]
        assert f"copy {number}" in clock.before[f"scale {number}"] & clock.before[f"event {number}"]
        assert f"scale {number}" not in clock.before[f"event {number}"]  # The buffer is free after the copy.
        assert batch.users == ["using"]


def test_images_that_are_there_stay_where_they_are():
    image, label = torch.zeros(2, device="meta"), torch.ones(2)
    ((_, (mine, other)),) = moved(iter([(0, (image, label))]), torch.device("meta"), is_on_device=True)
    assert (mine is image, other.device.type) == (True, "meta")


@CUDA
def test_events_are_used_again():
    device = torch.device("cuda")
    event = torch.cuda.current_stream(device).record_event()
    assert torch.cuda.current_stream(device).record_event(event) is event


@CUDA
def test_copies_overlap_with_work(tmp_path):
    """The profiler's timeline shows copies to the device during kernels of the program."""
    path, count = tmp_path / "images.arrow", 64
    write_images([image_of((1, 1, 1, 512, 512), "uint16", number) for number in range(count)], path)
    loader = OMEArrowDataLoader(OMEArrowDataset(path), 16, device="cuda")
    assert loader.settings["transfer"].value == "raw-pinned"
    weight = torch.randn(4096, 4096, device="cuda")

    def epoch():
        for batch in loader:
            for _ in range(8):
                weight @ weight
            batch.sum()
        torch.cuda.synchronize()

    epoch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        epoch()
    spans = {"copy": [], "work": []}
    for event in profile.events():
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        if "memcpy htod" in name and event.time_range.elapsed_us() > 100:  # A batch of 8 MB takes longer.
            assert "pinned" in name
            spans["copy"].append(span)
        elif "gemm" in name or "cutlass" in name or "nvjet" in name:
            spans["work"].append(span)
    assert (len(spans["copy"]), len(spans["work"])) == (4, 32)
    beside = [
        copy for copy in spans["copy"] if any(max(copy[0], work[0]) < min(copy[1], work[1]) for work in spans["work"])
    ]
    assert len(beside) >= 2, spans
