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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.options import WriteSettings
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.parts_source import Open
from omearrow_ds.storage.parts_stores import parts_store
from omearrow_ds.storage.parts_target import PartRecord, PartsTarget
from omearrow_ds.storage.planning import Material, PartitionOptions, describe_plan, hash_images, read_in_order
from omearrow_ds.storage.writing import Target, write
from omearrow_ds.text import count

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt.
_LARGE_BYTES = 2**24
_UNREADABLE = (FormatError, MissingPathError)


@dataclass(frozen=True)
class PartWriter:
    """Writer of the parts of a collection; ``plan`` has the indices of the images of each part."""

    material: Material
    plan: Sequence[Array]
    target: Target
    parts: PartsTarget
    skip_errors: bool

    def write_part(self, number: int) -> PartRecord:
        """Write a part and return its record; if another job finished the part earlier, return that job's record."""
        indices = self.plan[number]
        failed: list[Mapping[str, str]] = []
        with self.parts.store.temporary(f"{number:05d}{self.target.format.suffix}") as path:
            try:
                self._write(indices, path)
            except _UNREADABLE:
                if self.skip_errors:
                    indices, failed = self._readable(indices)
                if not failed:
                    raise
                self._write(indices, path)
            return self.parts.add(number, path, failed)

    def _write(self, indices: Array, path: Path) -> None:
        columns = self.material.columns.take(pa.array(indices))
        images = read_in_order(self.material, indices)
        write(images, replace(self.target, path=path, overwrite=False), columns, len(indices), progress=False)

    def _readable(self, indices: Array) -> tuple[Array, list[Mapping[str, str]]]:
        """Return the images of a part that can be read, and the errors of the others."""
        readable: list[int] = []
        failed: list[Mapping[str, str]] = []
        for index in indices.tolist():
            try:
                readable += [index for _ in self.material.images(np.array([index]))]
            except _UNREADABLE as error:
                failed.append({"id": self.material.image_ids[index], "error": str(error)})
        return np.array(readable, np.int64), failed


@functools.lru_cache(maxsize=1)
def _open_writer(pickled: bytes) -> PartWriter:
    """Return the writer that `make_parts` pickled, opened once per process; its source must be the planned one."""
    if multiprocessing.parent_process() is not None:
        return_memory()
    reopen, expected_hash, options, *others = pickle.loads(pickled)  # noqa: S301  # It comes from the executor of this job.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The planning process has already issued them.
        material = reopen()
    if hash_images(material) != expected_hash:
        raise FormatError(
            f"{material.source.path}: the source on host {socket.gethostname()} differs from the planned source; "
            f"provide the same source on all hosts, and do not change it before all parts are written"
        )
    return PartWriter(material, options.plan(material), *others)


def _write_in_worker(pickled: bytes, number: int) -> PartRecord:
    return _open_writer(pickled).write_part(number)


def make_parts(material: Material, target: Target, settings: WriteSettings, open_part: Open) -> PartsTarget:
    """Write the missing parts of a new or unfinished collection, or those in the share of ``settings.task``."""
    options = PartitionOptions.choose(settings, target.format.part_bytes)
    plan = options.plan(material)
    description = describe_plan(material, target, options, len(plan))
    parts = PartsTarget(parts_store(target.path, target.storage), open_part)
    parts.begin(description, overwrite=target.overwrite)
    index, num_tasks = settings.task or (1, 1)
    share = range((index - 1) * len(plan) // num_tasks, index * len(plan) // num_tasks)
    written = share if parts.is_published else parts.finished_parts()
    missing = [number for number in share if number not in written]
    if settings.executor is None:
        writer = PartWriter(material, plan, target, parts, settings.skips_errors)
        records = _write_here(writer, missing)
    else:
        source_hash = description["source"]["known"]
        arguments = material.opening(parts.store), source_hash, options, target, parts, settings.skips_errors
        records = _write_with_executor(settings.executor, pickle.dumps(arguments), missing, parts, len(plan))
    with tqdm(
        total=len(share),
        initial=len(share) - len(missing),
        unit="part",
        desc=target.format.label,
        disable=not settings.progress,
    ) as bar:
        try:
            for _ in records:
                bar.update()
        except KeyboardInterrupt:
            num_written = len(parts.finished_parts())
            raise KeyboardInterrupt(
                f"{target.path}: {num_written:,} of {count(len(plan), 'part')} are written; "
                f"repeat the command to continue"
            ) from None
    return parts


def _write_here(writer: PartWriter, numbers: Sequence[int]) -> Iterator[PartRecord]:
    for number in numbers:
        with _naming_part(writer.parts, number, len(writer.plan)):
            yield writer.write_part(number)


def _write_with_executor(
    executor: Executor, pickled: bytes, numbers: Sequence[int], parts: PartsTarget, total: int
) -> Iterator[PartRecord]:
    """Yield the records of parts as they are written; after an error, parts that have not begun are cancelled."""
    futures: dict[Future[PartRecord], int] = {}
    try:
        for number in numbers:
            with _naming_part(parts, number, total):
                futures[executor.submit(_write_in_worker, pickled, number)] = number
        for future in as_completed(futures):
            with _naming_part(parts, futures[future], total):
                yield future.result()
    finally:
        for future in futures:
            with suppress(NotImplementedError):  # Parsl does not support cancelling.
                future.cancel()


@contextmanager
def _naming_part(parts: PartsTarget, number: int, total: int) -> Iterator[None]:
    """Add the number of the part to any exception that ends its job."""
    path, part, remedy = parts.path, f"part {number + 1} of {total}", "repeat the command to write the missing parts"
    try:
        yield
    except BaseException as error:
        if isinstance(error, BrokenExecutor | CancelledError):
            raise WriteError(
                f"the executor lost its workers ({type(error).__name__}), e.g. because memory ran out",
                path=path,
                remedy="repeat the command with fewer workers to write the missing parts, or start again with a "
                "smaller part_bytes=",
            ) from error
        if isinstance(error, FileNotFoundError | WriteError) and not parts.store.is_begun:
            raise PathExistsError(
                "another process published or removed the collection", path=path, remedy="choose another path"
            ) from error
        if isinstance(error, OMEArrowDSError):
            hint = ", with on_error='skip' to skip unreadable images" if isinstance(error, _UNREADABLE) else ""
            raise type(error)(
                f"{part}: {error}", path=path, image=error.image, column=error.column, remedy=f"{remedy}{hint}"
            ) from error
        if isinstance(error, Exception):  # It is from the executor or the system.
            cause = f"{type(error).__name__}: {error}"
            raise WriteError(f"{part} could not be written: {cause}", path=path, remedy=remedy) from error
        raise


def return_memory() -> None:
    """Configure the C library to return large freed blocks to the system; only processes that write need this.

    By default, glibc keeps more memory the larger the freed blocks are: a process that wrote parts of 64 MiB with
    Vortex grew to 420 MB, with this setting to 250 MB. Smaller blocks are still kept and reused, because allocating
    them again took a fifth of the time. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
