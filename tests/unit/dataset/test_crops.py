"""Crops of images around objects, on a grid and at random; the oracle is a loop over pixels."""

from __future__ import annotations

import pickle
import warnings
from itertools import product

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    AxesError,
    ColumnError,
    MetadataError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    open_images,
    stats,
    write_embeddings,
    write_images,
)
from omearrow_ds.storage.source import open_source
from tests.support.errors import raises, warns
from tests.support.loops import made_by
from tests.support.strategies import DTYPES, NAMES, NF1, SUFFIX, image_of, images_of, slow_except

SHAPE = (1, 2, 2, 9, 11)
SITES = ["a", "b", "c"]


def oracle(image, top, left, height, width, pad):
    """Return a window of an image (..., Y, X), built pixel by pixel."""
    crop = np.zeros((*image.shape[:-2], height, width), image.dtype)
    for y in range(height):
        for x in range(width):
            position = [
                _pixel(first, size, pad) for first, size in zip((top + y, left + x), image.shape[-2:], strict=True)
            ]
            if None not in position:
                crop[..., y, x] = image[..., position[0], position[1]]
    return crop


def _pixel(position, size, pad):
    while not 0 <= position < size:
        if pad == "constant":
            return None
        position = (
            (0 if position < 0 else size - 1)
            if pad == "edge" or size == 1
            else -position
            if position < 0
            else 2 * (size - 1) - position
        )
    return position


def corner(centre, length):
    """Return the first pixel of the window whose middle is nearest to the center; ties go to the larger index."""
    middles = {first: first + (length - 1) / 2 for first in range(-40, 60)}
    return max(middles, key=lambda first: (-abs(middles[first] - centre), first))


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Images by format and kind: of one shape, or ragged. Each collection is written on first access."""
    folder = tmp_path_factory.mktemp("crops")
    columns = {"Metadata_Site": SITES, "Metadata_Well": ["A1", "A1", "B2"]}
    ragged = [(SHAPE, "int32"), ((1, 2, 2, 5, 6), "int32"), ((1, 2, 2, 20, 7), "int32")]

    class Stores(dict):
        def __missing__(self, key):
            name, kind = key
            images = images_of([(SHAPE, "uint16")] * 3 if kind == "same" else ragged)
            path = folder / f"{kind}-{name}{SUFFIX[name]}"
            write_images(images, path, name, image_ids=SITES, columns=columns)
            self[key] = path, images
            return self[key]

    return Stores()


def cells(centers, sites=None):
    """Return a table of objects at (Y, X) in the images."""
    sites = sites or [SITES[number % 3] for number in range(len(centers))]
    return pa.table(
        {
            "image_id": sites,
            "Nuclei_Location_Center_Y": [float(y) for y, _ in centers],
            "Nuclei_Location_Center_X": [float(x) for _, x in centers],
            "Metadata_ObjectNumber": list(range(1, len(centers) + 1)),
            "label": [f"kind {number % 2}" for number in range(len(centers))],
        }
    )


FEW_STORES = [("arrow", "same", "numba"), ("parquet", "ragged", "numpy"), ("tiff", "same", "numpy")]


@pytest.mark.parametrize(
    ("name", "kind", "loop"), slow_except(FEW_STORES, product(NAMES, ["same", "ragged"], ["numpy", "numba"]))
)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_crop_is_that_of_the_oracle(stores, name, kind, loop, data):
    path, images = stores[name, kind]
    size = data.draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    pad = data.draw(st.sampled_from([None, "constant", "edge", "reflect"]))
    field_indices = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    quarters = [
        [data.draw(st.integers(-2, 4 * length - 2)) / 4 for length in images[n].shape[3:]] for n in field_indices
    ]
    table = cells(quarters, [SITES[number] for number in field_indices])
    select = data.draw(st.sampled_from([None, {"C": [1, 0]}, {"Z": slice(None, None, -1)}, {"C": [0, 1, 0], "Z": 1}]))
    axes = data.draw(st.sampled_from(["CZYX", "ZCYX", "YXCZ", "TCZYX"]))
    normalize = data.draw(st.sampled_from([True, False, {"mean": [3, 5], "std": 7}, {"low": 2, "high": 90}]))
    datasets = [
        OMEArrowDatasetNumpy(
            path,
            objects=table,
            crop_size=size,
            pad=pad,
            select=select,
            axes=axes,
            normalize=normalize,
            preload=preload,
            cache_bytes=0 if preload else data.draw(st.sampled_from([0, 10**6])),
        )
        for preload in (True, False)
    ]
    whole = OMEArrowDatasetNumpy(path, axes="TCZYX", select=select, normalize=normalize)
    with made_by(loop):
        _compare(
            datasets,
            whole,
            field_indices,
            quarters,
            size,
            pad,
            axes,
            data.draw(st.lists(st.integers(0, len(field_indices) - 1), max_size=8)),
        )


def _compare(datasets, whole, field_numbers, quarters, size, pad, axes, order):
    for number, (field, (y, x)) in enumerate(zip(field_numbers, quarters, strict=True)):
        expected = oracle(whole[field], corner(y, size[0]), corner(x, size[1]), *size, pad or "constant")
        expected = (
            expected.transpose([("TCZYX").index(axis) for axis in axes if axis in "CZYX" or axes == "TCZYX"])
            if axes == "TCZYX"
            else expected[0].transpose(["CZYX".index(axis) for axis in axes])
        )
        for dataset in datasets:
            assert dataset[number].dtype == expected.dtype
            np.testing.assert_array_equal(dataset[number], expected)
    for dataset in datasets:
        for sample, number in zip(dataset.__getitems__(order), order, strict=True):
            np.testing.assert_array_equal(sample, dataset[number])


@pytest.mark.parametrize("name", ["arrow", "tiff"])
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("pad", ["constant", "edge", "reflect"])
def test_crop_of_selected_planes_may_be_beyond_the_last_pixel(stores, name, pad, preload):
    path, images = stores[name, "same"]
    table = cells([(3, 10.5)])  # The window of one pixel is column 11 of 0 to 10.
    options = {"objects": table, "crop_size": (1, 1), "pad": pad, "preload": preload, "normalize": False}
    sample = OMEArrowDatasetNumpy(path, select={"C": [0, 1, 0], "Z": 1}, **options)[0]
    expected = oracle(images[0][0, [0, 1, 0], 1], 3, 11, 1, 1, pad)
    np.testing.assert_array_equal(sample, expected)


def test_numbers_that_are_no_labels_make_no_ids(stores):
    path, _ = stores["arrow", "same"]
    for hashes in ([2**62, 2**62 + 1], [2**53 + 1, 7]):
        table = pa.table({"image_id": ["a", "b"], "centroid_y": [1, 2], "centroid_x": [3, 4], "label": hashes})
        dataset = OMEArrowDatasetNumpy(path, objects=table, crop_size=(3, 3), axes="CZYX")
        assert dataset.image_ids == ["a:0", "b:1"]
        assert dataset.columns["label"].to_pylist() == hashes


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_and_illumination(tmp_path, dtype):
    images = [image_of((1, 2, 1, 8, 9), dtype, number) for number in range(2)]
    write_images(images, tmp_path / "i.arrow")
    table = cells([(0, 0), (7, 8), (3.5, 4)], ["image-00000", "image-00001", "image-00000"])
    illumination = [np.linspace(1, 2, 72).reshape(8, 9), np.linspace(2, 1, 72).reshape(8, 9)]
    whole = OMEArrowDatasetNumpy(tmp_path / "i.arrow", illumination=illumination)
    for pad in ("constant", "reflect"):
        for preload in (True, False):
            crops = OMEArrowDatasetNumpy(
                tmp_path / "i.arrow",
                illumination=illumination,
                objects=table,
                crop_size=(5, 4),
                pad=pad,
                preload=preload,
            )
            for number, (field, y, x) in enumerate([(0, -2, -1), (1, 5, 7), (0, 2, 3)]):
                np.testing.assert_array_equal(crops[number], oracle(whole[field], y, x, 5, 4, pad))


def test_shift_moves_inside_and_drop_leaves_out(stores):
    path, images = stores["arrow", "same"]
    table = cells([(0, 0), (8, 10), (4, 5), (4, 10.4)])
    shifted = OMEArrowDatasetNumpy(path, objects=table, crop_size=(4, 5), pad="shift", axes="CZYX", normalize=False)
    for number, (y, x) in enumerate([(0, 0), (5, 6), (3, 3), (3, 6)]):
        np.testing.assert_array_equal(shifted[number], images[number % 3][0, ..., y : y + 4, x : x + 5])
    remaining = OMEArrowDatasetNumpy(
        path, objects=table, crop_size=(4, 5), pad="drop", axes="CZYX", normalize=False, return_ids=True
    )
    assert (
        len(remaining),
        remaining._collection.crops.num_dropped,
        remaining.objects["Metadata_ObjectNumber"].to_pylist(),
    ) == (
        1,
        3,
        [3],
    )
    np.testing.assert_array_equal(remaining[0][0], images[2][0, ..., 3:7, 3:8])
    assert "3 left out" in repr(remaining)
    with raises(AxesError, mentions=("pad='shift'", "crop_size=(10, 5)", "9 x 11")):
        OMEArrowDataset(path, objects=table, crop_size=(10, 5), pad="shift", axes="CZYX")


def test_boxes_give_ragged_crops_or_centred_or_scaled_ones(stores):
    path, images = stores["parquet", "same"]
    boxes = [(0, 4, 1, 3), (2, 9, 0, 11), (5, 6, 5, 6)]
    columns = dict(zip(("y0", "y1", "x0", "x1"), zip(*boxes, strict=True), strict=True))
    table = pa.table({"image_id": SITES, **columns})
    opened = {"objects": table, "box": ("y0", "y1", "x0", "x1"), "axes": "CZYX", "normalize": False}
    for preload in (True, False):
        ragged = OMEArrowDatasetNumpy(path, preload=preload, **opened)
        assert ragged.shape is None
        for number, (y0, y1, x0, x1) in enumerate(boxes):
            np.testing.assert_array_equal(ragged[number], images[number][0, ..., y0:y1, x0:x1])
        assert [sample.shape for sample in ragged.__getitems__([2, 0])] == [(2, 2, 1, 1), (2, 2, 4, 2)]
        centred = OMEArrowDatasetNumpy(path, preload=preload, crop_size=(3, 3), **opened)
        for number, (y, x) in enumerate([(1, 1), (4, 4), (4, 4)]):
            np.testing.assert_array_equal(centred[number], oracle(images[number][0], y, x, 3, 3, "constant"))
        scaled = OMEArrowDataset(path, preload=preload, resize=(6, 5), **{**opened, "normalize": True})
        assert scaled.shape == (2, 2, 6, 5)
        for number, (y0, y1, x0, x1) in enumerate(boxes):
            part = torch.from_numpy(images[number][0, ..., y0:y1, x0:x1] / np.float32(65535))
            expected = torch.nn.functional.interpolate(part, (6, 5), mode="bilinear", antialias=True)
            torch.testing.assert_close(scaled[number], expected, rtol=0, atol=0)
            assert torch.equal(scaled.__getitems__([number, 0])[0], scaled[number])


def test_boxes_in_zeros_and_ragged_batches(stores):
    path, images = stores["parquet", "same"]
    boxes = [(0, 4, 1, 3), (2, 9, 0, 11), (5, 6, 5, 6)]
    table = pa.table({"image_id": SITES, **dict(zip(("y0", "y1", "x0", "x1"), zip(*boxes, strict=True), strict=True))})
    opened = {"objects": table, "box": ("y0", "y1", "x0", "x1"), "axes": "CZYX", "normalize": False}
    parts = [images[number][0, ..., y0:y1, x0:x1] for number, (y0, y1, x0, x1) in enumerate(boxes)]
    put = OMEArrowDataset(path, pad_to=(8, 12), **opened)
    assert put.shape == (2, 2, 8, 12)
    for number, part in enumerate(parts):
        expected = np.zeros((2, 2, 8, 12), np.uint16)
        y, x = (8 - part.shape[2]) // 2, (12 - part.shape[3]) // 2
        expected[..., y : y + part.shape[2], x : x + part.shape[3]] = part
        np.testing.assert_array_equal(put[number].numpy(), expected)
    for name in ("resize", "pad_to"):
        with raises(AxesError, option=name, mentions="pass (6, 6)"):
            OMEArrowDataset(path, **{name: 6}, **opened)
    with raises(AxesError, option="pad_to", path=path, mentions=("'b:1'", "7 x 11", "pad_to=(6, 12)")):
        OMEArrowDataset(path, pad_to=(6, 12), **opened)
    for returned in (False, True):
        ragged = OMEArrowDataset(path, return_ids=returned, masks=path if returned else None, **opened)
        for workers in (0, 1):
            *padded, valid = next(iter(OMEArrowDataLoader(ragged, 3, collate="pad", num_workers=workers)))
            listed = next(iter(OMEArrowDataLoader(ragged, 3, collate="list", num_workers=workers)))
            assert (padded[0].shape, valid.shape, valid.dtype) == ((3, 2, 2, 7, 11), (3, 7, 11), torch.bool)
            for number, part in enumerate(parts):
                own = padded[0][number][:, :, valid[number]].numpy().reshape(part.shape)
                np.testing.assert_array_equal(own, part)
                assert padded[0][number][:, :, ~valid[number]].sum() == 0
                np.testing.assert_array_equal((listed[0] if returned else listed)[number].numpy(), part)
            if returned:
                assert padded[2] == listed[2] == ["a:0", "b:1", "c:2"]
                assert all(map(torch.equal, padded[1:2], padded[:1]))
                assert all(map(torch.equal, listed[0], listed[1]))
    alike = OMEArrowDataset(path, axes="CZYX", return_ids=True)
    for how in ("pad", "list"):
        images_, ids, *valid = next(iter(OMEArrowDataLoader(alike, 2, collate=how)))
        assert (len(images_), ids) == (2, ["a", "b"])
        assert all(part.all() and part.shape == (2, 9, 11) for part in valid)
    with raises(AxesError, option="collate", mentions=("collate='pad'", "'list'")):
        next(iter(OMEArrowDataLoader(ragged, 3)))
    for wrong in ({"collate": "stack"}, {"collate": "pad", "collate_fn": list}, {"collate": "pad", "batch_size": None}):
        with raises(ArgumentError, option="collate", remedy=False):
            OMEArrowDataLoader(ragged, **wrong)


BY_NAME = {
    "of CellProfiler": ("Cells_Location_Center_Y", "Cells_Location_Center_X"),
    "of its own tables": ("Location_Center_Y", "Location_Center_X"),
    "of CytoTable": ("Metadata_Cytoplasm_Location_Center_Y", "Metadata_Cytoplasm_Location_Center_X"),
    "of scikit-image": ("centroid-0", "centroid-1"),
    "in words": ("centroid_y", "centroid_x"),
}


@pytest.mark.parametrize("names", BY_NAME.values(), ids=list(BY_NAME))
@pytest.mark.parametrize("kind", ["arrow", "pandas", "csv", "parquet"])
def test_centres_are_found_by_known_names_in_tables_of_any_kind(stores, tmp_path, names, kind):
    table = pa.table({"image_id": ["b"], names[0]: [4.0], names[1]: [6.0]})
    file = tmp_path / f"cells.{kind}"
    if kind == "csv":
        table.to_pandas().to_csv(file, index=False)
    elif kind == "parquet":
        pq.write_table(table, file)
    objects = {"arrow": table, "pandas": table.to_pandas()}.get(kind, file)
    path, images = stores["arrow", "same"]
    dataset = OMEArrowDatasetNumpy(path, objects=objects, crop_size=(3, 3), axes="CZYX", normalize=False)
    np.testing.assert_array_equal(dataset[0], images[1][0, ..., 3:6, 5:8])


@pytest.mark.parametrize("axes", [("y", "x"), ("x", "y"), ("z", "y", "x")])
def test_shape_tables_of_ome_arrow(stores, tmp_path, axes):
    shapes = pytest.importorskip("ome_arrow.shapes", reason="ome-arrow is not installed")
    point = {"y": 4.0, "x": 6.0, "z": 1.0}
    ends = {"min": {"y": 2.0, "x": 1.0, "z": 0.0}, "max": {"y": 5.0, "x": 9.0, "z": 2.0}}
    row = {
        "object_id": "o",
        "image_id": "c",
        "label_value": 3,
        "geometry": None,
        "centroid": [point[axis] for axis in axes],
        "bbox": {end: [coordinates[axis] for axis in axes] for end, coordinates in ends.items()},
    }
    table = shapes.make_shape_table([row], geometry_encoding="ome.boundingbox", axes=axes, validate=False)
    file = tmp_path / "shapes.parquet"
    pq.write_table(table.drop_columns("geometry"), file)
    path, images = stores["arrow", "same"]
    opened = {"objects": file, "axes": "CZYX", "normalize": False}
    np.testing.assert_array_equal(
        OMEArrowDatasetNumpy(path, crop_size=(3, 3), **opened)[0], images[2][0, ..., 3:6, 5:8]
    )
    np.testing.assert_array_equal(OMEArrowDatasetNumpy(path, box=True, **opened)[0], images[2][0, ..., 2:5, 1:9])
    um = table.replace_schema_metadata({b"ome.arrow.shapes": b'{"axes": ["y", "x"], "units": ["um", "um"]}'})
    with raises(MetadataError, option="objects", mentions="um"):
        OMEArrowDataset(path, objects=um.drop_columns("geometry"), crop_size=(3, 3), axes="CZYX")


def test_objects_have_columns_targets_ids_splits_and_embeddings(stores, tmp_path):
    path, _ = stores["arrow", "same"]
    table = cells([(4, 5)] * 12)
    dataset = OMEArrowDataset(
        path, objects=table, crop_size=(4, 4), axes="CZYX", target=["label", "Metadata_Well"], return_ids=True
    )
    assert len(dataset) == 12
    assert dataset.objects.equals(table)
    assert dataset.columns.column_names == [*table.column_names, "Metadata_Site", "Metadata_Well"]
    assert dataset.columns["Metadata_Site"].to_pylist() == SITES * 4
    assert dataset.image_ids[:4] == ["a:1", "b:2", "c:3", "a:4"]
    assert dataset.classes == {"label": ("kind 0", "kind 1"), "Metadata_Well": ("A1", "B2")}
    assert dataset[5][1:] == ({"label": 1, "Metadata_Well": 1}, "c:6")
    for part in dataset.split((0.67, 0.33)):  # Objects of an image stay in one split.
        sites = part.columns["Metadata_Site"].to_pylist()
        assert len(part) in (8, 4)
        assert all(sites.count(site) == 4 for site in set(sites))
    train, test = dataset.split((0.5, 0.5), by="Metadata_Well", stratify="label")
    assert {train.columns["Metadata_Well"][0].as_py(), test.columns["Metadata_Well"][0].as_py()} == {"A1", "B2"}
    assert train.objects.num_rows == len(train)
    assert train.nbytes + test.nbytes == dataset.nbytes
    write_embeddings(tmp_path / "e.parquet", train.image_ids, np.zeros((len(train), 2)), columns=train)
    assert pq.read_table(tmp_path / "e.parquet")["Metadata_ObjectNumber"].equals(train.objects["Metadata_ObjectNumber"])
    called = OMEArrowDataset(
        path, objects=table, crop_size=(4, 4), axes="CZYX", target=lambda row: row["Metadata_ObjectNumber"]
    )
    assert [called[number][1] for number in range(12)] == list(range(1, 13))


def test_loaders_workers_and_pickles_give_the_same_crops(stores):
    path, _ = stores["tiff", "same"]
    table = cells([(number % 9, number % 11) for number in range(30)])
    datasets = [
        OMEArrowDataset(path, objects=table, crop_size=(5, 5), axes="CZYX", return_ids=True, preload=preload)
        for preload in (True, False)
    ]
    expected = {image_id: image for image, image_id in datasets[0]}
    for dataset in (*datasets, pickle.loads(pickle.dumps(datasets[0])), pickle.loads(pickle.dumps(datasets[1]))):
        for workers in (0, 2) if dataset in datasets else (0,):
            ids_of_epoch = []
            for images, image_ids in OMEArrowDataLoader(dataset, 7, shuffle=True, num_workers=workers):
                ids_of_epoch += image_ids
                assert all(
                    torch.equal(image, expected[image_id]) for image, image_id in zip(images, image_ids, strict=True)
                )
            assert sorted(ids_of_epoch) == sorted(expected)


def test_random_crops_lie_inside_everywhere_alike_and_follow_the_seed(stores):
    path, images = stores["arrow", "same"]
    dataset = OMEArrowDataset(path, crop_size=(4, 5), crop="random", axes="CZYX", normalize=False)
    windows = {number: {image.tobytes(): None for image in _windows(images[number][0], (4, 5))} for number in range(3)}
    torch.manual_seed(0)
    drawn_crops = [dataset[number % 3].numpy().tobytes() for number in range(3000)]
    assert all(crop in windows[number % 3] for number, crop in enumerate(drawn_crops))
    counts = np.bincount([list(windows[0]).index(crop) for crop in drawn_crops[::3]], minlength=42)
    assert counts.min() > 0
    assert ((counts - 1000 / 42) ** 2 / (1000 / 42)).sum() < 90

    def epochs(workers, dataset=dataset):
        loader = OMEArrowDataLoader(
            dataset, 2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3)
        )
        return [batch for _ in range(2) for batch in loader]

    first = epochs(0)
    assert not torch.equal(torch.cat(first[:2]), torch.cat(first[2:]))
    on_demand = OMEArrowDataset(path, crop_size=(4, 5), crop="random", axes="CZYX", normalize=False, preload=False)
    for again in (epochs(0), epochs(2), epochs(0, on_demand), epochs("auto", on_demand)):
        assert all(map(torch.equal, first, again))
    loader = OMEArrowDataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = OMEArrowDataLoader(dataset, 2, shuffle=True, generator=torch.Generator())
    other.load_state_dict(state)
    assert all(map(torch.equal, first[1:2], other))


def _windows(image, size):
    for y in range(image.shape[-2] - size[0] + 1):
        for x in range(image.shape[-1] - size[1] + 1):
            yield image[..., y : y + size[0], x : x + size[1]]


@settings(deadline=None, max_examples=40)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 11)),
    overlap=st.integers(0, 4),
    pad=st.sampled_from([None, "edge"]),
)
def test_tiles_put_together_are_the_images(stores, size, overlap, pad):
    path, images = stores["arrow", "same"]
    if overlap >= min(size):
        with raises(ArgumentError, option="overlap", remedy=False):
            OMEArrowDataset(path, crop_size=size, crop="grid", overlap=overlap, axes="CZYX")
        return
    tiles = OMEArrowDatasetNumpy(
        path, crop_size=size, crop="grid", overlap=overlap, pad=pad, axes="CZYX", normalize=False
    )
    assembled = [np.zeros((2, 2, 40, 40), np.uint16) for _ in images]
    for number, row in enumerate(tiles.columns.to_pylist()):
        y, x = row["crop_y"], row["crop_x"]
        assembled[SITES.index(row["Metadata_Site"])][..., y : y + size[0], x : x + size[1]] = tiles[number]
    for assembled_image, image in zip(assembled, images, strict=True):
        np.testing.assert_array_equal(assembled_image[..., :9, :11], image[0])
    assert len(set(tiles.image_ids)) == len(tiles)


def test_centre_crops_of_smaller_images_are_padded_where_asked(stores):
    path, images = stores["arrow", "ragged"]
    with raises(AxesError, option="crop_size", path=path, mentions=("image 1", "crop_size=(7, 7)")):
        OMEArrowDataset(path, crop_size=(7, 7), axes="CZYX")
    padded = OMEArrowDatasetNumpy(path, crop_size=(7, 7), pad="reflect", axes="CZYX", normalize=False)
    for number, image in enumerate(images):
        y, x = ((size - 7) // 2 for size in image.shape[3:])
        np.testing.assert_array_equal(padded[number], oracle(image[0], y, x, 7, 7, "reflect"))


def _swapped(table):
    return table.rename_columns(
        [name.replace("_Y", "_T").replace("_X", "_Y").replace("_T", "_X") for name in table.column_names]
    )


ERRORS = {
    "no such column": ({"center": ("y", "x")}, ColumnError, "objects", "'y'"),
    "one name": ({"center": "y"}, ArgumentError, "center", ("'y'", 2)),
    "text": ({"center": ("label", "image_id")}, ColumnError, "objects", ("'label'", "string")),
    "two places": ({"center": ("a", "b"), "box": True}, ArgumentError, "center", "box="),
    "no box": ({"box": True}, ColumnError, None, ("box=", "Nuclei_AreaShape_BoundingBoxMinimum_Y")),
    "no size": ({"crop_size": None}, ArgumentError, None, ("box=", "crop_size=")),
    "a size of 0": ({"crop_size": (0, 4)}, AxesError, "crop_size", ("(0, 4)", 1)),
    "a pad": ({"pad": "wrap"}, ArgumentError, "pad", ("'wrap'", "'constant'", "'edge'")),
    "a crop": ({"crop": "random"}, ArgumentError, "crop", ("'random'", "objects=")),
    "an overlap": ({"overlap": 2}, ArgumentError, "overlap", (2, "crop='grid'")),
    "a typo": ({"normalise": False}, ArgumentError, "normalise", "normalize="),
    "a resize": ({"resize": (4, 4)}, ArgumentError, "resize", "box="),
    "axes": ({"axes": "CZY"}, AxesError, "axes", "X"),
    "select": ({"select": {"X": slice(0, 5)}}, AxesError, "select", "X"),
    "no table": ({"objects": 3}, ArgumentError, "objects", "int"),
    "no file": ({"objects": "cells.parquet"}, FileNotFoundError, "objects", "cells.parquet"),
}


@pytest.mark.parametrize(("options", "error", "option", "facts"), ERRORS.values(), ids=list(ERRORS))
def test_what_cannot_be_is_said(stores, options, error, option, facts):
    path, _ = stores["arrow", "same"]
    all_options = {"objects": cells([(4, 5)] * 3), "crop_size": (4, 4), "axes": "CZYX", **options}
    with raises(error, option=option, mentions=facts, remedy=False):
        OMEArrowDataset(path, **all_options)


def test_objects_outside_unmatched_or_without_a_place(stores):
    path, _ = stores["arrow", "same"]
    options = {"crop_size": (4, 4), "axes": "CZYX"}
    with raises(
        MetadataError, option="objects", mentions=("1 object of 3", "row 1", "(4, 10.6)", "9 x 11"), remedy=False
    ):
        OMEArrowDataset(path, objects=cells([(4, 5), (4, 10.6), (0, 0)]), **options)
    with raises(MetadataError, option="objects", mentions="(10, 4)", remedy=False):
        OMEArrowDataset(path, objects=_swapped(cells([(4, 10)])), **options)
    with raises(MetadataError, option="objects", path=path, mentions=("'x'", "'a'", "'b'", "'c'")):
        OMEArrowDataset(path, objects=cells([(4, 5)], ["x"]), **options)
    with warns(UserWarning, option="objects", mentions=("1 of 2", "'x'")):
        assert len(OMEArrowDataset(path, objects=cells([(4, 5)] * 2, ["x", "a"]), **options)) == 1
    nulls = cells([(4, 5), (float("nan"), 5), (4, 5)])
    with raises(MetadataError, option="objects", mentions=("1 object", "row 1", "nulls='skip'")):
        OMEArrowDataset(path, objects=nulls, **options)
    without_nulls = OMEArrowDataset(path, objects=nulls, nulls="skip", return_ids=True, **options)
    assert without_nulls.image_ids == ["a:1", "c:3"]
    by_well = nulls.drop_columns("image_id").append_column("Metadata_Well", [["A01", "A1", "B2"]])
    with raises(MetadataError, option="objects", path=path, mentions=(0, 1, "'Metadata_Well'", "'A01'", "on=")):
        OMEArrowDataset(path, objects=by_well, **options)


@pytest.mark.skipif(not NF1.is_dir(), reason="the NF1 images are not here")
@pytest.mark.parametrize("pattern", [None, "{well}_01_{_}_{site}_{channel}_001.tif"])
def test_an_option_that_there_is_not_is_an_error_however_images_are_opened(pattern):
    pattern_option = {} if pattern is None else {"pattern": pattern}
    for call, typo in [
        (lambda **options: OMEArrowDataset(NF1, **options), "crop_sise"),
        (lambda **options: open_source(NF1, **options), "incomplet"),
        (lambda **options: convert(NF1, "nowhere.arrow", **options), "compresion"),
        (lambda **options: stats(NF1, **options), "foo"),
    ]:
        with raises((ArgumentError, TypeError), option=typo, remedy=False):
            call(**pattern_option, **{typo: 1})


def test_columns_without_a_value_are_no_key(stores, tmp_path):
    path, images = stores["parquet", "same"]
    empty = pa.array([None], pa.string())
    table = pa.table({"Metadata_Well": ["B2"], "Metadata_Site": empty, "centroid_y": [4], "centroid_x": [4]})
    dataset = OMEArrowDatasetNumpy(path, objects=table, crop_size=(1, 1), axes="CZYX", normalize=False)
    np.testing.assert_array_equal(dataset[0], images[2][0, ..., 4:5, 4:5])


def test_plate_well_and_site_find_the_image(stores):
    path, images = stores["parquet", "same"]
    table = pd.DataFrame(
        {"Metadata_Well": ["B02", "A01"], "Metadata_Site": ["c", "b"], "centroid_y": [4, 2], "centroid_x": [4, 3]}
    )
    for on in (None, ["Metadata_Well", "Metadata_Site"], {"Metadata_Site": "Metadata_Site"}):
        dataset = OMEArrowDatasetNumpy(path, objects=table, on=on, crop_size=(1, 1), axes="CZYX", normalize=False)
        np.testing.assert_array_equal(dataset[0], images[2][0, ..., 4:5, 4:5])
        np.testing.assert_array_equal(dataset[1], images[1][0, ..., 2:3, 3:4])


def test_crops_of_a_field_of_a_hundred_thousand_cost_little(tmp_path):
    write_images([np.zeros((64, 64), np.uint8)] * 3456, tmp_path / "i.arrow")
    fields = np.arange(100_000) % 3456
    table = pa.table(
        {"image_id": [f"image-{number:05d}" for number in fields], "centroid_y": fields % 64, "centroid_x": fields % 63}
    )
    dataset = OMEArrowDataset(tmp_path / "i.arrow", objects=table, crop_size=(8, 8), preload=False)
    assert len(dataset) == 100_000
    crops = dataset._collection.crops
    assert crops.corners.nbytes + crops.sizes.nbytes <= 12 * 100_000 + 100


@pytest.mark.skipif(not NF1.is_dir(), reason="the NF1 images are not here")
def test_real_cells_are_what_tifffile_has():
    rows = pq.read_table(NF1 / "cells.parquet").to_pylist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = OMEArrowDataset(
            NF1,
            pattern="{well}_01_{_}_{site}_{channel}_001.tif",
            objects=NF1 / "cells.parquet",
            crop_size=(64, 64),
            normalize=False,
            target="Metadata_Well",
        )
    assert len(dataset) == len(rows) == 132
    fields = {}
    for number, row in enumerate(rows):
        files = tuple(row[f"Image_FileName_{name}"] for name in ("DAPI", "GFP", "RFP"))
        if files not in fields:
            field = np.stack([tifffile.imread(NF1 / file) for file in files])
            fields[files] = np.pad(field, ((0, 0), (64, 64), (64, 64)))
        top, left = (int(np.floor(row[f"Nuclei_Location_Center_{axis}"] - 31.5 + 0.5)) + 64 for axis in "YX")
        image, well = dataset[number]
        np.testing.assert_array_equal(image.numpy(), fields[files][:, top : top + 64, left : left + 64])
        assert dataset.classes[well] == row["Metadata_Well"]


def test_one_region_is_read_where_a_store_can(stores):
    """On demand, a crop requests only its own window."""
    path, _ = stores["tiff", "same"]
    dataset = OMEArrowDataset(path, objects=cells([(4, 5)]), crop_size=(3, 3), axes="CZYX", preload=False)
    requests = []
    source = dataset.source
    read_arrays = source.images.read
    source.images.read = lambda rows, regions: requests.append(regions) or read_arrays(rows, regions)
    dataset[0]
    assert [region[3:5] + region[8:] for region in requests[0]] == [[3, 4, 6, 7]]
    assert open_images(path).read(0, region=(3, 6, 4, 7)).shape == (1, 2, 2, 3, 3)
