"""`PixelCache`: all pixels of a source decoded into one flat block of memory that processes share."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omearrow_ds.axes import pixel_count
from omearrow_ds.source import ImageSource

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64


class SharedBlock:
    """Zeroed memory that other processes of the same user can map while this one lives.

    It is an anonymous file (``memfd_create``): it needs no room in ``/dev/shm`` and leaves nothing behind, however
    the process ends. Where the system has none, it is an unlinked-at-exit temporary file. Pickling carries the handle.
    """

    def __init__(self, descriptor: int, size_bytes: int, path: str | None = None) -> None:
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._path = path
        weakref.finalize(self, os.close, descriptor)
        self.bytes: Array = np.frombuffer(mmap.mmap(descriptor, max(size_bytes, 1)), np.uint8)[:size_bytes]

    @classmethod
    def create(cls, size_bytes: int) -> SharedBlock:
        """Return a new block."""
        if sys.platform == "linux":
            descriptor, path = os.memfd_create("omearrow_ds", os.MFD_CLOEXEC), None
        else:
            descriptor, path = tempfile.mkstemp(prefix="omearrow_ds-")
        os.truncate(descriptor, max(size_bytes, 1))
        block = cls(descriptor, size_bytes, path)
        if path is not None:
            weakref.finalize(block, Path(path).unlink, missing_ok=True)
        return block

    @classmethod
    def attach(cls, path: str, identity: tuple[int, int], size_bytes: int) -> SharedBlock | None:
        """Return the block of another process, or None if that process has ended."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        stat = os.fstat(descriptor)
        if (stat.st_dev, stat.st_ino, stat.st_size) != (*identity, max(size_bytes, 1)):
            os.close(descriptor)
            return None
        return cls(descriptor, size_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        stat = os.fstat(self._descriptor)
        path = self._path or f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return SharedBlock.attach, (path, (stat.st_dev, stat.st_ino), self.size_bytes)


class PixelCache:
    """Decoded images in one `SharedBlock`, each at an offset of its own.

    Parameters
    ----------
    shapes
        (N, 5) int64, (T, C, Z, Y, X) of each image.
    dtypes
        N pixel dtypes.
    block
        Block to use, of `size_bytes`; by default a new one.
    """

    def __init__(self, shapes: Array, dtypes: Sequence[np.dtype[Any]], block: SharedBlock | None = None) -> None:
        self.uniform = len(shapes) > 0 and bool((shapes == shapes[0]).all()) and len(set(dtypes)) == 1
        self._offsets = _offsets(shapes, dtypes, uniform=self.uniform)
        self._shapes = [tuple(shape) for shape in shapes.tolist()]
        self._dtypes = list(dtypes)
        self.block = SharedBlock.create(self._offsets[-1]) if block is None else block

    @classmethod
    def load(cls, source: ImageSource) -> PixelCache:
        """Decode every image of ``source`` once."""
        cache = cls(source.shapes, source.dtypes)
        stack = cache.stack()
        for start, images in source.scan():
            if stack is not None and isinstance(images, np.ndarray):
                stack[start : start + len(images)] = images
                continue
            for index, image in enumerate(images, start=start):
                cache[index][...] = image
        return cache

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Array:
        """Return image ``index`` (T, C, Z, Y, X) as a view of the block."""
        pixels = self.block.bytes[self._offsets[index] : self._offsets[index + 1]]
        dtype, shape = self._dtypes[index], self._shapes[index]
        return pixels[: pixel_count(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def stack(self) -> Array | None:
        """Return all images as one view (N, T, C, Z, Y, X), or None if they differ in shape or dtype."""
        if not self.uniform:
            return None
        return self.block.bytes.view(self._dtypes[0]).reshape(len(self), *self._shapes[0])


def decoded_bytes(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> int:
    """Return the bytes that the decoded pixels take."""
    return sum(pixel_count(shape) * dtype.itemsize for shape, dtype in zip(shapes.tolist(), dtypes, strict=True))


def _offsets(shapes: Array, dtypes: Sequence[np.dtype[Any]], *, uniform: bool) -> list[int]:
    """Return N + 1 byte offsets: end to end for a uniform collection, so that it is one array; else aligned."""
    offsets = [0]
    for shape, dtype in zip(shapes.tolist(), dtypes, strict=True):
        length = pixel_count(shape) * dtype.itemsize
        offsets.append(offsets[-1] + (length if uniform else -(-length // _ALIGNMENT) * _ALIGNMENT))
    return offsets
