"""Readers of collections in an object store: this package and other libraries, each in its own process.

``python -m benchmarks.support.scale read NAME BUCKET CACHE`` reads two epochs of shuffled batches of 64 images as
float32 [0, 1], the first with an empty cache, and prints the cost of each. ``write NAME FOLDER DATA BUCKET`` writes
the collection to read. Environment variables set the credentials and the endpoint.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, open_images

BATCH, PART_BYTES, SHAPE = 64, 2**24, (5, 96, 96)
_CACHE_BYTES = 10**11
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """Library that reads collections.

    Attributes
    ----------
    name, module
        Name in tables, and module to import.
    write, read
        Functions that write its collection from our file, to a folder that is uploaded or directly to the bucket, and
        that return an iterable of the batches of an epoch, given a bucket and a cache.
    caches
        Whether the second epoch reads data that the first one cached.
    """

    name: str
    module: str
    write: Callable[[Path, Path, str], None]
    read: Callable[[str, Path], Iterable[Any]]
    caches: bool = True

    @property
    def missing(self) -> str | None:
        """Reason why the library cannot be used, or None if it can."""
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"cannot be imported: {error}"
        return None


def _scaled(images: list[Array]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).to(torch.float32).div_(65535)


def _images(data: Path) -> list[Array]:
    with open_images(data) as source:
        return [np.array(image).reshape(SHAPE) for image in source.take(range(len(source)))]


def _ours(form: str) -> Reader:
    def write(folder: Path, data: Path, bucket: str) -> None:
        del folder
        convert(data, f"s3://{bucket}/{form}.parts", form, part_bytes=PART_BYTES, shuffle_seed=0)

    def read(bucket: str, cache: Path) -> Iterable[Any]:
        url = f"s3://{bucket}/{form}.parts"
        dataset = OMEArrowDataset(url, preload=False, part_cache=cache, part_cache_bytes=_CACHE_BYTES)
        return OMEArrowDataLoader(dataset, BATCH, shuffle=True, num_workers=0)  # As other libraries with a cache.

    return Reader(f"ours, parts of {form}", "omearrow_ds", write, read)


def _local_read(bucket: str, cache: Path) -> Iterable[Any]:
    del bucket
    dataset = OMEArrowDataset(cache.parent / "data.arrow", preload=False)
    return OMEArrowDataLoader(dataset, BATCH, shuffle=True, num_workers=0)


def _litdata_write(folder: Path, data: Path, bucket: str) -> None:
    del bucket
    cache = importlib.import_module("litdata.streaming.cache").Cache(str(folder), chunk_bytes="16MB")
    for index, image in enumerate(_images(data)):
        cache[index] = image.tobytes()
    cache.done()
    cache.merge()


def _litdata_read(bucket: str, cache: Path) -> Iterable[Any]:
    litdata = importlib.import_module("litdata")
    downloader = importlib.import_module("litdata.streaming.downloader")
    vars(downloader)["_OBSTORE_CLIENT_OPTIONS"]["allow_http"] = True  # Else 0.2.76 refuses plain http: "BadScheme".
    of_server = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": os.environ["AWS_REGION"]}
    keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    url = f"s3://{bucket}/litdata"
    images = litdata.StreamingDataset(url, cache_dir=str(cache), shuffle=True, storage_options={**of_server, **keys})

    def collated(raw: list[bytes]) -> torch.Tensor:
        return _scaled([np.frombuffer(encoded, np.uint16).reshape(SHAPE) for encoded in raw])

    loader: Iterable[Any] = litdata.StreamingDataLoader(images, batch_size=BATCH, num_workers=0, collate_fn=collated)
    return loader


def _mosaic_write(folder: Path, data: Path, bucket: str) -> None:
    del bucket
    streaming = importlib.import_module("streaming")
    with streaming.MDSWriter(out=str(folder), columns={"x": "ndarray:uint16:5,96,96"}, size_limit=PART_BYTES) as writer:
        for image in _images(data):
            writer.write({"x": image})


def _mosaic_read(bucket: str, cache: Path) -> Iterable[Any]:
    streaming = importlib.import_module("streaming")
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()
    images = streaming.StreamingDataset(
        remote=f"s3://{bucket}/mosaic", local=str(cache), shuffle=True, batch_size=BATCH, num_canonical_nodes=1
    )

    def collated(samples: list[Any]) -> torch.Tensor:
        return _scaled([sample["x"] for sample in samples])

    loader: Iterable[Any] = streaming.StreamingDataLoader(images, batch_size=BATCH, num_workers=0, collate_fn=collated)
    return loader


def _webdataset_write(folder: Path, data: Path, bucket: str) -> None:
    del bucket
    webdataset = importlib.import_module("webdataset")
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=PART_BYTES, verbose=0) as shards:
        for index, image in enumerate(_images(data)):
            shards.write({"__key__": f"{index:08d}", "bin": image.tobytes()})


def _webdataset_read(bucket: str, cache: Path) -> Iterable[Any]:
    """Read a public bucket by curl in two workers, as the WebDataset guide recommends."""
    del cache
    webdataset = importlib.import_module("webdataset")
    base_url = f"{os.environ['AWS_ENDPOINT_URL']}/public/{bucket}/webdataset"
    urls = [f"pipe:curl -s -f {base_url}/{number:05d}.tar" for number in range(int(os.environ["SHARDS"]))]
    images = webdataset.WebDataset(urls, shardshuffle=len(urls), nodesplitter=None).shuffle(700).to_tuple("bin")
    return torch.utils.data.DataLoader(images, batch_size=BATCH, num_workers=2, collate_fn=_of_tar)


def _of_tar(samples: list[tuple[bytes]]) -> torch.Tensor:
    return _scaled([np.frombuffer(raw, np.uint16).reshape(SHAPE) for (raw,) in samples])


def _nothing(folder: Path, data: Path, bucket: str) -> None:
    del folder, data, bucket


READERS = {
    "arrow": _ours("arrow"),
    "vortex": _ours("vortex"),
    "local": Reader("ours, one local file", "omearrow_ds", _nothing, _local_read),
    "litdata": Reader("LitData", "litdata", _litdata_write, _litdata_read),
    "mosaic": Reader("MosaicML Streaming", "streaming", _mosaic_write, _mosaic_read),
    "webdataset": Reader("WebDataset, 2 workers", "webdataset", _webdataset_write, _webdataset_read, caches=False),
}


def _epoch(batches: Iterable[Any]) -> dict[str, Any]:
    start_s, cpu_s, first_s, total, checksums = perf_counter(), sum(os.times()[:4]), 0.0, 0, []
    for batch in batches:
        first_s = first_s or perf_counter() - start_s
        total += len(batch)
        checksums += np.asarray(batch).reshape(len(batch), -1)[:, :64].sum(1, np.float64).tolist()
    seconds, cpu_s = perf_counter() - start_s, sum(os.times()[:4]) - cpu_s  # Includes child processes that have ended.
    return {"seconds": seconds, "cpu_s": cpu_s, "first_s": first_s, "images": total, "distinct": len(set(checksums))}


def main(action: str, name: str, *words: str) -> None:
    """Write a collection, or read it and print the cost."""
    torch.set_num_threads(1)
    reader = READERS[name]
    if action == "write":
        folder, data, bucket = words
        reader.write(Path(folder), Path(data), bucket)
        return
    bucket, cache = words
    start_s = perf_counter()
    batches = reader.read(bucket, Path(cache))
    opening_s = perf_counter() - start_s
    cold = _epoch(batches)
    print(json.dumps({"opening_s": opening_s, "cold": cold, "warm": _epoch(batches)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
