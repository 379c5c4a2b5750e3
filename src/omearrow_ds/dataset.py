"""`OMEArrowDataset` and `OMEArrowDatasetNumpy`: stored images as map-style torch datasets."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from omearrow_ds.axes import Cut, Pick, SampleAxes
from omearrow_ds.batch import SampleBatch
from omearrow_ds.cache import PixelCache, decoded_bytes
from omearrow_ds.errors import ArgumentError, ColumnError, FormatError, ImageIndexError, MemoryLimitError
from omearrow_ds.memory import available_bytes
from omearrow_ds.source import ImageSource, StrPath, open_images

Array = np.ndarray[Any, Any]
Preload = bool | Literal["auto"]
Target = str | Callable[[dict[str, Any]], Any]
_FLOAT32 = np.dtype(np.float32)
_ROW_BY_ROW_BYTES = 128 * 1024


class _Rows:
    """Samples that lie decoded in memory, in one array or, of a store with several parts, in several."""

    def __init__(self, parts: list[Array]) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))[:-1]
        self.array = parts[0] if len(parts) == 1 and parts[0].flags.c_contiguous else None

    def __getitem__(self, position: int) -> Array:
        """Return one sample as a view."""
        part = bisect.bisect_right(self._starts, position) - 1
        row: Array = self._parts[part][position - self._starts[part]]
        return row


class _ImageDataset(Dataset[Any]):
    """What the two datasets share: opening, preloading, indices, cutting, scaling and targets, all in NumPy."""

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
    ) -> None:
        if not isinstance(preload, bool | np.bool_) and preload != "auto":
            raise ArgumentError(f"preload={preload!r}; it must be True, False or 'auto'")
        if max_bytes is not None and (not isinstance(max_bytes, int | np.integer) or max_bytes < 0):
            raise ArgumentError(f"max_bytes={max_bytes!r}; it must be a number of bytes, or None")
        if select is not None and not isinstance(select, Mapping):
            raise ArgumentError(f"select={select!r}; it must be a mapping of axes, e.g. {{'C': [0, 2]}}")
        if target is not None and not isinstance(target, str) and not callable(target):
            raise ArgumentError(f"target={target!r}; it must be the name of a column, or a callable on a row")
        self._sample_axes = SampleAxes(axes, None if select is None else dict(select), crop_size)
        self._normalize = bool(normalize)
        source = open_images(path, format)
        self._source: ImageSource | None = source
        self.path, self._format_name = source.path, source.format.name
        self._shapes, self._dtypes, self._image_ids = source.shapes, list(source.dtypes), source.image_ids
        self._plan()
        self._target = target
        self._targets = _target_values(source, target) if isinstance(target, str) else None
        self._columns = source.columns if callable(target) else None
        if self._columns is not None and not self._columns.num_columns:
            raise ColumnError(f"{self.path}: has no columns for target= to be called with")
        self._cache = self._preload(source, preload, max_bytes)

    def _plan(self) -> None:
        """Work out the cut of every distinct image shape, refusing what does not fit before any pixel is read."""
        rows = [tuple(shape) for shape in self._shapes.tolist()]
        cuts: dict[tuple[int, ...], Cut] = {}
        for index, shape in enumerate(rows):
            if shape not in cuts:
                cuts[shape] = self._sample_axes.cut(shape, f"{self.path}: image {index}")
        self._cuts = [cuts[shape] for shape in rows]
        self._divisors = [_divisor(dtype) if self._normalize else None for dtype in self._dtypes]
        kinds = {(cut.shape, self._sample_dtype(dtype)) for cut, dtype in zip(self._cuts, self._dtypes, strict=True)}
        self._one_kind = next(iter(kinds)) if len(kinds) == 1 else None

    def _preload(self, source: ImageSource, preload: Preload, max_bytes: int | None) -> PixelCache | None:
        if not preload:
            return None
        limit = available_bytes() // 2 if max_bytes is None else max_bytes
        if self.nbytes <= limit:
            cache = PixelCache.load(source)
            source.close()
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
        return _FLOAT32 if self._normalize else dtype

    @property
    def source(self) -> ImageSource:
        """The open source; in a process that unpickled the dataset it is opened at its first use."""
        if self._source is None:
            source = open_images(self.path, self._format_name)
            if not np.array_equal(source.shapes, self._shapes) or list(source.dtypes) != self._dtypes:
                raise FormatError(f"{self.path}: its images changed; make the dataset again")
            self._source = source
        return self._source

    @property
    def preloaded(self) -> bool:
        """Whether the pixels are held decoded in memory."""
        return self._cache is not None

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
        try:
            array = np.asarray(indices)
        except ValueError:  # not even a sequence of numbers: let each index say what is wrong with it
            array = np.empty(0)
        in_range = array.ndim == 1 and array.dtype.kind in "iu" and array.size and array.min() >= 0
        if in_range and array.max() < len(self._shapes):
            positions: list[int] = array.tolist()
            return positions
        return [self._position(index) for index in indices]

    def _sample(self, position: int) -> Array:
        """Return one sample in memory of its own."""
        rows = self._rows
        if rows is not None:
            view = rows[position]
        else:
            image = self.source.views(np.array([position]))[0] if self._cache is None else self._cache[position]
            view = self._cuts[position](image)
        sample = np.empty(view.shape, _FLOAT32 if self._normalize else view.dtype)
        _scale(view, self._divisors[position], sample)
        return sample

    def _batch(self, indices: Sequence[Any]) -> Array | list[Array]:
        """Return the samples of ``indices``: stacked in one array if they are all of one shape and dtype."""
        positions = self._positions(indices)
        if self._one_kind is None or not positions:
            return [self._sample(position) for position in positions]
        shape, dtype = self._one_kind
        samples = np.empty((len(positions), *shape), dtype)
        rows = self._rows
        if rows is not None and samples[0].nbytes < _ROW_BY_ROW_BYTES and rows.array is not None:
            _scale(rows.array.take(positions, axis=0), self._divisors[0], samples)
            return samples
        views = [rows[position] for position in positions] if rows is not None else self._views(positions)
        for view, position, sample in zip(views, positions, samples, strict=True):
            _scale(view, self._divisors[position], sample)
        return samples

    def _views(self, positions: list[int]) -> list[Array]:
        """Return the samples of ``positions``, not scaled yet; they may be read-only."""
        if self._cache is not None:
            return [self._cuts[position](self._cache[position]) for position in positions]
        distinct, inverse = np.unique(positions, return_inverse=True)
        images = self.source.views(distinct)
        return [
            self._cuts[position](images[number]) for position, number in zip(positions, inverse.tolist(), strict=True)
        ]

    @cached_property
    def _rows(self) -> _Rows | None:
        """All samples as views of memory that holds them decoded; None if there is none, or they differ in shape."""
        if self._one_kind is None or len(set(self._dtypes)) > 1 or len(set(map(id, self._cuts))) > 1:
            return None
        cut = self._cuts[0]
        stacks = self.source.stacks() if self._cache is None else [self._cache.stack()]
        if cut.picks or not stacks:
            return None
        return _Rows([cut(stack) for stack in stacks if stack is not None])

    def _target_of(self, index: int) -> Any:
        if self._targets is not None:
            return self._targets[index]
        assert callable(self._target)
        assert self._columns is not None
        return self._target(self._columns.slice(index, 1).to_pylist()[0])

    def __getstate__(self) -> dict[str, Any]:
        """Carry how to reopen and the handle of the shared block, never pixels or connections."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_rows", "_cuts")}
        block = None if self._cache is None else self._cache.block
        return {**state, "_source": None, "_cache": (self.preloaded, block)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        preloaded, block = state.pop("_cache")
        self.__dict__.update(state)
        self._plan()
        self._cache = None
        if preloaded:
            lives_on = block is not None
            self._cache = PixelCache(self._shapes, self._dtypes, block) if lives_on else PixelCache.load(self.source)

    def __repr__(self) -> str:
        held = "preloaded" if self.preloaded else "on demand"
        return f"<{type(self).__name__} of {len(self)} images, {self._format_name}, {held}, at {str(self.path)!r}>"


class OMEArrowDataset(_ImageDataset):
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

    Raises
    ------
    MemoryLimitError
        If ``preload=True`` and the decoded pixels exceed ``max_bytes``.
    AxesError
        If axes, selection or crop do not fit an image.
    ColumnError
        If there is no column ``target``, or it holds nulls.
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
        )
        if transform is not None and not callable(transform):
            raise ArgumentError(f"transform={transform!r}; it must be a callable on a sample's tensor")
        self._transform = transform

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: a tensor of the sample's own memory, or ``(tensor, target)``."""
        position = self._position(index)
        image = torch.from_numpy(self._sample(position))
        if self._transform is not None:
            image = self._transform(image)
        return image if self._target is None else (image, self._target_of(position))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices`` in that order, as a list that collates without a copy."""
        samples = self._batch(indices)
        if isinstance(samples, np.ndarray):
            stacked = torch.from_numpy(samples)
            if self._transform is None and self._target is None:
                return SampleBatch.of_images(stacked)
            images: list[Any] = list(stacked.unbind(0))
        else:
            images = [torch.from_numpy(sample) for sample in samples]
        if self._transform is not None:
            images = [self._transform(image) for image in images]
        if self._target is None:
            return images
        return [(image, self._target_of(self._position(i))) for image, i in zip(images, indices, strict=True)]


class OMEArrowDatasetNumpy(_ImageDataset):
    """Stored images as NumPy arrays: `OMEArrowDataset` without tensors and without ``transform``."""

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: an array of the sample's own memory, or ``(array, target)``."""
        position = self._position(index)
        image = self._sample(position)
        return image if self._target is None else (image, self._target_of(position))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``indices`` in that order."""
        images = list(self._batch(indices))
        if self._target is None:
            return images
        return [(image, self._target_of(self._position(i))) for image, i in zip(images, indices, strict=True)]


def _divisor(dtype: np.dtype[Any]) -> np.float32 | None:
    return np.float32(np.iinfo(dtype).max) if dtype.kind in "iu" else None


def _scale(pixels: Array, divisor: np.float32 | None, out: Array) -> None:
    """Write ``pixels`` to ``out``, divided in float32 if there is a divisor: one pass, no temporary array."""
    if divisor is None:
        with np.errstate(over="ignore"):
            np.copyto(out, pixels, casting="same_kind")
        return
    np.true_divide(pixels, divisor, out, dtype=_FLOAT32, casting="unsafe")


def _target_values(source: ImageSource, name: str) -> list[Any]:
    """Return the values of a column, lists of numbers as arrays, so that they collate to tensors."""
    if name not in source.columns.column_names:
        raise ColumnError(f"{source.path}: no column {name!r} for target; there are {source.columns.column_names}")
    column = source.columns[name]
    if column.null_count:
        row = int(column.is_null().to_numpy().argmax())
        raise ColumnError(
            f"{source.path}: column {name!r} is null at image {row}; fill it, or pass a callable as target"
        )
    values = column.to_pylist()
    return [np.asarray(value) for value in values] if pa.types.is_list(column.type) else values
