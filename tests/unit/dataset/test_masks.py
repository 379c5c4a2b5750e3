"""Masks of images: how they are found, cropped and returned, and the object mask of a crop."""

from __future__ import annotations

import pickle
import shutil
import sys
import types
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from omearrow_ds import (
    ArgumentError,
    ChecksumError,
    ColumnError,
    DecodeError,
    FormatError,
    MetadataError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    open_images,
    write_images,
)
from tests.support.errors import raises
from tests.support.plates import written_plate
from tests.support.strategies import NF1, image_of, slow_except

SHAPE = (1, 3, 1, 12, 14)
WELLS = ["A1", "A2", "B1"]
IMAGES = [image_of(SHAPE, "uint16", number) for number in range(3)]


def labels(number):
    """Return a label image of two objects, with values unique to the image."""
    mask = np.zeros((12, 14), np.int32)
    mask[1:5, 2:6] = 1 + 10 * number
    mask[6:11, 5:12] = 70_000 + number
    return mask


MASKS = [labels(number) for number in range(3)]


@pytest.fixture
def path(stored):
    return stored("arrow", IMAGES, image_ids=list("abc"), columns={"Metadata_Well": WELLS, "Metadata_Site": [1, 2, 3]})


def as_file(tmp_path, **options):
    write_images([MASKS[number] for number in (2, 0, 1)], tmp_path / "m.parquet", **options)
    return tmp_path / "m.parquet"


def as_folder(tmp_path):
    folder = tmp_path / "masks"
    folder.mkdir()
    for name, well, mask in zip("abc", WELLS, MASKS, strict=True):
        tifffile.imwrite(folder / f"{name}_MaskNuclei.tiff", mask)
        tifffile.imwrite(folder / f"{well}_s{1 + WELLS.index(well):02d}_x{name}.tif", mask)
        tifffile.imwrite(folder / f"{name}_MaskCells.tiff", mask * 0)
    return folder


FORMS = {
    "a path, by id": lambda folder: as_file(folder, image_ids=list("cab")),
    "a text": lambda folder: str(as_file(folder, image_ids=list("cab"))),
    "a source": lambda folder: open_images(as_file(folder, image_ids=list("cab"))),
    "by well": lambda folder: as_file(folder, columns={"Metadata_Well": ["B01", "A01", "A02"]}),
    "by what on says": lambda folder: {
        "path": as_file(folder, columns={"w": ["B1", "A1", "A2"]}),
        "on": {"Metadata_Well": "w"},
    },
    "files named after ids": lambda folder: f"{as_folder(folder)}/{{field}}_MaskNuclei.tiff",
    "files named after columns": lambda folder: f"{as_folder(folder)}/{{well}}_s{{site:02}}_x{{_}}.tif",
    "anything": lambda folder: as_folder(folder) / "{field}_{_}Nuclei.tif{_}",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_masks_of_any_form_are_paired_and_keep_their_labels(path, tmp_path, form):
    masks = form(tmp_path)
    for preload in (True, False):
        dataset = OMEArrowDataset(path, masks=masks, preload=preload)
        for number in (2, 0, 1, -1):
            image, mask = dataset[number]
            assert mask.dtype == torch.int32
            np.testing.assert_array_equal(mask.numpy(), MASKS[number])
            np.testing.assert_array_equal(image.numpy(), IMAGES[number][0, :, 0] / np.float32(65535))
        images, mask_batch = next(iter(OMEArrowDataLoader(dataset, 3)))
        assert (images.shape, mask_batch.shape) == ((3, 3, 12, 14), (3, 12, 14))
        np.testing.assert_array_equal(mask_batch.numpy(), np.stack(MASKS))


@pytest.mark.parametrize("form", ["a path, by id", "a source", "files named after ids"])
def test_masks_are_decoded_once_for_all_who_share_a_folder(path, tmp_path, form):
    masks = FORMS[form](tmp_path)
    for _ in range(2):
        dataset = OMEArrowDatasetNumpy(path, masks=masks, cache_dir=tmp_path / "cache")
        np.testing.assert_array_equal(np.stack([mask for _, mask in dataset]), MASKS)
        assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2


@pytest.mark.parametrize(("verify", "preload"), [(True, True), (True, False), (None, True)])
def test_masks_are_verified_as_images_are(path, tmp_path, verify, preload):
    write_images(MASKS, tmp_path / "m.tiffs", image_ids=list("abc"))
    file = next((tmp_path / "m.tiffs").glob("*b*.tif"))
    tifffile.imwrite(file, tifffile.imread(file) + 1)
    with raises(ChecksumError, path=tmp_path / "m.tiffs", mentions=("image 1", "'b'")):
        list(OMEArrowDatasetNumpy(path, masks=tmp_path / "m.tiffs", verify=verify, preload=preload))
    as_they_are = OMEArrowDatasetNumpy(path, masks=tmp_path / "m.tiffs", verify=False, preload=preload)
    np.testing.assert_array_equal(as_they_are[1][1], MASKS[1] + 1)


def test_files_named_after_images_of_several_sizes_are_their_masks(tmp_path):
    sizes = [(20, 30), (25, 10), (20, 30), (8, 8)]
    (tmp_path / "images").mkdir()
    for number, size in enumerate(sizes):
        tifffile.imwrite(tmp_path / "images" / f"{number}.tif", np.full(size, number, np.uint16))
        tifffile.imwrite(tmp_path / f"{number}_mask.tif", np.full(size, 10 + number, np.uint8))
    masks = tmp_path / "{field}_mask.tif"
    for preload in (True, False):
        dataset = OMEArrowDatasetNumpy(tmp_path / "images", masks=masks, normalize=False, preload=preload)
        for number, (image, mask) in enumerate(dataset):
            assert (image.shape, mask.shape) == ((1, *sizes[number]), sizes[number])
            assert (image == number).all()
            assert (mask == 10 + number).all()
    tifffile.imwrite(tmp_path / "2_mask.tif", np.zeros((30, 20), np.uint8))
    with raises(FormatError, path=tmp_path / "2_mask.tif"):
        OMEArrowDatasetNumpy(tmp_path / "images", masks=masks)


def test_a_column_of_the_same_table_is_the_mask(tmp_path):
    write_images(IMAGES, tmp_path / "i.parquet", image_ids=list("abc"))
    write_images(MASKS, tmp_path / "m.parquet", image_ids=list("xyz"))
    table = pq.read_table(tmp_path / "i.parquet")
    both = table.append_column("ome_arrow_label", pq.read_table(tmp_path / "m.parquet")["ome_image"])
    pq.write_table(both, tmp_path / "both.parquet", row_group_size=1)
    dataset = OMEArrowDatasetNumpy(tmp_path / "both.parquet", masks="ome_arrow_label", return_ids=True, preload=False)
    for (image, mask, image_id), expected, number in zip(dataset, MASKS, range(3), strict=False):
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(image, IMAGES[number][0, :, 0] / np.float32(65535))
        assert image_id == "abc"[number]


def cells(rows):
    """Return a table of objects: (image, Y, X, label)."""
    names = ("image_id", "centroid_y", "centroid_x", "Metadata_ObjectNumber")
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_the_mask_is_cut_with_the_cell_and_the_background_taken_away(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("m")
    write_images(IMAGES, folder / "i.arrow", image_ids=list("abc"))
    write_images(MASKS, folder / "m.arrow", image_ids=list("abc"))
    centers = {True: (3, 4), False: (8, 8)}
    drawn_objects = data.draw(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5))
    label = [int(MASKS[number][centers[first]]) for number, first in drawn_objects]
    table = cells(
        [("abc"[number], *centers[first], value) for (number, first), value in zip(drawn_objects, label, strict=True)]
    )
    size = data.draw(st.tuples(st.integers(2, 16), st.integers(2, 16)))
    pad = data.draw(st.sampled_from([None, "edge", "reflect"]))
    options = {"objects": table, "crop_size": size, "pad": pad, "preload": data.draw(st.booleans()), "normalize": False}
    plain = OMEArrowDatasetNumpy(folder / "i.arrow", masks=folder / "m.arrow", **options)
    alone = OMEArrowDatasetNumpy(folder / "m.arrow", axes="YX", **options)
    clear = OMEArrowDatasetNumpy(folder / "i.arrow", masks=folder / "m.arrow", mask_background=True, **options)
    for number, value in enumerate(label):
        image, mask = plain[number]
        np.testing.assert_array_equal(mask, alone[number])
        cleared, only = clear[number]
        np.testing.assert_array_equal(only, np.where(mask == value, mask, 0))
        np.testing.assert_array_equal(cleared, np.where(mask == value, image, 0))
        for batched, single in zip(clear.__getitems__([number])[0], (cleared, only), strict=True):
            np.testing.assert_array_equal(batched, single)


def test_in_binary_masks_the_object_is_what_is_connected_with_its_centre(path, tmp_path):
    binary = [(mask > 0).astype(np.uint8) * 255 for mask in MASKS]
    write_images(binary, tmp_path / "b.arrow", image_ids=list("abc"))
    table = cells([("a", 3, 4, 1), ("a", 8, 8, 2), ("b", 3, 4, 1), ("b", 0, 13, 2)])
    dataset = OMEArrowDatasetNumpy(
        path, objects=table, crop_size=(11, 11), masks=tmp_path / "b.arrow", mask_background=True, normalize=False
    )
    plain = OMEArrowDatasetNumpy(path, objects=table, crop_size=(11, 11), masks=tmp_path / "b.arrow", normalize=False)
    for number in range(3):
        image, mask = dataset[number]
        regions, _ = ndimage.label(plain[number][1])
        expected = regions == regions[5, 5]
        np.testing.assert_array_equal(mask, expected * np.uint8(255))
        np.testing.assert_array_equal(image, plain[number][0] * expected)
    with raises(DecodeError, path=tmp_path / "b.arrow", mentions=("row 3", "'b'")):
        dataset[3]
    without_null = OMEArrowDataset(
        path, objects=table, crop_size=(11, 11), masks=tmp_path / "b.arrow", mask_background=True, nulls="skip"
    )
    assert (len(without_null), without_null.objects["centroid_x"].to_pylist()) == (3, [4, 8, 4])


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_scaled_mask_lies_where_the_image_does(tmp_path, dtype):
    mask = np.zeros((7, 5), dtype)
    mask[3, 2] = mask[3, 0] = 255
    write_images([np.where(mask, np.float32(1), np.float32(0))], tmp_path / "i.arrow", image_ids=["a"])
    write_images([mask], tmp_path / "m.arrow", image_ids=["a"])
    box = {"y0": [0], "y1": [7], "x0": [0], "x1": [5]}
    options = {"objects": pa.table({"image_id": ["a"], **box}), "box": tuple(box), "axes": "YX"}
    for size in ((7, 5), (21, 15), (12, 13), (40, 8)):
        image, scaled_mask = OMEArrowDatasetNumpy(
            tmp_path / "i.arrow", masks=tmp_path / "m.arrow", resize=size, mask_background=True, **options
        )[0]
        rows, columns = (
            (2 * np.arange(to) + 1) * length // (2 * to) for to, length in zip(size, mask.shape, strict=True)
        )
        np.testing.assert_array_equal(scaled_mask, np.where(np.outer(rows == 3, columns == 2), 255, 0))
        np.testing.assert_array_equal(np.where(scaled_mask, image, 0), image)


@pytest.mark.parametrize("pad", ["constant", "edge", "reflect", "shift"])
def test_an_object_on_the_last_edge_is_found_in_a_binary_mask(path, tmp_path, pad):
    mask = np.zeros((12, 14), np.uint8)
    mask[9:, 11:] = 255
    write_images([mask] * 3, tmp_path / "b.arrow", image_ids=list("abc"))
    ((image, mask_crop),) = OMEArrowDatasetNumpy(
        path,
        objects=cells([("a", 11.5, 13.5, 1)]),
        crop_size=(5, 5),
        pad=pad,
        masks=tmp_path / "b.arrow",
        mask_background=True,
        normalize=False,
    )
    assert mask_crop.any()
    assert image[:, mask_crop > 0].any()


def test_a_random_crop_and_a_grid_cut_both_alike(path, tmp_path):
    numbered_pixels = [np.arange(12 * 14, dtype=np.uint16).reshape(1, 1, 1, 12, 14)] * 3
    write_images(numbered_pixels, tmp_path / "p.arrow", image_ids=list("abc"))
    write_images(numbered_pixels, tmp_path / "i.arrow", image_ids=list("abc"))
    for crop in ("random", "grid", "center"):
        dataset = OMEArrowDataset(
            tmp_path / "i.arrow", masks=tmp_path / "p.arrow", crop=crop, crop_size=(5, 4), normalize=False
        )
        for images, masks in OMEArrowDataLoader(dataset, 2, shuffle=True, num_workers=0):
            assert torch.equal(images[:, 0], masks)
        scaled = OMEArrowDataset(path, masks=tmp_path / "p.arrow", crop=crop, crop_size=(5, 4))
        assert [part.dtype for part in scaled[0]] == [torch.float32, torch.uint16]


def test_masks_go_to_workers_pickles_views_targets_and_transforms(path, tmp_path, monkeypatch):
    masks = as_file(tmp_path, image_ids=list("cab"))

    def flipped(image, mask):
        return image.flip(-1), mask.flip(-1)

    dataset = OMEArrowDataset(
        path, masks=masks, target="Metadata_Well", return_ids=True, transform=flipped, preload=False
    )
    for again in (dataset, pickle.loads(pickle.dumps(dataset.with_transform(None))).with_transform(flipped)):
        for number, (image, mask, target, image_id) in enumerate(OMEArrowDataLoader(again, None, num_workers=1)):
            np.testing.assert_array_equal(mask.numpy(), MASKS[number][:, ::-1])
            np.testing.assert_array_equal(image.numpy(), (IMAGES[number][0, :, 0] / np.float32(65535))[..., ::-1])
            assert (target, image_id) == (number, "abc"[number])
    part = dataset.split((0.67, 0.33))[0]
    assert [len(sample) for sample in part] == [4, 4] if len(part) == 2 else len(part[0]) == 4
    with raises(ArgumentError, option="transform", mentions="masks=", remedy=False):
        OMEArrowDataset(path, masks=masks, transform=lambda image, mask: image)[0]

    class Mask(torch.Tensor):
        """Fake of torchvision's class, as torchvision is not installed in tests."""

        def __new__(cls, data):
            return data.as_subclass(cls)

    module = types.ModuleType("torchvision.tv_tensors")
    module.Mask = Mask
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", module)
    from omearrow_ds.dataset import masks as under_test

    under_test._mask_type.cache_clear()
    type_pairs = []

    def typed(image, mask):
        type_pairs.append((type(image), type(mask)))
        return image, mask

    assert type(OMEArrowDataset(path, masks=masks, transform=typed)[0][1]) is torch.Tensor
    assert type_pairs == [(torch.Tensor, Mask)]
    under_test._mask_type.cache_clear()


def test_what_cannot_be_is_said(path, tmp_path):
    masks = as_file(tmp_path, image_ids=list("xab"))
    with raises(MetadataError, path=masks, mentions=("1 of 3", "'c'", "nulls='skip'")):
        OMEArrowDataset(path, masks=masks)
    assert OMEArrowDataset(path, masks=masks, nulls="skip").image_ids == ["a", "b"]
    for masks_, error, facts in [
        (3, ArgumentError, "masks=3"),
        ({"pattern": "x"}, ArgumentError, ("masks={'pattern': 'x'}", "path")),
        ("nothing", MissingPathError, "masks='nothing'"),
        (f"{tmp_path}/masks/a_MaskCell.tiff", MissingPathError, "'a_MaskCells.tiff'"),
        (f"{as_folder(tmp_path)}/{{plate}}.tif", ColumnError, ("masks=", "{plate}", "'Metadata_Well'")),
        (f"{tmp_path}/masks/{{field}}_Mask{{_}}.tiff", MetadataError, ("'a'", "'a_MaskCells.tiff'")),
        (f"{tmp_path}/masks/{{field}}.png", MetadataError, ("'{field}.png'", "['a']")),
        (f"{tmp_path}/masks/{{field}}_MaskCell.tiff", MetadataError, "'c_MaskCells.tiff'"),
        (f"{tmp_path}/{{well}}/x.tif", ArgumentError, ("masks=", "{well}")),
    ]:
        with raises(error, mentions=facts, remedy=False):
            OMEArrowDataset(path, masks=masks_)
    write_images([mask[:-1] for mask in MASKS], tmp_path / "small.arrow", image_ids=list("abc"))
    with raises(MetadataError, path=tmp_path / "small.arrow", mentions=("'a'", "11 x 14", "12 x 14"), remedy=False):
        OMEArrowDataset(path, masks=tmp_path / "small.arrow")
    with raises(ArgumentError, option="mask_background", mentions="objects="):
        OMEArrowDataset(path, masks=masks, nulls="skip", mask_background=True)
    with raises(ArgumentError, option="mask_background", mentions="masks="):
        OMEArrowDataset(path, mask_background=True)
    table = cells([("a", 3, 4, 1), ("a", 8, 8, 2)])
    with raises(DecodeError, mentions=("row 1", "'a'", "label 2", "Metadata_ObjectNumber")):
        _clear(path, table, tmp_path)[1]


def test_equal_ids_of_other_wells_are_refused(path, tmp_path):
    masks = as_file(tmp_path, image_ids=list("abc"), columns={"Metadata_Well": ["B01", "A01", "A02"]})
    with raises(MetadataError, path=masks, mentions=("row 0", "'a'", "Metadata_Well", "'B01'", "'A01'", "on=")):
        OMEArrowDataset(path, masks=masks)
    assert len(OMEArrowDataset(path, masks={"path": masks, "on": "Metadata_Well"})) == 3
    objects = pa.table({"image_id": ["a"], "Metadata_Well": ["A02"], "centroid_y": [3], "centroid_x": [4]})
    with raises(MetadataError, option="objects", mentions=("row 0", "'a'", "Metadata_Well", "'A02'", "'A01'")):
        OMEArrowDataset(path, objects=objects, crop_size=(4, 4))
    assert len(OMEArrowDataset(path, objects=objects, on="image_id", crop_size=(4, 4))) == 1


def test_a_class_is_not_taken_for_the_number_of_another_object(path, tmp_path):
    table = pa.table({"image_id": ["a", "a"], "centroid_y": [3, 8], "centroid_x": [4, 8], "label": [1, 1]})
    with raises(DecodeError, mentions=("row 1", "'a'", "label", 1, 70000)):
        _clear(path, table, tmp_path, size=(12, 12))[1]


def test_an_index_error_of_a_transform_does_not_end_an_iteration(path):
    with pytest.raises(IndexError, match="mine"):
        list(OMEArrowDataset(path, transform=lambda image: {}.get(0) or _raise(IndexError("mine"))))


def _raise(error):
    raise error


def _clear(path, table, tmp_path, size=(4, 4)):
    write_images(MASKS, tmp_path / "all.arrow", image_ids=list("abc"))
    return OMEArrowDataset(path, objects=table, crop_size=size, masks=tmp_path / "all.arrow", mask_background=True)


@pytest.mark.skipif(not NF1.is_dir(), reason="the NF1 images are not here")
def test_ten_lines_from_files_to_cells_masks_and_wells():
    dataset = OMEArrowDataset(
        NF1,
        pattern="{well}_01_{_}_{site}_{channel}_001.tif",
        objects=NF1 / "cells.parquet",
        crop_size=(64, 64),
        masks=NF1 / "masks/{field}_MaskNuclei.tiff",
        target="Metadata_Well",
    )
    rows = pq.read_table(NF1 / "cells.parquet").to_pylist()
    num_cells = 0
    for cells_, masks, wells in OMEArrowDataLoader(dataset, 32):
        assert cells_.shape[1:] == (3, 64, 64)
        for mask, well in zip(masks, wells, strict=True):
            row = rows[num_cells]
            stem = row["Image_FileName_DAPI"].removesuffix(".tif")
            whole = np.pad(tifffile.imread(NF1 / f"masks/{stem}_MaskNuclei.tiff"), 64)
            top, left = (int(np.floor(row[f"Nuclei_Location_Center_{axis}"] - 31)) + 64 for axis in "YX")
            np.testing.assert_array_equal(mask.numpy(), whole[top : top + 64, left : left + 64])
            assert dataset.classes[well] == row["Metadata_Well"]
            num_cells += 1
    assert num_cells == 132


LABELLED = {"A/1": [0, 1], "B/2": [2]}  # Fields 0 to 2.
OF_ZARR = [image_of((1, 2, 1, 15, 20), "uint16", number) for number in range(3)]
LABELS = [(np.arange(300, dtype=np.int32).reshape(1, 1, 15, 20) // 30 + 70_000 * number) for number in range(3)]


def zarr_plate(path, version, absent=(), names=("nuclei",)):
    """Return a plate of three fields with label images, written by zarr."""
    wells = {well: [OF_ZARR[number] for number in numbers] for well, numbers in LABELLED.items()}
    labels = {
        well: [None if number in absent else LABELS[number] for number in numbers] for well, numbers in LABELLED.items()
    }
    return written_plate(path, wells, version, label_images=dict.fromkeys(names, labels))


@pytest.mark.parametrize(
    ("version", "preload"), slow_except([("0.4", True), ("0.5", False)], product(["0.4", "0.5"], [True, False]))
)
def test_label_images_of_a_zarr_plate_are_masks(tmp_path, version, preload):
    path = zarr_plate(tmp_path / "p.zarr", version, names=("cells", "nuclei"))
    for name in ("labels/nuclei", "cells"):
        dataset = OMEArrowDatasetNumpy(path, masks=name, preload=preload, normalize=False)
        again = pickle.loads(pickle.dumps(dataset))
        for opened in (dataset, again):
            for number, (image, mask) in enumerate([opened[number] for number in range(3)]):
                np.testing.assert_array_equal(image, OF_ZARR[number][0, :, 0])
                np.testing.assert_array_equal(mask, LABELS[number][0, 0])
                assert mask.dtype == np.int32
    half = OMEArrowDatasetNumpy(path, masks="labels/nuclei", level=1, preload=preload, normalize=False)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(half))[2][1], LABELS[2][0, 0, ::2, ::2])
    objects = cells([("B/2/0", 0, 19, 140_000), ("A/1/1", 7, 8, 70_004)])
    cut = OMEArrowDatasetNumpy(
        path, objects=objects, crop_size=(5, 4), masks="labels/nuclei", preload=preload, normalize=False
    )
    np.testing.assert_array_equal(cut[1][1], LABELS[1][0, 0, 5:10, 7:11])
    np.testing.assert_array_equal(cut[0][1], np.pad(LABELS[2][0, 0], 3)[1:6, 21:25])
    alone = OMEArrowDatasetNumpy(
        path, objects=objects, crop_size=(5, 4), masks="labels/nuclei", mask_background=True, preload=preload
    )
    assert set(np.unique(alone[1][1])) == {0, 70_004}


def test_the_same_of_a_folder_of_zarr_images_and_of_one(tmp_path):
    path = zarr_plate(tmp_path / "p.zarr", "0.5")
    folder = tmp_path / "images"
    folder.mkdir()
    for number, field in enumerate(("A/1/0", "A/1/1", "B/2/0")):
        shutil.copytree(path / field, folder / f"{'abc'[number]}.ome.zarr")
    dataset = OMEArrowDatasetNumpy(folder, masks="labels/nuclei", return_ids=True, normalize=False)
    for number, (_, mask, image_id) in enumerate([dataset[number] for number in range(3)]):
        np.testing.assert_array_equal(mask, LABELS[number][0, 0])
        assert image_id == "abc"[number]
    one = OMEArrowDatasetNumpy(folder / "b.ome.zarr", masks="labels/nuclei", normalize=False, cache_dir=tmp_path)
    np.testing.assert_array_equal(one[0][1], LABELS[1][0, 0])
    np.testing.assert_array_equal(one[0][0], OF_ZARR[1][0, :, 0])
    write_images(OF_ZARR, tmp_path / "own.zarr", image_ids=list("abc"))
    for number, image in enumerate(sorted((tmp_path / "own.zarr").glob("*.ome.zarr"))):
        shutil.copytree(folder / f"{'abc'[number]}.ome.zarr" / "labels", image / "labels")
    own = OMEArrowDatasetNumpy(tmp_path / "own.zarr", masks="labels/nuclei", normalize=False, preload=False)
    for number in range(3):
        np.testing.assert_array_equal(own[number][1], LABELS[number][0, 0])


def test_fields_without_a_label_image_are_told_or_left_out(tmp_path):
    path = zarr_plate(tmp_path / "p.zarr", "0.5", absent=(1,))
    with raises(MetadataError, path=path, mentions=("1 of 3", "'A/1/1'", "nulls='skip'")):
        OMEArrowDataset(path, masks="labels/nuclei")
    images_with_masks = OMEArrowDatasetNumpy(
        path, masks="labels/nuclei", nulls="skip", normalize=False, return_ids=True
    )
    assert [images_with_masks[number][2] for number in range(len(images_with_masks))] == ["A/1/0", "B/2/0"]
    np.testing.assert_array_equal(images_with_masks[1][1], LABELS[2][0, 0])
    with raises(ArgumentError, option="masks", path=path, mentions=("'labels/cells'", "'labels/nuclei'"), remedy=False):
        OMEArrowDataset(path, masks="labels/cells")
    with raises(ArgumentError, option="masks", path=path, mentions="'labels/../0'", remedy=False):
        OMEArrowDataset(path, masks="labels/../0")
    with raises(MissingPathError, option="masks", path=path, mentions="'labels/nuclei'", remedy=False):
        OMEArrowDataset(path, masks="cells")
    write_images(OF_ZARR, tmp_path / "f.arrow")
    with raises(ArgumentError, option="masks", path=tmp_path / "f.arrow", mentions="Arrow IPC", remedy=False):
        OMEArrowDataset(tmp_path / "f.arrow", masks="labels/nuclei")
