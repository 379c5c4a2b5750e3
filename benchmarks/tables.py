"""The tidy tables: what each track measures, and pytest-benchmark's records as one row a benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

Row = dict[str, Any]
Fields = tuple[tuple[str, pa.DataType], ...]
MetricsOf = Callable[[Mapping[str, Any], Sequence[float]], Row]

# The fixed order of every plot. A format that never ran sends no label, hence the second copy of the library's names.
FORMAT_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "parquet": "Parquet",
        "parquet_duck": "Parquet (DuckDB)",
        "lance": "Lance",
        "vortex": "Vortex",
        "duckdb": "DuckDB",
        "arrow": "Arrow IPC",
        "tiff": "OME-TIFF",
        "ome_zarr": "OME-Zarr",
    }
)


@dataclass(frozen=True, slots=True)
class Track:
    """One family of benchmarks.

    Attributes
    ----------
    number : int
        The number that a benchmark gives as ``extra_info["track"]``.
    title : str
        What the track times, for headings.
    round : str
        What one round is, in a few words.
    parameters, metrics : tuple of (str, pyarrow.DataType)
        The columns of the track's table between the common ones.
    key, unit, higher_is_better : str, str, bool
        The metric that ranks formats.
    compared_within : tuple of str
        Parameters that must be equal for two rows to be ranked against each other, beside the operation.
    metrics_of : callable
        Computes the metrics from ``(extra_info, seconds of each round)``.
    """

    number: int
    title: str
    round: str
    parameters: Fields
    metrics: Fields
    key: str
    unit: str
    higher_is_better: bool
    compared_within: tuple[str, ...]
    metrics_of: MetricsOf

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameter columns."""
        return tuple(name for name, _ in self.parameters)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metric columns."""
        return tuple(name for name, _ in self.metrics)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the track's table."""
        identity = [(name, pa.string()) for name in ("name", "operation", "format", "label", "status", "reason")]
        times = [(f"{name}_ms", pa.float64()) for name in TIMES]
        return pa.schema([*identity, *self.parameters, *self.metrics, ("rounds", pa.int64()), *times])


TIMES = ("min", "median", "mean", "stddev")
OF_ROUNDS = ("wait_s", "numpy_s", "on_demand_s", "preloaded_s")  # in a benchmark's extra_info: seconds of each round
# What an epoch is split into, by the names that the profile gives; `other` is what none of the others is.
STAGES = ("read", "read+decode", "decode", "select", "normalise", "collate", "clocks", "other")


def tidy(benchmarks: Sequence[Mapping[str, Any]], absent: Sequence[Mapping[str, Any]]) -> dict[int, pa.Table]:
    """Sort finished and absent benchmarks into one table a track.

    Parameters
    ----------
    benchmarks : sequence of mapping
        ``Metadata.as_dict(include_data=True)`` of each finished benchmark. One without a track in its
        ``extra_info``, such as the gate's control, belongs to no table here and is left out.
    absent : sequence of mapping
        Benchmarks without a result: ``track``, ``operation``, ``format``, ``label``, ``params``, ``status``
        (``missing``, ``failed`` or ``skipped``), ``reason``, ``name``.

    Returns
    -------
    dict of int to pyarrow.Table
        Every track, in order, with the schema ``Track.schema``; one without benchmarks has a table without rows.
        A metric that cannot be computed, for instance from ``stats`` without ``data``, is null.

    Raises
    ------
    ValueError
        If a track is unknown, or a list of per-round seconds has not one value a round.
    """
    rows: dict[int, list[Row]] = {track.number: [] for track in TRACKS}
    for benchmark in benchmarks:
        if "track" in benchmark["extra_info"]:
            track = _track(benchmark["extra_info"]["track"], benchmark["name"])
            rows[track.number].append(_finished(track, benchmark))
    for missing in (row for row in absent if "track" in row):
        track = _track(missing["track"], missing.get("name"))
        rows[track.number].append(_absent(track, missing))
    return {track.number: pa.Table.from_pylist(rows[track.number], schema=track.schema) for track in TRACKS}


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


def _track(number: Any, name: Any) -> Track:
    for track in TRACKS:
        if track.number == number:
            return track
    raise ValueError(f"benchmark {name!r} is of track {number!r}; known are {[track.number for track in TRACKS]}")


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
    row |= {f"{name}_ms": _scaled(stats.get(name), 1e3) for name in TIMES}
    row |= track.metrics_of(extra, seconds)
    return {name: _finite(value) for name, value in row.items()}


def _absent(track: Track, missing: Mapping[str, Any]) -> Row:
    row = {name: missing.get(name) for name in ("name", "operation", "format", "label", "status", "reason")}
    params = missing.get("params") or {}
    return row | {name: params.get(name) for name in track.parameter_names}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _total(seconds: Sequence[float] | None) -> float | None:
    return math.fsum(seconds) if seconds else None


def _median(seconds: Sequence[float]) -> float | None:
    return float(np.median(seconds)) if seconds else None


def _percentiles_ms(seconds: Sequence[float], **columns: float) -> Row:
    """Return one percentile, interpolated linearly, for each column; null where there are no seconds."""
    if not seconds:
        return dict.fromkeys(columns)
    values = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, list(columns.values()))
    return dict(zip(columns, values.tolist(), strict=True))


def _reading(value: float | None, low: float, high: float, words: tuple[str, str, str]) -> str | None:
    if value is None:
        return None
    return words[0] if value < low else words[1] if value <= high else words[2]


def _storage(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    raw_bytes = extra.get("raw_bytes")
    return {name: extra.get(name) for name in ("size_bytes", "raw_bytes", "images")} | {
        "compression_ratio": _ratio(raw_bytes, extra.get("size_bytes")),
        "raw_mb_per_s": _ratio(_scaled(raw_bytes, 1e-6), _median(seconds)),
    }


def _getitem(_: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    percentiles = _percentiles_ms(seconds, p50_ms=50, p95_ms=95, p99_ms=99)
    return percentiles | {"samples_per_s": _ratio(len(seconds), _total(seconds))}


def _dataloader(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    return _percentiles_ms(seconds, p50_batch_ms=50) | {
        "samples_per_s": _ratio(extra.get("images"), _total(seconds)),
        "first_batch_ms": extra.get("first_batch_ms"),
        "images": extra.get("images"),
    }


def _model_loop(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    fraction = _ratio(_total(extra.get("wait_s")), _total(seconds))
    return _percentiles_ms(seconds, step_p50_ms=50, step_p95_ms=95) | {
        "data_wait_fraction": fraction,
        "reading": _reading(fraction, 0.30, 0.50, ("compute-bound", "balanced", "data-bound")),
        "images_per_s": _ratio(extra.get("images"), _total(seconds)),
        "images": extra.get("images"),
    }


def _numpy_vs_torch(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    row = _percentiles_ms(seconds, p50_ms=50, p95_ms=95, p99_ms=99) | {"bytes": extra.get("bytes")}
    numpy_s = extra.get("numpy_s")
    if not seconds or not numpy_s:
        return row
    convert_s = np.subtract(seconds, numpy_s)
    overhead_pct = _ratio(100 * math.fsum(convert_s), _total(numpy_s))
    return row | {
        "numpy_ms": float(np.median(numpy_s)) * 1e3,
        "convert_ms": float(np.median(convert_s)) * 1e3,
        "total_ms": float(np.median(seconds)) * 1e3,
        "overhead_pct": overhead_pct,
        "reading": _reading(overhead_pct, 10, 30, ("negligible", "moderate", "high")),
    }


def _stages(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    if "stage_s" in extra:
        return {"images": extra.get("images")} | _stage_times(extra["stage_s"], extra.get("images"), seconds)
    row = {"images": extra.get("images"), "break_even_epochs": extra.get("break_even_epochs")}
    if not seconds or "on_demand_s" not in extra:
        return row
    row |= {f"{name}_ms": float(np.median(extra[f"{name}_s"])) * 1e3 for name in ("on_demand", "preloaded")}
    return row | {"reading": _pays(extra.get("break_even_epochs"))}


def _stage_times(stage_s: Mapping[str, Sequence[float]], images: int | None, seconds: Sequence[float]) -> Row:
    """Return the time of each stage for one image, of the rounds all together, so that they add up."""
    if not seconds or not images:
        return {}
    total_s = {name: math.fsum(stage_s.get(name, ())) for name in STAGES[:-1]}
    total_s["other"] = math.fsum(math.fsum(values) for values in stage_s.values()) - math.fsum(total_s.values())
    return {stage_column(name): 1e6 * total_s[name] / (images * len(seconds)) for name in STAGES}


def stage_column(stage: str) -> str:
    """Return the column of a stage's microseconds."""
    return f"{stage.replace('+', '_')}_us"


def _pays(epochs: int | None) -> str:
    if epochs is None:
        return "never pays"
    return "pays in the first epoch" if epochs <= 1 else "pays within 10 epochs" if epochs <= 10 else "pays later"


def _of(dtype: pa.DataType, *names: str) -> Fields:
    return tuple((name, dtype) for name in names)


_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()

TRACKS: tuple[Track, ...] = (
    Track(
        number=0,
        title="storage",
        round="the whole collection",
        parameters=_of(_TEXT, "encoding"),
        metrics=(
            *_of(_INT, "size_bytes", "raw_bytes", "images"),
            *_of(_FLOAT, "compression_ratio", "raw_mb_per_s"),
        ),
        key="median_ms",
        unit="ms",
        higher_is_better=False,
        compared_within=(),  # encodings are alternatives: a folder's "native" competes with a table's "bytes"
        metrics_of=_storage,
    ),
    Track(
        number=1,
        title="one sample, dataset[i]",
        round="one sample",
        parameters=_of(_TEXT, "order", "transform", "access"),
        metrics=_of(_FLOAT, "p50_ms", "p95_ms", "p99_ms", "samples_per_s"),
        key="samples_per_s",
        unit="samples/s",
        higher_is_better=True,
        compared_within=("order", "transform", "access"),
        metrics_of=_getitem,
    ),
    Track(
        number=2,
        title="DataLoader",
        round="one batch, from asking for it to having it",
        parameters=(*_of(_INT, "batch_size", "workers"), *_of(_TEXT, "access")),
        metrics=(*_of(_FLOAT, "p50_batch_ms", "samples_per_s", "first_batch_ms"), *_of(_INT, "images")),
        key="samples_per_s",
        unit="samples/s",
        higher_is_better=True,
        compared_within=("batch_size", "workers", "access"),
        metrics_of=_dataloader,
    ),
    Track(
        number=3,
        title="model loop",
        round="one step, waiting for the batch and computing",
        parameters=_of(_TEXT, "access", "device"),
        metrics=(
            *_of(_FLOAT, "step_p50_ms", "step_p95_ms", "data_wait_fraction"),
            *_of(_TEXT, "reading"),
            *_of(_FLOAT, "images_per_s"),
            *_of(_INT, "images"),
        ),
        key="images_per_s",
        unit="images/s",
        higher_is_better=True,
        compared_within=("access", "device"),
        metrics_of=_model_loop,
    ),
    Track(
        number=4,
        title="numpy vs torch",
        round="one sample, or one conversion or copy",
        parameters=_of(_TEXT, "dtype", "device"),
        metrics=(
            *_of(_FLOAT, "numpy_ms", "convert_ms", "total_ms", "overhead_pct"),
            *_of(_TEXT, "reading"),
            *_of(_FLOAT, "p50_ms", "p95_ms", "p99_ms"),
            *_of(_INT, "bytes"),
        ),
        key="p50_ms",
        unit="ms",
        higher_is_better=False,
        compared_within=("device",),  # dtypes of a conversion are ranked against each other
        metrics_of=_numpy_vs_torch,
    ),
    Track(
        number=5,
        title="stages and preload",
        round="one epoch, or decoding everything once",
        parameters=_of(_TEXT, "access"),
        metrics=(
            *_of(_FLOAT, *map(stage_column, STAGES), "on_demand_ms", "preloaded_ms"),
            *_of(_INT, "break_even_epochs"),
            *_of(_TEXT, "reading"),
            *_of(_INT, "images"),
        ),
        key="median_ms",
        unit="ms",
        higher_is_better=False,
        compared_within=("access",),
        metrics_of=_stages,
    ),
)
