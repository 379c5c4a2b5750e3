"""Regions of Zarr arrays: the chunks that they meet, read one by one, or by zarr if no other reader knows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from omearrow_ds.axes import AXES
from omearrow_ds.codec.decode import new_image
from omearrow_ds.storage.extents import Array, Region, chunk_windows, size_of
from omearrow_ds.storage.formats._regions import slices_of
from omearrow_ds.storage.formats._zarr_chunks import Layout, decode_into

STAGES = {"read": "decode"}


def regions_of_array(regions: Sequence[Region], axes: str | None, rank: int) -> list[list[int]]:
    """Convert regions along T, C, Z, Y and X to regions along ``axes`` or, if None, along the axes for ``rank``."""
    columns = [AXES.index(axis) for axis in axes or {2: "YX"}.get(rank, AXES)]
    return [[region[column + stop] for stop in (0, len(AXES)) for column in columns] for region in regions]


def read(folder: str, layout: Layout, regions: Sequence[Region]) -> list[Array]:
    """Return regions of the array in a folder; each chunk that overlaps any of them is decoded once.

    Raises `OSError` if a chunk file is missing; `ValueError` if one is damaged.
    """
    arrays = [np.empty(size_of(region), layout.dtype) for region in regions]
    pixels = new_image(layout.chunk, layout.dtype, folder)
    flat = pixels.reshape(-1).view(np.uint8)
    grid = [-(-size // length) for size, length in zip(layout.shape, layout.chunk, strict=True)]
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    uses_by_chunk: dict[tuple[int, ...], list[Any]] = {}
    for number, region in enumerate(regions):
        for chunk, inner, outer in chunk_windows(region, layout.chunk):
            uses_by_chunk.setdefault(chunk, []).append((number, inner, outer))
    for chunk, uses in uses_by_chunk.items():
        name, _ = layout.places[sum(map(int.__mul__, chunk, steps))]
        decode_into(f"{folder}/{name}", layout, flat)
        for region, inner, outer in uses:
            arrays[region][outer] = pixels[inner]
    return arrays


def read_by_zarr(array: zarr.Array[Any], regions: Sequence[Region], path: Path) -> list[Array]:
    """Read regions of an array with zarr; raise an error if a region or the largest chunk does not fit in memory."""
    dtype = np.dtype(array.dtype)
    for shape in (*map(tuple, map(size_of, regions)), array.chunks):
        new_image(shape, dtype, path)
    return [np.asarray(array[slices_of(region)]) for region in regions]
