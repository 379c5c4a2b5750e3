"""How much memory is free: of the machine, of a container or batch job, and of the limits of the process."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from omearrow_ds.control_groups import OWN, ROOT, control_groups, number_named, numbers

# By version: limits, usage, and what of the usage is cached files that the system drops when memory is short.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))  # and the field of statm that counts towards it


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
