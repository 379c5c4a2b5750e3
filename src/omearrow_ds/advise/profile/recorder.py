"""`Recorder`: time of a thread by stage of an epoch, and `Breakdown`: the wall time of a recorded loop by stage.

Each moment counts for the innermost active stage, so the times of all stages add up to the recorded time. The data path
itself contains no clocks: they are put around its functions during a measurement. Formats of third-party packages list
their functions in ``STAGES``.
"""

from __future__ import annotations

import importlib
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce, wraps
from importlib.util import resolve_name
from math import inf
from multiprocessing import queues
from threading import get_ident
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from omearrow_ds.dataset.shared_memory import Array, SharedBlock
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.formats import formats

# Stages in their order, with the work that each includes.
STAGE_NOTES = {
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
}
COMPUTE = ("forward", "backward", "optimizer step")
CLOCKS = "clocks"
# Functions of each stage, as MODULE:FUNCTION,... of this package (with a dot) or of other libraries.
_FUNCTIONS = {
    "read": ".dataset.stored_images:StoredImages._fetch .storage.formats._zarr_chunks:fetch_chunks",
    "read+decode": """
        .storage.formats.arrow:ArrowTable._image_structs
        .storage.formats.duckdb:DuckDBTable._query
        .storage.formats.lance:LanceTable.fetch
        .storage.formats.ome_arrow:ChunkTable.decode_group
        .storage.formats.parquet:ParquetTable._read_group
        .storage.formats.vortex:VortexTable._images_of_scalars,Rows.take
        tifffile:TiffPageSeries.asarray
        zarr:Array.__getitem__
    """,
    "decode": """
        .codec.decode:ImageBlock.__init__,ImageBlock.__getitem__,ImageBlock.images,ImageBlock.stack
        .storage.formats._lance_pages:PixelPages.images
        .storage.formats._parquet_pages:EncodedPages.images
        .storage.image_extents:ImageExtents.images
        .storage.formats._table:_cut
        .storage.formats._zarr_chunks:decode_chunk
    """,
    "select": ".axes:Cut.__call__ .kernels.gather:DecodedRows.sample,DecodedRows.batch",
    "normalize": """
        .dataset.collection:assemble,scale,fill_in_threads
        .dataset.crop_boxes:CropResize.__call__,scale,crop
        .kernels.gather:scale,gather,crops,fill_in_threads
    """,
    "collate": """
        .dataset.samples:StoredSamples._allocate,StoredSamples._collated
        torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch
    """,
    "hand-over": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._next_data",
    "transfer": ".loader.device_transfer:map_tensors",
}
TIMED_FUNCTIONS = tuple(
    (resolve_name(module, "omearrow_ds"), function, stage)
    for stage, lines in _FUNCTIONS.items()
    for module, functions in (line.split(":") for line in lines.split())
    for function in functions.split(",")
)
# In the last stage, the main process waits for workers, or a worker waits for indices; it has no row in the table.
_FIRST_COUNT = {stage: 3 * index for index, stage in enumerate((*STAGE_NOTES, "wait"))}
_COST_CALLS = 2000


def stage_functions() -> Iterator[tuple[str, Any, str, str]]:
    """Yield stage functions: the imported module, the module or class with the function, its name, and its stage."""
    timed = list(TIMED_FUNCTIONS)
    for module_name in {fmt.implementation or "" for fmt in formats()}:
        for function, stage in getattr(sys.modules.get(module_name), "STAGES", {}).items():
            if stage not in STAGE_NOTES:
                known = ", ".join(STAGE_NOTES)
                raise ArgumentError(f"{module_name}.STAGES: {stage!r} is not a stage; use one of {known}")
            timed.append((module_name, function, stage))
    for module_name, function, stage in timed:
        if module_name in sys.modules:
            *path, name = function.split(".")
            yield module_name, reduce(getattr, path, sys.modules[module_name]), name, stage


class Recorder(ExitStack):
    """Clock that times functions in the thread that calls `start`, until the recorder is closed.

    ``counts`` has three numbers per stage: seconds, calls, and calls of other stages. Time outside of timed functions
    counts for the stage ``base``.
    ``finish`` is called before a stage on a device ends, to wait for pending work.
    """

    def __init__(self, base: str, finish: Callable[[], object] | None = None, counts: Any = None) -> None:
        super().__init__()
        self.counts = memoryview(bytearray(24 * len(_FIRST_COUNT))).cast("d") if counts is None else counts
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
            collection = getattr(dataset, "_collection", None)
            if collection is not None:  # Stages of other threads are not timed.
                self._replace(collection, "_decodes_in_threads", value=False)
            if vars(dataset).get("_transform") is not None:
                self.wrap(dataset, "_transform", "transform")

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time a function of a module, class or object, until the recorder is closed."""
        self._replace(owner, name, self.timed(getattr(owner, name), stage))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
        setattr(owner, name, value)
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


class WorkerClocks:
    """A ``worker_init_fn`` that times the stages in each worker, with counts in shared memory."""

    def __init__(self, num_workers: int) -> None:
        self._block = SharedBlock.create(2 * 8 * 3 * len(_FIRST_COUNT) * num_workers)
        self._modules = {module for module, *_ in stage_functions()}  # Workers import the same modules.

    def _by_thread(self) -> Array:
        """Return (W, 2, S, 3) counts of the main thread of each worker, and of the thread that sends batches."""
        return self._block.bytes.view(np.float64).reshape(-1, 2, len(_FIRST_COUNT), 3)

    def counts(self) -> Array:
        """Return (W, S, 3) counts by worker and stage, which are complete while workers are idle."""
        return np.asarray(self._by_thread().sum(axis=1))

    def __call__(self, worker_id: int) -> None:
        for module in self._modules:
            importlib.import_module(module)
        info = get_worker_info()
        assert info is not None
        making, sending = self._by_thread()[worker_id].reshape(2, -1)
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


def time_clock() -> tuple[float, float]:
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


class Run(NamedTuple):
    samples: int
    batches: int
    wall_s: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s


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


def break_down(run: Run, cost: tuple[float, float], program: Array, workers: Array, pids: Iterable[int]) -> Breakdown:
    """Return the wall time of a run per stage, with a separate row for the time that the clocks took.

    ``program`` and ``workers`` are the counts of the main process (S, 3) and of the workers (W, S, 3), and ``cost`` is
    that of the clocks per call. The wait for workers is attributed to the stages in proportion to the seconds of the
    workers. The ceiling of a stage is the current time divided by the time without that stage. With workers, that time
    is the longer of two: the main process's own work, and the workers' parallel work.
    """
    counted_s, clocks_s = without_clocks(program, cost)
    program_s, wait_s = counted_s[:-1], float(counted_s[-1])
    program_s[-1] += run.wall_s - clocks_s - counted_s.sum()  # In the stage "other".
    workers_s, _ = without_clocks(workers, cost)
    worker_s, by_worker_s = workers_s[:, :-1].sum(axis=0), workers_s[:, :-1].sum(axis=1)
    own_s, busy_s = program_s.sum(), worker_s.sum()
    shares = worker_s / busy_s if busy_s > 0 else np.array([stage == "hand-over" for stage in STAGE_NOTES])
    now_s = own_s + wait_s
    # The workers overlap as much without a stage as they do now. Without other stages, they may never wait.
    parallel_s = np.where(worker_s > 0, now_s * (1 - shares), min(busy_s / max(1, len(workers_s)), now_s))
    with np.errstate(divide="ignore"):
        ceilings = now_s / np.maximum(own_s - program_s, parallel_s)
    calls = program[:, 1] + workers[:, :, 1].sum(axis=0)
    columns = np.stack([program_s + wait_s * shares, ceilings, program_s, worker_s, calls[:-1]], axis=1)
    notes = {**STAGE_NOTES, CLOCKS: "time of the measurement itself, outside all stages"}
    rows = []
    for (stage, note), row in zip(notes.items(), [*columns.tolist(), (clocks_s, inf, clocks_s, 0.0, 0)], strict=True):
        total_s, ceiling, main_s, in_workers_s, num_calls = row
        relative = total_s / run.wall_s, total_s / run.samples, None if ceiling == inf else ceiling
        rows.append(StageTime(stage, total_s, *relative, main_s, in_workers_s, int(num_calls), note))
    worker_times = map(WorkerTime, pids, by_worker_s.tolist(), workers_s[:, -1].tolist())
    return Breakdown(run.wall_s, run.samples, run.batches, wait_s, tuple(worker_times), (), tuple(rows))
