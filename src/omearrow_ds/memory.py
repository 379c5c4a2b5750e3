"""How much memory is free: of the machine, of a container or batch job, and of the limits of the process."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from omearrow_ds.control_groups import OWN, ROOT, control_groups, number_named, numbers

# Limit, usage, and what of the usage is cached files that the system drops when memory is short; versions 2 and 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))  # and the field of statm that counts towards it


def available_bytes() -> int:
    """Return the bytes that this process can still use without swapping, or being killed or refused them.

    The least of what the machine has free, what each control group around this process leaves it (``memory.max`` and
    ``memory.high``, its cached files not counted), and its own limits (``ulimit -v``, ``ulimit -d``).
    """
    return max(0, min([int(psutil.virtual_memory().available), *_left_by_groups(), *_left_by_limits()]))


def preload_limit_bytes(available: int | None = None) -> int:
    """Return how many bytes of pixels are held in memory unless a caller says otherwise: half of those available."""
    return (available_bytes() if available is None else available) // 2


def _left_by_groups(root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Return what each control group around this process leaves it, of those that have a limit."""
    left = []
    for folder in control_groups("memory", root, own):
        for limit_file, usage_file, cached in _FILES:
            limit, usage = numbers(folder / limit_file), numbers(folder / usage_file)
            if limit and usage:
                left.append(limit[0] - usage[0] + number_named(folder / "memory.stat", cached))
    return left


def _left_by_limits() -> list[int]:
    """Return what the limits of this process leave it, of those that are set."""
    used = numbers(Path("/proc/self/statm"))
    set_to = [(resource.getrlimit(kind)[0], field) for kind, field in _LIMITS]
    page_bytes = resource.getpagesize()
    return [limit - used[field] * page_bytes for limit, field in set_to if used and limit != resource.RLIM_INFINITY]
