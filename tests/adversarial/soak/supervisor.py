"""Supervisor of child processes that run cases: ends hanging ones, continues after crashes, and collects reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import psutil

_DUMPING_S = 3.0  # Time that a process has to write its stacks.
_LINES_KEPT = 400
# glibc keeps up to 64 MiB of freed memory at the end of each arena, with up to 8 arenas per core, which malloc_trim
# does not release. Here glibc keeps almost nothing, so growing memory is memory in use.
_GIVING_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}


class Supervisor:
    """Runs cases in child processes, and collects their results.

    Parameters
    ----------
    command
        Command of a child, to which its pipe's number, the seed, the first case's number and ``formats`` are added.
    seed, formats
        Arguments of the child.
    limit_s
        Time limit of a case. The error has the stacks of all threads and workers.
    """

    def __init__(self, command: Sequence[str], seed: int, formats: Sequence[str] = (), *, limit_s: float = 180) -> None:
        self.command, self.seed, self.formats, self.limit_s = list(command), seed, list(formats), limit_s
        self.counts: Counter[str] = Counter()
        self.errors: list[dict[str, Any]] = []
        self.series: list[list[dict[str, Any]]] = []  # Per child, its resources after each case.
        self.cases = 0
        self.begun_s = time.monotonic()

    @property
    def samples(self) -> int:
        """Number of checked samples."""
        return sum(count for name, count in self.counts.items() if name.startswith("samples: "))

    def run(self, first: int, *, until_s: float | None, cases: int | None) -> None:
        """Run cases from number ``first`` on, until ``until_s`` of the monotonic clock or for ``cases`` cases."""
        number = first
        last = None if cases is None else first + cases
        while not self._over(number, until_s, last):
            number = self._child(number, until_s, last)

    def _over(self, number: int, until_s: float | None, last: int | None) -> bool:
        return (until_s is not None and time.monotonic() >= until_s) or (last is not None and number >= last)

    def _child(self, first: int, until_s: float | None, last: int | None) -> int:
        """Run one child until all cases are done or it fails, and return the number of the next case."""
        self.series.append([])
        reading, writing = os.pipe()
        environment = {**os.environ, **_GIVING_BACK, "PYTHONFAULTHANDLER": "1"}
        with tempfile.TemporaryDirectory(prefix="soak-") as folder, tempfile.TemporaryFile("w+b") as printed:
            child = subprocess.Popen(
                [*self.command, str(writing), str(self.seed), str(first), *self.formats],
                env={**environment, "TMPDIR": folder},
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
            os.close(writing)
            try:
                with os.fdopen(reading, "rb", buffering=0) as pipe:
                    return self._listen(child, pipe, printed, first, until_s, last)
            finally:
                _end(child)

    def _listen(
        self,
        child: subprocess.Popen[bytes],
        pipe: Any,
        printed: Any,
        first: int,
        until_s: float | None,
        last: int | None,
    ) -> int:
        number, begun_s, rest = first, time.monotonic(), b""
        while True:
            if not wait([pipe], timeout=max(0.0, begun_s + self.limit_s - time.monotonic())):
                _dump_stacks(child)
                self._failed(number, f"hangs: it took more than {self.limit_s:.0f} s", printed)
                return number + 1
            data = pipe.read(65_536)
            if not data:
                status = child.wait()
                how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
                self._failed(number, f"the process ended with {how}", printed)
                return number + 1
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                if "begun" in report:
                    number, begun_s = report["begun"], time.monotonic()
                else:
                    self._ended(report)
                    number += 1
                    if self._over(number, until_s, last):
                        return number

    def _ended(self, report: dict[str, Any]) -> None:
        self.cases += 1
        self.counts.update(report["counts"])
        minutes = (time.monotonic() - self.begun_s) / 60
        entry = {"minutes": minutes, "samples": self.samples, "number": report["ended"], "took_s": report["took_s"]}
        self.series[-1].append({**entry, **report["held"]})
        if report["error"] is not None:
            summary = report["error"]["traceback"].strip().split("\n")[-1]
            self._add_error(report["ended"], summary, **report["error"])

    def _failed(self, number: int, summary: str, printed: Any) -> None:
        printed.seek(0)
        lines = printed.read().decode(errors="replace").splitlines()
        self._add_error(number, summary, printed=lines[-_LINES_KEPT:])

    def _add_error(self, number: int, summary: str, **more: Any) -> None:
        again = f"python -m tests.adversarial.soak --seed {self.seed} --first {number} --cases 1"
        self.errors.append({"number": number, "what": summary, "again": again, **more})
        print(f"case {number}: {summary}\n    {again}", file=sys.stderr, flush=True)


def _dump_stacks(child: subprocess.Popen[bytes]) -> None:
    """Let workers and then the child write the stacks of all threads, as faulthandler does at SIGABRT."""
    with suppress(psutil.NoSuchProcess):
        for worker in psutil.Process(child.pid).children(recursive=True):
            if "resource_tracker" not in " ".join(worker.cmdline()):
                worker.send_signal(signal.SIGABRT)
    time.sleep(_DUMPING_S / 3)
    child.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_DUMPING_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def default_command() -> list[str]:
    """Return the command that starts a child with this Python."""
    return [sys.executable, "-m", f"{__package__}.child"]
