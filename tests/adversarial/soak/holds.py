"""Samples that programs keep, in every way that users may keep them, and checks that they do not change."""

from __future__ import annotations

import copy
import gc
import hashlib
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
_MOST_BYTES = 96 * 2**20  # Limit of all kept bytes, raised to four times the largest kept part.
_MOST_HELD = 64


class _Graph:
    """An autograd graph that keeps a tensor, which is also its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weight = torch.ones_like(tensor, requires_grad=True)
        self._loss = (tensor * self._weight).sum()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        (gradient,) = torch.autograd.grad(self._loss, self._weight, retain_graph=True)
        return gradient.numpy()


OF_ARRAYS: dict[str, Callable[[Array], Any]] = {
    "the array": lambda array: array,
    "a part": lambda array: array[-1:],
    "a slice": lambda array: array[..., ::2],
    "turned": lambda array: array.T,
    "other bits": lambda array: np.ascontiguousarray(array).reshape(-1).view(np.uint8)[1:],
    "a buffer": memoryview,
    "a buffer's bytes": lambda array: np.frombuffer(np.ascontiguousarray(array).data, np.uint8),
    "by dlpack": lambda array: np.from_dlpack(array)[:1],
    "unpickled": lambda array: pickle.loads(pickle.dumps(array)),
}
OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a part": lambda tensor: tensor[-1:],
    "a slice": lambda tensor: tensor[..., ::2],
    "turned": lambda tensor: tensor.movedim(0, -1),
    "its parts": lambda tensor: list(tensor.unbind()),
    "one of its parts": lambda tensor: tensor.unbind()[0],
    "detached": lambda tensor: tensor.detach()[:1],
    "storage": lambda tensor: torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())[: tensor.numel()],
    "by dlpack": torch.from_dlpack,
    "a deep copy": copy.deepcopy,  # pickle does not support uint16 tensors.
}


@dataclass
class _Hold:
    """A kept object, how it is kept, its digest and its size."""

    description: str
    content: Any
    digest: bytes
    size_bytes: int


class Holds:
    """Random samples that the programs of a case keep, up to a number of bytes; the oldest is dropped first.

    Parameters
    ----------
    rng
        Random choices of kept parts, ways to keep them, and durations.
    counts
        Counter of repeated comparisons.
    """

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self._rng, self._counts = rng, counts
        self._holds: deque[_Hold] = deque()
        self._most_bytes = _MOST_BYTES

    def use(self, sample: Any, origin: str) -> None:
        """Use a sample as a program may: write to it, keep some of it, or drop a kept part."""
        parts = list(parts_of(sample))
        if self._rng.random() < 0.2:
            self._write_over(parts)
        if parts and self._rng.random() < 0.5:
            for part in self._rng.sample(parts, self._rng.randint(1, min(3, len(parts)))):
                self._keep(part, origin)
        if self._holds and self._rng.random() < 0.15:
            del self._holds[self._rng.randrange(len(self._holds))]
        if self._rng.random() < 0.1:
            self.compare()

    def compare(self) -> None:
        """Check that no kept object has changed."""
        for hold in self._holds:
            assert _digest(hold.content) == hold.digest, f"what was held has changed: {hold.description}"
        self._counts["held and compared again"] += len(self._holds)

    def compare_last(self) -> None:
        """Check all kept objects after a garbage collection and new allocations, then drop them."""
        gc.collect()
        others = [np.full(hold.size_bytes, 0xA5, np.uint8) for hold in list(self._holds)[-8:]]
        self.compare()
        del others
        self._holds.clear()

    def _keep(self, part: Any, origin: str) -> None:
        if isinstance(part, torch.Tensor):
            size_bytes = part.untyped_storage().nbytes()
            how, content = self._held_tensor(part)
        else:
            size_bytes = _owner_bytes(part)
            how, content = self._held_array(part)
        self._holds.append(_Hold(f"{how} of {origin}, {size_bytes} bytes", content, _digest(content), size_bytes))
        self._most_bytes = max(self._most_bytes, 4 * size_bytes)
        while len(self._holds) > _MOST_HELD or sum(hold.size_bytes for hold in self._holds) > self._most_bytes:
            self._holds.popleft()

    def _held_tensor(self, tensor: torch.Tensor) -> tuple[str, Any]:
        if tensor.is_floating_point() and self._rng.random() < 0.1:
            return "a graph", _Graph(tensor)
        if tensor.ndim == 0 or self._rng.random() < 0.4:
            how, content = self._held_array(tensor.numpy())
            return f"{how} of numpy", content
        how = self._rng.choice(list(OF_TENSORS))
        return how, OF_TENSORS[how](tensor)

    def _held_array(self, array: Array) -> tuple[str, Any]:
        if array.ndim == 0:
            return "the array", array
        # Read-only arrays have no capsule, nor have views of decompressed pages, which a scan within the package gives.
        has_capsule = array.flags.writeable and all(stride % array.itemsize == 0 for stride in array.strides)
        how = self._rng.choice([how for how in OF_ARRAYS if has_capsule or how != "by dlpack"])
        return how, OF_ARRAYS[how](array)

    def _write_over(self, parts: list[Any]) -> None:
        """Write to every sample, which no earlier or later sample may show."""
        for part in parts:
            if isinstance(part, torch.Tensor) or part.flags.writeable:
                part[...] = 1
                self._counts["written over"] += 1


def parts_of(sample: Any) -> Iterator[Any]:
    """Return all non-empty tensors and arrays of a sample."""
    if isinstance(sample, torch.Tensor):
        if sample.numel():
            yield sample
    elif isinstance(sample, np.ndarray):
        if sample.size:
            yield sample
    elif isinstance(sample, dict):
        for value in sample.values():
            yield from parts_of(value)
    elif isinstance(sample, list | tuple):
        for item in sample:
            yield from parts_of(item)


def _owner_bytes(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.nbytes)


def _digest(content: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in content if isinstance(content, list) else [content]:
        digest.update(np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8))
    return digest.digest()
