"""Detection and false-alarm rates of the gate's self-test, with intervals, as Markdown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from scipy.special import betaincinv

from benchmarks.gate import resample
from benchmarks.gate.decision import Verdict
from benchmarks.gate.planted import FORMS
from benchmarks.gate.report import short_name
from benchmarks.gate.text import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Run = Mapping[str, Any]
    Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

RECORDED = "recorded"  # Kind of a run that only records pairs, from which gates are drawn.
_TAIL = 0.025  # Probability beyond each end of a 95 % interval.
_PASSED, _ALARMS, _FOUND = 0.95, 0.003, 0.99  # Targets for unchanged gates, and for slowdowns of 10 % and more.
_WORST = 10  # Number of benchmarks listed for drawn gates.
_EXITS = {0: "no regression", 1: "regression", 3: "too noisy"}


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a rate, by C. J. Clopper and E. S. Pearson (Biometrika 26, 1934, 404)."""
    low = float(betaincinv(hits, trials - hits + 1, _TAIL)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1 - _TAIL)) if hits < trials else 1.0
    return low, high


def rate(hits: int, trials: int) -> str:
    """Return a rate and its interval as text."""
    if not trials:
        return "-"
    low, high = interval(hits, trials)
    return f"{hits} of {trials} ({100 * hits / trials:.1f} %; {100 * low:.1f} to {100 * high:.1f})"


def missed_targets(runs: Sequence[Run]) -> list[str]:
    """Return a line per missed target, that is, a target excluded by the interval of the measured rate."""
    missed = []
    for kind in ("unchanged", "loaded"):
        exits = [run["exit"] for run in runs if run["kind"] == kind]
        if interval(exits.count(1), len(exits))[0] > _ALARMS:
            missed.append(f"false alarms of {kind} gates at most {_ALARMS:.1%}: {rate(exits.count(1), len(exits))}")
    exits = [run["exit"] for run in runs if run["kind"] == "unchanged"]
    if interval(exits.count(0), len(exits))[1] < _PASSED:
        missed.append(
            f"unchanged gates without a regression at least {_PASSED:.0%}: {rate(exits.count(0), len(exits))}"
        )
    rows = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"]]
    for level in (0.1, 0.2):
        verdicts = [row["verdict"] for row in rows if row["level"] == level]
        regressions = verdicts.count(Verdict.REGRESSION)
        if interval(regressions, len(verdicts))[1] < _FOUND:
            missed.append(f"+{level:.0%} found at least {_FOUND:.0%}: {rate(regressions, len(verdicts))}")
    return missed


def as_markdown(runs: Sequence[Run], environment: Mapping[str, Any]) -> str:
    """Return the rates of suites, of planted slowdowns, and of each benchmark as Markdown."""
    tables = [markdown(heading, lines, ("---", *["---:"] * (len(heading) - 1))) for heading, lines in rates(runs)]
    return "\n\n".join([caption(runs, environment), *tables]) + "\n"


def caption(runs: Sequence[Run], environment: Mapping[str, Any]) -> str:
    """Return the date, the machine, and the number and duration of gates."""
    machine, whole = environment["machine"], [run["seconds"] for run in runs if run["kind"] != RECORDED]
    pairs = sum(run["controls"][0]["rounds"] for run in runs if run["kind"] == RECORDED)
    loads = [run["load"] for run in runs if run.get("load") is not None]
    counted = [f"{len(whole)} gates, {sum(whole) / len(whole):.0f} s each, {max(whole):.0f} s at most"] if whole else []
    counted += [f"{pairs} recorded pairs of processes"] if pairs else []
    counted += [f"load of the machine {min(loads):.1f} to {max(loads):.1f}, the gate's own 1 included"] if loads else []
    return (
        f"{runs[-1]['finished'][:10]}, {machine['cpu']}, {machine['cores_usable']} cores, {machine['python']}, "
        f"torch {environment['versions'].get('torch')}: {'; '.join(counted)}. Rates with exact 95 % intervals."
    )


def rates(runs: Sequence[Run]) -> list[Table]:
    """Return heading and lines of the tables with lines: suites, planted slowdowns, drawn gates, benchmarks."""
    return [table for table in (_suites(runs), _planted(runs), *_drawn(runs), _per_benchmark(runs)) if table[1]]


def _suites(runs: Sequence[Run]) -> Table:
    lines = []
    for kind, label in (("unchanged", "no change"), ("loaded", "no change, the core 40 % busy")):
        of_kind = [run for run in runs if run["kind"] == kind]
        if of_kind:
            lines.append(
                (
                    f"{label}: whole gates",
                    *(rate(sum(run["exit"] == outcome for run in of_kind), len(of_kind)) for outcome in _EXITS),
                )
            )
    unslowed = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"] if not row["level"]]
    if unslowed:
        shares = (
            rate(sum(row["verdict"] == outcome for row in unslowed), len(unslowed)) for outcome in ("ok", "regression")
        )
        lines.append(("unslowed benchmarks in gates with slowdowns", *shares, "-"))
    return ("", *_EXITS.values()), lines


def _planted(runs: Sequence[Run]) -> Table:
    rows = [row for run in runs if run["kind"] == "slowed" for row in run["benchmarks"] if row["level"]]
    lines: list[tuple[str, ...]] = []
    kinds = ("regression", "not resolved", "ok")
    for level in sorted({row["level"] for row in rows}):
        level_rows = [row for row in rows if row["level"] == level]
        lines.append(
            (
                f"+{level:.0%}",
                *(rate(sum(row["verdict"] == kind for row in level_rows), len(level_rows)) for kind in kinds),
            )
        )
    slowed = [run for run in runs if run["kind"] == "in forms"]
    for form, benchmark in FORMS.items():
        form_rows = [row for run in slowed for row in run["benchmarks"] if short_name(row["name"]) == benchmark]
        if form_rows:
            shares = (rate(sum(row["verdict"] == kind for row in form_rows), len(form_rows)) for kind in kinds)
            lines.append((f"{form}, in {benchmark}", *shares))
    return ("planted", "found", "not resolved", "missed"), lines


def _per_benchmark(runs: Sequence[Run]) -> Table:
    """Return one line per benchmark: its noise without a change, and the rates of slowdowns found."""
    rows = [row for run in runs if run["kind"] in ("unchanged", "slowed") for row in run["benchmarks"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    levels = sorted({row["level"] for row in rows} - {0.0})
    lines = []
    for name in names:
        own_rows = [row for row in rows if row["name"] == name]
        still = [row for row in own_rows if not row["level"]]
        off = max((abs(row["ratio"] - 1) for row in still), default=math.nan)
        width = max(((row["high"] - row["low"]) / 2 for row in still), default=math.nan)
        cells = []
        for level in levels:
            level_rows = [row for row in own_rows if row["level"] == level]
            cells.append(
                f"{sum(row['verdict'] == Verdict.REGRESSION for row in level_rows)} of {len(level_rows)}"
                if level_rows
                else "-"
            )
        least = min(min(times["min_s"] for times in row["base"]) for row in own_rows)
        size = f"{least / 1e6:,.1f} MB" if own_rows[0].get("in_bytes") else f"{1e6 * least:,.0f}"
        lines.append((short_name(name), size, f"{100 * off:.1f}", f"{100 * width:.1f}", *cells))
    heading = ("benchmark", "us", "largest estimate, no change, %", "widest interval, +- %")
    return (*heading, *(f"+{level:.0%} found" for level in levels)), lines


def _drawn(runs: Sequence[Run]) -> list[Table]:
    """Return tables of rates estimated from drawn gates, without intervals because these gates share rounds."""
    recordings = [run for run in runs if run["kind"] == RECORDED]
    if not recordings:
        return []
    estimates = [resample.estimate(recordings, level, resample.GATES) for level in resample.LEVELS]
    still, slowed = estimates[0], estimates[1:]
    names = sorted(still.verdicts, key=lambda name: (_doubt(still, slowed, name), name), reverse=True)[:_WORST]
    exits = (f"{100 * still.exits[status] / resample.GATES:.1f} %" for status in _EXITS)
    verdicts = (Verdict.NOT_RESOLVED, Verdict.REGRESSION)
    lines = [
        (
            short_name(name),
            *(f"{100 * still.share(name, verdict):.1f} %" for verdict in verdicts),
            *(f"{100 * estimate.share(name, Verdict.REGRESSION):.1f} %" for estimate in slowed),
        )
        for name in names
    ]
    heading = ("drawn gates: worst benchmarks", "no change: not resolved", "regression")
    return [
        (("drawn gates", *_EXITS.values()), [(f"no change: {resample.GATES} gates", *exits)]),
        ((*heading, *(f"+{estimate.level:.0%} found" for estimate in slowed)), lines),
    ]


def _doubt(still: resample.Estimate, slowed: Sequence[resample.Estimate], name: str) -> float:
    """Return the sum of a benchmark's rates of wrong verdicts, without a change and for slowdowns of 10 % and more."""
    wrong = still.share(name, Verdict.NOT_RESOLVED) + still.share(name, Verdict.REGRESSION)
    return wrong + sum(1 - estimate.share(name, Verdict.REGRESSION) for estimate in slowed if estimate.level >= 0.1)
