"""Compilation of the loops of this package with numba, once a process has enough work, and their cache.

Importing numba and loading a cached loop take 0.4 to 1.4 s, compiling one for a dtype 0.3 s to 2 s more. So each
process begins with NumPy and switches after `WORTH_BYTES` of samples, when the extra time of NumPy is about the time of
the switch: a short run avoids the cost, and a long one loses at most that much time. Whole images reach this point
after 7 to 13 GB, crops after 1 to 3 GB, so each byte of crops counts as `CROP_WEIGHT` bytes.

If numba is already imported, as in workers forked from a server that imported it, `READY_BYTES` are enough. Results are
bit-identical, as tests verify. Compiled loops are cached in the user's cache folder, or in memory if that is read-only.
Without numba, NumPy creates all samples.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Loop = Callable[..., Any]
WORTH_BYTES, READY_BYTES = 8 * 2**30, 2**28
CROP_WEIGHT = 4


class CompileCounter:
    """Bytes of samples created by this process, and whether they justify compiled loops."""

    made_bytes = 0
    worth = False


COUNTER = CompileCounter()  # A forked process continues the counter of its parent.


def worth(made_bytes: int) -> bool:
    """Add ``made_bytes`` to the byte counter, and return whether compiled loops should be used from now on."""
    if not COUNTER.worth:
        COUNTER.made_bytes += made_bytes
        COUNTER.worth = COUNTER.made_bytes >= (READY_BYTES if "numba" in sys.modules else WORTH_BYTES)
    return COUNTER.worth


@functools.cache
def compiled(function: Loop, types: tuple[str, ...]) -> Loop | None:
    """Return a function of loops over arrays, compiled for arguments of ``types``, or None without numba.

    Types are the dtype of a number, or of a flat, contiguous array, followed by `` r`` if it is read, `` w`` if it is
    written, or `` unaligned`` if it is read and may be unaligned. ``none`` for None.
    """
    numba = _numba()
    if numba is None:
        return None
    try:
        return _kept(numba, function, types)
    except (OSError, RuntimeError, EOFError, pickle.PickleError):  # The cache folder is missing or damaged.
        return _compiled(numba, function, types, cache=False)


def pending_jit_loops() -> tuple[str, ...]:
    """Return the module that prepares compiled loops if workers need these; this saves 0.7 s and 90 MB per worker."""
    return ("omearrow_ds.kernels.ready",) if COUNTER.worth else ()


def ready() -> None:
    """Import and initialize numba, so that forked children share its memory.

    Loading a loop then took a child 0.02 s and 7 MB of private memory, instead of 0.7 s and 90 MB.
    """
    numba = _numba()
    if numba is not None:
        _compiled(numba, _nothing, ("none",), cache=False)


def _nothing(value: Any) -> Any:
    return value


@functools.cache
def _numba() -> ModuleType | None:
    try:
        import numba  # noqa: PLC0415  # Slow to import.
    except ImportError:  # Not installed, or incompatible with this NumPy.
        return None
    return numba


def _kept(numba: ModuleType, function: Loop, types: tuple[str, ...]) -> Loop:
    """Compile with numba's cache in the user's cache folder, or the folder that the user chose."""
    before = numba.config.CACHE_DIR
    if not before:
        numba.config.CACHE_DIR = str(_folder())
    try:
        return _compiled(numba, function, types, cache=True)
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    """Return the folder of compiled loops; raises RuntimeError if the user has no home directory."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache_home) if Path(cache_home).is_absolute() else Path.home() / ".cache") / "omearrow_ds" / "numba"


def _compiled(numba: ModuleType, function: Loop, types: tuple[str, ...], *, cache: bool) -> Loop:
    dispatcher = numba.njit(nogil=True, error_model="numpy", cache=cache)(function)
    dispatcher.compile(tuple(_type(numba, text) for text in types))
    dispatcher.disable_compile()  # Otherwise it would silently compile for other types.
    loop: Loop = dispatcher
    return loop


def _type(numba: ModuleType, text: str) -> Any:
    name, _, access = text.partition(" ")
    kind = getattr(numba.types, name)
    return numba.types.Array(kind, 1, "C", readonly=access != "w", aligned=access != "unaligned") if access else kind
