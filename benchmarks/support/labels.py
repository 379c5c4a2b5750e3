"""Label images: discs numbered from 1 on a background of 0, like segmented cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_RADIUS, _PIXELS_PER_LABEL = 14, 5200


def discs(centres: Array, shape: tuple[int, ...]) -> Array:
    """Return a uint16 label image ``(..., Y, X)`` with a disc around each center (Y, X); later discs are on top."""
    mask = np.zeros(shape, np.uint16)
    reach = np.arange(-_RADIUS, _RADIUS + 1)
    disc = np.argwhere(reach[:, None] ** 2 + reach**2 <= _RADIUS**2) - _RADIUS
    for number, centre in enumerate(np.rint(centres).astype(np.int64), start=1):
        y, x = (centre + disc).T
        within = (y >= 0) & (y < shape[-2]) & (x >= 0) & (x < shape[-1])
        mask[..., y[within], x[within]] = number
    return mask


def label_images(count: int, shape: tuple[int, ...], seed: int) -> Iterator[Array]:
    """Stream label images, each with a realistic number of cells for its size."""
    for index in range(count):
        draw = np.random.default_rng([seed, index])
        number = max(1, shape[-2] * shape[-1] // _PIXELS_PER_LABEL)
        yield discs(draw.uniform(0, np.array(shape[-2:]) - 1, (number, 2)), shape)
