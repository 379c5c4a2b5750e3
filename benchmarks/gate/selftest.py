"""Measured error rates of the gate: false alarms and detected slowdowns, ``python -m benchmarks.gate.selftest``.

Every run is a whole gate with fresh copies of the working tree, their own data, and the usual rule. Some runs compare
the tree with itself, a part of these while a program keeps the same core busy for 40 % of the time. In other runs,
three of four benchmarks have a slowdown of 5, 10 or 20 % in their own path (`planted`). In further runs, the slowdown
is in the first touch, in one call in ten, in work that grows with the number of images, in a lost cache, in memory or
in a wait. Times of benchmarks do not depend on each other, so slowing many at once gives dozens of trials per run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import count, cycle, repeat
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any
from zlib import crc32

from benchmarks.gate import environment
from benchmarks.gate.planted import in_forms, place_of, plant
from benchmarks.gate.processes import CannotCompareError, Command, ended_in_order, running
from benchmarks.gate.report import Comparison, as_json
from benchmarks.gate.rounds import Rule, compare, last_core
from benchmarks.gate.selftest_report import RECORDED, as_markdown, missed_targets
from benchmarks.gate.sides import Side, copy_tree, workplace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNCHANGED, SLOWED, IN_FORMS, LOADED = "unchanged", "slowed", "in forms", "loaded"
_PAIRS_AT_ONCE = 15  # Pairs per recording. Each recording copies both trees and writes their data again.
_KINDS = (UNCHANGED, SLOWED, IN_FORMS, SLOWED, LOADED)
_LEVELS = (0.0, 0.05, 0.10, 0.20)
_LOAD = """
from time import perf_counter, sleep
while True:
    end = perf_counter() + 0.008
    while perf_counter() < end: pass
    sleep(0.012)
"""


def run_once(repository: Path, kind: str, levels: Mapping[str, float], calls_s: Mapping[str, float]) -> Comparison:
    """Run a gate on two fresh copies of a tree; `LOADED` keeps its core busy meanwhile.

    ``levels`` maps benchmarks to the slowdown planted in head (0.1 for 10 %), and ``calls_s`` to the seconds of a call.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(workplace())
        extra_s = {place_of(name): level * calls_s[name] for name, level in levels.items() if level}
        slowed = in_forms(calls_s) if kind == IN_FORMS else (extra_s, {})
        base, head = (_copy(repository, folder, name, *slow) for name, slow in (("base", ({}, {})), ("head", slowed)))
        if kind == LOADED:
            busy = Command([sys.executable, "-c", _LOAD], folder, folder / "load.log", core=last_core())
            stack.enter_context(running(busy))
        rule = Rule(_PAIRS_AT_ONCE, _PAIRS_AT_ONCE) if kind == RECORDED else Rule()
        return compare(base, head, folder, rule, say=lambda _: None)


def _copy(repository: Path, folder: Path, name: str, extra_s: Mapping[str, float], forms: Mapping[str, str]) -> Side:
    tree = folder / name
    label = copy_tree(repository, tree)
    plant(tree, extra_s, forms)
    return Side(name, label, tree, tree, Path(sys.executable), folder / f"{name}-data")


def levels_of(names: Sequence[str], run: int) -> dict[str, float]:
    """Return the slowdown of each benchmark in a run; over four runs, each benchmark has each level once."""
    return {name: _LEVELS[(index + run) % len(_LEVELS)] for index, name in enumerate(sorted(names))}


def calls_of(comparison: Comparison) -> dict[str, float]:
    """Return the seconds per call in each benchmark of base that measures time."""
    rows = (row for row in comparison.rows if not row.in_bytes)
    return {row.short: median(median(times.worked_s) / times.calls for times in row.base) for row in rows}


def _record(kind: str, comparison: Comparison, levels: Mapping[str, float]) -> dict[str, Any]:
    result = as_json(comparison)
    for row, record in zip(comparison.rows, result["benchmarks"], strict=True):
        record["level"] = levels.get(row.short, 0.0)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"kind": kind, "finished": now, "load": os.getloadavg()[1] if hasattr(os, "getloadavg") else None, **result}


def main(words: Sequence[str] | None = None) -> int:
    """Run gates for the requested time, and write the results after each gate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate.selftest", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="running time; default: %(default)s")
    parser.add_argument("--summary", type=Path, default=Path("results/selftest.md"), help="Markdown file of rates")
    parser.add_argument("--json", type=Path, default=Path("results/selftest.json"), help="JSON file of results")
    parser.add_argument("--pairs", type=int, help="number of pairs of processes to record instead of running gates")
    parser.add_argument("--add", action="store_true", help="extend the results of this machine in --json")
    chosen = parser.parse_args(words)
    for file in (chosen.summary, chosen.json):
        file.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version for name, version in environment.versions().items() if name != "omearrow-ds"}
    machine = {"machine": environment.machine(), "versions": versions}  # Each run records its commit.
    runs = _earlier(chosen.json, machine) if chosen.add else []
    with ended_in_order():
        return _run_all(chosen, machine, runs)


def _earlier(file: Path, machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stored runs of this machine and these versions; move a file with other runs aside."""

    def aside(origin: Mapping[str, Any]) -> Path:
        return file.with_stem(f"{file.stem}-{crc32(json.dumps(origin, sort_keys=True).encode()):08x}")

    if file.is_file():
        earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        runs: list[dict[str, Any]] = earlier.pop("runs")
        if earlier == machine:
            return runs
        print(
            f"{file} is of another machine, or of other versions: it is {file.replace(aside(earlier))} now", flush=True
        )
    mine = aside(machine)
    return json.loads(mine.read_text(encoding="utf-8"))["runs"] if mine.is_file() else []


def _run_all(chosen: argparse.Namespace, machine: Mapping[str, Any], runs: list[dict[str, Any]]) -> int:
    begun_s, slowed = monotonic(), count()
    calls_s: dict[str, float] = {}
    recordings = -(-chosen.pairs // _PAIRS_AT_ONCE) if chosen.pairs else 0
    for number, kind in enumerate(repeat(RECORDED, recordings) if recordings else cycle(_KINDS), 1):
        spent_s = monotonic() - begun_s
        if number > 1 and spent_s * number / (number - 1) > chosen.minutes * 60:  # Another gate would exceed the time.
            break
        levels = levels_of(list(calls_s), next(slowed)) if kind == SLOWED else {}
        try:
            comparison = run_once(Path(), kind, levels, calls_s)
        except CannotCompareError as error:
            print(f"Could not compare: {error}", file=sys.stderr)
            return 2
        if kind in (UNCHANGED, SLOWED):
            calls_s = calls_of(comparison)
        runs.append(_record(kind, comparison, levels))
        chosen.json.write_text(json.dumps({**machine, "runs": runs}, indent=1), encoding="utf-8")
        chosen.summary.write_text(as_markdown(runs, machine), encoding="utf-8")
        print(f"run {number}, {kind}, {comparison.seconds:.0f} s: {comparison.conclusion(strict=False)}", flush=True)
    print(f"\n{chosen.summary.read_text(encoding='utf-8')}")
    missed = missed_targets(runs)
    for target in missed:
        print(f"Target missed: {target}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted; the runs so far are written")
