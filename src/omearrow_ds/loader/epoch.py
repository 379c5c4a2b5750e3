"""`Epoch`: a loader's batches as the program gets them, counted, and on the device that it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from omearrow_ds.loader.device import Numbered, Travelled, on_device
from omearrow_ds.loader.resume import Progress


class Epoch:
    """An iterator over batches.

    What torch's own iterator, ``batches``, has beside can be had here. Batches are delivered on ``device``, None leaves
    them where they are, and counted in ``progress``; ``travelled`` says what becomes of pixels that travel as they are
    stored, ``there`` whether images are made on a device.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        device: torch.device | None,
        progress: Progress,
        travelled: Travelled | None = None,
        *,
        there: bool = False,
    ) -> None:
        self._batches = batches
        self._progress = progress
        numbered = _Numbered(batches, progress)
        self._next = (numbered if device is None else on_device(numbered, device, travelled, there=there)).__next__

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            number, batch = self._next()
        except StopIteration:
            self._next = iter(()).__next__  # torch's iterator, with workers that live on, gives the next epoch's too
            if self._progress.begun:
                self._progress.end()
            raise
        except BaseException as error:
            self._progress.failed = self._progress.failed or isinstance(error, RuntimeError)  # if a worker was killed
            _out_of_its_cycle(error)
            raise
        if number is not None:
            self._progress.deliver(number)
        return batch

    @property
    def going_on(self) -> bool:
        """Whether it has more batches to give, as far as is known."""
        return self._progress.begun

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterator has a length

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while it is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def _out_of_its_cycle(error: BaseException) -> None:
    """Clear the frame in which torch raised a worker's error, which holds it, as it holds the frame.

    The frames above hold torch's iterator, its workers and their pipes: they would last until garbage is collected.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is ExceptionWrapper.reraise.__code__:
            trace.tb_frame.clear()
        trace = trace.tb_next


class _Numbered:
    """Torch's batches with their numbers; after each the global generators are the program's again."""

    def __init__(self, batches: Any, progress: Progress) -> None:
        self._batches = batches
        self._progress = progress
        self._by_workers = hasattr(batches, "_task_info")
        plain = type(batches) is _SingleProcessDataLoaderIter and batches._dataset_kind == _DatasetKind.Map  # noqa: SLF001
        self._unmarked = batches._next_data if plain else batches.__next__  # noqa: SLF001

    def __iter__(self) -> Iterator[Numbered]:
        return self

    def __next__(self) -> Numbered:
        try:
            # What torch does beside is a mark for its profiler: that took a tenth of a batch of 16 of 100 x 100.
            profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
            batch = next(self._batches) if profiled else self._unmarked()
        except BaseException:
            self._made()  # the one that failed is not delivered
            raise
        return self._made(), batch

    def _made(self) -> int | None:
        """Return the number of the batch that torch has done with, which may be any where they need not be in order."""
        progress = self._progress
        if not self._by_workers:
            if progress.lent is not None:
                progress.lent.give_back()
            return progress.waiting.get(0)
        # Torch does not say which batch it gives. But it forgets a batch when it gives it: the one that waits here and
        # that torch no longer knows of.
        tasks = self._batches._task_info  # noqa: SLF001  # those that it has not done with, by their place
        place = next((place for place in progress.waiting if place not in tasks), None)
        return None if place is None else progress.waiting.pop(place)
