"""`EpochProgress`: the position of a loader in an epoch, and its saved state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omearrow_ds.errors import ArgumentError

_VERSION = 2


@dataclass
class EpochProgress:
    """Position in one epoch."""

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
    has_borrowed: bool = False  # Whether the batch in preparation uses the global generators of the program.
    begun: bool = False  # Whether the order was drawn.
    ended: bool = False  # Whether all batches were delivered.
    failed: bool = False  # Whether the epoch ended in an error that workers may not have survived.
    resumed: bool = False  # Whether the epoch was begun by another loader.
    # For collections in parts: number of the first batch of this loader, and number of samples of all ranks before it.
    first: int = 0
    consumed: int = 0

    def deliver(self, number: int) -> None:
        self.ahead.add(number)
        while self.batches in self.ahead:
            self.ahead.remove(self.batches)
            self.batches += 1
        self.ended = self.batches == self.total

    def take_back(self) -> None:
        """Give batches that workers have not finished back to `RemainingBatches`, so that other workers create them."""
        if self.rest is not None:
            self.rest.put_back(self.waiting.values())
            self.waiting.clear()

    def state(self, generators: Sequence[torch.Generator], loader: dict[str, Any]) -> dict[str, Any]:
        """Return a state of numbers and tensors, from which `from_state` restores the progress."""
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
            raise ArgumentError(
                "is not a state of this version of OMEArrowDataLoader",
                option="state",
                value=state,
                remedy="pass a result of state_dict()",
            )
        states = list(state["generators"])
        saved = {"filter": None, **state["loader"], "generators": len(states) - state["begun"]}
        own = {"filter": None, **loader, "generators": len(generators)}
        differences = ", ".join(
            f"{name} was {saved.get(name)} and is now {value}"
            for name, value in own.items()
            if saved.get(name) != value
        )
        if differences:
            raise ArgumentError(
                f"was saved by a loader with other settings: {differences}",
                option="state",
                remedy="create the loader with the previous settings",
            )
        if state["begun"]:
            batches, ahead = int(state["batches"]), set(state["ahead"])
            return cls(int(state["epoch"]), batches, ahead, states=states, begun=True, resumed=True)
        for generator, generator_state in zip(generators, states, strict=True):
            generator.set_state(generator_state)
        return cls(int(state["epoch"]))
