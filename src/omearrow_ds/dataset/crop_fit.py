"""Fit of boxes to one size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from omearrow_ds.storage.formats._base import Array


class Fit(NamedTuple):
    """Conversion of crops to one ``size`` (height, width), either by scaling or by padding with zeros on all sides."""

    size: tuple[int, int]
    scaled: bool

    def __call__(self, crop: Array, sample: Array, *, smooth: bool) -> None:
        """Write a crop to a sample, both (T, C, Z, Y, X); scaling is bilinear if ``smooth``, else by nearest pixel."""
        if not self.scaled:
            sample[...] = 0
            top, left = ((to - length) // 2 for to, length in zip(self.size, crop.shape[3:], strict=True))
            sample[..., top : top + crop.shape[3], left : left + crop.shape[4]] = crop
        elif smooth:
            stack = torch.from_numpy(crop.reshape(1, -1, *crop.shape[3:]))
            scaled = torch.nn.functional.interpolate(stack, self.size, mode="bilinear", antialias=True)
            sample[...] = scaled.numpy().reshape(sample.shape)
        else:
            sides = zip(self.size, crop.shape[3:], strict=True)
            y, x = ((2 * np.arange(to) + 1) * length // (2 * to) for to, length in sides)  # Pixel centers.
            sample[...] = crop[..., y, :][..., x]

    def moved(self, pixel: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
        """Return the row and column in the sample of the pixel that was at ``pixel`` in a crop of ``shape``."""
        sides = zip(pixel, shape, self.size, strict=True)
        y, x = (
            (2 * coordinate + 1) * to // (2 * length) if self.scaled else coordinate + (to - length) // 2
            for coordinate, length, to in sides
        )
        return y, x
