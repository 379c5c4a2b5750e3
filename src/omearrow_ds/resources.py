"""Limits of this process: memory and cores, of the machine, of its control groups, of its ulimits and its ranks."""

from __future__ import annotations

import functools
import math
import os
import resource
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# By version: limits, usage, and what of the usage is cached files that the system drops when memory is short.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))  # and the field of statm that counts towards it


_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own


def space_on_disk(path: Path, files: Iterable[Path]) -> tuple[int, int]:
    """Return the size of files in bytes, and the bytes that the file system gives them and the folders they are in.

    Folders count from ``path`` on, if it is one of them. Blocks of a file are whole: a hundred small files may take
    several times their size.
    """
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


@functools.cache
def read_ahead_bytes(device: int) -> int:
    """Return the read-ahead of the device whose number is ``st_dev`` of its files; 128 KiB where it is unknown."""
    try:
        file = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        return 1024 * int(file.read_text())
    except (OSError, ValueError):
        return 2**17


def is_private_file(status: os.stat_result) -> bool:
    """Whether a status is of a file of this user's that no other can write to: what caches take their own for."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not others_write


def image_bytes(shapes: np.ndarray[Any, Any], dtypes: Sequence[np.dtype[Any]]) -> np.ndarray[Any, Any]:
    """Return for each image, of shapes (n, 5) and as many dtypes, the bytes that it takes decoded, as int64."""
    itemsizes = dtypes[0].itemsize if one_of(dtypes) else np.array([dtype.itemsize for dtype in dtypes], np.int64)
    sizes: np.ndarray[Any, Any] = shapes.prod(axis=1) * itemsizes
    return sizes


def one_of(values: Sequence[Any]) -> bool:
    """Whether there is one distinct value, without a loop in Python over a list of the same object."""
    return len(values) > 0 and values.count(values[0]) == len(values)


def pixel_count(shape: Sequence[int]) -> int:
    """Return the number of pixels of ``shape``, exact whatever its size."""
    return math.prod(int(size) for size in shape)


def available_bytes() -> int:
    """Return the bytes that this process can still use without swapping, or being killed or refused them.

    The least of what the machine has free, what each control group around this process leaves it (``memory.max`` and
    ``memory.high``, its cached files not counted), and its own limits (``ulimit -v``, ``ulimit -d``).
    """
    machine = psutil.virtual_memory()
    return max(0, min([int(machine.available), *_left_by_groups(int(machine.total)), *_left_by_limits()]))


def preload_limit_bytes(available: int | None = None) -> int:
    """Return how many bytes of pixels are held in memory unless a caller says otherwise: half of those available."""
    return (available_bytes() if available is None else available) // 2


def _left_by_groups(total_bytes: int, root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Return what each control group around this process leaves it, of those with a limit below the machine's total."""
    left = []
    for folder, version in control_groups("memory", root, own).items():
        limit_files, usage_file, cached = _FILES[version]
        limit = min((limit for file in limit_files for limit in numbers(folder / file)), default=total_bytes)
        usage = numbers(folder / usage_file) if limit < total_bytes else ()
        if usage:
            left.append(limit - usage[0] + number_named(folder / "memory.stat", cached))
    return left


def _left_by_limits() -> list[int]:
    """Return what the limits of this process leave it, of those that are set."""
    found = [(resource.getrlimit(kind)[0], field) for kind, field in _LIMITS]
    limits = [(limit, field) for limit, field in found if limit != resource.RLIM_INFINITY]
    used = numbers(Path("/proc/self/statm")) if limits else ()
    return [limit - used[field] * resource.getpagesize() for limit, field in limits if used]


def available_cores() -> int:
    """Return the cores that this process can keep busy, at least 1.

    The least of its affinity and of the quotas of its control groups (a container or batch job), divided by the ranks
    that ``torchrun`` started on this host (``LOCAL_WORLD_SIZE``).
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = min([cores, *_quotas()])
    return max(1, int(cores) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def _quotas(root: Path = ROOT, own: Path = OWN) -> list[float]:
    """Return the cores that each control group around this process is allowed, of those that have a limit."""
    quotas = []
    for folder, version in control_groups("cpu", root, own).items():
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        found = [number for file in files for number in numbers(folder / file)]
        if len(found) == 2 and all(found):
            quota_us, period_us = found
            quotas.append(quota_us / period_us)
    return quotas


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> dict[Path, int]:
    """Return the folders of this process's groups for a controller, each with its version, 1 or 2, the root last."""
    return _folders(_read(own), controller, root)


@functools.lru_cache
def _folders(own: bytes, controller: str, root: Path) -> dict[Path, int]:
    """As `control_groups`, of what the system says of the groups of a process."""
    found: dict[Path, int] = {}
    for line in own.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.lstrip("/")
            found |= dict.fromkeys([folder, *folder.parents], 1 if controllers else 2)
    folders = {folder: version for folder, version in found.items() if folder.is_relative_to(root) and folder != root}
    return {**folders, root / controller: 1, root: 2}  # the two are there in a container that hides its own path


def numbers(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file; none if it is not there, or says ``max``."""
    words = _read(file).split()
    return tuple(map(int, words)) if all(map(bytes.isdigit, words)) else ()


def number_named(file: Path, name: str) -> int:
    """Return the number that stands after ``name`` in a file of such lines, 0 if there is none."""
    lines = (line.split() for line in _read(file).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name.encode()]), 0)


def _read(file: Path) -> bytes:
    """Return what a file of the system holds, nothing if it is not there."""
    try:
        with file.open("rb", buffering=0) as raw:
            return raw.read() or b""
    except OSError:
        return b""
