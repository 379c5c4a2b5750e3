from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import numpy as np
import pyarrow.parquet as pq
import pytest
import tifffile

from benchmarks.report.tables import formats_of
from benchmarks.support.peers import PEERS
from benchmarks.tracks.stages import STAGES, stage_column
from tests.support.forked_runs import Runs
from tests.support.papyrus import install_papyrus
from tests.support.programs import ROOT, Programs

TINY = ("--num-images", "24", "--image-shape", "16x16")


# These tests check the content of benchmarks, records and displays, not times; the fewest rounds are enough.
BRIEF = """
    from dataclasses import replace
    from benchmarks.support import workload

    def brief(profile):
        none = {name: getattr(profile, name)._replace(seconds=0.0) for name in ("whole", "sample", "preloaded", "pair")}
        return replace(profile, **none, pair_round_s=0.0)

    workload.PROFILES = tuple(map(brief, workload.PROFILES))
"""

# Figures take longer than brief benchmarks, so tests of tables replace them by empty files.
UNDRAWN = """
    from benchmarks.report import plots

    plots.draw = lambda track, table, path, context: path.touch()
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for data, results and plugins of this module's runs."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "brief.py").write_text(dedent(BRIEF))
    (folder / "undrawn.py").write_text(dedent(UNDRAWN))
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]
# One track is enough for most tests: all files import more, and some start processes.
SAMPLES, LOOP, CONVERSIONS = (
    f"benchmarks/test_track{name}.py" for name in ("1_getitem", "3_model_loop", "4_numpy_vs_torch")
)


@pytest.fixture
def run(runs: Runs, workplace: Path) -> Run:
    def run(
        *words: str, files: Sequence[str] = ("benchmarks",), workload: Sequence[str] = TINY, root: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        folders = ["--data", str(workplace / "data"), "--benchmark-storage", f"file://{workplace / 'stored'}"]
        return runs.run(*files, "-pbrief", *workload, *folders, *words, path=workplace, root=root)

    return run


def rows(results: Path, track: int | str) -> list[dict[str, object]]:
    name = f"track{track}" if isinstance(track, int) else track
    return pq.read_table(results / f"pytest_benchmark_{name}.parquet").to_pylist()


# On a push, `.ci/run` makes such a run itself, without other libraries.
@pytest.mark.slow
@pytest.mark.parametrize("names", [("parquet",), ("parquet", "tiff")], ids=",".join)
def test_whole_run_and_comparison_with_it(names: tuple[str, ...], run: Run, workplace: Path) -> None:
    results = workplace / f"whole{len(names)}"
    done = run("--formats", ",".join(names), "--results", str(results), "--benchmark-autosave")
    assert done.returncode == 0, done.stdout

    summary = json.loads((results / "pytest_benchmark_summary.json").read_text())
    assert summary["workload"] == "24 images of 16 x 16 uint16, synthetic, seed 42"
    assert summary["configuration"]["seed"] == 42
    assert {"torch", "pyarrow", "pylance", "vortex-data", "duckdb", "zarr"} <= summary["versions"].keys()
    assert {"cpu", "cores_usable", "memory_bytes", "os", "python"} <= summary["machine"].keys()
    assert summary["setting"]["workload"] == summary["configuration"]["workload_key"]
    assert summary["setting"]["machine"]["Python"] == summary["machine"]["python"]
    assert set(summary["tracks"]) == {"0", "1", "2", "3", "4", "5", "6"}

    counts = {track: Counter((row["operation"], row["format"]) for row in rows(results, track)) for track in range(7)}
    encodings = {"parquet": 2, "tiff": 1}
    cold = {("preload_cold", name): 1 for name in names}
    assert counts[0] == {
        **cold,
        **{(operation, name): encodings[name] for operation in ("write", "preload") for name in names},
    }
    # Pixels in memory have one row, independent of their format.
    with_memory = (*names, "memory")
    touched = {(operation, name): 1 for operation in ("first_touch", "first_touch_cold") for name in names}
    assert counts[1] == {**touched, **{("getitem", name): 6 for name in with_memory}}
    assert counts[2] == {("epoch", name): 4 for name in with_memory}
    loops = {(mode, name): 1 for mode in ("train", "inference") for name in with_memory}
    assert counts[3] == {**loops, ("train", "memory"): loops["train", "memory"] + 1}  # Once more on a device.
    in_memory = {("sample", "memory"): 1, ("convert", "memory"): 12, ("to_device", "memory"): 7}
    assert counts[4] == {**{("sample", name): 1 for name in names}, **in_memory}
    preloads = {("preload", name): 1 for name in names}
    assert counts[5] == {**preloads, **{("epoch", name): 1 for name in with_memory}}
    assert counts[6] == {("cells", name): 2 for name in with_memory}
    check_conversions(rows(results, 4))
    check_stages(rows(results, 5))
    for track in range(7):
        assert (results / f"pytest_benchmark_track{track}.png").stat().st_size > 10_000
        elsewhere = ("to_device", "preload_cold", "first_touch_cold")
        measured = [row for row in rows(results, track) if row["operation"] not in elsewhere]
        measured = [row for row in measured if row.get("access") != "on_device"]
        assert {row["status"] for row in measured} == {"ok"}
    loops_run = [row for row in rows(results, 3) if row["access"] != "on_device"]
    assert all(row["rounds"] == 50 and row["data_wait_fraction"] is not None for row in loops_run)
    assert "Track 3: model loop" in done.stdout
    assert set(summary["limits"]) == {"reference", "memory"}
    check_limits(results, names)
    assert {
        "test_write[parquet-list]",
        f"test_getitem[{names[-1]}-random-augment-on_demand]",
        "test_epoch[parquet-batch16-workers2-preloaded]",
        "test_train_step[parquet-cpu-on_demand]",
    } <= {row["name"] for track in range(7) for row in rows(results, track)}

    # Existing results do not change the data, and the stored run is the one compared with.
    modified_ns = {path: path.stat().st_mtime_ns for path in (workplace / "data").rglob("manifest.json")}
    again = run(
        "--formats",
        "parquet",
        "--results",
        str(results),
        "--benchmark-compare",
        "-k",
        "test_getitem and sequential",
    )
    assert again.returncode == 0, again.stdout
    assert "comparison: with" in again.stdout
    assert "Missing, only in the stored run: " in again.stdout
    assert {path: path.stat().st_mtime_ns for path in modified_ns} == modified_ns


def check_conversions(track_rows: list[dict[str, object]]) -> None:
    """Check that every row has all times, and that a sample takes less time in a batch than by itself."""
    times = ("p50_us", "p95_us", "mean_us", "samples_per_s")  # Only tables with enough rounds have a p99.
    for row in (row for row in track_rows if row["operation"] != "to_device"):
        sample = row["operation"] == "sample"
        beside = [f"{conversion}_{name}" for conversion in ("numpy", "from_numpy", "copy", "batch") for name in times]
        assert all(row[name] is not None for name in times), row
        assert all((row[name] is not None) == sample for name in (*beside, "overhead_us", "overhead_pct", "reading"))
        if sample:
            assert 0 < float(str(row["batch_p50_us"])) < float(str(row["from_numpy_p50_us"]))
    hows = Counter((row["how"], row["dtype"]) for row in track_rows if row["operation"] == "convert")
    dtypes = ("float16", "float32", "uint8", "int8")
    assert hows == {(how, dtype): 1 for how in ("from_numpy", "copy", "batch") for dtype in dtypes}


def check_stages(track_rows: list[dict[str, object]]) -> None:
    """Check that every value exists; an epoch of these few images takes less than a second in all stages."""
    for row in track_rows:
        if row["operation"] == "epoch":
            times = {stage: float(str(row[stage_column(stage)])) for stage in STAGES}
            assert 0 < sum(times.values()) * 24 < 1e6, row
            assert times["normalize"] > 0
            assert row["on_demand_ms"] is None
        else:
            assert None not in {row["on_demand_ms"], row["preloaded_ms"], row["reading"]}


POOLS = [workers for workers in (2,) if workers <= len(os.sched_getaffinity(0))]


def check_limits(results: Path, formats: tuple[str, ...]) -> None:
    """Check the ratios of every format, which have no target at this size; missing libraries are reported."""
    missing = {peer.name for peer in PEERS if peer.missing}
    missing |= {"MONAI's SpatialCrop"} if find_spec("monai") is None else set()
    reference, memory = rows(results, "reference"), rows(results, "memory")
    counts = Counter((row["operation"], row["format"]) for row in reference)
    assert counts == {
        ("sample_preloaded", "memory"): 1,
        ("epoch", "memory"): 4 + len(PEERS),
        ("batch", "memory"): 1,
        ("view", "memory"): 1,
        ("cells", "memory"): 3,
        **{
            (operation, name): 1
            for operation in (
                "preload",
                "random_batch",
                "random_image",
                "epoch_on_demand",
                "auto_on_demand",
                "first_batch",
            )
            for name in formats
        },
        **{(operation, name): 1 for operation in ("region", "field", "stats") for name in formats if name == "tiff"},
        **{(operation, name): 1 for operation in ("cells_mapped", "parts_open", "parts_epoch") for name in formats[:1]},
        **{("parts_convert", name): len(POOLS) for name in formats[:1]},
        **{("cells_of_files", name): 1 for name in formats if name == "tiff"},
        **{
            (operation, name): 1
            for operation in ("wide_open", "wide_column", "wide_batch")
            for name in formats
            if name != "tiff"
        },
    }
    for row in reference:
        of_peer = row["reference"] in missing
        assert row["status"] == ("skipped" if of_peer else "ok"), row
        assert row["operation"].startswith(("region", "cells")) or row["met"] is None
        if of_peer:
            assert "pip install 'omearrow-ds[peers]'" in str(row["reason"])
        else:
            assert row["ratio"] > 0
            assert row["paired_ratio"] > 0
            assert row["iterations"] >= 1
    assert {row["image_shape"] for row in reference} <= {"16 x 16", "904 x 1224", None}
    of_images = [row for row in memory if row["operation"] != "wide_open"]
    assert {(row["operation"], row["format"]) for row in of_images} == {
        (operation, name) for operation in ("write", "preload", "epoch") for name in formats
    }
    assert {(row["status"], row["images"], row["decoded_bytes"]) for row in of_images} == {("ok", 24, 24 * 16 * 16 * 2)}
    of_columns = [row for row in memory if row["operation"] == "wide_open"]
    assert [row["format"] for row in of_columns] == [name for name in formats if name != "tiff"]
    assert {(row["status"], row["images"], row["decoded_bytes"]) for row in of_columns} == {("ok", 1_000, 8_000_000)}


@pytest.mark.slow
def test_limits_of_own_images_whatever_their_shape(run: Run, workplace: Path) -> None:
    folder, results = workplace / "own", workplace / "own_results"
    folder.mkdir(exist_ok=True)
    for number in range(3):
        tifffile.imwrite(folder / f"{number}.tif", np.arange(40 * (30 + number), dtype=np.uint16).reshape(40, -1))
    files = ("benchmarks/test_reference.py", "benchmarks/test_memory.py")
    # The images do not affect the start of processes, so one benchmark that starts some is enough.
    words = ("--images", str(folder), "--results", str(results), "--formats", "arrow", "-k", "not test_write")
    done = run(*words, files=files, workload=())
    assert done.returncode == 0, done.stdout
    assert "Name (time in" not in done.stdout  # Tables of pytest-benchmark itself, which -v shows.
    for row in rows(results, "reference"):
        ragged = row["operation"] in ("preload", "random_batch", "random_image")
        assert row["status"] == ("ok" if ragged else "skipped"), row
        assert ragged or "differ in shape" in str(row["reason"])
    assert {row["status"] for row in rows(results, "memory")} == {"ok", "skipped"}

    words = (*words[:-1], "not test_write and not workers", "--tile", "10")
    done = run(*words, files=files, workload=())
    assert done.returncode == 0, done.stdout
    assert {row["status"] for row in rows(results, "reference")} == {"ok"}
    assert {row["image_shape"] for row in rows(results, "memory")} == {"10 x 10"}


SEVENTH = """
    from benchmarks.tracks.track import TEXT, Metric, Panel, Track, View

    TRACK = Track(
        number=8,
        title="in order",
        round="one sample",
        parameters={"transform": TEXT},
        metrics=(Metric("fastest_us", heading="the fastest", unit="us"),),
        metrics_of=lambda extra, seconds: {"fastest_us": 1e6 * min(seconds)} if seconds else {},
        key="fastest_us",
        compared_within=("transform",),
        views=(View("in_order", fixed={"transform": "normalize"}),),
        panels=(Panel("In order", "time", ("fastest_us",), series="transform"),),
    )
"""
PLANTED = """
    import pytest
    from omearrow_ds import Format
    from omearrow_ds.storage.formats._folder import FolderImages

    def pytest_itemcollected(item):
        if "getitem" in item.name and "sequential" in item.name:
            mark = pytest.mark.track(8 if "normalize" in item.name else 9, "in_order")
            item.add_marker(mark, append=False)

    was = Format.missing_backend
    Format.missing_backend = property(lambda fmt: "no lance here" if fmt.name == "lance" else was.fget(fmt))

    def broken(self, *_):
        raise OSError("disk on fire\\nand more")

    FolderImages.read = broken
"""


REPORT = """
import os, runpy, sys

root, *sys.argv[1:] = sys.argv[1:]
os.chdir(root)
sys.path.insert(0, root)
runpy.run_module("benchmarks.report", run_name="__main__")
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the benchmarks that has a track with an additional file."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")  # With the compiled files, as all are imported.
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "benchmarks" / "tracks" / "in_order.py").write_text(dedent(SEVENTH))
    return tmp_path


@pytest.mark.slow
def test_missing_backend_failing_benchmark_ninth_format_and_seventh_and_undescribed_track_are_rows(
    run: Run, workplace: Path, copied: Path, programs: Programs
) -> None:
    install_papyrus(workplace)
    (workplace / "planted.py").write_text(dedent(PLANTED))
    results = workplace / "planted"
    words = ("-p", "planted", "--formats", "lance,tiff,arrow,papyrus", "--results", str(results))
    words = (*words, "-k", "test_getitem and not augment or test_sample")
    done = run(*words, files=(SAMPLES, CONVERSIONS), root=copied)
    assert done.returncode == 1, done.stdout
    for track in (1, 4, 8, 9):
        statuses = {(row["format"], row["status"], row["reason"]) for row in rows(results, track)}
        assert statuses - {("memory", "ok", None)} == {
            ("lance", "missing", "no lance here"),
            ("tiff", "failed", "OSError: disk on fire"),
            ("arrow", "ok", None),
            ("papyrus", "ok", None),
        }
        assert (("memory", "ok", None) in statuses) == (track != 4)
        table = pq.read_table(results / f"pytest_benchmark_track{track}.parquet")
        assert list(formats_of(table).values())[-2:] == ["ome-arrow", "Papyrus"]
        assert (results / f"pytest_benchmark_track{track}.png").stat().st_size > 10_000
    preloaded_rows = [row for row in rows(results, 1) if row["access"] == "preloaded"]
    assert [(row["order"], row["transform"], row["format"]) for row in preloaded_rows] == [
        ("random", transform, "memory") for transform in ("none", "normalize")
    ]
    assert {row["fastest_us"] is None for row in rows(results, 8) if row["status"] == "ok"} == {False}
    assert {"order", "transform", "access", "p50_ms"} <= rows(results, 9)[0].keys()
    summary = json.loads((results / "pytest_benchmark_summary.json").read_text())
    described = [summary["tracks"]["8"][name] for name in ("title", "key_metric", "unit", "higher_is_better")]
    assert described == ["in order", "fastest_us", "us", False]
    assert "Track 8: in order, us · in_order · transform normalize" in done.stdout
    assert "Track 9: not described yet, ms · in_order" in done.stdout
    assert "missing: no lance here" in done.stdout
    assert "failed: OSError: disk on fire" in done.stdout
    assert not (results / "pytest_benchmark_track0.parquet").exists()
    done = programs.run(REPORT, copied, results)
    assert done.returncode == 0, done.stderr
    page = (results / "report.html").read_text()
    assert "Track 8: in order" in page
    assert "Track 9: not described yet" in page


OWN = """
    import torch

    class Mean(torch.nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.linear = torch.nn.Linear(shape[-1], 3)

        def forward(self, images):
            return self.linear(images)

    def upside_down(image):
        return image.flip(-2)
"""


@pytest.mark.slow
def test_model_and_transform_of_ones_own(run: Run, workplace: Path) -> None:
    (workplace / "mine.py").write_text(dedent(OWN))
    words = ("--formats", "arrow", "--model", "mine:Mean", "--transform", "mine:upside_down")
    results = workplace / "mine"
    words = (*words, "--steps", "3", "-k", "test_train or random-augment-on_demand", "-pundrawn")
    done = run(*words, "--results", str(results), files=(SAMPLES, LOOP))
    assert done.returncode == 0, done.stdout
    skipped = {row["reason"] for track in (1, 3) for row in rows(results, track) if row["status"] != "ok"}
    assert skipped <= {"no CUDA device: measured with --device cuda"}
    configuration = json.loads((results / "pytest_benchmark_summary.json").read_text())["configuration"]
    assert (configuration["model"], configuration["transform"]) == ("mine:Mean", "mine:upside_down")


def test_results_that_cannot_be_written_are_an_error(run: Run, workplace: Path) -> None:
    blocked = workplace / "blocked"
    blocked.write_text("a file")
    done = run("--results", str(blocked), "-k", "test_convert and uint8", files=(CONVERSIONS,))
    assert done.returncode not in (0, 1), done.stdout
    assert "the results could not be written to" in done.stdout
    assert "Track 4" in done.stdout


@pytest.mark.parametrize(
    "words",
    [("--benchmark-disable",), pytest.param(("-p", "xdist", "-n", "1"), marks=pytest.mark.slow)],
    ids=["disabled", "xdist"],
)
def test_nothing_measured_writes_nothing(words: tuple[str, ...], run: Run, workplace: Path) -> None:
    results = workplace / "nothing"
    done = run(*words, "--results", str(results), "-k", "convert and uint8", files=(CONVERSIONS,))
    assert done.returncode == 0, done.stdout
    assert not results.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--formats", "parquet,papyrus"), "unknown papyrus; known are parquet, parquet_duck, lance"),
        (("--image-shape", "9"), "none of YxX, CxYxX, TxCxZxYxX"),
        pytest.param(("--num-images", "0"), "no integer from 1", marks=pytest.mark.slow),
        pytest.param(("--tile", "10"), "--tile cuts the TIFF files of --images", marks=pytest.mark.slow),
        pytest.param(("--images", "/no/such/folder"), "no such folder", marks=pytest.mark.slow),
        (("--images", "src"), "no TIFF file"),
        (("benchmarks/test_track3_model_loop.py", "--model", "torch.nn:Nothing"), "MODULE:NAME"),
        (("--images", "src", "--workload", "masks"), "pass one of them"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_options_are_usage_errors(words: tuple[str, ...], message: str, runs: Runs) -> None:
    # The options belong to every pytest run here; a run without benchmarks imports less.
    done = runs.run("tests/__init__.py", *words)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stdout


def test_help_shows_the_options(runs: Runs) -> None:
    done = runs.run("--help")
    assert done.returncode == 0
    text = done.stdout[done.stdout.index("omearrow-ds workload") :]
    options = "workload num-images image-shape seed profile formats images tile device results"
    for option in options.split():
        assert f"--{option}" in text
