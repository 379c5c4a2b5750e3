"""Comparison of each code path with its minimal cost or with the naive solution, in turns.

Both sides return a tensor or a decoded array with its own memory. Equality of samples is checked outside the timed
section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tifffile
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.data import DataLoader, Dataset, TensorDataset

import omearrow_ds
from benchmarks.conftest import Datasets
from benchmarks.support.data import DataCache
from benchmarks.support.library import PixelCache, decoded_bytes, get_format, images_of
from benchmarks.support.paired import Compare, Preloaded, Side, batched, divisor_of, drain, random_indices
from benchmarks.support.workload import NO_BATCH
from omearrow_ds import Format, ImageSource, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy, open_images

pytestmark = pytest.mark.usefixtures("one_core")

Array = np.ndarray[Any, Any]
_BATCH, _LARGE_BATCH = 16, 64
_FIELDS, _CHANNELS, _NAMED = 20, ("DNA", "ER", "Mito"), "{well}_s{site}_{channel}.tif"
_TENSORS, _LIST = "TensorDataset of float32", "list of arrays + copy()"


@pytest.mark.limit("reference", "sample_on_demand")
@pytest.mark.parametrize("format_name", ["arrow"])
def test_sample_on_demand(compare: Compare, fmt: Format, data: DataCache, datasets: Datasets, seed: int) -> None:
    """One random ``dataset[i]`` of a memory-mapped table, encoding list, until the tensor is returned."""
    path = data.path(fmt, "list")
    dataset = OMEArrowDataset(path, fmt.name, preload=False, axes=datasets.axes(fmt))
    if dataset.shape is None:
        pytest.skip(NO_BATCH)
    naive = _naive_sample(path, dataset)
    _assert_equal(dataset, naive)
    mine, theirs = random_indices(len(dataset), seed)
    ours, reference = Side(dataset.__getitem__, mine), Side(naive, theirs)
    compare(ours, reference, datasets.image_shape(fmt))


@pytest.mark.limit("reference", "sample_preloaded")
def test_sample_preloaded(compare: Compare, preloaded: Preloaded, seed: int) -> None:
    """One random ``dataset[i]`` of preloaded pixels, until the tensor is returned."""
    mine, theirs = random_indices(len(preloaded.pixels), seed)
    floor = partial(_floor_sample, preloaded.pixels, preloaded.divisor)
    _assert_equal(preloaded.dataset, floor)
    compare(Side(preloaded.dataset.__getitem__, mine), Side(floor, theirs), preloaded.image_shape)


@pytest.mark.limit("reference", "epoch")
@pytest.mark.parametrize(
    ("reference", "batch_size"),
    [
        pytest.param(_TENSORS, _BATCH, id="tensors-16"),
        pytest.param(_TENSORS, _LARGE_BATCH, id="tensors-64"),
        pytest.param(_LIST, _BATCH, id="list-16"),
        pytest.param(_LIST, _LARGE_BATCH, id="list-64"),
    ],
)
def test_epoch(compare: Compare, preloaded: Preloaded, reference: str, batch_size: int) -> None:
    """A shuffled epoch of preloaded pixels through the loader, no workers; time per image."""
    reference_dataset: Dataset[Any]
    if reference == _TENSORS:
        reference_dataset = TensorDataset(torch.from_numpy(preloaded.pixels.astype(np.float32) / preloaded.divisor))
        _assert_equal(preloaded.dataset, lambda index: reference_dataset[index][0])
    else:
        reference_dataset = _ListDataset(preloaded.pixels, preloaded.divisor)
        _assert_equal(preloaded.dataset, reference_dataset.__getitem__)
    images = len(preloaded.pixels)
    loaders: list[Iterable[Any]] = [
        OMEArrowDataLoader(preloaded.dataset, batch_size, shuffle=True, num_workers=0),
        DataLoader(reference_dataset, batch_size, shuffle=True),
    ]
    ours, theirs = (Side(drain, repeat(loader), images) for loader in loaders)
    compare(ours, theirs, preloaded.image_shape, f"{reference}, B={batch_size}")


@pytest.mark.limit("reference", "batch")
def test_batch(compare: Compare, preloaded: Preloaded, seed: int) -> None:
    """A random batch of 64 preloaded images, normalized into new memory."""
    batches = batched(random_indices(len(preloaded.pixels), seed)[0], _LARGE_BATCH)
    block = np.zeros((_LARGE_BATCH, *preloaded.pixels.shape[1:]), np.float32)
    memcpy = Side(np.ndarray.copy, repeat(block))
    compare(Side(preloaded.dataset.__getitems__, batches), memcpy, preloaded.image_shape)


@pytest.mark.limit("reference", "view")
def test_view(compare: Compare, preloaded: Preloaded) -> None:
    """A shuffled epoch of a view of all images through the loader, preloaded, no workers; time per image."""
    whole, images = preloaded.dataset, len(preloaded.pixels)
    if not hasattr(whole, "split"):
        pytest.skip("this version has no views")
    loaders = [
        OMEArrowDataLoader(images_of_view, _BATCH, shuffle=True, num_workers=0)
        for images_of_view in (*whole.split((1.0,)), whole)
    ]
    ours, theirs = (Side(drain, repeat(loader), images) for loader in loaders)
    compare(ours, theirs, preloaded.image_shape)


@pytest.mark.limit("reference", "preload")
def test_preload(compare: Compare, engine: str | None, opened: ImageSource, image_shape: str) -> None:
    """Decoding every image of an open collection into one block."""
    pixels = np.ones(decoded_bytes(opened.shapes, opened.dtypes), np.uint8)
    memcpy = Side(partial(np.copyto, np.zeros_like(pixels)), repeat(pixels), once=True)
    ours = Side(PixelCache.load, repeat(images_of(opened)), once=True)
    compare(ours, memcpy, image_shape, _case(opened, engine))


@pytest.mark.limit("reference", "random_batch")
def test_random_batch(
    compare: Compare, engine: str | None, opened: ImageSource, imread: Side, image_shape: str, seed: int
) -> None:
    """Reading and decoding a random batch of 16 of an open collection; time per image."""
    batches = batched(random_indices(len(opened), seed)[0], _BATCH)
    compare(Side(opened.take, batches, _BATCH), imread, image_shape, _case(opened, engine))


@pytest.mark.limit("reference", "random_image")
def test_random_image(
    compare: Compare, engine: str | None, opened: ImageSource, imread: Side, image_shape: str, seed: int
) -> None:
    """Reading and decoding one random image of an open collection."""
    indices, _ = random_indices(len(opened), seed)
    compare(Side(opened.read, indices), imread, image_shape, _case(opened, engine))


@pytest.mark.limit("reference", "field")
@pytest.mark.parametrize("format_name", ["tiff"])
def test_field(compare: Compare, plate: Path, image_shape: str, seed: int) -> None:
    """Reading one random field of three deflate-compressed TIFFs on demand, grouped by file names."""
    with open_images(plate, pattern=_NAMED) as source:
        mine, theirs = random_indices(len(source), seed)
        files = [[str(plate / f"A1_s{site}_{name}.tif") for name in _CHANNELS] for site in range(len(source))]
        assert np.array_equal(source.read(1)[0, :, 0], _imread_all(files[1]))
        reference = Side(_imread_all, (files[index] for index in theirs))
        compare(Side(source.read, mine), reference, image_shape)


@pytest.mark.limit("reference", "stats")
@pytest.mark.parametrize("format_name", ["tiff"])
def test_stats(compare: Compare, plate: Path, image_shape: str) -> None:
    """Measuring the values of all pixels of fields in deflate-compressed TIFFs, including opening."""

    def preload(_: None) -> None:
        OMEArrowDatasetNumpy(plate, pattern=_NAMED, progress=False)

    def measure(_: None) -> None:
        omearrow_ds.stats(plate, pattern=_NAMED)

    compare(Side(measure, repeat(None)), Side(preload, repeat(None)), image_shape)


@pytest.fixture
def plate(datasets: Datasets, fmt: Format, tmp_path: Path) -> Path:
    """Return a folder of deflate-compressed TIFFs with one channel each, three per field."""
    if not hasattr(omearrow_ds, "stats"):
        pytest.skip("this version finds no fields by names")
    with open_images(datasets.path(fmt), fmt.name) as source:
        if len(set(map(tuple, source.shapes.tolist()))) > 1:
            pytest.skip(NO_BATCH)
        planes = min(len(source) // len(_CHANNELS), _FIELDS) * len(_CHANNELS)
        for number, image in enumerate(source.take(range(planes))):
            site, channel = divmod(number, len(_CHANNELS))
            name = f"A1_s{site}_{_CHANNELS[channel]}.tif"
            tifffile.imwrite(tmp_path / name, image[0, 0, 0], compression="zlib", photometric="minisblack")
    return tmp_path


def _imread_all(files: Sequence[str]) -> Array:
    return np.stack([tifffile.imread(file) for file in files])


@pytest.fixture
def opened(benchmark: BenchmarkFixture, fmt: Format, engine: str | None, datasets: Datasets) -> Iterator[ImageSource]:
    """Yield an open collection, and record the engine that reads it."""
    options: dict[str, Any] = {} if engine is None else {"engine": engine}
    if not options.keys() <= inspect.signature(open_images).parameters.keys():
        pytest.skip("this version reads the format by one engine alone")
    with open_images(datasets.path(fmt), fmt.name, **options) as source:
        benchmark.extra_info.update(engine=getattr(source, "engine", None), images=len(source))
        yield source


@pytest.fixture
def image_shape(datasets: Datasets, fmt: Format) -> str:
    """Return the common shape of the images as in the tables."""
    return datasets.image_shape(fmt)


@pytest.fixture
def imread(datasets: Datasets, seed: int) -> Side:
    """Return the reference of random reads: tifffile reading one file of a TIFF folder of the same images."""
    files = sorted(path for path in datasets.path(get_format("tiff")).iterdir() if path.suffix == ".tif")
    order = random_indices(len(files), seed)[1]
    return Side(tifffile.imread, (str(files[index]) for index in order))


class _ListDataset(Dataset[torch.Tensor]):
    """Naive dataset: arrays in a list, and scaled copies as samples."""

    def __init__(self, pixels: Array, divisor: np.float32) -> None:
        self._images = [image.copy() for image in pixels]
        self._divisor = divisor

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._images[index].copy().astype(np.float32) / self._divisor)


def _naive_sample(path: Path, dataset: OMEArrowDataset) -> Callable[[int], torch.Tensor]:
    """Return a function that reads a sample of an open memory-mapped table by ``as_py()``."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    column = table[0]
    dtype = dataset.source.dtypes[0]
    shape, divisor = dataset.shape, divisor_of(dtype)

    def sample(index: int) -> torch.Tensor:
        pixels = [chunk["pixels"] for chunk in column[index].as_py()["chunks"]]
        return torch.from_numpy(np.array(pixels, dtype).reshape(shape).astype(np.float32) / divisor)

    return sample


def _floor_sample(pixels: Array, divisor: np.float32, index: int) -> torch.Tensor:
    sample = np.empty(pixels.shape[1:], np.float32)
    np.true_divide(pixels[index], divisor, out=sample, dtype=np.float32, casting="unsafe")
    return torch.from_numpy(sample)


def _case(source: ImageSource, engine: str | None) -> str:
    """Return the format that selects the target, or an empty text for an explicit engine without a target."""
    return source.format.name if engine is None else ""


def _assert_equal(dataset: OMEArrowDataset, reference: Callable[[int], torch.Tensor]) -> None:
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        assert torch.equal(dataset[index], reference(index)), f"sample {index} differs from the reference's"
