"""The report: it contains all measurements unchanged, and nothing from the network."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from benchmarks.gate import environment
from benchmarks.gate.report import Comparison, as_json
from benchmarks.report.__main__ import main
from benchmarks.report.charts import moment
from benchmarks.report.headlines import headlines
from benchmarks.report.history import MOST_RUNS
from benchmarks.report.ratios import tidy_ratios
from benchmarks.report.stored_runs import KEY, Setting
from benchmarks.tracks import TRACKS
from tests.benchmarks.test_gate import FASTER, SLOWER, row
from tests.benchmarks.test_ratios import epoch, grown, timed
from tests.benchmarks.test_ratios import gone as gone_ratio
from tests.benchmarks.test_results import LABELS, RANDOM, bench, gone, of_track_9, tidy, written_fast
from tests.support.html_page import lines_of, parse

ROOT = Path(__file__).parents[2]
NASTY = """<script>alert("1")</script> & 'it' </td>"""
SETTING = Setting({**environment.fingerprint(2), "CPU": "A CPU"}, "key", "3 images", "quick")
CONTEXT = {
    "workload": f"3 images of 4 x 4 uint16 {NASTY}",
    "command": f"pytest benchmarks -k {NASTY}",
    "finished": "2026-01-02T03:04:05+00:00",
    "configuration": {"seed": 42, "formats": None, "image_shape": [1, 1, 1, 4, 4]},
    "setting": SETTING.as_dict(),
    "versions": {"torch": "2.13", "numpy": None},
    "machine": {"cpu": "A CPU", "cores_usable": 2, "memory_bytes": 2**34},
    "git": {"commit": "c0ffee", "dirty": True},
}


def measured():
    """Return a few benchmarks of every track and table, with every kind of missing result."""
    step = {"wait_s": [0.001, 0.02], "images": 32, "device": "cpu"}
    finished = [
        bench(0, operation, [0.5 * slow, 0.7 * slow], name, encoding="bytes", size_bytes=10**7, raw_bytes=2 * 10**7)
        for operation in ("write", "preload")
        for slow, name in enumerate(LABELS, 1)
    ]
    finished += [bench(1, "getitem", [1e-5 * slow], name, **RANDOM) for slow, name in enumerate(LABELS, 1)]
    finished += [bench(2, "load", [0.01, 0.02], batch_size=16, workers=2, access="on_demand", images=32)]
    finished += [bench(3, "train", [0.1, 0.2], access="on_demand", **step)]
    finished += [bench(4, "sample", [1e-5, 2e-5], numpy_s=[5e-6, 1e-5], alone={"copy_mean_us": 7.5}, samples=1)]
    finished += [bench(4, "convert", [1e-6], "memory", dtype="int8", how="batch", samples=16, bytes=8)]
    finished += [bench(5, "epoch", [0.1], access="on_demand", images=10, stage_s={"read": [0.06], "normalize": [0.04]})]
    finished += [bench(5, "preload", [0.1], on_demand_s=[0.1], preloaded_s=[0.05], break_even_epochs=2, images=10)]
    finished += [bench(6, "cells", [0.001], sample="crop", access="on_demand", batch_size=64, of="synthetic")]
    finished += [timed("preload", [3e-6], [1e-6]), epoch("TensorDataset of float32", 0.5), grown("epoch", 7, 10**6)]
    absent = [
        gone(1, "getitem", "lance", "failed", f"ValueError: {NASTY}", **{**RANDOM, "order": "sequential"}),
        gone(2, "load", "duckdb", batch_size=16, workers=2, access="on_demand"),
        gone(4, "to_device", "tiff", "skipped", "measured with --device cuda"),
        gone_ratio("epoch", reference="MONAI DataLoader(CacheDataset)", batch_size=16),
    ]
    return finished, absent


def write(folder, context=CONTEXT):
    finished, absent = measured()
    written_fast(tidy(finished, absent), context, folder, tidy_ratios(finished, absent))
    rows = (row("preload[tiff]", SLOWER), row("getitem[arrow]", FASTER))
    comparison = Comparison("main", NASTY, 0.05, (row("control", [1.0] * 5),), rows, {NASTY: "new"}, {}, {}, 60.0)
    gate = json.loads(json.dumps(as_json(comparison)))
    (folder / "gate.json").write_text(json.dumps(gate))
    shutil.copy(folder / "pytest_benchmark_track4.png", folder / "gate.png")
    run = {"kind": "slowed", "finished": "2026-01-02T03:04:05", **gate}
    run["benchmarks"] = [{**benchmark, "level": 0.1} for benchmark in gate["benchmarks"]]
    origin = {"machine": {"cpu": NASTY, "cores_usable": 2, "python": "CPython 3"}, "versions": {"torch": "2"}}
    (folder / "selftest.json").write_text(json.dumps({**origin, "runs": [run]}))


def store(storage, number, least_s, setting=SETTING, *, folder=None, name="t::getitem[arrow-on_demand]"):
    """Store a run of one benchmark in the form of pytest-benchmark."""
    file = storage / (folder or setting.machine_id) / f"{number:04}_run.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    stats = dict.fromkeys(("min", "max", "mean", "stddev", "median", "iqr"), least_s) | {"median": 1.5 * least_s}
    extra = {"track": 1, "operation": "getitem", "format": "arrow", "label": "Arrow IPC", "access": "on_demand"}
    one = {"name": name.partition("::")[2], "fullname": name, "extra_info": extra}
    one["params"] = {"format_name": "arrow", "access": "on_demand", "order": NASTY}
    one["stats"] = stats | {"ops": 1, "rounds": 5, "iterations": 1, "outliers": "0;0"}
    commit = {"id": f"{number:04}beef", "dirty": False}
    content = {"benchmarks": [one], "commit_info": commit, "datetime": f"2026-01-{number:02}T10:20:30+00:00"}
    file.write_text(json.dumps(content | ({KEY: setting.as_dict()} if setting else {})))
    return file


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write(folder)
    return folder


@pytest.fixture
def results(written, tmp_path):
    return shutil.copytree(written, tmp_path / "results")


@pytest.fixture
def storage(tmp_path):
    return tmp_path / "stored"


def report(results, storage, *words):
    assert main([str(results), "--history", str(storage), *words]) == 0
    return parse((results / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(written, tmp_path_factory):
    storage = tmp_path_factory.mktemp("stored")
    for number in (2, 10, 1):
        store(storage, number, number * 1e-3)
    return report(written, storage)


def problems(page):
    item_lists = [section.all("li") for section in page.all("section") if section.attributes["id"] == "problems"]
    return [item.text for lines in item_lists for item in lines]


def test_every_row_of_every_track_is_there_with_the_figures_of_the_parquet(page, written):
    for track in TRACKS:
        rows = pq.read_table(written / f"pytest_benchmark_track{track.number}.parquet").to_pylist()
        table_rows = []
        for table in page.one("section", id=f"track{track.number}").one("details").all("table"):
            headings, lines = lines_of(table)
            names = [heading.replace(" ", "_") for heading in headings]
            operation = table.one("caption").text.partition(", ")[2].partition(":")[0]
            table_rows += [(operation, names, *line) for line in lines]
        assert len(table_rows) == len(rows) > 0
        order = list(dict.fromkeys(row["operation"] for row in rows))
        rows.sort(key=lambda row: order.index(row["operation"]))
        for one, (operation, names, label, cells) in zip(rows, table_rows, strict=True):
            assert (operation, label) == (one["operation"], one["label"])
            if one["status"] != "ok":
                assert cells[-1].text == f"{one['status']}: {one['reason']}"
                continue
            compare(one, dict(zip(names, cells, strict=True)), track)


def compare(measured, cells, track):
    for name in (*track.parameters, *track.metric_names, "rounds", "min_ms", "median_ms", "mean_ms", "stddev_ms"):
        value = measured[name]
        if isinstance(value, int | float) and name not in track.parameters:
            cell_value = float(cells[name].text.replace(",", ""))
            assert float(cells[name].one("data").attributes["value"]) == value
            assert cell_value == pytest.approx(value, rel=0.5 if 0 < abs(value) < 1e-3 else 6e-3)
        elif value is not None:
            assert cells[name].text == str(value).replace("_", " ")
        else:
            assert name not in cells or cells[name].text == "-"


def test_headlines_and_their_readings(page, written):
    tables = {n: pq.read_table(written / f"pytest_benchmark_track{n}.parquet") for n in range(len(TRACKS))}
    expected = headlines(tables)
    assert {headline.track for headline in expected} == set(TRACKS)
    words = page.one("section", id="readings")
    for headline in expected:
        section = page.one("section", id=f"track{headline.track.number}")
        (table,) = [
            table_element
            for table_element in section.all("table")
            if table_element.one("caption").text == headline.title
        ]
        _, lines = lines_of(table)
        for index, (_, cells) in enumerate(lines[: len(headline.names)]):
            assert [cell.text for cell in cells] == [column[index] for _, _, column in headline.columns]
        absent = [name for name, _ in headline.absent]
        assert [name.partition(" ")[2] for name, _ in lines] == [*headline.names, *absent, *headline.not_run]
        assert headline.reading in [paragraph.text for paragraph in section.all("p")]
        assert headline.reading.removeprefix("Reading: ") in [description.text for description in words.all("dd")]


def test_every_format_is_in_every_track(page):
    for track in TRACKS:
        section_text = page.one("section", id=f"track{track.number}").text
        assert all(label in section_text for label in LABELS.values()), track


def test_limits_and_memory(page):
    section = page.one("section", id="reference")
    _, lines = lines_of(section.one("table"))
    preload = next(cells for name, cells in lines if name.startswith("Arrow IPC"))
    assert [cell.text for cell in preload] == ["3 us", "1 us", "3", "<= 4", "met"]
    assert any("skipped: monai is not installed" in cell.text for _, cells in lines for cell in cells)
    assert "Reading: 2 of 2 targets are met." in section.text
    assert "7e-06" not in page.one("section", id="memory").text


def test_gate_and_selftest(page):
    section = page.one("section", id="gate")
    assert section.all("p")[0].text.startswith("Regression: preload[tiff]")
    _, lines = lines_of(section.one("table"))
    assert [(name, cells[-1].text) for name, cells in lines][:3] == [
        ("preload[tiff]", "regression"),
        ("getitem[arrow]", "improved"),
        ("control", "control"),
    ]
    assert section.one("img")
    assert re.match(r"Exit status 1 after 60 s, \d{4}-\d\d-\d\d \d\d:\d\d UTC\.", section.all("p")[1].text)
    assert "1 of 1" in page.one("section", id="selftest").text


def test_what_has_no_result_is_listed_with_its_reason(page):
    lines = lines_of(page.one("section", id="absent").one("table"))[1]
    assert [(name, [cell.text for cell in cells]) for name, cells in lines] == [
        ("Lance", ["getitem", "1", "failed", f"ValueError: {NASTY}"]),
        ("DuckDB", ["load", "1", "missing", "pylance is not installed"]),
        ("OME-TIFF", ["to_device", "1", "skipped", "measured with --device cuda"]),
        ("in memory", ["epoch", "1", "skipped", "monai is not installed"]),
    ]


def test_where_it_was_measured(page):
    lines = [row for table in page.one("section", id="where").all("table") for row in table.all("tr")]
    values = {line.one("th").text: line.one("td").text for line in lines}
    assert (values["cpu"], values["memory bytes"], values["torch"], values["numpy"]) == (
        "A CPU",
        "17,179,869,184",
        "2.13",
        "-",
    )
    assert (values["commit"], values["dirty"], values["seed"], values["image shape"]) == (
        "c0ffee",
        "yes",
        "42",
        "1, 1, 1, 4, 4",
    )
    assert values["command"] == f"pytest benchmarks -k {NASTY}"
    assert "finished 2026-01-02 03:04 UTC" in page.one("header").text


def test_text_of_others_is_never_markup(page):
    assert page.all("script") == []
    assert NASTY in page.one("head").one("title").text
    assert NASTY in page.one("section", id="history").text


def test_images_are_whole_and_inside_the_page(page, written):
    images = page.all("img")
    assert len(images) == len(TRACKS) + 1
    for image in images:
        kind, _, data = image.attributes["src"].partition(",")
        assert kind == "data:image/png;base64"
        height, width = imread(BytesIO(base64.b64decode(data, validate=True)), "png").shape[:2]
        assert (image.attributes["width"], image.attributes["height"]) == (str(width), str(height))
        assert image.attributes["alt"]
    assert (written / "report.html").stat().st_size < 5e6


def test_nothing_is_fetched(page, written):
    assert page.all("link", "script", "iframe", "object", "embed", "base", "video", "audio", "source") == []
    for element in every(page):
        for name in ("src", "href", "srcset", "xlink:href", "data", "action", "poster", "background"):
            assert element.attributes.get(name, "#").startswith(("#", "data:"))
        assert not re.search(r"url\(|@import", element.attributes.get("style", ""))
    assert not re.search(r"url\(|@import", page.one("style").text)
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert policy.startswith("default-src 'none'")


def every(element):
    for child in element.children:
        if not isinstance(child, str):
            yield child
            yield from every(child)


def test_it_can_be_read_without_seeing_it(page):
    assert page.one("html").attributes["lang"] == "en"
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("nav")) == len(page.all("header")) == 1
    assert "width=device-width" in page.one("meta", name="viewport").attributes["content"]
    assert all(cell.attributes["scope"] for cell in page.all("th"))
    assert all(table.one("caption").text for table in page.all("table"))
    ids = [element.attributes["id"] for element in every(page) if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert {link.attributes["href"][1:] for link in page.all("a")} <= set(ids)
    labelled = {section.attributes["aria-labelledby"] for section in page.all("section")}
    assert labelled <= set(ids)
    for chart in page.all("svg"):
        assert "aria-hidden" in chart.attributes or chart.attributes["aria-label"]


def colours(style):
    return dict(re.findall(r"--(\w+): (#\w{6})", style))


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_is_that_of_wcag_in_light_and_dark(page):
    light, _, dark = page.one("style").text.partition("@media (prefers-color-scheme: dark)")
    for scheme in (colours(light), colours(dark)):
        for text in ("ink", "soft", "accent", "bad", "odd", "good"):
            for ground in ("paper", "raised"):
                low, high = sorted(luminance(scheme[name]) + 0.05 for name in (text, ground))
                assert high / low >= 4.5, (text, ground)


def said_of_runs(page):
    return [group.one("title").text for group in page.one("section", id="history").all("g")]


def test_history_is_in_the_order_of_the_runs(page):
    assert said_of_runs(page) == [
        "0001 · 0001bee · 2026-01-01 10:20 · min 1 ms · median 1.5 ms",
        "0002 · 0002bee · 2026-01-02 10:20 · min 2 ms · median 3 ms",
        "0010 · 0010bee · 2026-01-10 10:20 · min 10 ms · median 15 ms",
    ]
    chart = page.one("section", id="history").one("ul").one("svg")
    least = [tuple(map(float, point.split(","))) for point in chart.all("polyline")[-1].attributes["points"].split()]
    assert [x for x, _ in least] == sorted({x for x, _ in least})
    assert [y for _, y in least] == sorted((y for _, y in least), reverse=True)
    assert chart.attributes["aria-label"].endswith("minimum 1 ms to 10 ms over 3 runs, last 10 ms")
    assert "Track 1: one sample, dataset[i] · getitem" in page.one("section", id="history").text


def test_other_machines_workloads_and_profiles_are_not_mixed_in(results, storage):
    store(storage, 1, 1.0)
    other = {**SETTING.as_dict(), "machine": {**SETTING.machine, "CPU flags": ["avx9"]}}
    store(storage, 2, 2.0, Setting(**other))
    store(storage, 3, 3.0, Setting(**other), folder=SETTING.machine_id)
    for number, change in enumerate(({"workload": "another"}, {"profile": "full"}), 4):
        store(storage, number, 4.0, Setting(**{**SETTING.as_dict(), **change}))
    store(storage, 6, 5.0, None, folder=SETTING.machine_id)
    page = report(results, storage)
    assert len(said_of_runs(page)) == 1
    assert "4 runs of other workloads or profiles are not shown" in page.one("section", id="history").text


def test_the_newest_runs_are_shown_and_the_others_counted(results, storage):
    for number in range(1, MOST_RUNS + 4):
        store(storage, number, 1e-3)
    page = report(results, storage)
    titles = said_of_runs(page)
    assert (len(titles), titles[0][:4], titles[-1][:4]) == (MOST_RUNS, "0004", f"{MOST_RUNS + 3:04}")
    assert (
        f"the last {MOST_RUNS}. 3 earlier runs of this machine are not shown" in page.one("section", id="history").text
    )


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_what_became_slower_through_the_stored_runs_is_said(results, storage, capsys, factor):
    random = np.random.default_rng(0)
    for number in range(1, 61):
        file = store(storage, number, 1e-3)
        stored = json.loads(file.read_text())
        for index, noise in enumerate(random.standard_normal(12)):
            less = 1e-3 * (1 + 0.01 * noise) * (factor if index == 3 and number > 35 else 1)
            stats = stored["benchmarks"][0]["stats"] | {"min": less}
            stored["benchmarks"].append({**stored["benchmarks"][0], "fullname": f"t::{index}{NASTY}", "stats": stats})
        file.write_text(json.dumps(stored))
    paragraphs = "\n".join(line.text for line in report(results, storage).one("section", id="history").all("p"))
    warning = f"t::3{NASTY} +"
    assert (warning in paragraphs) == (warning in capsys.readouterr().out) == (factor > 1)
    assert ("Slow drift: none, of 13 benchmarks and 60 runs" in paragraphs) == (factor == 1)
    markdown = (results / "drift.md").read_text()
    assert markdown.startswith("> [!WARNING]" if factor > 1 else "Slow drift: none")


def test_a_benchmark_that_the_last_run_has_not_measured_says_so(results, storage):
    store(storage, 1, 1e-3)
    store(storage, 2, 1e-3, name="t::getitem[other]")
    assert "1 ms, not measured in the last run" in report(results, storage).one("section", id="history").text


def test_memory_has_its_ratio_for_a_line(results, storage):
    file = store(storage, 1, 1.0)
    stored = json.loads(file.read_text())
    one = stored["benchmarks"][0]
    one["extra_info"] = {"table": "memory", "operation": "preload", "label": "Lance", "ratio": 1.25}
    file.write_text(json.dumps(stored))
    assert said_of_runs(report(results, storage)) == ["0001 · 0001bee · 2026-01-01 10:20 · 1.25 x"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"benchmarks": [{"fullname": "a"}]}', '{"benchmarks": 1}'])
def test_a_damaged_stored_run_is_named_and_passed_over(results, storage, damage):
    store(storage, 1, 1e-3)
    store(storage, 2, 1e-3).write_text(damage)
    page = report(results, storage)
    assert len(said_of_runs(page)) == 1
    assert [line for line in problems(page) if "0002_run.json is damaged" in line]


def test_without_stored_runs_the_report_says_how_to_store_one(results, storage):
    history = report(results, storage).one("section", id="history").text
    assert "has no stored run of this machine, workload and profile" in history
    assert "make bench" in history
    assert "not judged, 0 of the 32 runs needed are stored" in (results / "drift.md").read_text()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pytest_benchmark_track1.parquet", b"half"),
        ("pytest_benchmark_memory.parquet", b"PAR1"),
        ("pytest_benchmark_track2.png", b"\x89PNG\r\n\x1a\nhalf"),
        ("pytest_benchmark_summary.json", b"{"),
        ("pytest_benchmark_summary.json", b"[1]"),
        ("pytest_benchmark_summary.json", b"\xff"),
        ("gate.json", b'{"exit": 0}'),
        ("gate.json", b"null"),
        ("selftest.json", b'{"runs": [], "machine": {}}'),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_shown(results, storage, file, content):
    (results / file).write_bytes(content)
    page = report(results, storage)
    assert [line.partition(":")[0] for line in problems(page) if line.startswith(file)] == [file]
    assert page.one("section", id="track0").all("table")


@pytest.mark.parametrize("file", ["track3.parquet", "track2.png", "summary.json", "reference.parquet"])
def test_a_missing_file_is_named(results, storage, file):
    (results / f"pytest_benchmark_{file}").unlink()
    assert [line for line in problems(report(results, storage)) if line.startswith(f"pytest_benchmark_{file}: missing")]


def test_a_table_of_another_version_is_named(results, storage):
    file = results / "pytest_benchmark_track1.parquet"
    pq.write_table(pq.read_table(file).drop_columns("p99_ms"), file)
    assert [line for line in problems(report(results, storage)) if "written by another version" in line]


@pytest.mark.parametrize("setting", [None, 1, {}, {**SETTING.as_dict(), "machine": {}}, {"more": 1}])
def test_a_summary_that_does_not_tell_the_machine_has_no_history(results, storage, setting):
    store(storage, 1, 1e-3)
    file = results / "pytest_benchmark_summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "setting": setting}))
    page = report(results, storage)
    assert said_of_runs(page) == []
    assert any("summary.json" in line for line in problems(page))


NAMES = "machine", "versions", "git", "configuration", "tracks", "limits", "finished", "workload"
ODD = 1, [1], "word", None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # One value of each name; each takes half a second.
        pytest.param(name, value, marks=() if (index + number) % 4 == 0 else pytest.mark.slow)
        for index, name in enumerate(NAMES)
        for number, value in enumerate(ODD)
    ],
)
def test_an_odd_summary_is_no_traceback(results, storage, name, value):
    file = results / "pytest_benchmark_summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert report(results, storage).one("section", id="track0").all("table")


def test_a_table_of_an_earlier_run_says_so(results, storage):
    written_fast(tidy([bench(1, "getitem", [1.0], **RANDOM)], []), CONTEXT, results)
    page = report(results, storage)
    names = ["reference", "memory", *(f"track{track.number}" for track in TRACKS)]
    earlier = [name for name in names if "From an earlier run" in page.one("section", id=name).text]
    assert earlier == [name for name in names if name != "track1"]


def test_a_track_that_was_never_run_is_named(tmp_path, storage):
    written_fast(tidy([bench(1, "getitem", [1.0], **RANDOM)], []), CONTEXT, tmp_path / "few")
    absent = report(tmp_path / "few", storage).one("section", id="absent").text
    assert "track 0 (storage)" in absent
    assert "track 1" not in absent


def test_a_track_that_nobody_described_is_reported(tmp_path, storage, capsys):
    labels = {**LABELS, "papyrus": "Papyrus", "clay": "Clay tablets"}
    written_fast(tidy(*of_track_9(), labels), CONTEXT, tmp_path / "seven")
    page = report(tmp_path / "seven", storage)
    section = page.one("section", id="track9")
    assert section.one("img")
    names = [name for name, _ in lines_of(section.all("table")[0])[1]]
    assert ("9 Papyrus" in names, "- Clay tablets" in names) == (True, True)
    assert "Lance" in page.one("section", id="absent").text
    assert problems(page) == []
    # A table without a list of formats, as earlier versions wrote it, lists those of its rows.
    file = tmp_path / "seven" / "pytest_benchmark_track9.parquet"
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    assert "Clay tablets" not in report(tmp_path / "seven", storage).text
    pq.write_table(pq.read_table(file).drop_columns("p50_ms"), file)
    assert main([str(tmp_path / "seven")]) == 2
    assert "written by another version, column p50_ms is missing" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, {}, {"pytest_benchmark_track1.parquet": "half"}])
def test_no_results_are_an_error_that_says_what_to_run(tmp_path, capsys, content):
    folder = tmp_path / "none"
    if content is not None:
        folder.mkdir()
    for name, text in (content or {}).items():
        (folder / name).write_text(text)
    assert main([str(folder)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"Error: {folder}: no results; write them with `make bench`")
    assert all(f"{name}: damaged" in errors for name in content or {})
    assert not (folder / "report.html").exists()


def test_a_report_that_cannot_be_written_leaves_the_old_one(results, storage, capsys, monkeypatch):
    report(results, storage)
    before = (results / "report.html").read_bytes()

    def half(path, text, **_):
        path.write_bytes(text.encode()[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    assert main([str(results), "--history", str(storage)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert (results / "report.html").read_bytes() == before
    assert not list(results.glob(".*"))


def test_output_goes_where_it_is_asked_for(results, storage, tmp_path, capsys):
    output = tmp_path / "new" / "my report.html"
    assert main([str(results), "--history", str(storage), "--output", str(output)]) == 0
    assert parse(output.read_text(encoding="utf-8")).one("h1")
    assert capsys.readouterr().out.startswith(f"Report: {output}")


def test_moments_are_to_the_minute():
    assert moment("2026-01-02T03:04:05.678+00:00") == "2026-01-02 03:04"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("status", "reported"), [(0, True), (1, True), (2, False), (4, False), (5, False)])
@pytest.mark.parametrize("report_status", [0, 2])
def test_make_bench_reports_and_keeps_the_exit_status(tmp_path, status, reported, report_status):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\necho "$*" >> "{tmp_path}/calls"\n'
        f'case "$*" in *pytest*) exit {status};; *benchmarks.report*) exit {report_status};; esac\n'
    )
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    words = ["make", "-C", str(ROOT), "bench", f"VENV={tmp_path}", f"PYTHON={python}", "RESULTS=my results"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=plain)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if "benchmarks.report" in call] == ["-m benchmarks.report my results"] * reported
    left = status or (report_status if reported else 0)
    assert (f"Error {left}" in done.stderr) == bool(left), done.stderr
    assert bool(done.returncode) == bool(left)
