"""`Breakdown`: the wall time of a recorded run by stage, and the maximum speedup of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from omearrow_ds.advise.profile.loop import Recording
from omearrow_ds.advise.profile.recorder import STAGE_NOTES, without_clocks

CLOCKS = "clocks"
_OTHER, _WAIT = -2, -1  # Indices of the last stages.


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


@dataclass(frozen=True)
class WorkerTime:
    """Busy and idle seconds of one worker process."""

    pid: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True)
class Breakdown:
    """Wall time of a measured loop by stage.

    Attributes
    ----------
    wall_s, samples, batches
        Duration of the loop including clocks, and the number of its samples and batches.
    wait_s
        Seconds that the main process waited for workers, which are included in the stages.
    workers
        Busy and idle time per worker process.
    remarks
        Work that this loop does in unexpected stages.
    stages
        Stages, whose ``total_s`` add up to ``wall_s``.
    """

    wall_s: float
    samples: int
    batches: int
    wait_s: float
    workers: tuple[WorkerTime, ...]
    remarks: tuple[str, ...]
    stages: tuple[StageTime, ...]

    def __getitem__(self, stage: str) -> StageTime:
        return next(row for row in self.stages if row.stage == stage)


def break_down(recording: Recording) -> Breakdown:
    """Return the wall time of a recording per stage, with a separate row for the time that the clocks took.

    With workers, the time of the main process is its own work and its wait for workers. The wait is attributed to the
    stages in proportion to the seconds of the workers. The ceiling of a stage is the current time divided by the time
    without that stage. With workers, the loop takes as long as the slower of two: the own work of the main process, and
    the parallel work of the workers.
    """
    run, cost = recording.run, recording.cost
    program_s, clocks_s = without_clocks(recording.program, cost)
    by_worker_s, _ = without_clocks(recording.workers, cost)
    idle_s, by_worker_s[:, _WAIT] = by_worker_s[:, _WAIT].tolist(), 0.0
    wait_s, program_s[_WAIT] = float(program_s[_WAIT]), 0.0
    program_s[_OTHER] += run.wall_s - clocks_s - wait_s - program_s.sum()
    worker_s, busy_s = by_worker_s.sum(axis=0), by_worker_s.sum()
    worker_shares = worker_s / busy_s if busy_s > 0 else np.array([stage == "hand-over" for stage in STAGE_NOTES])
    own_s = program_s.sum()
    now_s = own_s + wait_s
    # The workers overlap as much without a stage as they do now. Without other stages, they may never wait.
    never_waiting_s = min(busy_s / max(1, len(by_worker_s)), now_s)
    parallel_s = np.where(worker_s > 0, now_s * (1 - worker_shares), never_waiting_s)
    with np.errstate(divide="ignore"):
        ceilings = now_s / np.maximum(own_s - program_s, parallel_s)
    calls = recording.program[:, 1] + recording.workers[:, :, 1].sum(axis=0)
    columns = np.stack([program_s + wait_s * worker_shares, ceilings, program_s, worker_s, calls], axis=1)
    columns[_WAIT] = clocks_s, inf, clocks_s, 0, 0
    notes = {**STAGE_NOTES, CLOCKS: "what measuring took; it is in no stage"}
    del notes["wait"]
    rows = []
    for (stage, note), (total_s, ceiling, own_s, in_workers_s, calls) in zip(
        notes.items(), columns.tolist(), strict=True
    ):
        shares, limit = (total_s / run.wall_s, total_s / run.samples), None if ceiling == inf else ceiling
        rows.append(StageTime(stage, total_s, *shares, limit, own_s, in_workers_s, int(calls), note))
    workers = map(WorkerTime, recording.pids, by_worker_s.sum(axis=1).tolist(), idle_s)
    return Breakdown(run.wall_s, run.samples, run.batches, wait_s, tuple(workers), (), tuple(rows))
