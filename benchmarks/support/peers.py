"""Third-party image loaders, each as a loader of float32 batches (B, ...) in [0, 1], without workers.

Each is set up for speed as its documentation recommends, and imported only when it is measured. They store different
data: `benchmarks.report.targets.KINDS` describes each one.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import tifffile
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

Array = np.ndarray[Any, Any]
LoaderOf = Callable[[Iterable[int]], DataLoader[Any]]


@dataclass(frozen=True, slots=True)
class Collection:
    """Images that another library loads.

    Attributes
    ----------
    pixels, divisor : numpy.ndarray, numpy.float32
        Pixels (N, ...) of the stored dtype, and the divisor that normalizes them.
    path : pathlib.Path or None
        The same images, stored by this package in the format that the library reads.
    scratch : pathlib.Path
        Empty folder on the disk of the data.
    batch_size : int
        Images per batch.
    """

    pixels: Array
    divisor: np.float32
    path: Path | None
    scratch: Path
    batch_size: int

    def scale(self, images: Sequence[Any]) -> torch.Tensor:
        """Return arrays of the stored dtype as a normalized batch of shape (B, *pixels.shape[1:])."""
        batch = np.empty((len(images), *self.pixels.shape[1:]), np.float32)
        for image, sample in zip(images, batch, strict=True):
            pixels = np.asarray(image).reshape(sample.shape)
            np.true_divide(pixels, self.divisor, out=sample, dtype=np.float32, casting="unsafe")
        return torch.from_numpy(batch)

    def scale_bytes(self, images: Sequence[bytes]) -> torch.Tensor:
        """Return the raw bytes of images as a normalized batch."""
        return self.scale([np.frombuffer(image, self.pixels.dtype) for image in images])

    def stream(self, loader: DataLoader[Any], sampler: Iterable[int], rewind: Callable[[], None] = lambda: None) -> Any:
        """Return an iterable over a loader with its own order, limited to the number of batches of a sampler.

        ``rewind`` is called at the start of each epoch.
        """
        return _Stream(loader, math.ceil(len(cast("Sized", sampler)) / self.batch_size), rewind)

    def loader_of(self, dataset: Any, loader: type[DataLoader[Any]] = DataLoader, **options: Any) -> LoaderOf:
        """Return a function that creates the loader for a sampler."""
        return lambda sampler: loader(dataset, batch_size=self.batch_size, sampler=sampler, num_workers=0, **options)


@dataclass(frozen=True, slots=True)
class Peer:
    """Third-party library: its key in names of benchmarks, its name in tables, and its module.

    It is compared with this package reading ``format`` on demand, the same storage or the most similar one. ``make``
    sets it up, given the module and a `Collection`. Slow libraries get ``at_most`` images. A library that ``streams``
    has its own order of images, and uses only the length of a sampler.
    """

    key: str
    name: str
    module: str
    format: str | None
    make: Callable[[Any, Collection], LoaderOf]
    at_most: int | None = None
    streams: bool = False

    @property
    def missing(self) -> str | None:
        """How to install the library, or None if it is installed."""
        package = self.module.split(".", maxsplit=1)[0]
        if importlib.util.find_spec(package) is not None:
            return None
        return f"{package} is not installed: pip install 'omearrow-ds[peers]'"

    def set_up(self, collection: Collection) -> LoaderOf:
        """Return a function that creates the loader for a sampler."""
        return self.make(importlib.import_module(self.module), collection)


class _Stream:
    """First batches of an epoch of a loader with its own order."""

    def __init__(self, loader: DataLoader[Any], batches: int, rewind: Callable[[], None]) -> None:
        self._loader, self._batches, self._rewind = loader, batches, rewind

    def __iter__(self) -> Iterator[Any]:
        self._rewind()
        return islice(self._loader, self._batches)


class _Batches(Dataset[Any]):
    """Dataset that reads a batch of images per call."""

    def __init__(self, read: Callable[[list[int]], Any]) -> None:
        self._read = read

    def __getitems__(self, indices: list[int]) -> Any:
        return self._read(indices)


def _monai(data: Any, collection: Collection) -> LoaderOf:
    """Cache the output of a MONAI transform, as its tutorials do: tensors with metadata."""
    transforms = importlib.import_module("monai.transforms")
    scale = transforms.ScaleIntensityRange(0, float(collection.divisor), 0, 1)
    cached = data.CacheDataset(list(collection.pixels.astype(np.float32)), transform=[scale], progress=False)
    return collection.loader_of(cached, data.DataLoader)


def _monai_plain(data: Any, collection: Collection) -> LoaderOf:
    """Cache plain float32 tensors without a transform, the minimal work of CacheDataset."""
    scaled = torch.from_numpy(collection.pixels.astype(np.float32) / collection.divisor)
    cached = data.CacheDataset(list(scaled.unbind(0)), transform=[], progress=False)
    return collection.loader_of(cached, data.DataLoader)


def _datasets(datasets: Any, collection: Collection) -> LoaderOf:
    """Memory-map an Arrow file of fixed-size lists, its fastest pixel column, and request and cast whole batches."""
    count = len(collection.pixels)
    path = collection.scratch / "datasets.arrow"
    column = pa.FixedSizeListArray.from_arrays(pa.array(collection.pixels.reshape(-1)), collection.pixels[0].size)
    with pa.ipc.new_stream(path, pa.schema([("pixels", column.type)])) as stream:
        for start in range(0, count, 1000):
            stream.write_batch(pa.record_batch([column[start : start + 1000]], ["pixels"]))
    images = datasets.Dataset.from_file(str(path)).with_format("torch", dtype=torch.float32)
    shape = collection.pixels.shape[1:]

    def scaled(batch: Any) -> torch.Tensor:
        pixels: torch.Tensor = batch["pixels"]
        return pixels.view(-1, *shape).div_(float(collection.divisor))

    def loader_of(sampler: Iterable[int]) -> DataLoader[Any]:
        batches: Any = BatchSampler(sampler, collection.batch_size, drop_last=False)
        return DataLoader(images, batch_size=None, sampler=batches, collate_fn=scaled)

    return loader_of


def _lance(lance: Any, collection: Collection) -> LoaderOf:
    """Use Lance's map-style dataset on our file; it returns the rows of a batch as dicts."""
    dtype = collection.pixels.dtype

    def scaled(rows: list[dict[str, Any]]) -> torch.Tensor:
        return collection.scale([np.concatenate(list(map(pixels, row["ome_image"]["chunks"]))) for row in rows])

    def pixels(chunk: dict[str, Any]) -> Array:
        return np.frombuffer(chunk["pixel_bytes"], dtype)

    return collection.loader_of(lance.SafeLanceDataset(str(collection.path)), collate_fn=scaled)


def _lancedb_table(collection: Collection) -> Any:
    """Open our Lance dataset as a LanceDB table."""
    assert collection.path is not None
    return importlib.import_module("lancedb").connect(collection.path.parent).open_table(collection.path.stem)


def _lancedb_pixels(collection: Collection, batch: pa.RecordBatch) -> list[Array]:
    """Return the pixels of each image in a batch of rows."""
    chunks = batch.column("ome_image").field("chunks")
    pixels = chunks.flatten().field("pixel_bytes")
    per_image = len(pixels) // len(batch)
    views = [np.frombuffer(value.as_buffer(), collection.pixels.dtype) for value in pixels]
    return [np.concatenate(views[start : start + per_image]) for start in range(0, len(views), per_image)]


def _permutation(permutation: Any, collection: Collection) -> LoaderOf:
    """Use LanceDB's map-style dataset on our file, with one request and one Arrow record batch per batch."""
    rows = permutation.Permutation.identity(_lancedb_table(collection)).select_columns(["ome_image"])
    read = rows.with_transform(partial(_lancedb_pixels, collection))
    return collection.loader_of(read, collate_fn=collection.scale)


def _streaming(streaming: Any, collection: Collection) -> LoaderOf:
    """Stream shuffled rows of our file, decoded in LanceDB's thread pool and batched by its loader.

    All epochs have the order of the first one, so LanceDB does not compute another order.
    """
    transform = partial(_lancedb_pixels, collection)
    images = streaming.StreamingDataset(_lancedb_table(collection), columns=["ome_image"], transform=transform)
    loader = streaming.StreamingDataLoader(
        images, batch_size=collection.batch_size, num_workers=0, collate_fn=collection.scale
    )
    start = images.state_dict()

    def loader_of(sampler: Iterable[int]) -> Any:
        return collection.stream(loader, sampler, partial(images.load_state_dict, start))

    return loader_of


def _ome_arrow(ome_arrow: Any, collection: Collection) -> LoaderOf:
    """Use ome-arrow's reader on its own layout, one uncompressed chunk and row group per image."""
    path = collection.scratch / "ome_arrow"
    planes = collection.pixels.reshape(len(collection.pixels), -1, *collection.pixels.shape[-2:])
    images = list(planes[:, None, :, None])
    ome_arrow.write_ome_arrow_dataset(images, path, chunk_shape=images[0].shape, compression=None)
    opened = ome_arrow.OMEArrowDataset(path)
    ids = opened.image_ids
    read = _Batches(lambda indices: opened.read_many([ids[index] for index in indices]))
    return collection.loader_of(read, collate_fn=collection.scale)


def _tensorstore(tensorstore: Any, collection: Collection) -> LoaderOf:
    """Keep all arrays of our OME-Zarr folder open, and read the images of a batch concurrently."""
    specs = [{"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}} for path in _arrays(collection)]
    stores = [opening.result() for opening in [tensorstore.open(spec, open=True, read=True) for spec in specs]]

    def read(indices: list[int]) -> list[Array]:
        return [reading.result() for reading in [stores[index].read() for index in indices]]

    return collection.loader_of(_Batches(read), collate_fn=collection.scale)


def _zarr(zarr: Any, collection: Collection) -> LoaderOf:
    """Keep all arrays of our OME-Zarr folder open."""
    arrays = [zarr.open_array(path, mode="r") for path in _arrays(collection)]
    read = _Batches(lambda indices: [arrays[index][...] for index in indices])
    return collection.loader_of(read, collate_fn=collection.scale)


def _tifffile(_: Any, collection: Collection) -> LoaderOf:
    """Read one file a sample, as most write it first."""
    assert collection.path is not None
    files = sorted(str(path) for path in collection.path.iterdir() if path.suffix == ".tif")
    read = _Batches(lambda indices: [tifffile.imread(files[index]) for index in indices])
    return collection.loader_of(read, collate_fn=collection.scale)


def _litdata(litdata: Any, collection: Collection) -> LoaderOf:
    """Stream shuffled chunks of raw bytes of 64 MB, the default size, with LitData's loader."""
    folder = str(collection.scratch / "litdata")
    cache = importlib.import_module("litdata.streaming.cache").Cache(folder, chunk_bytes="64MB")
    for index, image in enumerate(collection.pixels):
        cache[index] = image.tobytes()
    cache.done()
    cache.merge()
    images = litdata.StreamingDataset(folder, shuffle=True)
    loader = litdata.StreamingDataLoader(
        images, batch_size=collection.batch_size, num_workers=0, collate_fn=collection.scale_bytes
    )
    return partial(collection.stream, loader)


def _webdataset(webdataset: Any, collection: Collection) -> LoaderOf:
    """Stream shuffled tar files of 64 MB through a buffer of 1,000 samples, batched in the pipeline."""
    pattern = str(collection.scratch / "shard-%06d.tar")
    with webdataset.ShardWriter(pattern, maxsize=64_000_000, verbose=0) as shards:
        for index, image in enumerate(collection.pixels):
            shards.write({"__key__": f"{index:08d}", "bin": image.tobytes()})
    files = sorted(map(str, collection.scratch.glob("shard-*.tar")))
    images = webdataset.WebDataset(files, shardshuffle=len(files)).shuffle(1000).to_tuple("bin")
    batches = images.batched(
        collection.batch_size, collation_fn=lambda samples: collection.scale_bytes([raw for (raw,) in samples])
    )
    return partial(collection.stream, webdataset.WebLoader(batches, batch_size=None, num_workers=0))


def _arrays(collection: Collection) -> list[Path]:
    assert collection.path is not None
    groups = sorted(path for path in collection.path.iterdir() if path.is_dir())
    return [path / "0" for path in groups[: len(collection.pixels)]]


PEERS = (
    Peer("monai", "MONAI DataLoader(CacheDataset)", "monai.data", None, _monai),
    Peer("monai_plain", "MONAI, plain tensors in cache", "monai.data", None, _monai_plain),
    Peer("datasets", "HuggingFace datasets", "datasets", "arrow", _datasets),
    Peer("lance", "Lance's SafeLanceDataset", "lance.torch.data", "lance", _lance),
    Peer("lancedb", "LanceDB's Permutation", "lancedb.permutation", "lance", _permutation),
    Peer("lancedb_stream", "LanceDB's StreamingDataset", "lancedb.streaming", "lance", _streaming, streams=True),
    Peer("ome_arrow", "ome-arrow's read_many", "ome_arrow.dataset", "parquet", _ome_arrow, at_most=500),
    Peer("tensorstore", "tensorstore", "tensorstore", "ome_zarr", _tensorstore, at_most=1000),
    Peer("zarr", "zarr", "zarr", "ome_zarr", _zarr, at_most=1000),
    Peer("tifffile", "tifffile.imread", "tifffile", "tiff", _tifffile),
    Peer("litdata", "LitData's StreamingDataset", "litdata", "arrow", _litdata, streams=True),
    Peer("webdataset", "WebDataset", "webdataset", "arrow", _webdataset, streams=True),
)
