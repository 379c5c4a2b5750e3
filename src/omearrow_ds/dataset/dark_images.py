"""Warning about 12-bit pixels in uint16 images, which ``normalize=True`` makes nearly black."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from omearrow_ds.storage.formats._pixel_range import HIGH, PixelRange

Array = np.ndarray[Any, Any]
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # Set by torchrun, Lightning and SLURM.


def warn_of_dark_images(path: Path, images: Iterable[Array]) -> None:
    """Warn, once per process, if the first 64 uint16 images have at most 12 bits and are not black.

    Workers and ranks above 0 do not warn. Reading stops at the first image with larger values.
    """
    if has_warned().is_set() or not _is_main_process():
        return
    pixel_range = PixelRange.measure(images, limit=HIGH)
    if pixel_range is not None and pixel_range.normalize is not None:
        has_warned().set()
        warnings.warn(f"{path}: pixels have at most 12 bits: {pixel_range.text}", UserWarning, stacklevel=2)


@functools.cache
def has_warned() -> Event:
    """Return the event of this process that the warning sets; setting it earlier silences the warning."""
    return Event()


def _is_main_process() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0 and get_worker_info() is None
    return multiprocessing.parent_process() is None and all((os.environ.get(name) or "0") == "0" for name in _RANKS)
