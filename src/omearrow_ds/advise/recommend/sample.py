"""`Sample`: some images of a collection, few enough to be written many times, and `Cells`: the objects in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import AXES
from omearrow_ds.dataset.crop_boxes import boxes_around_objects
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.keys import IMAGE_ID, table_file
from omearrow_ds.storage.objects import Objects, ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.text import PythonName

Clock = Callable[[], float]
_CHUNK = 64  # Maximum number of images per read, after which the time is compared with the limit.
_LITTLE_MORE = 1.25  # A collection up to this multiple of the limits is taken completely.
_FEWEST_PIXELS = 64  # Minimum size along Y and X of an image that is cut.
_FETCHED_PARTS = 4
_LARGE_PART = 8  # An image that takes more than an eighth of the sample is cut.
_WHOLE_SAMPLE_S = 60.0  # With less time, the sample is smaller.
_READING_PART = 0.1  # Part of the time after which reading the sample ends.


@dataclass(frozen=True)
class Limits:
    """Maximum number of images, decoded bytes and seconds of reading for a sample."""

    images: int = 2048
    size_bytes: int = 32_000_000
    seconds: float = 9.0

    @classmethod
    def within(cls, seconds: float, size_bytes: int) -> Limits:
        """Return the limits for a sample whose measurements may take ``seconds`` in total."""
        part = min(1.0, seconds / _WHOLE_SAMPLE_S)
        return cls(max(32, int(cls.images * part)), max(1, int(size_bytes * part)), seconds * _READING_PART)


@dataclass(frozen=True)
class Cells:
    """Objects of a source around which samples are cropped."""

    source: BaseSource  # Images that contain objects; all images without a filter.
    objects: Objects  # One object per sample.
    options: dict[str, Any]  # Keywords of a dataset of the source.

    @classmethod
    def open(
        cls,
        source: BaseSource,
        crop_size: tuple[int, int] | None,
        crops: dict[str, Any],
        of_objects: ObjectSettings,
    ) -> Cells:
        """Open the table of objects that ``crops``, a dict of dataset options, contains.

        Errors are those of the dataset.
        """
        box, pad, passed = crops.get("box"), crops.get("pad"), crops["objects"]
        if crop_size is None and not box:
            raise ArgumentError(
                "the size of crops is missing", option="crop_size", remedy="pass (height, width), or box= with resize="
            )
        images, objects = of_objects.open(source, passed, crops.get("center"), box)
        objects = objects.keep(boxes_around_objects(objects, images.shapes, crop_size, pad)[1])
        if not len(objects.rows):
            raise ArgumentError(
                f"{objects.name} has no objects in these images",
                option="objects",
                remedy="pass a table with objects of these images",
            )
        file, row_filter = table_file(passed, "objects"), of_objects.row_filter
        types = None if file is None else of_objects.types.of_table(file) or None
        condition = None if row_filter is None else row_filter.condition
        joining = {"on": of_objects.on, "column_types": types, "filter": condition}
        return cls(images, objects, {**crops, **{name: value for name, value in joining.items() if value is not None}})

    @property
    def fields(self) -> Array:
        """Image index of each sample, shape (n,), int64."""
        return self.objects.fields

    def within(self, images: Sequence[int] | Array) -> Array:
        """Return the sorted indices of the objects that are in ``images``."""
        return np.flatnonzero(np.isin(self.fields, images))

    def remap_to_copies(self, images: Sequence[int], image_ids: Sequence[str]) -> dict[str, Any]:
        """Return dataset keywords for crops around the objects of ``images``, copied with the ids ``image_ids``."""
        part, new_ids = self.objects.keep(self.within(images)), dict(zip(images, image_ids, strict=True))
        columns: dict[str, Any] = {IMAGE_ID: [new_ids[field] for field in part.fields.tolist()]}
        option, positions = ("center", part.centers) if part.boxes is None else ("box", part.boxes)
        assert positions is not None
        names = ["y", "x"] if part.boxes is None else ["y0", "y1", "x0", "x1"]
        table = pa.table(columns | dict(zip(names, positions.T, strict=True)))
        return {"objects": table, option: names} | {k: v for k, v in self.options.items() if k in ("pad", "resize")}

    def opening_of_fields(self, opening: OpenOptions) -> OpenOptions:
        """Return ``opening`` without the column types that apply to the table of objects."""
        types = dict(opening.get("column_types") or {})
        for name in self.options.get("column_types", {}).keys() - set(self.source.column_names):
            types.pop(name, None)
        return {**opening, "column_types": types or None}

    @property
    def code(self) -> dict[str, Any]:
        """Return ``options`` to be printed as Python code, where a table in memory is called ``objects``."""
        objects = self.options["objects"]
        is_path = isinstance(objects, str | os.PathLike)
        return {**self.options, "objects": os.fspath(objects) if is_path else PythonName("objects")}


@dataclass(frozen=True)
class Sample:
    """Some images (T, C, Z, Y, X) of a collection, their ids, metadata and columns, and the collection's total size.

    The images are whole, or tiles, or regions if some are very large (``cut``). They come from the sorted ``indices``.
    The whole collection has ``whole_count`` such images or tiles with ``whole_bytes`` decoded. ``axes`` are the axes of
    dataset samples: C, Y, X and every other axis that is longer than 1 in some image. With ``cells``, samples are crops
    around the cells in the images.
    """

    images: Sequence[Array]
    image_ids: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    columns: pa.Table | None
    indices: Sequence[int]
    whole_count: int
    whole_bytes: int
    axes: str
    cut: bool = False
    cells: Cells | None = None

    def part(self, step: int) -> Sample:
        """Return a sample of every ``step``-th image."""
        lists = {name: getattr(self, name)[::step] for name in ("images", "image_ids", "metadata", "indices")}
        return replace(self, columns=_take(self.columns, range(0, len(self.images), step)), **lists)

    @property
    def size_bytes(self) -> int:
        return sum(image.nbytes for image in self.images)

    @property
    def complete(self) -> bool:
        return len(self.images) == self.whole_count and not self.cut

    @property
    def factor(self) -> float:
        """Decoded size of the whole collection divided by the decoded size of the sample."""
        return 1.0 if self.complete else self.whole_bytes / max(1, self.size_bytes)


def take_sample(
    source: BaseSource,
    limits: Limits,
    clock: Clock,
    *,
    tile: int | None = None,
    crop_size: tuple[int, int] | None = None,
    cells: Cells | None = None,
) -> Sample:
    """Read images spread over the whole collection until a limit is reached; at least one image is read.

    With ``tile``, images are cut into single-channel tiles of that edge. With ``cells``, images are whole and contain
    cells.
    """
    if len(source) == 0:
        raise ArgumentError("the collection is empty", path=source.path, remedy="pass a collection with images")
    shapes, lengths = source.shapes, image_bytes(source.shapes, source.dtypes)
    tiles = (shapes // (shapes if tile is None else (1, 1, 1, tile, tile))).prod(axis=1)
    if crop_size is not None and cells is None:
        _refuse_small(source, crop_size)
    whole_count, whole_bytes = int(tiles.sum()), int(lengths.sum())
    if not whole_count:
        problem = f"all images are smaller than {tile} x {tile} pixels"
        raise ArgumentError(problem, path=source.path, option="tile", value=tile, remedy="pass a smaller number")
    if whole_bytes <= _LITTLE_MORE * limits.size_bytes and whole_count <= _LITTLE_MORE * limits.images:
        limits = replace(limits, images=whole_count, size_bytes=whole_bytes)
    order = _spread(_candidates(source, cells), -(-limits.images * len(source) // whole_count))
    least = None if cells is not None else crop_size or (tile or 0, tile or 0)
    read = _read(source, order, lengths, limits, least, clock)
    indices = sorted(read)
    images = [read[index] for index in indices]
    axes = "".join(axis for row, axis in enumerate(AXES) if axis in "CYX" or (shapes[:, row] > 1).any())
    if tile is not None:
        images = list(islice(tiles_of(images, tile), limits.images))
        if not images:
            raise ArgumentError(
                "no image is as large as a tile", option="tile", value=tile, remedy="pass a smaller number"
            )
        ids = [f"tile-{number:05d}" for number in range(len(images))]
        whole_bytes = int((tiles * (lengths // shapes.prod(axis=1))).sum()) * tile * tile
        return Sample(images, ids, [{}] * len(images), None, indices, whole_count, whole_bytes, axes)
    ids, metadata = [source.image_ids[index] for index in indices], [source.metadata(index) for index in indices]
    if len(set(ids)) < len(ids) or "" in ids:  # Tables of other programs.
        ids = [f"image-{index:05d}" for index in indices]
    is_cut = any(read[index].nbytes < lengths[index] for index in indices)
    columns = _take(source.columns, indices)
    return Sample(images, ids, metadata, columns, indices, whole_count, whole_bytes, axes, is_cut, cells)


def tiles_of(images: Iterable[Array], edge: int) -> Iterator[Array]:
    """Cut images (T, C, Z, Y, X) into all their full single-channel tiles of ``edge`` x ``edge`` pixels."""
    for image in images:
        corners = (range(0, size - edge + 1, edge) for size in image.shape[3:])
        for t, c, z, y, x in product(*map(range, image.shape[:3]), *corners):
            yield image[t : t + 1, c : c + 1, z : z + 1, y : y + edge, x : x + edge]


def _take(columns: pa.Table | None, rows: Sequence[int]) -> pa.Table | None:
    return columns.take(pa.array(rows)) if columns is not None and columns.num_columns else None


def _candidates(source: BaseSource, cells: Cells | None) -> Array:
    """Return images to choose from: those with cells, and of a few evenly spaced parts if these are fetched whole."""
    parted, candidates = source.parted, np.arange(len(source))
    if parted is not None and parted.window is not None and len(parted.starts) > 1:
        part_of = np.searchsorted(parted.starts, candidates, side="right") - 1
        chosen = np.linspace(0, len(parted.starts) - 2, _FETCHED_PARTS).astype(np.int64)
        candidates = candidates[np.isin(part_of, chosen)]
    if cells is None:
        return candidates
    near: Array = np.intersect1d(candidates, cells.fields)
    return near if len(near) else np.unique(cells.fields)


def _refuse_small(source: BaseSource, crop_size: tuple[int, int]) -> None:
    small = np.flatnonzero((source.shapes[:, 3:] < crop_size).any(axis=1))
    if len(small):
        height, width = source.shapes[small[0], 3:].tolist()
        problem = f"image {small[0]} has only {height} x {width} pixels"
        remedy = "lower crop_size"
        raise AxesError(problem, path=source.path, option="crop_size", value=crop_size, remedy=remedy)


def _spread(candidates: Array, number: int) -> Array:
    """Return images in random order, one random image per interval of equal length."""
    random = np.random.default_rng(0)
    edges = np.linspace(0, len(candidates), min(len(candidates), number) + 1).astype(np.int64)
    spread: Array = candidates[random.permutation(random.integers(edges[:-1], edges[1:]))]
    return spread


def _read(
    source: BaseSource, order: Array, lengths: Array, limits: Limits, least: tuple[int, int] | None, clock: Clock
) -> dict[int, Array]:
    """Read images in this order until a limit is reached, each cut to an eighth of the sample size.

    Cut images keep at least ``least`` rows and columns; with None, images are not cut.
    """
    start_s, read_bytes = clock(), 0
    largest = max(1, limits.size_bytes // _LARGE_PART)
    read: dict[int, Array] = {}
    for group in split_by_bytes(np.maximum(lengths[order], -(-largest // _CHUNK)), largest):
        if read and (read_bytes >= limits.size_bytes or clock() - start_s >= limits.seconds):
            break
        for index, image in zip(order[group].tolist(), source.read_arrays(order[group].tolist()), strict=True):
            read[index] = image if least is None else _cut_down(image, largest, least)
            read_bytes += read[index].nbytes
    return read


def _cut_down(image: Array, most_bytes: int, least: tuple[int, int]) -> Array:
    """Return the middle of an image, cut along T, Z, Y and X in this order until it has at most ``most_bytes``.

    The result has at least ``least`` rows and columns, and so may be larger.
    """
    for axis, fewest in ((0, 1), (2, 1), (3, max(_FEWEST_PIXELS, least[0])), (4, max(_FEWEST_PIXELS, least[1]))):
        if image.nbytes > most_bytes:
            old = image.shape[axis]
            new = min(old, max(fewest, most_bytes * old // image.nbytes))
            first = (old - new) // 2
            image = image.take(range(first, first + new), axis=axis)
    return image
