"""Small charts of one benchmark each, through the stored runs: what the template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.gate.text import duration, number
from benchmarks.report.history import Series
from benchmarks.report.stored_runs import StoredRun

WIDTH, HEIGHT = 200, 64
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 192, 8, 56
_LEAST_SPAN = 1.5  # from bottom to top, at least: a shared machine's noise shall not look like a cliff


class Mark(NamedTuple):
    """One run: where its two figures are, and what is said when it is pointed at."""

    x: float
    y_least: float
    y_middle: float
    said: str


class Chart(NamedTuple):
    """A benchmark's chart: what it is of, the chart in words, and the newest figure.

    ``top`` and ``bottom`` are what the ends of the vertical axis stand for, ``least`` and ``middle`` the two lines as
    SVG's ``points``, the second empty where both are one. The marks are oldest first.
    """

    label: str
    detail: str
    said: str
    last: str
    top: str
    bottom: str
    least: str
    middle: str
    marks: list[Mark]


def run_names(runs: Iterable[StoredRun]) -> list[str]:
    """Say of each run its number, commit and date."""
    names = []
    for run in runs:
        parts = (run.path.name.partition("_")[0], run.commit[:7] or "no commit", moment(run.stored) or "no date")
        names.append(" · ".join(parts))
    return names


def moment(stamp: str) -> str:
    """Write an ISO 8601 time to the minute."""
    return stamp[:16].replace("T", " ")


def chart(series: Series, runs: Sequence[str]) -> Chart:
    """Lay out one benchmark; ``runs`` is what `run_names` says of each."""
    low, high = _ends(series)

    def y_of(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low), 1)

    step = (_RIGHT - _LEFT) / max(len(runs) - 1, 1)
    marks = []
    for point in series.points:
        figures = [f"min {_text(point.least, series)}", f"median {_text(point.middle, series)}"]
        said = " · ".join([runs[point.run], *(figures if series.is_time else [_text(point.least, series)])])
        marks.append(Mark(round(_LEFT + step * point.run, 1), y_of(point.least), y_of(point.middle), said))
    last, newest = _text(series.points[-1].least, series), series.points[-1].run == len(runs) - 1
    return Chart(
        label=series.label,
        detail=series.detail,
        said=_said(series, last),
        last=last if newest else f"{last}, not in the last run",
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


def _said(series: Series, last: str) -> str:
    least = [point.least for point in series.points]
    name, figure = f"{series.label}, {series.detail}", "min" if series.is_time else "ratio"
    if len(least) == 1:
        return f"{name}: {figure} {last} in one run"
    ends = f"{_text(min(least), series)} to {_text(max(least), series)}"
    return f"{name}: {figure} of {len(least)} runs {ends}, last {last}"
