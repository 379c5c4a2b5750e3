"""`Probe`: what measures inside workers, by their own clocks.

A worker counts as the program does, and writes its counts to a row of memory that it shares with the program: batches
and the way that they are handed over stay as they are.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from multiprocessing import queues
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from omearrow_ds.advise.profile.hooks import FETCH, Patches, find, hooks, install, install_dataset
from omearrow_ds.advise.profile.recorder import Counts, Recorder
from omearrow_ds.advise.profile.stages import Stage
from omearrow_ds.dataset.shared_block import SharedBlock

_Array = np.ndarray[Any, Any]
_FIELDS = 3 * len(Stage) + 3  # counts, seconds and calls of handing over, process id


class WorkerCounts(NamedTuple):
    """Counts of one worker, and which process it is."""

    pid: int
    counts: Counts


class Probe:
    """Counts in each of so many workers of a loader, whose ``worker_init_fn`` it is."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._block = SharedBlock.create(num_workers * _FIELDS * 8)
        self._modules = {hook.module for hook in hooks()}  # a worker will need the same
        self._begun = self._table().copy()

    def _table(self) -> _Array:
        return self._block.bytes.view(np.float64).reshape(self._num_workers, _FIELDS)

    def __call__(self, worker_id: int) -> None:
        """Begin to count, in a worker."""
        for module in self._modules:
            importlib.import_module(module)
        info = get_worker_info()
        assert info is not None
        row = self._table()[worker_id]
        row[-1] = os.getpid()
        recorder = Recorder(Stage.WAIT)
        patches = Patches()  # never undone: the worker is the profiler's own, and ends with it
        install(patches, recorder)
        install_dataset(info.dataset, patches, recorder)
        owner, name = find(FETCH)
        setattr(owner, name, _published(vars(owner)[name], recorder, row))
        queues._ForkingPickler = _timed_pickler(row)  # type: ignore[attr-defined]  # noqa: SLF001  # what a queue sends with
        recorder.start()

    def begin(self) -> None:
        """Count from here, in the program, while the workers have nothing to do."""
        self._begun = self._table().copy()

    def counted(self) -> list[WorkerCounts]:
        """Return what was counted since `begin`, in the program, while the workers have nothing to do."""
        table = self._table()
        workers = []
        for now, begun in zip(table, self._begun, strict=True):
            seconds, calls, nested = (now - begun)[:-3].reshape(3, -1)
            seconds[Stage.HAND_OVER] += now[-3] - begun[-3]
            calls[Stage.HAND_OVER] += now[-2] - begun[-2]
            counts = Counts(seconds.tolist(), calls.astype(int).tolist(), nested.astype(int).tolist())
            workers.append(WorkerCounts(int(now[-1]), counts))
        return workers


def _published(fetch: Callable[..., Any], recorder: Recorder, row: _Array) -> Callable[..., Any]:
    """Return the function that makes a batch, which then also writes what was counted."""

    def fetched(*args: Any, **kwargs: Any) -> Any:
        try:
            return fetch(*args, **kwargs)
        finally:
            row[:-3] = np.array(recorder.counts, np.float64).reshape(-1)

    return fetched


def _timed_pickler(row: _Array) -> type:
    """Return the pickler of queues, timed: it runs in a thread of its own, beside the making of the next batch."""
    pickler: Any = queues._ForkingPickler  # type: ignore[attr-defined]  # noqa: SLF001

    class Timed(pickler):  # type: ignore[misc]
        @classmethod
        def dumps(cls, value: Any, protocol: int | None = None) -> Any:
            start = perf_counter()
            try:
                return pickler.dumps(value, protocol)
            finally:
                row[-3] += perf_counter() - start
                row[-2] += 1

    return Timed
