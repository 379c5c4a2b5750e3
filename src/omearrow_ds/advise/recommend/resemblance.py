"""`resemblance`: the benchmark workload that is most similar to some images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omearrow_ds.axes import AXES
from omearrow_ds.storage.source import Array

_LOOKED_AT = 64  # Number of images.
_LARGE_PIXELS = 512 * 512  # Pixels per plane from which an image is a field, not a cell.
_FLAT_PART = 0.9  # Share of equal neighbors along X above which images are label images.
_CAMERAS = ((8, "cells-8bit"), (12, "cells-12bit"), (16, "cells-16bit"))


class Resemblance(NamedTuple):
    workload: str
    why: str


def resemblance(images: Sequence[Array]) -> Resemblance | None:
    """Return the workload that images (T, C, Z, Y, X) resemble most, or None for dtypes without a workload.

    The number of distinct pixel values and the image size decide, as sizes and times of formats depend on them.
    """
    step = max(1, len(images) // _LOOKED_AT)
    looked_at = images[::step]
    dtypes = {image.dtype for image in looked_at}
    if len(dtypes) > 1 or not dtypes <= {np.dtype(np.uint8), np.dtype(np.uint16)}:
        return None
    flat = np.mean([np.mean(image[..., 1:] == image[..., :-1]) for image in looked_at if image.shape[-1] > 1] or [0])
    if flat > _FLAT_PART:
        return Resemblance("masks", f"{flat:.0%} of neighbouring pixels are equal")
    levels = np.flatnonzero(np.sum([np.bincount(image.reshape(-1), minlength=2**16) for image in looked_at], axis=0))
    if max(image.shape[AXES.index("Z")] for image in looked_at) > 1:
        return Resemblance("stack", "images have several Z")
    if np.median([np.prod(image.shape[-2:]) for image in looked_at]) >= _LARGE_PIXELS:
        return Resemblance("fields", "images are whole fields")
    if dtypes == {np.dtype(np.uint8)}:
        return Resemblance("cells-uint8", "pixels are uint8")
    bits, name = next(camera for camera in _CAMERAS if len(levels) <= 2 ** camera[0])
    return Resemblance(name, f"pixels have {len(levels):,} of the 2^{bits} values of a camera of {bits} bits")
