"""Environment of a run: versions of libraries, machine, and git commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pathlib import Path

_DISTRIBUTION = "omearrow-ds"


def versions() -> dict[str, str | None]:
    """Return the versions of the package and its requirements, or None for those that are not installed."""
    names = {match[0] for line in metadata.requires(_DISTRIBUTION) or () if (match := re.match(r"[\w.-]+", line))}
    return {name: _version(name) for name in sorted(names | {_DISTRIBUTION})}


def machine() -> dict[str, Any]:
    """Return CPU, cores, memory, operating system and Python."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores_total": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def fingerprint(cores: int) -> dict[str, Any]:
    """Return the properties of the machine that affect times and do not vary between runs, as the clock rate does.

    ``cores`` is the number of cores that this process may use.
    """
    known = machine()
    return {
        "CPU": known["cpu"],
        "cores": cores,
        "cores in all": known["cores_total"],
        "CPU flags": sorted(set((_cpuinfo("flags|Features") or "").split())),
        "Python": known["python"],
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }


def machine_class(cores: int) -> dict[str, Any]:
    """Return the properties that machines with comparable times share, apart from pace; coarser than `fingerprint`."""
    model = [
        _cpuinfo(field) for field in ("vendor_id|CPU implementer", "cpu family|CPU architecture", "model|CPU part")
    ]
    return {
        "CPU": " ".join(map(str, model)) if all(model) else _cpu_model(),
        "cores": cores,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": ".".join((_version("torch") or "").split(".")[:2]),
    }


def git(root: Path) -> dict[str, Any]:
    """Return the commit checked out at ``root`` and whether files differ from it, or None without git."""
    status = _git(root, "status", "--porcelain")
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str | None:
    """Return a field of the first core from ``/proc/cpuinfo``, or None; ``field`` is a regular expression."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  # Not a path of the project.
            match = re.search(rf"^(?:{field})\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _git(root: Path, *words: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    done = subprocess.run(  # noqa: S603  # The arguments are our own.
        [program, "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
