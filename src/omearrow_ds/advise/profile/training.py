"""`Step`: step of a loop per batch, with or without a model."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from omearrow_ds.errors import ArgumentError

Optimizer = Literal["sgd", "adam", "none"]


class Step:
    """Training step with forward pass, backward pass and optimizer; ``optimizer="none"`` only runs the forward pass.

    Without a model, a step only counts samples. The loss is the sum of the means of all floating-point tensors that the
    model returns. The learning rate is 0, so that steps cost the usual time but weights stay constant. The model is
    copied, so that its running averages do not change either. SGD has momentum.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer = "none", device: torch.device | None = None
    ) -> None:
        self._device = device or torch.device("cpu")
        self._optimizer: torch.optim.Optimizer | None = None
        self._model = None if model is None else copy.deepcopy(model).to(self._device)
        if self._model is None:
            return
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        if weights and optimizer == "sgd":
            self._optimizer = torch.optim.SGD(weights, lr=0.0, momentum=0.9)
        elif weights and optimizer == "adam":
            self._optimizer = torch.optim.Adam(weights, lr=0.0)
        self._model.train(self._optimizer is not None)

    def __call__(self, batch: Any) -> int:
        images = next(tensors_of(batch), None)
        if images is None or not images.ndim:
            problem = f"a batch of type {type(batch).__name__} has no tensor of images"
            raise ArgumentError(problem, option="transform", remedy="return a tensor per sample")
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
            raise ArgumentError("the model returned no floating-point tensor to compute a loss from", option="model")
        return torch.stack(means).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> None:
        """Wait for pending work of a CUDA device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
        raise ArgumentError(f"cannot be imported: {error}", option=option, value=name, allowed=allowed) from error


def make_step(model: Any, optimizer: Optimizer, device: torch.device | None, dataset: Dataset[Any]) -> Step:
    """Return the step for ``model``: None, a module, a function that returns a module, or the name of one of these.

    A function is called without arguments, or with the shape of a sample if it requires an argument.
    """
    module = named(model, "model") if isinstance(model, str) else model
    if callable(module) and not isinstance(module, nn.Module):
        try:
            inspect.signature(module).bind()
        except TypeError:
            sample = dataset[0]
            module = module(tuple(np.shape(sample[0] if isinstance(sample, tuple | list) else sample)))
        else:
            module = module()
    if not isinstance(module, nn.Module | None):
        allowed = "a torch.nn.Module, or a function that returns one"
        problem = f"the value or its result is of type {type(module).__name__}"
        raise ArgumentError(problem, option="model", value=model, allowed=allowed)
    return Step(module, optimizer, device)
