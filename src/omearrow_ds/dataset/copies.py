"""Shallow copies of instances that share most attributes."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, TypeVar

Instance = TypeVar("Instance")


def copy_with(original: Instance, omitted: Container[str] = (), **changes: Any) -> Instance:
    """Return a shallow copy with some attributes omitted or changed, without calling pickling methods."""
    copied = object.__new__(type(original))
    shared = {name: value for name, value in vars(original).items() if name not in omitted}
    vars(copied).update({**shared, **changes})
    return copied
