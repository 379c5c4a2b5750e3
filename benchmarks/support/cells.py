"""Fields, objects and masks for benchmarks of single cells.

A folder of ``--images`` with CellProfiler's table ``cells.parquet`` is used as it is. Otherwise fields are synthetic
with the size of fields of the NF1 plate, objects have random positions, and masks label a disc around each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tifffile

from benchmarks.support.data import DataCache, encodings
from benchmarks.support.labels import discs
from benchmarks.support.workload import Workload
from omearrow_ds import Format, OMEArrowDataset, open_images

Array = np.ndarray[Any, Any]
SIDE = 64  # Side of a crop in pixels.
CHUNK_SHAPES: Mapping[str, tuple[int, int]] = {"ome_zarr": (256, 256), "ome_arrow": (256, 256)}
_FIELDS, _PER_FIELD, _SHAPE = 6, 200, (1, 3, 1, 904, 1224)
_TABLE, _Y, _X = "cells.parquet", "Nuclei_Location_Center_Y", "Nuclei_Location_Center_X"
_FILE, _NUMBER = "Image_FileName_", "Metadata_ObjectNumber"


class Plate(Protocol):
    """Fields with objects and masks."""

    @property
    def origin(self) -> str:
        """Origin of the fields."""

    def images(self) -> Iterator[Array]:
        """Stream the fields, each ``(T, C, Z, Y, X)``."""

    def masks(self) -> Iterator[Array]:
        """Stream one mask per field, each ``(1, 1, 1, Y, X)``."""

    def positions(self) -> tuple[Array, Array]:
        """Return the field index and the center ``(Y, X)`` in pixels of each object."""

    def key(self) -> str:
        """Return a key that differs between different fields or masks."""


@dataclass(frozen=True)
class Masks:
    """Masks of a plate, as a separate collection."""

    plate: Plate

    def images(self) -> Iterator[Array]:
        """Stream the masks."""
        return self.plate.masks()

    def key(self) -> str:
        """Return the plate's key with a suffix."""
        return f"{self.plate.key()}-masks"


@dataclass(frozen=True)
class SyntheticPlate:
    """Fields of 3 x 904 x 1224 uint16 with objects at random positions, some of them cut by the edge."""

    seed: int
    count: int = _FIELDS
    origin: str = "synthetic"

    def images(self) -> Iterator[Array]:
        """Stream the fields."""
        return self._workload.images()

    def masks(self) -> Iterator[Array]:
        """Stream label images, each with objects numbered from 1."""
        fields, centres = self.positions()
        for number in range(self.count):
            yield discs(centres[fields == number], (1, 1, 1, *_SHAPE[3:]))

    def positions(self) -> tuple[Array, Array]:
        """Return the field index and the center of each object."""
        return scattered(self.count * _PER_FIELD, self.count, _SHAPE, self.seed)

    def key(self) -> str:
        """Return a hash of the fields."""
        return self._workload.key()

    @property
    def _workload(self) -> Workload:
        return Workload(self.count, _SHAPE, seed=self.seed)


@dataclass(frozen=True)
class StoredPlate:
    """Fields of TIFF files listed in a CellProfiler table, and masks in the same folder."""

    folder: Path

    @property
    def origin(self) -> str:
        """Name of the folder."""
        return self.folder.name

    def images(self) -> Iterator[Array]:
        """Stream the fields, with one channel per column of file names."""
        for names in self._files:
            yield np.stack([tifffile.imread(self.folder / name) for name in names])[None, :, None]

    def masks(self) -> Iterator[Array]:
        """Stream the masks that are named after each field's first file."""
        for name, *_ in self._files:
            file = next((self.folder / "masks").glob(f"{Path(name).stem}_Mask*"), None)
            if file is None:
                raise FileNotFoundError(f"{self.folder / 'masks'}: no mask of {name}")
            yield tifffile.imread(file)[None, None, None]

    def positions(self) -> tuple[Array, Array]:
        """Return the field index and the center of each object."""
        number = {names: index for index, names in enumerate(self._files)}
        fields = np.array([number[names] for names in self._named])
        return fields, np.stack([self._table[name].to_numpy() for name in (_Y, _X)], axis=1)

    def key(self) -> str:
        """Return a hash of the files' names, sizes and times."""
        return f"{Workload(None, folder=self.folder).key()}-fields"

    @cached_property
    def _table(self) -> pa.Table:
        return pq.read_table(self.folder / _TABLE)

    @cached_property
    def _named(self) -> list[tuple[str, ...]]:
        columns = [name for name in self._table.column_names if name.startswith(_FILE)]
        return list(zip(*(self._table[name].to_pylist() for name in columns), strict=True))

    @cached_property
    def _files(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(self._named))


def scattered(count: int, fields: int, shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    """Return field indices and random centers of objects, distributed evenly over fields ``(..., Y, X)``."""
    centres = np.random.default_rng(seed).uniform(0, np.array(shape[-2:]) - 1, (count, 2))
    return np.arange(count) % fields, centres


def plate_of(workload: Workload) -> Plate:
    """Return the plate of the workload's folder if it has a table of objects, or else a synthetic one."""
    if workload.folder is not None and (workload.folder / _TABLE).is_file():
        return StoredPlate(workload.folder)
    return SyntheticPlate(workload.seed)


def table_of(image_ids: Sequence[str], fields: Array, centres: Array) -> pa.Table:
    """Return the object table of a dataset: ids of fields, centers, and numbers within the field."""
    numbers = np.zeros(len(fields), np.int64)
    for field in np.unique(fields):
        numbers[fields == field] = np.arange(1, 1 + np.count_nonzero(fields == field))
    ids = [image_ids[field] for field in fields.tolist()]
    return pa.table({"image_id": ids, _Y: centres[:, 0], _X: centres[:, 1], _NUMBER: numbers})


def corners_of(centres: Array) -> Array:
    """Return the first row and column of each crop of `SIDE` pixels, as the dataset places them."""
    return np.floor(centres - (SIDE - 1) / 2 + 0.5).astype(np.int64)


def inside(centres: Array, shape: tuple[int, ...]) -> Array:
    """Return a boolean array of the crops that are entirely inside a field ``(..., Y, X)``."""
    corners = corners_of(centres)
    within: Array = np.all((corners >= 0) & (corners + SIDE <= np.array(shape[-2:])), axis=1)
    return within


@cache
def compiled_loop() -> Any:
    """Return a plain compiled loop over crops, or None without numba.

    It is the direct solution for fields in one array: ``(fields (N, C, Y, X), places (n, 3), divisor, out)``.
    """
    try:
        from numba import njit  # noqa: PLC0415  # The import is slow, and may fail.
    except ImportError:
        return None

    @njit(error_model="numpy")
    def loop(fields: Array, corners: Array, divisor: np.float32, out: Array) -> None:
        for number in range(len(corners)):
            field, top, left = corners[number]
            for channel in range(out.shape[1]):
                for y in range(out.shape[2]):
                    for x in range(out.shape[3]):
                        out[number, channel, y, x] = np.float32(fields[field, channel, top + y, left + x]) / divisor

    return loop


class Cells:
    """Plate of a workload, stored in each requested format."""

    def __init__(self, root: Path, workload: Workload) -> None:
        plate = plate_of(workload)
        self._images = DataCache(root, plate, CHUNK_SHAPES)
        self._masks = DataCache(root, Masks(plate), CHUNK_SHAPES)
        fields, centres = plate.positions()
        self.properties = {"fields": int(fields.max()) + 1, "of": plate.origin}
        self.plate, self._positions = plate, (fields, centres)

    def path(self, fmt: Format) -> Path:
        """Return the path of the stored fields."""
        return self._images.path(fmt, encodings(fmt)[0])

    def dataset(self, fmt: Format, *, masked: bool, preload: bool) -> OMEArrowDataset:
        """Return a dataset of the crops of all objects, padded with 0 beyond edges."""
        path = self.path(fmt)
        with open_images(path, fmt.name) as source:
            objects = table_of(source.image_ids, *self._positions)
        masks = self._masks.path(fmt, encodings(fmt)[0]) if masked else None
        return OMEArrowDataset(
            path, fmt.name, objects=objects, crop_size=(SIDE, SIDE), masks=masks, preload=preload, progress=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._images.close()
        self._masks.close()
