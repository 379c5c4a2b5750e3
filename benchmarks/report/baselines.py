"""Baselines: usual times of benchmarks on a class of machine, and the limits at which a run fails.

A new clone has no stored run of its machine. For some classes of machines, `record_baseline` has written a file in
``benchmarks/baseline/`` to compare with. Machines of a class differ in clock and load, which changes all times by one
factor. This *pace* is the median of a run's times over the baseline's, and times are judged relative to it. Ratios of
two sides on one machine need no pace. The pace itself is compared with controls, which run no project code, because a
regression of all benchmarks would change only the pace. A run that waited for its core is not judged. Writing to a disk
is not judged either, because the class does not describe the disk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gate import environment
from benchmarks.report.control import Controls
from benchmarks.report.stored_runs import Setting

FOLDER = Path(__file__).parents[1] / "baseline"
_LEAST_PART = 0.5  # A smaller part of the baseline's benchmarks does not give a reliable pace.
_SHOWN = 5


class NoBaselineError(Exception):
    """No baseline fits the machine or the workload."""


class Usual(NamedTuple):
    """Usual figure of a benchmark, and the factor by which a run may exceed it."""

    figure: float
    limit: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison of a run with a baseline.

    Attributes
    ----------
    pace, behind, pace_limit : float
        Median of the run's times over the baseline's; the pace over that of the slower control (1 for unchanged code);
        and the limit of the latter.
    ratios : dict of str to Usual
        Figure of each benchmark over the usual one (times at the run's pace), and its limit.
    unjudged : str
        Reason why the run is not judged, or ``""``.
    """

    pace: float
    behind: float
    pace_limit: float
    ratios: dict[str, Usual]
    unjudged: str = ""

    @property
    def over(self) -> list[str]:
        """Benchmarks beyond their limits, the farthest first."""
        return [name for name in self._ranked() if self.ratios[name].figure > self.ratios[name].limit]

    @property
    def slower(self) -> bool:
        """Whether benchmarks are beyond their limits, or the pace is slower than the controls explain."""
        return not self.unjudged and (bool(self.over) or self.behind > self.pace_limit)

    def _ranked(self) -> list[str]:
        return sorted(self.ratios, key=lambda name: self.ratios[name].limit / self.ratios[name].figure)

    def lines(self) -> list[str]:
        """Return the report: the benchmarks beyond their limits, or those nearest to their limits."""
        lines = [
            f"all times {self.pace:.2f} x the baseline, {self.behind:.2f} x the controls (limit {self.pace_limit:.2f})"
        ]
        lines += [f"not judged: {self.unjudged}"] if self.unjudged else []
        named = self.over or self._ranked()[:_SHOWN]
        lines += [
            f"{'beyond their limits' if self.over else 'nearest to their limits'}: {len(self.over) or len(named)}"
        ]
        return lines + [
            f"  {self.ratios[name].figure:.2f} x (limit {self.ratios[name].limit:.2f}) {name}" for name in named
        ]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Usual times and ratios, by full names of benchmarks, on a class of machine, for a workload and profile.

    ``origin`` describes the runs: number, dates, commit, machine, versions and rate of false alarms. ``control_s`` is
    the usual time of the controls, ``most_waited`` the share of its time that a run may wait for a core, and
    ``pace_limit`` the factor by which it may be slower than its controls.
    """

    machine: dict[str, Any]
    workload: str
    description: str
    profile: str
    origin: dict[str, Any]
    control_s: dict[str, float]
    most_waited: float
    pace_limit: float
    times: dict[str, Usual]
    ratios: dict[str, Usual]

    def judge(self, figures: Mapping[str, float], control: Controls) -> Judgement:
        """Compare a run's figures and controls."""
        times = {name: figures[name] / usual.figure for name, usual in self.times.items() if name in figures}
        pace = median(times.values()) if times else 1.0
        relative = {name: Usual(ratio / pace, self.times[name].limit) for name, ratio in times.items()}
        for name, usual in self.ratios.items():
            if name in figures:
                relative[name] = Usual(figures[name] / usual.figure, usual.limit)
        slowest = max(control["least_s"][name] / usual_s for name, usual_s in self.control_s.items())
        part, unjudged = len(relative) / (len(self.times) + len(self.ratios)), ""
        if part < _LEAST_PART:
            unjudged = f"only {part:.0%} of its benchmarks were measured; measure {_LEAST_PART:.0%} or more"
        elif control["waited"] > self.most_waited:
            waits = f"this process waited for a core {control['waited']:.0%} of its time (limit {self.most_waited:.0%})"
            unjudged = f"the machine was busy, {waits}; repeat the run when the machine is idle"
        return Judgement(pace, pace / slowest, self.pace_limit, relative, unjudged)

    def as_text(self) -> str:
        """Return JSON with one line per benchmark, which gives readable diffs."""
        properties = {field.name: getattr(self, field.name) for field in fields(self)[:-2]}  # all but times and ratios
        head = json.dumps(properties, indent=1).removesuffix("\n}")
        return f'{head},\n "times": {_listed(self.times)},\n "ratios": {_listed(self.ratios)}\n}}\n'


def _listed(usual: Mapping[str, Usual]) -> str:
    lines = [f"  {json.dumps(name)}: [{figure:.4g}, {limit:.2f}]" for name, (figure, limit) in sorted(usual.items())]
    return "{\n" + ",\n".join(lines) + "\n }"


def figure_of(extra_info: Mapping[str, Any], least_s: float) -> tuple[str, float] | None:
    """Return ``"times"`` or ``"ratios"`` and the figure of a benchmark, or None if baselines omit it.

    The figure of a paired benchmark is ours over its reference. Memory is omitted because it has targets, and writing
    because it measures the disk.
    """
    if extra_info.get("table") == "memory" or (extra_info.get("track"), extra_info.get("operation")) == (0, "write"):
        return None
    return ("ratios", extra_info["ratio"]) if "ratio" in extra_info else ("times", least_s)


def file_of(machine: Mapping[str, Any], profile: str) -> str:
    """Return the file name of a baseline."""
    words = [f"{name if name != 'CPU' else ''}{value}" for name, value in machine.items()]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word) for word in [*words, profile]) + ".json"


def find(setting: Setting) -> tuple[Path, Baseline]:
    """Return the baseline of this class of machine, and its file.

    Raises
    ------
    NoBaselineError
        If the baseline is missing, or if it has another workload.
    ValueError
        If its file is damaged.
    """
    machine = environment.machine_class(setting.machine["cores"])
    file = FOLDER / file_of(machine, setting.profile)
    if not file.is_file():
        description = ", ".join(f"{name} {value}" for name, value in machine.items())
        raise NoBaselineError(
            f"no baseline for {description}, profile {setting.profile}; store one with `make baseline`"
        )
    baseline = read(file)
    if baseline.workload != setting.workload:
        raise NoBaselineError(
            f"{file.name}: the baseline is for {baseline.description} but this run measures {setting.description}"
        )
    return file, baseline


def read(file: Path) -> Baseline:
    """Read a baseline.

    Raises
    ------
    ValueError
        If it is damaged: with a limit or a time that is not a number, every run would pass.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for part in ("times", "ratios"):
            content[part] = {name: Usual(*pair) for name, pair in content[part].items()}
        baseline = Baseline(**content)
        numbers = [*baseline.control_s.values(), baseline.most_waited, baseline.pace_limit]
        numbers += [number for usual in (baseline.times | baseline.ratios).values() for number in usual]
        usable = baseline.times and baseline.control_s and all(math.isfinite(n) and n > 0 for n in numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: damaged baseline ({why}); write a new one with `make baseline`") from error
    if not usable:
        raise ValueError(f"{file}: damaged baseline (expected positive figures); write a new one with `make baseline`")
    return baseline
