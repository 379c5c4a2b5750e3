"""Headline tables: the main configuration of each track and operation, best format first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from benchmarks.gate.text import wrapped
from benchmarks.report.ratios import ratio_report
from benchmarks.report.tables import IN_MEMORY, case, formats_of, measured, narrow, ranked, stands_for, why
from benchmarks.tracks.track import Row, Track, View, in_order

# A folder has one encoding, which competes with a table's fast one.
_FOLDED = MappingProxyType({"bytes": "bytes or native", "native": "bytes or native"})
_LEAST_SPREAD = 1.1  # Runs differ by this much even if the rounds of one run agree.
# A reading divides formats where their intervals differ by this factor. With 4 % of simulated noise, five runs share
# 97 % of the readings of stored results. With a factor of 2, they share 81 %.
_GAP = 3


@dataclass(frozen=True, slots=True)
class Headline:
    """Headline table of one track and operation.

    ``names`` holds the measured entries, best first. The first ``ranked`` of them have the key metric. A column has a
    heading that neighboring columns share, a name, and one cell per entry. ``absent`` holds entries without figures
    and the row with the reason. ``not_run`` holds the labels of formats without a row.
    """

    track: Track
    title: str
    names: tuple[str, ...]
    ranked: int
    columns: tuple[tuple[str, str, list[str]], ...]
    absent: tuple[tuple[str, Row], ...]
    not_run: tuple[str, ...]
    reading: str


def headlines(tables: Mapping[int, pa.Table]) -> list[Headline]:
    """Return the headline table of every track and operation that has rows.

    If the main configuration was not run, the first one that was run replaces it. The title names the configuration.
    """
    views = []
    for track, rows in measured(tables):
        for view in track.views_of(rows):
            view_rows = [row | {name: _FOLDED.get(row[name], row[name]) for name in view.pivot} for row in rows]
            view_rows = [row for row in view_rows if view.operation in (None, row["operation"])]
            views += [_headline(view, track, view_rows, formats_of(tables[track.number]))] if view_rows else []
    return views


def _headline(view: View, track: Track, rows: Sequence[Row], formats: Mapping[str, str]) -> Headline:
    selected, chosen = narrow(rows, view.fixed)
    groups = _groups(view, selected)
    named: dict[str, list[Row]] = {}
    for row in selected:
        named.setdefault(case(row) if row["format"] == IN_MEMORY else row["label"], []).append(row)
    cells = {name: [_of_group(view, entry_rows, group) for group in groups] for name, entry_rows in named.items()}
    ranking = ranked((entry_cells[0] | {"entry": name} for name, entry_cells in cells.items() if entry_cells[0]), track)
    ratios = {row["entry"]: ratio for row, ratio in ranking}
    gone = [name for name, entry_rows in named.items() if all(row["status"] != "ok" for row in entry_rows)]
    order = [*ratios, *(name for name in named if name not in ratios and name not in gone)]
    fixed_values = [f"{name.replace('_', ' ')} {figure_text(value)}" for name, value in chosen.items()]
    run = {row["format"] for row in selected} & set(formats)
    title = [
        f"Track {track.number}: {track.title}, {track.unit}",
        *filter(None, [view.heading or view.operation]),
        *fixed_values,
    ]
    columns = _columns(view, track, groups, [cells[name] for name in order], [ratios.get(name) for name in order])
    return Headline(
        track=track,
        title=" · ".join(title),
        names=tuple(order),
        ranked=len(ratios),
        columns=tuple(columns),
        absent=tuple((name, named[name][0]) for name in gone),
        not_run=tuple(label for name, label in formats.items() if run and name not in run),
        reading=_reading(ranking, list(named)),
    )


def _groups(view: View, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return the values of the pivot parameters that have rows, the ranking one first."""
    with_figures = [row for row in rows if row["status"] == "ok"] or rows
    values = {tuple(row[name] for name in view.pivot) for row in with_figures}
    return sorted(values, key=lambda group: [in_order(value) for value in group])


def _of_group(view: View, rows: Iterable[Row], group: tuple[Any, ...]) -> Row | None:
    in_group = [row for row in rows if stands_for(tuple(row[name] for name in view.pivot), group)]
    return min(in_group, key=lambda row: row["status"] != "ok", default=None)


def _columns(
    view: View, track: Track, groups: Sequence[tuple[Any, ...]], entries: Sequence[list[Row | None]], ratios: list[Any]
) -> list[tuple[str, str, list[str]]]:
    """Return heading, name and cells of every column."""
    columns = []
    for index, group in enumerate(groups):
        heading = ", by ".join([figure_text(value) for value in group[:1]] + list(view.pivot[1:]))
        rows = [entry[index] for entry in entries]
        name = str(group[1]) if len(group) > 1 else track.unit
        columns.append((heading, name, [_cell(row, track, track.key) for row in rows]))
        if index == 0:
            columns.append((heading, "x best", [figure_text(ratio) for ratio in ratios]))
            columns.append((heading, "spread", [figure_text(row.get("spread")) if row else "-" for row in rows]))
        done = [row if row and row["status"] == "ok" else None for row in rows]
        for metric in view.rest if index else view.lead:
            title = track.metric(metric).heading or metric.replace("_", " ")
            columns.append((heading, title, [_cell(row, track, metric) for row in done]))
    return columns


def _cell(row: Row | None, track: Track, metric: str) -> str:
    if row is None:
        return "-"
    if row["status"] != "ok":
        return str(row["status"])
    value, factor = row[metric], track.metric(metric).factor
    return figure_text(value * factor if isinstance(value, (int, float)) and factor != 1 else value)


def figure_text(value: Any) -> str:
    """Return a number with three digits, or a word without underscores."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
    return "-" if value is None else str(value).replace("_", " ")


def _reading(ranking: Sequence[tuple[Row, float]], entries: Sequence[str]) -> str:
    """Return one line that groups the ranked entries, in the order of ``entries``, and counts the track's verdicts."""
    if not ranking:
        return "Reading: no results."
    compared = [(row, ratio) for row, ratio in ranking if row.get("spread") is not None]
    if len(ranking) == 1:
        grouped = f"only {ranking[0][0]['entry']} has results"
    elif ranking[0][0].get("spread") is None:
        grouped = "not compared, the fastest ran for one round only"
    else:
        groups = _divided(compared)
        slower = [f"at least {_GAP} x slower", *[f"at least {_GAP} x slower than these"] * len(groups)]
        titled = list(zip(["fastest" if groups[1:] else f"no gap of {_GAP} x", *slower], groups, strict=False))
        titled.append(("measured in one round only", [row["entry"] for row, _ in ranking if row.get("spread") is None]))
        named = [(title, [name for name in entries if name in group]) for title, group in titled]
        grouped = "; ".join(f"{title}: {', '.join(names)}" for title, names in named if names)
    verdicts = [row["reading"] for row, _ in ranking if row.get("reading")]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return f"Reading: {'; '.join(filter(None, [grouped, ', '.join(counts)]))}."


def _divided(ranking: Sequence[tuple[Row, float]]) -> list[list[str]]:
    """Return groups of entries, best first; the intervals of two groups are more than a factor of `_GAP` apart."""
    intervals = [_interval(row, ratio, ranking[0][0]) for row, ratio in ranking]
    groups: list[list[str]] = [[]]
    for index, (row, _) in enumerate(ranking):
        slowest = max((high for _, high in intervals[:index]), default=math.inf)
        if min(low for low, _ in intervals[index:]) > _GAP * slowest:
            groups.append([])
        groups[-1].append(row["entry"])
    return groups


def _interval(row: Row, ratio: float, fastest: Row) -> tuple[float, float]:
    """Return the interval of a ratio to the fastest entry, as far as parts of the rounds differ.

    The ratio of medians is included: a single long round changes a rate, not a median.
    """
    ratios = [ratio]
    if row.get("median_ms") and fastest.get("median_ms"):
        ratios.append(row["median_ms"] / fastest["median_ms"])
    half = math.sqrt(max(row["spread"], _LEAST_SPREAD))
    return min(ratios) / half, max(ratios) * half


def terminal_report(
    tables: Mapping[int, pa.Table], width: int = 100, limits: Mapping[str, pa.Table] = MappingProxyType({})
) -> str:
    """Return all headline and comparison tables in lines of at most ``width``; omit columns that do not fit."""
    lines = [line for headline in headlines(tables) for line in _lines(headline, width)]
    lines += ratio_report(limits, width)
    counts = {f"track{track.number}": len(rows) for track, rows in measured(tables)}
    counts |= {name: table.num_rows for name, table in limits.items() if table.num_rows}
    rest = f"All {sum(counts.values())} rows are in pytest_benchmark_{{{','.join(counts)}}}.parquet"
    return "\n".join([*lines, *wrapped(rest if counts else "No benchmarks ran.", width)])


def _lines(headline: Headline, width: int) -> list[str]:
    pad = 3 + max(map(len, [*headline.names, *(name for name, _ in headline.absent)]))
    labels = [
        f"{rank if rank <= headline.ranked else '-'}  {name}".ljust(pad) for rank, name in enumerate(headline.names, 1)
    ]
    room = max(width - pad - 2, 12)
    absent = [f"{f'-  {name}':{pad}}  {shorten(why(row), room, placeholder=' ...')}" for name, row in headline.absent]
    not_run = wrapped(f"Not run: {', '.join(headline.not_run)}", width) if headline.not_run else []
    rule = "-" * min(len(headline.title), width)
    table = [*_grid(labels, headline.columns, width), *absent, *not_run]
    return [*wrapped(headline.title, width), rule, *table, *wrapped(headline.reading, width), ""]


def _grid(labels: Sequence[str], columns: Sequence[tuple[str, str, list[str]]], width: int) -> list[str]:
    """Return the columns that fit next to each other, under headings that span them."""
    if not labels:
        return []
    pad = len(labels[0])
    above, names, lines, last = " " * pad, " " * pad, list(labels), ""
    for heading, name, cells in columns:
        room = max(len(name), *map(len, cells))
        if len(names) + 2 + room > width:
            break
        continued = heading != "" and heading == last
        title = "" if continued or not heading else f"{heading} "
        above += ("--" if continued else "  ") + title.ljust(room, "-" if heading else " ")
        names += f"  {name:>{room}}"
        lines = [f"{line}  {cell:>{room}}" for line, cell in zip(lines, cells, strict=True)]
        last = heading
    return [*([above[:width].rstrip()] if above.strip() else []), names, *lines]
