"""`resemblance`: the workload of the benchmarks that images are most like, whose measured tables say most of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omearrow_ds.axes import AXES
from omearrow_ds.storage.source import Array

_LOOKED_AT = 64  # images
_LARGE_PIXELS = 512 * 512  # of a plane: from here on an image is a field, not a cell
_FLAT_PART = 0.9  # of neighbours along X that are equal, in images of labels
_CAMERAS = ((8, "cells-8bit"), (12, "cells-12bit"), (16, "cells-16bit"))


class Resemblance(NamedTuple):
    """A named workload of the benchmarks, and why it is that."""

    workload: str
    why: str


def resemblance(images: Sequence[Array]) -> Resemblance | None:
    """Return the workload that images (T, C, Z, Y, X) resemble most; None for pixels that no workload has.

    What decides is what sizes and times of the formats hang on: how many values pixels have, and how large images are.
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
    bits, name = next(each for each in _CAMERAS if len(levels) <= 2 ** each[0])
    return Resemblance(name, f"pixels have {len(levels):,} of the 2^{bits} values of a camera of {bits} bits")
