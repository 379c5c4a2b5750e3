"""`Progress`: the place of a loader in its epochs, from which an epoch is begun again or continued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Self

import torch

from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.seeds import Lent, Seeded, Seeds, of_batch

_VERSION = 2


@dataclass
class Progress:
    """How far an epoch is."""

    epoch: int = 0  # number of the epoch, from 0
    batches: int = 0  # batches that were delivered without one before them missing
    # numbers of the batches that were delivered before others that come before them in the epoch
    ahead: set[int] = field(default_factory=set)
    # number in the epoch of each batch that is being made, by its place among those that workers were given; without
    # workers the place is 0
    waiting: dict[int, int] = field(default_factory=dict)
    # what torch's global generator, and then those of the loader and its samplers, were at when the order was drawn
    states: list[torch.Tensor] = field(default_factory=list)
    begun: bool = False  # whether it was begun; an epoch that was not yet has drawn nothing
    failed: bool = False  # whether it ended in an error that workers may not have survived
    resumed: bool = False  # whether it was begun elsewhere
    # the program's global generators, where batches are made in its process and draw from them
    lent: Lent | None = None
    # first, consumed: of a collection in parts: the number of the first batch that is made here, and how many samples
    # of all ranks come before it
    first: int = 0
    consumed: int = 0

    def deliver(self, number: int) -> None:
        """Note that the program has a batch."""
        if number != self.batches:
            self.ahead.add(number)
            return
        self.batches += 1
        while self.batches in self.ahead:
            self.ahead.remove(self.batches)
            self.batches += 1

    def end(self) -> None:
        """Note that all batches were delivered."""
        self.epoch, self.batches, self.begun, self.first, self.consumed = self.epoch + 1, 0, False, 0, 0
        self.ahead.clear()


class Rest:
    """The batches of indices that an epoch has still to draw."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches = batches
        self._drawing = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._drawing:
            return next(self._batches)

    def draw(self) -> None:
        """Draw all of them now."""
        with self._drawing:
            self._batches = iter(list(self._batches))


@dataclass
class Place:
    """Which epoch a loader is in, apart from the loader: what torch's iterator holds must not hold the loader again.

    Torch ends workers when its iterator is dropped; left to the garbage collector that takes 5 s a worker.
    """

    progress: Progress = field(default_factory=Progress)
    rest: Rest | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Carry nothing of the epoch that is going on here."""
        return {"progress": self.progress, "rest": None}


class Order:
    """The batches of indices of an epoch, as a loader's sampler gives them.

    Parameters
    ----------
    sampler
        What the loader takes indices from.
    place
        Tells the epoch that the next iteration is of.
    generators
        Generators that the order may be drawn from, beside torch's global one.
    drawing
        What batches that draw random numbers are seeded from; None if they draw none.
    seeds
        Returns what the random numbers of the epoch follow from; None: what these generators are at.
    workers
        Whether batches are made in other processes. If not, the first item is no batch: it has the order drawn when the
        epoch is begun, as it is with workers, not when the first batch is asked for.
    """

    def __init__(
        self,
        sampler: Any,
        place: Place,
        generators: Sequence[torch.Generator],
        *,
        drawing: Seeds | None,
        workers: bool,
        seeds: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._sampler = sampler
        self._place = place
        self._generators = generators
        self._drawing = drawing
        self._workers = workers
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(self._place.progress)

    def _indices(self, progress: Progress) -> Iterator[Any]:
        if self._place.rest is not None:
            self._place.rest.draw()
        generators = [torch.default_generator, *self._generators]
        before = torch.default_generator.get_state()
        if progress.resumed:
            for generator, state in zip(generators, progress.states, strict=True):
                generator.set_state(state)
        else:
            progress.states = [generator.get_state() for generator in generators]
        left = Rest(_left(self._sampler, progress))
        # An epoch that is left early leaves generators as at its end: workers, who are ahead, may have drawn all of it.
        self._place.rest = left if self._generators and _ends(self._sampler) else None
        first = list(islice(left, 1))
        if progress.resumed:
            torch.default_generator.set_state(before)
        if not self._workers:
            yield None
        states = progress.states if self._seeds is None else [self._seeds()] * 2
        epoch = None if self._drawing is None else self._drawing.of_epoch(states)
        lent = progress.lent = None if epoch is None or self._workers else Lent()
        place = 0
        for number, indices in chain(first, left):
            progress.waiting[place] = number
            place += self._workers
            if lent is not None and epoch is not None:
                lent.lend(of_batch(epoch, number))
            yield indices if epoch is None or lent is not None else Seeded(indices, of_batch(epoch, number))


def _left(sampler: Any, progress: Progress) -> Iterator[tuple[int, Any]]:
    for number, batch in enumerate(sampler, progress.first):
        if number >= progress.batches and number not in progress.ahead:
            yield number, batch


def _ends(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def check(state: dict[str, Any], loader: dict[str, int]) -> None:
    """Raise `ArgumentError` if a state is not one of a loader that gives the same batches."""
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ArgumentError(f"no state of an OMEArrowDataLoader, or of another version of it: {state!r:.200}")
    changed = {name: (state.get("loader", {}).get(name), value) for name, value in loader.items()}
    told = ", ".join(f"{name} was {then}, is {now}" for name, (then, now) in changed.items() if then != now)
    if told:
        raise ArgumentError(
            f"the state is of another loader: {told}; make the loader as it was when the state was taken"
        )


def state_of(progress: Progress, generators: Sequence[torch.Generator], loader: dict[str, int]) -> dict[str, Any]:
    """Return what `resumed` continues from: plain numbers and tensors."""
    states = progress.states if progress.begun else [each.get_state() for each in generators]
    return {
        "version": _VERSION,
        "epoch": progress.epoch,
        "batches": progress.batches,
        "ahead": sorted(progress.ahead),
        "begun": progress.begun,
        "generators": [state.clone() for state in states],
        "loader": loader,
    }


def resumed(state: dict[str, Any], generators: Sequence[torch.Generator]) -> Progress:
    """Return the epoch of a state; at its beginning, the loader's own generators go on from where they were."""
    epoch, begun, states = int(state["epoch"]), bool(state["begun"]), list(state["generators"])
    if len(states) != len(generators) + begun:
        raise ArgumentError("the state is of a loader with other generators; make the loader as it was")
    if begun:
        batches, ahead = int(state["batches"]), set(state["ahead"])
        return Progress(epoch, batches, ahead, states=states, begun=True, resumed=True)
    for generator, generator_state in zip(generators, states, strict=True):
        generator.set_state(generator_state)
    return Progress(epoch)
