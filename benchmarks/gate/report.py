"""Report of the gate as text, Markdown and JSON, and its exit status."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gate.decision import CONTROL_LIMIT, Change, Verdict, ratio_of_round
from benchmarks.gate.text import aligned, duration, markdown, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ORDER = (Verdict.REGRESSION, Verdict.NOT_RESOLVED, Verdict.IMPROVED, Verdict.OK)
_HEADINGS = ("benchmark", "base", "head", "change", "interval", "clock", "median", "p95", "rounds", "verdict")
_RULE = ("---", *["---:"] * (len(_HEADINGS) - 2), "---")
UNCOMPARED = {"new": "New, only run by head", "gone": "Missing, only run by base", "skipped": "Skipped"}
_CONTROL = ("control", "control: moved")
_CHANGED = (Verdict.REGRESSION, Verdict.IMPROVED)
_SHOWN = 20


class Times(NamedTuple):
    """Times in seconds that one process measured of one benchmark, and its number of library calls per round.

    ``worked_s`` and ``passed_s`` are the CPU time and the wall time of the fastest round of each turn. The other times
    are wall times. For a memory benchmark, all values are bytes instead of seconds.
    """

    min_s: float
    median_s: float
    p95_s: float
    calls: int
    worked_s: Sequence[float]
    passed_s: Sequence[float]


def short_name(name: str) -> str:
    """Return the pytest node id of a benchmark without file and ``test_``."""
    return name.rpartition("::")[2].removeprefix("test_")


@dataclass(frozen=True, slots=True)
class Row:
    """Benchmark that both sides ran: its pytest node id and the times of each round.

    Attributes
    ----------
    worked, passed : tuple of float
        Ratio of head to base in each round, for CPU time and for wall time.
    in_bytes : bool
        Whether bytes are judged instead of seconds.
    """

    name: str
    worked: tuple[float, ...]
    passed: tuple[float, ...]
    base: tuple[Times, ...] = ()
    head: tuple[Times, ...] = ()
    in_bytes: bool = False

    @classmethod
    def from_times(cls, name: str, base: Sequence[Times], head: Sequence[Times], *, in_bytes: bool = False) -> Row:
        """Compare the times of base and head in each round."""
        worked, passed = (
            tuple(ratio_of_round(getattr(b, turns), getattr(h, turns)) for b, h in zip(base, head, strict=True))
            for turns in ("worked_s", "passed_s")
        )
        return cls(name, worked, passed, tuple(base), tuple(head), in_bytes)

    @property
    def change(self) -> Change:
        """Change of the CPU time, which decides the verdict."""
        return Change.from_ratios(self.worked)

    @property
    def clock(self) -> Change:
        """Change of the wall time. It can show a slowdown, for example of code that waits, but not exclude one.

        Other programs lengthen the wall time.
        """
        return Change.from_ratios(self.passed)

    @property
    def short(self) -> str:
        """Result of `short_name`."""
        return short_name(self.name)

    def change_of(self, statistic: str) -> Change:
        """Return the change of another statistic, which is shown but not judged."""
        pairs = zip(self.base, self.head, strict=True)
        return Change.from_ratios([getattr(head, statistic) / getattr(base, statistic) for base, head in pairs])

    def verdict(self, threshold: float) -> Verdict:
        """Return the verdict: a regression of the wall time, or else the verdict of the CPU time."""
        if self.clock.verdict(threshold) is Verdict.REGRESSION:
            return Verdict.REGRESSION
        return self.change.verdict(threshold)

    def is_unresolved(self, threshold: float) -> bool:
        """Whether a regression is neither confirmed nor excluded."""
        return self.verdict(threshold) is not Verdict.REGRESSION and self.change.may_be_slower(threshold)

    def is_open(self, threshold: float) -> bool:
        """Whether the benchmark needs another round."""
        is_regression = self.verdict(threshold) is Verdict.REGRESSION
        return not is_regression and (self.change.may_be_slower(threshold) or self.clock.seems_slower(threshold))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of head with base: their labels, and the rows of all benchmarks that both ran.

    The threshold is 0.05 for 5 %. Controls run no code of the project. ``new`` (only run by head), ``gone`` (only run
    by base) and ``skipped`` (run by neither) map names of benchmarks to the reason, or to an empty string.
    """

    base: str
    head: str
    threshold: float
    controls: tuple[Row, ...]
    rows: tuple[Row, ...]
    new: Mapping[str, str]
    gone: Mapping[str, str]
    skipped: Mapping[str, str]
    seconds: float

    def verdict(self, row: Row) -> Verdict:
        """Return the verdict of one benchmark."""
        return row.verdict(self.threshold)

    def rows_with(self, verdict: Verdict) -> list[Row]:
        """Return the benchmarks with a verdict."""
        return [row for row in self.rows if self.verdict(row) is verdict]

    @property
    def moved(self) -> list[Row]:
        """Controls that changed. If there are any, the machine changed and no verdict is reliable."""
        return [row for row in self.controls if row.change.verdict(CONTROL_LIMIT) in _CHANGED]

    @property
    def moved_medians(self) -> list[Row]:
        """Benchmarks without a regression whose median is nevertheless slower by more than the threshold."""
        rows = [row for row in self.rows if self.verdict(row) is not Verdict.REGRESSION]
        return [row for row in rows if row.change_of("median_s").low > 1 + self.threshold]

    @property
    def unresolved(self) -> list[Row]:
        """Benchmarks whose regression is neither confirmed nor excluded."""
        return [row for row in self.rows if row.is_unresolved(self.threshold)]

    def exit_status(self, *, strict: bool) -> int:
        """Return 0 without a regression, 1 with one, 2 if ``strict`` and benchmarks are gone, 3 if too noisy."""
        if self.moved:
            return 3
        if self.rows_with(Verdict.REGRESSION):
            return 1
        if strict and self.gone:
            return 2
        return 3 if self.unresolved else 0

    def conclusion(self, *, strict: bool) -> str:
        """Return one sentence that explains the exit status."""
        limit = f"{self.threshold:.0%}" if self.threshold >= 0.01 else f"{self.threshold:.2%}"
        if self.moved:
            return (
                f"Too noisy to judge: {_listed(self.moved)} changed although it runs no project code; "
                f"{len(self.rows_with(Verdict.REGRESSION))} regressions may be caused by the machine."
            )
        if regressions := self.rows_with(Verdict.REGRESSION):
            return f"Regression: {_listed(regressions, self.threshold)} slower by more than {limit}."
        if strict and self.gone:
            return f"Could not compare all: head lacks {len(self.gone)} benchmarks of base, which --strict forbids."
        if unresolved := self.unresolved:
            return (
                f"Too noisy to judge {_listed(unresolved)}: "
                f"a slowdown of more than {limit} is neither shown nor excluded."
            )
        return f"No regression: none of {len(self.rows)} benchmarks is slower by more than {limit}."


def as_text(comparison: Comparison, *, strict: bool = False) -> str:
    """Return the report for a terminal or a log: a table, the benchmarks not compared, and the conclusion."""
    headings, *lines = aligned([_HEADINGS, *_cells(comparison)])
    rule = "-" * max(map(len, (headings, *lines)))
    head = f"head {comparison.head} compared with base {comparison.base}"
    table = [headings, rule, *lines, rule]
    return "\n".join([head, "", *table, *_notes(comparison), comparison.conclusion(strict=strict)])


def as_markdown(comparison: Comparison, *, strict: bool = False) -> str:
    """Return the report for a job summary: the conclusion first, and benchmarks with the verdict ok collapsed."""
    cells = _cells(comparison)
    quiet = [line for line in cells if line[-1] == Verdict.OK]
    loud = [line for line in cells if line[-1] != Verdict.OK]
    parts = [
        f"### {comparison.conclusion(strict=strict)}",
        f"Head {comparison.head} compared with base {comparison.base}.",
    ]
    parts += [markdown(_HEADINGS, loud, _RULE)] if loud else []
    if quiet:
        table = markdown(_HEADINGS, quiet, _RULE)
        parts.append(f"<details><summary>{len(quiet)} ok</summary>\n\n{table}\n\n</details>")
    return "\n\n".join([*parts, *_notes(comparison)]) + "\n"


def as_json(comparison: Comparison, *, strict: bool = False) -> dict[str, Any]:
    """Return the whole result as JSON values, including the times of each round."""
    return {
        "exit": comparison.exit_status(strict=strict),
        "conclusion": comparison.conclusion(strict=strict),
        "base": comparison.base,
        "head": comparison.head,
        "threshold": comparison.threshold,
        "seconds": comparison.seconds,
        "controls": [_record(row, _CONTROL[row in comparison.moved]) for row in comparison.controls],
        "benchmarks": [_record(row, comparison.verdict(row)) for row in comparison.rows],
        **{kind: dict(getattr(comparison, kind)) for kind in UNCOMPARED},
    }


def _record(row: Row, verdict: str) -> dict[str, Any]:
    change = row.change
    return {
        "name": row.name,
        "verdict": verdict,
        "ratio": change.ratio,
        "in_bytes": row.in_bytes,
        "low": change.low,
        "high": change.high,
        "rounds": change.rounds,
        "ratio_by_clock": row.clock.ratio,
        "worked": row.worked,
        "passed": row.passed,
        "ratio_of_medians": row.change_of("median_s").ratio,
        "ratio_of_p95": row.change_of("p95_s").ratio,
        "base": [times._asdict() for times in row.base],
        "head": [times._asdict() for times in row.head],
    }


def _cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the cells of one line per benchmark, sorted by verdict and ratio, with the controls last."""
    ordered = sorted(
        comparison.rows, key=lambda row: (ORDER.index(comparison.verdict(row)), -row.change.ratio, row.name)
    )
    lines = [_line(row, str(comparison.verdict(row))) for row in ordered]
    return [*lines, *(_line(row, _CONTROL[row in comparison.moved]) for row in comparison.controls)]


def _line(row: Row, verdict: str) -> tuple[str, ...]:
    change = row.change
    base, head = (median(median(times.worked_s) for times in side) for side in (row.base, row.head))
    return (
        row.short,
        *(f"{number(value / 1e6)} MB" if row.in_bytes else duration(value * 1e6) for value in (base, head)),
        _percent(change.ratio),
        f"{_percent(change.low)} to {_percent(change.high)}",
        *(_percent(other.ratio) for other in (row.clock, row.change_of("median_s"), row.change_of("p95_s"))),
        str(change.rounds),
        verdict,
    )


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _notes(comparison: Comparison) -> list[str]:
    """Return notes on slower medians and on benchmarks that were not compared."""
    notes = []
    if moved := comparison.moved_medians:
        medians = ", ".join(f"{row.short} ({_percent(row.change_of('median_s').ratio)})" for row in moved)
        notes.append(
            f"The shortest times show no regression but the medians do; perhaps some calls are slower: {medians}."
        )
    for kind, heading in UNCOMPARED.items():
        if names := getattr(comparison, kind):
            entries = [f"{PurePosixPath(name).name}{f' ({why})' if why else ''}" for name, why in names.items()]
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            notes.append(f"{heading}: {', '.join(entries[:_SHOWN])}{more}.")
    return notes


def _listed(rows: Sequence[Row], threshold: float = math.inf) -> str:
    """Return names and changes of up to 5 benchmarks; a regression of only the wall time is marked."""
    changes = []
    for row in rows:
        waits = row.change.verdict(threshold) is not Verdict.REGRESSION is row.clock.verdict(threshold)
        changes.append((row.clock.ratio if waits else row.change.ratio, " by the clock" if waits else "", row.short))
    names = [f"{name} ({_percent(ratio)}{how})" for ratio, how, name in sorted(changes, reverse=True)]
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
