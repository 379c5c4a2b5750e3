"""`Loop`: the ordinary training loop and its `Step` per batch, with or without clocks."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from omearrow_ds.advise.profile.recorder import COMPUTE, Breakdown, Recorder, Run, WorkerClocks, break_down, time_clock
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.dataloader import OMEArrowDataLoader

Optimizer = Literal["sgd", "adam", "none"]


@dataclass(eq=False)
class SampleOrder(Sampler[int]):
    """Sampler that continues where the last iteration ended, so that short runs do not read only cached images.

    An iteration ends when ``perf_counter`` reaches ``until``, but not before ``least_batches`` batches.
    """

    count: int
    batch_size: int
    shuffle: bool
    next_index: int = 0  # In the order of the current epoch.
    until: float = inf
    least_batches: int = 1
    _epoch: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(self.count, generator=generator).tolist() if self.shuffle else range(self.count)
        for batches, first in enumerate(range(self.next_index, self.count, self.batch_size)):
            if batches >= self.least_batches and perf_counter() >= self.until:
                return
            self.next_index = first + self.batch_size
            yield from order[first : self.next_index]
        self._epoch, self.next_index = self._epoch + 1, 0


class Step:
    """Training step with a copy of a model, at learning rate 0; without a model, it only counts samples.

    The loss is the sum of the means of all floating-point tensors that the model returns. SGD has momentum.
    ``optimizer="none"`` runs only the forward pass.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer = "none", device: torch.device | None = None
    ) -> None:
        self._device, self._model = device or torch.device("cpu"), copy.deepcopy(model)
        self._optimizer: torch.optim.Optimizer | None = None
        if self._model is not None:
            weights = [weight for weight in self._model.to(self._device).parameters() if weight.requires_grad]
            if weights and optimizer != "none":
                sgd = optimizer == "sgd"
                self._optimizer = torch.optim.SGD(weights, 0.0, 0.9) if sgd else torch.optim.Adam(weights, 0.0)
            self._model.train(self._optimizer is not None)

    def __call__(self, batch: Any) -> int:
        images = next(tensors_of(batch), None)
        if images is None or not images.ndim:
            problem = f"a batch of type {type(batch).__name__} contains no image tensor"
            raise ArgumentError(problem, option="transform", remedy="return one tensor per sample")
        if self._model is not None:
            with torch.inference_mode(self._optimizer is None):
                loss = self.forward(images)
            if self._optimizer is not None:
                self.backward(loss)
                self.optimize()
        return len(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert self._model is not None
        means = [tensor.mean() for tensor in tensors_of(self._model(images)) if tensor.is_floating_point()]
        if not means:
            problem = "the model returned no floating-point tensor, so a loss cannot be computed"
            raise ArgumentError(problem, option="model")
        return torch.stack(means).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(eq=False)
class Loop(AbstractContextManager["Loop"]):
    """A loader, and the ``step`` that is called per batch. `dataclasses.replace` returns a loop with other settings.

    With ``has_worker_clocks``, each worker process records its stages; ``num_workers`` is not ``"auto"`` then.
    """

    dataset: StoredSamples
    batch_size: int
    num_workers: Any = 0
    device: torch.device | str | None = None
    step: Step = field(default_factory=Step)
    shuffle: bool = True
    has_worker_clocks: bool = False

    def __post_init__(self) -> None:
        self._order = SampleOrder(len(self.dataset), self.batch_size, self.shuffle)
        self._clocks = WorkerClocks(self.num_workers if self.has_worker_clocks else 0)
        self.loader: Any = OMEArrowDataLoader(
            self.dataset,
            self.batch_size,
            num_workers=self.num_workers,
            device=self.device,
            sampler=self._order,
            worker_init_fn=self._clocks if self.has_worker_clocks else None,
        )

    def warm_up(self) -> None:
        self.run(most_s=0.0, least_batches=2 * self.loader.num_workers or 1)
        self._order.next_index = 0

    def run(self, least_s: float = 0.0, most_s: float = inf, epochs: int | None = None, least_batches: int = 1) -> Run:
        """Run whole epochs, or the loop for ``least_s`` to ``most_s`` seconds."""
        samples = batches = 0
        start = perf_counter()
        self._order.until, self._order.least_batches = start + most_s, least_batches
        if epochs is not None:
            self._order.next_index = 0
        for epoch in itertools.count(1):
            for batch in self.loader:
                samples += self.step(batch)
                batches += 1
            if perf_counter() - start >= least_s and epoch >= (epochs or 1):
                break
        self.step.finish()
        return Run(samples, batches, perf_counter() - start)

    def record(self, least_s: float = 0.0, most_s: float = inf, epochs: int | None = None) -> Breakdown:
        """Call `run` with clocks in all stage functions; the clocks are removed at the end, even if the run fails."""
        torch_batches = self.loader._iterator  # noqa: SLF001  # None without workers.
        with Recorder("other", self.step.finish) as recorder:
            recorder.wrap_stages(self.dataset if torch_batches is None else None)
            for name, stage in zip(("forward", "backward", "optimize"), COMPUTE, strict=True):
                recorder.wrap(self.step, name, stage)
            if torch_batches is not None:  # Time the wait for workers separately from receiving their batches.
                queue = torch_batches._data_queue  # noqa: SLF001  # torch has no name for it
                recorder.wrap(queue, "_poll" if hasattr(queue, "_poll") else "get", "wait")  # get: pinned by a thread.
            before, cost = self._clocks.counts(), time_clock()
            recorder.start()
            run = self.run(least_s, most_s, epochs)
            recorder.stop()
        pids = (worker.pid for worker in getattr(torch_batches, "_workers", ()))
        return break_down(run, cost, np.array(recorder.counts).reshape(-1, 3), self._clocks.counts() - before, pids)

    def __exit__(self, *error: object) -> None:
        torch_batches, self.loader._iterator = self.loader._iterator, None  # noqa: SLF001
        if torch_batches is not None:  # torch ends workers only when the loader is collected.
            torch_batches._shutdown_workers()  # noqa: SLF001


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)


def named(name: str, option: str) -> Any:
    """Import and return the object ``"module:name"``."""
    module_name, _, path = name.partition(":")
    try:
        return attrgetter(path)(importlib.import_module(module_name))
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        allowed = "" if path else "module:name, e.g. my_package.models:make_model"
        problem, remedy = f"cannot be imported: {error}", "" if allowed else "correct module:name"
        raise ArgumentError(problem, option=option, value=name, allowed=allowed, remedy=remedy) from error


def make_step(model: Any, optimizer: Optimizer, device: torch.device | None, dataset: Dataset[Any]) -> Step:
    """Return the step for ``model``: None, a module, a function that returns a module, or the name of one of these."""
    module = named(model, "model") if isinstance(model, str) else model
    if callable(module) and not isinstance(module, nn.Module):
        try:
            inspect.signature(module).bind()
            shapes = []
        except TypeError:  # It requires an argument.
            sample = dataset[0]
            shapes = [tuple(np.shape(sample[0] if isinstance(sample, tuple | list) else sample))]
        module = module(*shapes)
    if not isinstance(module, nn.Module | None):
        allowed = "a torch.nn.Module, or a function that returns one"
        problem = f"the value or its result is of type {type(module).__name__}"
        raise ArgumentError(problem, option="model", value=model, allowed=allowed)
    return Step(module, optimizer, device)
