"""Track 4: extra cost of a tensor over a NumPy array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.tracks.track import (
    INT,
    TEXT,
    Metric,
    Panel,
    Row,
    Track,
    View,
    floats,
    percentiles_ms,
    ratio,
    reading,
    scaled,
    total,
)

_LIMITS = (10, 30)


def of_a_sample(seconds: Sequence[float], samples: int = 1) -> Row:
    """Return the time per sample from the seconds of rounds of ``samples`` samples."""
    milliseconds = percentiles_ms(seconds, p50_us=50, p95_us=95, p99_us=99)
    total_s = total(seconds)
    return {name: scaled(value, 1e3 / samples) for name, value in milliseconds.items()} | {
        "mean_us": ratio(scaled(total_s, 1e6), samples * len(seconds)),
        "samples_per_s": ratio(samples * len(seconds), total_s),
    }


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    row: Row = {name: extra.get(name) for name in ("samples", "bytes")} | dict(extra.get("alone", {}))
    row |= of_a_sample(seconds, extra.get("samples", 1))
    if not seconds or "numpy_s" not in extra:
        return row
    row |= {f"numpy_{name}": value for name, value in of_a_sample(extra["numpy_s"]).items()}
    # Both alternate, so the median of their differences is used. If the time of a read has two levels, the difference
    # of the medians can be anything between them.
    overhead_us = 1e6 * float(np.median(np.subtract(seconds, extra["numpy_s"])))
    overhead_pct = ratio(100 * overhead_us, row["p50_us"])
    verdict = reading(overhead_pct, *_LIMITS, ("negligible", "moderate", "high"))
    return row | {"overhead_us": overhead_us, "overhead_pct": overhead_pct, "reading": verdict}


def _times(prefix: str = "", heading: str = "") -> tuple[Metric, ...]:
    return (
        Metric(f"{prefix}p50_us", heading=heading, unit="us"),
        *floats(f"{prefix}p95_us", f"{prefix}p99_us", f"{prefix}mean_us", unit="us"),
        Metric(f"{prefix}samples_per_s", heading=f"{prefix}samples/s".replace("_", " "), unit="samples/s"),
    )


_PERCENTILES = ("p50_us", "p95_us", "p99_us")
_BESIDE = {"numpy": "array", "from_numpy": "from_numpy", "copy": "copy", "batch": "batch"}
_ALONE = ("from_numpy_p50_us", "copy_p50_us", "batch_p50_us")
_SHOWN = tuple(
    f"{prefix}{name}" for prefix in ("", "numpy_") for name in ("p95_us", "p99_us", "mean_us", "samples_per_s")
)
_SAMPLE = ("sample",)

TRACK = Track(
    number=4,
    title="NumPy vs torch",
    round="one sample as a tensor, or one conversion",
    parameters={"how": TEXT, "dtype": TEXT, "device": TEXT},
    metrics=(
        *_times(),
        Metric("overhead_us"),
        Metric("overhead_pct", heading="overhead %", unit="% of the time as tensor"),
        Metric("reading", TEXT),
        *(metric for prefix, heading in _BESIDE.items() for metric in _times(f"{prefix}_", heading)),
        Metric("samples", INT),
        Metric("bytes", INT),
    ),
    metrics_of=_metrics,
    of_rounds=("numpy_s",),
    key="p50_us",
    compared_within=("how", "device"),  # dtypes of a conversion are ranked against each other
    views=(
        View("sample", ("overhead_pct", "numpy_p50_us", *_ALONE, "reading"), heading="sample: overhead of the tensor"),
        View("sample", ("rounds", *_SHOWN), heading="sample: time as tensor and as array"),
        View("convert", _SHOWN[:2], pivot=("how",)),
        View("to_device", _SHOWN[:4]),
    ),
    panels=(
        Panel("Sample: NumPy and torch", "median time", ("numpy_p50_us", "p50_us"), _SAMPLE),
        Panel("Sample: overhead of the tensor", "overhead", ("overhead_pct",), _SAMPLE, kind="bars", limits=_LIMITS),
        Panel(
            "Conversion only", "median time per sample", _ALONE, _SAMPLE, words=("from_numpy", "copy", "batch of 16")
        ),
        Panel("Sample as NumPy array", "time", tuple(f"numpy_{name}" for name in _PERCENTILES), _SAMPLE),
        Panel("Sample as tensor", "time", _PERCENTILES, _SAMPLE),
        Panel("Conversion only, in memory", "median time per sample", ("p50_us",), ("convert",), "how"),
    ),
)
