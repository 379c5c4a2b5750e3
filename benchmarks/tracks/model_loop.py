"""Track 3: steps of a model, and the share of each step that waits for data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View, percentiles_ms, ratio, reading, total

_LIMITS = (0.30, 0.50)


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    fraction = ratio(total(extra.get("wait_s")), total(seconds))
    return percentiles_ms(seconds, step_p50_ms=50, step_p95_ms=95) | {
        "data_wait_fraction": fraction,
        "reading": reading(fraction, *_LIMITS, ("compute-bound", "balanced", "data-bound")),
        "images_per_s": ratio(extra.get("images"), total(seconds)),
        "images": extra.get("images"),
    }


_STEP, _WAIT = ("step_p50_ms", "step_p95_ms"), ("data_wait_fraction",)
_LEAD = (*_STEP, *_WAIT, "reading")
_DEVICE, _ON_DEMAND = {"device": "cuda"}, {"access": "on_demand"}


def _panels(operation: str) -> tuple[Panel, ...]:
    name, operations, limits = operation.capitalize(), (operation,), tuple(100 * limit for limit in _LIMITS)
    return (
        Panel(f"{name}: throughput", "throughput", ("images_per_s",), operations, "access", _DEVICE),
        Panel(f"{name}: time per step", "time", _STEP, operations, fixed=_ON_DEMAND | _DEVICE),
        Panel(f"{name}: data wait", "data wait", _WAIT, operations, "access", _DEVICE, "bars", limits),
    )


TRACK = Track(
    number=3,
    title="model loop",
    round="one step: wait for the batch, then compute",
    parameters={"access": TEXT, "device": TEXT},
    metrics=(
        Metric("step_p50_ms", heading="p50 ms"),
        Metric("step_p95_ms", heading="p95 ms"),
        Metric("data_wait_fraction", heading="data wait %", unit="% of the step", factor=100.0),
        Metric("reading", TEXT),
        Metric("images_per_s", unit="images/s"),
        Metric("images", INT),
    ),
    metrics_of=_metrics,
    of_rounds=("wait_s",),
    key="images_per_s",
    higher_is_better=True,
    compared_within=("access", "device"),
    views=tuple(View(name, _LEAD, _WAIT, _DEVICE, ("access",)) for name in ("train", "inference")),
    panels=_panels("inference") + _panels("train"),
)
