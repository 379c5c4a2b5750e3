"""Position of a loader in an epoch, its saved state, and the choice of the next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed

from omearrow_ds.errors import ArgumentError

_VERSION = 2


@dataclass
class EpochProgress:
    epoch: int = 0
    batches: int = 0  # Number of the first batch that was not delivered.
    ahead: set[int] = field(default_factory=set)  # Numbers of later batches that were already delivered.
    total: int | None = None  # Number of batches of the epoch; None if the sampler has no length.
    # Number in the epoch and indices of each batch in preparation. The key is its number among the batches given to
    # the workers, 0 without workers.
    waiting: dict[int, tuple[int, Any]] = field(default_factory=dict)
    rest: Any = None  # `RemainingBatches`; None before the order is drawn.
    # States of torch's global generator, and of those of the loader and its samplers, when the order was drawn.
    states: list[torch.Tensor] = field(default_factory=list)
    seed: bytes | None = None  # Determines the random numbers of the batches; None without random numbers.
    begun: bool = False  # Whether the order was drawn.
    ended: bool = False  # Whether all batches were delivered.
    failed: bool = False  # Whether the epoch ended in an error that workers may not have survived.
    resumed: bool = False  # Whether the epoch was begun by another loader.
    has_requested: bool = False  # Whether pages of a later batch were requested for the batch in preparation.
    # For collections in parts: number of the first batch of this loader, and number of samples of all ranks before it.
    first: int = 0
    consumed: int = 0

    def set_length(self, sampler: Any) -> None:
        """Set the number of batches to that of a batch sampler, None if it has no length."""
        try:
            self.total = self.first + len(sampler)
        except (TypeError, NotImplementedError):
            self.total = None

    def deliver(self, number: int) -> None:
        if number == self.batches:
            self.batches += 1
        else:
            self.ahead.add(number)
        while self.batches in self.ahead:
            self.ahead.remove(self.batches)
            self.batches += 1
        self.ended = self.batches == self.total

    def state(self, generators: Sequence[torch.Generator], loader: dict[str, Any]) -> dict[str, Any]:
        states = self.states if self.begun else [generator.get_state() for generator in generators]
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "ahead": sorted(self.ahead),
            "begun": self.begun,
            "generators": [state.clone() for state in states],
            "loader": loader,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], generators: Sequence[torch.Generator], loader: dict[str, Any]
    ) -> EpochProgress:
        """Return the progress of a saved state; also restore the random generators if its epoch had not begun."""
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            problem = "is not a state of this version of OMEArrowDataLoader"
            raise ArgumentError(problem, option="state", value=state, remedy="pass a result of state_dict()")
        states = list(state["generators"])
        saved = {"filter": None, **state["loader"], "generators": len(states) - state["begun"]}
        differences = describe_differences(saved, {"filter": None, **loader, "generators": len(generators)})
        if differences:
            problem = f"was saved by a loader with other settings: {differences}"
            raise ArgumentError(problem, option="state", remedy="create the loader with the previous settings")
        if state["begun"]:
            batches, ahead = int(state["batches"]), set(state["ahead"])
            return cls(int(state["epoch"]), batches, ahead, states=states, begun=True, resumed=True)
        for generator, generator_state in zip(generators, states, strict=True):
            generator.set_state(generator_state)
        return cls(int(state["epoch"]))


def describe_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return the settings of a loader that differ from those in a saved state, as text."""
    changed = ((name, value) for name, value in own.items() if saved.get(name) != value)
    return ", ".join(f"{name} was {saved.get(name)} and is now {value}" for name, value in changed)


@dataclass(eq=False)
class LoaderPosition:
    """Epoch of a loader, in a separate object, since torch's iterator must not reference the loader.

    Torch ends workers when its iterator is dropped. In a reference cycle, garbage collection takes 5 s per worker.

    A single process begins a new epoch with each iteration. Several ranks do so after the last batch or by
    ``set_epoch``, so that a rank that left an iteration early, for example to show a batch, keeps the common order.
    """

    samplers: Sequence[Any] = (None,)  # Sampler and batch sampler of the loader, and the sampler of the latter.
    sets_epochs: bool = False  # Whether the loader created the sampler, and sets its epoch.
    progress: EpochProgress = field(default_factory=EpochProgress)
    rest: Any = None  # `RemainingBatches` of the last epoch whose order was drawn from generators of the loader.
    saved: EpochProgress | None = None  # Loaded, and not yet continued.
    # Epochs that a framework chose by ``sampler.set_epoch``; the last one counts. Samplers reference this list and not
    # the position: in a reference cycle, a dataset would remain in memory.
    choices: list[int] = field(default_factory=list)
    was_chosen: bool = False  # Whether an epoch was ever chosen.

    def __post_init__(self) -> None:
        """Give samplers without ``set_epoch`` this method, which Lightning calls; most samplers of torch lack it."""
        self.sampler_epoch = self._epoch_of_sampler  # The last known one.
        for sampler in self.samplers:
            if not _has_set_epoch(sampler):
                with suppress(AttributeError):  # Lists and other objects without attributes.
                    sampler.set_epoch = partial(list.append, self.choices)

    @property
    def _epoch_of_sampler(self) -> int | None:
        epoch = getattr(self.samplers[0], "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def pop_chosen(self) -> int | None:
        chosen = self.choices[-1] if self.choices else None
        self.choices.clear()
        epoch = self._epoch_of_sampler
        if self.sampler_epoch != epoch:
            chosen = self.sampler_epoch = epoch
        self.was_chosen = self.was_chosen or chosen is not None
        return chosen

    def pop_next(self, *, is_single: bool) -> tuple[EpochProgress, EpochProgress | None]:
        """Return the beginning of the next iteration, and the loaded progress that it discards, or None.

        ``is_single`` is whether this process is the only rank.
        """
        chosen, saved, self.saved = self.pop_chosen(), self.saved, None
        # A framework that counts the iterations of this process begins at 0, also after a later epoch was saved.
        if saved is not None and (chosen is None or chosen <= saved.epoch):
            return saved, None
        if chosen is None and (not self.sets_epochs or (self.was_chosen and not is_single)):
            chosen = self.sampler_epoch
        if chosen is not None:
            return EpochProgress(chosen), saved
        last = self.progress
        return EpochProgress(last.epoch + (last.ended or (last.begun and is_single))), None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which continues a loaded state if the state is from this epoch."""
        self.progress, self.was_chosen = EpochProgress(epoch), True
        self.choices.clear()
        self.set_samplers(epoch, always=True)

    def set_samplers(self, epoch: int, *, always: bool) -> None:
        """Set the epoch of the samplers, if the loader created them or ``always`` is True."""
        if always or self.sets_epochs:
            for sampler in filter(_has_set_epoch, self.samplers):
                sampler.set_epoch(epoch)
            self.sampler_epoch = self._epoch_of_sampler

    def following(self) -> EpochProgress:
        if not self.progress.ended:
            return self.progress
        if self.rest is not None:
            self.rest.draw()  # Advances the generators to the beginning of the next epoch.
        return EpochProgress(self.progress.epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "progress": replace(self.following(), rest=None, waiting={}), "rest": None}


def _has_set_epoch(sampler: Any) -> bool:
    """Whether a sampler has its own ``set_epoch``, not one added by this package."""
    set_epoch = getattr(sampler, "set_epoch", None)
    return set_epoch is not None and getattr(set_epoch, "func", None) is not list.append


def rank_and_world_size() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
