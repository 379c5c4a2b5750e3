"""Windows of Zarr arrays: the chunks that they meet, read one by one, or by zarr where it alone can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from omearrow_ds.axes import AXES
from omearrow_ds.codec.decode import new_image
from omearrow_ds.storage.formats._regions import Array, Box, by_cell, shape_of
from omearrow_ds.storage.formats._zarr_chunks import Layout, decode_into

STAGES = {"read": "decode"}


def along(boxes: Sequence[Box], axes: str | None, rank: int) -> list[tuple[slice, ...]]:
    """Return boxes as those of an array of these axes, or of a rank that tells them."""
    letters = axes or {2: "YX"}.get(rank, AXES)
    return [tuple(box[AXES.index(axis)] for axis in letters) for box in boxes]


def read(folder: str, layout: Layout, boxes: Sequence[Sequence[slice]]) -> list[Array]:
    """Return what boxes take of the array in a folder; each chunk that they meet is decoded once.

    Raises `OSError` if a chunk file is missing; `ValueError` if one is damaged.
    """
    windows = [np.empty(shape_of(box), layout.dtype) for box in boxes]
    chunk = new_image(layout.chunk, layout.dtype, folder)
    flat = chunk.reshape(-1).view(np.uint8)
    grid = [-(-size // length) for size, length in zip(layout.shape, layout.chunk, strict=True)]
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    for at, uses in by_cell(boxes, layout.chunk).items():
        name, _ = layout.places[sum(map(int.__mul__, at, strides))]
        decode_into(f"{folder}/{name}", layout, flat)
        for window, inside, place in uses:
            windows[window][place] = chunk[inside]
    return windows


def read_by_zarr(array: zarr.Array[Any], boxes: Sequence[Sequence[slice]], path: Path) -> list[Array]:
    """Return what boxes take of an array that zarr reads, if they and its largest chunk fit the memory."""
    dtype = np.dtype(array.dtype)
    for shape in (*map(shape_of, boxes), array.chunks):
        new_image(shape, dtype, path)
    return [np.asarray(array[tuple(box)]) for box in boxes]
