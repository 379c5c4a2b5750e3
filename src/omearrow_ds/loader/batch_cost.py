"""Measured cost of a batch, on a copy of the user's objects without side effects."""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.loader.epoch import borrowed_generators
from omearrow_ds.loader.worker_processes import UNPICKLABLE

_TRIAL_S = 0.15
_TRIALS = 20  # The first trials have cold caches.
_DATA_BYTES = 2**20  # Larger arrays and tensors are data, not the state of a function.
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), list, tuple, dict, set})  # Most pickled objects.
_OF_PACKAGES = ("omearrow_ds", "pyarrow", "multiprocessing")  # Open sources, pixels, tables, shared objects.
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_SEEDED = (torch.default_generator, *(vars(module)["random"].__self__ for module in (random, np.random)))  # Per batch.


class BatchCost(NamedTuple):
    batch_s: float
    worker_s: float
    batch_bytes: int


class CopyError(Exception):
    """A dataset cannot be timed, since workers cannot receive it or would create other samples than this process."""


def copy_for_trial(dataset: Any, *functions: Any) -> Any:
    """Return a copy of a dataset that shares pixels, tables and open files, after checking all objects for workers.

    Raises `CopyError` if pickling fails, or if a generator is found that the loader does not seed per batch.
    """
    file = io.BytesIO()
    pickler = _CopyPickler(file)
    try:
        pickler.dump((dataset, *functions))
        if pickler.generator is not None:
            raise CopyError(f"each worker would copy a random generator ({pickler.generator})")
        file.seek(0)
        unpickler = pickle.Unpickler(file)  # noqa: S301  # Pickled above.
        unpickler.persistent_load = pickler.shared.__getitem__  # type: ignore[method-assign]
        return unpickler.load()[0]
    except UNPICKLABLE as error:
        raise CopyError(f"the dataset cannot be sent to workers: {error}") from error


class _CopyPickler(cloudpickle.Pickler):  # type: ignore[misc]  # Untyped.
    """Pickler of mutable objects by value, where possible, that also detects random generators."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.shared: list[Any] = []
        self.generator: str | None = None
        # Classes and modules. Functions of the main module are pickled with the globals that they use.
        self._seen: set[Any] = {sys.modules["__main__"]}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _PLAIN or not _shared(value):
            return None
        self.shared.append(value.copy(plan=value.plan) if isinstance(value, Collection) else value)
        return len(self.shared) - 1

    def reducer_override(self, value: Any) -> Any:
        self._look_at(value)
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced[1]) > 2:
            make, (*arguments, _, extra), *rest = reduced  # Without its id in this process, by which it would be found.
            return make, (*arguments, None, extra), *rest
        return reduced

    def _look_at(self, value: Any) -> None:
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        members = {type(value).__name__: value}
        for owner in (*kinds, module):
            if owner is not None and owner not in self._seen:
                self._seen.add(owner)
                members |= {f"{owner.__name__}.{name}": member for name, member in vars(owner).items()}
        for name, member in members.items():
            if issubclass(type(member), _GENERATORS) and not any(member is generator for generator in _SEEDED):
                self.generator = self.generator or name


def _shared(value: Any) -> bool:
    """Whether a value is data, a part of an open collection, or meant to be shared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(value.nbytes > _DATA_BYTES)
    if isinstance(value, StoredSamples):
        return False
    if isinstance(value, Targets):
        return value.listed
    return str(type(value).__module__).partition(".")[0] in _OF_PACKAGES


def measure_batch_cost(dataset: Any, batch_size: int, candidates: Any = None) -> BatchCost:
    """Time a few random batches of ``candidates`` (None: all), or samples if batches are slow; keep random states."""
    candidates = np.arange(len(dataset)) if candidates is None else candidates
    if len(candidates) == 0:
        return BatchCost(0.0, 0.0, 0)
    order = np.random.default_rng(0).permutation(candidates).tolist() * (1 + _TRIALS * batch_size // len(candidates))
    generators, threads = borrowed_generators(os.getpid()), torch.get_num_threads()
    generators.borrow(bytes(32))
    try:
        _fetch(dataset, order[:1])  # Opens files and connections.
        size = batch_size if _fetch(dataset, order[:1])[0] * batch_size < _TRIAL_S else 1
        batch_s, size_bytes = worker_s, _ = _best(dataset, order, size)
        if threads > 1:
            torch.set_num_threads(1)
            worker_s, _ = _best(dataset, order, size)
    except Exception as error:
        error.add_note("It was raised while measuring batches for num_workers='auto'; pass a number to skip this")
        raise
    finally:
        torch.set_num_threads(threads)
        generators.restore()
    scale = batch_size / size
    return BatchCost(batch_s * scale, worker_s * scale, int(size_bytes * scale))


def _best(dataset: Any, order: list[int], size: int) -> tuple[float, int]:
    start, trials = perf_counter(), list[tuple[float, int]]()
    repeats = getattr(dataset, "cache_info", None) is None  # Measures the cost with open files.
    while len(trials) < _TRIALS and perf_counter() - start <= _TRIAL_S:
        first = (len(trials) % 2 if repeats else len(trials)) * size
        trials.append(_fetch(dataset, order[first : first + size]))
    return min(trials)


def _fetch(dataset: Any, indices: list[int]) -> tuple[float, int]:
    start = perf_counter()
    fetch = getattr(dataset, "__getitems__", None)
    samples = [dataset[index] for index in indices] if fetch is None else fetch(indices)
    return perf_counter() - start, sum(map(_count_bytes, samples))


def _count_bytes(sample: Any) -> int:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return int(sample.nbytes)
    items = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple | list) else ()
    return sum(map(_count_bytes, items))
