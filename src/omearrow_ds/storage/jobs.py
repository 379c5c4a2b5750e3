"""Jobs: each makes one part of a collection, in this process or in a worker of an executor.

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
from omearrow_ds.storage.hashes import hash_of
from omearrow_ds.storage.manifest import SUFFIX, Published
from omearrow_ds.storage.materials import Material, as_ordered
from omearrow_ds.storage.parts import Open
from omearrow_ds.storage.place import Place, size_of
from omearrow_ds.storage.placed import Run, runs_of
from omearrow_ds.storage.planning import Cut, Plan, described, known_of
from omearrow_ds.storage.unfinished import Record, Unfinished, place_of
from omearrow_ds.storage.writing import Target, write
from omearrow_ds.text import count

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt.
_LARGE_BYTES = 2**24
_UNREADABLE = (FormatError, MissingPathError)


@dataclass(frozen=True)
class Work:
    """Images, plan and target of the parts to make."""

    material: Material
    plan: Plan
    target: Target
    place: Place
    opening: Open
    skip_errors: bool

    def make(self, number: int) -> Record:
        """Write a part and return its record; if another job finished the part earlier, return that job's record."""
        with self.place.made_at(f"{number:05d}{self.target.format.suffix}") as temporary:
            return self._make(number, temporary)

    def _make(self, number: int, made: Path) -> Record:
        numbers = self.plan.part(number)
        failed: list[Mapping[str, str]] = []
        try:
            self._write(numbers, made)
        except _UNREADABLE:
            numbers, failed = self._readable(numbers) if self.skip_errors else (numbers, [])
            if not failed:
                raise
            self._write(numbers, made)
        name = f"{number:05d}-{hash_of(made)}{self.target.format.suffix}"
        record = Record(Published(name, len(numbers), size_of(made), self._places(made)), failed)
        return Unfinished(self.place, self.opening).add(number, made, record)

    def _places(self, made: Path) -> list[Run]:
        if not self.target.format.by_ranges:
            return []
        with self.opening(made) as source:
            return runs_of(source)

    def _write(self, numbers: Array, made: Path) -> None:
        columns = self.material.columns.take(pa.array(numbers)) if self.material.columns.num_columns else None
        images = as_ordered(self.material, numbers)
        write(images, replace(self.target, path=made, overwrite=False), columns, len(numbers), progress=False)

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
class _Recipe:
    """How to open a `Work` in another process; ``known`` is a hash of its images, which is compared there."""

    opening: Callable[[], Material]
    cut: Cut
    target: Target
    place: Place
    open_part: Open
    skip_errors: bool
    known: str
    files: str

    def open(self) -> Work:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The planning process has already issued them.
            material = self.opening()
        if known_of(material) != self.known:
            raise FormatError(
                f"{material.source.path}: on host {socket.gethostname()} differs from the planned source; provide the "
                f"same source on all hosts, unchanged until all parts are written"
            )
        return Work(material, self.cut.plan(material), self.target, self.place, self.open_part, self.skip_errors)


@functools.lru_cache(maxsize=1)
def _opened(recipe: bytes) -> Work:
    """Return the `Work` of a pickled recipe, opened once per process."""
    if multiprocessing.parent_process() is not None:
        return_memory()
    found: _Recipe = pickle.loads(recipe)  # noqa: S301  # It comes from the executor of this job.
    return found.open()


def _make_there(recipe: bytes, number: int) -> Record:
    return _opened(recipe).make(number)


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
        """Return the job settings in ``settings``; raise `ArgumentError` for an unsupported executor."""
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
    material: Material, target: Target, cut: Cut, jobs: Jobs, opening: Open, *, progress: bool
) -> Unfinished:
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
    parts_target = place_of(target.path, target.storage)
    unfinished = Unfinished(parts_target, opening)
    unfinished.begin(description, overwrite=target.overwrite)
    first, stop = 0, len(plan)
    if jobs.task is not None:
        index, num_tasks = jobs.task
        first, stop = (index - 1) * len(plan) // num_tasks, index * len(plan) // num_tasks
    written = range(len(plan)) if unfinished.published else unfinished.made
    missing = [number for number in range(first, stop) if number not in written]
    work = Work(material, plan, target, parts_target, opening, jobs.skip_errors)
    total = stop - first
    with tqdm(
        total=total, initial=total - len(missing), unit="part", desc=target.format.label, disable=not progress
    ) as bar:
        try:
            if jobs.executor is None:
                for number in missing:
                    with _naming(unfinished, number, len(plan)):
                        work.make(number)
                    bar.update()
            else:
                source = description["source"]
                recipe = _Recipe(
                    material.opening(parts_target),
                    cut,
                    target,
                    parts_target,
                    opening,
                    jobs.skip_errors,
                    source["known"],
                    source["files"],
                )
                for _ in _made_by(jobs.executor, pickle.dumps(recipe), missing, unfinished, len(plan)):
                    bar.update()
        except KeyboardInterrupt:
            num_written = len(unfinished.made)
            raise KeyboardInterrupt(
                f"{target.path}: {num_written:,} of {count(len(plan), 'part')} are written; "
                f"repeat the command to continue"
            ) from None
    return unfinished


def _made_by(
    executor: Executor, recipe: bytes, wanted: Sequence[int], unfinished: Unfinished, total: int
) -> Iterator[Record]:
    """Yield the records of parts as they are made; after an error, parts that have not begun are cancelled."""
    futures: dict[Future[Record], int] = {}
    try:
        for number in wanted:
            futures[executor.submit(_make_there, recipe, number)] = number
        for future in as_completed(futures):
            with _naming(unfinished, futures[future], total):
                yield future.result()
    except BrokenExecutor as error:
        raise _lost(unfinished.path, error) from error
    finally:
        for future in futures:
            with suppress(NotImplementedError):  # Parsl does not support cancelling.
                future.cancel()


class _naming:  # noqa: N801  # reads as a phrase: with _naming(unfinished, number, total):
    """Adds the name of the part to any exception that ends its job."""

    def __init__(self, unfinished: Unfinished, number: int, total: int) -> None:
        self._unfinished, self._path, self._part = unfinished, unfinished.path, f"part {number + 1} of {total}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        remedy = "repeat the command to write the missing parts"
        if isinstance(error, BrokenExecutor | CancelledError):
            raise _lost(self._path, error) from error
        if isinstance(error, FileNotFoundError | WriteError) and not self._unfinished.place.begun:
            raise PathExistsError(
                f"{self._path}: another process published or removed the collection; choose another path"
            ) from error
        if isinstance(error, OMEArrowDSError):
            hint = ", with on_error='skip' to skip unreadable images" if isinstance(error, _UNREADABLE) else ""
            raise type(error)(f"{self._path}: {self._part}: {error}; {remedy}{hint}") from error
        if isinstance(error, Exception):  # It is from the executor or the system.
            cause = f"{type(error).__name__}: {error}"
            raise WriteError(f"{self._path}: {self._part} could not be written: {cause}; {remedy}") from error


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
