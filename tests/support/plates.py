"""OME-Zarr plates as in their specification (https://ngff.openmicroscopy.org), written with zarr only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def written_plate(
    path: Path,
    wells: Mapping[str, Sequence[Array]],
    version: str = "0.5",
    *,
    labels: Sequence[str] = (),
    label_images: Mapping[str, Mapping[str, Sequence[Array | None]]] | None = None,
    paths: Mapping[str, Sequence[str]] | None = None,
    **of_plate: Any,
) -> Path:
    """Write images (T, C, Z, Y, X) as the fields of wells, each with a second level of half the size.

    ``labels`` are names of empty label images; ``label_images`` are some (T, Z, Y, X) by name and well, one per field
    or None. ``paths`` are the paths of the fields of each well, by default 0, 1, and so on.
    """
    import zarr

    form = 2 if version == "0.4" else 3

    def describe(node: Any, attributes: Mapping[str, Any]) -> None:
        node.attrs.update({**attributes} if form == 2 else {"ome": {"version": version, **attributes}})

    root = zarr.create_group(path, zarr_format=form)
    named = [{"path": well, "rowIndex": 0, "columnIndex": 0} for well in wells]
    describe(root, {"plate": {"wells": named, "rows": [{"name": "A"}], "columns": [{"name": "1"}], **of_plate}})
    for well, images in wells.items():
        group = root.require_group(well)
        fields = [str(number) for number in range(len(images))] if paths is None else paths[well]
        describe(group, {"well": {"images": [{"path": path} for path in fields]}})
        for number, image in enumerate(images):
            field = group.create_group(fields[number])
            axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "tczyx"]
            levels = [
                {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1, size, size]}]}
                for level, size in enumerate((0.5, 1.0))
            ]
            describe(field, {"multiscales": [{"axes": axes, "datasets": levels}]})
            for level in range(2):
                field.create_array(str(level), data=image[..., :: 1 + level, :: 1 + level], chunks=(1, 1, 1, 7, 8))
            of_name = {
                name: label_images_of_well[well][number] for name, label_images_of_well in (label_images or {}).items()
            }
            field_labels = {name: label for name, label in of_name.items() if label is not None}
            if not labels and not field_labels:
                continue
            of_field = field.create_group("labels")
            describe(of_field, {"labels": [*labels, *field_labels]})
            for name, label in field_labels.items():
                group_of_label = of_field.create_group(name)
                spatial = [axis for axis in axes if axis["name"] != "c"]
                of_levels = [
                    {
                        "path": level["path"],
                        "coordinateTransformations": [{"type": "scale", "scale": [1, 1, size, size]}],
                    }
                    for level, size in zip(levels, (0.5, 1.0), strict=True)
                ]
                image_label = {"image-label": {"source": {"image": "../../"}}}
                describe(group_of_label, {"multiscales": [{"axes": spatial, "datasets": of_levels}], **image_label})
                for level in range(2):
                    pixels = label[..., :: 1 + level, :: 1 + level]
                    group_of_label.create_array(str(level), data=pixels, chunks=(1, 1, 7, 8))
    return path
