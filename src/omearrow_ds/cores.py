"""How many cores this process may use: by its affinity, its control groups, and the ranks beside it."""

from __future__ import annotations

import os
from pathlib import Path

from omearrow_ds.control_groups import OWN, ROOT, control_groups, numbers


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
    return [
        quota
        for folder, version in control_groups("cpu", root, own).items()
        if (quota := _quota(folder, version)) is not None
    ]


def _quota(folder: Path, version: int) -> float | None:
    """Return the cores that a control group is allowed, None if all."""
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    found = [number for file in files for number in numbers(folder / file)]
    if len(found) != 2 or not all(found):
        return None
    quota_us, period_us = found
    return quota_us / period_us
