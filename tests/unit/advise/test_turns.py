"""Turns: their order, valid rounds, and gain, noise, ties and confidence, which all comparisons share."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds.advise.turns import (
    LEAST_TIE,
    MOST_TIE,
    InterleavedRounds,
    doubt_note,
    gains,
    mostly_agree,
    noise,
    tie_ratio,
)


@given(st.lists(st.lists(st.floats(0.1, 1000), min_size=2, max_size=2), min_size=1, max_size=7))
def test_a_gain_is_that_of_the_rates_beside_it(pairs):
    taken = {
        name: dict(enumerate(rates)) for name, rates in zip(("now", "other"), zip(*pairs, strict=True), strict=True)
    }
    now, other = taken["now"], taken["other"]
    actual = gains(other, now)
    assert actual == [rate / at_hand for at_hand, rate in pairs]
    ratio = median(other.values()) / median(now.values())
    assert min(actual) / (1 + 1e-9) <= ratio <= max(actual) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=9))
def test_noise_is_how_much_longer_half_of_the_rounds_took(times_s):
    limit_s = min(times_s) * (1 + noise(times_s))
    assert 2 * sum(time_s > limit_s * (1 + 1e-9) for time_s in times_s) <= len(times_s)
    assert 2 * sum(time_s >= limit_s * (1 - 1e-9) for time_s in times_s) >= len(times_s)


def test_ties_and_doubts_are_the_same_for_all_that_takes_turns():
    assert (tie_ratio(2, 0.0, 0.0), tie_ratio(3, 0.0, 0.0), tie_ratio(3, 9.0, 9.0)) == (MOST_TIE, LEAST_TIE, MOST_TIE)
    assert tie_ratio(5, 0.04, 0.06) == pytest.approx(1.05)
    assert mostly_agree([True] * 7 + [False])
    assert not mostly_agree([True] * 6 + [False])
    assert (doubt_note(3, 0.5), doubt_note(9, 0.0)) == ("", "")
    assert "only one round" in doubt_note(1, 0.0)
    assert "60% longer" in doubt_note(5, 0.6)


def test_turns_are_taken_forth_and_back_and_half_a_round_counts_for_nothing():
    left, taken = 7, []

    def take(key):
        nonlocal left
        left -= 1
        taken.append(key)
        return None if key == "c" else 10 * turns.rounds + len(taken)

    turns = InterleavedRounds(lambda: left <= 0)
    assert [turns.round("abc", take) for _ in range(3)] == [[], [], ["b", "c"]]
    assert "".join(taken) == "abccbaa"
    assert turns.figures == {"a": {0: 1, 1: 16}, "b": {0: 2, 1: 15}}
    assert turns.rounds == 2
    assert gains(turns.figures["a"], {1: 8, 2: 5}) == [2.0]  # From the one round that both completed.
    first = InterleavedRounds(lambda: True)
    assert first.round("abc", lambda key: 1.0) == ["b", "c"]
    assert first.figures == {"a": {0: 1.0}}  # The first figure is measured even if the time is over.


def test_turns_run_as_often_as_asked_or_until_the_time_is_over():
    taken = []
    for is_over, rounds in ((lambda: False, 3), (lambda: len(taken) >= 3, 1)):
        taken.clear()
        turns = InterleavedRounds(is_over)
        turns.run("ab", lambda name: taken.append(name) or 2.0, 3)
        assert turns.rounds == rounds
        assert turns.figures == {name: dict.fromkeys(range(rounds), 2.0) for name in "ab"}
