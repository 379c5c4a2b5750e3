"""Ways to store and to read uncompressed images, and the damage that each way to read must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, open_images, write_images
from tests.adversarial import layout_damage as damage
from tests.adversarial.layout_damage import DAMAGED, IMAGE_BYTES, IMAGES, IMAGES_PER_PART, NUM_IMAGES, Damage
from tests.support.strategies import SUFFIX

Array = np.ndarray[Any, Any]
LENGTH, OFFSET, TRUNCATED = "wrong length", "shifted offset", "truncated"
CROP_SIZE = (20, 16)
CENTERS = pa.table(
    {
        "image_id": [f"image-{number:05d}" for number in range(NUM_IMAGES)],
        "y": [20.0] * NUM_IMAGES,
        "x": [21.0] * NUM_IMAGES,
    }
)
WHOLE = IMAGES[DAMAGED][0, :, 0]
CENTER_CROP = WHOLE[:, 14:34, 17:33]  # The margins are (48 - 20) / 2 and (50 - 16) / 2.
OBJECT_CROP = WHOLE[:, 11:31, 14:30]  # Two windows are equally near (20, 21). The one below and to the right counts.


class Layout(NamedTuple):
    """A way to store the images, and the damage to it."""

    format_name: str
    damages: dict[str, Damage]
    options: dict[str, Any] | None = None


PREFIXES = {LENGTH: damage.lengthen_prefix, OFFSET: damage.shift_chunk, TRUNCATED: damage.truncate}
WHOLE_IMAGES = {**PREFIXES, OFFSET: damage.shift_image}
LEVELS = {LENGTH: damage.lengthen_list, OFFSET: damage.shift_list, TRUNCATED: damage.truncate_lists}
OFFSETS = {LENGTH: damage.shift_offset, OFFSET: damage.shift_all_offsets, TRUNCATED: damage.truncate}
LIST_OFFSETS = {**OFFSETS, LENGTH: damage.shift_list_offset, OFFSET: damage.shift_all_list_offsets}
HEADERS = {LENGTH: damage.lengthen_lance_chunk, OFFSET: damage.shift_lance_row, TRUNCATED: damage.truncate}
STEPS = {LENGTH: damage.shorten_vortex, OFFSET: damage.shift_in_vortex, TRUNCATED: damage.truncate}
LIST_STEPS = {**STEPS, LENGTH: damage.shorten_vortex_lists}
FILES = {LENGTH: damage.remove_pixel, OFFSET: damage.insert_pixel, TRUNCATED: damage.truncate}
CHUNK_FILES = {LENGTH: damage.insert_pixel, TRUNCATED: damage.truncate}  # A chunk fills its file: it has no offset.
INDEX = {"replaced part": damage.replace_part, "miscounted parts": damage.miscount_parts}
LISTS, UNCOMPRESSED = {"encoding": "list"}, {"compression": "none"}
LAYOUTS = {
    "parquet": Layout("parquet", PREFIXES),
    "parquet by duckdb": Layout("parquet_duck", PREFIXES),
    "parquet lists": Layout("parquet", LEVELS, LISTS),
    "parts of parquet": Layout("parquet", {**PREFIXES, **INDEX}),
    "ome-arrow": Layout("ome_arrow", WHOLE_IMAGES, UNCOMPRESSED),
    "ome-arrow dictionary": Layout("ome_arrow", WHOLE_IMAGES, UNCOMPRESSED),
    "arrow": Layout("arrow", OFFSETS),
    "arrow lists": Layout("arrow", LIST_OFFSETS, LISTS),
    "parts of arrow": Layout("arrow", {**OFFSETS, **INDEX}),
    "lance": Layout("lance", HEADERS),
    "vortex": Layout("vortex", STEPS),
    "vortex lists": Layout("vortex", LIST_STEPS, LISTS),
    "tiff": Layout("tiff", FILES),
    "ome-zarr": Layout("ome_zarr", CHUNK_FILES, UNCOMPRESSED),
}
CASES = [(name, kind) for name, layout in LAYOUTS.items() for kind in layout.damages]
# Lance reads consecutive rows without their offsets, so these are either refused or right.
MAY_BE_READ = [("lance", OFFSET)]


def write_layout(name: str, folder: Path) -> Path:
    """Write the images, without checksums, and return the path of the collection."""
    format_name, _, options = LAYOUTS[name]
    path = folder / f"images{SUFFIX[format_name]}"
    write_images(IMAGES, path, format_name, checksum=False, **(options or {}))
    if name == "ome-arrow dictionary":  # pyarrow, and so ome-arrow, writes dictionaries by default.
        chunks = path / "chunks.parquet"
        pq.write_table(pq.ParquetFile(chunks).read(), chunks, compression="none")
    if name.startswith("parts of"):
        parts = folder / "images.parts"
        convert(path, parts, format_name, part_bytes=IMAGES_PER_PART * IMAGE_BYTES, checksum=False)
        return parts
    return path


class Access(NamedTuple):
    """A way to read: how to open, how to read the damaged image, and the right pixels."""

    open: Callable[[Path], Any]
    read: Callable[[Any], Array]
    expected: Array = WHOLE


def whole_images(path: Path, **options: Any) -> OMEArrowDataset:
    return OMEArrowDataset(path, **{"preload": False, "normalize": False, **options})


def center_crops(path: Path, **options: Any) -> OMEArrowDataset:
    return whole_images(path, crop_size=CROP_SIZE, **options)


def object_crops(path: Path, **options: Any) -> OMEArrowDataset:
    return whole_images(path, objects=CENTERS, center=("y", "x"), crop_size=CROP_SIZE, **options)


def open_preloaded(path: Path) -> OMEArrowDataset:
    return whole_images(path, preload=True)


def get_sample(dataset: OMEArrowDataset) -> Array:
    return dataset[DAMAGED].numpy()


def get_batch(dataset: OMEArrowDataset) -> Array:
    return dataset.__getitems__([4, DAMAGED, 0])[1].numpy()


def load_epoch(dataset: OMEArrowDataset) -> Array:
    return [*OMEArrowDataLoader(dataset, 2, num_workers=0)][DAMAGED // 2][DAMAGED % 2].numpy()


ACCESSES = {
    "sample": Access(whole_images, get_sample),
    "batch": Access(whole_images, get_batch),
    "loader": Access(whole_images, load_epoch),
    "center crop": Access(center_crops, get_sample, CENTER_CROP),
    "batch of center crops": Access(center_crops, get_batch, CENTER_CROP),
    "object crop": Access(object_crops, get_sample, OBJECT_CROP),
    "batch of object crops": Access(object_crops, get_batch, OBJECT_CROP),
    "preloaded": Access(open_preloaded, get_sample),
    "read": Access(open_images, lambda source: source.read(DAMAGED)[0, :, 0]),
    "region": Access(open_images, lambda source: source.read(DAMAGED, (11, 31, 14, 30))[0, :, 0], OBJECT_CROP),
    "take": Access(open_images, lambda source: source.take([4, DAMAGED])[1][0, :, 0]),
}
