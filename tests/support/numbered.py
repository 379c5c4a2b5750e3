"""Images that encode their number: the first pixel is the number, the others follow from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CHANNELS = ("DAPI", "GFP")
PATTERN = "{well}_{site}_{channel}.tif"


def image(number: int, height: int = 24, width: int = 20) -> Array:
    """Return image ``number``: shape (C, Y, X), uint16."""
    pixels = np.arange(len(CHANNELS) * height * width, dtype=np.uint16).reshape(-1, height, width)
    return pixels * np.uint16(7 + number % 5) + np.uint16(number)


def number_of(pixels: Array) -> int:
    """Return the number of an image, after comparing all its pixels; additional axes of length 1 are allowed."""
    pixels = pixels.reshape(len(CHANNELS), *pixels.shape[-2:])
    number = int(pixels[0, 0, 0])
    np.testing.assert_array_equal(pixels, image(number, *pixels.shape[-2:]))
    return number


def place(number: int) -> tuple[str, int]:
    """Return the well and site of an image, with four sites per well."""
    return f"{'ABCDEFGH'[number // 48]}{number // 4 % 12 + 1:02d}", number % 4 + 1


def write_plate(folder: Path, count: int, height: int = 24, width: int = 20) -> Path:
    """Write ``count`` images as a plate of TIFF files, one per channel, with tifffile."""
    import tifffile

    folder.mkdir()
    for number in range(count):
        well, site = place(number)
        for name, pixels in zip(CHANNELS, image(number, height, width), strict=True):
            tifffile.imwrite(folder / f"{well}_{site}_{name}.tif", pixels, metadata=None)
    return folder


def wait_for_parts(folder: Path, least: int) -> int:
    """Wait for a number of parts of a running conversion, and return how many exist."""
    end_s = time.monotonic() + 60
    while (num_parts := len(list((folder / "jobs").glob("[0-9]*.json")))) < least:
        assert time.monotonic() < end_s, f"{num_parts} parts of {folder} are made after a minute"
        time.sleep(0.005)
    return num_parts


def check_parts(folder: Path, count: int) -> list[int]:
    """Return the number of images per part, after comparing all; pyarrow counts the rows if it can read the format."""
    import pyarrow as pa

    from omearrow_ds import open_images

    with open_images(folder) as source:
        stored = [(source.image_ids[index], number_of(source.read(index))) for index in range(len(source))]
        columns = list(zip(*(source.columns[f"Metadata_{name}"].to_pylist() for name in ("Well", "Site")), strict=True))
    assert [number for _, number in stored] == list(range(count)), stored
    assert len({name for name, _ in stored}) == count
    assert [(well, int(site)) for well, site in columns] == [place(number) for number in range(count)]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["index.parquet", "parts", "parts.json"], names
    named = {part["name"] for part in json.loads((folder / "parts.json").read_text())["parts"]}
    assert {path.name for path in (folder / "parts").iterdir()} == named
    parts = sorted((folder / "parts").glob("*.arrow"))
    rows = [pa.ipc.open_file(pa.memory_map(str(part))).read_all().num_rows for part in parts]
    assert not parts or sum(rows) == count
    return rows
