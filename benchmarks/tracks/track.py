"""`Track`: one family of benchmarks, the columns of its table, and how they are ranked and shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

Row = dict[str, Any]
MetricsOf = Callable[[Mapping[str, Any], Sequence[float]], Row]

LEAST_ROUNDS = MappingProxyType({99: 500})  # With fewer rounds, few long ones decide a percentile.
_NUM_PARTS = 5  # The spread compares the medians of successive parts of the rounds.
IDENTITY = ("name", "operation", "format", "label", "status", "reason")
TIMES = ("min", "median", "mean", "stddev")
TEXT, INT, FLOAT = pa.string(), pa.int64(), pa.float64()
# Order of parameter values in tables and figures. Other values come last.
_ORDER = (
    *("on_demand", "preloaded", "bytes or native", "bytes", "list", "native", "random", "sequential", "none"),
    *("normalize", "from_numpy", "copy", "batch", "crop", "mask"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of each benchmark: a column of the table.

    Attributes
    ----------
    name, dtype : str, pyarrow.DataType
        Name and type of the column.
    heading : str
        Heading in reports. The default is the name.
    unit : str
        Unit on the axis of a figure.
    factor : float
        Factor from the stored value to the value in reports and figures.
    """

    name: str
    dtype: pa.DataType = FLOAT
    heading: str = ""
    unit: str = "ms"
    factor: float = 1.0


def floats(*names: str, unit: str = "ms") -> tuple[Metric, ...]:
    """Return metrics whose heading is their name."""
    return tuple(Metric(name, unit=unit) for name in names)


@dataclass(frozen=True, slots=True)
class View:
    """Headline table of one operation, or of all operations by default, ranked by the track's key metric.

    `fixed` maps parameters to their preferred value. Each value of the `pivot` parameters is a group of columns. The
    first group ranks the formats and has the `lead` metrics, the other groups have the `rest`. `heading` replaces the
    operation in the heading.
    """

    operation: str | None = None
    lead: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pivot: tuple[str, ...] = ()
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes of the figure of a track.

    Attributes
    ----------
    title, quantity : str
        Heading, and label of the x axis without its unit.
    metrics, operations : tuple of str
        Columns that are drawn, and the operations of their rows. The default is all operations. A line joins several
        metrics.
    series : str or None
        Parameter with one mark per value.
    fixed : mapping
        Preferred value of the other parameters.
    kind : {"marks", "bars", "shares"}
        Marks on a linear or logarithmic axis, bars from zero, or one bar with the share of each metric.
    limits : tuple of float
        Vertical lines where the reading changes.
    words : tuple of str
        Names of the metrics in the legend. The default is the names of the columns.
    """

    title: str
    quantity: str
    metrics: tuple[str, ...]
    operations: tuple[str, ...] = ()
    series: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["marks", "bars", "shares"] = "marks"
    limits: tuple[float, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Track:
    """One family of benchmarks.

    Attributes
    ----------
    number : int
        Number in ``extra_info["track"]`` of each benchmark.
    title, round : str
        Heading of the track, and the work of one round.
    parameters : mapping of str to pyarrow.DataType
        Parameter columns.
    metrics, metrics_of : tuple of Metric, callable
        Metric columns, and the function that computes them from ``(extra_info, seconds of each round)``.
    of_rounds : tuple of str
        Entries of ``extra_info`` with the seconds of each round: a list, or a mapping to lists.
    key, higher_is_better : str, bool
        The metric that ranks formats.
    compared_within : tuple of str
        Parameters that must be equal, in addition to the operation, for two rows to be ranked together.
    views, panels : tuple of View, tuple of Panel
        Tables and axes of the reports. The default is one per operation, with the key metric.
    """

    number: int
    title: str
    round: str
    parameters: Mapping[str, pa.DataType]
    metrics: tuple[Metric, ...]
    metrics_of: MetricsOf
    key: str
    higher_is_better: bool = False
    compared_within: tuple[str, ...] = ()
    of_rounds: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    panels: tuple[Panel, ...] = ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metric columns."""
        return tuple(metric.name for metric in self.metrics)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the track's table."""
        figures = [(metric.name, metric.dtype) for metric in self.metrics]
        times = [(f"{name}_ms", FLOAT) for name in TIMES]
        identity = [(name, TEXT) for name in IDENTITY]
        return pa.schema([*identity, *self.parameters.items(), *figures, ("rounds", INT), ("spread", FLOAT), *times])

    @property
    def unit(self) -> str:
        """Unit of the key metric."""
        return self.metric(self.key).unit

    def metric(self, name: str) -> Metric:
        """Return a metric by its name, including the times that all tracks have."""
        return next((metric for metric in self.metrics if metric.name == name), Metric(name))

    def views_of(self, rows: Sequence[Row]) -> tuple[View, ...]:
        """Return the views, or one per operation if the track has none."""
        parameters, operations = dict.fromkeys(self.parameters), dict.fromkeys(row["operation"] for row in rows)
        return self.views or tuple(View(name, ("min_ms", "mean_ms"), fixed=parameters) for name in operations)

    def panels_of(self, rows: Sequence[Row]) -> tuple[Panel, ...]:
        """Return the panels, or one per operation if the track has none."""
        parameters, operations = dict.fromkeys(self.parameters), dict.fromkeys(row["operation"] for row in rows)
        quantity = self.key.removesuffix(f"_{self.unit}").replace("_", " ")
        return self.panels or tuple(
            Panel(name.replace("_", " "), quantity, (self.key,), (name,), fixed=parameters) for name in operations
        )


def in_order(value: Any) -> tuple[int, bool, Any]:
    """Return the sort key of a parameter value."""
    return _ORDER.index(value) if value in _ORDER else len(_ORDER), isinstance(value, str), value or 0


def finite(value: Any) -> Any:
    """Return the value, or None if it is a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scaled(value: float | None, factor: float) -> float | None:
    """Return the product, or None without a value."""
    return None if value is None else value * factor


def ratio(over: float | None, under: float | None) -> float | None:
    """Return the quotient, or None if a value is missing or the divisor is zero."""
    return None if over is None or not under else over / under


def total(seconds: Sequence[float] | None) -> float | None:
    """Return the sum, or None of an empty sequence."""
    return math.fsum(seconds) if seconds else None


def percentiles_ms(seconds: Sequence[float], **columns: float) -> Row:
    """Return one linearly interpolated percentile per column, or None with too few rounds for it."""
    supported = {
        name: percentile
        for name, percentile in columns.items()
        if len(seconds) >= max(LEAST_ROUNDS.get(int(percentile), 1), 1)
    }
    values = (
        np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, list(supported.values())).tolist()
        if supported
        else []
    )
    return dict.fromkeys(columns) | dict(zip(supported, values, strict=True))


def spread(seconds: Sequence[float]) -> float | None:
    """Return the largest over the least median of five successive parts of the rounds, or None for a single round."""
    if len(seconds) < 2 or min(seconds) <= 0:
        return None
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(seconds), min(_NUM_PARTS, len(seconds)))]
    return max(medians) / min(medians)


def reading(value: float | None, low: float, high: float, words: tuple[str, str, str]) -> str | None:
    """Return the word for a value below both limits, between them, or above both."""
    if value is None:
        return None
    return words[0] if value < low else words[1] if value <= high else words[2]
