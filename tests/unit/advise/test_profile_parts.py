"""Parts of the profiler that need no clock: counts, conclusions and messages."""

from __future__ import annotations

import threading
from math import inf
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds.advise.profile import recorder as recorders
from omearrow_ds.advise.profile import result
from omearrow_ds.advise.profile.loop import SampleOrder
from omearrow_ds.advise.profile.recorder import (
    STAGE_NOTES,
    Recorder,
    Run,
    break_down,
    time_clock,
    without_clocks,
)
from omearrow_ds.advise.profile.result import Trial, break_even_epochs, judge

STAGES = [*STAGE_NOTES, "wait"]
NO_COST = (0.0, 0.0)


@pytest.fixture
def ticking(monkeypatch):
    """Advance the clock by 1 s per reading."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(recorders, "perf_counter", lambda: float(next(ticks)))


def counts(**seconds):
    """Return seconds, calls and nested calls by stage."""
    return np.array([(seconds.get(stage.partition(" ")[0], 0.0), 0, 0) for stage in STAGES])


def counted(recorder):
    """Return seconds, calls and nested calls of a recorder as a dict."""
    return dict(zip(STAGES, np.array(recorder.counts).reshape(-1, 3).tolist(), strict=True))


def breakdown_of(wall_s, program, *workers, cost=NO_COST):
    by_worker = np.array(workers).reshape(-1, len(STAGES), 3)
    return break_down(Run(100, 10, wall_s), cost, program, by_worker, range(len(workers)))


def trial(name, gain, least_gain=None):
    least = gain if least_gain is None else least_gain
    return Trial(name, f"--{name}", "", f"Use {name}", 1.0, 10.0, gain, least, gain, 1.0, 1)


def verdict_of(breakdown, ratios, trials=(), *, tried=True, slow_rounds=0):
    """Judge rounds in which steps on one batch are faster by ``ratios``; some rounds take 10 times as long."""
    rates = {number: 10.0 if number < slow_rounds else 100.0 for number in range(max(1, len(ratios)))}
    cached = {number: rates[number] * ratio for number, ratio in enumerate(ratios)}
    return judge(breakdown, rates, cached or None, trials, tried=tried)


# Counting


def test_recorder_counts_a_moment_for_the_innermost_stage(ticking):
    recorder = Recorder("other")
    inner = recorder.timed(lambda: None, "decode")
    outer = recorder.timed(lambda: [inner(), inner()], "read")
    recorder.start()
    outer()
    recorder.stop()
    stages = counted(recorder)
    # Clock readings: start, into read, in and out of decode twice, out of read, stop.
    assert (stages["other"], stages["read"], stages["decode"]) == ([2, 0, 1], [3, 1, 2], [2, 2, 0])


def test_recorder_counts_failed_calls_but_no_other_threads(ticking):
    recorder = Recorder("other")

    def fail():
        raise KeyError("planted")

    timed = recorder.timed(fail, "read")
    recorder.start()
    with pytest.raises(KeyError):
        timed()
    recorder.stop()
    assert counted(recorder)["read"][0] == 1
    recorder.start()
    other = threading.Thread(target=recorder.timed(lambda: None, "read"))
    other.start()
    other.join()
    recorder.stop()
    assert counted(recorder)["read"][1] == 1
    assert recorder.timed(len, "read")((1, 2)) == 2  # A stopped recorder only calls the function.


def test_recorder_waits_for_a_device_within_its_stages(ticking):
    waits = []
    recorder = Recorder("other", lambda: waits.append(recorders.perf_counter()))
    recorder.start()
    recorder.timed(lambda: None, "read")()
    recorder.timed(lambda: None, "forward")()
    recorder.stop()
    assert len(waits) == 1
    assert counted(recorder)["forward"][0] == 2  # The wait is included.


def test_recorder_restores_functions_in_reverse_order():
    class Owner:
        def value(self):
            return 1

    instance, function = Owner(), Owner.value
    with Recorder("other") as recorder:
        recorder.wrap(Owner, "value", "read")
        recorder.wrap(Owner, "value", "decode")
        recorder.wrap(instance, "value", "select")
        assert Owner.value is not function
        recorder.start()
        assert instance.value() == 1
        recorder.stop()
    assert (Owner.value, vars(instance)) == (function, {})
    assert [stage for stage, (_, calls, _) in counted(recorder).items() if calls] == ["read", "decode", "select"]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100), st.integers(0, 100)), min_size=15, max_size=15))
def test_clock_cost_is_subtracted_and_returned(rows):
    net_s, cost_s = without_clocks(np.array(rows), (1e-3, 2e-3))
    seconds = [row[0] for row in rows]
    assert all(0 <= net <= gross for net, gross in zip(net_s, seconds, strict=True))
    assert net_s.sum() + cost_s == pytest.approx(sum(seconds))


def test_clock_cost_is_measured():
    own_s, outer_s = time_clock()
    assert 0 < own_s < 1e-3
    assert 0 <= outer_s < 1e-3


# Order


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.lists(st.integers(1, 4), max_size=6))
def test_sample_order_continues_after_the_last_batch_of_the_previous_run(count, batch_size, shuffle, cuts):
    order, taken = SampleOrder(count, batch_size, shuffle), []
    for batches in cuts:
        order.until, order.least_batches = 0.0, batches
        actual = list(order)
        assert len(actual) <= batches * batch_size
        taken += actual
    order.until = inf
    taken += order if len(taken) % count or not taken else []
    for epoch in range(len(taken) // count):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(taken) % count == 0
    assert shuffle or taken[:count] == list(range(count))


# Shares of time


def test_ceilings_are_the_rest_of_the_time_without_workers():
    breakdown = breakdown_of(10.0, counts(read=6.0, forward=3.0, other=1.0))
    assert breakdown["read"].ceiling == pytest.approx(10 / 4)
    assert breakdown["forward"].ceiling == pytest.approx(10 / 7)
    assert breakdown["decode"].ceiling == 1
    assert breakdown["read"].per_sample_s == pytest.approx(0.06)
    assert (breakdown["read"].share, breakdown.wait_s) == (0.6, 0)


def test_waits_for_workers_are_divided_among_their_stages():
    worker = counts(read=2.0, transform=6.0, wait=2.0)
    breakdown = breakdown_of(10.0, counts(wait=6.0, forward=3.0, other=1.0), worker, worker)
    assert breakdown.wait_s == 6
    assert (breakdown["transform"].total_s, breakdown["read"].total_s) == (4.5, 1.5)
    assert (breakdown["transform"].worker_s, breakdown["transform"].program_s) == (12, 0)
    # The workers would need a quarter of the time, which is less than the 4 s that the main process itself needs.
    assert breakdown["transform"].ceiling == pytest.approx(10 / 4)
    assert breakdown["read"].ceiling == pytest.approx(10 / 7.5)
    assert breakdown["forward"].ceiling == pytest.approx(10 / 8)  # Each worker is busy for 8 s.
    assert [(worker.pid, worker.busy_s, worker.idle_s) for worker in breakdown.workers] == [(0, 8, 2), (1, 8, 2)]


def test_stages_of_workers_take_no_time_when_workers_are_not_waited_for():
    worker = counts(transform=2.0, wait=8.0)
    breakdown = breakdown_of(10.0, counts(forward=9.0, other=1.0), worker)
    assert breakdown["transform"].total_s == 0
    assert breakdown["transform"].ceiling == 1
    assert breakdown["forward"].ceiling == pytest.approx(10 / 2)


def test_waits_are_hand_over_when_workers_counted_nothing():
    breakdown = breakdown_of(10.0, counts(wait=4.0, other=6.0), counts(wait=9.0))
    assert (breakdown["hand-over"].total_s, breakdown["other"].total_s) == (4, 6)


many_seconds = st.lists(st.floats(0, 100), min_size=len(STAGES), max_size=len(STAGES))


@given(many_seconds, st.lists(many_seconds, max_size=3), st.integers(0, 50))
def test_stages_add_up_to_the_wall_time(program, workers, calls):
    wall_s = max(sum(program), 1e-3)
    program, *workers = (np.array([(seconds, calls, 0) for seconds in stages]) for stages in (program, *workers))
    breakdown = breakdown_of(wall_s, program, *workers, cost=(1e-4, 0.0))
    assert sum(row.total_s for row in breakdown.stages) == pytest.approx(wall_s)
    assert sum(row.share for row in breakdown.stages) == pytest.approx(1.0)
    assert all(row.ceiling is None or row.ceiling >= 1 - 1e-9 for row in breakdown.stages)
    assert [row.stage for row in breakdown.stages] == [*STAGES[:-1], "clocks"]
    assert all(row.calls == calls * (1 + len(workers)) for row in breakdown.stages[:-1])


# Conclusions


@given(st.floats(0, 100), st.floats(0.01, 100), st.floats(0.2, 20), st.floats(0.2, 20))
def test_break_even_epochs_save_the_setup_time(setup_s, epoch_s, gain, least_gain):
    epochs = break_even_epochs(setup_s, epoch_s, gain, least_gain)
    if epochs is None:
        assert least_gain <= 1 or gain < 1.03
        return
    assert least_gain > 1
    slack_s = 1e-6 * (setup_s + epoch_s)
    assert setup_s + epochs * epoch_s / gain <= epochs * epoch_s + slack_s
    assert epochs == 1 or setup_s + (epochs - 1) * epoch_s / gain >= (epochs - 1) * epoch_s - slack_s


@pytest.mark.parametrize(
    ("rates", "setup_s", "text"),
    [
        ([14.0, 12.0, 13.0], 1.0, "1 epoch"),
        ([11.0] * 3, 1089.5, "1,199 epochs"),
        ([10.2, 7.0, 10.1], 1.0, "never"),
        ([13.0, 9.0, 12.0], 1.0, "not clear"),
    ],
)
def test_report_states_when_preloading_pays(rates, setup_s, text):
    by_round = {"on demand": dict.fromkeys(range(3), 10.0), "preload": dict(enumerate(rates))}
    way = Trial("preload", setup_s=setup_s).measured(by_round, "on demand", images=100)
    assert result._way_row(way)[3] == text


@pytest.mark.parametrize(
    ("headroom", "kind"),
    [(None, "data-bound"), (0.98, "compute-bound"), (1.1, "compute-bound"), (1.4, "balanced"), (3.0, "data-bound")],
)
def test_verdict_follows_the_headroom(headroom, kind):
    breakdown = breakdown_of(10.0, counts(read=3.0, decode=4.0, forward=3.0))
    verdict = verdict_of(breakdown, [] if headroom is None else [headroom] * 3, [trial("preload", 2.0)])
    assert (verdict.kind, verdict.bound, verdict.headroom) == (kind, "decode", pytest.approx(headroom))
    assert verdict.sure
    assert "not sure" not in verdict.text


def test_verdict_recommends_a_faster_trial_when_compute_bound():
    breakdown = breakdown_of(10.0, counts(read=1.0, forward=9.0))
    verdict = verdict_of(breakdown, [1.05], [trial("preload", 1.04), trial("batch", 1.6)])
    assert (verdict.kind, verdict.first) == ("compute-bound", "batch")
    assert "was 1.60x as fast" in verdict.advice
    assert "smaller model" in verdict.advice
    assert verdict_of(breakdown, [1.05], [trial("preload", 1.04)]).first is None


@pytest.mark.parametrize(
    ("ratios", "slow_rounds", "reason"),
    [
        ([1.1, 1.25, 1.3, 1.4, 1.8], 0, "2 rounds indicate compute-bound or data-bound"),
        ([1.3] * 5, 3, "half of the rounds took at least 900% longer"),
        ([1.3] * 2, 0, "only 2 rounds"),
    ],
    ids=["disagreement", "noise", "few rounds"],
)
def test_verdict_is_not_sure_after_rounds_with(ratios, slow_rounds, reason):
    breakdown = breakdown_of(10.0, counts(read=3.0, forward=7.0))
    verdict = verdict_of(breakdown, ratios, slow_rounds=slow_rounds)
    assert (verdict.kind, verdict.sure) == ("balanced", False)
    assert verdict.headroom == pytest.approx(median(ratios))
    assert (verdict.least_headroom, verdict.most_headroom) == pytest.approx((min(ratios), max(ratios)))
    assert "; not sure: " in verdict.text
    assert reason in verdict.text


def test_verdict_never_recommends_a_slower_trial():
    breakdown = breakdown_of(10.0, counts(transform=8.0, forward=2.0))
    trials = [
        trial("preload", 0.4),
        trial("workers", 1.05),
        trial("batch", 1.5, 0.9),
        Trial("arrow", "", "", "", note="no"),
    ]
    verdict = verdict_of(breakdown, [5.0], trials)
    assert verdict.first is None
    assert "No other setting was clearly faster" in verdict.advice
    assert "at most 5.00x" in verdict.advice
    assert "No other setting was tried" in verdict_of(breakdown, [5.0], tried=False).advice


def test_verdict_recommends_the_first_of_equally_good_trials():
    breakdown = breakdown_of(10.0, counts(read=9.0, forward=1.0))
    assert verdict_of(breakdown, [5.0], [trial("preload", 4.0), trial("cache_dir", 4.2)]).first == "preload"
    assert verdict_of(breakdown, [5.0], [trial("preload", 4.0), trial("workers", 8.0)]).first == "workers"
