"""Seeds of global generators per epoch and batch, so that a batch does not depend on its process."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_SEED_BYTES = 32
_numpy: Any = np.random  # Its stubs lack some functions.


def epoch_seed(state: torch.Tensor, rank: int) -> bytes:
    """Return the seed of an epoch from the state of its order; ranks with equal states draw different numbers."""
    salt = rank.to_bytes(8, "little")
    return blake2b(state.numpy().tobytes(), digest_size=_SEED_BYTES, salt=salt).digest()


def batch_seed(epoch: bytes, number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), key=epoch, digest_size=_SEED_BYTES).digest()


def seed_global_rngs(seed: bytes) -> None:
    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little"))
    random.seed(int.from_bytes(seed[8:24], "little"))
    np.random.seed(int.from_bytes(seed[24:28], "little"))  # noqa: NPY002  # Transforms may use it.


class BorrowedGenerators:
    """Global generators of a process, which are seeded for batches created in it, and restored afterwards.

    Saving and restoring NumPy's state takes 130 µs. Instead, another generator temporarily replaces it, and the cached
    second value of a pair of normal numbers is saved.

    Batches of several threads draw from the same generators: the first one saves their states, the last one restores
    them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_batches = 0
        self._own = np.random.MT19937(0)
        self._saved: tuple[Any, ...] = ()

    def borrow(self, seed: bytes) -> None:
        with self._lock:
            if self._num_batches == 0:
                with _without_bit_generator() as legacy:
                    pair = legacy.get_state(legacy=False)
                generator = _numpy.get_bit_generator()
                self._saved = torch.default_generator.get_state(), random.getstate(), generator, pair
                _numpy.set_bit_generator(self._own)
            self._num_batches += 1
            seed_global_rngs(seed)

    def restore(self) -> None:
        with self._lock:
            self._num_batches -= 1
            if self._num_batches:
                return
            torch_state, python_state, generator, pair = self._saved
            torch.default_generator.set_state(torch_state)
            random.setstate(python_state)
            _numpy.set_bit_generator(generator)
            if pair["has_gauss"]:
                with _without_bit_generator() as legacy:
                    legacy.set_state(pair)


@functools.cache
def borrowed_generators(pid: int) -> BorrowedGenerators:
    """Return the generators of this process, ``pid``; a forked child must not wait for its parent's lock."""
    del pid
    return BorrowedGenerators()


@contextmanager
def _without_bit_generator() -> Iterator[Any]:
    """Yield NumPy's global ``RandomState``, of which only the cached normal number can be read or set."""
    legacy = _numpy.rand.__self__
    generator = legacy._bit_generator  # noqa: SLF001  # No public API.
    legacy._bit_generator = SimpleNamespace(state={"bit_generator": "", "state": None})  # noqa: SLF001
    try:
        yield legacy
    finally:
        legacy._bit_generator = generator  # noqa: SLF001
