"""Steps of a loop per batch: only counting, or forward, backward and an optimizer step."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from omearrow_ds.advise.profile.stages import Stage
from omearrow_ds.errors import ArgumentError

Optimizer = Literal["sgd", "adam", "none"]


class NoStep:
    """A step that only counts samples; ``device`` is the device of the batches, ``None`` for the CPU."""

    parts: ClassVar[Mapping[str, Stage]] = MappingProxyType({})  # Method names and their stages.

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.asynchronous = device is not None and device.type == "cuda"

    def __call__(self, batch: Any) -> int:
        return len(images_of(batch))

    def finish(self) -> None:
        if self.asynchronous:
            torch.cuda.synchronize(self._device)


class Training(NoStep):
    """Forward, backward and an optimizer step; with ``optimizer="none"``, only forward without gradients.

    The loss is the sum of the means of all floating-point tensors that the model returns. The learning rate is 0, so
    that steps cost the usual time but weights stay constant. The model is copied, so that its running averages do not
    change either. SGD has momentum.
    """

    parts = MappingProxyType({"forward": Stage.FORWARD, "backward": Stage.BACKWARD, "optimize": Stage.OPTIMIZER})

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device | None) -> None:
        super().__init__(device)
        self.model = copy.deepcopy(model).to(device or torch.device("cpu"))
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer != "none" and weights:
            optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
            self.optimizer = optimizer_class(weights, lr=0.0, **({"momentum": 0.9} if optimizer == "sgd" else {}))
        self.model.train(self.optimizer is not None)

    def __call__(self, batch: Any) -> int:
        images = images_of(batch)
        if self.optimizer is None:
            with torch.inference_mode():
                self.forward(images)
        else:
            self.backward(self.forward(images))
            self.optimize()
        return len(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = [tensor.mean() for tensor in tensors_of(self.model(images)) if tensor.is_floating_point()]
        if not means:
            raise ArgumentError(
                "it returned no tensor of floating point, of which a loss could be made", option="model"
            )
        return torch.stack(means).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, mappings and objects with attributes, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def images_of(batch: Any) -> torch.Tensor:
    images = next(tensors_of(batch), None)
    if images is None or not images.ndim:
        problem = f"a batch is a {type(batch).__name__} without a tensor of images"
        raise ArgumentError(problem, option="transform", remedy="return a tensor per sample")
    return images


def named(name: str, option: str) -> Any:
    """Import and return the object ``"module:name"``."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ArgumentError(
            option=option, value=name, remedy="write it as module:name, e.g. my_package.models:make_model"
        )
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"the module {error.name!r} does not exist", option=option, value=name) from error
    for part in path.split("."):
        if not hasattr(thing, part):
            raise ArgumentError(f"{module_name} has no {path!r}", option=option, value=name)
        thing = getattr(thing, part)
    return thing


def as_model(model: nn.Module | Callable[..., Any] | str, sample_shape: tuple[int, ...]) -> nn.Module:
    """Return the model from a module, a function that returns one, or ``"module:name"`` of either.

    A function is called without arguments, or with the shape of a sample if it requires an argument.
    """
    result = named(model, "model") if isinstance(model, str) else model
    if not isinstance(result, nn.Module):
        if not callable(result):
            raise ArgumentError(
                option="model", value=model, allowed="a torch.nn.Module, or a callable that returns one"
            )
        parameters = inspect.signature(result).parameters.values()
        positional = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        result = (
            result(sample_shape) if any(parameter.default is parameter.empty for parameter in positional) else result()
        )
    if not isinstance(result, nn.Module):
        raise ArgumentError(
            f"it returned a {type(result).__name__}, not a torch.nn.Module", option="model", value=model
        )
    return result
