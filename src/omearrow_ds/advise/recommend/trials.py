"""One layout tried on the sample as a user would use it: written, opened, preloaded, and gone through by a loader."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from omearrow_ds.advise.recommend.choices import Layout
from omearrow_ds.advise.recommend.estimate import Turn
from omearrow_ds.advise.recommend.sample import Clock, Sample
from omearrow_ds.advise.workspace import stored_bytes
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.loader.dataloader import OMEArrowDataLoader
from omearrow_ds.storage.protocol import ImageSource, OpenOptions
from omearrow_ds.storage.source import Array, write_images
from omearrow_ds.storage.verified import verified_where_stored

Access = Literal["random", "sequential"]
_NO_LIMIT_BYTES = 2**62  # samples are small, and what is preloaded for them is not the whole collection
_REOPENED_S = 0.5  # a collection that takes longer to open is opened once


@dataclass(frozen=True)
class Use:
    """How samples are used.

    Attributes
    ----------
    access
        Whether an epoch goes through the images in a new random order or as they are stored.
    batch_size
        Samples a batch.
    axes, crop_size
        As of `OMEArrowDataset`.
    part_s
        Longest that one measurement of an epoch takes: a longer one is judged by its first batches.
    """

    access: Access
    batch_size: int
    axes: str
    crop_size: tuple[int, int] | None
    part_s: float

    def dataset(
        self, path: Path, format_name: str, *, preload: bool, **opening: Unpack[OpenOptions]
    ) -> OMEArrowDataset:
        """Return the dataset that a user would make."""
        limit = _NO_LIMIT_BYTES if preload else None
        return OMEArrowDataset(
            path,
            format_name,
            preload=preload,
            axes=self.axes,
            crop_size=self.crop_size,
            max_bytes=limit,
            progress=False,
            **opening,
        )

    def loader(self, dataset: OMEArrowDataset, order: Sequence[int], **settings: Any) -> OMEArrowDataLoader:
        """Return the loader that a user would make, in a given order of samples."""
        if dataset.shape is None:
            settings["collate_fn"] = list  # images of differing shape make no one tensor
        given: dict[str, Any] = {"num_workers": 0, "batch_size": self.batch_size} | settings
        return OMEArrowDataLoader(dataset, sampler=order, **given)

    def order(self, indices: Sequence[int], number: int) -> list[int]:
        """Return the order of an epoch over ``indices``; a random one depends on ``number`` alone."""
        if self.access == "sequential":
            return list(indices)
        found: list[int] = np.random.default_rng(number).permutation(np.asarray(indices)).tolist()
        return found


@dataclass(frozen=True)
class Whole:
    """The collection as it is stored now, and how it was opened."""

    source: ImageSource
    decoded_bytes: Array
    opening: OpenOptions = field(default_factory=OpenOptions)

    def read_s(self, sample: Sample, most_s: float, clock: Clock) -> float:
        """Return the seconds that a conversion takes to read it, scaled from its first images: pixels and metadata."""
        return self._scanned_s(sample, most_s, clock, lambda index, _: self.source.metadata(index))

    def decode_s(self, sample: Sample, most_s: float, clock: Clock) -> float:
        """Return the seconds that decoding it into memory takes, scaled from its first images."""
        return self._scanned_s(sample, most_s, clock, lambda _, image: np.array(image))

    def _scanned_s(self, sample: Sample, most_s: float, clock: Clock, use: Callable[[int, Array], Any]) -> float:
        start_s, seen_bytes = clock(), 0
        scan = verified_where_stored(self.source).scan()  # as `convert` and preloading do
        for first, images in scan:
            for index, image in enumerate(images, start=first):
                use(index, image)
                seen_bytes += image.nbytes
            if clock() - start_s > most_s or (not sample.complete and seen_bytes >= sample.size_bytes):
                break
        took_s = clock() - start_s
        getattr(scan, "close", lambda: None)()
        return took_s * float(self.decoded_bytes.sum()) / max(1, seen_bytes)


def epoch_s(loader: Any, most_s: float, clock: Clock) -> tuple[float, int]:
    """Go through an epoch, or what fits ``most_s``; return the seconds and the samples."""
    start_s, count = clock(), 0
    for batch in loader:
        count += len(batch)
        if clock() - start_s > most_s:
            break
    return clock() - start_s, count


def from_memory_s(dataset: OMEArrowDataset, indices: Sequence[int], use: Use, number: int, clock: Clock) -> float:
    """Return the seconds of an epoch of preloaded images, without what only its first batch takes."""
    loader = use.loader(dataset, use.order(indices, number))
    next(iter(loader))
    took_s, count = epoch_s(loader, use.part_s, clock)
    return took_s * len(indices) / count


class WrittenTrial:
    """The sample written in a layout, again in each round.

    Parameters
    ----------
    layout
        How to store it.
    sample, use
        What, and what for.
    folder
        Where to write.
    clock
        Tells the time in seconds.
    """

    def __init__(self, layout: Layout, sample: Sample, use: Use, folder: Path, clock: Clock) -> None:
        self.layout = layout
        self._sample, self._use, self._clock = sample, use, clock
        self.path = folder / f"images{layout.format.suffix}"
        self.opening = OpenOptions()
        self.indices = range(len(sample.images))
        folder.mkdir()

    @property
    def size_bytes(self) -> int:
        """Bytes that the whole collection takes on disk, scaled."""
        return round(stored_bytes(self.path) * self._sample.factor)

    def turn(self, number: int, read_s: float, preloaded_s: float | None) -> Turn:
        """Measure all of it once.

        Parameters
        ----------
        number
            Of the round.
        read_s
            What reading the collection takes, a part of every conversion.
        preloaded_s
            An epoch from memory; None measures it here.

        Raises
        ------
        OMEArrowDSError
            If the layout cannot hold the images.
        """
        factor = self._sample.factor
        write_s = self._write()
        opened_s, on_demand_s, batch_s = self._on_demand(number)
        preload_s, from_memory_s = self._preload(number, measure=preloaded_s is None)
        return Turn(
            number,
            convert_s=read_s + write_s * factor,
            open_s=opened_s * factor,
            preload_s=preload_s * factor,
            epoch_s=on_demand_s * factor * self._growth,
            preloaded_s=from_memory_s * factor if preloaded_s is None else preloaded_s,
            batch_s=batch_s * self._growth,
        )

    def _write(self) -> float:
        layout, sample = self.layout, self._sample
        fresh = self.path.with_name(f"fresh{layout.format.suffix}")
        start_s = self._clock()
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
        took_s = self._clock() - start_s
        remove(self.path)
        fresh.rename(self.path)
        return took_s

    def _on_demand(self, number: int) -> tuple[float, float, float]:
        """Return the seconds until the first batch beyond what it takes later, of an epoch, and of a batch."""
        start_s = self._clock()
        dataset = self._use.dataset(self.path, self.layout.format.name, preload=False)
        loader = self._use.loader(dataset, self._use.order(self.indices, number))
        next(iter(loader))
        first_s = self._clock() - start_s
        took_s, count = epoch_s(loader, self._use.part_s, self._clock)
        dataset.source.close()
        batch_s = took_s * min(1.0, self._use.batch_size / count)
        return max(0.0, first_s - batch_s), took_s * len(self.indices) / count, batch_s

    def _preload(self, number: int, *, measure: bool) -> tuple[float, float]:
        start_s = self._clock()
        dataset = self._use.dataset(self.path, self.layout.format.name, preload=True)
        took_s = self._clock() - start_s
        return took_s, from_memory_s(dataset, self.indices, self._use, number, self._clock) if measure else 0.0

    @property
    def _growth(self) -> float:
        """How much longer reading an image on demand takes in the whole collection than in the sample.

        Where a reader decodes a number of rows to give one, a sample of fewer shows too little.
        """
        scanned = dict(self.layout.format.scanned_rows).get(str(self.layout.compression), 1)
        return min(scanned, self._sample.whole_count) / min(scanned, len(self._sample.images))

    @property
    def grows(self) -> bool:
        """Whether times on demand are scaled by what a reader decodes to give one image."""
        return self._growth > 1


class StoredTrial:
    """The collection as it is: nothing is written, and the images of the sample are read where they are.

    Parameters
    ----------
    layout
        How it is stored.
    whole
        The collection.
    sample, use
        What is read of it, and what for.
    clock
        Tells the time in seconds.
    """

    def __init__(self, layout: Layout, whole: Whole, sample: Sample, use: Use, clock: Clock) -> None:
        self.layout = layout
        self._whole, self._sample, self._use, self._clock = whole, sample, use, clock
        self.path, self.opening = whole.source.path, whole.opening
        self.indices: Sequence[int] = sample.indices
        if use.access == "sequential":  # neighbours, as in a whole epoch
            first = (len(whole.source) - len(sample.indices)) // 2
            self.indices = range(first, first + len(sample.indices))
        seen_bytes = int(whole.decoded_bytes[list(self.indices)].sum())
        self._factor = float(whole.decoded_bytes.sum()) / max(1, seen_bytes)
        self._opened: tuple[float, OMEArrowDataset] | None = None

    @cached_property
    def size_bytes(self) -> int:
        """Bytes that the collection takes on disk."""
        return stored_bytes(self.path)

    def turn(self, number: int, read_s: float, preloaded_s: float | None) -> Turn:
        """Measure all of it once; see `WrittenTrial.turn`."""
        del read_s
        opened_s, dataset = self._open()
        loader = self._use.loader(dataset, self._use.order(self.indices, number))
        start_s = self._clock()
        next(iter(loader))
        first_s = self._clock() - start_s
        took_s, count = epoch_s(loader, self._use.part_s, self._clock)
        batch_s = took_s * min(1.0, self._use.batch_size / count)
        preload_s, from_memory = self._preload(number, opened_s, measure=preloaded_s is None)
        return Turn(
            number,
            convert_s=0.0,
            open_s=opened_s + max(0.0, first_s - batch_s),
            preload_s=preload_s,
            epoch_s=took_s * len(self.indices) / count * self._factor,
            preloaded_s=from_memory if preloaded_s is None else preloaded_s,
            batch_s=batch_s,
        )

    def _open(self) -> tuple[float, OMEArrowDataset]:
        if self._opened is None or self._opened[0] < _REOPENED_S:
            start_s = self._clock()
            dataset = self._use.dataset(self.path, self.layout.format.name, preload=False, **self.opening)
            self._opened = (self._clock() - start_s, dataset)
        return self._opened

    def _preload(self, number: int, opened_s: float, *, measure: bool) -> tuple[float, float]:
        if not self._sample.complete or opened_s > _REOPENED_S:
            return opened_s + self._whole.decode_s(self._sample, self._use.part_s, self._clock), inf
        start_s = self._clock()
        dataset = self._use.dataset(self.path, self.layout.format.name, preload=True, **self.opening)
        took_s = self._clock() - start_s
        return took_s, from_memory_s(dataset, self.indices, self._use, number, self._clock) if measure else inf

    @property
    def grows(self) -> bool:
        """Nothing is: it is read where it is."""
        return False


Trial = WrittenTrial | StoredTrial


def remove(path: Path) -> None:
    """Remove a collection, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
