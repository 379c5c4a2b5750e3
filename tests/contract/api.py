"""Record of `omearrow_ds.__all__`: signatures, defaults, bases and public members."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import omearrow_ds
from omearrow_ds.advise.recommend import Recommendation
from omearrow_ds.dataset.crop_boxes import DatasetOptions
from omearrow_ds.dataset.show import Shown
from omearrow_ds.dataset.stored_images import CacheInfo
from omearrow_ds.loader.settings import Setting

# Types that signatures and results of the public names contain.
_OTHERS = (CacheInfo, DatasetOptions, Recommendation, Setting, Shown)
_DUNDERS = {
    f"__{name}__" for name in ("add", "call", "contains", "enter", "exit", "getitem", "getitems", "iter", "len")
}
_COMMON_BASES = ("Exception", "BaseException", "Generic", "object")
_MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def record(folder: Path) -> dict[str, Any]:
    """Return the description of each public name, of types in their signatures, and of instances."""
    public = {name: getattr(omearrow_ds, name) for name in omearrow_ds.__all__}
    described = {name: _describe(value) for name, value in public.items()}
    others = {cls.__name__: _describe(cls) for cls in _OTHERS}
    return {"names": described, "other types": others, "attributes of instances": _instances(folder)}


def _describe(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": [_format(item) for item in value]}
    if typing.is_typeddict(value):
        return {"kind": "TypedDict", "keys": _typed_keys(value)}
    if inspect.isclass(value):
        return _describe_class(value)
    return {"kind": "function", "parameters": _parameters(value), "returns": _returned(value)}


def _format(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    is_plain = str | int | float | None
    return {name: item if isinstance(item, is_plain) else repr(item) for name, item in fields.items()}


def _describe_class(cls: type) -> dict[str, Any]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("omearrow_ds")]
    bases = [base.__name__ for base in cls.__mro__[1:] if base.__name__ not in _COMMON_BASES]
    described: dict[str, Any] = {"kind": _kind(cls), "bases": bases}
    if "__init__" in {name for base in own for name in vars(base)} and not getattr(cls, "_is_protocol", False):
        described["parameters"] = _parameters(cls)
    members: dict[str, str] = {}
    for base in reversed(own):
        members |= dict(_members(base))
    return {**described, "members": dict(sorted(members.items()))} if members else described


def _kind(cls: type) -> str:
    if issubclass(cls, Exception):
        return "error"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    return "protocol" if getattr(cls, "_is_protocol", False) else "class"


def _members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield public fields, properties and methods of one class, without those of its bases."""
    fields = getattr(cls, "__dataclass_fields__", {})  # Parameters, already recorded.
    for name, annotation in inspect.get_annotations(cls).items():
        if not name.startswith("_") and name not in fields:
            yield name, f"field: {_text(annotation)}"
    for name, member in vars(cls).items():
        if (name.startswith("_") and name not in _DUNDERS) or name in fields or member is None:
            continue
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            yield name, f"property: {_returned(getter)}"
        elif isinstance(member, classmethod | staticmethod):
            yield name, f"{type(member).__name__} {_call(member.__func__)}"
        elif inspect.isfunction(member) and member.__module__.startswith("omearrow_ds"):
            yield name, _call(member)
        elif not callable(member) and type(member).__name__ not in ("_tuplegetter", "member_descriptor"):
            yield name, f"attribute: {member!r}"


def _call(function: Callable[..., Any]) -> str:
    parameters = [text for text in _parameters(function) if text not in ("self", "cls")]
    return f"({', '.join(parameters)}) -> {_returned(function)}"


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters in words of Python, with ``*`` before those that are keywords only."""
    lines, is_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            lines.append("*")
        is_keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        annotation = "" if parameter.annotation is parameter.empty else f": {_text(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{_MARKS.get(parameter.kind, '')}{parameter.name}{annotation}{default}")
    return lines


def _returned(function: Callable[..., Any]) -> str:
    annotation = inspect.signature(function).return_annotation
    return "unknown" if annotation is inspect.Signature.empty else _text(annotation)


def _text(annotation: Any) -> str:
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _typed_keys(cls: Any) -> dict[str, str]:
    keys = {name: _text(annotation) for name, annotation in cls.__annotations__.items()}
    return dict(sorted(keys.items()))


def _instances(folder: Path) -> dict[str, dict[str, str]]:
    """Return the public attributes that instances have in addition to the members of their classes."""
    path = folder / "images.parquet"
    omearrow_ds.write_images([np.zeros((4, 5), np.uint8)] * 2, path)
    datasets = omearrow_ds.OMEArrowDataset(path), omearrow_ds.OMEArrowDatasetNumpy(path)
    loader = omearrow_ds.OMEArrowDataLoader(datasets[0], num_workers=0)
    foreign = vars(torch.utils.data.DataLoader([0]))
    attributes = {type(instance).__name__: _attributes(instance) for instance in (*datasets, loader)}
    return {cls: {k: v for k, v in names.items() if k not in foreign} for cls, names in attributes.items()}


def _attributes(instance: object) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in sorted(vars(instance).items()) if not name.startswith("_")}
