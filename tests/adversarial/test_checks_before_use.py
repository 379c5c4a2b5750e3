"""Checks of lengths and offsets that must come before the first use of uncompressed pixels, for each way to read."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from omearrow_ds import DecodeError, FormatError, OMEArrowDataLoader, OMEArrowDataset, open_images
from omearrow_ds.storage.byte_source import STATUS_NS
from tests.adversarial.layout_damage import DAMAGED, IMAGES, IMAGES_PER_PART, NUM_IMAGES, cut_end
from tests.adversarial.layouts import (
    ACCESSES,
    CASES,
    CENTER_CROP,
    LAYOUTS,
    LENGTH,
    MAY_BE_READ,
    OBJECT_CROP,
    OFFSET,
    TRUNCATED,
    WHOLE,
    Array,
    center_crops,
    get_batch,
    get_sample,
    object_crops,
    open_preloaded,
    whole_images,
    write_layout,
)
from tests.conftest import needs
from tests.support.errors import find_problems, raises

# Lance reads images itself if offsets are damaged. The package warns that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*is read by Lance:UserWarning")

REFUSED = (FormatError, DecodeError)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
cases = pytest.mark.parametrize(("layout", "kind"), CASES, ids=map(", ".join, CASES))
accesses = pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
on_demand = pytest.mark.parametrize(
    "name", [name for name, access in ACCESSES.items() if access.open is not open_preloaded]
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that gives the undamaged collection of a layout."""
    paths: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        needs(LAYOUTS[name].format_name)
        if name not in paths:
            paths[name] = write_layout(name, tmp_path_factory.mktemp("written"))
        return paths[name]

    return path_of


def copy_to(folder: Path, source: Path) -> Path:
    target = folder / source.name
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target))


@pytest.fixture(scope="module")
def damaged(written, tmp_path_factory):
    """Return a function that gives a damaged collection, and the path that errors must name."""
    paths: dict[tuple[str, str], tuple[Path, Path]] = {}

    def paths_of(name: str, kind: str) -> tuple[Path, Path]:
        if (name, kind) not in paths:
            path = copy_to(tmp_path_factory.mktemp("damaged"), written(name))
            paths[name, kind] = path, LAYOUTS[name].damages[kind](path)
        return paths[name, kind]

    return paths_of


@layouts
def test_layout_is_read_by_offset_when_nothing_is_damaged(written, layout):
    stored = open_images(written(layout)).images.details.storage_info()
    assert stored.compression == "none"
    assert stored.in_place or layout == "ome-zarr"


@accesses
@layouts
@pytest.mark.share(9, "layout", "access")
def test_access_returns_the_pixels_when_nothing_is_damaged(written, layout, access):
    np.testing.assert_array_equal(access.read(access.open(written(layout))), access.expected)


@accesses
@cases
@pytest.mark.share(9, "layout", "kind", "access")
def test_access_is_refused_when_the_collection_is_damaged(damaged, layout, kind, access):
    path, named = damaged(layout, kind)
    pixels = outcome(lambda: access.read(access.open(path)))
    if isinstance(pixels, Exception):
        assert find_problems(str(pixels), path=named, remedy=False) == []
    else:
        assert (layout, kind) in MAY_BE_READ, "nothing noticed the damage"
        np.testing.assert_array_equal(pixels, access.expected)


def outcome(read: Callable[[], Array]) -> Array | Exception:
    """Return the pixels that are read, or the error that refuses them."""
    try:
        return read()
    except REFUSED as error:
        return error


@pytest.mark.parametrize(
    ("layout", "kind", "image"),
    [
        *((layout, LENGTH, DAMAGED) for layout in ("parquet lists", "arrow", "arrow lists")),
        *((layout, OFFSET, DAMAGED) for layout in ("parquet", "parquet by duckdb", "parquet lists", "ome-arrow")),
        *((layout, OFFSET, DAMAGED) for layout in ("ome-arrow dictionary", "vortex", "vortex lists")),
        ("parts of arrow", LENGTH, DAMAGED % IMAGES_PER_PART),
        ("parts of parquet", OFFSET, DAMAGED % IMAGES_PER_PART),
    ],
)
def test_error_names_the_image_when_its_own_length_is_wrong(damaged, layout, kind, image):
    path, named = damaged(layout, kind)
    for read in (get_sample, get_batch):
        with raises(DecodeError, path=named, remedy=False, mentions=f"image {image}"):
            read(whole_images(path))


@cases
def test_other_images_are_right_or_refused_when_one_is_damaged(damaged, layout, kind):
    path, _ = damaged(layout, kind)
    if not opens(path):
        return
    source = open_images(path)
    for index, image in enumerate(IMAGES):
        pixels = outcome(partial(source.read, index))
        assert isinstance(pixels, Exception) or np.array_equal(pixels, image)


@on_demand
@layouts
@pytest.mark.share(5, "layout", "name")
def test_access_is_refused_when_the_file_is_cut_after_opening(written, tmp_path, layout, name):
    access = ACCESSES[name]
    path = copy_to(tmp_path, written(layout))
    opened = access.open(path)
    np.testing.assert_array_equal(access.read(opened), access.expected)
    named = cut_end(path)
    wait_for_look()
    with raises(REFUSED, path=named, remedy=False):
        access.read(opened)


def wait_for_look() -> None:
    """Wait until open parts are checked again, which happens once per millisecond."""
    time.sleep(2 * STATUS_NS / 1e9)


# ---- Loaders with a worker


class Batches:
    """Sampler of one batch per dataset of a `ConcatDataset`. Each batch begins with the damaged image."""

    def __init__(self, num_datasets: int) -> None:
        self._firsts = range(0, num_datasets * NUM_IMAGES, NUM_IMAGES)

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[list[int]]:
        return ([first + DAMAGED, first + 4] for first in self._firsts)


def loader_with_a_worker(paths: list[Path]) -> OMEArrowDataLoader:
    """Return a loader of all datasets. One worker per dataset would take most of the time of these tests."""
    datasets = ConcatDataset(list(map(whole_images, paths)))
    return OMEArrowDataLoader(datasets, batch_sampler=Batches(len(paths)), num_workers=1, timeout=60)


def outcomes(loader: OMEArrowDataLoader) -> list[Array | Exception]:
    """Return for each dataset the damaged image as the worker sends it, or the error that refuses it."""
    batches = iter(loader)

    def read() -> Array:
        return next(batches)[0].numpy()

    return [outcome(read) for _ in range(len(loader))]


def unnoticed(names: list[Any], paths_in_errors: list[Path], results: list[Array | Exception]) -> list[Any]:
    """Return the names of those that were read, or whose error does not name its path."""
    return [
        name
        for name, path, result in zip(names, paths_in_errors, results, strict=True)
        if not isinstance(result, Exception) or find_problems(str(result), path=path, remedy=False)
    ]


def test_worker_refuses_every_collection_when_damaged(damaged):
    names = [case for case in CASES if case not in MAY_BE_READ and opens(damaged(*case)[0])]
    assert {layout for layout, kind in names if kind == LENGTH} == set(LAYOUTS)
    paths, paths_in_errors = map(list, zip(*(damaged(*case) for case in names), strict=True))
    assert unnoticed(names, paths_in_errors, outcomes(loader_with_a_worker(paths))) == []


def opens(path: Path) -> bool:
    """Return whether damage is left to be noticed when images are read."""
    return not isinstance(outcome(lambda: open_images(path).close()), Exception)


def test_worker_refuses_every_file_when_it_is_cut_after_the_first_epoch(written, tmp_path):
    for layout in LAYOUTS:
        (tmp_path / layout).mkdir()
    paths = [copy_to(tmp_path / layout, written(layout)) for layout in LAYOUTS]
    loader = loader_with_a_worker(paths)
    for pixels in outcomes(loader):
        np.testing.assert_array_equal(pixels, WHOLE)
    paths_in_errors = list(map(cut_end, paths))
    assert unnoticed(list(LAYOUTS), paths_in_errors, outcomes(loader)) == []


# ---- cache_dir: pixels are decoded again if the file with decoded pixels is not complete


@pytest.fixture
def cached(written, tmp_path):
    """Return a function that opens a preloaded dataset, and the path of the file with its decoded pixels."""

    def open_cached(open_dataset: Callable[..., OMEArrowDataset] = whole_images) -> tuple[OMEArrowDataset, Path]:
        dataset = open_dataset(written("arrow"), preload=True, cache_dir=tmp_path)
        (file,) = tmp_path.glob("*.pixels")
        return dataset, file

    return open_cached


CHANGES = {
    LENGTH: lambda data: data + bytes(2),
    OFFSET: lambda data: bytes(2) + data[:-2],
    TRUNCATED: lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    ("open_dataset", "expected"), [(whole_images, WHOLE), (center_crops, CENTER_CROP), (object_crops, OBJECT_CROP)]
)
def test_cache_file_is_not_used_when_it_is_damaged(cached, kind, open_dataset, expected):
    _, file = cached()
    changed = CHANGES[kind](file.read_bytes())
    file.unlink()  # The first dataset keeps the old file mapped.
    file.write_bytes(changed)
    file.chmod(0o600)
    dataset, _ = cached(open_dataset)
    for read in (get_sample, get_batch):
        np.testing.assert_array_equal(read(dataset), expected)


def test_unpickled_dataset_does_not_use_a_cache_file_when_it_was_cut_after_pickling(cached):
    dataset, file = cached()
    pickled = pickle.dumps(dataset)
    cut_end(file, file.stat().st_size // 2)
    for read in (get_sample, get_batch):
        np.testing.assert_array_equal(read(pickle.loads(pickled)), WHOLE)
