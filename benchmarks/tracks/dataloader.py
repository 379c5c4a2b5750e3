"""Track 2: batches of a `DataLoader`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View, percentiles_ms, ratio, total


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    known = {name: extra.get(name) for name in ("first_batch_ms", "images")}
    rate = ratio(extra.get("images"), total(seconds))
    return percentiles_ms(seconds, p50_batch_ms=50) | known | {"samples_per_s": rate}


_RATE, _FIRST = ("samples_per_s",), ("first_batch_ms",)
_ON_DEMAND, _PRELOADED, _OF_16 = {"access": "on_demand"}, {"access": "preloaded"}, {"batch_size": 16}

TRACK = Track(
    number=2,
    title="DataLoader",
    round="one batch, from its request to its receipt",
    parameters={"batch_size": INT, "workers": INT, "access": TEXT},
    metrics=(
        Metric("p50_batch_ms"),
        Metric("samples_per_s", heading="samples/s", unit="samples/s"),
        Metric("first_batch_ms", heading="first batch, ms"),
        Metric("images", INT),
    ),
    metrics_of=_metrics,
    key="samples_per_s",
    higher_is_better=True,
    compared_within=("batch_size", "workers", "access"),
    views=(View(None, _FIRST, fixed=_OF_16, pivot=("access", "workers")),),
    panels=(
        Panel("By workers", "throughput", _RATE, series="workers", fixed=_ON_DEMAND | _OF_16),
        Panel("By workers", "throughput", _RATE, series="workers", fixed=_PRELOADED | _OF_16),
        Panel("By batch size", "throughput", _RATE, series="batch_size", fixed=_ON_DEMAND | {"workers": 0}),
        Panel("First batch", "time", _FIRST, series="workers", fixed=_ON_DEMAND | _OF_16),
    ),
)
