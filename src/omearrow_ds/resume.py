"""Where a loader is in its epochs, and how an epoch is begun again and continued from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch

from omearrow_ds.errors import ArgumentError

_VERSION = 1


@dataclass
class Progress:
    """How far an epoch is.

    Attributes
    ----------
    epoch : int
        Number of the epoch, from 0.
    batches : int
        Batches that were delivered.
    states : list of torch.Tensor
        What torch's global generator, and then those of the loader and its samplers, were at when the order was drawn.
    begun : bool
        Whether it was begun; an epoch that was not yet has drawn nothing.
    failed : bool
        Whether it ended in an error that workers may not have survived.
    resumed : int or None
        Batches that were delivered before the epoch was resumed, None if it was not.
    augmenting : torch.Tensor or None
        State of torch's global generator while this process makes a batch, apart from that of the program.
    """

    epoch: int = 0
    batches: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    begun: bool = False
    failed: bool = False
    resumed: int | None = None
    augmenting: torch.Tensor | None = None
    outside: torch.Tensor | None = None

    def end(self) -> None:
        """Note that all batches were delivered."""
        self.epoch, self.batches, self.begun = self.epoch + 1, 0, False

    def leave(self) -> None:
        """Give torch's global generator back to the program, after a batch was made in this process."""
        if self.outside is not None:
            self.augmenting = torch.default_generator.get_state()
            torch.default_generator.set_state(self.outside)
            self.outside = None

    def enter(self) -> None:
        """Draw augmentations apart from the program while a batch is made here, lest they change the next order."""
        if self.augmenting is not None:
            self.outside = torch.default_generator.get_state()
            torch.default_generator.set_state(self.augmenting)


@dataclass
class Place:
    """Which epoch a loader is in, apart from the loader: what torch's iterator holds must not hold the loader again.

    Torch ends workers when its iterator is dropped; left to the garbage collector that takes 5 s a worker.
    """

    progress: Progress = field(default_factory=Progress)


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
    mark
        What a batch of indices is made, to tell the dataset who asks; None leaves it.
    """

    def __init__(self, sampler: Any, place: Place, generators: Sequence[torch.Generator], *, mark: type | None) -> None:
        self._sampler = sampler
        self._place = place
        self._generators = generators
        self._mark = mark

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(self._place.progress)

    def _indices(self, progress: Progress) -> Iterator[Any]:
        generators = [torch.default_generator, *self._generators]
        before = torch.default_generator.get_state()
        if progress.resumed is not None:
            for generator, state in zip(generators, progress.states, strict=True):
                generator.set_state(state)
        else:
            progress.states = [generator.get_state() for generator in generators]
        batches = iter(self._sampler)
        for _ in islice(batches, progress.resumed or 0):
            pass
        first = list(islice(batches, 1))
        if progress.resumed is not None:
            torch.default_generator.set_state(before)
        for batch in chain(first, batches):
            progress.enter()
            yield batch if self._mark is None else self._mark(batch)


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
    states = progress.states if progress.begun else []
    if not states:  # what the order is drawn from next
        order_of = [torch.default_generator, *generators] if progress.begun else generators
        states = [each.get_state() for each in order_of]
    return {
        "version": _VERSION,
        "epoch": progress.epoch,
        "batches": progress.batches,
        "begun": progress.begun,
        "generators": [state.clone() for state in states],
        "loader": loader,
    }


def resumed(state: dict[str, Any], generators: Sequence[torch.Generator]) -> Progress:
    """Return the epoch of a state; at its beginning, the loader's own generators go on from where they were."""
    epoch, batches, begun, states = (
        int(state["epoch"]),
        int(state["batches"]),
        bool(state["begun"]),
        state["generators"],
    )
    if len(states) != len(generators) + begun:
        raise ArgumentError("the state is of a loader with other generators; make the loader as it was")
    if begun:
        return Progress(epoch, batches, list(states), begun=True, resumed=batches)
    for generator, generator_state in zip(generators, states, strict=True):
        generator.set_state(generator_state)
    return Progress(epoch)
