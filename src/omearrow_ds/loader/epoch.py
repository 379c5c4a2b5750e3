"""Batches of an epoch: their indices and seeds, requests for later pages, and the iterator over them."""

from __future__ import annotations

import functools
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from itertools import islice
from os import getpid
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from omearrow_ds.dataset.samples import list_samples
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.kernels.stacks import page_thread
from omearrow_ds.loader.device_transfer import Move, NumberedBatch, unwrap
from omearrow_ds.loader.position import EpochProgress, LoaderPosition
from omearrow_ds.loader.worker_processes import PickledCall

_SEED_BYTES = 32
_MAPPING_NS = 10**6  # Pages of the next batch are mapped if the program used the last one for at least this time.
Prepare = Callable[[Any], None]  # Called with an `EpochIterator`.
_numpy: Any = np.random  # Its stubs lack some functions.


class EpochIterator:
    """Iterator over the batches of one epoch, with the attributes of torch's iterator, ``batches``.

    Batches are counted in ``progress``, and moved to a device by ``move``, if not None. ``prepare`` is called before
    the first batch, and before the next one after `release`. It may call `start` or `use`.
    """

    _returned_ns = 0  # Time at which the last batch was returned, if pages were requested for a later one.

    def __init__(self, batches: Any, progress: EpochProgress, move: Move | None, prepare: Prepare | None) -> None:
        self._move, self._prepare, self._in_use = move, prepare, threading.RLock()
        self.start(batches, progress)
        self._is_ready = prepare is None

    def start(self, batches: Any, progress: EpochProgress) -> None:
        self.progress, self._is_over = progress, False
        self.use(batches)

    def use(self, batches: Any) -> None:
        self._batches, self._is_ready, self.is_released = batches, True, False
        self._has_workers = hasattr(batches, "_task_info")
        is_plain = type(batches) is _SingleProcessDataLoaderIter and batches._dataset_kind == _DatasetKind.Map  # noqa: SLF001
        self._unmarked = batches._next_data if is_plain else batches.__next__  # noqa: SLF001

    def release(self) -> bool:
        """Release the workers for another epoch and return True, unless a thread waits for a batch."""
        if not self._in_use.acquire(blocking=False):
            return False
        progress = self.progress
        self._is_over = self._is_over or progress.ended
        if not progress.ended:
            if progress.rest is not None:  # Other workers create the batches that these have not finished.
                progress.rest.put_back(progress.waiting.values())
                progress.waiting.clear()
            self._is_ready, self.is_released = False, True
        self._in_use.release()
        return True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_ready and self._prepare is not None:
            self._is_ready = True
            self._prepare(self)
        # If the next batch follows at once, a thread that maps pages would delay it by taking the interpreter lock.
        is_used = self._returned_ns > 0 and monotonic_ns() - self._returned_ns > _MAPPING_NS
        with self._in_use:
            if not self._is_ready:
                return next(self)  # Another thread took the workers meanwhile.
            if self._is_over:  # With persistent workers, torch's iterator would start the next epoch.
                raise StopIteration
            try:
                number, batch = self._fetch() if self._move is None else self._move(self._fetch)
            except StopIteration:
                self._is_over, self.progress.ended = True, self.progress.begun
                raise
            except RuntimeError:
                self.progress.failed = True  # A worker may have been killed.
                raise
            if number is not None:
                self.progress.deliver(number)
            if self.progress.has_requested:
                self.progress.has_requested = False
                if is_used:
                    page_thread().map_requested()
                self._returned_ns = monotonic_ns()
            return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # During initialization.
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _fetch(self) -> NumberedBatch:
        """Return torch's next batch with its number; the program's global generators are restored."""
        try:
            # `__next__` only adds a profiler record, which took a tenth of the time of a batch of 16 at 100 x 100.
            profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
            batch = next(self._batches) if profiled else self._unmarked()
        except BaseException as error:
            number, indices = self._pop_finished()  # The failed batch is not delivered.
            if number is not None and isinstance(error, StopIteration):
                raise _not_the_end(indices) from error
            if self._has_workers:
                # Torch's frames and the error reference each other, and workers would remain until garbage collection.
                traceback.clear_frames(error.__traceback__)
            raise
        return self._pop_finished()[0], batch

    def _pop_finished(self) -> tuple[int | None, Any]:
        """Return number and indices of the batch that torch returned."""
        waiting = self.progress.waiting
        if not self._has_workers:
            if waiting and self.progress.seed is not None:
                borrowed_generators(getpid()).restore()
            return waiting.pop(0, (None, None))
        # Torch does not return the number of a batch, but removes the batch from its pending tasks. So it is the
        # waiting batch that is not pending.
        tasks = self._batches._task_info  # noqa: SLF001  # Pending tasks by their index.
        key = next((key for key in waiting if key not in tasks), None)
        return (None, None) if key is None else waiting.pop(key)


def _not_the_end(indices: Any) -> RuntimeError:
    """Return the error that replaces a `StopIteration` of a batch, which would end the loop."""
    samples = list_samples(indices if isinstance(indices, list | tuple) else [indices])
    problem = f"samples {samples}: collate_fn or the dataset raised StopIteration, which would end the epoch early"
    return RuntimeError(f"{problem}; add a default to its next() call")


class RemainingBatches:
    """Batches of an epoch, as batch numbers and indices, that have not been given to the workers."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches = batches
        self._drawn = deque[tuple[int, Any]]()  # They come before the rest of `_batches`.
        self._drawing = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._drawing:
            return self._drawn.popleft() if self._drawn else next(self._batches)

    def peek(self, distance: int) -> Any:
        """Return the indices of the batch that is ``distance`` batches ahead, or None after the end of the epoch."""
        with self._drawing:
            self._drawn.extend(islice(self._batches, max(distance - len(self._drawn), 0)))
            return self._drawn[distance - 1][1] if len(self._drawn) >= distance else None

    def draw(self) -> None:
        with self._drawing:
            self._drawn.extend(self._batches)

    def put_back(self, batches: Iterable[tuple[int, Any]]) -> None:
        with self._drawing:
            self._drawn.extendleft(reversed(list(batches)))


@dataclass(eq=False)
class EpochBatchSampler:
    """Iterable over the batches of indices of an epoch, drawn from the sampler of a loader."""

    sampler: Any
    position: LoaderPosition
    generators: Sequence[torch.Generator]  # The order may be drawn from them, or from torch's global one.
    _: KW_ONLY
    workers: bool
    rank: int | None = None  # Rank that random numbers of batches are seeded for; None if batches draw none.
    # Returns the state that determines the random numbers, from the states of torch's and the other generators.
    seed_source: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    # Dataset whose pages of later batches are requested, and the distance of these batches. None if batches must not be
    # drawn before they are needed.
    read_ahead: tuple[Any, int] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._prepare_batches(self.position.progress)  # The position may have the next epoch at the first batch.

    def _prepare_batches(self, progress: EpochProgress) -> Iterator[Any]:
        rest, (dataset, distance) = progress.rest or self.draw(progress), self.read_ahead or (None, 0)
        page_requests = None if dataset is None else unwrap(dataset)[0]._collection.page_requests
        for key, (number, indices) in enumerate(rest):
            seed = None if progress.seed is None else batch_seed(progress.seed, number)
            if self.workers:
                progress.waiting[key] = number, indices
                later = None if dataset is None else rest.peek(distance)
                yield indices if seed is None and later is None else PickledCall(receive_indices, indices, seed, later)
                continue
            if page_requests is not None and page_requests.num_remaining:
                _request_pages(dataset, rest.peek(distance))
                progress.has_requested = True
            if seed is not None:
                borrowed_generators(getpid()).borrow(seed)
            progress.waiting[0] = number, indices
            yield indices

    def draw(self, progress: EpochProgress) -> RemainingBatches:
        if self.position.rest is not None:
            self.position.rest.draw()
        generators = [torch.default_generator, *self.generators]
        states = [generator.get_state() for generator in generators]
        if progress.resumed:
            for generator, state in zip(generators, progress.states, strict=True):
                generator.set_state(state)
        else:
            progress.states = states
        progress.set_length(self.sampler)
        numbered: Iterator[tuple[int, Any]] = enumerate(self.sampler, progress.first)
        start, ahead = progress.batches, frozenset(progress.ahead)
        if start > progress.first or ahead:
            numbered = (batch for batch in numbered if batch[0] >= start and batch[0] not in ahead)
        progress.rest = rest = RemainingBatches(numbered)
        # An epoch that ends early leaves generators as at its end, since prefetching may have drawn all of it.
        self.position.rest = rest if self.generators and progress.total is not None else None
        rest.peek(1)  # Samplers draw when their first batch is requested.
        if progress.resumed:
            torch.default_generator.set_state(states[0])
        progress.seed = None if self.rank is None else epoch_seed(self.seed_source(progress.states), self.rank)
        return rest

    def pass_over(self, progress: EpochProgress) -> None:
        if self.generators and progress.begun:
            (progress.rest or self.draw(progress)).draw()


def receive_indices(indices: Any, seed: bytes | None, later: Sequence[int] | None) -> Any:
    """Return the indices of a batch in a worker, which seeds generators and requests the pages of a later batch."""
    worker = get_worker_info()
    if worker is not None and later is not None:
        _request_pages(worker.dataset, later)
    if seed is not None:
        seed_global_rngs(seed)
    return indices


def _request_pages(dataset: Any, indices: Sequence[int] | None) -> None:
    """Request the pages of a later batch, if reads wait; errors are ignored, as creating the batch raises them."""
    samples, positions = unwrap(dataset)
    if indices is None or not samples._collection.page_requests.num_remaining:
        return
    with suppress(OMEArrowDSError):
        if positions is not None:
            indices = [positions[index] for index in indices]
        samples._collection.request_ahead(samples._positions(indices))  # noqa: SLF001  # Its base class is ours.


def epoch_seed(state: torch.Tensor, rank: int) -> bytes:
    """Return the seed of an epoch from the state of its order; ranks with equal states draw different numbers."""
    return blake2b(state.numpy().tobytes(), digest_size=_SEED_BYTES, salt=rank.to_bytes(8, "little")).digest()


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

    Batches of several threads draw from the same generators: the first saves their states, the last restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_batches = 0
        self._own = np.random.MT19937(0)
        self._saved: tuple[Any, ...] = ()

    def borrow(self, seed: bytes) -> None:
        with self._lock:
            if self._num_batches == 0:
                generator = _numpy.get_bit_generator()
                self._saved = torch.default_generator.get_state(), random.getstate(), generator, _cached_normal()
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
                _cached_normal(pair)


@functools.cache
def borrowed_generators(pid: int) -> BorrowedGenerators:
    """Return the generators of this process, ``pid``; a forked child must not wait for its parent's lock."""
    del pid
    return BorrowedGenerators()


def _cached_normal(pair: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the cached normal number of NumPy's global ``RandomState``, after setting it to ``pair`` if not None."""
    legacy = _numpy.rand.__self__
    generator = legacy._bit_generator  # noqa: SLF001  # No public API.
    legacy._bit_generator = SimpleNamespace(state={"bit_generator": "", "state": None})  # noqa: SLF001
    try:
        if pair is not None:
            legacy.set_state(pair)
        cached: dict[str, Any] = legacy.get_state(legacy=False)
        return cached
    finally:
        legacy._bit_generator = generator  # noqa: SLF001
