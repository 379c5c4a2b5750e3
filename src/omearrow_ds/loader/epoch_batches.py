"""Batches of indices of an epoch, with seeds of their random numbers and requests for the pages of later batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from os import getpid
from typing import Any, Self

import torch
from torch.utils.data import get_worker_info

from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.loader.checkpoint import EpochProgress
from omearrow_ds.loader.device_transfer import unwrap
from omearrow_ds.loader.position import LoaderPosition
from omearrow_ds.loader.seeding import batch_seed, borrowed_generators, epoch_seed, seed_global_rngs
from omearrow_ds.loader.worker_processes import PickledCall


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
    """Iterable over the batches of indices of an epoch, drawn from the sampler of a loader.

    If batches are created in this process, the first item is a placeholder, None: requesting it draws the order when
    the epoch begins, as with workers, not when the first batch is requested.
    """

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
        progress = self.position.progress
        return self._for_workers(progress) if self.workers else self._for_this_process(progress)

    def _for_workers(self, progress: EpochProgress) -> Iterator[Any]:
        rest = progress.rest or self.draw(progress)
        for key, (number, indices) in enumerate(rest):
            progress.waiting[key] = number, indices
            seed = None if progress.seed is None else batch_seed(progress.seed, number)
            later = None if self.read_ahead is None else rest.peek(self.read_ahead[1])
            yield indices if seed is None and later is None else PickledCall(receive_indices, indices, seed, later)

    def _for_this_process(self, progress: EpochProgress) -> Iterator[Any]:
        rest = progress.rest or self.draw(progress)
        yield None
        dataset, distance = self.read_ahead or (None, 0)
        page_requests = None if dataset is None else unwrap(dataset)[0]._collection.page_requests
        for number, indices in rest:
            progress.waiting[0] = number, indices
            if page_requests is not None and page_requests.num_remaining:
                _request_pages(dataset, rest.peek(distance))
            if progress.seed is not None:
                borrowed_generators(getpid()).borrow(batch_seed(progress.seed, number))
                progress.has_borrowed = True
            yield indices

    def draw(self, progress: EpochProgress) -> RemainingBatches:
        """Draw the order of an epoch, and return its remaining batches."""
        if self.position.rest is not None:
            self.position.rest.draw()
        generators = [torch.default_generator, *self.generators]
        before = torch.default_generator.get_state()
        if progress.resumed:
            for generator, state in zip(generators, progress.states, strict=True):
                generator.set_state(state)
        else:
            progress.states = [generator.get_state() for generator in generators]
        length = count_batches(self.sampler)
        progress.total = None if length is None else progress.first + length
        progress.rest = rest = RemainingBatches(
            (number, indices)
            for number, indices in enumerate(self.sampler, progress.first)
            if number >= progress.batches and number not in progress.ahead
        )
        # An epoch that ends early leaves generators as at its end, since prefetching may have drawn all of it.
        self.position.rest = rest if self.generators and length is not None else None
        rest.peek(1)  # Samplers draw when their first batch is requested.
        if progress.resumed:
            torch.default_generator.set_state(before)
        progress.seed = None if self.rank is None else epoch_seed(self.seed_source(progress.states), self.rank)
        return rest

    def pass_over(self, progress: EpochProgress) -> None:
        """Advance the generators to the end of an epoch whose batches are skipped."""
        if self.generators and progress.begun:
            (progress.rest or self.draw(progress)).draw()


def count_batches(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def receive_indices(indices: Any, seed: bytes | None, later: Sequence[int] | None) -> Any:
    """Return the indices of a batch in a worker, after it seeds generators and requests the pages of a later batch."""
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
