"""Uncompressed images at known offsets of a file, each in pieces of equal size at equal distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from omearrow_ds.kernels.stacks import Prefixes, Stacks
from omearrow_ds.storage.byte_source import Array, ByteRange, MappedFile


class OtherLayoutError(Exception):
    """Raised if bytes of a file do not have the expected layout, so that the library of the format must read them."""


@dataclass(frozen=True)
class PieceLayout:
    """Shape, dtype and arrangement in pieces of images that a file stores in the same way."""

    shape: tuple[int, ...]  # (T, C, Z, Y, X).
    dtype: np.dtype[Any]  # In the byte order of the file.
    num_pieces: int  # Pieces of equal size, in the order TCZYX; 0 for an image without pixels.
    prefixes: tuple[bytes, ...] = ()  # Expected bytes before each piece, of equal length; empty without such bytes.
    gap_bytes: int = 0  # Between two pieces without ``prefixes``.

    @cached_property
    def prefix_bytes(self) -> int:
        return len(self.prefixes[0]) if self.prefixes else 0

    @cached_property
    def piece_pixels(self) -> int:
        return math.prod(self.shape) // max(self.num_pieces, 1)

    @cached_property
    def piece_step(self) -> int:
        """Number of bytes from the start of a piece to the start of the next one."""
        return self.piece_pixels * self.dtype.itemsize + (self.prefix_bytes or self.gap_bytes)

    @cached_property
    def num_bytes(self) -> int:
        return max(0, self.num_pieces * self.piece_step - (self.prefix_bytes or self.gap_bytes))

    @cached_property
    def strides(self) -> tuple[int, ...] | None:
        """Strides in bytes along T, C, Z, Y and X; None if an image cannot be a view of the file."""
        if not self.num_pieces or not self.dtype.isnative:
            return None
        num_axes = next((n for n in range(6) if math.prod(self.shape[:n]) == self.num_pieces), None)
        if num_axes is None:
            return None
        steps = [self.dtype.itemsize * math.prod(self.shape[axis + 1 :]) for axis in range(num_axes, 5)]
        of_pieces = [self.piece_step * math.prod(self.shape[axis + 1 : num_axes]) for axis in range(num_axes)]
        return (*of_pieces, *steps)

    def has_prefixes(self, data: memoryview, start: int) -> bool:
        """Whether each piece of the image whose first pixel is at ``start`` has the expected bytes before it."""
        if not self.prefixes:
            return True
        first = start - self.prefix_bytes
        starts = range(first, first + self.num_pieces * self.piece_step, self.piece_step)
        return all(
            data[offset : offset + len(prefix)] == prefix for offset, prefix in zip(starts, self.prefixes, strict=False)
        )

    def image(self, data: memoryview | Array, start: int) -> Array:
        """Return the image whose first pixel is at ``start``, as a view if possible, else as a native copy."""
        if self.strides is not None:
            return np.ndarray(self.shape, self.dtype, data, start, self.strides)
        image: Array = self.stack(data, start, 1)[0]
        return image

    def stack(self, data: memoryview | Array, start: int, count: int) -> Array:
        """Return consecutive images as an array (count, T, C, Z, Y, X): a view if possible, else a native copy."""
        if self.strides is not None:
            strides = (self.num_pieces * self.piece_step, *self.strides)
            return np.ndarray((count, *self.shape), self.dtype, data, start, strides)
        dtype = self.dtype.newbyteorder("=")
        if not self.num_pieces:
            return np.empty((count, *self.shape), dtype)
        steps = (self.piece_step, self.dtype.itemsize)
        pieces: Array = np.ndarray((count * self.num_pieces, self.piece_pixels), self.dtype, data, start, steps)
        return pieces.astype(dtype, copy=False).reshape(count, *self.shape)


class ImageExtents:
    """Offsets of the first pixels of uncompressed images in a file, and their layouts, which equal images share."""

    def __init__(self, starts: Array, layouts: Sequence[PieceLayout]) -> None:
        self.starts, self.layouts = starts, layouts
        self._starts: list[int] = starts.tolist()
        self._is_checked = bytearray(len(starts))

    def ranges(self, rows: Sequence[int]) -> list[ByteRange]:
        """Return the byte range of each image, including the bytes before its first piece."""
        ranges = []
        for row in rows:
            start, layout = self._starts[row], self.layouts[row]
            ranges.append((start - layout.prefix_bytes, start + layout.num_bytes))
        return ranges

    def images(self, rows: Sequence[int], stored: Sequence[memoryview]) -> list[Array]:
        """Return images from the bytes of their `ranges`, as views if possible; prefixes are compared once."""
        images = []
        for row, data in zip(rows, stored, strict=True):
            layout = self.layouts[row]
            if not self._is_checked[row]:
                first = layout.prefix_bytes
                if not layout.has_prefixes(data, first) or len(data) < first + layout.num_bytes:
                    raise OtherLayoutError
                self._is_checked[row] = 1
            images.append(layout.image(data, layout.prefix_bytes))
        return images

    def check(self, data: Array, first: int, stop: int) -> None:
        """Raise `OtherLayoutError` if bytes before pieces of images ``first`` to ``stop - 1`` differ."""
        layout = self.layouts[first]
        if not layout.prefixes or b"\0" not in self._is_checked[first:stop]:
            return
        shape = (stop - first, layout.num_pieces, layout.prefix_bytes)
        image_step = self._starts[first + 1] - self._starts[first] if stop > first + 1 else 0
        strides = (image_step, layout.piece_step, 1)
        stored = np.ndarray(shape, np.uint8, data, self._starts[first] - layout.prefix_bytes, strides)
        if (stored != np.frombuffer(b"".join(layout.prefixes), np.uint8).reshape(shape[1:])).any():
            raise OtherLayoutError
        self._is_checked[first:stop] = b"\1" * (stop - first)

    def stack(self, data: Array, first: int, stop: int) -> Array:
        """Return images ``first`` to ``stop - 1``, which are consecutive and have one layout, without checking them."""
        return self.layouts[first].stack(data, self._starts[first], stop - first)

    def stacks(self, data: Array, first: int, stop: int) -> list[Array] | None:
        """Return images ``first`` to ``stop - 1`` of a mapped file, unchecked, in arrays with equal distances."""
        # Returns None if the images differ in layout, or cannot be views.
        layouts = self.layouts[first:stop]
        strides = layouts[0].strides if layouts else None
        if strides is None or any(layout is not layouts[0] for layout in layouts):
            return None
        steps = np.diff(self.starts[first:stop])
        bounds = [first, *(np.flatnonzero(np.diff(steps)) + first + 2).tolist(), stop]
        arrays = []
        for low, high in pairwise(bounds):
            if low < high:
                step = int(steps[low - first]) if high > low + 1 else 0
                shape = (high - low, *layouts[0].shape)
                arrays.append(np.ndarray(shape, layouts[0].dtype, data, self._starts[low], (step, *strides)))
        return arrays


def stack_images(
    arrays: Sequence[Array], layout: PieceLayout, mapping: MappedFile, refuse: Callable[[int], object]
) -> Stacks:
    """Return all images of a collection; the bytes before the pieces of an image are checked at its first use."""
    # ``refuse`` raises the error for an image with other prefixes.
    prefixes = None
    if layout.prefixes:
        distances = np.arange(layout.num_pieces) * layout.piece_step - layout.prefix_bytes
        expected = np.frombuffer(b"".join(layout.prefixes), np.uint8).reshape(layout.num_pieces, -1)
        prefixes = Prefixes(Stacks(arrays).addresses, distances, expected, refuse)
    return Stacks(arrays, mapping.refuse_changed, prefixes, is_mapped=True, file=mapping.file)
