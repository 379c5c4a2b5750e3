"""Processes of the gate, each in its own process group that ends with the call."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from benchmarks.gate.baton import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_TIMEOUT_S = 1800.0  # A process that takes longer hangs.
_GRACE_S = 5.0  # Time from SIGTERM to SIGKILL.
_SHOWN_LINES = 30


class CannotCompareError(Exception):
    """The sides cannot be compared; the message states the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command to run: program and arguments, working directory, and log file of its output.

    The process and its children are pinned to ``core`` if the system can; None means all cores.
    """

    words: Sequence[str]
    folder: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    core: int | None = None


def run(command: Command) -> int:
    """Run one process and return its exit status.

    Raises
    ------
    CannotCompareError
        If it does not end in half an hour.
    """
    return run_at_once(command)[0]


def run_at_once(*commands: Command) -> list[int]:
    """Run processes concurrently and return their exit statuses; raises the errors of `run`."""
    until_s = monotonic() + _TIMEOUT_S
    with ExitStack() as stack:
        processes = [stack.enter_context(running(command)) for command in commands]
        return [_status(process, command, until_s) for process, command in zip(processes, commands, strict=True)]


def run_in_turns(first: Command, second: Command) -> tuple[int, int]:
    """Run two processes that alternate by `benchmarks.gate.baton`, and return their exit statuses.

    Raises
    ------
    CannotCompareError
        If they do not end in half an hour.
    """
    until_s = monotonic() + _TIMEOUT_S
    forth, back = os.pipe(), os.pipe()
    with ExitStack() as stack:
        try:
            one = stack.enter_context(running(first, (back[0], forth[1], "first")))
            two = stack.enter_context(running(second, (forth[0], back[1], "second")))
        finally:
            for end in (*forth, *back):
                os.close(end)  # The processes have inherited copies.
        return _status(one, first, until_s), _status(two, second, until_s)


def _status(process: subprocess.Popen[bytes], command: Command, until_s: float) -> int:
    try:
        return process.wait(max(0.0, until_s - monotonic()))
    except subprocess.TimeoutExpired:
        words = " ".join(command.words)
        raise CannotCompareError(f"{words} did not end within {_TIMEOUT_S:.0f} s\n{end_of(command.log)}") from None


@contextmanager
def running(command: Command, baton: tuple[int, int, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process; on leaving, end its process group.

    ``baton`` has the ends of its pipes, and whether it is first or second, for `benchmarks.gate.baton`.
    """
    handed = {VARIABLE: ",".join(map(str, baton))} if baton else {}
    with command.log.open("wb") as output:
        with _kept_on(command.core):
            process = subprocess.Popen(  # noqa: S603  # The arguments are our own.
                command.words,
                cwd=command.folder,
                env={**command.environment, **handed},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the group.
                pass_fds=baton[:2] if baton else (),
            )
        try:
            yield process
        finally:
            _end_group(process)


@contextmanager
def _kept_on(core: int | None) -> Iterator[None]:
    """Pin this thread, and so its child processes, to a core."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process group, by SIGTERM first and then by SIGKILL."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(f"    {line}" for line in lines)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so child processes and temporary files are cleaned up."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
