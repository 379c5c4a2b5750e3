"""`resemblance`: the benchmark workload that is most similar to some images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omearrow_ds.storage.source import Array

_MOST_IMAGES = 64
_LARGE_PIXELS = 512 * 512  # Pixels per plane from which an image is a field, not a cell.
_FLAT_PART = 0.9  # Share of equal neighbors along X above which images are label images.


class Resemblance(NamedTuple):
    workload: str
    why: str


def resemblance(images: Sequence[Array]) -> Resemblance | None:
    """Return the workload that images (T, C, Z, Y, X) resemble most, or None for dtypes without a workload.

    The number of distinct pixel values and the image size decide, as sizes and times of formats depend on them.
    """
    images = images[:: max(1, len(images) // _MOST_IMAGES)]
    dtypes = {str(image.dtype) for image in images}
    if dtypes not in ({"uint8"}, {"uint16"}):
        return None
    flat = np.mean([np.mean(image[..., 1:] == image[..., :-1]) for image in images if image.shape[-1] > 1] or [0])
    if flat > _FLAT_PART:
        return Resemblance("masks", f"{flat:.0%} of neighboring pixels are equal")
    if any(image.shape[2] > 1 for image in images):
        return Resemblance("stack", "images have several Z")
    if np.median([image.shape[-2] * image.shape[-1] for image in images]) >= _LARGE_PIXELS:
        return Resemblance("fields", "images are whole fields")
    if dtypes == {"uint8"}:
        return Resemblance("cells-uint8", "pixels are uint8")
    levels = np.count_nonzero(sum(np.bincount(image.reshape(-1), minlength=2**16) for image in images))
    bits = next(bits for bits in (8, 12, 16) if levels <= 2**bits)
    why = f"pixels have {levels:,} of the 2^{bits} values of a camera of {bits} bits"
    return Resemblance(f"cells-{bits}bit", why)
