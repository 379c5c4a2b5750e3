"""Results of a run, as plain values and as text."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from tests.adversarial.soak.supervisor import Supervisor
from tests.adversarial.soak.watch import Slope, after_warm_up, grown, slope

_PACKAGES = ("torch", "numpy", "pyarrow", "pylance", "vortex-data", "duckdb", "zarr", "tifffile")
_COUNTS = ("descriptors", "threads", "children", "shared_bytes")
_PAGES = 4 * 2**20  # Tolerated growth of shared bytes, because libraries map pages.
# Tolerated rise: allocators and caches of libraries still settle after the first third of a run.
TOLERATED_BYTES_A_MINUTE = 256 * 1024
_LEAST_MINUTES = 5.0


def report(soak: Supervisor, minutes: float, *, ended: str) -> dict[str, Any]:
    """Return the results of a run; ``failures`` is empty if nothing is wrong."""
    longest = max(soak.series, key=len, default=[])
    judged = after_warm_up(longest)
    memory = _memory(judged)
    return {
        "seed": soak.seed,
        "ended": ended,
        "minutes": round(minutes, 2),
        "cases": soak.cases,
        "samples": soak.samples,
        "samples by format": _named(soak, "samples: "),
        "acts": _named(soak, "act: "),
        "other": {name: count for name, count in sorted(soak.counts.items()) if ": " not in name},
        "errors": soak.errors,
        "restarts": max(0, len(soak.series) - 1),
        "memory": memory,
        "resources": {
            name: _described(judged, name) for name in (*_COUNTS, "allocated_bytes", "children_bytes", "shm_files")
        },
        "failures": _failures(soak, judged, memory),
        "machine": _machine(),
        "series": [_thinned(series) for series in soak.series],
    }


def _named(soak: Supervisor, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in sorted(soak.counts.items()) if name.startswith(prefix)}


def _memory(judged: list[dict[str, Any]]) -> dict[str, Any]:
    private_bytes = [entry["private_bytes"] for entry in judged]
    a_minute = slope([entry["minutes"] for entry in judged], private_bytes)
    per_thousand = slope([entry["samples"] / 1000 for entry in judged], private_bytes)
    span = judged[-1]["minutes"] - judged[0]["minutes"] if judged else 0.0
    return {
        "private_bytes": _described(judged, "private_bytes"),
        "judged_minutes": round(span, 2),
        "bytes_a_minute": None if a_minute is None else a_minute.as_dict(),
        "bytes_per_1000_samples": None if per_thousand is None else per_thousand.as_dict(),
        "verdict": _verdict(a_minute, span),
    }


def _verdict(growth: Slope | None, span: float) -> str:
    if growth is None or span < _LEAST_MINUTES:
        return f"not judged: fewer than {_LEAST_MINUTES:.0f} minutes after warm-up"
    if growth.low > TOLERATED_BYTES_A_MINUTE:
        return "grows"
    return (
        "may grow" if growth.low > 0 else "does not grow" if growth.high < TOLERATED_BYTES_A_MINUTE else "not resolved"
    )


def _described(judged: list[dict[str, Any]], name: str) -> dict[str, int] | None:
    values = [entry[name] for entry in judged]
    if not values:
        return None
    return {"first": values[0], "least": min(values), "most": max(values), "last": values[-1], "grown": grown(values)}


def _failures(soak: Supervisor, judged: list[dict[str, Any]], memory: dict[str, Any]) -> list[str]:
    failures = [f"{len(soak.errors)} errors"] if soak.errors else []
    if memory["verdict"] == "grows":
        failures.append(f"private memory grows by {memory['bytes_a_minute']['per_unit']:,.0f} bytes a minute")
    for name in _COUNTS if memory["judged_minutes"] >= _LEAST_MINUTES else ():
        more = grown([entry[name] for entry in judged])
        if more > (_PAGES if name.endswith("_bytes") else 0):
            failures.append(f"{name} grow: {more:,} more in the last quarter than ever in the first")
    if not soak.samples:
        failures.append("no sample was checked")
    return failures


def _thinned(series: list[dict[str, Any]], most: int = 400) -> list[dict[str, Any]]:
    step = max(1, len(series) // most)
    return [{**entry, "minutes": round(entry["minutes"], 3)} for entry in series[::step]]


def _machine() -> dict[str, str]:
    properties = {"system": platform.platform(), "python": platform.python_version()}
    return properties | {package: version(package) for package in _PACKAGES}


def text_of(result: dict[str, Any]) -> str:
    """Return a report as text for a terminal."""
    lines = [
        f"soak run, seed {result['seed']}: {result['ended']} after {result['minutes']} minutes",
        f"  {result['samples']:,} samples checked in {result['cases']:,} cases; {len(result['errors'])} errors",
    ]
    lines += [f"    {name:<22}{count:>10,}" for name, count in result["samples by format"].items()]
    lines += [f"  {name}: {count:,}" for name, count in (*result["acts"].items(), *result["other"].items())]
    lines += [f"  private memory: {result['memory']['verdict']}"]
    for name, unit in (("bytes_a_minute", "a minute"), ("bytes_per_1000_samples", "per 1,000 samples")):
        growth = result["memory"][name]
        if growth is not None:
            lines.append(
                f"    {growth['per_unit']:,.0f} bytes {unit}, "
                f"99 % interval {growth['low']:,.0f} to {growth['high']:,.0f}"
            )
    for name, values in {"private_bytes": result["memory"]["private_bytes"], **result["resources"]}.items():
        if values is not None:
            lines.append(f"  {name}: " + ", ".join(f"{statistic} {value:,}" for statistic, value in values.items()))
    lines += [f"  error in case {error['number']}: {error['what']}; {error['again']}" for error in result["errors"]]
    lines += [f"FAILED: {failure}" for failure in result["failures"]] or ["passed"]
    return "\n".join(lines)
