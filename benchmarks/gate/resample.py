"""An estimate of how often the gate would err: gates drawn from recorded pairs of processes of a tree and itself.

A recording is a gate of unchanged copies in which every benchmark has all rounds. A drawn gate takes rounds of one
recording, with replacement and whole, so that what disturbs several benchmarks at once does so here too, and applies
the gate's own rule to them. A slowdown is planted by multiplying head's times. That estimates: the recorded rounds are
few, and come again and again. Whole gates certify, and are counted apart.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.gate.decision import LEAST_ROUNDS, MOST_ROUNDS, Change, Verdict
from benchmarks.gate.report import Comparison, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Record = Mapping[str, Any]

GATES = 1000  # drawn for each slowdown
LEVELS = (0.0, 0.05, 0.10, 0.20)


@dataclass(frozen=True)
class Estimate:
    """What became of drawn gates in which all benchmarks are slower by ``level``: exits, and verdicts by name."""

    level: float
    exits: Counter[int] = field(default_factory=Counter)
    verdicts: dict[str, Counter[Verdict]] = field(default_factory=dict)

    def share(self, name: str, verdict: Verdict) -> float:
        """Return how often a benchmark had a verdict."""
        return self.verdicts[name][verdict] / self.verdicts[name].total()


def estimate(recordings: Sequence[Record], level: float, gates: int = GATES) -> Estimate:
    """Draw gates, with a seed of its own, so that the same recordings give the same."""
    draw, found = random.Random(0), Estimate(level)  # noqa: S311  # no secret
    for _ in range(gates):
        gate = drawn_gate(draw.choice(recordings), draw, level)
        found.exits[gate.exit_status(strict=False)] += 1
        for row in gate.rows:
            found.verdicts.setdefault(row.name, Counter())[gate.verdict(row)] += 1
    return found


def drawn_gate(recording: Record, draw: random.Random, level: float) -> Comparison:
    """Return a gate of drawn rounds: the first `LEAST_ROUNDS`, and more of what is open, as `rounds.compare` does."""
    threshold, controls, rows = recording["threshold"], recording["controls"], recording["benchmarks"]
    order = draw.choices(range(min(row["rounds"] for row in (*controls, *rows))), k=MOST_ROUNDS)

    def change(row: Record, rounds: int, slower: float) -> Change:
        base, head = ([row[side][at]["min_s"] for at in order[:rounds]] for side in ("base", "head"))
        return Change.of(base, [time * (1 + slower) for time in head], least=row.get("least", False))

    def judged(row: Record, slower: float) -> Change:
        for rounds in range(LEAST_ROUNDS, MOST_ROUNDS):
            if not (found := change(row, rounds, slower)).is_open(threshold):
                return found
        return change(row, MOST_ROUNDS, slower)

    changes = {row["name"]: judged(row, level) for row in rows}
    # Controls run in every round that anything needs, their own doubts included.
    last = max(each.rounds for each in (*changes.values(), *(judged(row, 0.0) for row in controls)))
    return Comparison(
        base="",
        head="",
        threshold=threshold,
        controls=tuple(Row(row["name"], change(row, last, 0.0), (), ()) for row in controls),
        rows=tuple(Row(name, each, (), ()) for name, each in changes.items()),
        new={},
        gone={},
        skipped={},
        seconds=0.0,
    )
