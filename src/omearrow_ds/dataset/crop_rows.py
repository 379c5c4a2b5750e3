"""Rows of crops: their ids and columns beside the pixels, and the fit of boxes to one size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from omearrow_ds.dataset.places import Places
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.formats._columns import Named
from omearrow_ds.storage.objects import Objects, object_ids


class Fit(NamedTuple):
    """How crops of boxes get one ``size`` (height, width): scaled, or in the middle of zeros."""

    size: tuple[int, int]
    scaled: bool

    def __call__(self, crop: Array, sample: Array, *, smooth: bool) -> None:
        """Write a crop to a sample, both (T, C, Z, Y, X): scaled smoothly, or by the nearest pixels."""
        if not self.scaled:
            sample[...] = 0
            top, left = ((to - of) // 2 for to, of in zip(self.size, crop.shape[3:], strict=True))
            sample[..., top : top + crop.shape[3], left : left + crop.shape[4]] = crop
        elif smooth:
            stack = torch.from_numpy(crop.reshape(1, -1, *crop.shape[3:]))
            scaled = torch.nn.functional.interpolate(stack, self.size, mode="bilinear", antialias=True)
            sample[...] = scaled.numpy().reshape(sample.shape)
        else:
            sides = zip(self.size, crop.shape[3:], strict=True)
            y, x = ((2 * np.arange(to) + 1) * of // (2 * to) for to, of in sides)  # in the middle of each
            sample[...] = crop[..., y, :][..., x]

    def moved(self, pixel: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
        """Return where a pixel of a crop of ``shape`` is in its sample."""
        sides = zip(pixel, shape, self.size, strict=True)
        y, x = ((2 * at + 1) * to // (2 * of) if self.scaled else at + (to - of) // 2 for at, of, to in sides)
        return y, x


class CropRows:
    """Path, ids and columns of crops: those of the objects, or of the tiles, and those of their images.

    Without ``objects`` they are tiles, which have their place as columns ``crop_y`` and ``crop_x``.
    """

    def __init__(self, source: BaseSource, places: Places, objects: Objects | None) -> None:
        self.path, self._places, self.objects = source.path, places, objects
        self._images: tuple[Sequence[str], pa.Table] = (source.image_ids, source.columns)

    @cached_property
    def image_ids(self) -> Sequence[str]:
        """One id a crop."""
        if self.objects is not None:
            return object_ids(self.objects, self._images[0])
        placed = zip(self._places.fields.tolist(), *(of.tolist() for of in self._places.corners), strict=True)
        return [f"{self._images[0][field]}:{top},{left}" for field, top, left in placed]

    @property
    def own(self) -> pa.Table:
        """The columns of the objects, or of the tiles."""
        if self.objects is not None:
            return self.objects.table
        return pa.table(dict(zip(("crop_y", "crop_x"), self._places.corners, strict=True)))

    @cached_property
    def columns(self) -> pa.Table:
        """Theirs, and those of their images that are called otherwise."""
        own, images = self.own, self._images[1]
        others = images.select([name for name in images.column_names if name not in own.column_names])
        if not others.num_columns:
            return own
        of_images = others.take(pa.array(self._places.fields))
        return pa.table({name: of[name] for of in (own, of_images) for name in of.column_names})

    @property
    def named(self) -> Named:
        """The same."""
        named: Named = self.columns
        return named

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("image_ids", "columns")}
