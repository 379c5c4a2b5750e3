"""`Breakdown`: the wall time of a recorded run, shared out among its stages, and what each could give at most.

Without workers the program's own clock tells it all. With workers the program's time is what it does itself and what it
waits for its workers. That wait is shared out among the stages in the workers, in proportion to the seconds that the
workers' clocks counted for each.

The ceiling of a stage is the time now over the time if it cost nothing. With workers the loop takes as long as the
slower of two: what the program does itself, and what the workers do side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omearrow_ds.advise.profile.loop import Recording
from omearrow_ds.advise.profile.recorder import ClockCost
from omearrow_ds.advise.profile.stages import Stage

CLOCKS = "clocks"
_AS_FAST = 1.15  # clocks take some percent, and the machine is never the same


@dataclass(frozen=True)
class StageTime:
    """A stage's part of the wall time.

    Attributes
    ----------
    stage
        Its name.
    total_s
        Seconds of the wall time: ``program_s``, and of the wait for workers the part that is attributed to it.
    share
        ``total_s`` over the wall time.
    per_sample_s
        ``total_s`` for each sample.
    ceiling
        How many times faster the loop would be, at most, if the stage cost nothing; None for what is no stage.
    program_s, worker_s
        Seconds by the clock of the program, and by those of the workers, all together.
    calls
        How often it was entered.
    note
        What is in it.
    """

    stage: str
    total_s: float
    share: float
    per_sample_s: float
    ceiling: float | None
    program_s: float
    worker_s: float
    calls: int
    note: str


class WorkerTime(NamedTuple):
    """A worker process: how long it made samples, and how long it had nothing to do."""

    pid: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True)
class Breakdown:
    """An epoch's wall time by stage.

    Attributes
    ----------
    stages
        Their ``total_s`` add up to ``wall_s``.
    wall_s, samples, batches
        How long the loop took, with clocks in it, for how much.
    wait_s
        How long the program waited for workers; it is in the stages.
    workers
        Each worker process.
    remarks
        What of this loop is in other stages than one would look for.
    """

    stages: tuple[StageTime, ...]
    wall_s: float
    samples: int
    batches: int
    wait_s: float
    workers: tuple[WorkerTime, ...]
    remarks: tuple[str, ...] = ()

    def __getitem__(self, stage: str) -> StageTime:
        """Return a stage by its name."""
        return next(each for each in self.stages if each.stage == stage)


def break_down(recording: Recording, cost: ClockCost, remarks: tuple[str, ...] = ()) -> Breakdown:
    """Share out the wall time of a recording, what the clocks cost apart."""
    run = recording.run
    program, clocks_s = cost.taken_off(recording.program)
    workers = [(each, cost.taken_off(each.counts)[0]) for each in recording.workers]
    in_workers = [0.0 if stage is Stage.WAIT else sum(net[stage] for _, net in workers) for stage in Stage]
    wait_s, program[Stage.WAIT] = program[Stage.WAIT], 0.0
    program[Stage.OTHER] += run.wall_s - clocks_s - wait_s - sum(program)
    attributed = _attributed(wait_s, in_workers)
    ceilings = _ceilings(program, wait_s, in_workers, len(workers))
    calls = [sum(each.counts.calls[stage] for each, _ in workers) for stage in Stage]

    def row(stage: Stage) -> StageTime:
        total_s = program[stage] + attributed[stage]
        share, per_sample_s = total_s / run.wall_s, total_s / run.samples
        times = program[stage], in_workers[stage], recording.program.calls[stage] + calls[stage]
        return StageTime(stage.label, total_s, share, per_sample_s, ceilings[stage], *times, stage.note)

    rows = [row(stage) for stage in Stage if stage is not Stage.WAIT]
    note = "what measuring took; it is in no stage"
    share, per_sample_s = clocks_s / run.wall_s, clocks_s / run.samples
    rows.append(StageTime(CLOCKS, clocks_s, share, per_sample_s, None, clocks_s, 0.0, 0, note))
    times = [WorkerTime(each.pid, sum(net) - net[Stage.WAIT], net[Stage.WAIT]) for each, net in workers]
    return Breakdown(tuple(rows), run.wall_s, run.samples, run.batches, wait_s, tuple(times), remarks)


def differs(breakdown: Breakdown, samples_per_s: float) -> tuple[str, ...]:
    """Return what to say where the loop with clocks in it was not as fast as without."""
    with_clocks = breakdown.samples / breakdown.wall_s
    if samples_per_s / _AS_FAST <= with_clocks <= samples_per_s * _AS_FAST:
        return ()
    rates = f"{with_clocks:,.4g} samples/s with clocks in it and {samples_per_s:,.4g} without"
    return (f"The loop made {rates}, which ran at another time or on other images; the shares above are of the first.",)


def _attributed(wait_s: float, in_workers: Sequence[float]) -> list[float]:
    """Share out what the program waited in proportion to what the workers did."""
    busy_s = sum(in_workers)
    if busy_s <= 0.0:
        return [wait_s if stage is Stage.HAND_OVER else 0.0 for stage in Stage]
    return [wait_s * seconds / busy_s for seconds in in_workers]


def _ceilings(program: Sequence[float], wait_s: float, in_workers: Sequence[float], workers: int) -> list[float | None]:
    """Return for each stage how many times faster the loop would be, at most, without it."""
    own_s, busy_s = sum(program), sum(in_workers)
    now_s = own_s + wait_s
    least_s = busy_s / workers if workers else 0.0  # of the workers, if none of them ever waits
    ceilings: list[float | None] = []
    for stage in Stage:
        in_program_s = max(own_s - program[stage], min(least_s, now_s))
        if busy_s > 0.0 and in_workers[stage] > 0.0:
            # They are as much side by side as they are now.
            beside_s = now_s * (1 - in_workers[stage] / busy_s)
            without_s = max(own_s - program[stage], beside_s)
        else:
            without_s = in_program_s
        ceilings.append(now_s / without_s if without_s > 0.0 else None)
    return ceilings
