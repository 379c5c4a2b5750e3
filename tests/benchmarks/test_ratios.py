"""Ratios to references and to memory: verdicts, tables, report and the README's section."""

from __future__ import annotations

import json
import math
import tempfile
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate.text import number
from benchmarks.report import readme
from benchmarks.report.headlines import terminal_report
from benchmarks.report.ratios import SCHEMAS, held_against, judged, ratio_report, summarise_ratios, tidy_ratios
from benchmarks.report.results import summarise, write_results
from benchmarks.report.targets import FULL_BYTES, HELD, KINDS, LARGE, SMALL, TIMED
from benchmarks.support.memory import STATUS, Measured, few_of, held, shifted
from benchmarks.support.paired import batched, divisor_of, random_indices
from benchmarks.support.peers import PEERS
from benchmarks.support.workload import Workload
from omearrow_ds import write_images
from tests.benchmarks.test_results import CONTEXT, LABELS, bench, getitems, tidy
from tests.support.errors import raises

MACHINE = {"cpu": "A CPU", "python": "CPython 3"}
RUN = {"finished": "2026-01-02T03:04:05", "command": "pytest b", "machine": MACHINE}
RUN |= {"versions": {"torch": "2", "pyarrow": "26"}, "workload": "1,000 images of 100 x 100 uint16, synthetic, seed 42"}
seconds = st.lists(st.floats(1e-6, 10), min_size=1, max_size=20)


def timed(operation, ours_s, reference_s, name="arrow", shape=SMALL, case=None, **extra):
    """Return a record of one unit per call, as `benchmarks.support.paired` writes it."""
    case_name = case if case is not None else name if TIMED[operation].of_formats else ""
    judgement = judged(operation, ours_s, reference_s, shape, case_name)
    row = bench(0, operation, ours_s, name, table="reference", reference_s=reference_s, **judgement, **extra)
    del row["extra_info"]["track"]
    row["stats"]["iterations"] = 1
    return row


def grown(operation, growth_bytes, decoded_bytes, name="arrow"):
    """Return a record as a benchmark of memory writes it."""
    sizes = {"growth_bytes": growth_bytes, "decoded_bytes": decoded_bytes, "mapped_bytes": 0, "resident_bytes": 0}
    extra = sizes | held_against(operation, growth_bytes, decoded_bytes) | {"images": 200, "image_shape": LARGE}
    row = bench(0, operation, [0.5], name, table="memory", **extra)
    del row["extra_info"]["track"]
    return row


def gone(operation, reason="monai is not installed", **params):
    row = {"table": "reference", "operation": operation, "format": "memory", "label": "in memory", "name": "n"}
    return row | {"params": params, "status": "skipped", "reason": reason}


def epoch(reference, ours_s, batch_size=16, **extra):
    case = f"{reference}, B={batch_size}"
    return timed("epoch", [ours_s], [1.0], "memory", case=case, reference=reference, batch_size=batch_size, **extra)


def rows_of(benchmarks, absent=(), table="reference"):
    return tidy_ratios(benchmarks, list(absent))[table].to_pylist()


def test_every_target_is_of_something_that_is_measured():
    for compared in (*TIMED.values(), *HELD.values()):
        engines = {f"{engine} of {number}" for engine in ("pool", "dask") for number in (1, 2)}
        assert set(compared.targets) <= {*LABELS, "", *engines} or not compared.reference
        assert compared.unit
    named = {case.split(", B=")[0] for case in TIMED["epoch"].targets}
    assert named <= set(KINDS)
    assert {peer.name for peer in PEERS} <= set(KINDS)
    assert {peer.format for peer in PEERS} - {None} <= set(LABELS)


@pytest.mark.parametrize(
    ("operation", "case", "ours_s", "text", "is_met"),
    [
        ("sample_on_demand", "", 0.025, "40 x faster", True),
        ("sample_on_demand", "", 0.0251, "39.8 x faster", False),
        ("sample_preloaded", "", 0.8, "0.8 x the minimum", True),
        ("sample_preloaded", "", 0.81, "0.81 x the minimum", False),
        ("epoch", "MONAI DataLoader(CacheDataset), B=16", 0.25, "4 x faster", True),
        ("epoch", "MONAI DataLoader(CacheDataset), B=64", 0.4, "2.5 x faster", None),
        ("preload", "arrow", 4.0, "4 x memcpy", True),
        ("preload", "arrow", 4.5, "4.5 x memcpy", False),
        ("preload", "parquet_duck", 4.5, "4.5 x memcpy", False),
        ("random_batch", "arrow", 0.02, "0.02 x imread", True),
        ("random_image", "vortex", 0.16, "0.16 x imread", False),
    ],
)
def test_verdicts_in_the_words_of_the_target(operation, case, ours_s, text, is_met):
    judgement = judged(operation, [ours_s * 2, ours_s], [1.0, 4.0], SMALL, case)
    assert (judgement["ratio"], judgement["said"], judgement["met"]) == (ours_s, text, is_met)
    assert judgement["paired_ratio"] == pytest.approx((2 * ours_s + ours_s / 4) / 2)
    assert (judgement["target"] is None) == (is_met is None) == (judgement["limit"] == "-")


@pytest.mark.parametrize(
    ("shape", "is_met"), [(SMALL, None), (LARGE, True), ("3 x 512 x 512", None), ("differing", None)]
)
def test_a_target_is_for_its_image_sizes_alone(shape, is_met):
    judgement = judged("batch", [0.8], [1.0], shape)
    assert (judgement["said"], judgement["met"]) == ("1.25 x the speed", is_met)
    assert judged("random_image", [0.01], [1.0], shape, "tiff")["met"] is (True if shape == SMALL else None)


@given(seconds, seconds, st.integers(-8, 8))
def test_ratios_do_not_depend_on_the_machines_speed(ours, reference, power):
    rounds = min(len(ours), len(reference))
    one = judged("preload", ours[:rounds], reference[:rounds], SMALL, "tiff")
    scaled = [[value * 2.0**power for value in side[:rounds]] for side in (ours, reference)]
    assert judged("preload", *scaled, SMALL, "tiff") == one


@pytest.mark.parametrize(
    ("size_bytes", "growth", "is_met"), [(FULL_BYTES, 1.3, True), (FULL_BYTES, 1.31, False), (FULL_BYTES - 1, 9, None)]
)
def test_memory_has_a_target_for_large_collections_alone(size_bytes, growth, is_met):
    assert held_against("preload", int(size_bytes * growth), size_bytes)["met"] is is_met
    assert held_against("write", size_bytes, size_bytes)["met"] is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234.6, "1,235"), (43.21, "43.2"), (2.0, "2"), (0.5, "0.5"), (0.02124, "0.0212"), (1e-7, "0")]
)
def test_numbers_have_three_digits_at_most(value, text):
    assert number(value) == text


def test_rows_in_the_order_of_operations():
    absent = gone("epoch", reference="MONAI DataLoader(CacheDataset)", batch_size=16)
    benchmarks = [
        timed("random_image", [2e-6, 1e-6], [4e-6, 8e-6], "tiff", engine="pread", images=9),
        timed("sample_preloaded", [0.5e-6], [1e-6], "memory"),
        grown("preload", 120, 100),
        *getitems({"arrow": 1.0}),
    ]
    rows = rows_of(benchmarks, [absent, {"track": 1, "operation": "getitem"}])
    assert [row["operation"] for row in rows] == ["sample_preloaded", "epoch", "random_image"]
    floor, missing, image = rows
    assert (floor["reference"], floor["kind"], floor["met"]) == ("slice, divide, from_numpy", None, True)
    assert (missing["status"], missing["reason"], missing["kind"]) == ("skipped", absent["reason"], "holds float32")
    assert (missing["batch_size"], missing["figure"], missing["met"]) == (16, None, None)
    assert (image["ours_us"], image["reference_us"], image["ratio"]) == (1.0, 4.0, 0.25)
    assert (image["engine"], image["images"], image["image_shape"], image["rounds"]) == ("pread", 9, SMALL, 2)
    (memory,) = rows_of(benchmarks, table="memory")
    assert (memory["growth_bytes"], memory["ratio"], memory["seconds"], memory["met"]) == (120, 1.2, 0.5, None)
    assert tidy(benchmarks, [absent])[0].num_rows == 0


def test_an_unknown_table_or_operation_is_refused():
    for table, operation in (("reference", "dance"), ("speed", "preload")):
        benchmark = {"name": "b[x]", "extra_info": {"table": table, "operation": operation}}
        with raises(ValueError, mentions=("'b[x]'", f"'{operation}'", f"'{table}'", "sample_on_demand"), remedy=False):
            tidy_ratios([benchmark], [])


def test_a_figure_that_is_not_finite_is_null():
    benchmark = timed("preload", [1.0], [1.0])
    benchmark["extra_info"] |= {"ratio": math.inf, "figure": math.nan}
    (row,) = rows_of([benchmark])
    assert row["ratio"] is row["figure"] is None


def report_of(benchmarks, absent=(), width=80):
    return ratio_report(tidy_ratios(benchmarks, list(absent)), width)


def test_report_names_what_is_compared_and_each_verdict():
    reference = "MONAI DataLoader(CacheDataset)"
    report = report_of(
        [
            timed("preload", [0.0034], [0.001], "arrow"),
            timed("preload", [0.05], [0.001], "vortex"),
            timed("preload", [2.0], [0.001], "parquet_duck", case="", engine="duckdb"),
            epoch("TensorDataset of float32", 0.5),
        ],
        [gone("epoch", reference=reference, batch_size=16)],
    )
    words = [" ".join(line.split()) for line in report]
    assert words[2:] == [
        "omearrow-ds reference ratio target",
        "DataLoader, preloaded, batches of 16, the reference holds float32 · x faster",
        "TensorDataset of float32 500 ms 1 s 2 >= 1.5 met",
        f"{reference} skipped: monai is not installed",
        "preload, compared with memcpy of the pixels · x memcpy",
        "Arrow IPC 3.4 ms 1 ms 3.4 <= 4 met",
        "Vortex 50 ms 1 ms 50 <= 11 MISSED",
        "Parquet (DuckDB) (duckdb) 2 s 1 ms 2,000 -",
        "Reading: 2 of 3 targets are met.",
        "",
    ]


def test_a_figure_of_which_best_and_median_disagree_is_marked():
    steady, busy = timed("preload", [1, 1.2], [1, 1.1]), timed("preload", [0.61, 4.0, 4.5], [1, 1, 3], "tiff")
    assert busy["extra_info"]["paired_ratio"] > 2 * busy["extra_info"]["ratio"]
    words = [" ".join(line.split()) for line in report_of([steady, busy], [])]
    assert "Arrow IPC 1 s 1 s 1 <= 4 met" in words
    assert "OME-TIFF 610 ms 1 s ~0.61 <= 8 met" in words
    assert "~: the ratio of the best rounds and the median ratio of all rounds" in " ".join(words)
    assert "~" not in " ".join(report_of([steady], []))


def test_memory_is_of_the_whole_epoch_and_tells_what_comes_late():
    row = grown("epoch", 130_000_000, 524_000_000, "duckdb")
    row["extra_info"]["later_bytes"] = 2_000_000
    words = [" ".join(line.split()) for line in report_of([row, grown("preload", 10, 20)])]
    assert "DuckDB 130.0 MB (2.0) 524.0 MB 0.248 (0.00382) <= 0.1 MISSED" in words
    assert "Arrow IPC 0.0 MB 0.0 MB 0.5 -" in words


@pytest.mark.parametrize(
    ("operation", "untold"), [("preload", set()), ("random_batch", set()), ("random_image", {"ome_arrow"})]
)
def test_every_format_has_a_target_that_judges(operation, untold):
    assert set(LABELS) - set(TIMED[operation].targets) == untold
    # Ratios of docs/explanation/comparison.md on 2026-11-22, synthetic images: no target allows twice the time.
    was = {
        "preload": {"parquet": 2.18, "parquet_duck": 2.07, "lance": 2.73, "vortex": 5.82, "duckdb": 5.82},
        "random_batch": {"parquet": 0.0283, "parquet_duck": 0.0255, "lance": 0.0444, "vortex": 0.0984, "duckdb": 0.695},
        "random_image": {"parquet": 0.0269, "parquet_duck": 0.025, "lance": 0.0374, "vortex": 0.101, "duckdb": 6.2},
    }
    for name, figure in was[operation].items():
        assert 1 < TIMED[operation].targets[name] / figure <= 2


def test_report_keeps_to_its_width():
    benchmarks = [timed(operation, [1e-6], [1e-5], name) for operation in TIMED for name in ("arrow", "parquet_duck")]
    benchmarks += [epoch(name, 0.5) for name in KINDS] + [grown(operation, 10**9, 10**9) for operation in HELD]
    absent = [gone("epoch", "long " * 50, reference="zarr", batch_size=16)]
    assert max(map(len, report_of(benchmarks, absent))) <= 80
    assert report_of([]) == []
    assert report_of([grown("preload", 1, 100)])[-2] == "Reading: images of this size and number have no targets."


def test_summary_and_files_hold_the_limits(tmp_path):
    limits = tidy_ratios([timed("preload", [0.003], [0.001]), timed("preload", [1.0], [0.001], "tiff")], [])
    summary = summarise(tidy([], []), CONTEXT, limits)
    assert summary["limits"]["reference"]["targets"] == 2
    assert summary["limits"]["reference"]["met"] == 1
    assert summarise_ratios(tidy_ratios([], [])) == {}
    written = write_results(tidy([], []), CONTEXT, tmp_path, limits)
    assert [path.name for path in written] == ["pytest_benchmark_reference.parquet", "pytest_benchmark_summary.json"]
    assert json.loads(written[1].read_text())["limits"]["reference"]["rows"][1]["said"] == "1,000 x memcpy"
    report = terminal_report(tidy([], []), 80, limits).splitlines()
    assert report[-1] == "All 2 rows are in pytest_benchmark_{reference}.parquet"
    assert {table: list(schema.names) for table, schema in SCHEMAS.items()} == {
        table: limits[table].schema.names for table in SCHEMAS
    }


@pytest.fixture
def folders(tmp_path):
    """Return the results of two runs: one of 100 x 100 images, one of 512 x 512 with a value of memory."""
    small = [
        timed("preload", [0.005], [0.001], engine="mapped"),
        epoch("zarr", 0.01),
        timed("sample_preloaded", [0.5], [1.0], "memory"),
    ]
    large = [timed("preload", [0.003], [0.001], shape=LARGE), grown("preload", 6 * 10**8, 5 * 10**8)]
    large += [timed("preload", [0.1], [0.001], "parquet_duck", LARGE, case="", engine="duckdb")]
    large += [timed("batch", [2.0], [1.0], "memory", LARGE)]
    other = {**RUN, "workload": "9 images of 512 x 512 uint16, synthetic, seed 42", "command": "pytest c"}
    for name, benchmarks, context in (("small", small, RUN), ("large", large, other)):
        write_results(tidy([], []), context, tmp_path / name, tidy_ratios(benchmarks, [], LABELS))
    return [tmp_path / "small", tmp_path / "large"]


def test_readme_has_a_table_of_formats_a_run_with_a_line_each(folders):
    paths, *formats, note, captions = readme.limits_section(map(readme.Run.from_folder, folders)).split("\n\n")
    assert paths.splitlines() == [
        "| path | reference | target | 1,000 images of 100 x 100 uint16 | 9 images of 512 x 512 uint16 |",
        "|---|---|---|---|---|",
        "| one sample, preloaded | slice, divide, from_numpy | <= 0.8 x the minimum | 0.5 | - |",
        "| DataLoader, preloaded, batches of 16 | zarr (reads storage) | x faster | 100 | - |",
        f"| {TIMED['batch'].title} | memcpy of its float32 bytes | >= 1 x the speed | - | **0.5** |",
    ]
    assert [part.splitlines() for part in formats] == [
        ["1,000 images of 100 x 100 uint16:"],
        ["|  | preload, x memcpy |", "|---|---|", "| Arrow IPC | **5**, <= 4 |"],
        ["9 images of 512 x 512 uint16:"],
        [
            "|  | preload, x memcpy | preload: peak memory, x the pixels (200 images of 512 x 512) |",
            "|---|---|---|",
            "| Parquet (DuckDB), by duckdb | 100 | - |",
            "| Arrow IPC | 3, <= 4 | 1.2, <= 1.3 |",
        ],
    ]
    assert note.startswith("Bold values miss their target.")
    assert captions.splitlines()[1].endswith("2026-01-02, A CPU, CPython 3, torch 2, pyarrow 26; `pytest c`")


def marks(name, cpu):
    return [mark.format(name, cpu) for mark in (readme.BEGIN, readme.END)]


def test_readme_is_changed_between_the_marks_alone(folders, tmp_path):
    path = tmp_path / "README.md"
    begin, end = marks("limits", "A CPU")
    untouched = f"before {marks('measured', 'A CPU')[0]} old\n"
    path.write_text(f"{untouched}{begin} gone {end} after", encoding="utf-8")
    readme.main(*folders, readme=path)
    text = path.read_text(encoding="utf-8")
    section = readme.limits_section(map(readme.Run.from_folder, folders))
    assert text == f"{untouched}{begin}\n**On A CPU:**\n\n{section}\n{end} after"
    for plain in ("no marks", text):
        path.write_text(plain, encoding="utf-8")
        readme.main(*folders, readme=path)
        assert path.read_text(encoding="utf-8") == plain


def test_readme_keeps_the_tables_of_other_machines(folders, tmp_path):
    path = tmp_path / "README.md"
    other = " theirs ".join(marks("limits", "CPU (R) @ 2.80GHz"))
    path.write_text(f"before {other} after", encoding="utf-8")
    for _ in range(2):
        readme.main(*folders, readme=path)
        before, ours = path.read_text(encoding="utf-8").split(marks("limits", "A CPU")[0])
        assert before == f"before {other}\n\n"
        assert ours.endswith(f"{marks('limits', 'A CPU')[1]} after")


def test_without_ratios_there_is_no_section(tmp_path):
    write_results(tidy([], []), RUN, tmp_path)
    assert readme.limits_section([readme.Run.from_folder(tmp_path)]) == ""


def test_both_sides_go_through_the_same_indices():
    one, two = random_indices(10, seed=3)
    first, second = list(islice(one, 20)), list(islice(two, 20))
    assert sorted(first[:10]) == sorted(second[:10]) == list(range(10))
    assert first[:10] == first[10:] == second[5:15]
    assert [len(batch) for batch in islice(batched(one, 7), 3)] == [7, 7, 7]
    assert divisor_of(np.dtype("uint16")) == np.float32(65535)
    assert divisor_of(np.dtype("float32")) == 1


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_memory_of_a_preload_is_the_block():
    workload = Workload(16, (1, 1, 1, 512, 512))
    with tempfile.TemporaryDirectory() as folder:  # on disk: mapped files in memory count as memory
        path = Path(folder, "images.arrow")
        write_images(shifted(few_of(workload), 64), path)
        with Measured("preload", path, "arrow") as measured:
            measured.run()
    assert measured.figures["decoded_bytes"] == 64 * 512 * 512 * 2
    assert 1 <= measured.figures["growth_bytes"] / measured.figures["decoded_bytes"] < 1.3
    assert held().own_bytes > 0


@pytest.mark.parametrize("ended", [FileNotFoundError, ProcessLookupError], ids=["before", "while its file was read"])
def test_a_process_that_has_ended_holds_nothing(ended, monkeypatch):
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=ended))
    assert held(1) == (0, 0, 0, 0)


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_a_measured_process_that_fails_is_an_error(tmp_path):
    with raises(RuntimeError, mentions="code 1", remedy=False):
        Measured("preload", Path(tmp_path / "nothing.arrow"), "arrow")
