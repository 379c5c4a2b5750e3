"""Stored runs of pytest-benchmark: their machine and workload, and reading and writing them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pytest_benchmark.storage.file import FileStorage
from pytest_benchmark.utils import safe_dumps

from benchmarks.report.control import Controls

KEY = "omearrow_ds"  # Key of the setting in the stored JSON.
CONTROL = "control"  # Key of the result of `benchmarks.report.control.Control.result`.
_SHOWN = {"ops", "rounds", "iterations", "outliers"}
_COMPARED = ("min", "max", "mean", "stddev", "median", "iqr")  # Names that --benchmark-compare-fail accepts.
_MOST_FLAGS = 6


@dataclass(frozen=True, slots=True)
class Setting:
    """Machine, workload and profile, on which times depend in addition to the code.

    Attributes
    ----------
    machine : dict
        `benchmarks.gate.environment.fingerprint`.
    workload, description : str
        `benchmarks.support.workload.Workload.key`, and a description of the workload.
    profile : str
        Name of the profile, which sets how long to measure.
    """

    machine: dict[str, Any]
    workload: str
    description: str
    profile: str

    @property
    def machine_id(self) -> str:
        """Name of the folder of the machine's runs: CPU, cores and versions, and a hash of all properties."""
        digest = hashlib.blake2b(json.dumps(self.machine, sort_keys=True).encode(), digest_size=4).hexdigest()
        words = [f"{self.machine['CPU']:.40}", f"{self.machine['cores']} cores", self.machine["Python"]]
        words += [f"{name}{self.machine[name]}" for name in ("torch", "numpy")]
        return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in [*words, digest])

    def as_dict(self) -> dict[str, Any]:
        """Return the setting as a dict to be stored."""
        return asdict(self)

    def same_workload(self, other: Setting) -> bool:
        """Whether both settings have the same images and profile."""
        return (self.workload, self.profile) == (other.workload, other.profile)

    def say_workload(self) -> str:
        """Return the description of the workload; its key distinguishes workloads with equal descriptions."""
        return f"{self.description}, profile {self.profile} (key {self.workload})"

    def machine_differences(self, stored: Setting) -> list[str]:
        """Return the differences between this machine and that of a stored run."""
        names = dict.fromkeys([*self.machine, *stored.machine])
        pairs = [(name, stored.machine.get(name), self.machine.get(name)) for name in names]
        return [_difference(name, then, now) for name, then, now in pairs if then != now]


def _difference(name: str, then: Any, now: Any) -> str:
    if not (isinstance(then, list) and isinstance(now, list)):
        return f"{name} {then}, now {now}"
    lists = [f"{sign} {few(sorted(names), _MOST_FLAGS)}" for sign, names in _signed(set(then), set(now)) if names]
    return f"{name}: {', '.join(lists)}"


def _signed(then: set[str], now: set[str]) -> list[tuple[str, set[str]]]:
    return [("no more", then - now), ("now also", now - then)]


def few(names: list[str], most: int) -> str:
    """Return the first ``most`` names as text, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Stored run: its file, its benchmarks by full name as pytest-benchmark stores them, its commit and its time.

    Values that an older version did not store are missing (None or ""). The path of a file in the storage is relative.
    """

    path: Path
    setting: Setting | None
    benchmarks: dict[str, dict[str, Any]]
    commit: str = ""
    stored: str = ""
    control: Controls | None = None

    def is_like(self, setting: Setting) -> bool:
        """Whether the run has the same machine, workload and profile."""
        mine = self.setting
        return mine is not None and mine.machine == setting.machine and mine.same_workload(setting)


class DamagedRunError(ValueError):
    """The file of a stored run is damaged."""


class RunStorage:
    """Storage of runs for pytest-benchmark's session, with one folder per machine.

    pytest-benchmark's own storage skips unreadable files and gives concurrent runs the same number. ``path`` is the
    folder of all machines, and ``saved`` the file of this run.
    """

    def __init__(self, files: FileStorage, machine_id: str) -> None:
        files.default_machine_id = machine_id
        self._files = files
        self._folder = Path(files.path) / machine_id
        self.path = Path(files.path)
        self.saved: Path | None = None

    def save(self, output_json: dict[str, Any], save: str) -> None:
        """Store a run under the next number with an atomic rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / ".lock"):
            last = max(map(_number, _numbered(self._folder)), default=0)
            target = self._folder / f"{last + 1:04}_{save}.json"
            partial = target.with_suffix(".partial")
            for left in self._folder.glob("*.partial"):  # Killed runs left them, as we hold the lock.
                left.unlink(missing_ok=True)
            try:
                partial.write_text(safe_dumps(output_json, indent=4), encoding="utf-8")
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
        self.saved = target

    def last_like(self, setting: Setting, names: set[str]) -> StoredRun | None:
        """Return the last run with this setting that has the most of the named benchmarks, or None.

        Later runs with fewer of the benchmarks are skipped. A run must have at least one of them.

        Raises
        ------
        pytest.UsageError
            If a file read during the search is damaged.
        """
        best, most = None, 0
        for file in newest_first(self._folder):
            run = self.read(file)
            if run.is_like(setting):
                shared = len(run.benchmarks.keys() & names)
                if shared > most:
                    best, most = run, shared
                if shared == len(names):
                    break
        return best

    def named(self, name: str) -> list[StoredRun]:
        """Return the runs that match a number, a glob with or without a machine's folder, or a path.

        Raises
        ------
        pytest.UsageError
            If no run matches, or if a run is damaged.
        """
        try:
            files = self._files.query(name)
        except ValueError as error:
            raise pytest.UsageError(f"--benchmark-compare={name}: {error}") from error
        if not files:
            stored_numbers = few(sorted(file.stem for file in _numbered(self._folder)), 5)
            raise pytest.UsageError(
                f"--benchmark-compare={name}: no such run in {self.path}; "
                f"stored of this machine: {stored_numbers or 'none'}; one of another machine is FOLDER/NUM"
            )
        return [self.read(file) for file in files]

    def count(self) -> tuple[int, int]:
        """Return the number of stored runs of this machine, and of other folders."""
        mine = len(_numbered(self._folder))
        return mine, len(_numbered(self.path)) + len(_numbered(self.path, "*/*.json")) - mine

    def read(self, file: Path) -> StoredRun:
        """Read a stored run.

        Raises
        ------
        pytest.UsageError
            If the file is damaged.
        """
        try:
            return read_run(file, self.path)
        except DamagedRunError as error:
            raise pytest.UsageError(f"{error}: delete it, or name another by --benchmark-compare=NUM") from error


def read_run(file: Path, folder: Path) -> StoredRun:
    """Read a stored run; its path is shown relative to the storage's folder.

    Raises
    ------
    DamagedRunError
        If the file is damaged.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        benchmarks = {bench["fullname"]: bench for bench in content["benchmarks"]}
        setting = Setting(**content[KEY]) if KEY in content else None
        _check_stats([bench["stats"] for bench in benchmarks.values()])
        commit, stored = content.get("commit_info") or {}, content.get("datetime") or ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedRunError(f"the stored run {file} is damaged ({type(error).__name__}: {error})") from error
    relative = file.relative_to(folder) if file.is_relative_to(folder) else file
    known = str(commit.get("id") or ""), str(stored), content.get(CONTROL)
    return StoredRun(relative, setting, benchmarks, *known)


def _check_stats(stats: list[dict[str, Any]]) -> None:
    # A NaN would pass every --benchmark-compare-fail.
    if not all(one.keys() >= _SHOWN for one in stats):
        raise ValueError("a benchmark lacks figures")
    if not all(math.isfinite(one[name]) for one in stats for name in _COMPARED):
        raise ValueError("a time is no number")


def newest_first(folder: Path) -> list[Path]:
    """Return the files of a machine's runs, the latest first."""
    return sorted(_numbered(folder), key=_number, reverse=True)


def _numbered(folder: Path, pattern: str = "*.json") -> list[Path]:
    return [file for file in folder.glob(pattern) if re.match(r"\d+_", file.name)]


def _number(file: Path) -> int:
    return int(file.name.split("_")[0])
