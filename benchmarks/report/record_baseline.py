"""New baseline of a class of machine, ``python -m benchmarks.report.record_baseline`` (``make baseline``).

The main job runs several times, each time in a fresh process that stores its run. The last of these runs are used. The
usual time of a benchmark is the median at the run's pace, and its limit follows from the deviations of the runs. The
same runs give an estimate of how often an unchanged run would fail: each is compared with the others, with a heavy
tail fitted to the largest deviations. All runs are of one machine in one hour, so this is an estimate, not a bound.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gate import environment
from benchmarks.report import baselines
from benchmarks.report.baselines import Baseline, Usual, figure_of
from benchmarks.report.stored_runs import Setting, StoredRun, newest_first, read_run

Array = np.ndarray[Any, np.dtype[np.float64]]

_LEAST_RUNS = 5  # Fewer runs do not show the spread.
_LEAST_LIMIT = 1.3  # Machines of the same class may differ by this factor.
_LEAST_WAITED = 0.05  # Added to twice the usual share of time waiting for a core, above which a machine is busy.
MOST_WAITED = 0.15  # Runs that waited for a core for a larger share of their time are left out.
_SPREADS = (8.0, 10.0, 12.0, 16.0, 20.0)  # Candidate limits, in standard deviations of the logarithm.
_MOST_ALARMS = 0.01  # The narrowest limit is used for which at most this share of runs raises an alarm.
_PRIOR_RUNS = 4.0  # Weight of the spread of all benchmarks, in runs of one benchmark.
_TAIL = 0.02  # Share of the deviations to which the tail is fitted.
_RESAMPLED = 400
_STEPS = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of runs of the same code.

    Attributes
    ----------
    usual : numpy.ndarray
        Logarithm of the median figure of each benchmark, shape (benchmarks,).
    off : numpy.ndarray
        Deviation of each run from it, with times divided by the run's pace, shape (runs, benchmarks).
    pace : numpy.ndarray
        Logarithm of each run's pace, shape (runs,).
    """

    usual: Array
    off: Array
    pace: Array

    @classmethod
    def from_figures(cls, figures: Array, timed: Array) -> Spread:
        """Estimate the spread from logarithms of figures, shape (runs, benchmarks), with a pace for ``timed`` ones.

        Figures that a run did not measure are NaN.
        """
        paced, pace = figures, np.zeros(len(figures))
        for _ in range(_STEPS):  # Medians depend on the paces, and paces on the medians.
            usual = np.nanmedian(paced, axis=0)
            pace = np.nanmedian((figures - usual)[:, timed], axis=1)
            paced = figures - np.outer(pace, timed)
        usual = np.nanmedian(paced, axis=0)
        return cls(usual, paced - usual, pace)

    @property
    def deviation(self) -> Array:
        """Standard deviation of each benchmark, shrunk to the median of all, more so for few runs."""
        runs = len(self.off)
        own = (self.off**2).sum(axis=0)
        shared = np.median(own / (runs - 1))
        return np.asarray(np.sqrt((own + _PRIOR_RUNS * shared) / (runs - 1 + _PRIOR_RUNS)))

    def limit(self, spreads: float) -> Array:
        """Return the largest allowed slowdown factor of each benchmark, ``spreads`` standard deviations from usual."""
        return np.asarray(np.maximum(np.exp(spreads * self.deviation), _LEAST_LIMIT))


class Alarms(NamedTuple):
    """Rate at which runs of the same code exceed a limit of ``spreads`` standard deviations, without measuring again.

    ``runs`` counts runs that exceed limits made of the other runs. ``rate`` is the sum over benchmarks of the rate by
    a Pareto tail, and ``most`` is the 95th percentile of that rate over resampled runs.
    """

    spreads: float
    runs: int
    rate: float
    most: float


def narrowest(figures: Array, timed: Array) -> Alarms:
    """Return the narrowest limits with a rate of at most `_MOST_ALARMS`, or the widest of `_SPREADS`."""
    tried = (false_alarms(figures, timed, spreads) for spreads in _SPREADS)
    return next(alarms for alarms in tried if alarms.most <= _MOST_ALARMS or alarms.spreads == _SPREADS[-1])


def false_alarms(figures: Array, timed: Array, spreads: float) -> Alarms:
    """Estimate how often a run of the same code exceeds limits of ``spreads`` standard deviations."""
    alarmed, apart, room = 0, [], []
    for left_out in range(len(figures)):
        others = Spread.from_figures(np.delete(figures, left_out, axis=0), timed)
        off = figures[left_out] - others.usual
        off -= timed * np.median(off[timed])
        alarmed += bool((off > np.log(others.limit(spreads))).any())
        apart.append(off / others.deviation)
        room.append(np.log(others.limit(spreads)) / others.deviation)
    rates = [_rate(np.array(apart)[chosen], np.array(room)[chosen]) for chosen in _draws(len(figures))]
    return Alarms(spreads, alarmed, rates[0], float(np.quantile(rates[1:], 0.95)))


def _draws(runs: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [np.arange(runs), *(random.integers(0, runs, runs) for _ in range(_RESAMPLED))]


def _rate(apart: Array, room: Array) -> float:
    """Return the expected number of benchmarks beyond their limits in a run, by Hill's estimate of the tail."""
    ordered = np.sort(apart, axis=None)[::-1]
    count = min(max(10, int(_TAIL * ordered.size)), int((ordered > 0).sum()) - 1)
    start = ordered[count]
    exponent = 1 / np.log(ordered[:count] / start).mean()
    beyond = count / ordered.size * (room / start) ** -exponent
    return float(beyond.sum(axis=1).mean())


def derive(stored: Sequence[StoredRun], setting: Setting, most_waited: float = MOST_WAITED) -> Baseline:
    """Return the baseline of runs of one setting, without runs that waited for a core for more than ``most_waited``.

    Raises
    ------
    ValueError
        If too few runs are left.
    """
    runs = [run for run in stored if run.control and run.control["waited"] <= most_waited]
    controls = [run.control for run in runs if run.control]
    if len(runs) < _LEAST_RUNS:
        waited = ", ".join(f"{run.control['waited']:.0%}" for run in stored if run.control)
        raise ValueError(
            f"{len(runs)} of {len(stored)} stored runs had the machine to themselves, {_LEAST_RUNS} are needed: they "
            f"waited for a core for {waited or 'nobody knows how much'} of their time, {most_waited:.0%} is allowed"
        )
    figures_by_run = [
        {name: figure for name, bench in run.benchmarks.items() if (figure := _figure(bench))} for run in runs
    ]
    names = sorted(set.intersection(*(set(figures) for figures in figures_by_run)))
    timed = np.array([figures_by_run[0][name][0] == "times" for name in names])
    figures = np.log([[figures[name][1] for name in names] for figures in figures_by_run])
    spread = Spread.from_figures(figures, timed)
    # The limit of the pace follows from how far it exceeded the slowest control in these runs.
    control_s = {name: float(np.median([c["least_s"][name] for c in controls])) for name in controls[0]["least_s"]}
    slowest = np.max([[np.log(c["least_s"][name] / s) for c in controls] for name, s in control_s.items()], axis=0)
    alarms = narrowest(figures, timed)
    limit = spread.limit(alarms.spreads)
    usual = {
        name: Usual(float(np.exp(log)), float(most)) for name, log, most in zip(names, spread.usual, limit, strict=True)
    }
    return Baseline(
        machine=environment.machine_class(setting.machine["cores"]),
        workload=setting.workload,
        description=setting.description,
        profile=setting.profile,
        origin={
            "runs": len(runs),
            "left out": len(stored) - len(runs),
            "from": min(run.stored for run in runs)[:19],
            "to": max(run.stored for run in runs)[:19],
            "commit": ", ".join(sorted({run.commit[:10] for run in runs})),
            "on": f"{setting.machine['CPU']}, {setting.machine['Python']}, torch {setting.machine['torch']}",
            "limits": "{:.2f} to {:.2f}, half of them up to {:.2f}".format(*np.quantile(limit, (0, 1, 0.5))),
            "beyond them": f"{alarms.runs} of these runs by the others' limits at {alarms.spreads:.0f} deviations; "
            f"estimated {alarms.rate:.2%} of runs, at most {alarms.most:.2%}",
        },
        control_s=control_s,
        most_waited=2 * max(c["waited"] for c in controls) + _LEAST_WAITED,
        pace_limit=float(max(np.exp(alarms.spreads * (spread.pace - slowest).std()), _LEAST_LIMIT)),
        times={name: usual[name] for name, is_time in zip(names, timed, strict=True) if is_time},
        ratios={name: usual[name] for name, is_time in zip(names, timed, strict=True) if not is_time},
    )


def _figure(bench: dict[str, Any]) -> tuple[str, float] | None:
    return figure_of(bench["extra_info"], bench["stats"]["min"])


def last_runs(storage: Path, count: int) -> tuple[list[StoredRun], Setting]:
    """Return the last runs with the setting and number of benchmarks of the very last one, and that setting.

    Raises
    ------
    ValueError
        If the storage is empty, or if a run is damaged or lacks its setting.
    """
    files = sorted(storage.glob("*/*.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise ValueError(f"no run is stored in {storage}")
    runs = [read_run(file, storage) for file in newest_first(files[-1].parent)]
    setting = runs[0].setting
    if setting is None:
        raise ValueError(f"{files[-1]} does not say its workload, an older version stored it")
    like = [run for run in runs if run.setting == setting and len(run.benchmarks) == len(runs[0].benchmarks)]
    return like[:count], setting


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.record_baseline", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=12, metavar="N", help="how many runs it is made of; default: %(default)s"
    )
    parser.add_argument(
        "--stored", type=int, default=0, metavar="M", help="how many of them are the last that are stored"
    )
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="default: %(default)s")
    parser.add_argument("--storage", type=Path, default=Path(".benchmarks"), help="default: %(default)s")
    parser.add_argument("--most-waited", type=float, default=MOST_WAITED, metavar="SHARE", help="default: %(default)s")
    chosen = parser.parse_args(words)
    environ = {name: value for name, value in os.environ.items() if name != "CI"}  # Runs are not judged here.
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "--profile", chosen.profile, "--benchmark-compare"]
    for number in range(chosen.stored, chosen.runs):
        print(f"run {number + 1} of {chosen.runs}", flush=True)
        words_now = [*command, f"--benchmark-storage=file://{chosen.storage}"]
        done = subprocess.run(words_now, stdout=subprocess.PIPE, env=environ, check=False)  # noqa: S603  # The arguments are our own.
        if done.returncode:
            print(done.stdout.decode(errors="replace")[-3000:], file=sys.stderr)
            return done.returncode
    try:
        baseline = derive(*last_runs(chosen.storage, chosen.runs), chosen.most_waited)
    except ValueError as error:
        parser.error(str(error))
    file = baselines.FOLDER / baselines.file_of(baseline.machine, baseline.profile)
    file.parent.mkdir(exist_ok=True)
    file.write_text(baseline.as_text(), encoding="utf-8")
    print(f"{file}: {len(baseline.times) + len(baseline.ratios)} benchmarks")
    for name in ("limits", "beyond them"):
        print(f"{name}: {baseline.origin[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
