"""Files for the records: collections with damaged pixels, without planes, or in foreign formats."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tifffile

from omearrow_ds import FORMATS, convert, write_images

COLUMNS = {
    "Metadata_Plate": ["P1"] * 4,
    "Metadata_Well": ["A01", "A02", "B01", "B02"],
    "label": ["x", "y", "x", "y"],
    "sparse": [1, None, 2, 3],
}
_METADATA = {"channels": [{"name": "DNA"}, {"name": "ER"}], "physical_size_x": 0.5, "physical_size_x_unit": "µm"}
_OBJECTS = "image_id,Metadata_ObjectNumber,y,x\n{},1,8,9\n"
TABLES = {
    "objects": _OBJECTS.format("image-00000"),
    "strangers": _OBJECTS.format("image-99999"),
    "unplaced": "image_id,Metadata_ObjectNumber\nimage-00000,1\n",
    "repeated": "image_id,donor\nimage-00000,a\nimage-00000,b\n",
    "listing": "FileName_DNA,PathName_DNA,Metadata_Well\nA01_1_DNA.tif,/nowhere,A01\n",
}


def pixels() -> list[Any]:
    """Return four images of two channels with random pixels."""
    return list(np.random.default_rng(0).integers(0, 200, (4, 1, 2, 1, 16, 20), np.uint8))


def write(path: Path, **options: Any) -> Path:
    """Write the four images with names of channels, a pixel size and columns."""
    write_images(pixels(), path, metadata=[_METADATA] * 4, columns=COLUMNS, **options)
    return path


def write_damaged(images: Path, target: Path) -> Path:
    """Copy a Parquet file with one other pixel in its second image."""
    content = bytearray(images.read_bytes())
    first = content.find(pixels()[1][0, 0].tobytes())
    assert first > 0
    content[first] ^= 1
    target.write_bytes(content)
    return target


def write_tables(folder: Path) -> dict[str, Path]:
    """Write tables of objects, keys and files as CSV, and return their paths by name."""
    paths = {name: folder / f"{name}.csv" for name in TABLES}
    for name, path in paths.items():
        path.write_text(TABLES[name])
    return paths


def write_planes(folder: Path, names: Sequence[str]) -> Path:
    """Write a folder of TIFF files with one plane each."""
    folder.mkdir()
    for name in names:
        tifffile.imwrite(folder / name, np.ones((8, 9), np.uint8))
    return folder


def write_odd_tables(images: Path) -> dict[str, Path]:
    """Write Parquet files without checksums, small, without images, with two image columns and with a null image."""
    names = ("unchecked", "small_masks", "no_images", "two_columns", "null_image")
    paths = {name: images.parent / f"{name}.parquet" for name in names}
    write_images(pixels(), paths["unchecked"], checksum=False)
    write_images([image[..., :4, :4] for image in pixels()], paths["small_masks"])
    write_images([], paths["no_images"])
    column = pq.read_table(images)["ome_image"]
    pq.write_table(pa.table({"first": column, "second": column}), paths["two_columns"])
    some = pa.array([None, *column.to_pylist()[1:]], column.type)
    pq.write_table(pa.table({"ome_image": some}), paths["null_image"])
    return paths


def write_parts(images: Path) -> dict[str, Path]:
    """Write collections in parts: complete, with one part removed, and with half of the parts made."""
    paths = {name: images.parent / f"{name}.parts" for name in ("parts", "incomplete_parts", "shared_out")}
    convert(images, paths["parts"])
    shutil.copytree(paths["parts"], paths["incomplete_parts"])
    next((paths["incomplete_parts"] / "parts").iterdir()).unlink()
    convert(images, paths["shared_out"], part_bytes=1000, task=(1, 2))
    return paths


def write_broken(folder: Path) -> dict[str, Path]:
    """Write a truncated collection and a text for each format, an empty file and pictures of another format."""
    paths = {"empty_file": folder / "empty.parquet", "picture": folder / "picture.png", "pictures": folder / "pictures"}
    paths["empty_file"].touch()
    paths["pictures"].mkdir()
    for file in (paths["picture"], paths["pictures"] / "a.png"):
        file.write_bytes(b"\x89PNG")
    for fmt in FORMATS:
        truncated, foreign = folder / f"truncated{fmt.suffix}", folder / f"foreign{fmt.suffix}"
        write_images(pixels(), truncated, image_ids=map(str, range(4)))
        files = [file for file in (truncated, *truncated.rglob("*")) if file.is_file() and not _is_description(file)]
        largest = max(files, key=lambda file: (file.stat().st_size, str(file)))
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        if fmt.is_folder:
            foreign.mkdir()
        (foreign / "notes.txt" if fmt.is_folder else foreign).write_text("Not images.\n" * 100)
        paths |= {f"truncated_{fmt.name}": truncated, f"foreign_{fmt.name}": foreign}
    return paths


def _is_description(file: Path) -> bool:
    return file.suffix == ".json" or file.name == "columns.parquet"
