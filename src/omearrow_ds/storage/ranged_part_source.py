"""Single images of a part on a server, fetched by range requests at the offsets in the manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.array_utils import byte_bounds

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._table import TableSource
from omearrow_ds.storage.image_extents import PieceLayout

_MOST_RUNS = 64  # Limit per part, because the manifest describes all parts.


class Run(NamedTuple):
    """Images at regular byte offsets in a file; each may consist of pieces with gaps, as in Parquet pages.

    Attributes
    ----------
    start, images, step
        Offset of the first image, number of images, and stride.
    times, apart
        Number of repetitions of these images, and stride of the repetitions.
    pieces, gap
        Number of equal pieces per image, and gap between two pieces.
    """

    start: int
    images: int
    step: int
    times: int = 1
    apart: int = 0
    pieces: int = 1
    gap: int = 0


def find_byte_runs(source: Images) -> list[Run]:
    """Return the offsets of images in a local, uncompressed file; an empty list if images are not stored as in memory.

    The list is also empty if a checksum is missing, because fetched bytes could not be verified.
    """
    mapping, checksums = source.mapping if isinstance(source, TableSource) else None, source.checksums
    stacks = None if mapping is None or checksums is None or checksums.null_count else source.mapped_stacks()
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
    """Return number of pieces of an image in C order, and the gap between two; None for other layouts."""
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


class RangedPartSource(Images):
    """Images fetched by byte range from a part that is not opened; callers must verify their checksums.

    Parameters
    ----------
    path
        The URL of the part.
    fmt
        Format of the part.
    size_bytes, runs
        Size of the part in bytes, and the offsets of the images.
    known
        Ids, shapes, dtypes and checksums of the images.
    fetch
        Returns the bytes of spans of the part.
    opening
        Opens the part for all other requests.
    """

    fetches = True

    def __init__(
        self,
        path: Path,
        fmt: Format,
        size_bytes: int,
        runs: Sequence[Run],
        known: tuple[Sequence[str], Array, Sequence[np.dtype[Any]], pa.ChunkedArray],
        fetch: Callable[[Sequence[ByteRange]], list[memoryview]],
        opening: Callable[[Path], Images],
    ) -> None:
        self.path, self.guard = path, FileGuard(path)
        self.name = fmt.name  # type: ignore[misc]  # It has any format.
        self.image_ids, self.shapes, self.dtypes, self.checksums = known
        self._size_bytes, self._runs, self._fetch, self._open_whole = size_bytes, runs, fetch, opening

    def _read_images(self, rows: Sequence[int]) -> list[Array]:
        """Fetch images; images that are near each other in the file share a request."""
        located = list(map(self._locate, rows))
        stored = self._fetch([(start, start + layout.num_bytes) for start, layout in located])
        images = (layout.image(data, 0) for (_, layout), data in zip(located, stored, strict=True))
        return [image.astype(image.dtype.newbyteorder("="), copy=False) for image in images]

    def _locate(self, index: int) -> tuple[int, PieceLayout]:
        """Return the offset of the first pixel of an image, and its layout."""
        row, shape, dtype = index, tuple(self.shapes[index].tolist()), self.dtypes[index].newbyteorder("<")
        for run in self._runs:
            if row < run.images * run.times:
                repeat, position = divmod(row, run.images)
                start = run.start + repeat * run.apart + position * run.step
                if run.pieces >= 1 and math.prod(shape) % run.pieces == 0 and run.gap >= 0:
                    layout = PieceLayout(shape, dtype, run.pieces, gap_bytes=run.gap)
                    if 0 <= start <= start + layout.num_bytes <= self._size_bytes:
                        return start, layout
                break
            row -= run.images * run.times
        raise FormatError(
            f"{self.path}: the byte range of image {index} in the manifest is outside the part; restore the manifest",
            image=index,
        )

    @cached_property
    def _whole(self) -> Images:
        return self._open_whole(self.path)

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the metadata of an image, read through the opened part."""
        return self._whole.metadata(index)

    def mask_name_stems(self, index: int) -> list[str]:
        """Return the names by which other files may refer to an image, read through the opened part."""
        return self._whole.mask_name_stems(index)

    def storage_info(self) -> Stored:
        """Return the storage layout of the opened part."""
        return self._whole.storage_info()

    def close(self) -> None:
        """Close the part if it is open."""
        if "_whole" in vars(self):
            self._whole.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a single part cannot be pickled; pickle its collection")
