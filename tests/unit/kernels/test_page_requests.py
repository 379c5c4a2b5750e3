"""Requests for pages of mapped files: byte ranges, time of the request, and pages that the kernel reads."""

from __future__ import annotations

import concurrent.futures.thread
import ctypes
import gc
import mmap
import os
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, open_images, write_images
from omearrow_ds.kernels import stacks as stacks_module
from omearrow_ds.kernels.stacks import (
    PageThread,
    Prefixes,
    Stacks,
    _page_ranges_of_images,
    byte_ranges,
    page_thread,
    request_pages,
)
from tests.conftest import needs
from tests.support.page_requests import address_of, covers, set_reads, watch_requests
from tests.support.strategies import slow_except

PAGE = mmap.PAGESIZE
PIECE = 2**17
MS = 10**6
FORMATS = ["arrow", "parquet", "lance", "vortex"]
COUNT, SHAPE = 320, (1, 5, 1, 96, 96)


@pytest.fixture
def requested(monkeypatch):
    return watch_requests(monkeypatch)


@pytest.fixture
def reads(monkeypatch):
    return set_reads(monkeypatch)


@st.composite
def strided(draw):
    """Draw an array (n, T, C, Z, Y, X) with gaps, permuted axes or reversed axes."""
    lengths = draw(st.tuples(st.integers(1, 4), *(st.integers(1, 3) for _ in range(3)), *(st.integers(1, 70),) * 2))
    order = draw(st.permutations(range(1, 6)))
    stored = np.zeros([lengths[0], *(lengths[axis] + draw(st.integers(0, 2)) for axis in order)], "uint16")
    array = stored.transpose(0, *(1 + order.index(axis) for axis in range(1, 6)))
    array = array[tuple(slice(length) for length in lengths)]
    return array[:, :, ::-1] if draw(st.booleans()) else array


@settings(deadline=None)
@given(strided(), st.data())
def test_requests_cover_each_byte_of_the_images_in_small_pieces(array, data):
    indices = np.array(data.draw(st.lists(st.integers(0, len(array) - 1), min_size=1, max_size=3)))
    ranges = _page_ranges_of_images(Stacks([array]).addresses[indices], array, None).tolist()
    assert all(first % PAGE == 0 and 0 < length <= PIECE for first, length in ranges)
    for index in set(indices.tolist()):
        for plane in np.ndindex(array.shape[1:4]):
            rows = array[index][plane]
            assert all(covers(ranges, address_of(row)) for row in (*rows, *rows[:, -1:]))


@settings(deadline=None)
@given(strided(), st.data())
def test_requests_cover_the_bytes_before_each_chunk(array, data):
    first, span_bytes = (int(value) for value in (byte_ranges(array)[0].min(), array[0].nbytes))
    near = st.integers(first - 40, first + span_bytes)
    distances = data.draw(st.lists(st.one_of(near, st.integers(-3 * PAGE, 3 * PAGE)), min_size=1, max_size=4))
    num_bytes = data.draw(st.integers(1, 40))
    prefixes = Prefixes(np.zeros(0), np.array(distances), np.zeros((len(distances), num_bytes), "uint8"), pytest.fail)
    stacks = Stacks([array], prefixes=prefixes)
    prefixes.addresses, prefixes.is_checked = stacks.addresses, np.zeros(len(array), bool)
    ranges = stacks.page_ranges(np.arange(len(array))).tolist()
    for index, address in enumerate(stacks.addresses.tolist()):
        for distance in distances:
            assert covers(ranges, address + distance)
            assert covers(ranges, address + distance + num_bytes - 1)
        assert all(
            covers(ranges, address_of(row)) for plane in np.ndindex(array.shape[1:4]) for row in array[index][plane]
        )


def test_one_request_is_made_for_an_image_of_several_pages_of_parquet(stored):
    with open_images(stored("parquet")) as source:
        ranges = source.images.mapped_stacks().page_ranges(np.arange(COUNT))
    assert len(ranges) == COUNT  # An image is less than 128 kB.


def test_images_are_requested_again_after_16_requests_or_a_second(reads):
    images = Stacks([np.zeros((64, 10, 10), "uint16")], is_mapped=True)
    counts = []
    for number in range(20):
        reads.time_ns += 1000 * MS * (number == 19)
        counts.append(len(images.page_ranges(np.array([0, number + 1]))))
    assert counts == [2, *[1] * 16, 2, 1, 2]


def test_requests_for_regions_include_the_bytes_before_chunks():
    array = np.zeros((4, 1, 1, 1, 512, 128), "uint16")
    prefixes = Prefixes(Stacks([array]).addresses, np.array([-4]), np.zeros((1, 4), "uint8"), pytest.fail)
    stacks = Stacks([array], prefixes=prefixes).cut(lambda images: images[..., 256:, :])
    assert covers(stacks.page_ranges(np.array([1])).tolist(), address_of(array[1]) - 4)


@settings(deadline=None)
@given(strided(), st.integers(-80, 80), st.integers(1, 90))
def test_requests_for_rows_cover_those_inside_of_the_image(array, top, num_rows):
    addresses = Stacks([array]).addresses[:1]
    ranges = _page_ranges_of_images(addresses, array, (np.array([top]), num_rows)).tolist()
    for row in range(max(top, 0), min(top + num_rows, array.shape[4])):
        for plane in np.ndindex(array.shape[1:4]):
            assert covers(ranges, address_of(array[0][plane][row, :1]))
            assert covers(ranges, address_of(array[0][plane][row, -1:]))


def test_requests_are_for_no_more_than_the_pages_of_whole_images():
    array = np.zeros((50, 5, 300, 300), "uint16")
    ranges = _page_ranges_of_images(Stacks([array]).addresses[[3, 40]], array, None)
    image_bytes = array[0].nbytes
    assert ranges[:, 1].sum() <= 2 * (image_bytes + PAGE)
    assert len(ranges) == 2 * -(-(image_bytes + PAGE) // PIECE)


@pytest.mark.parametrize("is_cold", [False, True])
def test_pages_are_requested_for_16_batches_after_reads_and_of_cold_files(requested, reads, is_cold):
    reads.is_resident = not is_cold
    images = Stacks([np.zeros((80, 10, 10), "uint16")], is_mapped=True)
    batches = []
    for number in range(40):
        reads.time_ns += MS
        reads.ru_majflt += number == 20
        reads.ru_inblock += number == 38
        images.prepare(np.array([2 * number, 2 * number + 1]))
        batches.append(len(requested))
        requested.clear()
    assert [number for number, count in enumerate(batches) if count] == [*range(16 * is_cold), *range(20, 36), 38, 39]
    assert reads.num_calls == 40


@pytest.mark.parametrize("is_sample", [False, True], ids=["batch", "sample"])
def test_warm_images_ask_for_reads_once_per_millisecond(requested, reads, is_sample):
    images = Stacks([np.zeros((64, 10, 10), "uint16")], is_mapped=True)
    prepare = partial(images.prepare_image, 1) if is_sample else partial(images.prepare, np.arange(2))
    for _ in range(100):
        prepare()
        reads.time_ns += MS // 20
    assert reads.num_calls == 5
    reads.ru_inblock += 1
    requested.clear()
    prepare()
    assert requested


def test_arrays_in_memory_are_never_asked_for(requested, reads):
    Stacks([np.zeros((64, 10, 10), "uint16")]).prepare(np.arange(2))
    assert (requested, reads.num_calls) == ([], 0)


@pytest.fixture(scope="module")
def images():
    """Noise that no format compresses, with the image number as the first pixel."""
    noise = np.random.default_rng(0).integers(0, 2**16, (COUNT, *SHAPE), "uint16")
    noise[:, 0, 0, 0, 0, 0] = np.arange(COUNT)
    return list(noise)


@pytest.fixture(scope="module")
def disk():
    """A folder on disk; other tests use memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def stored(disk, images):
    """Return a function that writes the images once per layout."""

    def path_of(layout):
        needs(layout.removesuffix(".parts"))
        path = disk / f"images.{layout}"
        if not path.exists():
            if layout.endswith(".parts"):
                convert(path_of("arrow"), path, "arrow", part_bytes=8 * 2**20)
            else:
                write_images(images, path, layout)
        return path

    return path_of


def files_of(path):
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def residents_of(file):
    """Return the pages of a file that are in the page cache."""
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    pages = np.zeros(-(-len(mapped) // PAGE), np.uint8)
    view = np.frombuffer(mapped, np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(view.ctypes.data, len(mapped), pages.ctypes.data) == 0
    return pages & 1


def forget(path):
    """Evict the pages of files from the page cache."""
    gc.collect()  # Mapped pages are not evicted.
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if sum(residents_of(file).sum() for file in files_of(path) if file.stat().st_size) > 10:
        pytest.skip("pages of files on this disk stay in memory")


@pytest.mark.parametrize("is_permitted", [True, False], ids=["one call", "a call per range"])
@pytest.mark.parametrize("request_ranges", [request_pages, lambda ranges: page_thread().request(ranges)])
def test_requested_pages_are_read_and_others_are_not(stored, monkeypatch, request_ranges, is_permitted):
    path = stored("arrow")
    forget(path)
    if not is_permitted:
        monkeypatch.setattr(stacks_module._libc(), "syscall", lambda *_: -1)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        pages = np.arange(0, 4 * 1100, 4)  # More ranges than one system call accepts.
        request_ranges(np.column_stack([address + pages * PAGE, np.full(len(pages), PAGE)]))
        page_thread()._executor.submit(int).result()
        deadline = monotonic() + 60
        while not residents_of(path)[pages].all() and monotonic() < deadline:
            sleep(0.01)
    residents = residents_of(path)
    assert residents[pages].all()
    assert residents.sum() < 2 * len(pages)


def faults_of_touching(address, num_pages, ranges=None):
    """Return the page faults of reading pages of a mapping, after ``ranges`` were requested and mapped, if given."""
    if ranges is not None:
        thread = page_thread()
        thread.request(ranges)
        thread._executor.submit(int).result()
        thread.map_requested()
        thread._executor.submit(int).result()
    bytes_at, before = (ctypes.c_ubyte * (num_pages * PAGE)).from_address(address), getrusage(RUSAGE_THREAD).ru_minflt
    for page in range(num_pages):
        assert bytes_at[page * PAGE] >= 0
    return getrusage(RUSAGE_THREAD).ru_minflt - before


def test_pages_of_the_last_request_are_mapped_before_they_are_read(tmp_path):
    path, num_pages = tmp_path / "pixels", 512
    path.write_bytes(bytes(num_pages * PAGE))
    faults = []
    for is_mapped in (False, True):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            ranges = np.array(
                [[address, num_pages * PAGE // 2], [address + num_pages * PAGE // 2, num_pages * PAGE // 2]]
            )
            faults.append(faults_of_touching(address, num_pages, ranges if is_mapped else None))
    assert faults[1] < faults[0] / 2


def test_an_exit_does_not_wait_for_the_pages_of_a_batch(monkeypatch):
    """Regression: the program waited until a slow disk had read the next batch."""
    mapped, pages = [], PageThread()

    def exit_meanwhile(address, *_):
        mapped.append(address)
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)  # As Python does before it joins threads.

    monkeypatch.setattr(stacks_module, "_libc", lambda: SimpleNamespace(madvise=exit_meanwhile))
    monkeypatch.setattr(stacks_module, "request_pages", lambda _: None)
    pages.request(np.array([[PAGE, PAGE], [2 * PAGE, PAGE], [3 * PAGE, PAGE]]))
    pages.map_requested()
    pages._executor.shutdown()
    assert mapped == [PAGE]


ONE_OF_EACH = [("arrow", "batch"), ("parquet", "sample"), ("lance", "crops")]


@pytest.mark.parametrize(
    ("layout", "read"), slow_except(ONE_OF_EACH, product(["arrow", "parquet", "lance"], ["sample", "batch", "crops"]))
)
def test_the_first_batch_reads_few_pages_of_a_cold_file(stored, layout, read):
    """Regression: Parquet and Lance read the whole file."""
    path = stored(layout)
    forget(path)
    crop = {"crop_size": (16, 96), "crop": "grid"} if read == "crops" else {}
    dataset = OMEArrowDataset(path, preload=False, **crop)
    numbers = [200] if read == "sample" else [7, 150, 290, 33]
    indices = [number * len(dataset) // COUNT for number in numbers]
    loader = OMEArrowDataLoader(dataset, 4, num_workers=0, sampler=indices)
    batch = dataset[200][None] if read == "sample" else next(iter(loader))
    assert [round(float(image[0, 0, 0]) * 65535) for image in batch] == numbers
    num_resident = sum(int(residents_of(file).sum()) for file in files_of(path) if file.stat().st_size)
    assert num_resident * PAGE < COUNT * np.prod(SHAPE) * 2 / 2


@pytest.mark.parametrize("layout", slow_except(["parquet", "arrow.parts"], [*FORMATS, "arrow.parts"]))
def test_warm_batches_request_nothing_and_ask_at_most_once_each(stored, layout, requested, reads):
    dataset = OMEArrowDataset(stored(layout), preload=False)
    loader = OMEArrowDataLoader(dataset, 32, num_workers=0)
    reads.num_calls = 0
    for _ in loader:
        reads.time_ns += MS // 2
    assert requested == []
    assert reads.num_calls == len(loader) // 2


def test_a_mapped_cache_file_is_requested_too(stored, disk, requested, reads):
    options = {"cache_dir": disk / "cache", "axes": "TCZYX"}
    OMEArrowDataset(stored("arrow"), **options)
    reads.is_resident = False
    dataset = OMEArrowDataset(stored("arrow"), **options)
    assert round(float(dataset[5][0, 0, 0, 0, 0]) * 65535) == 5
    assert sum(length for _, length in requested) >= np.prod(SHAPE) * 2
