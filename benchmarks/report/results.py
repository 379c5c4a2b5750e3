"""Result files of a session: tidy tables, a summary and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import plots
from benchmarks.report.files import SUMMARY, figure_file, replacing, table_file
from benchmarks.report.ratios import summarise_ratios
from benchmarks.report.tables import measured, ranked, stands_for
from benchmarks.tracks.track import Row, Track

SCHEMA_VERSION = 2


def summarise(
    tables: Mapping[int, pa.Table], context: Mapping[str, Any], limits: Mapping[str, pa.Table] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the summary of a session as JSON values.

    Parameters
    ----------
    tables, limits : mapping
        Results of `tidy` and `benchmarks.report.ratios.tidy_ratios`.
    context : mapping
        Other entries of the summary, such as ``configuration``, ``versions`` and ``machine``.

    Returns
    -------
    dict
        The context, ``schema_version``, ``tracks`` and ``limits``. ``tracks`` maps the number of each track with rows
        (a string) to its ``rows`` with all metrics and its ``rankings``. There is one ranking per operation and set of
        parameters, best first, with ``ratio_to_best`` (1 for the best, larger is worse). ``limits`` has the rows of
        each comparison table, and the number of targets that they meet. Figures that are not finite are null.
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
        for track, rows in measured(tables)
    }
    summary = {"configuration": {}, "versions": {}, "machine": {}, **context}
    results = {"schema_version": SCHEMA_VERSION, "tracks": tracks, "limits": summarise_ratios(limits)}
    return _jsonable(summary | results)  # type: ignore[no-any-return]


def write_results(
    tables: Mapping[int, pa.Table],
    context: Mapping[str, Any],
    out_dir: Path,
    limits: Mapping[str, pa.Table] = MappingProxyType({}),
) -> list[Path]:
    """Write tables, summary and figures into a folder, and return the files.

    Each file is replaced atomically, so an interrupted run leaves no partial file. A table without rows is not written,
    and its file from an earlier run remains. The summary describes only this run.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    numbers = [track.number for track, _ in measured(tables)]
    all_tables: dict[int | str, pa.Table] = {number: tables[number] for number in numbers}
    for name, table in (all_tables | {name: table for name, table in limits.items() if table.num_rows}).items():
        written.append(out_dir / table_file(name))
        with replacing(written[-1]) as path:
            pq.write_table(table, path)
    written.append(out_dir / SUMMARY)
    text = json.dumps(summarise(tables, context, limits), indent=2, allow_nan=False) + "\n"
    with replacing(written[-1]) as path:
        path.write_text(text, encoding="utf-8")
    for number in numbers:  # Figures are slowest, so they come last.
        written.append(out_dir / figure_file(number))
        with replacing(written[-1]) as path:
            plots.draw(number, tables[number], path, context)
    return written


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


def _rankings(track: Track, rows: Sequence[Row]) -> list[Row]:
    """Rank the formats for every operation and set of parameters."""
    within = ("operation", *track.compared_within)
    named = ("format", "label", *(name for name in track.parameters if name not in within))
    groups = list(dict.fromkeys(tuple(row[name] for name in within) for row in rows))
    rankings = []
    for group in groups:
        # An absent row without parameters is part of every ranking of its operation, and has no ranking of its own.
        if any(other != group and stands_for(group, other) for other in groups):
            continue
        group_rows = [row for row in rows if stands_for(tuple(row[name] for name in within), group)]
        best_first = [
            {name: row[name] for name in named} | {"value": row[track.key], "ratio_to_best": ratio}
            for row, ratio in ranked(group_rows, track)
        ]
        absent = [
            {name: row[name] for name in (*named, "status", "reason")} for row in group_rows if row["status"] != "ok"
        ]
        parameters = dict(zip(within[1:], group[1:], strict=True))
        rankings.append({"operation": group[0], "parameters": parameters, "best_first": best_first, "absent": absent})
    return rankings
