"""Crops around objects compared with code without this package: batches of 64, scaled to float32.

Objects at an edge are left out, because references do not pad. Equality of crops is checked outside the timed section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from benchmarks.support.cells import SIDE, Cells, compiled_loop, corners_of, inside
from benchmarks.support.library import HAS_OBJECTS, get_format
from benchmarks.support.paired import Compare, Side, batched, divisor_of, random_indices
from benchmarks.support.workload import sizes
from omearrow_ds import Format, OMEArrowDataset

Array = np.ndarray[Any, Any]
Crop = Callable[[int, int, int], Array]

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.skipif(not HAS_OBJECTS, reason="this version cuts no crops around objects"),
]
_BATCH = 64


@pytest.mark.limit("reference", "cells")
@pytest.mark.parametrize("reference", ["plain compiled loop", "NumPy's slices", "MONAI's SpatialCrop"])
def test_preloaded(compare: Compare, reference: str, whole: Whole, seed: int) -> None:
    """A batch of 64 random crops; time per crop."""
    theirs = {"NumPy's slices": whole.sliced, "plain compiled loop": whole.looped, "MONAI's SpatialCrop": whole.monai}
    _compare(compare, whole, "arrow", theirs[reference](), reference, seed)


@pytest.mark.limit("reference", "cells_mapped")
@pytest.mark.parametrize("format_name", ["arrow", "parquet", "lance"])
def test_mapped(compare: Compare, fmt: Format, whole: Whole, seed: int) -> None:
    """A batch of 64 random crops on demand from memory-mapped tables; time per crop."""
    preloaded = whole.cells.dataset(get_format("arrow"), masked=False, preload=True)
    _compare(compare, whole, fmt.name, preloaded.__getitems__, fmt.name, seed, preload=False)


@pytest.mark.limit("reference", "cells_of_files")
@pytest.mark.parametrize("format_name", ["tiff", "ome_zarr"])
def test_files(compare: Compare, fmt: Format, whole: Whole, seed: int) -> None:
    """A batch of 64 random crops on demand, with one file or array per field; time per crop."""
    crop = {"tiff": whole.imread, "ome_zarr": whole.zarr}[fmt.name](fmt)
    _compare(compare, whole, fmt.name, whole.scaled(crop), fmt.name, seed, preload=False)


def _compare(
    compare: Compare,
    whole: Whole,
    format_name: str,
    theirs: Callable[[list[int]], Any],
    case: str,
    seed: int,
    *,
    preload: bool = True,
) -> None:
    dataset: OMEArrowDataset = whole.cells.dataset(get_format(format_name), masked=False, preload=preload)
    orders = random_indices(len(whole.inside), seed)
    mine, other = (batched((int(whole.inside[index]) for index in order), _BATCH) for order in orders)
    batch = next(mine)
    ours, reference = (torch.stack(list(act(batch))) for act in (dataset.__getitems__, theirs))
    assert torch.equal(ours, reference), "the reference's crops differ from ours"
    sides = Side(dataset.__getitems__, mine, _BATCH), Side(theirs, other, _BATCH)
    compare(*sides, whole.shape, case, batch_size=_BATCH, images=len(whole.fields))


class Whole:
    """Fields in memory (N, C, Y, X), and functions that cut a batch of crops from them or from their files."""

    def __init__(self, cells: Cells) -> None:
        images = list(cells.plate.images())
        if len({image.shape for image in images}) > 1:
            pytest.skip("the fields differ in shape, so they make no array")
        self.cells, self.shape = cells, sizes(images[0].shape[3:])
        self.fields = np.concatenate(images)[:, :, 0]
        self.divisor = divisor_of(self.fields.dtype)
        fields, centres = cells.plate.positions()
        self.corners = np.column_stack([fields, corners_of(centres)])
        self.inside = np.flatnonzero(inside(centres, self.fields.shape))

    def scaled(self, crop: Crop) -> Callable[[list[int]], torch.Tensor]:
        """Return a function that cuts crops one by one and scales them into a batch."""

        def batch(objects: list[int]) -> torch.Tensor:
            out = self._empty(objects)
            for corner, into in zip(self.corners[objects].tolist(), out, strict=True):
                np.true_divide(crop(*corner), self.divisor, out=into, dtype=np.float32, casting="unsafe")
            return torch.from_numpy(out)

        return batch

    def sliced(self) -> Callable[[list[int]], torch.Tensor]:
        """Return NumPy's slices of the fields in memory."""
        return self.scaled(lambda field, y, x: self.fields[field, :, y : y + SIDE, x : x + SIDE])

    def looped(self) -> Callable[[list[int]], torch.Tensor]:
        """Return a compiled loop over the fields in memory."""
        loop = compiled_loop()
        if loop is None:
            pytest.skip("numba is not installed: pip install numba")

        def batch(objects: list[int]) -> torch.Tensor:
            out = self._empty(objects)
            loop(self.fields, self.corners[objects], self.divisor, out)
            return torch.from_numpy(out)

        return batch

    def monai(self) -> Callable[[list[int]], torch.Tensor]:
        """Return MONAI's crops of scaled fields in memory."""
        transforms = pytest.importorskip(
            "monai.transforms", reason="monai is not installed: pip install 'omearrow-ds[peers]'"
        )
        scaled_fields = [torch.from_numpy(field.astype(np.float32) / self.divisor) for field in self.fields]

        def batch(objects: list[int]) -> torch.Tensor:
            crops = [
                transforms.SpatialCrop(roi_slices=[slice(y, y + SIDE), slice(x, x + SIDE)])(scaled_fields[field])
                for field, y, x in self.corners[objects].tolist()
            ]
            return torch.stack(crops).as_subclass(torch.Tensor)

        return batch

    def imread(self, fmt: Format) -> Crop:
        """Return a function that reads the whole file of a field."""
        files = sorted(path for path in self.cells.path(fmt).iterdir() if path.suffix == ".tif")
        return lambda field, y, x: tifffile.imread(files[field])[..., y : y + SIDE, x : x + SIDE]

    def zarr(self, fmt: Format) -> Crop:
        """Return zarr's slices of its open arrays."""
        zarr = pytest.importorskip("zarr")
        members = sorted(self.cells.path(fmt).glob("*.ome.zarr"))
        arrays = [zarr.open_array(member / "0", mode="r") for member in members]
        return lambda field, y, x: np.asarray(arrays[field][0, :, 0, y : y + SIDE, x : x + SIDE])

    def _empty(self, objects: Sequence[int]) -> Array:
        return np.empty((len(objects), self.fields.shape[1], SIDE, SIDE), np.float32)


@pytest.fixture(scope="module")
def whole(cells: Cells) -> Whole:
    """Return the fields in memory."""
    return Whole(cells)
