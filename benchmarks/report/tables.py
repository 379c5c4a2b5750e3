"""Tidy tables: records of pytest-benchmark, one row per benchmark and one table per track."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from benchmarks import tracks
from benchmarks.tracks.track import IDENTITY, TIMES, Row, Track, finite, scaled, spread

IN_MEMORY = "memory"  # Format of rows that measure no storage format.
_FORMATS_KEY = b"formats"  # Key in the schema metadata of a table.
NO_FORMATS: Mapping[str, str] = MappingProxyType({})


def tidy(
    benchmarks: Sequence[Mapping[str, Any]],
    absent: Sequence[Mapping[str, Any]],
    formats: Mapping[str, str] = NO_FORMATS,
) -> dict[int, pa.Table]:
    """Sort finished and absent benchmarks into one table per track. Benchmarks without a track are omitted.

    Parameters
    ----------
    benchmarks : sequence of mapping
        ``Metadata.as_dict(include_data=True)`` of each finished benchmark.
    absent : sequence of mapping
        Benchmarks without a result: ``track``, ``operation``, ``format``, ``label``, ``params``, ``status``
        (``missing``, ``failed`` or ``skipped``), ``reason``, ``name``.
    formats : mapping of str to str
        Label of each format, measured or not, in the order of the reports.

    Returns
    -------
    dict of int to pyarrow.Table
        Table of each track, in order. A track without benchmarks has a table without rows. The columns of an unknown
        track come from its benchmarks. A metric that cannot be computed is null.

    Raises
    ------
    ValueError
        If a list of seconds does not have one value per round.
    """
    of_track: dict[int, tuple[list[Any], list[Any]]] = {track.number: ([], []) for track in tracks.TRACKS}
    for benchmark in benchmarks:
        if "track" in benchmark["extra_info"]:
            of_track.setdefault(benchmark["extra_info"]["track"], ([], []))[0].append(benchmark)
    for missing in absent:
        if "track" in missing:
            of_track.setdefault(missing["track"], ([], []))[1].append(missing)
    tables = {}
    for number, (finished, gone) in sorted(of_track.items()):
        track = tracks.track_of_records(number, finished, gone)
        rows = [*(_finished(track, record) for record in finished), *(_absent(track, record) for record in gone)]
        tables[number] = with_formats(_table(rows, track.schema), formats)
    return tables


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    texts = {field.name for field in schema if field.type == pa.string()}
    converted = [{name: str(v) if name in texts and v is not None else v for name, v in row.items()} for row in rows]
    return pa.Table.from_pylist(converted, schema=schema)


def measured(tables: Mapping[int, pa.Table]) -> list[tuple[Track, list[Row]]]:
    """Return each track with rows, and its rows."""
    numbered = [(tracks.track_of(number, table.schema), table) for number, table in sorted(tables.items())]
    return [(track, table.to_pylist()) for track, table in numbered if table.num_rows]


def with_formats(table: pa.Table, formats: Mapping[str, str]) -> pa.Table:
    """Return the table with the names and labels of all formats in its schema metadata."""
    return table.replace_schema_metadata({_FORMATS_KEY: json.dumps(dict(formats))})


def formats_of(*tables: pa.Table) -> dict[str, str]:
    """Return the label of each format in the metadata or rows of the tables, in order."""
    formats: dict[str, str] = {}
    for table in tables:
        formats |= json.loads((table.schema.metadata or {}).get(_FORMATS_KEY, b"{}"))
    for row in (row for table in tables for row in table.select(["format", "label"]).to_pylist()):
        if row["format"] != IN_MEMORY:
            formats.setdefault(row["format"], row["label"])
    return formats


def case(row: Row) -> str:
    """Return the name of a row without a storage format, such as ``"in memory, float16"``."""
    return ", ".join(str(part) for part in (row["label"], row.get("dtype"), row.get("device")) if part is not None)


def why(row: Row) -> str:
    """Return the reason why a row has no figures."""
    return f"{row['status']}: {row['reason'] or 'no reason given'}"


def stands_for(values: tuple[Any, ...], group: tuple[Any, ...]) -> bool:
    """Whether the values of a row equal those of a group, except missing ones."""
    return all(value in (group_value, None) for value, group_value in zip(values, group, strict=True))


def ranked(rows: Iterable[Row], track: Track) -> list[tuple[Row, float]]:
    """Return the rows with the key metric, best first, and the factor by which each is worse than the best."""
    timed = [row for row in rows if row[track.key] is not None]
    timed.sort(key=lambda row: float(row[track.key]), reverse=track.higher_is_better)
    best = float(timed[0][track.key]) if timed else 0.0
    return [(row, _times_worse(float(row[track.key]), best, higher_is_better=track.higher_is_better)) for row in timed]


def _times_worse(value: float, best: float, *, higher_is_better: bool) -> float:
    more, less = (best, value) if higher_is_better else (value, best)
    return 1.0 if more == less else more / less if less else math.inf


def narrow(rows: Iterable[Row], preferred: Mapping[str, Any]) -> tuple[list[Row], Row]:
    """Return the rows with one value of each parameter, and these values: the preferred ones, or the first measured.

    A row without a value of a parameter is in the result for every value. A parameter without values is omitted.
    """
    selected, chosen = list(rows), {}
    for name, preferred_value in preferred.items():
        values = [row[name] for row in selected if row["status"] == "ok" and row[name] is not None]
        values = values or [row[name] for row in selected if row[name] is not None]
        if values:
            chosen[name] = preferred_value if preferred_value in values else values[0]
            selected = [row for row in selected if row[name] in (chosen[name], None)]
    return selected, chosen


def _finished(track: Track, benchmark: Mapping[str, Any]) -> Row:
    extra, stats = benchmark["extra_info"], benchmark.get("stats") or {}
    seconds = stats.get("data") or ()
    for name, values in _of_rounds(track, extra):
        # A recorded warm-up round would change every fraction without an error.
        if seconds and len(values) != len(seconds):
            raise ValueError(f"{benchmark['name']}: {name} has {len(values)} values for {len(seconds)} rounds")
    row = {name: extra[name] for name in ("operation", "format", "label")}
    row |= {"name": benchmark["name"], "status": "ok", "rounds": stats.get("rounds"), "spread": spread(seconds)}
    row |= {name: extra.get(name) for name in track.parameters}
    row |= {f"{name}_ms": scaled(stats.get(name), 1e3) for name in TIMES}
    row |= track.metrics_of(extra, seconds)
    return {name: finite(value) for name, value in row.items()}


def _of_rounds(track: Track, extra: Mapping[str, Any]) -> list[tuple[str, Sequence[float]]]:
    measured_values = [(name, extra[name]) for name in track.of_rounds if name in extra]
    return [
        pair
        for name, value in measured_values
        for pair in (value.items() if isinstance(value, Mapping) else [(name, value)])
    ]


def _absent(track: Track, missing: Mapping[str, Any]) -> Row:
    params = missing.get("params") or {}
    return {name: missing.get(name) for name in IDENTITY} | {name: params.get(name) for name in track.parameters}
