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

LEAST_ROUNDS = MappingProxyType({99: 500})  # of fewer a percentile is that of the few longest, and is not given
_PARTS = 5  # of the rounds, one after the other, of which each has a median
IDENTITY = ("name", "operation", "format", "label", "status", "reason")
TIMES = ("min", "median", "mean", "stddev")
TEXT, INT, FLOAT = pa.string(), pa.int64(), pa.float64()
# In which tables and figures have the values of parameters; those that are not named come last.
_ORDER = (
    *("on_demand", "preloaded", "bytes or native", "bytes", "list", "native", "random", "sequential", "none"),
    *("normalize", "from_numpy", "copy", "batch", "crop", "mask"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of each benchmark: a column of the table.

    Attributes
    ----------
    name, dtype : str, pyarrow.DataType
        Of the column.
    heading : str
        In tables for people; the name, where it is empty.
    unit : str
        Of a figure's axis.
    factor : float
        What both multiply the figure by.
    """

    name: str
    dtype: pa.DataType = FLOAT
    heading: str = ""
    unit: str = "ms"
    factor: float = 1.0


def floats(*names: str, unit: str = "ms") -> tuple[Metric, ...]:
    """Return metrics that are shown by their own names."""
    return tuple(Metric(name, unit=unit) for name in names)


@dataclass(frozen=True, slots=True)
class View:
    """What tables for people show of one operation (None: of all), ranked by the track's key metric.

    `fixed` holds parameters still at the value preferred; every value of the `pivot` parameters becomes a group of
    columns. The first group ranks the formats and shows the `lead` metrics too, the others the `rest`. `what` stands
    for the operation in the heading.
    """

    operation: str | None = None
    lead: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pivot: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes of the figure: a metric of some operations, and what gives a format several marks.

    Attributes
    ----------
    title, quantity : str
        The heading, and what the x axis shows, without its unit.
    metrics, operations : tuple of str
        Which columns of whose rows (all, where empty). Several metrics are joined by a line.
    series : str or None
        The parameter that has one mark for each of its values.
    fixed : mapping
        Parameters held still, with the value preferred.
    kind : {"marks", "bars", "shares"}
        Marks on an axis that may be logarithmic, bars from zero, or what each metric is of their sum, as one bar.
    limits : tuple of float
        Where the reading changes.
    words : tuple of str
        What the legend calls the metrics, where not by their names.
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
        The number that a benchmark gives as ``extra_info["track"]``.
    title, round : str
        What the track times, for headings, and what one round is.
    parameters : mapping of str to pyarrow.DataType
        The columns that say what a benchmark was of.
    metrics, metrics_of : tuple of Metric, callable
        The columns of figures, and what computes them of ``(extra_info, seconds of each round)``.
    of_rounds : tuple of str
        What of the ``extra_info`` is seconds of each round: a list of them, or a mapping to such lists.
    key, higher_is_better : str, bool
        The metric that ranks formats.
    compared_within : tuple of str
        Parameters that must be equal for two rows to be ranked against each other, beside the operation.
    views, panels : tuple of View, tuple of Panel
        What tables and figures show; where there are none, one for each operation is made of the key metric.
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
        """Return a metric by its name; the times that all tracks have are metrics too."""
        return next((metric for metric in self.metrics if metric.name == name), Metric(name))

    def views_of(self, rows: Sequence[Row]) -> tuple[View, ...]:
        """Return the views; where none are given, one for each operation that there is."""
        held, operations = dict.fromkeys(self.parameters), dict.fromkeys(row["operation"] for row in rows)
        return self.views or tuple(View(name, ("min_ms", "mean_ms"), fixed=held) for name in operations)

    def panels_of(self, rows: Sequence[Row]) -> tuple[Panel, ...]:
        """Return the panels; where none are given, one for each operation that there is."""
        held, operations = dict.fromkeys(self.parameters), dict.fromkeys(row["operation"] for row in rows)
        quantity = self.key.removesuffix(f"_{self.unit}").replace("_", " ")
        return self.panels or tuple(
            Panel(name.replace("_", " "), quantity, (self.key,), (name,), fixed=held) for name in operations
        )


def in_order(value: Any) -> tuple[int, bool, Any]:
    """Return what values of parameters are sorted by."""
    return _ORDER.index(value) if value in _ORDER else len(_ORDER), isinstance(value, str), value or 0


def finite(value: Any) -> Any:
    """Return the value, or None for a figure that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scaled(value: float | None, factor: float) -> float | None:
    """Multiply, where there is a value."""
    return None if value is None else value * factor


def ratio(over: float | None, under: float | None) -> float | None:
    """Divide, where there are both values and the divisor is not zero."""
    return None if over is None or not under else over / under


def total(seconds: Sequence[float] | None) -> float | None:
    """Return the sum, where there is anything."""
    return math.fsum(seconds) if seconds else None


def percentiles_ms(seconds: Sequence[float], **columns: float) -> Row:
    """Return one percentile, interpolated linearly, for each column; null where there are too few seconds for it."""
    given = {name: at for name, at in columns.items() if len(seconds) >= max(LEAST_ROUNDS.get(int(at), 1), 1)}
    values = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, list(given.values())).tolist() if given else []
    return dict.fromkeys(columns) | dict(zip(given, values, strict=True))


def spread(seconds: Sequence[float]) -> float | None:
    """Return how far repeats differ: the largest over the least median of parts of the rounds, in their order.

    Of few rounds each is a part; of one there is no repeat, and None.
    """
    if len(seconds) < 2 or min(seconds) <= 0:
        return None
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(seconds), min(_PARTS, len(seconds)))]
    return max(medians) / min(medians)


def reading(value: float | None, low: float, high: float, words: tuple[str, str, str]) -> str | None:
    """Say in a word where a value lies: below both limits, between them, or above."""
    if value is None:
        return None
    return words[0] if value < low else words[1] if value <= high else words[2]
