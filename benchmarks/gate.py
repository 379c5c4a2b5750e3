"""``python -m benchmarks.gate --base REF`` tells whether the working tree is slower than REF.

Base and head run as fresh processes in turns, so that both meet the machine in the same moods; `benchmarks.decision`
has the rule. Exit status: 0 no regression, 1 a confirmed regression, 2 they could not be compared, 3 too noisy to
judge.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from benchmarks import environment
from benchmarks.decision import LEAST_ROUNDS, Change
from benchmarks.gate_report import Comparison, Row, Times, as_json, as_markdown, as_text
from benchmarks.sides import (
    CannotCompareError,
    Side,
    check_out,
    copy_tree,
    end_of,
    environments,
    git,
    workplace,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import FrameType

_CANNOT_COMPARE = 2
_CONTROL = "control"
_OWN = "; if base is too old for head's benchmark files, pass --own-benchmarks"


@dataclass(frozen=True, slots=True)
class Rule:
    """How long to measure and when to alarm.

    Attributes
    ----------
    rounds, max_rounds : int
        Rounds of every benchmark, and of those that look suspicious after them.
    threshold : float
        0.05 alarms at 5 %.
    """

    rounds: int = LEAST_ROUNDS
    max_rounds: int = 11
    threshold: float = 0.05


class Rounds:
    """What was measured so far of two sides, round by round.

    Parameters
    ----------
    base, head
        The sides.
    folder
        Where their processes leave what they found.
    rule
        How many rounds, to tell how long it will take.
    """

    def __init__(self, base: Side, head: Side, folder: Path, rule: Rule) -> None:
        self._sides = {"base": base, "head": head}
        self._folder = folder
        self._rule = rule
        self._start_s = perf_counter()
        self._done = 0
        self.times: dict[str, list[dict[str, Times]]] = {"base": [], "head": []}
        self.absent: dict[str, dict[str, str]] = {"base": {}, "head": {}}
        self.control = ""

    def measure(self, names: Collection[str] | None = None, of_rounds: int = 0) -> None:
        """Run both sides once, in swapped order every other time.

        Parameters
        ----------
        names
            Which benchmarks; None is all.
        of_rounds
            How many rounds there will be, to say so.
        """
        number = len(self.times["base"]) + 1
        for name in ("base", "head") if number % 2 else ("head", "base"):
            start_s = perf_counter()
            found = self._run(self._sides[name], f"{name}-{number}", names)
            self.times[name].append(found)
            took_s = perf_counter() - start_s
            self._done += 1
            # In a round of its own each side takes about as long as the one just measured.
            left_s = (2 * of_rounds - 2 * number + self._done % 2) * took_s
            _say(f"round {number} of {of_rounds}, {name}: {len(found)} benchmarks, {took_s:.0f} s; {_about(left_s)}")
        self._check(number, names)

    def _run(self, side: Side, stem: str, names: Collection[str] | None) -> dict[str, Times]:
        found, junit = self._folder / f"{stem}.json", self._folder / f"{stem}.xml"
        log = self._folder / f"{stem}.log"
        chosen = sorted(names) if names else ["benchmarks"]
        words = ["-m", "pytest", *chosen, "-m", "gate", "-q", "-p", "no:cacheprovider", "--data", str(side.data)]
        status = side.run([*words, f"--benchmark-json={found}", f"--junitxml={junit}"], log, core=last_core())
        self.absent[side.name] |= _absent(junit)
        if not found.is_file():
            reason = "ran no benchmark that is marked gate; were they disabled?" if status in (0, 5) else "does not run"
            own = _OWN if side.name == "base" and side.suite != side.tree else ""
            raise CannotCompareError(f"{side.name} ({side.label}) {reason}{own}\n{end_of(log)}")
        if status and side.name == "head":
            raise CannotCompareError(f"head ({side.label}) fails its own benchmarks\n{end_of(log)}")
        benchmarks = json.loads(found.read_text(encoding="utf-8"))["benchmarks"]
        self.control = next(
            (b["fullname"] for b in benchmarks if b["extra_info"].get("gate") == _CONTROL), self.control
        )
        return {benchmark["fullname"]: _times(benchmark) for benchmark in benchmarks}

    def _check(self, number: int, names: Collection[str] | None) -> None:
        for name, rounds in self.times.items():
            wanted = rounds[0].keys() if names is None else set(names)
            if rounds[-1].keys() != wanted:
                lost = ", ".join(sorted(wanted ^ rounds[-1].keys()))
                raise CannotCompareError(f"{name} ran other benchmarks in round {number} than before: {lost}")

    def compared(self) -> dict[str, Row]:
        """Return how every benchmark compares that both sides ran; the control first."""
        first = self.times["head"][0]
        common = [name for name in first if name in self.times["base"][0]]
        return {name: self._row(name) for name in sorted(common, key=lambda name: name != self.control)}

    def _row(self, name: str) -> Row:
        base, head = ([times[name] for times in self.times[side] if name in times] for side in ("base", "head"))
        change = Change.of([times.min_s for times in base], [times.min_s for times in head])
        return Row(name, change, tuple(base), tuple(head))


def compare(base: Side, head: Side, folder: Path, rule: Rule) -> Comparison:
    """Check that both sides give the same pixels, then measure them in turns.

    Raises
    ------
    CannotCompareError
        If their pixels differ, a side does not run, or they have no benchmark in common.
    """
    start_s = perf_counter()
    for side in (base, head):
        side.check_import(folder / f"{side.name}-import.log")
    _check_pixels(base, head, folder)
    rounds = Rounds(base, head, folder, rule)
    for _ in range(rule.rounds):
        rounds.measure(of_rounds=rule.rounds)
    rows = rounds.compared()
    if not rows.keys() - {rounds.control}:
        raise CannotCompareError(f"base and head have no benchmark in common{_OWN}")
    if rounds.control not in rows:
        raise CannotCompareError("there is no control: a benchmark marked gate('control', ...) on both sides")
    suspicious = {name for name, row in rows.items() if row.change.is_suspicious(rule.threshold)}
    if suspicious and rule.max_rounds > rule.rounds:
        _say(f"{len(suspicious)} of {len(rows)} look suspicious and are measured again")
        for _ in range(rule.rounds, rule.max_rounds):
            rounds.measure(suspicious | {rounds.control}, rule.max_rounds)
    rows = rounds.compared()
    names = {side: times[0].keys() for side, times in rounds.times.items()}
    return Comparison(
        base=base.label,
        head=head.label,
        threshold=rule.threshold,
        control=rows.pop(rounds.control),
        rows=tuple(rows.values()),
        new={name: rounds.absent["base"].get(name, "") for name in sorted(names["head"] - names["base"])},
        gone={name: rounds.absent["head"].get(name, "") for name in sorted(names["base"] - names["head"])},
        skipped={name: why for name, why in sorted(rounds.absent["head"].items()) if name not in names["base"]},
        seconds=perf_counter() - start_s,
    )


def _check_pixels(base: Side, head: Side, folder: Path) -> None:
    """Let each side write its data and read it back, and compare what they read."""
    found: dict[str, dict[str, str]] = {}
    for side in (base, head):
        file, log = folder / f"{side.name}-pixels.json", folder / f"{side.name}-pixels.log"
        words = ["-m", "benchmarks.pixels", "--data", str(side.data), "--json", str(file)]
        if side.run(words, log):
            own = _OWN if side.name == "base" and side.suite != side.tree else ""
            raise CannotCompareError(f"{side.name} ({side.label}) cannot write and read its data{own}\n{end_of(log)}")
        found[side.name] = json.loads(file.read_text(encoding="utf-8"))
        _say(f"{side.name}: data written, {len(found[side.name])} checksums")
    common = found["base"].keys() & found["head"].keys()
    differing = sorted(way for way in common if found["base"][way] != found["head"][way])
    if differing:
        listed = "\n".join(f"    {way}" for way in differing)
        raise CannotCompareError(f"base and head give different pixels, so their speed is not compared:\n{listed}")
    if not common:
        raise CannotCompareError(f"base and head have no way to read in common{_OWN}")


def last_core() -> int | None:
    """Return the core that benchmark processes are kept on, the last that this one may use; None if it is unknown."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _times(benchmark: Mapping[str, Any]) -> Times:
    data: Sequence[float] = benchmark["stats"]["data"]
    p95 = quantiles(data, n=20, method="inclusive")[-1] if len(data) > 1 else data[0]
    return Times(min(data), median(data), p95, benchmark["extra_info"].get("calls", 1))


def _absent(junit: Path) -> dict[str, str]:
    """Return why benchmarks that were collected have no times, by name."""
    if not junit.is_file():
        return {}
    absent = {}
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314  # pytest wrote it
        said = next((found for kind in ("failure", "error", "skipped") if (found := case.find(kind)) is not None), None)
        if said is not None:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            absent[name] = said.get("message", "").splitlines()[0] if said.get("message") else said.tag
    return absent


def _about(seconds: float) -> str:
    return f"about {int(seconds) // 60}:{int(seconds) % 60:02} left"


def _say(text: str) -> None:
    print(text, flush=True)


def _compare_trees(chosen: argparse.Namespace, rule: Rule) -> Comparison:
    """Lay out both trees in a temporary folder, and compare them."""
    with workplace() as folder:
        given = chosen.head or Path()
        repository = Path(git(given if given.is_dir() else Path(), "rev-parse", "--show-toplevel").strip())
        trees = {name: folder / name for name in ("base", "head")}
        labels = {"base": check_out(repository, chosen.base, trees["base"])}
        if given.is_dir():
            labels["head"] = copy_tree(repository, trees["head"])
        else:
            labels["head"] = check_out(repository, str(given), trees["head"])
        _say(f"base: {labels['base']}\nhead: {labels['head']}")
        pythons = environments(trees["base"], trees["head"], folder)
        base, head = (
            Side(
                name,
                labels[name],
                trees[name],
                trees[name if chosen.own_benchmarks else "head"],
                python,
                folder / f"{name}-data",
            )
            for name, python in zip(("base", "head"), pythons, strict=True)
        )
        return compare(base, head, folder, rule)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate",
        description="Is head slower than base? Exit status: 0 no regression, 1 a confirmed regression, "
        "2 they could not be compared, 3 too noisy to judge.",
    )
    parser.add_argument("--base", required=True, metavar="REF", help="commit, branch or tag to compare with")
    parser.add_argument(
        "--head", type=Path, metavar="PATH|REF", help="working tree or commit; default: this tree, changes included"
    )
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-rounds", type=int, default=11, metavar="N", help="rounds of suspicious benchmarks; default: %(default)s"
    )
    parser.add_argument("--threshold", type=float, default=5.0, metavar="PERCENT", help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="fail where a benchmark of base is gone")
    parser.add_argument(
        "--own-benchmarks", action="store_true", help="each side runs its own benchmark files; default: both run head's"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the result as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the result (PNG, SVG or PDF)")
    return parser


def _checked(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Rule:
    if chosen.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {chosen.rounds}: fewer than {LEAST_ROUNDS} give no interval")
    if chosen.max_rounds < chosen.rounds:
        parser.error(f"--max-rounds {chosen.max_rounds} is less than --rounds {chosen.rounds}")
    if not 0 < chosen.threshold < math.inf:
        parser.error(f"--threshold {chosen.threshold}: it must be a percentage above 0")
    return Rule(chosen.rounds, chosen.max_rounds, chosen.threshold / 100)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Unwind on the signals that would end this process at once, so that what it started and made goes too."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(words)
    rule = _checked(parser, chosen)
    with _ended_in_order():
        try:
            comparison = _compare_trees(chosen, rule)
        except CannotCompareError as error:
            print(f"Could not compare: {error}", file=sys.stderr)
            _write(
                chosen,
                f"**Could not compare**\n\n```text\n{error}\n```\n",
                {"exit": _CANNOT_COMPARE, "why": str(error)},
            )
            return _CANNOT_COMPARE
    print(f"\n{as_text(comparison, strict=chosen.strict)}")
    _write(chosen, as_markdown(comparison, strict=chosen.strict), as_json(comparison, strict=chosen.strict))
    if chosen.figure:
        from benchmarks.gate_figure import draw  # noqa: PLC0415  # matplotlib takes a second, only where it is asked for

        draw(comparison, _made(chosen.figure))
    return comparison.exit_status(strict=chosen.strict)


def _write(chosen: argparse.Namespace, text: str, record: Mapping[str, Any]) -> None:
    if chosen.summary:
        _made(chosen.summary).write_text(text, encoding="utf-8")
    if chosen.json:
        where = {"machine": environment.machine(), "versions": environment.versions()}
        _made(chosen.json).write_text(json.dumps({**record, **where}, indent=1), encoding="utf-8")


def _made(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted; nothing is left behind")
