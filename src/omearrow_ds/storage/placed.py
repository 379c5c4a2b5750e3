"""Images of a part on a server, each fetched alone by one request: the manifest says where in the part they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.array_utils import byte_bounds

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._base import Array, BaseSource, Block
from omearrow_ds.storage.formats._ranged import Span
from omearrow_ds.storage.formats._stored import Stored

_MOST_RUNS = 64  # of a part: the manifest names all parts


class Run(NamedTuple):
    """Images that stand in a file in equal steps, all in bytes; Parquet has them in pages, and values with gaps.

    Attributes
    ----------
    start, images, step
        Where the first one begins, how many there are, and how far apart.
    times, apart
        How often there are so many again, and how far apart these are.
    pieces, gap
        In how many pieces of one size each is, and what is between two of them.
    """

    start: int
    images: int
    step: int
    times: int = 1
    apart: int = 0
    pieces: int = 1
    gap: int = 0


def runs_of(source: BaseSource) -> list[Run]:
    """Return where the images of a file of this machine stand as they are in memory; nothing where they do not.

    Nothing, too, if some have no checksum: then nobody could tell that what was fetched is an image.
    """
    mapping, checksums = source.mapping, source.checksums
    stacks = None if mapping is None or checksums is None or checksums.null_count else source.stacked()
    if mapping is None or stacks is None:
        return []
    stacks.prepare(np.arange(len(stacks)))
    file = np.frombuffer(mapping.file, np.uint8)
    runs: list[Run] = []
    for images in filter(len, stacks.arrays):
        low, high = byte_bounds(images)
        pieces = _pieces(images[0])
        inside = file.ctypes.data <= low < high <= file.ctypes.data + file.size
        if pieces is None or not (inside and images.dtype.newbyteorder("<").isnative):
            return []
        run = Run(low - file.ctypes.data, len(images), images.strides[0], 1, 0, *pieces)
        last = runs[-1] if runs else run._replace(images=0)
        apart = last.apart if last.times > 1 else run.start - last.start
        again = last._replace(times=last.times + 1, apart=apart)
        if run == last._replace(start=last.start + last.times * apart, times=1, apart=0):
            runs[-1] = again
        else:
            runs.append(run)
    return runs if len(runs) <= _MOST_RUNS else []


def _pieces(image: Array) -> tuple[int, int] | None:
    """Return in how many pieces an image in C order is, and what is between two of them; None if it is otherwise."""
    axes = next(axes for axes in range(image.ndim + 1) if image[(0,) * axes].flags.c_contiguous)
    if not axes:
        return 1, 0
    step = image.strides[axes - 1]
    gap = step - image[(0,) * axes].nbytes
    for size, stride in zip(image.shape[axes - 1 :: -1], image.strides[axes - 1 :: -1], strict=True):
        if gap < 0 or (size > 1 and stride != step):
            return None
        step *= size
    return math.prod(image.shape[:axes]), gap


class Placed(BaseSource):
    """The images of a part of which nothing was read: what is fetched has to be compared with their checksums.

    Parameters
    ----------
    path
        The URL of the part.
    fmt
        Its format.
    size_bytes, runs
        How large it is, and where its images stand.
    known
        Ids, shapes, dtypes and checksums of its images.
    fetch
        Returns the bytes of spans of the part.
    opening
        Opens it, for what else is asked for.
    """

    fetches = True

    def __init__(
        self,
        path: Path,
        fmt: Format,
        size_bytes: int,
        runs: Sequence[Run],
        known: tuple[Sequence[str], Array, Sequence[np.dtype[Any]], pa.ChunkedArray],
        fetch: Callable[[Sequence[Span]], list[memoryview]],
        opening: Callable[[Path], BaseSource],
    ) -> None:
        self.path, self.name = path, fmt.name  # type: ignore[misc]  # of any format
        self.image_ids, self.shapes, self.dtypes, self.checksums = known
        self._size_bytes, self._runs, self._fetch, self._open_whole = size_bytes, runs, fetch, opening

    def views(self, indices: Sequence[int]) -> list[Array]:
        """Return images, those fetched together that are near each other."""
        places = [self._place(index) for index in indices]
        found = self._fetch([span for span, _, _ in places])
        return [
            self._image(index, data, pieces, gap)
            for index, data, (_, pieces, gap) in zip(indices, found, places, strict=True)
        ]

    def _place(self, index: int) -> tuple[Span, int, int]:
        """Return where an image stands, in how many pieces, and what is between two of them."""
        row, size_bytes = index, int(self.shapes[index].prod()) * self.dtypes[index].itemsize
        for run in self._runs:
            if row < run.images * run.times:
                time, here = divmod(row, run.images)
                start = run.start + time * run.apart + here * run.step
                stop = start + size_bytes + (run.pieces - 1) * run.gap
                if (
                    run.pieces < 1
                    or size_bytes % run.pieces
                    or run.gap < 0
                    or not 0 <= start <= stop <= self._size_bytes
                ):
                    break
                return (start, stop), run.pieces, run.gap
            row -= run.images * run.times
        raise FormatError(
            f"{self.path}: image {index} is nowhere in it, as the manifest tells its places; restore it", image=index
        )

    def _image(self, index: int, data: memoryview, pieces: int, gap: int) -> Array:
        dtype = self.dtypes[index]
        pixels = int(self.shapes[index].prod()) // pieces
        strides = (pixels * dtype.itemsize + gap, dtype.itemsize)
        flat: Array = np.ndarray((pieces, pixels), dtype.newbyteorder("<"), data, 0, strides)
        image: Array = flat.astype(dtype, copy=False).reshape(self.shapes[index])
        return image

    @cached_property
    def _whole(self) -> BaseSource:
        return self._open_whole(self.path)

    def blocks(self) -> Iterator[Block]:
        """Return all images, of the opened part."""
        return self._whole.blocks()

    def metadata(self, index: int) -> dict[str, Any]:
        """Return that of an image, of the opened part."""
        return self._whole.metadata(index)

    def stems(self, index: int) -> list[str]:
        """Return what may name an image, of the opened part."""
        return self._whole.stems(index)

    def chunk_codec(self) -> str | None:
        """Return nothing: images are stored as they are."""
        return None

    def stored_as(self) -> Stored:
        """Return how the opened part is stored."""
        return self._whole.stored_as()

    def close(self) -> None:
        """Close what was opened."""
        if "_whole" in vars(self):
            self._whole.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("it is opened anew by the collection that it is a part of")
