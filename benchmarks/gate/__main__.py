"""``python -m benchmarks.gate --base REF`` reports whether the working tree is slower than REF.

Base and head run as fresh processes in turns, so that the speed of the machine is the same for both. The rule is in
`benchmarks.gate.decision`. Exit status: 0 no regression, 1 a confirmed regression, 2 they could not be compared, 3 too
noisy to judge.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gate import environment
from benchmarks.gate.decision import LEAST_ROUNDS
from benchmarks.gate.pins import environments
from benchmarks.gate.processes import CannotCompareError, ended_in_order
from benchmarks.gate.report import Comparison, as_json, as_markdown, as_text
from benchmarks.gate.rounds import Rule, compare
from benchmarks.gate.sides import Side, check_out, copy_tree, git, workplace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_CANNOT_COMPARE, _INTERRUPTED = 2, 128 + signal.SIGINT
_FIGURES = (".png", ".svg", ".pdf")
_say = partial(print, flush=True)


def _compare_trees(chosen: argparse.Namespace, rule: Rule) -> Comparison:
    """Copy both trees to a temporary folder, and compare them."""
    with workplace() as folder:
        chosen_head = chosen.head or Path()
        repository = Path(git(chosen_head if chosen_head.is_dir() else Path(), "rev-parse", "--show-toplevel").strip())
        trees = {name: folder / name for name in ("base", "head")}
        labels = {"base": check_out(repository, chosen.base, trees["base"])}
        if chosen_head.is_dir():
            labels["head"] = copy_tree(repository, trees["head"])
        else:
            labels["head"] = check_out(repository, str(chosen_head), trees["head"])  # Not a folder, so a commit.
        _say(f"base: {labels['base']}\nhead: {labels['head']}")
        with workplace(Path(tempfile.gettempdir())) as room:
            pythons = environments(trees["base"], trees["head"], room)
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
            return compare(base, head, folder, rule, _say)


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
        "--max-rounds", type=int, default=31, metavar="N", help="of benchmarks that are open; default: %(default)s"
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
    for file in filter(None, (chosen.summary, chosen.json, chosen.figure)):
        if problem := _cannot_write(file):
            parser.error(f"{file}: {problem}")
    if chosen.figure and chosen.figure.suffix not in _FIGURES:
        parser.error(f"--figure {chosen.figure}: its suffix must be one of {', '.join(_FIGURES)}")
    return Rule(chosen.rounds, chosen.max_rounds, chosen.threshold / 100)


def _cannot_write(file: Path) -> str:
    """Return the reason why a file cannot be written, or an empty text; its folder is created."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        return "it cannot be written there"
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(words)
    rule = _checked(parser, chosen)
    with ended_in_order():
        try:
            comparison = _compare_trees(chosen, rule)
        except CannotCompareError as error:
            print(f"Could not compare: {error}", file=sys.stderr)
            _write(
                chosen,
                f"**Could not compare**\n\n```text\n{error}\n```\n",
                {"exit": _CANNOT_COMPARE, "conclusion": str(error)},
            )
            return _CANNOT_COMPARE
    print(f"\n{as_text(comparison, strict=chosen.strict)}")
    _write(chosen, as_markdown(comparison, strict=chosen.strict), as_json(comparison, strict=chosen.strict))
    if chosen.figure:
        from benchmarks.gate.figure import draw  # noqa: PLC0415  # matplotlib takes a second, only where it is asked for

        draw(comparison, chosen.figure)
    return comparison.exit_status(strict=chosen.strict)


def _write(chosen: argparse.Namespace, text: str, record: Mapping[str, Any]) -> None:
    if chosen.summary:
        chosen.summary.write_text(text, encoding="utf-8")
    if chosen.json:
        origin = {"machine": environment.machine(), "versions": environment.versions()}
        chosen.json.write_text(json.dumps({**record, **origin}, indent=1), encoding="utf-8")


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception, and do not exit with Python's status 1, which would mean a regression."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    traceback.print_exception(kind, error, None if interrupted else trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED if interrupted else _CANNOT_COMPARE)


if __name__ == "__main__":
    sys.excepthook = _fail
    sys.exit(main())
