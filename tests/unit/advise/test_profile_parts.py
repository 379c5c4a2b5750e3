"""Parts of the profiler that need no clock: counts, conclusions and messages."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds.advise.profile import recorder as recorders
from omearrow_ds.advise.profile import result
from omearrow_ds.advise.profile.breakdown import break_down, differs
from omearrow_ds.advise.profile.hooks import Patches
from omearrow_ds.advise.profile.loop import Recording, Run, SampleOrder
from omearrow_ds.advise.profile.probe import WorkerCounts
from omearrow_ds.advise.profile.recorder import ClockCost, Counts, Recorder
from omearrow_ds.advise.profile.stages import COMPUTE, DATA, Stage
from omearrow_ds.advise.profile.trials import Trial, break_even_epochs
from omearrow_ds.advise.profile.verdict import Headroom, judge
from omearrow_ds.advise.turns import is_clear

FREE = ClockCost(0.0, 0.0)
FIVE = Headroom(5.0, [5.0])


@pytest.fixture
def ticking(monkeypatch):
    """Advance the clock by 1 s per reading."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(recorders, "perf_counter", lambda: float(next(ticks)))


def counts(**seconds):
    found = Counts.zero()
    for name, value in seconds.items():
        found.seconds[Stage[name]] = value
    return found


def recording(wall_s, program, *workers):
    found = [WorkerCounts(number, each) for number, each in enumerate(workers)]
    return Recording(Run(100, 10, wall_s), program, found)


def trial(name, gain, least_gain=None):
    least = gain if least_gain is None else least_gain
    return Trial(name, f"--{name}", "", f"Use {name}", 1.0, 10.0, gain, least, gain, 1.0, 1)


# Counting


def test_a_moment_is_counted_for_the_innermost_stage(ticking):
    recorder = Recorder(Stage.OTHER)
    inner = recorder.timed(lambda: None, Stage.DECODE)
    outer = recorder.timed(lambda: [inner(), inner()], Stage.READ)
    recorder.start()
    outer()
    recorder.stop()
    found = recorder.counts
    assert (found.calls[Stage.READ], found.calls[Stage.DECODE]) == (1, 2)
    assert (found.nested[Stage.READ], found.nested[Stage.OTHER]) == (2, 1)
    # Clock readings: start, into READ, in and out of DECODE twice, out of READ, stop.
    assert (found.seconds[Stage.OTHER], found.seconds[Stage.READ], found.seconds[Stage.DECODE]) == (2, 3, 2)


def test_errors_and_other_threads(ticking):
    recorder = Recorder(Stage.OTHER)

    def fail():
        raise KeyError("planted")

    timed = recorder.timed(fail, Stage.READ)
    recorder.start()
    with pytest.raises(KeyError):
        timed()
    recorder.stop()
    assert recorder.counts.seconds[Stage.READ] == 1
    recorder.start()
    other = threading.Thread(target=recorder.timed(lambda: None, Stage.READ))
    other.start()
    other.join()
    recorder.stop()
    assert recorder.counts.calls[Stage.READ] == 1
    assert recorder.timed(len, Stage.READ)((1, 2)) == 2  # A stopped recorder only calls the function.


def test_a_device_is_waited_for_within_its_stages(ticking):
    waited = []
    recorder = Recorder(Stage.OTHER, lambda: waited.append(recorders.perf_counter()), (Stage.FORWARD,))
    recorder.start()
    recorder.timed(lambda: None, Stage.READ)()
    recorder.timed(lambda: None, Stage.FORWARD)()
    recorder.stop()
    assert len(waited) == 1
    assert recorder.counts.seconds[Stage.FORWARD] == 2  # The wait is included.


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100), st.integers(0, 100)), min_size=15, max_size=15))
def test_what_clocks_cost_is_taken_off_and_not_lost(rows):
    found = Counts(*map(list, zip(*rows, strict=True)))
    net, cost_s = ClockCost(1e-3, 2e-3).taken_off(found)
    assert all(0 <= each <= seconds for each, seconds in zip(net, found.seconds, strict=True))
    assert sum(net) + cost_s == pytest.approx(sum(found.seconds))


def test_clocks_cost_something():
    cost = ClockCost.measure()
    assert 0 < cost.own_s < 1e-3
    assert 0 <= cost.outer_s < 1e-3


def test_patches_are_undone_last_first():
    class Owner:
        value = 1

    instance = Owner()
    with Patches() as patches:
        patches.replace(Owner, "value", 2)
        patches.replace(Owner, "value", 3)
        patches.replace(instance, "value", 4)
        assert (Owner.value, instance.value) == (3, 4)
    assert (Owner.value, vars(instance)) == (1, {})


# Order


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.lists(st.integers(1, 4), max_size=6))
def test_a_run_that_is_cut_is_continued(count, batch_size, shuffle, cuts):
    order, taken = SampleOrder(count, batch_size, shuffle=shuffle), []
    for batches in cuts:
        order.limit(0.0, batches)
        actual = list(order)
        assert len(actual) <= batches * batch_size
        taken += actual
    order.limit(float("inf"))
    taken += order if len(taken) % count or not taken else []
    for epoch in range(len(taken) // count):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(taken) % count == 0
    assert shuffle or taken[:count] == list(range(count))


# Shares of time


def test_without_workers_a_ceiling_is_the_rest():
    found = break_down(recording(10.0, counts(READ=6.0, FORWARD=3.0, OTHER=1.0)), FREE)
    assert found["read"].ceiling == pytest.approx(10 / 4)
    assert found["forward"].ceiling == pytest.approx(10 / 7)
    assert found["decode"].ceiling == 1
    assert found["read"].per_sample_s == pytest.approx(0.06)
    assert (found["read"].share, found.wait_s) == (0.6, 0)


def test_with_workers_the_wait_is_shared_out():
    worker = counts(READ=2.0, TRANSFORM=6.0, WAIT=2.0)
    found = break_down(recording(10.0, counts(WAIT=6.0, FORWARD=3.0, OTHER=1.0), worker, worker), FREE)
    assert found.wait_s == 6
    assert (found["transform"].total_s, found["read"].total_s) == (4.5, 1.5)
    assert (found["transform"].worker_s, found["transform"].program_s) == (12, 0)
    # The workers would need a quarter of the time, which is less than the 4 s that the main process itself needs.
    assert found["transform"].ceiling == pytest.approx(10 / 4)
    assert found["read"].ceiling == pytest.approx(10 / 7.5)
    assert found["forward"].ceiling == pytest.approx(10 / 8)  # Each worker is busy for 8 s.
    assert [(each.busy_s, each.idle_s) for each in found.workers] == [(8, 2), (8, 2)]


def test_workers_that_are_not_waited_for_have_nothing_to_give():
    worker = counts(TRANSFORM=2.0, WAIT=8.0)
    found = break_down(recording(10.0, counts(FORWARD=9.0, OTHER=1.0), worker), FREE)
    assert found["transform"].total_s == 0
    assert found["transform"].ceiling == 1
    assert found["forward"].ceiling == pytest.approx(10 / 2)


seconds = st.lists(st.floats(0, 100), min_size=len(Stage), max_size=len(Stage))


@given(seconds, st.lists(seconds, max_size=3), st.integers(0, 50))
def test_stages_always_add_up(program, workers, calls):
    wall_s = max(sum(program), 1e-3)
    zero, many = [0] * len(Stage), [calls] * len(Stage)
    found = break_down(
        recording(wall_s, Counts(program, many, zero), *(Counts(each, many, zero) for each in workers)),
        ClockCost(1e-4, 0.0),
    )
    assert sum(each.total_s for each in found.stages) == pytest.approx(wall_s)
    assert sum(each.share for each in found.stages) == pytest.approx(1.0)
    assert all(each.ceiling is None or each.ceiling >= 1 - 1e-9 for each in found.stages)
    assert len({each.stage for each in found.stages}) == len(found.stages) == len(Stage)


def test_every_stage_is_of_one_kind():
    assert not set(DATA) & set(COMPUTE)
    assert set(Stage) - {*DATA, *COMPUTE} == {Stage.OTHER, Stage.WAIT}


# Conclusions


@given(st.floats(0, 100), st.floats(0.01, 100), st.floats(0.2, 20), st.floats(0.2, 20))
def test_preloading_has_paid_after_so_many_epochs(setup_s, epoch_s, gain, least_gain):
    epochs = break_even_epochs(setup_s, epoch_s, gain, least_gain)
    if epochs is None:
        assert least_gain <= 1 or gain < 1.03
        return
    assert least_gain > 1
    slack_s = 1e-6 * (setup_s + epoch_s)
    assert setup_s + epochs * epoch_s / gain <= epochs * epoch_s + slack_s
    assert epochs == 1 or setup_s + (epochs - 1) * epoch_s / gain >= (epochs - 1) * epoch_s - slack_s


@pytest.mark.parametrize(
    ("epochs", "gains", "text"),
    [
        (1, [1.4, 1.2], "1 epoch"),
        (1200, [1.1], "1,200 epochs"),
        (None, [1.02, 0.7], "never"),
        (None, [1.3, 0.9, 1.2], "not clear"),
    ],
)
def test_it_says_when_preloading_pays(epochs, gains, text):
    way = replace(trial("preload", 1.2), break_even_epochs=epochs, clear=is_clear(gains))
    assert result._break_even_text(way) == text


@pytest.mark.parametrize(
    ("headroom", "kind"),
    [(None, "data-bound"), (0.98, "compute-bound"), (1.1, "compute-bound"), (1.4, "balanced"), (3.0, "data-bound")],
)
def test_the_verdict_follows_the_headroom(headroom, kind):
    found = break_down(recording(10.0, counts(READ=3.0, DECODE=4.0, FORWARD=3.0)), FREE)
    turns = None if headroom is None else Headroom(headroom, [headroom] * 3)
    verdict = judge(found, turns, [trial("preload", 2.0)], tried=True)
    assert (verdict.kind, verdict.bound, verdict.headroom) == (kind, "decode", headroom)
    assert verdict.sure
    assert "Not sure" not in verdict.text
    assert ("no data work can win anything" in verdict.text) == (headroom == 0.98)


def test_what_was_faster_is_said_of_a_loop_that_is_compute_bound_too():
    found = break_down(recording(10.0, counts(READ=1.0, FORWARD=9.0)), FREE)
    verdict = judge(found, Headroom(1.05, [1.05]), [trial("preload", 1.04), trial("batch", 1.6)], tried=True)
    assert (verdict.kind, verdict.first) == ("compute-bound", "batch")
    assert "was 1.60x as fast" in verdict.advice
    assert "smaller model" in verdict.advice
    assert judge(found, Headroom(1.05, [1.05]), [trial("preload", 1.04)], tried=True).first is None


def test_turns_that_disagree_are_told():
    found = break_down(recording(10.0, counts(READ=3.0, FORWARD=7.0)), FREE)
    verdict = judge(found, Headroom(1.3, [1.1, 1.25, 1.3, 1.4, 1.8]), [], tried=True)
    assert (verdict.kind, verdict.sure) == ("balanced", False)
    assert "by 2 of them it is compute-bound or data-bound" in verdict.text
    assert (verdict.least_headroom, verdict.most_headroom) == (1.1, 1.8)


def test_turns_that_agree_on_a_noisy_machine_are_not_sure():
    found = break_down(recording(10.0, counts(READ=3.0, FORWARD=7.0)), FREE)
    verdict = judge(found, Headroom(1.3, [1.3] * 5), [], tried=True, noise=0.6)
    assert (verdict.kind, verdict.sure) == ("balanced", False)
    assert "not sure: the machine was too noisy, half of the rounds took 60% longer" in verdict.text


def test_a_recording_at_another_speed_is_told():
    found = break_down(recording(10.0, counts(READ=10.0)), FREE)
    rate = found.samples / found.wall_s
    assert differs(found, rate * 1.1) == differs(found, rate / 1.1) == ()
    assert "the shares above are of the first" in differs(found, rate * 1.3)[0]


def test_what_was_slower_is_never_recommended():
    found = break_down(recording(10.0, counts(TRANSFORM=8.0, FORWARD=2.0)), FREE)
    slow = [
        trial("preload", 0.4),
        trial("workers", 1.05),
        trial("batch", 1.5, 0.9),
        Trial("arrow", "", "", "", note="no"),
    ]
    verdict = judge(found, FIVE, slow, tried=True)
    assert verdict.first is None
    assert "Nothing that was tried was clearly faster" in verdict.advice
    assert "at most 5.00x" in verdict.advice
    assert "Nothing was tried" in judge(found, FIVE, [], tried=False).advice


def test_of_two_as_good_the_first_is_recommended():
    found = break_down(recording(10.0, counts(READ=9.0, FORWARD=1.0)), FREE)
    assert judge(found, FIVE, [trial("preload", 4.0), trial("cache_dir", 4.2)], tried=True).first == "preload"
    assert judge(found, FIVE, [trial("preload", 4.0), trial("workers", 8.0)], tried=True).first == "workers"
