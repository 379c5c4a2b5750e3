"""`Epoch`: a loader's batches as the program gets them, counted, and on the device that it asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from omearrow_ds.resume import Progress


class Epoch:
    """An iterator over batches.

    Parameters
    ----------
    batches
        Torch's own iterator; what else it has can be had here.
    device
        Where to deliver them; ``None`` leaves them where they are.
    progress
        What to count them in.
    """

    def __init__(self, batches: Iterator[Any], device: torch.device | None, progress: Progress) -> None:
        self._batches = batches
        self._progress = progress
        made = batches if progress.augmenting is None else _InProgram(batches, progress)
        self._next = (made if device is None else on_device(made, device)).__next__

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = self._next()
        except StopIteration:
            self._progress.end()
            raise
        except BaseException as error:
            self._progress.failed = self._progress.failed or isinstance(error, RuntimeError)  # if a worker was killed
            _out_of_its_cycle(error)
            raise
        self._progress.batches += 1
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


class _InProgram:
    """Batches, after each of which torch's global generator is the program's again."""

    def __init__(self, batches: Iterator[Any], progress: Progress) -> None:
        self._batches = batches
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        finally:
            self._progress.leave()


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches on ``device``; to a CUDA device each is copied while the program has the one before."""
    if device.type == "cuda":
        return _copied_ahead(batches, device)
    if device.type == "cpu":
        return batches
    return (apply(batch, lambda tensor: tensor.to(device)) for batch in batches)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy on a stream of its own, from pinned memory; the program's stream waits for the copy that it is given."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: list[Any] = []
    for batch in batches:
        with torch.cuda.stream(side):
            copied = apply(batch, lambda tensor: tensor.to(device, non_blocking=True))
        if ahead:
            yield _ready(ahead.pop(), side, device)
        ahead.append(copied)
    if ahead:
        yield _ready(ahead.pop(), side, device)


def _ready(batch: Any, side: torch.cuda.Stream, device: torch.device) -> Any:
    using = torch.cuda.current_stream(device)
    using.wait_stream(side)

    def used(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(using)  # lest its memory is given to the next copy while it is in use
        return tensor

    return apply(batch, used)


def apply(batch: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with ``act`` done to every tensor in its tuples, lists and mappings."""
    if isinstance(batch, torch.Tensor):
        return act(batch)
    if isinstance(batch, dict):
        return {name: apply(value, act) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [apply(value, act) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
