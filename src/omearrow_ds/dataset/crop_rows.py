"""Ids and columns of crops, and the fit of boxes to one size."""

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
    """Conversion of crops to one ``size`` (height, width), by scaling or by centering them in zeros."""

    size: tuple[int, int]
    scaled: bool

    def __call__(self, crop: Array, sample: Array, *, smooth: bool) -> None:
        """Write a crop to a sample, both (T, C, Z, Y, X); scaling is bilinear if ``smooth``, else by nearest pixel."""
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
            y, x = ((2 * np.arange(to) + 1) * of // (2 * to) for to, of in sides)  # Pixel centers.
            sample[...] = crop[..., y, :][..., x]

    def moved(self, pixel: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
        """Return the (row, column) in the sample to which a pixel of a crop of ``shape`` is mapped."""
        sides = zip(pixel, shape, self.size, strict=True)
        y, x = ((2 * at + 1) * to // (2 * of) if self.scaled else at + (to - of) // 2 for at, of, to in sides)
        return y, x


class CropRows:
    """Path, ids and columns of crops; the columns are those of the objects or tiles, and of their images.

    Without ``objects``, crops are tiles, whose positions are the columns ``crop_y`` and ``crop_x``.
    """

    def __init__(self, source: BaseSource, places: Places, objects: Objects | None) -> None:
        self.path, self._places, self.objects = source.path, places, objects
        self._images: tuple[Sequence[str], pa.Table] = (source.image_ids, source.columns)

    @cached_property
    def image_ids(self) -> Sequence[str]:
        """One id per crop."""
        if self.objects is not None:
            return object_ids(self.objects, self._images[0])
        placed = zip(self._places.fields.tolist(), *(of.tolist() for of in self._places.corners), strict=True)
        return [f"{self._images[0][field]}:{top},{left}" for field, top, left in placed]

    @property
    def own(self) -> pa.Table:
        """Columns of the objects or tiles."""
        if self.objects is not None:
            return self.objects.table
        return pa.table(dict(zip(("crop_y", "crop_x"), self._places.corners, strict=True)))

    @cached_property
    def columns(self) -> pa.Table:
        """Columns of the objects or tiles, then the columns of their images whose names differ from these."""
        own, images = self.own, self._images[1]
        others = images.select([name for name in images.column_names if name not in own.column_names])
        if not others.num_columns:
            return own
        of_images = others.take(pa.array(self._places.fields))
        return pa.table({name: of[name] for of in (own, of_images) for name in of.column_names})

    @property
    def named(self) -> Named:
        """`columns` as a mapping by name."""
        named: Named = self.columns
        return named

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("image_ids", "columns")}
