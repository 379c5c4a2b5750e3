"""`Collection`: stored images as samples by index: opened, preloaded, cut and scaled. Datasets share it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from omearrow_ds.axes import AXES, Cut, Pick, SampleAxes, to_tczyx
from omearrow_ds.codec.decode import new_image
from omearrow_ds.dataset.cache_dir import Fingerprint, collection_fingerprint
from omearrow_ds.dataset.copies import copy_with
from omearrow_ds.dataset.cuda import DeviceSamples, check_room, device_of, sent
from omearrow_ds.dataset.dark_images import warn_of_dark_images
from omearrow_ds.dataset.gather import DecodedRows, fill_in_threads
from omearrow_ds.dataset.handover import BatchBufferPool
from omearrow_ds.dataset.image_cache import ImageCache
from omearrow_ds.dataset.preload import PixelCache, PreloadProgressBar, decoded_bytes, group_into_kinds
from omearrow_ds.dataset.scaling import Scalings
from omearrow_ds.dataset.shared_block import SharedBlock
from omearrow_ds.dataset.window_maker import DeviceCropper
from omearrow_ds.dataset.windows import DeviceScaling, SampleLayout
from omearrow_ds.errors import ArgumentError, FormatError, MemoryLimitError
from omearrow_ds.kernels.compiled import worth
from omearrow_ds.kernels.page_requests import request_files
from omearrow_ds.kernels.scaling import FLOAT32, Divisor, Scaling, scale
from omearrow_ds.kernels.stacks import PageRequests, Stacks
from omearrow_ds.resources import image_bytes, preload_limit_bytes
from omearrow_ds.storage.formats._base import BaseSource, Block, Done, Reader
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.storage.formats._pixel_range import MAX_IMAGES, UINT16
from omearrow_ds.storage.verified import verified_where_stored

Array = np.ndarray[Any, Any]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
Preload = bool | str | torch.device  # Strings are "auto" and devices.
Select = Mapping[str, Pick]
_BLOCK_BYTES = 2**22  # Smaller batches do not gain from reused memory.
# Attributes that are recomputed after unpickling:
_MADE_ANEW = (
    *("rows", "_reader", "page_requests", "_in_memory", "_even"),
    *("recent", "pool", "cuts", "kinds", "_divisors"),
)
STAGES = {"Collection._fetch": "read", "scale": "normalize", "fill_in_threads": "normalize"}


class PreloadOptions(NamedTuple):
    """Settings for caching, preloading and verifying decoded pixels."""

    # cache_bytes, cache_dir, progress, verify: see `omearrow_ds.OMEArrowDataset`.
    cache_bytes: int = 0
    cache_dir: Path | None = None
    progress: bool | None = None
    verify: bool | None = None
    fingerprint: Fingerprint | None = None  # `collection_fingerprint` before opening.


class Collection:
    """Samples created from the images of an open source by cropping, selecting and scaling.

    ``axes``, ``normalize`` and ``illumination`` are those of `omearrow_ds.OMEArrowDataset`. ``held`` has the settings
    of pixels in memory.
    """

    def __init__(
        self, source: BaseSource, axes: SampleAxes, options: PreloadOptions, *, normalize: Any, illumination: Any = None
    ) -> None:
        self._axes, self.held = axes, options
        self._source: BaseSource | None = source
        self._opening = b""  # Pickled source, to open in a process that unpickled this.
        self.path, self.format_name, self._stamp = source.path, source.format.name, source.stamp
        self.shapes, self.dtypes, self.image_ids = source.shapes, list(source.dtypes), source.image_ids
        self.parted = source.parted
        self.cache: PixelCache | None = None
        self.on_device: DeviceSamples | None = None
        self._scalings = Scalings(source, normalize, illumination)
        self._plan()

    def _plan(self) -> None:
        """Compute the cut of every distinct image shape; raise errors before any pixel is read."""
        self.kinds = group_into_kinds(self.shapes, self.dtypes, *self._scalings.apart)
        cuts: dict[tuple[int, ...], Cut] = {}
        made_divisors: dict[Any, Divisor] = {}
        divisors: list[Divisor] = []
        shapes = [tuple(self.shapes[index].tolist()) for index in self.kinds.first]
        for index, shape in zip(self.kinds.first, shapes, strict=True):
            if shape not in cuts:
                cuts[shape] = self._cut_axes.cut(shape, f"{self.path}: image {index}")
        for index, shape in zip(self.kinds.first, shapes, strict=True):
            key, make = self._scalings.of(index, self.dtypes[index], shape, cuts[shape])
            if key not in made_divisors:
                made_divisors[key] = make()
            divisors.append(made_divisors[key])
        self.cuts: list[Cut] = self.kinds.spread([cuts[shape] for shape in shapes])
        self._divisors: list[Divisor] = self.kinds.spread(divisors)
        dtypes = [self.dtypes[index] for index in self.kinds.first]
        kinds = {(cuts[shape].shape, self._sample_dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)}
        self._one_kind = next(iter(kinds)) if len(kinds) == 1 else None
        self._stored_alike, self._scaled_alike = len({*zip(shapes, dtypes, strict=True)}) == 1, len(made_divisors) == 1

    def preload(self, preload: Preload, max_bytes: int | None) -> None:
        """Decode all images if ``preload`` is set and the images do not exceed the memory limit."""
        if not preload:
            return
        device = device_of(preload)
        if device is not None and len(self.shapes):
            self._load_on(device, max_bytes)
            self._warn_if_dark()
            self.source.close()
            return
        limit = preload_limit_bytes() if max_bytes is None else max_bytes
        if self.nbytes <= limit:
            self._load(self.held.fingerprint)
            self._warn_if_dark()
            self.source.close()
        elif preload != "auto":
            msg = (
                f"{self.path}: preloading needs {self.nbytes:,} bytes but the limit is {limit:,} "
                f"({'max_bytes' if max_bytes is not None else 'half of the available memory'}); "
                f"raise max_bytes, or pass preload=False or 'auto'"
            )
            raise MemoryLimitError(msg)

    def _warn_if_dark(self) -> None:
        """Warn if ``normalize=True`` makes preloaded images nearly black."""
        if self._scalings.by_dtype:
            first = enumerate(self.dtypes[:MAX_IMAGES])
            warn_of_dark_images(self.path, (self.image(index) for index, dtype in first if dtype == UINT16))

    def _load(self, fingerprint: Fingerprint | None) -> None:
        worth(self.nbytes)  # Starts an epoch of many images with compiled loops.
        options = self.held
        self.cache = PixelCache.load(self.verified_source, options.cache_dir, fingerprint, progress=options.progress)

    def _load_on(self, device: torch.device, max_bytes: int | None) -> None:
        if not self._stored_alike:
            raise ArgumentError(
                "images differ in shape or dtype",
                path=self.path,
                option="preload",
                value=str(device),
                remedy="pass preload=True, and device='cuda' to the loader",
            )
        (cut, divisors, groups), (window, pad, boxes) = self.uncut(), self._windowed()
        box_bytes = 0 if boxes is None else boxes.nbytes
        check_room(self.path, device, self.nbytes + box_bytes, max_bytes)
        pixels = self._sent(device, (len(self.shapes), *self.shapes[0].tolist()))
        self.on_device = DeviceSamples(
            pixels, cut, self.axes, divisors, groups, floating=self.floating, window=window, pad=pad, boxes=boxes
        )

    def _sent(self, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
        options, source = self.held, self.verified_source
        if options.cache_dir is not None:
            cache = PixelCache.load(source, options.cache_dir, options.fingerprint, progress=options.progress)
            stack = cache.stack()
            assert stack is not None
            return sent([(0, stack)], shape, self.dtypes[0], device)
        with PreloadProgressBar(source, options.progress) as bar:
            return sent(_told(source.blocks(), bar.done), shape, self.dtypes[0], device)

    def _windowed(self) -> tuple[tuple[int, int] | None, str, Array | None]:
        """Return (height, width) of windows, padding, and (M, 3) image, top and left; None for whole images.

        Raises `ArgumentError` if windows differ in size.
        """
        return None, "constant", None

    def _sample_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return FLOAT32 if self._scalings.floating else dtype

    @property
    def source(self) -> BaseSource:
        """Source of the images; a process that unpickled the collection opens the source at first use."""
        if self._source is None:
            source: BaseSource = pickle.loads(self._opening)  # noqa: S301  # Pickled by this class.
            # Also for equal shapes: changed images would get the targets of the previous ones.
            if source.stamp != self._stamp:
                raise FormatError(f"{self.path}: the file changed after it was opened; create the dataset again")
            self._source = source
        return self._source

    @property
    def verified_source(self) -> BaseSource:
        """Source for preloading: with ``verify=None``, images with a stored checksum are verified."""
        return verified_where_stored(self.source) if self.held.verify is None else self.source

    @property
    def image_bytes(self) -> Array:
        return image_bytes(self.shapes, self.dtypes)

    @property
    def nbytes(self) -> int:
        return decoded_bytes(self.shapes, self.dtypes, self.kinds)

    @property
    def axes(self) -> str:
        return self._axes.axes

    @property
    def _cut_axes(self) -> SampleAxes:
        return self._axes

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def sample_ids(self) -> Sequence[str]:
        return self.image_ids

    @property
    def beside(self) -> ColumnReader:
        """Object that provides the path, ids and columns of the samples: the source, or the rows of crops."""
        return self.source

    @property
    def noun(self) -> str:
        return "images"

    @property
    def together(self) -> bool:
        """Whether several samples may share an image, so that a split must not separate them."""
        return False

    @property
    def random(self) -> bool:
        """Whether samples depend on random numbers from torch's global generator."""
        return False

    @property
    def floating(self) -> bool:
        """Whether samples are always float32, for any stored dtype."""
        return self._scalings.floating

    def fields_of(self, positions: Array) -> Array:
        return positions

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of all samples, or None if shapes differ or `shape_of` has to be called per sample."""
        return None if self._one_kind is None else self._one_kind[0]

    def shape_of(self, position: int) -> tuple[int, ...]:
        return self.cuts[position].shape

    def sample(self, position: int) -> Array:
        rows = self.rows
        if rows is not None:
            return rows.sample(position)
        return self._scaled(self._images([position])[0], position)

    def image(self, position: int) -> Array:
        """Return one whole image (T, C, Z, Y, X), read-only."""
        return self._images([position])[0]

    def unscaled(self, image: Array, position: int) -> Array:
        """Return the region of ``image`` that a sample shows, with all five axes and without scaling."""
        return to_tczyx(self.cuts[position](image), self.axes, f"{self.path}: image {position}")

    def windows(self, positions: list[int]) -> Any:
        """Return the locations of samples for `at`; for whole images, these are the ``positions`` themselves."""
        return positions

    def batch(self, positions: list[int], allocate: Allocate) -> Array | list[Array]:
        """Return the samples of ``positions``, stacked if all samples of the collection have one shape and dtype."""
        if self._one_kind is None or not positions:
            images = self._distinct(positions)
            return [self._scaled(images[position], position) for position in positions]
        shape, dtype = self._one_kind
        samples = allocate((len(positions), *shape), dtype)
        threads = torch.get_num_threads()
        if self.rows is not None:
            self.rows.batch(positions, samples, threads)
            return samples
        if self._is_read_once and self.page_requests.is_needed():
            self.request_ahead(positions)
        read = self._reader if samples.nbytes >= _BLOCK_BYTES else None
        images = self._distinct(positions) if read is None else {}
        worth(samples.nbytes)

        def fill(share: slice) -> None:
            # Fresh memory for all images of a batch causes page faults, which take longer than reading large images.
            block = None if read is None else new_image(tuple(self.shapes[0].tolist()), self.dtypes[0], str(self.path))
            for position, sample in zip(positions[share], samples[share], strict=True):
                image = images[position] if read is None or block is None else read(position, block)
                scale(self.cuts[position](image), self._divisors[position], sample)

        fill_in_threads(fill, samples, threads)
        return samples

    @property
    def _is_read_once(self) -> bool:
        """Whether each access to an image reads it from the source."""
        return self.cache is None and self.on_device is None and self.recent is None

    @cached_property
    def _reader(self) -> Reader | None:
        """Function that reads images into one reused block of memory; None if images differ or are in memory."""
        return self.source.reader() if self._is_read_once and self._stored_alike else None

    def at(self, locations: Any, allocate: Allocate) -> Array | list[Array]:
        """Return the samples at locations that `windows` returned, stacked or as a list like `batch`."""
        return self.batch(locations, allocate)

    def _distinct(self, positions: list[int]) -> dict[int, Array]:
        distinct = sorted(set(positions))
        return dict(zip(distinct, self._images(distinct), strict=True))

    def _scaled(self, image: Array, position: int) -> Array:
        view = self.cuts[position](image)
        sample = np.empty(view.shape, self._sample_dtype(view.dtype))
        scale(view, self._divisors[position], sample)
        return sample

    def _images(self, positions: list[int]) -> Sequence[Array]:
        """Return whole images of sorted, distinct ``positions``, from memory or the source; read-only."""
        if self.on_device is not None:
            return self.on_device.images(positions)
        if self.cache is not None:
            return [self.cache[position] for position in positions]
        return self._fetch(positions) if self.recent is None else self.recent.get(positions, self._fetch)

    def _fetch(self, positions: list[int]) -> Sequence[Array]:
        return self.source.views(positions)

    @cached_property
    def recent(self) -> ImageCache | None:
        """Cache of recently used images, or None without ``cache_bytes``."""
        return ImageCache(self.held.cache_bytes) if self.held.cache_bytes else None

    @cached_property
    def pool(self) -> BatchBufferPool:
        """Memory pool of large batches."""
        return BatchBufferPool()

    @cached_property
    def rows(self) -> DecodedRows | None:
        """All samples as views of decoded memory, or None if images are not decoded or samples differ in shape."""
        if self._one_kind is None or not self._stored_alike:
            return None
        cut, stacks = self.cuts[0], self.stacked()
        if cut.picks or stacks is None:
            return None
        divisors = self._divisors[:1] if self._scaled_alike else self._divisors
        return DecodedRows(stacks.cut(cut), divisors, self._one_kind[1])

    def stacked(self) -> Stacks | None:
        """Return all images if their pixels are preloaded or memory-mapped, otherwise None."""
        if self.on_device is not None:
            return None
        if self.cache is None:
            stacks = self.source.stacked()
        else:
            stack = self.cache.stack()
            stacks = None if stack is None else Stacks([stack], is_mapped=not self.cache.block.writable)
        if stacks is not None and stacks.requests is not None:
            stacks.requests = self.page_requests
        return stacks

    @property
    def is_read(self) -> bool:
        """Whether samples are read from files, including a memory-mapped file with preloaded pixels."""
        return self.on_device is None and (self.cache is None or not self.cache.block.writable)

    @cached_property
    def page_requests(self) -> PageRequests:
        """Rule that decides for which batches to request pages or files in advance."""
        return PageRequests()

    def request_ahead(self, positions: list[int]) -> None:
        """Ask Linux to read the memory-mapped pages or the files of the samples of a batch."""
        if self.rows is not None:
            self.rows.stacks.request(np.array(positions))
        elif self._is_read_once:
            dtypes = [self.dtypes[position] for position in positions]
            max_bytes = 2 * int(image_bytes(self.shapes[positions], dtypes).max())
            request_files((file for position in positions for file in self.source.files_of(position)), max_bytes)

    def samples_of(self, count: int) -> Array:
        """Return the sorted positions of the samples of the first ``count`` images."""
        return np.arange(count)

    def on_demand(self, source: BaseSource | None = None) -> Self:
        """Return a copy that reads images on demand from ``source``, by default the source of this collection."""
        opening: dict[str, Any] = {}
        if source is not None:
            opening = {"_opening": pickle.dumps(source), "_stamp": source.stamp, "path": source.path}
        return self._remade(cache=(False, None), **opening)

    def preloaded(self, folder: Path | None, *, progress: bool) -> Self:
        """Return a copy with all pixels decoded, into memory or a memory-mapped file in ``folder``."""
        return self._remade(folder, progress=progress, cache=(True, None))

    def first(self, count: int, block: SharedBlock) -> Self:
        """Return a collection of the first ``count`` images, with decoded pixels from ``block``."""
        alone: dict[str, Any] = {
            "shapes": self.shapes[:count],
            "dtypes": self.dtypes[:count],
            "image_ids": self.image_ids[:count],
        }
        return self._remade(cache=(True, block), **alone)

    def _remade(self, folder: Path | None = None, *, progress: bool = False, **changed: Any) -> Self:
        """Return a collection from the pickled state of this one, with some attributes changed."""
        state = self.__getstate__()
        held = state["held"]._replace(cache_dir=folder, progress=progress)
        made = object.__new__(type(self))
        made.__setstate__({**state, "held": held, **changed})
        return made

    def uncut(self) -> tuple[Cut, list[Divisor], Array | None]:
        """Return how images are cut and scaled, for all axes (T, C, Z, Y, X); all images must have one shape.

        These are the cut, the distinct scalings, and (N,) the index of each image's scaling; None if there is one.
        """
        axes, shape = self._cut_axes, tuple(self.shapes[0].tolist())
        cut = SampleAxes(AXES, axes.select, axes.crop_size).cut(shape, str(self.path))
        divisors: dict[Any, Divisor] = {}
        keys = []
        for index in self.kinds.first:
            key, make = self._scalings.of(index, self.dtypes[index], shape, cut)
            if key not in divisors:
                divisors[key] = make()
            keys.append([*divisors].index(key))
        return cut, [*divisors.values()], None if len(divisors) == 1 else np.asarray(self.kinds.spread(keys))

    def maker(self, device: torch.device, shape: tuple[int, ...]) -> DeviceCropper:
        """Return the function that scales a batch of `as_stored` samples of ``shape`` on ``device``."""
        _, (divisor,), _ = self.uncut()
        if isinstance(divisor, Scaling) and not divisor.has_illumination:
            divisor = divisor.at(slice(0, 1), slice(0, 1))  # Equal for all pixels of a plane.
        layout = SampleLayout.of_samples(shape, self.axes)
        return DeviceCropper(layout, DeviceScaling.of([divisor], None, layout.lengths, torch.float32, device), device)

    def early_scaling_reason(self, *, cleared: bool) -> str | None:
        """Return why pixels must be scaled when samples are created, or None if batches can be scaled later.

        ``cleared``: whether pixels of samples may be set to 0.
        """
        if not self.floating or not (self._stored_alike and self._scaled_alike):
            return "images differ in shape, dtype or scaling" if self.floating else "samples are of the stored dtype"
        if self.dtypes[0].kind not in "iu" or self.dtypes[0].itemsize >= FLOAT32.itemsize:
            return f"{self.dtypes[0]} is no smaller than float32"
        if not self.dtypes[0].isnative:
            return "pixels are stored in another byte order"
        return "some pixels are set to 0 after scaling" if cleared and isinstance(self._divisors[0], Scaling) else None

    def as_stored(self) -> Collection:
        """Return a copy whose samples are not scaled."""
        scalings = Scalings(self.source, normalize=False, illumination=None)
        stored = copy_with(self, _MADE_ANEW, recent=self.recent, _scalings=scalings)
        stored._plan()  # noqa: SLF001  # Same class.
        return stored

    def apart(self) -> Collection:
        """Return a copy with a separate cache of images."""
        return copy_with(self, ("recent",))

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled source and the handle of the shared block, without pixels or connections.

        Raises `ArgumentError` if the pixels are on a device: another process would copy them there.
        """
        if self.on_device is not None:
            raise ArgumentError(
                f"the pixels are on {self.on_device.device}, and each worker process would copy them",
                path=self.path,
                option="num_workers",
                remedy="leave out num_workers, or create the dataset in the process that uses it",
            )
        state = {name: value for name, value in vars(self).items() if name not in _MADE_ANEW}
        cache = (False, None) if self.cache is None else (True, self.cache.block)
        options = self.held._replace(progress=False, fingerprint=None)
        opening = self._opening if self._source is None else pickle.dumps(self._source)
        if not any(self.shapes.strides):  # One broadcast row, which NumPy would pickle N times.
            state["shapes"] = self.shapes[:1], len(self.shapes)
        return {**state, "_source": None, "_opening": opening, "cache": cache, "held": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        preloaded, block = state["cache"]
        vars(self).update(state, cache=None)
        if isinstance(self.shapes, tuple):
            self.shapes = np.broadcast_to(self.shapes[0], (self.shapes[1], self.shapes[0].shape[1]))
        self._plan()
        if preloaded and block is None:  # The process of the block has ended.
            self._load(None if self.held.cache_dir is None else collection_fingerprint(self.path))
        elif preloaded:
            self.cache = PixelCache(self.shapes, self.dtypes, block)


def _told(blocks: Iterator[Block], done: Done | None) -> Iterator[Block]:
    """Yield blocks, and call ``done`` after each."""
    for start, images in blocks:
        yield start, images
        if done is not None:
            done(start, start + len(images))
