"""Tables with thousands of columns: opening, joining and training without reading all of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import (
    ColumnError,
    FormatError,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    Storage,
    open_images,
    write_crops,
    write_images,
)
from omearrow_ds.storage.table_files import TableFile
from tests.support.errors import raises
from tests.support.objects import serving

COUNT = 12
FEATURES = {f"Cells.Feature {number}": np.arange(COUNT) * 0.5 + number for number in range(80)}


def write_plate(path):
    """Write images whose pixels are their number, with wells A01 to A12."""
    images = (np.full((4, 4), number, np.uint16) for number in range(COUNT))
    wells = [f"A{number + 1:02}" for number in range(COUNT)]
    write_images(images, path, axes="YX", columns={"Metadata_Well": wells, "number": np.arange(COUNT)})
    return path


@pytest.fixture
def plate(tmp_path):
    return write_plate(tmp_path / "plate.parquet")


@pytest.fixture
def profiles(tmp_path):
    """Return the path of a table with many features, whose rows are in reverse order and lack the last well."""
    table = pa.table({"Image_Metadata_Well": [f"A{number + 1}" for number in range(COUNT)], **FEATURES})
    pq.write_table(table.slice(0, COUNT - 1).take(list(range(COUNT - 1))[::-1]), tmp_path / "profiles.parquet")
    return tmp_path / "profiles.parquet"


@pytest.fixture
def requested(monkeypatch):
    """Return a list that receives the column names of each read of a Parquet or text table."""
    names_read, read = [], TableFile.read
    monkeypatch.setattr(
        TableFile, "read", lambda file, names=None, types=None: names_read.append(names) or read(file, names, types)
    )
    return names_read


@pytest.mark.filterwarnings("ignore:.*have no row:UserWarning")
def test_columns_of_a_wide_joined_table_are_those_of_the_table_in_memory(plate, profiles):
    names = ["Cells.Feature 79", "number", "Cells.Feature 3", "Metadata_Well"]
    table = pq.read_table(profiles)
    with open_images(plate, columns=profiles) as lazy, open_images(plate, columns=table) as eager:
        again = pickle.loads(pickle.dumps(lazy))
        assert "columns" not in vars(lazy)
        for source in (lazy, again):
            assert source.column_names == eager.column_names
            assert source.images.header.columns.schema == eager.columns.schema
            assert source.column_table(names).equals(eager.column_table(names))
            assert source.column("Cells.Feature 7").to_pylist() == [*FEATURES["Cells.Feature 7"][:-1].tolist(), None]
        assert lazy.columns.equals(eager.columns)
        again.close()


@pytest.mark.filterwarnings("ignore:.*have no row:UserWarning")
def test_joining_a_wide_table_reads_only_the_columns_of_target_and_condition(plate, profiles, requested):
    condition = '"Cells.Feature 5" >= 6 and number < 8'
    dataset = OMEArrowDataset(plate, columns=profiles, filter=condition, target="Cells.Feature 2", axes="YX")
    assert [int(image.max() * 65535 + 0.5) for image, _ in dataset] == [2, 3, 4, 5, 6, 7]
    assert [float(label) for _, label in dataset] == FEATURES["Cells.Feature 2"][2:8].tolist()
    assert sorted(chain.from_iterable(requested)) == ["Cells.Feature 2", "Cells.Feature 5", "Image_Metadata_Well"]


@pytest.mark.filterwarnings("ignore:.*have no row:UserWarning")
def test_wide_joined_tables_replaced_after_opening_are_refused(plate, profiles):
    with open_images(plate, columns=profiles) as source:
        pq.write_table(pq.read_table(profiles).slice(1), profiles)
        with raises(FormatError, mentions=(str(profiles),)):
            source.column("Cells.Feature 7")


@pytest.mark.filterwarnings("ignore:.*have no row:UserWarning")
def test_columns_to_join_by_are_read_from_a_wide_table(plate, profiles):
    numbers = {f"Cells.Feature {number}": f"feature {number}" for number in range(1, 80)}
    table = pq.read_table(profiles)
    table = table.drop_columns("Image_Metadata_Well")
    table = table.rename_columns([numbers.get(name, name) for name in table.column_names])
    table = table.set_column(0, "number of image", pa.array(range(COUNT - 1)))
    pq.write_table(table, profiles)
    with open_images(plate, columns=profiles, on={"number": "number of image"}) as source:
        assert source.column("feature 1").to_pylist() == [*FEATURES["Cells.Feature 1"][:-1][::-1].tolist(), None]


PLATES = ("P1", "P2", "P3")


@pytest.fixture(params=["parquet", "arrow", "lance", "vortex", "duckdb"])
def plates(request, tmp_path):
    """Return a Hive folder of wide tables: in the second, a feature is whole numbers, in the third, it is missing."""
    pytest.importorskip({"arrow": "pyarrow", "parquet": "pyarrow"}.get(request.param, request.param))
    for number, name in enumerate(PLATES):
        columns = {"number": np.arange(COUNT) + number * COUNT}
        columns |= {column.replace(".", "_"): values for column, values in FEATURES.items()}
        if number == 1:
            columns["Cells_Feature 7"] = np.arange(COUNT)
        if number == 2:
            del columns["Cells_Feature 7"]
        folder = tmp_path / "plates" / f"Metadata_Plate={name}"
        folder.mkdir(parents=True)
        images = (np.full((4, 4), number * COUNT + index, np.uint16) for index in range(COUNT))
        write_images(images, folder / f"images.{request.param}", axes="YX", columns=columns)
    return tmp_path / "plates"


@pytest.mark.share(2, "plates")
def test_columns_of_several_wide_tables_are_joined_on_request(plates):
    with open_images(plates) as source:
        assert "columns" not in vars(source.images)
        for joined in (source, pickle.loads(pickle.dumps(source))):
            features = joined.column("Cells_Feature 7")
            assert features.to_pylist() == [
                *FEATURES["Cells.Feature 7"].tolist(),
                *map(float, range(COUNT)),
                *[None] * COUNT,
            ]
            assert joined.column("Metadata_Plate").to_pylist() == [name for name in PLATES for _ in range(COUNT)]
            table = joined.column_table(["Metadata_Plate", "number"])
            assert table["number"].to_pylist() == list(range(3 * COUNT))
            assert joined.columns.column_names == joined.column_names
            assert joined.columns.schema == joined.images.header.columns.schema


@pytest.mark.share(2, "plates")
def test_a_target_and_a_condition_read_two_columns_of_several_wide_tables(plates):
    condition = "\"Cells_Feature 5\" > 6 and Metadata_Plate == 'P2'"
    dataset = OMEArrowDataset(plates, filter=condition, target="Cells_Feature 2", axes="YX", preload=False)
    assert "columns" not in vars(dataset.source.images)
    rows = np.flatnonzero(FEATURES["Cells.Feature 5"] > 6)
    assert [round(float(image.max()) * 65535) for image, _ in dataset] == (rows + COUNT).tolist()
    assert [float(label) for _, label in dataset] == FEATURES["Cells.Feature 2"][rows].tolist()


def test_a_folder_name_that_contradicts_a_column_of_a_wide_table_is_refused(tmp_path):
    folder = tmp_path / "plates" / "well=B1"
    folder.mkdir(parents=True)
    columns = {"well": ["A1"] * COUNT, **FEATURES}
    write_images([np.zeros((4, 4), np.uint8)] * COUNT, folder / "images.parquet", axes="YX", columns=columns)
    with raises(ColumnError, mentions=("'well'", "'B1'", folder / "images.parquet")):
        open_images(tmp_path / "plates")


def test_columns_without_a_common_type_in_wide_tables_are_refused(tmp_path):
    for number, values in enumerate((["a"] * COUNT, np.arange(COUNT))):
        columns = {"v": values, **FEATURES}
        images = [np.zeros((4, 4), np.uint8)] * COUNT
        write_images(images, tmp_path / f"{number}.parquet", axes="YX", columns=columns)
    with raises(ColumnError, mentions=("'v'", "string", "int64", tmp_path / "1.parquet")):
        open_images(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "lance"])
def test_a_wide_table_on_a_server_sends_only_the_requested_columns(tmp_path, suffix):
    pytest.importorskip({"parquet": "pyarrow"}.get(suffix, suffix))
    noise = np.random.default_rng(0).random((200, 2_000))
    features = {f"Cells_Feature {number}": values for number, values in enumerate(noise)}
    (tmp_path / "lab").mkdir()
    images = (np.full((4, 4), number, np.uint16) for number in range(2_000))
    write_images(images, tmp_path / f"lab/plate.{suffix}", axes="YX", columns=features)
    with serving(tmp_path) as server:
        storage = Storage(anonymous=True, endpoint=server.url)
        with open_images(f"s3://lab/plate.{suffix}", storage=storage) as source:
            assert server.sent_bytes.total() < noise.nbytes / 4
            server.sent_bytes.clear()
            server.requests.clear()
            np.testing.assert_array_equal(source.column("Cells_Feature 7"), noise[7])
            assert server.sent_bytes.total() < noise.nbytes / 10
            assert [int(image.max()) for image in source.take([1_999, 3])] == [1_999, 3]


@pytest.fixture
def cells(tmp_path):
    """Return the path of a table with two objects per image and many features, some of them before the positions."""
    count = 2 * COUNT
    table = {
        "image_id": [f"image-{number // 2:05}" for number in range(count)],
        **{f"Cells_Feature {number}": np.arange(count) * 0.5 + number for number in range(80)},
        "Nuclei_Location_Center_Y": np.arange(count) % 4 * 1.0,
        "Nuclei_Location_Center_X": [1.0] * count,
    }
    pq.write_table(pa.table(table), tmp_path / "cells.parquet")
    return tmp_path / "cells.parquet"


def test_crops_of_a_wide_table_of_objects_are_those_of_the_table_in_memory(plate, cells, tmp_path):
    options = {"crop_size": (3, 3), "pad": "constant", "filter": '"Cells_Feature 5" > 6 and number < 8'}
    options |= {"target": "Cells_Feature 7", "preload": False}
    lazy = OMEArrowDatasetNumpy(plate, objects=cells, **options)
    eager = OMEArrowDatasetNumpy(plate, objects=pq.read_table(cells), **options)
    for dataset in (lazy, pickle.loads(pickle.dumps(lazy)), lazy.split((0.5, 0.5))[0]):
        chosen = eager if len(dataset) == len(eager) else eager.split((0.5, 0.5))[0]
        assert dataset.column_names == chosen.column_names
        assert dataset.columns.equals(chosen.columns)
        assert dataset.objects.equals(chosen.objects)
        for (crop, label), (expected_crop, expected_label) in zip(dataset, chosen, strict=True):
            np.testing.assert_array_equal(crop, expected_crop)
            assert label == expected_label
    for name, table in (("lazy", cells), ("eager", pq.read_table(cells))):
        write_crops(plate, table, tmp_path / f"{name}.arrow", crop_size=(3, 3), pad="constant")
    with open_images(tmp_path / "lazy.arrow") as source, open_images(tmp_path / "eager.arrow") as expected:
        assert source.columns.equals(expected.columns)


def test_crops_read_only_the_requested_columns_of_a_wide_table_of_objects(plate, cells, requested):
    condition = '"Cells_Feature 5" > 6'
    dataset = OMEArrowDataset(
        plate, objects=cells, crop_size=(3, 3), pad="constant", filter=condition, target="Cells_Feature 2", axes="YX"
    )
    rows = np.flatnonzero(np.arange(2 * COUNT) * 0.5 + 5 > 6)
    assert [float(label) for _, label in dataset] == (rows * 0.5 + 2).tolist()
    features = {name for name in chain.from_iterable(requested) if name.startswith("Cells_Feature")}
    assert features == {"Cells_Feature 2", "Cells_Feature 5"}
    pq.write_table(pq.read_table(cells).slice(1), cells)
    with raises(FormatError, mentions=(str(cells),)):
        dataset.column("Cells_Feature 3")


TRAIN = """
import resource, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset

start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dataset = OMEArrowDataset(
    sys.argv[1], columns=sys.argv[2] or None, filter="treatment in ('a', 'b')", target="treatment", preload=False
)
train, test = dataset.split((0.75, 0.25), by="Metadata_Well")
for batch, _ in zip(OMEArrowDataLoader(train, 64, shuffle=True), range(3)):
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux")
@pytest.mark.parametrize("is_joined", [False, True])
def test_training_on_a_table_of_4000_features_uses_less_memory_than_its_columns(tmp_path, is_joined):
    """The columns have 160 MB; the footer and libraries that are imported late take 60 to 150 MB."""
    count = 5_000
    random = np.random.default_rng(0)
    described = {
        "Metadata_Well": [f"{'ABCDEFGH'[n % 96 // 12]}{n % 12 + 1:02}" for n in range(count)],
        "Metadata_Site": [n // 96 for n in range(count)],
        "treatment": ["abc"[n % 3] for n in range(count)],
    }
    features = {f"Cells_Feature_{number}": random.random(count) for number in range(4_000)}
    images = (np.full((16, 16), number, np.uint16) for number in range(count))
    plate, profiles = tmp_path / "plate.parquet", tmp_path / "profiles.parquet"
    if is_joined:
        pq.write_table(pa.table(described | features), profiles)
        described.pop("treatment")
    write_images(images, plate, axes="YX", columns=described if is_joined else described | features)
    command = [sys.executable, "-c", TRAIN, str(plate), str(profiles) if is_joined else ""]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert int(result.stdout) < 200_000
