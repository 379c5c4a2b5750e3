"""Track 5: where the time of an epoch goes, and when preloading has paid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View

# What an epoch is split into, by the names that the profile gives; `other` is what none of the others is.
STAGES = ("read", "read+decode", "decode", "select", "normalize", "collate", "clocks", "other")


def stage_column(stage: str) -> str:
    """Return the column of a stage's microseconds."""
    return f"{stage.replace('+', '_')}_us"


def _metrics(extra: Mapping[str, Any], seconds: Sequence[float]) -> Row:
    if "stage_s" in extra:
        return {"images": extra.get("images")} | _stage_times(extra["stage_s"], extra.get("images"), seconds)
    row = {"images": extra.get("images"), "break_even_epochs": extra.get("break_even_epochs")}
    if not seconds or "on_demand_s" not in extra:
        return row
    row |= {f"{name}_ms": float(np.median(extra[f"{name}_s"])) * 1e3 for name in ("on_demand", "preloaded")}
    return row | {"reading": _pays(extra.get("break_even_epochs"))}


def _stage_times(stage_s: Mapping[str, Sequence[float]], images: int | None, seconds: Sequence[float]) -> Row:
    """Return the time of each stage for one image, of the rounds all together, so that they add up."""
    if not seconds or not images:
        return {}
    total_s = {name: math.fsum(stage_s.get(name, ())) for name in STAGES[:-1]}
    total_s["other"] = math.fsum(math.fsum(values) for values in stage_s.values()) - math.fsum(total_s.values())
    return {stage_column(name): 1e6 * total_s[name] / (images * len(seconds)) for name in STAGES}


def _pays(epochs: int | None) -> str:
    if epochs is None:
        return "never pays"
    return "pays in the first epoch" if epochs <= 1 else "pays within 10 epochs" if epochs <= 10 else "pays later"


_COLUMNS = tuple(map(stage_column, STAGES))
_EPOCHS = ("on_demand_ms", "preloaded_ms")

TRACK = Track(
    number=5,
    title="stages and preload",
    round="one epoch, or decoding everything once",
    parameters={"access": TEXT},
    metrics=(
        *(Metric(stage_column(stage), heading=f"{stage} us") for stage in STAGES),
        Metric("on_demand_ms", heading="epoch on demand ms"),
        Metric("preloaded_ms", heading="preloaded ms"),
        Metric("break_even_epochs", INT, "pays after epochs", unit="epochs"),
        Metric("reading", TEXT),
        Metric("images", INT),
    ),
    metrics_of=_metrics,
    of_rounds=("stage_s", "on_demand_s", "preloaded_s"),
    key="median_ms",
    compared_within=("access",),
    views=(
        View("epoch", _COLUMNS, _COLUMNS, pivot=("access",)),
        View("preload", (*_EPOCHS, "break_even_epochs", "reading")),
    ),
    panels=(
        *(
            Panel(
                "An epoch by stage",
                "part of its time",
                _COLUMNS,
                ("epoch",),
                fixed={"access": access},
                kind="shares",
                words=STAGES,
            )
            for access in ("on_demand", "preloaded")
        ),
        Panel(
            "Decode all once, or at each epoch",
            "time",
            ("median_ms", *_EPOCHS),
            ("preload",),
            words=("decode all", "epoch on demand", "epoch preloaded"),
        ),
        Panel("Preloading has paid", "after", ("break_even_epochs",), ("preload",)),
    ),
)
