"""`OMEArrowDataset` and `OMEArrowDatasetNumpy`: stored images as map-style torch datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch.utils.data import default_collate

from omearrow_ds.dataset.batch import ASKERS, CollatedBatch, asked_for_whole
from omearrow_ds.dataset.collection import Array, Preload, Select
from omearrow_ds.dataset.cuda import DeviceIndices, DeviceSamples
from omearrow_ds.dataset.handover import batch_array
from omearrow_ds.dataset.masks import transformed
from omearrow_ds.dataset.samples import DatasetOptions, StoredSamples
from omearrow_ds.dataset.scaling import Illum, Normalize
from omearrow_ds.dataset.targets import ChosenClasses, Target
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.protocol import Paths, StrPath

STAGES = {"OMEArrowDataset._allocate": "collate", "OMEArrowDataset._collated": "collate"}


class OMEArrowDataset(StoredSamples):
    """Stored images as tensors.

    Parameters
    ----------
    path, format
        As in `open_images`.
    preload
        ``True`` decodes every image once into shared memory, ``False`` keeps nothing, ``"auto"`` preloads what fits
        ``max_bytes``. Samples are bit-identical either way. ``"cuda"`` or ``"cuda:1"`` decodes them into that device's
        memory, as they are stored, where one kernel makes a sample or a batch: images of one shape and dtype, in this
        process alone, without ``masks``; each rank of its own.
    axes
        Axes of a sample, in its order; an axis left out must have length 1 after ``select``.
    select
        Indices picked of an axis: ``{"C": [0, 2], "Z": slice(10, 20), "T": 0}``.
    crop_size
        ``(height, width)`` of a crop, in pixels.
    normalize
        ``True``: float32, integer pixels divided by the largest value of their dtype, floating pixels unscaled.
        ``False``: the stored dtype. ``{"mean": ..., "std": ...}`` or ``{"low": ..., "high": ...}``, in stored pixel
        values, a number or one for each stored channel: float32, less the mean and divided by the std, or such that
        low is 0 and high 1, and what is beyond is kept at them. The file that ``omearrow-ds stats`` wrote, or a
        `Stats`: mean and std by channel and, where it is grouped, by the image's group; ``{"stats": file, "low": "p1",
        "high": "p99"}`` takes percentiles of it.
    illumination
        Illumination functions, positive arrays (Y, X) that pixels are divided by first: a mapping of channel names to
        ``.npy`` files or arrays, one for each stored channel, or ``True`` for those that a LoadData table names.
    transform
        Called with each sample's tensor; with ``masks`` with it and the mask's, a ``tv_tensors.Mask`` where torchvision
        is installed, and it returns both.
    masks
        Masks beside the images: the path of a collection of them, or an open one, paired by id or else by plate, well
        and site; a mapping of ``path`` and further keywords of `open_images`, whose ``on`` says what is paired by; the
        name of another image column of the same table, or of ``"labels/..."`` beside OME-Zarr images; or the path of a
        file with names in braces, as ``"masks/{field}_MaskNuclei.tiff"``: ``{field}`` is an image's id or the name of
        one of its files without suffix, ``{well}`` its column ``Metadata_Well``, ``{_}`` anything. A sample is then
        ``(image, mask)``, the mask in its own dtype, cut as the image is, with the same axes, without C where masks
        have one channel. With ``nulls="skip"`` images without one are left out.
    mask_background
        With ``objects`` and ``masks``: what is not the object of a crop becomes 0, in image and mask. In label images
        it is told by a column of labels (``label_value``, ``Nuclei_Number_Object_Number``, ``Metadata_ObjectNumber``),
        in binary masks it is what is connected, within the crop, with the pixel at its centre; an object that is not
        there is an error, or with ``nulls="skip"`` left out.
    target
        Name of a column; or several, and the target is a dict; or a callable on a row of the columns (a dict), which
        also has ``image_id`` and ``index``, its place in the collection, unless a column is called so. A sample is then
        ``(image, target)``. With ``nulls="skip"`` images whose target is null are left out.
    encode_targets
        ``True``: a target's text is its int64 code, the place among the column's sorted distinct texts, which `classes`
        has. ``False``: the text.
    classes
        Texts of a text target in the order of their codes, for several columns a mapping of columns to texts:
        ``OMEArrowDataset(test, target="t", classes=train.classes)`` has the codes of ``train``. A text that is not
        among them is an error.
    return_ids
        Let the image's id be the last of a sample, ``(image, target, id)``; the ids of a batch are a list.
    max_bytes
        Limit for preloading, in bytes of the whole images, whatever is selected or cropped of them; by default half of
        the memory available now, the processor's or the device's.
    cache_bytes
        On demand, keep the images used last, up to this many bytes in each process; 0 keeps none. For stores whose
        random access is slow (DuckDB, compressed Parquet); `cache_info` tells the hit rate.
    cache_dir
        Folder for the decoded pixels: the first process that preloads writes them to a file there, all others, and the
        next run, map it. Ranks on one host then share one copy. It takes `nbytes` on disk until the file is deleted.
    progress
        Show a progress bar where preloading takes longer than two seconds; ``None`` shows it only in a terminal. A
        process that unpickles a dataset shows none.
    objects
        Cells or nuclei, of which each is a sample: a table, a frame, or the path of a CSV or Parquet file. They are in
        the image of their ``image_id``, or of the same ``Metadata_*`` columns; ``on`` says otherwise, where it does not
        say what ``columns`` is joined by. Those without an image are left out with a warning, those without a place are
        an error, or with ``nulls="skip"`` left out. Their columns come before the images' in `columns`, for targets and
        splits; `objects` is their table; an id is the image's and their number, as ``"B7_3:12"``.
    center, box
        Columns that say where objects are, in pixels counted from 0 at the centre of the first pixel, Y down, as
        CellProfiler has them: ``center=(y, x)``, by default found by the names that CellProfiler, CytoTable,
        scikit-image and ome-arrow use; or ``box=(y0, y1, x0, x1)``, y1 and x1 excluded, ``True`` for known names.
        A crop of ``crop_size`` is the one whose middle is nearest to the object's, the further down and right of two as
        near. Without ``crop_size`` a crop is the box, and crops differ in shape.
    resize
        ``(height, width)`` that boxes are scaled to: bilinear with antialiasing, masks by the nearest pixel.
    pad_to
        ``(height, width)`` of zeros that boxes are put into the middle of; a larger one is an error.
    crop
        Without ``objects``: ``"center"``, the middle of an image; ``"random"``, anywhere in it, drawn from torch's
        global generator, which `OMEArrowDataLoader` seeds by epoch and batch; ``"grid"``, tiles that cover it, ids and
        columns ``crop_y`` and ``crop_x`` tell where, in pixels from its corner.
    overlap
        Pixels that neighbouring tiles share, one number or ``(down, right)``.
    pad
        What of a crop is beyond the edge: ``"constant"`` is 0, ``"edge"`` and ``"reflect"`` are as of `numpy.pad`;
        around objects also ``"shift"``, which moves the crop inside, or ``"drop"``, which leaves the object out.
        ``None`` is ``"constant"`` around objects; else an image smaller than a crop is an error, and the last tiles
        move inside.
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
    ArgumentError
        If an option is invalid, or a target is not among ``classes``.
    ChecksumError
        If an image that is verified is not the one that was written.
    """

    def __init__(
        self,
        path: Paths,
        format: str | None = None,  # noqa: A002  # the public name
        *,
        preload: Preload = True,
        axes: str = "CYX",
        select: Select | None = None,
        crop_size: tuple[int, int] | None = None,
        normalize: Normalize = True,
        illumination: Illum | None = None,
        transform: Callable[[torch.Tensor], Any] | None = None,
        masks: Masks | None = None,
        mask_background: bool = False,
        target: Target | None = None,
        encode_targets: bool = True,
        classes: ChosenClasses | None = None,
        return_ids: bool = False,
        max_bytes: int | None = None,
        cache_bytes: int = 0,
        cache_dir: StrPath | None = None,
        progress: bool | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        super().__init__(
            path,
            format,
            preload=preload,
            axes=axes,
            select=select,
            crop_size=crop_size,
            normalize=normalize,
            illumination=illumination,
            masks=masks,
            mask_background=mask_background,
            target=target,
            encode_targets=encode_targets,
            classes=classes,
            return_ids=return_ids,
            max_bytes=max_bytes,
            cache_bytes=cache_bytes,
            cache_dir=cache_dir,
            progress=progress,
            **options,
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
    def _early_scaling_reason(self) -> str | None:
        """Why pixels are scaled when samples are made; None if that can wait, and is alike for all."""
        return super()._early_scaling_reason if self._transform is None else "a transform is given samples"

    @property
    def _has_user_code(self) -> bool:
        """Whether a sample calls a function of the user's, which may take long, or draw random numbers."""
        return super()._has_user_code or self._transform is not None

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: a tensor of the sample's own memory, or a tuple of it, its target and its id."""
        try:
            position = self._position(index)
            if self._masks is not None:
                images, masks = self._masks.batch([position], np.empty)
                return self._sample(torch.from_numpy(images[0]), torch.from_numpy(masks[0]), position)
            held = self._collection.on_device
            there = None if held is None else self._there(held, [index])[0]
            image = torch.from_numpy(self._collection.sample(position)) if there is None else there
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
        if self._collection.on_device is not None:
            return self._on_device(indices, whole=self._transform is None and asked_for_whole())
        try:
            positions = self._positions(indices)
            pixels: tuple[Array | list[Array], ...]
            if self._masks is None:
                pixels = (self._collection.batch(positions, self._allocate),)
            else:
                pixels = self._masks.batch(positions, self._allocate)
        except Exception as error:
            self._note(error, indices)
            raise
        are_stacked = list not in map(type, pixels)
        if are_stacked and self._transform is None and asked_for_whole():
            return [self._collated(list(map(torch.from_numpy, pixels)), positions, indices)]
        images, *masks = (list(map(torch.from_numpy, each)) for each in pixels)
        as_they_are = self._transform is None and self._alone
        return images if as_they_are else self._finished(images, masks[0] if masks else None, positions, indices)

    def _there(self, held: DeviceSamples, indices: Sequence[int]) -> torch.Tensor:
        """Return samples stacked, on the device that their pixels lie on."""
        if isinstance(indices, DeviceIndices) and not self._collection.random:
            picked = self._picked_there
            return held.batch(indices.there if picked is None else picked[indices.there])
        positions = self._positions(indices)
        if self._collection.random:
            return held.at(np.stack(self._collection.windows(positions)[:3], axis=1))
        return held.batch(torch.tensor(positions, dtype=torch.int64).to(held.device))

    def _on_device(self, indices: Sequence[int], *, whole: bool) -> list[Any]:
        """Return samples of pixels that lie on a device; ``whole`` as one `CollatedBatch`."""
        held, as_they_are = self._collection.on_device, self._transform is None and self._alone
        assert held is not None
        try:
            images = self._there(held, indices)
            positions = [] if as_they_are else self._positions(list(indices))
        except Exception as error:
            self._note(error, indices)
            raise
        if whole:
            return [self._collated([images], positions, indices)]
        samples = list(images)
        return samples if as_they_are else self._finished(samples, None, positions, indices)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return batch_array(shape, dtype, self._collection.pool) if self._transform is None else np.empty(shape, dtype)

    def _finished(
        self, images: list[Any], masks: list[Any] | None, positions: list[int], indices: Sequence[Any]
    ) -> list[Any]:
        """Return the samples: images transformed, with what is beside them."""
        finished: list[Any] = []
        try:
            for place, position in enumerate(positions):
                finished.append(self._sample(images[place], None if masks is None else masks[place], position))
        except Exception as error:
            self._note(error, indices[len(finished) :][:1])
            raise
        return finished

    def _sample(self, image: Any, mask: Any, position: int) -> Any:
        if mask is not None:
            both = (image, mask) if self._transform is None else transformed(self._transform, image, mask)
            return (*both, *self._beside(position))
        if self._transform is not None:
            image = self._transform(image)
        return image if self._alone else (image, *self._beside(position))

    def _collated(self, stacked: list[torch.Tensor], positions: list[int], indices: Sequence[Any]) -> CollatedBatch:
        if self._alone:
            return CollatedBatch(stacked[0])
        parts: list[Any] = [*stacked]
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
            parts.append([self._collection.sample_ids[position] for position in positions])
        return CollatedBatch(parts)


def _checked(transform: Callable[[torch.Tensor], Any] | None) -> Callable[[torch.Tensor], Any] | None:
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform={transform!r}; it must be a callable on a sample's tensor")
    return transform


class OMEArrowDatasetNumpy(StoredSamples):
    """Stored images as NumPy arrays: `OMEArrowDataset` without tensors and without ``transform``."""

    _of_arrays = True

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: an array of the sample's own memory, or a tuple of it, its target and its id."""
        try:
            position = self._position(index)
            if self._masks is not None:
                images, masks = self._masks.batch([position], np.empty)
                return (images[0], masks[0], *self._beside(position))
            image = self._collection.sample(position)
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
            if self._masks is not None:
                both = zip(*self._masks.batch(positions, np.empty), positions, strict=True)
                return [(image, mask, *self._beside(position)) for image, mask, position in both]
            images = list(self._collection.batch(positions, np.empty))
            if self._alone:
                return images
            return [(image, *self._beside(position)) for image, position in zip(images, positions, strict=True)]
        except Exception as error:
            self._note(error, indices)
            raise
