"""The parts of the gate: exit status, report, trees, environments, and the slowdowns that its self-test plants."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import psutil
import pytest
from packaging.requirements import Requirement

from benchmarks.gate.pins import environments, meets, pins
from benchmarks.gate.planted import FORMS, in_forms, place_of, plant
from benchmarks.gate.processes import CannotCompareError, Command, run
from benchmarks.gate.report import Comparison, Row, Times, as_json, as_markdown, as_text
from benchmarks.gate.rounds import last_core
from benchmarks.gate.selftest import levels_of
from benchmarks.gate.selftest_report import as_markdown as rates
from benchmarks.gate.selftest_report import missed_targets, rate
from benchmarks.gate.sides import check_out, copy_tree, share_equal_files, workplace
from benchmarks.support import gated as gated_data
from benchmarks.support import pixels
from benchmarks.support.data import encodings
from omearrow_ds.storage.formats import get_format
from tests.support.errors import raises

ROOT = Path(__file__).resolve().parents[2]
SLOWER, SAME, FASTER = [1.12, 1.11, 1.13, 1.14, 1.12], [1.0, 1.01, 0.99, 1.0, 1.0], [0.88, 0.87, 0.88, 0.89, 0.88]
UNCLEAR, LEANING = [0.99, 1.06, 1.07, 1.08, 1.2], [1.0, 0.98, 0.99, 0.9, 0.97]


def times(ratios, clock=None):
    """Return one process's times for each ratio; ``clock`` has the ratios of elapsed times if these differ."""
    return [
        Times(1e-3 * ratio, 2e-3 * ratio, 3e-3, 8, [1e-3 * ratio, 1.1e-3 * ratio], [1e-3 * by, 1.1e-3 * by])
        for ratio, by in zip(ratios, clock or ratios, strict=True)
    ]


def row(name, ratios):
    return Row.from_times(f"benchmarks/test_gate.py::test_{name}", times([1.0] * len(ratios)), times(ratios))


def comparison(*rows, control=SAME, **others):
    options = {"new": {}, "gone": {}, "skipped": {}, **others}
    named = tuple(row(f"work{index}[arrow]", ratios) for index, ratios in enumerate(rows))
    return Comparison("main (abc)", "def", 0.05, (row("control", control),), named, seconds=1.0, **options)


@pytest.mark.parametrize(
    ("rows", "others", "status", "conclusion"),
    [
        ([SAME, FASTER], {}, 0, "No regression: none of 2 benchmarks is slower by more than 5%."),
        ([SAME, SLOWER], {}, 1, "Regression: work1[arrow] (+12.4%) slower by more than 5%."),
        ([SAME, UNCLEAR], {}, 3, "Too noisy to judge work1[arrow] (+7.8%)"),
        ([SAME, LEANING], {}, 0, "No regression"),  # Faster or equal, so not slower.
        ([SLOWER, UNCLEAR], {}, 1, "Regression: work0[arrow]"),
        ([SLOWER], {"control": SLOWER}, 3, "control (+12.4%) changed"),
        ([SAME], {"control": FASTER}, 3, "control (-12.0%) changed"),
        ([SAME], {"gone": {"test_gate.py::test_x": ""}}, 0, "No regression"),
    ],
)
def test_exit_status_and_conclusion(rows, others, status, conclusion):
    compared = comparison(*rows, **others)
    assert compared.exit_status(strict=False) == status
    assert compared.conclusion(strict=False).startswith(conclusion.split(":")[0]) or conclusion in compared.conclusion(
        strict=False
    )
    assert conclusion in compared.conclusion(strict=False)
    assert as_json(compared)["exit"] == status
    for text in (as_text(compared), as_markdown(compared)):
        assert compared.conclusion(strict=False) in text
        assert all(benchmark.short in text for benchmark in compared.rows)


BYTES, MORE_BYTES = [16e6] * 5, [18e6] * 5


def test_memory_is_told_in_bytes_and_judged_as_times_are():
    base, head = ([Times(size, size, size, 1, [size], [size]) for size in sizes] for sizes in (BYTES, MORE_BYTES))
    heavy = Row.from_times("test_gate.py::test_memory[arrow]", base, head, in_bytes=True)
    compared = replace(comparison(SAME), rows=(heavy,))
    assert compared.exit_status(strict=False) == 1
    (line,) = [line for line in as_text(compared).splitlines() if line.startswith("memory[arrow] ")]
    assert line.split()[1:6] == ["16", "MB", "18", "MB", "+12.5%"]


def test_code_that_waits_is_slower_by_the_clock_and_a_busy_machine_is_not():
    waits = Row.from_times("test_gate.py::test_waits", times(SAME), times(SAME, clock=SLOWER))
    compared = replace(comparison(SAME), rows=(waits,))
    assert compared.exit_status(strict=False) == 1
    assert "Regression: waits (+12.4% by the clock) slower by more than 5%." in as_text(compared)
    busy = Row.from_times("test_gate.py::test_busy", times(SAME), times(SAME, clock=[1.0, 1.4, 0.8, 1.3, 1.1]))
    compared = replace(comparison(SAME), rows=(busy,))
    assert compared.exit_status(strict=False) == 0
    assert not busy.is_open(0.05)
    seems = Row.from_times("test_gate.py::test_seems", times(SAME), times(SAME, clock=[1.07, 1.12, 1.05, 1.13, 1.08]))
    assert seems.is_open(0.05)  # More rounds would decide between the two.
    assert not seems.is_unresolved(0.05)


def test_strict_fails_on_what_is_gone_and_a_regression_goes_before():
    gone = {"gone": {"benchmarks/test_gate.py::test_old[arrow]": "no longer"}}
    assert comparison(SAME, **gone).exit_status(strict=True) == 2
    assert comparison(SLOWER, **gone).exit_status(strict=True) == 1
    text = as_text(comparison(SAME, **gone), strict=True)
    assert "Missing, only run by base: test_gate.py::test_old[arrow] (no longer)." in text


def test_the_table_shows_what_matters_first_and_what_is_not_judged():
    lines = as_text(comparison(SAME, FASTER, SLOWER, UNCLEAR)).splitlines()
    order = [line.split()[0] for line in lines if line.startswith("work")]
    assert order == ["work2[arrow]", "work3[arrow]", "work1[arrow]", "work0[arrow]"]
    slower = next(line for line in lines if line.startswith("work2"))
    assert " ".join(slower.split()[1:]) == "1.05 ms 1.18 ms +12.4% +10.2% to +14.6% +12.4% +12.4% +0.0% 5 regression"
    folded = as_markdown(comparison(SAME, SLOWER))
    assert folded.index("work1[arrow]") < folded.index("<summary>1 ok") < folded.index("work0[arrow]")


def test_a_slowdown_that_spares_some_calls_is_told():
    slow = row("some[arrow]", SAME)
    half = tuple(times._replace(median_s=times.median_s * 2) for times in slow.head)
    compared = comparison(SAME)
    compared = replace(compared, rows=(*compared.rows, replace(slow, head=half)))
    assert compared.exit_status(strict=False) == 0
    assert "perhaps some calls are slower: some[arrow] (+100.0%)." in as_text(compared)


def test_the_record_holds_every_round():
    record = json.loads(json.dumps(as_json(comparison(SLOWER, new={"x::test_new": "AttributeError"}))))
    (one,) = record["benchmarks"]
    assert one["verdict"] == "regression"
    assert [times["min_s"] for times in one["head"]] == pytest.approx([1e-3 * ratio for ratio in SLOWER])
    assert one["worked"] == one["passed"] == pytest.approx(SLOWER)
    assert record["new"] == {"x::test_new": "AttributeError"}


def test_gate_and_report_need_neither_torch_nor_the_package():
    """The gate must report a broken working tree, not break with it; the others must start fast."""
    code = (
        "import sys, benchmarks.gate.__main__, benchmarks.gate.selftest, benchmarks.gate.figure\n"
        "import benchmarks.report.results, benchmarks.report.__main__\n"
        "assert not {'torch', 'omearrow_ds', 'tests', 'matplotlib.pyplot'} & sys.modules.keys(), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".gitignore").write_text("ignored\n")
    for name in ("kept", "changed", "deleted"):
        (folder / name).write_text("committed")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_head_is_the_working_tree_as_it_is(repository, tmp_path):
    assert " and " not in copy_tree(repository, tmp_path / "clean")
    (repository / "changed").write_text("new")
    (repository / "deleted").unlink()
    (repository / "folder").mkdir()
    (repository / "folder" / "untracked").write_text("u")
    (repository / "ignored").write_text("i")
    label = copy_tree(repository, tmp_path / "copy")
    assert label.endswith(" and uncommitted changes")
    files = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert files == {".gitignore", "kept", "changed", "folder/untracked"}
    assert (tmp_path / "copy" / "changed").read_text() == "new"


def test_the_worktree_of_base_goes_and_the_users_stay(repository, tmp_path):
    git(repository, "worktree", "add", "--quiet", str(tmp_path / "mine"))
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    hook.chmod(0o755)
    with workplace(tmp_path) as folder:
        assert check_out(repository, "main", folder / "base").startswith("main (")
        assert (folder / "base" / "kept").read_text() == "committed"
        assert len(list((repository / ".git" / "worktrees").iterdir())) == 2
    assert not folder.exists()
    assert [path.name for path in (repository / ".git" / "worktrees").iterdir()] == ["mine"]
    assert not (tmp_path / "ran").exists()


def test_what_a_killed_gate_left_is_removed_and_what_is_in_use_is_not(repository, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from benchmarks.gate.sides import check_out, workplace\n"
        "with workplace(Path(sys.argv[1])) as folder:\n"
        "    check_out(Path(sys.argv[2]), 'main', folder / 'base')\n"
        "    os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(repository)]
    subprocess.run(command, cwd=ROOT, check=False)
    (left,) = tmp_path.glob("omearrow-ds-gate-*")
    assert (left / "base").is_dir()
    with workplace(tmp_path) as first:
        assert not left.exists()
        assert not (repository / ".git" / "worktrees").exists()
        with workplace(tmp_path):
            assert first.is_dir()
        assert first.is_dir()


def test_a_left_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    left, treasure = tmp_path / "omearrow-ds-gate-planted", tmp_path / "worktrees" / "treasure"
    (left / "base").mkdir(parents=True)
    treasure.mkdir(parents=True)
    (left / ".in-use").touch()
    (left / "base" / ".git").write_text(f"gitdir: {treasure}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with workplace(tmp_path):
            assert left.is_dir()
    assert treasure.is_dir()


def test_files_of_equal_bytes_become_one(tmp_path):
    for side, texts in (("base", {"a": "same", "b": "mine"}), ("head", {"a": "same", "b": "other", "empty": ""})):
        (tmp_path / side / "deep").mkdir(parents=True)
        for name, text in texts.items():
            (tmp_path / side / "deep" / name).write_text(text)
    (tmp_path / "base" / "other").mkdir()
    (tmp_path / "base" / "other" / "a").write_text("same")  # The same image in another collection.
    assert share_equal_files(tmp_path / "base", tmp_path / "head") == 1
    inodes = {str(path.relative_to(tmp_path)): path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}
    assert inodes["base/deep/a"] == inodes["head/deep/a"]
    assert len(set(inodes.values())) == len(inodes) - 1
    assert (tmp_path / "head" / "deep" / "b").read_text() == "other"


def tree(folder, pinned, needed="", extras=""):
    folder.mkdir()
    (folder / "constraints.txt").write_text(pinned)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "it"\ndependencies = [{needed}]\n'
        f'[project.optional-dependencies]\nbench = ["it[all]"{extras}]\nall = ["pytest>=8"]\ndev = ["ruff==0.0.1"]\n'
    )
    return folder


def test_pins_are_what_the_benchmarks_need(tmp_path):
    one = tree(tmp_path / "one", "# why\nnumpy==1.0  # old\n\npytest==8.3.0\n", '"numpy>=1"', ', "filelock"')
    assert {str(requirement) for requirement in pins(one)} == {
        "numpy==1.0",
        "pytest==8.3.0",
        "numpy>=1",
        "filelock",
        "pytest>=8",
    }
    assert pins(tmp_path) == frozenset()
    ours = pins(ROOT)
    assert Requirement("torch>=2.6") in ours
    assert any(requirement.name == "matplotlib" for requirement in ours)
    assert not any(
        requirement.name == "ruff" and not str(requirement.specifier).startswith("==") for requirement in ours
    )


def test_an_environment_meets_pins_or_does_not():
    def meets_pins(*lines):
        return meets(frozenset(map(Requirement, lines)))

    assert meets_pins("pytest>=8", "no-such-package==1.0")  # A pin of a missing package has no effect.
    assert meets_pins('no-such-package>=1; python_version < "3"')
    assert not meets_pins("no-such-package>=1")
    assert not meets_pins("pytest==1.0")


def test_one_environment_serves_both_where_pins_agree_or_it_meets_both(tmp_path):
    current = (Path(sys.executable), Path(sys.executable))
    base, head = tree(tmp_path / "base", "pytest==1.0\n"), tree(tmp_path / "head", "pytest==1.0\n")
    assert environments(base, head, tmp_path) == current  # Neither requirement is met, by the user's choice.
    other = tree(tmp_path / "other", "no-such-package==1.0\n")
    assert environments(other, tree(tmp_path / "more", ""), tmp_path) == current


def test_an_environment_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    base = tree(tmp_path / "base", "pytest==1.0\n")
    with raises(CannotCompareError, mentions=("environment", "base"), remedy=False):
        environments(base, tree(tmp_path / "head", ""), tmp_path)


def test_a_process_is_kept_on_a_core_and_this_one_is_not(tmp_path):
    before, core = os.sched_getaffinity(0), last_core()
    command = Command([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], tmp_path, tmp_path / "log")
    assert run(replace(command, core=core)) == 0
    assert (tmp_path / "log").read_text().strip() == str({core})
    assert os.sched_getaffinity(0) == before


def test_a_process_ends_with_all_that_it_started(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)"
    )
    command = Command([sys.executable, "-c", code], tmp_path, tmp_path / "log")
    assert run(command) == 0
    child = int((tmp_path / "log").read_text())
    until_s = monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert monotonic() < until_s


def test_what_both_sides_are_compared_in_reads_every_workload_in_every_way(tmp_path, monkeypatch):
    fewer = {name: replace(workload, count=min(workload.count, 20)) for name, workload in gated_data.WORKLOADS.items()}
    monkeypatch.setattr(gated_data, "WORKLOADS", fewer)
    monkeypatch.setattr(pixels, "formats", lambda: [get_format("arrow")])
    with gated_data.Collections(tmp_path) as collections:
        digests = pixels.checksums(collections)
    assert {name.partition(":")[0].rpartition(", ")[2] for name in digests} == fewer.keys()
    for name, digest in digests.items():
        assert digests[name.replace("on demand", "preloaded")] == digest


def gated(runs):
    """Return the names of the gated benchmarks."""
    done = runs.run("benchmarks", "-m", "gate", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout
    return [line.rpartition("::test_")[2] for line in done.stdout.splitlines() if "::test_" in line]


def test_every_gated_benchmark_has_a_place_of_its_own_to_be_slowed(runs):
    names = [name for name in gated(runs) if not name.startswith("control")]
    assert len(names) > 40
    assert len({place_of(name) for name in names}) == len(names)
    formats = {name.rpartition("[")[2] for name in names}
    for operation in ("write", "preload", "getitem", "batch"):
        assert {name for name in names if name.startswith(f"{operation}[")} == {
            f"{operation}[{format_suffix}" for format_suffix in formats
        }
    for name in formats:  # A place names the stored encoding.
        assert place_of(f"preload[{name}").split()[2] == encodings(get_format(name[:-1]))[0]
    with pytest.raises(KeyError):
        place_of("unheard[arrow]")


@pytest.mark.slow
def test_every_benchmark_calls_what_would_be_slowed(tmp_path, runs):
    copy_tree(ROOT, tmp_path / "tree")
    plant(tmp_path / "tree", {})
    with (tmp_path / "tree/src/omearrow_ds/_planted.py").open("a") as file:
        # Several processes end, some of them without a call.
        file.write("import atexit\natexit.register(lambda: open('called', 'a').write('\\n'.join([*calls, ''])))\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "tree" / "src")}
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark refuses to measure in a worker.
    words = ["-m", "pytest", "benchmarks", "-m", "gate", "-q", "-p", "no:cacheprovider", "--data=data"]
    subprocess.run([sys.executable, *words], cwd=tmp_path / "tree", env=environment, check=True)
    called = (tmp_path / "tree/called").read_text().splitlines()
    elsewhere = {"control_compute", "control_memory", "memory[arrow]", "batch_worker[arrow]"}  # last: in a worker
    assert [name for name in gated(runs) if name not in elsewhere and place_of(name) not in called] == []


# Imports the package of a tree in a process that has imported torch and that of this repository.
IN_TREE = """
import os, sys

for name in [name for name in sys.modules if name.partition(".")[0] == "omearrow_ds"]:
    del sys.modules[name]
os.chdir(sys.argv[1])
sys.path.insert(0, os.path.abspath("tree/src"))
"""


def test_a_planted_slowdown_is_one_of_that_call_alone(programs, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "tree" / "src")
    plant(tmp_path / "tree", {place_of("getitem[tiff]"): 0.2, place_of("write[arrow]"): 0.1})
    code = (
        "import numpy as np, omearrow_ds as ds; from time import perf_counter as now\n"
        "assert ds.__file__.startswith(os.path.abspath('tree'))\n"
        "images = [np.zeros((100, 100), np.uint16)] * 3\n"
        "def took(act):\n"
        "    start = now(); act(); return round(now() - start, 3)\n"
        "print(took(lambda: ds.write_images(images, 'a.tiffs', 'tiff')))\n"
        "print(took(lambda: ds.write_images(images, 'a.arrow', 'arrow')))\n"
        "for name in ('a.tiffs', 'a.arrow'):\n"
        "    data = ds.OMEArrowDataset(name, preload=False); data[0]\n"
        "    print(took(lambda: data[1]))\n"
        "    print(took(lambda: data.__getitems__([0, 1])))\n"
    )
    done = programs.run(IN_TREE + code, tmp_path)
    assert done.returncode == 0, done.stderr
    write_tiff, write_arrow, sample, batch, *arrow = map(float, done.stdout.split())
    assert write_arrow >= 0.1
    assert sample >= 0.2
    assert max(batch, *arrow) < 0.1
    assert write_tiff < 30


def test_a_slowdown_of_what_is_read_first_is_planted_in_the_first_batch_alone(programs, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "tree" / "src")
    plant(tmp_path / "tree", {place_of("first_touch[arrow]"): 0.2})
    code = (
        "import numpy as np, omearrow_ds as ds; from time import perf_counter as now\n"
        "ds.write_images([np.zeros((100, 100), np.uint16)] * 9, 'a.arrow', 'arrow')\n"
        "data = ds.OMEArrowDataset('a.arrow', preload=False)\n"
        "for _ in range(2):\n"
        "    start = now(); data.__getitems__(range(8)); print(now() - start)\n"
    )
    done = programs.run(IN_TREE + code, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert first >= 0.2 > second


def test_forms_of_slowness_are_planted_where_the_gate_should_find_them(programs, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "tree" / "src")
    extra_s, forms = in_forms(dict.fromkeys([*FORMS.values(), "getitem[arrow]"], 0.1))
    plant(tmp_path / "tree", extra_s, forms)
    code = (
        "import os, numpy as np, omearrow_ds as ds; from time import perf_counter as now\n"
        "from omearrow_ds.dataset.preload import PixelCache\n"
        "def took(act, *given):\n"
        "    start = now(); act(*given); return now() - start\n"
        "os.makedirs('arrow-bytes-1'); os.chdir('arrow-bytes-1')\n"
        "ds.write_images([np.zeros((100, 100), np.uint16)] * 12, 'a.arrow', 'arrow')\n"
        "data = ds.OMEArrowDataset('a.arrow')\n"
        "print(sum(took(data.__getitems__, range(12)) > 0.1 for _ in range(20)))\n"
        "for side in (8, 100):\n"
        "    ds.write_images([np.zeros((side, side), np.uint16)] * 3, f'{side}.arrow', 'arrow')\n"
        "    data = ds.OMEArrowDataset(f'{side}.arrow', preload=False); data[0]\n"
        "    print(took(data.__getitem__, 1))\n"
        "ds.write_images([np.zeros((100, 100), np.uint16)] * 3, 'a.parquet', 'parquet')\n"
        "data = ds.OMEArrowDataset('a.parquet', preload=False); data[0]\n"
        "pages = data.source.images.table._reader; reader = pages.get(); data[1]; print(reader is pages.get())\n"
        "ds.write_images([np.zeros((512, 512), np.uint16)] * 4, 'large.arrow', 'arrow')\n"
        "print(len(PixelCache.load(ds.open_images('large.arrow').images).planted))\n"
    )
    done = programs.run(IN_TREE + code, tmp_path)
    assert done.returncode == 0, done.stderr
    slow, of_many, of_few, same, is_shared = done.stdout.split()
    assert int(slow) == 2
    assert float(of_many) >= 0.01 > float(of_few) >= 0.01 * 256 / 20_000
    assert (same, is_shared) == ("False", str(4 * 512 * 512 * 2 // 10))


def test_levels_go_round():
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        assert {levels_of(names, number)[name] for number in range(4)} == {0.0, 0.05, 0.1, 0.2}
    assert len(set(levels_of(names, 0).values())) == 4


def test_rates_have_intervals():
    assert rate(0, 0) == "-"
    assert rate(0, 100) == "0 of 100 (0.0 %; 0.0 to 3.6)"  # 1 - 0.025 ** (1 / 100)
    assert rate(50, 100) == "50 of 100 (50.0 %; 39.8 to 60.2)"
    assert rate(10, 10) == "10 of 10 (100.0 %; 69.2 to 100.0)"  # 0.025 ** (1 / 10)


def test_the_rates_of_constructed_runs():
    def ran(kind, exit_status, *rows):
        record = as_json(comparison(*(ratios for ratios, _ in rows)))
        for one, (_, level) in zip(record["benchmarks"], rows, strict=True):
            one["level"] = level
        return {"kind": kind, "finished": "2026-01-01T00:00:00+00:00", **record, "exit": exit_status}

    runs = [
        ran("unchanged", 0, (SAME, 0.0), (SAME, 0.0)),
        ran("unchanged", 1, (SAME, 0.0), (SLOWER, 0.0)),
        ran("slowed", 1, (SLOWER, 0.1), (SAME, 0.05)),
        ran("loaded", 3, (UNCLEAR, 0.0), (SAME, 0.0)),
    ]
    environment = {"machine": {"cpu": "a CPU", "cores_usable": 2, "python": "CPython 3"}, "versions": {"torch": "2"}}
    assert missed_targets(runs) == ["false alarms of unchanged gates at most 0.3%: 1 of 2 (50.0 %; 1.3 to 98.7)"]
    assert missed_targets([runs[0], *[ran("slowed", 0, (SAME, 0.1))] * 9])[0].startswith(
        "+10% found at least 99%: 0 of"
    )
    runs.append(ran("in forms", 1, (SLOWER, 0.0)))
    runs[-1]["benchmarks"][0]["name"] = f"test_gate.py::test_{FORMS['growth']}"
    report = rates(runs, environment)
    assert f"| growth, in {FORMS['growth']} | 1 of 1" in report
    assert "| no change: whole gates | 1 of 2 (50.0 %; 1.3 to 98.7) | 1 of 2 (50.0 %; 1.3 to 98.7) | 0 of 2" in report
    assert (
        "the core 40 % busy: whole gates | 0 of 1 (0.0 %; 0.0 to 97.5) | 0 of 1 (0.0 %; 0.0 to 97.5) | 1 of 1" in report
    )
    assert "| +5% | 0 of 1" in report
    assert "| +10% | 1 of 1" in report
    assert "| work0[arrow] | 1,000 | 1.0 |" in report or "| work0[arrow] | 1,000 |" in report
