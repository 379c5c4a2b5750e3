"""Slow drift: deliberate drift is found in time, and no other change of a history is called slower code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.report.drift import ALL, Drift, Drifts, Measured, find
from benchmarks.report.drift_rates import NOISES, SHAPES, alarmed, main, num_found
from benchmarks.report.ranks import DIVISIONS, NEEDED, WINDOW, Shift, between, scores, shift_of
from tests.benchmarks.test_baselines import CONTROL

BENCHMARKS = 30
STEADY = "a slowdown of 10 % is found within 20 runs in 31 steady benchmarks"
TIMES = [f"t{number}" for number in range(BENCHMARKS)]


def history(runs=80, noise=0.02, seed=0, waited=0.05):
    """Return runs of benchmarks that take one to thirty seconds, five of them ratios."""
    random = np.random.default_rng(seed)
    figures = np.arange(1, BENCHMARKS + 1) * np.exp(noise * random.standard_normal((runs, BENCHMARKS)))
    kinds = ["times"] * 25 + ["ratios"] * 5
    return [
        Measured(f"{number:04}", f"{number:04}beef", dict(zip(TIMES, zip(kinds, row, strict=True), strict=True)),
                 {name: second * (1 + 0.01 * random.random()) for name, second in CONTROL.items()}, waited)
        for number, row in enumerate(figures.tolist())
    ]  # fmt: skip


def slowed(runs, names, factor, first, control=1.0, last=None):
    """Return runs that take longer from run ``first`` until before run ``last``."""
    changed = list(runs)
    for index in range(first, len(runs) if last is None else last):
        figures = {n: (kind, s * factor if n in names else s) for n, (kind, s) in changed[index].figures.items()}
        control_s = {name: second * control for name, second in changed[index].control_s.items()}
        changed[index] = replace(changed[index], figures=figures, control_s=control_s)
    return changed


def test_sums_of_ranks_are_those_of_scipy():
    from scipy import stats  # The import takes more than a second in every process that collects tests.

    values = np.random.default_rng(0).integers(0, 1000, (3, WINDOW)).astype(float)
    values += np.random.default_rng(1).random(values.shape)  # Values must differ, because ties narrow scipy's interval.
    for index, division in enumerate(DIVISIONS):
        before, after = division.split(values)
        assert (before.shape[1], after.shape[1]) == (division.before, division.after)
        expected = stats.mannwhitneyu(after, before, axis=1, method="asymptotic", use_continuity=False)
        spread = math.sqrt(division.before * division.after * (division.before + division.after + 1) / 12)
        middle = division.before * division.after / 2
        np.testing.assert_allclose(scores(values)[:, index], (expected.statistic - middle) / spread)


@pytest.mark.parametrize(("shape", "over"), [("one step", 1), ("bit by bit", 20), ("four steps", 12)])
@pytest.mark.parametrize("noise", ["Gaussian", "Student, 3 degrees", "outlier runs"])
@pytest.mark.share(3, "shape", "noise")
def test_ten_percent_in_all_are_found_within_twenty_runs(shape, over, noise):
    series = 0.03 * NOISES[noise](np.random.default_rng(0), 100, 40 + over + 20)
    assert num_found(series, shape, over) >= 95


def test_a_planted_shape_ends_where_it_says():
    for name, shape in SHAPES.items():
        share = shape(np.linspace(0, 1, 13))
        assert (share[0], share[-1]) == (0, 1), name
        assert (np.diff(share) >= 0).all()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.share(2, "noise")
def test_noise_is_no_drift(noise):
    series = NOISES[noise](np.random.default_rng(3), BENCHMARKS, 200)
    assert abs(np.median(series.std(axis=1)) - 1) < 0.2 or noise == "outlier runs"
    assert alarmed(0.04 * series) == 0


def test_it_is_told_by_how_much_and_since_when():
    runs = slowed(history(), {"t3", "t28"}, 1.1, 50)
    drifts = find(runs)
    assert {drift.benchmark for drift in drifts.slower} == {"t3", "t28"} == {drift.benchmark for drift in drifts.drifts}
    for drift in drifts.slower:
        more, low, high, _ = drift.shift
        assert math.exp(low) < 1.1 < math.exp(high)
        assert low < more < high < 0.2
        assert abs(int(drift.run) - 50) <= 3
        assert drift.commit == f"{drift.run}beef"
    assert (drifts.runs, drifts.left_out, drifts.benchmarks) == (80, 0, BENCHMARKS + 1)
    first, *others = drifts.lines()
    assert first.startswith("Slow drift: 2 benchmarks became slower, of 31 benchmarks and 80 runs")
    assert all(" since about run 00" in line and ", commit 00" in line for line in others)
    assert drifts.as_markdown().startswith("> [!WARNING]\n> Slow drift: 2 benchmarks became slower")
    assert all(line.startswith(">") for line in drifts.as_markdown().splitlines())


@pytest.mark.parametrize(
    ("factor", "first", "last", "why"),
    [
        (0.8, 40, None, "faster"),
        (1.5, 30, 50, "slow for a while"),
        (1.03, 40, None, "less than five percent"),
        (2.0, 75, None, "five runs are too few"),
    ],
)
def test_what_is_no_drift_is_not_called_one(factor, first, last, why):
    drifts = find(slowed(history(), {"t3"}, factor, first, last=last))
    assert drifts.drifts == (), why
    assert drifts.lines() == [f"Slow drift: none, of 31 benchmarks and 80 runs; {STEADY}"]
    assert "WARNING" not in drifts.as_markdown()


def test_another_pace_is_another_machine():
    assert find(slowed(history(), TIMES[:25], 1.2, 40, control=1.2)).drifts == ()


def test_what_all_have_in_common_is_seen_beside_the_controls():
    assert [drift.benchmark for drift in find(slowed(history(), TIMES[:25], 1.2, 40)).slower] == [ALL]


def test_where_a_control_moved_it_was_the_machine():
    drifts = find(slowed(history(), {"t3"}, 1.1, 40, control=0.9))
    assert {drift.benchmark for drift in drifts.drifts if "; control compute changed by -1" in drift.machine} == {
        "t3",
        ALL,
    }
    assert not drifts.slower
    assert "  not judged, the machine changed: t3 +" in "\n".join(drifts.lines())


def test_others_faster_at_the_same_time_is_another_machine():
    runs = slowed(slowed(history(), TIMES[:6], 1.12, 40), TIMES[6:12], 0.9, 41)
    drifts = find(runs)
    assert {drift.benchmark for drift in drifts.drifts} == set(TIMES[:6])
    assert not drifts.slower
    assert drifts.lines()[-1].endswith("; 6 others became faster")
    later = find(slowed(slowed(history(), TIMES[:6], 1.12, 40), TIMES[6:12], 0.9, 55))
    assert {drift.benchmark for drift in later.slower} == set(TIMES[:6])


def test_a_busy_or_partial_run_is_left_out():
    runs = history()
    runs[10] = replace(runs[10], waited=0.4)
    runs[20] = replace(runs[20], figures={"t1": ("times", 1.0)})
    drifts = find(runs)
    assert (drifts.runs, drifts.left_out) == (78, 2)
    assert drifts.lines()[0].endswith(f"of 31 benchmarks and 78 runs; 2 busy or partial runs left out; {STEADY}")


def test_a_benchmark_that_some_runs_lack_has_its_own_series():
    runs = slowed(history(), {"t3"}, 1.15, 50)
    for index in range(0, 80, 4):
        runs[index] = replace(
            runs[index], figures={n: figure for n, figure in runs[index].figures.items() if n != "t3"}
        )
    (slower,) = find(runs).slower
    assert (slower.benchmark, abs(int(slower.run) - 50) <= 4) == ("t3", True)


def test_few_times_tell_no_pace():
    runs = history()
    few = [replace(run, figures=dict(list(run.figures.items())[20:])) for run in runs]
    drifts = find(slowed(few, {"t21", "t28"}, 1.3, 40))
    assert ([drift.benchmark for drift in drifts.slower], drifts.benchmarks) == (["t28"], 5)


@pytest.mark.parametrize("runs", [0, 1, NEEDED - 1])
def test_too_few_runs_are_said(runs):
    drifts = find(history(runs))
    assert drifts == Drifts(runs)
    assert drifts.lines() == [f"Slow drift: not judged, {runs} of the {NEEDED} runs needed are stored"]


def test_least_runs_that_can_show_anything_do():
    values = np.arange(NEEDED) % 2 + 0.001 * np.arange(NEEDED)  # Successive runs are independent.
    values *= 0.01
    values[-12:] += 1
    assert any(division.runs == NEEDED for division in DIVISIONS)
    assert shift_of(values) is not None
    assert shift_of(values[1:]) is None


def test_an_interval_holds_the_shift_as_often_as_it_says():
    random = np.random.default_rng(5)
    num_inside = 0
    for _ in range(200):
        before, after = random.standard_normal(40), 1 + random.standard_normal(20)
        _, low, high = between(before, after, 1.0)
        num_inside += low < 1 < high
    assert 0.9 < num_inside / 200 < 0.99


def test_text_of_a_drift():
    drift = Drift("t::a", Shift(math.log(1.1), math.log(1.08), math.log(1.12), 20), "0041", "")
    assert str(drift) == "t::a +10.0% (+8.0% to +12.0%) since about run 0041"


@pytest.mark.slow
def test_tables_of_rates_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.report.drift_rates.false_alarms", lambda runs: [["Gaussian", "0.0", f"{runs}"]])
    monkeypatch.setattr("benchmarks.report.drift_rates.power", lambda: [["a", "b", *"12345"]])
    assert main(["--runs", "30", "--history", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "| Gaussian | 0.0 | 30 |" in printed.out
    assert "| another machine, each benchmark 5 % off, a control 10 % off | 0 of 1" in printed.out
    assert "no run is stored" in printed.err
