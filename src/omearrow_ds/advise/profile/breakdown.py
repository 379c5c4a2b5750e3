"""`Breakdown`: the wall time of a recorded run by stage, and the maximum speedup of each stage.

Without workers, the clock of the main process measures every stage. With workers, the time of the main process is its
own work and its wait for workers. That wait is distributed among the stages in proportion to the seconds that the
clocks of the workers counted for each.

The ceiling of a stage is the current time divided by the time without that stage. With workers, the loop takes as long
as the slower of two: the own work of the main process, and the parallel work of the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omearrow_ds.advise.profile.loop import Recording
from omearrow_ds.advise.profile.recorder import ClockCost
from omearrow_ds.advise.profile.stages import Stage

CLOCKS = "clocks"
_AS_FAST = 1.15  # Clocks take some percent, and the speed of the machine varies.


@dataclass(frozen=True)
class StageTime:
    """Part of the wall time that one stage takes.

    Attributes
    ----------
    stage
        Name of the stage.
    total_s
        Seconds of the wall time: ``program_s``, plus the attributed part of the wait for workers.
    share
        ``total_s`` divided by the wall time.
    per_sample_s
        ``total_s`` per sample.
    ceiling
        Maximum speedup of the loop if the stage took no time; None for the cost of the clocks, or if unbounded.
    program_s, worker_s
        Seconds by the clock of the main process, and the sum over the clocks of all workers.
    calls
        Number of calls.
    note
        Work that the stage includes.
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
    """Busy and idle seconds of one worker process."""

    pid: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True)
class Breakdown:
    """Wall time of a measured loop by stage.

    Attributes
    ----------
    stages
        Stages, whose ``total_s`` add up to ``wall_s``.
    wall_s, samples, batches
        Duration of the loop including clocks, and the number of its samples and batches.
    wait_s
        Seconds that the main process waited for workers, which are included in the stages.
    workers
        Busy and idle time per worker process.
    remarks
        Work that this loop does in unexpected stages.
    """

    stages: tuple[StageTime, ...]
    wall_s: float
    samples: int
    batches: int
    wait_s: float
    workers: tuple[WorkerTime, ...]
    remarks: tuple[str, ...] = ()

    def __getitem__(self, stage: str) -> StageTime:
        return next(row for row in self.stages if row.stage == stage)


def break_down(recording: Recording, cost: ClockCost, remarks: tuple[str, ...] = ()) -> Breakdown:
    """Return the wall time of a recording per stage; the time that the clocks took has its own row."""
    run = recording.run
    program, clocks_s = cost.taken_off(recording.program)
    workers = [(worker, cost.taken_off(worker.counts)[0]) for worker in recording.workers]
    in_workers = [0.0 if stage is Stage.WAIT else sum(net[stage] for _, net in workers) for stage in Stage]
    wait_s, program[Stage.WAIT] = program[Stage.WAIT], 0.0
    program[Stage.OTHER] += run.wall_s - clocks_s - wait_s - sum(program)
    attributed = _attributed(wait_s, in_workers)
    ceilings = _ceilings(program, wait_s, in_workers, len(workers))
    calls = [sum(worker.counts.calls[stage] for worker, _ in workers) for stage in Stage]

    def row(stage: Stage) -> StageTime:
        total_s = program[stage] + attributed[stage]
        share, per_sample_s = total_s / run.wall_s, total_s / run.samples
        times = program[stage], in_workers[stage], recording.program.calls[stage] + calls[stage]
        return StageTime(stage.label, total_s, share, per_sample_s, ceilings[stage], *times, stage.note)

    rows = [row(stage) for stage in Stage if stage is not Stage.WAIT]
    note = "what measuring took; it is in no stage"
    share, per_sample_s = clocks_s / run.wall_s, clocks_s / run.samples
    rows.append(StageTime(CLOCKS, clocks_s, share, per_sample_s, None, clocks_s, 0.0, 0, note))
    times = [WorkerTime(worker.pid, sum(net) - net[Stage.WAIT], net[Stage.WAIT]) for worker, net in workers]
    return Breakdown(tuple(rows), run.wall_s, run.samples, run.batches, wait_s, tuple(times), remarks)


def differs(breakdown: Breakdown, samples_per_s: float) -> tuple[str, ...]:
    """Return one remark if the recorded loop differs in speed from the unrecorded loop by more than 15 %, else ()."""
    with_clocks = breakdown.samples / breakdown.wall_s
    if samples_per_s / _AS_FAST <= with_clocks <= samples_per_s * _AS_FAST:
        return ()
    rates = f"{with_clocks:,.4g} samples/s with clocks in it and {samples_per_s:,.4g} without"
    return (f"The loop made {rates}, which ran at another time or on other images; the shares above are of the first.",)


def _attributed(wait_s: float, in_workers: Sequence[float]) -> list[float]:
    """Distribute the wait of the main process among the stages, in proportion to the time of the workers in them."""
    busy_s = sum(in_workers)
    if busy_s <= 0.0:
        return [wait_s if stage is Stage.HAND_OVER else 0.0 for stage in Stage]
    return [wait_s * seconds / busy_s for seconds in in_workers]


def _ceilings(program: Sequence[float], wait_s: float, in_workers: Sequence[float], workers: int) -> list[float | None]:
    """Return the maximum speedup of the loop without each stage, None if it is unbounded."""
    own_s, busy_s = sum(program), sum(in_workers)
    now_s = own_s + wait_s
    least_s = busy_s / workers if workers else 0.0  # Time of the workers if none ever waits.
    ceilings: list[float | None] = []
    for stage in Stage:
        in_program_s = max(own_s - program[stage], min(least_s, now_s))
        if busy_s > 0.0 and in_workers[stage] > 0.0:
            # Assumes that workers overlap as much as they do now.
            beside_s = now_s * (1 - in_workers[stage] / busy_s)
            without_s = max(own_s - program[stage], beside_s)
        else:
            without_s = in_program_s
        ceilings.append(now_s / without_s if without_s > 0.0 else None)
    return ceilings
