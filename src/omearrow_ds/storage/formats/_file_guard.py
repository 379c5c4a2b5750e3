"""`FileGuard`: errors of a collection, and the check that it is still the one that was opened first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._urls import Url

Fingerprint = tuple[int, ...]


class FileGuard:
    """Translates errors of a format's library, and detects that a collection was replaced or changed.

    As a context around opening a file, it raises an error if the file is not the one that was opened first. For this,
    it compares the status before and after opening, because a replaced file does not come back. It refers to no source,
    so that a source is freed without the garbage collector. The status of ``tracked``, by default ``path``, shows
    whether the collection was replaced; at a URL, the client of the server detects changes.
    """

    files: Sequence[str] = ()  # Further files, existing or not, that define the collection.
    # Returns the error of a library that failed for a reason other than a damaged file, else None.
    explain: Callable[[FileGuard, BaseException], OMEArrowDSError | None] | None = None
    fingerprint: Fingerprint | None = None  # State of the files when they were opened first.

    def __init__(
        self, path: Path, label: str = "", errors: tuple[type[Exception], ...] = (), *, tracked: Path | None = None
    ) -> None:
        self.path, self.label, self._errors = path, label, errors
        self._tracked = None if isinstance(path, Url) else str(tracked or path)

    def reading(self, path: Path | None = None) -> translate_errors:
        """Return a context that converts errors of the library to a `FormatError` for ``path``, by default its own."""
        return translate_errors(path or self.path, self.label, self._errors, self.failure)

    def interpreting(self, path: Path | None = None, label: str = "") -> translate_errors:
        """Return `reading` that also converts errors of our own code for malformed values."""
        return translate_errors(path or self.path, label or self.label, (*self._errors, *MALFORMED), self.failure)

    def __enter__(self) -> None:
        if self.fingerprint is None:
            self.refuse_changed()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):  # A replaced file may also cause an error.
            self.refuse_changed()
        if error is not None:
            self.reading().__exit__(kind, error, trace)

    def failure(self, error: BaseException) -> OMEArrowDSError | None:
        """Return the error of a library that failed for a reason other than a damaged file, else None."""
        return self.find_change() if self.explain is None else self.explain(self, error)

    def find_change(self) -> OMEArrowDSError | None:
        """Return the error of a collection that was replaced, changed or removed, else None."""
        try:
            self.refuse_changed()
        except OMEArrowDSError as changed:
            return changed
        return None

    def refuse_changed(self) -> None:
        """Raise an error if the collection was replaced, changed or removed since the first call."""
        if self._tracked is None:
            return
        try:
            status = os.stat(self._tracked)  # noqa: PTH116  # at every read: pathlib would double its cost
        except FileNotFoundError:
            raise MissingPathError(
                "was removed since it was opened", path=self.path, remedy="restore it, and open it again"
            ) from None
        fingerprint: Fingerprint = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode):
            fingerprint = (*fingerprint, status.st_size, status.st_mtime_ns)
            if not stat.S_ISREG(status.st_mode):
                refuse_special(self.path)
        for file in self.files:
            try:
                status = os.stat(file)  # noqa: PTH116  # At every read.
                fingerprint += (status.st_ino, status.st_size, status.st_mtime_ns)
            except (FileNotFoundError, NotADirectoryError):
                fingerprint += (0, 0, 0)
            if self.fingerprint is None:
                refuse_special(file)
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        elif fingerprint != self.fingerprint:
            self.compare(fingerprint)

    def compare(self, fingerprint: Fingerprint) -> None:
        """Record the first fingerprint; raise `FormatError` if another one differs."""
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        if fingerprint != self.fingerprint:
            problem = "was replaced or changed since it was opened"
            raise FormatError(problem, path=self.path, remedy="open it again")
