"""Track 5: time of an epoch by stage, and number of epochs until preloading pays off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.tracks.track import INT, TEXT, Metric, Panel, Row, Track, View

# Stages of an epoch, as the profile names them. `other` is the rest.
STAGES = ("read", "read+decode", "decode", "select", "normalize", "collate", "clocks", "other")


def stage_column(stage: str) -> str:
    """Return the column name for the microseconds of a stage."""
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
    """Return microseconds per image of each stage. They are sums over all rounds, so they add up."""
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
    title="stages of an epoch, and preloading",
    round="one epoch, or preloading the collection once",
    parameters={"access": TEXT},
    metrics=(
        *(Metric(stage_column(stage), heading=f"{stage} us") for stage in STAGES),
        Metric("on_demand_ms", heading="epoch on demand, ms"),
        Metric("preloaded_ms", heading="epoch preloaded, ms"),
        Metric("break_even_epochs", INT, "break-even epochs", unit="epochs"),
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
                "Time of an epoch by stage",
                "share of the epoch",
                _COLUMNS,
                ("epoch",),
                fixed={"access": access},
                kind="shares",
                words=STAGES,
            )
            for access in ("on_demand", "preloaded")
        ),
        Panel(
            "Preload once, or decode every epoch",
            "time",
            ("median_ms", *_EPOCHS),
            ("preload",),
            words=("preload", "epoch on demand", "epoch preloaded"),
        ),
        Panel("Break-even of preloading", "epochs until preloading pays off", ("break_even_epochs",), ("preload",)),
    ),
)
