"""Label images of bool, int64 and uint64 as masks, from tifffile, zarr and ome-arrow's types."""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
import tifffile
import torch

from omearrow_ds import (
    DecodeError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    Storage,
    convert,
    open_images,
    write_images,
)
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.plates import written_plate
from tests.support.raw_tables import store_table, struct_of
from tests.support.strategies import SUFFIX, TABLES

READ_AS = {"bool": "uint8", "int64": "int32", "uint64": "int32", "uint32": "uint32"}
IMAGES = [np.arange(20 * 24, dtype=np.uint16).reshape(20, 24) + 40_000 + number for number in range(3)]
IDS = list("abc")
TOO_LARGE = {"int64": (2**31, -(2**31) - 1), "uint64": (2**31, 2**64 - 1)}
wide = pytest.mark.parametrize("dtype", ["bool", "int64", "uint64"])
preloads = pytest.mark.parametrize("preload", [True, False], ids=["preloaded", "on demand"])


def labels_of(number, dtype="int64"):
    """Return a label image whose values encode the pixel position."""
    y, x = np.mgrid[:20, :24]
    labels = np.where((y + x + number) % 3 == 0, 0, 1 + number + 100 * y + x)
    return (labels + 10**9 * (labels > 0)).astype(dtype)


@pytest.fixture
def images(tmp_path):
    write_images(IMAGES, tmp_path / "images.arrow", image_ids=IDS)
    return tmp_path / "images.arrow"


def tiffs(folder, masks, **how):
    folder.mkdir()
    for name, mask in zip(IDS, masks, strict=True):
        tifffile.imwrite(folder / f"{name}.tif", mask, photometric="minisblack", **how)
    return folder


def table(folder, masks, name="parquet"):
    rows = [struct_of([[mask[None, None, None]]], id=image_id) for image_id, mask in zip(IDS, masks, strict=True)]
    return store_table(name, pa.table({"ome_image": pa.concat_arrays(rows)}), folder / f"masks{SUFFIX[name]}")


FORMS = {
    "TIFF by name": lambda folder, masks: f"{tiffs(folder / 'm', masks)}/{{field}}.tif",
    "TIFF folder": lambda folder, masks: tiffs(folder / "m", masks),
    "tiles": lambda folder, masks: tiffs(folder / "m", masks, compression="zlib", tile=(16, 16)),
    "big-endian": lambda folder, masks: tiffs(folder / "m", masks, byteorder=">"),
    **{f"table of {name}": lambda folder, masks, name=name: table(folder, masks, name) for name in TABLES},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", READ_AS)
@pytest.mark.share(4, "form", "dtype")
def test_masks_are_read_by_their_declared_dtype(images, tmp_path, form, dtype):
    masks = [labels_of(number, dtype) for number in range(3)]
    path = form(tmp_path, masks)
    for preload in (True, False):
        dataset = OMEArrowDataset(images, masks=path, axes="YX", preload=preload)
        for number, (_, mask) in enumerate(dataset):
            assert mask.numpy().dtype == READ_AS[dtype]
            np.testing.assert_array_equal(mask.numpy(), masks[number])
        grid = OMEArrowDatasetNumpy(images, masks=path, axes="YX", preload=preload, crop="grid", crop_size=(10, 8))
        np.testing.assert_array_equal(grid[4][1], masks[0][10:, 8:16])


@wide
@preloads
@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.share(3, "dtype", "preload", "version")
def test_label_images_of_a_plate_are_read_by_their_declared_dtype(tmp_path, dtype, preload, version):
    wells = {"A/1": [image[None, None, None] for image in IMAGES]}
    labels = {"nuclei": {"A/1": [labels_of(number, dtype)[None, None] for number in range(3)]}}
    path = written_plate(tmp_path / "p.zarr", wells, version, label_images=labels)
    for level, step in enumerate((1, 2)):
        dataset = OMEArrowDatasetNumpy(path, masks="labels/nuclei", axes="YX", preload=preload, level=level)
        for number, (_, mask) in enumerate(dataset):
            assert mask.dtype == READ_AS[dtype]
            np.testing.assert_array_equal(mask, labels_of(number, dtype)[::step, ::step])


@wide
def test_a_column_of_the_same_table_is_a_mask_of_its_declared_dtype(tmp_path, dtype):
    pairs = [(image, labels_of(number, dtype)) for number, image in enumerate(IMAGES)]
    columns = (
        pa.concat_arrays([struct_of([[one[None, None, None]]]) for one in column_images])
        for column_images in zip(*pairs, strict=True)
    )
    path = store_table(
        "parquet", pa.table(dict(zip(("ome_image", "cells"), columns, strict=True))), tmp_path / "t.parquet"
    )
    dataset = OMEArrowDatasetNumpy(path, image_column="ome_image", masks="cells", axes="YX", normalize=False)
    for (image, mask), (expected, labels) in zip(dataset, pairs, strict=True):
        np.testing.assert_array_equal(image, expected)
        np.testing.assert_array_equal(mask, labels)
        assert mask.dtype == READ_AS[dtype]


@preloads
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.share(2, "preload", "background")
def test_crops_of_int64_masks_keep_their_object_in_workers(images, tmp_path, preload, background):
    masks = [np.zeros((20, 24), np.int64) for _ in IMAGES]
    for number, mask in enumerate(masks):
        mask[4:9, 4:9], mask[9:14, 9:14] = 7 + 2**30, 9 + number
    objects = pa.table(
        {"image_id": IDS, "y": [6, 11, 6], "x": [6, 11, 6], "Metadata_ObjectNumber": [7 + 2**30, 10, 7 + 2**30]}
    )
    dataset = OMEArrowDataset(
        images,
        objects=objects,
        center=("y", "x"),
        crop_size=(7, 7),
        masks=tiffs(tmp_path / "m", masks),
        mask_background=background,
        axes="YX",
        preload=preload,
    )
    ((_, mask_batch),) = OMEArrowDataLoader(dataset, 3, num_workers=2)
    assert mask_batch.dtype == torch.int32
    for number, (y, label) in enumerate([(6, 7 + 2**30), (11, 10), (6, 7 + 2**30)]):
        window = masks[number][y - 3 : y + 4, y - 3 : y + 4]
        np.testing.assert_array_equal(
            mask_batch[number].numpy(), np.where(window == label, label, 0) if background else window
        )


BEYOND = [(dtype, value) for dtype, values in TOO_LARGE.items() for value in values]


@pytest.mark.parametrize(("dtype", "value"), BEYOND)
@pytest.mark.parametrize("form", ["TIFF by name", "tiles", "table of parquet", "table of duckdb"])
@pytest.mark.share(4, "dtype", "value", "form")
def test_a_label_beyond_int32_is_an_error_when_its_mask_is_read(images, tmp_path, form, dtype, value):
    masks = [labels_of(number, dtype) for number in range(3)]
    masks[1][19, 23] = value
    path = FORMS[form](tmp_path, masks)
    dataset = OMEArrowDatasetNumpy(images, masks=path, axes="YX", preload=False)
    np.testing.assert_array_equal(dataset[0][1], masks[0])
    with raises(DecodeError, mentions=(value, "'b'")):
        dataset[1]
    np.testing.assert_array_equal(dataset[2][1], masks[2])
    with raises(DecodeError, mentions=(value, "'b'")):
        OMEArrowDatasetNumpy(images, masks=path, axes="YX")


def test_the_largest_labels_of_int32_are_read(images, tmp_path):
    masks = [np.array([[-(2**31), 2**31 - 1]], np.int64).repeat(20, axis=0).repeat(12, axis=1)] * 3
    dataset = OMEArrowDatasetNumpy(images, masks=tiffs(tmp_path / "m", masks), axes="YX")
    np.testing.assert_array_equal(dataset[0][1], masks[0])


@wide
def test_images_of_wide_dtypes_stay_an_error(tmp_path, dtype):
    masks = [labels_of(number, dtype) for number in range(3)]
    for path, image_id in ((tiffs(tmp_path / "m", masks), "'a'"), (table(tmp_path, masks), "'a'")):
        for attempt in (open_images, OMEArrowDataset, lambda path: convert(path, tmp_path / "out.arrow")):
            with raises(DecodeError, path=path, mentions=(dtype, image_id, "masks=")):
                attempt(path)


@wide
def test_masks_in_a_bucket_are_read_by_their_declared_dtype(images, tmp_path, dtype):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    masks = [labels_of(number, dtype) for number in range(3)]
    (tmp_path / "served" / "lab").mkdir(parents=True)
    shutil.copytree(tiffs(tmp_path / "m", masks), tmp_path / "served" / "lab" / "m")
    shutil.copy(table(tmp_path, masks), tmp_path / "served" / "lab" / "m.parquet")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        for name, preload in product(("m", "m.parquet"), (True, False)):
            masks_option = {"path": f"s3://lab/{name}", "storage": storage}
            dataset = OMEArrowDatasetNumpy(images, masks=masks_option, axes="YX", preload=preload)
            for number, (_, mask) in enumerate(dataset):
                np.testing.assert_array_equal(mask, masks[number])
                assert mask.dtype == READ_AS[dtype]
