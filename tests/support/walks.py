"""Calls of package functions on the way from a file to a batch: ``python -m tests.support.walks``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tifffile
import torch

import omearrow_ds
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, open_images, write_images

PACKAGE_FOLDER = str(Path(omearrow_ds.__file__).parent)
_NUM_FIELDS, _NUM_CELLS = 4, 40


class Walk(NamedTuple):
    """Package functions that an operation calls, and how many times a call is in another file than the one before."""

    calls: int
    file_changes: int


def record_walk(operation: Callable[[], object]) -> Walk:
    """Return the walk of an operation in this thread."""
    files: list[str] = []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            files.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return Walk(len(files), sum(file != following for file, following in pairwise(files)))


@patch("omearrow_ds.kernels.stacks.getrusage", new=lambda _: SimpleNamespace(ru_majflt=0, ru_inblock=0))
def record_walks(folder: Path) -> dict[str, Walk]:
    """Return the walks of the main operations, of objects that were used before; ``folder`` is an empty one.

    No read waits for a disk, as after such reads pages are requested.
    """
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    parquet, arrow = folder / "images.parquet", folder / "images.arrow"
    write_images([rng.integers(0, 60_000, (3, 100, 100), dtype=np.uint16) for _ in range(64)], parquet, axes="CYX")
    convert(parquet, arrow)
    plate, cells = folder / "plate", folder / "cells.parquet"
    _write_plate(plate, cells, rng)
    crops = {"pattern": "{well}_{site}_{channel}.tif", "objects": cells, "crop_size": (64, 64)}
    on_demand = OMEArrowDataset(parquet, preload=False)
    preloaded = OMEArrowDataset(arrow)
    cell_crops = OMEArrowDataset(plate, preload=False, **crops)
    for dataset in (on_demand, preloaded, cell_crops):
        [dataset[index] for index in range(len(dataset))]
    return {
        "Parquet on demand, dataset[7]": record_walk(lambda: on_demand[7]),
        "Parquet on demand, loader batch of 16": _record_batch(on_demand, 16),
        "Arrow preloaded, dataset[7]": record_walk(lambda: preloaded[7]),
        "Arrow preloaded, loader batch of 16": _record_batch(preloaded, 16),
        "crops of TIFF fields, loader batch of 8": _record_batch(cell_crops, 8),
        "open_images, Parquet": record_walk(lambda: open_images(parquet)),
        "OMEArrowDataset, Parquet on demand": record_walk(lambda: OMEArrowDataset(parquet, preload=False)),
        "OMEArrowDataset, crops of TIFF fields": record_walk(lambda: OMEArrowDataset(plate, preload=False, **crops)),
    }


def _record_batch(dataset: OMEArrowDataset, batch_size: int) -> Walk:
    """Return the walk of the third batch of a seeded loader, which does not ask whether reads wait for a disk."""
    order = torch.Generator().manual_seed(0)
    loader = OMEArrowDataLoader(dataset, batch_size, shuffle=True, num_workers=0, generator=order)
    batches: Iterator[Any] = iter(loader)
    with patch("omearrow_ds.kernels.stacks._QUERY_NS", 10**15):
        next(batches), next(batches)
        return record_walk(lambda: next(batches))


def _write_plate(folder: Path, cells: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    for field in range(_NUM_FIELDS):
        for channel in "ABC":
            pixels = rng.integers(0, 60_000, (300, 300), dtype=np.uint16)
            tifffile.imwrite(folder / f"W{field}_1_{channel}.tif", pixels)
    columns = {
        "Metadata_Well": [f"W{cell % _NUM_FIELDS}" for cell in range(_NUM_CELLS)],
        "Metadata_Site": [1] * _NUM_CELLS,
        "Nuclei_Location_Center_Y": rng.uniform(0, 299, _NUM_CELLS),
        "Nuclei_Location_Center_X": rng.uniform(0, 299, _NUM_CELLS),
    }
    pq.write_table(pa.table(columns), cells)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        recorded = record_walks(Path(name))
    if "--json" in sys.argv:
        print(json.dumps(recorded))
    else:
        for operation, walk in recorded.items():
            print(f"{operation:42} {walk.calls:5} calls {walk.file_changes:5} file changes")
