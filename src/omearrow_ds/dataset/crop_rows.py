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
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.storage.objects import Objects, object_ids


class Fit(NamedTuple):
    """Conversion of crops to one ``size`` (height, width), by scaling or by centering them in zeros."""

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
        """Return the (row, column) in the sample to which a pixel of a crop of ``shape`` is mapped."""
        sides = zip(pixel, shape, self.size, strict=True)
        y, x = (
            (2 * coordinate + 1) * to // (2 * length) if self.scaled else coordinate + (to - length) // 2
            for coordinate, length, to in sides
        )
        return y, x


class CropRows(ColumnReader):
    """Path, ids and columns of crops; the columns are those of the objects or tiles, then other ones of their images.

    Without ``objects``, crops are tiles, whose positions are the columns ``crop_y`` and ``crop_x``. A process that
    unpickles it sets ``source``, the source of the images, before it reads columns.
    """

    def __init__(self, source: BaseSource, boxes: Places, objects: Objects | None) -> None:
        self.path, self._places, self.objects = source.path, boxes, objects
        self.source: BaseSource | None = source
        self._field_ids = source.image_ids

    @cached_property
    def image_ids(self) -> Sequence[str]:
        if self.objects is not None:
            return object_ids(self.objects, self._field_ids)
        corners = zip(self._places.fields.tolist(), *(starts.tolist() for starts in self._places.corners), strict=True)
        return [f"{self._field_ids[field]}:{top},{left}" for field, top, left in corners]

    @property
    def own(self) -> pa.Table:
        if self.objects is not None:
            return self.objects.table
        return pa.table(dict(zip(("crop_y", "crop_x"), self._places.corners, strict=True)))

    @cached_property
    def column_schema(self) -> pa.Schema:
        """Names and types of the columns."""
        assert self.source is not None
        own, images = self.own.schema, self.source.column_schema
        return pa.schema([*own, *(field for field in images if field.name not in own.names)])

    def _read_columns(self, names: list[str]) -> pa.Table:
        assert self.source is not None
        own = self.own
        of_images = self.source.column_table([name for name in names if name not in own.column_names])
        rows = of_images.take(pa.array(self._places.fields)) if of_images.num_columns else of_images
        tables = {name: own if name in own.column_names else rows for name in names}
        return pa.table({name: table[name] for name, table in tables.items()})

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("image_ids", "columns")}
        return {**state, "source": None}
