"""`StoredSamples`: base class of both datasets."""

from __future__ import annotations

import os
import reprlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset, WeightedRandomSampler, default_collate

from omearrow_ds.axes import Array, SampleAxes
from omearrow_ds.dataset.batch import ASKERS, BatchedConcat, CollatedBatch, asked_for_whole
from omearrow_ds.dataset.collection import Collection, Preload, Select
from omearrow_ds.dataset.crop_boxes import DatasetOptions, check_needed, make_crops, shown_indices, split_options
from omearrow_ds.dataset.cuda import DeviceIndices, device_of
from omearrow_ds.dataset.masks import MaskedSamples, transformed
from omearrow_ds.dataset.normalization import Illum, Normalize
from omearrow_ds.dataset.preload import collection_fingerprint
from omearrow_ds.dataset.shared_memory import batch_array
from omearrow_ds.dataset.split import checked_seed, codes_of, split_positions
from omearrow_ds.dataset.stored_images import CacheInfo, PreloadOptions, copy_with, stored_attributes
from omearrow_ds.dataset.targets import ChosenClasses, Classes, Target, Targets
from omearrow_ds.errors import ArgumentError, ImageIndexError, OMEArrowDSError
from omearrow_ds.options import SampleSettings, check_integer, refuse_unknown
from omearrow_ds.resources import sum_bytes
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.fields import warn_of_layout
from omearrow_ds.storage.formats._pictures import Pictures, as_html, kinds, shapes
from omearrow_ds.storage.masks import Masks, open_masks, select_masks
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.part_files import label_of
from omearrow_ds.storage.protocol import OpenOptions, Paths, StrPath
from omearrow_ds.storage.row_filter import RowFilter
from omearrow_ds.storage.source import open_source
from omearrow_ds.text import count, size

_INDICES_SHOWN = 16
_OPTIONS = {"format", *SampleSettings.__dataclass_fields__, *OpenOptions.__annotations__} - {"chosen"}


def list_samples(indices: Sequence[Any]) -> str:
    return ", ".join(map(str, indices[:_INDICES_SHOWN])) + (", ..." if len(indices) > _INDICES_SHOWN else "")


def _checked_preload(preload: Any, cache_bytes: int, cache_dir: Any, unsupported: str | None) -> Preload:
    """Return True, False, "auto" or a device; ``unsupported`` names an option or class that needs the CPU."""
    device = device_of(preload)
    if device is not None and unsupported is not None:
        problem, remedy = f"{unsupported} needs preloading on the CPU", "pass preload=True"
        raise ArgumentError(problem, option="preload", value=preload, remedy=remedy)
    if device is None and not isinstance(preload, bool | np.bool_) and preload != "auto":
        raise ArgumentError(option="preload", value=preload, allowed="True, False, 'auto' or a device such as 'cuda'")
    if cache_bytes and (device or preload not in (False, "auto")):
        remedy = "pass preload=False or 'auto'"
        raise ArgumentError("only images read on demand are cached", option="cache_bytes", remedy=remedy)
    if cache_dir is not None and not (isinstance(cache_dir, str | os.PathLike) and preload):
        raise ArgumentError(option="cache_dir", value=cache_dir, allowed="a folder, with preload=True or 'auto'")
    return device or preload


class StoredSamples(Dataset[Any]):
    """Base of `OMEArrowDataset` and `OMEArrowDatasetNumpy`."""

    _of_arrays = False  # Whether samples are NumPy arrays.
    _convert: Callable[[Any], Any] = staticmethod(torch.from_numpy)
    _transform: Callable[..., Any] | None = None
    _filters: tuple[str, ...] = ()  # Conditions that chose the samples.

    def __init__(
        self,
        path: Paths,
        format: str | None = None,  # noqa: A002  # Public name.
        *,
        preload: Preload = True,
        axes: str = "CYX",
        select: Select | None = None,
        crop_size: tuple[int, int] | None = None,
        normalize: Normalize = True,
        illumination: Illum | None = None,
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
        normalize = bool(normalize) if isinstance(normalize, np.bool_) else normalize
        samples = SampleSettings.take({**options, **locals()})
        unsupported = "OMEArrowDatasetNumpy" if self._of_arrays else None if masks is None else "masks="
        preload = _checked_preload(preload, cache_bytes, cache_dir, unsupported)
        check_needed("target=", target is not None, classes=classes)
        check_needed("masks=", masks is not None, mask_background=bool(mask_background) or None)
        known = _OPTIONS - {"transform"} if self._of_arrays else _OPTIONS
        refuse_unknown(options, known, type(self).__name__, str(path))
        crop_options, opening = split_options(options)
        if "pattern" not in opening:
            warn_of_layout(path, opening)
        if opening.get("filter") is not None:
            self._filters = (RowFilter(opening["filter"]).text,)
        object_settings = ObjectSettings.take(opening, samples.objects)
        folder = None if cache_dir is None else Path(cache_dir).absolute()
        fingerprint = None if folder is None else collection_fingerprint(label_of(path))
        settings = PreloadOptions(samples.cache_bytes, folder, progress, opening.get("verify"), fingerprint)
        source, crops = open_source(path, format, **opening), None
        if crop_options:
            source, crops = make_crops(source, samples, object_settings)
        sample_axes = SampleAxes(axes, select, None if crop_options else crop_size)
        self._collection = Collection(
            source, sample_axes, settings, normalize=normalize, illumination=illumination, crops=crops
        )
        self._picked: array[int] | None = None  # Positions in the collection; None is all.
        self._count = len(self._collection)
        self._return_ids, self._targets, skip = bool(return_ids), None, object_settings.skip_nulls
        is_present = np.ones(self._count, np.bool_)
        if target is not None:
            columns, encode = self._collection.column_source, bool(encode_targets)
            self._targets = Targets(columns, target, classes, encode_targets=encode, nulls=skip)
            if self._targets.present is not None:
                is_present &= self._targets.present
        self._masks: MaskedSamples | None = None
        if masks is not None:
            opening.pop("filter", None)  # Masks are matched with the chosen images.
            mask_source, mask_of = open_masks(self._collection.source, masks, opening, skip_nulls=skip)
            if self._filters:
                mask_source, mask_of = select_masks(mask_source, mask_of, *self._filters)
            clears = bool(mask_background)
            self._masks = MaskedSamples.of(self._collection, mask_source, mask_of, settings, clears=clears)
            is_present &= mask_of[self.fields] >= 0
        self._alone = target is None and not return_ids and masks is None
        self._pick(is_present)
        self._collection.preload(preload, max_bytes)
        if self.device is not None:
            self._convert = torch.as_tensor  # It also returns tensors on a device, but takes longer.
        if self._masks is not None:
            self._masks.collection.preload(preload, max_bytes)
            if skip and mask_background:
                self._pick(self._masks.have_objects(self._all_positions()))

    def _pick(self, is_present: Array) -> None:
        if not is_present.all():
            self._picked = array("q", self._all_positions()[is_present].tolist())
            self._count = len(self._picked)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless it is an option: a change after creation would have no effect."""
        is_ours = type(self).__module__ == "omearrow_ds.dataset.dataset"  # A subclass may use the name of an option.
        if is_ours and name in _OPTIONS:
            remedy = f"create another dataset with {name}=, with cache_dir= to share the pixels"
            if name == "transform":
                remedy = "call dataset.with_transform(f), which shares the pixels"
            raise ArgumentError("cannot change after the dataset is created", option=name, remedy=remedy)
        super().__setattr__(name, value)

    @property
    def path(self) -> Path:
        """Path or URL of the collection."""
        return self._collection.path

    @property
    def source(self) -> CollectionSource:
        """Source of the images of this dataset."""
        return CollectionSource(self._collection.source)

    @property
    def preloaded(self) -> bool:
        """Whether all pixels are decoded and in memory, on the CPU or on a device."""
        return self._collection.cache is not None or self._collection.on_device is not None

    @property
    def device(self) -> torch.device | None:
        """CUDA device of the preloaded pixels, or None."""
        samples = self._collection.on_device
        return None if samples is None else samples.device

    @property
    def _has_user_code(self) -> bool:
        """Whether a sample calls a user function, which may be slow or draw random numbers."""
        return self._transform is not None or (self._targets is not None and not self._targets.listed)

    @property
    def _is_random(self) -> bool:
        """Whether a sample may draw from global generators: in user functions, or for the position of its crop."""
        return self._has_user_code or self._collection.is_random

    @cached_property
    def image_ids(self) -> Sequence[str]:
        """Id of each sample."""
        ids = self._collection.sample_ids
        return ids if self._picked is None else [ids[position] for position in self._picked.tolist()]

    @property
    def fields(self) -> Array:
        """Index of the image that each sample is read from, as an integer array."""
        return self._collection.fields_of(self._all_positions())

    @property
    def columns(self) -> pa.Table:
        """Columns of the samples, one row per sample. Columns of objects come first.

        All are read at the first access; `column` and `column_table` read single columns.
        """
        return self._picked_rows(self._collection.column_source.table)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, without reading their values. Columns of objects come first.

        Examples
        --------
        >>> from omearrow_ds import OMEArrowDataset
        >>> OMEArrowDataset("plate.arrow").column_names
        ['Metadata_Well', 'label']
        """
        return self._collection.column_source.names

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column, one value per sample, without reading the others.

        Parameters
        ----------
        name
            Name of the column.

        Returns
        -------
        pyarrow.ChunkedArray
            One value per sample.

        Raises
        ------
        ColumnError
            If the column does not exist.
        FormatError
            If the column cannot be read, or the file changed after it was opened.

        Examples
        --------
        >>> from omearrow_ds import OMEArrowDataset
        >>> OMEArrowDataset("plate.arrow").column("label").to_pylist()[:3]
        [0, 1, 0]
        """
        return self.column_table([name])[name]

    def column_table(self, names: Sequence[str]) -> pa.Table:
        """Return some columns as a table, one row per sample, without reading the others.

        Parameters
        ----------
        names
            Distinct names of columns, in the order of the table.

        Returns
        -------
        pyarrow.Table
            One row per sample.

        Raises
        ------
        ArgumentError
            If ``names`` is a string, or repeats a name.
        ColumnError
            If a column does not exist.
        FormatError
            If a column cannot be read, or the file changed after it was opened.

        Examples
        --------
        >>> from omearrow_ds import OMEArrowDataset
        >>> OMEArrowDataset("plate.arrow").column_table(["label", "Metadata_Well"]).column_names
        ['label', 'Metadata_Well']
        """
        return self._picked_rows(self._collection.column_source.select(names))

    def _picked_rows(self, columns: pa.Table) -> pa.Table:
        return columns if self._picked is None or not columns.num_columns else columns.take(np.asarray(self._picked))

    @property
    def objects(self) -> pa.Table | None:
        """Table of objects, one row per sample, or None without ``objects=``."""
        rows = self._collection.crop_rows
        return None if rows is None or rows.objects is None else self._picked_rows(rows.own_columns)

    @property
    def classes(self) -> Classes | None:
        """Class names of a text target in the order of their codes, or None.

        With several targets, a mapping from columns to class names. Names are those of
        ``classes=``, or the sorted strings of the whole collection, so that all views have the same codes.
        """
        return None if self._targets is None else self._targets.classes

    @property
    def nbytes(self) -> int:
        """Size in bytes of all decoded images."""
        if self._picked is None:
            return self._collection.nbytes
        return sum_bytes(self._collection.image_bytes[np.unique(self.fields)])

    @property
    def preload_bytes(self) -> int:
        """Number of bytes that all images and masks of the collection occupy if they are preloaded."""
        return self._collection.nbytes + (0 if self._masks is None else self._masks.collection.nbytes)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of a sample, or None if shapes differ or the dataset is empty."""
        return self._collection.shape_of(self._all_positions())

    @property
    def cache_info(self) -> CacheInfo | None:
        """Return hits, misses and size in bytes of the cache of this process, or None without ``cache_bytes=``.

        Each worker has its own cache. Memory-mapped and preloaded images do not use it.
        """
        cache = self._collection.image_cache
        return None if cache is None else cache.info

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples. Python's default would end at any `IndexError`, also at one of a transform."""
        return (self[index] for index in range(len(self)))

    def _position(self, index: Any) -> int:
        try:
            number: int = index if type(index) is int else index.__index__()
        except (AttributeError, TypeError):
            msg = f"{self.path}: sample index {index!r} is not an integer; pass an integer from 0 to {self._count - 1}"
            raise ImageIndexError(msg) from None
        num_samples = self._count
        if not -num_samples <= number < num_samples:
            problem = f"{self.path}: sample index {number} is out of range for {count(num_samples, 'sample')}"
            raise ImageIndexError(f"{problem}; use an index below len(dataset)")
        if self._picked is not None:
            return self._picked[number]
        return number if number >= 0 else number + num_samples

    def _positions(self, indices: Sequence[Any]) -> list[int]:
        picked = self._picked
        if isinstance(indices, DeviceIndices):
            return indices if picked is None else DeviceIndices(map(picked.__getitem__, indices), indices.on_device)
        if set(map(type, indices)) == {int} and min(indices) >= 0 and max(indices) < self._count:
            return list(indices) if picked is None else list(map(picked.__getitem__, indices))
        return [self._position(index) for index in indices]

    def _all_positions(self) -> Array:
        return np.arange(self._count) if self._picked is None else np.asarray(self._picked)

    def _note(self, error: Exception, indices: Sequence[Any]) -> None:
        """Add the samples that were being created to an error's notes, which a worker also sends.

        Raises `RuntimeError` for a `StopIteration`, which a loop over the samples would take for their end.
        """
        if isinstance(error, OMEArrowDSError):
            error.path = error.path or str(self.path)
        samples = list_samples(indices)
        view = "" if self._picked is None else "a view of "
        stored = f"{view}{self.path} (format {self._collection.format_name})"
        error.add_note(f"Raised while creating sample {samples} of {stored}")
        if isinstance(error, StopIteration):
            problem = f"{self.path}: the transform or target of sample {samples} raised StopIteration"
            msg = f"{problem}, which would end the epoch early; add a default to its next() call"
            raise RuntimeError(msg) from error  # noqa: TRY004  # Like Python for generators.

    def _target_and_id(self, position: int) -> tuple[Any, ...]:
        target = () if self._targets is None else (self._targets[position],)
        return (*target, self._collection.sample_ids[position]) if self._return_ids else target

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: new pixels, or a tuple of image, mask, target and id, as far as requested."""
        try:
            position = self._position(index)
            if self._masks is not None:
                images, masks = self._masks.batch(self._collection, [position], np.empty)
                return self._sample(self._convert(images[0]), self._convert(masks[0]), position)
            image = self._collection.sample(position)
            if not self._of_arrays:
                image = self._convert(image)
            if self._transform is not None:
                image = self._transform(image)
            return image if self._alone else (image, *self._target_and_id(position))
        except Exception as error:
            self._note(error, [index])
            raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices``, or one `CollatedBatch` for a loader that only collates them."""
        caller = sys._getframe(1)  # noqa: SLF001  # CPython only, see `asked_for_whole`.
        requested = caller.f_locals["self"].dataset if caller.f_code in ASKERS else self
        # A wrapper that forwards missing attributes, or a subclass, creates its own samples.
        if requested is not self or type(self).__getitem__ is not StoredSamples.__getitem__:
            return [requested[index] for index in indices]
        is_plain = self._transform is None and not self._of_arrays
        is_whole, allocate = is_plain and asked_for_whole(caller), self._allocate if is_plain else np.empty
        try:
            positions = self._positions(indices)
            if self._masks is None:
                pixels: tuple[Any, ...] = (self._collection.batch(positions, allocate),)
            else:
                pixels = self._masks.batch(self._collection, positions, allocate)
        except Exception as error:
            self._note(error, indices)
            raise
        if is_whole and list not in map(type, pixels):
            return [self._collated(list(map(self._convert, pixels)), positions, indices)]
        images, *masks = (list(map(self._convert, arrays)) for arrays in pixels)
        if self._transform is None and self._alone:
            return images
        return self._created(self._sample, indices, images, *(masks or [[None] * len(images)]), positions)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return batch_array(shape, dtype, self._collection.pool)

    def _created(self, create: Callable[..., Any], indices: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
        """Return samples or targets of ``indices``; an error names the index of the one that failed."""
        created: list[Any] = []
        try:
            for arguments in zip(*columns, strict=True):
                created.append(create(*arguments))  # noqa: PERF401  # Its length is the index of a failure.
        except Exception as error:
            self._note(error, indices[len(created) :][:1])
            raise
        return created

    def _sample(self, image: Any, mask: Any, position: int) -> Any:
        if mask is not None:
            both = (image, mask) if self._transform is None else transformed(self._transform, image, mask)
            return (*both, *self._target_and_id(position))
        if self._transform is not None:
            image = self._transform(image)
        return image if self._alone else (image, *self._target_and_id(position))

    def _collated(self, stacked: list[torch.Tensor], positions: list[int], indices: Sequence[Any]) -> CollatedBatch:
        if self._alone:
            return CollatedBatch(stacked[0])
        parts: list[Any] = [*stacked]
        if self._targets is not None:
            parts.append(default_collate(self._created(self._targets.__getitem__, indices, positions)))
        if self._return_ids:
            parts.append([self._collection.sample_ids[position] for position in positions])
        return CollatedBatch(parts)

    def split(
        self,
        fractions: Sequence[float],
        by: str | Sequence[str] | None = None,
        stratify: str | None = None,
        seed: int = 0,
    ) -> list[Self]:
        """Divide the samples into disjoint views, for example for training and validation.

        A view is a dataset of the same class that shares pixels, source and targets, and can be split again. Samples
        keep the order of the collection. `omearrow_ds.dataset.split` describes the algorithm.

        Parameters
        ----------
        fractions
            Share of each view, e.g. ``(0.8, 0.1, 0.1)``.
        by
            ``None`` keeps the samples of one image together. Otherwise one or more columns, such as plate or donor:
            samples with equal values are in one view.
        stratify
            ``None``, or a column whose values are distributed equally over the views. Without ``by``, counts differ by
            at most one sample per value.
        seed
            Integer from 0 to 2**32 - 1. A seed gives the same views on every machine.

        Returns
        -------
        list
            One view per fraction.

        Raises
        ------
        ArgumentError
            If the sum of the fractions is not 1, there are fewer groups than views, or a view would be empty.
        ColumnError
            If a column is missing or has nulls.

        Examples
        --------
        >>> from omearrow_ds import OMEArrowDataset
        >>> train, test = OMEArrowDataset("plate.arrow").split((0.8, 0.2), by="Metadata_Well")
        >>> len(train), len(test)
        (8, 2)
        """
        groups = None if by is None else codes_of(self, by, "by=", str(self.path))
        if groups is None and self._collection.crop_rows is not None:  # Samples may share an image.
            groups = np.unique(self.fields, return_inverse=True)[1].reshape(-1)
        classes = None if stratify is None else codes_of(self, stratify, "stratify=", str(self.path))
        positions = self._all_positions()
        parts = split_positions(len(self), fractions, groups, classes, seed, str(self.path))
        return [self._subset_at(positions[part]) for part in parts]

    def filter(self, condition: str | pc.Expression) -> Self:
        """Return a view of the samples for which a condition on their columns is true.

        A view is a dataset of the same class that shares pixels, source and targets, and can be filtered or split.
        Unlike with the option ``filter``, pixels of the other samples stay in memory if they are preloaded.

        Parameters
        ----------
        condition
            A text such as ``"dose > 1 and treatment in ('DMSO', 'TAXOL')"``, or a `pyarrow.compute.Expression`. Columns
            are those of `columns`, and ``image_id``.

        Returns
        -------
        OMEArrowDataset or OMEArrowDatasetNumpy
            The view. It is empty if samples outside of this view fulfill the condition.

        Raises
        ------
        ArgumentError
            If the condition is invalid.
        ColumnError
            If a column does not exist, or is compared with a value of another type.
        SelectError
            If no sample of the collection fulfills the condition.

        Examples
        --------
        >>> from omearrow_ds import OMEArrowDataset
        >>> plate = OMEArrowDataset("plate.arrow")
        >>> view = plate.filter("label == 1 and Metadata_Well != 'B02'")
        >>> len(plate), len(view), set(view.columns["label"].to_pylist())
        (10, 4, {1})
        """
        row_filter, positions = RowFilter(condition), self._all_positions()
        view = self._subset_at(positions[np.isin(positions, row_filter.choose(self._collection.column_source))])
        view._filters = (*self._filters, row_filter.text)  # noqa: SLF001  # Same class.
        return view

    def balanced_sampler(self, column: str, num_samples: int | None = None, seed: int = 0) -> WeightedRandomSampler:
        """Return a sampler that draws each value of a column equally often, with replacement.

        Parameters
        ----------
        column
            Name of the column.
        num_samples
            Number of samples per epoch. The default is the length of the dataset.
        seed
            Seed of the generator, whose state continues from epoch to epoch and is part of the loader's ``state_dict``.
            Pass a different seed on each rank.

        Returns
        -------
        torch.utils.data.WeightedRandomSampler
            Sampler for the loader.

        Raises
        ------
        ColumnError
            If the column is missing or has nulls.
        ArgumentError
            If the dataset is empty, or ``num_samples`` or ``seed`` is invalid.
        """
        classes = codes_of(self, column, "column=", str(self.path))
        if not len(classes):
            raise ArgumentError("the dataset is empty", path=self.path, remedy="pass a dataset with samples")
        weights = torch.from_numpy(1 / np.bincount(classes)[classes])
        generator = torch.Generator().manual_seed(checked_seed(seed))
        number = check_integer("num_samples", len(self) if num_samples is None else num_samples, 1)
        return WeightedRandomSampler(weights, number, generator=generator)  # type: ignore[arg-type]

    def __add__(self, other: Dataset[Any]) -> BatchedConcat:
        return BatchedConcat([self, other])

    def _with_reader(self, collection: Collection, masks: Collection | None = None) -> Self:
        """Return this dataset with other readers of images and masks; ``collection`` may have only the first images."""
        masked = self._masks if masks is None or self._masks is None else replace(self._masks, collection=masks)
        other = copy_with(self, _collection=collection, _masks=masked)
        if len(collection) != len(self._collection):
            other._picked, other._count = None, len(collection)  # noqa: SLF001  # Same class.
        return other

    def _subset_at(self, positions: Array) -> Self:
        picked = array("q", positions.astype(np.int64).tobytes())
        return copy_with(self, _picked=picked, _count=len(picked))

    def __getstate__(self) -> dict[str, Any]:
        return stored_attributes(self)

    def __repr__(self) -> str:
        collection, access = self._collection, "preloaded" if self.preloaded else "on demand"
        num_samples, noun = f"{len(self)}" if self._picked is None else f"{len(self)} of {len(collection)}", "images"
        if collection.crops is not None:
            num_dropped = collection.crops.num_dropped
            noun = f"crops{f' ({num_dropped} left out)' if num_dropped else ''} of {len(collection.shapes)} images"
        kind = f"{type(self).__name__} of {num_samples} {noun}"
        return f"<{kind}, {collection.format_name}, {access}, at {str(self.path)!r}>"

    def _preview(self) -> Pictures:
        """Return previews of the samples, which are cropped but neither scaled nor transformed."""
        collection, positions, fields = self._collection, self._all_positions(), self.fields.tolist()
        try:
            schema = collection.column_source.schema
        except OMEArrowDSError:  # The dataset was unpickled with its pixels, and the file is gone.
            schema = pa.schema([])

        def channels(index: int) -> list[str | None]:
            field = fields[index]
            names = [channel["name"] for channel in collection.source.metadata(field)["channels"]]
            if collection.cache is not None:
                collection.source.close()
            shape = collection.shapes[field].tolist()
            if len(names) != shape[1]:
                return []
            return [names[channel] for channel in shown_indices(collection.plan.cuts[field], shape)[1].tolist()]

        def image(index: int) -> Array:
            with torch.random.fork_rng([], enabled=collection.is_random):  # Keeps the random state of training.
                return collection.unscaled(collection.image(fields[index]), int(positions[index]))

        image_bytes = collection.image_bytes[fields]
        return Pictures(str(collection.path), self.image_ids, schema, self.column, image_bytes, image, channels)

    def _repr_html_(self) -> str:
        collection, fields = self._collection, np.unique(self.fields)
        masks, targets, transform, classes = self._masks, self._targets, self._transform, self.classes or {}
        of_targets = classes if isinstance(classes, dict) else {"": classes}
        access = "read on demand" if collection.cache is None else "preloaded"
        shape = "" if self.shape is None else " x ".join(map(str, self.shape))
        facts = [
            ("path", str(collection.path)),
            ("images", shapes(collection.shapes[fields])),
            ("dtype", kinds(collection.dtypes[field].name for field in fields.tolist())),
            ("pixels", f"{access}, {size(sum_bytes(collection.image_bytes[fields]))} decoded"),
            ("sample", f"{collection.axes} {shape}"),
            ("transform", "" if transform is None else f"{reprlib.repr(transform)}; images are shown without it"),
            ("masks", "" if masks is None else f"{masks.collection.path}; images are shown without them"),
            ("target", "" if targets is None else targets.text),
            *((f"classes {name}".strip(), reprlib.repr(list(item))) for name, item in of_targets.items()),
        ]
        return as_html(repr(self).partition(", at ")[0].removeprefix("<"), facts, self._preview())
