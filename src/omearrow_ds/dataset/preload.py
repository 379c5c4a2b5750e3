"""`PixelCache`: all decoded pixels of a source in one flat block of shared memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

import numpy as np
from tqdm import tqdm

from omearrow_ds.dataset.cache_dir import Fingerprint, collection_fingerprint, open_or_build
from omearrow_ds.dataset.shared_block import SharedBlock
from omearrow_ds.resources import image_bytes, one_of, pixel_count
from omearrow_ds.storage.formats._base import Done, Images
from omearrow_ds.storage.verified import VerifiedSource

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64


class ImageKinds(NamedTuple):
    """Groups of similar images: first image and size of each group, and group of each image (None for one group)."""

    first: list[int]
    of_each: np.ndarray[Any, Any] | None
    counts: list[int]

    def spread(self, values: list[Any]) -> list[Any]:
        """Return one value per image from one value per group."""
        return values * self.counts[0] if self.of_each is None else [values[kind] for kind in self.of_each.tolist()]


def group_into_kinds(
    shapes: np.ndarray[Any, Any], dtypes: Sequence[np.dtype[Any]], *others: np.ndarray[Any, Any] | None
) -> ImageKinds:
    """Group images that are equal in shape, dtype and all codes of ``others``, in the order of their first images."""
    count = len(shapes)
    if not count:
        return ImageKinds([], np.zeros(0, np.int64), [])
    keys = [*shapes.T, *(other for other in others if other is not None)]
    if not one_of(dtypes):
        number = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
        keys.append(np.fromiter(map(number.__getitem__, dtypes), np.int64, count))
    keys = [codes for codes in keys if (codes != codes[0]).any()]
    if not keys:
        return ImageKinds([0], None, [count])
    kinds = np.zeros(count, np.int64)
    for codes in keys:
        distinct = np.unique(codes, return_inverse=True)[1].reshape(-1)
        kinds = np.unique(kinds * (int(distinct.max()) + 1) + distinct, return_inverse=True)[1].reshape(-1)
    _, first, counts = np.unique(kinds, return_index=True, return_counts=True)
    order = np.argsort(first)
    return ImageKinds(first[order].tolist(), np.argsort(order)[kinds], counts[order].tolist())


class PixelCache:
    """Decoded images at offsets in one `SharedBlock`.

    ``shapes`` are (N, 5) int64, (T, C, Z, Y, X) of each image. Without ``block``, a new one is created.
    """

    def __init__(self, shapes: Array, dtypes: Sequence[np.dtype[Any]], block: SharedBlock | None = None) -> None:
        self.uniform = _uniform(shapes, dtypes)
        self._offsets = _offsets(shapes, dtypes, uniform=self.uniform)
        self._shapes = [tuple(shape) for shape in shapes.tolist()]
        self._dtypes = list(dtypes)
        self.block = SharedBlock.create(self._offsets[-1]) if block is None else block

    @classmethod
    def load(
        cls,
        source: Images,
        folder: Path | None = None,
        fingerprint: Fingerprint | None = None,
        *,
        progress: bool | None = False,
    ) -> PixelCache:
        """Decode every image of ``source`` once, into memory or into a memory-mapped file in ``folder``.

        ``fingerprint`` is the result of `omearrow_ds.dataset.cache_dir.collection_fingerprint` before the source was
        opened; by default, it is computed before decoding.
        """
        shapes, dtypes = source.shapes, source.dtypes
        with PreloadProgressBar(source, progress) as bar:
            if folder is None:
                cache = cls(shapes, dtypes)
                cache.decode(source, bar.done)
                return cache
            built: list[SharedBlock] = []

            def build(block: SharedBlock) -> None:
                cls(shapes, dtypes, block).decode(source, bar.done)
                built.append(block)

            size_bytes = _offsets(shapes, dtypes, uniform=_uniform(shapes, dtypes))[-1]
            fingerprint = fingerprint or collection_fingerprint(source.path)
            cache = cls(shapes, dtypes, open_or_build(folder, source, fingerprint, size_bytes, build))
            if isinstance(source, VerifiedSource) and not built:  # Decoded earlier, without verification.
                source.check_all(cache, f"pixels kept in {folder} of {source.path}", bar.done)
            return cache

    def decode(self, source: Images, done: Done | None = None) -> None:
        stack = self.stack()
        source.decode_into(self if stack is None else stack, done)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Array:
        pixels = self.block.bytes[self._offsets[index] : self._offsets[index + 1]]
        dtype, shape = self._dtypes[index], self._shapes[index]
        return pixels[: pixel_count(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def stack(self) -> Array | None:
        """Return all images as one view (N, T, C, Z, Y, X), or None if they differ in shape or dtype."""
        if not self.uniform:
            return None
        return self.block.bytes.view(self._dtypes[0]).reshape(len(self), *self._shapes[0])


class _ThreadlessBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Progress bar without a monitor thread, which would be unsafe if the process forks."""

    monitor_interval = 0
    _lock = threading.RLock()  # The default lock of tqdm would choose the start method of processes.


class PreloadProgressBar:
    """Progress bar that appears if decoding takes longer than 2 s; ``progress=None`` shows it only in a terminal.

    It counts images, or bytes if the source downloads them. The bar is created when it appears, because that takes as
    long as decoding some small images.
    """

    after_s = 2.0

    def __init__(self, source: Images, progress: bool | None) -> None:
        self._num_done, self._start_s = 0, monotonic()
        self._bar: _ThreadlessBar | None = None
        err = sys.stderr
        is_shown = err is not None and not err.closed and bool(progress or (progress is None and err.isatty()))
        is_whole = len(source) == source.row_count  # Otherwise, the number of bytes is unknown.
        self._fetches = source.part_fetches if is_shown and is_whole else None
        num_bytes = 0 if self._fetches is None else self._fetches.report(self._advance)
        total = {"total": num_bytes, "unit": "B", "unit_scale": True} if num_bytes else {"total": len(source)}
        self._options = {"desc": f"preloading {source.path.name}", "unit": "image", "leave": False, **total}
        self.done: Done | None = None if num_bytes or not is_shown else self._count_images

    def _count_images(self, first: int, stop: int) -> None:
        self._advance(stop - first)

    def _advance(self, count: int) -> None:
        self._num_done += count
        if self._bar is not None:
            self._bar.update(count)
        elif monotonic() - self._start_s > self.after_s:
            self._bar = _ThreadlessBar(initial=self._num_done, **self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fetches is not None:
            self._fetches.report(None)
        if self._bar is not None:
            self._bar.close()


def decoded_bytes(shapes: Array, dtypes: Sequence[np.dtype[Any]], kinds: ImageKinds | None = None) -> int:
    """Return the decoded size of all images in bytes; ``kinds`` is computed from shapes and dtypes if not passed."""
    kinds = kinds or group_into_kinds(shapes, dtypes)
    counted = zip(kinds.first, kinds.counts, strict=True)
    return sum(number * pixel_count(shapes[index].tolist()) * dtypes[index].itemsize for index, number in counted)


def _uniform(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> bool:
    return len(shapes) > 0 and bool((shapes == shapes[0]).all()) and len(set(dtypes)) == 1


def _offsets(shapes: Array, dtypes: Sequence[np.dtype[Any]], *, uniform: bool) -> list[int]:
    """Return N + 1 byte offsets: contiguous for a uniform collection, so that it is one array; otherwise aligned."""
    lengths = image_bytes(shapes, dtypes)
    if not uniform:
        lengths = -(-lengths // _ALIGNMENT) * _ALIGNMENT
    offsets: list[int] = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return offsets
