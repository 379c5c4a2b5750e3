"""`SampleOptions`: what a sample is, as one value, for what makes datasets of one kind from several stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from omearrow_ds.dataset.collection import Preload, Select
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.places import CropOptions
from omearrow_ds.dataset.scaling import Illum, Normalize
from omearrow_ds.dataset.targets import Target
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.protocol import OpenOptions, Paths


@dataclass(frozen=True)
class SampleOptions:
    """What a sample is, as in `OMEArrowDataset`; ``crops`` are the options that say where it lies."""

    axes: str = "CYX"
    select: Select | None = None
    crop_size: tuple[int, int] | None = None
    normalize: Normalize = True
    illumination: Illum | None = None
    masks: Masks | None = None
    mask_background: bool = False
    transform: Callable[[torch.Tensor], Any] | None = None
    target: Target | None = None
    encode_targets: bool = True
    return_ids: bool = False
    crops: CropOptions = field(default_factory=CropOptions)

    def dataset(
        self,
        path: Paths,
        format_name: str | None,
        *,
        preload: Preload,
        max_bytes: int | None = None,
        **opening: Unpack[OpenOptions],
    ) -> OMEArrowDataset:
        """Return a dataset of such samples, made without a bar."""
        given: dict[str, Any] = {**vars(self), **self.crops, **opening}
        del given["crops"]
        return OMEArrowDataset(path, format_name, preload=preload, max_bytes=max_bytes, progress=False, **given)
