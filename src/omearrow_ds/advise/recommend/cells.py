"""`Cells`: the objects of a collection whose samples are crops around objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.dataset.places import of_objects as crops_of_objects
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.keys import IMAGE_ID, table_file
from omearrow_ds.storage.objects import Objects, ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.text import PythonName


@dataclass(frozen=True)
class Cells:
    """Objects of a source around which samples are cropped.

    Attributes
    ----------
    source
        Images that contain objects; all images without a filter.
    objects
        One object per sample.
    options
        Keywords of a dataset of the source.
    """

    source: BaseSource
    objects: Objects
    options: dict[str, Any]

    @classmethod
    def open(
        cls,
        source: BaseSource,
        crop_size: tuple[int, int] | None,
        crops: dict[str, Any],
        of_objects: ObjectSettings,
    ) -> Cells:
        """Open the table of objects that ``crops``, a dict of dataset options, contains.

        Errors are those of the dataset.
        """
        box, pad, passed = crops.get("box"), crops.get("pad"), crops["objects"]
        if crop_size is None and not box:
            raise ArgumentError(
                "the size of crops is missing", option="crop_size", remedy="pass (height, width), or box= with resize="
            )
        images, objects = of_objects.open(source, passed, crops.get("center"), box)
        objects = objects.keep(crops_of_objects(objects, images.shapes, crop_size, pad)[1])
        if not len(objects.rows):
            raise ArgumentError(
                f"{objects.where} has no objects in these images",
                option="objects",
                remedy="pass a table with objects of these images",
            )
        file, row_filter = table_file(passed, "objects"), of_objects.row_filter
        types = None if file is None else of_objects.types.of_table(file) or None
        condition = None if row_filter is None else row_filter.condition
        joining = {"on": of_objects.on, "column_types": types, "filter": condition}
        return cls(images, objects, {**crops, **{name: value for name, value in joining.items() if value is not None}})

    @property
    def fields(self) -> Array:
        """(n,) int64, image index per sample."""
        return self.objects.fields

    def within(self, images: Sequence[int] | Array) -> Array:
        """Return the sorted indices of the objects that are in ``images``."""
        return np.flatnonzero(np.isin(self.fields, images))

    def remap_to_copies(self, images: Sequence[int], image_ids: Sequence[str]) -> dict[str, Any]:
        """Return dataset keywords for crops around the objects of ``images``, copied with the ids ``image_ids``."""
        part, new_ids = self.objects.keep(self.within(images)), dict(zip(images, image_ids, strict=True))
        columns: dict[str, Any] = {IMAGE_ID: [new_ids[field] for field in part.fields.tolist()]}
        option, positions = ("center", part.centers) if part.boxes is None else ("box", part.boxes)
        assert positions is not None
        names = ["y", "x"] if part.boxes is None else ["y0", "y1", "x0", "x1"]
        table = pa.table(columns | dict(zip(names, positions.T, strict=True)))
        return {"objects": table, option: names} | {k: v for k, v in self.options.items() if k in ("pad", "resize")}

    def opening_of_fields(self, opening: OpenOptions) -> OpenOptions:
        """Return ``opening`` without the column types that apply to the table of objects."""
        types = dict(opening.get("column_types") or {})
        for name in self.options.get("column_types", {}).keys() - set(self.source.column_names):
            types.pop(name, None)
        return {**opening, "column_types": types or None}

    @property
    def code(self) -> dict[str, Any]:
        """Return ``options`` to be printed as Python code, where a table in memory is called ``objects``."""
        objects = self.options["objects"]
        is_path = isinstance(objects, str | os.PathLike)
        return {**self.options, "objects": os.fspath(objects) if is_path else PythonName("objects")}


def in_turn(samples: Array, fields: Array, random: np.random.Generator) -> Array:
    """Return samples in random order, where crops of one image are far apart: each pass takes one crop per image.

    In a collection of thousands of images, a shuffled batch rarely has two crops of one image. In a sample of a few
    images, only this order keeps such repetitions as rare.
    """
    order = random.permutation(len(samples))
    by_field = np.argsort(fields[order], kind="stable")
    sorted_fields = fields[order][by_field]
    turn = np.empty_like(order)
    turn[by_field] = np.arange(len(order)) - np.searchsorted(sorted_fields, sorted_fields)
    ordered: Array = samples[order[np.argsort(turn, kind="stable")]]
    return ordered
