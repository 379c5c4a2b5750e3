"""`Sample`: some images of a collection, few enough to be written many times, and `SampleFields`: objects in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import AXES
from omearrow_ds.dataset.crop_boxes import CropOptions, make_crops
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import SampleSettings, refuse_value
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.keys import IMAGE_ID
from omearrow_ds.storage.objects import Objects, ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.table_files import table_file
from omearrow_ds.text import PythonName, count, size

Clock = Callable[[], float]
_CHUNK = 64  # Maximum number of images per read, after which the time is compared with the limit.
_LITTLE_MORE = 1.25  # A collection up to this multiple of the limits is taken completely.
_FEWEST_PIXELS = 64  # Minimum size along Y and X of an image that is cut.
_FETCHED_PARTS = 4
_LARGE_PART = 8  # An image that takes more than an eighth of the sample is cut.
_WHOLE_SAMPLE_S = 60.0  # With less time, the sample is smaller.
_READING_PART = 0.1  # Part of the time after which reading the sample ends.
_SPARE_BYTES = 64_000_000  # Bytes that stay free on the disk, and overhead of small files.
_LEAST_BYTES = 1_000_000
_MOST_IMAGES = 64
_LARGE_PIXELS = 512 * 512  # Pixels per plane from which an image is a field, not a cell.
_FLAT_PART = 0.9  # Share of equal neighbors along X above which images are label images.


@dataclass(frozen=True)
class Limits:
    images: int = 2048
    size_bytes: int = 32_000_000
    seconds: float = 9.0

    @classmethod
    def within(cls, seconds: float, folder: Path, copies: int) -> Limits:
        """Return the limits for a sample that is measured in ``seconds``, and fits ``folder`` in ``copies`` copies."""
        free_bytes = shutil.disk_usage(folder).free
        # Some formats store uncompressed lists of 16-bit values in twice their size.
        size_bytes = min(cls.size_bytes, (free_bytes - _SPARE_BYTES) // (2 * copies))
        if size_bytes < _LEAST_BYTES:
            needed = f"{copies} copies of a sample need at least {2 * copies * _LEAST_BYTES + _SPARE_BYTES:,}"
            problem, remedy = f"the disk has {free_bytes:,} free bytes, but {needed}", "pass a folder on another disk"
            refuse_value("work_dir", str(folder.parent), problem, f"{remedy}, or fewer formats")
        part = min(1.0, seconds / _WHOLE_SAMPLE_S)
        return cls(max(32, int(cls.images * part)), max(1, int(size_bytes * part)), seconds * _READING_PART)


@dataclass(frozen=True)
class SampleFields:
    """Samples of a source: all its images, or crops around objects."""

    source: Images  # Images that contain objects; all images without a filter.
    objects: Objects | None = None  # One object per sample.
    options: dict[str, Any] = field(default_factory=dict)  # Keywords of a dataset of the source.

    @classmethod
    def open(cls, source: Images, crop_size: Any, crops: CropOptions, of_objects: ObjectSettings) -> SampleFields:
        """Return the samples that a dataset with these options has; ``crops`` may contain a table of objects."""
        if not crops:
            return cls(source)
        images, windows = make_crops(source, SampleSettings(crop_size=crop_size, **crops), of_objects)
        objects: Any = windows.rows and windows.rows.objects
        if not len(objects.rows):
            problem, remedy = "has no objects in these images", "pass a table with objects of these images"
            raise ArgumentError(f"{objects.joined.name} {problem}", option="objects", remedy=remedy)
        file, row_filter = table_file(crops["objects"], "objects"), of_objects.row_filter
        types = None if file is None else of_objects.types.of_table(file) or None
        condition = row_filter and row_filter.condition
        return cls(images, objects, {**crops, "on": of_objects.on, "column_types": types, "filter": condition})

    @cached_property
    def fields(self) -> Array:
        return np.arange(len(self.source)) if self.objects is None else self.objects.fields

    def within(self, images: Sequence[int] | Array) -> Array:
        """Return the sorted indices of the samples that are in ``images``."""
        return np.flatnonzero(np.isin(self.fields, images))

    def remap_to_copies(self, images: Sequence[int]) -> dict[str, Any]:
        """Return dataset keywords for crops around the objects of sorted ``images``, which were copied without ids."""
        if self.objects is None:
            return {}
        part = self.objects.keep(self.within(images))
        # The ids of `write_images`.
        columns: dict[str, Any] = {IMAGE_ID: [f"image-{n:05d}" for n in np.searchsorted(images, part.fields).tolist()]}
        option, names = ("box", ["y0", "y1", "x0", "x1"]) if part.are_boxes else ("center", ["y", "x"])
        table = pa.table(columns | dict(zip(names, part.positions.T, strict=True)))
        return {"objects": table, option: names} | {k: v for k, v in self.options.items() if k in ("pad", "resize")}

    def opening_of_fields(self, opening: OpenOptions) -> OpenOptions:
        """Return ``opening`` without the column types that apply to the table of objects."""
        of_objects = set(self.options.get("column_types") or ()) - set(self.source.header.columns.names)
        types = {name: kind for name, kind in (opening.get("column_types") or {}).items() if name not in of_objects}
        return {**opening, "column_types": types or None}

    @property
    def code(self) -> dict[str, Any]:
        """Return ``options`` to be printed as Python code, where a table in memory is called ``objects``."""
        objects = self.options.get("objects")
        if objects is not None:
            objects = os.fspath(objects) if isinstance(objects, str | os.PathLike) else PythonName("objects")
        return {**self.options, "objects": objects}


class Sample(NamedTuple):
    """Some images of a collection, their metadata and columns, and the collection's total size."""

    origin: SampleFields
    lengths: Array  # Decoded size of each image of the collection.
    axes: str  # Axes of dataset samples: C, Y, X and every other axis that is longer than 1 in some image.
    whole_count: int  # Images or tiles of the whole collection, and their decoded size.
    whole_bytes: int
    indices: Sequence[int]  # Sorted.
    images: Sequence[Array]  # (T, C, Z, Y, X): whole images, tiles, or regions if some are very large (``cut``).
    metadata: Sequence[Mapping[str, Any]]
    columns: pa.Table
    cut: bool = False

    def part(self, step: int) -> Sample:
        names = ("images", "metadata", "columns", "indices")
        return self._replace(**{name: getattr(self, name)[::step] for name in names})

    @property
    def size_bytes(self) -> int:
        return sum(image.nbytes for image in self.images)

    def coverage(self, seconds: float = 0.0) -> SampleCoverage:
        return SampleCoverage(len(self.images), self.size_bytes, self.whole_count, self.whole_bytes, seconds, self.cut)

    @property
    def complete(self) -> bool:
        return self.coverage().whole

    @property
    def factor(self) -> float:
        """Decoded size of the whole collection divided by the decoded size of the sample."""
        return 1.0 if self.complete else self.whole_bytes / self.size_bytes


class Resemblance(NamedTuple):
    workload: str
    why: str

    @classmethod
    def of(cls, images: Sequence[Array]) -> Resemblance | None:
        """Return the workload that images (T, C, Z, Y, X) resemble most, or None for dtypes without a workload.

        The number of distinct pixel values and the image size decide, as sizes and times of formats depend on them.
        """
        images = images[:: max(1, len(images) // _MOST_IMAGES)]
        dtypes = {str(image.dtype) for image in images}
        if dtypes not in ({"uint8"}, {"uint16"}):
            return None
        flat = np.mean([np.mean(image[..., 1:] == image[..., :-1]) for image in images if image.shape[-1] > 1] or 0)
        if flat > _FLAT_PART:
            return cls("masks", f"{flat:.0%} of neighboring pixels are equal")
        if any(image.shape[2] > 1 for image in images):
            return cls("stack", "images have several Z")
        if np.median([image.shape[-2] * image.shape[-1] for image in images]) >= _LARGE_PIXELS:
            return cls("fields", "images are whole fields")
        if dtypes == {"uint8"}:
            return cls("cells-uint8", "pixels are uint8")
        levels = np.count_nonzero(sum(np.bincount(image.reshape(-1), minlength=2**16) for image in images))
        bits = next(bits for bits in (8, 12, 16) if levels <= 2**bits)
        return cls(f"cells-{bits}bit", f"pixels have {levels:,} of the 2^{bits} values of a camera of {bits} bits")


class SampleCoverage(NamedTuple):
    """Size of the measured sample in images and decoded bytes; ``cut`` is True if large images were cropped."""

    images: int
    size_bytes: int
    whole_count: int
    whole_bytes: int
    seconds: float
    cut: bool = False

    @property
    def text(self) -> str:
        whole, whole_size = count(self.whole_count, "image"), f"{size(self.whole_bytes)} decoded"
        if self.whole:
            return f"{'' if self.whole_count == 1 else 'all '}{whole} ({whole_size})"
        part = whole if self.images == self.whole_count else f"{self.images:,} of {whole}"
        cut = ", large images cropped to their center" * self.cut
        return f"{part}{cut}, {size(self.size_bytes)} of {whole_size}; the values below are scaled to all images"

    @property
    def whole(self) -> bool:
        return self.images == self.whole_count and not self.cut


def take_sample(
    origin: SampleFields,
    limits: Limits,
    clock: Clock,
    *,
    tile: int | None = None,
    crop_size: tuple[int, int] | None = None,
) -> Sample:
    """Read images or single-channel tiles, spread over the whole collection, until a limit is reached."""
    source = origin.source
    path, shapes, least = source.header.path, source.header.shapes, None
    if len(source) == 0:
        raise ArgumentError("the collection is empty", path=path, remedy="pass a collection with images")
    lengths = image_bytes(shapes, source.header.dtypes)
    axes = "".join(axis for row, axis in enumerate(AXES) if axis in "CYX" or (shapes[:, row] > 1).any())
    if origin.objects is None:  # Images with objects are read as a whole.
        least = crop_size or (tile or 0, tile or 0)
        small = np.flatnonzero((shapes[:, 3:] < (crop_size or 0)).any(axis=1))
        if len(small):
            problem = "image {} has only {} x {} pixels".format(small[0], *shapes[small[0], 3:])
            raise AxesError(problem, path=path, option="crop_size", value=crop_size, remedy="lower crop_size")
    tiles = (shapes // (shapes if tile is None else (1, 1, 1, tile, tile))).prod(axis=1)
    whole_count, whole_bytes = int(tiles.sum()), int(lengths.sum())
    if whole_bytes <= _LITTLE_MORE * limits.size_bytes and whole_count <= _LITTLE_MORE * limits.images:
        limits = replace(limits, images=whole_count, size_bytes=whole_bytes)
    # Images in random order, one random image per interval of equal length.
    random, candidates = np.random.default_rng(0), _candidates(origin)
    number = min(len(candidates), -(-limits.images * len(source) // max(1, whole_count)))
    edges = np.linspace(0, len(candidates), number + 1).astype(np.int64)
    order = candidates[random.permutation(random.integers(edges[:-1], edges[1:]))]
    read = _read(source, order, lengths, limits, least, clock)
    indices = sorted(read)
    images = [read[index] for index in indices]
    sample = partial(Sample, origin, lengths, axes, whole_count)
    if tile is None:
        metadata, columns = [source.metadata(index) for index in indices], source.header.columns.table.take(indices)
        is_cut = any(image.nbytes < lengths[index] for index, image in zip(indices, images, strict=True))
        return sample(whole_bytes, indices, images, metadata, columns, is_cut)
    images = list(islice(tiles_of(images, tile), limits.images))
    if not images:
        problem = f"no image of the sample has {tile} x {tile} pixels"
        refuse_value("tile", tile, problem, "pass a smaller number", path)
    whole_bytes = int((tiles * (lengths // shapes.prod(axis=1))).sum()) * tile * tile
    return sample(whole_bytes, indices, images, [{}] * len(images), pa.table({}))


def tiles_of(images: Iterable[Array], edge: int) -> Iterator[Array]:
    """Cut images (T, C, Z, Y, X) into all their full single-channel tiles of ``edge`` x ``edge`` pixels."""
    for image in images:
        corners = (range(0, length - edge + 1, edge) for length in image.shape[3:])
        for t, c, z, y, x in product(*map(range, image.shape[:3]), *corners):
            yield image[t : t + 1, c : c + 1, z : z + 1, y : y + edge, x : x + edge]


def _candidates(origin: SampleFields) -> Array:
    """Return the images that have samples; only those of a few evenly spaced parts if parts are fetched whole."""
    parted, candidates = origin.source.header.part_layout, np.unique(origin.fields)
    if parted is None or parted.window is None or len(parted.starts) < 2:
        return candidates
    part_of = np.searchsorted(parted.starts, candidates, side="right") - 1
    is_near = np.isin(part_of, np.linspace(0, len(parted.starts) - 2, _FETCHED_PARTS).astype(np.int64))
    return candidates[is_near] if is_near.any() else candidates


def _read(
    source: Images, order: Array, lengths: Array, limits: Limits, least: tuple[int, int] | None, clock: Clock
) -> dict[int, Array]:
    """Read images in this order until a limit is reached, at least one; ``least=None`` does not cut large images."""
    start_s, read_bytes, read = clock(), 0, dict[int, Array]()
    largest = max(1, limits.size_bytes // _LARGE_PART)
    for group in split_by_bytes(np.maximum(lengths[order], -(-largest // _CHUNK)), largest):
        if read and (read_bytes >= limits.size_bytes or clock() - start_s >= limits.seconds):
            break
        rows = order[group].tolist()
        for index, image in zip(rows, source.read(rows), strict=True):
            read[index] = image if least is None else _cut_down(image, largest, least)
            read_bytes += read[index].nbytes
    return read


def _cut_down(image: Array, most_bytes: int, least: tuple[int, int]) -> Array:
    """Return the middle of an image, cut along T, Z, Y, X in this order until it has at most ``most_bytes``.

    At least ``least`` (Y, X) pixels remain, even if they exceed ``most_bytes``.
    """
    for axis, fewest in zip((0, 2, 3, 4), (1, 1, *(max(_FEWEST_PIXELS, side) for side in least)), strict=True):
        if image.nbytes > most_bytes:
            old = image.shape[axis]
            new = min(old, max(fewest, most_bytes * old // image.nbytes))
            image = image.take(np.arange(new) + (old - new) // 2, axis=axis)
    return image
