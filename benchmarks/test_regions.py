"""Regions of large fields on demand: 3 x 64 x 64 out of 904 x 1224, compared with the field and with zarr's slice.

The fields are camera noise, independent of the workload. Equality of regions is checked outside the timed section.
"""

from __future__ import annotations

import inspect
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.paired import Compare, Side, random_indices
from omearrow_ds import Format, open_images, write_images

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.skipif("chunk_shape" not in inspect.signature(write_images).parameters, reason="reads no parts"),
]

Array = np.ndarray[Any, Any]
Region = tuple[int, tuple[int, int, int, int]]
_FIELDS, _SHAPE, _SIDE, _CROPS, _CHUNK = 6, (1, 3, 1, 904, 1224), 64, 64, (256, 256)
_LABEL = f"{_SHAPE[3]} x {_SHAPE[4]}"


@pytest.mark.limit("reference", "region")
@pytest.mark.parametrize("format_name", ["tiff", "ome_zarr"])
def test_region(compare: Compare, fmt: Format, fields: Path, seed: int) -> None:
    """One crop of three channels by ``source.read(index, region)``."""
    with open_images(fields, fmt.name) as source:
        regions = _regions(seed)
        index, (y0, y1, x0, x1) = regions[0]
        assert np.array_equal(source.read(index, (y0, y1, x0, x1)), source.read(index)[..., y0:y1, x0:x1])
        _, whole = random_indices(len(source), seed)
        ours = Side(lambda region: source.read(*region), cycle(regions))
        compare(ours, Side(source.read, whole), _LABEL, fmt.name)


@pytest.mark.limit("reference", "region_by_zarr")
@pytest.mark.parametrize("format_name", ["ome_zarr"])
def test_region_by_zarr(compare: Compare, fmt: Format, fields: Path, seed: int) -> None:
    """One crop of three channels stored in chunks of 256 x 256, compared with zarr's slice."""
    zarr = pytest.importorskip("zarr")
    arrays = [zarr.open_array(member / "0", mode="r") for member in sorted(fields.glob("*.ome.zarr"))]

    def slice_of(region: Region) -> Array:
        index, (y0, y1, x0, x1) = region
        return np.asarray(arrays[index][..., y0:y1, x0:x1])

    with open_images(fields, fmt.name) as source:
        regions = _regions(seed)
        assert np.array_equal(source.read(*regions[0]), slice_of(regions[0]))
        ours = Side(lambda region: source.read(*region), cycle(regions))
        compare(ours, Side(slice_of, cycle(regions[::-1])), _LABEL)


@pytest.fixture(scope="module")
def noise(seed: int) -> list[Array]:
    """Return the pixels of the fields."""
    draw = np.random.default_rng(seed)
    return [draw.poisson(300, _SHAPE).astype(np.uint16) for _ in range(_FIELDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of stored fields."""
    return tmp_path_factory.mktemp("fields")


@pytest.fixture
def fields(fmt: Format, noise: list[Array], folder: Path) -> Path:
    """Return stored fields, uncompressed TIFF or OME-Zarr in chunks with default compression."""
    path = folder / f"fields{fmt.suffix}"
    if not path.exists():
        chunk_shape = _CHUNK if fmt.name == "ome_zarr" else None
        write_images(noise, path, fmt.name, axes="TCZYX", chunk_shape=chunk_shape, checksum=False)
    return path


def _regions(seed: int) -> list[Region]:
    """Return random positions of crops."""
    draw = np.random.default_rng(seed)
    y, x = (draw.integers(0, size - _SIDE, _CROPS).tolist() for size in _SHAPE[3:])
    indices = draw.integers(0, _FIELDS, _CROPS).tolist()
    return [(i, (y0, y0 + _SIDE, x0, x0 + _SIDE)) for i, y0, x0 in zip(indices, y, x, strict=True)]
