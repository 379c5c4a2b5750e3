"""`Recorder`: time of a thread by stage of an epoch.

Each moment counts for the innermost active stage, so the times of all stages add up to the recorded time. The data path
itself contains no clocks: they are put around its functions during a measurement. A module that makes samples lists its
stage functions in ``STAGES``, and so do formats of third-party packages.
"""

from __future__ import annotations

import importlib
import math
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import reduce, wraps
from multiprocessing import queues
from threading import get_ident
from time import perf_counter
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from omearrow_ds.dataset.shared_block import SharedBlock
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.formats import formats

Array = np.ndarray[Any, Any]
# Stages in their order, with the work that each includes. In the last one, the main process waits for workers, or a
# worker waits for indices; it has no row in the table.
STAGE_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "open": "opening the collection again in another process",
        "read": "locating and reading stored bytes",
        "read+decode": "reading and decoding by the library of the format",
        "decode": "decoding stored bytes into pixels",
        "select": "copying small images in memory; others are cut in normalize",
        "normalize": "cutting, converting and writing into the batch",
        "transform": "",
        "collate": "allocating the batch and stacking samples",
        "hand-over": "transferring batches from workers to the main process",
        "transfer": "",
        "forward": "model and loss",
        "backward": "",
        "optimizer step": "",
        "other": "training loop, DataLoader of torch, sample order",
        "wait": "",
    }
)
COMPUTE = ("forward", "backward", "optimizer step")
OTHER_LIBRARIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "torch.utils.data._utils.fetch": {"_MapDatasetFetcher.fetch": "collate"},
        "torch.utils.data.dataloader": {"_MultiProcessingDataLoaderIter._next_data": "hand-over"},
        "zarr": {"Array.__getitem__": "read+decode"},
        "tifffile": {"TiffPageSeries.asarray": "read+decode"},
    }
)
_FIRST_COUNT = MappingProxyType({stage: 3 * index for index, stage in enumerate(STAGE_NOTES)})
_COST_CALLS = 2000


def stage_functions() -> Iterator[tuple[str, Any, str, str]]:
    """Yield stage functions: the imported module, the module or class with the function, its name, and its stage."""
    modules = {*OTHER_LIBRARIES, *(fmt.implementation for fmt in formats())}
    for module_name, module in list(sys.modules.items()):
        if module_name in modules or module_name.startswith("omearrow_ds."):
            for function, stage in vars(module).get("STAGES", OTHER_LIBRARIES.get(module_name, {})).items():
                if stage not in STAGE_NOTES:
                    known = ", ".join(STAGE_NOTES)
                    raise ArgumentError(f"{module_name}.STAGES: {stage!r} is not a stage; use one of {known}")
                *path, name = function.split(".")
                yield module_name, reduce(getattr, path, module), name, stage


class Recorder(ExitStack):
    """Clock that times functions in the thread that calls `start`, until the recorder is closed.

    ``counts`` has three numbers per stage: seconds, calls, and calls of other stages. Time outside of timed functions
    counts for the stage ``base``. ``finish`` is called before a stage on a device ends, to wait for pending work.
    """

    def __init__(self, base: str, finish: Callable[[], object] | None = None, counts: Any = None) -> None:
        super().__init__()
        self.counts = memoryview(bytearray(24 * len(STAGE_NOTES))).cast("d") if counts is None else counts
        self._active = [_FIRST_COUNT[base]]
        self._since = 0.0
        self._thread: int | None = None
        self._finish = finish

    def start(self) -> None:
        self._thread, self._since = get_ident(), perf_counter()

    def stop(self) -> None:
        self.counts[self._active[-1]] += perf_counter() - self._since
        self._thread = None

    def wrap_stages(self, dataset: Dataset[Any] | None) -> None:
        """Time all stage functions, and the methods of a dataset that creates samples in this process."""
        for _, owner, name, stage in stage_functions():
            self.wrap(owner, name, stage)
        if dataset is not None:
            self.wrap(type(dataset), "__getitems__", "other")
            if vars(dataset).get("_transform") is not None:
                self.wrap(dataset, "_transform", "transform")

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time a function of a module, class or object, until the recorder is closed."""
        undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
        setattr(owner, name, self.timed(getattr(owner, name), stage))
        self.callback(*undo)

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Return a function whose run time counts for ``stage``, except for the time of nested stages."""
        counts, active, own = self.counts, self._active, _FIRST_COUNT[stage]
        finish = self._finish if stage in ("transfer", *COMPUTE) else None

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._thread != get_ident():
                return function(*args, **kwargs)
            now = perf_counter()
            counts[active[-1]] += now - self._since
            self._since = now
            active.append(own)
            try:
                return function(*args, **kwargs)
            finally:
                if finish is not None:
                    finish()
                active.pop()
                counts[own + 1] += 1
                counts[active[-1] + 2] += 1
                now = perf_counter()
                counts[own] += now - self._since
                self._since = now

        return timed


def measure_clock_cost() -> tuple[float, float]:
    """Return the seconds that one timed call adds to the stage of the function, and to the stage of its caller."""
    costs = []
    for _ in range(5):
        recorder = Recorder("other")
        timed, plain_s = recorder.timed(int, "read"), timeit.timeit(int, number=_COST_CALLS)
        recorder.start()
        timeit.timeit(timed, number=_COST_CALLS)
        recorder.stop()
        own_s, outer_s = (recorder.counts[_FIRST_COUNT[stage]] for stage in ("read", "other"))
        costs.append((own_s / _COST_CALLS, max(0.0, outer_s - plain_s) / _COST_CALLS))
    return min(costs, key=sum)


def without_clocks(counts: Array, cost: tuple[float, float]) -> tuple[Array, float]:
    """Subtract the cost of clocks from (..., S, 3) counts; return (..., S) seconds and the total cost."""
    seconds, calls, nested = np.moveaxis(counts, -1, 0)
    cost_s = np.minimum(seconds, calls * cost[0] + nested * cost[1])
    return seconds - cost_s, float(cost_s.sum())


class WorkerClocks:
    """A ``worker_init_fn`` that times the stages in each worker, with counts in shared memory.

    Batches and their transfer between processes do not change.
    """

    def __init__(self, num_workers: int) -> None:
        self._shape = (num_workers, 2, len(STAGE_NOTES), 3)
        self._block = SharedBlock.create(8 * math.prod(self._shape))
        self._modules = {module for module, *_ in stage_functions()}  # Workers import the same modules.

    def _table(self) -> Array:
        """Return the counts of the main thread of each worker, and of the thread that sends batches."""
        return self._block.bytes.view(np.float64).reshape(self._shape)

    def counts(self) -> Array:
        """Return (W, S, 3) counts by worker and stage, which are complete while workers are idle."""
        return np.asarray(self._table().sum(axis=1))

    def __call__(self, worker_id: int) -> None:
        for module in self._modules:
            importlib.import_module(module)
        info = get_worker_info()
        assert info is not None
        making, sending = self._table()[worker_id].reshape(2, -1)
        recorder = Recorder("wait", counts=making.data)  # Never closed, as the worker ends with the profiler.
        recorder.wrap_stages(info.dataset)
        # Another thread sends a batch while the next one is made.
        pickler = queues._ForkingPickler  # type: ignore[attr-defined]  # noqa: SLF001  # Queues send with it.

        def dumps(*args: Any) -> Any:
            start = perf_counter()
            try:
                return pickler.dumps(*args)
            finally:
                sending[_FIRST_COUNT["hand-over"] :][:2] += perf_counter() - start, 1

        queues._ForkingPickler = SimpleNamespace(dumps=dumps, loads=pickler.loads)  # type: ignore[attr-defined]  # noqa: SLF001
        recorder.start()
