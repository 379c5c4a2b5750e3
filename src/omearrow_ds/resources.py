"""Memory, cores and temporary folders of this process, limited by the system and by ranks."""

from __future__ import annotations

import functools
import math
import os
import resource
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from omearrow_ds.errors import MissingPathError

Array = np.ndarray[Any, Any]
ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# By version: files of limits, file of usage, and field of the page cache in it, which the system can reclaim.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", b"total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", b"inactive_file"),
}
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))  # With the field of statm that counts toward the limit.
_BLOCK_BYTES = 512  # Unit of st_blocks on all file systems.


def space_on_disk(path: Path, files: Iterable[Path]) -> tuple[int, int]:
    """Return the size of files in bytes, and the bytes that the disk allocates for them and their folders."""
    size_bytes, blocks, folders = 0, 0, set[Path]()
    for file in files:
        status = file.stat()
        size_bytes, blocks = size_bytes + status.st_size, blocks + status.st_blocks
        folder = file.parent
        while folder not in folders and folder.is_relative_to(path):
            folders.add(folder)
            folder = folder.parent
    blocks += sum(folder.stat().st_blocks for folder in folders)
    return size_bytes, blocks * _BLOCK_BYTES


def end_with_parent() -> None:
    """End this worker when its creator ends, which may not be its parent in the system: a fork server waits for all."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def read_ahead_bytes(device: int) -> int:
    """Return the read-ahead of the device with number ``st_dev``, or 128 KiB if it is unknown."""
    try:
        file = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        return 1024 * int(file.read_text())
    except (OSError, ValueError):
        return 2**17


def is_private_file(status: os.stat_result) -> bool:
    """Whether a regular file belongs to this user and no other user can write to it, as caches require."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not others_write


def image_bytes(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> Array:
    """Return the decoded size in bytes of each image, as int64, from shapes (n, 5) and n dtypes."""
    itemsizes = dtypes[0].itemsize if one_of(dtypes) else np.array([dtype.itemsize for dtype in dtypes], np.int64)
    sizes: Array = shapes.prod(axis=1) * itemsizes
    return sizes


def sum_bytes(sizes_bytes: Array) -> int:
    """Return the sum of int64 sizes as Python's int, because invalid shapes in many images exceed int64."""
    return (int((sizes_bytes >> 32).sum()) << 32) + int((sizes_bytes & 0xFFFF_FFFF).sum())


def split_by_bytes(sizes_bytes: Array, max_bytes: int) -> Iterator[slice]:
    """Yield slices of consecutive items; each slice has at most ``max_bytes`` in total, or is one larger item."""
    ends, start = sizes_bytes.cumsum(), 0
    while start < len(ends):
        limit_bytes = max_bytes + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(ends.searchsorted(limit_bytes, side="right")))
        yield slice(start, stop)
        start = stop


def one_of(values: Sequence[Any]) -> bool:
    """Whether ``values`` has at least one value and all its values are equal."""
    return len(values) > 0 and values.count(values[0]) == len(values)


def pixel_count(shape: Sequence[int]) -> int:
    return math.prod(int(size) for size in shape)


def available_bytes() -> int:
    """Return the bytes that this process can allocate: the least of machine, control groups and its own limits."""
    machine = psutil.virtual_memory()
    return max(0, min([int(machine.available), *_left_by_groups(int(machine.total)), *_left_by_limits()]))


def preload_limit_bytes(available: int | None = None) -> int:
    """Return the default limit of preloaded pixels in bytes, half of the available memory."""
    return (available_bytes() if available is None else available) // 2


def over_limit_message(n_bytes: int, name: str, limit_bytes: int, limit_name: str) -> str:
    """Return an error text if ``n_bytes`` exceed the limit of memory or disk, else an empty string."""
    needs = f"needs {n_bytes:,} bytes of {name} but the limit is {limit_bytes:,} ({limit_name})"
    return needs if n_bytes > limit_bytes else ""


@contextmanager
def workspace(parent: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Create a folder in ``parent`` that only this user can enter, and remove it with its content at the end."""
    if parent is not None and not Path(parent).is_dir():
        raise MissingPathError("no such folder", option="work_dir", value=str(parent), remedy="create it")
    folder = TemporaryDirectory(prefix="omearrow-ds-", dir=parent, ignore_cleanup_errors=True)
    try:
        with folder:
            yield Path(folder.name)
    finally:
        folder.cleanup()  # Again, because an interrupt can end the first removal.


def _left_by_groups(total_bytes: int) -> list[int]:
    left = []
    for folder, version in _control_groups(_read(OWN), "memory", ROOT).items():
        limit_files, usage_file, cached = _FILES[version]
        limit = min((limit for file in limit_files for limit in numbers(folder / file)), default=total_bytes)
        usage = numbers(folder / usage_file) if limit < total_bytes else ()
        if usage:
            lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
            cached_bytes = next((int(words[1]) for words in lines if words[:1] == [cached]), 0)
            left.append(limit - usage[0] + cached_bytes)
    return left


def _left_by_limits() -> list[int]:
    limits = [(resource.getrlimit(kind)[0], field) for kind, field in _LIMITS]
    limits = [(limit, field) for limit, field in limits if limit != resource.RLIM_INFINITY]
    used = numbers(Path("/proc/self/statm")) if limits else ()
    return [limit - used[field] * resource.getpagesize() for limit, field in limits if used]


def available_cores() -> int:
    """Return the number of cores by affinity and control groups, divided among the ranks on this host, at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = min([cores, *_quotas()])
    return max(1, int(cores) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def _quotas() -> list[float]:
    """Return the number of cores allowed by each control group of this process that has a limit."""
    quotas = []
    for folder, version in _control_groups(_read(OWN), "cpu", ROOT).items():
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        microseconds = [number for file in files for number in numbers(folder / file)]
        if len(microseconds) == 2 and all(microseconds):
            quotas.append(microseconds[0] / microseconds[1])
    return quotas


@functools.lru_cache
def _control_groups(own: bytes, controller: str, root: Path) -> dict[Path, int]:
    """Return the folder and version of each control group of a controller in ``/proc/self/cgroup``, the root last."""
    groups: dict[Path, int] = {}
    for line in own.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.lstrip("/")
            groups |= dict.fromkeys([folder, *folder.parents], 1 if controllers else 2)
    below = {folder: version for folder, version in groups.items() if folder.is_relative_to(root) and folder != root}
    return {**below, root / controller: 1, root: 2}  # The roots exist even if a container hides its path.


def numbers(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file; an empty tuple if it is missing or contains ``max``."""
    words = _read(file).split()
    return tuple(map(int, words)) if all(map(bytes.isdigit, words)) else ()


def _read(file: Path) -> bytes:
    try:
        with file.open("rb", buffering=0) as raw:
            return raw.read() or b""
    except OSError:
        return b""
