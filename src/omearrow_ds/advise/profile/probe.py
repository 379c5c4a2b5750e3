"""`Probe`: measurements inside workers, by their own clocks.

A worker counts like the main process, and writes its counts to a row of shared memory. Batches and their transfer
between processes do not change.
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
_FIELDS = 3 * len(Stage) + 3  # Counts, seconds and calls of transfers, process id.


class WorkerCounts(NamedTuple):
    pid: int
    counts: Counts


class Probe:
    """A ``worker_init_fn`` that records the time per stage in each worker process of a loader."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._block = SharedBlock.create(num_workers * _FIELDS * 8)
        self._modules = {hook.module for hook in hooks()}  # Workers import the same modules.
        self._begun = self._table().copy()

    def _table(self) -> _Array:
        return self._block.bytes.view(np.float64).reshape(self._num_workers, _FIELDS)

    def __call__(self, worker_id: int) -> None:
        for module in self._modules:
            importlib.import_module(module)
        info = get_worker_info()
        assert info is not None
        row = self._table()[worker_id]
        row[-1] = os.getpid()
        recorder = Recorder(Stage.WAIT)
        patches = Patches()  # Never undone, as the worker belongs to the profiler and ends with it.
        install(patches, recorder)
        install_dataset(info.dataset, patches, recorder)
        owner, name = find(FETCH)
        setattr(owner, name, _published(vars(owner)[name], recorder, row))
        queues._ForkingPickler = _timed_pickler(row)  # type: ignore[attr-defined]  # noqa: SLF001  # Queues send with it.
        recorder.start()

    def begin(self) -> None:
        """Save the current counts as the start of a recording. The main process calls it while the workers are idle."""
        self._begun = self._table().copy()

    def counted(self) -> list[WorkerCounts]:
        """Return the counts since `begin`. The main process calls it while the workers are idle."""
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
    """Return the function that makes a batch, wrapped so that it also publishes the counts."""

    def fetched(*args: Any, **kwargs: Any) -> Any:
        try:
            return fetch(*args, **kwargs)
        finally:
            row[:-3] = np.array(recorder.counts, np.float64).reshape(-1)

    return fetched


def _timed_pickler(row: _Array) -> type:
    """Return the pickler of queues with a clock; it runs in a separate thread, while the next batch is made."""
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
