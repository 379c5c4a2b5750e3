"""Error rates of the detection of slow drift, ``python -m benchmarks.report.drift_rates``.

False alarms are counted in simulated histories of 300 benchmarks, which are judged after each run like those of the
report. A repeated alarm counts once. The noise has several kinds and the widths of stored runs, or is resampled from
stored runs. Drifts of 10 % in total are planted into noise of known width. Takes minutes of one core; seeded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from benchmarks.gate.selftest_report import rate
from benchmarks.gate.text import counted, markdown
from benchmarks.report import drift, ranks
from benchmarks.report.drift import Measured
from benchmarks.report.ranks import Array
from benchmarks.report.record_baseline import Spread, last_runs

Noise = Callable[[np.random.Generator, int, int], Array]

_BENCHMARKS = 300
_WIDTHS = 0.028, 0.77  # Noise of a run: median of the benchmarks, standard deviation of its logarithm.
_STANDS = 40  # A counted alarm is not counted again for this many runs.
_DRIFT = math.log(1.1)
_USED = 40  # Runs before the drift.
_SERIES = 300
_NEIGHBOURS = 100  # Series from which the correlation of successive runs is estimated.


def gaussian(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw Gaussian noise with standard deviation 1."""
    return random.standard_normal((series, runs))


def laplace(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw noise with exponential tails."""
    return random.laplace(size=(series, runs)) / math.sqrt(2)


def student(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw noise with cubic tails."""
    return random.standard_t(3, size=(series, runs)) / math.sqrt(3)


def outliers(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw noise in which one run in ten is slower by up to 20 standard deviations in half of the benchmarks."""
    slow = (random.random(runs) < 0.1) & (random.random((series, runs)) < 0.5)
    return gaussian(random, series, runs) + slow * random.uniform(0, 20, (series, runs))


def modes(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw noise around two levels, -0.98 and 0.98."""
    return np.sign(random.standard_normal((series, runs))) * 0.98 + 0.2 * gaussian(random, series, runs)


def correlated(random: np.random.Generator, series: int, runs: int, *, common: float) -> Array:
    """Draw autoregressive noise in which successive runs have the correlation ``common``."""
    noise = gaussian(random, series, runs)
    for run in range(1, runs):
        noise[:, run] = common * noise[:, run - 1] + math.sqrt(1 - common**2) * noise[:, run]
    return noise


def some_correlated(random: np.random.Generator, series: int, runs: int) -> Array:
    """Draw noise in which one series in ten is correlated, so the median correlation does not show it."""
    noise = gaussian(random, series, runs)
    noise[::10] = correlated(random, len(noise[::10]), runs, common=0.5)
    return noise


NOISES: MappingProxyType[str, Noise] = MappingProxyType(
    {
        "Gaussian": gaussian,
        "Laplace": laplace,
        "Student, 3 degrees": student,
        "outlier runs": outliers,
        "two levels": modes,
        "autocorrelated 0.3": partial(correlated, common=0.3),
        "autocorrelated 0.5": partial(correlated, common=0.5),
        "one in ten autocorrelated 0.5": some_correlated,
    }
)

# Share of the drift that is reached, by the elapsed share of its runs.
SHAPES: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {"one step": np.ceil, "bit by bit": lambda share: share, "four steps": lambda share: np.ceil(4 * share) / 4}
)


def alarmed(histories: Array) -> int:
    """Count the alarms in histories, shape (series, runs), judged after each run."""
    count, judged_from = 0, np.full(len(histories), ranks.NEEDED)
    for runs, index in _alarms(histories, judged_from, 0.0):
        count, judged_from[index] = count + 1, runs + _STANDS
    return count


def num_found(noise: Array, shape: str, over: int, used: int = _USED) -> int:
    """Count the series in which a planted drift is found. It starts after ``used`` runs and takes ``over`` runs.

    An alarm up to `drift.PROMISE` runs later counts, so the noise has ``used + over + drift.PROMISE`` runs. The
    correlation of successive runs is estimated from noise without drift.
    """
    share = np.clip((np.arange(noise.shape[1]) - used + 1) / over, 0, 1)
    slower = _DRIFT * SHAPES[shape](share)
    judged_from, hit = np.full(len(noise), used + 1), set()
    for runs, index in _alarms(noise, judged_from, slower):
        hit.add(index)
        judged_from[index] = runs + noise.shape[1]
    return len(hit)


def _alarms(noise: Array, judged_from: Array, slower: Array | float) -> Iterator[tuple[int, int]]:
    """Judge each series after every run from its ``judged_from`` on; yield number of runs and index of each alarm."""
    histories = noise + slower
    for runs in range(int(judged_from.min()), noise.shape[1] + 1):
        open_, window = np.flatnonzero(judged_from <= runs), slice(max(runs - ranks.WINDOW, 0), runs)
        sums = ranks.scores(histories[open_, window])
        above = np.flatnonzero(sums.max(axis=1, initial=0.0) >= ranks.LIMIT)
        common = ranks.usual_correlation(noise[:_NEIGHBOURS, window]) if len(above) else 0.0
        for position in above:
            if ranks.shift_of(histories[open_[position], window], sums[position], common):
                yield runs, int(open_[position])


def false_alarms(runs: int) -> list[list[str]]:
    """Return one line per noise: alarms per 1,000 runs of 300 benchmarks, with realistic and with wide noise."""
    lines = []
    for seed, (name, noise) in enumerate(NOISES.items()):
        random = np.random.default_rng(seed)
        widths = _WIDTHS[0] * np.exp(_WIDTHS[1] * random.standard_normal((_BENCHMARKS, 1)))
        history = noise(random, _BENCHMARKS, runs)
        counts = [alarmed(history * width) for width in (widths, 1.0)]
        lines.append([name, *(f"{1000 * count / runs:.1f}" for count in counts)])
    return lines


def resampled(measured: Sequence[Measured], runs: int) -> list[list[str]]:
    """Return the line of runs resampled per benchmark from stored runs: alarms, and planted drifts that are found."""
    names = sorted(set.intersection(*(set(run.figures) for run in measured)))
    figures = np.log([[run.figures[name][1] for name in names] for run in measured])
    timed = np.array([measured[0].figures[name][0] == "times" for name in names])
    few = math.sqrt(len(measured) / (len(measured) - 1))  # The median of few runs reduces their spread.
    off = Spread.from_figures(figures, timed).off * few
    random = np.random.default_rng(0)
    history = off[random.integers(0, len(off), runs)].T
    count = alarmed(history) * 1000 / runs
    steady = np.flatnonzero(off.std(axis=0) <= drift.STEADY)
    chosen = steady[np.arange(_SERIES) % max(len(steady), 1)] if len(steady) else steady
    runs_drawn = random.integers(0, len(off), (_SERIES, _USED + 20 + drift.PROMISE))
    hit = num_found(off[runs_drawn[: len(chosen)], chosen[:, None]], "four steps", 20)
    description = f"{len(measured)} stored runs drawn anew, {len(names)} benchmarks, {len(steady)} of them steady"
    return [[description, f"{count:.1f}", rate(hit, len(chosen))]]


def machines(changes: int) -> list[list[str]]:
    """Return how often another machine of the class is mistaken for slower code, if a control changes and if not."""
    lines = []
    for name, moved in (("a control 10 % off", 0.1), ("controls as before", 0.0)):
        random, alarms, called = np.random.default_rng(2), 0, 0
        for _ in range(changes):
            runs = _other_machine(random, moved)
            judgements = [drift.find(runs[:end]) for end in range(50, 81, 6)]
            alarms += any(drifts.slower for drifts in judgements)
            called += max(len(drifts.slower) for drifts in judgements)
        lines.append(
            [f"another machine, each benchmark 5 % off, {name}", rate(alarms, changes), f"{called / changes:.1f}"]
        )
    return lines


def _other_machine(random: np.random.Generator, moved: float) -> list[Measured]:
    """Generate 80 runs, the last 40 of them on another machine."""
    off = 0.05 * random.standard_normal(_BENCHMARKS)
    widths = _WIDTHS[0] * np.exp(_WIDTHS[1] * random.standard_normal(_BENCHMARKS))
    runs = []
    for number in range(80):
        other = number >= 40
        times = np.exp(widths * random.standard_normal(_BENCHMARKS) + other * (0.2 + off))
        figures = {f"b{index}": ("times", float(time)) for index, time in enumerate(times)}
        noise = np.exp(0.03 * random.standard_normal(2))
        control_s = {"compute": float(noise[0]) * (1 + other * moved), "memory": float(noise[1])}
        runs.append(Measured(f"{number:04}", "", figures, control_s, 0.0))
    return runs


def power() -> list[list[str]]:
    """Return one line per drift and noise: the share found up to `drift.PROMISE` runs after its end, by noise width."""
    lines = []
    for seed, (shape, over) in enumerate(
        [("one step", 1), ("bit by bit", 10), ("bit by bit", 20), ("bit by bit", 40), ("four steps", 20)]
    ):
        for name in ("Gaussian", "Student, 3 degrees", "outlier runs", "autocorrelated 0.3"):
            noise = NOISES[name](np.random.default_rng(seed), _SERIES, _USED + over + drift.PROMISE)
            cells = [
                f"{num_found(width * noise, shape, over) / _SERIES:.0%}" for width in (0.01, 0.02, 0.03, 0.04, 0.06)
            ]
            lines.append([f"{shape}, {counted(over, 'run')}", name, *cells])
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.drift_rates", description=__doc__)
    parser.add_argument("--runs", type=int, default=5000, help="how many are made up; default: %(default)s")
    parser.add_argument("--history", type=Path, default=Path(".benchmarks"), help="stored runs; default: %(default)s")
    chosen = parser.parse_args(words)
    print(
        markdown(
            ["noise", "alarms in 1,000 runs", "all noise wide"], false_alarms(chosen.runs), ["---", "---:", "---:"]
        )
    )
    try:
        stored, _ = last_runs(chosen.history, ranks.WINDOW)
    except ValueError as error:
        print(f"No stored runs are drawn: {error}", file=sys.stderr)
    else:
        heading = ["real runs", "alarms in 1,000 runs", "+10 % in four steps found"]
        print("\n" + markdown(heading, resampled([Measured.from_run(run) for run in stored], chosen.runs)))
    heading = ["change of machine", "taken for slower code", "benchmarks named"]
    print("\n" + markdown(heading, machines(max(chosen.runs // 30, 1))))
    heading = ["+10 %", "noise", *(f"of {width} %" for width in (1, 2, 3, 4, 6))]
    print("\n" + markdown(heading, power(), ["---", "---", *["---:"] * 5]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
