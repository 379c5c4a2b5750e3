"""`Collection`: samples of stored images, whole or cropped, scaled one at a time or in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from omearrow_ds.axes import AXES, Cut, Pick, SampleAxes
from omearrow_ds.codec.decode import new_image
from omearrow_ds.dataset.crop_boxes import Boxes, CropWindows, PlacedBox, shown_indices
from omearrow_ds.dataset.cuda import Create, DeviceSamples, check_room, device_cropper
from omearrow_ds.dataset.normalization import Normalizer, warn_of_dark_images
from omearrow_ds.dataset.preload import ImageKinds, group_into_kinds
from omearrow_ds.dataset.shared_memory import BatchBufferPool
from omearrow_ds.dataset.stored_images import PreloadOptions, StoredImages
from omearrow_ds.dataset.windows import DeviceScaling, SampleLayout
from omearrow_ds.errors import ArgumentError, AxesError, MemoryLimitError
from omearrow_ds.kernels.compiled import worth
from omearrow_ds.kernels.crops import assemble, crop
from omearrow_ds.kernels.gather import DecodedRows, fill_in_threads
from omearrow_ds.kernels.scaling import FLOAT32, Array, Divisor, Scaling, scale
from omearrow_ds.kernels.stacks import page_thread, request_files
from omearrow_ds.resources import image_bytes, preload_limit_bytes, sum_bytes
from omearrow_ds.storage.extents import Shape
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.storage.formats._pictures import MAX_IMAGES, UINT16
from omearrow_ds.storage.formats._regions import PickedRegion, slices_of, spans_of

Allocate = Callable[[Shape, np.dtype[Any]], Array]
Preload = bool | str | torch.device  # Strings are "auto" and devices.
Select = Mapping[str, Pick]
_BLOCK_BYTES = 2**22  # Smaller batches do not gain from reused memory.


class SamplePlan(NamedTuple):
    """Region and scaling of each image."""

    kinds: ImageKinds
    cuts: list[Cut]  # Region of each image that samples may show, with all axes for crops.
    divisors: list[Divisor]
    planes: list[PickedRegion]  # For crops, the T, C and Z of each image that samples show.
    # Shape and dtype of all samples, or None if they differ. For crops, the shape along T, C and Z.
    sample_kind: tuple[Shape, np.dtype[Any]] | None
    is_stored_alike: bool  # Whether all images have one shape and dtype.
    is_scaled_alike: bool


class Collection(StoredImages):
    """Samples created from the images of an open source by cropping, selecting and scaling.

    With ``crops``, each sample is a box in an image; `shapes`, `dtypes`, `image` and `nbytes` are per image, which is
    called a field. Options that do not fit the images raise an error before any pixel is read.
    """

    def __init__(
        self,
        source: Images,
        axes: SampleAxes,
        options: PreloadOptions,
        *,
        normalize: Any,
        illumination: Any = None,
        crops: CropWindows | None = None,
    ) -> None:
        super().__init__(source, options)
        self.sample_axes, self.axes, self.crops = axes, axes.axes, crops
        # Ids and columns of crops; None if samples have those of the images.
        self.crop_rows = None if crops is None else crops.rows
        self.is_random = crops is not None and crops.ranges is not None
        self._normalizer = Normalizer(source, normalize, illumination)
        self.is_float32 = self._normalizer.is_float32  # Whether samples are float32 for any stored dtype.
        if crops is not None and not {"Y", "X"} <= set(axes.axes):
            raise AxesError(f"axes={axes.axes!r}: crops need Y and X; add both axes")
        if crops is not None and {"Y", "X"} & set(axes.select or {}):
            raise AxesError(f"select={dict(axes.select or {})!r}: crops need whole planes; leave out Y and X")
        self.plan  # noqa: B018  # Raises errors.

    @cached_property
    def plan(self) -> SamplePlan:
        is_cropped = self.crops is not None
        codes = (of_images[: len(self.shapes)] for of_images in self._normalizer.group_codes)
        kinds = group_into_kinds(self.shapes, self.dtypes, *codes)
        shapes = [tuple(self.shapes[index].tolist()) for index in kinds.first]
        dtypes = [self.dtypes[index] for index in kinds.first]
        axes = replace(self.sample_axes, axes=AXES) if is_cropped else self.sample_axes
        cuts = list(map(axes.cut, shapes, [f"{self.path}: image {index}" for index in kinds.first]))
        divisors = list(map(self._normalizer.divisor, kinds.first, dtypes, shapes, cuts))
        planes = [
            PickedRegion.from_spans([spans_of(indices.tolist()) for indices in shown_indices(cut, shape)[:3]])
            for cut, shape in (zip(cuts, shapes, strict=True) if is_cropped else ())
        ]
        sample_shapes = [cut.shape[: 3 if is_cropped else None] for cut in cuts]
        sample_kinds = {*zip(sample_shapes, map(self._sample_dtype, dtypes), strict=True)}
        sample_kind = sample_kinds.pop() if len(sample_kinds) == 1 else None
        is_uniform = len({*zip(shapes, dtypes, strict=True)}) == 1, len({*divisors}) == 1
        regions = kinds.spread(planes) if is_cropped else []
        return SamplePlan(kinds, kinds.spread(cuts), kinds.spread(divisors), regions, sample_kind, *is_uniform)

    def _sample_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return FLOAT32 if self.is_float32 else dtype

    @property
    def nbytes(self) -> int:
        return sum_bytes(self.image_bytes)

    def __len__(self) -> int:
        return len(self.shapes if self.crops is None else self.crops)

    @property
    def sample_ids(self) -> Sequence[str]:
        rows = self.crop_rows
        return self.image_ids if rows is None else rows.image_ids

    @property
    def column_source(self) -> ColumnReader:
        """Path, ids and columns of the samples: the source, or the rows of crops."""
        rows = self.crop_rows
        if rows is None:
            return self.source.header.columns
        if rows.source is None:  # After unpickling.
            rows.source = self.source.header.columns
        return rows

    def fields_of(self, positions: Array) -> Array:
        return positions if self.crops is None else self.crops.corners[0, positions]

    def samples_of(self, count: int) -> Array:
        return np.flatnonzero(self.fields_of(np.arange(len(self))) < count)

    def shape_of(self, positions: Array) -> Shape | None:
        """Return the shape of samples, or None without samples, or if their shapes differ."""
        cuts, crops = self.plan.cuts, self.crops
        if crops is None:
            is_uniform = self.plan.sample_kind is not None
            shapes = {cuts[position].shape for position in positions[: 1 if is_uniform else None].tolist()}
        else:
            planes = (cuts[field].shape[:3] for field in crops.corners[0, positions].tolist())
            sizes = (crops.size or crops.size_of(position) for position in positions.tolist())
            shapes = set(map(self._crop_shape, planes, sizes))
        return shapes.pop() if len(shapes) == 1 else None

    def _crop_shape(self, planes: Sequence[int], size: Sequence[int]) -> Shape:
        lengths = dict(zip(AXES, (*planes, *size), strict=True))
        return tuple([lengths[axis] for axis in self.axes])  # A generator takes one call per axis.

    def preload(self, preload: Preload, max_bytes: int | None) -> None:
        """Decode all pixels, unless ``preload`` is False, or is "auto" and they exceed the limit."""
        if isinstance(preload, torch.device) and len(self.shapes):
            self._load_on(preload, max_bytes)
        elif preload:
            limit, limit_name = max_bytes, "max_bytes"
            if limit is None:
                limit, limit_name = preload_limit_bytes(), "half of the available memory"
            if self.nbytes <= limit:
                self._load()
            elif preload != "auto":
                problem = f"preloading needs {self.nbytes:,} bytes but the limit is {limit:,} ({limit_name})"
                raise MemoryLimitError(f"{self.path}: {problem}; raise max_bytes, or pass preload=False or 'auto'")
        if self.cache is not None or self.on_device is not None:
            if self._normalizer.by_dtype:
                first = enumerate(self.dtypes[:MAX_IMAGES])
                warn_of_dark_images(self.path, (self.image(index) for index, dtype in first if dtype == UINT16))
            self.source.close()
        bool(self._decodes_in_threads)  # Locates the pixels of Parquet now, not in each forked worker.

    def _load_on(self, device: torch.device, max_bytes: int | None) -> None:
        crops, error = self.crops, partial(ArgumentError, path=self.path, option="preload")
        on_cpu = "preload=True, and device='cuda' to the loader"
        if not self.plan.is_stored_alike:
            problem = "images that differ in shape or dtype cannot be preloaded on a device"
            raise error(problem, value=str(device), remedy=f"pass {on_cpu}")
        if crops is not None and (crops.resize is not None or crops.box_size is None):
            problem = "crops on a device need one size, but boxes differ in size"
            raise error(problem, remedy=f"pass crop_size=, or {on_cpu}")
        boxes_bytes = 0 if crops is None or self.is_random else 2 * crops.corners.nbytes  # As int64.
        check_room(self.path, device, self.nbytes + boxes_bytes, max_bytes)
        pixels = self._sent(device)
        cut, divisors, groups = self.full_image_layout()
        layout = SampleLayout.of(pixels.shape[1:], pixels.stride()[1:], cut, self.axes, crops)
        dtype = torch.float32 if self.is_float32 else pixels.dtype
        scales = DeviceScaling.of(divisors, groups, cut.lengths, dtype, device)
        self.on_device = DeviceSamples(pixels, device_cropper(layout, scales, device), crops)

    def sample(self, position: int) -> Any:
        rows, crops = self.rows, self.crops
        if rows is not None and crops is None:
            return rows.sample(position)
        if self.on_device is not None:
            return self.on_device.batch([position])[0]
        if crops is not None:
            return self._crop(crops, crops.take([position]), np.empty)[0]
        return self._scaled(self._images([position])[0], position)

    def unscaled(self, image: Array, position: int) -> Array:
        """Return the region of ``image`` that a sample shows, with all five axes and without scaling."""
        if self.crops is None:
            return self.tczyx(self.plan.cuts[position](image))
        field, top, left, *size = self.crops.take([position])[:, 0].tolist()
        planes = self.plan.cuts[field](image)
        sample = np.empty((*planes.shape[:3], *size), image.dtype)
        crop(planes, top, left, sample, None, self.crops.pad)
        return sample

    def batch(self, positions: list[int], allocate: Allocate, boxes: Boxes | None = None) -> Any:
        """Return the samples of ``positions``, stacked if all samples of the collection have one shape and dtype.

        They are arrays, or one tensor if pixels are on a device. Masks pass the ``boxes`` of their images.
        """
        if self.on_device is not None:
            return self.on_device.batch(positions)
        if self.crops is not None:
            return self._crop(self.crops, self.crops.take(positions) if boxes is None else boxes, allocate)
        plan = self.plan
        if plan.sample_kind is None or not positions:
            images = self._distinct(positions)
            return [self._scaled(images[position], position) for position in positions]
        shape, dtype = plan.sample_kind
        samples = allocate((len(positions), *shape), dtype)
        threads = torch.get_num_threads()
        if self.rows is not None:
            self.rows.batch(positions, samples, threads)
            return samples
        if self._is_read_once and self.page_requests.is_needed():
            self.request_ahead(positions)
        source = self._filling_source if samples.nbytes >= _BLOCK_BYTES else None
        decodes_in_fill = source is not None or self._decodes_in_threads
        images = {} if decodes_in_fill else self._distinct(positions)
        worth(samples.nbytes)

        def fill(share: slice) -> None:
            # Fresh memory for all images of a batch causes page faults, which take longer than reading large images.
            shape = tuple(self.shapes[0].tolist())
            block = [] if source is None else [new_image(shape, self.dtypes[0], str(self.path))]
            decoded = self._distinct(positions[share]) if source is None and decodes_in_fill else images
            for position, sample in zip(positions[share], samples[share], strict=True):
                image = decoded[position] if source is None else source.read([position], out=block)[0]
                scale(plan.cuts[position](image), plan.divisors[position], sample)

        fill_in_threads(fill, samples, threads)
        return samples

    @cached_property
    def _filling_source(self) -> Images | None:
        """Source that reads images into one reused block of memory."""
        is_alike = self._is_read_once and self.plan.is_stored_alike
        return self.source if is_alike and self.source.details.fills_out() else None

    @cached_property
    def _decodes_in_threads(self) -> bool:
        return self._is_read_once and self.source.details.decodes_in_threads()

    def _scaled(self, image: Array, position: int) -> Array:
        view = self.plan.cuts[position](image)
        sample = np.empty(view.shape, FLOAT32 if self.is_float32 else view.dtype)
        scale(view, self.plan.divisors[position], sample)
        return sample

    def _crop(self, crops: CropWindows, boxes: Boxes, allocate: Allocate) -> Any:
        sample_kind, resize = self.plan.sample_kind, crops.resize
        if sample_kind is None or crops.size is None:
            samples: Any = self._new_crops(boxes, crops.size)
        else:
            samples = allocate((boxes.shape[1], *self._crop_shape(sample_kind[0], crops.size)), sample_kind[1])
        unresized = samples if resize is None else self._new_crops(boxes)
        self._fill(boxes, unresized, crops.pad)
        if resize is not None:
            for part, sample in zip(unresized, samples, strict=True):
                resize(self.tczyx(part), self.tczyx(sample), smooth=self.is_float32)
        return samples

    def _new_crops(self, boxes: Boxes, size: Sequence[int] | None = None) -> list[Array]:
        cuts, dtypes = self.plan.cuts, self.dtypes
        return [
            np.empty(self._crop_shape(cuts[field].shape[:3], size or box), self._sample_dtype(dtypes[field]))
            for field, _, _, *box in boxes.T.tolist()
        ]

    def _fill(self, boxes: Boxes, samples: Array | list[Array], pad: str) -> None:
        plan, threads, stacked = self.plan, torch.get_num_threads(), None
        if isinstance(samples, np.ndarray):
            stacked = self.tczyx(samples)
            if self.rows is not None:
                self.rows.crop(list(boxes[:3]), stacked, pad, threads)
                return
        targets = list(map(self.tczyx, samples)) if stacked is None else stacked
        # The source reads the part of each box that is in its field, and this pads the pixels outside.
        placed = [PlacedBox.of(box, self.shapes[box[0]], pad) for box in boxes.T.tolist()]
        regions = self._read(placed)

        def fill(positions: Iterable[int]) -> None:
            for position in positions:
                box = placed[position]
                box.write(regions[position], plan.divisors[box.field], targets[position], pad)

        positions = range(len(placed))
        if stacked is None:
            fill(positions)
        elif self._plane_divisor is not None:  # One loop writes the boxes that are inside.
            inside = [position for position in positions if placed[position].is_inside]
            assemble([regions[position] for position in inside], inside, stacked, self._plane_divisor[0])
            fill(sorted({*positions} - {*inside}))
        else:
            fill_in_threads(lambda share: fill(positions[share]), stacked, threads)

    @cached_property
    def _plane_divisor(self) -> tuple[Divisor] | None:
        """Divisor of all crops if it is equal for all pixels of a plane, or None."""
        plan, crops = self.plan, self.crops
        if not (plan.is_stored_alike and plan.is_scaled_alike) or crops is None or crops.box_size is None:
            return None
        divisor = plan.divisors[0]
        if isinstance(divisor, Scaling):
            divisor = divisor.at(slice(0, 1), slice(0, 1))
            return (divisor,) if divisor.illumination is None else None
        return (divisor,)

    def _read(self, placed: Sequence[PlacedBox]) -> list[Array]:
        """Return regions (T, C, Z, y, x) of images, from memory or the source; read-only."""
        parts = [self.plan.planes[box.field] for box in placed]
        rows, regions = [], []
        for part, (field, (y0, x0, y1, x1), *_) in zip(parts, placed, strict=True):
            for t0, c0, z0, t1, c1, z1 in part.regions:
                rows.append(field)
                regions.append([t0, c0, z0, y0, x0, t1, c1, z1, y1, x1])
        if self._is_read_once:
            arrays = self._fetch(rows, regions)
        else:
            images = self._distinct(rows)
            arrays = [images[row][slices_of(region)] for row, region in zip(rows, regions, strict=True)]
        if len(arrays) == len(placed):
            return arrays
        remaining = iter(arrays)
        return [part.join(list(islice(remaining, len(part.regions)))) for part in parts]

    @cached_property
    def _order(self) -> tuple[list[int], tuple[Any, ...]]:
        """Axes of a sample in the order (T, C, Z, Y, X), and an index that adds the missing ones."""
        order = [self.axes.index(axis) - len(self.axes) for axis in AXES if axis in self.axes]
        return order, (..., *(slice(None) if axis in self.axes else None for axis in AXES))

    def tczyx(self, samples: Array) -> Array:
        """Return a view of a sample, or of a stack of samples, with all five axes."""
        order, present = self._order
        view: Array = samples.transpose([*range(samples.ndim - len(order)), *order])[present]
        return view

    @cached_property
    def pool(self) -> BatchBufferPool:
        return BatchBufferPool()

    @cached_property
    def rows(self) -> DecodedRows | None:
        """Images in memory, cut to the region of samples; None if samples differ in shape, or crops in scaling."""
        plan = self.plan
        if plan.sample_kind is None or not plan.is_stored_alike or plan.cuts[0].picks:
            return None
        if self.crops is not None and not plan.is_scaled_alike:
            return None
        stacks = self.mapped_stacks()
        divisors = plan.divisors[:1] if plan.is_scaled_alike else plan.divisors
        return None if stacks is None else DecodedRows(stacks.cut(plan.cuts[0]), divisors, plan.sample_kind[1])

    def request_ahead(self, positions: list[int]) -> None:
        rows, crops = self.rows, self.crops
        if crops is not None:
            if rows is not None and crops.box_size is not None and not self.is_random:
                boxes = crops.take(positions)
                page_thread().request(rows.stacks.page_ranges(boxes[0], (boxes[1], crops.box_size[0])))
        elif rows is not None:
            page_thread().request(rows.stacks.page_ranges(np.array(positions)))
        elif self._is_read_once:
            dtypes = [self.dtypes[position] for position in positions]
            max_bytes = 2 * int(image_bytes(self.shapes[positions], dtypes).max())
            request_files(chain.from_iterable(map(self.source.details.files_of, positions)), max_bytes)

    def full_image_layout(self) -> tuple[Cut, list[Divisor], Array | None]:
        """Return the cut of equally shaped images, with all axes, the scalings, and the scaling index of each image."""
        kinds, shape = self.plan.kinds, tuple(self.shapes[0].tolist())
        cut = replace(self.sample_axes, axes=AXES).cut(shape, str(self.path))
        divisors = [self._normalizer.divisor(index, self.dtypes[index], shape, cut) for index in kinds.first]
        return cut, divisors, kinds.of_each

    def maker(self, device: torch.device, shape: Shape) -> Create:
        """Return the function that scales a batch of `as_stored` samples on ``device``."""
        _, (divisor,), _ = self.full_image_layout()
        if isinstance(divisor, Scaling) and divisor.illumination is None:
            divisor = divisor.at(slice(0, 1), slice(0, 1))  # Equal for all pixels of a plane.
        layout = SampleLayout.of_samples(shape, self.axes)
        return device_cropper(layout, DeviceScaling.of([divisor], None, layout.lengths, torch.float32, device), device)

    def early_scaling_reason(self, *, is_cleared: bool) -> str | None:
        """Return why pixels must be scaled early, or None; with ``is_cleared``, samples may have pixels set to 0."""
        plan, crops = self.plan, self.crops
        divisor = plan.divisors[0] if plan.divisors else None
        if crops is not None:
            if crops.resize is not None or crops.box_size is None:
                return "crops differ in size, or are resized to one size"
            if isinstance(divisor, Scaling) and divisor.illumination is not None:
                return "the illumination correction depends on the position of a crop"
        if not self.is_float32:
            return "samples are of the stored dtype"
        if not (plan.is_stored_alike and plan.is_scaled_alike):
            return "images differ in shape, dtype or scaling"
        if self.dtypes[0].kind not in "iu" or self.dtypes[0].itemsize >= FLOAT32.itemsize:
            return f"{self.dtypes[0]} is not smaller than float32"
        if not self.dtypes[0].isnative:
            return "pixels are stored in another byte order"
        if crops is not None and crops.pad == "constant" and not crops.are_inside(plan.cuts[0].shape[3:]):
            is_cleared = True
        return "some pixels are set to 0 after scaling" if is_cleared and isinstance(divisor, Scaling) else None

    def as_stored(self) -> Self:
        normalizer = Normalizer(self.source, normalize=False, illumination=None)
        return self.copy(_normalizer=normalizer, is_float32=False, image_cache=self.image_cache)
