"""Process-local handles, opened at their first use and kept unused in a forked child; and memory-mapped files."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Generic, TypeVar

from omearrow_ds.errors import FormatError
from omearrow_ds.resources import read_ahead_bytes

LOOK_NS = 10**6  # time between two checks of a file, if a check would cost more than reading an image
Handle = TypeVar("Handle")
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class ProcessLocal(Generic[Handle]):
    """A handle opened at its first use in each process.

    A forked child opens its own. It keeps the inherited handle, unused and unclosed, until it exits: Lance and DuckDB
    crash if a child closes its parent's handle.

    A bound method as opener is referenced weakly. Otherwise, its owner, which owns this handle, would only be freed by
    the garbage collector, together with files, connections and their threads.
    """

    _owner: tuple[int, Handle] | None = None  # also set on the class: Ctrl-C may come before an instance has its own

    def __init__(self, opener: Callable[[], Handle]) -> None:
        method = weakref.WeakMethod(opener) if inspect.ismethod(opener) else None
        self._opener: Callable[[], Callable[[], Handle] | None] = method or (lambda: opener)

    def get(self) -> Handle:
        """Return this process's handle, and open it at the first use."""
        owner = self._owner  # read once: another thread may close it
        if owner is not None and owner[0] == os.getpid():
            return owner[1]
        if owner is not None:
            _keep_for_ever(owner)
        opener = self._opener()
        if opener is None:
            raise ReferenceError("what opens the handle is gone")
        handle = opener()
        self._owner = (os.getpid(), handle)
        return handle

    def close(self) -> None:
        """Drop this process's handle, if it is open; a later `get` opens another.

        It is closed with its last reference, which may be that of a reading thread.
        """
        owner = self._owner
        if owner is not None and owner[0] == os.getpid():
            self._owner = None

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Callable[[object], object] = _keep_for_ever) -> None:
        # At interpreter exit, this module may already be cleared: the default arguments keep the functions.
        if self._owner is not None and self._owner[0] != getpid():
            keep(self._owner)


class Mapping:
    """A memory-mapped file; if it is truncated, touching the missing bytes ends the process (SIGBUS).

    Overwritten bytes appear in the mapping. A file that replaces it at its path does not.

    Attributes
    ----------
    file
        The mapping, a buffer for Arrow and NumPy.
    read_ahead_bytes
        Read-ahead of the disk: the bytes that one page fault reads.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._path, self._size_bytes, self.read_ahead_bytes = str(path), len(self.file), read_ahead_bytes(status.st_dev)
        self._file_number, self._modified_ns, self._look_ns = (status.st_dev, status.st_ino), status.st_mtime_ns, 0

    @contextmanager
    def read_at_random(self) -> Iterator[None]:
        """Within this context, read single pages instead of one read-ahead window per page fault."""
        self.file.madvise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            self.file.madvise(mmap.MADV_NORMAL)

    def refuse_cut(self, among: int = 1) -> None:
        """Raise `FormatError` if the file has another length than when it was mapped, or was overwritten.

        The length takes 0.4 us and is checked each time. The status takes 1.5 us and is checked once per millisecond
        and file, or less often if ``among`` files are read together.
        """
        if monotonic_ns() >= self._look_ns:
            self._look_ns = monotonic_ns() + among * LOOK_NS
            try:
                status = os.stat(self._path)  # noqa: PTH116  # pathlib would double its cost
            except OSError:  # the file is gone, so it cannot be overwritten
                status = None
            if status is not None and (status.st_dev, status.st_ino) == self._file_number:
                self._size_bytes = self._size_bytes if status.st_mtime_ns == self._modified_ns else -1  # from now on
        if self.file.size() != self._size_bytes:
            raise FormatError(f"{self._path}: was changed since it was opened; open it again")
