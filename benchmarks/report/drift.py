"""Slow drift: runs of merges that together made a benchmark slower, found in the stored runs of one machine.

Each new run asks of every benchmark whether its last runs are slower than those before, by `benchmarks.report.ranks`.
Times are taken at the run's pace, as baselines do; what all benchmarks have in common is a series of its own, beside
the controls. Where a control moved with a benchmark, or others became faster, it was the machine.
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

STEADY = 0.04  # noise of a run up to which +10 % in all is found within `PROMISE` runs in 95 of 100 cases
PROMISE = 20
_MOST_COMMON = 0.1  # correlation of successive runs: of more, less is found
ALL = "all benchmarks together, beside the controls"
_LEAST_PART = 0.5  # of the last run's benchmarks, times and ratios: a run of fewer is left out
_LEAST_TIMED = 10  # fewer times tell no pace
_LEAST_FASTER = 3  # benchmarks, and a third of those that became slower then: another machine
_THEN = 10  # runs: as near as two splits of one moment are told
_MACHINE_MOVED = 3.0  # sum of ranks of a control, likewise


@dataclass(frozen=True, slots=True)
class Measured:
    """What a stored run found, of which its file is no longer needed: figures by benchmarks' full names."""

    name: str
    commit: str
    figures: dict[str, tuple[str, float]]
    control_s: dict[str, float]
    waited: float

    @classmethod
    def of(cls, run: StoredRun) -> Measured:
        """Take what is judged of a run: of memory nothing, it has targets."""
        figures = {}
        for name, bench in run.benchmarks.items():
            figure = figure_of(bench.get("extra_info") or {}, bench["stats"]["min"])
            if figure and figure[1] and figure[1] > 0:  # a ratio of what did not run is None
                figures[name] = figure
        control = run.control or {"least_s": {}, "waited": 0.0}
        return cls(run.path.stem.partition("_")[0], run.commit, figures, control["least_s"], control["waited"])


@dataclass(frozen=True, slots=True)
class Drift:
    """A benchmark that became slower, since about which run and commit, or why it was the machine."""

    benchmark: str
    shift: Shift
    run: str
    commit: str
    machine: str = ""

    def __str__(self) -> str:
        more, low, high = (math.expm1(each) for each in self.shift[:3])
        since = f"since about run {self.run}{f', commit {self.commit[:10]}' if self.commit else ''}"
        return f"{self.benchmark} {more:+.1%} ({low:+.1%} to {high:+.1%}) {since}{self.machine}"


@dataclass(frozen=True, slots=True)
class Drifts:
    """What was found in stored runs: in how many, how many were left out, and of how many benchmarks.

    ``steady`` of them have so little noise that +10 % is found, by what the table of rates says: none where successive
    runs have much in common.
    """

    runs: int = 0
    left_out: int = 0
    benchmarks: int = 0
    steady: int = 0
    found: tuple[Drift, ...] = ()

    @property
    def slower(self) -> list[Drift]:
        """What became slower and not by the machine: that is the code's."""
        return [drift for drift in self.found if not drift.machine]

    def lines(self) -> list[str]:
        """Say it: what was found, or that nothing was, or that there are too few runs to say."""
        out = f"; {counted(self.left_out, 'busy or partial run')} left out" if self.left_out else ""
        if self.runs < NEEDED:
            return [f"Slow drift: not judged, {NEEDED} runs are needed; stored of this kind: {self.runs}{out}"]
        where = f"in {counted(self.runs, 'run')} of {counted(self.benchmarks, 'benchmark')}{out}"
        promise = f"{self.steady} of them are steady enough that +10 % in all is found within {PROMISE} runs"
        said = [f"Slow drift: {counted(len(self.slower), 'benchmark') if self.slower else 'none'} {where}; {promise}"]
        said += [f"  slower: {drift}" for drift in self.slower]
        return said + [f"  the machine's, not judged: {drift}" for drift in self.found if drift.machine]

    def as_markdown(self) -> str:
        """Say it as GitHub shows it: as a warning, where something became slower."""
        first, *others = self.lines()
        lines = [first, "", *(f"- {line.strip()}" for line in others)]
        if self.slower:
            lines = [f"> {line}" for line in ("[!WARNING]", *lines)]
        return "\n".join(lines).strip() + "\n"


def find(measured: Sequence[Measured]) -> Drifts:
    """Look for drift in runs of one machine, workload and profile, the oldest first."""
    wanted = _judged(measured[-1]) if measured else {}
    runs = [run for run in measured if run.waited <= MOST_WAITED and _has_most(run, wanted)][-WINDOW:]
    left_out = len(measured) - len(runs)
    if len(runs) < NEEDED:
        return Drifts(len(runs), left_out)
    series = _series(runs, wanted)
    common = usual_correlation(values for _, values in series.values())
    slower, faster = (_shifts(series, sign, common) for sign in (1, -1))
    drifts = []
    for name, (place, shift) in slower.items():
        since = [runs[at] for at in series[name][0]]
        why = _moved(since, shift) or _turned(place, slower, faster)
        drifts.append(Drift(name, shift, runs[place].name, runs[place].commit, why))
    drifts.sort(key=lambda drift: -drift.shift.more)
    steady = 0 if common > _MOST_COMMON else sum(_is_steady(values) for _, values in series.values())
    return Drifts(len(runs), left_out, len(series), steady, tuple(drifts))


def _is_steady(values: Array) -> bool:
    return noise_of(np.diff(values)) <= STEADY * math.sqrt(2)  # a drift is hardly in what neighbours differ


def _shifts(series: Mapping[str, tuple[Any, Array]], sign: int, common: float) -> dict[str, tuple[int, Shift]]:
    """Return which series drifted, up or down by the sign, since which run and by how much."""
    shifts = {}
    for name, (places, values) in series.items():
        if shift := shift_of(sign * values, common=common):
            shifts[name] = int(places[-shift.split]), shift
    return shifts


def _turned(place: int, slower: Mapping[str, tuple[int, Shift]], faster: Mapping[str, tuple[int, Shift]]) -> str:
    """Say how many became faster when others became slower, if that is another machine: the pace is in the middle."""
    near, others = (sum(abs(at - place) <= _THEN for at, _ in each.values()) for each in (faster, slower))
    return f"; {near} became faster then" if near >= max(_LEAST_FASTER, others / 3) else ""


def _judged(run: Measured) -> dict[str, str]:
    """Return the benchmarks of a run and their kinds: times not, where too few of them tell the pace."""
    kinds = {name: kind for name, (kind, _) in sorted(run.figures.items())}
    few = list(kinds.values()).count("times") < _LEAST_TIMED
    return {name: kind for name, kind in kinds.items() if not (few and kind == "times")}


def _has_most(run: Measured, wanted: Mapping[str, str]) -> bool:
    for kind in set(wanted.values()):
        names = [name for name, its in wanted.items() if its == kind]
        if sum(name in run.figures for name in names) < _LEAST_PART * len(names):
            return False
    return bool(wanted)


def _series(runs: Sequence[Measured], wanted: Mapping[str, str]) -> dict[str, tuple[Any, Array]]:
    """Return of each benchmark the places of the runs that measured it and its logarithms there, at the runs' pace."""
    none = ("", math.nan)
    figures = np.log([[run.figures.get(name, none)[1] for name in wanted] for run in runs])
    timed = np.array([kind == "times" for kind in wanted.values()])
    if not timed.any():
        return {name: _known(column) for name, column in zip(wanted, figures.T, strict=True)}
    spread = Spread.of(figures, timed)
    found = {name: _known(column) for name, column in zip(wanted, (spread.usual + spread.off).T, strict=True)}
    controls = list(_controls(runs).values())
    if controls:
        found[ALL] = _known(spread.pace - np.max([each - np.nanmedian(each) for each in controls], axis=0))
    return found


def _known(column: Array) -> tuple[Any, Array]:
    places = np.flatnonzero(np.isfinite(column))
    return places, column[places]


def _controls(runs: Sequence[Measured]) -> dict[str, Array]:
    """Return the logarithms of what each control took; NaN where a run does not say."""
    names = sorted({name for run in runs for name in run.control_s})
    return {name: np.log([run.control_s.get(name, math.nan) for run in runs]) for name in names}


def _moved(runs: Sequence[Measured], shift: Shift) -> str:
    """Say which control moved with a benchmark, either way: what runs on another machine is no slower code."""
    for name, control in _controls(runs).items():
        before, after = (side[np.isfinite(side)] for side in (control[: -shift.split], control[-shift.split :]))
        if min(len(before), len(after)) < LAST:
            continue
        signs = np.sign(np.subtract.outer(after, before)).sum()
        moved = between(before, after, 1.0)[0]
        if abs(standardised(signs, len(before), len(after))) >= _MACHINE_MOVED and abs(moved) >= shift.more / 3:
            return f"; control {name} {math.expm1(moved):+.1%}"
    return ""
