"""The cost of a batch, tried on a copy of all that the user's functions hold: a trial leaves no trace."""

from __future__ import annotations

import copyreg
import io
import pickle
import random
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset

from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.loader.seeds import Lent
from omearrow_ds.loader.workers import UNPICKLABLE

_TRIAL_S = 0.15
_TRIALS = 20  # the first ones find caches and memory cold
_DATA_BYTES = 2**20  # an array or tensor that is larger is data, not what a function counts or draws from
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), list, tuple, dict, set})  # most of what is pickled
_OF_PACKAGES = ("omearrow_ds", "pyarrow", "multiprocessing")  # open sources, pixels, tables; what processes share
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_SEEDED = (torch.default_generator, *(vars(each)["random"].__self__ for each in (random, np.random)))  # by batch


class Cost(NamedTuple):
    """What making a batch costs in this process, what with one thread, as in a worker, and its size."""

    batch_s: float
    worker_s: float
    batch_bytes: int


class CopyError(Exception):
    """What makes batches is not tried: it cannot be sent to workers, or they would make other samples of it."""


def copied(dataset: Any, *functions: Any) -> Any:
    """Return a copy of a dataset, which shares pixels, tables and open files, after a look at all that workers get.

    What a class or module holds, not an object, a closure or the main script, is not copied. Raises `CopyError` if it
    cannot be pickled, or a generator is found that the loader does not seed by batch.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((dataset, *functions))
        if pickler.generator is not None:
            msg = f"each worker would copy a random generator ({pickler.generator})"
            raise CopyError(msg)
        file.seek(0)
        return _Unpickler(file, pickler.kept).load()[0]
    except UNPICKLABLE as error:
        raise CopyError(f"the dataset cannot be sent to workers: {error}") from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what may change while samples are made, by value as far as it can, and looks out for generators."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []
        self.generator: str | None = None
        # Classes, and modules; the main one's functions are pickled with those of its globals that they use.
        self._seen: set[Any] = {sys.modules["__main__"]}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _PLAIN or not _shared(value):
            return None
        self.kept.append(value.apart() if isinstance(value, Collection) else value)
        return len(self.kept) - 1

    def reducer_override(self, value: Any) -> Any:
        self._look_at(value)
        if isinstance(value, StoredSamples):
            return copyreg.__newobj__, (type(value),), dict(vars(value)), None, None, _fill  # type: ignore[attr-defined]
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced[1]) > 2:
            make, (*given, _, extra), *rest = reduced  # without its number in this process, by which it would be found
            return make, (*given, None, extra), *rest
        return reduced

    def _look_at(self, value: Any) -> None:
        """Note a generator: this, one that its class has, or one that is global in the module of either."""
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        places = {type(value).__name__: value}
        for owner in (*kinds, module):
            if owner is not None and owner not in self._seen:
                self._seen.add(owner)
                places |= {f"{owner.__name__}.{name}": held for name, held in vars(owner).items()}
        for place, held in places.items():
            if issubclass(type(held), _GENERATORS) and not any(held is each for each in _SEEDED):
                self.generator = self.generator or place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


def _fill(dataset: StoredSamples, state: dict[str, Any]) -> None:
    vars(dataset).update(state)


def _shared(value: Any) -> bool:
    """Whether something is data, a part of an open collection, or meant to be shared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.nbytes > _DATA_BYTES)
    if isinstance(value, StoredSamples):
        return False
    if isinstance(value, Targets):
        return value.listed
    return str(type(value).__module__).partition(".")[0] in _OF_PACKAGES


def measure(dataset: Dataset[Any], batch_size: int, among: Any = None) -> Cost:
    """Time a few random batches, without touching the program's random numbers; large ones by a part of them.

    ``among`` are the samples that they are of; None is all.
    """
    count = len(dataset if among is None else among)  # type: ignore[arg-type]  # of map style: has a length
    if count == 0:
        return Cost(0.0, 0.0, 0)
    order = np.random.default_rng(0).permutation(count if among is None else among).tolist() * (
        1 + _TRIALS * batch_size // count
    )
    lent = Lent()
    lent.lend(bytes(32))
    threads = torch.get_num_threads()
    try:
        _fetch(dataset, order[:1])  # opens what is opened at the first use
        part = batch_size if _fetch(dataset, order[:1])[0] * batch_size < _TRIAL_S else 1
        batch_s, size_bytes = _best(dataset, order, part)
        worker_s = batch_s
        if threads > 1:
            torch.set_num_threads(1)
            worker_s = _best(dataset, order, part)[0]
    except Exception as error:
        error.add_note("It was raised in a trial for num_workers='auto'; with a number there is none")
        raise
    finally:
        torch.set_num_threads(threads)
        lent.give_back()
    whole = batch_size / part
    return Cost(batch_s * whole, worker_s * whole, int(size_bytes * whole))


def _best(dataset: Any, order: list[int], size: int) -> tuple[float, int]:
    """Return the least seconds of some batches, and their bytes."""
    start = perf_counter()
    trials = []
    repeats = getattr(dataset, "cache_info", None) is None  # to see what a batch costs once files are open
    for trial in range(_TRIALS):
        first = (trial % 2 if repeats else trial) * size
        trials.append(_fetch(dataset, order[first : first + size]))
        if perf_counter() - start > _TRIAL_S:
            break
    return min(trials)


def _fetch(dataset: Any, indices: list[int]) -> tuple[float, int]:
    start = perf_counter()
    fetch = getattr(dataset, "__getitems__", None)
    samples = [dataset[index] for index in indices] if fetch is None else fetch(indices)
    seconds = perf_counter() - start
    return seconds, sum(map(_bytes, samples))


def _bytes(sample: Any) -> int:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return int(sample.nbytes)
    if isinstance(sample, Mapping):
        return sum(map(_bytes, sample.values()))
    return sum(map(_bytes, sample)) if isinstance(sample, tuple | list) else 0
