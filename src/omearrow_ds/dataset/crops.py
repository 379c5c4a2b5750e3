"""`CropCollection`: windows of stored images as samples, cut from memory or storage, and padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from omearrow_ds.axes import AXES, SampleAxes
from omearrow_ds.dataset.collection import Allocate, Collection
from omearrow_ds.dataset.crop_fit import Fit
from omearrow_ds.dataset.gather import fill_in_threads
from omearrow_ds.dataset.places import Places, Windows
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.kernels.crops import assemble, crops, places_of
from omearrow_ds.kernels.scaling import Divisor, Scaling, scale
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.storage.formats._regions import PickedRegion, spans_of
from omearrow_ds.storage.objects import CropRows

Array = np.ndarray[Any, Any]
STAGES = {
    "CropCollection._read_from_source": "read",
    "CropCollection._fitted": "normalize",
    "assemble": "normalize",
    "crops": "normalize",
    "scale": "normalize",
    "fill_in_threads": "normalize",
}


class _PlacedWindow(NamedTuple):
    """Window in an image, and the image pixels that it contains."""

    field: int  # Index of the image.
    sides: tuple[int, int, int, int]  # First row and column of the pixels that are read, and those after the last.
    pixels: tuple[slice | Array, slice | Array]  # Rows and columns of the image; arrays if some are repeated.
    target: tuple[Any, ...] | None = None  # Part of the window that these pixels fill, if zeros are around them.


class CropCollection(Collection):
    """Collection whose samples are windows of images.

    Images are called fields: `shapes`, `dtypes`, `image` and `nbytes` are per field, `places` has one entry per sample.
    """

    places: Places
    crop_rows: CropRows | None
    fit: Fit | None

    @classmethod
    def of(
        cls, collection: Collection, windows: Places, rows: CropRows | None = None, fit: Fit | None = None
    ) -> CropCollection:
        """Return a collection of crops at ``windows`` that replaces ``collection``, which must not be used afterwards.

        Raises `AxesError` if samples lack Y or X, or ``select`` includes them. ``rows`` has the ids and columns
        of crops; None if there is one crop per image, with those of the image. ``fit`` brings crops to one size.
        """
        crops = object.__new__(cls)
        vars(crops).update(vars(collection), places=windows, crop_rows=rows, fit=fit)
        crops._plan()
        return crops

    def _plan(self) -> None:
        axes, select = self._axes.axes, self._axes.select or {}
        if not {"Y", "X"} <= set(axes):
            raise AxesError(f"axes={axes!r}: crops need Y and X; add both axes")
        if {"Y", "X"} & set(select):
            raise AxesError(f"select={dict(select)!r}: crops need whole planes; leave out Y and X")
        super()._plan()
        self._order = [axes.index(axis) for axis in AXES if axis in axes]
        self._present = tuple(slice(None) if axis in axes else None for axis in AXES)
        first = self.kinds.first
        kinds = {(self.cuts[index].kept[:3], self._sample_dtype(self.dtypes[index])) for index in first}
        self._kind = next(iter(kinds)) if len(kinds) == 1 else None
        self._alike = self._stored_alike and self._scaled_alike and not self.cuts[0].picks
        taken = [_from_the_front(self.cuts[index].slices[:3], self.shapes[index]) for index in first]
        self._taken = self.kinds.spread(taken)
        spans = ([spans_of(range(part.start, part.stop, part.step)) for part in slices] for slices, _ in taken)
        self._picked = self.kinds.spread(list(map(PickedRegion.from_spans, spans)))

    @property
    def _cut_axes(self) -> SampleAxes:
        return SampleAxes(AXES, self._axes.select)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def sample_ids(self) -> Sequence[str]:
        return self.image_ids if self.crop_rows is None else self.crop_rows.image_ids

    @property
    def beside(self) -> ColumnReader:
        if self.crop_rows is None:
            return self.source
        if self.crop_rows.source is None:  # After unpickling.
            self.crop_rows.source = self.source
        return self.crop_rows

    @property
    def noun(self) -> str:
        dropped = f" ({self.places.dropped} left out)" if self.places.dropped else ""
        return f"crops{dropped} of {len(self.shapes)} images"

    @property
    def together(self) -> bool:
        return self.crop_rows is not None

    @property
    def random(self) -> bool:
        return self.places.random

    def fields_of(self, positions: Array) -> Array:
        return self.places.fields[positions]

    @property
    def shape(self) -> None:
        return None

    def shape_of(self, position: int) -> tuple[int, ...]:
        lead = self.cuts[int(self.places.fields[position])].kept[:3]
        return self._shape(lead, *(self.places.size_of(position) if self.fit is None else self.fit.size))

    def _shape(self, lead: Sequence[int], height: int, width: int) -> tuple[int, ...]:
        lengths = dict(zip(AXES, (*lead, height, width), strict=True))
        return tuple([lengths[axis] for axis in self.axes])  # A generator takes one call per axis.

    def sample(self, position: int) -> Array:
        return self.at(self.places.windows([position]), np.empty)[0]

    def windows(self, positions: list[int]) -> Windows:
        return self.places.windows(positions)

    def batch(self, positions: list[int], allocate: Allocate) -> Array | list[Array]:
        return self.at(self.places.windows(positions), allocate)

    def samples_of(self, count: int) -> Array:
        return np.flatnonzero(self.places.fields < count)

    def at(self, windows: Windows, allocate: Allocate) -> Array | list[Array]:
        size = self.places.size if self.fit is None else self.fit.size
        samples = None
        if self._kind is not None and size is not None:
            samples = allocate((len(windows.fields), *self._shape(self._kind[0], *size)), self._kind[1])
            if self.fit is None:
                self._fill(windows, samples)
                return samples
        crops = []
        for field, height, width in zip(*(values.tolist() for values in (windows.fields, *windows[3:])), strict=True):
            shape = self._shape(self.cuts[field].kept[:3], height, width)
            crops.append(np.empty(shape, self._sample_dtype(self.dtypes[field])))
        self._fill(windows, crops)
        return crops if self.fit is None else self._fitted(crops, self.fit, samples)

    def _fitted(self, crops: list[Array], fit: Fit, samples: Array | None) -> Array | list[Array]:
        fitted: Array | list[Array] | None = samples
        if fitted is None:
            fitted = [np.empty(self._shape(self.tczyx(crop).shape[:3], *fit.size), crop.dtype) for crop in crops]
        for crop, sample in zip(crops, fitted, strict=True):
            fit(self.tczyx(crop), self.tczyx(sample), smooth=self.floating)
        return fitted

    def _fill(self, windows: Windows, samples: Array | list[Array]) -> None:
        # For fields in memory and samples of one size, one loop cuts, pads and scales.
        fields = self._in_memory
        if fields is not None and isinstance(samples, np.ndarray):
            self._fill_from_memory(fields, windows, self._tczyx_of_all(samples))
            return
        # The source reads the part of each window that is in its field, and this pads the pixels outside.
        placed = list(map(self._place, *[values.tolist() for values in windows]))
        arrays = self._read(placed)

        def fill(positions: Iterable[int]) -> None:
            for position in positions:
                self._fill_sample(placed[position], arrays[position], samples[position])

        positions = range(len(samples))
        if not isinstance(samples, np.ndarray):
            fill(positions)
        elif self._even is not None:  # One loop writes the windows that are inside.
            inside = [n for n, (_, _, (y, _), target) in enumerate(placed) if target is None and isinstance(y, slice)]
            batch = self._tczyx_of_all(samples)
            assemble([arrays[position][self._taken[0][1]] for position in inside], inside, batch, self._even[0])
            for position in sorted({*positions} - {*inside}):
                self._fill_sample(placed[position], arrays[position], samples[position])
        else:
            fill_in_threads(lambda share: fill(positions[share]), samples, torch.get_num_threads())

    def _fill_from_memory(self, fields: Stacks, windows: Windows, batch: Array) -> None:
        def fill(turn: Array | slice, out: Array) -> None:
            fields.prepare(windows.fields[turn], (windows.tops[turn], out.shape[-2]))

            def fill_share(share: slice) -> None:
                numbers, tops, lefts = (values[turn][share] for values in windows[:3])
                crops(fields, numbers, tops, lefts, out[share], self._divisors[0], self.places.pad)

            fill_in_threads(fill_share, out, torch.get_num_threads())

        if not (fields.many and fields.in_open_file_groups(windows.fields, batch, fill)):
            fill(slice(None), batch)

    def _fill_sample(self, window: _PlacedWindow, region: Array, sample: Array) -> None:
        pixels, target = region[self._taken[window.field][1]], self.tczyx(sample)
        for axis, pick in self.cuts[window.field].picks:
            pixels = np.take(pixels, pick, axis=axis)
        if window.target is not None:
            sample.fill(0)
            target = target[window.target]
        rows, columns = window.pixels
        if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
            pixels = pixels[..., rows - window.sides[0], :][..., columns - window.sides[1]]
        divisor = self._divisors[window.field]
        scale(pixels, divisor.at(rows, columns) if isinstance(divisor, Scaling) else divisor, target)

    def _place(self, field: int, top: int, left: int, height: int, width: int) -> _PlacedWindow:
        size_y, size_x = self.shapes[field, 3:].tolist()
        bottom, right = top + height, left + width
        if top >= 0 and left >= 0 and bottom <= size_y and right <= size_x:
            return _PlacedWindow(field, (top, left, bottom, right), (slice(top, bottom), slice(left, right)))
        if self.places.pad == "constant":
            y0, x0, y1, x1 = max(top, 0), max(left, 0), min(bottom, size_y), min(right, size_x)
            target = (..., slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
            return _PlacedWindow(field, (y0, x0, y1, x1), (slice(y0, y1), slice(x0, x1)), target)
        rows, columns = (
            np.arange(size)[places_of(first, length, size, self.places.pad)]
            for first, length, size in ((top, height, size_y), (left, width, size_x))
        )
        sides = int(rows.min()), int(columns.min()), int(rows.max()) + 1, int(columns.max()) + 1
        return _PlacedWindow(field, sides, (rows, columns))

    @cached_property
    def _even(self) -> tuple[Divisor] | None:
        """Divisor of all crops if it is equal for all pixels of a plane, or None."""
        divisor, size = self._divisors[0] if self._alike else None, self.places.size
        if not self._alike or size is None:
            return None
        if isinstance(divisor, Scaling):
            divisor = divisor.at(slice(0, 1), slice(0, 1))
            return None if divisor.has_illumination else (divisor,)
        return (divisor,)

    @cached_property
    def _in_memory(self) -> Stacks | None:
        """All images in memory, cut to the region of samples; None if images or scalings differ."""
        stacks = self.stacked() if self._alike else None
        part = slice(None), *self.cuts[0].slices
        return None if stacks is None else stacks.cut(lambda images: images[part])

    def request_ahead(self, positions: list[int]) -> None:
        fields, size = self._in_memory, self.places.size
        if fields is not None and size is not None and not self.random:
            windows = self.places.windows(positions)
            fields.request(windows.fields, (windows.tops, size[0]))

    def _tczyx_of_all(self, samples: Array) -> Array:
        return samples.transpose([0, *[axis + 1 for axis in self._order]])[(slice(None), *self._present)]

    def tczyx(self, sample: Array) -> Array:
        """Return a sample as a view with the axes (T, C, Z, Y, X)."""
        return sample.transpose(self._order)[self._present]

    def _windowed(self) -> tuple[tuple[int, int] | None, str, Array | None]:
        size, windows = self.places.size, self.places
        if self.fit is not None or size is None:
            raise ArgumentError(
                "crops on a device need one size but boxes differ in size",
                path=self.path,
                option="preload",
                remedy="pass crop_size=, or preload=True and device='cuda' to the loader",
            )
        boxes = None if self.random else np.stack([windows.fields, *windows.corners], axis=1).astype(np.int64)
        return size, windows.pad, boxes

    def early_scaling_reason(self, *, cleared: bool) -> str | None:
        size, divisor = self.places.size, self._divisors[0] if self._divisors else None
        if self.fit is not None or size is None:
            return "crops differ in size, or are fitted to one size"
        if isinstance(divisor, Scaling) and divisor.has_illumination:
            return "the illumination correction depends on the position of a crop"
        padded = self.places.pad == "constant" and self._alike and not self.places.within(self.cuts[0].kept[3:])
        return super().early_scaling_reason(cleared=cleared or padded)

    def _read(self, placed: Sequence[_PlacedWindow]) -> Sequence[Array]:
        """Return regions of images (t, c, z, y, x), from memory or the source; read-only."""
        images: Any = self.cache
        if images is None:
            if self.recent is None and self.on_device is None:
                return self._read_from_source(placed)
            images = self._distinct([window.field for window in placed])
        return [
            images[field][(*self._taken[field][0], slice(y0, y1), slice(x0, x1))]
            for field, (y0, x0, y1, x1), *_ in placed
        ]

    def _read_from_source(self, placed: Sequence[_PlacedWindow]) -> list[Array]:
        parts = [self._picked[window.field] for window in placed]
        rows, regions = [], []
        for part, (field, (y0, x0, y1, x1), *_) in zip(parts, placed, strict=True):
            for t0, c0, z0, t1, c1, z1 in part.regions:
                rows.append(field)
                regions.append([t0, c0, z0, y0, x0, t1, c1, z1, y1, x1])
        arrays = self.source.read_regions(rows, regions)
        if len(arrays) == len(placed):
            return arrays
        remaining = iter(arrays)
        return [part.join(list(islice(remaining, len(part.regions)))) for part in parts]

    def unscaled(self, image: Array, position: int) -> Array:
        field, top, left, height, width = (int(values[0]) for values in self.places.windows([position]))
        window = self._place(field, top, left, height, width)
        region = self.cuts[field](image)[..., window.pixels[0], :][..., window.pixels[1]]
        if window.target is None:
            return region
        crop = np.zeros((*region.shape[:3], height, width), region.dtype)
        crop[window.target] = region
        return crop


def _from_the_front(slices: tuple[slice, ...], shape: Any) -> tuple[tuple[slice, slice, slice], tuple[slice, ...]]:
    """Return slices of T, C and Z with positive steps for reading, and slices that reorder the result."""
    rising = [part if part.step > 0 else slice(0, int(size), 1) for part, size in zip(slices, shape, strict=False)]
    t, c, z = (
        slice(part.start, int(size) if part.stop is None else part.stop, part.step)
        for part, size in zip(rising, shape, strict=False)
    )
    return (t, c, z), tuple(slice(None) if part.step > 0 else part for part in slices)
