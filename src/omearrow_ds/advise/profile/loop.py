"""`Loop`: the ordinary training loop, with or without clocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
from torch.utils.data import Dataset, Sampler

from omearrow_ds.advise.profile.hooks import Patches, install, install_dataset
from omearrow_ds.advise.profile.probe import Probe, WorkerCounts
from omearrow_ds.advise.profile.recorder import Counts, Recorder
from omearrow_ds.advise.profile.stages import COMPUTE, Stage
from omearrow_ds.advise.profile.training import NoStep
from omearrow_ds.loader.dataloader import OMEArrowDataLoader

_ON_DEVICE = (Stage.TRANSFER, *COMPUTE)


class Run(NamedTuple):
    samples: int
    batches: int
    wall_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s


class Recording(NamedTuple):
    run: Run
    program: Counts
    workers: list[WorkerCounts]


class Duration(NamedTuple):
    """Limits of a run: at least ``least_s`` and at most ``most_s`` seconds, or a fixed number of ``epochs``."""

    least_s: float
    most_s: float
    epochs: int | None = None


class SampleOrder(Sampler[int]):
    """Sampler whose order spans many epochs: each run begins after the last sample of the previous run.

    Otherwise, each short run would read the same images, which are in the page cache after the first run. Runs are cut
    between batches. With ``shuffle``, the order depends only on the epoch and the number of samples.
    """

    def __init__(self, count: int, batch_size: int, *, shuffle: bool) -> None:
        self._count, self._batch_size, self._shuffle = count, batch_size, shuffle
        self._epoch = self._next = 0
        self._until, self._least_batches = float("inf"), 0

    def __len__(self) -> int:
        return self._count

    def restart(self) -> None:
        """Begin the next iteration at the first sample of the current epoch."""
        self._next = 0

    def limit(self, until: float, least_batches: int = 1) -> None:
        """Stop iterating when ``perf_counter`` reaches ``until``, but not before ``least_batches`` batches."""
        self._until, self._least_batches = until, least_batches

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(self._count, generator=generator).tolist() if self._shuffle else range(self._count)
        for batches, first in enumerate(range(self._next, self._count, self._batch_size)):
            if batches >= self._least_batches and perf_counter() >= self._until:
                return
            self._next = first + self._batch_size
            yield from order[first : self._next]
        self._epoch, self._next = self._epoch + 1, 0


class Loop:
    """A loader and the ``step`` that is called per batch; with ``probe``, each worker process records its stages."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        num_workers: Any,
        device: torch.device | str | None,
        step: NoStep,
        *,
        shuffle: bool = True,
        probe: bool = False,
    ) -> None:
        self._order = SampleOrder(len(dataset), batch_size, shuffle=shuffle)  # type: ignore[arg-type]  # of map style
        self._probe = Probe(num_workers) if probe and num_workers else None
        extra: dict[str, Any] = {} if self._probe is None else {"worker_init_fn": self._probe}
        self.dataset, self.batch_size, self.step = dataset, batch_size, step
        self._asked_workers, self._shuffle = num_workers, shuffle
        self.loader = OMEArrowDataLoader(
            dataset, batch_size, num_workers=num_workers, device=device, sampler=self._order, **extra
        )

    def like(
        self, dataset: Dataset[Any], num_workers: Any = None, *, batch_size: int | None = None, probe: bool = False
    ) -> Loop:
        """Return a loop over another dataset; workers and batch size default to those of this loop."""
        workers = self._asked_workers if num_workers is None else num_workers
        size = self.batch_size if batch_size is None else batch_size
        return Loop(dataset, size, workers, self.device, self.step, shuffle=self._shuffle, probe=probe)

    @property
    def device(self) -> torch.device | None:
        device: torch.device | None = self.loader.device
        return device

    @property
    def num_workers(self) -> int:
        return self.loader.num_workers

    def warm_up(self) -> Any:
        """Run a few batches, so that workers are started and files are open, and return the first batch."""
        self._order.limit(0.0, 2 * self.num_workers or 1)
        first = None
        for batch in self.loader:
            self.step(batch)
            first = batch if first is None else first
        self.step.finish()
        self._order.restart()
        return first

    def run(self, duration: Duration) -> Run:
        samples = batches = 0
        start = perf_counter()
        self._order.limit(start + duration.most_s)
        if duration.epochs is not None:
            self._order.restart()
        for epoch in itertools.count(1):
            for batch in self.loader:
                samples += self.step(batch)
                batches += 1
            elapsed_s = perf_counter() - start
            if epoch == duration.epochs or (duration.epochs is None and elapsed_s >= duration.least_s):
                break
        self.step.finish()
        return Run(samples, batches, perf_counter() - start)

    def record(self, duration: Duration) -> Recording:
        """Run the loop with clocks in all stage functions; the clocks are removed at the end, even if the run fails."""
        recorder = Recorder(Stage.OTHER, self.step.finish if self.step.asynchronous else None, _ON_DEVICE)
        with Patches() as patches:
            install(patches, recorder)
            for part, stage in self.step.parts.items():
                patches.replace(self.step, part, recorder.timed(getattr(self.step, part), stage))
            if self.num_workers:
                self._install_queue(patches, recorder)
            else:
                install_dataset(self.dataset, patches, recorder)
            if self._probe is not None:
                self._probe.begin()
            recorder.start()
            run = self.run(duration)
            recorder.stop()
        return Recording(run, recorder.counts, [] if self._probe is None else self._probe.counted())

    def _install_queue(self, patches: Patches, recorder: Recorder) -> None:
        """Time the wait for workers separately from receiving their batches."""
        queue = self.loader._iterator._data_queue  # type: ignore[union-attr]  # noqa: SLF001  # torch has no name for it
        waits = "_poll" if hasattr(queue, "_poll") else "get"  # With pinned memory, a thread receives.
        patches.replace(queue, waits, recorder.timed(getattr(queue, waits), Stage.WAIT))

    def close(self) -> None:
        batches = self.loader._iterator  # noqa: SLF001  # torch ends them only when the loader is collected
        if batches is not None:
            self.loader._iterator = None  # noqa: SLF001
            batches._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
