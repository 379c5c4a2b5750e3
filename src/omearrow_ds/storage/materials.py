"""`Material` of a collection in parts: images by index, which any process can open and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import encode as codec
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.checksums import Hasher
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.parts_stores import PartsStore
from omearrow_ds.storage.verified import verified_where_stored

Image = codec.Image  # Item that a material yields.
HELD_BYTES = 2**25  # Decoded images in memory at once if they are written in another order.


class Material(Protocol):
    """Images to be written, with their ids, shapes, dtypes and columns, and methods that read the pixels.

    Attributes
    ----------
    source
        Source that the images are read from.
    image_ids, shapes, dtypes, columns, checksums
        Attributes as in a source, for the written images.
    options
        Options, as JSON values, that affect the written pixels in addition to the source.
    """

    source: BaseSource
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None
    options: Mapping[str, Any]

    def images(self, numbers: Array) -> Iterator[codec.Image]:
        """Yield the images at sorted, distinct indices."""

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        """Return a picklable function that opens the images in another process by file names only.

        Data without a file name is written to ``store``.
        """


class Stored:
    """Images of a source that `omearrow_ds.convert` writes.

    Parameters
    ----------
    source
        An open source; images that have a checksum are verified.
    checksum
        Whether each image gets a checksum: the stored one or, if none is stored, a new one.
    """

    def __init__(self, source: BaseSource, *, checksum: bool) -> None:
        self.source, self._hasher = source, Hasher() if checksum else None
        self.image_ids, self.shapes, self.dtypes = source.image_ids, source.shapes, source.dtypes
        self.columns, self.checksums = source.columns, source.checksums
        self.options: Mapping[str, Any] = {}
        self._verified = verified_where_stored(source)
        self._known = [None] * len(source) if self.checksums is None else self.checksums.to_pylist()

    def images(self, numbers: Array) -> Iterator[codec.Image]:
        """Yield the images at sorted, distinct indices."""
        sizes_bytes = image_bytes(self.shapes[numbers], [self.dtypes[index] for index in numbers.tolist()])
        for part in split_by_bytes(sizes_bytes, HELD_BYTES):
            indices = numbers[part].tolist()
            yield from map(self._image, indices, self._verified.read_arrays(indices))

    def in_order(self) -> Iterator[codec.Image]:
        """Yield all images in order; use an image before requesting the next one, which may reuse its memory."""
        for start, images in self._verified.stream():
            yield from (self._image(number, pixels) for number, pixels in enumerate(images, start=start))

    def _image(self, number: int, pixels: Array) -> codec.Image:
        checksum = None if self._hasher is None else self._known[number] or self._hasher.checksum(pixels)
        return codec.Image(pixels, self.image_ids[number], self.source.metadata(number), checksum)

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        """Return a function that opens the images in another process."""
        del store
        return partial(_stored, opening_of(self.source), checksum=self._hasher is not None)


def _stored(opening: Callable[[], BaseSource], *, checksum: bool) -> Material:
    return Stored(opening(), checksum=checksum)


def opening_of(source: BaseSource) -> Callable[[], BaseSource]:
    """Return a function that opens ``source`` in another process."""
    return source.opened_by or partial(_itself, source)


def _itself(source: BaseSource) -> BaseSource:
    return source


def as_ordered(material: Material, numbers: Array) -> Iterator[codec.Image]:
    """Yield images in the order of distinct ``numbers``; unsorted images are read in sorted groups and held in memory.

    Images at sorted indices are yielded as they are read.
    """
    if bool((np.diff(numbers) > 0).all()):
        yield from material.images(numbers)
        return
    sizes_bytes = image_bytes(material.shapes[numbers], [material.dtypes[n] for n in numbers.tolist()])
    for part in split_by_bytes(sizes_bytes, HELD_BYTES):
        indices = numbers[part]
        order = np.sort(indices)
        images = dict(zip(order.tolist(), material.images(order), strict=True))
        yield from (images.pop(index) for index in indices.tolist())
