"""`EpochIterator`: iterator over a loader's batches, counted and on the requested device."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from os import getpid
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from omearrow_ds.loader.checkpoint import EpochProgress
from omearrow_ds.loader.device_transfer import NumberedBatch
from omearrow_ds.loader.seeding import borrowed_generators

_INDICES_SHOWN = 16


class EpochIterator:
    """Iterator over the batches of one epoch.

    It has the attributes of torch's iterator, ``batches``. Batches are counted in ``progress``, and moved to a device
    by ``move``.

    ``prepare`` is called before the first batch, and before the next one after `release`. It may call `start` or `use`.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        progress: EpochProgress,
        move: Callable[[Iterator[NumberedBatch]], Iterator[NumberedBatch]],
        prepare: Callable[[EpochIterator], None] | None = None,
    ) -> None:
        self._move, self._prepare, self._in_use = move, prepare, threading.RLock()
        self.start(batches, progress)
        self._is_ready = prepare is None

    def start(self, batches: Iterator[Any], progress: EpochProgress) -> None:
        self.progress = progress
        self._numbered = _NumberedBatches(progress)
        self.use(batches)
        self._next = self._move(self._numbered).__next__

    def use(self, batches: Iterator[Any]) -> None:
        self._batches, self._is_ready, self.is_released = batches, True, False
        self._numbered.use(batches)

    def release(self) -> bool:
        """Release the workers for another epoch, unless a thread waits for a batch; return whether they were released.

        If this epoch continues, it needs new workers.
        """
        if not self._in_use.acquire(blocking=False):
            return False
        if self.progress.ended:
            self._next = iter(()).__next__
        else:
            self.progress.take_back()
            self._is_ready, self.is_released = False, True
        self._in_use.release()
        return True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_ready and self._prepare is not None:
            self._is_ready = True
            self._prepare(self)
        with self._in_use:
            if not self._is_ready:
                return next(self)  # Another thread took the workers meanwhile.
            try:
                number, batch = self._next()
            except StopIteration:
                self._next = iter(()).__next__  # With persistent workers, torch's iterator would start the next epoch.
                self.progress.ended = self.progress.begun
                raise
            except RuntimeError:
                self.progress.failed = True  # A worker may have been killed.
                raise
            if number is not None:
                self.progress.deliver(number)
            return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # Torch's iterator has a length.

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # During initialization.
            raise AttributeError(name)
        return getattr(self._batches, name)


class _NumberedBatches:
    """Torch's batches with their numbers; the program's global generators are restored after each."""

    def __init__(self, progress: EpochProgress) -> None:
        self._progress = progress

    def use(self, batches: Any) -> None:
        self._batches = batches
        self._has_workers = hasattr(batches, "_task_info")
        is_plain = type(batches) is _SingleProcessDataLoaderIter and batches._dataset_kind == _DatasetKind.Map  # noqa: SLF001
        self._unmarked = batches._next_data if is_plain else batches.__next__  # noqa: SLF001

    def __iter__(self) -> Iterator[NumberedBatch]:
        return self

    def __next__(self) -> NumberedBatch:
        try:
            # `__next__` only adds a profiler record, which took a tenth of the time of a batch of 16 at 100 x 100.
            profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
            batch = next(self._batches) if profiled else self._unmarked()
        except StopIteration as error:
            if not self._progress.waiting:
                raise
            raise _not_the_end(self._pop_finished()[1]) from error
        except BaseException as error:
            self._pop_finished()  # The failed batch is not delivered.
            if self._has_workers:
                # Torch's frames and the error reference each other, and workers would remain until garbage collection.
                traceback.clear_frames(error.__traceback__)
            raise
        return self._pop_finished()[0], batch

    def _pop_finished(self) -> tuple[int | None, Any]:
        """Return number and indices of the batch that torch returned, which may be out of order."""
        progress = self._progress
        if progress.has_borrowed:
            borrowed_generators(getpid()).restore()
            progress.has_borrowed = False
        if not self._has_workers:
            return progress.waiting.pop(0, (None, None))
        # Torch does not return the number of a batch, but removes the batch from its pending tasks. So it is the
        # waiting batch that is not pending.
        tasks = self._batches._task_info  # noqa: SLF001  # Pending tasks by their index.
        key = next((key for key in progress.waiting if key not in tasks), None)
        return (None, None) if key is None else progress.waiting.pop(key)


def _not_the_end(indices: Any) -> RuntimeError:
    """Return the error that replaces a `StopIteration` of a batch, which would end the loop."""
    samples = list(indices) if isinstance(indices, list | tuple) else [indices]
    listed = ", ".join(map(str, samples[:_INDICES_SHOWN])) + (", ..." if len(samples) > _INDICES_SHOWN else "")
    return RuntimeError(
        f"samples {listed}: collate_fn or the dataset raised StopIteration, which would end the epoch early; "
        f"add a default to its next() call"
    )
