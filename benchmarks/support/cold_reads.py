"""Time and bytes of the first batch and of random batches of a file that the page cache does not hold.

``python -m benchmarks.support.cold_reads`` writes images into a temporary folder, once per format, and reads each
collection a few times in processes of their own. It prints medians: seconds and MB of opening and of the first batch,
microseconds per image of the next batches, the bytes read per byte needed, and the share of the throughput of
``preadv`` from 16 threads that reads equally large ranges of the Arrow file.

Pass ``--folder`` on the disk to be measured: a temporary folder may be in memory, where nothing is cold. The read-ahead
of that disk is printed, since page faults read that much. `docs/how-to/larger-than-memory.md` says how to set it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.support.cold import drop, files_of, read_bytes, why_not
from benchmarks.support.library import read_ahead_bytes
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, write_images

_FORMATS = ("arrow", "parquet", "lance", "vortex", "tiff", "ome_zarr")
_BATCH_SIZE, _QUEUE_DEPTH = 16, 16


def main(arguments: list[str] | None = None) -> None:
    """Measure cold reads, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="images per collection (default: 10,000, 0.9 GB)")
    parser.add_argument("--shape", type=int, nargs=3, default=[5, 96, 96], metavar=("C", "Y", "X"))
    parser.add_argument("--formats", nargs="+", default=_FORMATS, metavar="NAME")
    parser.add_argument("--batches", type=int, default=20, help="after the first one (default: 20)")
    parser.add_argument("--model-ms", type=float, default=0, help="simulated time of a model per batch, not counted")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of the loader; bytes are not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the collections are made, and removed (default: temporary)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"read-ahead {read_ahead_bytes(Path(folder).stat().st_dev) // 1024} kB, batches of {_BATCH_SIZE}")
        paths = {name: Path(folder, f"images.{name}") for name in options.formats}
        for name, path in paths.items():
            write_images(_images(options.images, options.shape), path, name, axes="CYX")
        first = next(iter(paths.values()))
        if reason := why_not(files_of(first)):
            raise SystemExit(f"{folder}: {reason}; pass --folder on another disk")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
        floors: list[float] = []
        for seed in range(options.rounds):
            for name, path in paths.items():
                drop(files_of(path))
                results[name].append(_in_process(path, seed, options.batches, options.model_ms, options.workers))
            floors.append(
                _floor_s(_largest(first), 2 * int(np.prod(options.shape)), options.batches * _BATCH_SIZE, seed)
            )
        _print(results, statistics.median(floors))


def _images(count: int, shape: list[int]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield images of noise, which cannot be compressed."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield generator.integers(0, 2**16, shape, dtype=np.uint16)


def _in_process(path: Path, seed: int, num_batches: int, model_ms: float, num_workers: int) -> dict[str, float]:
    arguments = [str(path), *map(str, (seed, num_batches, model_ms, num_workers))]
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    output = subprocess.check_output(command, text=True)  # noqa: S603
    result: dict[str, float] = json.loads(output)
    return result


_PROGRAM = """
import json, sys
from pathlib import Path
from benchmarks.support.cold_reads import read
path, seed, num_batches, model_ms, num_workers = sys.argv[1:]
print(json.dumps(read(Path(path), int(seed), int(num_batches), float(model_ms), int(num_workers))))
"""


def read(path: Path, seed: int, num_batches: int, model_ms: float, num_workers: int) -> dict[str, float]:
    """Return seconds, and bytes that this process reads, of opening, of the first batch and of the next batches.

    After each batch, the process multiplies matrices for ``model_ms``, which is not counted.
    """
    bounds = [(perf_counter(), read_bytes())]
    dataset = OMEArrowDataset(path, preload=False)
    bounds.append((perf_counter(), read_bytes()))
    torch.manual_seed(seed)
    loader = OMEArrowDataLoader(dataset, _BATCH_SIZE, shuffle=True, num_workers=num_workers)
    batches = itertools.islice(loader, 1 + num_batches)
    image_bytes = 2 * next(batches)[0].numel()
    bounds.append((perf_counter(), read_bytes()))
    count, busy_s = 0, _work(model_ms)
    for batch in batches:
        count += len(batch)
        busy_s += _work(model_ms)
    bounds.append((perf_counter() - busy_s, read_bytes()))
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(bounds)]
    (open_s, open_bytes), (first_s, first_bytes), (next_s, next_bytes) = steps
    return {
        "open_s": open_s,
        "open_MB": open_bytes / 1e6,
        "first_s": first_s,
        "first_MB": first_bytes / 1e6,
        "us_per_image": next_s / count * 1e6,
        "read_per_needed": next_bytes / (count * image_bytes),
    }


def _work(model_ms: float) -> float:
    """Multiply matrices, which releases the global interpreter lock like a model, and return the elapsed seconds."""
    start, matrix = perf_counter(), torch.ones(256, 256)
    while perf_counter() < start + model_ms / 1000:
        matrix @ matrix
    return perf_counter() - start


def _largest(path: Path) -> Path:
    return max(files_of(path), key=lambda file: file.stat().st_size)


def _floor_s(file: Path, num_bytes: int, count: int, seed: int) -> float:
    """Return seconds per range that `preadv` needs for random ranges of a cold file, from 16 threads."""
    drop([file])
    starts = np.random.default_rng(seed).integers(0, file.stat().st_size - num_bytes, count).tolist()
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        with ThreadPoolExecutor(_QUEUE_DEPTH) as pool:
            buffers = [bytearray(num_bytes) for _ in range(_QUEUE_DEPTH)]
            shares = [starts[number::_QUEUE_DEPTH] for number in range(_QUEUE_DEPTH)]

            def read_share(share: list[int], buffer: bytearray) -> None:
                for start in share:
                    os.preadv(descriptor, [buffer], start)

            start = perf_counter()
            list(pool.map(read_share, shares, buffers))
            return (perf_counter() - start) / count
    finally:
        os.close(descriptor)


def _print(results: dict[str, list[dict[str, float]]], floor_s: float) -> None:
    names = list(next(iter(results.values()))[0])
    print(f"{'format':<12}" + "".join(f"{name:>17}" for name in names) + f"{'share of preadv':>17}")
    for name, rounds in results.items():
        medians = [statistics.median(figures[key] for figures in rounds) for key in names]
        share = floor_s * 1e6 / medians[names.index("us_per_image")]
        print(f"{name:<12}" + "".join(f"{value:>17.2f}" for value in medians) + f"{share:>17.2f}", flush=True)
    print(f"{'preadv':<12}{'':>68}{floor_s * 1e6:>17.2f}{1:>17.2f}{1:>17.2f}")


if __name__ == "__main__":
    main()
