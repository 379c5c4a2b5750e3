"""`StoredSamples`: what both datasets share: opening, preloading, indices, cutting, scaling and targets, in NumPy."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch.utils.data import Dataset

from omearrow_ds.axes import Cut, Pick, SampleAxes
from omearrow_ds.dataset.cache_dir import Seen, look
from omearrow_ds.dataset.gather import FLOAT32, DecodedRows, divisor_of, one_by_one, scale
from omearrow_ds.dataset.image_cache import CacheInfo, ImageCache
from omearrow_ds.dataset.preload import PixelCache, decoded_bytes
from omearrow_ds.dataset.targets import Target, Targets
from omearrow_ds.errors import ArgumentError, FormatError, ImageIndexError, MemoryLimitError
from omearrow_ds.resources import preload_limit_bytes
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.protocol import OpenOptions, StrPath
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.verified import verified_where_stored

Array = np.ndarray[Any, Any]
Preload = bool | Literal["auto"]
_INDICES_SHOWN = 16
_OURS = "omearrow_ds.dataset.dataset"
_MADE_ANEW = ("_rows", "_recent", "_cuts", "_pool")  # in a process that unpickled a dataset


@functools.cache
def _options() -> set[str]:
    """Return the names of what a dataset is made with, but for its path, which it tells."""
    return {"transform", *inspect.signature(StoredSamples).parameters, *OpenOptions.__annotations__} - {"path"}


class StoredSamples(Dataset[Any]):
    """Base of `OMEArrowDataset` and `OMEArrowDatasetNumpy`."""

    def __init__(
        self,
        path: StrPath,
        format: str | None = None,  # noqa: A002  # the public name
        *,
        preload: Preload = True,
        axes: str = "CYX",
        select: Mapping[str, Pick] | None = None,
        crop_size: tuple[int, int] | None = None,
        normalize: bool = True,
        target: Target | None = None,
        max_bytes: int | None = None,
        cache_bytes: int = 0,
        cache_dir: StrPath | None = None,
        progress: bool | None = None,
        **opening: Unpack[OpenOptions],
    ) -> None:
        if not isinstance(preload, bool | np.bool_) and preload != "auto":
            raise ArgumentError(f"preload={preload!r}; it must be True, False or 'auto'")
        if max_bytes is not None and (not isinstance(max_bytes, int | np.integer) or max_bytes < 0):
            raise ArgumentError(f"max_bytes={max_bytes!r}; it must be a number of bytes, or None")
        if select is not None and not isinstance(select, Mapping):
            raise ArgumentError(f"select={select!r}; it must be a mapping of axes, e.g. {{'C': [0, 2]}}")
        if not isinstance(cache_bytes, int | np.integer) or cache_bytes < 0:
            raise ArgumentError(f"cache_bytes={cache_bytes!r}; it must be a number of bytes, 0 for no cache")
        if cache_bytes and preload not in (False, "auto"):
            raise ArgumentError("cache_bytes= is for access on demand; pass preload=False or 'auto' with it")
        if cache_dir is not None and not (isinstance(cache_dir, str | os.PathLike) and preload):
            raise ArgumentError(f"cache_dir={cache_dir!r}; it must be a folder, for preload=True or 'auto'")
        self._sample_axes = SampleAxes(axes, None if select is None else dict(select), crop_size)
        self._normalize = bool(normalize)
        self._cache_dir = None if cache_dir is None else Path(cache_dir).absolute()
        seen = None if cache_dir is None else look(Path(path))
        self._verify, self._progress = opening.get("verify"), progress
        source = open_source(path, format, **opening)
        self._source: BaseSource | None = source
        self._opening = b""  # how to open it, in a process that unpickled the dataset
        self.path, self._format_name, self._stamp = source.path, source.format.name, source.stamp
        self._shapes, self._dtypes, self._image_ids = source.shapes, list(source.dtypes), source.image_ids
        self._plan()
        self._targets = None if target is None else Targets(source, target)
        self._cache = self._preload(preload, max_bytes, seen)
        self._cache_bytes = int(cache_bytes)

    def _plan(self) -> None:
        """Work out the cut of every distinct image shape, refusing what does not fit before any pixel is read."""
        rows = [tuple(shape) for shape in self._shapes.tolist()]
        cuts: dict[tuple[int, ...], Cut] = {}
        for index, shape in enumerate(rows):
            if shape not in cuts:
                cuts[shape] = self._sample_axes.cut(shape, f"{self.path}: image {index}")
        self._cuts = [cuts[shape] for shape in rows]
        self._divisors = [divisor_of(dtype) if self._normalize else None for dtype in self._dtypes]
        kinds = {(cut.shape, self._sample_dtype(dtype)) for cut, dtype in zip(self._cuts, self._dtypes, strict=True)}
        self._one_kind = next(iter(kinds)) if len(kinds) == 1 else None

    def _preload(self, preload: Preload, max_bytes: int | None, seen: Seen | None) -> PixelCache | None:
        if not preload:
            return None
        limit = preload_limit_bytes() if max_bytes is None else max_bytes
        if self.nbytes <= limit:
            cache = PixelCache.load(self.verified_source, self._cache_dir, seen, progress=self._progress)
            self.source.close()
            return cache
        if preload == "auto":
            return None
        msg = (
            f"{self.path}: preloading needs {self.nbytes:,} bytes, allowed are {limit:,} "
            f"({'max_bytes' if max_bytes is not None else 'half of the memory available now'}); "
            f"raise max_bytes, or pass preload=False or 'auto'"
        )
        raise MemoryLimitError(msg)

    def _sample_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return FLOAT32 if self._normalize else dtype

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but no option: it was worked in when the dataset was made, and would do nothing now."""
        ours = type(self).__module__ == _OURS  # a subclass may have one of its own by that name
        if ours and not name.startswith("_") and name in _options():
            msg = (
                f"{name} of a dataset is fixed when it is made; make another with {name}=..., and of a split's part "
                f"Subset(another, part.indices): with cache_dir= they share one copy of the pixels"
            )
            raise ArgumentError(msg)
        super().__setattr__(name, value)

    @property
    def source(self) -> BaseSource:
        """The open source; in a process that unpickled the dataset it is opened at its first use."""
        if self._source is None:
            source: BaseSource = pickle.loads(self._opening)  # noqa: S301  # of our own making
            # Others of the same shapes too: they would be given the targets of those that were there before.
            if source.stamp != self._stamp:
                raise FormatError(f"{self.path}: was replaced or changed since it was opened; make the dataset again")
            self._source = source
        return self._source

    @property
    def verified_source(self) -> BaseSource:
        """The source as preloading reads it: with ``verify=None``, what it stores of checksums is compared."""
        return verified_where_stored(self.source) if self._verify is None else self.source

    @property
    def preloaded(self) -> bool:
        """Whether the pixels are held decoded in memory."""
        return self._cache is not None

    @property
    def calls(self) -> bool:
        """Whether a sample calls a function of the user's, which may take long, or draw random numbers."""
        return self._targets is not None and not self._targets.listed

    @property
    def image_ids(self) -> Sequence[str]:
        """One id an image."""
        return self._image_ids

    @property
    def nbytes(self) -> int:
        """Bytes of all decoded images, preloaded or not."""
        return decoded_bytes(self._shapes, self._dtypes)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """One sample's shape, or None if samples differ (or there are none)."""
        shapes = {cut.shape for cut in self._cuts}
        return shapes.pop() if len(shapes) == 1 else None

    def __len__(self) -> int:
        return len(self._shapes)

    def _position(self, index: Any) -> int:
        """Return ``index`` counted from the front, or raise `ImageIndexError`."""
        try:
            position: int = index.__index__()
        except (AttributeError, TypeError):
            raise ImageIndexError(f"{self.path}: sample index {index!r} is no integer") from None
        count = len(self._shapes)
        if -count <= position < count:
            return position if position >= 0 else position + count
        raise ImageIndexError(f"{self.path}: sample index {position} is outside the {count} images")

    def _positions(self, indices: Sequence[Any]) -> list[int]:
        """Return ``indices`` counted from the front, or raise `ImageIndexError`."""
        if set(map(type, indices)) == {int} and min(indices) >= 0 and max(indices) < len(self._shapes):
            return list(indices)
        return [self._position(index) for index in indices]

    def _note(self, error: Exception, indices: Sequence[Any]) -> None:
        """Say in an error's text, which a worker sends along, what was being made when it was raised."""
        shown = ", ".join(map(str, indices[:_INDICES_SHOWN])) + (", ..." if len(indices) > _INDICES_SHOWN else "")
        error.add_note(f"This was raised making sample {shown} of {self.path} (format {self._format_name})")

    def _sample(self, position: int) -> Array:
        """Return one sample in memory of its own."""
        rows = self._rows
        if rows is not None:
            return rows.sample(position)
        return self._scaled(self._images([position])[0], position)

    def _batch(self, positions: list[int]) -> Array | list[Array]:
        """Return the samples of ``positions``: stacked in one array if they are all of one shape and dtype."""
        if self._one_kind is None or not positions:
            images = self._distinct(positions)
            return [self._scaled(images[position], position) for position in positions]
        shape, dtype = self._one_kind
        samples = self._allocate((len(positions), *shape), dtype)
        threads = torch.get_num_threads()
        if self._rows is not None:
            self._rows.batch(positions, samples, threads)
            return samples
        images = self._distinct(positions)

        def fill(place: int) -> None:
            position = positions[place]
            scale(self._cuts[position](images[position]), self._divisors[position], samples[place])

        one_by_one(fill, samples, threads)
        return samples

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory for a batch."""
        return np.empty(shape, dtype)

    def _distinct(self, positions: list[int]) -> dict[int, Array]:
        """Return the whole images of ``positions`` by position."""
        distinct = sorted(set(positions))
        return dict(zip(distinct, self._images(distinct), strict=True))

    def _scaled(self, image: Array, position: int) -> Array:
        view = self._cuts[position](image)
        sample = np.empty(view.shape, self._sample_dtype(view.dtype))
        scale(view, self._divisors[position], sample)
        return sample

    def _images(self, positions: list[int]) -> Sequence[Array]:
        """Return the whole images of sorted, distinct ``positions``, from memory or from the source; read-only."""
        if self._cache is not None:
            return [self._cache[position] for position in positions]
        return self._fetch(positions) if self._recent is None else self._recent.get(positions, self._fetch)

    def _fetch(self, positions: list[int]) -> Sequence[Array]:
        return self.source.views(positions)

    @cached_property
    def _recent(self) -> ImageCache | None:
        return ImageCache(self._cache_bytes) if self._cache_bytes else None

    @property
    def cache_info(self) -> CacheInfo | None:
        """Hits, misses and bytes held of ``cache_bytes=`` in this process, None without it; workers count apart.

        A memory-mapped file that is read where it lies, and a preloaded data set, never ask the cache.
        """
        return None if self._recent is None else self._recent.info

    @cached_property
    def _rows(self) -> DecodedRows | None:
        """All samples as views of memory that holds them decoded; None if there is none, or they differ in shape."""
        if self._one_kind is None or len(set(self._dtypes)) > 1 or len(set(map(id, self._cuts))) > 1:
            return None
        cut = self._cuts[0]
        stacks = self.source.stacks() if self._cache is None else [self._cache.stack()]
        if cut.picks or not stacks:
            return None
        parts = [cut(stack) for stack in stacks if stack is not None]
        mapping = self.source.mapping if self._cache is None else None
        guard = None if mapping is None else mapping.refuse_cut
        return DecodedRows(parts, self._divisors[0], self._one_kind[1], guard)

    def __getstate__(self) -> dict[str, Any]:
        """Carry how to reopen and the handle of the shared block, never pixels or connections."""
        state = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
        block = None if self._cache is None else self._cache.block
        opening = self._opening if self._source is None else pickle.dumps(self._source)
        own = {"_source": None, "_opening": opening, "_cache": (self.preloaded, block), "_progress": False}
        return {**state, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        preloaded, block = state.pop("_cache")
        self.__dict__.update(state)
        self._plan()
        self._cache = None
        if preloaded:
            if block is None:  # its process has ended
                seen = None if self._cache_dir is None else look(self.path)
                self._cache = PixelCache.load(self.verified_source, self._cache_dir, seen, progress=self._progress)
            else:
                self._cache = PixelCache(self._shapes, self._dtypes, block)

    def __repr__(self) -> str:
        held = "preloaded" if self.preloaded else "on demand"
        return f"<{type(self).__name__} of {len(self)} images, {self._format_name}, {held}, at {str(self.path)!r}>"
