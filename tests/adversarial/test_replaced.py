"""A collection that is replaced while datasets and workers have it open: old pixels or an error, never a mixture."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest

from omearrow_ds import FormatError, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDSError, open_images, write_images
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.verified import decode
from tests.support.errors import find_problems, raises
from tests.support.strategies import NAMES, NAMES_OR_LONG, all_same, image_of, same

formats = pytest.mark.parametrize("name", NAMES)
OLD = [image_of((1, 1, 1, 6, 7), "uint16", number) for number in range(5)]
NEW = [image_of((1, 1, 1, 6, 7), "uint16", number) for number in range(100, 105)]


@pytest.fixture
def opened(stored):
    """Return a function that opens old images with their numbers, then replaces the file by similar images."""

    def make(name):
        path = stored(name, OLD, columns={"number": [*range(5)]})
        dataset = OMEArrowDataset(path, name, preload=False, normalize=False, axes="TCZYX", target="number")
        return dataset, lambda: write_images(NEW, path, name, columns={"number": [*range(100, 105)]}, overwrite=True)

    return make


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_samples_of_old_and_new_are_never_mixed(opened, name):
    dataset, replace = opened(name)
    assert same(dataset[1][0].numpy(), OLD[1])
    replace()
    with contextlib.suppress(FormatError):  # "was replaced", if the old pixels are gone.
        image, number = dataset[0]
        assert same(image.numpy(), OLD[number])


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_process_that_opens_later_takes_no_other_collection_for_it(opened, name):
    dataset, replace = opened(name)
    pickled = pickle.dumps(dataset)
    image, number = pickle.loads(pickled)[3]
    assert same(image.numpy(), OLD[number])
    replace()
    for late in (pickled, pickle.dumps(pickle.loads(pickled)), pickle.dumps(dataset)):
        with raises(FormatError, path=dataset.source.path):
            pickle.loads(late)[3]


@pytest.mark.parametrize("name", ["parquet", "arrow", "lance"])
def test_workers_take_no_other_collection_for_it(opened, name):
    dataset, replace = opened(name)
    replace()
    try:
        for images, numbers in OMEArrowDataLoader(dataset, 2, num_workers=1, timeout=60):
            assert all(same(image.numpy(), OLD[number]) for image, number in zip(images, numbers, strict=True))
    except OMEArrowDSError as error:
        assert not find_problems(str(error), path=dataset.source.path)  # noqa: PT017  # either is right


READS = {
    "read": lambda source: [source.read(index) for index in range(len(OLD))],
    "take": lambda source: source.take(range(len(OLD))),
    "scan": lambda source: [image for _, part in source.images.stream() for image in part],
}


def _decoded(source):
    images = np.zeros((len(OLD), *OLD[0].shape), OLD[0].dtype)
    decode(source.images, images)
    return list(images)


READS["decode"] = _decoded


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("checks", [1, 2])
@pytest.mark.parametrize(("name", "engine"), [*((name, None) for name in NAMES), ("parquet_duck", "duckdb")])
@pytest.mark.share(5, "name", "how", "checks")
def test_a_replacement_right_after_the_file_was_looked_at_is_noticed(stored, monkeypatch, name, engine, how, checks):
    compression = {"tiff": "zlib", "parquet": "zstd"}.get(name)  # Compressed files are not read in place.
    path = stored(name, OLD, compression=compression)
    source = open_images(path, name, engine=engine)
    look, looked = FileGuard.refuse_changed, []

    def look_and_replace(self):
        look(self)
        looked.append(1)
        if len(looked) == checks:
            write_images(NEW, path, name, overwrite=True, compression=compression)

    monkeypatch.setattr(FileGuard, "refuse_changed", look_and_replace)
    try:
        status = READS[how](source)
    except FormatError as error:
        assert not find_problems(str(error), path=path, remedy=False)  # noqa: PT017  # either is right
    else:
        assert all_same(status, OLD)


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
def test_a_scan_gives_no_pixels_of_a_folder_that_replaced_its_own(stored, name):
    """The pixels came before the error, so a reader of only the first block never met the error."""
    path = stored(name, OLD)
    source = open_images(path)
    write_images(NEW, path, name, overwrite=True)
    with raises(FormatError, path=path):
        next(source.images.stream())


def test_parquet_is_not_opened_again_after_it_was_replaced(stored):
    path = stored("parquet", OLD)
    with open_images(path) as source:
        assert same(source.read(1), OLD[1])  # Opens the bytes, and not the file that pyarrow reads.
        write_images(NEW, path, "parquet", overwrite=True)
        with raises(FormatError, path=path, mentions="replaced"):
            source.images.table._file.get()
