"""`OMEArrowDataset` and `OMEArrowDatasetNumpy`: stored images as map-style torch datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch.utils.data import default_collate

from omearrow_ds.axes import Pick
from omearrow_ds.dataset.batch import ASKERS, CollatedBatch, asked_for_whole
from omearrow_ds.dataset.collection import Array, Preload
from omearrow_ds.dataset.handover import batch_array
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.scaling import Illum, Normalize
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
        ``False``: the stored dtype. ``{"mean": ..., "std": ...}`` or ``{"low": ..., "high": ...}``, in stored pixel
        values, a number or one for each stored channel: float32, less the mean and divided by the std, or such that
        low is 0 and high 1, and what is beyond is kept at them. The file that ``omearrow-ds stats`` wrote, or a
        `Stats`: mean and std by channel and, where it is grouped, by the image's group; ``{"stats": file, "low": "p1",
        "high": "p99"}`` takes percentiles of it.
    illum
        Illumination functions, positive arrays (Y, X) that pixels are divided by first: a mapping of channel names to
        ``.npy`` files or arrays, one for each stored channel, or ``True`` for those that a LoadData table names.
    transform
        Called with each sample's tensor.
    target
        Name of a column; or several, and the target is a dict; or a callable on a row of the columns (a dict), which
        also has ``image_id`` and ``index``, its place in the collection, unless a column is called so. A sample is then
        ``(image, target)``. With ``nulls="skip"`` images whose target is null are left out.
    encode
        ``True``: a target's text is its int64 code, the place among the column's sorted distinct texts, which `classes`
        has. ``False``: the text.
    return_ids
        Let the image's id be the last of a sample, ``(image, target, id)``; the ids of a batch are a list.
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
        normalize: Normalize = True,
        illum: Illum | None = None,
        transform: Callable[[torch.Tensor], Any] | None = None,
        target: Target | None = None,
        encode: bool = True,
        return_ids: bool = False,
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
            illum=illum,
            target=target,
            encode=encode,
            return_ids=return_ids,
            max_bytes=max_bytes,
            cache_bytes=cache_bytes,
            cache_dir=cache_dir,
            progress=progress,
            **opening,
        )
        self._transform = _checked(transform)

    def with_transform(self, transform: Callable[[torch.Tensor], Any] | None) -> Self:
        """Return a dataset of the same samples that shares all with this one, but calls ``transform``; None is none.

        Raises
        ------
        ArgumentError
            If ``transform`` is not callable.
        """
        view = self._view(self._picked)
        view._transform = _checked(transform)  # noqa: SLF001  # of this class
        return view

    @property
    def calls(self) -> bool:
        """Whether a sample calls a function of the user's, which may take long, or draw random numbers."""
        return super().calls or self._transform is not None

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: a tensor of the sample's own memory, or a tuple of it, its target and its id."""
        try:
            position = self._position(index)
            image = torch.from_numpy(self.collection.sample(position))
            if self._transform is not None:
                image = self._transform(image)
            return image if self._alone else (image, *self._beside(position))
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
            samples = self.collection.batch(positions, self._allocate)
        except Exception as error:
            self._note(error, indices)
            raise
        stacked = torch.from_numpy(samples) if isinstance(samples, np.ndarray) else None
        if stacked is not None and self._transform is None and asked_for_whole():
            return [self._collated(stacked, positions, indices)]
        images = [torch.from_numpy(sample) for sample in samples] if stacked is None else list(stacked.unbind(0))
        as_they_are = self._transform is None and self._alone
        return images if as_they_are else self._finished(images, positions, indices)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return batch_array(shape, dtype, self.collection.pool) if self._transform is None else np.empty(shape, dtype)

    def _finished(self, images: list[Any], positions: list[int], indices: Sequence[Any]) -> list[Any]:
        """Return the samples: images transformed, with what is beside them."""
        finished: list[Any] = []
        try:
            for image, position in zip(images, positions, strict=True):
                sample = image if self._transform is None else self._transform(image)
                finished.append(sample if self._alone else (sample, *self._beside(position)))
        except Exception as error:
            self._note(error, indices[len(finished) :][:1])
            raise
        return finished

    def _collated(self, stacked: torch.Tensor, positions: list[int], indices: Sequence[Any]) -> CollatedBatch:
        if self._alone:
            return CollatedBatch(stacked)
        parts: list[Any] = [stacked]
        if self._targets is not None:
            targets: list[Any] = []
            try:
                for position in positions:
                    targets.append(self._targets[position])  # noqa: PERF401  # how many there are tells which failed
            except Exception as error:
                self._note(error, indices[len(targets) :][:1])
                raise
            parts.append(default_collate(targets))
        if self._return_ids:
            parts.append([self.collection.image_ids[position] for position in positions])
        return CollatedBatch(parts)


def _checked(transform: Callable[[torch.Tensor], Any] | None) -> Callable[[torch.Tensor], Any] | None:
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform={transform!r}; it must be a callable on a sample's tensor")
    return transform


class OMEArrowDatasetNumpy(StoredSamples):
    """Stored images as NumPy arrays: `OMEArrowDataset` without tensors and without ``transform``."""

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: an array of the sample's own memory, or a tuple of it, its target and its id."""
        try:
            position = self._position(index)
            image = self.collection.sample(position)
            return image if self._alone else (image, *self._beside(position))
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
            images = list(self.collection.batch(positions, np.empty))
            if self._alone:
                return images
            return [(image, *self._beside(position)) for image, position in zip(images, positions, strict=True)]
        except Exception as error:
            self._note(error, indices)
            raise
