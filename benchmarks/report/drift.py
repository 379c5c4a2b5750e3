"""Slow drift: benchmarks that became slower over many stored runs of one machine.

Each new run compares the last runs of every benchmark with the runs before, by `benchmarks.report.ranks`. Times are
divided by the pace of their run, as in baselines. The pace relative to the controls is a series of its own. If a
control changed with a benchmark, or other benchmarks became faster at that time, the cause is the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gate.text import counted
from benchmarks.report.baselines import figure_of
from benchmarks.report.ranks import (
    LAST,
    NEEDED,
    WINDOW,
    Array,
    Shift,
    between,
    noise_of,
    shift_of,
    standardised,
    usual_correlation,
)
from benchmarks.report.record_baseline import MOST_WAITED, Spread
from benchmarks.report.stored_runs import StoredRun

STEADY = 0.04  # Up to this noise, 95 of 100 drifts of 10 % are found within `PROMISE` runs.
PROMISE = 20
_MOST_COMMON = 0.1  # Above this correlation of successive runs, fewer drifts are found.
ALL = "all benchmarks, relative to the controls"
_LEAST_PART = 0.5  # Runs with a smaller part of the last run's benchmarks are left out.
_LEAST_TIMED = 10  # Fewer times do not give a pace.
_LEAST_FASTER = 3  # This many faster benchmarks, and a third of the slower ones, mean another machine.
_THEN = 10  # Splits that are at most this many runs apart have one cause.
_MACHINE_MOVED = 3.0  # Sum of ranks of a control, in standard deviations, that means another machine.


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a stored run by full names of benchmarks."""

    name: str
    commit: str
    figures: dict[str, tuple[str, float]]
    control_s: dict[str, float]
    waited: float

    @classmethod
    def from_run(cls, run: StoredRun) -> Measured:
        """Return the judged figures of a run. Memory has targets, so it is not judged here."""
        figures = {}
        for name, bench in run.benchmarks.items():
            figure = figure_of(bench.get("extra_info") or {}, bench["stats"]["min"])
            if figure and figure[1] and figure[1] > 0:  # Without a run of the reference, the ratio is missing.
                figures[name] = figure
        control = run.control or {"least_s": {}, "waited": 0.0}
        return cls(run.path.stem.partition("_")[0], run.commit, figures, control["least_s"], control["waited"])


@dataclass(frozen=True, slots=True)
class Drift:
    """Benchmark that became slower: the approximate first run and commit, and the cause if it is the machine."""

    benchmark: str
    shift: Shift
    run: str
    commit: str
    machine: str = ""

    def __str__(self) -> str:
        more, low, high = (math.expm1(logarithm) for logarithm in self.shift[:3])
        since = f"since about run {self.run}{f', commit {self.commit[:10]}' if self.commit else ''}"
        return f"{self.benchmark} {more:+.1%} ({low:+.1%} to {high:+.1%}) {since}{self.machine}"


@dataclass(frozen=True, slots=True)
class Drifts:
    """Drifts in stored runs, with the numbers of runs, of runs left out and of benchmarks.

    ``steady`` counts the benchmarks with so little noise that a drift of 10 % is found. It is zero if successive runs
    are correlated.
    """

    runs: int = 0
    left_out: int = 0
    benchmarks: int = 0
    steady: int = 0
    drifts: tuple[Drift, ...] = ()

    @property
    def slower(self) -> list[Drift]:
        """Benchmarks that became slower for another reason than the machine."""
        return [drift for drift in self.drifts if not drift.machine]

    def lines(self) -> list[str]:
        """Return the report: the drifts, or the number of runs that are missing."""
        out = f"; {counted(self.left_out, 'busy or partial run')} left out" if self.left_out else ""
        if self.runs < NEEDED:
            return [f"Slow drift: not judged, {self.runs} of the {NEEDED} runs needed are stored{out}"]
        scope = f"{counted(self.benchmarks, 'benchmark')} and {counted(self.runs, 'run')}{out}"
        power = f"a slowdown of 10 % is found within {PROMISE} runs in {counted(self.steady, 'steady benchmark')}"
        outcome = f"{counted(len(self.slower), 'benchmark')} became slower" if self.slower else "none"
        lines = [f"Slow drift: {outcome}, of {scope}; {power}"]
        lines += [f"  slower: {drift}" for drift in self.slower]
        return lines + [f"  not judged, the machine changed: {drift}" for drift in self.drifts if drift.machine]

    def as_markdown(self) -> str:
        """Return the report as Markdown for GitHub, as a warning if a benchmark became slower."""
        first, *others = self.lines()
        lines = [first, "", *(f"- {line.strip()}" for line in others)]
        if self.slower:
            lines = [f"> {line}" for line in ("[!WARNING]", *lines)]
        return "\n".join(lines).strip() + "\n"


def find(measured: Sequence[Measured]) -> Drifts:
    """Return the drifts in runs of one machine, workload and profile, the oldest first."""
    kinds = _judged(measured[-1]) if measured else {}
    runs = [run for run in measured if run.waited <= MOST_WAITED and _has_most(run, kinds)][-WINDOW:]
    left_out = len(measured) - len(runs)
    if len(runs) < NEEDED:
        return Drifts(len(runs), left_out)
    series = _series(runs, kinds)
    common = usual_correlation(values for _, values in series.values())
    slower, faster = (_shifts(series, sign, common) for sign in (1, -1))
    drifts = []
    for name, (first_run, shift) in slower.items():
        since = [runs[run_index] for run_index in series[name][0]]
        why = _moved(since, shift) or _turned(first_run, slower, faster)
        drifts.append(Drift(name, shift, runs[first_run].name, runs[first_run].commit, why))
    drifts.sort(key=lambda drift: -drift.shift.more)
    steady = 0 if common > _MOST_COMMON else sum(_is_steady(values) for _, values in series.values())
    return Drifts(len(runs), left_out, len(series), steady, tuple(drifts))


def _is_steady(values: Array) -> bool:
    return noise_of(np.diff(values)) <= STEADY * math.sqrt(2)  # Differences of neighbors hardly contain a drift.


def _shifts(series: Mapping[str, tuple[Any, Array]], sign: int, common: float) -> dict[str, tuple[int, Shift]]:
    """Return the first run and the shift of each series that drifted up (sign 1) or down (sign -1)."""
    shifts = {}
    for name, (run_indices, values) in series.items():
        if shift := shift_of(sign * values, common=common):
            shifts[name] = int(run_indices[-shift.split]), shift
    return shifts


def _turned(first_run: int, slower: Mapping[str, tuple[int, Shift]], faster: Mapping[str, tuple[int, Shift]]) -> str:
    """Return a note if many benchmarks became faster when others became slower: the machine changed."""
    near, others = (
        sum(abs(other_run - first_run) <= _THEN for other_run, _ in shifts.values()) for shifts in (faster, slower)
    )
    return f"; {near} others became faster" if near >= max(_LEAST_FASTER, others / 3) else ""


def _judged(run: Measured) -> dict[str, str]:
    """Return the benchmarks of a run and their kinds, without times if there are too few for a pace."""
    kinds = {name: kind for name, (kind, _) in sorted(run.figures.items())}
    few = list(kinds.values()).count("times") < _LEAST_TIMED
    return {name: kind for name, kind in kinds.items() if not (few and kind == "times")}


def _has_most(run: Measured, kinds: Mapping[str, str]) -> bool:
    for kind in set(kinds.values()):
        names = [name for name, its in kinds.items() if its == kind]
        if sum(name in run.figures for name in names) < _LEAST_PART * len(names):
            return False
    return bool(kinds)


def _series(runs: Sequence[Measured], kinds: Mapping[str, str]) -> dict[str, tuple[Any, Array]]:
    """Return the indices of the runs with each benchmark, and its logarithms there, divided by the pace."""
    none = ("", math.nan)
    figures = np.log([[run.figures.get(name, none)[1] for name in kinds] for run in runs])
    timed = np.array([kind == "times" for kind in kinds.values()])
    if not timed.any():
        return {name: _known(column) for name, column in zip(kinds, figures.T, strict=True)}
    spread = Spread.from_figures(figures, timed)
    series = {name: _known(column) for name, column in zip(kinds, (spread.usual + spread.off).T, strict=True)}
    controls = list(_controls(runs).values())
    if controls:
        series[ALL] = _known(spread.pace - np.max([control - np.nanmedian(control) for control in controls], axis=0))
    return series


def _known(column: Array) -> tuple[Any, Array]:
    run_indices = np.flatnonzero(np.isfinite(column))
    return run_indices, column[run_indices]


def _controls(runs: Sequence[Measured]) -> dict[str, Array]:
    """Return the logarithm of each control's time, or NaN for runs without it."""
    names = sorted({name for run in runs for name in run.control_s})
    return {name: np.log([run.control_s.get(name, math.nan) for run in runs]) for name in names}


def _moved(runs: Sequence[Measured], shift: Shift) -> str:
    """Return a note if a control changed with a benchmark, in either direction: the machine changed."""
    for name, control in _controls(runs).items():
        before, after = (side[np.isfinite(side)] for side in (control[: -shift.split], control[-shift.split :]))
        if min(len(before), len(after)) < LAST:
            continue
        signs = np.sign(np.subtract.outer(after, before)).sum()
        moved = between(before, after, 1.0)[0]
        if abs(standardised(signs, len(before), len(after))) >= _MACHINE_MOVED and abs(moved) >= shift.more / 3:
            return f"; control {name} changed by {math.expm1(moved):+.1%}"
    return ""
