"""`Material` of a collection in parts: images by number, which any process can open and read some of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import encode as codec
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.checksums import Hasher
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.place import Place
from omearrow_ds.storage.verified import verified_where_stored

Image = codec.Image  # what a material gives
HELD_BYTES = 2**25  # of decoded images that are in memory at once, where they are written in another order


class Material(Protocol):
    """Images to be written: all that is known of them without reading, and how to read some.

    Attributes
    ----------
    source
        What they are read from.
    image_ids, shapes, dtypes, columns, checksums
        As of a source, of the images as they are written.
    options
        What beside the source their pixels hang on, as JSON holds it.
    """

    source: BaseSource
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None
    options: Mapping[str, Any]

    def images(self, numbers: Array) -> Iterator[codec.Image]:
        """Yield the images of sorted, distinct numbers."""

    def opening(self, place: Place) -> Callable[[], Material]:
        """Return what opens them in another process: it can be pickled, and is of names alone.

        ``place`` keeps what has no name.
        """


class Stored:
    """The images of a source, as `omearrow_ds.convert` writes them.

    Parameters
    ----------
    source
        An open source; images that have a checksum are verified.
    checksum
        Whether each gets one: the one that is stored, else a new one.
    """

    def __init__(self, source: BaseSource, *, checksum: bool) -> None:
        self.source, self._hasher = source, Hasher() if checksum else None
        self.image_ids, self.shapes, self.dtypes = source.image_ids, source.shapes, source.dtypes
        self.columns, self.checksums = source.columns, source.checksums
        self.options: Mapping[str, Any] = {}
        self._verified = verified_where_stored(source)
        self._known = [None] * len(source) if self.checksums is None else self.checksums.to_pylist()

    def images(self, numbers: Array) -> Iterator[codec.Image]:
        """Yield the images of sorted, distinct numbers."""
        for some in _chunks(numbers, image_bytes(self.shapes[numbers], [self.dtypes[n] for n in numbers.tolist()])):
            views = self._verified.views(some.tolist())
            yield from (self._image(number, pixels) for number, pixels in zip(some.tolist(), views, strict=True))

    def in_order(self) -> Iterator[codec.Image]:
        """Yield all images in order: each stored block is read once, and may be used again for the next."""
        for start, images in self._verified.blocks():
            yield from (self._image(number, pixels) for number, pixels in enumerate(images, start=start))

    def _image(self, number: int, pixels: Array) -> codec.Image:
        checksum = None if self._hasher is None else self._known[number] or self._hasher.checksum(pixels)
        return codec.Image(pixels, self.image_ids[number], self.source.metadata(number), checksum)

    def opening(self, place: Place) -> Callable[[], Material]:
        """Return what opens them in another process."""
        del place
        return partial(_stored, opening_of(self.source), checksum=self._hasher is not None)


def _stored(opening: Callable[[], BaseSource], *, checksum: bool) -> Material:
    return Stored(opening(), checksum=checksum)


def opening_of(source: BaseSource) -> Callable[[], BaseSource]:
    """Return what opens a source in another process."""
    return source.opened_by or partial(_itself, source)


def _itself(source: BaseSource) -> BaseSource:
    return source


def as_ordered(material: Material, numbers: Array) -> Iterator[codec.Image]:
    """Yield images in any order of distinct numbers: so many are held that those of one stored block are read together.

    Sorted ones are handed on as they come.
    """
    if bool((np.diff(numbers) > 0).all()):
        yield from material.images(numbers)
        return
    sizes_bytes = image_bytes(material.shapes[numbers], [material.dtypes[n] for n in numbers.tolist()])
    for some in _chunks(numbers, sizes_bytes):
        order = np.argsort(some)
        held = dict(zip(some[order].tolist(), material.images(some[order]), strict=True))
        yield from (held.pop(number) for number in some.tolist())


def _chunks(numbers: Array, sizes_bytes: Array) -> Iterator[Array]:
    """Yield runs of numbers whose images are held at once, at least one."""
    ends = np.cumsum(sizes_bytes)
    first = 0
    while first < len(numbers):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + HELD_BYTES, side="right")))
        yield numbers[first:stop]
        first = stop
