"""`cropped`: crops for the options of a dataset."""

from __future__ import annotations

from typing import Any

from omearrow_ds.axes import checked_size
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.crop_rows import CropRows, Fit
from omearrow_ds.dataset.crops import CropCollection
from omearrow_ds.dataset.places import CropOptions, Places, RandomPlaces, of_centres, of_grid, of_objects
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import PADS, check_choice
from omearrow_ds.storage.objects import open_objects
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import ColumnTypes


def cropped(
    collection: Collection, crop_size: Any, on: On | None, nulls: str, options: CropOptions, types: ColumnTypes
) -> CropCollection:
    """Return the crops of a collection for the options of `omearrow_ds.OMEArrowDataset`.

    Raises `ArgumentError` if options are invalid or conflict; `AxesError` if an image is smaller than a crop.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _refuse(given, crop_size)
    objects, pad = given.pop("objects", None), given.get("pad")
    size = None if crop_size is None else checked_size(crop_size)
    where, shapes = str(collection.path), collection.shapes
    if objects is None:
        assert size is not None
        crop = given.get("crop", "center")
        if crop == "random":
            return CropCollection.of(collection, RandomPlaces(shapes, size, pad, where))
        if crop == "center":
            return CropCollection.of(collection, of_centres(shapes, size, pad, where))
        places = of_grid(shapes, size, given.get("overlap", 0), pad, where)
        return CropCollection.of(collection, places, CropRows(collection.source, places, None))
    found = open_objects(
        collection.source, objects, given.get("center"), given.get("box"), on, types=types, skip_nulls=nulls == "skip"
    )
    places, kept = of_objects(found, shapes, size, pad)
    told = CropRows(collection.source, places, found.keep(kept))
    fit = next(
        (Fit(checked_size(given[name]), name == "resize") for name in ("resize", "pad_to") if name in given), None
    )
    if fit is not None and fit.scaled and not collection.floating:
        raise ArgumentError(
            "it returns floats but normalize=False keeps the stored dtype",
            option="resize",
            remedy="leave out one of them",
        )
    if fit is not None and not fit.scaled:
        _refuse_larger(places, told, fit)
    return CropCollection.of(collection, places, told, fit)


def _refuse_larger(places: Places, told: CropRows, fit: Fit) -> None:
    """Raise `AxesError` if a box is larger than ``pad_to``."""
    for position in range(len(places)):
        height, width = places.size_of(position)
        if height > fit.size[0] or width > fit.size[1]:
            raise AxesError(
                f"{told.path}: the box of {told.image_ids[position]!r} has {height} x {width} pixels but "
                f"pad_to={fit.size}; raise pad_to, or pass resize= instead"
            )


def _refuse(given: dict[str, Any], crop_size: Any) -> None:
    """Raise `ArgumentError` for options that are invalid or conflict."""
    crop, pad = given.get("crop", "center"), given.get("pad")
    pads = PADS if "objects" in given else PADS[:3]
    if pad is not None:
        check_choice("pad", pad, pads, ", or None" if "objects" in given else ", or None without objects=")
    needs: dict[str, list[str]] = {
        "objects": [name for name in ("center", "box", "resize", "pad_to") if name in given and "objects" not in given],
        "crop='grid'": ["overlap"] if "overlap" in given and crop != "grid" else [],
        "box": [name for name in ("resize", "pad_to") if name in given and not given.get("box")],
    }
    for other, names in needs.items():
        for name in names:
            what = other if "=" in other else f"{other}="
            raise ArgumentError(f"needs {what}", option=name, value=given[name], remedy=f"pass {what} or leave it out")
    if "objects" in given and crop != "center":
        raise ArgumentError("objects= sets the position of crops", option="crop", value=crop, remedy="leave it out")
    if crop_size is None and not given.get("box"):
        remedy = "pass (height, width)" + (" or the columns of box=" if "objects" in given else "")
        raise ArgumentError("the size of crops is missing", option="crop_size", remedy=remedy)
    sizes = [
        name for name in ("crop_size", "resize", "pad_to") if {**given, "crop_size": crop_size}.get(name) is not None
    ]
    if len(sizes) > 1:
        raise ArgumentError(f"{' and '.join(sizes)}: each sets the size of samples; pass only one of them")
