"""Hooks: functions of the data path that are stages, wrapped from outside during a measurement.

The data path itself contains no clocks. A module that makes samples lists its stage functions in ``STAGES``, and so do
formats of third-party packages. This module lists only functions of other libraries. A missing function is an error of
the package that names it, which a test finds. Functions of a format are wrapped if the format is in use.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from functools import reduce
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from omearrow_ds.advise.profile.recorder import Recorder
from omearrow_ds.advise.profile.stages import Stage
from omearrow_ds.storage.formats import formats

_ABSENT = object()


class Patches(ExitStack):
    """Attributes replaced during a measurement and restored at its end, in reverse order."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _ABSENT)
        undo = (delattr, owner, name) if before is _ABSENT else (setattr, owner, name, before)
        self.callback(*undo)
        setattr(owner, name, value)


class Hook(NamedTuple):
    module: str
    name: str
    stage: Stage


FETCH = Hook("torch.utils.data._utils.fetch", "_MapDatasetFetcher.fetch", Stage.COLLATE)
FOREIGN = (
    FETCH,
    Hook("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter._next_data", Stage.HAND_OVER),
    Hook("zarr", "Array.__getitem__", Stage.READ_DECODE),
    Hook("tifffile", "TiffPageSeries.asarray", Stage.READ_DECODE),
)


def hooks() -> list[Hook]:
    """Return the hooks of this package's imported modules, of storage formats and of third-party libraries."""
    registered = {fmt.implementation for fmt in formats()}
    wrapped = [hook for hook in FOREIGN if hook.module in sys.modules]
    for name, module in list(sys.modules.items()):
        if name.startswith("omearrow_ds.") or name in registered:
            stages = vars(module).get("STAGES", {}).items()
            wrapped += [Hook(name, function, Stage.labelled(label, f"{name}.STAGES")) for function, label in stages]
    return wrapped


def install(patches: Patches, recorder: Recorder) -> None:
    for hook in hooks():
        owner, name = find(hook)
        patches.replace(owner, name, recorder.timed(vars(owner)[name], hook.stage))


def find(hook: Hook) -> tuple[Any, str]:
    """Return the module or class that contains a function, and the name of the function in it."""
    *path, name = hook.name.split(".")
    return reduce(getattr, path, importlib.import_module(hook.module)), name


def install_dataset(dataset: Dataset[Any], patches: Patches, recorder: Recorder) -> None:
    """Wrap ``__getitems__`` and the transform of a dataset in clocks."""
    owner = next((cls for cls in type(dataset).__mro__ if "__getitems__" in vars(cls)), None)
    if owner is not None:
        patches.replace(owner, "__getitems__", recorder.timed(vars(owner)["__getitems__"], Stage.OTHER))
    transform = vars(dataset).get("_transform")
    if transform is not None:
        patches.replace(dataset, "_transform", recorder.timed(transform, Stage.TRANSFORM))
