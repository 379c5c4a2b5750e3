"""Sites of OME-Zarr plates and tables joined by them; the oracle is zarr, field by field."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    MetadataError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    Storage,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.cli import main
from tests.support.errors import raises, warns
from tests.support.objects import serving
from tests.support.plates import written_plate

zarr = pytest.importorskip("zarr")
WELL_NAMES = {"A/1": "A01", "A/2": "A02", "B/12": "B12"}
ON_PATHS = {"Metadata_Plate": "Metadata_Plate", "Metadata_Well": "Metadata_Well", "Metadata_Field": "Metadata_Site"}


def write_plate(path, paths, name="P1", **options):
    """Write a plate whose pixels encode plate, well and field index."""
    wells = {}
    for row, (well, fields) in enumerate(paths.items()):
        values = [100 * row + 10 * (number + 1) + len(name) for number in range(len(fields))]
        wells[well] = [np.full((1, 1, 1, 8, 8), value, np.uint16) + np.arange(8, dtype=np.uint16) for value in values]
    return written_plate(path, wells, paths=paths, name=name, **options)


def read_by_zarr(path, well, field):
    return zarr.open_array(path / well / field / "0", mode="r")[...]


def objects_at(sites, wells=("A01",), plate="P1", column="Metadata_Site"):
    """Return a table with one object per well and site."""
    rows = [(well, site) for well in wells for site in sites]
    return {
        "Metadata_Plate": [plate] * len(rows),
        "Metadata_Well": [well for well, _ in rows],
        column: [site for _, site in rows],
        "Nuclei_Location_Center_X": [4.0] * len(rows),
        "Nuclei_Location_Center_Y": [4.0] * len(rows),
    }


def crops(path, objects, **options):
    return OMEArrowDataset(path, objects=objects, crop_size=(4, 4), normalize=False, **options)


@pytest.mark.parametrize(
    ("paths", "sites"),
    [
        pytest.param(["0", "1", "2"], [1, 2, 3], id="from 0"),
        pytest.param(["1", "2", "3"], [1, 2, 3], id="from 1"),
        pytest.param(["4", "7"], [4, 7], id="from above 1, with a gap"),
        pytest.param(["00", "01"], [1, 2], id="zeros in front"),
        pytest.param(["field_1", "field_2"], None, id="words"),
        pytest.param(["0", "overview"], None, id="a number and a word"),
        pytest.param(["1", "01"], None, id="one number twice in a well"),
        pytest.param(["-1", "0"], None, id="a sign"),
        pytest.param(["\u0661", "\u0662"], None, id="digits of another script"),
    ],
)
@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.share(2, "paths", "version")
def test_plate_sites_count_from_1_when_paths_are_whole_numbers(tmp_path, paths, sites, version):
    path = write_plate(tmp_path / "p.zarr", {"A/1": paths}, version=version)
    with open_images(path) as source:
        assert sorted(source.columns["Metadata_Field"].to_pylist()) == sorted(paths)
        stored_sites = (
            source.columns["Metadata_Site"].to_pylist() if "Metadata_Site" in source.columns.column_names else None
        )
        assert stored_sites == sites
        for index, field in enumerate(source.columns["Metadata_Field"].to_pylist()):
            np.testing.assert_array_equal(source.read(index), read_by_zarr(path, "A/1", field))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_plate_fields_keep_their_path_when_it_has_several_names(tmp_path, version):
    paths = {"A/1": ["0/raw", "1/raw"], "A/2": ["0/raw"]}
    path = write_plate(tmp_path / "p.zarr", paths, version=version)
    with open_images(path) as source:
        assert source.columns.select(["Metadata_Well", "Metadata_Field"]).to_pylist() == [
            {"Metadata_Well": WELL_NAMES[well], "Metadata_Field": field} for well in paths for field in paths[well]
        ]
        assert "Metadata_Site" not in source.columns.column_names
        np.testing.assert_array_equal(source.read(1), read_by_zarr(path, "A/1", "1/raw"))


def test_plate_sites_depend_on_all_wells_when_one_well_lacks_path_0(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["1", "2"], "A/2": ["0", "2"]})
    with open_images(path) as source:
        assert source.columns.select(["Metadata_Well", "Metadata_Site"]).to_pylist() == [
            {"Metadata_Well": "A01", "Metadata_Site": 2},
            {"Metadata_Well": "A01", "Metadata_Site": 3},
            {"Metadata_Well": "A02", "Metadata_Site": 1},
            {"Metadata_Well": "A02", "Metadata_Site": 3},
        ]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(WELL_NAMES)), st.sets(st.integers(0, 12), min_size=1, max_size=4), min_size=1
    ),
    st.integers(0, 2),
)
def test_crops_are_of_the_field_that_the_site_counts(wells, shift):
    """Site n is path n, or path n - 1 if the smallest path of the plate is 0."""
    paths = {well: [str(number + shift) for number in sorted(numbers)] for well, numbers in wells.items()}
    smallest = min(int(path) for fields in paths.values() for path in fields)
    with tempfile.TemporaryDirectory() as folder:
        path = write_plate(Path(folder) / "p.zarr", paths)
        expected = [(well, field, int(field) + (smallest == 0)) for well, fields in paths.items() for field in fields]
        tables = [objects_at([site], [WELL_NAMES[well]]) for well, _, site in expected]
        objects = {name: [table[name][0] for table in tables] for name in tables[0]}
        dataset = crops(path, objects, preload=False)
        assert len(dataset) == len(expected)
        for index, (well, field, _) in enumerate(expected):
            np.testing.assert_array_equal(dataset[index], read_by_zarr(path, well, field)[0, :, 0, 3:7, 3:7])


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.share(2, "preload", "converted")
def test_objects_of_sites_from_1_are_cut_from_their_fields(tmp_path, preload, converted):
    plate = path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1", "2"], "A/2": ["0", "1", "2"]})
    if converted:
        path = tmp_path / "p.arrow"
        convert(plate, path)
    dataset = crops(path, objects_at([1, 2, 3], ["A01", "A02"]), preload=preload)
    expected = [read_by_zarr(plate, well, field)[0, 0, 0, 4, 4] for well in ("A/1", "A/2") for field in "012"]
    for workers in (0, 1):
        batches = OMEArrowDataLoader(dataset, batch_size=4, num_workers=workers)
        assert [int(image[0, 1, 1]) for batch in batches for image in batch] == expected


@pytest.mark.parametrize("sites", [[0, 1, 2], ["0", "1"], [0.0], [1, 4], [1, 400]])
@pytest.mark.parametrize("kind", ["plate", "converted", "parts"])
@pytest.mark.share(3, "sites", "kind")
def test_objects_are_refused_when_a_site_cannot_be_of_the_plate(tmp_path, sites, kind):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1", "2"]})
    if kind != "plate":
        target = tmp_path / ("p.parquet" if kind == "converted" else "p.parts")
        convert(path, target, **({} if kind == "converted" else {"format": "arrow"}))
        path = target
    wrong = next(site for site in sites if float(site) == 0 or float(site) > 3)
    with raises(MetadataError, mentions=["Metadata_Field", int(float(wrong)), 3, f"row {sites.index(wrong)}"]):
        crops(path, objects_at(sites))
    with raises(MetadataError, mentions="Metadata_Field"):
        crops(path, objects_at(sites), on=["Metadata_Well", "Metadata_Site"])


def test_objects_are_cut_by_paths_when_on_names_the_field(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1", "2"]})
    dataset = crops(path, objects_at([0, 1, 2]), on=ON_PATHS)
    assert [int(dataset[n][0, 1, 1]) for n in range(3)] == [
        read_by_zarr(path, "A/1", field)[0, 0, 0, 4, 4] for field in "012"
    ]


def test_columns_and_masks_are_refused_when_their_sites_count_from_0(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1"]})
    labels = {"Metadata_Well": ["A01", "A01"], "Metadata_Site": [0, 1], "label": ["a", "b"]}
    with raises(MetadataError, mentions="Metadata_Field"):
        open_images(path, columns=labels)
    labels["Metadata_Site"] = [1, 2]
    assert open_images(path, columns=labels).columns["label"].to_pylist() == ["a", "b"]
    on = {"Metadata_Well": "Metadata_Well", "Metadata_Field": "Metadata_Site"}
    labels["Metadata_Site"] = [0, 1]
    assert open_images(path, columns=labels, on=on).columns["label"].to_pylist() == ["a", "b"]
    # Image ids differ, so masks are found by plate, well and site.
    old = tmp_path / "old.arrow"
    with open_images(path) as source:
        columns = source.columns.drop_columns("Metadata_Field").to_pydict() | {"Metadata_Site": [0, 1]}
        write_images(source.take([0, 1]), old, axes="TCZYX", columns=columns, image_ids=["x", "y"])
    for images, masks in ((path, old), (old, path)):
        with raises(MetadataError, mentions=["Metadata_Field", "site 0"]):
            OMEArrowDataset(images, masks=str(masks))


@pytest.mark.parametrize(
    ("paths", "column", "fits"),
    [
        pytest.param(["0", "1", "2"], ["0", "1", "2"], True, id="paths from 0"),
        pytest.param(["0", "1", "2"], ["1", "2"], False, id="perhaps sites"),
        pytest.param(["1", "2", "3"], [0, 1, 2], False, id="perhaps indices"),
        pytest.param(["1", "2", "3"], [1, 2], True, id="paths from 1"),
        pytest.param(["a", "b", "c"], ["a", "c"], True, id="words"),
    ],
)
def test_objects_with_a_field_column_are_joined_only_when_it_has_the_paths(tmp_path, paths, column, fits):
    path = write_plate(tmp_path / "p.zarr", {"A/1": paths})
    objects = objects_at(column, column="Metadata_Field")
    if not fits:
        with raises(MetadataError, mentions=["Metadata_Field", "Metadata_Site"]):
            crops(path, objects)
        return
    dataset = crops(path, objects)
    assert [int(dataset[n][0, 1, 1]) for n in range(len(column))] == [
        read_by_zarr(path, "A/1", str(field))[0, 0, 0, 4, 4] for field in column
    ]


def test_objects_with_site_and_another_field_column_are_joined_by_site(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1", "2"]})
    objects = objects_at([3, 1]) | {"Metadata_Field": [3, 1]}
    dataset = crops(path, objects)
    assert [int(dataset[n][0, 1, 1]) for n in (0, 1)] == [
        read_by_zarr(path, "A/1", field)[0, 0, 0, 4, 4] for field in "20"
    ]


def test_several_plates_are_decided_one_by_one(tmp_path):
    first = write_plate(tmp_path / "a.zarr", {"A/1": ["0", "1"]}, "P1")
    second = write_plate(tmp_path / "b.zarr", {"A/1": ["1", "2", "3"], "A/2": ["2"]}, "PP2")
    third = write_plate(tmp_path / "c.zarr", {"A/1": ["x"]}, "PPP3")
    with open_images(str(tmp_path / "*.zarr")) as source:
        assert source.columns["Metadata_Site"].to_pylist() == [1, 2, 1, 2, 3, 2, None]
        assert source.columns["Metadata_Field"].to_pylist() == ["0", "1", "1", "2", "3", "2", "x"]
    plates = [str(first), str(second), str(third)]
    dataset = crops(plates, objects_at([2], plate="P1"))
    assert int(dataset[0][0, 1, 1]) == read_by_zarr(first, "A/1", "1")[0, 0, 0, 4, 4]
    with raises(MetadataError, mentions=["Metadata_Field", 2]):
        crops(plates, objects_at([3], plate="P1"))  # A site of the other plate.
    dataset = crops(plates, objects_at([3], plate="PP2"))
    assert int(dataset[0][0, 1, 1]) == read_by_zarr(second, "A/1", "3")[0, 0, 0, 4, 4]


def test_objects_of_other_plates_and_wells_are_left_out_with_a_warning(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1"], "A/2": ["0"]})
    tables = [objects_at([2]), objects_at([9], plate="other"), objects_at([0], wells=["H12"]), objects_at([2], ["A02"])]
    objects = {name: [value for table in tables for value in table[name]] for name in tables[0]}
    with warns(UserWarning, mentions="3 of 4"):
        dataset = crops(path, objects)
    assert int(dataset[0][0, 1, 1]) == read_by_zarr(path, "A/1", "1")[0, 0, 0, 4, 4]


def test_sites_of_other_collections_are_not_checked(stored):
    images = [np.zeros((1, 1, 1, 8, 8), np.uint8) + number for number in range(2)]
    columns = {"Metadata_Plate": ["P1"] * 2, "Metadata_Well": ["A01"] * 2, "Metadata_Site": [0, 5]}
    path = stored("arrow", images, columns=columns | {"Metadata_Field": ["x", "9"]})
    dataset = crops(path, objects_at([0, 5]))
    assert [int(dataset[n][0, 1, 1]) for n in (0, 1)] == [0, 1]


def test_a_plate_that_lists_a_field_twice_is_refused(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1"]}, version="0.4")
    well = zarr.open_group(path / "A/1", mode="a")
    well.attrs["well"] = {"images": [{"path": "0"}, {"path": "0"}]}
    with pytest.raises(ValueError, match=r"lists '0' twice"):
        open_images(path)


def test_commands_refuse_sites_from_0_and_take_on(tmp_path):
    path = write_plate(tmp_path / "p.zarr", {"A/1": ["0", "1"]})
    pd.DataFrame(objects_at([0, 1])).to_csv(tmp_path / "cells.csv", index=False)
    words = ["crops", str(path), str(tmp_path / "cells.csv"), str(tmp_path / "cells.arrow"), "--crop", "4x4"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "Metadata_Field" in done.output


def test_sites_of_a_plate_at_a_url_are_those_of_the_local_one(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    (tmp_path / "served" / "lab").mkdir(parents=True)
    with serving(tmp_path / "served") as server:
        path = write_plate(server.folder / "lab" / "p.zarr", {"A/1": ["0", "1", "2"], "A/2": ["1"]})
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/p.zarr", storage=storage) as source:
            assert source.columns.equals(open_images(path).columns)
        dataset = crops("s3://lab/p.zarr", objects_at([3, 1]), storage=storage, preload=False)
        assert [int(dataset[n][0, 1, 1]) for n in (0, 1)] == [
            read_by_zarr(path, "A/1", field)[0, 0, 0, 4, 4] for field in "20"
        ]
        with raises(MetadataError, mentions="Metadata_Field"):
            crops("s3://lab/p.zarr", objects_at([0]), storage=storage)
