"""One figure per track. Each format has the same position and color in all axes, also without a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report.tables import IN_MEMORY, case, formats_of, narrow, why
from benchmarks.tracks import track_of
from benchmarks.tracks.track import Panel, Row, Track, in_order

# The eight colors of Okabe and Ito are distinct for all common types of color blindness. Formats also differ by
# position, so marks and hatches distinguish values at the same position.
_OKABE_ITO = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#F0E442", "#009E73", "#CC79A7", "#000000")
_GOLDEN = (5**0.5 - 1) / 2  # Step on the circle of hues that keeps any number of hues distinct.


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return one color per name: eight that color-blind readers can distinguish, then generated ones."""
    others = (to_hex(tuple(hsv_to_rgb((index * _GOLDEN % 1, 0.5, 0.75)))) for index in count(1))
    return dict(zip(names, chain(_OKABE_ITO, others), strict=False))  # The colors are unlimited.


# Stages are not formats, so they have other colors.
_SHADES = ("#08519c", "#4a90c8", "#a6cee3", "#b15928", "#f28e2b", "#ffd08a", "#d9d9d9", "#8c8c8c")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "////", "....", "xxxx", "++++", "oooo")
_GREY, _EDGE = "#9a9a9a", "#303030"

_LOG_SPAN = 10  # A logarithmic axis of less than one decade has at most one label.


@dataclass(frozen=True, slots=True)
class _Position:
    key: str
    label: str
    colour: str
    y: float
    height: float = 1.0


def draw(track: int, table: pa.Table, path: Path, context: Mapping[str, Any]) -> None:
    """Write `figure` as PNG. The suffix of ``path`` is ignored."""
    figure(track, table, context).savefig(path, format="png", dpi=120)


def figure(track: int, table: pa.Table, context: Mapping[str, Any]) -> Figure:
    """Return the figure of one track.

    The title has the number of the track and ``context["workload"]``, if present. The figure does not use pyplot and
    its global state.
    """
    rows, formats, described = table.to_pylist(), formats_of(table), track_of(track, table.schema)
    panels = described.panels_of(rows)
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = ceil(len(panels) / columns)
    height = max(4.8, 1.6 + 0.4 * len(formats))
    drawn = Figure(figsize=(5.8 * columns, 0.9 + height * lines), layout="constrained")
    title_lines = [f"Track {track}: {described.title}", *([context["workload"]] if "workload" in context else ())]
    drawn.suptitle("\n".join(title_lines))
    panel_axes = list(drawn.subplots(lines, columns, squeeze=False).flat)
    for panel, axes in zip(panels, panel_axes, strict=False):
        _draw_panel(axes, described, panel, rows, formats)
    for axes in panel_axes[len(panels) :]:
        axes.remove()
    return drawn


def _draw_panel(axes: Axes, track: Track, panel: Panel, rows: Iterable[Row], formats: Mapping[str, str]) -> None:
    selected, chosen = narrow(
        (row for row in rows if row["operation"] in panel.operations or not panel.operations), panel.fixed
    )
    series, positions = _series(selected, panel.series), _positions(selected, formats)
    values: list[float] = []
    for position in positions:
        position_rows = [row for row in selected if position.key in (row["format"], case(row))]
        values += _draw_format(axes, track, panel, position_rows, series, position)
    _scale(axes, panel, track.metric(panel.metrics[0]).unit, values)
    axes.set_yticks(range(len(positions)), [position.label for position in positions])
    axes.set_ylim(len(positions) - 0.5, -0.5)
    fixed_values = [_value_label(name, value) for name, value in chosen.items()]
    axes.set_title(
        " · ".join([panel.title, *fixed_values]),
        loc="left",
        fontsize=10.5,
        weight="bold",
        pad=38 if panel.kind == "shares" else 22,
    )
    _draw_legend(axes, panel, series)


def _positions(rows: Sequence[Row], formats: Mapping[str, str]) -> list[_Position]:
    """Return the positions on the axis: all formats, if one has a row, and the cases measured in memory."""
    cases = dict.fromkeys(case(row) for row in rows if row["format"] == IN_MEMORY)
    named = dict(formats) if not cases or any(row["format"] != IN_MEMORY for row in rows) else {}
    shades = colours(formats)
    entries = [(name, label, shades[name]) for name, label in named.items()]
    entries += [(name, name.split(", ", 1)[-1], _GREY) for name in cases]
    return [_Position(*entry, y) for y, entry in enumerate(entries)]


def _series(rows: Iterable[Row], parameter: str | None) -> list[Any]:
    if parameter is None:
        return [None]
    return sorted({row[parameter] for row in rows} - {None}, key=in_order) or [None]


def _draw_format(
    axes: Axes, track: Track, panel: Panel, rows: Sequence[Row], series: Sequence[Any], position: _Position
) -> list[float]:
    """Draw the marks of one format, or the reason for their absence. Return the values."""
    rows_by_value = {
        value: [row for row in rows if panel.series is None or row[panel.series] == value] for value in series
    }
    points = {value: _points(track, panel, value_rows) for value, value_rows in rows_by_value.items()}
    if not any(points.values()):
        _write(axes, position.y, _no_mark(rows), 8.5)
        return []
    # The values present divide the height of a format, so a single value is in the middle.
    present = [value for value in series if rows_by_value[value]]
    for slot, value in enumerate(present):
        slot_position = replace(
            position, y=position.y + 0.64 * ((slot + 0.5) / len(present) - 0.5), height=0.6 / len(present)
        )
        if points[value]:
            _draw_marks(axes, panel, points[value], series.index(value), slot_position)
        else:
            _write(
                axes, slot_position.y, f"{_value_label(panel.series, value)}: {rows_by_value[value][0]['status']}", 7.5
            )
    return [value for marks in points.values() for value in marks]


def _points(track: Track, panel: Panel, rows: Iterable[Row]) -> list[float]:
    for row in rows:
        values = [row[metric] * track.metric(metric).factor for metric in panel.metrics if row[metric] is not None]
        if row["status"] == "ok" and values:
            return values
    return []


def _no_mark(rows: Sequence[Row]) -> str:
    """Return a short reason why a format has no mark."""
    for row in rows:
        if row["status"] != "ok":
            return shorten(why(row), 48, placeholder=" ...")
    readings = [row["reading"] for row in rows if row.get("reading")]
    return readings[0] if readings else "no data" if rows else "not run"


def _write(axes: Axes, y: float, text: str, size: float) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(0.02, y, text, transform=axes.get_yaxis_transform(), va="center", size=size, color="#505050", bbox=box)


def _draw_marks(axes: Axes, panel: Panel, points: Sequence[float], index: int, position: _Position) -> None:
    if panel.kind == "shares":
        _draw_shares(axes, points, position)
        return
    if panel.kind == "bars":
        edge = _GREY if position.colour == "#000000" else _EDGE  # The hatch has the color of the edge.
        bars = axes.barh(
            position.y, points[0], position.height, color=position.colour, edgecolor=edge, hatch=_pick(_HATCHES, index)
        )
        axes.bar_label(bars, fmt="%.1f", padding=4, size=7.5, color=_EDGE)
        return
    axes.plot(points, [position.y] * len(points), color=_GREY, linewidth=1.4, zorder=1)
    for mark, value in enumerate(points, start=index):
        shape = _pick(_MARKERS, mark)
        axes.plot(
            value, position.y, shape, color=position.colour, markeredgecolor=_EDGE, markeredgewidth=0.7, markersize=7
        )


def _pick(marks: Sequence[str], index: int) -> str:
    return marks[index % len(marks)]


def _draw_shares(axes: Axes, points: Sequence[float], position: _Position) -> None:
    """Draw the share of each metric, and write their sum. Sums of formats differ too much for one axis."""
    total = sum(points) or 1.0
    left = 0.0
    for index, value in enumerate(points):
        share = 100 * value / total
        axes.barh(
            position.y, share, position.height, left=left, color=_pick(_SHADES, index), edgecolor=_EDGE, linewidth=0.5
        )
        left += share
    axes.text(101.5, position.y, f"{_short(float(f'{total:.3g}'))} us", va="center", size=8, color=_EDGE)


def _scale(axes: Axes, panel: Panel, unit: str, values: Sequence[float]) -> None:
    if panel.kind == "shares":
        unit = "%), with the time per image (us"
    axes.set_xlabel(f"{panel.quantity} ({unit})")
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for limit in panel.limits:
        axes.axvline(limit, color=_EDGE, linewidth=0.9, linestyle="--", zorder=0.5)
    low, high = (0.0, 100.0) if panel.kind == "shares" else (min(values, default=0.0), max(values, default=0.0))
    if panel.kind == "marks" and low > 0 and high / low >= _LOG_SPAN:
        # Label values between powers of ten only if there are few.
        axes.set_xscale("log")
        axes.set_xlim(low / 1.6, high * 1.6)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{panel.quantity} ({unit}), log scale")
    else:
        axes.set_xlim(
            min(0.0, low - 0.1 * (max(high, *panel.limits, 0.0) - low)),
            max((high * (1.18 if panel.kind == "shares" else 1.14), *(limit * 1.14 for limit in panel.limits))) or 1.0,
        )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    size = abs(value)
    return f"{value / 1e6:g}M" if size >= 1e6 else f"{value / 1e3:g}k" if size >= 1e4 else f"{value:,g}"


def _word(value: Any) -> str:
    return str(value).replace("_", " ")


def _value_label(name: str | None, value: Any) -> str:
    """Return a parameter's value, with the name of the parameter if the value is a number."""
    if isinstance(value, str):
        return _word(value)
    return f"{value} {_word(name)}" if name == "workers" else f"{_word(name)} {value}"


def _draw_legend(axes: Axes, panel: Panel, series: Sequence[Any]) -> None:
    names = panel.words or tuple(map(_short_name, panel.metrics))
    if panel.series:
        names = tuple(_value_label(panel.series, value) for value in series)
    if len(names) < 2:
        return
    axes.legend(
        handles=[_handle(panel, index, name) for index, name in enumerate(names)],
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        ncols=min(len(names), 4),
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.4,
        borderpad=0.2,
    )


def _short_name(metric: str) -> str:
    return _word(metric.removesuffix("_ms").removesuffix("_us").removeprefix("step_"))


def _handle(panel: Panel, index: int, label: str) -> Line2D | Patch:
    """Return the legend entry of a series or metric."""
    if panel.kind == "shares":
        return Patch(facecolor=_pick(_SHADES, index), edgecolor=_EDGE, linewidth=0.5, label=label)
    if panel.kind == "bars":
        return Patch(facecolor="white", edgecolor=_EDGE, hatch=_pick(_HATCHES, index), label=label)
    return Line2D(
        [], [], linestyle="", marker=_pick(_MARKERS, index), color="white", markeredgecolor=_EDGE, label=label
    )
