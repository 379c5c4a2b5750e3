"""The tracks: what each measures, its columns, and how its figures follow from the seconds of its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import pyarrow as pa

Row = dict[str, Any]
Fields = tuple[tuple[str, pa.DataType], ...]
MetricsOf = Callable[[Mapping[str, Any], Sequence[float]], Row]

IDENTITY = ("name", "operation", "format", "label", "status", "reason")
TIMES = ("min", "median", "mean", "stddev")
OF_ROUNDS = ("wait_s", "numpy_s", "on_demand_s", "preloaded_s")  # in a benchmark's extra_info: seconds of each round
# What an epoch is split into, by the names that the profile gives; `other` is what none of the others is.
STAGES = ("read", "read+decode", "decode", "select", "normalise", "collate", "clocks", "other")


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
        identity = [(name, pa.string()) for name in IDENTITY]
        times = [(f"{name}_ms", pa.float64()) for name in TIMES]
        return pa.schema([*identity, *self.parameters, *self.metrics, ("rounds", pa.int64()), *times])


def finite(value: Any) -> Any:
    """Return the value, or None for a figure that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scaled(value: float | None, factor: float) -> float | None:
    """Multiply, where there is a value."""
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
        "raw_mb_per_s": _ratio(scaled(raw_bytes, 1e-6), _median(seconds)),
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
    row: Row = {name: extra.get(name) for name in ("samples", "bytes")} | dict(extra.get("alone", {}))
    row |= of_a_sample(seconds, extra.get("samples", 1))
    if not seconds or "numpy_s" not in extra:
        return row
    row |= {f"numpy_{name}": value for name, value in of_a_sample(extra["numpy_s"]).items()}
    # The median of differences, as both are taken in turns: where a read takes now one time, now another, the
    # difference of medians may lie anywhere between.
    overhead_us = 1e6 * float(np.median(np.subtract(seconds, extra["numpy_s"])))
    overhead_pct = _ratio(100 * overhead_us, row["p50_us"])
    reading = _reading(overhead_pct, 10, 30, ("negligible", "moderate", "high"))
    return row | {"overhead_us": overhead_us, "overhead_pct": overhead_pct, "reading": reading}


def of_a_sample(seconds: Sequence[float], samples: int = 1) -> Row:
    """Return the times of one sample, of the seconds of rounds of so many."""
    milliseconds = _percentiles_ms(seconds, p50_us=50, p95_us=95, p99_us=99)
    total_s = _total(seconds)
    return {name: scaled(value, 1e3 / samples) for name, value in milliseconds.items()} | {
        "mean_us": _ratio(scaled(total_s, 1e6), samples * len(seconds)),
        "samples_per_s": _ratio(samples * len(seconds), total_s),
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


_SAMPLE_TIMES = ("p50_us", "p95_us", "p99_us", "mean_us", "samples_per_s")
_BESIDE_TENSORS = ("numpy", "from_numpy", "copy", "batch")
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
        title="NumPy vs torch",
        round="one sample as a tensor, or one conversion",
        parameters=_of(_TEXT, "how", "dtype", "device"),
        metrics=(
            *_of(_FLOAT, *_SAMPLE_TIMES, "overhead_us", "overhead_pct"),
            *_of(_TEXT, "reading"),
            *_of(_FLOAT, *(f"{of}_{name}" for of in _BESIDE_TENSORS for name in _SAMPLE_TIMES)),
            *_of(_INT, "samples", "bytes"),
        ),
        key="p50_us",
        unit="us",
        higher_is_better=False,
        compared_within=("how", "device"),  # dtypes of a conversion are ranked against each other
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

_PERCENTILES = _of(_FLOAT, "p50_ms", "p95_ms", "p99_ms")


def track_of(number: int, schema: pa.Schema) -> Track:
    """Return a track by its number; of one that nobody described, what the schema of its table tells.

    Raises
    ------
    KeyError
        If that is the schema of something else.
    """
    for track in TRACKS:
        if track.number == number:
            return track
    ends = [name for name in ("p50_ms", "rounds") if schema.get_field_index(name) < 0]
    if ends:
        raise KeyError(ends[0])
    columns = [(field.name, field.type) for field in schema]
    first, last = map(schema.get_field_index, ("p50_ms", "rounds"))
    return _undescribed(number, tuple(columns[len(IDENTITY) : first]), tuple(columns[first:last]))


def track_of_records(number: int, finished: Sequence[Mapping[str, Any]], absent: Sequence[Mapping[str, Any]]) -> Track:
    """Return a track by its number; one that nobody described has columns for what its benchmarks gave."""
    for track in TRACKS:
        if track.number == number:
            return track
    taken = {*_undescribed(number, (), _PERCENTILES).schema.names, "track", "format_name"}
    given = [item for each in (*finished, *absent) for item in (each.get("params") or {}).items()]
    parameters = _columns((name, value) for name, value in given if name not in taken)
    taken |= {name for name, _ in parameters}
    extra = [item for each in finished for item in each["extra_info"].items()]
    figures = _columns((name, value) for name, value in extra if name not in taken and isinstance(value, str | Real))
    return _undescribed(number, parameters, (*_PERCENTILES, *figures))


def _columns(found: Iterable[tuple[str, Any]]) -> Fields:
    """Return a column for each name, of the type that holds all its values: text, where they are no numbers."""
    values: dict[str, list[Any]] = {}
    for name, value in found:
        values.setdefault(name, []).append(value)
    return tuple((name, _type_of([value for value in of if value is not None])) for name, of in values.items())


def _type_of(values: Sequence[Any]) -> pa.DataType:
    for kind, dtype in ((Integral, _INT), (Real, _FLOAT)):
        if values and all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            return dtype
    return _TEXT


def _undescribed(number: int, parameters: Fields, metrics: Fields) -> Track:
    def metrics_of(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
        given = {name: extra.get(name) for name, _ in metrics}
        return given | _percentiles_ms(seconds, p50_ms=50, p95_ms=95, p99_ms=99)

    return Track(
        number=number,
        title="not described yet",
        round="what the benchmark times",
        parameters=parameters,
        metrics=metrics,
        key="p50_ms",
        unit="ms",
        higher_is_better=False,
        compared_within=tuple(name for name, _ in parameters),
        metrics_of=metrics_of,
    )
