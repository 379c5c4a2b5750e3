"""Strict turns between two processes; a process never waits for one that has ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gate.baton import TURNS, Baton, in_turns, least_of_turns
from benchmarks.gate.processes import Command, run_in_turns

ROOT = Path(__file__).resolve().parents[2]
TAKE_TURNS = """
import sys, time
from benchmarks.gate.baton import baton
name, turns = sys.argv[1], int(sys.argv[2])
time.sleep(float(sys.argv[3]))
baton()
for number in range(turns):
    with open(sys.argv[4], "a") as file:
        file.write(f"{name}{number} ")
    baton().hand_over()
"""


def taken(tmp_path, first, second):
    """Let two processes take turns, and return the owner of each turn and the exit statuses."""
    turns_file = tmp_path / "told"
    commands = [
        Command(
            [sys.executable, "-c", TAKE_TURNS, name, *map(str, words), str(turns_file)], ROOT, tmp_path / f"{name}.log"
        )
        for name, words in (("a", first), ("b", second))
    ]
    statuses = run_in_turns(*commands)
    return turns_file.read_text().split(), statuses


@pytest.mark.parametrize("delays", [(0.0, 0.3), (0.3, 0.0)])
def test_turns_alternate_whoever_is_there_first(tmp_path, delays):
    order, statuses = taken(tmp_path, (4, delays[0]), (4, delays[1]))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert statuses == (0, 0)


@pytest.mark.parametrize(
    ("turns", "order"),
    [((1, 4), ["a0", "b0", "b1", "b2", "b3"]), ((4, 1), ["a0", "b0", "a1", "a2", "a3"]), ((0, 2), ["b0", "b1"])],
)
def test_who_is_left_goes_on_alone(tmp_path, turns, order):
    assert taken(tmp_path, (turns[0], 0), (turns[1], 0)) == (order, (0, 0))


def test_a_side_that_dies_holds_nobody_up(tmp_path):
    order, statuses = taken(tmp_path, ("3", 0), ("none", 0))
    assert order == ["a0", "a1", "a2"]
    assert statuses[0] == 0
    assert statuses[1] != 0


AGREE = """
import sys
from benchmarks.gate.baton import baton
name, *wanted = sys.argv[1:4]
for number, rounds in enumerate(wanted):
    with open(sys.argv[5], "a") as file:
        file.write(f"{name}{number}:{baton().agreed(sys.argv[4].format(number), int(rounds))} ")
    for _ in range(3):
        baton().hand_over()
"""


@pytest.mark.parametrize(("second", "expected"), [("work{}", "10 10 20 20"), ("other{}", "10 1 20 2")])
def test_both_make_as_many_rounds_of_the_same_as_the_first_wants(tmp_path, second, expected):
    file = tmp_path / "told"
    commands = [
        Command([sys.executable, "-c", AGREE, *words, str(file)], ROOT, tmp_path / f"{words[0]}.log")
        for words in (("a", "10", "20", "work{}"), ("b", "1", "2", second))
    ]
    assert run_in_turns(*commands) == (0, 0)
    numbers = expected.split()
    assert file.read_text().split() == [f"a0:{numbers[0]}", f"b0:{numbers[1]}", f"a1:{numbers[2]}", f"b1:{numbers[3]}"]


def test_outside_of_the_gate_there_is_no_other():
    assert Baton("").agreed("work", 7) == 7
    Baton("").hand_over()


@pytest.mark.parametrize("rounds", [1, 7, 8, 9, 20, 300, 1000])
def test_hand_overs_lie_between_equal_parts(monkeypatch, rounds):
    done, handed = [], []

    class Counted:
        def hand_over(self):
            handed.append(len(done))

    monkeypatch.setattr("benchmarks.gate.baton.baton", Counted)
    set_up = in_turns(rounds, lambda: ((1,), {}))
    for number in range(rounds):
        assert set_up() == ((1,), {})
        done.append(number)
    parts = [after - before for before, after in zip([0, *handed], [*handed, rounds], strict=True)]
    assert len(parts) == min(rounds, TURNS)
    assert max(parts) - min(parts) <= 1
    assert 0 not in handed
    # The reported minimum of a turn covers the rounds between two hand-overs.
    values = [(7 * number) % 11 for number in range(rounds)]
    least = [min(values[first:after]) for first, after in zip([0, *handed], [*handed, rounds], strict=True)]
    assert least_of_turns(values) == least
