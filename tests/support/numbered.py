"""Images that say which they are: the first pixel has the number, the others follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CHANNELS = ("DAPI", "GFP")
PATTERN = "{well}_{site}_{channel}.tif"


def image(number: int, height: int = 24, width: int = 20) -> Array:
    """Return image ``number``: shape (C, Y, X), uint16."""
    pixels = np.arange(len(CHANNELS) * height * width, dtype=np.uint16).reshape(-1, height, width)
    return pixels * np.uint16(7 + number % 5) + np.uint16(number)


def number_of(found: Array) -> int:
    """Return the number of an image, after comparing all its pixels; it may have more axes of length 1."""
    found = found.reshape(len(CHANNELS), *found.shape[-2:])
    number = int(found[0, 0, 0])
    np.testing.assert_array_equal(found, image(number, *found.shape[-2:]))
    return number


def write_plate(folder: Path, count: int, height: int = 24, width: int = 20) -> Path:
    """Write ``count`` images as a plate of TIFF files, by tifffile: one a channel, with four sites a well."""
    import tifffile

    folder.mkdir()
    for number in range(count):
        well, site = f"{'ABCDEFGH'[number // 48]}{number // 4 % 12 + 1:02d}", number % 4 + 1
        for name, pixels in zip(CHANNELS, image(number, height, width), strict=True):
            tifffile.imwrite(folder / f"{well}_{site}_{name}.tif", pixels, metadata=None)
    return folder
