"""Counts of the gate's self-test, with exact intervals, and estimates from gates drawn from recorded pairs."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from benchmarks.gate import resample, selftest
from benchmarks.gate.decision import LEAST_ROUNDS, MOST_ROUNDS, Verdict
from benchmarks.gate.report import Comparison, as_json
from benchmarks.gate.selftest_report import as_markdown as rates
from benchmarks.gate.selftest_report import interval
from tests.benchmarks.test_gate import comparison


@pytest.mark.parametrize("hits", [0, 1, 7, 39, 40])
def test_an_interval_holds_what_is_not_improbable(hits):
    """At the ends, the hits and more, or the hits and fewer, have a probability of 2.5 %."""
    low, high = interval(hits, 40)

    def probability(share, those):
        return sum(math.comb(40, k) * share**k * (1 - share) ** (40 - k) for k in those)

    assert probability(low, range(hits, 41)) == pytest.approx(0.025 if hits else 1)
    assert probability(high, range(hits + 1)) == pytest.approx(0.025 if hits < 40 else 1)


def recorded(**ratios):
    """Return a recording with the ratio of each round, per benchmark and for the control."""
    controls = {name: round_ratios for name, round_ratios in ratios.items() if name == "control"} or {
        "control": [1.0] * 25
    }
    rows = {name: round_ratios for name, round_ratios in ratios.items() if name != "control"}
    record = as_json(Comparison("a", "a", 0.05, (), (), {}, {}, {}, seconds=1.0))
    rows_by_kind = {
        kind: [
            as_json(comparison(rounds))["benchmarks"][0] | {"name": name, "level": 0.0} for name, rounds in some.items()
        ]
        for kind, some in (("controls", controls), ("benchmarks", rows))
    }
    return {"kind": "recorded", "finished": "2026-01-01T00:00:00+00:00", **record, **rows_by_kind}


def test_gates_drawn_without_noise_are_right():
    runs = [recorded(one=[1.0] * 25, other=[1.01] * 25)]
    assert resample.estimate(runs, 0.0, 50).exits == {0: 50}
    slowed = resample.estimate(runs, 0.1, 50)
    assert slowed.exits == {1: 50}
    assert slowed.share("one", Verdict.REGRESSION) == slowed.share("other", Verdict.REGRESSION) == 1.0


def test_gates_drawn_of_noise_are_undecided_and_of_one_recording_at_a_time():
    apart = [0.8, 1.25] * 12 + [1.0]
    noisy = resample.estimate([recorded(one=apart, still=[1.0] * 25)], 0.0, 200)
    assert noisy.exits[3] > 20
    assert noisy.share("still", Verdict.OK) == 1.0
    # Mixed rounds of two recordings would be as noisy, with 0.8 and 1.25 in turn.
    two = resample.estimate([recorded(one=[0.8] * 25), recorded(one=[1.25] * 25)], 0.0, 200)
    assert set(two.verdicts["one"]) == {Verdict.IMPROVED, Verdict.REGRESSION}


def test_a_control_that_moves_is_no_verdict_in_a_drawn_gate():
    assert resample.estimate([recorded(one=[1.2] * 25, control=[1.1] * 25)], 0.0, 20).exits == {3: 20}


def test_a_drawn_gate_takes_as_many_rounds_as_the_rule():
    """Benchmarks that lean to faster stop after the minimum of rounds; others are measured until decided."""
    leaning = recorded(one=[0.9] * 25, wide=[0.9, 1.1] * 12 + [1.0])
    taken = set()
    for seed in range(20):
        gate = resample.drawn_gate(leaning, random.Random(seed), 0.0)
        one, wide = gate.rows
        assert len(one.worked) == LEAST_ROUNDS
        taken.add(rounds := len(wide.worked))
        assert rounds == MOST_ROUNDS or not wide.is_open(0.05)
        for fewer in range(LEAST_ROUNDS, rounds):
            assert replace(wide, worked=wide.worked[:fewer], passed=wide.passed[:fewer]).is_open(0.05)
        assert len(gate.controls[0].worked) == rounds
    assert len(taken) > 3


@pytest.fixture
def few_gates(monkeypatch):
    """Draw few gates for a summary, for recordings without noise and for tests that check no rate."""
    monkeypatch.setattr(resample, "GATES", 10)


@pytest.mark.usefixtures("few_gates")
def test_drawn_gates_are_told_apart_from_whole_ones():
    environment = {"machine": {"cpu": "a CPU", "cores_usable": 2, "python": "CPython 3"}, "versions": {"torch": "2"}}
    report = rates([recorded(**{"t::test_one": [1.0] * 25})], environment)
    assert "25 recorded pairs of processes." in report
    assert "whole gates" not in report
    assert "| no change: 10 gates | 100.0 % | 0.0 % | 0.0 % |" in report
    assert "| one | 0.0 % | 0.0 % | 0.0 % | 100.0 % | 100.0 % |" in report


@pytest.mark.usefixtures("few_gates")
def test_runs_are_not_added_to_those_of_another_machine_and_none_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "run_once", lambda *_: comparison([1.0] * 15, control=[1.0] * 15))
    file = tmp_path / "selftest.json"
    words = ["--pairs", "15", "--add", "--json", str(file), "--summary", str(tmp_path / "s.md")]
    for cpu, runs in (("one", 1), ("other", 1), ("one", 2), ("one", 3), ("other", 2)):
        monkeypatch.setattr(
            selftest.environment, "machine", lambda cpu=cpu: {"cpu": cpu, "cores_usable": 2, "python": ""}
        )
        assert selftest.main(words) == 0
        stored = json.loads(file.read_text())
        assert (stored["machine"]["cpu"], len(stored["runs"])) == (cpu, runs)
    assert "is of another machine" in capsys.readouterr().out


@pytest.mark.usefixtures("few_gates")
def test_as_many_pairs_are_recorded_as_were_asked_for_and_added_to_those_there(tmp_path, monkeypatch):
    kinds = []

    def run_once(repository, kind, levels, calls_s):
        kinds.append((kind, levels))
        return comparison([1.0] * 25, control=[1.0] * 25)

    monkeypatch.setattr(selftest, "run_once", run_once)
    file = tmp_path / "pairs.json"
    words = ["--pairs", "30", "--add", "--json", str(file), "--summary", str(tmp_path / "pairs.md")]
    for runs in (2, 4):
        assert selftest.main(words) == 0
        assert kinds == [("recorded", {})] * runs
        assert len(json.loads(file.read_text())["runs"]) == runs
    assert "100 recorded pairs of processes; load of the machine" in (tmp_path / "pairs.md").read_text()
