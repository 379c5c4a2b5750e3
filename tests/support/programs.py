"""Programs that are processes of their own, forked from one that has imported what most of them would import.

``python -m tests.support.programs`` reads a program a line, and starts each at once. A program is what ``python -c``
takes: its names are those of ``__main__``, and what it uses first (threads, libraries of formats) is its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


class Programs:
    """Where programs are asked for: the process that forks them, and a folder for what they say."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._numbers = process, folder, count()

    def start(self, code: str, *words: object, timeout_s: int = 120, env: Mapping[str, str] | None = None) -> Program:
        """Start a program with ``words`` as its arguments; SIGALRM ends it when its time is up."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        for name in ("pid", "status"):
            os.mkfifo(folder / name)
        asked = {"code": code, "words": list(map(str, words)), "folder": str(folder), "timeout_s": timeout_s}
        asked |= {"env": dict(env or {})}
        self._ask(asked)
        return Program(folder)

    def _ask(self, asked: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def prepare(self, module: str) -> None:
        """Import a module that several programs will, once for those that are started from here on."""
        self._ask({"module": module})

    def run(self, code: str, *words: object, timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
        """Run a program, and return its exit status and what it said."""
        return self.start(code, *words, timeout_s=timeout_s).wait()


class Program:
    """A program that was started; its folder has what it says.

    Attributes
    ----------
    pid
        Its number, for signals; it is no child of who started it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = int((folder / "pid").read_text())

    def first_line(self, timeout_s: float = 120) -> str:
        """Return the first line that it prints, once it has; what it has printed, once it has ended or time is up."""
        end_s = time.monotonic() + timeout_s
        while "\n" not in (said := self._said("out")) and psutil.pid_exists(self.pid) and time.monotonic() < end_s:
            time.sleep(0.01)
        return said.partition("\n")[0]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return its exit status and what it said, once it has ended."""
        status = int((self._folder / "status").read_text())
        return subprocess.CompletedProcess([], status, self._said("out"), self._said("err"))

    def _said(self, name: str) -> str:
        file = self._folder / name
        return file.read_text() if file.exists() else ""


@contextmanager
def forked_programs(folder: Path) -> Iterator[Programs]:
    """Give the programs of one process, which ends on leaving."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True) as process:
        yield Programs(process, folder)


def main() -> None:
    """Fork a program a line; nobody waits for who waits for it."""
    import matplotlib.figure  # noqa: F401  # this and pytest for runs of the benchmarks
    import pytest  # noqa: F401

    import omearrow_ds.loader.dataloader  # noqa: F401

    gc.freeze()  # or each program would go through all that is imported here once more at its end: half a second
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        if "module" in asked:
            importlib.import_module(asked["module"])
            gc.freeze()
        elif not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(**asked)
    os._exit(0)  # what torch and others do at an end takes a second, and there is nothing to keep


def _run(code: str, words: list[str], folder: str, timeout_s: int, env: dict[str, str]) -> None:
    program = os.fork()
    if program:
        Path(folder, "pid").write_text(str(program))
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        Path(folder, "status").write_text(str(status))
        os._exit(0)
    signal.alarm(timeout_s)
    for number, file in enumerate((os.devnull, f"{folder}/out", f"{folder}/err")):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["-c", *words]
    os.environ.update(env)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(module))
    sys.exit()


if __name__ == "__main__":
    main()
