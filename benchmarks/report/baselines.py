"""Baselines: what benchmarks usually take on a class of machine, and how much more may be before a run fails.

A fresh clone has no run of its own machine to compare with. For classes of machines that were measured, a file in
``benchmarks/baseline/`` stands in, which `record_baseline` writes. Machines of a class differ in clock and
mood, which moves all times alike, so a run is set in proportion first: its *pace* is the median of its times over the
baseline's, and a time is judged at that pace. Ratios of two sides that met the same machine are judged as they are. The
pace is judged against controls, which run no code of the project: what slows all benchmarks alike is seen there.
A run that had to wait for its core is not judged, and neither is writing to a disk, which is no part of the class.
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
_LEAST_PART = 0.5  # of the baseline's benchmarks: the pace of fewer says little
_SHOWN = 5


class NoBaselineError(Exception):
    """There is no baseline to judge by; the message says why."""


class Usual(NamedTuple):
    """What is usual of a benchmark: its figure, and by what factor a run may exceed it."""

    figure: float
    limit: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a run compares with a baseline.

    Attributes
    ----------
    pace, behind, pace_limit : float
        Median of the run's times over the baseline's; that over the control's, whichever of the controls is slower (1
        where the code is as fast as it was); and what that may be.
    ratios : dict of str to Usual
        Of each benchmark, the run's figure over the usual one (times at the run's pace), and its limit.
    unjudged : str
        Why nothing is judged, if that is so.
    """

    pace: float
    behind: float
    pace_limit: float
    ratios: dict[str, Usual]
    unjudged: str = ""

    @property
    def over(self) -> list[str]:
        """The benchmarks beyond their limits, the farthest first."""
        return [name for name in self._ranked() if self.ratios[name].figure > self.ratios[name].limit]

    @property
    def slower(self) -> bool:
        """Whether benchmarks are beyond their limits, or all are slower than what the controls explain."""
        return not self.unjudged and (bool(self.over) or self.behind > self.pace_limit)

    def _ranked(self) -> list[str]:
        return sorted(self.ratios, key=lambda name: self.ratios[name].limit / self.ratios[name].figure)

    def lines(self) -> list[str]:
        """Say it in words: all that is beyond its limit, or what is nearest to it."""
        said = [
            f"pace {self.pace:.2f} x the baseline's, {self.behind:.2f} x the controls' (limit {self.pace_limit:.2f})"
        ]
        said += [f"not judged: {self.unjudged}"] if self.unjudged else []
        named = self.over or self._ranked()[:_SHOWN]
        said += [f"{'slower than its limit' if self.over else 'nearest to its limit'}: {len(self.over) or len(named)}"]
        return said + [
            f"  {self.ratios[name].figure:.2f} x (limit {self.ratios[name].limit:.2f}) {name}" for name in named
        ]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is usual on a class of machine, of a workload and profile; times and ratios by benchmarks' full names.

    ``origin`` is for people: how many runs, of when, which commit, machine and versions, and the rate of false alarms.
    ``control_s`` is what the controls usually take, ``most_waited`` the share of its time that a run may have waited
    for a core, and ``pace_limit`` by what factor it may be slower than its controls.
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
        found = {name: Usual(ratio / pace, self.times[name].limit) for name, ratio in times.items()}
        for name, usual in self.ratios.items():
            if name in figures:
                found[name] = Usual(figures[name] / usual.figure, usual.limit)
        slowest = max(control["least_s"][name] / usual_s for name, usual_s in self.control_s.items())
        part, unjudged = len(found) / (len(self.times) + len(self.ratios)), ""
        if part < _LEAST_PART:
            unjudged = f"{part:.0%} of its benchmarks were measured, {_LEAST_PART:.0%} or more tell the pace"
        elif control["waited"] > self.most_waited:
            waits = f"waited for a core {control['waited']:.0%} of its time, {self.most_waited:.0%} is allowed"
            unjudged = f"the machine was busy with other work: this process {waits}"
        return Judgement(pace, pace / slowest, self.pace_limit, found, unjudged)

    def as_text(self) -> str:
        """Return it as JSON with a line for each benchmark, so that a renewal reads as a diff."""
        told = {field.name: getattr(self, field.name) for field in fields(self)[:-2]}  # all but times and ratios
        head = json.dumps(told, indent=1).removesuffix("\n}")
        return f'{head},\n "times": {_listed(self.times)},\n "ratios": {_listed(self.ratios)}\n}}\n'


def _listed(usual: Mapping[str, Usual]) -> str:
    lines = [f"  {json.dumps(name)}: [{figure:.4g}, {limit:.2f}]" for name, (figure, limit) in sorted(usual.items())]
    return "{\n" + ",\n".join(lines) + "\n }"


def figure_of(extra_info: Mapping[str, Any], least_s: float) -> tuple[str, float] | None:
    """Return ``"times"`` or ``"ratios"`` and the figure of a benchmark; None of what no baseline has.

    A paired benchmark's is ours over its reference. Memory has none: it has targets, and some of it does not grow; and
    writing a collection to a disk is as fast as the disk.
    """
    if extra_info.get("table") == "memory" or (extra_info.get("track"), extra_info.get("operation")) == (0, "write"):
        return None
    return ("ratios", extra_info["ratio"]) if "ratio" in extra_info else ("times", least_s)


def file_of(machine: Mapping[str, Any], profile: str) -> str:
    """Return the name of a baseline's file."""
    words = [f"{name if name != 'CPU' else ''}{value}" for name, value in machine.items()]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word) for word in [*words, profile]) + ".json"


def find(setting: Setting) -> tuple[Path, Baseline]:
    """Return the baseline of this class of machine, and its file.

    Raises
    ------
    NoBaselineError
        If there is none, or it is of another workload.
    ValueError
        If its file is damaged.
    """
    machine = environment.machine_class(setting.machine["cores"])
    file = FOLDER / file_of(machine, setting.profile)
    if not file.is_file():
        said = ", ".join(f"{name} {value}" for name, value in machine.items())
        raise NoBaselineError(
            f"no baseline for this class of machine: {said}, profile {setting.profile}; `make baseline` stores one"
        )
    baseline = read(file)
    if baseline.workload != setting.workload:
        raise NoBaselineError(
            f"the baseline of this class of machine is of {baseline.description}; now: {setting.description}"
        )
    return file, baseline


def read(file: Path) -> Baseline:
    """Read a baseline.

    Raises
    ------
    ValueError
        If it is damaged: a limit or a time that is no number would let everything pass.
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
        raise ValueError(f"the baseline {file} is damaged ({why}); `make baseline` renews it") from error
    if not usable:
        raise ValueError(
            f"the baseline {file} is damaged (a figure is missing or no number); `make baseline` renews it"
        )
    return baseline
