"""Datasets of filtered images and objects, and filtered views; images encode their numbers."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    SelectError,
    open_images,
    profile_dataset,
    recommend,
    show,
    stats,
    write_crops,
    write_images,
)
from omearrow_ds.cli import main
from tests.support.errors import raises
from tests.support.numbered import image, number_of
from tests.support.parts import publish

COUNT = 8
IMAGES = [image(number)[None, :, None] for number in range(COUNT)]
COLUMNS = {
    "treatment": [None if number == 3 else ("DMSO", "TAXOL")[number % 2] for number in range(COUNT)],
    "dose": [number / 2 for number in range(COUNT)],
}
IDS = [f"id-{number}" for number in range(COUNT)]
# Object k is in image k // 3, and its crop starts at (5 + k % 7, 6); images 6 and 7 have no object.
OBJECTS = pa.table(
    {
        "image_id": [IDS[number // 3] for number in range(18)],
        "centroid_y": [7.5 + number % 7 for number in range(18)],
        "centroid_x": [8.5] * 18,
        "area": [None if number == 5 else 10 * number for number in range(18)],
    }
)
RAW = {"normalize": False, "axes": "CYX"}


@pytest.fixture
def path(stored):
    return stored("arrow", IMAGES, columns=COLUMNS, image_ids=IDS)


def numbers_of(dataset):
    return [number_of(dataset[index].numpy()) for index in range(len(dataset))]


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_has_only_the_chosen_images(path, preload, workers):
    condition = (pc.field("treatment") == "TAXOL") & (pc.field("dose") < 3)
    dataset = OMEArrowDataset(path, preload=preload, filter=condition, target="dose", return_ids=True, **RAW)
    assert dataset.nbytes == 2 * IMAGES[0].nbytes
    assert dataset.source.rows.tolist() == [1, 5]
    batches = list(OMEArrowDataLoader(dataset, batch_size=1, num_workers=workers, shuffle=True))
    samples = sorted((number_of(pixels.numpy()), float(dose), *ids) for pixels, dose, ids in batches)
    assert samples == [(1, 0.5, "id-1"), (5, 2.5, "id-5")]


@pytest.mark.slow
def test_workers_of_a_spawned_process_have_the_chosen_images(path):
    dataset = OMEArrowDataset(path, preload=False, filter=pc.field("dose") > 2, **RAW)
    loader = OMEArrowDataLoader(dataset, batch_size=3, num_workers=1, multiprocessing_context="spawn")
    assert [number_of(pixels) for batch in loader for pixels in batch.numpy()] == [5, 6, 7]


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize(
    ("condition", "chosen"),
    [
        ("area >= 60 and area < 100", [6, 7, 8, 9]),
        ("treatment == 'TAXOL' and area != 30", [4, 15, 16, 17]),
        ("area is null", [5]),
        (pc.field("area") > 150, [16, 17]),
    ],
)
def test_filter_chooses_objects_and_the_fields_that_contain_them(path, preload, condition, chosen):
    crops = {"objects": OBJECTS, "crop_size": (6, 6), "return_ids": True, "preload": preload}
    whole, few = OMEArrowDataset(path, **crops, **RAW), OMEArrowDataset(path, filter=condition, **crops, **RAW)
    assert len(few) == len(chosen)
    for index, number in enumerate(chosen):
        expected = IMAGES[number // 3][0, :, 0, number % 7 + 5 : number % 7 + 11, 6:12]
        np.testing.assert_array_equal(few[index][0].numpy(), expected)
        assert few[index][1] == whole[number][1]
    fields = sorted({number // 3 for number in chosen})
    assert list(few.source.image_ids) == [IDS[field] for field in fields]
    assert few.nbytes == len(fields) * IMAGES[0].nbytes
    assert few.columns["treatment"].to_pylist() == [COLUMNS["treatment"][number // 3] for number in chosen]
    again = pickle.loads(pickle.dumps(few))
    assert [again[index][1] for index in range(len(again))] == [few[index][1] for index in range(len(few))]


def test_objects_without_an_image_are_reported_before_the_filter(path):
    objects = OBJECTS.set_column(0, "image_id", pa.array(["other", *OBJECTS["image_id"].to_pylist()[1:]]))
    with pytest.warns(UserWarning, match="1 of 18"):
        dataset = OMEArrowDataset(path, objects=objects, crop_size=(6, 6), filter="area < 30", preload=False)
    assert len(dataset) == 2


@pytest.mark.parametrize("condition", ["area > 1000", "dose > 4"])
def test_objects_that_are_all_filtered_out_are_an_error(path, condition):
    with raises(SelectError, "filter", path):
        OMEArrowDataset(path, objects=OBJECTS, crop_size=(6, 6), filter=condition)
    with raises(ColumnError, "filter", path, mentions=["area"]):
        OMEArrowDataset(path, objects=OBJECTS, crop_size=(6, 6), filter="aera > 1")


@pytest.mark.parametrize("preload", [True, False])
def test_filter_view_shares_pixels_and_composes_with_other_views(path, preload):
    dataset = OMEArrowDataset(path, preload=preload, target="treatment", nulls="skip", normalize=False)
    view = dataset.filter("dose >= 1").filter(pc.field("treatment") == "DMSO")
    numbers = [number_of(view[index][0].numpy()) for index in range(len(view))]
    assert numbers == [2, 4, 6]
    assert view.classes == dataset.classes
    assert view.columns["dose"].to_pylist() == [1.0, 2.0, 3.0]
    train, test = dataset.filter("dose != 0.5").split((0.5, 0.5))
    assert sorted([*train.columns["dose"].to_pylist(), *test.columns["dose"].to_pylist()]) == [0, 1, 2, 2.5, 3, 3.5]
    assert [row for part in (train, test) for row in part.filter("dose == 3").columns["dose"].to_pylist()] == [3]
    in_workers = [number_of(pixels) for batch, _ in OMEArrowDataLoader(view, num_workers=1) for pixels in batch.numpy()]
    assert in_workers == numbers


def test_filter_view_of_crops_uses_columns_of_objects_and_ids(path):
    cells = OMEArrowDataset(path, objects=OBJECTS, crop_size=(6, 6), return_ids=True, preload=False)
    assert [cells.filter("area in (10, 170)")[index][1] for index in range(2)] == ["id-0:1", "id-5:17"]
    tiles = OMEArrowDataset(path, crop="grid", crop_size=(12, 10), return_ids=True, preload=False)
    view = tiles.filter("crop_y == 12 and crop_x == 0 and dose < 1")
    assert [view[index][1] for index in range(len(view))] == ["id-0:12,0", "id-1:12,0"]
    assert tiles.filter("image_id == 'id-3:0,10'")[0][1] == "id-3:0,10"


def test_filter_view_without_samples_of_the_collection_is_an_error(path):
    dataset = OMEArrowDataset(path, preload=False)
    with raises(SelectError, "filter", path):
        dataset.filter("dose > 100")
    with raises(ArgumentError, "filter"):
        dataset.filter("dose >")
    with raises(ArgumentError, "filter"):
        dataset.filter = "dose > 1"


@pytest.mark.parametrize("kind", ["collection", "column", "files"])
def test_masks_belong_to_the_chosen_images(stored, tmp_path, kind):
    masks = [np.full((1, 1, 1, 24, 20), number + 1, np.uint16) for number in range(COUNT)]
    if kind == "column":
        import pyarrow.parquet as pq

        tables = [
            pq.read_table(stored("parquet", images, stem, image_ids=IDS))
            for stem, images in (("i", IMAGES), ("m", masks))
        ]
        table = tables[0].select(["ome_image"]).append_column("mask", tables[1]["ome_image"])
        path, mask_path = tmp_path / "both.parquet", "mask"
        pq.write_table(table.append_column("dose", pa.array(COLUMNS["dose"])), path)
    else:
        path = stored("parquet", IMAGES, columns=COLUMNS, image_ids=IDS)
        mask_path = stored("ome_zarr", masks, "masks", image_ids=IDS)
    if kind == "files":
        import tifffile

        for number, mask in enumerate(masks):
            tifffile.imwrite(tmp_path / f"id-{number}_mask.tif", mask[0, 0, 0])
        mask_path = str(tmp_path / "{field}_mask.tif")
    options = {} if kind != "column" else {"image_column": "ome_image"}
    for preload in (True, False):
        dataset = OMEArrowDataset(
            path, filter="dose > 2 and dose < 3.5", masks=mask_path, preload=preload, **options, **RAW
        )
        assert [(number_of(pixels.numpy()), int(mask.numpy().max())) for pixels, mask in dataset] == [(5, 6), (6, 7)]
        assert dataset.preload_bytes == 2 * IMAGES[0].nbytes + 2 * masks[0].nbytes


def test_cache_dir_holds_pixels_of_several_filters(path, tmp_path):
    folder = tmp_path / "cache"
    for _ in range(2):
        for condition, chosen in (("dose < 1", [0, 1]), ("dose > 3", [7]), (None, list(range(COUNT)))):
            dataset = OMEArrowDataset(path, filter=condition, cache_dir=folder, **RAW)
            assert numbers_of(dataset) == chosen
    assert len(list(folder.glob("*.pixels"))) == 3


def loader_of(path, condition=None, view=None):
    dataset = OMEArrowDataset(path, filter=condition, preload=False, **RAW)
    return OMEArrowDataLoader(dataset if view is None else dataset.filter(view), batch_size=1, shuffle=True)


def test_a_state_resumes_only_with_the_same_filter(path):
    loader = loader_of(path, "dose < 2")
    batches = iter(loader)
    first = number_of(next(batches).numpy())
    state = loader.state_dict()
    again = loader_of(path, "dose < 2")
    again.load_state_dict(state)
    rest = [number_of(batch.numpy()) for batch in again]
    assert sorted([first, *rest]) == [0, 1, 2, 3]
    with raises(ArgumentError, mentions=["filter"]):
        loader_of(path, "dose >= 2").load_state_dict(state)
    with raises(ArgumentError, mentions=["filter"]):
        loader_of(path, "dose < 2", "dose < 9").load_state_dict(state)
    plain = loader_of(path)
    with raises(ArgumentError, mentions=["filter"]):
        plain.load_state_dict(
            {**plain.state_dict(), "loader": {**plain.state_dict()["loader"], "filter": "(dose < 2)"}}
        )


def test_a_state_of_parts_resumes_only_with_the_same_images(tmp_path):
    path = publish(tmp_path / "plate.parts", IMAGES, [3, 3, 2])
    loader = loader_of(path, "label != 4")
    batches = iter(loader)
    first = [number_of(next(batches).numpy()) for _ in range(3)]
    again = loader_of(path, "label != 4")
    again.load_state_dict(loader.state_dict())
    assert sorted(first + [number_of(batch.numpy()) for batch in again]) == [0, 1, 2, 3, 5, 6, 7]
    with raises(ArgumentError):
        loader_of(path, "label != 5").load_state_dict(loader.state_dict())


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("target", ["crops.arrow", "crops.parts"])
def test_write_crops_writes_the_chosen_objects(path, tmp_path, opened, target):
    options = {"crop_size": (6, 6), "filter": "area > 80 and treatment == 'DMSO'"}
    options |= {"part_bytes": 1_000} if target == "crops.parts" else {}
    if opened:
        with open_images(path) as source:
            write_crops(source, OBJECTS, tmp_path / target, **options)
    else:
        write_crops(path, OBJECTS, tmp_path / target, **options)
    with open_images(tmp_path / target) as crops:
        assert list(crops.image_ids) == ["id-4:12", "id-4:13", "id-4:14"]
        for index, number in enumerate((12, 13, 14)):
            expected = IMAGES[4][:, :, :, number % 7 + 5 : number % 7 + 11, 6:12]
            np.testing.assert_array_equal(crops.read(index), expected)


def test_functions_of_a_collection_use_the_filter(path, monkeypatch):
    monkeypatch.setattr("omearrow_ds.advise.profile.measure._TURN_S", (0.01, 0.01))
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'omearrow-ds[show]'")
    grid = show(path, filter="dose > 2")
    assert sorted(row["image_id"] for row in grid.images) == ["id-5", "id-6", "id-7"]
    cells = show(path, filter="area < 30", objects=OBJECTS, crop_size=(6, 6))
    assert sorted(row["image_id"] for row in cells.images) == ["id-0:0", "id-0:1", "id-0:2"]
    measured = profile_dataset(path, filter="dose > 2", batch_size=1, num_workers=0, epochs=1, trials=False)
    assert measured.images == 3
    view = OMEArrowDataset(path, preload=False).filter("dose > 2")
    assert set(stats(view).table["images"].to_pylist()) == {3}


@pytest.mark.parametrize("objects", [None, OBJECTS])
def test_recommend_measures_the_chosen_samples(path, objects):
    crops = {} if objects is None else {"objects": objects, "crop_size": (6, 6)}
    advice = recommend(path, formats=["arrow"], seconds=0.2, filter="dose > 1 and dose < 3", **crops)
    assert advice.looked.whole_count == 3
    if objects is None:
        assert "--filter" in advice.command or "filter=" in advice.python
    else:
        assert any("9 objects" in note for note in advice.notes)
        assert "filter='dose > 1 and dose < 3'" in advice.python


@pytest.mark.parametrize(
    "words", [["info"], ["verify"], ["stats"], ["profile", "--epochs", "1", "--no-trials", "--batch-size", "1"]]
)
def test_commands_use_the_filter_and_state_it(path, words, monkeypatch):
    monkeypatch.setattr("omearrow_ds.advise.profile.measure._TURN_S", (0.01, 0.01))
    name, *flags = words
    done = CliRunner().invoke(main, [name, str(path), "--filter", "dose >= 2", "--json", *flags])
    assert done.exit_code == 0, done.output
    described = json.loads(done.stdout)
    assert described["filter"] == "dose >= 2"
    assert described.get("images", 4) == 4
    done = CliRunner().invoke(main, [name, str(path), "--json", *flags])
    assert json.loads(done.stdout)["filter"] is None


@pytest.mark.parametrize("suffix", [".tiffs", ".zarr", ".arrow"])
def test_convert_counts_no_row_without_an_image_when_a_filter_leaves_images_out(tmp_path, suffix):
    source = tmp_path / f"plate{suffix}"
    write_images([np.full((4, 4), number, np.uint16) for number in range(5)], source, axes="YX")
    words = ["convert", str(source), str(tmp_path / "few.parquet"), "--filter", "image_id > 'image-00002'", "--json"]
    done = CliRunner().invoke(main, words)
    assert json.loads(done.stdout)["left_out"] == {"rows": 0, "image_columns": []}
    assert len(open_images(tmp_path / "few.parquet")) == 2


def test_convert_and_crops_commands_use_the_filter(path, tmp_path):
    words = ["convert", str(path), str(tmp_path / "few.parquet"), "--filter", '"treatment" = 3']
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "--filter" in done.stderr
    assert "character 13" in done.stderr
    done = CliRunner().invoke(main, [*words[:-1], "treatment is null or dose == 0", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["left_out"] == {"rows": 0, "image_columns": []}
    with open_images(tmp_path / "few.parquet") as copy:
        assert list(copy.image_ids) == ["id-0", "id-3"]
    objects = tmp_path / "cells.csv"
    OBJECTS.to_pandas().to_csv(objects, index=False)
    words = ["crops", str(path), str(objects), str(tmp_path / "cells.arrow"), "--crop", "6", "--filter", "area > 150"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    with open_images(tmp_path / "cells.arrow") as crops:
        assert list(crops.image_ids) == ["id-5:16", "id-5:17"]
