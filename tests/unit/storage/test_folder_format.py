"""A folder format of another package, which has no code for servers, reads local files and buckets alike."""

from __future__ import annotations

import inspect
import pickle
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from omearrow_ds import (
    FormatError,
    MissingPathError,
    OMEArrowDataset,
    Storage,
    convert,
    formats,
    open_images,
    write_images,
)
from tests.support import npy_folder
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.sources import check

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
NUM_IMAGES, SHAPE = 9, (2, 300, 400)
HEAD_BYTES = 2**16  # Fetched when an object is opened.
HEADER_BYTES = 128  # Before the pixels of a NumPy file.


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """Install the module as Python installs packages: by a file and an entry point."""
    site, info = tmp_path / "site", tmp_path / "site" / "npy_folder-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "npy_folder.py").write_text(inspect.getsource(npy_folder))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy-folder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[omearrow_ds.formats]\nnpy = npy_folder:FORMAT\n")
    monkeypatch.syspath_prepend(str(site))
    formats.cache_clear()
    yield
    monkeypatch.undo()
    formats.cache_clear()
    sys.modules.pop("npy_folder", None)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served" / "lab").mkdir(parents=True)
    with serving(tmp_path / "served") as served:
        yield served


@pytest.fixture
def images():
    """Images (C, Y, X) whose pixels encode their position."""
    return list(np.arange(NUM_IMAGES * np.prod(SHAPE), dtype=np.uint32).reshape(NUM_IMAGES, *SHAPE))


@pytest.fixture
def storage(server):
    return Storage(anonymous=True, endpoint=server.url, region="us-east-1")


@pytest.fixture(params=["written", "foreign"])
def folder(request, server, images):
    """Return a folder with a list of its files, or with files that ``numpy.save`` wrote."""
    path = server.folder / "lab" / request.param
    if request.param == "written":
        write_images(images, path, "npy", axes="CYX", columns={"label": list(range(NUM_IMAGES))})
    else:
        path.mkdir()
        for number, image in enumerate(images):
            np.save(path / f"{number}.npy", image)
    return path


@pytest.fixture(params=["local", "bucket"])
def opened(request, folder, storage):
    path = folder if request.param == "local" else f"s3://lab/{folder.name}"
    options = {} if request.param == "local" else {"storage": storage}
    return path, options


def as_stored(folder, image):
    """Return an image as (T, C, Z, Y, X): arrays of other programs have no names of axes."""
    return image[None, :, None] if folder.name == "written" else image[None, None]


def test_the_module_is_short_and_has_no_code_for_servers():
    source = inspect.getsource(npy_folder)
    assert source.count("\n") <= 150
    code = source.partition('"""\n')[2].replace('remote_access=("ranges",)', "").lower()  # A property of the format.
    for word in ("url", "remote", "object", "server", "http", "s3", "fetch", "storage."):
        assert word not in code.replace("omearrow_ds.storage.formats", ""), word


def test_images_and_regions_are_those_of_numpy(opened, folder):
    path, options = opened
    arrays = list(map(np.load, sorted(folder.glob("*.npy"))))
    stored = [array.reshape((1,) * (5 - array.ndim) + array.shape) for array in arrays]
    with open_images(path, "npy", **options) as source:
        check(source, stored, [8, 0, 3, 3, -2])
        check(pickle.loads(pickle.dumps(source)), stored, [5])
        assert source.images.details.storage_info().in_place == (not options)
        if folder.name == "written":
            assert source.columns["label"].to_pylist() == list(range(NUM_IMAGES))


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.share(2, "folder", "preload")
def test_samples_and_crops_are_slices_of_the_arrays(opened, folder, images, preload):
    path, options = opened
    axes = "CYX" if folder.name == "written" else "ZYX"
    options = {"format": "npy", "axes": axes, "normalize": False, "preload": preload, **options}
    dataset = OMEArrowDataset(path, **options)
    for index in (7, 0):
        np.testing.assert_array_equal(dataset[index].numpy(), images[index])
    objects = pd.DataFrame({"image_id": dataset.image_ids[:3], "y": [20, 150, 280], "x": [30, 200, 370]})
    crops = OMEArrowDataset(path, objects=objects, center=("y", "x"), crop_size=(32, 48), **options)
    for sample, image, row in zip(crops.__getitems__([0, 1, 2]), images, objects.itertuples(), strict=False):
        y, x = row.y - 15, row.x - 23
        np.testing.assert_array_equal(sample.numpy(), image[:, y : y + 32, x : x + 48])


def test_an_image_is_one_request_and_a_region_requests_only_its_rows(server, folder, storage, images):
    with open_images(f"s3://lab/{folder.name}", "npy", storage=storage) as source:
        num_opening = 2 if folder.name == "written" else 1 + NUM_IMAGES  # A list, and the table or each header.
        assert server.requests.total() == num_opening
        server.requests.clear()
        np.testing.assert_array_equal(source.read(4), as_stored(folder, images[4]))
        assert server.requests.total() == 1
        axis = {"channels": [1]} if folder.name == "written" else {"z": [1]}
        for number in range(2):
            server.requests.clear()
            server.sent_bytes.clear()
            region = source.read(4, (200, 210, 50, 80), **axis)
            np.testing.assert_array_equal(region.reshape(10, 30), images[4][1, 200:210, 50:80])
            is_opened = number == 1 or folder.name == "foreign"
            assert server.requests.total() == (1 if is_opened else 2)
            rows_bytes = 10 * SHAPE[2] * images[4].itemsize
            assert server.sent_bytes.total() == rows_bytes + (0 if is_opened else HEAD_BYTES)


def test_opening_a_listed_folder_reads_no_image(server, storage, images):
    write_images(images, server.folder / "lab/a.npys", axes="CYX")
    with open_images("s3://lab/a.npys", storage=storage) as source:
        assert source.format.name == "npy"
        assert source.shapes.tolist() == [[1, 2, 1, 300, 400]] * NUM_IMAGES
    assert not [path for path in server.requests if path.endswith(".npy")]


def test_a_preloaded_folder_requests_each_file_once(server, storage, images):
    write_images(images, server.folder / "lab/a.npys", axes="CYX")
    OMEArrowDataset("s3://lab/a.npys", storage=storage)
    files = [count for path, count in server.requests.items() if path.endswith(".npy")]
    assert files == [1] * NUM_IMAGES


@pytest.mark.parametrize("save", [partial(np.ndarray.astype, dtype=">u4"), np.asfortranarray], ids=["big", "fortran"])
def test_arrays_in_another_order_are_read_by_numpy(server, storage, images, save):
    path = server.folder / "lab" / "odd"
    path.mkdir()
    for number, image in enumerate(images):
        np.save(path / f"{number}.npy", save(image))
    for location, options in ((path, {}), ("s3://lab/odd", {"storage": storage})):
        with open_images(location, "npy", **options) as source:
            check(source, [image[None, None] for image in images], [8, 0, 3])


def test_changed_damaged_and_missing_files_are_named(server, storage, images):
    path = server.folder / "lab" / "foreign"
    path.mkdir()
    for number, image in enumerate(images):
        np.save(path / f"{number}.npy", image)
    source = open_images("s3://lab/foreign", "npy", storage=storage)
    np.save(path / "2.npy", images[3])
    (path / "5.npy").unlink()
    for read in (source.read, partial(source.read, region=(0, 5, 0, 5))):
        with raises(FormatError, path="s3://lab/foreign/2.npy"):
            read(2)
    with raises(MissingPathError, path="s3://lab/foreign/5.npy"):
        source.read(5)
    (path / "7.npy").write_bytes((path / "7.npy").read_bytes()[:1000])
    for location, options in ((path, {}), ("s3://lab/foreign", {"storage": storage})):
        with raises(FormatError, path=Path(location, "7.npy") if not options else f"{location}/7.npy"):
            open_images(location, "npy", **options)


def test_requests_that_fail_change_no_pixel(server, storage, images):
    write_images(images, server.folder / "lab/a.npys", axes="CYX")
    server.faults = 0.3
    with open_images("s3://lab/a.npys", storage=storage) as source:
        check(source, [image[None, :, None] for image in images], [8, 0, 3])
    assert len(server.failed) > 3


def test_a_folder_in_a_bucket_is_converted(server, storage, images, tmp_path):
    write_images(images, server.folder / "lab/a.npys", axes="CYX", columns={"label": list(range(NUM_IMAGES))})
    convert("s3://lab/a.npys", tmp_path / "a.arrow", storage=storage)
    with open_images(tmp_path / "a.arrow", verify=True) as source:
        check(source, [image[None, :, None] for image in images], [8, 0])
        assert source.columns["label"].to_pylist() == list(range(NUM_IMAGES))
