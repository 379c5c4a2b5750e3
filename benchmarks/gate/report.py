"""The report of the gate as text, Markdown and JSON, and the exit status that it means."""

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
    """One process's times of one benchmark, in seconds, and how many library calls one of its rounds makes.

    ``worked_s`` and ``passed_s`` are of the quietest round of each turn: for how long cores worked for it, and how long
    it took by the clock, as all others are. Of a benchmark of memory, they are all the bytes that it took.
    """

    min_s: float
    median_s: float
    p95_s: float
    calls: int
    worked_s: Sequence[float]
    passed_s: Sequence[float]


def short_name(name: str) -> str:
    """Return a benchmark's pytest node id without file and ``test_``."""
    return name.rpartition("::")[2].removeprefix("test_")


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark that both sides ran, by its pytest node id, and the times of each round.

    Attributes
    ----------
    worked, passed : tuple of float
        Head's ratio to base in each round: of the time that cores worked, and of that which passed by the clock.
    in_bytes : bool
        Whether bytes are judged, not seconds.
    """

    name: str
    worked: tuple[float, ...]
    passed: tuple[float, ...]
    base: tuple[Times, ...] = ()
    head: tuple[Times, ...] = ()
    in_bytes: bool = False

    @classmethod
    def of(cls, name: str, base: Sequence[Times], head: Sequence[Times], *, in_bytes: bool = False) -> Row:
        """Compare the times of base and head in each round."""
        worked, passed = (
            tuple(ratio_of_round(getattr(b, turns), getattr(h, turns)) for b, h in zip(base, head, strict=True))
            for turns in ("worked_s", "passed_s")
        )
        return cls(name, worked, passed, tuple(base), tuple(head), in_bytes)

    @property
    def change(self) -> Change:
        """How the time compares that cores worked, by which it is judged."""
        return Change.of(self.worked)

    @property
    def clock(self) -> Change:
        """How the time by the clock does: it may show a slowdown, as of code that waits, and excludes none.

        Other programs lengthen it.
        """
        return Change.of(self.passed)

    @property
    def short(self) -> str:
        """Its name as `short_name` has it."""
        return short_name(self.name)

    def change_of(self, statistic: str) -> Change:
        """Compare another statistic, which is shown and not judged."""
        pairs = zip(self.base, self.head, strict=True)
        return Change.of([getattr(head, statistic) / getattr(base, statistic) for base, head in pairs])

    def verdict(self, threshold: float) -> Verdict:
        """Judge it."""
        if self.clock.verdict(threshold) is Verdict.REGRESSION:
            return Verdict.REGRESSION
        return self.change.verdict(threshold)

    def is_unresolved(self, threshold: float) -> bool:
        """Whether a regression is neither shown nor excluded."""
        return self.verdict(threshold) is not Verdict.REGRESSION and self.change.may_be_slower(threshold)

    def is_open(self, threshold: float) -> bool:
        """Whether another round of it is wanted."""
        shown = self.verdict(threshold) is Verdict.REGRESSION
        return not shown and (self.change.may_be_slower(threshold) or self.clock.seems_slower(threshold))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Base against head: what they are, for people, and how all benchmarks compare that both ran.

    The threshold is 0.05 for 5 %. Controls run no code of the project. What only head ran, only base ran, or neither,
    is ``new``, ``gone`` or ``skipped``, by name, each with the reason, if one is known.
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
        """Judge one benchmark."""
        return row.verdict(self.threshold)

    def of(self, verdict: Verdict) -> list[Row]:
        """Return the benchmarks of one verdict."""
        return [row for row in self.rows if self.verdict(row) is verdict]

    @property
    def moved(self) -> list[Row]:
        """The controls that moved: where there are any, the machine itself did, and nothing can be said."""
        return [row for row in self.controls if row.change.verdict(CONTROL_LIMIT) in _CHANGED]

    @property
    def moved_medians(self) -> list[Row]:
        """The benchmarks whose shortest time is no regression, and whose median is slower in nearly every round."""
        rows = [row for row in self.rows if self.verdict(row) is not Verdict.REGRESSION]
        return [row for row in rows if row.change_of("median_s").low > 1 + self.threshold]

    @property
    def unresolved(self) -> list[Row]:
        """The benchmarks of which a regression is neither shown nor excluded."""
        return [row for row in self.rows if row.is_unresolved(self.threshold)]

    def exit_status(self, *, strict: bool) -> int:
        """Return 0 no regression, 1 a confirmed one, 2 gone benchmarks under ``strict``, 3 too noisy to judge."""
        if self.moved:
            return 3
        if self.of(Verdict.REGRESSION):
            return 1
        if strict and self.gone:
            return 2
        return 3 if self.unresolved else 0

    def conclusion(self, *, strict: bool) -> str:
        """Say in a sentence what the exit status means."""
        limit = f"{self.threshold:.0%}" if self.threshold >= 0.01 else f"{self.threshold:.2%}"
        if self.moved:
            return (
                f"Too noisy to judge: {_listed(self.moved)} changed although it runs no project code; "
                f"{len(self.of(Verdict.REGRESSION))} regressions may be caused by the machine."
            )
        if found := self.of(Verdict.REGRESSION):
            return f"Regression: {_listed(found, self.threshold)} slower by more than {limit}."
        if strict and self.gone:
            return f"Could not compare all: head lacks {len(self.gone)} benchmarks of base, which --strict forbids."
        if found := self.unresolved:
            return (
                f"Too noisy to judge {_listed(found)}: a slowdown of more than {limit} is neither shown nor excluded."
            )
        return f"No regression: none of {len(self.rows)} benchmarks is slower by more than {limit}."


def as_text(comparison: Comparison, *, strict: bool = False) -> str:
    """Lay the result out for a terminal or a log: a table, what could not be compared, and the conclusion."""
    headings, *lines = aligned([_HEADINGS, *_cells(comparison)])
    rule = "-" * max(map(len, (headings, *lines)))
    head = f"head {comparison.head} compared with base {comparison.base}"
    table = [headings, rule, *lines, rule]
    return "\n".join([head, "", *table, *_notes(comparison), comparison.conclusion(strict=strict)])


def as_markdown(comparison: Comparison, *, strict: bool = False) -> str:
    """Lay the result out for a job summary: the conclusion first, what is ok folded away."""
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
    """Return everything that was found, each round's times included, as JSON can hold it."""
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
    """Return one line of words a benchmark, what matters first, the controls last."""
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
        *(f"{number(each / 1e6)} MB" if row.in_bytes else duration(each * 1e6) for each in (base, head)),
        _percent(change.ratio),
        f"{_percent(change.low)} to {_percent(change.high)}",
        *(_percent(each.ratio) for each in (row.clock, row.change_of("median_s"), row.change_of("p95_s"))),
        str(change.rounds),
        verdict,
    )


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _notes(comparison: Comparison) -> list[str]:
    """Name what was not compared."""
    notes = []
    if moved := comparison.moved_medians:
        said = ", ".join(f"{row.short} ({_percent(row.change_of('median_s').ratio)})" for row in moved)
        notes.append(
            f"The shortest times show no regression but the medians do; perhaps some calls are slower: {said}."
        )
    for kind, said in UNCOMPARED.items():
        if names := getattr(comparison, kind):
            shown = [f"{PurePosixPath(name).name}{f' ({why})' if why else ''}" for name, why in names.items()]
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            notes.append(f"{said}: {', '.join(shown[:_SHOWN])}{more}.")
    return notes


def _listed(rows: Sequence[Row], threshold: float = math.inf) -> str:
    """Name benchmarks; a change that the clock alone shows to be above the threshold is told as such."""
    told = []
    for row in rows:
        waits = row.change.verdict(threshold) is not Verdict.REGRESSION is row.clock.verdict(threshold)
        told.append((row.clock.ratio if waits else row.change.ratio, " by the clock" if waits else "", row.short))
    names = [f"{name} ({_percent(ratio)}{how})" for ratio, how, name in sorted(told, reverse=True)]
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
