"""Track 0: writing a collection, and opening it with all pixels decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View, ratio, scaled


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    raw_bytes = extra.get("raw_bytes")
    median_s = float(np.median(seconds)) if seconds else None
    return {name: extra.get(name) for name in ("size_bytes", "allocated_bytes", "raw_bytes", "images")} | {
        "compression_ratio": ratio(raw_bytes, extra.get("allocated_bytes")),
        "raw_mb_per_s": ratio(scaled(raw_bytes, 1e-6), median_s),
    }


_LEAD, _REST = ("raw_mb_per_s", "allocated_bytes", "size_bytes", "compression_ratio"), ("allocated_bytes",)

TRACK = Track(
    number=0,
    title="storage",
    round="the whole collection",
    parameters={"encoding": TEXT},
    metrics=(
        Metric("allocated_bytes", INT, "disk space, MB", unit="MB", factor=1e-6),
        Metric("size_bytes", INT, "file size, MB", unit="MB", factor=1e-6),
        Metric("raw_bytes", INT),
        Metric("images", INT),
        Metric("compression_ratio", heading="raw / disk"),
        Metric("raw_mb_per_s", heading="MB/s"),
    ),
    metrics_of=_metrics,
    key="median_ms",
    compared_within=(),  # Encodings are alternatives: "native" of a folder competes with "bytes" of a table.
    views=tuple(
        View(operation, _LEAD, _REST, pivot=("encoding",)) for operation in ("preload", "preload_cold", "write")
    ),
    panels=(
        Panel("Preload: open and decode", "time", ("median_ms",), ("preload",), "encoding"),
        Panel("Preload from disk", "time", ("median_ms",), ("preload_cold",), "encoding"),
        Panel("Write", "time", ("median_ms",), ("write",), "encoding"),
        Panel("Size on disk", "size", ("allocated_bytes",), ("write", "preload"), "encoding", kind="bars"),
    ),
)
