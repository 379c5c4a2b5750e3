"""Bounded memory and descriptors: data larger than memory, and more images than open files."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds import FORMATS, resources
from omearrow_ds.resources import _left_by_groups, _quotas, available_cores, split_by_bytes, sum_bytes
from tests.support.strategies import FEW_FORMATS, FOLDERS

HERE = [fmt.name for fmt in FORMATS if fmt.missing_backend is None]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups and RLIMIT_DATA are Linux's")

LARGER = """
import gc, importlib, resource, sys, tempfile
from pathlib import Path
import numpy as np
from omearrow_ds import MemoryLimitError, OMEArrowDataset, open_images, write_images
from omearrow_ds.storage.formats import get_format
from omearrow_ds.resources import available_bytes

COUNT, SIDE, FREE = 10, 1536, 36 * 2**20  # 45 MiB of pixels
base = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE)
folder, names = Path(sys.argv[1]), sys.argv[2:]
for name in names:
    importlib.import_module(f"omearrow_ds.storage.formats.{name}")
    importlib.import_module(get_format(name).backend)
    path = folder / f"small{get_format(name).suffix}"
    write_images([base[:64, :64]] * 2, path, name)
    OMEArrowDataset(path, name, preload=False)[1]  # threads and tables of the library are there before the limit
for name in names:
    path = folder / f"images{get_format(name).suffix}"
    write_images((base + np.uint16(number) for number in range(COUNT)), path, name)
    gc.collect()
    held = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + FREE, resource.RLIM_INFINITY))
    assert available_bytes() <= FREE
    try:
        OMEArrowDataset(path, name)
    except MemoryLimitError as error:
        assert str(path) in str(error) and "47,185,920" in str(error), error
    else:
        raise AssertionError(f"{name} was preloaded")
    dataset = OMEArrowDataset(path, name, preload="auto", axes="YX", normalize=False)
    assert not dataset.preloaded
    for number in range(COUNT):
        assert (dataset[number].numpy() == base + np.uint16(number)).all(), (name, number)
    dataset.source.close()
    del dataset
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    path.unlink() if path.is_file() else __import__("shutil").rmtree(path)
    print(f"\\nlarger:{name}")
"""

MANY = """
import os

COUNT = 400
image = np.arange(64, dtype=np.uint8).reshape(8, 8)
for name in names:
    if get_format(name).kind != "directory":
        continue
    path = folder / f"many{get_format(name).suffix}"
    write_images((image + np.uint8(number % 190) for number in range(COUNT)), path, name)
    for kept in (True, False):
        if not kept:
            (path / "columns.parquet").unlink()
        opened = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with open_images(path) as source:
            for number, found in enumerate(source.take(range(COUNT))):
                assert (found[0, 0, 0] == image + np.uint8(number % 190)).all()
            assert sum(len(images) for _, images in source.images.stream()) == COUNT
        dataset = OMEArrowDataset(path)
        assert len(dataset) == COUNT and dataset.preloaded
        assert len(os.listdir("/proc/self/fd")) <= opened + 4
    print(f"\\nmany:{name}")
"""


@pytest.fixture(scope="module", params=[FEW_FORMATS, pytest.param(HERE, marks=pytest.mark.slow)], ids=["few", "all"])
def names(request):
    return request.param


@pytest.fixture(scope="module")
def output_words(programs, names, tmp_path_factory):
    """Run both programs in one process with limits, and return the words of its output."""
    done = programs.run(LARGER + MANY, tmp_path_factory.mktemp("resources"), *names, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.split()  # DuckDB adds a progress bar under python -c


def test_data_larger_than_memory_is_refused_or_read_image_by_image(output_words, names):
    """45 MiB of pixels, and 36 MiB of memory."""
    assert [word for word in output_words if word.startswith("larger:")] == [f"larger:{name}" for name in names]


def test_a_folder_of_many_images_takes_few_descriptors(output_words, names):
    """400 images, and 12 descriptors."""
    assert [word for word in output_words if word.startswith("many:")] == [
        f"many:{name}" for name in names if name in FOLDERS
    ]


TOTAL = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return the folder of control groups, and the file that lists those of this process."""
    root, own = tmp_path / "fs", tmp_path / "cgroup"
    monkeypatch.setattr(resources, "ROOT", root)
    monkeypatch.setattr(resources, "OWN", own)
    return root, own


def test_memory_is_that_of_the_tightest_group_its_cached_files_not_counted(groups):
    root, own = groups
    inner = root / "pod" / "container"
    inner.mkdir(parents=True)
    own.write_text("0::/pod/container\n")
    assert _left_by_groups(TOTAL) == []
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("300\n")
    assert _left_by_groups(TOTAL) == []
    (root / "pod" / "memory.max").write_text("1000\n")
    (root / "pod" / "memory.current").write_text("700\n")
    (root / "pod" / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _left_by_groups(TOTAL) == [450]
    (inner / "memory.high").write_text("400\n")
    assert sorted(_left_by_groups(TOTAL)) == [100, 450]
    assert _left_by_groups(1000) == [100]  # A limit above the machine's memory is ignored.
    own.unlink()
    assert _left_by_groups(TOTAL) == []


def test_memory_of_version_1_groups(groups):
    root, own = groups
    job = root / "memory" / "slurm" / "job"
    job.mkdir(parents=True)
    own.write_text("5:memory:/slurm/job\n4:cpu,cpuacct:/\n")
    (job / "memory.limit_in_bytes").write_text("1000\n")
    (job / "memory.usage_in_bytes").write_text("900\n")
    (job / "memory.stat").write_text("cache 600\ntotal_inactive_file 50\n")
    assert _left_by_groups(TOTAL) == [150]


def test_cores_are_those_of_the_control_group(groups, monkeypatch):
    root, own = groups
    own.write_text("0::/outer/inner\n")
    inner = root / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert _quotas() == []
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert _quotas() == [1.5]
    own.write_text("4:cpu,cpuacct:/job\n3:memory:/other\n")
    job = root / "cpu" / "job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert _quotas() == []
    (job / "cpu.cfs_quota_us").write_text("300000\n")
    assert _quotas() == [3.0]
    own.unlink()
    assert _quotas() == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("omearrow_ds.resources._quotas", lambda: [5.9])
    assert available_cores() == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_cores() == 1


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_sum_bytes_exceeds_int64(sizes):
    assert sum_bytes(np.array(sizes, np.int64)) == sum(sizes)


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_split_by_bytes_fills_each_slice_up_to_the_limit(sizes, limit):
    parts = list(split_by_bytes(np.array(sizes, np.int64), limit))
    assert [index for part in parts for index in range(len(sizes))[part]] == list(range(len(sizes)))
    for part in parts:
        assert sum(sizes[part]) <= limit or part.stop - part.start == 1
        assert part.stop == len(sizes) or sum(sizes[part.start : part.stop + 1]) > limit
