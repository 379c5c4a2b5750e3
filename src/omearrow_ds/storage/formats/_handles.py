"""Handles of a process: opened at their first use, kept unused in a forked child; and files that are mapped."""

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

LOOK_NS = 10**6  # between two looks at a file, where they would cost more than reading an image does
Handle = TypeVar("Handle")
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class ProcessLocal(Generic[Handle]):
    """A handle opened at its first use in each process.

    A forked child opens its own. What it inherited it keeps, unused and unclosed, to its end: Lance and DuckDB crash
    where a child closes its parent's handle.

    An opener that is a method is held weakly: its owner, which holds this, would otherwise be gone only when garbage is
    collected, with files, connections and the threads of these.
    """

    _owner: tuple[int, Handle] | None = None  # of the class too: Ctrl-C may come before an instance has its own

    def __init__(self, opener: Callable[[], Handle]) -> None:
        method = weakref.WeakMethod(opener) if inspect.ismethod(opener) else None
        self._opener: Callable[[], Callable[[], Handle] | None] = method or (lambda: opener)

    def get(self) -> Handle:
        """Return this process's handle, opened now if it was not."""
        owner = self._owner  # looked at once: another thread may close it
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
        """Let go of this process's handle, if there is one; a later `get` opens another.

        It is closed with its last reference, which a thread that is reading may hold.
        """
        owner = self._owner
        if owner is not None and owner[0] == os.getpid():
            self._owner = None

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Callable[[object], object] = _keep_for_ever) -> None:
        # An interpreter that ends may have cleared this module before: what is needed is held here.
        if self._owner is not None and self._owner[0] != getpid():
            keep(self._owner)


class Mapping:
    """A file that is mapped; if it is cut short, what was cut off must not be touched: that ends the process (SIGBUS).

    What is written over it appears in the mapping. A file that was put in its place does not.

    Attributes
    ----------
    file
        The mapping, which Arrow and NumPy take as a buffer.
    read_ahead_bytes
        Read-ahead of the disk: what one page fault reads.
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
        """Raise `FormatError` if the file is not as long as it was when it was mapped, or was written over.

        The first takes 0.4 us and is looked at each time; the second takes 1.5, and is looked at once a millisecond, of
        several files that are read together at one of them.
        """
        if monotonic_ns() >= self._look_ns:
            self._look_ns = monotonic_ns() + among * LOOK_NS
            try:
                status = os.stat(self._path)  # noqa: PTH116  # pathlib would double its cost
            except OSError:  # it is gone, and so is who could write over it
                status = None
            if status is not None and (status.st_dev, status.st_ino) == self._file_number:
                self._size_bytes = self._size_bytes if status.st_mtime_ns == self._modified_ns else -1  # from now on
        if self.file.size() != self._size_bytes:
            raise FormatError(f"{self._path}: was changed since it was opened; open it again")
