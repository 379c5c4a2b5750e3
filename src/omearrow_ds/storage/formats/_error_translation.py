"""Conversion of library errors to our own, which name the path and a remedy."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from omearrow_ds.errors import FormatError, OMEArrowDSError

# Errors of code that trusts a damaged header; invalid UTF-8 is a ValueError too.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError, OSError)


class translate_errors:  # noqa: N801  # reads as a phrase: with translate_errors(path, "Parquet", errors):
    """Context that converts ``errors`` and panics of Rust libraries to a `FormatError` that names ``path``.

    ``failure`` returns the error for another cause than damage, such as a replaced file, else None. Each read enters
    this context, for which a `contextlib.contextmanager` would take five times as long.
    """

    __slots__ = ("_errors", "_failure", "_label", "_path")

    def __init__(
        self,
        path: Path,
        label: str,
        errors: tuple[type[Exception], ...],
        failure: Callable[[BaseException], OMEArrowDSError | None] | None = None,
    ) -> None:
        self._path, self._label, self._errors, self._failure = path, label, errors, failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OMEArrowDSError):
            error.path = error.path or str(self._path)
        if error is None or isinstance(error, OMEArrowDSError):
            return
        if is_stop(error):
            raise KeyboardInterrupt from error
        if isinstance(error, self._errors) or is_panic(error):
            failure = None if self._failure is None else self._failure(error)
            failure = failure or damaged(self._path, self._label, error)
            failure.path = failure.path or str(self._path)
            raise failure from error


def is_stop(error: BaseException) -> bool:
    """Whether DuckDB raised an error because the user pressed Ctrl-C."""
    return str(error) in ("Query interrupted", "INTERRUPT Error: Interrupted!")


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library written in Rust, whose class is not an `Exception`."""
    return type(error).__name__ == "PanicException"


def refuse_odd_name(path: Path) -> None:
    """Raise `FormatError` if a path is not valid UTF-8, which half of the libraries cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise damaged(path, "a path", error) from None


def refuse(path: str | os.PathLike[str], problem: str, remedy: str) -> NoReturn:
    raise FormatError(problem, path=path, remedy=remedy)


def damaged(path: Path, label: str, error: BaseException) -> FormatError:
    """Return the error for a file that its library cannot read."""
    if isinstance(error, UnicodeEncodeError):
        return FormatError(f"{str(path)!a}: the name is not valid UTF-8; rename it")
    if isinstance(error, PermissionError):
        return FormatError(f"{path}: cannot be read: {error.strerror} ({error.filename}); ask its owner for permission")
    if os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        problem = f"cannot be opened: this process reached its limit of {limit:,} open files"
        return FormatError(f"{path}: {problem}; raise it with ulimit -n")
    remedy = "it is damaged, incomplete or in another format, restore it"
    return FormatError(f"{path}: cannot be read as {label}: {first_line(error)}; {remedy}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without a period: some libraries add a native backtrace."""
    return str(error).split("\n", maxsplit=1)[0].rstrip(".")
