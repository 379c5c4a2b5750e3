"""`EpochProgress`: the position of a loader in an epoch, from which the epoch is continued or the next one begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from typing import Any, Self

import torch

from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.read_ahead import ReadAhead, request_in_worker
from omearrow_ds.loader.seeds import BorrowedGenerators, EpochSeeds, OnArrival, batch_seed, seed_global_rngs

_VERSION = 2


@dataclass
class EpochProgress:
    """Position in one epoch.

    Attributes
    ----------
    epoch
        Number of the epoch, from 0.
    batches
        Number of the first batch that was not delivered.
    ahead
        Numbers of later batches that were already delivered.
    total
        Number of batches of the epoch; None if the sampler has no length.
    waiting
        Number in the epoch and indices of each batch in preparation. The key is its number among the batches given to
        the workers, 0 without workers.
    rest
        Batches of indices that were not given to the workers; None before the order is drawn.
    states
        States of torch's global generator, and of those of the loader and its samplers, when the order was drawn.
    seed
        Seed of the random numbers of the batches, or None without random numbers.
    borrowed
        Saved global generators of the program, if batches are created in its process and draw random numbers.
    begun, ended
        Whether the order was drawn, and whether all batches were delivered.
    failed
        Whether the epoch ended in an error that workers may not have survived.
    resumed
        Whether the epoch was begun by another loader.
    first, consumed
        Collections in parts only: number of the first batch that this loader creates, and number of samples of all
        ranks before it.
    """

    epoch: int = 0
    batches: int = 0
    ahead: set[int] = field(default_factory=set)
    total: int | None = None
    waiting: dict[int, tuple[int, Any]] = field(default_factory=dict)
    rest: RemainingBatches | None = None
    states: list[torch.Tensor] = field(default_factory=list)
    seed: bytes | None = None
    borrowed: BorrowedGenerators | None = None
    begun: bool = False
    ended: bool = False
    failed: bool = False
    resumed: bool = False
    first: int = 0
    consumed: int = 0

    def deliver(self, number: int) -> None:
        if number != self.batches:
            self.ahead.add(number)
            return
        self.batches += 1
        while self.batches in self.ahead:
            self.ahead.remove(self.batches)
            self.batches += 1
        self.ended = self.batches == self.total

    def take_back(self) -> None:
        """Give batches that workers have not finished back to `RemainingBatches`, so that other workers create them."""
        if self.rest is not None:
            self.rest.put_back(self.waiting.values())
            self.waiting.clear()


class RemainingBatches:
    """Batches of an epoch, as indices and batch numbers, that have not been given to the workers."""

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


@dataclass
class LoaderPosition:
    """Epoch of a loader, in a separate object, since torch's iterator must not reference the loader.

    Torch ends workers when its iterator is dropped. In a reference cycle, garbage collection takes 5 s per worker.
    """

    progress: EpochProgress = field(default_factory=EpochProgress)
    rest: RemainingBatches | None = (
        None  # The rest of the last epoch whose order was drawn from generators of the loader.
    )
    saved: EpochProgress | None = None  # Loaded, and not yet continued.
    chosen: int | None = None  # Epoch that a framework chose.

    def choose(self, epoch: int) -> None:
        """Store the epoch that a framework sets by ``sampler.set_epoch``, until the next iteration."""
        self.chosen = epoch

    def following(self) -> EpochProgress:
        if not self.progress.ended:
            return self.progress
        if self.rest is not None:
            self.rest.draw()  # Advances the generators to the beginning of the next epoch.
        return EpochProgress(self.progress.epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the current iteration of this process."""
        progress = replace(self.following(), rest=None, waiting={}, borrowed=None)
        return {"progress": progress, "rest": None, "saved": self.saved, "chosen": self.chosen}


@dataclass(eq=False)
class EpochBatchSampler:
    """Iterable over the batches of indices of an epoch, drawn from the sampler of a loader.

    Attributes
    ----------
    sampler
        Source of the batches of indices.
    position
        Holds the epoch that the next iteration belongs to.
    generators
        Generators that the order may be drawn from, in addition to torch's global one.
    drawing
        Source of the seeds of batches that draw random numbers; None if they draw none.
    seeds
        Returns the numbers that determine the seed of the epoch; None uses the states of the generators.
    ahead
        Requests the pages of later batches; None if batches must not be drawn before they are needed.
    workers
        Whether batches are created in other processes. Otherwise the first item is a placeholder, None: requesting it
        draws the order when the epoch begins, as with workers, not when the first batch is requested.
    """

    sampler: Any
    position: LoaderPosition
    generators: Sequence[torch.Generator]
    _: KW_ONLY
    drawing: EpochSeeds | None
    workers: bool
    seeds: Callable[[], torch.Tensor] | None = None
    ahead: ReadAhead | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(self.position.progress)

    def _indices(self, progress: EpochProgress) -> Iterator[Any]:
        rest = self.draw(progress) if progress.rest is None else progress.rest
        if not self.workers:
            yield None
        seed = progress.seed
        borrowed = progress.borrowed = None if seed is None or self.workers else BorrowedGenerators()
        key, ahead = 0, self.ahead
        for number, indices in rest:
            progress.waiting[key] = number, indices
            key += self.workers
            if borrowed is not None and seed is not None:
                borrowed.borrow(batch_seed(seed, number))
            if ahead is not None and self.workers:
                indices = OnArrival(indices, request_in_worker, rest.peek(ahead.distance))  # noqa: PLW2901  # Wrapped for sending.
            elif ahead is not None and ahead.requests.num_remaining:
                ahead.request(rest.peek(ahead.distance))
            if seed is not None and borrowed is None:
                indices = OnArrival(indices, seed_global_rngs, batch_seed(seed, number))  # noqa: PLW2901  # As above.
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
        progress.rest = rest = RemainingBatches(_left(self.sampler, progress))
        # An epoch that ends early leaves generators as at its end, since prefetching may have drawn all of it.
        self.position.rest = rest if self.generators and length is not None else None
        rest.put_back([first for first in [next(rest, None)] if first is not None])
        if progress.resumed:
            torch.default_generator.set_state(before)
        states = progress.states if self.seeds is None else [self.seeds()] * 2
        progress.seed = None if self.drawing is None else self.drawing.of_epoch(states)
        return rest

    def pass_over(self, progress: EpochProgress) -> None:
        """Advance the generators to the end of an epoch whose batches are skipped."""
        if self.generators and progress.begun:
            (self.draw(progress) if progress.rest is None else progress.rest).draw()


def _left(sampler: Any, progress: EpochProgress) -> Iterator[tuple[int, Any]]:
    for number, batch in enumerate(sampler, progress.first):
        if number >= progress.batches and number not in progress.ahead:
            yield number, batch


def count_batches(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def check(state: dict[str, Any], loader: dict[str, int]) -> None:
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ArgumentError(
            "not a state of this version of OMEArrowDataLoader", option="state", value=state, remedy="pass state_dict()"
        )
    saved = state.get("loader", {})
    changed = {name: (saved.get(name), loader.get(name)) for name in dict.fromkeys([*loader, "filter"])}
    differences = ", ".join(f"{name} was {then}, is {now}" for name, (then, now) in changed.items() if then != now)
    if differences:
        raise ArgumentError(
            f"is from a loader with other settings: {differences}", option="state", remedy="create the loader as before"
        )


def state_of(progress: EpochProgress, generators: Sequence[torch.Generator], loader: dict[str, int]) -> dict[str, Any]:
    """Return a state of numbers and tensors, from which `resumed` restores the progress."""
    states = progress.states if progress.begun else [generator.get_state() for generator in generators]
    return {
        "version": _VERSION,
        "epoch": progress.epoch,
        "batches": progress.batches,
        "ahead": sorted(progress.ahead),
        "begun": progress.begun,
        "generators": [state.clone() for state in states],
        "loader": loader,
    }


def resumed(state: dict[str, Any], generators: Sequence[torch.Generator]) -> EpochProgress:
    """Return the progress of a saved state; also restore the random generators if its epoch had not begun."""
    epoch, begun, states = int(state["epoch"]), bool(state["begun"]), list(state["generators"])
    if len(states) != len(generators) + begun:
        raise ArgumentError("has another number of generators", option="state", remedy="create the loader as before")
    if begun:
        batches, ahead = int(state["batches"]), set(state["ahead"])
        return EpochProgress(epoch, batches, ahead, states=states, begun=True, resumed=True)
    for generator, generator_state in zip(generators, states, strict=True):
        generator.set_state(generator_state)
    return EpochProgress(epoch)
