"""Track 1: one sample, ``dataset[i]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tracks.track import TEXT, Metric, Panel, Row, Track, View, floats, percentiles_ms, ratio, total


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    samples = extra.get("samples") or 1
    percentiles = percentiles_ms([call_s / samples for call_s in seconds], p50_ms=50, p95_ms=95, p99_ms=99)
    return percentiles | {"samples_per_s": ratio(samples * len(seconds), total(seconds))}


_RATE, _TIMES, _MEDIAN = ("samples_per_s",), ("p50_ms", "p95_ms", "p99_ms"), ("p50_ms",)
_AGAIN = ("getitem",)
_RANDOM, _PLAIN, _ON_DEMAND = {"order": "random"}, {"transform": "normalize"}, {"access": "on_demand"}

TRACK = Track(
    number=1,
    title="one sample, dataset[i]",
    round="one sample, or 16 samples of a newly opened collection",
    parameters={"order": TEXT, "transform": TEXT, "access": TEXT},
    metrics=(*floats(*_TIMES), Metric("samples_per_s", heading="samples/s", unit="samples/s")),
    metrics_of=_metrics,
    key="samples_per_s",
    higher_is_better=True,
    compared_within=("order", "transform", "access"),
    views=(
        View("getitem", (*_TIMES, "rounds"), fixed=_RANDOM | _PLAIN, pivot=("access",)),
        View("first_touch", ("p50_ms", "p95_ms", "rounds"), heading="first read of each image after opening"),
        View("first_touch_cold", ("p50_ms", "p95_ms", "rounds"), heading="first read of each image, from disk"),
    ),
    panels=(
        Panel("Throughput", "throughput", _RATE, _AGAIN, "access", _RANDOM | _PLAIN),
        Panel("Latency", "time", _TIMES, _AGAIN, fixed=_ON_DEMAND | _RANDOM | _PLAIN),
        Panel("First read of an image", "time", ("p50_ms", "p95_ms"), ("first_touch",)),
        Panel("First read, from disk", "time", ("p50_ms", "p95_ms"), ("first_touch_cold",)),
        Panel("Latency by order", "median time", _MEDIAN, _AGAIN, "order", _ON_DEMAND | _PLAIN),
        Panel("Latency by transform", "median time", _MEDIAN, _AGAIN, "transform", _ON_DEMAND | _RANDOM),
    ),
)
