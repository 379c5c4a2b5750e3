"""Creation of datasets from a record of options."""

from __future__ import annotations

from typing import Unpack

from omearrow_ds.dataset.collection import Preload
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.options import SampleSettings
from omearrow_ds.storage.protocol import OpenOptions, Paths


def make_dataset(
    settings: SampleSettings,
    path: Paths,
    format_name: str | None,
    *,
    preload: Preload,
    max_bytes: int | None = None,
    **opening: Unpack[OpenOptions],
) -> OMEArrowDataset:
    options = {**settings.chosen, **opening, "preload": preload, "max_bytes": max_bytes, "progress": False}
    return OMEArrowDataset(path, format_name, **options)
