"""What each track's figure shows: its panels, and the units of their axes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.tracks.track import STAGES, Track, stage_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNITS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "size_bytes": ("MB", 1e-6),
        "data_wait_fraction": ("% of the step", 100.0),
        "overhead_pct": ("% of the tensor's time", 1.0),
        **dict.fromkeys((f"{of}p{q}_us" for of in ("", "numpy_") for q in (50, 95, 99)), ("us", 1.0)),
        "from_numpy_p50_us": ("us", 1.0),
        "samples_per_s": ("samples/s", 1.0),
        "images_per_s": ("images/s", 1.0),
        "break_even_epochs": ("epochs", 1.0),
    }
)
_PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes: a metric of one operation, and what gives a format several marks.

    Attributes
    ----------
    title, quantity : str
        The heading, and what the x axis shows, without its unit.
    operations, metrics : tuple of str
        Whose rows are shown (all, where empty), and which of their columns. Several metrics are joined by a line.
    series : str or None
        The parameter that has one mark for each of its values.
    fixed : mapping
        Parameters held still, with the value preferred; see `narrow`.
    kind : {"marks", "bars", "shares"}
        Marks on an axis that may be logarithmic, bars from zero, or what each metric is of their sum, as one bar.
    limits : tuple of float
        Where the reading changes.
    unit : str
        Of metrics that are not in `UNITS`.
    """

    title: str
    quantity: str
    operations: tuple[str, ...]
    metrics: tuple[str, ...]
    series: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["marks", "bars", "shares"] = "marks"
    limits: tuple[float, ...] = ()
    unit: str = "ms"

    def unit_of(self, metric: str) -> tuple[str, float]:
        """Return the unit that a metric's axis has, and what its values are multiplied with."""
        return UNITS.get(metric, (self.unit, 1.0))


def _storage() -> tuple[Panel, ...]:
    return (
        Panel("Preload: open and decode all", "time", ("preload",), ("median_ms",), "encoding"),
        Panel("Write all", "time", ("write",), ("median_ms",), "encoding"),
        Panel("Size on disk", "size", ("write", "preload"), ("size_bytes",), "encoding", kind="bars"),
    )


def _getitem() -> tuple[Panel, ...]:
    of, random, normalize = (), {"order": "random"}, {"transform": "normalize"}
    on_demand = {"access": "on_demand"}
    return (
        Panel("Throughput", "throughput", of, ("samples_per_s",), "access", random | normalize),
        Panel("Latency", "time", of, _PERCENTILES, None, on_demand | random | normalize),
        Panel("By order", "median time", of, ("p50_ms",), "order", on_demand | normalize),
        Panel("By transform", "median time", of, ("p50_ms",), "transform", on_demand | random),
    )


def _dataloader() -> tuple[Panel, ...]:
    of, rate = (), ("samples_per_s",)
    on_demand, preloaded, batch = {"access": "on_demand"}, {"access": "preloaded"}, {"batch_size": 16}
    return (
        Panel("By workers", "throughput", of, rate, "workers", on_demand | batch),
        Panel("By workers", "throughput", of, rate, "workers", preloaded | batch),
        Panel("By batch size", "throughput", of, rate, "batch_size", on_demand | {"workers": 0}),
        Panel("First batch", "time", of, ("first_batch_ms",), "workers", on_demand | batch),
    )


def _model_loop() -> tuple[Panel, ...]:
    steps, wait, on_demand = ("step_p50_ms", "step_p95_ms"), ("data_wait_fraction",), {"access": "on_demand"}
    device = {"device": "cuda"}
    panels: list[Panel] = []
    for operation in ("inference", "train"):
        name, of = operation.capitalize(), (operation,)
        panels += (
            Panel(f"{name}: throughput", "throughput", of, ("images_per_s",), "access", device),
            Panel(f"{name}: step", "time", of, steps, None, on_demand | device),
            Panel(f"{name}: waiting for data", "wait", of, wait, "access", device, kind="bars", limits=(30, 50)),
        )
    return tuple(panels)


def _numpy_vs_torch() -> tuple[Panel, ...]:
    of, percentiles = ("sample",), ("p50_us", "p95_us", "p99_us")
    of_numpy = tuple(f"numpy_{name}" for name in percentiles)
    alone = tuple(f"{how}_p50_us" for how in ("from_numpy", "copy", "batch"))
    return (
        Panel("Sample: array and tensor", "median time", of, ("numpy_p50_us", "p50_us")),
        Panel("Sample: the tensor's part", "overhead", of, ("overhead_pct",), kind="bars", limits=(10, 30)),
        Panel("Conversion alone", "median time of a sample", of, alone),
        Panel("Sample as array", "time", of, of_numpy),
        Panel("Sample as tensor", "time", of, percentiles),
        Panel("Conversion alone, in memory", "median time of a sample", ("convert",), ("p50_us",), "how"),
    )


def _stages() -> tuple[Panel, ...]:
    of, stages = ("epoch",), tuple(map(stage_column, STAGES))
    preload = ("preload",)
    return (
        Panel("An epoch by stage", "part of its time", of, stages, None, {"access": "on_demand"}, "shares"),
        Panel("An epoch by stage", "part of its time", of, stages, None, {"access": "preloaded"}, "shares"),
        Panel("Decode all once, or at each epoch", "time", preload, ("median_ms", "on_demand_ms", "preloaded_ms")),
        Panel("Preloading has paid", "after", preload, ("break_even_epochs",)),
    )


PANELS: Mapping[int, tuple[Panel, ...]] = MappingProxyType(
    {0: _storage(), 1: _getitem(), 2: _dataloader(), 3: _model_loop(), 4: _numpy_vs_torch(), 5: _stages()}
)


def panels_of(track: Track, operations: Iterable[str]) -> tuple[Panel, ...]:
    """Return a track's panels; where none are given, one for each operation that shows the metric that ranks."""
    held, quantity = dict.fromkeys(track.parameter_names), track.key.removesuffix(f"_{track.unit}").replace("_", " ")
    return PANELS.get(track.number) or tuple(
        Panel(name.replace("_", " "), quantity, (name,), (track.key,), None, held, unit=track.unit)
        for name in dict.fromkeys(operations)
    )
