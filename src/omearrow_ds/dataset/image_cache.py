"""`ImageCache`: recently used images of on-demand access, within a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class CacheInfo(NamedTuple):
    """Hits, misses and size of a cache in this process."""

    hits: int
    misses: int
    images: int
    held_bytes: int
    max_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits as a share of all requests; 0.0 without requests."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0


class ImageCache:
    """LRU cache of decoded images by index.

    Thread-safe. An image larger than the limit is returned but not cached.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[int, Array] = OrderedDict()
        self._held_bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    @property
    def info(self) -> CacheInfo:
        """Counts since the cache was created, and its current size."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._images), self._held_bytes, self._max_bytes)

    def get(self, indices: Sequence[int], fetch: Callable[[list[int]], Sequence[Array]]) -> list[Array]:
        """Return the images of distinct ``indices``; images that are not cached are fetched in one call.

        Callers must not change the images, as the cache continues to use them.
        """
        images: dict[int, Array] = {}
        with self._lock:
            for index in indices:
                image = self._images.get(index)
                if image is not None:
                    self._images.move_to_end(index)
                    images[index] = image
        missing = [index for index in indices if index not in images]
        fetched = dict(zip(missing, fetch(missing), strict=True)) if missing else {}
        with self._lock:
            self._hits += len(images)
            self._misses += len(missing)
            for index, image in fetched.items():
                self._keep(index, image)
        return [images[index] if index in images else fetched[index] for index in indices]

    def _keep(self, index: int, image: Array) -> None:
        if index in self._images or image.nbytes > self._max_bytes:
            return
        # A view would keep its whole base array alive.
        self._images[index] = image if image.flags.owndata else image.copy()
        self._held_bytes += image.nbytes
        while self._held_bytes > self._max_bytes:
            self._held_bytes -= self._images.popitem(last=False)[1].nbytes
