"""Track 6: batches of crops around objects, with and without masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View, percentiles_ms, ratio, scaled, total

_TIMES = {"p50_us": 50, "p95_us": 95}


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    batch = extra.get("batch_size")
    of_batch = percentiles_ms(seconds, **_TIMES)
    times = {name: scaled(ratio(value, batch), 1e3) for name, value in of_batch.items()}
    rate = None if batch is None else ratio(batch * len(seconds), total(seconds))
    known = {name: extra.get(name) for name in ("batch_size", "crop_shape", "fields", "objects", "of")}
    return times | {"crops_per_s": rate} | known


_RATE, _ON_DEMAND, _CROP = ("crops_per_s",), {"access": "on_demand"}, {"sample": "crop"}

TRACK = Track(
    number=6,
    title="single cells",
    round="one batch of crops",
    parameters={"sample": TEXT, "access": TEXT},
    metrics=(
        *(Metric(name, heading=f"{name[:3]} us", unit="us") for name in _TIMES),
        Metric("crops_per_s", heading="crops/s", unit="crops/s"),
        Metric("batch_size", INT),
        Metric("crop_shape", TEXT),
        Metric("fields", INT),
        Metric("objects", INT),
        Metric("of", TEXT),
    ),
    metrics_of=_metrics,
    key="crops_per_s",
    higher_is_better=True,
    compared_within=("sample", "access"),
    views=(View("cells", tuple(_TIMES), fixed=_ON_DEMAND, pivot=("sample",)),),
    panels=(
        Panel("Throughput", "throughput", _RATE, ("cells",), "access", _CROP),
        Panel("Crops and masks", "throughput", _RATE, ("cells",), "sample", _ON_DEMAND),
        Panel("Time per crop", "time", tuple(_TIMES), ("cells",), fixed=_ON_DEMAND | _CROP),
    ),
)
