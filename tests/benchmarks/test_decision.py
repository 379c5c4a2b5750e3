"""The decision rule of the gate, on constructed data: verdicts on ratios, and changes that must not affect them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import special

from benchmarks.gate.decision import (
    ALARM,
    EXCLUDED,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    USUAL_NOISE,
    USUAL_ROUNDS,
    Change,
    Verdict,
    quantile,
    ratio_of_round,
)
from tests.support.errors import raises

THRESHOLD = 0.05
NEAR = 1e-9  # Distance from a limit within which rounding may decide.

ratios = st.lists(st.floats(0.5, 2.0), min_size=LEAST_ROUNDS, max_size=MOST_ROUNDS)
turns = st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=1, max_size=24)


def far_from_limits(change):
    limits = (1.0, 1 + THRESHOLD, 1 / (1 + THRESHOLD))
    ends = (change.ratio, change.low, change.high, change.surely_low, change.surely_high)
    return all(abs(end - limit) > NEAR for end in ends for limit in limits)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.02, 0.98], Verdict.OK),
        ([1.10, 1.15, 1.12, 1.13, 1.11], Verdict.REGRESSION),
        ([1.058, 1.059, 1.047, 1.119, 1.051], Verdict.NOT_RESOLVED),  # an unchanged tree, slower by chance
        ([1.09, 1.11, 1.10, 1.12, 1.08] * 2, Verdict.REGRESSION),  # ten rounds may show more than five
        ([1.3, 1.4, 1.0, 1.01, 0.99], Verdict.NOT_RESOLVED),  # Two disturbed rounds of five.
        ([1.3, 0.7, *[1.0, 1.01, 0.99] * 2], Verdict.NOT_RESOLVED),
        ([1.04, 1.03, 1.02, 1.01, 1.049], Verdict.NOT_RESOLVED),
        ([1.01, 1.02, 1.015, 1.02, 1.01], Verdict.OK),
        ([0.90, 0.87, 0.89, 0.88, 0.88], Verdict.IMPROVED),
        ([0.99, 0.98, 0.97, 0.96, 0.90], Verdict.NOT_RESOLVED),
    ],
)
def test_verdicts(values, verdict):
    change = Change.from_ratios(values)
    assert change.verdict(THRESHOLD) is verdict
    assert verdict is not Verdict.OK or not change.may_be_slower(THRESHOLD)


def test_what_seems_slower_is_no_regression_yet():
    change = Change.from_ratios([1.07, 1.12, 1.05, 1.13, 1.08])
    assert change.seems_slower(THRESHOLD)
    assert change.may_be_slower(THRESHOLD)
    assert change.verdict(THRESHOLD) is Verdict.NOT_RESOLVED


@given(ratios)
def test_the_interval_is_that_of_a_moderated_t_statistic(values):
    """Compare with scipy: usual noise adds `USUAL_ROUNDS` observations of the variance, not of the mean."""
    logs, change = np.log(values), Change.from_ratios(values)
    free = len(logs) - 1 + USUAL_ROUNDS
    variance = (logs.var(ddof=1) * (len(logs) - 1) + USUAL_NOISE**2 * USUAL_ROUNDS) / free
    for tail, low, high in (
        (EXCLUDED, change.low, change.high),
        (ALARM, change.surely_low, change.surely_high),
    ):
        off = special.stdtrit(free, 1 - tail) * math.sqrt(variance / len(logs))
        ends = logs.mean() - off, logs.mean() + off
        assert np.log([low, high]) == pytest.approx(ends, rel=1e-6, abs=1e-9)
    assert change.surely_low < change.low < change.ratio < change.high < change.surely_high
    assert change.rounds == len(values)


@given(ratios)
def test_swapping_the_sides_mirrors_the_verdict(values):
    forth, back = Change.from_ratios(values), Change.from_ratios([1 / value for value in values])
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert (back.low, back.high) == pytest.approx((1 / forth.high, 1 / forth.low))
    assume(far_from_limits(forth) and far_from_limits(back))
    mirrored = {Verdict.REGRESSION: Verdict.IMPROVED, Verdict.IMPROVED: Verdict.REGRESSION}
    verdict = forth.verdict(THRESHOLD)
    assert back.verdict(THRESHOLD) is mirrored.get(verdict, verdict)


@given(ratios, st.randoms(use_true_random=False))
def test_the_order_of_rounds_has_no_say(values, draw):
    before = Change.from_ratios(values)
    draw.shuffle(values)
    after = Change.from_ratios(values)
    assert (after.ratio, after.low, after.surely_low) == pytest.approx((before.ratio, before.low, before.surely_low))


@given(ratios, st.floats(1.0, 3.0))
def test_more_noise_never_shows_a_change(values, factor):
    before = Change.from_ratios(values)
    assume(before.verdict(THRESHOLD) in (Verdict.NOT_RESOLVED, Verdict.OK))
    noisy = Change.from_ratios([before.ratio * (value / before.ratio) ** factor for value in values])
    assume(far_from_limits(before) and far_from_limits(noisy))
    assert noisy.verdict(THRESHOLD) in (Verdict.NOT_RESOLVED, Verdict.OK)


@given(ratios, st.floats(1.0, 3.0))
def test_slower_is_never_better(values, factor):
    order = [Verdict.IMPROVED, Verdict.OK, Verdict.REGRESSION]
    before, after = (Change.from_ratios([v * f for v in values]).verdict(THRESHOLD) for f in (1.0, factor))
    if Verdict.NOT_RESOLVED not in (before, after):
        assert order.index(after) >= order.index(before)


@given(turns, st.lists(st.floats(0.2, 5.0), min_size=24, max_size=24))
def test_the_moods_of_turns_have_no_say_in_a_round(pairs, moods):
    base, head = zip(*pairs, strict=True)
    ratio = ratio_of_round(base, head)
    moody = ([time * mood for time, mood in zip(side, moods, strict=False)] for side in (base, head))
    assert ratio_of_round(*moody) == pytest.approx(ratio)
    assert ratio_of_round(head, base) == pytest.approx(1 / ratio)


def test_less_than_half_of_the_turns_may_be_disturbed():
    assert ratio_of_round([1.0] * 24, [1.1] * 13 + [9.0] * 11) == pytest.approx(1.1)
    assert ratio_of_round([1.0] * 13 + [9.0] * 11, [1.1] * 24) == pytest.approx(1.1)


def test_sides_of_unequal_turns_are_compared_as_a_whole():
    assert ratio_of_round([1.0, 1.0, 7.0], [2.0]) == 2.0


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gate_rounds.json").read_text())


def ratios_of(record):
    return [head / base for base, head in zip(record["base_us"], record["head_us"], strict=True)]


@pytest.mark.parametrize(
    "record", RECORDED, ids=[f"{one['kind']}-{one['benchmark']}-{one['level']:.0%}" for one in RECORDED]
)
def test_recorded_rounds(record):
    """Rounds of real gates: an unchanged tree, with and without a busy program, and deliberate slowdowns."""
    change = Change.from_ratios(ratios_of(record))
    verdict = change.verdict(THRESHOLD)
    if record["level"] >= 0.1:
        assert verdict is Verdict.REGRESSION or change.seems_slower(THRESHOLD)
    elif record["level"] == 0:
        assert verdict in (Verdict.OK, Verdict.NOT_RESOLVED)
    assert verdict is not Verdict.IMPROVED


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
def test_a_look_after_each_round_alarms_falsely_in_less_than_three_of_a_thousand_gates(noise):
    """Gates have 70 benchmarks, all with this noise and heavy tails, and 27 looks at each, as if none were resolved."""
    draw = np.random.default_rng(0)
    logs = noise * draw.standard_t(8, (70 * 400, MOST_ROUNDS)) / math.sqrt(8 / 6)
    count = np.arange(1, MOST_ROUNDS + 1)
    middle = logs.cumsum(1) / count
    squares = (logs**2).cumsum(1) - count * middle**2 + USUAL_ROUNDS * USUAL_NOISE**2
    free = count - 1 + USUAL_ROUNDS
    low = middle - np.sqrt(squares / free / count) * [quantile(int(degrees), ALARM) for degrees in free]
    looks = slice(LEAST_ROUNDS - 1, None)
    alarms = ((low > 0) & (middle > math.log1p(THRESHOLD)))[:, looks].any(1)
    for index in draw.integers(0, len(logs), 20):  # The calculation above equals that of the gate.
        rounds = int(draw.integers(LEAST_ROUNDS, MOST_ROUNDS + 1))
        change = Change.from_ratios(np.exp(logs[index, :rounds]).tolist())
        assert math.log(change.surely_low) == pytest.approx(low[index, rounds - 1])
    assert alarms.reshape(400, 70).any(1).sum() <= 1


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_ratios_that_are_none(bad):
    with raises(ValueError, mentions="ratios", remedy=False):
        Change.from_ratios([1.0, 1.0, 1.0, 1.0, bad])


def test_too_few_rounds_have_no_interval():
    with raises(ValueError, mentions=("4 rounds", 5), remedy=False):
        Change.from_ratios([1.0] * 4)
