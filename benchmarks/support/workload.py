"""`Workload` (the images to measure) and `Profile` (how long to measure)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support.labels import label_images
from benchmarks.support.library import synthetic_images
from benchmarks.tracks.track import LEAST_ROUNDS
from omearrow_ds import ImageSource, open_images

Array = np.ndarray[Any, Any]
_NAMED = 5  # Files that a message names.
_FEW = 64  # Images of a small folder: 4 batches of 16.
_AGAIN = ", so few that rounds read the same ones again and again"
DIFFERING = "differing"
NO_BATCH = "the images differ in shape, so they make no batch; cut them with --tile"


@dataclass(frozen=True, slots=True)
class Workload:
    """Images to measure: their number, shape and dtype, synthetic or from a folder.

    Attributes
    ----------
    count : int or None
        Number of images; ``None`` means all images of ``folder``.
    shape, dtype, seed : tuple of int, str, int
        ``(T, C, Z, Y, X)``, pixel type and seed of synthetic images; not used with ``folder``.
    folder : pathlib.Path or None
        Folder of TIFF files to measure instead of synthetic images.
    tile : int or None
        Edge in pixels of the single-channel tiles that files are cut into; ``None`` keeps them whole.
    bits : int
        Camera bits of synthetic images: 8 (scaled to the range of the dtype), or 12 or 16 (stored unscaled).
    labels : bool
        Whether to generate uint16 label images instead.
    """

    count: int | None = 1000
    shape: tuple[int, int, int, int, int] = (1, 1, 1, 100, 100)
    dtype: str = "uint16"
    seed: int = 42
    folder: Path | None = None
    tile: int | None = None
    bits: int = 8
    labels: bool = False

    def images(self) -> Iterator[Array]:
        """Stream the images, each ``(T, C, Z, Y, X)``.

        Raises
        ------
        ValueError
            If no tile fits into the images of the folder.
        """
        if self.folder is None:
            return self._synthetic(self.count or 0)
        return islice(self._of_folder(), self.count)

    def describe(self) -> str:
        """Return a short description of the images."""
        if self.folder is None:
            return (
                f"{self.count:,} images of {sizes(self.shape)} {self.dtype}{self._kind()}, synthetic, seed {self.seed}"
            )
        with open_images(self.folder, "tiff") as source:
            shapes = list(dict.fromkeys(map(tuple, source.shapes.tolist())))
            total = (
                len(source) if self.tile is None else sum(len(_corners(s, self.tile)) for s in source.shapes.tolist())
            )
            dtypes = "/".join(dict.fromkeys(dtype.name for dtype in source.dtypes))
            files = len(source)
            without = _without_tiles(source, self.tile)
        count = total if self.count is None else min(self.count, total)
        if self.tile is not None:
            tiles = f"{count:,} tiles of {self.tile} x {self.tile} {dtypes} from {files - len(without)} files"
            smaller = f" (too small: {', '.join(without[:_NAMED])}{', ...' if len(without) > _NAMED else ''})"
            again = _AGAIN if count < _FEW else ""
            return f"{tiles} of {self.folder.name}{smaller if without else ''}{again}"
        size = sizes(shapes[0]) if len(shapes) == 1 else "differing shape"
        return f"{count:,} images of {size} {dtypes} from {self.folder.name}{_AGAIN if count < _FEW else ''}"

    def key(self) -> str:
        """Return a hash of all properties of the images, including name, size and time of a folder's files."""
        if self.folder is None:
            properties: list[Any] = ["synthetic", self.count, self.shape, self.dtype, self.seed]
            properties += [self._kind()] if self._kind() else []
        else:
            stats = [(path.name, path.stat()) for path in sorted(self.folder.iterdir()) if path.is_file()]
            files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
            properties = ["folder", self.count, self.tile, files]
        return hashlib.blake2b(json.dumps(properties).encode(), digest_size=8).hexdigest()

    def _kind(self) -> str:
        return " labels" if self.labels else "" if self.bits == 8 else f" of {self.bits} bits"

    def _synthetic(self, count: int) -> Iterator[Array]:
        if self.labels:
            return label_images(count, self.shape, self.seed)
        if self.bits == 8:
            return synthetic_images(count, self.shape, self.dtype, self.seed)
        images = synthetic_images(count, self.shape, self.dtype, self.seed, levels=2**self.bits)
        return (image >> (16 - self.bits) for image in images)

    def _of_folder(self) -> Iterator[Array]:
        with open_images(self.folder or "", "tiff") as source:
            if self.tile is None:
                yield from (source.read(index) for index in range(len(source)))
                return
            if not any(_corners(shape, self.tile) for shape in source.shapes.tolist()):
                raise ValueError(f"{self.folder}: no image holds a tile of {self.tile} x {self.tile} pixels")
            yield from _tiles(source, self.tile)


NAMED: Mapping[str, Workload] = MappingProxyType(
    {
        "cells-8bit": Workload(),
        "cells-12bit": Workload(bits=12),
        "cells-16bit": Workload(bits=16),
        "cells-uint8": Workload(dtype="uint8"),
        "fields": Workload(8, (1, 5, 1, 1080, 1080), bits=16),
        "stack": Workload(40, (1, 2, 16, 256, 256), bits=12),
        "masks": Workload(200, (1, 1, 1, 512, 512), labels=True),
    }
)


def _without_tiles(source: ImageSource, edge: int | None) -> list[str]:
    """Return the ids of images that are smaller than a tile."""
    sized = zip(source.image_ids, source.shapes.tolist(), strict=True)
    return [] if edge is None else [name for name, shape in sized if not _corners(shape, edge)]


def _tiles(source: ImageSource, edge: int) -> Iterator[Array]:
    for index, shape in enumerate(source.shapes.tolist()):
        image = source.read(index)
        for t, c, z, y, x in _corners(shape, edge):
            yield image[t : t + 1, c : c + 1, z : z + 1, y : y + edge, x : x + edge]


def _corners(shape: tuple[int, ...], edge: int) -> list[tuple[int, ...]]:
    """Return the first index of each full tile of an image."""
    *planes, size_y, size_x = shape
    steps = (range(0, size - edge + 1, edge) for size in (size_y, size_x))
    return list(product(*map(range, planes), *steps))


def sizes(shape: tuple[int, ...]) -> str:
    """Return the shape (T, C, Z, Y, X) as text without leading axes of length 1: ``"100 x 100"``."""
    first = next((axis for axis, size in enumerate(shape[:3]) if size > 1), 3)
    return " x ".join(map(str, shape[first:]))


def common_size(shapes: Iterable[tuple[int, ...]]) -> str:
    """Return the common shape of all images as text, or `DIFFERING`."""
    distinct = {sizes(tuple(shape)) for shape in shapes}
    return distinct.pop() if len(distinct) == 1 else DIFFERING


class Budget(NamedTuple):
    """Seconds to measure, and the minimum and maximum number of rounds."""

    seconds: float
    least: int
    most: int

    def rounds(self, trial_s: float) -> int:
        """Return the number of rounds that fit if one takes ``trial_s`` seconds."""
        return int(min(max(self.seconds / trial_s, self.least), self.most))


@dataclass(frozen=True, slots=True)
class Profile:
    """How long to measure.

    Attributes
    ----------
    name : str
        Name on the command line.
    whole, sample, preloaded, pair : Budget
        Budgets of benchmarks with rounds of a whole collection, of a sample or batch on demand, of a preloaded sample
        or batch, and of paired rounds of this package and a reference (time of both).
    pair_round_s : float
        Minimum seconds of one side's round, reached with up to `MOST_CALLS` calls.
    """

    name: str
    whole: Budget
    sample: Budget
    preloaded: Budget
    pair: Budget
    pair_round_s: float

    def budget(self, access: str) -> Budget:
        """Return the budget of samples or batches that are ``"preloaded"`` or ``"on_demand"``."""
        return self.preloaded if access == "preloaded" else self.sample

    def rounds_of_distribution(self, trial_s: float) -> int:
        """Return the number of rounds of a benchmark that reports p99: enough for p99 unless they take too long."""
        return max(self.sample.rounds(trial_s), min(_ROUNDS_OF_P99, int(2 * self.whole.seconds / trial_s)))

    def calls_of_round(self, trial_s: float) -> int:
        """Return the number of calls per round of a paired benchmark."""
        return min(max(math.ceil(self.pair_round_s / trial_s), 1), MOST_CALLS)


MOST_CALLS = 1000
_ROUNDS_OF_P99 = LEAST_ROUNDS[99]
PROFILES = (
    Profile(
        "quick",
        whole=Budget(0.5, 2, 5),
        sample=Budget(0.1, 10, 1000),
        preloaded=Budget(0.5, 50, 5000),
        pair=Budget(0.4, 3, 15),
        pair_round_s=0.005,
    ),
    Profile(
        "full",
        whole=Budget(6.0, 5, 30),
        sample=Budget(1.5, 50, 5000),
        preloaded=Budget(5.0, 100, 20000),
        pair=Budget(4.0, 5, 60),
        pair_round_s=0.02,
    ),
)


def trial_s(action: Callable[[], object], times: int = 1) -> float:
    """Return the mean seconds of an action over a number of calls."""
    start = perf_counter()
    for _ in range(times):
        action()
    return (perf_counter() - start) / times
