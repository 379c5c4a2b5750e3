"""Thousands of seeded damages to stored collections. Each must give identical pixels or an error of the package.

``python -m tests.adversarial.damage --format parquet --mutations 2000 --seed 1`` damages copies of small collections of
a format, in each encoding and with each compression, and reads each copy in every way. A child process with limited
time and memory reads many copies, and is restarted when it dies. Children are forks of a server that has imported torch
but started nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.strategies import NAMES

CHILD = "tests.adversarial.damaged_child:main"
LIMIT_S = 30.0
DATA_LIMIT_BYTES = 1 << 30
RSS_LIMIT_BYTES = 512 << 20
STARTING_S = 120.0
PER_CHILD = 400
OUTCOMES = ("identical", "error", "changed")
FAULTS = ("unverified", "foreign", "unnamed", "crash", "hang", "memory")


@dataclass
class Tally:
    """Results of the mutations of one format.

    Attributes
    ----------
    name
        Name of the format.
    outcomes
        Number of mutations by the result of reading without verification, one of `OUTCOMES`.
    changed
        Number of mutations without an error by the part of the data that they changed.
    faults
        Reports of mutations that broke a guarantee; ``unverified`` is the guarantee of checksums.
    """

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    caught: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(self.outcomes.values()) + sum(fault["fault"] in ("crash", "hang") for fault in self.faults)

    def add(self, report: dict[str, Any]) -> None:
        self.outcomes[report["outcome"]] += 1
        self.changed.update(report["changed"])
        self.caught += report["caught"]
        self.slowest_s = max(self.slowest_s, report["seconds"])
        self.largest_bytes = max(self.largest_bytes, report["peak_bytes"])
        self.faults += [{**report, "fault": fault} for fault in report["faults"]]


def run(name: str, mutations: int, seed: int, *, limit_s: float = LIMIT_S, show: bool = False) -> Tally:
    """Damage the collections of a format ``mutations`` times, and return the results."""
    tally = Tally(name)
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        Path(folder).chmod(0o755)
        done = 0
        while done < mutations:
            stop = min(mutations, done + PER_CHILD)
            for number, report in _child(folder, name, (done, stop), seed, limit_s):
                tally.add(report) if "outcome" in report else tally.faults.append(report)
                done = number + 1
                if show and (report.get("faults") or report.get("fault")):
                    print(json.dumps(report), flush=True)
    return tally


def _child(
    folder: str, name: str, numbers: tuple[int, int], seed: int, limit_s: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and report of each mutation of one child; the last report is of an unplanned end."""
    reading, writing = Pipe(duplex=False)
    output = Path(folder, "stderr")
    child = start(output, CHILD, Path(folder), name, *numbers, seed, writing)
    writing.close()
    begun: dict[str, Any] = {}
    number = numbers[0]
    try:
        with reading, os.fdopen(os.dup(reading.fileno()), "rb", buffering=0) as pipe:
            for line in _lines(pipe, limit_s):
                if line is None:
                    child.kill()
                    yield number, {"fault": "hang", **begun}
                    return
                report = json.loads(line)
                if "seconds" in report:
                    yield number, report
                    number, begun = number + 1, {}
                elif report:
                    begun = report
        child.join(limit_s)
        status = child.exitcode
        if number < numbers[1]:
            if not begun:
                raise RuntimeError(f"the child of {name} ended with {status} between mutations:\n{_tail(output)}")
            ending = signal.Signals(-status).name if status and status < 0 else f"exit status {status}"
            yield number, {"fault": "crash", **begun, "why": ending, "said": _tail(output)}
    finally:
        child.kill()
        child.join()


def start(output: Path, function: str, *arguments: Any) -> ForkServerProcess:
    """Start a child that calls ``module:function`` and writes its output to the file ``output``."""
    context: ForkServerContext = get_context("forkserver")
    context.set_forkserver_preload(["omearrow_ds.dataset.dataset", "tests.adversarial.damaged_child"])
    child = context.Process(target=_called, args=(output, function, arguments))
    child.start()
    return child


def _called(output: Path, function: str, arguments: tuple[Any, ...]) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.environ["RUST_BACKTRACE"] = "0"
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(*arguments)


def _lines(pipe: Any, limit_s: float) -> Iterator[bytes | None]:
    """Yield lines until one is late, then None and no more. The first line has a longer limit."""
    rest, wait_s = b"", STARTING_S
    while True:
        if not select.select([pipe], [], [], wait_s)[0]:
            yield None
            return
        wait_s = limit_s
        new = pipe.read(65536)
        if not new:
            return
        *lines, rest = (rest + new).split(b"\n")
        yield from lines


def _tail(file: Path) -> str:
    """Return the last output of a child, without backtraces."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if not re.match(r"\s+(\d+:|at )", line)]
    return "\n".join(lines)[-1500:]


def table(tallies: Sequence[Tally]) -> str:
    """Return the results as a Markdown table."""
    head = ["format", "mutations", *OUTCOMES, "of them pixels", "caught by checksum", "crash", "hang", "foreign error"]
    rows = [head, ["---"] * len(head)]
    for tally in tallies:
        faults = Counter(fault["fault"] for fault in tally.faults)
        counts = [
            tally.total,
            *(tally.outcomes[outcome] for outcome in OUTCOMES),
            tally.changed["pixels"],
            tally.caught,
        ]
        rows.append([tally.name, *map(str, [*counts, faults["crash"], faults["hang"], faults["foreign"]])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Run from the command line; return 1 if a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=NAMES, action="append", help="by default all, one after the other")
    parser.add_argument("--mutations", type=int, default=2000, help="number of mutations per format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for one mutation")
    parser.add_argument("--json", type=Path, help="file for every fault")
    options = parser.parse_args()
    tallies = []
    for name in options.format or NAMES:
        begun = time.monotonic()
        tally = run(name, options.mutations, options.seed, limit_s=options.limit_s, show=True)
        tallies.append(tally)
        if options.json:
            options.json.write_text(json.dumps([vars(done) for done in tallies], indent=1))
        took_s = time.monotonic() - begun
        print(
            f"{name}: {tally.total} in {took_s:.0f} s, slowest {tally.slowest_s:.1f} s, "
            f"{tally.largest_bytes >> 20} MiB at most, {dict(tally.outcomes)}, changed {dict(tally.changed)}, "
            f"{dict(Counter(fault['fault'] for fault in tally.faults))}",
            flush=True,
        )
    print(table(tallies))
    return int(any(tally.faults for tally in tallies))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
