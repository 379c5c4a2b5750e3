"""Comparisons of benchmarks with references, the wording of their ratios, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.gate.text import number

SMALL, LARGE, FIELD = "100 x 100", "512 x 512", "904 x 1224"
FULL_BYTES = 500_000_000  # Smaller collections have no targets for memory: constant costs dominate.


@dataclass(frozen=True, slots=True)
class Compared:
    """Operation that is compared with a reference, or with the size of the images.

    Attributes
    ----------
    title, reference : str
        Operation of this package, and its reference. If the reference is empty, each benchmark names its own.
    template, inverse : str, bool
        Text of the figure, with ``{}`` for the number. The figure is ours / reference and should be at most the target.
        If ``inverse``, it is reference / ours and should be at least the target.
    targets : mapping of str to float
        Targets by case: name of a format, case of a benchmark, or ``""``.
    shapes : tuple of str
        Image sizes that the targets hold for.
    of_formats : bool
        Whether each format is a case.
    """

    title: str
    reference: str = ""
    template: str = "{} x"
    inverse: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    shapes: tuple[str, ...] = (SMALL, LARGE)
    of_formats: bool = False

    @property
    def unit(self) -> str:
        """Text after a figure, such as ``"x faster"``."""
        return self.template.format("").strip()

    def figure(self, ratio: float) -> float:
        """Return the figure for the ratio ours / reference."""
        return 1 / ratio if self.inverse else ratio

    def target(self, case: str, shape: str) -> float | None:
        """Return the target of a case, or None if images of this shape have no target."""
        return self.targets.get(case) if shape in self.shapes else None

    def is_met(self, ratio: float, target: float | None) -> bool | None:
        """Whether the target is met; None without one."""
        if target is None:
            return None
        return self.figure(ratio) >= target if self.inverse else self.figure(ratio) <= target

    def words(self, figure: float | None) -> str:
        """Return a figure as text, such as ``"43.2 x faster"``."""
        return "-" if figure is None else self.template.format(number(figure))

    def limit(self, target: float | None) -> str:
        """Return a target as text, such as ``">= 40"``."""
        return "-" if target is None else f"{'>=' if self.inverse else '<='} {number(target)}"


# Other loaders hold or read different data, which is different work. Each row of a loader names it.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "TensorDataset of float32": "holds float32",
        "list of arrays + copy()": "holds uint16",
        "MONAI DataLoader(CacheDataset)": "holds float32",
        "MONAI, plain tensors in cache": "holds float32",
        "HuggingFace datasets": "reads storage",
        "Lance's SafeLanceDataset": "reads storage",
        "LanceDB's Permutation": "reads storage",
        "LanceDB's StreamingDataset": "streams storage",
        "ome-arrow's read_many": "reads storage",
        "tensorstore": "reads storage",
        "zarr": "reads storage",
        "tifffile.imread": "reads storage",
        "LitData's StreamingDataset": "streams storage",
        "WebDataset": "streams storage",
        "plain compiled loop": "holds uint16",
        "NumPy's slices": "holds uint16",
        "MONAI's SpatialCrop": "holds float32",
        "Python's forkserver": "imports again",
        "Python's spawn": "imports again",
    }
)


TIMED: Mapping[str, Compared] = MappingProxyType(
    {
        "sample_on_demand": Compared(
            "one sample on demand, list encoding",
            "as_py() + np.array",
            "{} x faster",
            inverse=True,
            targets={"": 40},
        ),
        "sample_preloaded": Compared(
            "one sample, preloaded", "slice, divide, from_numpy", "{} x the minimum", targets={"": 0.8}
        ),
        "epoch": Compared(
            "DataLoader, preloaded",
            template="{} x faster",
            inverse=True,
            targets={
                "TensorDataset of float32, B=16": 1.5,
                "TensorDataset of float32, B=64": 2.2,
                "list of arrays + copy(), B=16": 2.0,
                "list of arrays + copy(), B=64": 2.5,
                "MONAI DataLoader(CacheDataset), B=16": 3,
                "HuggingFace datasets, B=16": 8,
            },
        ),
        "epoch_on_demand": Compared("DataLoader, on demand", template="{} x faster", inverse=True),
        "batch": Compared(
            "batch of 64, preloaded, into new memory",
            "memcpy of its float32 bytes",
            "{} x the speed",
            inverse=True,
            targets={"": 1},
            shapes=(LARGE,),
        ),
        "view": Compared(
            "DataLoader of a view, preloaded, B=16",
            "the whole dataset",
            "{} x the speed",
            inverse=True,
            targets={"": 0.97},
        ),
        "field": Compared(
            "field of three TIFF files, on demand",
            "tifffile.imread of the three files",
            "{} x the time",
            targets={"": 1.1},
            shapes=(LARGE,),
        ),
        "stats": Compared(
            "pixel statistics of such fields",
            "preloading the fields",
            "{} x the speed",
            inverse=True,
            targets={"": 0.5},
        ),
        "preload": Compared(
            "preload",
            "memcpy of the pixels",
            "{} x memcpy",
            targets={
                "arrow": 4,
                "tiff": 8,
                "vortex": 11,
                "parquet": 4,
                "parquet_duck": 4,
                "lance": 5,
                "ome_zarr": 33,
                "duckdb": 11,
                "ome_arrow": 40,
            },
            of_formats=True,
        ),
        "random_batch": Compared(
            "one image of a random batch of 16, on demand",
            "one tifffile.imread",
            "{} x imread",
            targets={
                "arrow": 0.02,
                "tiff": 0.03,
                "vortex": 0.12,
                "lance": 0.07,
                "parquet": 0.04,
                "ome_zarr": 0.2,
                "ome_arrow": 0.22,
                "parquet_duck": 0.04,
                "duckdb": 1.2,
            },
            shapes=(SMALL,),
            of_formats=True,
        ),
        "random_image": Compared(
            "one random image, on demand",
            "one tifffile.imread",
            "{} x imread",
            targets={
                "arrow": 0.03,
                "tiff": 0.04,
                "parquet": 0.05,
                "parquet_duck": 0.05,
                "lance": 0.06,
                "ome_zarr": 0.25,
                "vortex": 0.15,
                "duckdb": 9,
            },
            shapes=(SMALL,),
            of_formats=True,
        ),
        "region": Compared(
            "region of 3 x 64 x 64 of a field, on demand",
            "reading the field",
            "{} x the time",
            targets={"tiff": 0.08, "ome_zarr": 0.12},
            shapes=(FIELD,),
            of_formats=True,
        ),
        "region_by_zarr": Compared(
            "region of 3 x 64 x 64, chunks of 256 x 256",
            "slicing an open zarr array",
            "{} x the time",
            targets={"": 0.2},
            shapes=(FIELD,),
        ),
        "cells": Compared(
            "crop of 3 x 64 x 64, preloaded",
            template="{} x the time",
            targets={"plain compiled loop": 1.5, "NumPy's slices": 0.7},
            shapes=(FIELD,),
        ),
        "cells_mapped": Compared(
            "crop of 3 x 64 x 64 on demand, uncompressed",
            "the same crop, preloaded",
            "{} x the time",
            targets={"arrow": 1.3, "parquet": 1.3, "lance": 1.3},
            shapes=(FIELD,),
            of_formats=True,
        ),
        "cells_of_files": Compared(
            "crop of 3 x 64 x 64, on demand",
            "tifffile.imread and a slice, or slicing an open zarr array",
            "{} x the time",
            targets={"tiff": 0.08, "ome_zarr": 0.2},
            shapes=(FIELD,),
            of_formats=True,
        ),
        "parts_open": Compared(
            "opening a collection of 20 parts", "opening one file", "{} x the time", of_formats=True
        ),
        "parts_epoch": Compared(
            "epoch on demand from 20 parts, batches of 64",
            "the epoch from one file",
            "{} x the speed",
            inverse=True,
            targets={"arrow": 0.95, "parquet": 0.95, "vortex": 0.95},
            of_formats=True,
        ),
        "parts_convert": Compared(
            "conversion to 8 parts by a process pool",
            "one process",
            "{} x faster",
            inverse=True,
            targets={"pool of 1": 0.95, "pool of 2": 1.7},
        ),
        "parts_convert_dask": Compared(
            "conversion to 8 parts by a Dask cluster",
            "one process",
            "{} x faster",
            inverse=True,
            targets={"dask of 1": 0.95, "dask of 2": 1.7},
        ),
        "wide_open": Compared(
            "opening a table with thousands of columns",
            "opening it and reading its columns",
            "{} x the time",
            of_formats=True,
        ),
        "wide_column": Compared("one column of such a table", "all of its columns", "{} x the time", of_formats=True),
        "wide_batch": Compared(
            "epoch on demand with a target from such a table, batches of 64",
            "the epoch from a table with only this column",
            "{} x the time",
            of_formats=True,
        ),
        "auto_preloaded": Compared(
            "batch of 16, preloaded, num_workers='auto'",
            "the best of 0, 1, 2, 4 workers",
            "{} x the time",
            targets={"": 1.1},
        ),
        "auto_on_demand": Compared(
            "batch of 16 on demand, num_workers='auto'",
            "the best of 0, 1, 2, 4 workers",
            "{} x the time",
            targets={"": 1.1},
            of_formats=True,
        ),
        "first_batch": Compared(
            "first batch of two workers, after the first start", "0.2 s", "{} x", targets={"": 1}, of_formats=True
        ),
        "start": Compared("first batch of two workers, after the first start", template="{} x faster", inverse=True),
    }
)
HELD: Mapping[str, Compared] = MappingProxyType(
    {
        "preload": Compared(
            "preload: peak memory", "decoded bytes", "{} x the pixels", targets={"": 1.3}, of_formats=True
        ),
        "epoch": Compared(
            "epoch on demand: growth (after the first tenth)",
            "decoded bytes",
            "{} x the pixels",
            targets={"": 0.1},
            of_formats=True,
        ),
        "workers": Compared(
            "4 workers on preloaded pixels: private memory", "decoded bytes", "{} x the pixels", targets={"": 0.15}
        ),
        "write": Compared("streaming write: peak memory", "decoded bytes", "{} x the pixels", of_formats=True),
        "wide_open": Compared(
            "opening a table with thousands of columns", "bytes of the columns", "{} x the columns", of_formats=True
        ),
    }
)
