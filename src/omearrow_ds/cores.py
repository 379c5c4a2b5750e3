"""How many cores this process may use: by its affinity, its control groups, and the ranks beside it."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Return the cores that this process can keep busy, at least 1.

    The least of its affinity and of the quotas of its control groups (a container or batch job), divided by the ranks
    that ``torchrun`` started on this host (``LOCAL_WORLD_SIZE``).
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = min([cores, *_quotas()])
    return max(1, int(cores) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def _quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the cores that each control group around this process is allowed, of those that have a limit."""
    return [quota for folder in _groups(root, own) if (quota := _quota(folder)) is not None]


def _groups(root: Path, own: Path) -> list[Path]:
    """Return the folders of this process's control groups, from its own to the root; versions 2 and 1."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    found = [root, root / "cpu"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            folder = (root / "cpu" if controllers else root) / path.lstrip("/")
            found += [folder, *(each for each in folder.parents if each.is_relative_to(root))]
    return list(dict.fromkeys(found))


def _quota(folder: Path) -> float | None:
    """Return the cores that a control group is allowed, None if all: version 2, or else version 1."""
    numbers = _numbers(folder / "cpu.max")
    if not numbers:
        numbers = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
    if len(numbers) != 2 or not all(numbers):
        return None
    quota_us, period_us = numbers
    return quota_us / period_us


def _numbers(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file; none if it is not there, or says ``max``."""
    try:
        words = file.read_text(encoding="ascii").split()
    except OSError:
        return ()
    return tuple(int(word) for word in words) if all(word.isdecimal() for word in words) else ()
