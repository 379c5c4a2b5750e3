"""`describe`: contents and storage of a collection of images, read without decoding pixels."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Unpack

import numpy as np

from omearrow_ds.errors import FormatError, ImageColumnError, MissingPathError, OMEArrowDSError
from omearrow_ds.resources import available_bytes, image_bytes, preload_limit_bytes, sum_bytes
from omearrow_ds.storage import fields
from omearrow_ds.storage.formats._base import Images, outline_of, stored_size
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._pictures import MAX_IMAGES, UINT16, PixelRange
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.writing import is_parts

_PLENTY_BYTES = 2**62
_MAX_PIXELS_BYTES = 2**28  # Images of this size are decoded at once.
_STORED_IN_JSON = ("encoding", "compression", "chunking", "read_in_place", "reading", "files_looked_at")


class CollectionSizes(NamedTuple):
    """Sizes of a collection on disk and in memory."""

    disk_files: int  # Number of files of the collection.
    disk_bytes: int  # Size of these files.
    allocated_bytes: int  # Space that the file system allocates for them and their folders.
    decoded_bytes: int  # Size of all images decoded, as `OMEArrowDataset` holds them with ``preload=True``.
    available_bytes: int  # Memory available now.
    preload_fits: bool  # Whether the decoded images fit into the memory that ``preload=True`` may use.


class Description(NamedTuple):
    """Shapes, dtypes, columns and storage layout of a collection of images."""

    path: str
    format_name: str
    format_label: str
    shapes: Mapping[tuple[int, ...], int]  # Each shape (T, C, Z, Y, X) with its number of images, most frequent first.
    dtypes: Mapping[str, int]  # Each pixel dtype with its number of images, most frequent first.
    # Channel names in a few images spread over the collection, each None if unnamed. None overall if the images differ
    # or none could be read.
    channels: Sequence[str | None] | None
    physical_sizes: Mapping[str, tuple[float, str | None]]  # In x, y and z with units, if those images agree.
    columns: Mapping[str, str]  # Names and types of the other columns.
    sizes: CollectionSizes
    stored: Stored  # How the images are stored and read.
    checksums: bool  # Whether checksums of the images are stored.
    labels: Sequence[str]  # Names of label images, such as masks, that are stored with a few of the images.
    image_column: Sequence[str]  # Tables only: the columns that this describes.
    image_columns: Sequence[ImagesOf]  # Contents of each image column of the table.
    # For a folder of TIFF files named like the planes of an instrument: the name of the layout, for ``pattern=``, and
    # the numbers of fields and channels that it yields; otherwise None.
    looks_like: tuple[str, int, int] | None
    chosen: bool  # Whether ``image_column`` can be opened; False if it must be chosen, and this describes the first.
    pixel_range: PixelRange | None  # Range of up to 64 images; None if pixels were not read.

    @property
    def images(self) -> int:
        return sum(self.shapes.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "format": self.format_name,
            "images": self.images,
            **_kinds(self.shapes, self.dtypes),
            "channels": self.channels and list(self.channels),
            "physical_sizes": {
                axis: {"size": size, "unit": unit} for axis, (size, unit) in self.physical_sizes.items()
            },
            "columns": [{"name": name, "type": kind} for name, kind in self.columns.items()],
            **self.sizes._asdict(),
            **dict(zip(_STORED_IN_JSON, vars(self.stored).values(), strict=True)),
            "checksums": self.checksums,
            "labels": list(self.labels),
            "image_column": list(self.image_column) if self.chosen else None,
            "image_columns": [
                {**vars(column), **_kinds(column.shapes, column.dtypes)} for column in self.image_columns
            ],
            "looks_like": self.looks_like
            and dict(zip(("pattern", "fields", "channels"), self.looks_like, strict=True)),
            "pixel_range": self.pixel_range and self.pixel_range.as_dict(),
        }


def describe(
    path: Paths,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    read_pixels: bool = False,
    **opening: Unpack[OpenOptions],
) -> Description:
    """Return shapes, dtypes, columns and storage layout of a collection, decoding pixels only with ``read_pixels``.

    Of folders, a few files are inspected. Null images are left out, unless ``nulls="error"`` is passed. In a table with
    several image columns, the first one is described if none is chosen.
    """
    opening.setdefault("nulls", "skip")
    has_index_on_server = isinstance(path, str | os.PathLike) and url_of(path) is not None and is_parts(path)
    if not has_index_on_server or opening.get("part_cache") is not None:
        return _described(path, format, opening, read_pixels=read_pixels)
    with TemporaryDirectory(prefix="omearrow-ds-") as folder:
        cache: OpenOptions = {"part_cache": folder, "part_cache_bytes": _PLENTY_BYTES}
        return _described(path, format, {**opening, **cache}, read_pixels=read_pixels)


def _described(path: Paths, format_name: str | None, opening: OpenOptions, *, read_pixels: bool) -> Description:
    chosen = True
    try:
        opened = open_source(path, format_name, **opening)
    except ImageColumnError as error:
        chosen = False
        opening["image_column"] = error.columns[0]
        opened = open_source(path, format_name, **opening)
    with closing(opened) as source:
        header = source.header
        try:
            on_disk = stored_size(source)
        except FileNotFoundError as error:
            problem = f"does not exist, but {header.path} needs it"
            raise MissingPathError(problem, path=error.filename, remedy="restore it") from error
        except OSError as error:
            raise FormatError(f"changed while it was read: {error}", path=header.path, remedy="try again") from error
        outline, free_bytes = outline_of(source), available_bytes()
        decoded_bytes = sum_bytes(image_bytes(header.shapes, header.dtypes))
        return Description(
            str(header.path),
            header.format.name,
            header.format.label,
            dict(Counter(map(tuple, header.shapes.tolist())).most_common()),
            dict(Counter(dtype.name for dtype in header.dtypes).most_common()),
            _channels(source, outline.metadata),
            _physical_sizes(outline.metadata),
            {field.name: str(field.type) for field in header.columns.schema},
            CollectionSizes(*on_disk, decoded_bytes, free_bytes, decoded_bytes <= preload_limit_bytes(free_bytes)),
            outline.stored,
            header.columns.checksums is not None,
            source.details.label_names(),
            header.image_column,
            source.details.image_columns(),
            None if opening.get("pattern") or not header.path.is_dir() else fields.suggestion(header.path),
            chosen,
            _pixel_range(source) if read_pixels else None,
        )


def _pixel_range(source: Images) -> PixelRange | None:
    """Return the pixel range of uint16 images spread over the collection; None for remote or unreadable images."""
    header = source.header
    if isinstance(header.path, Url) or next(source.details.files(), None) is None:
        return None
    sizes_bytes = image_bytes(header.shapes, header.dtypes)
    is_uint16 = np.array([dtype == UINT16 for dtype in header.dtypes], bool)
    indices = np.flatnonzero(is_uint16 & (sizes_bytes <= _MAX_PIXELS_BYTES))
    if not len(indices):
        return None
    num_images = min(MAX_IMAGES, len(indices), int(_MAX_PIXELS_BYTES // max(1, sizes_bytes[indices].max())))
    spread = indices[np.linspace(0, len(indices) - 1, num_images).astype(int)]
    try:
        return PixelRange.measure(source.read(spread.tolist()))
    except OMEArrowDSError:
        return None


def _kinds(shapes: Mapping[tuple[int, ...], int], dtypes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "shapes": [{"shape": list(shape), "images": number} for shape, number in shapes.items()],
        "dtypes": [{"dtype": name, "images": number} for name, number in dtypes.items()],
    }


def _channels(source: Images, described: Sequence[Mapping[str, Any]]) -> list[str | None] | None:
    """Return the channel names if all images have the same number of channels, and the inspected images agree."""
    numbers = set(source.header.shapes[:, 1].tolist())
    names = {tuple(channel["name"] for channel in metadata["channels"]) for metadata in described}
    if len(numbers) > 1 or len(names) != min(1, len(source)):
        return None
    named = list(names.pop()) if names else []
    return named or [None] * sum(numbers)


def _physical_sizes(described: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str | None]]:
    sizes = {}
    for axis in "xyz":
        name = f"physical_size_{axis}"
        values = {(metadata[name], metadata[f"{name}_unit"]) for metadata in described}
        size, unit = values.pop() if len(values) == 1 else (None, None)
        if size is not None and math.isfinite(size):
            sizes[axis] = (float(size), unit)
    return sizes
