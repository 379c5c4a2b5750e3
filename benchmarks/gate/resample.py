"""Estimated error rates of the gate: gates are drawn from recorded pairs of processes of equal trees.

A recording is a gate of unchanged copies in which every benchmark has all rounds. A drawn gate samples whole rounds of
one recording with replacement, which keeps disturbances shared by several benchmarks, and applies the gate's rule to
them. A slowdown is planted by multiplying head's times. This is only an estimate, because few recorded rounds are
drawn repeatedly. Whole gates are the proof, and are counted separately.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.gate.decision import LEAST_ROUNDS, MOST_ROUNDS, Verdict
from benchmarks.gate.report import Comparison, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Record = Mapping[str, Any]

GATES = 1000  # Gates drawn per slowdown.
LEVELS = (0.0, 0.05, 0.10, 0.20)


@dataclass(frozen=True)
class Estimate:
    """Counts of exit statuses, and of verdicts by name, of drawn gates with all benchmarks slower by ``level``."""

    level: float
    exits: Counter[int] = field(default_factory=Counter)
    verdicts: dict[str, Counter[Verdict]] = field(default_factory=dict)

    def share(self, name: str, verdict: Verdict) -> float:
        """Return the share of drawn gates in which a benchmark had a verdict."""
        return self.verdicts[name][verdict] / self.verdicts[name].total()


def estimate(recordings: Sequence[Record], level: float, gates: int) -> Estimate:
    """Draw gates with a fixed seed, and count their exit statuses and verdicts."""
    draw, estimated = random.Random(0), Estimate(level)  # noqa: S311  # Not used for secrets.
    for _ in range(gates):
        gate = drawn_gate(draw.choice(recordings), draw, level)
        estimated.exits[gate.exit_status(strict=False)] += 1
        for row in gate.rows:
            estimated.verdicts.setdefault(row.name, Counter())[gate.verdict(row)] += 1
    return estimated


def drawn_gate(recording: Record, draw: random.Random, level: float) -> Comparison:
    """Return a gate of drawn rounds: `LEAST_ROUNDS`, and further ones of open benchmarks, as `rounds.compare` does."""
    threshold, controls, rows = recording["threshold"], recording["controls"], recording["benchmarks"]
    order = draw.choices(range(min(row["rounds"] for row in (*controls, *rows))), k=MOST_ROUNDS)

    def of_rounds(row: Record, rounds: int, slower: float = 0.0) -> Row:
        worked, passed = (
            tuple(row[kind][index] * (1 + slower) for index in order[:rounds]) for kind in ("worked", "passed")
        )
        return Row(row["name"], worked, passed)

    def judged(row: Record) -> Row:
        for rounds in range(LEAST_ROUNDS, MOST_ROUNDS):
            if not (row_so_far := of_rounds(row, rounds, level)).is_open(threshold):
                return row_so_far
        return of_rounds(row, MOST_ROUNDS, level)

    judged_rows = tuple(map(judged, rows))
    last = max(len(row.worked) for row in judged_rows)  # Controls run in all rounds.
    return Comparison(
        base="",
        head="",
        threshold=threshold,
        controls=tuple(of_rounds(row, last) for row in controls),
        rows=judged_rows,
        new={},
        gone={},
        skipped={},
        seconds=0.0,
    )
