"""Golden files of tools with their own environments: plates by ome-zarr and iohub, tables by CytoTable and others.

They require other versions of zarr and ome-arrow than the tests; the README next to the files lists the commands.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.adversarial.golden.content import Content
from tests.adversarial.golden.foreign import Foreign

_FIELDS = (("A", "1", "0"), ("A", "1", "1"), ("B", "2", "0"), ("B", "12", "0"))  # Row, column, field.
PLATE = Content(
    (((1, 2, 1, 9, 11), "uint16"),) * len(_FIELDS),
    tuple("/".join(field) for field in _FIELDS),
    {
        "Metadata_Plate": (pa.string(), ["plate"] * len(_FIELDS)),
        "Metadata_Well": (pa.string(), ["A01", "A01", "B02", "B12"]),
        "Metadata_Site": (pa.int64(), [1, 2, 1, 1]),
        "Metadata_Field": (pa.string(), ["0", "1", "0", "0"]),
    },
)
_MOVED = ((0, 1), (1, 1, 1, 12, 17))
_FILES = tuple(f"field-{number}" for number in range(3))
CYTOTABLE = Content(
    (((12, 17), "uint16"),) * 3,
    _FILES,
    {"source_image_file": (pa.string(), [f"{name}.tiff" for name in _FILES])},
    moved=_MOVED,
)
CYTODATAFRAME = Content(
    (((12, 17), "uint8"),) * 3,
    ("unnamed",) * 3,
    {"FileName_DNA": (pa.string(), [f"{name}.tiff" for name in _FILES])},
    moved=_MOVED,
    storage_info="uint16",
)


def tool_cases() -> Iterator[Foreign]:
    """Yield the cases of the tools."""
    for version in ("0.4", "0.5"):
        for tool, write in (("ome_zarr", _by_ome_zarr), ("iohub", _by_iohub)):
            written = partial(write, version)
            yield Foreign(f"by_{tool}-plate-{version}", "plate.zarr", "ome_zarr", PLATE, (tool,), written)
    opening = {"image_column": "FileName_DNA_OMEArrow_ORIG"}
    needs = ("cytodataframe", "ome_arrow")
    yield Foreign("by_cytodataframe", "cells.parquet", "parquet", CYTODATAFRAME, needs, _by_cytodataframe, opening)
    opening = {"image_column": "ome_arrow_image"}
    for kind in ("crops", "images"):
        written = partial(_by_cytotable, kind)
        needs = ("cytotable", "ome_arrow")
        yield Foreign(f"by_cytotable-{kind}", "cells.parquet", "parquet", CYTOTABLE, needs, written, opening)


def _by_ome_zarr(version: str, path: Path, content: Content) -> None:
    import zarr
    from ome_zarr.format import FormatV04, FormatV05
    from ome_zarr.writer import write_image, write_plate_metadata, write_well_metadata

    fmt = {"0.4": FormatV04, "0.5": FormatV05}[version]()
    root = zarr.create_group(path, zarr_format=fmt.zarr_format)
    wells = list(dict.fromkeys(f"{row}/{column}" for row, column, _ in _FIELDS))
    rows, columns = (list(dict.fromkeys(field[axis] for field in _FIELDS)) for axis in (0, 1))
    write_plate_metadata(root, rows, columns, wells, fmt=fmt)
    for well in wells:
        images = [field for *well_parts, field in _FIELDS if "/".join(well_parts) == well]
        write_well_metadata(root.require_group(well), images, fmt=fmt)
    options = {"chunks": (1, 1, 1, 5, 6)}
    for field, image in zip(_FIELDS, content.written, strict=True):
        group = root.require_group("/".join(field))
        write_image(image, group, scale_factors=[2], fmt=fmt, axes="tczyx", storage_options=options)


def _by_iohub(version: str, path: Path, content: Content) -> None:
    from iohub import open_ome_zarr

    names = ["DNA", "RNA"]
    with open_ome_zarr(path, layout="hcs", mode="w", channel_names=names, version=version) as plate:
        for field, image in zip(_FIELDS, content.written, strict=True):
            plate.create_position(*field).create_image("0", image, chunks=(1, 1, 1, 5, 6))


def _profiles(folder: Path, content: Content) -> Any:
    """Write a TIFF file per image, and per mask except the last; return CellProfiler's measurements of the objects.

    Each image has one object that covers all of it.
    """
    import pandas as pd
    import tifffile

    for folder_name in ("images", "masks"):
        (folder / folder_name).mkdir()
    height, width = content.kinds[0][0]
    rows = []
    for number, (name, image) in enumerate(zip(_FILES, content.written, strict=True)):
        tifffile.imwrite(folder / "images" / f"{name}.tiff", image)
        if number < len(_FILES) - 1:
            mask = np.zeros_like(image)
            mask[3:9, 4 : 12 + number] = 1
            tifffile.imwrite(folder / "masks" / f"{name}.tiff", mask)
        box = {"Minimum_X": 0, "Minimum_Y": 0, "Maximum_X": width, "Maximum_Y": height}
        box_columns = {f"AreaShape_BoundingBox{corner}": value for corner, value in box.items()}
        rows.append({"Metadata_Well": "A01", "ImageNumber": number, "FileName_DNA": f"{name}.tiff", **box_columns})
    return pd.DataFrame(rows)


def _by_cytodataframe(path: Path, content: Content) -> None:
    from cytodataframe import CytoDataFrame

    with tempfile.TemporaryDirectory() as folder:
        profiles = _profiles(Path(folder), content)
        frame = CytoDataFrame(
            profiles,
            data_context_dir=f"{folder}/images",
            data_mask_context_dir=f"{folder}/masks",
            image_adjustment=lambda image, _: image,  # By default, contrast is stretched.
        )
        frame.to_ome_parquet(path)


def _by_cytotable(kind: str, path: Path, content: Content) -> None:
    """Write CytoTable's table of whole images or crops, as it appends it to its warehouse."""
    from cytotable.warehouse import images

    make = {
        "crops": images.image_crop_table_from_joined_chunk,
        "images": images.source_image_table_from_joined_chunk,
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        chunk = Path(folder) / "chunk.parquet"
        _profiles(Path(folder), content).to_parquet(chunk)
        pq.write_table(make(str(chunk), f"{folder}/images", mask_dir=f"{folder}/masks", crop_workers=1), path)
