"""`LayoutTrial`: one layout, measured on the sample by writing, opening, preloading and loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import numpy as np

from omearrow_ds.advise.recommend.cells import in_turn
from omearrow_ds.advise.recommend.choices import StorageLayout
from omearrow_ds.advise.recommend.estimate import LayoutTiming
from omearrow_ds.advise.recommend.sample import Clock, Sample
from omearrow_ds.advise.workspace import remove
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.options import make_dataset
from omearrow_ds.dataset.places import CropOptions
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.options import SampleSettings
from omearrow_ds.resources import space_on_disk
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import Array, write_images
from omearrow_ds.storage.verified import verified_where_stored

Access = Literal["random", "sequential"]
_NO_LIMIT_BYTES = 2**62  # Samples are small, as only the sample is preloaded.
_REOPENED_S = 0.5  # A collection that takes longer to open is opened once.


@dataclass(frozen=True)
class AccessPattern:
    """Access pattern, batch size, sample settings and clock of a measurement.

    An epoch that takes longer than ``part_s`` is estimated from its first batches.
    """

    access: Access
    batch_size: int
    samples: SampleSettings
    part_s: float
    clock: Clock

    def dataset(
        self, path: Paths, format_name: str, *, preload: bool, **opening: Unpack[OpenOptions]
    ) -> OMEArrowDataset:
        limit = _NO_LIMIT_BYTES if preload else None
        return make_dataset(self.samples, path, format_name, preload=preload, max_bytes=limit, **opening)

    def loader(self, dataset: OMEArrowDataset, order: Sequence[int], **settings: Any) -> OMEArrowDataLoader:
        if dataset.shape is None:
            settings["collate_fn"] = list  # Images of different shapes cannot be stacked.
        options: dict[str, Any] = {"num_workers": 0, "batch_size": self.batch_size} | settings
        return OMEArrowDataLoader(dataset, sampler=order, **options)

    def order(self, indices: Sequence[int], number: int, fields: Array | None = None) -> list[int]:
        """Return the order of ``indices`` in an epoch; a random order is determined by the epoch ``number``.

        With crops, the images of ``fields`` take turns.
        """
        if self.access == "sequential":
            return list(indices)
        if fields is not None:
            return in_turn(np.asarray(indices), fields, np.random.default_rng(number))
        shuffled: list[int] = np.random.default_rng(number).permutation(np.asarray(indices)).tolist()
        return shuffled


@dataclass(frozen=True)
class OriginalCollection:
    source: BaseSource
    decoded_bytes: Array
    opening: OpenOptions = field(default_factory=OpenOptions)

    def read_s(self, sample: Sample, use: AccessPattern) -> float:
        """Return the estimated seconds to read all pixels and metadata for a conversion; only first images are read."""
        return self._scanned_s(sample, use, lambda index, _: self.source.metadata(index))

    def decode_s(self, sample: Sample, use: AccessPattern) -> float:
        """Return the estimated seconds to decode all pixels into memory; only the first images are decoded."""
        return self._scanned_s(sample, use, lambda _, image: np.array(image))

    def _scanned_s(self, sample: Sample, use: AccessPattern, take: Callable[[int, Array], Any]) -> float:
        start_s, seen_bytes = use.clock(), 0
        blocks = verified_where_stored(self.source).blocks()  # Like `convert` and preloading.
        for first, images in blocks:
            for index, image in enumerate(images, start=first):
                take(index, image)
                seen_bytes += image.nbytes
            if use.clock() - start_s > use.part_s or (not sample.complete and seen_bytes >= sample.size_bytes):
                break
        took_s = use.clock() - start_s
        getattr(blocks, "close", lambda: None)()
        return took_s * float(self.decoded_bytes.sum()) / max(1, seen_bytes)


class LayoutTrial:
    """Measurement of one layout with the samples at ``indices``; times are scaled to the whole collection.

    ``factor`` is the ratio of decoded bytes of collection and sample, or of their numbers of crops with ``fields``.
    """

    growth = 1.0  # Time per image on demand in the whole collection, as a multiple of that in the sample.
    _once = 1.0  # Time of one-time work for the whole collection, as a multiple of that for the sample.
    _open_dataset: OMEArrowDataset | None = None  # Stays open for the next round.

    def __init__(
        self,
        layout: StorageLayout,
        path: Path,
        opening: OpenOptions,
        indices: Sequence[int],
        use: AccessPattern,
        factor: float,
        crops: CropOptions | None = None,
        fields: Array | None = None,
    ) -> None:
        options: dict[str, Any] = dict(crops or {})
        of_opening = {name: options.pop(name) for name in ("on", "column_types", "filter") if name in options}
        self.layout, self.path, self.indices = layout, path, indices
        self.opening = cast(OpenOptions, {**of_opening, **opening})
        self.fields, self._factor = fields, factor
        self._use = replace(use, samples=replace(use.samples, **options))

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of the whole collection on disk."""
        files = [file for file in self.path.rglob("*") if file.is_file()] if self.path.is_dir() else [self.path]
        return round(space_on_disk(self.path, files)[1] * self._once)

    def turn(self, number: int, read_s: float, preloaded_s: float | None) -> LayoutTiming:
        """Measure all times of the layout once, in round ``number``.

        ``read_s`` are the seconds of reading the collection, a part of every conversion. ``preloaded_s`` is an epoch
        from memory, or None to measure it. Raises `OMEArrowDSError` if the layout cannot store the images.
        """
        convert_s = self._convert_s(read_s)
        opened_s, dataset = self._open()
        first_s, epoch_s, batch_s = self._epoch(dataset, number)
        if dataset is not self._open_dataset:
            dataset.source.close()
        preload_s, memory_s = self._preload(number, opened_s, measure=preloaded_s is None)
        return LayoutTiming(
            number,
            convert_s=convert_s,
            open_s=(opened_s + max(0.0, first_s - batch_s)) * self._once,
            preload_s=preload_s * self._once,
            epoch_s=epoch_s * self._factor * self.growth,
            preloaded_s=memory_s * self._factor if preloaded_s is None else preloaded_s,
            batch_s=batch_s * self.growth,
        )

    def _convert_s(self, read_s: float) -> float:
        """Store the images, and return the seconds of that for the whole collection."""
        raise NotImplementedError

    def _open(self) -> tuple[float, OMEArrowDataset]:
        return self._dataset(preload=False)

    def _dataset(self, *, preload: bool) -> tuple[float, OMEArrowDataset]:
        start_s = self._use.clock()
        dataset = self.dataset(preload=preload)
        return self._use.clock() - start_s, dataset

    def dataset(self, *, preload: bool) -> OMEArrowDataset:
        return self._use.dataset(self.path, self.layout.format.name, preload=preload, **self.opening)

    def _epoch(self, dataset: OMEArrowDataset, number: int) -> tuple[float, float, float]:
        """Return the seconds of the first batch, of an epoch (estimated from its first batches), and of a batch."""
        clock, start_s, count = self._use.clock, self._use.clock(), 0
        settings = {}
        if self.fields is not None and self._use.access == "random":  # Avoids repeated images in a batch.
            settings["batch_size"] = min(self._use.batch_size, len(np.unique(self.fields)))
        loader = self._use.loader(dataset, self._use.order(self.indices, number, self.fields), **settings)
        next(iter(loader))
        began_s = clock()
        for batch in loader:
            count += len(batch)
            if clock() - began_s > self._use.part_s:
                break
        took_s = clock() - began_s
        return began_s - start_s, took_s * len(self.indices) / count, took_s * min(1.0, self._use.batch_size / count)

    def _preload(self, number: int, opened_s: float, *, measure: bool) -> tuple[float, float]:
        """Return the seconds of preloading, and of an epoch from memory (``inf`` if not measured)."""
        del opened_s
        took_s, dataset = self._dataset(preload=True)
        return took_s, self._epoch(dataset, number)[1] if measure else inf


class WrittenTrial(LayoutTrial):
    """Trial that writes the sample in a layout, into a new folder per round, and reads it."""

    def __init__(self, layout: StorageLayout, sample: Sample, use: AccessPattern, folder: Path) -> None:
        path, cells = folder / f"images{layout.format.suffix}", sample.cells
        if cells is None:
            super().__init__(layout, path, OpenOptions(), range(len(sample.images)), use, sample.factor)
        else:
            numbers, crops = cells.within(sample.indices), cells.remap_to_copies(sample.indices, sample.image_ids)
            factor, fields = len(cells) / len(numbers), cells.fields[numbers]
            super().__init__(layout, path, OpenOptions(), range(len(numbers)), use, factor, crops, fields)
        self._sample, self._once = sample, sample.factor
        # If a reader decodes several rows to return one, a sample of fewer rows underestimates that cost.
        scanned = dict(layout.format.scanned_rows).get(str(layout.compression), 1)
        self.growth = min(scanned, sample.whole_count) / min(scanned, len(sample.images))
        folder.mkdir()

    def _convert_s(self, read_s: float) -> float:
        layout, sample = self.layout, self._sample
        fresh = self.path.with_name(f"fresh{layout.format.suffix}")
        start_s = self._use.clock()
        write_images(
            sample.images,
            fresh,
            layout.format.name,
            encoding=layout.encoding,
            compression=layout.compression,
            image_ids=sample.image_ids,
            metadata=sample.metadata,
            columns=sample.columns if sample.columns.num_columns else None,
        )
        took_s = self._use.clock() - start_s
        remove(self.path)
        fresh.rename(self.path)
        return read_s + took_s * self._once


class StoredTrial(LayoutTrial):
    """Trial that reads the sampled images from the existing collection, without writing."""

    def __init__(self, layout: StorageLayout, whole: OriginalCollection, sample: Sample, use: AccessPattern) -> None:
        indices: Sequence[int] = sample.indices
        if use.access == "sequential":  # Neighbors, as in a whole epoch.
            first = (len(whole.source) - len(sample.indices)) // 2
            indices = range(first, first + len(sample.indices))
        factor = float(whole.decoded_bytes.sum()) / max(1, int(whole.decoded_bytes[list(indices)].sum()))
        crops, fields, cells = None, None, sample.cells
        if cells is not None:
            indices = cells.within(sample.indices if use.access == "random" else indices).tolist()
            indices = indices or cells.within(sample.indices).tolist()
            factor, crops, fields = len(cells) / len(indices), cells.dataset_options, cells.fields[indices]
        super().__init__(layout, whole.source.path, whole.opening, indices, use, factor, crops, fields)
        self._whole, self._sample = whole, sample
        self._opened_s = 0.0

    @property
    def size_bytes(self) -> int:
        return self._whole.source.stored_size()[2]

    def dataset(self, *, preload: bool) -> OMEArrowDataset:
        return self._use.dataset(self._whole.source.given, self.layout.format.name, preload=preload, **self.opening)

    def _convert_s(self, read_s: float) -> float:
        del read_s
        return 0.0

    def _open(self) -> tuple[float, OMEArrowDataset]:
        if self._open_dataset is not None:
            return self._opened_s, self._open_dataset
        self._opened_s, dataset = super()._open()
        self._open_dataset = dataset if self._opened_s >= _REOPENED_S else None
        return self._opened_s, dataset

    def _preload(self, number: int, opened_s: float, *, measure: bool) -> tuple[float, float]:
        if self._sample.complete and opened_s <= _REOPENED_S:
            return super()._preload(number, opened_s, measure=measure)
        return opened_s + self._whole.decode_s(self._sample, self._use), inf
