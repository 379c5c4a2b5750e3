"""`write_crops`: pixels compared with padded slices, columns with pyarrow, and one decoding per field."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ChecksumError,
    MetadataError,
    OMEArrowDatasetNumpy,
    PathExistsError,
    open_images,
    write_crops,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.dataset import write_crops as under_test
from tests.support.errors import raises, warns
from tests.support.strategies import NAMES_OR_LONG, NF1, SUFFIX, image_of, slow_except

SHAPE = (2, 3, 2, 12, 14)
IMAGES = [image_of(SHAPE, "uint16", number) for number in range(3)]
METADATA = [
    {"name": f"field {number}", "physical_size_x": 0.5, "channels": [{"name": name} for name in ("DNA", "ER", "Mito")]}
    for number in range(3)
]
PLACES = [("a", 3, 4), ("c", 0, 13), ("a", 11, 0), ("b", 6, 7.5), ("c", 5, 5)]
FIELD_BY_FIELD = [0, 2, 1, 4, 3]


def cells(objects=PLACES):
    """Return a table of objects: (field, Y, X)."""
    ids, y, x = zip(*objects, strict=True)
    columns = {"image_id": ids, "Nuclei_Location_Center_Y": y, "Nuclei_Location_Center_X": x}
    return pa.table({**columns, "Metadata_ObjectNumber": range(1, 1 + len(ids)), "label": [f"k{i}" for i in ids]})


def cut(image, y, x, height, width, **pad):
    """Return the window of an image around a point, by NumPy's padding."""
    top, left = (math.floor(center - (length - 1) / 2 + 0.5) for center, length in ((y, height), (x, width)))
    whole = np.pad(image, [(0, 0)] * 3 + [(20, 20)] * 2, **(pad or {"mode": "constant"}))
    return whole[..., 20 + top : 20 + top + height, 20 + left : 20 + left + width], top, left


def fields(folder, name="arrow", suffix=".arrow"):
    wells = {"Metadata_Well": ["A1", "A1", "B2"], "label": ["field"] * 3}
    write_images(IMAGES, folder / f"f{suffix}", name, image_ids=list("abc"), metadata=METADATA, columns=wells)
    return folder / f"f{suffix}"


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_crops_are_a_collection_of_any_format(tmp_path, name):
    path, dst = fields(tmp_path, name, SUFFIX[name]), tmp_path / f"crops{SUFFIX[name]}"
    write_crops(path, cells(), dst, name, crop_size=(5, 4))
    dataset = OMEArrowDatasetNumpy(
        path, objects=cells(), crop_size=(5, 4), return_ids=True, normalize=False, axes="TCZYX"
    )
    with open_images(dst) as written:
        assert (len(written), written.format.name) == (5, name)
        for position, number in enumerate(FIELD_BY_FIELD):
            field, y, x = PLACES[number]
            expected, top, left = cut(IMAGES["abc".index(field)], y, x, 5, 4)
            np.testing.assert_array_equal(written.read(position), expected)
            assert written.read(position).dtype == np.uint16
            assert written.image_ids[position] == dataset[number][1] == f"{field}:{number + 1}"
            row = {column: values[position] for column, values in written.columns.to_pydict().items()}
            assert row == {
                "Metadata_image_id": field,
                "Nuclei_Location_Center_Y": y,
                "Nuclei_Location_Center_X": x,
                "Metadata_ObjectNumber": number + 1,
                "label": f"k{field}",
                "Metadata_Well": "B2" if field == "c" else "A1",
                "source_bbox_y_min": top,
                "source_bbox_x_min": left,
                "source_bbox_y_max": top + 5,
                "source_bbox_x_max": left + 4,
            }
            metadata = written.metadata(position)
            assert [channel["name"] for channel in metadata["channels"]] == ["DNA", "ER", "Mito"]
            assert metadata["name"] == f"field {'abc'.index(field)}"
        assert None not in written.images.header.columns.checksums.to_pylist()
    again = OMEArrowDatasetNumpy(dst, target="label", return_ids=True, axes="TCZYX", normalize=False)
    assert again.shape == (2, 3, 2, 5, 4)


def test_others_read_the_same(tmp_path):
    path = fields(tmp_path)
    write_crops(path, cells(), tmp_path / "c.parquet", crop_size=(5, 4))
    table = pq.read_table(tmp_path / "c.parquet")
    assert [row["id"] for row in table["ome_image"].to_pylist()] == ["a:1", "a:3", "c:2", "c:5", "b:4"]
    write_crops(path, cells(), tmp_path / "c.tiffs", crop_size=(5, 4), chunk_shape=(16, 16), compression="zlib")
    files = sorted((tmp_path / "c.tiffs").glob("*.tif*"))
    for file, number in zip(files, FIELD_BY_FIELD, strict=True):
        field, y, x = PLACES[number]
        expected, *_ = cut(IMAGES["abc".index(field)], y, x, 5, 4)
        np.testing.assert_array_equal(tifffile.imread(file).ravel(), expected.ravel())


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_pads_boxes_and_parts_of_any_size(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("c")
    path = fields(folder)
    objects = data.draw(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 11), st.integers(0, 13)), min_size=1, max_size=7)
    )
    size = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    pad = data.draw(st.sampled_from(["constant", "edge", "reflect"]))
    order = sorted(range(len(objects)), key=lambda number: [field for field, *_ in objects].index(objects[number][0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "_HELD_BYTES", data.draw(st.sampled_from([1, 500, 5_000, 10**6])))
        write_crops(path, cells(objects), folder / "c.arrow", crop_size=size, pad=pad)
        boxes = cells(objects).append_column("y1", pa.array([y + 1 for _, y, _ in objects]))
        boxes = boxes.append_column("x1", pa.array([14] * len(objects)))
        names = ("Nuclei_Location_Center_Y", "y1", "Nuclei_Location_Center_X", "x1")
        write_crops(path, boxes, folder / "b.arrow", box=names)
    with open_images(folder / "c.arrow") as crops, open_images(folder / "b.arrow") as boxed:
        assert len(crops) == len(boxed) == len(objects)
        for index, number in enumerate(order):
            field, y, x = objects[number]
            image = IMAGES["abc".index(field)]
            np.testing.assert_array_equal(crops.read(index), cut(image, y, x, *size, mode=pad)[0])
            np.testing.assert_array_equal(boxed.read(index), image[..., y : y + 1, x:14])


@pytest.mark.parametrize("held_bytes", [1, 2**26])
def test_each_field_is_decoded_once_and_few_are_held(tmp_path, monkeypatch, held_bytes):
    path = fields(tmp_path, "parquet", ".parquet")
    monkeypatch.setattr(under_test, "_HELD_BYTES", held_bytes)
    with open_images(path) as source:
        read, read_arrays = [], type(source.images).read

        def recorded(self, rows, **options):
            read.append(list(rows))
            return read_arrays(self, rows, **options)

        monkeypatch.setattr(type(source.images), "read", recorded)
        write_crops(source, cells(), tmp_path / "c.arrow", crop_size=(1, 1))
        if held_bytes > 1:
            assert read == [[0, 1, 2]]
        else:
            assert [len(rows) for rows in read] == [1] * len(read)
        assert len(source.read(0)) == 2  # The caller's source stays open.


def test_objects_at_the_edge_may_be_left_out_and_are_counted(tmp_path):
    with warns(UserWarning, option="pad", path=tmp_path / "c.arrow", mentions=("2 of 5", "pad='drop'")):
        write_crops(fields(tmp_path), cells(), tmp_path / "c.arrow", crop_size=(5, 4), pad="drop")
    with open_images(tmp_path / "c.arrow") as crops:
        assert list(crops.image_ids) == ["a:1", "b:4", "c:5"]


@pytest.mark.parametrize(("size", "number"), [((13, 4), "5 of 5 crops"), ((3, 15), "5 of 5 crops")])
@pytest.mark.parametrize("dst", ["c.arrow", "c.parts"])
def test_a_warning_counts_crops_larger_than_their_field(tmp_path, size, number, dst):
    facts = [number, f"{size[0]} x {size[1]} pixels", "'a'", "12 x 14", "pad='constant'"]
    with warns(UserWarning, path=tmp_path / dst, mentions=facts) as warnings:
        write_crops(fields(tmp_path), cells(), tmp_path / dst, crop_size=size)
    assert len(warnings) == 1


@pytest.mark.parametrize(("size", "pad"), [((12, 14), None), ((13, 14), "constant"), ((13, 14), "edge")])
def test_crops_are_written_without_warning_if_they_fit_or_pad_is_chosen(tmp_path, size, pad):
    write_crops(fields(tmp_path), cells(), tmp_path / "c.arrow", crop_size=size, pad=pad)  # Warnings are errors.
    with open_images(tmp_path / "c.arrow") as crops:
        assert crops.shapes[:, 3:].tolist() == [list(size)] * 5


def test_what_is_damaged_is_not_cut(tmp_path):
    path = fields(tmp_path)
    raw = bytearray(path.read_bytes())
    offset = raw.find(IMAGES[1].tobytes()[:64])
    raw[offset] ^= 1
    path.write_bytes(raw)
    with raises(ChecksumError, path=path, mentions="'b'"):
        write_crops(path, cells(), tmp_path / "c.arrow", crop_size=(5, 4))
    assert not (tmp_path / "c.arrow").exists()
    write_crops(path, cells(), tmp_path / "c.arrow", crop_size=(5, 4), verify=False)


def test_what_cannot_be_is_said(tmp_path):
    path = fields(tmp_path)
    pq.write_table(cells(), tmp_path / "cells.parquet")
    out = tmp_path / "c.arrow"
    stored_cells = tmp_path / "cells.parquet"
    for arguments, options, error, facts in [
        ((path, None, out), {"crop_size": (5, 4)}, ArgumentError, "objects=None"),
        ((path, cells(), out), {}, ArgumentError, ("box=", "crop_size=")),
        ((3, cells(), out), {"crop_size": (5, 4)}, ArgumentError, 3),
        ((path, cells(), path), {"crop_size": (5, 4)}, PathExistsError, (path, "overwrite=True")),
        ((path, cells(), path), {"crop_size": (5, 4), "overwrite": True}, PathExistsError, path),
        ((path, stored_cells, stored_cells), {"overwrite": True}, PathExistsError, stored_cells),
        ((path, cells([("a", 40, 4)]), out), {"crop_size": (5, 4)}, MetadataError, ("row 0", "(40, 4)", "12 x 14")),
        ((path, cells(), out), {"crop_size": (5, 4), "pad": "no"}, ArgumentError, "pad='no'"),
        ((path, cells(), out), {"crop_size": (5, 4), "rows_per_group": 0}, ArgumentError, "rows_per_group=0"),
    ]:
        with raises(error, mentions=facts, remedy=False):
            write_crops(*arguments, **options)
    with open_images(path) as source, raises(ArgumentError, option="level"):
        write_crops(source, cells(), out, crop_size=(5, 4), level=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cells.parquet", "f.arrow"]


def test_the_command(tmp_path):
    path = fields(tmp_path)
    table = cells().rename_columns(["field", "y", "x", "Metadata_ObjectNumber", "label"])
    pa.csv.write_csv(table, tmp_path / "cells.csv")

    def run(*arguments, code=0):
        done = CliRunner().invoke(main, ["crops", *map(str, arguments)], prog_name="omearrow-ds")
        assert done.exit_code == code, done.output
        return done

    output = run(path, tmp_path / "cells.csv", tmp_path / "c.parquet", "--crop", "5x4", "--center", "y,x", code=1)
    assert "no column" in output.stderr or "neither" in output.stderr
    pa.csv.write_csv(table.rename_columns(["image_id", *table.column_names[1:]]), tmp_path / "cells.csv")
    more = ("--crop", "5x4", "--center", "y,x", "--pad", "edge", "--compression", "zstd")
    done = run(path, tmp_path / "cells.csv", tmp_path / "c.parquet", *more, "--json")
    assert json.loads(done.stdout)["written"]["images"] == 5
    with open_images(tmp_path / "c.parquet") as report:
        np.testing.assert_array_equal(report.read(1), cut(IMAGES[0], 11, 0, 5, 4, mode="edge")[0])
    assert (
        "already exists; pass --overwrite" in run(path, tmp_path / "cells.csv", tmp_path / "c.parquet", code=1).stderr
    )
    done = run(path, tmp_path / "cells.csv", tmp_path / "c.parquet", *more, "--overwrite", "--src-format", "arrow")
    assert "c.parquet: 5 crops of 3 fields" in done.stdout


@pytest.mark.skipif(not NF1.is_dir(), reason="the NF1 images are not here")
def test_cells_and_their_masks_of_a_real_plate(tmp_path):
    pattern = "{well}_01_{_}_{site}_{channel}_001.tif"
    rows = pq.read_table(NF1 / "cells.parquet").to_pylist()
    write_crops(NF1, NF1 / "cells.parquet", tmp_path / "cells.arrow", crop_size=(64, 64), pattern=pattern)
    with open_images(tmp_path / "cells.arrow") as crops:
        assert len(crops) == len(rows) == 132
        for index in range(0, 132, 7):
            row = {name: crops.columns[name][index].as_py() for name in crops.columns.column_names}
            whole = np.pad(tifffile.imread(NF1 / row["Image_FileName_DAPI"]), 64)
            top, left = row["source_bbox_y_min"] + 64, row["source_bbox_x_min"] + 64
            assert top - 64 == math.floor(row["Nuclei_Location_Center_Y"] - 31.5 + 0.5)
            channel = [channel_metadata["name"] for channel_metadata in crops.metadata(index)["channels"]].index("DAPI")
            np.testing.assert_array_equal(crops.read(index)[0, channel, 0], whole[top : top + 64, left : left + 64])


@pytest.mark.parametrize(
    ("as_path", "seed"), slow_except([(True, None), (False, 2)], product([True, False], [None, 2]))
)
def test_parts_of_crops_are_the_crops_of_a_file(tmp_path, seed, as_path):
    """With and without an executor, which gets an in-memory table as a file."""
    objects = cells([(field, y, x) for y in range(0, 12, 2) for field in "abc" for x in (3, 9)])
    if as_path:
        pq.write_table(objects, tmp_path / "cells.parquet")
        objects = tmp_path / "cells.parquet"
    path = fields(tmp_path)
    write_crops(path, objects, tmp_path / "whole.arrow", crop_size=(4, 6))
    options = {"crop_size": (4, 6), "part_bytes": 7 * 2 * 3 * 2 * 4 * 6 * 2, "shuffle_seed": seed}
    with ThreadPoolExecutor(2) as executor:
        write_crops(path, objects, tmp_path / "x.parts", executor=executor, **options)
    write_crops(path, objects, tmp_path / "y.parts", task=(1, 2), **options)
    with raises(PathExistsError, path=tmp_path / "y.parts"):
        write_crops(path, objects, tmp_path / "y.parts", pad="edge", **options)
    write_crops(path, objects, tmp_path / "y.parts", **options)
    with open_images(tmp_path / "whole.arrow") as whole, open_images(tmp_path / "y.parts", verify=True) as parts:
        assert len(list((tmp_path / "y.parts/parts").iterdir())) == 6
        ids = list(parts.image_ids)
        order = [list(whole.image_ids).index(image_id) for image_id in ids]
        assert sorted(order) == list(range(36))
        assert (order == sorted(order)) == (seed is None)
        assert parts.columns.equals(whole.columns.take(pa.array(order)))
        for number, row in enumerate(order):
            assert np.array_equal(parts.read(number), whole.read(row))
            assert parts.metadata(number) == whole.metadata(row)
    manifests = [(tmp_path / f"{name}.parts/parts.json").read_text() for name in "xy"]
    assert manifests[0] == manifests[1]


def test_crops_of_a_field_that_cannot_be_read_are_listed(tmp_path):
    for number, image in enumerate(IMAGES):
        tifffile.imwrite(tmp_path / f"{'abc'[number]}_1.tif", image[0, 0, 0])
    (tmp_path / "b_1.tif").write_bytes(b"no image")
    options = {"crop_size": (4, 4), "pattern": "{site}_{channel}.tif", "on": {"Metadata_Site": "image_id"}}
    with warns(UserWarning, path=tmp_path / "x.parts", mentions=1):
        write_crops(tmp_path, cells(), tmp_path / "x.parts", on_error="skip", **options)
    with open_images(tmp_path / "x.parts") as source:
        assert source.columns["Metadata_image_id"].to_pylist() == ["a", "a", "c", "c"]
