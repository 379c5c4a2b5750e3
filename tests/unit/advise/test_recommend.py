"""`recommend`: its arithmetic by hypothesis, its trials on small images with a simulated clock."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import stat
import time
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds import (
    FORMATS,
    ArgumentError,
    AxesError,
    FormatError,
    MissingPathError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.advise.recommend import recommend, tiles_of, trials
from omearrow_ds.advise.recommend.choices import (
    CLOSE,
    LoadingPlan,
    NetworkLink,
    PlanCost,
    ReadBudget,
    RemoteCost,
    RemoteEstimate,
    StorageLayout,
    choose,
    confidence,
    layouts,
    ranked,
)
from omearrow_ds.advise.recommend.sample import Limits, SampleCoverage, SampleFields, take_sample
from omearrow_ds.advise.recommend.trials import LoaderTiming, PlanTiming, Settings, plan_costs
from omearrow_ds.cli import main
from omearrow_ds.options import SampleSettings
from tests.support.errors import raises
from tests.support.strategies import RAGGED, TABLES

BY_NAME = {fmt.name: fmt for fmt in FORMATS}
TIFF, ARROW, PARQUET = (BY_NAME[name] for name in ("tiff", "arrow", "parquet"))
AS_IT_IS = StorageLayout(TIFF, as_it_is=True)
ROOMY = ReadBudget(epochs=10, decoded_bytes=1000, memory_bytes=10**6, disk_bytes=10**6)


def numbered(count, shape=(1, 1, 1, 16, 16), dtype="uint16"):
    """Return images whose pixels encode the image and the pixel position."""
    size = int(np.prod(shape))
    return [(np.arange(size, dtype=np.int64) + 1000 * index).astype(dtype).reshape(shape) for index in range(count)]


@pytest.fixture
def folder(tmp_path):
    write_images(numbered(40), tmp_path / "plate.tiffs", columns={"well": [f"A{i}" for i in range(40)]})
    return tmp_path / "plate.tiffs"


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture(autouse=True)
def one_core_and_few_rounds(monkeypatch):
    monkeypatch.setattr("omearrow_ds.advise.recommend.trials._MOST_ROUNDS", 2)
    monkeypatch.setattr("omearrow_ds.advise.recommend.trials._MOST_LOADER_ROUNDS", 2)
    monkeypatch.setattr("omearrow_ds.advise.recommend.trials.available_cores", lambda: 1)
    monkeypatch.setattr("omearrow_ds.advise.recommend.advice.available_cores", lambda: 1)


class Clock:
    """A clock that advances by 1 us per reading and by planted durations."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1e-6
        return self.now_s


@pytest.fixture
def planted(monkeypatch):
    """A clock with a planted batch duration per format; writing and preloading take 1 s each."""
    clock = Clock()
    batch_s = {}

    class Loader:
        def __init__(self, loader, dataset):
            self._loader, self._dataset = loader, dataset

        def __iter__(self):
            for batch in self._loader:
                format_name = self._dataset.source.format.name
                clock.now_s += 0.004 if self._dataset.preloaded else batch_s.get(format_name, 0.02)
                yield batch

    load, open_dataset, write_images = trials.Subject.loader, trials.LayoutTrial.dataset, trials.write_images

    def dataset(self, *, preload):
        clock.now_s += 1.0 if preload else 0.0
        return open_dataset(self, preload=preload)

    def write(*args, **kwargs):
        clock.now_s += 1.0
        write_images(*args, **kwargs)

    monkeypatch.setattr(trials.Subject, "loader", lambda self, data, *a, **k: Loader(load(self, data, *a, **k), data))
    monkeypatch.setattr(trials.LayoutTrial, "dataset", dataset)
    monkeypatch.setattr(trials, "write_images", write)
    return clock, batch_s


# Arithmetic.


def costs_of(layout, *rounds, size_bytes=10, images=8, task=ROOMY):
    """Return the costs on demand and preloaded, from keywords of both timings per round."""
    zeros = {"convert_s": 0.0, "open_s": 0.0, "preload_s": 0.0, "epoch_s": 1.0, "preloaded_s": 1.0}
    timings = {}
    for number, times_s in enumerate(rounds):
        convert_s, open_s, preload_s, epoch_s, preloaded_s = (zeros | times_s).values()
        timings[number] = (
            PlanTiming(convert_s, open_s, epoch_s, 0.0),
            PlanTiming(convert_s, preload_s, preloaded_s, 0.0),
        )
    return plan_costs(layout, timings, size_bytes, images, task)


def row(total_s, layout=AS_IT_IS, rounds=5, noise=0.0, size_bytes=10, preload=False, why_not=None, totals_s=None):
    totals = totals_s or dict.fromkeys(range(rounds), total_s)
    plan = LoadingPlan(layout, preload)
    return PlanCost(plan, size_bytes, total_s=total_s, rounds=rounds, noise=noise, totals_s=totals, why_not=why_not)


def test_total_is_conversion_and_opening_and_all_epochs():
    first = {"convert_s": 5, "open_s": 1, "preload_s": 3, "epoch_s": 2, "preloaded_s": 0.5}
    second = {"convert_s": 4, "open_s": 2, "preload_s": 4, "epoch_s": 3, "preloaded_s": 0.25}
    on_demand, preloaded = costs_of(StorageLayout(ARROW), first, second)
    assert on_demand.total_s == 4 + 1 + 10 * 2
    assert on_demand.totals_s == {0: 5 + 1 + 20, 1: 4 + 2 + 30}
    assert preloaded.total_s == 4 + 3 + 10 * 0.25
    assert preloaded.totals_s == {0: 5 + 3 + 5, 1: 4 + 4 + 2.5}
    assert (on_demand.rounds, on_demand.images) == (2, 8)
    assert on_demand.noise == pytest.approx((26 + 36) / 2 / 26 - 1)


def test_plan_beyond_a_budget_is_excluded_with_both_sizes():
    task = replace(ROOMY, memory_bytes=999)
    on_demand, preloaded = costs_of(StorageLayout(ARROW), {}, size_bytes=2_000_000, task=task)
    assert "2,000,000" in on_demand.why_not
    assert "1,000,000" in on_demand.why_not
    on_demand, preloaded = costs_of(AS_IT_IS, {}, size_bytes=2_000_000, task=task)
    assert on_demand.why_not is None  # The collection itself needs no more disk.
    assert "1,000" in preloaded.why_not
    assert "999" in preloaded.why_not


@given(epochs=st.integers(1, 1000), convert_s=st.floats(0, 100), slow_s=st.floats(0.01, 10), fast_s=st.floats(0.01, 10))
def test_conversion_is_chosen_only_if_epochs_pay_for_it(epochs, convert_s, slow_s, fast_s):
    task = replace(ROOMY, epochs=epochs, memory_bytes=0)
    stays = costs_of(AS_IT_IS, *[{"epoch_s": slow_s}] * 3, task=task)
    moves = costs_of(StorageLayout(ARROW), *[{"convert_s": convert_s, "epoch_s": fast_s}] * 3, task=task)
    chosen = choose([*stays, *moves])
    stay_s, move_s = epochs * slow_s, convert_s + epochs * fast_s
    assert (chosen.plan.layout.format is ARROW) == (stay_s > move_s * 1.03)


ROWS = st.lists(
    st.builds(
        row,
        st.floats(0.1, 10),
        st.sampled_from(
            [
                AS_IT_IS,
                StorageLayout(ARROW, compression="none"),
                StorageLayout(ARROW, "list", "none"),
                StorageLayout(PARQUET),
            ]
        ),
        noise=st.floats(0, 1),
        size_bytes=st.integers(1, 5),
        preload=st.booleans(),
        why_not=st.sampled_from([None, None, "over the budget"]),
    ),
    max_size=8,
)


@given(ROWS, st.randoms())
def test_a_choice_is_possible_near_the_best_and_the_simplest_of_those(rows, random):
    chosen = choose(rows)
    possible = [candidate for candidate in rows if candidate.why_not is None]
    assert (chosen is None) == (not possible)
    if chosen is None:
        return
    least_s = min(candidate.total_s for candidate in possible)
    assert chosen.why_not is None
    assert chosen.total_s <= least_s * 1.08 * (1 + 1e-9)
    tied = [candidate for candidate in possible if candidate.total_s <= least_s * 1.03]
    assert chosen.plan.layout.as_it_is or not any(candidate.plan.layout.as_it_is for candidate in tied)
    order = ranked(rows)
    assert [candidate.why_not is None for candidate in order] == sorted(
        (candidate.why_not is None for candidate in rows), reverse=True
    )
    shuffled = random.sample(rows, len(rows))
    again = choose(shuffled)
    assert (again.total_s, again.plan.layout.as_it_is) == (chosen.total_s, chosen.plan.layout.as_it_is) or (
        again.size_bytes,
        again.plan,
    ) == (chosen.size_bytes, chosen.plan)


def test_ties_go_to_what_is_there_then_to_the_default_then_to_the_smaller():
    default, other = StorageLayout(ARROW, compression="none"), StorageLayout(ARROW, compression="zstd")
    assert choose([row(1.0, default), row(1.02)]).plan.layout is AS_IT_IS
    assert choose([row(1.0, default), row(1.2)]).plan.layout is default
    assert choose([row(1.0, other, size_bytes=1), row(1.02, default)]).plan.layout is default
    assert choose([row(1.0, default, size_bytes=9), row(1.01, StorageLayout(PARQUET), size_bytes=5)]).size_bytes == 5
    noisy = row(1.0, default, noise=0.2)
    assert choose([noisy, row(1.07, noise=0.2)]).plan.layout is AS_IT_IS


@pytest.mark.parametrize(
    ("looked", "text"),
    [
        (SampleCoverage(1, 10, 1, 10, 1.0), "1 image (10 bytes decoded)"),
        (SampleCoverage(3, 30, 3, 30, 1.0), "all 3 images (30 bytes decoded)"),
        (
            SampleCoverage(3, 10, 3, 30, 1.0, cut=True),
            "3 images, large images cropped to their center, 10 bytes of 30 bytes decoded; ",
        ),
        (
            SampleCoverage(1, 10, 3, 30, 1.0),
            "1 of 3 images, 10 bytes of 30 bytes decoded; the values below are scaled to all images",
        ),
    ],
)
def test_it_says_how_much_was_looked_at(looked, text):
    assert looked.text.startswith(text)
    assert looked.whole == ("scaled" not in looked.text)


def test_it_says_how_sure_it_is():
    chosen, far = row(1.0), row(2.0, StorageLayout(ARROW))
    assert confidence(chosen, [chosen, far]).level == "sure"
    assert "100%" in confidence(chosen, [chosen, far]).why
    near = row(1.0 + CLOSE / 2, StorageLayout(ARROW))
    close = confidence(chosen, [chosen, near, far])
    assert (close.level, close.rivals) == ("close", (near.plan,))
    assert "5% more" in close.why
    few = row(1.0, rounds=2)
    assert confidence(few, [few, far]).level == "unsure"
    assert "--seconds" in confidence(few, [few, far]).why
    noisy = row(1.0, noise=0.9)
    assert "noisy" in confidence(noisy, [noisy, far]).why
    flips = row(1.5, StorageLayout(ARROW), totals_s={0: 0.5, 1: 0.5, 2: 2.0, 3: 2.0, 4: 2.0})
    assert confidence(chosen, [chosen, flips]).level == "unsure"
    assert "2 of 5 rounds" in confidence(chosen, [chosen, flips]).why
    assert confidence(chosen, [chosen, replace(far, why_not="over the budget")]).level == "sure"


def test_workers_are_taken_where_they_are_worth_it_and_then_as_few_as_do():
    def timed(workers, ratio, batch_size=16):
        return LoaderTiming(Settings(workers, batch_size, 2 if workers else None), ratio, 0.1, 3, ratio)

    assert trials.best([timed(0, 1.0), timed(0, 0.5, 64), timed(1, 0.95)]).settings.num_workers == 0
    assert trials.best([timed(0, 1.0), timed(1, 0.6), timed(2, 0.4), timed(4, 0.39)]).settings.num_workers == 2
    # They start in 0.1 s, and save a fifth of the work.
    assert trials.best([timed(0, 1.0), timed(2, 0.8)], work_s=0.4).settings.num_workers == 0
    assert trials.best([timed(0, 1.0), timed(2, 0.8)], work_s=0.6).settings.num_workers == 2
    assert {item.num_workers for item in trials.grid(16, 6)} == {0, 1, 2, 4, 6}
    assert {item.num_workers for item in trials.grid(16, 1)} == {0}
    settings = Settings(2, 16, 4, "spawn")
    assert settings.keywords == {"num_workers": 2, "prefetch_factor": 4, "multiprocessing_context": "spawn"}


# Trials.


def test_every_format_encoding_and_compression_is_tried_and_defaults_come_first():
    tried = layouts(None, TIFF)
    assert tried[0] == AS_IT_IS
    firsts = tried[1 : 1 + len(FORMATS)]
    assert [layout.format for layout in firsts] == list(FORMATS)
    assert all(layout.is_default for layout in firsts)
    for fmt in FORMATS:
        assert {layout.compression for layout in tried if layout.format is fmt and not layout.as_it_is} == {
            *fmt.writer.compressions,
            *(["chunk-zstd"] if fmt.kind == "table" else []),
        }
    assert [layout.format.name for layout in tried if layout.encoding == "list"] == TABLES
    with raises(FormatError, mentions="'no_such'", remedy=False):
        layouts(["no_such"], TIFF)


# Samples.


def test_sample_contains_unchanged_images_of_the_whole_collection(folder):
    with open_images(folder) as source:
        sample = take_sample(SampleFields(source.images), Limits(10, 10**9, 10.0), Clock())
    assert len(sample.images) == 10
    assert [index // 4 for index in sample.indices] == list(range(10))
    files = sorted(folder.glob("*.tif"))
    for index, image in zip(sample.indices, sample.images, strict=True):
        np.testing.assert_array_equal(image.squeeze(), tifffile.imread(files[index]))
    assert sample.columns["well"].to_pylist() == [f"A{index}" for index in sample.indices]
    assert not sample.complete
    assert sample.factor == 4.0


def test_sample_is_limited_in_bytes_and_in_time():
    clock = Clock()
    taken = []

    class Many:
        """A hundred thousand images with a read time of 1 s each."""

        header = SimpleNamespace(
            path="many",
            part_layout=None,
            columns=SimpleNamespace(table=pa.table({}), names=[]),
            shapes=np.tile([1, 1, 1, 100, 100], (100_000, 1)),
            dtypes=[np.dtype("uint16")] * 100_000,
        )

        def __len__(self):
            return 100_000

        def metadata(self, index):
            return {}

        def read(self, rows):
            taken.extend(rows)
            clock.now_s += len(rows)
            return [np.zeros((1, 1, 1, 100, 100), np.uint16) for _ in rows]

    sample = take_sample(SampleFields(Many()), Limits(2048, 32_000_000, 9.0), clock)
    assert len(sample.images) == len(taken) <= 1 + 64
    assert max(taken) - min(taken) > 50_000
    taken.clear()
    sample = take_sample(SampleFields(Many()), Limits(2048, 2_000_000, inf), clock)
    assert 1_900_000 <= sample.size_bytes <= 2_000_000 + 64 * 20_000
    assert sample.factor == pytest.approx(100_000 / len(sample.images))


def test_large_image_is_cut_to_its_middle_and_scaled_by_bytes(tmp_path):
    write_images(numbered(3, (2, 1, 3, 128, 128)), tmp_path / "large.arrow")
    with open_images(tmp_path / "large.arrow") as source:
        sample = take_sample(SampleFields(source.images), Limits(100, 200_000, 10.0), Clock(), crop_size=(100, 70))
        assert sample.cut
        assert sample.axes == "TCZYX"
        for index, image in zip(sample.indices, sample.images, strict=True):
            t, c, z, y, x = image.shape
            assert image.nbytes <= 200_000 // 8
            assert (t, c, z) == (1, 1, 1)
            assert y >= 100
            assert x >= 70
            top, left = (128 - y) // 2, (128 - x) // 2
            np.testing.assert_array_equal(image[0, 0, 0], source.read(index)[0, 0, 1, top : top + y, left : left + x])
        assert sample.factor == sample.whole_bytes / sample.size_bytes > 3
        with raises(AxesError, path=tmp_path / "large.arrow", mentions="(129, 1)"):
            take_sample(SampleFields(source.images), Limits(), Clock(), crop_size=(129, 1))


def test_tiles_of_a_sample_are_complete(tmp_path):
    write_images(numbered(2, (1, 2, 1, 20, 33)), tmp_path / "fields.arrow")
    with open_images(tmp_path / "fields.arrow") as source:
        sample = take_sample(SampleFields(source.images), Limits(), Clock(), tile=10)
        whole = [source.read(index) for index in range(2)]
        with raises(ArgumentError, option="tile", path=tmp_path / "fields.arrow", mentions="21 x 21", remedy=False):
            take_sample(SampleFields(source.images), Limits(), Clock(), tile=21)
    assert sample.whole_count == len(sample.images) == 2 * 2 * 2 * 3
    assert sample.complete
    np.testing.assert_array_equal(sample.images[5], whole[0][:, :1, :, 10:20, 20:30])
    assert len(list(tiles_of(whole, 10))) == 24


# Network links.

VORTEX, LANCE = BY_NAME["vortex"], BY_NAME["lance"]


def test_epoch_over_a_link_takes_the_longer_of_link_and_decoding():
    link = NetworkLink.parse("8Mb", "10ms")  # 1 MB/s.
    assert (link.bytes_s, link.latency_s) == (1e6, 0.01)
    task = replace(ROOMY, epochs=3, decoded_bytes=10 * 2**26)  # Ten parts, fetched four at a time.
    on_demand = PlanCost(LoadingPlan(StorageLayout(ARROW), preload=False), 2_000_000, epoch_s=0.5)
    actual = RemoteCost.over(link, on_demand, task)
    assert actual.link_s == pytest.approx(2.0 + 0.01 * (2 + 3))
    assert (actual.epoch_s, actual.later_epoch_s, actual.limit) == (actual.link_s, 0.5, "link")
    assert actual.total_s == pytest.approx(actual.link_s + 2 * 0.5)
    slow = RemoteCost.over(link, replace(on_demand, epoch_s=5.0), ROOMY)
    assert (slow.epoch_s, slow.limit) == (5.0, "decoding")
    preloaded = PlanCost(LoadingPlan(StorageLayout(ARROW), preload=True), 2_000_000, open_s=3.0, epoch_s=0.1)
    assert RemoteCost.over(link, preloaded, ROOMY).epoch_s == pytest.approx(3.0 + 0.1)


def over_link(bandwidth, rows, epochs=10, *, on_server=False):
    link, task = NetworkLink.parse(bandwidth, None), replace(ROOMY, epochs=epochs)
    return RemoteEstimate.choose(link, rows, task, on_server=on_server)


def test_thin_link_favors_small_parts_and_wide_link_fast_decoding():
    large = row(1.0, StorageLayout(ARROW, compression="none"), size_bytes=2_000_000)
    small = row(2.0, StorageLayout(VORTEX), size_bytes=1_000_000)
    rows = [replace(large, epoch_s=0.05), replace(small, epoch_s=0.1), row(9.0), row(0.1, StorageLayout(LANCE))]
    thin, wide = over_link("1MB", rows), over_link("1GB", rows)
    assert (thin.chosen.row.plan.layout.format, thin.chosen.limit) == (VORTEX, "link")
    assert thin.rows[1].epoch_s / thin.chosen.epoch_s == pytest.approx(2.0)
    assert (wide.chosen.row.plan.layout.format, wide.chosen.limit) == (ARROW, "decoding")
    assert [item.row.plan.layout.as_it_is for item in thin.rows] == [False, False]  # The existing file is not in parts.
    assert thin.absent == (TIFF.label, LANCE.label)
    text = "\n".join(thin.as_lines())
    assert "over 1 MB/s (8 Mbit/s)" in text
    assert "> Vortex, on demand" in text
    assert "On the server: Vortex, on demand, one epoch in 1 s. The link is the limit; decoding takes 100 ms" in text
    assert "For 10 epochs" not in text
    often = over_link("1MB", rows, epochs=1000)
    assert often.chosen.row == thin.chosen.row
    assert often.in_all.row.plan.layout.format == ARROW
    takes = "Arrow IPC, uncompressed, on demand takes 49% less"
    assert f"If the cache holds all parts for 1,000 epochs, {takes}." in "\n".join(often.as_lines())
    target = [*rows, row(9.0, StorageLayout(ARROW, as_it_is=True))]
    assert [len(over_link("1MB", target, on_server=on).rows) for on in (False, True)] == [2, 3]
    excluded = row(1.0, StorageLayout(ARROW), why_not="too large")
    assert over_link("1MB", [row(1.0), row(1.0, StorageLayout(LANCE)), excluded]) is None


@given(ROWS, st.floats(1e3, 1e9), st.integers(1, 100))
def test_choice_over_a_link_is_near_the_best(rows, bytes_s, epochs):
    estimate = over_link(bytes_s, rows, epochs)
    possible = [row for row in rows if row.why_not is None and not row.plan.layout.as_it_is]
    assert (estimate is None) == (not possible)
    if estimate is not None:
        assert len(estimate.rows) == len(possible)
        assert estimate.chosen.epoch_s <= min(cost.epoch_s for cost in estimate.rows) * 1.08 * (1 + 1e-9)
        assert estimate.in_all.total_s == min(cost.total_s for cost in estimate.rows)
        json.dumps(estimate.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [("1Gb", 125e6), ("1Gbit", 125e6), ("1 Gbit/s", 125e6), ("100MB", 1e8), ("2.5MB/s", 2.5e6), ("8kbps", 1e3), (5, 5)],
)
def test_bits_and_bytes_are_told_apart(text, bytes_s):
    assert NetworkLink.parse(text, "20ms") == NetworkLink(bytes_s, 0.02)


@pytest.mark.parametrize("wrong", ["1gb", "1GBIT", "1G", "100", "Gb", "-1Gb", "1KB", "1Gb/h", "0Gb", "nanGb", 0, inf])
def test_a_bandwidth_without_a_clear_unit_is_refused(wrong):
    with raises(ArgumentError, option="bandwidth", mentions=("1Gb", "1Gbit")):
        NetworkLink.parse(wrong, None)


def test_a_latency_is_a_time_beside_a_bandwidth():
    assert [NetworkLink.parse("1Gb", text).latency_s for text in ("0.5s", "0ms", 0.25, None)] == [0.5, 0.0, 0.25, 0.0]
    for wrong in ("20", "20 m", "-1ms", -1.0, inf):
        with raises(ArgumentError, option="latency", mentions="20ms"):
            NetworkLink.parse("1Gb", wrong)
    with raises(ArgumentError, option="latency", mentions="bandwidth="):
        NetworkLink.parse(None, "20ms")
    assert NetworkLink.parse(None, None) is None


# Whole runs.


def test_what_is_fastest_over_all_epochs_is_recommended_and_its_lines_run(folder, work, planted):
    clock, batch_s = planted
    batch_s |= {"tiff": 0.05, "arrow": 0.001}
    options = {"work_dir": work, "clock": clock, "seconds": 100, "batch_size": 4}
    few = recommend(folder, epochs=1, formats=("arrow",), **options)
    assert few.chosen.plan == LoadingPlan(AS_IT_IS, preload=False)
    assert few.command == ""
    assert "nothing to convert" in few.as_text()
    assert f"OMEArrowDataset({str(folder)!r}, preload=False)" in few.python

    many = recommend(folder, epochs=100_000, formats=("parquet", "arrow"), **options)
    assert (many.chosen.plan.layout.format, many.chosen.plan.preload) == (ARROW, False)
    assert many.chosen.plan.layout.is_default
    epochs = {item.plan.label: item.epoch_s for item in many.rows if item.rounds > 1}
    assert epochs["OME-TIFF, as it is, on demand"] == pytest.approx(10 * 0.05, rel=0.01)
    assert list(work.iterdir()) == []

    words = shlex.split(many.command)
    assert words[:3] == ["omearrow-ds", "convert", str(folder)]
    assert len(words) == 4
    convert(words[2], words[3])
    names = {}
    exec(many.python, names)
    assert [tuple(batch.shape) for batch in names["loader"]] == [(4, 1, 16, 16)] * 10
    again = recommend(words[3], epochs=100_000, formats=("arrow",), **options)
    assert again.chosen.plan.layout.as_it_is
    assert again.command == ""


def test_memory_is_chosen_where_there_is_enough_of_it(folder, work, planted):
    clock, _ = planted
    options = {"formats": ("arrow",), "work_dir": work, "clock": clock, "seconds": 100, "epochs": 10_000}
    assert recommend(folder, **options).chosen.plan.preload
    without = recommend(folder, memory_bytes=40 * 512 - 1, **options)
    assert not without.chosen.plan.preload
    assert {"20,480" in row.why_not for row in without.rows if row.plan.preload} == {True}
    assert "ruled out: needs 20,480 bytes of memory" in without.as_text()


def test_disk_beyond_the_budget_is_not_recommended(folder, work, planted):
    clock, batch_s = planted
    batch_s |= {"tiff": 5.0}
    options = {"formats": ("arrow",), "work_dir": work, "clock": clock, "seconds": 100, "memory_bytes": 0}
    assert recommend(folder, epochs=1000, **options).chosen.plan.layout.format is ARROW
    cheap = recommend(folder, epochs=1000, budget_bytes=5000, **options)
    assert cheap.chosen.plan.layout.as_it_is
    assert {candidate.why_not is None for candidate in cheap.rows if not candidate.plan.layout.as_it_is} == {False}
    with raises(ArgumentError, mentions="5,000", remedy=False):
        recommend(folder, tile=8, budget_bytes=5000, **options)


@pytest.mark.parametrize("formats", [("arrow", "tiff"), pytest.param(None, marks=pytest.mark.slow)])
def test_all_formats_are_measured_and_what_cannot_be_says_why(tmp_path, work, formats):
    write_images(numbered(6, dtype="float32"), tmp_path / "floats.arrow")
    clock = Clock()  # It never reaches the time limit.
    advice = recommend(tmp_path / "floats.arrow", formats=formats, work_dir=work, clock=clock)
    rows = {measured.plan.layout: measured for measured in advice.rows}
    assert set(rows) == set(layouts(formats, ARROW))
    for layout, measured in rows.items():
        assert (measured.rounds == 0) == (layout.encoding == "list"), layout.label
        assert measured.rounds or "float32" in measured.why_not
    assert list(work.iterdir()) == []


def test_images_of_differing_shape_dtype_and_axes_are_measured(tmp_path, work):
    images = [numbered(1, shape, dtype)[0] for shape, dtype in RAGGED] * 3
    write_images(images, tmp_path / "ragged.parquet")
    options = {"work_dir": work, "seconds": 3, "epochs": 3, "access": "sequential"}
    advice = recommend(tmp_path / "ragged.parquet", formats=("arrow",), **options)
    assert advice.looked.images == 15
    if advice.command:
        convert(*shlex.split(advice.command)[2:4])
    names = {}
    exec(advice.python, names)
    shapes = [tuple(image.shape) for batch in names["loader"] for image in batch]
    assert shapes == [image.shape for image in images]


def test_a_missing_backend_is_a_row_that_says_what_to_install(folder, work, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lance" else find(name, *rest))
    advice = recommend(folder, formats=("lance", "arrow"), work_dir=work, seconds=2)
    (lance,) = (candidate for candidate in advice.rows if candidate.plan.layout.format.name == "lance")
    assert "pip install 'omearrow-ds[lance]'" in lance.why_not
    assert lance.why_not in advice.as_text()


def test_recommend_refuses_tiles_when_no_format_can_be_measured(folder, work, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lance" else find(name, *rest))
    with raises(ArgumentError, mentions="pip", remedy=False):
        recommend(folder, tile=8, formats=("lance",), work_dir=work)


def test_a_part_of_many_images_is_screened_first_and_time_ends_it(tmp_path, work, planted, monkeypatch):
    clock, _ = planted
    monkeypatch.setattr("omearrow_ds.advise.recommend.trials._FEWEST_SCREENED", 4)
    write_images(numbered(32, (1, 1, 1, 8, 8)), tmp_path / "many.arrow")
    advice = recommend(tmp_path / "many.arrow", formats=("tiff",), work_dir=work, clock=clock, seconds=100)
    assert {row.images for row in advice.rows} == {4, 32}
    short = recommend(tmp_path / "many.arrow", formats=("tiff", "arrow"), work_dir=work, clock=clock, seconds=4)
    assert short.confidence.level == "unsure"
    assert [row for row in short.rows if row.why_not and "--seconds" in row.why_not]


def test_tiles_are_stored_in_place_of_images_and_the_lines_do_so(tmp_path, work):
    write_images(numbered(2, (1, 2, 1, 20, 33)), tmp_path / "fields.tiffs")
    options = {"tile": 10, "formats": ("arrow",), "work_dir": work, "seconds": 2, "batch_size": 8}
    advice = recommend(tmp_path / "fields.tiffs", **options)
    assert not any(row.plan.layout.as_it_is for row in advice.rows)
    exec(advice.command)
    names = {}
    exec(advice.python, names)
    assert [tuple(batch.shape) for batch in names["loader"]] == [(8, 1, 10, 10)] * 3


def subject_of(sample, clock):
    return trials.Subject(sample, {}, "random", 4, SampleSettings(), 1.0, clock)


def test_times_are_scaled_up_when_readers_decode_several_rows(folder, work):
    with open_images(folder) as source:
        sample = take_sample(SampleFields(source.images), Limits(10, 10**9, 10.0), Clock())._replace(whole_count=5000)
        for compression, growth in (("zstd", 2048 / 10), ("none", 1)):
            layout = StorageLayout(BY_NAME["duckdb"], "bytes", compression)
            assert trials.LayoutTrial(subject_of(sample, Clock()), layout, work).growth == growth


def test_trial_writes_the_sample(folder, work):
    with open_images(folder) as source:
        sample = take_sample(SampleFields(source.images), Limits(10, 10**9, 10.0), Clock())
        subject = subject_of(sample, time.perf_counter)
        trial = trials.LayoutTrial(subject, StorageLayout(TIFF, compression="none"), work / "trial")
        on_demand, preloaded = trial.measure(0, read_s=7.0)
    files = sorted(trial.path.glob("*.tif"))
    for image, file in zip(sample.images, files, strict=True):
        np.testing.assert_array_equal(image.squeeze(), tifffile.imread(file))
    assert on_demand.convert_s == preloaded.convert_s > 7.0
    assert trial.size_bytes == 4 * 512 * sum(item.stat().st_blocks for item in (trial.path, *trial.path.iterdir()))


@pytest.mark.parametrize("opening_s", [0.1, 5.0])
def test_collection_is_opened_once_when_opening_is_slow(folder, work, monkeypatch, opening_s):
    clock, opened, closed = Clock(), [], []
    open_dataset = trials.LayoutTrial.dataset

    def dataset(trial, *, preload):
        created = open_dataset(trial, preload=preload)
        if not preload:
            clock.now_s += opening_s if trial.path == folder else 0.0
            opened.append(trial.path)
            monkeypatch.setattr(created.source.images, "close", lambda: closed.append(trial.path))
        return created

    monkeypatch.setattr(trials.LayoutTrial, "dataset", dataset)
    with open_images(folder) as source:
        subject = subject_of(take_sample(SampleFields(source.images), Limits(), Clock()), clock)
        stored = trials.LayoutTrial(subject, AS_IT_IS, work)
        written = trials.LayoutTrial(subject, StorageLayout(ARROW), work / "trial")
        for number in range(3):
            actual, _ = stored.measure(number, read_s=7.0)
            written.measure(number, read_s=7.0)
            assert actual.open_s >= opening_s
            assert actual.convert_s == 0.0
    assert opened.count(folder) == (1 if opening_s > 1 else 3)
    assert closed.count(folder) == (0 if opening_s > 1 else 3)
    assert closed.count(written.path) == opened.count(written.path) == 3


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"access": "shuffled"}, "access='shuffled'"),
        ({"seconds": 0}, "seconds=0"),
        ({"tile": -1}, "tile=-1"),
        ({"tile": 0}, "tile=0"),
        ({"budget_bytes": "20GB"}, "budget_bytes='20GB'"),
        ({"memory_bytes": -1}, "memory_bytes=-1"),
    ],
)
def test_what_is_no_option_is_refused(folder, options, setting):
    with raises(ArgumentError, option=next(iter(options)), mentions=setting, remedy=False):
        recommend(folder, **options)


def test_a_disk_without_room_is_refused_before_anything_is_written(folder, work, monkeypatch):
    usage = shutil.disk_usage(work)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=123_456))
    with raises(ArgumentError, option="work_dir", path=work, mentions="123,456"):
        recommend(folder, work_dir=work)
    assert list(work.iterdir()) == []
    with raises(MissingPathError, option="work_dir", path=work / "nowhere", remedy=False):
        recommend(folder, work_dir=work / "nowhere")


def test_an_error_leaves_nothing(folder, work, monkeypatch):
    monkeypatch.setattr(trials, "write_images", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recommend(folder, formats=("arrow",), work_dir=work)
    assert list(work.iterdir()) == []


def test_it_says_what_it_did_not_look_at(tmp_path, work):
    path = tmp_path / "images.arrow"
    write_images([np.full((8, 9), index, np.uint8) for index in range(200)], path)
    result = recommend(path, formats=("arrow",), work_dir=work, seconds=1, epochs=1)
    assert not result.looked.whole
    assert "Only the sample was read" in result.as_text()
    assert "verify=True also compares checksums on demand" in result.as_text()


def test_the_command_prints_text_or_json(folder, work):
    words = ["recommend", str(folder), "--formats", "arrow", "--work-dir", str(work)]
    done = CliRunner().invoke(main, [*words, "--seconds", "1"])
    assert (done.exit_code, done.stdout.count("Recommended:")) == (0, 1)
    done = CliRunner().invoke(main, [*words, "--seconds", "1", "--json", "--budget-bytes", "1.5kB", "--crop", "8x6"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["disk_budget_bytes"] == 1500
    assert result["recommended"]["as_it_is"]
    assert "crop_size=(8, 6)" in result["recommended"]["python"]
    assert result["looked_at"]["images"] == 40
    assert not result["scaled"]
    assert result["over_link"] is None
    done = CliRunner().invoke(main, [*words, "--seconds", "2", "--json", "--bandwidth", "1Mb", "--latency", "20ms"])
    result = json.loads(done.stdout)["over_link"]
    assert (result["bandwidth_bytes_s"], result["latency_s"]) == (125_000, 0.02)
    assert {row["format"] for row in result["rows"]} == {"arrow"}
    chosen = result["recommended"]
    assert chosen["link_s"] == pytest.approx(chosen["size_bytes"] / 125_000 + 3 * 0.02)
    parts = folder.with_suffix(".parts")
    typed = shlex.split(chosen["command"])
    assert typed[:6] == ["omearrow-ds", "convert", str(folder), str(parts), "--format", "arrow"]
    assert CliRunner().invoke(main, typed[1:]).exit_code == 0
    assert len(open_images(parts)) == 40
    for wrong, remedy in (
        (["--bandwidth", "1G"], "such as 1Gb"),
        (["--bandwidth", "1Gb", "--latency", "20"], "such as 20ms"),
    ):
        done = CliRunner().invoke(main, [*words, *wrong])
        assert (done.exit_code, remedy in done.stderr) == (2, True)
    done = CliRunner().invoke(main, [*words, "--latency", "20ms"])
    assert (done.exit_code, done.stderr) == (
        1,
        "error: --latency '20ms': needs --bandwidth; pass --bandwidth or leave it out\n",
    )
    for wrong in (["--formats", "png"], ["--budget-bytes", "much"], ["--crop", "0"], ["--epochs", "0"]):
        assert CliRunner().invoke(main, [*words, *wrong]).exit_code == 2


def test_ctrl_c_removes_the_private_folder(programs, folder, work):
    code = "from omearrow_ds.cli import main; main()"
    program = programs.start(code, "recommend", folder, "--work-dir", work, "--seconds", "60", has_workers=True)
    inside = []
    while not inside and psutil.pid_exists(program.pid):
        time.sleep(0.05)
        # `os.walk` ignores folders that vanish during the walk.
        inside = [
            folder_of_run
            for folder_of_run in work.iterdir()
            if any("images." in str(walked) for walked in os.walk(folder_of_run))
        ]
    if inside:
        assert stat.S_IMODE(inside[0].stat().st_mode) == 0o700
        os.kill(program.pid, signal.SIGINT)
    done = program.wait()
    assert inside, done
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert list(work.iterdir()) == []
    assert len(list(folder.glob("*.tif"))) == 40
