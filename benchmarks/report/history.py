"""Stored runs comparable with the last one, oldest first, and the series of each benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.report.drift import Drifts, Measured, find
from benchmarks.report.ranks import WINDOW
from benchmarks.report.ratios import OPERATIONS, TITLES
from benchmarks.report.stored_runs import DamagedRunError, Setting, StoredRun, newest_first, read_run
from benchmarks.tracks import TRACKS

_TRACKS = MappingProxyType({track.number: f"Track {track.number}: {track.title}" for track in TRACKS})
_TABLES = MappingProxyType({name: title.partition(":")[0] for name, title in TITLES.items()})
MOST_RUNS = 20  # More runs make the file too large to send, and the charts too dense.


class Point(NamedTuple):
    """Figures of a benchmark in one run: the index of the run, the minimum and the median."""

    run: int
    least: float
    middle: float


@dataclass(frozen=True, slots=True)
class Series:
    """Benchmark over the runs, oldest first. Runs that did not measure it have no point.

    ``group`` is its track or table and operation, ``label`` its format, ``detail`` its parameters. Points are seconds
    if ``is_time``, and multiples of the decoded pixels otherwise.
    """

    group: str
    label: str
    detail: str
    is_time: bool
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class History:
    """Stored runs of one machine, workload and profile, oldest first.

    ``unread`` counts earlier runs of the machine with any workload, ``others`` runs of other workloads or profiles.
    ``drifts`` is computed from more runs than are shown.
    """

    runs: list[StoredRun]
    unread: int = 0
    others: int = 0
    drifts: Drifts = field(default_factory=Drifts)

    def series(self) -> dict[str, list[Series]]:
        """Return the series of all benchmarks by group, in the order of tracks and tables."""
        by_name: dict[str, Series] = {}
        for index, run in enumerate(self.runs):
            for name, bench in run.benchmarks.items():
                series = by_name.setdefault(name, _series(bench))
                series.points.append(_point(index, bench, is_time=series.is_time))
        groups: dict[str, list[Series]] = {}
        for series in by_name.values():
            groups.setdefault(series.group, []).append(series)
        return dict(sorted(groups.items(), key=lambda item: _group_index(item[0])))


def read_history(storage: Path, setting: Setting, problems: list[str]) -> History:
    """Read the last runs with a setting. Damaged files are skipped and listed in ``problems``."""
    runs: list[StoredRun] = []
    measured: list[Measured] = []
    unread, others, files = 0, 0, newest_first(storage / setting.machine_id)
    for read, file in enumerate(files, 1):
        try:
            run = read_run(file, storage)
        except DamagedRunError as error:
            problems.append(str(error))
            continue
        is_in_charts = len(runs) < MOST_RUNS
        # The folder name has only a hash of the machine, so the setting in the file decides.
        if not run.is_like(setting):
            others += is_in_charts
            continue
        measured.append(Measured.from_run(run))
        if is_in_charts:
            runs.append(run)
            unread = len(files) - read if len(runs) == MOST_RUNS else 0
        if len(measured) == 2 * WINDOW:  # Busy and partial runs are left out later.
            break
    return History(runs[::-1], unread, others, find(measured[::-1]))


def _series(bench: Mapping[str, Any]) -> Series:
    extra = _mapping(bench.get("extra_info"))
    group = _group(extra)
    params = [value for name, value in _mapping(bench.get("params")).items() if name != "format_name"]
    detail = " · ".join(_words(params)) or str(bench.get("name", "")).removeprefix("test_")
    label = str(extra.get("label") or bench.get("name", ""))
    return Series(group, label, detail, is_time=extra.get("table") != "memory")


def _point(run_index: int, bench: Mapping[str, Any], *, is_time: bool) -> Point:
    if is_time:
        return Point(run_index, float(bench["stats"]["min"]), float(bench["stats"]["median"]))
    ratio = float(_mapping(bench.get("extra_info")).get("ratio") or 0.0)
    return Point(run_index, ratio, ratio)


def _group(extra: Mapping[str, Any]) -> str:
    """Return the track or table of a benchmark, and its operation."""
    operation = str(extra.get("operation", ""))
    if "track" in extra:
        number = extra["track"]
        return f"{_TRACKS.get(number, f'Track {number}')} · {operation}"
    if "table" not in extra:
        return "Others"
    compared = OPERATIONS.get(extra["table"], {}).get(operation)
    return f"{_TABLES.get(extra['table'], 'Other tables')} · {compared.title if compared else operation}"


def _group_index(group: str) -> int:
    titles = [*_TRACKS.values(), *_TABLES.values()]
    return next((index for index, title in enumerate(titles) if group.startswith(title)), len(titles))


def _words(values: Iterable[Any]) -> list[str]:
    return [str(value).replace("_", " ") for value in values if value is not None]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
