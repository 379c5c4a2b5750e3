"""Profile, show and stats of datasets with objects, and the same options given with a path."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from omearrow_ds import (
    ArgumentError,
    AxesError,
    OMEArrowDataset,
    convert,
    open_images,
    profile_dataset,
    recommend,
    show,
    stats,
    write_images,
)
from omearrow_ds.advise.profile import measure
from omearrow_ds.advise.profile.measure import on_demand, preloaded
from omearrow_ds.advise.recommend.sample import Limits, SampleFields, take_sample
from omearrow_ds.advise.recommend.trials import in_turn
from omearrow_ds.cli import main
from omearrow_ds.storage.objects import ObjectSettings
from tests.support.errors import raises
from tests.support.strategies import image_of

SHAPE = (1, 2, 1, 16, 18)
IMAGES = [image_of(SHAPE, "uint16", number) for number in range(3)]
NAMES = ("image_id", "centroid_y", "centroid_x", "Metadata_ObjectNumber", "treatment")
CELLS = pa.table(
    dict(zip(NAMES, (["a", "c", "a", "c"], [0, 8, 9, 15], [0, 9, 3, 17], [1, 2, 3, 4], list("xyxy")), strict=True))
)
METADATA = [{"channels": [{"name": "DNA"}, {"name": "ER"}]}] * 3


@pytest.fixture
def path(tmp_path):
    masks = [np.full((16, 18), number + 1, np.uint8) for number in range(3)]
    write_images(IMAGES, tmp_path / "f.parquet", image_ids=list("abc"), metadata=METADATA)
    write_images(masks, tmp_path / "m.arrow", image_ids=list("abc"))
    pq.write_table(CELLS, tmp_path / "cells.parquet")
    return tmp_path / "f.parquet"


@pytest.mark.parametrize(("preload", "masked"), [(True, False), (False, True)])
def test_a_dataset_of_objects_is_profiled(path, preload, masked, monkeypatch):
    monkeypatch.setattr(measure, "available_cores", lambda: 1)  # Workers take long to start.
    masks = path.with_name("m.arrow") if masked else None
    dataset = OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4), preload=preload, masks=masks)
    actual = profile_dataset(dataset, batch_size=2, num_workers=0, seconds=0.05, trials=masked)
    assert (actual.images, actual.sample_shape, actual.preloaded) == (4, (2, 6, 4), preload)
    assert {trial.note for trial in actual.trials} <= {""}
    stages = {stage.stage for stage in actual.breakdown.stages if stage.program_s}
    assert "normalize" in stages


def test_its_workers_are_profiled_too(path):
    dataset = OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4), preload=False)
    profiled = profile_dataset(dataset, batch_size=2, num_workers=1, seconds=0.05, trials=False)
    assert (profiled.num_workers, profiled.images) == (1, 4)


def test_of_a_path_by_its_options(path):
    options = {"objects": path.with_name("cells.parquet"), "num_workers": 0, "seconds": 0.05, "trials": False}
    profiled = profile_dataset(path, crop_size=(6, 4), masks=path.with_name("m.arrow"), batch_size=2, **options)
    assert (profiled.images, profiled.sample_shape) == (4, (2, 6, 4))
    boxes = CELLS.append_column("y1", pa.array([2, 9, 14, 16])).append_column("x1", pa.array([18] * 4))
    ragged = {**options, "objects": boxes, "box": ("centroid_y", "y1", "centroid_x", "x1")}
    with raises(AxesError, option="crop_size", path=path, mentions=("resize=", "pad_to=")):
        profile_dataset(path, batch_size=2, **ragged)
    dataset = OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4))
    with raises(ArgumentError, mentions="dataset"):
        profile_dataset(dataset, objects=CELLS)


def test_masks_are_held_as_the_images_are(path):
    options = {"objects": CELLS, "crop_size": (6, 4), "mask_background": True}
    labelled = CELLS.set_column(3, "label_value", pa.array([1, 3, 1, 3]))
    dataset = OMEArrowDataset(path, **{**options, "objects": labelled}, masks=path.with_name("m.arrow"), preload=False)
    preloaded_crops = preloaded(on_demand(dataset))
    assert preloaded_crops.preloaded
    assert preloaded_crops._masks.collection.cache is not None
    assert on_demand(preloaded_crops)._masks.collection.cache is None
    assert dataset.preload_bytes == sum(image.nbytes for image in IMAGES) + 3 * 16 * 18
    for other in (preloaded_crops, on_demand(preloaded_crops)):
        for (image, mask), (expected_image, of_mask) in zip(other, dataset, strict=False):
            assert (image == expected_image).all()
            assert (mask == of_mask).all()


def test_crops_are_shown_by_their_channels_also_at_an_edge(path):
    dataset = OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4), preload=False, select={"C": [1, 0]})
    pictures = dataset._preview()
    assert list(pictures.image_ids) == ["a:1", "c:2", "a:3", "c:4"]
    for number in range(4):
        assert pictures.channels(number) == ["ER", "DNA"]
        field = IMAGES["abc".index(CELLS["image_id"][number].as_py())][:, ::-1]
        crop = pictures.image(number)
        assert crop.shape == (1, 2, 1, 6, 4)
        inside = field[0, 0, 0, CELLS["centroid_y"][number].as_py(), CELLS["centroid_x"][number].as_py()]
        assert inside in crop[0, 0]
    text = dataset._repr_html_()
    assert "4 crops of 3 images" in text
    assert "a:1" in text
    by_path = show(path, objects=CELLS, crop_size=(6, 4), by="treatment", sample=4)
    assert [shown_image["image_id"] for shown_image in by_path.images] == ["a:1", "a:3", "c:2", "c:4"]
    assert by_path.png == show(OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4)), by="treatment", sample=4).png
    with raises(ArgumentError, option="objects", remedy=False):
        show(dataset, objects=CELLS)


def test_looking_at_random_crops_draws_nothing_for_training(path):
    import torch

    dataset = OMEArrowDataset(path, crop="random", crop_size=(6, 4))
    state = torch.get_rng_state()
    dataset._repr_html_()
    assert torch.equal(state, torch.get_rng_state())


def test_statistics_are_of_the_fields_that_have_objects(path):
    dataset = OMEArrowDataset(path, objects=CELLS, crop_size=(6, 4))
    rows = stats(dataset).table.to_pylist()
    for channel, row in enumerate(rows):
        pixels = np.stack([IMAGES[0], IMAGES[2]])[:, :, channel]
        assert (row["images"], row["pixels"]) == (2, pixels.size)
        assert row["mean"] == pytest.approx(pixels.mean())
    with open_images(path) as source:
        assert stats(source).table["images"].to_pylist() == [3, 3]
    part = dataset.split((0.5, 0.5))[0]
    assert stats(part).table["images"].to_pylist() == [1, 1]


def test_the_commands(path):
    def run(*arguments):
        done = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="omearrow-ds")
        assert done.exit_code == 0, done.output
        return done.stdout

    cells, out = path.with_name("cells.parquet"), path.with_name("cells.png")
    options = ("--objects", cells, "--crop", "6x4", "--pad", "edge")
    masks = ("--masks", path.with_name("m.arrow"), "--workers", 0, "--seconds", 0.05, "--no-trials", "--batch-size", 2)
    profiled = json.loads(run("profile", path, *options, *masks, "--json"))
    assert (profiled["images"], profiled["sample_shape"]) == (4, [2, 6, 4])
    shown_crops = json.loads(run("show", path, *options, "--center", "centroid_y,centroid_x", "--out", out, "--json"))
    assert (shown_crops["total"], len(shown_crops["images"])) == (4, 4)


def test_crops_of_a_small_sample_take_turns_like_crops_of_many_fields():
    fields = np.repeat([4, 7, 9], [5, 3, 2])
    samples = np.arange(10) * 2
    for seed in range(5):
        order = in_turn(samples, fields, np.random.default_rng(seed)).tolist()
        assert sorted(order) == samples.tolist()
        in_order = [int(fields[samples.tolist().index(sample)]) for sample in order]
        turns = (in_order[:3], in_order[3:6], in_order[6:8], in_order[8:])
        assert [sorted(turn) for turn in turns] == [[4, 7, 9], [4, 7, 9], [4, 7], [4, 4]]


@pytest.mark.parametrize("access", ["random", pytest.param("sequential", marks=pytest.mark.slow)])
def test_crops_are_recommended_for(path, access):
    result = recommend(
        path, objects=CELLS, crop_size=(6, 4), formats=["arrow"], seconds=1, batch_size=4, access=access, epochs=3
    )
    assert "Samples are crops around 4 objects; an epoch reads each crop once." in result.notes
    assert {row.plan.layout.format.name for row in result.rows if row.rounds} == {"parquet", "arrow"}
    assert "objects=objects" in result.python
    lines = result.python.replace("objects=objects", "objects=CELLS")
    if result.command:
        _, _, source, target, *_ = result.command.split()
        convert(source, target)
    names = {"CELLS": CELLS}
    exec(lines, names)
    assert names["dataset"][0].shape == (2, 6, 4)
    assert sum(len(batch) for batch in names["loader"]) == 4


def test_recommend_of_boxes_and_what_cannot_be(path):
    boxes = CELLS.append_column("y1", pa.array([2, 9, 14, 16])).append_column("x1", pa.array([18] * 4))
    pq.write_table(boxes, path.with_name("boxes.parquet"))
    options = ("--objects", path.with_name("boxes.parquet"), "--box", "centroid_y,y1,centroid_x,x1", "--json")
    more = ("--seconds", 1, "--formats", "arrow", "--batch-size", 2)
    done = CliRunner().invoke(main, [str(word) for word in ("recommend", path, *options, *more)])
    assert done.exit_code == 0, done.output
    python_code = json.loads(done.stdout)["recommended"]["python"]
    assert f"objects='{path.with_name('boxes.parquet')}', box=['centroid_y', 'y1', 'centroid_x', 'x1']" in python_code
    assert "collate_fn=list" in python_code
    for options, option, facts in [
        ({"pad": "edge"}, "pad", "objects="),
        ({"objects": CELLS}, "crop_size", "box="),
        ({"objects": CELLS, "crop_size": (4, 4), "tile": 4}, "tile", "objects="),
        ({"objects": CELLS, "crop_size": (4, 4), "pad": "no"}, "pad", "'no'"),
        ({"objects": CELLS, "crop_size": (16, 18), "pad": "drop"}, "objects", ()),
    ]:
        with raises(ArgumentError, option=option, mentions=facts, remedy=False):
            recommend(path, **options)


def test_the_sample_of_a_large_collection_keeps_its_fields_whole_and_their_objects(path):
    with open_images(path) as source:
        cells = SampleFields.open(
            source.images, (6, 4), {"objects": CELLS, "pad": "edge"}, ObjectSettings.take({}, CELLS)
        )
        sample = take_sample(cells, Limits(1, 100, 10.0), lambda: 0.0)
        assert sample.images[0].shape == SHAPE
        assert sample.indices[0] in (0, 2)
        crops = cells.remap_to_copies(sample.indices)
        assert crops["objects"]["image_id"].to_pylist() == ["image-00000"] * 2
        write_images(sample.images, path.with_name("part.arrow"))
        part = OMEArrowDataset(path.with_name("part.arrow"), crop_size=(6, 4), **crops)
        whole = OMEArrowDataset(path, crop_size=(6, 4), objects=CELLS, pad="edge")
        for image, number in zip(part, cells.within(sample.indices).tolist(), strict=False):
            assert (image == whole[number]).all()
