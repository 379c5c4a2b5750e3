"""Small collections, seeded loaders of them, and simulated ranks, for records of orders and saved states."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, write_images
from tests.support.strategies import image_of

NUM_IMAGES, IMAGES_PER_PART = 23, 6
IMAGE_SHAPE, CROP_SIZE = (6, 7), (4, 5)
SEED = 11
BATCH_SIZE, NUM_BATCHES = 4, 6


def write_collection(folder: Path, num_images: int = NUM_IMAGES) -> Path:
    """Write images whose pixels encode their coordinates to one file, and return its path."""
    path = folder / f"images-{num_images}.arrow"
    images = [image_of(IMAGE_SHAPE, "uint16", number) for number in range(num_images)]
    write_images(images, path, columns={"number": list(range(num_images))})
    return path


def write_parts(path: Path, images_per_part: int = IMAGES_PER_PART) -> Path:
    """Write the images of a file in parts, and return the path of the parts."""
    parts = path.with_suffix(".parts")
    convert(path, parts, "arrow", part_bytes=images_per_part * image_of(IMAGE_SHAPE).nbytes)
    return parts


def open_images(path: Path) -> OMEArrowDataset:
    """Open whole images. A sample is an image and its number."""
    return OMEArrowDataset(path, target="number")


def open_crops(path: Path) -> OMEArrowDataset:
    """Open random crops. A sample is a crop and the number of its image."""
    return OMEArrowDataset(path, target="number", crop="random", crop_size=CROP_SIZE, normalize=False)


def numbers(batch: Any) -> list[int]:
    """Return the numbers of the images of a batch."""
    return batch[1].tolist()


def checksums(batch: Any) -> list[str]:
    """Return for each sample the number of its image and the CRC-32 of its pixels."""
    crops, of_images = batch
    crcs = [zlib.crc32(crop.numpy().tobytes()) for crop in crops]
    return [f"{number}: {crc:08x}" for number, crc in zip(of_images.tolist(), crcs, strict=True)]


@dataclass(frozen=True)
class Run:
    """A way to load: the dataset, options of the loader, and how a batch is recorded."""

    dataset: OMEArrowDataset
    options: dict[str, Any]
    summarize: Callable[[Any], list[Any]] = numbers

    def loader(self, workers: int = 0, seed: int | None = SEED) -> OMEArrowDataLoader:
        """Return a loader with a seeded generator, or with torch's global one (None)."""
        generator = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        timeout = {"timeout": 60} if workers else {}
        options = {"batch_size": BATCH_SIZE, "num_workers": workers, **timeout, **generator, **self.options}
        with many_workers():
            return OMEArrowDataLoader(self.dataset, **options)

    def epochs(self, loader: OMEArrowDataLoader, num_epochs: int = 2) -> list[list[Any]]:
        """Return the records of the batches of several epochs."""
        with many_workers():
            return [[self.summarize(batch) for batch in loader] for _ in range(num_epochs)]


@contextmanager
def many_workers() -> Iterator[None]:
    """Ignore the warning of torch that there are more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


@contextmanager
def as_rank(rank: int, world_size: int, per_host: int | None = None) -> Iterator[None]:
    """Let torch.distributed report a rank, without other processes. ``per_host`` is what torchrun reports."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("WORLD_SIZE")}
    if per_host is not None:
        environment["LOCAL_WORLD_SIZE"] = str(per_host)
    values = {"is_initialized": world_size > 1, "get_rank": rank, "get_world_size": world_size}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment, clear=True))
        for name, value in values.items():
            stack.enter_context(patch.object(torch.distributed, name, lambda *_, value=value: value))
        yield
