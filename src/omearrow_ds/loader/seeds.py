"""Seeds of global generators per epoch and batch, so that a batch does not depend on its process."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

_SEED_BYTES = 32
_numpy: Any = np.random  # Its stubs lack some functions.


class EpochSeeds(NamedTuple):
    source: int  # Index of the generator of the order: 0 is torch's global one, 1 the loader's.
    rank: int  # Ranks with equal generators draw different numbers.

    def of_epoch(self, states: Sequence[torch.Tensor]) -> bytes:
        state = states[self.source].numpy().tobytes()
        return blake2b(state, digest_size=_SEED_BYTES, salt=self.rank.to_bytes(8, "little")).digest()


def batch_seed(epoch: bytes, number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), key=epoch, digest_size=_SEED_BYTES).digest()


def seed_global_rngs(seed: bytes) -> None:
    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little"))
    random.seed(int.from_bytes(seed[8:24], "little"))
    np.random.seed(int.from_bytes(seed[24:28], "little"))  # noqa: NPY002  # Transforms may use it.


class BorrowedGenerators:
    """Context of a batch created in the main process: the global generators are seeded, and restored afterwards.

    Saving and restoring NumPy's state takes 130 µs. Instead, another generator temporarily replaces it, and the cached
    second value of a pair of normal numbers is saved.

    Batches of several concurrent threads draw from the same generators; the last batch restores the program's.
    """

    def __init__(self) -> None:
        self._ours = np.random.MT19937(0)
        self._programs: tuple[Any, ...] | None = None

    def borrow(self, seed: bytes) -> None:
        stack = _lendings(os.getpid())
        with stack.lock:
            numpys, pair = _numpy.get_bit_generator(), _with_pair(_numpy.rand.__self__.get_state, legacy=False)
            self._programs = torch.default_generator.get_state(), random.getstate(), numpys, pair
            stack.borrowers.append(self)
            _numpy.set_bit_generator(self._ours)
            seed_global_rngs(seed)

    def restore(self) -> None:
        """Restore the states of the global generators that were saved by `borrow`, if any."""
        if self._programs is None:
            return
        stack = _lendings(os.getpid())
        with stack.lock:
            index = stack.borrowers.index(self)
            stack.borrowers.pop(index)
            programs, self._programs = self._programs, None
            if index < len(stack.borrowers):  # A later batch in another thread saved the states of this one.
                stack.borrowers[index]._programs = programs  # noqa: SLF001  # Same class.
                return
            torchs, pythons, numpys, pair = programs
            torch.default_generator.set_state(torchs)
            random.setstate(pythons)
            _numpy.set_bit_generator(numpys)
            if pair["has_gauss"]:
                _with_pair(_numpy.rand.__self__.set_state, pair)


class _BorrowStack:
    """Batches of a process that use its generators, in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.borrowers: list[BorrowedGenerators] = []


@functools.cache
def _lendings(pid: int) -> _BorrowStack:
    """Return the lendings of this process, ``pid``."""
    del pid
    return _BorrowStack()


class _FrozenBitGenerator:
    """Replacement of NumPy's bit generator while only the cached normal number is read or set."""

    def __init__(self) -> None:
        self.state = {"bit_generator": "", "state": None}


def _with_pair(do: Any, *arguments: Any, **kwargs: Any) -> Any:
    owner, generator = do.__self__, _numpy.get_bit_generator()
    owner._bit_generator = _FrozenBitGenerator()  # noqa: SLF001  # No public API.
    try:
        return do(*arguments, **kwargs)
    finally:
        owner._bit_generator = generator  # noqa: SLF001


class OnArrival:
    """Indices of a batch; a worker that unpickles them calls ``act(*arguments)`` before it creates the batch."""

    def __init__(self, indices: Any, act: Callable[..., object], *arguments: Any) -> None:
        self._sent = indices, act, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_and_run, self._sent


def _rebuild_and_run(indices: Any, act: Callable[..., object], arguments: tuple[Any, ...]) -> Any:
    act(*arguments)
    return indices
