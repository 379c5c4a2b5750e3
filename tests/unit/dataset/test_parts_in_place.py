"""Samples of collections in local parts equal those of one file, for any number of open files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds import FormatError, OMEArrowDataset, convert, write_images
from omearrow_ds.dataset.batch import collate
from omearrow_ds.storage import concat as storage_parts
from omearrow_ds.storage.byte_source import STATUS_NS
from omearrow_ds.storage.concat import PartStacks
from omearrow_ds.storage.manifest import PARTS
from tests.support.errors import raises
from tests.support.loops import made_by
from tests.support.parts import publish
from tests.support.strategies import image_of

SIZES = [5, 1, 11, 4, 2]
COUNT = sum(SIZES)
ORDERS = [[22, 0, 5, 6, 21, 6, 17], [3], list(range(COUNT)), [-1, -23]]


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    return [image_of((1, 3, 1, 7, 9), "uint16", number) for number in range(COUNT)]


@pytest.fixture(scope="module", params=["arrow", "parquet", pytest.param("vortex", marks=pytest.mark.slow)])
def path(request, images, tmp_path_factory) -> Path:
    return publish(tmp_path_factory.mktemp(request.param) / "plate.parts", images, SIZES, request.param)


@pytest.mark.parametrize("which", ["numpy", "numba"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_size": (5, 4)},
        {"axes": "YXC", "select": {"C": [2, 0]}},
        {"normalize": {"mean": [1, 20, 300], "std": [3, 2, 1.7]}},
        {"normalize": False},
    ],
    ids=str,
)
@pytest.mark.share(2, "path", "options", "which")
def test_batches_are_those_of_one_file(path, images, options, which, monkeypatch, tmp_path):
    monkeypatch.setattr(storage_parts.Parts, "max_open", 2)
    write_images(images, tmp_path / "one.arrow")
    whole = OMEArrowDataset(tmp_path / "one.arrow", **options)
    with made_by(which):
        for preload in (False, True):
            dataset = OMEArrowDataset(path, preload=preload, **options)
            if not preload:
                assert isinstance(dataset._collection.mapped_stacks(), PartStacks)
            for order in ORDERS:
                actual, want = (collate(batch.__getitems__(order)).numpy() for batch in (dataset, whole))
                assert actual.tobytes() == want.tobytes()
                assert dataset[order[0]].numpy().tobytes() == want[0].tobytes()
            assert preload or len(dataset.source.images.parts.opened) <= 2


@pytest.mark.parametrize("which", ["numpy", "numba"])
@pytest.mark.parametrize("pad", ["constant", "reflect"])
@pytest.mark.share(2, "path", "which", "pad")
def test_crops_are_those_of_one_file(path, images, which, pad, tmp_path, monkeypatch):
    monkeypatch.setattr(storage_parts.Parts, "max_open", 2)
    ids = [f"id-{number}" for number in range(COUNT)]
    write_images(images, tmp_path / "one.arrow", image_ids=ids)
    cells = pa.table({"image_id": ids * 2, "y": [float(n % 7) for n in range(2 * COUNT)], "x": [3.0] * 2 * COUNT})
    options = {"objects": cells, "center": ("y", "x"), "crop_size": (4, 6), "pad": pad}
    with made_by(which):
        whole, dataset = (
            OMEArrowDataset(tmp_path / "one.arrow", **options),
            OMEArrowDataset(path, preload=False, **options),
        )
        for order in ([0, 45, 30, 7, 22, 5, 6], [9]):
            actual, want = (collate(source.__getitems__(order)).numpy() for source in (dataset, whole))
            assert actual.tobytes() == want.tobytes()


def test_a_part_that_is_compressed_is_decoded(images, tmp_path):
    path = publish(tmp_path / "plate.parts", images, [12, 11])
    second = sorted((path / PARTS).iterdir())[1]
    convert(second, tmp_path / "packed.arrow", compression="zstd")
    (tmp_path / "packed.arrow").replace(second)
    dataset = OMEArrowDataset(path, preload=False, normalize=False)
    for which in ("numpy", "numba"):
        with made_by(which):
            for options in ({}, {"crop_size": (3, 4)}):
                dataset = OMEArrowDataset(path, preload=False, normalize=False, **options)
                actual = collate(dataset.__getitems__([22, 3, 12, 22, 0])).numpy()
                want = np.stack([images[number][0, :, 0] for number in (22, 3, 12, 22, 0)])
                np.testing.assert_array_equal(actual, want[..., 2:5, 2:6] if options else want)


def test_a_part_that_was_cut_is_an_error_and_the_others_are_read(images, tmp_path):
    path = publish(tmp_path / "plate.parts", images, [12, 11])
    dataset = OMEArrowDataset(path, preload=False)
    first, second = sorted((path / PARTS).iterdir())
    dataset.__getitems__([0, 22])
    with second.open("r+b") as file:
        file.truncate(4096)
    time.sleep(2 * STATUS_NS / 1e9)  # The file is checked again after `STATUS_NS`.
    dataset.__getitems__([0, 3])
    with raises(FormatError, path=second):
        dataset.__getitems__([0, 22])
    with raises(FormatError, path=second):
        dataset[20]
    assert first.exists()


def test_threads_that_close_each_others_parts(images, tmp_path, monkeypatch):
    monkeypatch.setattr(storage_parts.Parts, "max_open", 1)
    path = publish(tmp_path / "plate.parts", images, [4] * 5 + [3])
    dataset = OMEArrowDataset(path, preload=False, normalize=False)
    wrong = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            order = random.integers(0, COUNT, 6).tolist()
            actual = collate(dataset.__getitems__(order)).numpy()
            wrong.extend(n for n, got in zip(order, actual, strict=True) if not np.array_equal(got, images[n][0, :, 0]))

    with made_by("numba"):
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
