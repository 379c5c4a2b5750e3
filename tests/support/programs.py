"""Programs in their own processes, forked from one that has imported their common modules.

That process is itself forked from Python's fork server, which tests of workers need too, so that torch is imported once
for both. A program is code for ``python -c``: its names are in ``__main__``, and it starts threads and libraries of
formats itself.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from multiprocessing import forkserver, process, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[2]


class Programs:
    """Starts programs: has a connection to the process that forks them, and a folder for their output."""

    def __init__(self, requests: Connection, folder: Path) -> None:
        self._requests, self._folder, self._numbers = requests, folder, count()

    def start(
        self,
        code: str,
        *words: object,
        timeout_s: int = 120,
        env: Mapping[str, str] | None = None,
        has_workers: bool = False,
    ) -> Program:
        """Start a program with ``words`` as its arguments; SIGALRM ends it after ``timeout_s``.

        ``has_workers`` spares the server that forks its first workers the import of torch.
        """
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        for name in ("pid", "status"):
            os.mkfifo(folder / name)
        request = {"code": code, "words": list(map(str, words)), "folder": str(folder), "timeout_s": timeout_s}
        request |= {"env": dict(env or {}), "has_workers": has_workers}
        self._requests.send(request)
        return Program(folder)

    def prepare(self, module: str) -> None:
        """Import a module once for all programs that start later."""
        self._requests.send({"module": module})

    def run(
        self, code: str, *words: object, timeout_s: int = 120, has_workers: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, and return its exit status and output."""
        return self.start(code, *words, timeout_s=timeout_s, has_workers=has_workers).wait()


class Program:
    """A started program, whose output is in its folder.

    Attributes
    ----------
    pid
        Its process id, for signals. It is not a child of the caller.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = int((folder / "pid").read_text())

    def first_line(self, timeout_s: float = 120) -> str:
        """Return the first line of the output; without one at exit or timeout, return the output."""
        end_s = time.monotonic() + timeout_s
        while (
            "\n" not in (output := self._read_stream("out"))
            and psutil.pid_exists(self.pid)
            and time.monotonic() < end_s
        ):
            time.sleep(0.01)
        return output.partition("\n")[0]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return the exit status and output, after the program has ended."""
        status = int((self._folder / "status").read_text())
        return subprocess.CompletedProcess([], status, self._read_stream("out"), self._read_stream("err"))

    def _read_stream(self, name: str) -> str:
        file = self._folder / name
        return file.read_text() if file.exists() else ""


@contextmanager
def forked_programs(folder: Path) -> Iterator[Programs]:
    """Yield the process that starts programs, which ends on leaving."""
    context = multiprocessing.get_context("forkserver")
    received, requests = context.Pipe(duplex=False)
    started = context.Process(target=_serve, args=(received,))
    started.start()
    received.close()
    with requests:
        yield Programs(requests, folder)
    started.join()


def _serve(requests: Connection) -> None:
    """Fork one program per request, without waiting for any."""
    import omearrow_ds.loader.dataloader  # noqa: F401

    _detach()
    gc.freeze()  # Otherwise each program would collect the imports of this process at its end, for half a second.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while request := _next_request(requests):
        if "module" in request:
            importlib.import_module(request["module"])
            gc.freeze()
        elif not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(**request)
    os._exit(0)  # Skip the cleanup of torch and others, which takes a second.


def _next_request(requests: Connection) -> dict[str, Any] | None:
    try:
        request: dict[str, Any] = requests.recv()
    except EOFError:
        return None
    return request


def _detach() -> None:
    """Make this process look like one that the user started: without parent, fork server and resource tracker."""
    os.chdir(ROOT)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    sys.warnoptions[:] = ["ignore"]
    warnings.simplefilter("ignore")
    server = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # Programs must not keep the fork server alive.
    server.__init__()
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)  # That of the tests would remove what programs leave only after the last test.
    tracker._fd = None
    own = multiprocessing.current_process()
    own._identity, own._parent_pid, own.name = (), None, "MainProcess"
    process._parent_process = None


def _run(code: str, words: list[str], folder: str, timeout_s: int, env: dict[str, str], has_workers: bool) -> None:
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
    if has_workers:
        _fork_server()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    status: object = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(module))
    except SystemExit as exited:
        status = exited.code or 0
        if not isinstance(status, int):
            raise
    _exit(status)


def _fork_server() -> None:
    """Fork a process that serves as the first fork server of multiprocessing, in place of a new Python.

    Here no thread has been started, and torch is imported.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        message, received, *_ = socket.recv_fds(theirs, 2**16, 16)
        if message:  # Otherwise the program has ended.
            code, *numbers = json.loads(message)
            high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500) for descriptor in received]  # None is overwritten.
            for descriptor, number in zip(high, numbers, strict=True):
                os.dup2(descriptor, number)
            os.setpgid(0, os.getpgid(os.getppid()))  # Workers receive signals of the terminal.
            exec(code, {})
        os._exit(0)
    theirs.close()
    spawn = util.spawnv_passfds

    def spawn_or_use(path: object, arguments: list[str], descriptors: list[int]) -> int:
        if ours.fileno() < 0 or "multiprocessing.forkserver" not in arguments[-1]:
            return spawn(path, arguments, descriptors)
        with ours:
            socket.send_fds(ours, [json.dumps([arguments[-1], *descriptors]).encode()], descriptors)
        return pid

    util.spawnv_passfds = spawn_or_use


def _exit(status: int) -> NoReturn:
    """Exit as Python does, but do not free each object and module, which takes 0.4 s of CPU time with torch."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)
