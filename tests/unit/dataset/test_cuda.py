"""Pixels in device memory: samples equal those of the CPU bit for bit; data that do not fit are rejected."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ImageIndexError,
    MemoryLimitError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    write_images,
)
from omearrow_ds.dataset import cuda
from omearrow_ds.dataset.cuda import DeviceIndices, device_of
from omearrow_ds.storage.formats import _folder
from tests.support.devices import CUDA, DEVICES, examples, stand_in
from tests.support.errors import raises
from tests.support.strategies import DTYPES, SUFFIX, image_of

SHAPE = (1, 2, 2, 9, 11)
COUNT = 5


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return stand_in(monkeypatch, request.param)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Images of one shape in a table and in a folder, numbered, with two wells."""
    folder, paths = tmp_path_factory.mktemp("on-device"), {}
    for dtype in map(str, DTYPES):
        for name in ("arrow", "tiff"):
            paths[name, dtype] = folder / f"{dtype}{SUFFIX[name]}"
            images = [image_of(SHAPE, dtype, number) for number in range(COUNT)]
            columns = {"Metadata_Well": [f"A{number % 2}" for number in range(COUNT)], "number": [*range(COUNT)]}
            write_images(images, paths[name, dtype], name, columns=columns)
    return paths


def same(mine, other):
    assert mine.dtype == other.dtype
    assert mine.cpu().numpy().tobytes() == other.numpy().tobytes()


OPTIONS = st.fixed_dictionaries(
    {
        "axes": st.sampled_from(["CZYX", "ZCYX", "YXCZ", "TCZYX", "ZYXC"]),
        "select": st.sampled_from(
            [None, {"C": [1, 0]}, {"X": slice(None, None, -1), "Z": [0, 0]}, {"C": [0, 1, 1], "Y": slice(1, 8, 1)}]
        ),
        "normalize": st.sampled_from([True, False, {"mean": [3, 5], "std": 7}, {"low": 2, "high": 90}]),
    },
    optional={
        "crop_size": st.sampled_from([(4, 6), (7, 11)]),
        "illumination": st.just([1 + np.arange(99, dtype=np.float32).reshape(9, 11)] * 2),
    },
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_samples_are_those_of_the_cpu(device, stores, data):
    options, store = data.draw(OPTIONS), stores[data.draw(st.sampled_from(sorted(stores)))]
    if options["normalize"] is False:
        options.pop("illumination", None)
    ours, cpu = (OMEArrowDataset(store, preload=preload, **options) for preload in ("cuda", False))
    indices = data.draw(st.lists(st.integers(-COUNT, COUNT - 1), min_size=1, max_size=6))
    for mine, other in zip(ours.__getitems__(indices), cpu.__getitems__(indices), strict=True):
        assert mine.device == device
        same(mine, other)
    same(ours[indices[0]], cpu[indices[0]])


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_crops_are_those_of_the_cpu(device, stores, data):
    store = stores["arrow", str(data.draw(st.sampled_from(DTYPES)))]
    crop = data.draw(st.sampled_from(["center", "grid", "random", "objects"]))
    pad = data.draw(st.sampled_from(["constant", "edge", "reflect"]))
    options = {"crop_size": data.draw(st.tuples(st.integers(1, 13), st.integers(1, 13))), "axes": "CZYX", "pad": pad}
    options["normalize"] = data.draw(st.sampled_from([True, False, {"mean": [3, 5], "std": 7}]))
    if crop == "objects":
        centers = data.draw(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10)), min_size=1, max_size=5))
        y, x = zip(*centers, strict=True)
        table = {"number": [n % COUNT for n in range(len(y))], "Location_Center_Y": y, "Location_Center_X": x}
        import pandas as pd

        options |= {"objects": pd.DataFrame(table), "on": "number"}
    else:
        options["crop"] = crop
    ours, cpu = (OMEArrowDataset(store, preload=preload, **options) for preload in ("cuda", True))
    assert len(ours) == len(cpu)
    for indices in ([*range(len(cpu))], [len(cpu) - 1, 0]):
        batches = []
        for dataset in (ours, cpu):
            torch.manual_seed(3)
            batches.append(dataset.__getitems__(indices))
        for mine, other in zip(*batches, strict=True):
            same(mine, other)


def test_groups_of_statistics_scale_their_images(device, stores, tmp_path):
    from omearrow_ds import stats

    measured = stats(stores["arrow", "uint16"], by="Metadata_Well")
    ours, cpu = (
        OMEArrowDataset(stores["arrow", "uint16"], preload=preload, axes="CZYX", normalize=measured)
        for preload in ("cuda", True)
    )
    assert not torch.equal(cpu[0], cpu[1])
    for mine, other in zip(ours, cpu, strict=True):
        same(mine, other)


def batches_of(loader):
    return [[part.cpu() if isinstance(part, torch.Tensor) else part for part in parts_of(batch)] for batch in loader]


def parts_of(batch):
    return batch if isinstance(batch, list | tuple) else [batch]


def equal(first, second):
    assert len(first) == len(second)
    for mine, other in zip(first, second, strict=True):
        for part, part_of_other in zip(mine, other, strict=True):
            assert torch.equal(part, part_of_other) if isinstance(part, torch.Tensor) else part == part_of_other


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("options", [{}, {"target": "number", "return_ids": True}], ids=["alone", "beside"])
@pytest.mark.parametrize("loading", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {}], ids=str)
def test_order_and_resume_are_those_of_the_cpu(device, stores, view, options, loading):
    epochs = []
    for preload in ("cuda", True):
        dataset = OMEArrowDataset(stores["arrow", "uint16"], preload=preload, axes="CZYX", **options)
        dataset = dataset.split((0.8, 0.2), seed=1)[0] if view else dataset
        loaders = [OMEArrowDataLoader(dataset, 2, generator=torch.Generator().manual_seed(4), **loading) for _ in "ab"]
        first, second = loaders
        epoch = iter(first)
        begun = batches_of([next(epoch)])
        second.load_state_dict(first.state_dict())
        rest, later, again = batches_of(epoch), batches_of(second), batches_of(first)
        epochs.append([*begun, *rest, *later, *again])
        assert (preload == "cuda") == (dataset.device is not None)
    equal(*epochs)


def test_indices_of_an_epoch_are_sent_together(device, stores, monkeypatch):
    dataset = OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX")
    loader, requested = OMEArrowDataLoader(dataset, 2, shuffle=True), []
    get = OMEArrowDataset.__getitems__

    def spy(self, indices):
        requested.append(indices)
        return get(self, indices)

    monkeypatch.setattr(OMEArrowDataset, "__getitems__", spy)
    assert len(list(loader)) == 3
    assert all(isinstance(item, DeviceIndices) for item in requested)
    assert sorted(index for item in requested for index in item) == [*range(COUNT)]
    assert all(item.on_device.tolist() == list(item) and item.on_device.device == device for item in requested)


def test_indices_that_there_are_not_are_refused(device, stores):
    dataset = OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX")
    for index in (COUNT, -COUNT - 1):
        with raises(ImageIndexError, path=stores["arrow", "uint16"], mentions=(index, 5), remedy=False):
            dataset[index]
        with raises(ImageIndexError, path=stores["arrow", "uint16"], mentions=(index, 5), remedy=False):
            dataset.__getitems__([0, index])
    sampler = torch.utils.data.SequentialSampler(range(COUNT + 1))
    with raises(ImageIndexError, path=stores["arrow", "uint16"], mentions=5, remedy=False):
        list(OMEArrowDataLoader(dataset, 4, sampler=sampler))
    with pytest.raises(ImageIndexError):
        list(OMEArrowDataLoader(dataset, 2, sampler=[0, 9]))


def test_samples_are_the_caller_s_own(device, stores):
    dataset = OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX")
    before = dataset[1].clone()
    dataset[1].zero_()
    dataset.__getitems__([1])[0].zero_()
    next(iter(OMEArrowDataLoader(dataset, 2))).zero_()
    assert torch.equal(dataset[1], before)


def test_a_transform_is_given_samples_there(device, stores):
    devices = []

    def half(image):
        devices.append(image.device)
        return image / 2

    dataset = OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX", transform=half)
    plain = dataset.with_transform(None)
    assert torch.equal(next(iter(OMEArrowDataLoader(dataset, 3)))[2], plain[2] / 2)
    assert torch.equal(dataset[2], plain[2] / 2)
    assert set(devices) == {device}


def test_workers_and_other_processes_are_refused(device, stores):
    dataset = OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX")
    loader = OMEArrowDataLoader(dataset, 2)
    assert (loader.num_workers, loader.pin_memory) == (0, False)
    assert f"the pixels are on {device}" in loader.settings["num_workers"].why

    class Around(torch.utils.data.Dataset):
        def __init__(self):
            self.dataset = dataset

        def __len__(self):
            return 1

    subset, both = torch.utils.data.Subset(dataset, [0]), torch.utils.data.ConcatDataset([dataset, dataset])
    for on_device in (dataset, subset, both, Around()):
        assert OMEArrowDataLoader(on_device, 2).num_workers == 0
        with raises(ArgumentError, option="num_workers", mentions=device):
            OMEArrowDataLoader(on_device, 2, num_workers=2)
    with raises(ArgumentError, path=stores["arrow", "uint16"], mentions=(device, "num_workers")):
        pickle.dumps(dataset)


def test_what_cannot_lie_on_a_device_is_refused(device, stores, tmp_path):
    path = tmp_path / "ragged.arrow"
    write_images([image_of((1, 1, 1, 4, 5 + number), "uint16", number) for number in range(2)], path)
    with raises(ArgumentError, option="preload", path=path, mentions=device):
        OMEArrowDataset(path, preload="cuda")
    with raises(ArgumentError, option="preload", mentions="OMEArrowDatasetNumpy"):
        OMEArrowDatasetNumpy(path, preload="cuda")
    with raises(ArgumentError, option="preload", mentions="masks"):
        OMEArrowDataset(path, preload="cuda", masks=path)
    boxes = {"number": [0], "y0": [0], "y1": [2], "x0": [0], "x1": [3]}
    options = {"objects": boxes, "on": "number", "box": ("y0", "y1", "x0", "x1"), "pad_to": (4, 4), "axes": "CZYX"}
    with raises(ArgumentError, option="preload", path=stores["arrow", "uint16"]):
        OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", **options)


def test_more_than_is_free_is_refused_before_a_pixel_is_read(device, stores, monkeypatch):
    def refuse(*_):
        raise AssertionError("a pixel was read")

    store = stores["tiff", "uint16"]
    needed = COUNT * int(np.prod(SHAPE)) * 2
    monkeypatch.setattr(_folder.FolderImages, "read", refuse)

    with raises(MemoryLimitError, option="max_bytes", path=store, mentions=(f"{needed:,}", f"{needed - 1:,}")):
        OMEArrowDataset(store, preload="cuda", axes="CZYX", max_bytes=needed - 1)
    for free, max_bytes in ((needed, None), (needed - 2, needed)):
        monkeypatch.setattr(cuda, "free_bytes", lambda device, free=free: free)
        allowed = free // 2 if max_bytes is None else free
        with raises(MemoryLimitError, path=store, mentions=(f"{needed:,}", f"{allowed:,}", "max_bytes")):
            OMEArrowDataset(store, preload="cuda", axes="CZYX", max_bytes=max_bytes)


def test_pixels_come_from_the_cache_folder_too(device, stores, tmp_path):
    datasets = [
        OMEArrowDataset(stores["arrow", "uint16"], preload="cuda", axes="CZYX", cache_dir=tmp_path) for _ in range(2)
    ]
    assert len(list(tmp_path.glob("*.pixels"))) == 1
    same(datasets[0][3], OMEArrowDataset(stores["arrow", "uint16"], axes="CZYX")[3])
    assert torch.equal(datasets[0][3], datasets[1][3])


def test_a_dataset_tells_and_shows_what_lies_there(device, stores):
    dataset, cpu = (OMEArrowDataset(stores["arrow", "uint16"], preload=p, axes="CZYX") for p in ("cuda", True))
    assert (dataset.preloaded, dataset.device, cpu.device) == (True, device, None)
    assert (dataset.shape, dataset.nbytes) == (cpu.shape, cpu.nbytes)
    assert np.array_equal(dataset._collection.image(2), cpu._collection.image(2))
    pytest.importorskip("imagecodecs")  # It encodes the images.
    assert dataset._repr_html_()


def test_pieces_are_sent_whole(device, stores, monkeypatch):
    monkeypatch.setattr(cuda, "_PIECE_BYTES", 2 * int(np.prod(SHAPE)) * 2)
    dataset, cpu = (OMEArrowDataset(stores["tiff", "uint16"], preload=p, axes="CZYX") for p in ("cuda", True))
    for mine, other in zip(dataset, cpu, strict=True):
        same(mine, other)


@pytest.mark.parametrize("preload", ["cuda:x", "cudas", torch.device("meta")], ids=str)
def test_what_is_no_device_is_refused(preload):
    with raises(ArgumentError, option="preload", remedy=False):
        device_of(preload)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_is_said_so(stores):
    for preload in ("cuda", "cuda:1", torch.device("cuda")):
        with raises(ArgumentError, option="preload", mentions="CUDA"):
            OMEArrowDataset(stores["arrow", "uint16"], preload=preload)


@CUDA
def test_a_device_beyond_those_there_are_is_refused():
    with raises(ArgumentError, option="preload", mentions="CUDA"):
        device_of(f"cuda:{torch.cuda.device_count()}")


@CUDA
def test_it_takes_the_memory_that_it_says(tmp_path):
    path, count = tmp_path / "images.arrow", 64
    write_images([image_of((1, 1, 1, 512, 512), "uint16", number) for number in range(count)], path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dataset = OMEArrowDataset(path, preload="cuda")
    torch.cuda.synchronize()
    assert dataset.nbytes == count * 512 * 512 * 2
    allocated, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert dataset.nbytes <= allocated <= peak <= dataset.nbytes + 2**22


def test_free_memory_is_what_torch_can_have(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert cuda.free_bytes(torch.device("cuda")) == 1200
