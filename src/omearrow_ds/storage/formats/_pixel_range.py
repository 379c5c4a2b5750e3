"""`PixelRange`: the largest value of a few uint16 images, and the scaling of 12-bit pixels."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.text import count

Array = np.ndarray[Any, Any]
HIGH = 4095  # Largest value of 12 bits.
MAX_IMAGES = 64
UINT16 = np.dtype(np.uint16)
_LARGEST = np.iinfo(UINT16).max


class PixelRange(NamedTuple):
    """Largest value of a few uint16 images."""

    largest: int
    num_images: int

    @classmethod
    def measure(cls, images: Iterable[Array], limit: int = _LARGEST) -> PixelRange | None:
        """Measure the uint16 images among the first 64, until a value exceeds ``limit``; None if no image is uint16."""
        largest = num_images = 0
        for image in islice(images, MAX_IMAGES):
            if image.dtype == UINT16:
                largest, num_images = max(largest, int(image.max(initial=0))), num_images + 1
            if largest > limit:
                break
        return cls(largest, num_images) if num_images else None

    @classmethod
    def join(cls, ranges: Iterable[PixelRange | None]) -> PixelRange | None:
        """Return the combined range of several collections; None if no range is known."""
        known = [pixel_range for pixel_range in ranges if pixel_range is not None]
        return cls(max(largest for largest, _ in known), sum(num for _, num in known)) if known else None

    @property
    def normalize(self) -> dict[str, int] | None:
        """Value of ``normalize=`` for 12-bit pixels; None if the images have larger values, or are black."""
        return {"low": 0, "high": HIGH} if 0 < self.largest <= HIGH else None

    @property
    def text(self) -> str:
        """Description of the largest value and, if this has at most 12 bits, the option that scales such images."""
        measured = f"largest value {self.largest:,} in {count(self.num_images, 'uint16 image')}"
        if self.normalize is None:
            return measured
        scaled = self.largest / _LARGEST
        return f'{measured}, {scaled:.2g} with normalize=True; pass normalize={{"low": 0, "high": {HIGH}}}'

    def as_dict(self) -> dict[str, Any]:
        """Return the range as a dictionary of JSON values."""
        return {"largest": self.largest, "images": self.num_images, "normalize": self.normalize}
