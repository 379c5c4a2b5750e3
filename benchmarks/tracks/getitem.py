"""Track 1: one sample by ``dataset[i]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tracks.track import TEXT, Metric, Panel, Row, Track, View, floats, percentiles_ms, ratio, total


def _metrics(_: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    percentiles = percentiles_ms(seconds, p50_ms=50, p95_ms=95, p99_ms=99)
    return percentiles | {"samples_per_s": ratio(len(seconds), total(seconds))}


_RATE, _TIMES, _MEDIAN = ("samples_per_s",), ("p50_ms", "p95_ms", "p99_ms"), ("p50_ms",)
_RANDOM, _PLAIN, _ON_DEMAND = {"order": "random"}, {"transform": "normalize"}, {"access": "on_demand"}

TRACK = Track(
    number=1,
    title="one sample, dataset[i]",
    round="one sample",
    parameters={"order": TEXT, "transform": TEXT, "access": TEXT},
    metrics=(*floats(*_TIMES), Metric("samples_per_s", heading="samples/s", unit="samples/s")),
    metrics_of=_metrics,
    key="samples_per_s",
    higher_is_better=True,
    compared_within=("order", "transform", "access"),
    views=(View(None, (*_TIMES, "rounds"), fixed=_RANDOM | _PLAIN, pivot=("access",)),),
    panels=(
        Panel("Throughput", "throughput", _RATE, series="access", fixed=_RANDOM | _PLAIN),
        Panel("Latency", "time", _TIMES, fixed=_ON_DEMAND | _RANDOM | _PLAIN),
        Panel("By order", "median time", _MEDIAN, series="order", fixed=_ON_DEMAND | _PLAIN),
        Panel("By transform", "median time", _MEDIAN, series="transform", fixed=_ON_DEMAND | _RANDOM),
    ),
)
