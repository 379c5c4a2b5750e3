"""``python -m benchmarks.support.pixels --data DIR --json FILE``: a checksum of what every public way to read gives.

The gate runs it on both sides before it times anything: what differs in its result is not compared in its speed. It
also makes the collections that the gate measures on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.cells import SIDE
from benchmarks.support.data import encodings
from benchmarks.support.gated import Collections, gated_objects, workloads_of
from benchmarks.support.library import HAS_OBJECTS, formats
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy, open_images

_BATCH, _LARGE_BATCH, _CROP = 7, 33, (40, 60)  # The last batch is smaller.


def checksums(collections: Collections) -> dict[str, str]:
    """Return hashes of shape, dtype and bytes of all arrays that each way to read returns, by its name."""
    ways: dict[str, str] = {}
    for fmt in formats():
        for size in workloads_of(fmt):
            for encoding in encodings(fmt):
                if fmt.missing_backend is None:
                    path = collections.path(size, fmt, encoding)
                    ways |= {
                        f"{fmt.name} {encoding}, {size}: {way}": _hash(arrays) for way, arrays in _ways(fmt, path, size)
                    }
    return ways


def _ways(fmt: Format, path: Path, size: str) -> Iterator[tuple[str, Iterable[Any]]]:
    with open_images(path, fmt.name) as source:
        backwards = range(len(source) - 1, -1, -1)
        yield "source.take", source.take(backwards)
        yield "source.read", map(source.read, backwards[:_BATCH])
    for preload in (True, False):
        access = "preloaded" if preload else "on demand"
        dataset = OMEArrowDataset(path, fmt.name, preload=preload)
        mixed = np.random.default_rng(0).permutation(len(dataset)).tolist()
        yield f"dataset[i], {access}", map(dataset.__getitem__, mixed[:_BATCH])
        yield f"loader, {access}", OMEArrowDataLoader(dataset, _BATCH, num_workers=0, sampler=backwards)
        yield (
            f"loader, large batches, {access}",
            OMEArrowDataLoader(dataset, _LARGE_BATCH, num_workers=0, sampler=mixed),
        )
        *_, height, width = dataset.shape or _CROP
        crop_size = (min(height, _CROP[0]), min(width, _CROP[1]))
        cropped = OMEArrowDataset(path, fmt.name, preload=preload, crop_size=crop_size)
        yield f"cropped, {access}", OMEArrowDataLoader(cropped, _LARGE_BATCH, num_workers=0, sampler=mixed)
        if HAS_OBJECTS and size == "large":
            crops: dict[str, Any] = {"objects": gated_objects(path, fmt), "crop_size": (SIDE, SIDE), "masks": path}
            masked = OMEArrowDatasetNumpy(path, fmt.name, preload=preload, progress=False, **crops)
            yield f"crops and masks, {access}", chain.from_iterable(masked.__getitems__(range(len(masked))))
        if len(dataset) <= _LARGE_BATCH:
            workers = OMEArrowDataLoader(dataset, _BATCH, num_workers=1, sampler=mixed)
            yield f"loader, one worker, {access}", workers
        arrays = OMEArrowDatasetNumpy(path, fmt.name, preload=preload, normalize=False)
        yield f"NumPy dataset, {access}", map(arrays.__getitem__, backwards[:_BATCH])


def _hash(arrays: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for array in map(np.asarray, arrays):
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def main() -> None:
    """Write the checksums as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of the collections")
    parser.add_argument("--json", type=Path, required=True, help="where to write the checksums")
    chosen = parser.parse_args()
    with Collections(chosen.data.absolute()) as collections:
        chosen.json.write_text(json.dumps(checksums(collections), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
