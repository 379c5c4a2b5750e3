"""The gate's figure: the change of every benchmark with its interval, against the threshold."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.gate.decision import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.gate.report import Comparison

_COLOURS: Mapping[Verdict, str] = MappingProxyType(
    {
        Verdict.REGRESSION: "#D55E00",
        Verdict.NOT_RESOLVED: "#E69F00",
        Verdict.IMPROVED: "#009E73",
        Verdict.OK: "#0072B2",
    }
)
_LINE_INCHES = 0.2


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the comparison into a file, whose suffix says the kind."""
    rows = sorted(comparison.rows, key=lambda row: row.change.ratio)
    rows = [*comparison.controls, *rows]
    lines = {row.name: line for line, row in enumerate(rows)}
    figure = Figure(figsize=(8, 1.5 + _LINE_INCHES * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(100 / (1 + comparison.threshold) - 100, 100 * comparison.threshold, color="#eeeeee")
    axes.axvline(0, color="#9a9a9a", linewidth=0.8)
    kinds = {verdict: comparison.rows_with(verdict) for verdict in Verdict}
    drawn = [(kind.value, _COLOURS[kind], rows_of_kind) for kind, rows_of_kind in kinds.items() if rows_of_kind]
    for label, colour, points in [*drawn, ("control", "#000000", comparison.controls)]:
        changes = [100 * row.change.ratio - 100 for row in points]
        reach = [
            [100 * (row.change.ratio - row.change.low) for row in points],
            [100 * (row.change.high - row.change.ratio) for row in points],
        ]
        heights = [lines[row.name] for row in points]
        axes.errorbar(changes, heights, xerr=reach, fmt="o", color=colour, markersize=4, linewidth=1, label=label)
    axes.set_yticks(list(lines.values()), [row.short for row in rows], fontsize=7)
    axes.set_ylim(-1, len(lines))
    axes.set_xlabel("change of the time that cores worked, head against base, % (grey: within the threshold)")
    axes.set_title(f"{comparison.head} against {comparison.base}", fontsize=9)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)
