"""Which functions of the ordinary path belong to which stage: they are wrapped from outside while it is measured.

Nothing of the path itself knows of clocks. This list is all that is wrapped by its name. A function that is named here
and no longer there is an error of the package, which a test finds; a format's are wrapped if the format is in use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import reduce
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from omearrow_ds.advise.profile.recorder import Recorder
from omearrow_ds.advise.profile.stages import Stage

_ABSENT = object()


class Patches(ExitStack):
    """Attributes replaced for the time of a measurement: at its end each is as it was, the latest put back first."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module, a class or an instance."""
        before = vars(owner).get(name, _ABSENT)
        undo = (delattr, owner, name) if before is _ABSENT else (setattr, owner, name, before)
        self.callback(*undo)
        setattr(owner, name, value)


class Hook(NamedTuple):
    """A function, by the module that it is looked up in and its name there, and the stage that it is."""

    module: str
    name: str
    stage: Stage


_FORMATS = "omearrow_ds.storage.formats"
_LOADER = "torch.utils.data.dataloader"

SAMPLE_HOOKS = (
    Hook("torch.utils.data._utils.fetch", "_MapDatasetFetcher.fetch", Stage.COLLATE),
    Hook("omearrow_ds.dataset.dataset", "OMEArrowDataset._allocate", Stage.COLLATE),
    Hook("omearrow_ds.dataset.dataset", "OMEArrowDataset._collated", Stage.COLLATE),
    Hook("omearrow_ds.dataset.collection", "Collection._fetch", Stage.READ),
    Hook("omearrow_ds.dataset.collection", "scale", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.collection", "one_by_one", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "CropCollection._fetch_windows", Stage.READ),
    Hook("omearrow_ds.dataset.crops", "CropCollection._fitted", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "assemble", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "crops", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "scale", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "one_by_one", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.crops", "in_shares", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.gather", "scale", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.gather", "gather", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.gather", "in_shares", Stage.NORMALISE),
    Hook("omearrow_ds.dataset.gather", "DecodedRows.sample", Stage.SELECT),
    Hook("omearrow_ds.dataset.gather", "DecodedRows.batch", Stage.SELECT),
    Hook("omearrow_ds.axes", "Cut.__call__", Stage.SELECT),
    Hook("omearrow_ds.codec.decode", "ImageBlock.__init__", Stage.DECODE),
    Hook("omearrow_ds.codec.decode", "ImageBlock.__getitem__", Stage.DECODE),
    Hook("omearrow_ds.codec.decode", "ImageBlock.images", Stage.DECODE),
    Hook("omearrow_ds.codec.decode", "ImageBlock.stack", Stage.DECODE),
    Hook(f"{_FORMATS}._leaf", "_cut", Stage.DECODE),
    Hook(f"{_FORMATS}.arrow", "Source._batch", Stage.READ_DECODE),
    Hook(f"{_FORMATS}._parquet", "ParquetSource._read_group", Stage.READ_DECODE),
    Hook(f"{_FORMATS}.ome_arrow", "Source._read_group", Stage.READ_DECODE),
    Hook(f"{_FORMATS}._parquet_pages", "PixelPages.images", Stage.DECODE),
    Hook(f"{_FORMATS}._parquet_pages", "PackedPages.images", Stage.DECODE),
    Hook(f"{_FORMATS}.lance", "Source._fetch", Stage.READ_DECODE),
    Hook(f"{_FORMATS}._lance_pages", "PixelPages.image", Stage.DECODE),
    Hook(f"{_FORMATS}._vortex_rows", "Rows.take", Stage.READ_DECODE),
    Hook(f"{_FORMATS}.vortex", "Source._images_of_scalars", Stage.READ_DECODE),
    Hook(f"{_FORMATS}._sql", "SqlSource._query", Stage.READ_DECODE),
    Hook(f"{_FORMATS}._zarr_chunks", "read_into", Stage.DECODE),
    Hook(f"{_FORMATS}._zarr_windows", "read", Stage.DECODE),
    Hook(f"{_FORMATS}._zarr_chunks", "contents", Stage.READ),
    Hook("zarr", "Array.__getitem__", Stage.READ_DECODE),
    Hook("tifffile", "TiffPageSeries.asarray", Stage.READ_DECODE),
)
PROGRAM_HOOKS = (
    Hook("omearrow_ds.loader.epoch", "apply", Stage.TRANSFER),
    Hook(_LOADER, "_MultiProcessingDataLoaderIter._next_data", Stage.HAND_OVER),
)


def loaded_modules() -> tuple[str, ...]:
    """Return the modules with hooks for samples that are loaded here: a worker will load the same."""
    return tuple(dict.fromkeys(hook.module for hook in SAMPLE_HOOKS if hook.module in sys.modules))


def install(hooks: Iterable[Hook], patches: Patches, recorder: Recorder) -> None:
    """Wrap the functions of ``hooks`` in all modules that are loaded."""
    for hook in hooks:
        if hook.module not in sys.modules:
            continue
        owner, name = find(hook)
        patches.replace(owner, name, recorder.timed(vars(owner)[name], hook.stage))


def find(hook: Hook) -> tuple[Any, str]:
    """Return the module or class that holds a function, and its name there."""
    *path, name = hook.name.split(".")
    return reduce(getattr, path, importlib.import_module(hook.module)), name


def install_dataset(dataset: Dataset[Any], patches: Patches, recorder: Recorder) -> None:
    """Wrap what a dataset has of its own: its ``__getitems__``, and its transform."""
    owner = next((each for each in type(dataset).__mro__ if "__getitems__" in vars(each)), None)
    if owner is not None:
        patches.replace(owner, "__getitems__", recorder.timed(vars(owner)["__getitems__"], Stage.OTHER))
    transform = vars(dataset).get("_transform")
    if transform is not None:
        patches.replace(dataset, "_transform", recorder.timed(transform, Stage.TRANSFORM))
