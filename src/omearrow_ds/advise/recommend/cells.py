"""`Cells`: the objects of a collection whose samples are crops around objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import checked_size
from omearrow_ds.dataset.places import CropOptions
from omearrow_ds.dataset.places import of_objects as crops_of_objects
from omearrow_ds.errors import ArgumentError
from omearrow_ds.options import PADS, check_choice
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.keys import IMAGE_ID, table_file
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.text import as_keywords

_CENTER, _BOX = ("y", "x"), ("y0", "y1", "x0", "x1")


class Cells:
    """Objects of a source around which samples are cropped.

    ``crop_size`` and ``options`` have the meaning of `omearrow_ds.OMEArrowDataset`. ``options`` contains those of
    ``objects``, ``center``, ``box``, ``pad`` and ``resize`` that were passed. Errors are those of the dataset.

    Attributes
    ----------
    dataset_options
        Keywords of a dataset of the source.
    source
        Images that contain objects; all images without a filter.
    fields
        (n,) int64, image index per sample.
    """

    def __init__(
        self,
        source: BaseSource,
        crop_size: tuple[int, int] | None,
        options: CropOptions,
        of_objects: ObjectSettings,
    ) -> None:
        box, pad = options.get("box"), options.get("pad")
        if crop_size is None and not box:
            raise ArgumentError(
                "the size of crops is missing", option="crop_size", remedy="pass (height, width), or box= with resize="
            )
        if pad is not None:
            check_choice("pad", pad, PADS, ", or None")
        table, center = options.get("objects"), options.get("center")
        self.source, objects = of_objects.open(source, table, center, box)
        size = None if crop_size is None else checked_size(crop_size)
        self._source_columns = source.column_names
        self._objects = objects.keep(crops_of_objects(objects, self.source.shapes, size, pad)[1])
        if not len(self._objects.rows):
            raise ArgumentError(
                f"{objects.where} has no objects in these images",
                option="objects",
                remedy="pass a table with objects of these images",
            )
        file = table_file(table, "objects")
        types = None if file is None else of_objects.types.of_table(file) or None
        condition = None if of_objects.row_filter is None else of_objects.row_filter.condition
        chosen = {"on": of_objects.on, "column_types": types, "filter": condition}
        self.dataset_options = cast(
            CropOptions, {**options, **{name: value for name, value in chosen.items() if value is not None}}
        )
        self.fields = self._objects.fields

    def __len__(self) -> int:
        return len(self.fields)

    def within(self, images: Sequence[int]) -> Array:
        """Return the sorted indices of the objects that are in ``images``."""
        return np.flatnonzero(np.isin(self.fields, np.asarray(images, np.int64)))

    def remap_to_copies(self, images: Sequence[int], image_ids: Sequence[str]) -> CropOptions:
        """Return the dataset keywords that crop around the objects of ``images`` in copies named ``image_ids``."""
        part = self._objects.keep(self.within(images))
        new_id = dict(zip(images, image_ids, strict=True))
        names, values = (_CENTER, part.centers) if part.boxes is None else (_BOX, part.boxes)
        assert values is not None
        ids = pa.array([new_id[field] for field in part.fields.tolist()], pa.string())
        table = pa.table({IMAGE_ID: ids, **dict(zip(names, map(pa.array, values.T), strict=True))})
        position_options = {"objects": table, ("center" if part.boxes is None else "box"): names}
        kept_options = {name: value for name, value in self.dataset_options.items() if name in ("pad", "resize")}
        return cast(CropOptions, {**position_options, **kept_options})

    def opening_of_fields(self, opening: OpenOptions) -> OpenOptions:
        """Return the options that open only the images: ``opening`` without column types of the objects' table."""
        options: Any = self.dataset_options
        own = set(options.get("column_types", ())) - set(self._source_columns)
        types = {name: kind for name, kind in (opening.get("column_types") or {}).items() if name not in own}
        return {**opening, "column_types": types or None}

    def as_keywords(self, opening: OpenOptions) -> list[str]:
        """Return the options in `dataset_options` as Python code, without those in ``opening``.

        An in-memory table is named ``objects``.
        """
        options: dict[str, Any] = {name: value for name, value in self.dataset_options.items() if name not in opening}
        objects = options.pop("objects")
        path = repr(os.fspath(objects)) if isinstance(objects, str | os.PathLike) else "objects"
        return [f"objects={path}", *as_keywords(options)]


def in_turn(numbers: Array, fields: Array, random: np.random.Generator) -> list[int]:
    """Return samples in random order, one of each image per turn, so that crops of one image are far apart.

    In a collection of thousands of images, a shuffled batch rarely has two crops of one image. In a sample of a few
    images, only this order keeps such repetitions as rare.
    """
    order = random.permutation(len(numbers))
    by_field = np.argsort(fields[order], kind="stable")
    sorted_fields = fields[order][by_field]
    first = np.searchsorted(sorted_fields, sorted_fields)
    turn = np.empty(len(order), np.int64)
    turn[by_field] = np.arange(len(order)) - first
    ordered: list[int] = numbers[order[np.argsort(turn, kind="stable")]].tolist()
    return ordered
