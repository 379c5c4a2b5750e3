"""Seeds of what making a batch draws: by epoch and batch, so that a batch is the same whoever makes it."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

_SEED_BYTES = 32
_numpy: Any = np.random  # its stubs lack some functions


class Seeds(NamedTuple):
    """What the seeds of an epoch are made from."""

    source: int  # which of the generators that the order may be drawn from: 0 is torch's global one, 1 the loader's own
    rank: int  # ranks whose generators are alike draw different numbers

    def of_epoch(self, states: Sequence[torch.Tensor]) -> bytes:
        """Return the seed of the epoch whose order was drawn from generators at ``states``; nothing is drawn for it."""
        state = states[self.source].numpy().tobytes()
        return blake2b(state, digest_size=_SEED_BYTES, salt=self.rank.to_bytes(8, "little")).digest()


def of_batch(epoch: bytes, number: int) -> bytes:
    """Return the seed of an epoch's batch."""
    return blake2b(number.to_bytes(8, "little"), key=epoch, digest_size=_SEED_BYTES).digest()


def sow(seed: bytes) -> None:
    """Seed the global generators of torch (the CPU's), Python and NumPy."""
    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little"))
    random.seed(int.from_bytes(seed[8:24], "little"))
    np.random.seed(int.from_bytes(seed[24:28], "little"))  # noqa: NPY002  # what transforms may use


class Lent:
    """The program's global generators, lent to a batch that is made in its process, and given back as they were.

    To take NumPy's state and set it again takes 130 µs. Here another generator takes its place for the time, and what
    that would lose is looked after: the second of a pair of normal numbers.

    Batches made in several threads at once draw from the same generators; the last of them gives back the program's.
    """

    def __init__(self) -> None:
        self._ours = np.random.MT19937(0)
        self._programs: tuple[Any, ...] | None = None

    def lend(self, seed: bytes) -> None:
        """Seed the generators, after a look at where the program is with them."""
        out = _lendings(os.getpid())
        with out.lock:
            numpys, pair = _numpy.get_bit_generator(), _with_pair(_numpy.rand.__self__.get_state, legacy=False)
            self._programs = torch.default_generator.get_state(), random.getstate(), numpys, pair
            out.lent.append(self)
            _numpy.set_bit_generator(self._ours)
            sow(seed)

    def give_back(self) -> None:
        """Let the program's generators go on from where they were; without effect where they are not lent."""
        if self._programs is None:
            return
        out = _lendings(os.getpid())
        with out.lock:
            place = out.lent.index(self)
            out.lent.pop(place)
            programs, self._programs = self._programs, None
            if place < len(out.lent):  # lent since to a batch of another thread, which found them as they are with this
                out.lent[place]._programs = programs  # noqa: SLF001  # another of this class
                return
            torchs, pythons, numpys, pair = programs
            torch.default_generator.set_state(torchs)
            random.setstate(pythons)
            _numpy.set_bit_generator(numpys)
            if pair["has_gauss"]:
                _with_pair(_numpy.rand.__self__.set_state, pair)


class _Lendings:
    """To whom a process's generators are lent, one after the other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lent: list[Lent] = []


@functools.cache
def _lendings(pid: int) -> _Lendings:
    """Return those of process ``pid``, this one."""
    del pid
    return _Lendings()


class _Aside:
    """Stands in for NumPy's bit generator while nothing but the pair is looked at or set."""

    def __init__(self) -> None:
        self.state = {"bit_generator": "", "state": None}


def _with_pair(do: Any, *arguments: Any, **kwargs: Any) -> Any:
    owner, generator = do.__self__, _numpy.get_bit_generator()
    owner._bit_generator = _Aside()  # noqa: SLF001  # there is no public way
    try:
        return do(*arguments, **kwargs)
    finally:
        owner._bit_generator = generator  # noqa: SLF001


class Seeded:
    """A batch's indices on their way to a worker: as they arrive, just before the batch is made, they seed it."""

    def __init__(self, indices: Any, seed: bytes) -> None:
        self._sent = indices, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, self._sent


def _arrive(indices: Any, seed: bytes) -> Any:
    sow(seed)
    return indices
