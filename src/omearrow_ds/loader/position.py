"""`LoaderPosition`: the epoch of a loader, chosen by the loader, ``set_epoch``, or a framework."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from omearrow_ds.loader import settings
from omearrow_ds.loader.checkpoint import EpochProgress


@dataclass(eq=False)
class LoaderPosition:
    """Epoch of a loader, in a separate object, since torch's iterator must not reference the loader.

    Torch ends workers when its iterator is dropped. In a reference cycle, garbage collection takes 5 s per worker.

    A single process begins a new epoch with each iteration. Several ranks do so after the last batch or by
    ``set_epoch``, so that a rank that left an iteration early, for example to show a batch, keeps the common order.

    ``samplers`` of the methods are those of the loader; the first one may have an attribute ``epoch``.
    """

    sets_epochs: bool = False  # Whether the loader created the sampler, and sets its epoch.
    progress: EpochProgress = field(default_factory=EpochProgress)
    rest: Any = None  # `RemainingBatches` of the last epoch whose order was drawn from generators of the loader.
    saved: EpochProgress | None = None  # Loaded, and not yet continued.
    chosen: int | None = None  # Epoch that a framework chose by ``sampler.set_epoch`` for the next iteration.
    sampler_epoch: int | None = None  # The last known epoch of the sampler.
    is_fixed: bool = True  # Whether iterations have the epoch of the sampler if none is chosen.

    def watch(self, samplers: Sequence[Any]) -> None:
        """Give samplers without ``set_epoch`` this method, which Lightning calls; most samplers of torch lack it."""
        self.is_fixed, self.sampler_epoch = not self.sets_epochs, _epoch_of(samplers)
        for sampler in samplers:
            if not _has_set_epoch(sampler):
                with suppress(AttributeError):  # Lists and other objects without attributes.
                    sampler.set_epoch = self.choose

    def choose(self, epoch: int) -> None:
        self.chosen = epoch

    def pop_chosen(self, samplers: Sequence[Any]) -> int | None:
        """Return the epoch that a framework set since the last iteration began, or None."""
        chosen, self.chosen = self.chosen, None
        epoch = _epoch_of(samplers)
        if epoch != self.sampler_epoch:
            chosen = self.sampler_epoch = epoch
        if chosen is not None:
            self.is_fixed = not self.sets_epochs or not _is_single_process()
        return chosen

    def pop_next(self, samplers: Sequence[Any]) -> tuple[EpochProgress, EpochProgress | None]:
        """Return the beginning of the next iteration, and the loaded progress that it discards, or None."""
        chosen, saved, self.saved = self.pop_chosen(samplers), self.saved, None
        # A framework that counts the iterations of this process begins at 0, also after a later epoch was saved.
        if saved is not None and (chosen is None or chosen <= saved.epoch):
            return saved, None
        if chosen is None and self.is_fixed:
            chosen = _epoch_of(samplers)
        if chosen is not None:
            return EpochProgress(chosen), saved
        last = self.progress
        return EpochProgress(last.epoch + (last.ended or (last.begun and _is_single_process()))), None

    def set_epoch(self, epoch: int, samplers: Sequence[Any]) -> None:
        """Choose the epoch of the next iteration, which continues a loaded state if the state is from this epoch."""
        if self.saved is not None and self.saved.epoch != epoch:
            self.saved = None
        self.progress, self.chosen = EpochProgress(epoch), None
        self.is_fixed = not self.sets_epochs or not _is_single_process()
        self.set_samplers(epoch, samplers, always=True)

    def set_samplers(self, epoch: int, samplers: Sequence[Any], *, always: bool) -> None:
        """Set the epoch of the samplers, if the loader created them or ``always`` is True."""
        for sampler in samplers if always or self.sets_epochs else ():
            if _has_set_epoch(sampler):
                sampler.set_epoch(epoch)
        self.sampler_epoch = _epoch_of(samplers)

    def following(self) -> EpochProgress:
        """Return the progress of the current epoch, or of the next one if the current epoch has ended."""
        if not self.progress.ended:
            return self.progress
        if self.rest is not None:
            self.rest.draw()  # Advances the generators to the beginning of the next epoch.
        return EpochProgress(self.progress.epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the current iteration of this process."""
        progress = replace(self.following(), rest=None, waiting={}, has_borrowed=False)
        return {**vars(self), "progress": progress, "rest": None}


def _is_single_process() -> bool:
    return settings.rank_and_world_size()[1] == 1


def _epoch_of(samplers: Sequence[Any]) -> int | None:
    epoch = getattr(samplers[0], "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _has_set_epoch(sampler: Any) -> bool:
    """Whether a sampler has its own ``set_epoch``, not one added by this package."""
    set_epoch = getattr(sampler, "set_epoch", None)
    return set_epoch is not None and not isinstance(getattr(set_epoch, "__self__", None), LoaderPosition)
