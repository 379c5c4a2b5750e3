"""Rounds of base and head: fresh processes that run in turns, until the rule can decide."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from benchmarks.gate.baton import least_of_turns
from benchmarks.gate.decision import LEAST_ROUNDS, MOST_ROUNDS
from benchmarks.gate.processes import CannotCompareError, end_of, run_at_once, run_in_turns
from benchmarks.gate.report import Comparison, Row, Times
from benchmarks.gate.sides import move_in_memory, share_equal_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from benchmarks.gate.sides import Side

    Say = Callable[[str], None]

_CONTROL = "control"
_MOST_S, _AGAIN = 600.0, 0.5  # Further rounds end within 600 s, or within 1.5 times the time of the regular rounds.
_START = 12  # Starting a process takes about as long as this number of benchmarks.
_PIXELS = ("benchmarks/support/pixels.py", "benchmarks/pixels.py")  # A base with older benchmark files has the latter.
_OWN = "; if base is too old for head's benchmark files, pass --own-benchmarks"


@dataclass(frozen=True, slots=True)
class Rule:
    """Number of rounds of all benchmarks, largest number of rounds of open ones, and the threshold (0.05 is 5 %)."""

    rounds: int = LEAST_ROUNDS
    max_rounds: int = MOST_ROUNDS
    threshold: float = 0.05


class Rounds:
    """Times of both sides, measured round by round; the processes write their results to a folder."""

    def __init__(self, base: Side, head: Side, folder: Path, say: Say) -> None:
        self._sides = {"base": base, "head": head}
        self._folder = folder
        self._say = say
        self.times: dict[str, list[dict[str, Times]]] = {"base": [], "head": []}
        self.absent: dict[str, dict[str, str]] = {"base": {}, "head": {}}
        self.controls: set[str] = set()
        self._last_s = 0.0
        self._in_bytes: set[str] = set()

    def measure(self, of_rounds: int, names: Collection[str] | None = None) -> None:
        """Measure one round: a fresh process per side, in turns; the sides alternate in who begins.

        ``of_rounds`` is the planned number of rounds, for progress messages. ``names`` selects benchmarks; None is all.
        """
        number = len(self.times["base"]) + 1
        start_s = perf_counter()
        for side in self._sides.values():
            move_in_memory(side.data)
        order = ("base", "head") if number % 2 else ("head", "base")
        files = {name: self._folder / f"{name}-{number}" for name in order}
        commands = [
            self._sides[name].command(
                _words(files[name], self._sides[name], names), files[name].with_suffix(".log"), core=last_core()
            )
            for name in order
        ]
        statuses = dict(zip(order, run_in_turns(*commands), strict=True))
        for name in ("base", "head"):
            self.times[name].append(self._read(self._sides[name], files[name], statuses[name]))
        self._check(number, names)
        self._last_s = perf_counter() - start_s
        most, count = (len(self.times["base"][index].keys() & self.times["head"][index].keys()) for index in (0, -1))
        left_s = int((of_rounds - number) * self._last_s)
        measured = f"{count} benchmarks" if count == most else f"{count} of {most} left"
        then = "left, then again what is open" if count == most else "left at most"
        self._say(
            f"round {number} of {of_rounds}: {measured}, {self._last_s:.0f} s; {left_s // 60}:{left_s % 60:02} {then}"
        )

    def _read(self, side: Side, file: Path, status: int) -> dict[str, Times]:
        """Return the times that a process measured, and record its controls and absent benchmarks."""
        log, results = file.with_suffix(".log"), file.with_suffix(".json")
        self.absent[side.name] |= _absent(file.with_suffix(".xml"))
        if not results.is_file() or not results.stat().st_size:  # pytest-benchmark before 5.3 creates it empty.
            reason = "ran no benchmark that is marked gate; were they disabled?" if status in (0, 5) else "does not run"
            raise CannotCompareError(f"{side.name} ({side.label}) {reason}{_hint(side)}\n{end_of(log)}")
        if status and side.name == "head":
            raise CannotCompareError(f"head ({side.label}) fails its own benchmarks\n{end_of(log)}")
        benchmarks = json.loads(results.read_text(encoding="utf-8"))["benchmarks"]
        self.controls |= {b["fullname"] for b in benchmarks if b["extra_info"].get("gate") == _CONTROL}
        self._in_bytes |= {b["fullname"] for b in benchmarks if "bytes" in b["extra_info"]}
        return {benchmark["fullname"]: _times(benchmark) for benchmark in benchmarks}

    def _check(self, number: int, names: Collection[str] | None) -> None:
        for name, rounds in self.times.items():
            expected = rounds[0].keys() if names is None else set(names)
            if rounds[-1].keys() != expected:
                lost = ", ".join(sorted(expected ^ rounds[-1].keys()))
                raise CannotCompareError(f"{name} ran other benchmarks in round {number} than before: {lost}")

    def seconds_of(self, count: int) -> float:
        """Estimate the seconds of a round of ``count`` benchmarks from the last round."""
        return self._last_s * (count + _START) / (len(self.times["head"][-1]) + _START)

    def compared(self) -> dict[str, Row]:
        """Return the row of each benchmark that both sides ran."""
        return {name: self._row(name) for name in self.times["head"][0] if name in self.times["base"][0]}

    def _row(self, name: str) -> Row:
        base, head = ([times[name] for times in self.times[side] if name in times] for side in ("base", "head"))
        return Row.from_times(name, base, head, in_bytes=name in self._in_bytes)


def compare(base: Side, head: Side, folder: Path, rule: Rule, say: Say) -> Comparison:
    """Check that both sides read equal pixels, then measure them in turns.

    Raises
    ------
    CannotCompareError
        If their pixels differ, a side does not run, or they have no benchmark in common.
    """
    start_s = perf_counter()
    for side in (base, head):
        side.check_import(folder / f"{side.name}-import.log")
    _check_pixels(base, head, folder, say)
    share_equal_files(base.data, head.data)
    rounds = Rounds(base, head, folder, say)
    rounds.measure(rule.rounds)
    common = rounds.times["base"][0].keys() & rounds.times["head"][0].keys()
    if not common - rounds.controls:
        raise CannotCompareError(f"base and head have no benchmark in common{_OWN}")
    if not common & rounds.controls:
        raise CannotCompareError("there is no control: a benchmark marked gate('control', ...) on both sides")
    for _ in range(1, rule.rounds):
        rounds.measure(rule.rounds, common)
    most_s = max(_MOST_S, (1 + _AGAIN) * (perf_counter() - start_s))
    for _ in range(rule.rounds, rule.max_rounds):
        open_ones = {name for name, row in rounds.compared().items() if row.is_open(rule.threshold)} - rounds.controls
        again = open_ones | rounds.controls & common
        if not open_ones or perf_counter() - start_s + rounds.seconds_of(len(again)) > most_s:
            break
        rounds.measure(rule.max_rounds, again)
    rows = rounds.compared()
    names = {side: times[0].keys() for side, times in rounds.times.items()}
    return Comparison(
        base=base.label,
        head=head.label,
        threshold=rule.threshold,
        controls=tuple(row for name, row in rows.items() if name in rounds.controls),
        rows=tuple(row for name, row in rows.items() if name not in rounds.controls),
        new={name: rounds.absent["base"].get(name, "") for name in sorted(names["head"] - names["base"])},
        gone={name: rounds.absent["head"].get(name, "") for name in sorted(names["base"] - names["head"])},
        skipped={name: why for name, why in sorted(rounds.absent["head"].items()) if name not in names["base"]},
        seconds=perf_counter() - start_s,
    )


def _check_pixels(base: Side, head: Side, folder: Path, say: Say) -> None:
    """Run the pixel check of each side, which writes and reads its data, and compare the checksums."""
    checksums: dict[str, dict[str, str]] = {}
    commands, files = [], []
    for side in (base, head):
        files.append(folder / f"{side.name}-pixels.json")
        module = next((name for name in _PIXELS if (side.suite / name).is_file()), _PIXELS[0])
        words = ["-m", module.removesuffix(".py").replace("/", "."), "--data", str(side.data), "--json", str(files[-1])]
        commands.append(side.command(words, files[-1].with_suffix(".log")))
    for side, command, file, status in zip((base, head), commands, files, run_at_once(*commands), strict=True):
        if status:
            failure = f"{side.name} ({side.label}) cannot write and read its data"
            raise CannotCompareError(f"{failure}{_hint(side)}\n{end_of(command.log)}")
        checksums[side.name] = json.loads(file.read_text(encoding="utf-8"))
        say(f"{side.name}: data written, {len(checksums[side.name])} checksums")
    common = checksums["base"].keys() & checksums["head"].keys()
    differing = sorted(way for way in common if checksums["base"][way] != checksums["head"][way])
    if differing:
        listed = "\n".join(f"    {way}" for way in differing)
        raise CannotCompareError(f"base and head give different pixels, so their speed is not compared:\n{listed}")
    if not common:
        raise CannotCompareError(f"base and head have no way to read in common{_OWN}")


def _hint(side: Side) -> str:
    """Return a hint if base may have failed because of head's benchmark files."""
    return _OWN if side.name == "base" and side.suite != side.tree else ""


def last_core() -> int | None:
    """Return the core that benchmark processes are pinned to, the last one allowed for this process, or None."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _words(file: Path, side: Side, names: Collection[str] | None) -> list[str]:
    chosen = sorted(names) if names else ["benchmarks"]
    reports = [f"--benchmark-json={file.with_suffix('.json')}", f"--junitxml={file.with_suffix('.xml')}"]
    # Override the suite's configuration: benchmarks that one side leaves out would look new.
    whole = ["--rootdir=.", "--maxfail=0", "-m", "gate"]
    # Each option is one word, because pytest searches for its configuration at separate words that are folders.
    return ["-m", "pytest", *chosen, *whole, "-q", "-p", "no:cacheprovider", f"--data={side.data}", *reports]


def _times(benchmark: Mapping[str, Any]) -> Times:
    extra = benchmark["extra_info"]
    data: Sequence[float] = [extra["bytes"]] if "bytes" in extra else benchmark["stats"]["data"]
    p95 = quantiles(data, n=20, method="inclusive")[-1] if len(data) > 1 else data[0]
    passed_s = least_of_turns(data)
    worked_s = passed_s if "bytes" in extra else extra.get("worked_s", passed_s)
    return Times(min(data), median(data), p95, extra.get("calls", 1), worked_s, passed_s)


def _absent(junit: Path) -> dict[str, str]:
    """Return the reasons of collected benchmarks without times, by name."""
    if not junit.is_file():
        return {}
    absent = {}
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314  # The file comes from pytest.
        outcome = next(
            (element for kind in ("failure", "error", "skipped") if (element := case.find(kind)) is not None), None
        )
        if outcome is not None:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            absent[name] = outcome.get("message", "").splitlines()[0] if outcome.get("message") else outcome.tag
    return absent
