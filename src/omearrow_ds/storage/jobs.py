"""Writing of a collection in parts: its images, their assignment to parts, and jobs that write one part each.

The assignment depends only on source and options, so it is equal in every process. A worker receives the names of
source and target, options and a number, and returns a small record.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds.codec import encode as codec
from omearrow_ds.errors import ColumnError, FormatError, MissingPathError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.options import WriteSettings, check_names
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.concat import Index, Open
from omearrow_ds.storage.formats import default_part_bytes
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.hashes import new_hash
from omearrow_ds.storage.manifest import PLATE
from omearrow_ds.storage.parts_stores import PartsStore, parts_store
from omearrow_ds.storage.parts_target import PartRecord, PartsTarget, count_written
from omearrow_ds.storage.published_parts import index_hash
from omearrow_ds.storage.verified import verified_where_stored
from omearrow_ds.storage.writing import Target, write

_GROUP_BYTES = 2**25  # Decoded images in memory at once.
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt.
_LARGE_BYTES = 2**24
WritePart = Callable[[int], object]
_UNREADABLE = (FormatError, MissingPathError)


class Material(Protocol):
    """Images to be written, with their index, and methods that read the pixels.

    ``options`` are JSON values that affect the written pixels in addition to the source.
    """

    source: Images
    index: Index
    options: Mapping[str, Any]

    def images(self, indices: Array) -> Iterator[codec.Image]:
        """Yield the images at sorted, distinct indices."""

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        """Return a picklable function that opens them elsewhere; data without a file name is written to ``store``."""


class SourceImages:
    """Images of a source to be written, verified if they have a checksum."""

    def __init__(self, source: Images) -> None:
        self.source, self.index = source, Index.of(source.header, [0, len(source)])
        self.options: Mapping[str, Any] = {}
        self._verified, checksums = verified_where_stored(source), self.index.checksums
        self._stored = [None] * len(source) if checksums is None else checksums.to_pylist()

    def images(self, indices: Array) -> Iterator[codec.Image]:
        for group in _split_indices(self, indices):
            yield from map(self._image, group.tolist(), self._verified.read(group.tolist()))

    def in_order(self) -> Iterator[codec.Image]:
        """Yield all images in order; use an image before requesting the next one, which may reuse its memory."""
        for start, images in self._verified.stream():
            yield from (self._image(index, pixels) for index, pixels in enumerate(images, start=start))

    def _image(self, index: int, pixels: Array) -> codec.Image:
        return codec.Image(pixels, self.index.image_ids[index], self.source.metadata(index), self._stored[index])

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        del store
        return partial(_open_source_images, opening_of(self.source))


def _open_source_images(open_source: Callable[[], Images]) -> Material:
    return SourceImages(open_source())


def opening_of(source: Images) -> Callable[[], Images]:
    return source.header.opened_by or partial(_itself, source)


def _itself(source: Images) -> Images:
    return source


def read_in_order(material: Material, indices: Array) -> Iterator[codec.Image]:
    """Yield images in the order of distinct indices; unsorted ones are read in sorted groups and held in memory."""
    if (np.diff(indices) > 0).all():
        yield from material.images(indices)
        return
    for group in _split_indices(material, indices):
        order = np.sort(group)
        images = dict(zip(order.tolist(), material.images(order), strict=True))
        yield from (images.pop(index) for index in group.tolist())


def _split_indices(material: Material, indices: Array) -> Iterator[Array]:
    """Yield consecutive indices whose images fit into memory."""
    index = material.index
    sizes_bytes = image_bytes(index.shapes[indices], [index.dtypes[row] for row in indices.tolist()])
    return (indices[group] for group in split_by_bytes(sizes_bytes, _GROUP_BYTES))


@dataclass(frozen=True)
class PartitionOptions:
    part_bytes: int  # Maximum decoded size of the images of a part; one image may exceed it.
    shuffle_seed: int | None = None  # Permutes images over all parts of a plate or group; None keeps their order.
    group_by: tuple[str, ...] = ()  # Columns in addition to the plate's; a part has one value of each.

    def plan(self, material: Material) -> list[Array]:
        """Return the indices of the images of each part, in the order in which they are stored."""
        sizes_bytes = image_bytes(material.index.shapes, material.index.dtypes)
        parts: list[Array] = []
        for number, group in enumerate(self._groups(material)):
            rows = group
            if self.shuffle_seed is not None:  # Raw random numbers, as NumPy may change its shuffles.
                draws = np.random.Philox(np.random.SeedSequence([self.shuffle_seed, number])).random_raw(len(rows))
                rows = rows[np.argsort(draws, kind="stable")]
            parts += [rows[part] for part in split_by_bytes(sizes_bytes[rows], self.part_bytes)]
        return parts or [np.zeros(0, np.int64)]

    def _groups(self, material: Material) -> list[Array]:
        """Return the indices of the images of each plate and group, in order of first occurrence."""
        columns, known = material.index.columns, material.index.columns.column_names
        unknown = next((name for name in self.group_by if name not in known), None)
        if unknown is not None:
            names = ", ".join(map(repr, known)) or "none"
            raise ColumnError(
                f"{material.source.header.path}: group_by={unknown!r}: no such column; pass one of {names}"
            )
        grouping = dict.fromkeys([*([PLATE] if PLATE in known else []), *self.group_by])
        nested = next((name for name in grouping if pa.types.is_nested(columns[name].type)), None)
        if nested is not None:
            problem = f"has the type {columns[nested].type}, which cannot be grouped"
            raise ColumnError(f"{material.source.header.path}: group_by={nested!r}: {problem}; pass another column")
        rows = np.arange(len(material.index.image_ids))
        if not grouping or not len(rows):
            return [rows]
        keys = list(map(str, range(len(grouping))))
        table = pa.table([*(columns[name] for name in grouping), rows], [*keys, "rows"])
        grouped = table.group_by(keys, use_threads=False).aggregate([("rows", "list")])
        return [group.values.to_numpy() for group in grouped["rows_list"]]


def describe_plan(material: Material, target: Target, options: PartitionOptions, num_parts: int) -> dict[str, Any]:
    """Return everything that determines the contents of the parts, as JSON values, to compare it in a later run."""
    source = material.source
    layout = {"format": target.format.name, **asdict(target.layout), "checksum": target.checksum, **asdict(options)}
    description = {
        "source": {
            "format": source.header.format.name,
            "images": len(material.index.image_ids),
            "chosen": [*source.header.image_column, *source.header.variant],
            "known": index_hash(material.index),
            "files": _files_hash(source),
            "options": dict(material.options),
        },
        "layout": layout,
        "parts": num_parts,
    }
    return dict(json.loads(json.dumps(description)))  # With lists instead of tuples.


def _files_hash(source: Images) -> str:
    """Return the hash of names, sizes and times of a source's files; a missing file has no size and time."""
    digest = new_hash()
    for file in sorted(source.details.files()):
        name = file.relative_to(source.header.path) if file.is_relative_to(source.header.path) else file
        try:
            status = os.stat(file)  # noqa: PTH116  # For tens of thousands of files, pathlib doubles the cost.
            version = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            version = "-"
        digest.update(f"{name} {version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_part(
    material: Material, plan: Sequence[Array], target: Target, parts: PartsTarget, skip_errors: bool, number: int
) -> PartRecord:
    """Write a part and return its record, or that of the job that finished it earlier; ``plan`` is of all parts."""
    readable: list[int] = []
    failed: list[Mapping[str, str]] = []
    with parts.store.temporary(f"{number:05d}{target.format.suffix}") as path:
        part_target = replace(target, path=path, overwrite=False)
        try:
            _write_images(material, plan[number], part_target)
        except _UNREADABLE:
            for index in plan[number].tolist() if skip_errors else ():
                try:
                    readable += [index for _ in material.images(np.array([index]))]
                except _UNREADABLE as error:
                    failed.append({"id": material.index.image_ids[index], "error": str(error)})
            if not failed:
                raise
            _write_images(material, np.array(readable, np.int64), part_target)
        return parts.add(number, path, failed)


def _write_images(material: Material, indices: Array, target: Target) -> None:
    columns = material.index.columns.take(pa.array(indices))
    write(read_in_order(material, indices), target, columns, len(indices), progress=False)


@functools.lru_cache(maxsize=1)
def _open_writer(pickled: bytes) -> WritePart:
    """Return the writer that `make_parts` pickled, opened once per process; its source must be the planned one."""
    if multiprocessing.parent_process() is not None:
        return_memory()
    reopen, expected_hash, options, *others = pickle.loads(pickled)  # noqa: S301  # It comes from the executor of this job.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The planning process has already issued them.
        material = reopen()
    if index_hash(material.index) != expected_hash:
        problem = f"the source on host {socket.gethostname()} differs from the planned source"
        remedy = "provide the same source on all hosts, and do not change it before all parts are written"
        refuse(material.source.path, problem, remedy)
    return partial(_write_part, material, options.plan(material), *others)


def _write_in_worker(pickled: bytes, number: int) -> object:
    return _open_writer(pickled)(number)


def make_parts(material: Material, target: Target, settings: WriteSettings, open_part: Open) -> PartsTarget:
    """Write the missing parts of a new or unfinished collection, or those in the share of ``settings.task``."""
    group_by = tuple(check_names("group_by", settings.group_by, "distinct column names")) if settings.group_by else ()
    options = PartitionOptions(
        settings.part_bytes or default_part_bytes(target.format), settings.shuffle_seed, group_by
    )
    plan = options.plan(material)
    description = describe_plan(material, target, options, len(plan))
    parts = PartsTarget(parts_store(target.path, settings.target_storage), open_part)
    parts.begin(description, overwrite=target.overwrite)
    index, num_tasks = settings.task or (1, 1)
    share = range((index - 1) * len(plan) // num_tasks, index * len(plan) // num_tasks)
    written = share if parts.is_published else parts.finished_parts()
    missing = [number for number in share if number not in written]
    others = target, parts, settings.skips_errors
    if settings.executor is None:
        write_part: WritePart = partial(_write_part, material, plan, *others)
    else:
        reopened = material.opening(parts.store), description["source"]["known"], options
        write_part = partial(_write_in_worker, pickle.dumps((*reopened, *others)))
    label, is_silent = target.format.label, not settings.progress
    with tqdm(total=len(share), initial=len(share) - len(missing), unit="part", desc=label, disable=is_silent) as bar:
        try:
            for _ in _run_jobs(settings.executor, write_part, missing, parts, len(plan)):
                bar.update()
        except KeyboardInterrupt:
            problem = count_written(len(parts.finished_parts()), len(plan))
            raise KeyboardInterrupt(f"{target.path}: {problem}; repeat the command to continue") from None
    return parts


def _run_jobs(
    executor: Executor | None, write_part: WritePart, numbers: Sequence[int], parts: PartsTarget, total: int
) -> Iterator[object]:
    """Write parts, and yield after each; after an error, parts that have not begun are cancelled."""
    futures: dict[Future[object], int] = {}
    try:
        for number in numbers:
            with _naming_part(parts, number, total):
                if executor is None:
                    yield write_part(number)
                else:
                    futures[executor.submit(write_part, number)] = number
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
            problem = f"the executor lost its workers ({type(error).__name__}), e.g. because memory ran out"
            repeated = "repeat the command with fewer workers to write the missing parts"
            remedy = f"{repeated}, or start again with a smaller part_bytes="
            raise WriteError(problem, path=path, remedy=remedy) from error
        if isinstance(error, FileNotFoundError | WriteError) and not parts.store.is_begun:
            problem = "another process published or removed the collection"
            raise PathExistsError(problem, path=path, remedy="choose another path") from error
        if isinstance(error, OMEArrowDSError):
            remedy += ", with on_error='skip' to skip unreadable images" if isinstance(error, _UNREADABLE) else ""
            problem, image, column = f"{part}: {error}", error.image, error.column
            raise type(error)(problem, path=path, image=image, column=column, remedy=remedy) from error
        if isinstance(error, Exception):  # It is from the executor or the system.
            cause = f"{type(error).__name__}: {error}"
            raise WriteError(f"{part} could not be written: {cause}", path=path, remedy=remedy) from error
        raise


def return_memory() -> None:
    """Configure glibc to return large freed blocks to the system; only processes that write need this.

    A process that wrote parts of 64 MiB with Vortex grew to 420 MB, with this setting to 250 MB. Smaller blocks are
    kept and reused, because allocating them again took a fifth of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
