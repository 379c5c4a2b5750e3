"""Choice of the epoch of each iteration: by the loader, ``set_epoch``, or a framework that sets the sampler's epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from omearrow_ds.loader import settings
from omearrow_ds.loader.resume import EpochProgress, LoaderPosition


class EpochChoice:
    """Choice of the epoch to which the next iteration over a loader belongs.

    A single process begins a new epoch with each iteration. Several ranks do so after the last batch or by
    ``set_epoch``, so that a rank that left an iteration early, for example to show a batch, keeps the common order.

    Parameters
    ----------
    position
        Position of the loader.
    samplers
        Samplers of the loader; the first one may have an attribute ``epoch``.
    shares
        Whether the loader made the sampler, and sets its epoch.
    """

    def __init__(self, position: LoaderPosition, samplers: Sequence[Any], *, shares: bool) -> None:
        self._position, self._samplers, self._shares = position, samplers, shares
        self._is_fixed = not shares
        self._last = self._epoch_of_sampler()
        for sampler in samplers:
            if not _has_set_epoch(sampler):
                with suppress(AttributeError):  # Lists and other objects without attributes.
                    sampler.set_epoch = position.choose  # Lightning calls it; most samplers of torch lack it.

    def _epoch_of_sampler(self) -> int | None:
        epoch = getattr(self._samplers[0], "epoch", None)
        return epoch if isinstance(epoch, int) else None

    @property
    def orders_differ(self) -> bool:
        return self._last is not None

    def chosen(self) -> int | None:
        """Return the epoch that a framework set since the last iteration began, or None."""
        chosen, self._position.chosen = self._position.chosen, None
        epoch = self._epoch_of_sampler()
        if epoch != self._last:
            chosen, self._last = epoch, epoch
        if chosen is not None:
            self._is_fixed = not (self._shares and _is_single_process())
        return chosen

    def next(self, discard: Callable[[EpochProgress, int], None]) -> EpochProgress:
        """Return where the next iteration begins; call ``discard`` if a later epoch than the loaded one was chosen."""
        chosen, saved = self.chosen(), self._position.saved
        self._position.saved = None
        # A framework that counts the iterations of this process begins at 0, also after a later epoch was saved.
        if saved is not None and (chosen is None or chosen <= saved.epoch):
            return saved
        if saved is not None and chosen is not None:
            discard(saved, chosen)
        if chosen is None and self._is_fixed:
            chosen = self._epoch_of_sampler()
        if chosen is not None:
            return EpochProgress(chosen)
        last = self._position.progress
        return EpochProgress(last.epoch + (last.ended or (last.begun and _is_single_process())))

    def set(self, epoch: int, discard: Callable[[EpochProgress, int], None]) -> None:
        """Choose the epoch of the next iteration, which continues a loaded state if the state is from this epoch."""
        saved = self._position.saved
        if saved is not None and saved.epoch != epoch:
            discard(saved, epoch)
            self._position.saved = None
        self._position.progress, self._position.chosen = EpochProgress(epoch), None
        self._is_fixed = not (self._shares and _is_single_process())
        self.set_samplers(epoch, always=True)

    def set_samplers(self, epoch: int, *, always: bool) -> None:
        """Set the epoch of the samplers, if the loader created them or ``always`` is True."""
        for sampler in self._samplers if always or self._shares else ():
            if _has_set_epoch(sampler):
                sampler.set_epoch(epoch)
        self._last = self._epoch_of_sampler()


def _is_single_process() -> bool:
    return settings.rank_and_world_size()[1] == 1


def _has_set_epoch(sampler: Any) -> bool:
    """Whether a sampler has its own ``set_epoch``, not one added by this package."""
    set_epoch = getattr(sampler, "set_epoch", None)
    return set_epoch is not None and not isinstance(getattr(set_epoch, "__self__", None), LoaderPosition)


def warn_of_discarded(saved: EpochProgress, epoch: int) -> None:
    """Warn that the rest of a saved epoch is skipped, if only some of its batches were delivered."""
    delivered = saved.batches - saved.first + len(saved.ahead) + bool(saved.consumed)
    if delivered and saved.batches != saved.total:
        total = "" if saved.total is None else f" of {saved.total}"
        msg = (
            f"set_epoch({epoch}): skips the rest of epoch {saved.epoch}, which the loaded state left after batch "
            f"{saved.batches}{total}; call set_epoch({saved.epoch}) to continue it"
        )
        warnings.warn(msg, UserWarning, stacklevel=5)
