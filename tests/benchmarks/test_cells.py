"""Data of single-cell benchmarks, a user's or a synthetic plate with objects and masks, and the results."""

from __future__ import annotations

from textwrap import dedent

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile

from benchmarks.support.cells import (
    SIDE,
    StoredPlate,
    SyntheticPlate,
    compiled_loop,
    corners_of,
    inside,
    plate_of,
    table_of,
)
from benchmarks.support.workload import Workload
from omearrow_ds import OMEArrowDatasetNumpy, write_images
from tests.benchmarks.test_benchmark_suite import BRIEF, UNDRAWN, rows
from tests.support.programs import ROOT

SHAPE = (90, 110)
CENTRES = [(45.0, 50.0), (44.6, 60.0), (2.0, 3.0), (50.0, 70.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two fields of two channels with masks, and a table of their cells as written by CellProfiler."""
    folder = tmp_path_factory.mktemp("plate")
    draw = np.random.default_rng(1)
    (folder / "masks").mkdir()
    for site in (1, 2):
        for channel in ("DNA", "ER"):
            tifffile.imwrite(folder / f"s{site}_{channel}.tif", draw.integers(0, 2**16, SHAPE, np.uint16))
        tifffile.imwrite(folder / "masks" / f"s{site}_DNA_MaskNuclei.tiff", np.full(SHAPE, site, np.uint8))
    sites = [1, 2, 1, 2]
    named = {f"Image_FileName_{channel}": [f"s{site}_{channel}.tif" for site in sites] for channel in ("DNA", "ER")}
    centres = {
        f"Nuclei_Location_Center_{axis}": [centre[axis_index] for centre in CENTRES]
        for axis_index, axis in enumerate("YX")
    }
    pq.write_table(pa.table(named | centres), folder / "cells.parquet")
    return folder


def test_a_folder_with_a_table_of_cells_is_the_plate(folder, tmp_path):
    plate = plate_of(Workload(None, folder=folder))
    assert plate == StoredPlate(folder)
    images, masks, (fields, centres) = list(plate.images()), list(plate.masks()), plate.positions()
    assert [image.shape for image in images] == [(1, 2, 1, *SHAPE)] * 2
    assert np.array_equal(images[1][0, 1, 0], tifffile.imread(folder / "s2_ER.tif"))
    assert [int(mask.max()) for mask in masks] == [1, 2]
    assert (fields.tolist(), inside(centres, SHAPE).tolist()) == ([0, 1, 0, 1], [True, True, False, True])
    write_images(images, tmp_path / "fields.arrow", axes="TCZYX", image_ids=["a", "b"])
    objects = table_of(["a", "b"], fields, centres)
    assert objects["Metadata_ObjectNumber"].to_pylist() == [1, 1, 2, 2]
    crops = OMEArrowDatasetNumpy(tmp_path / "fields.arrow", objects=objects, crop_size=(SIDE, SIDE), normalize=False)
    for number in np.flatnonzero(inside(centres, SHAPE)):
        y, x = corners_of(centres)[number]
        assert np.array_equal(crops[number], images[fields[number]][0, :, 0, y : y + SIDE, x : x + SIDE])
    loop, out = compiled_loop(), np.empty((2, 2, SIDE, SIDE), np.float32)
    if loop is not None:
        corners = np.column_stack([fields, corners_of(centres)])[:2]
        loop(np.concatenate(images)[:, :, 0], corners, np.float32(1), out)
        assert np.array_equal(out, [crops[0], crops[1]])
    assert isinstance(plate_of(Workload()), SyntheticPlate)


def test_a_made_mask_has_its_objects_number_at_its_centre():
    plate = SyntheticPlate(3, count=2)
    fields, centres = plate.positions()
    for number, mask in enumerate(plate.masks()):
        labels = [mask[0, 0, 0, y, x] for y, x in np.rint(centres[fields == number]).astype(int)]
        # If two overlap, the later one covers the earlier one.
        assert np.mean(labels == np.arange(1, len(labels) + 1)) > 0.9


@pytest.mark.slow
def test_cells_are_measured_in_every_way_and_equal_their_references(runs, folder, tmp_path):
    (tmp_path / "brief.py").write_text(dedent(BRIEF))
    (tmp_path / "undrawn.py").write_text(dedent(UNDRAWN))
    files = ("benchmarks/test_track6_cells.py", "benchmarks/test_cells.py")
    words = ("--formats", "arrow,tiff", "-k", "not MONAI and not compiled", "--results", str(tmp_path / "results"))
    words = (*words, "-pbrief", "-pundrawn", "--images", str(folder), "--data", str(tmp_path / "data"))
    done = runs.run(*files, *words, path=tmp_path, root=ROOT)
    assert done.returncode == 0, done.stdout
    measured = rows(tmp_path / "results", 6)
    assert {(row["format"], row["sample"], row["access"], row["status"]) for row in measured} >= {
        (name, sample, "on_demand", "ok") for name in ("arrow", "tiff") for sample in ("crop", "mask")
    }
    assert {(row["fields"], row["objects"], row["of"], row["crop_shape"]) for row in measured} == {
        (2, 4, folder.name, "2 x 64 x 64")
    }
    limits = {(row["operation"], row["format"], row["status"]) for row in rows(tmp_path / "results", "reference")}
    assert {("cells", "memory", "ok"), ("cells_mapped", "arrow", "ok"), ("cells_of_files", "tiff", "ok")} <= limits


def test_of_a_package_without_objects_gated_cells_are_new_and_no_error(runs, tmp_path):
    (tmp_path / "older.py").write_text("from benchmarks.support import library\nlibrary.HAS_OBJECTS = False\n")
    words = ("-m", "gate", "-polder", "-k", "cells", "-rs", "--data", str(tmp_path / "data"))
    done = runs.run("benchmarks/test_gate.py", *words, path=tmp_path, root=ROOT)
    assert done.returncode == 0, done.stdout
    assert "4 skipped" in done.stdout
    assert "this version cuts no crops around objects" in done.stdout
