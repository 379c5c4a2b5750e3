"""`LayoutTrial`: one layout, measured on the sample by writing, opening, preloading and loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from omearrow_ds.advise.recommend.cells import in_turn
from omearrow_ds.advise.recommend.choices import PlanTiming, StorageLayout, Timings
from omearrow_ds.advise.recommend.sample import Clock, Sample
from omearrow_ds.advise.workspace import remove
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.options import SampleSettings
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.source import Array, write_images
from omearrow_ds.storage.verified import verified_where_stored

Access = Literal["random", "sequential"]
Result = TypeVar("Result")
_NO_LIMIT_BYTES = 2**62  # Samples are small, as only the sample is preloaded.
_REOPENED_S = 0.5  # A collection that takes longer to open is opened once.


@dataclass(frozen=True)
class Subject:
    """Collection to measure, with its sample and the settings for reading batches.

    ``lengths`` are the decoded bytes of each image. An epoch that takes longer than ``part_s`` is estimated from its
    first batches.
    """

    source: BaseSource
    opening: OpenOptions
    lengths: Array
    sample: Sample
    access: Access
    batch_size: int
    settings: SampleSettings
    part_s: float
    clock: Clock

    def timed(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> tuple[float, Result]:
        """Call a function, and return the seconds that the call took and its result."""
        start_s = self.clock()
        result = function(*arguments, **options)
        return self.clock() - start_s, result

    def loader(self, dataset: OMEArrowDataset, order: Sequence[int], **settings: Any) -> OMEArrowDataLoader:
        if dataset.shape is None:
            settings["collate_fn"] = list  # Images of different shapes cannot be stacked.
        return OMEArrowDataLoader(dataset, sampler=order, **{"num_workers": 0, **settings})

    def scan_s(self, take: Callable[[int, Array], Any]) -> float:
        """Pass the first images to ``take``, and return the estimated seconds for all images of the collection."""
        start_s, read_bytes = self.clock(), 0
        blocks = verified_where_stored(self.source).blocks()  # Like `convert` and preloading.
        for first, images in blocks:
            for index, image in enumerate(images, start=first):
                take(index, image)
                read_bytes += image.nbytes
            is_enough = not self.sample.complete and read_bytes >= self.sample.size_bytes
            if is_enough or self.clock() - start_s > self.part_s:
                break
        took_s = self.clock() - start_s
        getattr(blocks, "close", lambda: None)()
        return took_s * float(self.lengths.sum()) / max(1, read_bytes)


class LayoutTrial:
    """Measurement of the existing collection, or of one layout of the sample, which is written to ``folder``.

    Attributes
    ----------
    path
        The collection that is read.
    indices, fields
        (n,) int64, the samples that are read, and the image of each sample.
    options
        Keywords of the dataset.
    size_bytes, is_ragged
        Estimated bytes of the whole collection on disk, and whether samples differ in shape, once measured.
    factor, once, growth
        Values for the whole collection as a multiple of measured values. They apply to the time of an epoch, to sizes
        and work that is done once, and to images on demand, because some readers decode several rows to return one.
    """

    def __init__(self, subject: Subject, layout: StorageLayout, folder: Path) -> None:
        self.subject, self.layout, self.path = subject, layout, folder / f"images{layout.format.suffix}"
        self.size_bytes, self.is_ragged = 0, False
        self._slow: tuple[float, OMEArrowDataset] | None = None
        sample, cells, as_it_is = subject.sample, subject.sample.cells, layout.as_it_is
        images = np.asarray(sample.indices)
        if as_it_is:
            self.path = subject.source.path
            if subject.access == "sequential":  # Neighbors, as in a whole epoch.
                images = np.arange(len(images)) + (len(subject.source) - len(images)) // 2
        num_decoded = 1 if as_it_is else dict(layout.format.scanned_rows).get(str(layout.compression), 1)
        self.growth = min(num_decoded, sample.whole_count) / min(num_decoded, len(sample.images))
        self.once = 1.0 if as_it_is else sample.factor
        crops: dict[str, Any] = {}
        if cells is not None:
            numbers = cells.within(images)
            numbers = numbers if len(numbers) else cells.within(sample.indices)
            self.indices = numbers if as_it_is else np.arange(len(numbers))
            self.fields, self.factor = cells.fields[numbers], len(cells.fields) / len(numbers)
            crops = cells.options if as_it_is else cells.remap_to_copies(sample.indices, sample.image_ids)
        elif as_it_is:
            self.indices = self.fields = images
            self.factor = float(subject.lengths.sum() / max(1, subject.lengths[images].sum()))
        else:
            self.indices = self.fields = np.arange(len(sample.images))
            self.factor = sample.factor
        self.options: dict[str, Any] = {**subject.settings.chosen, **crops, **(subject.opening if as_it_is else {})}

    def order(self, number: int) -> list[int]:
        """Return the order of samples in an epoch; a random order is determined by the epoch ``number``."""
        is_random = self.subject.access == "random"
        indices = in_turn(self.indices, self.fields, np.random.default_rng(number)) if is_random else self.indices
        order: list[int] = indices.tolist()
        return order

    def dataset(self, *, preload: bool) -> OMEArrowDataset:
        path = self.subject.source.given if self.layout.as_it_is else self.path
        options = {"max_bytes": _NO_LIMIT_BYTES if preload else None, "progress": False, **self.options}
        dataset = OMEArrowDataset(path, self.layout.format.name, preload=preload, **options)
        self.is_ragged = dataset.shape is None
        return dataset

    def measure(self, number: int, read_s: float) -> Timings:
        """Measure round ``number``, and return the times with images read on demand and with preloaded images.

        ``read_s`` are the seconds of reading the collection, a part of every conversion. An epoch of preloaded images
        is infinite if it is not measured. Raises `OMEArrowDSError` if the layout cannot store the images.
        """
        subject, as_it_is, memory_s = self.subject, self.layout.as_it_is, inf
        convert_s = 0.0 if as_it_is else read_s + self._write_s() * self.once
        opened_s, dataset = self._slow or subject.timed(self.dataset, preload=False)
        if as_it_is and opened_s >= _REOPENED_S:
            self._slow = opened_s, dataset
        first_s, epoch_s, batch_s = self._epoch(dataset, number)
        self.size_bytes = self.size_bytes or round(dataset.source.stored_size()[2] * self.once)
        if self._slow is None:
            dataset.source.close()
        if self._slow is not None or (as_it_is and not subject.sample.complete):
            preload_s = opened_s + subject.scan_s(lambda _, image: np.array(image))
        else:
            preload_s, preloaded = subject.timed(self.dataset, preload=True)
            memory_s = self._epoch(preloaded, number)[1] * self.factor
        open_s, batch_s = opened_s + max(0.0, first_s - batch_s), batch_s * self.growth
        return (
            PlanTiming(convert_s, open_s * self.once, epoch_s * self.factor * self.growth, batch_s),
            PlanTiming(convert_s, preload_s * self.once, memory_s, batch_s),
        )

    def _write_s(self) -> float:
        """Write the sample again, and return the seconds."""
        sample, options = self.subject.sample, self.layout.write_options
        options |= {"image_ids": sample.image_ids, "metadata": sample.metadata, "columns": sample.columns}
        self.path.parent.mkdir(exist_ok=True)
        remove(self.path)
        return self.subject.timed(write_images, sample.images, self.path, self.layout.format.name, **options)[0]

    def _epoch(self, dataset: OMEArrowDataset, number: int) -> tuple[float, float, float]:
        """Return the seconds of the first batch, of an epoch (estimated from its first batches), and of a batch."""
        subject, clock, num_read, batch_size = self.subject, self.subject.clock, 0, self.subject.batch_size
        # With random access, few images would repeat in a batch, as they rarely do in a large collection.
        size = min(batch_size, len(np.unique(self.fields))) if subject.access == "random" else batch_size
        loader = subject.loader(dataset, self.order(number), batch_size=size)
        first_s, _ = subject.timed(lambda: next(iter(loader)))
        start_s = clock()
        for batch in loader:
            num_read += len(batch)
            if clock() - start_s > subject.part_s:
                break
        sample_s = (clock() - start_s) / num_read
        return first_s, sample_s * len(self.indices), sample_s * min(num_read, batch_size)
