"""What a session leaves behind: tidy tables, a summary, figures, and a report for the terminal."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from textwrap import shorten, wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from benchmarks.report import plots
from benchmarks.report.ratios import ratio_report, summarise_ratios
from benchmarks.report.tables import IN_MEMORY, case, formats_of, narrow, tidy
from benchmarks.tracks.track import STAGES, Row, Track, stage_column, track_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

__all__ = [
    "SCHEMA_VERSION",
    "Headline",
    "figure_text",
    "headlines",
    "replacing",
    "summarise",
    "terminal_report",
    "tidy",
    "write_results",
]

SCHEMA_VERSION = 2


def summarise(
    tables: Mapping[int, pa.Table], context: Mapping[str, Any], limits: Mapping[str, pa.Table] = MappingProxyType({})
) -> dict[str, Any]:
    """Aggregate a session into what JSON can hold.

    Parameters
    ----------
    tables : mapping of int to pyarrow.Table
        As `tidy` makes them.
    context : mapping
        Passed through, top level: ``configuration``, ``versions``, ``machine`` and whatever else there is.
    limits : mapping of str to pyarrow.Table
        As `benchmarks.report.ratios.tidy_ratios` makes them.

    Returns
    -------
    dict
        The context, ``schema_version``, and ``tracks``: for each track number (a string) with rows its ``rows`` with
        all metrics and its ``rankings``, one for every operation and set of parameters, best first, with
        ``ratio_to_best`` (1 for the best, larger is worse). ``limits``: for each of those tables that has rows, the
        rows and how many targets they meet. Figures that are not finite are null.
    """
    tracks = {
        str(track.number): {
            "title": track.title,
            "round": track.round,
            "key_metric": track.key,
            "unit": track.unit,
            "higher_is_better": track.higher_is_better,
            "rankings": _rankings(track, rows),
            "rows": rows,
        }
        for track, rows in _measured(tables)
    }
    summary = {"configuration": {}, "versions": {}, "machine": {}, **context}
    found = {"schema_version": SCHEMA_VERSION, "tracks": tracks, "limits": summarise_ratios(limits)}
    return _jsonable(summary | found)  # type: ignore[no-any-return]


def write_results(
    tables: Mapping[int, pa.Table],
    context: Mapping[str, Any],
    out_dir: Path,
    limits: Mapping[str, pa.Table] = MappingProxyType({}),
) -> list[Path]:
    """Write ``pytest_benchmark_track{n}.parquet`` and ``.png``, the limits', and ``pytest_benchmark_summary.json``.

    Each file is written under a temporary name and then moved over the old one, so an interrupted run leaves no half
    file. A table without rows gets no file: those that an earlier, wider run left for it stay as they are, while the
    summary is of this run alone.

    Parameters
    ----------
    tables : mapping of int to pyarrow.Table
        As `tidy` makes them.
    context : mapping
        For `summarise`, and ``"workload"`` for the figures' headings.
    out_dir : pathlib.Path
        Made where it is missing.
    limits : mapping of str to pyarrow.Table
        For ``pytest_benchmark_reference.parquet`` and ``pytest_benchmark_memory.parquet``.

    Returns
    -------
    list of pathlib.Path
        The files written: tables, summary, figures.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    found = {f"track{track.number}": tables[track.number] for track, _ in _measured(tables)}
    found |= {name: table for name, table in limits.items() if table.num_rows}
    for name, table in found.items():
        written.append(out_dir / f"pytest_benchmark_{name}.parquet")
        with replacing(written[-1]) as path:
            pq.write_table(table, path)
    written.append(out_dir / "pytest_benchmark_summary.json")
    with replacing(written[-1]) as path:
        path.write_text(
            json.dumps(summarise(tables, context, limits), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    # Figures last: they are the slowest, and the numbers are safe by then.
    for track, _ in _measured(tables):
        written.append(out_dir / f"pytest_benchmark_track{track.number}.png")
        with replacing(written[-1]) as path:
            plots.draw(track.number, tables[track.number], path, context)
    return written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name, and move what was written there over ``path``, if the block ends well."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # held by a run that is alive, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as held:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)  # what is written there by name is written into this file
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _measured(tables: Mapping[int, pa.Table]) -> list[tuple[Track, list[Row]]]:
    found = [(track_of(number, table.schema), table) for number, table in sorted(tables.items()) if table.num_rows]
    return [(track, table.to_pylist()) for track, table in found]


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _ranked(rows: Iterable[Row], metric: str, *, higher_is_better: bool) -> list[tuple[Row, float]]:
    """Return the rows that have the metric, best first, each with how many times worse than the best it is."""
    measured = [row for row in rows if row[metric] is not None]
    measured.sort(key=lambda row: float(row[metric]), reverse=higher_is_better)
    if not measured:
        return []
    best = float(measured[0][metric])
    return [(row, _times_worse(float(row[metric]), best, higher_is_better=higher_is_better)) for row in measured]


def _times_worse(value: float, best: float, *, higher_is_better: bool) -> float:
    more, less = (best, value) if higher_is_better else (value, best)
    return 1.0 if more == less else more / less if less else math.inf


def _rankings(track: Track, rows: Sequence[Row]) -> list[Row]:
    """Rank the formats for every operation and set of parameters."""
    within = ("operation", *track.compared_within)
    named = ("format", "label", *(name for name in track.parameter_names if name not in within))
    groups = list(dict.fromkeys(tuple(row[name] for name in within) for row in rows))
    rankings = []
    for group in groups:
        # An absent row that names no parameter is absent from every ranking of its operation, and is none by itself.
        if any(other != group and _stands_for(group, other) for other in groups):
            continue
        of = [row for row in rows if _stands_for(tuple(row[name] for name in within), group)]
        best_first = [
            {name: row[name] for name in named} | {"value": row[track.key], "ratio_to_best": ratio}
            for row, ratio in _ranked(of, track.key, higher_is_better=track.higher_is_better)
        ]
        absent = [{name: row[name] for name in (*named, "status", "reason")} for row in of if row["status"] != "ok"]
        held = dict(zip(within[1:], group[1:], strict=True))
        rankings.append({"operation": group[0], "parameters": held, "best_first": best_first, "absent": absent})
    return rankings


def _stands_for(values: tuple[Any, ...], group: tuple[Any, ...]) -> bool:
    return all(value in (wanted, None) for value, wanted in zip(values, group, strict=True))


@dataclass(frozen=True, slots=True)
class _View:
    """What the terminal shows of one operation (None: of all), ranked by the track's key metric.

    `fixed` holds parameters still at the value preferred (see `narrow`); every value of the `pivot` parameters becomes
    a group of columns. The first group ranks the formats and shows the `lead` metrics too, the others the `rest`.
    `what` stands for the operation in the heading.
    """

    operation: str | None
    fixed: tuple[tuple[str, Any], ...] = ()
    pivot: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    what: str = ""


_STORAGE = ("raw_mb_per_s", "size_bytes", "compression_ratio")
_STEP = ("step_p50_ms", "step_p95_ms", "data_wait_fraction", "reading")
_ALONE = ("overhead_pct", "numpy_p50_us", "from_numpy_p50_us", "copy_p50_us", "batch_p50_us", "reading")
_TIMES = tuple(f"{of}{name}" for of in ("", "numpy_") for name in ("p95_us", "p99_us", "mean_us", "samples_per_s"))
_STAGE_COLUMNS = tuple(stage_column(stage) for stage in STAGES)
_VIEWS: Mapping[int, tuple[_View, ...]] = MappingProxyType(
    {
        0: tuple(_View(operation, (), ("encoding",), _STORAGE, ("size_bytes",)) for operation in ("preload", "write")),
        1: (
            _View(None, (("order", "random"), ("transform", "normalize")), ("access",), ("p50_ms", "p95_ms", "p99_ms")),
        ),
        2: (_View(None, (("batch_size", 16),), ("access", "workers"), ("first_batch_ms",)),),
        3: tuple(
            _View(operation, (("device", "cuda"),), ("access",), _STEP, ("data_wait_fraction",))
            for operation in ("train", "inference")
        ),
        4: (
            _View("sample", lead=_ALONE, what="sample: what the tensor costs"),
            _View("sample", lead=_TIMES, what="sample: times as tensor and as array"),
            _View("convert", (), ("how",), _TIMES[:2]),
            _View("to_device", lead=_TIMES[:4]),
        ),
        5: (
            _View("epoch", (), ("access",), _STAGE_COLUMNS, _STAGE_COLUMNS),
            _View("preload", lead=("on_demand_ms", "preloaded_ms", "break_even_epochs", "reading")),
        ),
    }
)
_COLUMNS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "median_ms": ("ms", 1.0),
        "raw_mb_per_s": ("MB/s", 1.0),
        "size_bytes": ("MB", 1e-6),
        "compression_ratio": ("raw/size", 1.0),
        "first_batch_ms": ("first ms", 1.0),
        "step_p50_ms": ("p50 ms", 1.0),
        "step_p95_ms": ("p95 ms", 1.0),
        "data_wait_fraction": ("wait %", 100.0),
        "overhead_pct": ("overhead %", 1.0),
        "numpy_p50_us": ("array", 1.0),
        "from_numpy_p50_us": ("from_numpy", 1.0),
        "copy_p50_us": ("copy", 1.0),
        "batch_p50_us": ("batch", 1.0),
        "samples_per_s": ("samples/s", 1.0),
        "numpy_samples_per_s": ("numpy samples/s", 1.0),
        "on_demand_ms": ("epoch on demand ms", 1.0),
        "preloaded_ms": ("preloaded ms", 1.0),
        "break_even_epochs": ("pays after epochs", 1.0),
        **{stage_column(stage): (f"{stage} us", 1.0) for stage in STAGES},
    }
)


def _views(track: Track, rows: Iterable[Row]) -> tuple[_View, ...]:
    """Return a track's views; where none are given, one for each operation, with the times that all tracks have."""
    held = tuple((name, None) for name in track.parameter_names)
    operations = dict.fromkeys(row["operation"] for row in rows)
    return _VIEWS.get(track.number) or tuple(_View(name, held, lead=("min_ms", "mean_ms")) for name in operations)


# A folder has one encoding, which competes with a table's fast one.
_FOLDED = MappingProxyType({"bytes": "bytes or native", "native": "bytes or native"})
_GROUP_ORDER = ("on_demand", "preloaded", "bytes or native", "list", "from_numpy", "copy", "batch")
_LEVEL = 1.1  # nearer than this to the best is named with it


@dataclass(frozen=True, slots=True)
class Headline:
    """What one track and operation come to, as every report shows it.

    Attributes
    ----------
    track : Track
        Whose it is.
    title : str
        Track, unit, operation and the parameters held still.
    names : tuple of str
        What was measured, best first; those that the key metric does not rank come last.
    ranked : int
        How many of the names have a place.
    columns : tuple of (str, str, list of str)
        Heading that neighbours share, name and one cell for each of the names.
    absent : tuple of (str, Row)
        What has no figure at all, and a row that says why.
    not_run : tuple of str
        Labels of the formats that have no row.
    reading : str
        In words.
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
    """Return the headline configuration of every track and operation that has rows.

    Parameters
    ----------
    tables : mapping of int to pyarrow.Table
        As `tidy` makes them.
    """
    found = []
    for track, rows in _measured(tables):
        formats = formats_of(tables[track.number])
        for view in _views(track, rows):
            of = [row | {name: _FOLDED.get(row[name], row[name]) for name in view.pivot} for row in rows]
            of = [row for row in of if view.operation in (None, row["operation"])]
            found += [_headline(view, track, of, formats)] if of else []
    return found


def terminal_report(
    tables: Mapping[int, pa.Table], width: int = 100, limits: Mapping[str, pa.Table] = MappingProxyType({})
) -> str:
    """Lay out the headline configuration of every track, best format first.

    Parameters
    ----------
    tables : mapping of int to pyarrow.Table
        As `tidy` makes them.
    width : int, default 100
        Longest line; columns that do not fit are left out, from the right.
    limits : mapping of str to pyarrow.Table
        As `benchmarks.report.ratios.tidy_ratios` makes them.

    Returns
    -------
    str
        One table for each track and operation that has rows. Where the headline configuration was not run, another
        that was run stands in, and the heading names it.
    """
    lines = [line for headline in headlines(tables) for line in _lines(headline, width)]
    lines += ratio_report(limits, width)
    found = {f"track{track.number}": len(rows) for track, rows in _measured(tables)}
    found |= {name: table.num_rows for name, table in limits.items() if table.num_rows}
    rest = f"All {sum(found.values())} rows: pytest_benchmark_{{{','.join(found)}}}.parquet"
    return "\n".join([*lines, *_wrapped(rest if found else "No benchmark was run.", width)])


def _headline(view: _View, track: Track, rows: Sequence[Row], formats: Mapping[str, str]) -> Headline:
    kept, chosen = narrow(rows, dict(view.fixed))
    groups = _groups(view, kept)
    named: dict[str, list[Row]] = {}
    for row in kept:
        named.setdefault(case(row) if row["format"] == IN_MEMORY else row["label"], []).append(row)
    cells = {name: [_of_group(view, found, group) for group in groups] for name, found in named.items()}
    leading = [found[0] | {"entry": name} for name, found in cells.items() if found[0]]
    ranking = _ranked(leading, track.key, higher_is_better=track.higher_is_better)
    ratios = {row["entry"]: ratio for row, ratio in ranking}
    gone = [name for name, found in named.items() if all(row["status"] != "ok" for row in found)]
    order = [*ratios, *(name for name in named if name not in ratios and name not in gone)]
    held = [f"{name.replace('_', ' ')} {figure_text(value)}" for name, value in chosen.items()]
    run = {row["format"] for row in kept} & set(formats)
    return Headline(
        track=track,
        title=" · ".join(
            [f"Track {track.number}: {track.title}, {track.unit}", *filter(None, [view.what or view.operation]), *held]
        ),
        names=tuple(order),
        ranked=len(ratios),
        columns=tuple(
            _columns(view, track, groups, [cells[name] for name in order], [ratios.get(name) for name in order])
        ),
        absent=tuple((name, named[name][0]) for name in gone),
        not_run=tuple(label for name, label in formats.items() if run and name not in run),
        reading=_reading(ranking),
    )


def _lines(of: Headline, width: int) -> list[str]:
    pad = 3 + max(map(len, [*of.names, *(name for name, _ in of.absent)]))
    places = [
        f"{f'{place}  {name}' if place <= of.ranked else f'-  {name}':{pad}}" for place, name in enumerate(of.names, 1)
    ]
    absent = [f"{f'-  {name}':{pad}}  {_why(row, width - pad - 2)}" for name, row in of.absent]
    not_run = _wrapped(f"Not run: {', '.join(of.not_run)}", width) if of.not_run else []
    rule = "-" * min(len(of.title), width)
    table = [*_grid(places, of.columns, width), *absent, *not_run]
    return [*_wrapped(of.title, width), rule, *table, *_wrapped(of.reading, width), ""]


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, subsequent_indent="  ")


def _groups(view: _View, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return the values of the pivot parameters that have rows, those that rank first."""
    measured = [row for row in rows if row["status"] == "ok"] or rows
    found = {tuple(row[name] for name in view.pivot) for row in measured}
    place = {value: at for at, value in enumerate(_GROUP_ORDER)}
    return sorted(
        found, key=lambda group: [(place.get(value, len(place)), isinstance(value, str), value or 0) for value in group]
    )


def _of_group(view: _View, rows: Iterable[Row], group: tuple[Any, ...]) -> Row | None:
    found = [row for row in rows if _stands_for(tuple(row[name] for name in view.pivot), group)]
    return min(found, key=lambda row: row["status"] != "ok", default=None)


def _columns(
    view: _View, track: Track, groups: Sequence[tuple[Any, ...]], entries: Sequence[list[Row | None]], ratios: list[Any]
) -> list[tuple[str, str, list[str]]]:
    """Return heading, name and cells of every column."""
    columns = []
    for at, group in enumerate(groups):
        heading = ", by ".join([figure_text(value) for value in group[:1]] + list(view.pivot[1:]))
        name = str(group[1]) if len(group) > 1 else track.unit
        rows = [entry[at] for entry in entries]
        columns.append((heading, name, [_cell(row, track.key) for row in rows]))
        if at == 0:
            columns.append((heading, "x best", [figure_text(ratio) for ratio in ratios]))
        for metric in view.rest if at else view.lead:
            title = _COLUMNS.get(metric, (metric.replace("_", " "), 1.0))[0]
            measured = [row if row and row["status"] == "ok" else None for row in rows]
            columns.append((heading, title, [_cell(row, metric) for row in measured]))
    return columns


def _grid(places: Sequence[str], columns: Sequence[tuple[str, str, list[str]]], width: int) -> list[str]:
    """Lay columns out side by side, as many as fit, under headings that span them."""
    if not places:
        return []
    pad = len(places[0])
    above, names, lines, last = " " * pad, " " * pad, list(places), ""
    for heading, name, cells in columns:
        room = max(len(name), *map(len, cells))
        if len(names) + 2 + room > width:
            break
        continued = heading != "" and heading == last
        shown = "" if continued or not heading else f"{heading} "
        above += ("--" if continued else "  ") + shown.ljust(room, "-" if heading else " ")
        names += f"  {name:>{room}}"
        lines = [f"{line}  {cell:>{room}}" for line, cell in zip(lines, cells, strict=True)]
        last = heading
    return [*([above[:width].rstrip()] if above.strip() else []), names, *lines]


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return "-"
    if row["status"] != "ok":
        return str(row["status"])
    value, factor = row[metric], _COLUMNS.get(metric, ("", 1.0))[1]
    return figure_text(value * factor if isinstance(value, (int, float)) and factor != 1 else value)


def figure_text(value: Any) -> str:
    """Write a figure with three digits, a word without underscores."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
    return "-" if value is None else str(value).replace("_", " ")


def _why(row: Row, room: int) -> str:
    return shorten(f"{row['status']}: {row['reason'] or 'no reason given'}", max(room, 12), placeholder=" ...")


def _reading(ranking: Sequence[tuple[Row, float]]) -> str:
    """Say in one line who leads, who trails, and how the track's own readings are spread."""
    if not ranking:
        return "Reading: nothing was measured."
    (best, _), (last, ratio) = ranking[0], ranking[-1]
    if len(ranking) == 1:
        return f"Reading: only {best['entry']} was measured."
    level = [row["entry"] for row, times in ranking[1:] if times <= _LEVEL]
    said = f"{best['entry']} leads" + (f" ({', '.join(level)} within 10 %)" if level else "")
    if ratio > _LEVEL:
        said += f"; {last['entry']} is last, {figure_text(ratio)}x"
    readings = [row["reading"] for row, _ in ranking if row.get("reading")]
    spread = [f"{readings.count(word)} {word}" for word in dict.fromkeys(readings)]
    return f"Reading: {said}{'; ' if spread else ''}{', '.join(spread)}."
