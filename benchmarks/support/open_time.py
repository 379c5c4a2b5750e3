"""Time of opening many images, and its growth with their number.

``python -m benchmarks.support.open_time`` writes tiny images into a temporary folder, opens each collection a few
times, and prints milliseconds of processor time and their growth relative to the number of images: 1.0 is linear.

Processor time on 2026-11-22, one core of a quiet machine, in ms:

                     10,000   100,000   growth
    parquet              30       274     0.93
    parquet_duck         21       230     1.12
    lance                37       196     0.53
    vortex               17       132     0.80
    arrow                 9        77     0.89
    duckdb               60       202     0.34
    tiff                 43       404     0.95
    tiff, no list     5,586    48,983     0.88
    ome_zarr            106     1,732     1.63
    ome_zarr, no list   626     7,420     1.19

A list is the file that this package writes next to the images of a folder. Without it, each image is inspected.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from benchmarks.support.library import formats
from omearrow_ds import open_images, write_images


def opening_s(path: Path, rounds: int = 3, enough_s: float = 10) -> float:
    """Return the least CPU seconds of opening ``path``, which exclude the time of other processes."""
    times: list[float] = []
    while len(times) < rounds and sum(times) < enough_s:
        start = process_time()
        open_images(path).close()
        times.append(process_time() - start)
    return min(times)


def main(arguments: list[str] | None = None) -> None:
    """Measure opening, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs=2, default=[10_000, 100_000], metavar=("FEW", "MANY"))
    parser.add_argument("--formats", nargs="+", default=[fmt.name for fmt in formats()], metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where the collections are made, and removed (default: temporary)")
    options = parser.parse_args(arguments)
    few, many = options.images
    print(f"{'format':<22}{'write, s':>10}{f'{few:,}, ms':>14}{f'{many:,}, ms':>14}{'us an image':>14}{'growth':>8}")
    for name in options.formats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            _measure(name, few, many, Path(folder))


def _measure(name: str, few: int, many: int, folder: Path) -> None:
    fmt = next(fmt for fmt in formats() if fmt.name == name)
    labels = [name, *([f"{name}, no list"] if fmt.kind == "directory" else [])]
    times: dict[tuple[str, int], float] = {}
    written_s = 0.0
    image = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for count in (few, many):
        path = folder / f"images{fmt.suffix}"
        start = perf_counter()
        write_images((image for _ in range(count)), path, name, columns={"well": ["A01"] * count})
        written_s = perf_counter() - start
        for label in labels:
            if label != name:
                (path / "columns.parquet").unlink()
            times[label, count] = opening_s(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for label in labels:
        first, second = times[label, few], times[label, many]
        growth = second / first / (many / few)
        row = f"{label:<22}{written_s:>10.1f}{first * 1e3:>14.1f}{second * 1e3:>14.1f}{second / many * 1e6:>14.2f}"
        print(f"{row}{growth:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
