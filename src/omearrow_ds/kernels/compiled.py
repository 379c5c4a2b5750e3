"""Compiles the loops of this folder, when there is enough to do to be worth it, and keeps what was compiled.

Importing numba and loading a loop from its cache take 0.4 to 1.4 s, compiling one for a dtype 0.3 s to 2 s more. So
each process begins with NumPy and changes over after `WORTH_BYTES` of samples, when NumPy has cost about as much more
as the change does: a short run does not pay for it, and a long one loses no more than its price. Whole images reach
this after 7 to 13 GB, crops after 1 to 3 GB, so each byte of crops counts as `CROP_WEIGHT` bytes.

If numba is imported already, as in workers forked from a server that imported it, `READY_BYTES` are enough. The bits
are the same, as tests hold. Compiled loops are kept in the user's cache folder, or in memory if that is read-only.
Without numba, NumPy makes all samples.
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


class Tally:
    """How many bytes of samples this process has made, and whether loops are compiled now."""

    made_bytes = 0
    worth = False


@functools.cache
def tally() -> Tally:
    """Return that of this process; what was forked goes on from its parent's."""
    return Tally()


def worth(made_bytes: int) -> bool:
    """Count samples that are about to be made, or will be, and return whether to make them by compiled loops."""
    counted = tally()
    counted.made_bytes += made_bytes
    counted.worth = counted.made_bytes >= (READY_BYTES if "numba" in sys.modules else WORTH_BYTES)
    return counted.worth


@functools.cache
def compiled(function: Loop, types: tuple[str, ...]) -> Loop | None:
    """Return loops compiled for arguments of ``types``; None without numba.

    Parameters
    ----------
    function
        Loops over arrays, in plain Python.
    types
        Of each argument: a dtype for a number, and followed by `` r`` or `` w`` for a flat, contiguous array that is
        read or written, by `` unaligned`` for one that is read and lies anywhere; ``none`` for None.
    """
    numba = _numba()
    if numba is None:
        return None
    try:
        return _kept(numba, function, types)
    except (OSError, RuntimeError, EOFError, pickle.PickleError):  # no folder to keep it in, or a damaged one
        return _compiled(numba, function, types, cache=False)


def ready() -> None:
    """Make numba ready, so that children forked from here share what it takes.

    To load a loop then took a child 0.02 s and 7 MB of its own, without 0.7 s and 90 MB.
    """
    numba = _numba()
    if numba is not None:
        _compiled(numba, _nothing, ("none",), cache=False)


def _nothing(given: Any) -> Any:
    return given


@functools.cache
def _numba() -> ModuleType | None:
    try:
        import numba  # noqa: PLC0415  # when it is worth it
    except ImportError:  # it is not there, or not for this NumPy
        return None
    return numba


def _kept(numba: ModuleType, function: Loop, types: tuple[str, ...]) -> Loop:
    """Compile with numba's cache in the user's folder, unless the user chose another one."""
    before = numba.config.CACHE_DIR
    if not before:
        numba.config.CACHE_DIR = str(_folder())
    try:
        return _compiled(numba, function, types, cache=True)
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    """Return the folder of what was compiled; raises RuntimeError where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "omearrow_ds" / "numba"


def _compiled(numba: ModuleType, function: Loop, types: tuple[str, ...], *, cache: bool) -> Loop:
    made = numba.njit(nogil=True, error_model="numpy", cache=cache)(function)
    made.compile(tuple(_type(numba, each) for each in types))
    made.disable_compile()  # of other types it would compile without a word
    loop: Loop = made
    return loop


def _type(numba: ModuleType, text: str) -> Any:
    name, _, access = text.partition(" ")
    kind = getattr(numba.types, name)
    aligned = access != "unaligned"
    return numba.types.Array(kind, 1, "C", readonly=access != "w", aligned=aligned) if access else kind
