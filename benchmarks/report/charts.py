"""Small charts of one benchmark each over the stored runs, for the SVG of the template."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.gate.text import duration, number
from benchmarks.report.history import Series
from benchmarks.report.stored_runs import StoredRun

WIDTH, HEIGHT = 200, 64
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 192, 8, 56
_LEAST_SPAN = 1.5  # Least ratio of top to bottom, so that noise does not look like a regression.


class Mark(NamedTuple):
    """One run: the positions of its two values, and its tooltip."""

    x: float
    y_least: float
    y_middle: float
    tooltip: str


class Chart(NamedTuple):
    """Chart of a benchmark: its name, the chart as text, and the newest value.

    ``top`` and ``bottom`` are the values at the ends of the vertical axis. ``least`` and ``middle`` are the two lines
    as ``points`` of SVG. The second is empty if both are equal. The oldest mark is first.
    """

    label: str
    detail: str
    description: str
    last: str
    top: str
    bottom: str
    least: str
    middle: str
    marks: list[Mark]


def run_names(runs: Iterable[StoredRun]) -> list[str]:
    """Return number, commit and date of each run."""
    names = []
    for run in runs:
        parts = (run.path.name.partition("_")[0], run.commit[:7] or "no commit", moment(run.stored) or "no date")
        names.append(" · ".join(parts))
    return names


def moment(stamp: str) -> str:
    """Return an ISO 8601 time with minutes, without seconds."""
    return stamp[:16].replace("T", " ")


def chart(series: Series, runs: Sequence[str]) -> Chart:
    """Return the chart of one benchmark. ``runs`` is the result of `run_names`."""
    low, high = _ends(series)

    def y_of(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low), 1)

    step = (_RIGHT - _LEFT) / max(len(runs) - 1, 1)
    marks = []
    for point in series.points:
        figures = [f"min {_text(point.least, series)}", f"median {_text(point.middle, series)}"]
        tooltip = " · ".join([runs[point.run], *(figures if series.is_time else [_text(point.least, series)])])
        marks.append(Mark(round(_LEFT + step * point.run, 1), y_of(point.least), y_of(point.middle), tooltip))
    last, newest = _text(series.points[-1].least, series), series.points[-1].run == len(runs) - 1
    return Chart(
        label=series.label,
        detail=series.detail,
        description=_describe(series, last),
        last=last if newest else f"{last}, not measured in the last run",
        top=_text(high, series),
        bottom=_text(low, series),
        least=" ".join(f"{mark.x},{mark.y_least}" for mark in marks),
        middle=" ".join(f"{mark.x},{mark.y_middle}" for mark in marks) if series.is_time else "",
        marks=marks,
    )


def _ends(series: Series) -> tuple[float, float]:
    low, high = min(point.least for point in series.points), max(point.middle for point in series.points)
    if low <= 0:
        return min(low, 0.0), high * 1.1 if high > 0 else 1.0
    wider = math.sqrt(max(_LEAST_SPAN * low / high, 1.0))
    return low / wider, high * wider


def _text(value: float, series: Series) -> str:
    return duration(value * 1e6) if series.is_time else f"{number(value)} x"


def _describe(series: Series, last: str) -> str:
    least = [point.least for point in series.points]
    name, statistic = f"{series.label}, {series.detail}", "minimum" if series.is_time else "ratio"
    if len(least) == 1:
        return f"{name}: {statistic} {last} in one run"
    ends = f"{_text(min(least), series)} to {_text(max(least), series)}"
    return f"{name}: {statistic} {ends} over {len(least)} runs, last {last}"
