"""The rates that the gate's self-test found, with their intervals, as Markdown."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from benchmarks.gate.decision import Change, Verdict
from benchmarks.gate.planted import FORMS
from benchmarks.gate.report import short_name
from benchmarks.gate.text import markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Run = Mapping[str, Any]
    Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

_Z = 1.959964  # of a 95 % interval
_RESAMPLED = 2000
_EXITS = {0: "no regression", 1: "regression", 3: "too noisy"}


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate, by E. B. Wilson (J. Am. Stat. Assoc. 22, 1927, 209)."""
    if not trials:
        return 0.0, 1.0
    share, spread = hits / trials, _Z**2 / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def rate(hits: int, trials: int) -> str:
    """Write a rate with its interval."""
    if not trials:
        return "-"
    low, high = interval(hits, trials)
    return f"{hits} of {trials} ({100 * hits / trials:.1f} %; {100 * low:.1f} to {100 * high:.1f})"


def missed_targets(runs: Sequence[Run]) -> list[str]:
    """Return which targets the runs show to be missed: those that the interval of the measured rate excludes."""
    missed = []
    for kind, most in (("unchanged", 0.01), ("loaded", 0.05)):
        exits = [run["exit"] for run in runs if run["kind"] == kind]
        if interval(exits.count(1), len(exits))[0] > most:
            missed.append(f"false alarms of {kind} gates at most {most:.0%}: {rate(exits.count(1), len(exits))}")
    rows = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"]]
    for level, least in ((0.1, 0.95), (0.2, 0.99)):
        verdicts = [row["verdict"] for row in rows if row["level"] == level]
        found = verdicts.count(Verdict.REGRESSION)
        if interval(found, len(verdicts))[1] < least:
            missed.append(f"+{level:.0%} found at least {least:.0%}: {rate(found, len(verdicts))}")
    return missed


def as_markdown(runs: Sequence[Run], where: Mapping[str, Any]) -> str:
    """Lay the rates out: of suites, of planted slowdowns, and of each benchmark."""
    tables = [markdown(heading, lines, ("---", *["---:"] * (len(heading) - 1))) for heading, lines in rates(runs)]
    return "\n\n".join([caption(runs, where), *tables]) + "\n"


def caption(runs: Sequence[Run], where: Mapping[str, Any]) -> str:
    """Say when and where how many gates were run."""
    machine, mean_s = where["machine"], sum(run["seconds"] for run in runs) / len(runs)
    return (
        f"{runs[-1]['finished'][:10]}, {machine['cpu']}, {machine['cores_usable']} cores, {machine['python']}, "
        f"torch {where['versions'].get('torch')}: {len(runs)} gates, {mean_s:.0f} s each. Rates with 95 % intervals."
    )


def rates(runs: Sequence[Run]) -> list[Table]:
    """Return heading and lines of each table: of suites, of planted slowdowns, and of each benchmark."""
    return [table for table in (_suites(runs), _found(runs), _each(runs)) if table[1]]


def _suites(runs: Sequence[Run]) -> Table:
    lines = []
    for kind, said in (("unchanged", "no change"), ("loaded", "no change, the core 40 % busy")):
        of = [run for run in runs if run["kind"] == kind]
        if of:
            lines.append(
                (f"{said}: whole gates", *(rate(sum(run["exit"] == each for run in of), len(of)) for each in _EXITS))
            )
    unslowed = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"] if not row["level"]]
    bank = [run for run in runs if run["kind"] == "unchanged"]
    if unslowed:
        shares = (rate(sum(row["verdict"] == each for row in unslowed), len(unslowed)) for each in ("ok", "regression"))
        lines.append(("unslowed benchmarks beside slowed ones", *shares, "-"))
    if bank:
        pools, draw = _pools(bank), random.Random(0)  # noqa: S311  # no secret
        alarms = sum(_alarms(pools, bank[0]["threshold"], draw) for _ in range(_RESAMPLED))
        lines.append(("no change: gates drawn from the rounds of those", "-", f"{alarms} of {_RESAMPLED}", "-"))
    return ("", *_EXITS.values()), lines


def _found(runs: Sequence[Run]) -> Table:
    rows = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"] if row["level"]]
    lines: list[tuple[str, ...]] = []
    kinds = ("regression", "not resolved", "ok")
    for level in sorted({row["level"] for row in rows}):
        of = [row for row in rows if row["level"] == level]
        lines.append((f"+{level:.0%}", *(rate(sum(row["verdict"] == kind for row in of), len(of)) for kind in kinds)))
    slowed = [run for run in runs if run["kind"] == "in forms"]
    for form, where in FORMS.items():
        of = [row for run in slowed for row in run["benchmarks"] if short_name(row["name"]) == where]
        if of:
            shares = (rate(sum(row["verdict"] == kind for row in of), len(of)) for kind in kinds)
            lines.append((f"{form}, in {where}", *shares))
    return ("planted", "found", "not resolved", "missed"), lines


def _each(runs: Sequence[Run]) -> Table:
    """Return a line for each benchmark: its noise without a change, and what was found of its slowdowns."""
    rows = [row for run in runs if run["kind"] in ("unchanged", "slowed") for row in run["benchmarks"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    levels = sorted({row["level"] for row in rows} - {0.0})
    lines = []
    for name in names:
        of = [row for row in rows if row["name"] == name]
        still = [row for row in of if not row["level"]]
        off = max((abs(row["ratio"] - 1) for row in still), default=math.nan)
        width = max(((row["high"] - row["low"]) / 2 for row in still), default=math.nan)
        cells = []
        for level in levels:
            at = [row for row in of if row["level"] == level]
            cells.append(f"{sum(row['verdict'] == Verdict.REGRESSION for row in at)} of {len(at)}" if at else "-")
        least = min(min(times["min_s"] for times in row["base"]) for row in of)
        size = f"{least / 1e6:,.1f} MB" if of[0].get("in_bytes") else f"{1e6 * least:,.0f}"
        lines.append((short_name(name), size, f"{100 * off:.1f}", f"{100 * width:.1f}", *cells))
    heading = ("benchmark", "us", "largest estimate, no change, %", "widest interval, +- %")
    return (*heading, *(f"+{level:.0%} found" for level in levels)), lines


def _pools(bank: Iterable[Run]) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """Return the shortest times of base and head in every round of all runs, by benchmark and by how it is judged."""
    pools: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for run in bank:
        for row in run["benchmarks"]:
            times = zip(row["base"], row["head"], strict=True)
            pool = pools.setdefault((row["name"], row.get("least", False)), [])
            pool.extend((base["min_s"], head["min_s"]) for base, head in times)
    return pools


def _alarms(pools: Mapping[tuple[str, bool], list[tuple[float, float]]], threshold: float, draw: random.Random) -> bool:
    """Whether a gate alarms whose rounds are drawn with replacement."""
    return any(_drawn(pool, threshold, draw, least=least) is Verdict.REGRESSION for (_, least), pool in pools.items())


def _drawn(pool: list[tuple[float, float]], threshold: float, draw: random.Random, *, least: bool) -> Verdict:
    pairs = draw.choices(pool, k=5)
    while (change := Change.of(*zip(*pairs, strict=True), least=least)).is_suspicious(threshold) and len(pairs) < 11:
        pairs.append(draw.choice(pool))
    return change.verdict(threshold)
