"""Metrics, rankings, files and the terminal report, on constructed benchmarks."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from benchmarks import tracks
from benchmarks.report import plots, tables
from benchmarks.report.headlines import headlines, terminal_report
from benchmarks.report.inputs import read_inputs
from benchmarks.report.results import SCHEMA_VERSION, summarise, write_results
from benchmarks.report.tables import formats_of
from benchmarks.tracks import TRACKS
from benchmarks.tracks.stages import STAGES, stage_column
from benchmarks.tracks.track import TEXT, Metric, Track
from omearrow_ds import FORMATS
from tests.support.errors import raises

LABELS = {fmt.name: fmt.label for fmt in FORMATS}
RANDOM = {"order": "random", "transform": "normalize", "access": "on_demand"}
CONTEXT = {"workload": "3 images of 4 x 4 uint16", "configuration": {"seed": 42}, "machine": {"cores": np.int64(2)}}
seconds = st.lists(st.floats(1e-6, 10), min_size=1, max_size=40)


def tidy(benchmarks, absent, formats=LABELS):
    return tables.tidy(benchmarks, absent, formats)


def bench(track, operation, data, name="arrow", **extra):
    stats = {"rounds": len(data), "data": data}
    stats |= {"min": min(data), "max": max(data), "mean": float(np.mean(data)), "median": float(np.median(data))}
    label = "in memory" if name == "memory" else LABELS.get(name, name.title())
    info = {"track": track, "operation": operation, "format": name, "label": label}
    return {
        "name": f"{operation}[{name}]",
        "extra_info": info | extra,
        "stats": stats | {"stddev": float(np.std(data))},
    }


def gone(track, operation, name="lance", status="missing", reason="pylance is not installed", **params):
    row = {"track": track, "operation": operation, "format": name, "label": LABELS[name], "name": "n"}
    return row | {"params": params, "status": status, "reason": reason, "fullname": "f::n"}


def written_fast(*results):
    """Write results with figures that are drawn fast; other tests check their content."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda _, table, path, context: Figure((1, 1)).savefig(path, format="png"))
        return write_results(*results)


def row_of(benchmark):
    (row,) = tidy([benchmark], [])[benchmark["extra_info"]["track"]].to_pylist()
    return row


def getitems(times, **changes):
    """Return one getitem benchmark per format, one sample each."""
    return [bench(1, "getitem", [time], name, **{**RANDOM, **changes}) for name, time in times.items()]


def test_tracks_are_numbered_and_have_their_key_metric():
    assert [track.number for track in TRACKS] == [0, 1, 2, 3, 4, 5, 6]
    for track in TRACKS:
        assert {track.key, *track.compared_within} <= set(track.schema.names)
        assert len(set(track.schema.names)) == len(track.schema.names)


def test_empty_input_gives_empty_tables_and_no_track_in_the_summary():
    tables = tidy([], [])
    assert {number: table.num_rows for number, table in tables.items()} == dict.fromkeys(range(len(TRACKS)), 0)
    assert all(tables[track.number].schema == track.schema for track in TRACKS)
    assert summarise(tables, {})["tracks"] == {}
    assert terminal_report(tables) == "No benchmarks ran."


def test_storage_metrics():
    row = row_of(
        bench(
            0,
            "write",
            [0.5, 0.25, 1.0],
            encoding="list",
            size_bytes=8_000_000,
            allocated_bytes=10_000_000,
            raw_bytes=20_000_000,
            images=1000,
        )
    )
    assert (row["allocated_bytes"], row["raw_bytes"], row["images"], row["encoding"]) == (
        10_000_000,
        20_000_000,
        1000,
        "list",
    )
    assert (row["compression_ratio"], row["raw_mb_per_s"]) == (2.0, 40.0)
    assert (row["min_ms"], row["median_ms"], row["rounds"], row["status"]) == (250.0, 500.0, 3, "ok")


def test_getitem_percentiles_are_of_the_samples():
    row = row_of(bench(1, "getitem", [i / 5000 for i in range(500, -1, -1)], **RANDOM))
    assert [row[f"p{q}_ms"] for q in (50, 95, 99)] == pytest.approx([50, 95, 99], rel=1e-12)
    assert row["samples_per_s"] == pytest.approx(501 / 25.05)


def test_first_touch_is_told_of_a_sample():
    row = row_of(bench(1, "first_touch", [0.016, 0.032], samples=16, **RANDOM))
    assert (row["p50_ms"], row["samples_per_s"]) == (pytest.approx(1.5), pytest.approx(32 / 0.048))


def test_of_fewer_than_500_rounds_there_is_no_p99():
    (few, enough) = (row_of(bench(1, "getitem", [0.1] * rounds, **RANDOM)) for rounds in (499, 500))
    assert [(row["rounds"], row["p95_ms"], row["p99_ms"]) for row in (few, enough)] == [
        (499, 100, None),
        (500, 100, 100),
    ]
    assert "rounds" in TRACKS[1].views[0].lead


def test_the_spread_is_that_of_parts_of_the_rounds():
    steady, drifting = [0.1] * 9 + [0.5], [0.1] * 8 + [0.2] * 2
    spreads = [row_of(bench(1, "getitem", data, **RANDOM))["spread"] for data in (steady, drifting, [0.1, 0.3], [0.1])]
    assert spreads == [pytest.approx(3), pytest.approx(2), pytest.approx(3), None]


def test_cells_metrics_are_of_a_crop():
    properties = {"batch_size": 64, "crop_shape": "3 x 64 x 64", "objects": 132, "fields": 5, "of": "nf1"}
    row = row_of(bench(6, "cells", [0.0064, 0.0064, 0.0128], sample="mask", access="on_demand", **properties))
    assert row["crops_per_s"] == pytest.approx(3 * 64 / 0.0256)
    assert (row["p50_us"], row["min_ms"]) == (pytest.approx(100), pytest.approx(6.4))
    assert properties.items() <= row.items()


def test_dataloader_metrics():
    row = row_of(
        bench(2, "load", [0.1, 0.3, 0.1], batch_size=16, workers=2, access="preloaded", images=40, first_batch_ms=7.5)
    )
    assert row["samples_per_s"] == pytest.approx(80)  # The last batch is short: images, not rounds x batch size.
    assert (row["p50_batch_ms"], row["first_batch_ms"], row["workers"]) == (100.0, 7.5, 2)


@pytest.mark.parametrize(
    ("waited", "reading"),
    [(29, "compute-bound"), (30, "balanced"), (50, "balanced"), (51, "data-bound")],
)
def test_data_wait_fraction_and_its_reading(waited, reading):
    row = row_of(
        bench(3, "train", [60.0, 40.0], access="on_demand", device="cpu", wait_s=[waited - 1.0, 1.0], images=32)
    )
    assert row["data_wait_fraction"] == waited / 100
    assert row["reading"] == reading
    assert (row["images_per_s"], row["step_p50_ms"]) == (0.32, 50_000.0)
    assert row["step_p95_ms"] == pytest.approx(59_000)


@pytest.mark.parametrize(
    ("part", "reading"),
    [(9, "negligible"), (10, "moderate"), (30, "moderate"), (31, "high"), (0, "negligible"), (-1, "negligible")],
)
def test_overhead_is_a_share_of_the_tensors_time(part, reading):
    row = row_of(bench(4, "sample", [100.0, 100.0, 50.0], numpy_s=[100.0 - part, 100.0 - part, 30.0]))
    assert (row["overhead_pct"], row["overhead_us"], row["reading"]) == (part, part * 1e6, reading)
    assert (row["p50_us"], row["numpy_p50_us"]) == pytest.approx((100e6, (100 - part) * 1e6))
    assert (row["numpy_mean_us"], row["samples_per_s"]) == pytest.approx(((230 - 2 * part) * 1e6 / 3, 3 / 250))


def test_overhead_of_reads_that_take_one_time_or_another_is_that_of_pairs():
    row = row_of(bench(4, "sample", [1.5, 9.5, 1.5, 9.5, 9.5], numpy_s=[1.0, 9.0, 1.0, 9.0, 1.0]))
    assert (row["overhead_us"], row["p50_us"] - row["numpy_p50_us"]) == pytest.approx((0.5e6, 8.5e6))


def test_conversion_alone_is_of_one_sample_and_has_no_overhead():
    row = row_of(bench(4, "convert", [0.016, 0.048], "memory", dtype="uint8", how="batch", samples=16, bytes=10_000))
    assert (row["p50_us"], row["mean_us"], row["samples_per_s"]) == pytest.approx((2000, 2000, 500))
    assert (row["bytes"], row["dtype"], row["how"]) == (10_000, "uint8", "batch")
    assert row["overhead_pct"] is row["reading"] is row["numpy_p50_us"] is None


def test_conversions_beside_a_sample_are_in_its_row():
    row = row_of(bench(4, "sample", [1.0], numpy_s=[0.5], alone={"copy_p50_us": 7.0, "from_numpy_p99_us": 2.0}))
    assert (row["copy_p50_us"], row["from_numpy_p99_us"], row["batch_p50_us"]) == (7.0, 2.0, None)


def test_one_round_is_its_own_percentile():
    row = row_of(bench(1, "getitem", [0.25], **RANDOM))
    assert (row["p50_ms"], row["p95_ms"], row["samples_per_s"], row["stddev_ms"]) == (250.0, 250.0, 4.0, 0.0)


@pytest.mark.parametrize(
    ("track", "extra"),
    [
        (0, {}),
        (1, RANDOM),
        (2, {}),
        (3, {"wait_s": [1.0]}),
        (4, {"numpy_s": [1.0]}),
        (5, {"stage_s": {"read": [1.0]}}),
        (5, {}),
    ],
)
@pytest.mark.parametrize("stats", [{}, None, {"data": []}, {"median": math.nan, "rounds": 1}])
def test_without_data_metrics_are_null(track, extra, stats):
    row = row_of(bench(track, "preload", [1.0], **extra) | {"stats": stats})
    known = {"raw_bytes", "size_bytes", "allocated_bytes", "images", "bytes", "first_batch_ms"}
    assert all(row[name] is None for name in TRACKS[track].metric_names if name not in known)
    assert row["median_ms"] is None


@settings(max_examples=40, deadline=None)
@given(seconds)
def test_percentiles_agree_with_sorted_data(data):
    row = row_of(bench(1, "getitem", data, **RANDOM))
    ordered = sorted(data)
    for q in (50, 95):
        rank = (len(data) - 1) * q / 100
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        assert row[f"p{q}_ms"] == pytest.approx(1e3 * (low + (high - low) * (rank - math.floor(rank))), rel=1e-9)
    assert row["p50_ms"] <= row["p95_ms"]


def test_a_control_is_left_out():
    assert sum(table.num_rows for table in tidy([{"name": "control", "extra_info": {}}], []).values()) == 0


def test_stages_of_an_epoch_add_up_to_it_for_each_image():
    stage_s = {"read": [1.0, 3.0], "read+decode": [0.5, 0.5], "forward": [0.25, 0.75]}
    row = row_of(bench(5, "epoch", [2.0, 4.0], access="on_demand", images=10, stage_s=stage_s))
    assert (row["read_us"], row["read_decode_us"], row["decode_us"]) == (2e5, 5e4, 0.0)
    assert row["other_us"] == pytest.approx(5e4)  # Values without their own column.
    assert sum(row[stage_column(stage)] for stage in STAGES) * 10 == pytest.approx(1e6 * 3.0)
    assert row["break_even_epochs"] is row["reading"] is row["on_demand_ms"] is None


@pytest.mark.parametrize(
    ("epochs", "words"),
    [(None, "never pays"), (1, "pays in the first epoch"), (10, "pays within 10 epochs"), (11, "pays later")],
)
def test_when_preloading_pays_in_words(epochs, words):
    extra = {"on_demand_s": [0.1, 0.3], "preloaded_s": [0.05, 0.05], "images": 4, "break_even_epochs": epochs}
    row = row_of(bench(5, "preload", [1.0, 1.0], **extra))
    assert (row["reading"], row["break_even_epochs"]) == (words, epochs)
    assert (row["on_demand_ms"], row["preloaded_ms"], row["median_ms"]) == (200.0, 50.0, 1000.0)


def test_stages_of_a_warm_up_round_are_refused():
    with raises(ValueError, mentions=("epoch[arrow]", "read", 2, 1), remedy=False):
        tidy([bench(5, "epoch", [1.0], images=1, stage_s={"read": [1.0, 1.0]})], [])


def test_waits_of_a_warm_up_round_are_refused():
    with raises(ValueError, mentions=("train[arrow]", "wait_s", 3, 2), remedy=False):
        tidy([bench(3, "train", [1.0, 1.0], wait_s=[0.5, 0.1, 0.1], images=2)], [])


def ranking_of(tables, track=1, index=0):
    return summarise(tables, CONTEXT)["tracks"][str(track)]["rankings"][index]


def test_ranking_best_first_with_ratio_to_best():
    ranking = ranking_of(tidy(getitems({"duckdb": 0.5, "arrow": 0.125, "tiff": 0.25}), [gone(1, "getitem", **RANDOM)]))
    assert [(r["format"], r["value"], r["ratio_to_best"]) for r in ranking["best_first"]] == [
        ("arrow", 8.0, 1.0),
        ("tiff", 4.0, 2.0),
        ("duckdb", 2.0, 4.0),
    ]
    assert ranking["parameters"] == RANDOM
    assert [(r["format"], r["status"], r["reason"]) for r in ranking["absent"]] == [
        ("lance", "missing", "pylance is not installed")
    ]


def test_lower_is_better_for_times_and_encodings_compete():
    data = [("arrow", "list", 3.0), ("arrow", "bytes", 1.5), ("tiff", "native", 2.0)]
    tables = tidy([bench(0, "preload", [time], name, encoding=encoding) for name, encoding, time in data], [])
    best = ranking_of(tables, 0)["best_first"]
    assert [(r["encoding"], r["ratio_to_best"]) for r in best] == [
        ("bytes", 1.0),
        ("native", pytest.approx(4 / 3)),
        ("list", 2.0),
    ]


def test_an_absent_row_without_parameters_is_in_every_ranking_of_its_operation():
    data = [*getitems({"arrow": 1.0}), *getitems({"arrow": 1.0}, order="sequential")]
    rankings = summarise(tidy(data, [gone(1, "getitem")]), {})["tracks"]["1"]["rankings"]
    assert [r["parameters"]["order"] for r in rankings] == ["random", "sequential"]
    assert [r["absent"][0]["format"] for r in rankings] == ["lance", "lance"]


times = st.dictionaries(st.sampled_from(list(LABELS)), st.integers(1, 10**6), min_size=1)


@settings(max_examples=40)
@given(times, st.integers(-8, 8))
def test_ranking_does_not_depend_on_the_machines_speed(times, power):
    # Powers of two scale floats exactly, so ties stay ties.
    slow = {name: time * 2.0**power for name, time in times.items()}
    one, two = (ranking_of(tidy(getitems(data), []))["best_first"] for data in (times, slow))
    assert [(r["format"], r["ratio_to_best"]) for r in one] == [(r["format"], r["ratio_to_best"]) for r in two]
    assert one[0]["ratio_to_best"] == 1.0
    assert [r["ratio_to_best"] for r in one] == sorted(r["ratio_to_best"] for r in one)


def test_summary_is_strict_json_with_the_context_passed_through(tmp_path):
    tables = tidy(getitems({"arrow": 0.5}), [])
    text = json.dumps(
        summarise(tables, {**CONTEXT, "odd": [math.nan, math.inf, tmp_path, np.float32(1)]}), allow_nan=False
    )
    summary = json.loads(text)
    assert summary["odd"] == [None, None, str(tmp_path), 1.0]
    assert (summary["configuration"], summary["machine"], summary["versions"]) == ({"seed": 42}, {"cores": 2}, {})
    assert summary["schema_version"] == SCHEMA_VERSION
    assert summary["tracks"]["1"]["rows"][0]["samples_per_s"] == 2.0


def test_written_files(tmp_path):
    tables = tidy(getitems({"arrow": 0.5}), [gone(1, "getitem", **RANDOM)])
    out = tmp_path / "new" / "out"
    names = ["pytest_benchmark_track1.parquet", "pytest_benchmark_summary.json", "pytest_benchmark_track1.png"]
    assert [path.name for path in write_results(tables, CONTEXT, out)] == names
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    table = pq.read_table(out / names[0])
    assert table.equals(tables[1])
    assert table["status"].to_pylist() == ["ok", "missing"]
    assert json.loads((out / names[1]).read_text())["tracks"].keys() == {"1"}


@pytest.mark.parametrize("broken", ["parquet", "png"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, broken):
    written_fast(tidy(getitems({"arrow": 0.5}), []), CONTEXT, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(*args, **kwargs):
        next(arg for arg in args if hasattr(arg, "write_bytes")).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(*((pq, "write_table") if broken == "parquet" else (plots, "draw")), half)
    with pytest.raises(KeyboardInterrupt):
        write_results(tidy(getitems({"arrow": 0.25}), []), CONTEXT, tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert after[f"pytest_benchmark_track1.{broken}"] == before[f"pytest_benchmark_track1.{broken}"]


def test_files_of_a_track_that_was_not_run_stay(tmp_path):
    old = tmp_path / "pytest_benchmark_track2.parquet"
    old.write_text("earlier")
    written_fast(tidy(getitems({"arrow": 0.5}), []), CONTEXT, tmp_path)
    assert old.read_text() == "earlier"


def test_report_has_the_best_first_and_the_absent_last():
    data = getitems({"duckdb": 0.5, "arrow": 0.001, "tiff": 0.00105})
    data += getitems({"duckdb": 0.001, "tiff": 0.001, "arrow": 0.001}, access="preloaded")
    report = terminal_report(tidy(data, [gone(1, "getitem", **RANDOM)])).splitlines()
    assert report[0] == "Track 1: one sample, dataset[i], samples/s · getitem · order random · transform normalize"
    assert [line.split()[:2] for line in report[4:8]] == [
        ["1", "Arrow"],
        ["2", "OME-TIFF"],
        ["3", "DuckDB"],
        ["-", "Lance"],
    ]
    assert report[6].split()[2:4] == ["2.00", "500"]
    assert report[7].endswith("missing: pylance is not installed")
    assert report[8] == "Not run: Parquet, Parquet (DuckDB), Vortex, OME-Zarr, ome-arrow"
    assert report[9] == "Reading: not compared, the fastest ran for one round only."


def reading(**rounds):
    """Return the reading of formats with these round times in seconds, without prefix and period."""
    (headline,) = headlines(tidy([bench(1, "getitem", data, name, **RANDOM) for name, data in rounds.items()], []))
    return headline.reading.removeprefix("Reading: ").removesuffix(".")


def rounds(factor, noise=1.02):
    return [factor, factor * noise] * 5


class TestReading:
    def test_groups_are_divided_at_gaps_of_3(self):
        near = {"tiff": rounds(1.45), "arrow": rounds(1), "lance": rounds(2.9)}
        assert reading(**near) == "no gap of 3 x: OME-TIFF, Arrow IPC, Lance"
        text = "fastest: OME-TIFF, Arrow IPC, Lance; at least 3 x slower: DuckDB"
        assert reading(**near, duckdb=rounds(12)) == text
        assert reading(**near, duckdb=rounds(12), ome_zarr=rounds(15), vortex=rounds(60)) == (
            "fastest: OME-TIFF, Arrow IPC, Lance; at least 3 x slower: DuckDB, OME-Zarr; "
            "at least 3 x slower than these: Vortex"
        )

    def test_groups_are_not_divided_where_an_interval_is_within_the_gap(self):
        assert reading(arrow=rounds(1), tiff=rounds(4.2)) == "fastest: Arrow IPC; at least 3 x slower: OME-TIFF"
        noisy = [2.8] * 5 + [5.6] * 5  # The mean is 4.2 as above, and the spread is 2.
        assert reading(arrow=rounds(1), tiff=noisy) == "no gap of 3 x: Arrow IPC, OME-TIFF"
        hiccup = [*rounds(1)[:-1], 500.0]  # Its rate is that of a slow format, its median is not.
        assert reading(arrow=rounds(1), tiff=hiccup) == "no gap of 3 x: Arrow IPC, OME-TIFF"

    def test_a_single_round_is_not_compared(self):
        text = "no gap of 3 x: Arrow IPC; measured in one round only: OME-TIFF"
        assert reading(arrow=rounds(1), tiff=[30.0]) == text
        assert reading(arrow=[1.0], tiff=rounds(30)) == "not compared, the fastest ran for one round only"

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.floats(1.0, 60.0), min_size=2, max_size=len(LABELS)),
        st.lists(st.floats(1.0, 3.0), min_size=len(LABELS), max_size=len(LABELS)),
    )
    def test_groups_have_a_gap_between_all_intervals_and_no_gap_within(self, factors, noises):
        seconds_of = {name: [t, t * noise] for name, t, noise in zip(LABELS, factors, noises, strict=False)}
        half = {LABELS[name]: math.sqrt(max(data[1] / data[0], 1.1)) for name, data in seconds_of.items()}
        time = {LABELS[name]: sum(data) for name, data in seconds_of.items()}
        groups = [part.split(": ")[1].split(", ") for part in reading(**seconds_of).split("; ")]
        order = sorted(time, key=time.__getitem__)
        assert sorted(name for group in groups for name in group) == sorted(order)
        borders = set(np.cumsum([len(group) for group in groups]).tolist())
        assert all(
            set(order[end - len(group) : end]) == set(group) for end, group in zip(sorted(borders), groups, strict=True)
        )
        for index in range(1, len(order)):
            slowest = max(time[name] * half[name] for name in order[:index])
            gap = min(time[name] / half[name] for name in order[index:]) / slowest
            assert gap == pytest.approx(3, rel=1e-9) or (gap > 3) == (index in borders)

    @pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
    def test_five_of_five_runs_agree_in_at_least_90_percent_of_simulations(self, count):
        """Formats are slower by random factors, as in stored results; runs and rounds have a noise of 4 %."""
        random = np.random.default_rng(0)
        num_agreeing, num_divided, num_orders = 0, 0, 0
        for _ in range(count):
            times = dict(zip(LABELS, np.exp(np.abs(random.normal(0, 1.4, len(LABELS)))), strict=True))
            noise = 0.04 * random.normal(size=(5, len(LABELS), 1)) + 0.04 * random.normal(size=(5, len(LABELS), 10))
            runs = [
                {name: list(time * np.exp(logs)) for (name, time), logs in zip(times.items(), run, strict=True)}
                for run in noise
            ]
            readings = {reading(**run) for run in runs}
            num_agreeing += len(readings) == 1
            num_divided += any(text.startswith("fastest") for text in readings)
            num_orders += len({tuple(sorted(run, key=lambda name: sum(run[name]))) for run in runs}) > 1
        assert num_agreeing >= 0.9 * count
        assert min(num_divided, num_orders) >= 0.1 * count  # Otherwise agreement would be without meaning.


def test_report_falls_back_to_what_was_run():
    report = terminal_report(
        tidy(getitems({"arrow": 0.5}, order="sequential", transform="none", access="preloaded"), [])
    )
    assert "order sequential · transform none" in report
    assert "preloaded" in report
    assert "only Arrow IPC has results" in report


def test_report_shows_a_failure_where_its_figure_would_be():
    failed = gone(1, "getitem", "arrow", "failed", "boom", **RANDOM | {"access": "preloaded"})
    report = terminal_report(tidy(getitems({"arrow": 0.5, "tiff": 0.5}), [failed]))
    assert "1  Arrow IPC" in report
    tables = tidy([*getitems({"arrow": 0.5, "tiff": 0.5}), *getitems({"tiff": 1.0}, access="preloaded")], [failed])
    (line,) = (line for line in terminal_report(tables).splitlines() if line.startswith("1  Arrow"))
    assert line.split()[-1] == "failed"


def test_report_when_nothing_worked():
    report = terminal_report(tidy([], [gone(3, "train", access="on_demand", device="cpu"), gone(5, "preload")]))
    assert report.count("missing: pylance is not installed") == 2
    assert report.count("Reading: no results.") == 2


@pytest.mark.parametrize("width", [60, 100])
def test_report_keeps_to_its_width(width):
    data = [
        bench(2, "load", [0.001], name, batch_size=16, workers=workers, access=access, images=16, first_batch_ms=1.0)
        for name in LABELS
        for workers in (0, 2, 4)
        for access in ("on_demand", "preloaded")
    ]
    report = terminal_report(tidy(data, [gone(0, "write", reason="long " * 50)]), width)
    assert max(map(len, report.splitlines())) <= width
    assert "on demand, by workers" in report


def of_track_9():
    """Return benchmarks of a track without a description, one of them without a result."""
    finished = [
        bench(9, "resize", [1e-3 * speed, 2e-3 * speed, 6e-3 * speed], name, size=size, sharp=0.5)
        | {"params": {"format_name": name, "size": size, "filter": None}}
        for speed, name in enumerate((*LABELS, "papyrus"), 1)
        for size in (10, 20)
        if name != "lance"
    ]
    return finished, [gone(9, "resize", size=20, filter=("a", 1))]


def test_a_ninth_format_and_a_track_that_nobody_described_are_in_all_results(tmp_path):
    labels = {**LABELS, "papyrus": "Papyrus"}
    written = write_results(tidy(*of_track_9(), labels), CONTEXT, tmp_path)
    assert [path.name.removeprefix("pytest_benchmark_") for path in written] == [
        "track9.parquet",
        "summary.json",
        "track9.png",
    ]
    table = pq.read_table(written[0])
    assert formats_of(table) == labels
    row = table.to_pylist()[-2]
    assert {name: row[name] for name in ("format", "size", "filter", "sharp", "p50_ms", "rounds")} == {
        "format": "papyrus",
        "size": 20,
        "filter": None,
        "sharp": 0.5,
        "p50_ms": pytest.approx(20),
        "rounds": 3,
    }
    assert table.to_pylist()[-1]["filter"] == "('a', 1)"
    (track,) = json.loads(written[1].read_text())["tracks"].values()
    assert [ranking["best_first"][-1]["format"] for ranking in track["rankings"][:2]] == ["papyrus", "papyrus"]
    assert [len(ranking["absent"]) for ranking in track["rankings"]] == [0, 1]
    # Results that are read again have the same track and report.
    report = terminal_report(read_inputs(tmp_path).tables)
    assert "Track 9: not described yet, ms · resize · size 10" in report
    assert "9  Papyrus" in report
    assert report == terminal_report({9: table})


def test_a_track_that_is_described_needs_no_views_and_no_panels(tmp_path, monkeypatch):
    seventh = Track(
        number=7, title="crops", round="one crop", parameters={"dtype": TEXT},
        metrics=(Metric("crops_per_s", unit="crops/s"),), metrics_of=lambda extra, _: {"crops_per_s": extra["n"]},
        key="crops_per_s", higher_is_better=True, compared_within=("dtype",),
    )  # fmt: skip
    monkeypatch.setattr(tracks, "TRACKS", (*TRACKS, seventh))
    crop_tables = tidy(
        [bench(7, "cut", [1.0], n=3.0, dtype="uint8"), bench(7, "cut", [1.0], "tiff", n=5.0, dtype="int8")], []
    )
    (headline,) = headlines(crop_tables)
    assert (headline.title, headline.names) == ("Track 7: crops, crops/s · cut · dtype uint8", ("Arrow IPC",))
    assert {path.suffix for path in write_results(crop_tables, CONTEXT, tmp_path)} == {".parquet", ".json", ".png"}
    (axes,) = plots.figure(7, crop_tables[7], CONTEXT).axes
    assert axes.get_xlabel() == "crops per s (crops/s)"
