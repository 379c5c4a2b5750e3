"""`cropped`: crops for the options of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from omearrow_ds.axes import checked_size
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.crop_fit import Fit
from omearrow_ds.dataset.crops import CropCollection
from omearrow_ds.dataset.places import CropOptions, Places, RandomPlaces, of_centres, of_grid, of_objects
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import PADS, check_choice
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.objects import CropRows, ObjectSettings


def cropped(
    collect: Callable[[BaseSource], Collection],
    source: BaseSource,
    crop_size: Any,
    options: CropOptions,
    settings: ObjectSettings,
) -> CropCollection:
    """Return a collection of crops that the options of `omearrow_ds.OMEArrowDataset` select from images.

    ``collect`` returns the whole images of a source as samples. Raises `ArgumentError` if options are invalid or
    conflict; `AxesError` if an image is smaller than a crop.
    """
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _refuse(chosen, crop_size)
    objects, pad = chosen.pop("objects", None), chosen.get("pad")
    size = None if crop_size is None else checked_size(crop_size)
    path = str(source.path)
    if objects is None:
        assert size is not None
        crop, collection = chosen.get("crop", "center"), collect(source)
        if crop == "random":
            return CropCollection.of(collection, RandomPlaces(source.shapes, size, pad, path))
        if crop == "center":
            return CropCollection.of(collection, of_centres(source.shapes, size, pad, path))
        tiles = of_grid(source.shapes, size, chosen.get("overlap", 0), pad, path)
        positions = pa.table(dict(zip(("crop_y", "crop_x"), tiles.corners, strict=True)))
        rows = CropRows(source, positions, tiles.fields, partial(_tile_ids, tiles, source.image_ids))
        return CropCollection.of(collection, tiles, rows)
    source, located = settings.open(source, objects, chosen.get("center"), chosen.get("box"))
    collection = collect(source)
    boxes, is_inside = of_objects(located, source.shapes, size, pad)
    rows = CropRows.of_objects(source, located.keep(is_inside))
    name = next((name for name in ("resize", "pad_to") if name in chosen), None)
    fit = None if name is None else Fit(checked_size(chosen[name]), name == "resize")
    if name == "resize" and not collection.floating:
        problem = "scaled crops are floats, but normalize=False keeps the stored dtype"
        raise ArgumentError(problem, option="resize", remedy="leave out one of them")
    if fit is not None and name == "pad_to":
        _refuse_larger(boxes, rows, fit.size)
    return CropCollection.of(collection, boxes, rows, fit)


def _tile_ids(tiles: Places, image_ids: Sequence[str]) -> list[str]:
    corners = zip(tiles.fields.tolist(), *(starts.tolist() for starts in tiles.corners), strict=True)
    return [f"{image_ids[field]}:{top},{left}" for field, top, left in corners]


def _refuse_larger(windows: Places, rows: CropRows, size: tuple[int, int]) -> None:
    for position in range(len(windows)):
        height, width = windows.size_of(position)
        if height > size[0] or width > size[1]:
            raise AxesError(
                f"{rows.path}: the box of {rows.image_ids[position]!r} has {height} x {width} pixels but "
                f"pad_to={size}; raise pad_to, or pass resize= instead"
            )


def _refuse(passed: dict[str, Any], crop_size: Any) -> None:
    crop, pad = passed.get("crop", "center"), passed.get("pad")
    pads = PADS if "objects" in passed else PADS[:3]
    if pad is not None:
        check_choice("pad", pad, pads, ", or None" if "objects" in passed else ", or None without objects=")
    needs = (
        ("objects=", ("center", "box", "resize", "pad_to"), "objects" in passed),
        ("crop='grid'", ("overlap",), crop == "grid"),
        ("box=", ("resize", "pad_to"), passed.get("box")),
    )
    for other, names, is_passed in needs:
        name = next((name for name in names if name in passed and not is_passed), None)
        if name is not None:
            raise ArgumentError(
                f"needs {other}", option=name, value=passed[name], remedy=f"pass {other} or leave it out"
            )
    if "objects" in passed and crop != "center":
        raise ArgumentError("objects= sets the position of crops", option="crop", value=crop, remedy="leave it out")
    if crop_size is None and not passed.get("box"):
        remedy = "pass (height, width)" + (" or the columns of box=" if "objects" in passed else "")
        raise ArgumentError("the size of crops is missing", option="crop_size", remedy=remedy)
    sizes = {"crop_size": crop_size, "resize": passed.get("resize"), "pad_to": passed.get("pad_to")}
    first, *others = [name for name, size in sizes.items() if size is not None] or [""]
    for name in others:
        raise ArgumentError(
            f"{name}= also sets the size of samples", option=first, value=sizes[first], remedy="pass only one of them"
        )
