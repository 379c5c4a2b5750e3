"""`OMEArrowDataset` and `OMEArrowDatasetNumpy`: stored images as map-style torch datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import default_collate

from omearrow_ds.axes import Pick
from omearrow_ds.dataset.batch import ASKERS, CollatedBatch, asked_for_whole
from omearrow_ds.dataset.handover import Pool, batch_array
from omearrow_ds.dataset.samples import Array, Preload, StoredSamples
from omearrow_ds.dataset.targets import Target
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.protocol import OpenOptions, StrPath


class OMEArrowDataset(StoredSamples):
    """Stored images as tensors.

    Parameters
    ----------
    path, format
        As in `open_images`.
    preload
        ``True`` decodes every image once into shared memory, ``False`` keeps nothing, ``"auto"`` preloads what fits
        ``max_bytes``. Samples are bit-identical either way.
    axes
        Axes of a sample, in its order; an axis left out must have length 1 after ``select``.
    select
        Indices picked of an axis: ``{"C": [0, 2], "Z": slice(10, 20), "T": 0}``.
    crop_size
        ``(height, width)`` of a centre crop, in pixels.
    normalize
        ``True``: float32, integer pixels divided by the largest value of their dtype, floating pixels unscaled.
        ``False``: the stored dtype.
    transform
        Called with each sample's tensor.
    target
        Name of a column, or a callable on a row of the columns (a dict); a sample is then ``(image, target)``.
    max_bytes
        Limit for preloading, in bytes of the whole images, whatever is selected or cropped of them; by default half of
        the memory available now.
    cache_bytes
        On demand, keep the images used last, up to this many bytes in each process; 0 keeps none. For stores whose
        random access is slow (DuckDB, compressed Parquet); `cache_info` tells the hit rate.
    cache_dir
        Folder for the decoded pixels: the first process that preloads writes them to a file there, all others, and the
        next run, map it. Ranks on one host then share one copy. It takes `nbytes` on disk until the file is deleted.
    progress
        Show a progress bar where preloading takes longer than two seconds; ``None`` shows it only in a terminal. A
        process that unpickles a dataset shows none.
    opening
        How to open the collection, as in `open_images`. Images are compared with their stored checksums, with
        ``verify=None`` those that have one, whenever pixels are preloaded, also where ``cache_dir`` has them, and on
        demand none; with ``verify=True`` every image, on demand at each access too; with ``verify=False`` none.

    Raises
    ------
    MemoryLimitError
        If ``preload=True`` and the decoded pixels exceed ``max_bytes``.
    AxesError
        If axes, selection or crop do not fit an image.
    ColumnError
        If there is no column ``target``, or it holds nulls.
    ChecksumError
        If an image that is verified is not the one that was written.
    """

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
        transform: Callable[[torch.Tensor], Any] | None = None,
        target: Target | None = None,
        max_bytes: int | None = None,
        cache_bytes: int = 0,
        cache_dir: StrPath | None = None,
        progress: bool | None = None,
        **opening: Unpack[OpenOptions],
    ) -> None:
        super().__init__(
            path,
            format,
            preload=preload,
            axes=axes,
            select=select,
            crop_size=crop_size,
            normalize=normalize,
            target=target,
            max_bytes=max_bytes,
            cache_bytes=cache_bytes,
            cache_dir=cache_dir,
            progress=progress,
            **opening,
        )
        if transform is not None and not callable(transform):
            raise ArgumentError(f"transform={transform!r}; it must be a callable on a sample's tensor")
        self._transform = transform

    @property
    def calls(self) -> bool:
        """Whether a sample calls a function of the user's, which may take long, or draw random numbers."""
        return super().calls or self._transform is not None

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: a tensor of the sample's own memory, or ``(tensor, target)``."""
        try:
            position = self._position(index)
            image = torch.from_numpy(self._sample(position))
            if self._transform is not None:
                image = self._transform(image)
            return image if self._targets is None else (image, self._targets[position])
        except Exception as error:
            self._note(error, [index])
            raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices`` in that order.

        A loader that shows them to nobody before it collates them gets one `CollatedBatch` in their place.
        """
        caller = sys._getframe(1)  # noqa: SLF001  # CPython's, as in `asked_for_whole`
        asked = caller.f_locals["self"].dataset if caller.f_code in ASKERS else self
        # One around this that hands on what it has not itself, or a subclass, makes samples of its own.
        if asked is not self or type(self).__getitem__ is not OMEArrowDataset.__getitem__:
            return [asked[index] for index in indices]
        try:
            positions = self._positions(indices)
            samples = self._batch(positions)
        except Exception as error:
            self._note(error, indices)
            raise
        stacked = torch.from_numpy(samples) if isinstance(samples, np.ndarray) else None
        if stacked is not None and self._transform is None and asked_for_whole():
            return [self._collated(stacked, positions)]
        images = [torch.from_numpy(sample) for sample in samples] if stacked is None else list(stacked.unbind(0))
        as_they_are = self._transform is None and self._targets is None
        return images if as_they_are else self._finished(images, positions)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return batch_array(shape, dtype, self._pool) if self._transform is None else np.empty(shape, dtype)

    @cached_property
    def _pool(self) -> Pool:
        return Pool()

    def _finished(self, images: list[Any], positions: list[int]) -> list[Any]:
        """Return the samples: images transformed, with their targets."""
        finished: list[Any] = []
        try:
            for image, position in zip(images, positions, strict=True):
                sample = image if self._transform is None else self._transform(image)
                finished.append(sample if self._targets is None else (sample, self._targets[position]))
        except Exception as error:
            self._note(error, positions[len(finished) :][:1])
            raise
        return finished

    def _collated(self, stacked: torch.Tensor, positions: list[int]) -> CollatedBatch:
        if self._targets is None:
            return CollatedBatch(stacked)
        targets = self._finished([stacked] * len(positions), positions)
        return CollatedBatch([stacked, default_collate([target for _, target in targets])])


class OMEArrowDatasetNumpy(StoredSamples):
    """Stored images as NumPy arrays: `OMEArrowDataset` without tensors and without ``transform``."""

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: an array of the sample's own memory, or ``(array, target)``."""
        try:
            position = self._position(index)
            image = self._sample(position)
            return image if self._targets is None else (image, self._targets[position])
        except Exception as error:
            self._note(error, [index])
            raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices`` in that order."""
        caller = sys._getframe(1)  # noqa: SLF001  # CPython's, as in `asked_for_whole`
        asked = caller.f_locals["self"].dataset if caller.f_code in ASKERS else self
        # One around this that hands on what it has not itself, or a subclass, makes samples of its own.
        if asked is not self or type(self).__getitem__ is not OMEArrowDatasetNumpy.__getitem__:
            return [asked[index] for index in indices]
        try:
            positions = self._positions(indices)
            images = list(self._batch(positions))
            if self._targets is None:
                return images
            return [(image, self._targets[position]) for image, position in zip(images, positions, strict=True)]
        except Exception as error:
            self._note(error, indices)
            raise
