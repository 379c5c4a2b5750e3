"""`Sample`: images from the whole collection, few enough to be written many times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.advise.recommend.cells import Cells
from omearrow_ds.axes import AXES
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.formats._base import Parted
from omearrow_ds.storage.protocol import ImageSource
from omearrow_ds.storage.source import Array

Clock = Callable[[], float]
_CHUNK = 64  # Images per read, so that vectors and row groups are not scanned again for each image.
_LITTLE_MORE = 1.25  # A collection up to this multiple of the limits is taken completely.
_FEWEST_PIXELS = 64  # Minimum size along Y and X of an image that is cut.
_FETCHED_PARTS = 4
_LARGE_PART = 8  # An image that takes more than an eighth of the sample is cut.


@dataclass(frozen=True)
class Limits:
    """Maximum number of images, decoded bytes and seconds of reading for a sample."""

    images: int = 2048
    size_bytes: int = 32_000_000
    seconds: float = 9.0


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
    columns: pa.Table
    indices: Sequence[int]
    whole_count: int
    whole_bytes: int
    axes: str
    cut: bool
    cells: Cells | None = None

    def part(self, step: int) -> Sample:
        rows = range(0, len(self.images), step)
        columns = self.columns.take(pa.array(rows)) if self.columns.num_columns else self.columns
        lists = {name: getattr(self, name)[::step] for name in ("images", "image_ids", "metadata", "indices")}
        return replace(self, columns=columns, **lists)

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
    source: ImageSource,
    limits: Limits,
    clock: Clock,
    *,
    tile: int | None = None,
    crop_size: tuple[int, int] | None = None,
    cells: Cells | None = None,
) -> Sample:
    """Read images spread over the whole collection up to the limits; the first image is read regardless of them.

    With ``tile``, images are cut into single-channel tiles of that edge. With ``cells``, images are whole and contain
    cells. Raises `ArgumentError` for a collection without images, or without an image that contains a tile, and
    `AxesError` for an image that is smaller than the crop.
    """
    if len(source) == 0:
        raise ArgumentError("holds no image, so there is nothing to measure", path=source.path)
    lengths = image_bytes(source.shapes, source.dtypes)
    _refuse_small(source, crop_size if cells is None else None)
    corners_of = [1 if tile is None else len(_corners(tuple(shape), tile)) for shape in source.shapes.tolist()]
    if not any(corners_of):
        raise ArgumentError(
            f"no image of {source.path} holds a tile of {tile} x {tile} pixels", option="tile", value=tile
        )
    if lengths.sum() <= _LITTLE_MORE * limits.size_bytes and sum(corners_of) <= _LITTLE_MORE * limits.images:
        limits = replace(limits, images=sum(corners_of), size_bytes=int(lengths.sum()))
    tiles = max(1, sum(corners_of) // len(source))
    candidates = _at_hand(source)
    if cells is not None:
        fields_with_cells = np.unique(cells.fields)
        near = np.intersect1d(candidates, fields_with_cells)
        candidates = near if len(near) else fields_with_cells
    of_mean_size = int(limits.size_bytes / max(1.0, float(lengths.mean())))
    fitting = min(-(-limits.images // tiles), max(_LARGE_PART, of_mean_size))  # At least 8, as large ones are cut.
    chosen = candidates[_spread(len(candidates), fitting)]
    least = None if cells is not None else crop_size or (tile or 0, tile or 0)
    read = _read(source, chosen, lengths, limits, least, clock)
    indices = sorted(read)
    columns = source.columns.take(pa.array(indices)) if source.columns.num_columns else pa.table({})
    ids, notes = [source.image_ids[i] for i in indices], [source.metadata(i) for i in indices]
    if len(set(ids)) < len(ids) or "" in ids:  # Tables of other programs.
        ids = [f"image-{i:05d}" for i in indices]
    images, cut = [read[i] for i in indices], any(read[i].nbytes < lengths[i] for i in indices)
    whole_count, whole_bytes = len(source), int(lengths.sum())
    if tile is not None:
        whole_count = sum(corners_of)
        tile_bytes = [n * tile * tile * d.itemsize for n, d in zip(corners_of, source.dtypes, strict=True)]
        whole_bytes = sum(tile_bytes)
        images = list(tiles_of(images, tile))[: limits.images]
        ids, notes = [f"tile-{n:05d}" for n in range(len(images))], [{} for _ in images]
        columns, cut = pa.table({}), False
        if not images:
            raise ArgumentError("none of the images that were looked at holds such a tile", option="tile", value=tile)
    axes = "".join(axis for row, axis in enumerate(AXES) if axis in "CYX" or (source.shapes[:, row] > 1).any())
    return Sample(images, ids, notes, columns, indices, whole_count, whole_bytes, axes, cut, cells)


def _at_hand(source: ImageSource) -> Array:
    """Return the images to choose from: all, or those of a few evenly spaced parts if parts are fetched as a whole."""
    parted: Parted | None = getattr(source, "parted", None)
    if parted is None or parted.window is None or len(parted.starts) < 2:
        return np.arange(len(source))
    starts = parted.starts
    chosen = np.unique(np.linspace(0, len(starts) - 2, _FETCHED_PARTS).astype(np.int64)).tolist()
    return np.concatenate([np.arange(starts[number], starts[number + 1]) for number in chosen])


def tiles_of(images: Iterable[Array], edge: int) -> Iterator[Array]:
    """Cut images (T, C, Z, Y, X) into all their full single-channel tiles of ``edge`` x ``edge`` pixels."""
    for image in images:
        for t, c, z, y, x in _corners(image.shape, edge):
            yield image[t : t + 1, c : c + 1, z : z + 1, y : y + edge, x : x + edge]


def _corners(shape: tuple[int, ...], edge: int) -> list[tuple[int, ...]]:
    *planes, size_y, size_x = shape
    return list(product(*map(range, planes), *(range(0, size - edge + 1, edge) for size in (size_y, size_x))))


def _refuse_small(source: ImageSource, crop_size: tuple[int, int] | None) -> None:
    if crop_size is None:
        return
    small = (source.shapes[:, 3] < crop_size[0]) | (source.shapes[:, 4] < crop_size[1])
    if small.any():
        index = int(np.flatnonzero(small)[0])
        size_y, size_x = source.shapes[index, 3:].tolist()
        msg = f"{source.path}: image {index} is {size_y} x {size_x}, smaller than the crop of {crop_size}; crop less"
        raise AxesError(msg)


def _spread(count: int, num_indices: int) -> Array:
    """Return ``wanted`` indices in random order, one random index per interval of equal length."""
    random = np.random.default_rng(0)
    num_indices = min(count, max(1, num_indices))
    edges = np.linspace(0, count, num_indices + 1).astype(np.int64)
    return random.permutation(random.integers(edges[:-1], edges[1:]))


def _read(
    source: ImageSource, order: Array, lengths: Array, limits: Limits, least: tuple[int, int] | None, clock: Clock
) -> dict[int, Array]:
    """Read images in the order of ``wanted`` until a limit is reached, each cut to an eighth of the sample size.

    Cut images keep at least ``least`` rows and columns; with None, images are not cut.
    """
    start_s, held_bytes = clock(), 0
    largest = max(1, limits.size_bytes // _LARGE_PART)
    read: dict[int, Array] = {}
    start = 0
    while start < len(order) and (not read or (held_bytes < limits.size_bytes and clock() - start_s < limits.seconds)):
        step = _CHUNK if read and int(lengths[order[start : start + _CHUNK]].sum()) < limits.size_bytes else 1
        chunk = order[start : start + step]
        for index, image in zip(chunk.tolist(), source.take(chunk), strict=True):
            read[index] = image if least is None else _cut_down(image, largest, least)
            held_bytes += read[index].nbytes
        start += step
    return read


def _cut_down(image: Array, most_bytes: int, least: tuple[int, int]) -> Array:
    """Return the middle of an image, cut along T, Z, Y and X in this order until it has at most ``most_bytes``.

    The result has at least ``least`` rows and columns, and so may be larger.
    """
    for axis in (0, 2, 3, 4):
        if image.nbytes <= most_bytes:
            break
        row_bytes = image.nbytes // image.shape[axis]
        fewest = max(_FEWEST_PIXELS, least[axis - 3]) if axis > 2 else 1
        length = min(image.shape[axis], max(fewest, most_bytes // max(1, row_bytes)))
        first = (image.shape[axis] - length) // 2
        image = image.take(range(first, first + length), axis=axis)
    return image
