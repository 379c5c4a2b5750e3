"""`cropped`: crops for the options of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omearrow_ds.axes import checked_size
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.crop_rows import CropRows, Fit
from omearrow_ds.dataset.crops import CropCollection
from omearrow_ds.dataset.places import CropOptions, Places, RandomPlaces, of_centres, of_grid, of_objects
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import PADS, check_choice
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.objects import ObjectSettings


def cropped(
    collect: Callable[[BaseSource], Collection],
    source: BaseSource,
    crop_size: Any,
    options: CropOptions,
    settings: ObjectSettings,
) -> CropCollection:
    """Return the crops of a source's images for the options of `omearrow_ds.OMEArrowDataset`.

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
        return CropCollection.of(collection, tiles, CropRows(source, tiles, None))
    source, located = settings.open(source, objects, chosen.get("center"), chosen.get("box"))
    collection = collect(source)
    boxes, is_inside = of_objects(located, source.shapes, size, pad)
    rows = CropRows(source, boxes, located.keep(is_inside))
    fit = next(
        (Fit(checked_size(chosen[name]), name == "resize") for name in ("resize", "pad_to") if name in chosen), None
    )
    if fit is not None and fit.scaled and not collection.floating:
        raise ArgumentError(
            "it returns floats but normalize=False keeps the stored dtype",
            option="resize",
            remedy="leave out one of them",
        )
    if fit is not None and not fit.scaled:
        _refuse_larger(boxes, rows, fit)
    return CropCollection.of(collection, boxes, rows, fit)


def _refuse_larger(windows: Places, metadata: CropRows, fit: Fit) -> None:
    for position in range(len(windows)):
        height, width = windows.size_of(position)
        if height > fit.size[0] or width > fit.size[1]:
            raise AxesError(
                f"{metadata.path}: the box of {metadata.image_ids[position]!r} has {height} x {width} pixels but "
                f"pad_to={fit.size}; raise pad_to, or pass resize= instead"
            )


def _refuse(passed: dict[str, Any], crop_size: Any) -> None:
    crop, pad = passed.get("crop", "center"), passed.get("pad")
    pads = PADS if "objects" in passed else PADS[:3]
    if pad is not None:
        check_choice("pad", pad, pads, ", or None" if "objects" in passed else ", or None without objects=")
    needs: dict[str, list[str]] = {
        "objects": [
            name for name in ("center", "box", "resize", "pad_to") if name in passed and "objects" not in passed
        ],
        "crop='grid'": ["overlap"] if "overlap" in passed and crop != "grid" else [],
        "box": [name for name in ("resize", "pad_to") if name in passed and not passed.get("box")],
    }
    for other, names in needs.items():
        for name in names:
            requirement = other if "=" in other else f"{other}="
            raise ArgumentError(
                f"needs {requirement}", option=name, value=passed[name], remedy=f"pass {requirement} or leave it out"
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
