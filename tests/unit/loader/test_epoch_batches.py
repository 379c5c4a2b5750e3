"""Requests for the pages of later batches: their time and range; orders and states do not change."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from torch.utils.data import BatchSampler, SequentialSampler, Subset

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, write_images
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.kernels.stacks import PageThread
from omearrow_ds.loader import epoch
from omearrow_ds.loader.epoch import RemainingBatches
from omearrow_ds.loader.worker_processes import PickledCall
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.page_requests import covers, set_reads, watch_file_requests, watch_requests

COUNT, SIZE, SHAPE = 40, 4, (1, 1, 1, 80, 80)


@pytest.fixture
def requested(monkeypatch):
    return watch_requests(monkeypatch)


@pytest.fixture
def reads(monkeypatch):
    return set_reads(monkeypatch)


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes images, with the image number as the first pixel, in a layout."""

    def path_of(layout):
        needs(layout.removesuffix(".parts"))
        images = np.zeros((COUNT, *SHAPE), "uint16")
        images[:, 0, 0, 0, 0, 0] = np.arange(COUNT)
        path = tmp_path / f"images.{layout}"
        if layout.endswith(".parts"):
            write_images(list(images), tmp_path / "images.arrow")
            convert(tmp_path / "images.arrow", path, "arrow", part_bytes=2**18)
        else:
            write_images(list(images), path, layout)
        return path

    return path_of


def numbers_of(batch):
    return [round(number * 65535) for number in batch[:, 0, 0, 0].tolist()]


def stacks_of(dataset):
    return dataset._collection.rows.stacks


@pytest.mark.parametrize("used_ns", [epoch._MAPPING_NS + 1, epoch._MAPPING_NS // 2])
def test_requested_pages_are_mapped_only_while_the_program_uses_a_batch(stored, requested, reads, monkeypatch, used_ns):
    mapped, clock = [], iter(range(10**9, 10**15, used_ns))
    monkeypatch.setattr(epoch, "monotonic_ns", lambda: next(clock))
    monkeypatch.setattr(PageThread, "map_requested", lambda _: mapped.append(len(requested)))
    loader = OMEArrowDataLoader(OMEArrowDataset(stored("arrow"), preload=False), SIZE, num_workers=0)
    for number, _ in enumerate(loader):
        reads.ru_majflt += number < 4  # Then reads no longer wait.
        reads.time_ns += 10**6
    assert (len(mapped) > 3) == bool(mapped) == (used_ns > epoch._MAPPING_NS)


@pytest.mark.parametrize("layout", ["arrow", "parquet", "lance", "vortex", "arrow.parts"])
def test_the_batch_after_the_next_is_requested_while_reads_wait(stored, layout, requested, reads):
    dataset = OMEArrowDataset(stored(layout), preload=False)
    loader = OMEArrowDataLoader(dataset, SIZE, num_workers=0, shuffle=True, generator=torch.Generator().manual_seed(3))
    order = [numbers_of(batch) for batch in loader]
    if layout.endswith(".parts"):
        loader.set_epoch(0)
    else:
        loader.generator.manual_seed(3)
    batches = iter(loader)
    next(batches)
    for number in range(1, len(order)):
        reads.ru_majflt += 1
        reads.time_ns += 10**6
        requested.clear()
        assert numbers_of(next(batches)) == order[number]
        later = order[number + 2] if number + 2 < len(order) else []
        addresses = stacks_of(dataset).located(np.array(later or [0])).addresses.tolist()
        if number > 1 and later:
            assert all(covers(requested, address) for address in addresses)
    assert next(batches, None) is None


@pytest.mark.parametrize("inner", [False, True], ids=["dataset", "subset"])
def test_rows_of_later_crops_are_requested_while_reads_wait(stored, requested, reads, inner):
    dataset = OMEArrowDataset(stored("arrow"), preload=False, crop="grid", crop_size=(40, 80))
    samples = Subset(dataset, range(1, len(dataset))) if inner else dataset
    batches = iter(OMEArrowDataLoader(samples, SIZE, num_workers=0))
    next(batches)
    for _ in range(2):
        reads.ru_majflt += 1
        reads.time_ns += 10**6
        requested.clear()
        next(batches)
    first = 4 * SIZE + inner  # The fifth batch is requested after the third was made.
    row_bytes = SHAPE[-1] * 2
    start = int(stacks_of(dataset).addresses[first // 2]) + first % 2 * 40 * row_bytes
    assert covers(requested, start)
    assert covers(requested, start + 40 * row_bytes - 1)


def test_warm_batches_are_drawn_when_they_are_needed(stored, reads):
    loader = OMEArrowDataLoader(OMEArrowDataset(stored("arrow"), preload=False), SIZE, num_workers=0)
    batches = iter(loader)
    for _ in range(3):
        reads.time_ns += 10**6
        next(batches)
        assert not batches.progress.rest._drawn


def test_samplers_of_the_user_are_not_asked_early(stored, reads):
    drawn = []

    class Watched(SequentialSampler):
        def __iter__(self):
            for index in super().__iter__():
                drawn.append(index)
                yield index

    dataset = OMEArrowDataset(stored("arrow"), preload=False)
    batches = iter(OMEArrowDataLoader(dataset, SIZE, num_workers=0, sampler=Watched(dataset)))
    for number in range(5):
        reads.ru_majflt += 1
        reads.time_ns += 10**6
        next(batches)
        assert len(drawn) == (number + 1) * SIZE


def test_a_state_while_reads_wait_continues_with_the_next_batch(stored, requested, reads):
    dataset = OMEArrowDataset(stored("arrow"), preload=False)
    torch.manual_seed(5)
    whole = [numbers_of(batch) for batch in OMEArrowDataLoader(dataset, SIZE, num_workers=0, shuffle=True)]
    torch.manual_seed(5)
    loader = OMEArrowDataLoader(dataset, SIZE, num_workers=0, shuffle=True)
    batches = iter(loader)
    for _ in range(4):
        reads.ru_majflt += 1
        next(batches)
    other = OMEArrowDataLoader(dataset, SIZE, num_workers=0, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert [numbers_of(batch) for batch in other] == whole[4:]
    assert [numbers_of(batch) for batch in batches] == whole[4:]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_workers_request_announced_batches_only_while_reads_wait(stored, requested, reads, monkeypatch, is_waiting):
    dataset = OMEArrowDataset(stored("arrow"), preload=False)
    monkeypatch.setattr(epoch, "get_worker_info", lambda: SimpleNamespace(dataset=dataset))
    announced = PickledCall(epoch.receive_indices, [1, 2], None, [7, 8])
    assert pickle.loads(pickle.dumps(announced)) == [1, 2]
    for _ in range(2):
        dataset.__getitems__([0, 1])
        reads.ru_majflt += is_waiting
        reads.time_ns += 10**6
    requested.clear()
    assert pickle.loads(pickle.dumps(announced)) == [1, 2]
    addresses = stacks_of(dataset).addresses[[7, 8]].tolist()
    assert all(covers(requested, address) for address in addresses) == is_waiting


def test_errors_of_later_batches_are_raised_when_these_are_made(stored, requested, reads):
    dataset = OMEArrowDataset(stored("arrow"), preload=False)
    samples = Subset(dataset, [*range(4 * SIZE), COUNT])  # The last index does not exist.
    batches = iter(OMEArrowDataLoader(samples, SIZE, num_workers=0))
    for _ in range(4):
        reads.ru_majflt += 1
        reads.time_ns += 10**6
        next(batches)
    with pytest.raises(IndexError):
        next(batches)


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_rest_yields_each_batch_once_in_order_when_later_ones_are_peeked(distance):
    batches = list(enumerate(BatchSampler(range(20), 2, drop_last=False)))
    rest = RemainingBatches(iter(batches))
    yielded = []
    for number, batch in enumerate(rest):
        yielded.append(batch)
        later = number + distance
        assert rest.peek(distance) == (batches[later][1] if later < len(batches) else None)
        if number == 3:
            rest.put_back(yielded[2:])
            assert [next(rest), next(rest)] == batches[2:4]
        if number == 6:
            rest.draw()
    assert yielded == batches


@pytest.fixture
def plates(stored, tmp_path):
    """Return a function that returns path, options and files per image of a layout."""

    def of(layout):
        if layout != "plate":
            path = stored(layout)
            files = sorted(path.glob("*.tif*")) if layout == "tiff" else sorted(path.glob("*.zarr/0"))
            return path, {}, [[file] if file.is_file() else list(file.iterdir()) for file in files]
        path = tmp_path / "plate"
        path.mkdir()
        files = [[path / f"f{number:02}_{channel}.tif" for channel in "AB"] for number in range(COUNT)]
        for number, of_image in enumerate(files):
            for file in of_image:
                tifffile.imwrite(file, np.full(SHAPE[-2:], number, "uint16"))
        return path, {"pattern": "f{field}_{channel}.tif"}, files

    return of


@pytest.mark.parametrize("layout", ["tiff", "ome_zarr", "plate"])
def test_files_of_later_batches_are_requested_only_while_reads_wait(plates, layout, reads, monkeypatch):
    path, options, files = plates(layout)
    dataset = OMEArrowDataset(path, preload=False, **options)
    loader = OMEArrowDataLoader(dataset, SIZE, num_workers=0)
    for _ in loader:  # After this epoch the chunk names of OME-Zarr are known.
        reads.time_ns += 10**6
    requested = watch_file_requests(monkeypatch)
    batches = iter(loader)
    for _ in range(3):
        reads.time_ns += 10**6
        next(batches)
    assert requested == []
    for number in range(3, 6):
        reads.ru_inblock += 1
        reads.time_ns += 10**6
        requested.clear()
        assert numbers_of(next(batches)) == list(range(number * SIZE, (number + 1) * SIZE))
        later = [str(file) for of_image in files[(number + 2) * SIZE : (number + 3) * SIZE] for file in of_image]
        now = [str(file) for of_image in files[number * SIZE : (number + 1) * SIZE] for file in of_image]
        assert sorted(requested) == sorted([*(later if number > 3 else []), *now])


def test_missing_files_of_later_batches_are_reported_when_these_are_made(stored, reads):
    path = stored("tiff")
    batches = iter(OMEArrowDataLoader(OMEArrowDataset(path, preload=False), SIZE, num_workers=0))
    next(batches)
    sorted(path.glob("*.tif*"))[4 * SIZE].unlink()
    for _ in range(3):
        reads.ru_inblock += 1
        reads.time_ns += 10**6
        next(batches)
    with raises(OMEArrowDSError, path=path, remedy=False):
        next(batches)
