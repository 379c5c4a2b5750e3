"""`normalize=` and ``illumination=``; the oracle is the same arithmetic in NumPy, image by image."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pandas as pd
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    stats,
    write_images,
)
from omearrow_ds.advise.profile.measure import part_preloaded
from tests.support.errors import raises
from tests.support.strategies import DTYPES, NAMES_OR_LONG, images_of, same, slow_except

F32 = np.float32
SHAPE = (1, 3, 1, 8, 9)
PLATES = ["P1", "P2", "P1", "P2", "P1"]
IMAGES = images_of([(SHAPE, "uint16")] * 5)
NAMED = [{"channels": [{"name": name} for name in ("OrigDNA", "ER", "RNA")]}] * 5


def column(values):
    return np.asarray(values, F32)[:, None, None]


def scaled(image, normalize, illumination=None):
    """Return the expected sample (C, Y, X)."""
    pixels = image[0, :, 0]
    if illumination is not None:
        pixels = pixels.astype(F32) / np.asarray(illumination, F32)
    if normalize is True:
        return pixels.astype(F32) / F32(np.iinfo(image.dtype).max) if image.dtype.kind in "iu" else pixels.astype(F32)
    first, second = (np.broadcast_to(np.asarray(value, np.float64), image.shape[1]) for value in normalize.values())
    if "mean" in normalize:
        return (pixels.astype(F32) - column(first)) / column(second)
    return np.clip((pixels.astype(F32) - column(first)) / column(second - first), F32(0), F32(1))


def every_way(path, **options):
    """Yield all samples of a collection for each way to access them."""
    for preload in (True, False):
        dataset = OMEArrowDataset(path, preload=preload, **options)
        again = pickle.loads(pickle.dumps(dataset))
        arrays = OMEArrowDatasetNumpy(path, preload=preload, **options)
        order = list(range(len(dataset)))
        yield [dataset[index].numpy() for index in order]
        yield [sample.numpy() for sample in dataset.__getitems__(order)]
        yield [sample.numpy() for batch in OMEArrowDataLoader(again, batch_size=2, num_workers=0) for sample in batch]
        yield list(arrays.__getitems__(order))
        yield [arrays[index] for index in order]


NORMALIZE = [
    {"mean": 100, "std": 30.5},
    {"mean": [1, 20, 300], "std": [3, 2, 1.7]},
    {"mean": [1, 2, 3], "std": 7},
    {"low": 10, "high": [70, 80, 90]},
    {"low": -3.5, "high": 1e4},
]


@pytest.mark.parametrize("name", NAMES_OR_LONG)
@pytest.mark.parametrize("normalize", NORMALIZE[1::2], ids=str)
@pytest.mark.share(2, "name", "normalize")
def test_every_path_gives_the_same_bits(stored, name, normalize):
    path = stored(name, IMAGES)
    for samples in every_way(path, normalize=normalize):
        assert all(same(sample, scaled(image, normalize)) for sample, image in zip(samples, IMAGES, strict=True))


EACH_ONCE = [(NORMALIZE[number % len(NORMALIZE)], dtype) for number, dtype in enumerate(DTYPES)]


@pytest.mark.parametrize(("normalize", "dtype"), slow_except(EACH_ONCE, product(NORMALIZE, DTYPES)), ids=str)
def test_every_dtype(stored, dtype, normalize):
    images = images_of([(SHAPE, str(dtype))] * 5)
    path = stored("arrow", images)
    for samples in every_way(path, normalize=normalize):
        assert all(same(sample, scaled(image, normalize)) for sample, image in zip(samples, images, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["CYX", "YXC", "XCY"]),
    st.sampled_from([None, [0], [2, 0], slice(1, 3)]),
    st.sampled_from([None, (3, 4), (8, 9)]),
    st.sampled_from(NORMALIZE),
    st.booleans(),
)
def test_cut_and_scaled_is_scaled_and_cut(tmp_path_factory, axes, pick, crop, normalize, preload):
    path = tmp_path_factory.mktemp("cut") / "images.arrow"
    write_images(IMAGES, path)
    given_ = {} if pick is None else {"select": {"C": pick}}
    dataset = OMEArrowDataset(path, axes=axes, crop_size=crop, normalize=normalize, preload=preload, **given_)
    for index, image in enumerate(IMAGES):
        expected = scaled(image, normalize)
        expected = expected if pick is None else expected[pick]
        if crop is not None:
            top, left = (8 - crop[0]) // 2, (9 - crop[1]) // 2
            expected = expected[:, top : top + crop[0], left : left + crop[1]]
        expected = expected.transpose(["CYX".index(axis) for axis in axes])
        assert same(dataset[index].numpy(), np.ascontiguousarray(expected))


def test_ragged_images_and_workers(stored):
    images = images_of([((1, 3, 1, 5 + number, 6), "uint16") for number in range(4)])
    path = stored("lance", images)
    dataset = OMEArrowDataset(path, normalize=NORMALIZE[1])
    loader = OMEArrowDataLoader(dataset, batch_size=1, num_workers=1)
    for batch, image in zip(loader, images, strict=True):
        assert same(batch[0].numpy(), scaled(image, NORMALIZE[1]))


def test_part_preloaded_uses_the_statistics_of_each_plate(stored):
    images = [image + np.uint16(1000 * (plate == "P2")) for image, plate in zip(IMAGES, PLATES, strict=True)]
    path = stored("arrow", images, columns={"plate": PLATES}, metadata=NAMED)
    dataset = OMEArrowDataset(path, normalize=stats(path, by="plate"), preload=False)
    first = part_preloaded(dataset, 2)
    assert first.preloaded
    assert len(first) == 2
    for index in range(len(first)):
        assert same(first[index].numpy(), dataset[index].numpy())


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("how", ["Stats", "file", "percentiles"])
def test_statistics_by_plate_go_to_the_images_of_the_plate(stored, tmp_path, preload, how):
    images = [image + np.uint16(1000 * (plate == "P2")) for image, plate in zip(IMAGES, PLATES, strict=True)]
    path = stored("arrow", images, columns={"plate": PLATES}, metadata=NAMED)
    measured = stats(path, by="plate")
    measured.write(tmp_path / "stats.parquet")
    normalize = {
        "Stats": measured,
        "file": tmp_path / "stats.parquet",
        "percentiles": {"stats": str(tmp_path / "stats.parquet"), "low": "p1", "high": "p99"},
    }[how]
    dataset = OMEArrowDataset(path, normalize=normalize, preload=preload)
    names = {"low": "p1", "high": "p99"} if how == "percentiles" else {"mean": "mean", "std": "std"}
    batch = dataset.__getitems__([4, 1, 0])
    for position, index in enumerate([4, 1, 0]):
        rows = [row for row in measured.table.to_pylist() if row["plate"] == PLATES[index]]
        expected = scaled(images[index], {key: [row[name] for row in rows] for key, name in names.items()})
        assert same(dataset[index].numpy(), expected)
        assert same(batch[position].numpy(), expected)


def test_statistics_are_found_by_the_names_of_channels(tmp_path):
    for number, name in enumerate(["A", "B"]):
        tifffile.imwrite(tmp_path / f"w1_{name}.tif", IMAGES[number][0, 0, 0])
    measured = stats(tmp_path, pattern="{well}_{channel}.tif")
    dataset = OMEArrowDataset(tmp_path, pattern="{well}_{channel}.tif", channels=["B", "A"], normalize=measured)
    rows = measured.table.to_pylist()
    ordered = {key: [rows[1][key], rows[0][key]] for key in ("mean", "std")}
    image = np.stack([IMAGES[1][0, 0], IMAGES[0][0, 0]])[None]
    assert same(dataset[0].numpy(), scaled(image, ordered))


ILLUM = 1 + np.random.default_rng(0).random((3, 8, 9))


@pytest.mark.parametrize("normalize", [True, NORMALIZE[1], NORMALIZE[3]], ids=str)
def test_illumination_is_divided_first(stored, tmp_path, normalize):
    path = stored("arrow", IMAGES, metadata=NAMED)
    names = ("OrigDNA", "ER", "RNA")
    for name, function in zip(names, ILLUM, strict=True):
        np.save(tmp_path / f"{name}.npy", function)
    np.save(tmp_path / "all.npy", ILLUM)
    forms = (
        {name: tmp_path / f"{name}.npy" for name in names},
        dict(zip(names, ILLUM, strict=True)),
        list(ILLUM),
        ILLUM,
        tmp_path / "all.npy",
    )
    for illumination in forms:
        for samples in every_way(path, normalize=normalize, illumination=illumination):
            expected = [scaled(image, normalize, ILLUM) for image in IMAGES]
            assert all(map(same, samples, expected))


def test_functions_that_load_data_names_are_those_of_the_plate(tmp_path):
    rows = []
    for number, plate in enumerate(PLATES):
        for channel, name in enumerate(("OrigDNA", "ER", "RNA")):
            tifffile.imwrite(tmp_path / f"{number}_{name}.tif", IMAGES[number][0, channel, 0])
            np.save(tmp_path / f"{plate}_{name}.npy", ILLUM[channel] + (plate == "P2"))
        files = {f"FileName_{name}": f"{number}_{name}.tif" for name in ("OrigDNA", "ER", "RNA")}
        functions = {
            f"FileName_Illum{name.removeprefix('Orig')}": f"{plate}_{name}.npy" for name in ("OrigDNA", "ER", "RNA")
        }
        rows.append({**files, **functions, "Metadata_Plate": plate, "Metadata_Site": number})
    pd.DataFrame(rows).to_csv(tmp_path / "load_data.csv", index=False)
    for preload in (True, False):
        dataset = OMEArrowDataset(tmp_path / "load_data.csv", illumination=True, preload=preload)
        for index, plate in enumerate(PLATES):
            assert same(dataset[index].numpy(), scaled(IMAGES[index], True, ILLUM + (plate == "P2")))
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in tmp_path.glob("*.*"):
        if file.suffix != ".csv":
            file.rename(moved / file.name)
    dataset = OMEArrowDataset(tmp_path / "load_data.csv", illumination=True, root=moved)
    assert same(dataset[1].numpy(), scaled(IMAGES[1], True, ILLUM + 1))


@pytest.mark.parametrize(
    ("options", "error", "option", "facts"),
    [
        ({"normalize": "imagenet"}, FileNotFoundError, "normalize", "imagenet"),
        ({"normalize": {"mean": 1}}, ArgumentError, "normalize", "{'mean': 1}"),
        ({"normalize": {"mean": "a", "std": 1}}, ArgumentError, "normalize", "'a'"),
        ({"normalize": 5}, ArgumentError, "normalize", 5),
        ({"normalize": {"mean": [1, 2], "std": [1, 2, 3]}}, ArgumentError, "normalize", "[1, 2, 3]"),
        ({"normalize": {"mean": [1, 2], "std": 1}}, ArgumentError, "normalize", ("2 values", "image 0", "3 channels")),
        ({"normalize": {"mean": 1, "std": 0}}, ArgumentError, "normalize", ("'std': 0", "std")),
        ({"normalize": {"mean": 1, "std": [1, 2, np.nan]}}, ArgumentError, "normalize", ("nan", "std")),
        ({"normalize": {"low": 5, "high": 5}}, ArgumentError, "normalize", ("high", "low")),
        (
            {"illumination": np.ones((3, 8, 9)), "normalize": False},
            ArgumentError,
            "normalize",
            ("False", "illumination="),
        ),
        (
            {"illumination": np.ones((3, 9, 9))},
            ArgumentError,
            "illumination",
            ("function 0", "9 x 9", "image 0", "8 x 9"),
        ),
        ({"illumination": np.ones((2, 8, 9))}, ArgumentError, "illumination", ("2 values", "image 0", "3 channels")),
        ({"illumination": np.zeros((3, 8, 9))}, FormatError, "illumination", 0),
        ({"illumination": True}, ColumnError, None, ("'FileName_IllumDNA'", "'OrigDNA'")),
        ({"illumination": {"ER": np.ones((8, 9))}}, ArgumentError, "illumination", "'OrigDNA'"),
        ({"illumination": 3}, ArgumentError, "illumination", 3),
        ({"illumination": "/no/such.npy"}, FileNotFoundError, "illumination", ("/no/such.npy", ".npy")),
        ({"illumination": np.ones((3, 8, 9)) * 1j}, FormatError, "illumination", "complex128"),
        ({"normalize": {"mean": [], "std": []}}, ArgumentError, "normalize", "[]"),
        ({"normalize": {"mean": 1e300, "std": 1}}, ArgumentError, "normalize", "1e+300"),
    ],
)
def test_what_cannot_be_scaled(stored, options, error, option, facts):
    path = stored("arrow", IMAGES, metadata=NAMED)
    with raises(error, option=option, mentions=facts, remedy=False):
        OMEArrowDataset(path, **options)


def test_statistics_of_other_images_are_refused(stored):
    path = stored("arrow", IMAGES, columns={"plate": PLATES})
    measured = stats(path, by="plate")
    other = stored("arrow", IMAGES[:1], columns={"plate": ["P9"]}, stem="other")
    with raises(ArgumentError, path=path, mentions=("'P9'", "image 0")):
        OMEArrowDataset(other, normalize=measured)
    with raises(ColumnError, path=path, mentions="'plate'", remedy=False):
        OMEArrowDataset(stored("arrow", IMAGES[:1], stem="bare"), normalize=measured)
    more = stored("arrow", images_of([((1, 4, 1, 8, 9), "uint16")]), stem="more", columns={"plate": ["P1"]})
    with raises(ArgumentError, path=more, mentions="channel 3"):
        OMEArrowDataset(more, normalize=measured)


def test_views_and_transforms_go_with_it(stored):
    path = stored("arrow", IMAGES, columns={"plate": PLATES})
    dataset = OMEArrowDataset(path, normalize=stats(path, by="plate"), transform=torch.neg)
    train, val = dataset.split((0.6, 0.4), by="plate")
    for view in (train, val):
        for index, image_id in enumerate(view.image_ids):
            assert torch.equal(view[index], dataset[list(dataset.image_ids).index(image_id)])


def test_functions_are_those_that_were_there_when_it_was_opened(stored, tmp_path, monkeypatch):
    path = stored("arrow", IMAGES)
    monkeypatch.chdir(tmp_path)
    np.save("all.npy", ILLUM)
    mine = ILLUM.copy()
    for illumination in (mine, ["0.npy", "1.npy", "2.npy"]):
        for number, function in enumerate(ILLUM):
            np.save(f"{number}.npy", function)
        dataset = OMEArrowDataset(path, illumination=illumination)
        expected = [scaled(image, True, ILLUM) for image in IMAGES]
        mine *= 2
        for number in range(3):
            np.save(f"{number}.npy", ILLUM[number] * 2)
        (tmp_path / "2.npy").unlink()
        monkeypatch.chdir("/")
        again = pickle.loads(pickle.dumps(dataset))
        batches = list(OMEArrowDataLoader(dataset, batch_size=1, num_workers=1))
        for index, image in enumerate(expected):
            assert same(dataset[index].numpy(), image)
            assert same(again[index].numpy(), image)
            assert same(batches[index][0].numpy(), image)
        monkeypatch.chdir(tmp_path)


def named(*names):
    return [{"channels": [{"name": name} for name in names]}] * len(IMAGES)


def test_channels_of_one_name_have_statistics_of_their_own(stored):
    path = stored("arrow", IMAGES, metadata=named("DNA", "DNA", "ER"))
    measured = stats(path)
    rows = measured.table.to_pylist()
    dataset = OMEArrowDataset(path, normalize=measured)
    expected = scaled(IMAGES[0], {name: [row[name] for row in rows] for name in ("mean", "std")})
    assert same(dataset[0].numpy(), expected)


def test_statistics_of_channels_by_other_names_are_refused(stored):
    measured = stats(stored("arrow", IMAGES, metadata=named("A", "B", "C")))
    other = stored("arrow", IMAGES, metadata=named("C", "D", "A"), stem="other")
    with raises(ArgumentError, path=other, mentions=("'D'", "['A', 'B', 'C']")):
        OMEArrowDataset(other, normalize=measured)


def test_statistics_of_one_channel_are_not_those_of_all(stored):
    path = stored("arrow", images_of([((1, channels, 1, 8, 9), "uint16") for channels in (1, 3)]))
    with raises(ArgumentError, option="normalize", path=path, mentions=("image 1", "3 channels"), remedy=False):
        OMEArrowDataset(path, normalize=stats(path))


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
@pytest.mark.parametrize("groups", [["01", "1", "01", "1", "01"], [1, 2, 1, 2, 1], [True, False] * 2 + [True]], ids=str)
def test_groups_come_back_from_files_as_they_were(stored, tmp_path, suffix, groups):
    path = stored("arrow", IMAGES, columns={"group": groups})
    measured = stats(path, by="group")
    measured.write(tmp_path / f"stats{suffix}")
    direct = OMEArrowDataset(path, normalize=measured)
    dataset = OMEArrowDataset(path, normalize=tmp_path / f"stats{suffix}")
    assert all(torch.equal(dataset[index], direct[index]) for index in range(len(IMAGES)))


def test_statistics_edited_by_hand_are_whole_or_refused(stored, tmp_path):
    path = stored("arrow", IMAGES)
    table = pd.DataFrame(stats(path).table.to_pylist())
    pd.concat([table, table[:1]]).to_csv(tmp_path / "twice.csv", index=False)
    with raises(FormatError, path=tmp_path / "twice.csv", mentions="channel 0"):
        OMEArrowDataset(path, normalize=tmp_path / "twice.csv")
    table.assign(mean=["a", "b", "c"]).to_csv(tmp_path / "text.csv", index=False)
    with raises(FormatError, path=tmp_path / "text.csv", mentions=("'mean'", "'a'", 0)):
        OMEArrowDataset(path, normalize=tmp_path / "text.csv")
    table.to_csv(tmp_path / "whole.csv", index=False)
    with raises(ArgumentError, option="normalize", remedy=False):
        OMEArrowDataset(path, normalize={"stats": tmp_path / "whole.csv", "low": ["p1"], "high": "p99"})


def test_other_processes_are_sent_a_value_a_channel(stored):
    path = stored("arrow", images_of([((1, 3, 1, 200, 200), "uint16")] * 2), columns={"plate": ["a", "b"]})
    assert len(pickle.dumps(OMEArrowDataset(path, normalize=stats(path, by="plate")))) < 10_000
