"""Tables of the HTML report: headings, lines and cells for the template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import pyarrow as pa

from benchmarks.gate.report import ORDER, UNCOMPARED, short_name
from benchmarks.gate.selftest_report import rates
from benchmarks.gate.text import counted, duration
from benchmarks.report.headlines import Headline, figure_text
from benchmarks.report.ratios import COLUMNS, TITLES, ratio_groups
from benchmarks.tracks.track import IDENTITY, Row, Track

_TONES = {
    "bad": ("failed", "MISSED", "regression", "control: moved", "data-bound", "high"),
    "odd": ("missing", "skipped", "not resolved", "balanced", "moderate"),
    "good": ("met", "improved", "compute-bound", "negligible"),
}
_TONE_OF = {word: tone for tone, words in _TONES.items() for word in words}


class Cell(NamedTuple):
    """Cell of a table: its text, the exact value of a rounded text, its number of columns, and its CSS class."""

    text: str
    value: float | None = None
    columns: int = 1
    tone: str = ""


class Line(NamedTuple):
    """Line of a table: its name and its cells."""

    name: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Table of the report: rows of headings, and groups of lines.

    A row of headings omits the first column. Tables of names and values have no headings. A group's heading may be
    empty.
    """

    caption: str
    headings: list[list[Cell]]
    groups: list[tuple[str, list[Line]]]


def headline_table(headline: Headline) -> Table:
    """Return a headline table: measured entries, best first, then the others and the reason."""
    above = [(text, len(list(columns))) for text, columns in groupby(heading for heading, _, _ in headline.columns)]
    lines = []
    for index, name in enumerate(headline.names):
        rank = f"{index + 1}" if index < headline.ranked else "-"
        lines.append(Line(f"{rank} {name}", [_toned(cells[index]) for _, _, cells in headline.columns]))
    span = max(len(headline.columns), 1)
    lines += [Line(f"- {name}", [_absent(row["status"], row["reason"], span)]) for name, row in headline.absent]
    lines += [Line(f"- {label}", [Cell("not run", None, span, "odd")]) for label in headline.not_run]
    names = [Cell(name) for _, name, _ in headline.columns]
    headings = (
        [[Cell(text, columns=span) for text, span in above], names] if any(text for text, _ in above) else [names]
    )
    return Table(headline.title, headings, [("", lines)])


def row_tables(track: Track, table: pa.Table) -> list[Table]:
    """Return all rows of a track, one table per operation, without empty columns."""
    tables = []
    rows = table.to_pylist()
    for operation in dict.fromkeys(row["operation"] for row in rows):
        operation_rows = [row for row in rows if row["operation"] == operation]
        used = [name for name in table.column_names if any(row[name] is not None for row in operation_rows)]
        parameters = [name for name in used if name in track.parameters]
        figures = [name for name in used if name not in (*IDENTITY, *parameters)]
        lines = [Line(row["label"], _row_cells(row, parameters, figures)) for row in operation_rows]
        headings = [
            Cell(name.replace("_", " "), tone="text" if name in parameters else "") for name in (*parameters, *figures)
        ]
        tables.append(
            Table(
                f"Track {track.number}, {operation}: {counted(len(operation_rows), 'row')}", [headings], [("", lines)]
            )
        )
    return tables


def _row_cells(row: Row, parameters: Sequence[str], figures: Sequence[str]) -> list[Cell]:
    cells = [Cell(figure_text(row[name]), tone="text") for name in parameters]
    if row["status"] != "ok":
        return [*cells, _absent(row["status"], row["reason"], max(len(figures), 1))]
    return [*cells, *(_figure(row[name]) for name in figures)]


def _figure(value: Any) -> Cell:
    if isinstance(value, int):
        return Cell(f"{value:,}", value)
    return Cell(figure_text(value), value) if isinstance(value, float) else _toned(figure_text(value))


def _toned(text: str) -> Cell:
    return Cell(text, tone=_TONE_OF.get(text, ""))


def _absent(status: str, reason: str | None, columns: int) -> Cell:
    return Cell(f"{status}: {reason or 'no reason given'}", None, columns, _TONE_OF.get(status, ""))


class Limit(NamedTuple):
    """Comparison table, its name and its reading."""

    name: str
    table: Table
    reading: str


def ratio_tables(limits: Mapping[str, pa.Table]) -> list[Limit]:
    """Return the tables that compare times with references, and memory with the pixels."""
    headings = [Cell(name or "verdict") for name in COLUMNS[1:]]
    tables = []
    for name, (groups, reading) in ratio_groups(limits).items():
        lines = [(title, [_ratio_line(cells) for cells in group_rows]) for title, group_rows in groups.items()]
        tables.append(Limit(name, Table(TITLES[name], [headings], lines), reading))
    return tables


def _ratio_line(cells: Sequence[str]) -> Line:
    name, *others = cells
    if len(others) == 1:
        status, _, reason = others[0].partition(": ")
        return Line(name, [_absent(status, reason, len(COLUMNS) - 1)])
    return Line(name, [_toned(cell) for cell in others])


def absent_table(tables: Mapping[Track, pa.Table], limits: Mapping[str, pa.Table]) -> Table | None:
    """Return the benchmarks without a result, one line per format and reason, or None if all have a result."""
    counts: dict[tuple[str, str, str, str], list[str]] = {}
    named = {f"Track {track.number}: {track.title}": table for track, table in tables.items()}
    for title, table in (named | {TITLES[name].partition(":")[0]: table for name, table in limits.items()}).items():
        for row in table.to_pylist():
            if row["status"] != "ok":
                key = title, row["label"], row["status"], row["reason"] or "no reason given"
                counts.setdefault(key, []).append(row["operation"])
    groups: dict[str, list[Line]] = {}
    for (title, label, status, reason), operations in counts.items():
        operation_cells = [
            Cell(", ".join(dict.fromkeys(operations)), tone="text"),
            Cell(str(len(operations)), len(operations)),
        ]
        groups.setdefault(title, []).append(Line(label, [*operation_cells, _toned(status), Cell(reason, tone="words")]))
    headings = [Cell("operations", tone="text"), Cell("benchmarks"), Cell("status"), Cell("reason", tone="text")]
    return Table("Benchmarks without a result", [headings], list(groups.items())) if groups else None


def gate_table(gate: Mapping[str, Any]) -> Table:
    """Return the results of the gate as a table, from the output of `benchmarks.gate.report.as_json`."""
    names = ("base", "head", "change", "low", "high", "median", "p95", "rounds", "verdict")
    ordered = sorted(gate["benchmarks"], key=lambda row: (ORDER.index(row["verdict"]), -row["ratio"], row["name"]))
    kinds = (
        ("Benchmarks, regressions first", ordered),
        ("Controls, which run no project code", gate["controls"]),
    )
    groups = [(title, [_gate_line(row) for row in rows]) for title, rows in kinds if rows]
    for key, title in UNCOMPARED.items():
        lines = [Line(short_name(name), [Cell(why or "-", None, len(names))]) for name, why in gate[key].items()]
        groups += [(title, lines)] if lines else []
    caption = f"Head {gate['head']} compared with base {gate['base']}"
    return Table(caption, [[Cell(name) for name in names]], groups)


def _gate_line(row: Mapping[str, Any]) -> Line:
    times = [
        Cell(duration(1e6 * median(times_of_round["min_s"] for times_of_round in row[side])))
        for side in ("base", "head")
    ]
    ratios = [row[name] for name in ("ratio", "low", "high", "ratio_of_medians", "ratio_of_p95")]
    changes = [Cell(f"{ratio - 1:+.1%}", ratio) for ratio in ratios]
    return Line(
        short_name(row["name"]), [*times, *changes, Cell(str(row["rounds"]), row["rounds"]), _toned(row["verdict"])]
    )


def selftest_tables(selftest: Mapping[str, Any]) -> list[Table]:
    """Return the detection rates of the gate's self-test as tables."""
    captions = {"": "Gates without a change", "planted": "Injected slowdowns", "benchmark": "Rates per benchmark"}
    return [
        Table(captions[heading[0]], [[Cell(name) for name in heading[1:]]], [("", [_plain(line) for line in lines])])
        for heading, lines in rates(selftest["runs"])
    ]


def _plain(line: Iterable[str]) -> Line:
    name, *cells = line
    return Line(name, [Cell(cell) for cell in cells])


def pairs_table(caption: str, pairs: Mapping[str, Any]) -> Table:
    """Return a table of names and values."""
    lines = [Line(name.replace("_", " "), [Cell(_value_text(value), tone="words")]) for name, value in pairs.items()]
    return Table(caption, [], [("", lines)])


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
