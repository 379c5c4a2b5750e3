"""Figures of collections in parts other than ratios of times, each printed by one command.

``python -m benchmarks.support.parts_figures open`` (1,000 files of others, and descriptors while all are read),
``index`` (opening 1,000,000 images and 8 columns), ``memory`` (of a worker that makes parts, of ``--part-mib`` or the
format's own size) or ``wells`` (distinct ones in a batch).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.support.library import default_part_bytes, formats, get_format
from benchmarks.support.memory import Measured, held
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, open_images, write_images

_PARTS, _IMAGES, _SHAPE = 1000, 1_000_000, (1, 5, 1, 128, 128)
_FIELD, _PARTS_MADE = (1, 5, 1, 400, 400), 4
_WELLS, _CELLS, _BATCH = 384, 60, 64
_MB = 1e6


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[*_FIGURES, "memory"])
    parser.add_argument("--formats", nargs="+", metavar="NAME")
    parser.add_argument("--part-mib", nargs="+", type=int, help="sizes of parts whose memory is printed")
    parser.add_argument("--folder", type=Path, help="where the collections are made, and removed (default: temporary)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.figure == "memory":
            _memory(Path(folder), options.formats, options.part_mib)
        else:
            _FIGURES[options.figure](Path(folder), options.formats)


def _open(folder: Path, names: list[str] | None) -> None:
    """Print the time to open 1,000 files of two images, and the file descriptors open while all are read."""
    print(f"{'format':<14}{'open, s':>10}{'descriptors':>14}")
    for name in names or ["parquet", "arrow", "lance", "vortex", "duckdb"]:
        suffix = next(fmt.suffix for fmt in formats() if fmt.name == name)
        (folder / name).mkdir()
        for number in range(_PARTS):
            images = [np.full((8, 8), number, np.uint16)] * 2
            write_images(images, folder / name / f"{number}{suffix}", name, columns={"n": [number] * 2})
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as fresh:
            open_s, most = fresh.submit(_open_and_read, str(folder / name / f"*{suffix}"), name).result()
        print(f"{name:<14}{open_s:>10.2f}{most:>14}", flush=True)


def _open_and_read(pattern: str, name: str) -> tuple[float, int]:
    """Return the seconds of opening, and the largest number of additional descriptors while images are read."""
    before = _descriptors()
    start = perf_counter()
    source: Any = open_images(pattern, name)
    open_s, most = perf_counter() - start, _descriptors() - before
    images = []
    for index in np.random.default_rng(0).permutation(len(source)).tolist():
        images.append(source.read(index))
        assert images[-1][0, 0, 0, 0, 0] == index // 2
        most = max(most, _descriptors() - before)
    return open_s, most


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a few thousand times


def _index(folder: Path, names: list[str] | None) -> None:
    """Print the time and memory to open 1,000,000 images in 1,000 parts that are not read."""
    del names
    (folder / "million.parts").mkdir()
    numbers = np.arange(_IMAGES)
    columns: dict[str, Any] = {
        f"feature_{number}": np.random.default_rng(number).random(_IMAGES) for number in range(4)
    }
    columns |= {name: numbers // divisor % 384 for name, divisor in (("plate", 384 * 50), ("site", 1))}
    wells = pa.array([f"{'ABCDEFGHIJKLMNOP'[well // 24]}{well % 24 + 1:02d}" for well in range(384)])
    table = pa.table({**columns, "well": wells.take(numbers // 50 % 384), "treatment": wells.take(numbers // 7 % 384)})
    ids = pa.array([f"BR00117035_{number:07d}" for number in range(_IMAGES)])
    per_part = _IMAGES // _PARTS
    sizes = {f"size_{axis}": np.full(_IMAGES, size, np.int32) for axis, size in zip("tczyx", _SHAPE, strict=True)}
    index_columns = {"id": ids, "part": pa.array(numbers // per_part, pa.int32()), "row": pa.array(numbers % per_part)}
    index_columns |= {**sizes, "dtype": pa.array(["uint16"] * _IMAGES)}
    index_columns["checksum"] = pa.array([f"xxh3-128:{number:032x}" for number in range(_IMAGES)])
    images = pa.StructArray.from_arrays(
        [pa.array(column) for column in index_columns.values()], names=list(index_columns)
    )
    index = folder / "million.parts" / "index.parquet"
    pq.write_table(
        pa.table({"omearrow_ds": images, **{name: table[name] for name in table.column_names}}),
        index,
        compression="zstd",
    )
    part_names = (f"{number:05d}-{number:032x}.arrow" for number in range(_PARTS))
    parts = [{"name": name, "images": per_part, "size_bytes": 2**26} for name in part_names]
    digest = hashlib.blake2b(index.read_bytes(), digest_size=16).hexdigest()
    manifest = {"format": "arrow", "parts": parts, "index": digest, "version": 1}
    index.with_name("parts.json").write_text(json.dumps(manifest))
    for _ in range(3):
        with Measured("open", folder / "million.parts") as measured:
            measured.run()
        figures = measured.figures
        print(f"{figures['open_s']:.2f} s, {figures['growth_bytes'] / _MB:.0f} MB")


def _memory(folder: Path, names: list[str] | None, sizes_mib: list[int] | None) -> None:
    """Print the private memory of a worker that writes parts of some sizes or the default, before and at its peak."""
    print(f"{'format':<14}{'part, MB':>10}{'before':>10}{'at most':>10}{'permuted':>10}{'x part':>10}")
    for name in names or [fmt.name for fmt in formats() if fmt.name not in ("parquet_duck", "ome_arrow")]:
        for part_bytes in [size << 20 for size in sizes_mib or []] or [default_part_bytes(get_format(name))]:
            write_images(noisy_fields(_PARTS_MADE * part_bytes), folder / "fields.arrow", overwrite=True)
            write_arguments = (folder / "fields.arrow", folder / f"{name}.parts", name, part_bytes)
            (before, most), (_, permuted) = worker_bytes(*write_arguments), worker_bytes(*write_arguments, seed=0)
            mb = "".join(f"{size_bytes / _MB:>10.0f}" for size_bytes in (part_bytes, before, most, permuted))
            print(f"{name:<14}{mb}{(max(most, permuted) - before) / part_bytes:>10.1f}", flush=True)


def noisy_fields(size_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
    """Stream 12-bit fields of 1.6 MB, up to ``size_bytes`` in total."""
    for number in range(size_bytes // (2 * math.prod(_FIELD))):
        yield np.random.default_rng(number).integers(0, 4096, _FIELD, np.uint16)


_WORKER = """
import sys
from omearrow_ds.cli import main
from omearrow_ds.storage.formats import get_format
source, target, name, *seed = sys.argv[1:]
get_format(name).module()
print("ready", flush=True)
sys.stdin.readline()
main(["convert", source, target, "--format", name, "--task", "1/1", *seed])
"""


def worker_bytes(source: Path, target: Path, name: str, part_bytes: int, *, seed: int | None = None) -> tuple[int, int]:
    """Return the own memory of a process in bytes before it writes all parts, and its peak meanwhile."""
    words = [sys.executable, "-c", _WORKER, str(source), str(target), name, "--part-bytes", str(part_bytes)]
    words += [] if seed is None else ["--shuffle-seed", str(seed)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as worker:  # noqa: S603  # The arguments are our own.
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()
        before = most = held(worker.pid).own_bytes
        worker.stdin.write("\n")
        worker.stdin.flush()
        while worker.poll() is None:  # Its short final output fits in the pipe.
            most = max(most, held(worker.pid).own_bytes)
            time.sleep(1e-3)
    shutil.rmtree(target)
    assert worker.returncode == 0, words
    return before, most


def _wells(folder: Path, names: list[str] | None) -> None:
    """Print the number of wells per batch of 64: for ordered parts, permuted parts, and all crops in one file."""
    del names
    crops = [np.zeros((1, 1), np.uint8)] * (_WELLS * _CELLS)
    wells = np.repeat(np.arange(_WELLS), _CELLS)
    write_images(crops, folder / "crops.arrow", columns={"well": wells})
    for seed, name in ((None, "ordered"), (0, "permuted")):
        convert(folder / "crops.arrow", folder / f"{name}.parts", part_bytes=_CELLS, shuffle_seed=seed)
    print(f"{'collection':<16}{'wells a batch':>14}{'of global':>12}")
    whole = np.mean(list(_distinct(folder / "crops.arrow")))
    for name in ("crops.arrow", "permuted.parts", "ordered.parts"):
        mean = np.mean(list(_distinct(folder / name)))
        print(f"{name:<16}{mean:>14.1f}{mean / whole:>12.1%}")


def _distinct(path: Path) -> Iterator[int]:
    dataset = OMEArrowDataset(path, preload=False, axes="YX")
    generator = torch.Generator().manual_seed(0)
    loader = OMEArrowDataLoader(dataset, _BATCH, shuffle=True, generator=generator, drop_last=True, num_workers=0)
    wells = np.asarray(dataset.source.columns["well"])
    batches: Any = loader.batch_sampler
    for batch in batches:  # Only the order matters, not the pixels.
        yield len(np.unique(wells[batch]))


_FIGURES = {"open": _open, "index": _index, "wells": _wells}

if __name__ == "__main__":
    main()
