"""`Loop`: the ordinary training loop, with or without clocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import Sampler

from omearrow_ds.advise.profile.recorder import COMPUTE, Array, Recorder, WorkerClocks, measure_clock_cost
from omearrow_ds.advise.profile.training import Step
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.loader.dataloader import OMEArrowDataLoader


class Run(NamedTuple):
    samples: int
    batches: int
    wall_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s


class Recording(NamedTuple):
    """Measured run, the cost of its clocks per call, and counts of the main process (S, 3) and of workers (W, S, 3)."""

    run: Run
    cost: tuple[float, float]
    program: Array
    workers: Array
    pids: tuple[int, ...]


class Duration(NamedTuple):
    """Duration of a run: from ``least_s`` to ``most_s`` seconds, or a fixed number of ``epochs``."""

    least_s: float
    most_s: float
    epochs: int | None = None


class SampleOrder(Sampler[int]):
    """Sampler whose order spans many epochs: each run begins after the last sample of the previous run.

    Otherwise, each short run would read the same images, which are in the page cache after the first run. An iteration
    ends when ``perf_counter`` reaches ``until``, but not before ``least_batches`` batches. With ``shuffle``, the order
    depends only on the epoch and the number of samples.
    """

    def __init__(self, count: int, batch_size: int, *, shuffle: bool) -> None:
        self._count, self._batch_size, self._shuffle = count, batch_size, shuffle
        self._epoch = 0
        self.next_index = 0  # In the order of the current epoch.
        self.until, self.least_batches = inf, 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(self._count, generator=generator).tolist() if self._shuffle else range(self._count)
        for batches, first in enumerate(range(self.next_index, self._count, self._batch_size)):
            if batches >= self.least_batches and perf_counter() >= self.until:
                return
            self.next_index = first + self._batch_size
            yield from order[first : self.next_index]
        self._epoch, self.next_index = self._epoch + 1, 0


@dataclass(eq=False)
class Loop:
    """A loader, and the ``step`` that is called per batch. `dataclasses.replace` returns a loop with other settings.

    With ``has_worker_clocks``, each worker process records its stages; ``num_workers`` is not ``"auto"`` then.
    """

    dataset: StoredSamples
    batch_size: int
    num_workers: Any = 0
    device: torch.device | str | None = None
    step: Step = field(default_factory=Step)
    shuffle: bool = True
    has_worker_clocks: bool = False

    def __post_init__(self) -> None:
        self._order = SampleOrder(len(self.dataset), self.batch_size, shuffle=self.shuffle)
        self._clocks = WorkerClocks(self.num_workers if self.has_worker_clocks else 0)
        self.loader: Any = OMEArrowDataLoader(
            self.dataset,
            self.batch_size,
            num_workers=self.num_workers,
            device=self.device,
            sampler=self._order,
            worker_init_fn=self._clocks if self.has_worker_clocks else None,
        )

    def warm_up(self) -> Any:
        """Run a few batches, so that workers are started and files are open, and return the first batch."""
        self._order.until, self._order.least_batches = 0.0, 2 * self.loader.num_workers or 1
        first = None
        for batch in self.loader:
            self.step(batch)
            first = batch if first is None else first
        self.step.finish()
        self._order.next_index = 0
        return first

    def run(self, duration: Duration) -> Run:
        samples = batches = 0
        start = perf_counter()
        self._order.until, self._order.least_batches = start + duration.most_s, 1
        if duration.epochs is not None:
            self._order.next_index = 0
        for epoch in itertools.count(1):
            for batch in self.loader:
                samples += self.step(batch)
                batches += 1
            if perf_counter() - start >= duration.least_s and epoch >= (duration.epochs or 1):
                break
        self.step.finish()
        return Run(samples, batches, perf_counter() - start)

    def record(self, duration: Duration) -> Recording:
        """Run the loop with clocks in all stage functions; the clocks are removed at the end, even if the run fails."""
        cost, torch_batches = measure_clock_cost(), self.loader._iterator  # noqa: SLF001  # None without workers.
        with Recorder("other", self.step.finish) as recorder:
            recorder.wrap_stages(self.dataset if torch_batches is None else None)
            for name, stage in zip(("forward", "backward", "optimize"), COMPUTE, strict=True):
                recorder.wrap(self.step, name, stage)
            if torch_batches is not None:  # Time the wait for workers separately from receiving their batches.
                queue = torch_batches._data_queue  # noqa: SLF001  # torch has no name for it
                recorder.wrap(queue, "_poll" if hasattr(queue, "_poll") else "get", "wait")  # get: pinned by a thread.
            before = self._clocks.counts()
            recorder.start()
            run = self.run(duration)
            recorder.stop()
        pids = tuple(worker.pid for worker in getattr(torch_batches, "_workers", ()))
        counts = np.array(recorder.counts).reshape(-1, 3)
        return Recording(run, cost, counts, self._clocks.counts() - before, pids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        torch_batches = self.loader._iterator  # noqa: SLF001  # torch ends workers only when the loader is collected
        if torch_batches is not None:
            self.loader._iterator = None  # noqa: SLF001
            torch_batches._shutdown_workers()  # noqa: SLF001
