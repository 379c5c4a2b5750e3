"""Tracks, one object per file of this folder: measured operations, and their presentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from pkgutil import iter_modules
from typing import Any

import pyarrow as pa

from benchmarks.tracks.track import FLOAT, IDENTITY, INT, TEXT, Metric, Row, Track, floats, percentiles_ms

_FOUND = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
TRACKS: tuple[Track, ...] = tuple(
    sorted((module.TRACK for module in _FOUND if hasattr(module, "TRACK")), key=lambda track: track.number)
)
_PERCENTILES = floats("p50_ms", "p95_ms", "p99_ms")


def track_of(number: int, schema: pa.Schema) -> Track:
    """Return a track by its number; an undescribed track is derived from the schema of its table.

    Raises
    ------
    KeyError
        If the schema is not that of a track.
    """
    if track := _described(number):
        return track
    first, last = (schema.get_field_index(name) for name in ("p50_ms", "rounds"))
    if min(first, last) < 0:
        raise KeyError("p50_ms" if first < 0 else "rounds")
    columns = {field.name: field.type for field in schema}
    names = list(columns)
    metrics = [Metric(name, columns[name]) for name in names[first:last]]
    return _undescribed(number, {name: columns[name] for name in names[len(IDENTITY) : first]}, metrics)


def track_of_records(number: int, finished: Sequence[Mapping[str, Any]], absent: Sequence[Mapping[str, Any]]) -> Track:
    """Return a track by its number; an undescribed track has columns for the values of its benchmarks."""
    if track := _described(number):
        return track
    taken = {*_undescribed(number, {}, _PERCENTILES).schema.names, "track", "format_name"}
    params = [item for record in (*finished, *absent) for item in (record.get("params") or {}).items()]
    parameters = _columns((name, value) for name, value in params if name not in taken)
    taken |= parameters.keys()
    extra = [item for record in finished for item in record["extra_info"].items()]
    figures = _columns((name, value) for name, value in extra if name not in taken and isinstance(value, str | Real))
    return _undescribed(number, parameters, [*_PERCENTILES, *(Metric(*figure) for figure in figures.items())])


def _described(number: int) -> Track | None:
    return next((track for track in TRACKS if track.number == number), None)


def _columns(pairs: Iterable[tuple[str, Any]]) -> dict[str, pa.DataType]:
    """Return one column per name, with the type that holds all of its values, or text if they are not numeric."""
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {
        name: _type_of([value for value in column_values if value is not None])
        for name, column_values in values.items()
    }


def _type_of(values: Sequence[Any]) -> pa.DataType:
    for kind, dtype in ((Integral, INT), (Real, FLOAT)):
        if values and all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            return dtype
    return TEXT


def _undescribed(number: int, parameters: Mapping[str, pa.DataType], metrics: Sequence[Metric]) -> Track:
    def metrics_of(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
        figures = {metric.name: extra.get(metric.name) for metric in metrics}
        return figures | percentiles_ms(seconds, p50_ms=50, p95_ms=95, p99_ms=99)

    return Track(
        number=number,
        title="not described yet",
        round="what the benchmark times",
        parameters=parameters,
        metrics=tuple(metrics),
        metrics_of=metrics_of,
        key="p50_ms",
        compared_within=tuple(parameters),
    )
