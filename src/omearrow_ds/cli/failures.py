"""Errors of commands: one line on stderr, and an exit code.

0 success · 1 an error, in one line · 2 an invalid command line (from click) · 130 stopped by Ctrl-C, or 128 plus the
number of the signal. If the reader of a pipe ends (``| head``), the command ends without a message.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import FrameType
from typing import Any, Self

import click

from omearrow_ds import text
from omearrow_ds.errors import OMEArrowDSError, show_keyword

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_STOP_S = 2.0
_AGAIN_S = 0.05
_MOST_PUT_OFF = 200  # At most 200 times, which takes ten seconds.
_IMPORTS = "<frozen importlib._bootstrap>"  # File name of the frames of an import.
_OWN = (OMEArrowDSError, click.ClickException, click.exceptions.Exit, click.Abort)


class Failure(click.ClickException):
    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.strip().splitlines()))

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=True)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn expected errors and stops of a command into a line and an exit code, and warnings into lines."""
    with Stops() as stops, warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            with naming():
                yield
        except BaseException as error:
            stop: BaseException | None = error
            while stop is not None and not isinstance(stop, KeyboardInterrupt):
                stop = stop.__cause__  # Imports of extension modules wrap a stop in another error.
            if stop is not None:
                click.echo(f"stopped; {str(stop) or 'nothing was left half-written'}", err=True)
                # If a stop interrupts an eval of a string (as in every namedtuple), Python would end the process by
                # SIGINT instead of the exit code, unless a later eval completes.
                eval("None")  # noqa: S307
                raise click.exceptions.Exit(128 + stops.number) from None
            raise


def _show_warning(message: Warning | str, *_location: Any, **_source: Any) -> None:
    click.echo(f"warning: {_show_text(_flags(), str(message))}", err=True)


@contextmanager
def naming(**flags: str) -> Iterator[None]:
    """Turn expected errors into failures of one line each, with flags of the command instead of arguments.

    ``flags`` are those that have another name than their argument.
    """
    try:
        yield
    except OMEArrowDSError as error:
        raise Failure(_text_of(error, {**_flags(), **flags})) from error
    except UnicodeEncodeError as error:  # A path that is not UTF-8, which Arrow and other libraries reject.
        raise Failure(f"{error.object!a}: the name is not valid UTF-8; rename it") from error
    except MemoryError as error:
        raise Failure(f"out of memory: {error}" if str(error) else "out of memory") from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # The reader of the pipe ended; click exits without a message.
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        problem = str(error) or type(error).__name__
        raise Failure(": ".join([*names, error.strerror]) if error.strerror else problem) from error


def _text_of(error: BaseException, flags: Mapping[str, str] | None = None) -> str:
    """Return the message of an error with command-line flags instead of arguments."""
    message = str(error)
    if "Traceback" in message:  # From a worker process; only the last line states the error.
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        kind = type(error).__name__
        known = [line for line in lines if line.partition(": ")[0].rpartition(".")[2] == kind]
        return known[-1].partition(": ")[2] if known else lines[-1]
    if flags is None or not isinstance(error, OMEArrowDSError):
        return message
    return error.describe(partial(_show_flag, flags), partial(_show_text, flags))


def _show_flag(flags: Mapping[str, str], option: str, value: Any) -> str:
    """Return an option as on the command line: ``--level -1``."""
    if is_dataclass(value):  # A `Storage`, each field of which is a flag.
        prefix = option.removesuffix("storage").replace("_", "-")
        return " ".join(text.as_flags(vars(value))).replace("--", f"--{prefix}")
    if option not in flags:
        return show_keyword(option, value)
    if value is True or value is ...:
        return flags[option]
    if isinstance(value, list | tuple):
        between = "," if any(isinstance(each, str) for each in value) else "/" if option == "task" else "x"
        return f"{flags[option]} {between.join(map(str, value))}"
    return f"{flags[option]} {show_keyword('', value).removeprefix('=')}"


def _show_text(flags: Mapping[str, str], message: str) -> str:
    """Return a text in which flags replace arguments, including ``target_storage=Storage(endpoint=)``."""

    def shown(match: re.Match[str]) -> str:
        start, name, field = match.groups()
        name = f"{name.removesuffix('storage')}{field}" if field else name
        space = " " * (message[match.end() : match.end() + 1] not in {*" ,.;:)", ""})
        return f"{start}{flags[name]}{space}" if name in flags else match[0]

    return re.sub(r"(?<![^ ])(\(?)(\w+)=(?:Storage\((\w+)=(?:True)?\)?|)(?:True)?", shown, message)


def _flags() -> dict[str, str]:
    """Return the flags and arguments of the running command by parameter name."""
    context = click.get_current_context(silent=True)
    command = context and context.command
    if context and isinstance(command, click.Group):
        command = command.get_command(context, context.invoked_subcommand or "")
    params = command.params if command else []
    return {str(p.name): max(p.opts, key=len) if isinstance(p, click.Option) else p.human_readable_name for p in params}


class Stops(ExitStack):
    """Context in which SIGTERM and SIGHUP stop the command like Ctrl-C, so that partial output is removed.

    A signal that is ignored from the start of the process (``nohup``, a background job) stays ignored. A second signal
    within two seconds is ignored, so that it does not interrupt the cleanup. Python drops a signal in a finalizer or a
    weak reference callback, which every import has; it is then sent again. A signal during an import is also sent
    again, for at most ten seconds, because it would make extension modules end the process.
    """

    number: int = signal.SIGINT
    _last_s = -_SAME_STOP_S
    _times_put_off = 0

    def __enter__(self) -> Self:
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                try:
                    signal.signal(number, self._stop)
                except ValueError:  # Only the main thread receives signals.
                    return self
                self.callback(signal.signal, number, handler)
        self._report_dropped, sys.unraisablehook = sys.unraisablehook, self._again
        self.callback(setattr, sys, "unraisablehook", self._report_dropped)
        return self

    def _again(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._put_off()
        else:
            self._report_dropped(dropped)

    def _put_off(self) -> None:
        self._last_s = -_SAME_STOP_S
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), self.number))
        again.daemon = True
        again.start()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        same, self._last_s = now_s - self._last_s < _SAME_STOP_S, now_s
        if same:
            return
        self.number = number
        if self._times_put_off == _MOST_PUT_OFF or not _is_importing(frame):
            self._times_put_off = 0
            raise KeyboardInterrupt
        self._times_put_off += 1
        self._put_off()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORTS:
        frame = frame.f_back
    return frame is not None


@contextmanager
def calling(function: str, *, show_traceback: bool = False) -> Iterator[None]:
    """Show errors of a user function in one line, or with a traceback; those of this package are already clear."""
    try:
        yield
    except Exception as error:
        if function and not isinstance(error, _OWN):
            if show_traceback:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # Without this function.
                sys.excepthook(type(error), error, error.__traceback__)
            summary = f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")
            hint = "" if show_traceback else " (--traceback shows where)"
            raise Failure(f"{function} raised {summary}{hint}") from error
        raise
