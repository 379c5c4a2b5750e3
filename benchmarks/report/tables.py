"""The tidy tables: pytest-benchmark's records as one row a benchmark, one table a track."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from benchmarks.tracks import track as tracks
from benchmarks.tracks.track import IDENTITY, OF_ROUNDS, TIMES, Row, Track, finite, scaled

IN_MEMORY = "memory"  # a row's format, where what it measures has none
_FORMATS_KEY = b"formats"  # of a table's schema metadata
_NO_FORMATS: Mapping[str, str] = MappingProxyType({})


def tidy(
    benchmarks: Sequence[Mapping[str, Any]],
    absent: Sequence[Mapping[str, Any]],
    formats: Mapping[str, str] = _NO_FORMATS,
) -> dict[int, pa.Table]:
    """Sort finished and absent benchmarks into one table a track.

    Parameters
    ----------
    benchmarks : sequence of mapping
        ``Metadata.as_dict(include_data=True)`` of each finished benchmark. One without a track in its
        ``extra_info``, such as the gate's control, belongs to no table here and is left out.
    absent : sequence of mapping
        Benchmarks without a result: ``track``, ``operation``, ``format``, ``label``, ``params``, ``status``
        (``missing``, ``failed`` or ``skipped``), ``reason``, ``name``.
    formats : mapping of str to str
        Label of each format that there is, measured or not, in the order in which they are shown.

    Returns
    -------
    dict of int to pyarrow.Table
        Every track, in order, with the schema ``Track.schema``; one without benchmarks has a table without rows.
        One that nobody described has columns of what its benchmarks gave. A metric that cannot be computed, for
        instance from ``stats`` without ``data``, is null.

    Raises
    ------
    ValueError
        If a list of per-round seconds has not one value a round.
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
        rows = [*(_finished(track, each) for each in finished), *(_absent(track, each) for each in gone)]
        tables[number] = with_formats(_table(rows, track.schema), formats)
    return tables


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    texts = {field.name for field in schema if field.type == pa.string()}
    said = [{name: str(v) if name in texts and v is not None else v for name, v in row.items()} for row in rows]
    return pa.Table.from_pylist(said, schema=schema)


def with_formats(table: pa.Table, formats: Mapping[str, str]) -> pa.Table:
    """Let a table say which formats there were when it was made: name to label, in order."""
    return table.replace_schema_metadata({_FORMATS_KEY: json.dumps(dict(formats))})


def formats_of(*tables: pa.Table) -> dict[str, str]:
    """Return the label of each format that the tables say there is or have rows of, in their order."""
    found: dict[str, str] = {}
    for table in tables:
        found |= json.loads((table.schema.metadata or {}).get(_FORMATS_KEY, b"{}"))
    for row in (row for table in tables for row in table.select(["format", "label"]).to_pylist()):
        if row["format"] != IN_MEMORY:
            found.setdefault(row["format"], row["label"])
    return found


def case(row: Row) -> str:
    """Name what a row without a storage format measures, e.g. ``"in memory, float16"``."""
    return ", ".join(str(part) for part in (row["label"], row.get("dtype"), row.get("device")) if part is not None)


def narrow(rows: Iterable[Row], preferred: Mapping[str, Any]) -> tuple[list[Row], Row]:
    """Keep one value of each parameter: the preferred one where it was measured, else the first that was.

    Parameters
    ----------
    rows : iterable of dict
        Rows of one track and operation.
    preferred : mapping
        Parameter name to the value wanted.

    Returns
    -------
    rows : list of dict
        Rows with the chosen values. An absent row that names no value of a parameter stands for all of them.
    chosen : dict
        Parameter name to the value kept; a parameter that no row has is left out.
    """
    kept, chosen = list(rows), {}
    for name, wanted in preferred.items():
        values = [row[name] for row in kept if row["status"] == "ok" and row[name] is not None]
        values = values or [row[name] for row in kept if row[name] is not None]
        if values:
            chosen[name] = wanted if wanted in values else values[0]
            kept = [row for row in kept if row[name] in (chosen[name], None)]
    return kept, chosen


def _finished(track: Track, benchmark: Mapping[str, Any]) -> Row:
    extra, stats = benchmark["extra_info"], benchmark.get("stats") or {}
    seconds = stats.get("data") or ()
    of_rounds = {name: extra[name] for name in OF_ROUNDS if name in extra} | dict(extra.get("stage_s", {}))
    for name, values in of_rounds.items():
        # A warm-up round that was recorded too would shift every fraction without anyone noticing.
        if seconds and len(values) != len(seconds):
            raise ValueError(f"{benchmark['name']}: {name} has {len(values)} values for {len(seconds)} rounds")
    row = {name: extra[name] for name in ("operation", "format", "label")}
    row |= {"name": benchmark["name"], "status": "ok", "rounds": stats.get("rounds")}
    row |= {name: extra.get(name) for name in track.parameter_names}
    row |= {f"{name}_ms": scaled(stats.get(name), 1e3) for name in TIMES}
    row |= track.metrics_of(extra, seconds)
    return {name: finite(value) for name, value in row.items()}


def _absent(track: Track, missing: Mapping[str, Any]) -> Row:
    row = {name: missing.get(name) for name in IDENTITY}
    params = missing.get("params") or {}
    return row | {name: params.get(name) for name in track.parameter_names}
