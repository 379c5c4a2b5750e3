"""`StoredImages`: images of an open source, read on demand, cached within a limit, or decoded into memory."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from omearrow_ds.dataset.cuda import DeviceSamples, sent
from omearrow_ds.dataset.preload import Fingerprint, PixelCache, preload_progress
from omearrow_ds.dataset.shared_memory import SharedBlock
from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.kernels.compiled import worth
from omearrow_ds.kernels.stacks import PageRequests, Stacks
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.verified import verified_where_stored

Instance = TypeVar("Instance")


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
    """Thread-safe LRU cache of decoded images by index, without images larger than the limit."""

    def __init__(self, max_bytes: int) -> None:
        self.info = CacheInfo(0, 0, 0, 0, max_bytes)
        self._images, self._lock = OrderedDict[int, Array](), threading.Lock()

    def get(self, indices: Sequence[int], fetch: Callable[[list[int]], Sequence[Array]]) -> list[Array]:
        """Return the images of distinct ``indices``, which callers must not change; fetch absent ones in one call."""
        with self._lock:
            images = {index: self._images.pop(index) for index in indices if index in self._images}
            self._images.update(images)  # Now the last ones.
        missing = [index for index in indices if index not in images]
        fetched = dict(zip(missing, fetch(missing), strict=True)) if missing else {}
        with self._lock:
            hits, misses, _, held_bytes, max_bytes = self.info
            for index, image in fetched.items():
                if index not in self._images and image.nbytes <= max_bytes:
                    # A view would keep its whole base array alive.
                    self._images[index] = image if image.flags.owndata else image.copy()
                    held_bytes += image.nbytes
                while held_bytes > max_bytes:
                    held_bytes -= self._images.popitem(last=False)[1].nbytes
            self.info = CacheInfo(hits + len(images), misses + len(missing), len(self._images), held_bytes, max_bytes)
        images |= fetched
        return [images[index] for index in indices]


class PreloadOptions(NamedTuple):
    # cache_bytes, cache_dir, progress, verify: see `omearrow_ds.OMEArrowDataset`.
    cache_bytes: int = 0
    cache_dir: Path | None = None
    progress: bool | None = None
    verify: bool | None = None
    fingerprint: Fingerprint | None = None  # `collection_fingerprint` before opening; by default, before decoding.


class StoredImages:
    """Images of an open source, on demand, decoded into memory, or on a device."""

    def __init__(self, source: Images, options: PreloadOptions) -> None:
        header = source.header
        self.options = options
        self._source: Images | None = source
        self._pickled_source = b""  # To open the source in a process that unpickled this.
        self.path, self.format_name, self._fingerprint = header.path, header.format.name, header.guard.fingerprint
        self.shapes, self.dtypes, self.image_ids = header.shapes, list(header.dtypes), header.image_ids
        self.part_layout = header.part_layout
        self.cache: PixelCache | None = None
        self.on_device: DeviceSamples | None = None

    @property
    def source(self) -> Images:
        """Source of the images; a process that unpickled the collection opens the source at first use."""
        if self._source is None:
            source: Images = pickle.loads(self._pickled_source)  # noqa: S301  # Pickled by this class.
            # Also for equal shapes: changed images would get the targets of the previous ones.
            if source.header.guard.fingerprint != self._fingerprint:
                raise FormatError(f"{self.path}: the file changed after it was opened; create the dataset again")
            self._source = source
        return self._source

    @property
    def verified_source(self) -> Images:
        """Source for preloading: with ``verify=None``, images with a stored checksum are verified."""
        return verified_where_stored(self.source) if self.options.verify is None else self.source

    @property
    def image_bytes(self) -> Array:
        return image_bytes(self.shapes, self.dtypes)

    @property
    def _is_read_once(self) -> bool:
        """Whether each access to an image reads it from the source."""
        return self.cache is None and self.on_device is None and self.image_cache is None

    @property
    def is_read(self) -> bool:
        """Whether samples are read from files, including a memory-mapped file with preloaded pixels."""
        return self.on_device is None and (self.cache is None or not self.cache.block.writable)

    def image(self, position: int) -> Array:
        """Return one whole image (T, C, Z, Y, X), read-only."""
        return self._images([position])[0]

    def _images(self, positions: list[int]) -> Sequence[Array]:
        """Return whole images of sorted, distinct ``positions``, from memory or the source; read-only."""
        if self.on_device is not None:
            return self.on_device.images(positions)
        if self.cache is not None:
            return [self.cache[position] for position in positions]
        return self._fetch(positions) if self.image_cache is None else self.image_cache.get(positions, self._fetch)

    def _fetch(self, positions: list[int], regions: Sequence[Region] | None = None) -> list[Array]:
        return self.source.read(positions, regions)

    def _distinct(self, positions: list[int]) -> dict[int, Array]:
        distinct = sorted(set(positions))
        return dict(zip(distinct, self._images(distinct), strict=True))

    @cached_property
    def image_cache(self) -> ImageCache | None:
        """Cache of recently used images, or None without ``cache_bytes``."""
        return ImageCache(self.options.cache_bytes) if self.options.cache_bytes else None

    @cached_property
    def page_requests(self) -> PageRequests:
        """Rule that decides for which batches to request pages or files in advance."""
        return PageRequests()

    def mapped_stacks(self) -> Stacks | None:
        """Return all images if their pixels are preloaded or memory-mapped, otherwise None."""
        if self.on_device is not None:
            return None
        if self.cache is None:
            stacks = self.source.mapped_stacks()
        else:
            stack = self.cache.stack()
            stacks = None if stack is None else Stacks([stack], is_mapped=not self.cache.block.writable)
        if stacks is not None and stacks.requests is not None:
            stacks.requests = self.page_requests
        return stacks

    def _decoded(self) -> PixelCache:
        _, folder, progress, _, fingerprint = self.options
        return PixelCache.load(self.verified_source, folder, fingerprint, progress=progress)

    def _load(self) -> None:
        self.cache = self._decoded()
        worth(self.cache.block.size_bytes)  # Starts an epoch of many images with compiled loops.

    def _sent(self, device: torch.device) -> torch.Tensor:
        """Return all images of one shape and dtype as a tensor on a device."""
        source, shape = self.verified_source, (len(self.shapes), *self.shapes[0].tolist())
        if self.options.cache_dir is not None:
            stack = self._decoded().stack()
            assert stack is not None
            return sent([(0, stack)], shape, self.dtypes[0], device, None)
        with preload_progress(source, self.options.progress) as done:
            return sent(source.stream(), shape, self.dtypes[0], device, done)

    def copy(self, **changes: Any) -> Self:
        """Return a copy with changed attributes, without computed ones and pixels on a device."""
        return copy_with(self, **{"on_device": None, **changes})

    def on_demand(self, source: Images | None = None, cache_dir: Path | None = None, *, progress: bool = False) -> Self:
        """Return a copy that reads images on demand from ``source``, by default the source of this collection."""
        opened = self.source if source is None else source
        options = self.options._replace(cache_dir=cache_dir, progress=progress, fingerprint=None)
        identity = {"path": opened.header.path, "_fingerprint": opened.header.guard.fingerprint}
        return self.copy(cache=None, options=options, _source=None, _pickled_source=pickle.dumps(opened), **identity)

    def preloaded(self, folder: Path | None, *, progress: bool) -> Self:
        """Return a copy with all pixels decoded, into memory or a memory-mapped file in ``folder``."""
        copied = self.on_demand(cache_dir=folder, progress=progress)
        copied._load()  # noqa: SLF001  # Same class.
        return copied

    def first(self, count: int, block: SharedBlock) -> Self:
        """Return a collection of the first ``count`` images, with decoded pixels from ``block``."""
        shapes, dtypes = self.shapes[:count], self.dtypes[:count]
        cache, image_ids = PixelCache(shapes, dtypes, block), self.image_ids[:count]
        return self.on_demand().copy(shapes=shapes, dtypes=dtypes, image_ids=image_ids, cache=cache)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with a pickled source and block; refuse pixels on a device, which would be copied."""
        if self.on_device is not None:
            problem = f"the pixels are on {self.on_device.device}, and each worker process would copy them"
            remedy = "leave out num_workers, or create the dataset in the process that uses it"
            raise ArgumentError(problem, path=self.path, option="num_workers", remedy=remedy)
        state = stored_attributes(self)
        if self._source is not None:
            state |= {"_source": None, "_pickled_source": pickle.dumps(self._source)}
        if not any(self.shapes.strides):  # One broadcast row, which NumPy would pickle N times.
            state["shapes"] = self.shapes[:1], len(self.shapes)
        block = None if self.cache is None else self.cache.block
        options = self.options._replace(progress=False, fingerprint=None)
        return {**state, "cache": (self.cache is not None, block), "options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_preloaded, block = state["cache"]
        vars(self).update(state, cache=None)
        if isinstance(self.shapes, tuple):
            self.shapes = np.broadcast_to(self.shapes[0], (self.shapes[1], self.shapes[0].shape[1]))
        if block is not None:
            self.cache = PixelCache(self.shapes, self.dtypes, block)
        elif is_preloaded:  # The process of the block has ended.
            self._load()


def stored_attributes(instance: object) -> dict[str, Any]:
    """Return the attributes of an object, without those that this package computes at first access."""
    owners = [owner for owner in type(instance).__mro__ if owner.__module__.startswith("omearrow_ds.")]
    members = chain.from_iterable(vars(owner).items() for owner in owners)
    computed = {name for name, member in members if isinstance(member, cached_property)}
    return {name: value for name, value in vars(instance).items() if name not in computed}


def copy_with(original: Instance, **changes: Any) -> Instance:
    """Return a shallow copy with changed attributes, without computed ones and without calling pickling methods."""
    copied = object.__new__(type(original))
    vars(copied).update(stored_attributes(original) | changes)
    return copied
