"""Pixel statistics; the oracle is NumPy over all pixels."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ChecksumError,
    ColumnError,
    FormatError,
    MissingPathError,
    OMEArrowDataset,
    PathExistsError,
    open_images,
    show,
    stats,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.storage.stats import MEASURES, PERCENTILES, read_stats
from tests.support.errors import raises
from tests.support.strategies import DTYPES, NAMES

PLATES = ["P1", "P2", "P1", "P2"]


def images(dtype, count=4, shape=(2, 3, 1, 5, 6), seed=0):
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "f":
        return list(random.normal(3, 100, (count, *shape)).astype(dtype))
    info = np.iinfo(dtype)
    return list(random.choice([info.min, info.min + 3, 0, 7, info.max // 3, info.max], (count, *shape)).astype(dtype))


def check(row, pixels):
    """Compare a row with NumPy's values of the same pixels."""
    whole = pixels.astype(np.float64)
    assert (row["pixels"], row["min"], row["max"]) == (whole.size, whole.min(), whole.max())
    assert row["mean"] == pytest.approx(whole.mean(), rel=1e-9, abs=1e-9)
    rounding = 1e-15 * np.abs(whole).max()  # NumPy has this error if all pixels are equal.
    assert row["std"] == pytest.approx(whole.std(), rel=1e-6, abs=max(1e-9, rounding))
    for name, percent in PERCENTILES.items():
        assert row[name] == pytest.approx(np.percentile(whole, percent), rel=1e-9)
    if pixels.dtype.kind == "f":
        assert row["saturated"] is None
    else:
        assert row["saturated"] == pytest.approx((pixels == np.iinfo(pixels.dtype).max).mean())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype(stored, dtype):
    all_images = images(dtype)
    measured = stats(stored("parquet", all_images, columns={"plate": PLATES}), by="plate")
    assert measured.by == ("plate",)
    assert measured.table["plate"].to_pylist() == ["P1"] * 3 + ["P2"] * 3
    for row in measured.table.to_pylist():
        of_group = [image for image, plate in zip(all_images, PLATES, strict=True) if plate == row["plate"]]
        check(row, np.stack(of_group)[:, :, row["channel"]])
        assert (row["images"], row["exact"]) == (2, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3, "name")
def test_values_of_every_format_and_ragged_images(stored, name):
    written = [images("uint16", 1, (1, 1 + number % 2, 1, 3 + number, 4), seed=number)[0] for number in range(5)]
    rows = stats(stored(name, written)).table.to_pylist()
    assert [row["images"] for row in rows] == [5, 2]
    for row in rows:
        channel = row["channel"]
        check(row, np.concatenate([image[:, channel].ravel() for image in written if image.shape[1] > channel]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=9), min_size=1, max_size=4))
def test_any_values(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("stats") / "images.arrow"
    all_images = [np.array(row, np.int16).reshape(1, 1, 1, 1, -1) for row in values]
    write_images(all_images, path)
    (row,) = stats(path).table.to_pylist()
    check(row, np.concatenate([image.ravel() for image in all_images]))


def test_many_floating_pixels_are_measured_by_a_sample_and_said_so(tmp_path):
    pixels = np.random.default_rng(0).normal(5, 2, (5, 1, 1, 1, 512, 512)).astype(np.float32)
    pixels[0, ..., 0, 0] = np.nan
    write_images(list(pixels), tmp_path / "images.arrow")
    measured = stats(tmp_path / "images.arrow")
    (row,) = measured.table.to_pylist()
    assert not row["exact"]
    assert row["pixels"] == pixels.size - 1
    assert row["mean"] == pytest.approx(np.nanmean(pixels.astype(np.float64)), rel=1e-9)
    assert row["std"] == pytest.approx(np.nanstd(pixels.astype(np.float64)), rel=1e-9)
    assert (row["min"], row["max"]) == (np.nanmin(pixels), np.nanmax(pixels))
    for name, percent in PERCENTILES.items():
        assert row[name] == pytest.approx(np.nanpercentile(pixels, percent), abs=0.15)
    assert measured.as_text().endswith("of a sample")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float32", "float64"]),
    st.lists(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0, -7.5, 3, 1e30]), min_size=1), min_size=1),
)
def test_stats_counts_the_pixels_that_are_not_finite_and_measures_the_others(tmp_path_factory, dtype, values):
    path = tmp_path_factory.mktemp("stats") / "images.arrow"
    write_images([np.array(row, dtype).reshape(1, 1, 1, 1, -1) for row in values], path)
    pixels = np.concatenate([np.array(row, dtype) for row in values])
    finite = pixels[np.isfinite(pixels)]
    measured = stats(path)
    (row,) = measured.table.to_pylist()
    assert (row["pixels"], row["left_out"], row["images"]) == (finite.size, pixels.size - finite.size, len(values))
    if finite.size:
        check(row, finite)
    else:
        assert all(row[measure] is None for measure in MEASURES)
    assert ("infinite or NaN" in measured.as_text()) == (finite.size < pixels.size)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json"])
def test_stats_writes_and_reads_the_count_of_left_out_pixels(stored, tmp_path, suffix):
    all_images = images("float32")
    all_images[0][0, 1, 0, 0, :4] = [np.nan, np.inf, -np.inf, np.nan]
    measured = stats(stored("parquet", all_images))
    assert measured.table["left_out"].to_pylist() == [0, 4, 0]
    assert [row["left_out"] for row in measured.as_dict()["stats"]] == [0, 4, 0]
    assert "left_out" not in "".join(measured.columns.column_names)
    measured.write(tmp_path / f"stats{suffix}")
    assert read_stats(tmp_path / f"stats{suffix}").table.to_pylist() == measured.table.to_pylist()


def test_read_stats_reads_tables_without_the_count_of_left_out_pixels(stored, tmp_path):
    measured = stats(stored("parquet", images("float32")))
    pq.write_table(measured.table.drop_columns("left_out"), tmp_path / "stats.parquet")
    old = read_stats(tmp_path / "stats.parquet")
    assert old.by == ()
    assert old.as_text().splitlines()[1:] == measured.as_text().splitlines()[1:]


def test_stats_of_integers_leave_out_nothing(stored):
    for dtype in ("uint8", "int32"):
        assert stats(stored("parquet", images(dtype), stem=dtype)).table["left_out"].to_pylist() == [0, 0, 0]


@pytest.mark.parametrize("normalize", [True, False, "stats", {"low": "p1", "high": "p99"}], ids=str)
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.share(2, "normalize", "preload")
def test_samples_and_pictures_of_pixels_that_are_not_finite_cause_no_warning(stored, tmp_path, normalize, preload):
    """NumPy's warnings are errors in this suite."""
    pixels = images("float32", shape=(1, 3, 1, 5, 6))
    pixels[0][0, 0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    pixels[1][:], pixels[2][:] = np.nan, np.inf
    path = stored("parquet", pixels)
    stats(path).write(tmp_path / "stats.parquet")
    if normalize == "stats":
        normalize = str(tmp_path / "stats.parquet")
    is_clipped = isinstance(normalize, dict)
    if is_clipped:
        normalize = {"stats": str(tmp_path / "stats.parquet"), **normalize}
    dataset = OMEArrowDataset(path, normalize=normalize, preload=preload)
    assert np.isnan(dataset[1].numpy()).all()
    assert (dataset[2].numpy() == (1 if is_clipped else np.inf)).all()
    show(dataset)


def test_names_of_channels_and_columns_to_join(stored):
    channels = [{"name": name} for name in ("DNA", "ER", "RNA")]
    metadata = [{"channels": channels}] * 4
    path = stored("parquet", images("uint8"), columns={"plate": PLATES, "n": [1, 2, 1, 2]}, metadata=metadata)
    measured = stats(path, by=["plate", "n"])
    assert measured.table["channel_name"].to_pylist() == ["DNA", "ER", "RNA"] * 2
    with open_images(path, columns=measured.columns, on=["plate", "n"]) as source:
        assert source.columns["Stats_p99.9_ER"].to_pylist()[0] == measured.table["p99.9"].to_pylist()[1]
        assert source.columns["Stats_mean_RNA"].to_pylist()[1] == measured.table["mean"].to_pylist()[5]
    assert "P2, 2  RNA" in measured.as_text()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json"])
def test_the_command_writes_what_is_read_again(stored, tmp_path, suffix):
    path = stored("parquet", images("uint16"), columns={"plate": PLATES})
    out = tmp_path / f"stats{suffix}"
    words = ["stats", str(path), "--by", "plate", "--out", str(out)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    read, expected = read_stats(out), stats(path, by="plate")
    assert read.by == ("plate",)
    assert read.table.to_pylist() == expected.table.to_pylist()
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "exists" in done.stderr) == (1, True)
    done = CliRunner().invoke(main, [*words, "--overwrite", "--json"])
    assert json.loads(done.stdout) == expected.as_dict() | {"filter": None}
    done = CliRunner().invoke(main, [*words[:-1], str(tmp_path / "stats.txt")])
    assert done.stderr.startswith(f"error: --out '{tmp_path / 'stats.txt'}': expected a path that ends in .parquet")


def test_what_cannot_be_measured(stored, tmp_path):
    path = stored("parquet", images("uint16"), columns={"plate": PLATES})
    with raises(ColumnError, path=path, mentions=("'well'", "'plate'"), remedy=False):
        stats(path, by="well")
    mixed = stored("parquet", [*images("uint16", 1), *images("float32", 1)], stem="mixed")
    with raises(FormatError, option="by", path=mixed, mentions=("image 1", "float32")):
        stats(mixed)
    wide = stored("parquet", [*images("int32", 1), *images("float32", 1)], stem="wide")
    with raises(FormatError, option="by", path=wide, mentions=("image 1", "float32")):
        stats(wide)
    with raises(FormatError, path="none.parquet", remedy=False):
        stats(stored("parquet", [], stem="none"))
    named = stored("parquet", images("uint16"), columns={"mean": PLATES, "lists": [[1]] * len(PLATES)}, stem="named")
    with raises(ColumnError, path=named, mentions=("'lists'", "list<item: int64>"), remedy=False):
        stats(named, by="lists")
    for by in ("mean", ["lists", "lists"], 5, [None]):
        with raises(ArgumentError, option="by", remedy=False):
            stats(named, by=by)
    measured = stats(path)
    with raises(ArgumentError, path=tmp_path / "stats.xlsx", mentions=(".parquet", ".csv", ".json"), remedy=False):
        measured.write(tmp_path / "stats.xlsx")
    measured.write(tmp_path / "stats.csv")
    with pytest.raises(PathExistsError):
        measured.write(tmp_path / "stats.csv")
    with raises(FormatError, path=path, mentions="'channel'", remedy=False):
        read_stats(path)
    for bad in ("{}", '{"stats": "x"}', '{"stats": [1]}'):
        (tmp_path / "bad.json").write_text(bad)
        with raises(FormatError, path=tmp_path / "bad.json", remedy=False):
            read_stats(tmp_path / "bad.json")
    with pytest.raises(MissingPathError):
        read_stats(tmp_path / "none.json")


@pytest.mark.parametrize("preload", [True, False])
def test_a_view_is_measured_alone(stored, preload):
    all_images = images("uint16")
    path = stored("arrow", all_images, columns={"plate": PLATES})
    dataset = OMEArrowDataset(path, preload=preload, axes="TCYX")
    assert stats(dataset).table.equals(stats(path).table)
    with open_images(path) as source:
        assert stats(source).table.equals(stats(path).table)
    train, _ = dataset.split((0.5, 0.5), by="plate")
    picked = [all_images[list(dataset.image_ids).index(image_id)] for image_id in train.image_ids]
    for row in stats(train, by="plate").table.to_pylist():
        check(row, np.stack(picked)[:, :, row["channel"]])
    with raises(ArgumentError, mentions=5, remedy=False):
        stats(5)
    with raises(ArgumentError, option="pattern"):
        stats(train, pattern="{well}.tif")


def test_channels_in_another_order_are_not_measured_as_one(stored):
    named = [{"channels": [{"name": name} for name in names]} for names in ("ABC", "ABC", "CAB", "ABC")]
    path = stored("parquet", images("uint8"), metadata=named)
    with raises(FormatError, path=path, mentions=("image 2", "['C', 'A', 'B']", "['A', 'B', 'C']")):
        stats(path)
    other = stats(stored("parquet", images("uint8"), metadata=named[:1] * 4, stem="other"))
    with raises(FormatError, path=path, mentions="image 2"):
        OMEArrowDataset(path, normalize=other, axes="TCYX")


def test_images_that_are_damaged_are_not_measured(stored):
    path = stored("arrow", images("uint16", shape=(1, 1, 1, 64, 64)))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 255
    path.write_bytes(raw)
    with pytest.raises((ChecksumError, FormatError)):
        stats(path)


def test_a_table_of_statistics_is_a_plain_table(stored, tmp_path):
    stats(stored("parquet", images("uint8"))).write(tmp_path / "stats.parquet")
    assert pq.read_table(tmp_path / "stats.parquet")["channel"].to_pylist() == [0, 1, 2]


def test_floating_pixels_far_from_zero(stored):
    pixels = np.full((1, 1, 1, 8, 8), 1e6, np.float32)
    pixels[..., ::2] += np.float32(0.0625)  # Their mean is between two float32 numbers.
    (row,) = stats(stored("arrow", [pixels])).table.to_pylist()
    assert row["std"] == np.std(pixels, dtype=np.float64) == 0.03125


def test_images_without_a_measured_pixel_are_told(stored):
    path = stored("arrow", [np.full((1, 1, 1, 4, 4), np.nan, np.float32)])
    measured = stats(path)
    assert (measured.table["mean"].to_pylist(), measured.table["pixels"].to_pylist()) == ([None], [0])
    assert "channel 0" in measured.as_text()


def test_statistics_that_are_not_finite_are_null_in_json(stored, tmp_path):
    """Squares of float64 pixels may overflow."""
    path = stored("arrow", [np.array([[[[[1e200, 1, np.inf]]]]], np.float64)])
    done = CliRunner().invoke(main, ["stats", str(path), "--json"])
    stats(path).write(tmp_path / "stats.json")
    assert done.exit_code == 0, done.output
    for written in (done.stdout, (tmp_path / "stats.json").read_text()):
        (row,) = json.loads(written, parse_constant=pytest.fail)["stats"]
        assert (row["min"], row["max"], row["std"], row["left_out"]) == (1, 1e200, None, 1)


def test_what_is_shown_is_the_table_as_people_read_it(tmp_path):
    write_images([np.full((4, 4), 7, np.uint8)], tmp_path / "a.parquet")
    measured = stats(tmp_path / "a.parquet")
    assert repr(measured) == measured.as_text()
    assert "pyarrow" not in repr(measured)
