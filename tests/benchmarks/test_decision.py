"""The gate's rule, on constructed data: what is said of ratios, and what never changes it."""

from __future__ import annotations

import json
import math
import random
from itertools import product
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.gate.decision import COVERAGE, LEAST_ROUNDS, Change, Verdict, ends_left_out, median

THRESHOLD = 0.05
NEAR = 1e-9  # how near to a limit rounding may decide

ratios = st.lists(st.floats(0.5, 2.0), min_size=LEAST_ROUNDS, max_size=11)
# Times of one round differ by an even power of two at most, so that scaling them loses no digit.
times = st.floats(1e-6, 1.0)


def change_of(values):
    return Change.of([1.0] * len(values), values)


def far_from_limits(values):
    limits = (1.0, 1 + THRESHOLD, 1 / (1 + THRESHOLD), *(1 / v for v in (1 + THRESHOLD,)))
    return all(abs(value - limit) > NEAR for value in [*values, change_of(values).ratio] for limit in limits)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.02, 0.98], Verdict.OK),
        ([1.10, 1.11, 1.09, 1.12, 1.08], Verdict.REGRESSION),
        ([1.06, 1.051, 1.07, 1.001, 1.2], Verdict.REGRESSION),
        ([1.06, 1.051, 1.07, 0.999, 1.2], Verdict.NOT_RESOLVED),  # the interval reaches below 0
        ([1.04, 1.03, 1.02, 1.01, 1.049], Verdict.OK),
        ([1.04, 1.03, 1.02, 1.01, 1.051], Verdict.OK),  # its upper end is above the threshold, that of the least is not
        ([1.049, 0.94, 1.0, 0.97, 1.051], Verdict.NOT_RESOLVED),  # both are beyond it, to one side each
        ([0.90, 0.91, 0.89, 0.92, 0.88], Verdict.IMPROVED),
        ([0.99, 0.98, 0.97, 0.96, 0.90], Verdict.NOT_RESOLVED),
        ([1.3, 1.4] + [1.0] * 7 + [0.7, 0.8], Verdict.OK),  # of 11 rounds two at each end lie outside the interval
        ([1.3, 1.4, 1.5] + [1.0] * 6 + [0.7, 0.8], Verdict.NOT_RESOLVED),
    ],
)
def test_verdicts(values, verdict):
    assert change_of(values).verdict(THRESHOLD) is verdict


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ([1.0, 1.2, 1.3, 1.01, 1.25], [1.3, 1.0, 1.02, 1.25, 1.3], Verdict.OK),  # each was disturbed in other rounds
        ([1.0, 1.2, 1.3, 1.01, 1.25], [1.06, 1.5, 1.36, 1.07, 1.32], Verdict.REGRESSION),
        ([1.0, 1.2, 1.3, 1.03, 1.25], [1.02, 1.5, 1.4, 1.04, 1.45], Verdict.REGRESSION),  # most rounds say so
        ([1.0, 1.2, 1.3, 1.02, 1.25], [1.01, 1.5, 1.2, 1.1, 1.45], Verdict.NOT_RESOLVED),  # by the best head was slower
        ([1.0, 1.2, 1.3, 1.02, 1.25], [1.01, 1.5, 1.2, 1.01, 1.45], Verdict.OK),
        ([1.0, 1.2, 1.3, 1.02, 1.25], [1.0, 1.5, 1.2, 1.1, 1.45], Verdict.NOT_RESOLVED),
    ],
)
def test_the_best_of_all_rounds_may_exclude_a_slowdown_and_never_shows_one(base, head, verdict):
    change = Change.of(base, head)
    assert change.verdict(THRESHOLD) is verdict
    assert change.may_be_slower(THRESHOLD) is (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ([1.0, 1.15, 1.01, 1.2, 1.3], [1.3, 1.01, 1.4, 1.0, 1.2], Verdict.OK),  # rounds from -26 to +30 %
        ([1.0, 1.15, 1.01, 1.2, 1.3], [1.06, 1.3, 1.07, 1.1, 1.2], Verdict.REGRESSION),
        ([1.06, 1.3, 1.07, 1.1, 1.2], [1.0, 1.15, 1.01, 1.2, 1.3], Verdict.IMPROVED),
        ([1.0, 1.07, 1.2, 1.2, 1.3], [1.06, 1.06, 1.1, 1.1, 1.2], Verdict.NOT_RESOLVED),  # base was fast once
        ([1.0, 1.0, 1.2, 1.2, 1.3], [1.0, 1.06, 1.1, 1.1, 1.2], Verdict.NOT_RESOLVED),
    ],
)
def test_verdicts_by_the_least_of_all_rounds(base, head, verdict):
    assert Change.of(base, head, least=True).verdict(THRESHOLD) is verdict


@given(st.lists(st.tuples(times, times), min_size=LEAST_ROUNDS, max_size=11))
def test_the_least_of_all_rounds_has_an_interval_and_a_mirror_image(pairs):
    base, head = zip(*pairs, strict=True)
    there, back = Change.of(base, head, least=True), Change.of(head, base, least=True)
    assert there.low <= there.ratio <= there.high
    assert (back.low, back.ratio, back.high) == pytest.approx((1 / there.high, 1 / there.ratio, 1 / there.low))


@given(ratios)
def test_a_verdict_other_than_ok_is_suspicious_and_ok_lies_within_the_threshold(values):
    change = change_of(values)
    assert change.low <= change.ratio <= change.high
    if change.verdict(THRESHOLD) is Verdict.OK:
        assert not change.may_be_slower(THRESHOLD)
        assert 1 / (1 + THRESHOLD) <= change.ratio <= 1 + THRESHOLD
    else:
        assert change.is_suspicious(THRESHOLD)


@given(st.lists(st.tuples(times, times), min_size=LEAST_ROUNDS, max_size=11), st.integers(-8, 8))
def test_scale_invariance(pairs, power):
    base, head = zip(*pairs, strict=True)
    scaled = Change.of([time * 2.0**power for time in base], [time * 2.0**power for time in head])
    assert scaled == Change.of(base, head)


@given(st.lists(st.tuples(times, times), min_size=LEAST_ROUNDS, max_size=11), st.lists(times, min_size=11, max_size=11))
def test_the_mood_of_a_round_has_no_say(pairs, moods):
    base, head = zip(*pairs, strict=True)
    assume(far_from_limits([h / b for b, h in pairs]))
    before = Change.of(base, head)
    moody = Change.of(
        [t * m for t, m in zip(base, moods, strict=False)], [t * m for t, m in zip(head, moods, strict=False)]
    )
    shown = (Verdict.REGRESSION, Verdict.IMPROVED)
    assert (moody.ratio, moody.low, moody.high) == pytest.approx((before.ratio, before.low, before.high))
    if before.verdict(THRESHOLD) in shown or moody.verdict(THRESHOLD) in shown:
        assert moody.verdict(THRESHOLD) is before.verdict(THRESHOLD)


@given(st.lists(st.tuples(times, times), min_size=LEAST_ROUNDS, max_size=11))
def test_swapping_the_sides_mirrors_the_verdict(pairs):
    base, head = zip(*pairs, strict=True)
    there, back = Change.of(base, head), Change.of(head, base)
    assert back.ratio == pytest.approx(1 / there.ratio)
    assume(far_from_limits([h / b for b, h in pairs]) and far_from_limits([b / h for b, h in pairs]))
    mirrored = {Verdict.REGRESSION: Verdict.IMPROVED, Verdict.IMPROVED: Verdict.REGRESSION}
    verdict = there.verdict(THRESHOLD)
    assert back.verdict(THRESHOLD) is mirrored.get(verdict, verdict)


@given(ratios, st.lists(st.floats(0, 1), min_size=11, max_size=11))
def test_noise_never_shows_a_change(values, noise):
    before = change_of(values)
    assume(before.verdict(THRESHOLD) in (Verdict.NOT_RESOLVED, Verdict.OK))
    assume(far_from_limits(values))
    # Noise drives what is off the median further off, by any factor for each round.
    noisy = [v * math.exp(math.copysign(n, v - before.ratio)) for v, n in zip(values, noise, strict=False)]
    assert change_of(noisy).verdict(THRESHOLD) in (Verdict.NOT_RESOLVED, Verdict.OK)


@given(ratios, st.floats(1.0, 3.0))
def test_slower_is_never_better(values, factor):
    order = [Verdict.IMPROVED, Verdict.OK, Verdict.REGRESSION]
    before, after = (change_of([v * f for v in values]).verdict(THRESHOLD) for f in (1.0, factor))
    if Verdict.NOT_RESOLVED not in (before, after):
        assert order.index(after) >= order.index(before)


@pytest.mark.parametrize("count", range(LEAST_ROUNDS, 13))
def test_the_interval_covers_the_median_as_often_as_it_says(count):
    """Count over all ways in which rounds can fall below or above the true median, each equally likely."""
    left_out = ends_left_out(count)

    def share(left):
        inside = sum(left < sum(signs) < count - left for signs in product((0, 1), repeat=count))
        return inside / 2**count

    assert share(left_out) >= COVERAGE > share(left_out + 1)


def test_the_median_of_two_is_their_geometric_mean():
    assert median([0.5, 2.0]) == 1.0
    assert median([1.0, 2.0, 8.0, 9.0]) == 4.0
    assert median([1.0, 2.0, 9.0]) == 2.0


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gate_rounds.json").read_text())


@pytest.mark.parametrize(
    "record", RECORDED, ids=[f"{one['kind']}-{one['benchmark']}-{one['level']:.0%}" for one in RECORDED]
)
def test_recorded_rounds(record):
    """Rounds of real gates: of an unchanged tree, also beside a busy program, and of slowdowns that were planted."""
    verdict = Change.of(record["base_us"], record["head_us"]).verdict(THRESHOLD)
    allowed = {Verdict.REGRESSION} if record["level"] >= 0.1 else {Verdict.NOT_RESOLVED, Verdict.OK}
    assert verdict in (allowed | {Verdict.REGRESSION} if record["level"] == 0.05 else allowed)
    mirrored = Change.of(record["head_us"], record["base_us"]).verdict(THRESHOLD)
    assert mirrored is {Verdict.REGRESSION: Verdict.IMPROVED}.get(verdict, verdict)


def test_two_thousand_gates_of_recorded_rounds_without_a_change():
    """Rounds drawn from those of unchanged runs, head and base taking each other's part at random."""
    draw, alarms = random.Random(0), 0
    still = [list(zip(one["base_us"], one["head_us"], strict=True)) for one in RECORDED if one["kind"] == "unchanged"]
    for _ in range(2000):
        pairs = [pair if draw.random() < 0.5 else pair[::-1] for pair in draw.choices(draw.choice(still), k=11)]
        alarms += Change.of(*zip(*pairs, strict=True)).verdict(THRESHOLD) is Verdict.REGRESSION
    assert alarms <= 20


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none(bad):
    with pytest.raises(ValueError, match="positive and finite"):
        Change.of([1.0] * 5, [1.0, 1.0, 1.0, 1.0, bad])


def test_too_few_rounds_have_no_interval():
    with pytest.raises(ValueError, match="5 or more"):
        Change.of([1.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match="4 of head"):
        Change.of([1.0] * 5, [1.0] * 4)
    with pytest.raises(ValueError, match="4 rounds"):
        ends_left_out(4)
