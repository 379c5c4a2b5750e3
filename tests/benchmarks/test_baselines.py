"""The committed baselines: their machines, failures, and the calculation of limits and rates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from benchmarks.gate import environment
from benchmarks.report import baselines, record_baseline
from benchmarks.report.baselines import Baseline, Usual, figure_of
from benchmarks.report.control import Control
from benchmarks.report.record_baseline import Spread, derive, false_alarms, narrowest
from benchmarks.report.stored_runs import Setting, StoredRun
from omearrow_ds.resources import available_cores
from tests.support.errors import raises
from tests.support.small_suite import Suite

pytest_plugins = ["pytester"]

FAILED, OK, USAGE = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR
COMPARE = "--benchmark-compare"
NAMES = [f"test_some.py::test_{name}" for name in ("one", "two", "three", "four")]
CONTROL = {"compute": 1e-4, "memory": 1e-3}


def baseline(times=None, ratios=None, **changes):
    machine = environment.machine_class(available_cores())
    usual = {name: Usual(*pair) for name, pair in (times or {}).items()}
    usual_ratios = {name: Usual(*pair) for name, pair in (ratios or {}).items()}
    stored = Baseline(machine, "key", "10 images", "quick", {"runs": 9}, CONTROL, 0.2, 1.5, usual, usual_ratios)
    return replace(stored, **changes)


def controls(factor=1.0, waited=0.01, **changes):
    return {"least_s": {name: factor * s for name, s in CONTROL.items()} | changes, "waited": waited}


TEN = {f"t{number}": (1.0, 1.4) for number in range(10)}


def test_a_slower_machine_is_no_slower_code():
    judged = baseline(TEN).judge(dict.fromkeys(TEN, 3.0), controls(3))
    assert (judged.pace, judged.slower) == (3.0, False)
    assert judged.behind == pytest.approx(1)


def test_what_is_beyond_its_limit_at_the_pace_of_the_run_is_slower():
    judged = baseline(TEN).judge({**dict.fromkeys(TEN, 3.0), "t4": 4.3, "t5": 4.1}, controls(memory=3e-3))
    assert judged.over == ["t4"]
    assert judged.slower
    assert "  1.43 x (limit 1.40) t4" in judged.lines()


def test_what_slows_all_alike_is_seen_beside_the_controls():
    judged = baseline(TEN).judge(dict.fromkeys(TEN, 1.6), controls())
    assert not judged.over
    assert judged.slower
    assert not baseline(TEN).judge(dict.fromkeys(TEN, 1.6), controls(memory=1.2e-3)).slower


def test_ratios_have_no_pace():
    both = baseline(TEN, {"r": (0.5, 1.4)})
    assert both.judge({**dict.fromkeys(TEN, 3.0), "r": 0.69}, controls(3)).over == []
    assert both.judge({**dict.fromkeys(TEN, 3.0), "r": 0.71}, controls(3)).over == ["r"]


def test_a_part_is_not_judged():
    judged = baseline(TEN).judge({"t0": 1.0, "t1": 9.0, "other": 5.0}, controls())
    assert not judged.slower
    assert any(line.startswith("not judged: only 20%") for line in judged.lines())


def test_a_run_that_waited_for_its_core_is_not_judged():
    judged = baseline(TEN).judge({**dict.fromkeys(TEN, 1.0), "t4": 2.0}, controls(waited=0.21))
    assert judged.over == ["t4"]
    assert not judged.slower
    assert any("waited for a core 21% of its time (limit 20%)" in line for line in judged.lines())


def test_waiting_for_a_core_is_seen():
    control, before, start_s, waited = Control(), os.sched_getaffinity(0), monotonic(), 0.0
    code = f"import os\nos.sched_setaffinity(0, {{{max(before)}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        try:
            os.sched_setaffinity(0, {max(before)})
            while waited < 0.2 and monotonic() < start_s + 20:
                control.sample()
                waited = control.result()["waited"]  # This share falls again if the other process releases the core.
        finally:
            os.sched_setaffinity(0, before)
            busy.kill()
    assert waited >= 0.2


def test_the_figure_of_a_pair_is_its_ratio_and_memory_has_none():
    assert figure_of({"track": 1}, 0.25) == ("times", 0.25)
    assert figure_of({"table": "reference", "ratio": 0.5}, 0.25) == ("ratios", 0.5)
    assert figure_of({"table": "memory", "ratio": 0.5}, 0.25) is None
    assert figure_of({"track": 0, "operation": "write"}, 0.25) is None


def test_text_gives_the_same_baseline(tmp_path):
    original = baseline(TEN, {"r": (0.5, 1.4)})
    (tmp_path / "b.json").write_text(original.as_text())
    assert baselines.read(tmp_path / "b.json") == original
    assert original.as_text().count("\n") < 60


@pytest.mark.parametrize("damage", ["", "[]", "{}", "no control", "no number", "no times"])
def test_a_damaged_one_is_an_error(damage, tmp_path):
    content = json.loads(baseline(TEN).as_text())
    if damage == "no control":
        content["control_s"] = {}
    if damage == "no number":
        content["times"]["t0"] = [1.0, float("nan")]
    if damage == "no times":
        content["times"] = {}
    (tmp_path / "b.json").write_text(json.dumps(content) if damage.startswith("no") else damage)
    with raises(ValueError, path=tmp_path / "b.json", mentions="make baseline", remedy=False):
        baselines.read(tmp_path / "b.json")


def test_those_that_are_committed_are_whole_and_small():
    files = sorted(Path(baselines.__file__).parents[1].joinpath("baseline").iterdir())
    assert files
    for file in files:
        stored = baselines.read(file)
        assert file.name == baselines.file_of(stored.machine, stored.profile)
        assert len(stored.times) > 150
        assert file.stat().st_size < 60_000
        assert stored.as_text() == file.read_text()


# A benchmark run finds the baseline, shows it, repeats benchmarks over their limits, and fails in CI.


@pytest.fixture
def suite(pytester, monkeypatch):
    return Suite(pytester, monkeypatch)


def commit(suite, **changes):
    """Store a baseline of the suite's benchmarks; the first one sleeps for 1 ms and may take 20 times that."""
    stored = baseline(
        dict.fromkeys(NAMES[1:], (1e-7, 1e9)),
        {NAMES[0]: (1e-3, 20.0)},
        **{"workload": workload(suite), "pace_limit": 1e9, "most_waited": 1.0} | changes,
    )
    baselines.FOLDER.mkdir(exist_ok=True)
    file = baselines.FOLDER / baselines.file_of(stored.machine, stored.profile)
    file.write_text(stored.as_text())
    return file


def workload(suite):
    suite.save()
    (stored,) = suite.stored()
    key = json.loads(stored.read_text())["omearrow_ds"]["workload"]
    stored.unlink()
    return key


def test_without_a_baseline_of_the_class_it_is_said(suite):
    assert suite.run(COMPARE, CI="true") == OK
    assert "no baseline for CPU " in suite.output
    assert "store one with `make baseline`" in suite.output


def test_a_run_within_its_limits_passes_and_is_what_the_next_is_compared_with(suite):
    file = commit(suite)
    assert suite.run(COMPARE, CI="true") == OK
    assert f"comparison: compared with the baseline {file.name} (runs 9)" in suite.output
    assert "Baseline: within its limits" in suite.output
    assert "nearest to their limits: 4" in suite.output
    assert suite.run(COMPARE, CI="true", SLEEP_S="0.04") == OK
    assert suite.table_says("(NOW)")
    assert "Baseline" not in suite.output


@pytest.mark.parametrize(("ci", "status", "stored"), [("true", FAILED, 0), ("", OK, 1), ("false", OK, 1)])
def test_a_run_beyond_its_limits_fails_in_ci_after_two_more_chances(ci, status, stored, suite):
    commit(suite)
    assert suite.run(COMPARE, CI=ci, SLEEP_S="0.04") == status
    assert "Baseline: slower than its limits" in suite.output
    assert ("ERROR: Baseline" in suite.output) == (status == FAILED)
    assert "beyond their limits: 1" in suite.output
    assert f"(limit 20.00) {NAMES[0]}" in suite.output
    assert "6 passed" in suite.output
    assert sum(line.startswith("test_one") for line in suite.output.splitlines()) == 1
    assert len(suite.stored()) == stored


def test_what_was_slow_for_a_moment_is_not_slower(suite):
    commit(suite)
    assert suite.run(COMPARE, CI="true", SLEEP_ONCE_S="0.04") == OK
    assert "5 passed" in suite.output
    assert "Baseline: within its limits" in suite.output
    (stored,) = suite.stored()
    names = [bench["fullname"] for bench in json.loads(stored.read_text())["benchmarks"]]
    assert sorted(names) == sorted(NAMES), "what was measured again is in the stored run once, as it was first"


@pytest.mark.parametrize("words", [("-k", "test_two"), ("--collect-only",)], ids=" ".join)
def test_a_part_passes(words, suite):
    commit(suite)
    assert suite.run(COMPARE, *words, CI="true") == OK
    assert ("not judged: only 25% of its benchmarks" in suite.output) == ("-k" in words)


def test_another_workload_or_class_is_not_judged(suite):
    file = commit(suite, workload="another", description="12 images")
    assert suite.run(COMPARE, CI="true", SLEEP_S="0.04") == OK
    assert "the baseline is for 12 images but this run measures 10 images" in suite.output
    suite.stored()[0].unlink()
    file.write_text("damaged")
    assert suite.run(COMPARE) == USAGE
    assert not suite.measured()
    assert suite.run(COMPARE, "--profile", "full") == OK
    assert "profile full; store one with `make baseline`" in suite.output


def test_a_failure_stays_a_failure(suite):
    commit(suite)
    assert suite.run(COMPARE, CI="true", THREE="fails") == FAILED
    assert "1 failed, 3 passed" in suite.output


# How limits and rates are computed.


def made_up(runs, count, random, tail=None):
    """Return the logarithms of times: each benchmark has its own spread, each run its own pace."""
    noise = random.standard_t(tail, (runs, count)) if tail else random.standard_normal((runs, count))
    spread = random.uniform(0.01, 0.06, count)
    return random.normal(-8, 2, count) + noise * spread + random.normal(0, 0.2, (runs, 1))


def test_the_pace_of_a_run_is_no_part_of_its_spread():
    figures = made_up(12, 300, np.random.default_rng(0))
    timed = np.ones(300, bool)
    spread = Spread.from_figures(figures, timed)
    slower = Spread.from_figures(figures + np.linspace(0, 1, 12)[:, None], timed)
    np.testing.assert_allclose(slower.off, spread.off, atol=0.01)
    assert 0.02 < spread.deviation.mean() < 0.05
    assert (spread.limit(8.0) >= 1.3).all()


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(record_baseline, "_RESAMPLED", 40)


@pytest.mark.parametrize("tail", [None, 4])
def test_the_estimated_rate_is_no_less_than_the_true_one(tail, monkeypatch):
    monkeypatch.setattr(record_baseline, "_LEAST_LIMIT", 1.0)
    random, timed = np.random.default_rng(1), np.ones(200, bool)
    true, estimated = [], []
    for _ in range(5):
        figures = made_up(212, 200, random, tail)
        recorded, later = figures[:12], figures[12:]
        spread = Spread.from_figures(recorded, timed)
        off = later - spread.usual
        off -= np.median(off, axis=1, keepdims=True)
        true.append((off > np.log(spread.limit(5.0))).any(axis=1).mean())
        estimated.append(false_alarms(recorded, timed, 5.0).most)
    assert np.mean(true) <= np.mean(estimated)


def stored_run(number, factor=1.0):
    random = np.random.default_rng(number)
    names = {f"t{index}": {"track": 1} for index in range(20)} | {"m": {"table": "memory", "ratio": 0.0}}
    names["r"] = {"table": "reference", "ratio": 0.5 * random.uniform(0.97, 1.03)}
    benchmarks = {
        name: {"extra_info": info, "stats": {"min": factor * random.uniform(0.98, 1.02)}}
        for name, info in names.items()
    }
    return StoredRun(Path("r.json"), None, benchmarks, "abc", f"2026-11-2{number}T10:00:00.0", controls(factor))


def test_a_baseline_is_made_of_stored_runs():
    setting = Setting(environment.fingerprint(2), "key", "10 images", "quick")
    derived = derive([stored_run(number, 1 + 0.2 * number) for number in range(6)], setting)
    assert derived.origin["runs"] == 6
    assert derived.origin["from"] == "2026-11-20T10:00:00"
    assert len(derived.times) == 20
    assert derived.ratios.keys() == {"r"}
    assert derived.ratios["r"].figure == pytest.approx(0.5, rel=0.05)
    assert {usual.limit for usual in derived.times.values()} == {1.3}
    assert derived.pace_limit == 1.3
    assert not derived.judge({name: usual.figure for name, usual in derived.times.items()}, controls(1.5)).slower
    with raises(ValueError, mentions=("4 of 4", 5), remedy=False):
        derive([stored_run(number) for number in range(4)], setting)
    with raises(ValueError, mentions=("0 of 6", 5), remedy=False):
        derive([replace(stored_run(number), control=None) for number in range(6)], setting)


def test_runs_beside_other_work_are_left_out_of_a_baseline():
    setting = Setting(environment.fingerprint(2), "key", "10 images", "quick")
    runs = [stored_run(number) for number in range(6)]
    busy = [replace(run, control=controls(waited=0.3)) for run in runs]
    assert derive([*runs, *busy], setting).origin | {"runs": 6, "left out": 6} == derive([*runs, *busy], setting).origin
    with raises(ValueError, mentions=("3 of 9", "30%", "15%"), remedy=False):
        derive([*runs[:3], *busy], setting)


def test_limits_are_as_wide_as_they_must_be_for_few_alarms(monkeypatch):
    monkeypatch.setattr(record_baseline, "_LEAST_LIMIT", 1.0)
    timed, random = np.ones(200, bool), np.random.default_rng(2)
    normal, heavy = (narrowest(made_up(12, 200, random, tail), timed) for tail in (None, 3))
    assert normal.spreads < heavy.spreads
    assert normal.most <= 0.01
    assert heavy.most <= 0.01 or heavy.spreads == 20.0


def test_the_command_makes_of_stored_runs_what_a_fresh_clone_is_judged_by(suite, capsys):
    for _ in range(5):
        assert suite.run(COMPARE) == OK
    words = [
        "--runs",
        "5",
        "--stored",
        "5",
        "--most-waited",
        "1",
        "--storage",
        str(suite.pytester.path / ".benchmarks"),
    ]
    assert record_baseline.main(words) == 0
    assert "limits: " in capsys.readouterr().out
    (file,) = baselines.FOLDER.iterdir()
    shutil.rmtree(suite.pytester.path / ".benchmarks")
    assert suite.run(COMPARE) == OK
    assert f"comparison: compared with the baseline {file.name} (runs 5, left out 0, from " in suite.output


def test_the_command_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        record_baseline.main(["--runs", "5", "--stored", "5", "--storage", str(tmp_path)])
    assert f"no run is stored in {tmp_path}" in capsys.readouterr().err
