"""Jobs that write one part of a collection each, in this process or in a worker of an executor.

A worker receives the names of source and target, options and a number, and returns a small record.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds.errors import (
    ArgumentError,
    FormatError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
    WriteError,
)
from omearrow_ds.options import PARTS, WriteSettings
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.manifest import SUFFIX
from omearrow_ds.storage.materials import Material, as_ordered
from omearrow_ds.storage.parts import Open
from omearrow_ds.storage.parts_stores import parts_store
from omearrow_ds.storage.parts_target import PartRecord, PartsTarget
from omearrow_ds.storage.planning import Cut, Plan, described, known_of
from omearrow_ds.storage.writing import Target, write
from omearrow_ds.text import count

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt.
_LARGE_BYTES = 2**24
_UNREADABLE = (FormatError, MissingPathError)


@dataclass(frozen=True)
class PartWriter:
    """Writer of the parts of a collection, according to a plan."""

    material: Material
    plan: Plan
    target: Target
    parts: PartsTarget
    skip_errors: bool

    def write_part(self, number: int) -> PartRecord:
        """Write a part and return its record; if another job finished the part earlier, return that job's record."""
        numbers = self.plan.part(number)
        failed: list[Mapping[str, str]] = []
        with self.parts.store.temporary(f"{number:05d}{self.target.format.suffix}") as path:
            try:
                self._write(numbers, path)
            except _UNREADABLE:
                numbers, failed = self._readable(numbers) if self.skip_errors else (numbers, [])
                if not failed:
                    raise
                self._write(numbers, path)
            return self.parts.add(number, path, failed)

    def _write(self, numbers: Array, path: Path) -> None:
        columns = self.material.columns.take(pa.array(numbers)) if self.material.columns.num_columns else None
        images = as_ordered(self.material, numbers)
        write(images, replace(self.target, path=path, overwrite=False), columns, len(numbers), progress=False)

    def _readable(self, numbers: Array) -> tuple[Array, list[Mapping[str, str]]]:
        """Return the images of a part that can be read, and the errors of the others."""
        good: list[int] = []
        failed: list[Mapping[str, str]] = []
        for number in numbers.tolist():
            try:
                good += [number for _ in self.material.images(np.array([number]))]
            except _UNREADABLE as error:
                failed.append({"id": self.material.image_ids[number], "error": str(error)})
        return np.array(good, np.int64), failed


@dataclass(frozen=True)
class _WriterSpec:
    """Arguments of a `PartWriter` of another process; the hash of its images in ``source`` is compared there."""

    reopen: Callable[[], Material]
    cut: Cut
    target: Target
    parts: PartsTarget
    skip_errors: bool
    source: Mapping[str, Any]

    def open(self) -> PartWriter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The planning process has already issued them.
            material = self.reopen()
        if known_of(material) != self.source["known"]:
            raise FormatError(
                f"{material.source.path}: the source on host {socket.gethostname()} is not the one that was planned; "
                f"provide the same source on all hosts, and do not change it before all parts are written"
            )
        return PartWriter(material, self.cut.plan(material), self.target, self.parts, self.skip_errors)


@functools.lru_cache(maxsize=1)
def _open_writer(spec: bytes) -> PartWriter:
    """Return the writer of a pickled `_WriterSpec`, opened once per process."""
    if multiprocessing.parent_process() is not None:
        return_memory()
    unpickled: _WriterSpec = pickle.loads(spec)  # noqa: S301  # It comes from the executor of this job.
    return unpickled.open()


def _write_in_worker(spec: bytes, number: int) -> PartRecord:
    return _open_writer(spec).write_part(number)


@dataclass(frozen=True)
class Jobs:
    """Settings of the jobs that write parts: executor, error handling, and which share of the parts to write.

    Attributes
    ----------
    executor
        Any `concurrent.futures.Executor`; None makes the parts in this process, one by one.
    skip_errors
        Leave out images that cannot be read, and list them.
    task
        ``(K, N)``: share K of N of the parts, counted from 1, without publishing; None is all of them.
    """

    executor: Executor | None = None
    skip_errors: bool = False
    task: tuple[int, int] | None = None

    @classmethod
    def choose(cls, settings: WriteSettings) -> Jobs:
        """Return the job settings of a call; raise `ArgumentError` if its executor is not supported."""
        executor = settings.executor
        if executor is not None and not isinstance(executor, Executor):
            raise ArgumentError(
                option="executor",
                value=executor,
                allowed="a concurrent.futures.Executor such as a process pool, or client.get_executor() of a Dask "
                "client",
            )
        context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
        if context is not None and context.get_start_method() == "fork":
            raise ArgumentError(
                "executor: a pool of forked processes hangs with libraries that start threads (Lance, DuckDB); "
                "create it with ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
            )
        return cls(executor, settings.skips_errors, settings.task)


def chosen_parts(target: Target, settings: WriteSettings) -> tuple[Cut, Jobs] | None:
    """Return the rules and job settings for writing a collection in parts; None for a target that is not in parts.

    Raises
    ------
    ArgumentError
        If an option is invalid, or is for targets in parts only.
    """
    if target.in_parts:
        return Cut.choose(settings, target.format.part_bytes), Jobs.choose(settings)
    for name, value in settings.chosen.items():
        if name in PARTS:
            shown_value = ... if name == "executor" else value
            problem = f"needs a target with the suffix {SUFFIX}, not {target.path}"
            raise ArgumentError(problem, option=name, value=shown_value, remedy="leave it out")
    return None


def make_parts(
    material: Material, target: Target, cut: Cut, jobs: Jobs, open_part: Open, *, progress: bool
) -> PartsTarget:
    """Write the missing parts of a new or unfinished collection, or those in the share that ``jobs.task`` selects.

    Raises
    ------
    PathExistsError
        If the unpublished collection has another source or other options.
    OMEArrowDSError
        If a part could not be made.
    """
    plan = cut.plan(material)
    description = described(material, target, cut, plan)
    parts = PartsTarget(parts_store(target.path, target.storage), open_part)
    parts.begin(description, overwrite=target.overwrite)
    index, num_tasks = jobs.task or (1, 1)
    share = range((index - 1) * len(plan) // num_tasks, index * len(plan) // num_tasks)
    written = share if parts.is_published else parts.finished_parts()
    missing = [number for number in share if number not in written]
    with tqdm(
        total=len(share),
        initial=len(share) - len(missing),
        unit="part",
        desc=target.format.label,
        disable=not progress,
    ) as bar:
        try:
            if jobs.executor is None:
                writer = PartWriter(material, plan, target, parts, jobs.skip_errors)
                for number in missing:
                    with _PartErrors(parts, number, len(plan)):
                        writer.write_part(number)
                    bar.update()
            else:
                reopen, source = material.opening(parts.store), description["source"]
                spec = pickle.dumps(_WriterSpec(reopen, cut, target, parts, jobs.skip_errors, source))
                for _ in _write_with_executor(jobs.executor, spec, missing, parts, len(plan)):
                    bar.update()
        except KeyboardInterrupt:
            num_written = len(parts.finished_parts())
            raise KeyboardInterrupt(
                f"{target.path}: {num_written:,} of {count(len(plan), 'part')} are written; "
                f"repeat the command to continue"
            ) from None
    return parts


def _write_with_executor(
    executor: Executor, spec: bytes, numbers: Sequence[int], parts: PartsTarget, total: int
) -> Iterator[PartRecord]:
    """Yield the records of parts as they are written; after an error, parts that have not begun are cancelled."""
    futures: dict[Future[PartRecord], int] = {}
    try:
        for number in numbers:
            futures[executor.submit(_write_in_worker, spec, number)] = number
        for future in as_completed(futures):
            with _PartErrors(parts, futures[future], total):
                yield future.result()
    except BrokenExecutor as error:
        raise _lost(parts.path, error) from error
    finally:
        for future in futures:
            with suppress(NotImplementedError):  # Parsl does not support cancelling.
                future.cancel()


class _PartErrors:
    """Context that adds the number of the part to any exception that ends its job."""

    def __init__(self, parts: PartsTarget, number: int, total: int) -> None:
        self._parts, self._part = parts, f"part {number + 1} of {total}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        path, remedy = self._parts.path, "repeat the command to write the missing parts"
        if isinstance(error, BrokenExecutor | CancelledError):
            raise _lost(path, error) from error
        if isinstance(error, FileNotFoundError | WriteError) and not self._parts.store.is_begun:
            raise PathExistsError(
                f"{path}: another process published or removed the collection; choose another path"
            ) from error
        if isinstance(error, OMEArrowDSError):
            hint = ", with on_error='skip' to skip unreadable images" if isinstance(error, _UNREADABLE) else ""
            raise type(error)(f"{path}: {self._part}: {error}; {remedy}{hint}") from error
        if isinstance(error, Exception):  # It is from the executor or the system.
            cause = f"{type(error).__name__}: {error}"
            raise WriteError(f"{path}: {self._part} could not be written: {cause}; {remedy}") from error


def _lost(path: Path, error: BaseException) -> WriteError:
    return WriteError(
        f"{path}: the executor lost its workers ({type(error).__name__}), for example killed for their memory; "
        f"repeat the command with fewer workers to write the missing parts, or start again with a smaller "
        f"part_bytes="
    )


def return_memory() -> None:
    """Configure the C library to return large freed blocks to the system; only processes that write need this.

    By default, glibc keeps more memory the larger the freed blocks are: a process that wrote parts of 64 MiB with
    Vortex grew to 420 MB, with this setting to 250 MB. Smaller blocks are still kept and reused, because allocating
    them again took a fifth of the time. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
