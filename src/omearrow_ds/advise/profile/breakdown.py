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
    """Part of the wall time that one stage takes."""

    stage: str
    total_s: float  # Own seconds of the main process, and the attributed part of its wait for workers.
    share: float  # Total time divided by the wall time.
    per_sample_s: float
    ceiling: float | None  # Maximum speedup of the loop without the stage; None for clocks, or if unbounded.
    program_s: float  # By the clock of the main process.
    worker_s: float  # Sum over the clocks of all workers.
    calls: int
    note: str  # Work that the stage includes.


@dataclass(frozen=True)
class WorkerTime:
    """Busy and idle seconds of one worker process."""

    pid: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True)
class Breakdown:
    """Wall time of a measured loop by stage."""

    wall_s: float  # Duration of the loop with clocks.
    samples: int
    batches: int
    wait_s: float  # Seconds that the main process waited for workers, which the stages include.
    workers: tuple[WorkerTime, ...]
    remarks: tuple[str, ...]  # Work that this loop does in unexpected stages.
    stages: tuple[StageTime, ...]  # Their total times add up to the wall time.

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
    notes = {**STAGE_NOTES, CLOCKS: "time of the measurement itself, outside all stages"}
    del notes["wait"]
    rows = []
    for (stage, note), (total_s, ceiling, own_s, in_workers_s, calls) in zip(
        notes.items(), columns.tolist(), strict=True
    ):
        shares, limit = (total_s / run.wall_s, total_s / run.samples), None if ceiling == inf else ceiling
        rows.append(StageTime(stage, total_s, *shares, limit, own_s, in_workers_s, int(calls), note))
    workers = map(WorkerTime, recording.pids, by_worker_s.sum(axis=1).tolist(), idle_s)
    return Breakdown(run.wall_s, run.samples, run.batches, wait_s, tuple(workers), (), tuple(rows))
