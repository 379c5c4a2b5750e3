"""Right results: images computed from coordinates, samples cut by plain NumPy, files read by other libraries."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import AXES
from omearrow_ds.storage.formats import get_format
from tests.adversarial.soak.plan import Collection, Program, View
from tests.support.raw_tables import raw_table
from tests.support.strategies import METADATA, image_of, same

Array = np.ndarray[Any, Any]
Key = tuple[Any, ...]


def images_of(collection: Collection) -> list[Array]:
    return [image_of(*kind, number) for number, kind in enumerate(collection.kinds, collection.first_number)]


def columns_of(collection: Collection) -> pa.Table | None:
    if not collection.described:
        return None
    numbers = range(collection.first_number, collection.first_number + len(collection.kinds))
    return pa.table(
        {
            "label": pa.array(numbers, pa.int64()),
            "well": pa.array([f"µ'{number % 7}" for number in numbers]),
            "features": pa.array([[number / 2, -1.5, 3.0] for number in numbers], pa.list_(pa.float64())),
        }
    )


def metadata_of(collection: Collection) -> list[dict[str, Any] | None]:
    """Return metadata per image: all fields for some, a name for others."""
    all_fields = METADATA | {"channels": []}
    return [all_fields if number % 3 == 0 else {"name": f"n{number}"} for number in range(len(collection.kinds))]


def sample_of(image: Array, view: View) -> Array:
    """Return the image of a sample, cut by plain NumPy."""
    pixels = image
    for axis_index, axis in enumerate(AXES):
        pick = view.select.get(axis, slice(None))
        chosen = np.arange(pixels.shape[axis_index])[pick]
        pixels = pixels.take(np.atleast_1d(chosen), axis=axis_index)
    if view.crop_size is not None:
        top, left = ((size - side) // 2 for size, side in zip(pixels.shape[3:], view.crop_size, strict=True))
        pixels = pixels[..., top : top + view.crop_size[0], left : left + view.crop_size[1]]
    shown_axes = [axis for axis in AXES if axis in view.axes]
    pixels = pixels.reshape([size for axis, size in zip(AXES, pixels.shape, strict=True) if axis in view.axes])
    pixels = pixels.transpose([shown_axes.index(axis) for axis in view.axes])
    if view.normalize:
        largest = np.float32(np.iinfo(pixels.dtype).max) if pixels.dtype.kind in "iu" else np.float32(1)
        pixels = pixels.astype(np.float32) / largest
    return changed(pixels, None if view.as_numpy else view.transform)


def changed(pixels: Array, transform: str | None) -> Array:
    """Return pixels after a transform."""
    if transform == "flip":
        return pixels[..., ::-1].copy()  # torch allows no negative strides, even on an axis of length 1.
    return pixels.astype(np.float64) * 0.5 if transform == "scaled" else np.ascontiguousarray(pixels)


def target_of(number: int, target: str | None) -> Any:
    """Return the target of image ``number``."""
    return {None: None, "label": number, "features": (number / 2, -1.5, 3.0), "row": number * 10 + 3}[target]


def key_of(pixels: Array, target: Any) -> Key:
    """Return the key of a sample. Two samples have equal keys if they are equal bit for bit."""
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data.cast("B"), digest_size=16).digest()
    return pixels.shape, pixels.dtype.name, digest, target


def keys_of(collection: Collection, view: View) -> list[Key]:
    """Return the key of every sample of a collection."""
    return [
        key_of(sample_of(image, view), target_of(collection.first_number + index, view.target))
        for index, image in enumerate(images_of(collection))
    ]


def check_foreign(program: Program, path: Path, images: list[Array]) -> int:
    """Read some images with another library, compare them, and return their number."""
    rng = random.Random(program.seed)
    fmt = get_format(program.store.format)
    indices = sorted(rng.sample(range(len(images)), min(3, len(images))))
    others = (
        _files(fmt.name, path, indices, images) if fmt.kind == "directory" else _rows(fmt.name, path, indices, images)
    )
    for index, pixels in zip(indices, others, strict=True):
        assert same(pixels, images[index]), f"{fmt.name}: image {index}, read by another reader, differs"
    return len(indices)


def _files(name: str, path: Path, indices: list[int], images: list[Array]) -> Iterator[Array]:
    if name == "tiff":
        import tifffile

        files = sorted(path.glob("*.tif"))
        for index in indices:
            with tifffile.TiffFile(files[index]) as tif:
                yield tif.series[0].asarray().reshape(images[index].shape)  # The series omits axes of length 1.
        return
    import zarr

    groups = sorted(group for group in path.iterdir() if group.is_dir())
    for index in indices:
        array: Any = zarr.open_group(groups[index], mode="r")["0"]
        yield np.asarray(array[...])


def _rows(name: str, path: Path, indices: list[int], images: list[Array]) -> Iterator[Array]:
    import ome_arrow

    column = raw_table(name, path)["ome_image"]
    for index in indices:
        yield ome_arrow.to_numpy(column[index].as_py(), dtype=images[index].dtype)
