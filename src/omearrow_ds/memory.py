"""How much memory is free: of the machine, and of the control group that a container or a batch job runs in."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Return the bytes that this process can still use without swapping, or being killed by its control group."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            free = min(free, max(0, int(limit) - int(usage)))
    return free
