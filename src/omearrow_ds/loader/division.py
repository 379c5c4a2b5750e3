"""Division of samples among ranks, by this package's samplers or a framework but not both."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.samplers import PartsSampler, Ranks

_NESTED = ("batch_sampler", "_batch_sampler", "sampler", "_sampler", "dataset")  # Attributes of wrappers.
_MOST_NESTED = 6
_FRAMES = 8  # From an iteration over a sampler, through torch's iterator, to the loader that dispatches the batches.


def undivided(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Return a copy of ``sampler`` that yields the samples of all ranks instead of one rank."""
    if isinstance(sampler, PartsSampler):
        return sampler.divided(Ranks())
    samples = len(sampler.dataset)  # type: ignore[arg-type]  # Map-style, so it has a length.
    return copy_with(sampler, rank=0, num_replicas=1, num_samples=samples, total_size=samples)


class SharedBatches(BatchSampler):
    """Batch sampler of one rank that yields the batches of all ranks if another loader divides batches among ranks.

    Accelerate creates another loader with the ``batch_sampler`` of the loader that it prepares, and divides its batches
    among the ranks. Accelerate's loader gets the batches of all ranks. If ``of_rank`` is true, and in a loader that
    only skips the first batches, the batches are those of one rank.
    """

    of_rank = False
    _has_warned = False

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        if batches.sampler is not self.sampler and not self._has_warned:
            self._has_warned = True
            msg = (
                "OMEArrowDataLoader: an outer loader (such as that of accelerator.prepare) divides samples among "
                "ranks, so this loader does not; to use load_state_dict(), iterate over this loader directly"
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        return iter(batches)

    def __len__(self) -> int:
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.sampler
        sampler.set_epoch(epoch)

    def _batches(self) -> BatchSampler:
        own = self.of_rank or _is_only_skipped(sys._getframe(2))  # noqa: SLF001  # CPython only, see `asked_for_whole`.
        sampler: Any = self.sampler if own else undivided(self.sampler)  # type: ignore[arg-type]
        return BatchSampler(sampler, self.batch_size, self.drop_last)


def _is_only_skipped(frame: Any) -> bool:
    """Whether the caller only skips batches of a loader that this package divided, and no outer loader divides them."""
    attributes: list[Any] = []
    while frame is not None and len(attributes) < _FRAMES:
        attributes.append(getattr(frame.f_locals.get("self"), "__dict__", {}))
        frame = frame.f_back
    # Attributes of Accelerate's SkipBatchSampler and DataLoaderDispatcher.
    return "skip_batches" in attributes[0] and not any("slice_fn" in names for names in attributes)


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers that it wraps, from the outermost to the innermost."""
    pending, visited = [sampler], set[int]()
    while pending and len(visited) < _MOST_NESTED:
        current = pending.pop(0)
        visited.add(id(current))
        yield current
        attributes = getattr(current, "__dict__", {})
        pending += [attributes[name] for name in _NESTED if name in attributes and id(attributes[name]) not in visited]


def divides(sampler: Any, ranks: int) -> bool:
    """Whether a sampler yields one rank's share of the sampler that it wraps."""
    return ranks > 1 and ranks in (getattr(sampler, "num_replicas", None), getattr(sampler, "num_processes", None))


def within(sampler: Any, kinds: tuple[type, ...], ranks: int) -> Any:
    """Return the wrapped sampler of a class in ``kinds``; None if ``sampler`` does not divide samples among ranks."""
    outer, *inner = nested(sampler)
    return next((wrapped for wrapped in inner if isinstance(wrapped, kinds)), None) if divides(outer, ranks) else None


def warn_of_division(sampler: Any) -> None:
    """Warn that the loader ignores ``sampler``, because a sampler inside it already divides samples among ranks."""
    msg = (
        f"sampler={type(sampler).__name__}: its inner sampler already divides the samples among ranks, so the "
        f"outer sampler is ignored; in Lightning, pass use_distributed_sampler=False"
    )
    warnings.warn(msg, UserWarning, stacklevel=6)


def share_batches(batch_sampler: Any, ranks: int) -> None:
    """Make a wrapped `SharedBatches` yield the batches of one rank, unless one of its wrappers divides batches.

    Raises `ArgumentError` if a wrapper divides the share of a rank again.
    """
    wrappers: list[Any] = []
    for sampler in nested(batch_sampler):
        is_divided = any(divides(wrapper, ranks) for wrapper in wrappers)
        if isinstance(sampler, SharedBatches):
            sampler.of_rank = not is_divided
            return
        if is_divided and isinstance(sampler, DistributedSampler) and divides(sampler, ranks):
            names = f"{type(batch_sampler).__name__} and {type(sampler).__name__}"
            problem = f"{names} both divide the samples among {ranks} ranks"
            remedy = "pass a batch sampler that divides them only once"
            raise ArgumentError(problem, option="batch_sampler", remedy=remedy)
        wrappers.append(sampler)
