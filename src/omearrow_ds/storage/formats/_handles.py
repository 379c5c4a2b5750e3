"""Handles that each process opens at first use; a forked child does not use those of its parent."""

from __future__ import annotations

import ctypes
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Handle = TypeVar("Handle")
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class ProcessLocal(Generic[Handle]):
    """A handle, such as an open file, that each process opens at its first use.

    A forked child keeps the inherited handle, unclosed, until it exits: Lance and DuckDB crash if a child closes it. A
    bound method as opener is referenced weakly, so that its owner is freed without the garbage collector.
    """

    _owner: tuple[int, Handle] | None = None  # also set on the class: Ctrl-C may come before an instance has its own

    def __init__(self, opener: Callable[[], Handle]) -> None:
        self._get_opener: Callable[[], Callable[[], Handle] | None]
        self._get_opener = weakref.WeakMethod(opener) if inspect.ismethod(opener) else lambda: opener

    def get(self) -> Handle:
        """Return this process's handle, and open it at the first use."""
        owner = self._owner  # read once: another thread may close it
        if owner is not None and owner[0] == os.getpid():
            return owner[1]
        if owner is not None:
            _keep_for_ever(owner)
        opener = self._get_opener()
        if opener is None:
            raise ReferenceError("the owner of the handle was deleted")
        handle = opener()
        self._owner = (os.getpid(), handle)
        return handle

    def close(self) -> None:
        """Drop the handle of this process, if it is open; a later call of `get` opens a new one."""
        # It is closed with its last reference, which may be that of a reading thread.
        owner = self._owner
        if owner is not None and owner[0] == os.getpid():
            self._owner = None

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Callable[[object], object] = _keep_for_ever) -> None:
        # At interpreter exit, this module may already be cleared: the default arguments keep the functions.
        if self._owner is not None and self._owner[0] != getpid():
            keep(self._owner)
