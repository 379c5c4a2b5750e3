"""The work of the hot paths as it is counted now; `test_work_counts` holds the package to it, and says what to do."""

from __future__ import annotations

from omearrow_ds import OMEArrowDataset, OMEArrowDatasetNumpy
from tests.support.strategies import ENCODED

SIDES = {100: 32, 512: 8}  # the images' height and width, and how many; every second one is a batch
SLOW_ENGINES = ["parquet bytes by pyarrow", "parquet_duck bytes by duckdb", "lance bytes by lance"]
CASES = [*map(" ".join, ENCODED), *SLOW_ENGINES]

# Images as stored that NumPy allocates for each image read, of 100 x 100 and of 512 x 512: for a sample, a batch,
# `take`, and decoding all into memory at hand. A float32 sample is two; a batch that is gathered before it is scaled,
# one more. Batches from 1 MiB on are made in memory that was a batch before.
ALLOCATED = {
    "parquet bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "parquet list": ((3, 3, 2, 1), (3, 1, 2, 1)),  # pixels are stored as int32, and cast
    "parquet_duck bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "parquet_duck list": ((3, 3, 2, 1), (3, 1, 2, 1)),  # as above
    "lance bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "lance list": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "vortex bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "vortex list": ((2, 3, 1, 0), (2, 0, 1, 0)),
    "duckdb bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "duckdb list": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "arrow bytes": ((2, 3, 1, 0), (2, 0, 1, 0)),
    "arrow list": ((2, 3, 1, 0), (2, 0, 1, 0)),
    "tiff bytes": ((3, 3, 1, 0), (3, 0.25, 1, 0)),
    "ome_zarr bytes": ((3, 3, 1, 0), (3, 0.25, 1, 0)),
    "ome_arrow bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "parquet bytes by pyarrow": ((1, 0), (1, 0)),
    "parquet_duck bytes by duckdb": ((1, 0), (1, 0)),
    "lance bytes by lance": ((1, 0), (1, 0)),
}

# Images of 512 x 512 that NumPy and Python hold at the most, above what was held before: for a sample, a batch of 4,
# `take` of 4, and decoding all 8.
HELD = {
    "parquet bytes": (2, 0, 4, 0),
    "parquet list": (3, 4, 8, 2),
    "parquet_duck bytes": (2, 0, 4, 0),
    "parquet_duck list": (3, 4, 8, 8),
    "lance bytes": (2, 0, 4, 0),
    "lance list": (2, 0, 4, 0),
    "vortex bytes": (3, 4, 8, 0),
    "vortex list": (2, 0, 4, 0),
    "duckdb bytes": (2, 0, 4, 0),
    "duckdb list": (2, 0, 4, 0),
    "arrow bytes": (2, 0, 4, 0),
    "arrow list": (2, 0, 4, 0),
    "tiff bytes": (3, 1, 4, 0),
    "ome_zarr bytes": (3, 2, 5, 1),
    "ome_arrow bytes": (2, 0, 4, 0),
    "parquet bytes by pyarrow": (4, 0),
    "parquet_duck bytes by duckdb": (4, 0),
    "lance bytes by lance": (4, 0),
}

# Images of 512 x 512 that Arrow allocates for `take` of 4 and for decoding all 8: what its readers decode.
ARROW = {"parquet bytes by pyarrow": (8, 8)}

# Functions of this package that are called for a sample, a batch of 16, `take` of 16, and decoding all 32, 100 x 100.
# One an access looks whether a mapped file was cut short.
CALLED = {
    "parquet bytes": (8, 27, 60, 12),
    "parquet list": (19, 103, 61, 19),
    "parquet_duck bytes": (8, 27, 60, 12),
    "parquet_duck list": (19, 102, 60, 12),
    "lance bytes": (8, 27, 72, 11),
    "lance list": (49, 102, 60, 51),
    "vortex bytes": (22, 95, 53, 35),
    "vortex list": (8, 12, 30, 10),
    "duckdb bytes": (90, 143, 101, 90),
    "duckdb list": (85, 138, 96, 85),
    "arrow bytes": (8, 12, 26, 11),
    "arrow list": (8, 12, 26, 11),
    "tiff bytes": (16, 144, 102, 165),
    "ome_zarr bytes": (32, 280, 238, 357),
    "ome_arrow bytes": (20, 103, 61, 12),
    "parquet bytes by pyarrow": (133, 47),
    "parquet_duck bytes by duckdb": (95, 78),
    "lance bytes by lance": (35, 26),
}

# Calls into the store for a batch of 16 (of an engine: `take`) and for decoding all 32; those not listed read mapped
# memory without any.
# A file is looked at after it was asked, as a writer may replace it meanwhile; of a scan also at each batch. So are the
# files of DuckDB's log, there or not.
QUERY = {"stat": 1, "SpiedConnection.sql": 1}
SCAN = {**QUERY, "stat": 2}
LOGGED = {**QUERY, "stat": 3}, {**SCAN, "stat": 6}
STORE = {
    "lance list": ({"FragmentSession.take": 1}, {"FragmentSession.take": 1}),
    "vortex bytes": ({"scalar_at": 16}, {"take": 1, "to_arrow_array": 1}),
    "duckdb bytes": LOGGED,
    "duckdb list": LOGGED,
    "tiff bytes": (
        dict.fromkeys(["open", "fstat", "preadv", "close"], 16),
        {"stat": 2, **dict.fromkeys(["open", "fstat", "preadv", "close"], 32)},
    ),
    "ome_zarr bytes": (
        {"stat": 1, "open": 32, "read": 32, "close": 32},
        {"stat": 2, "open": 64, "read": 64, "close": 64},
    ),
    "parquet bytes by pyarrow": ({"ParquetFile.read_row_group": 1}, {"ParquetFile.read_row_group": 1}),
    "parquet_duck bytes by duckdb": (QUERY, SCAN),
    "lance bytes by lance": ({"FragmentSession.take": 1}, {"FragmentSession.take": 1}),
}

# What tables that are not read in place are asked for by `take` and by reading all: the pixel leaf alone, where the
# library can.
CHUNKS = '"ome_image"."chunks" AS pixels'
ASKED = {
    "lance list": {"ome_image.chunks.item.pixels"},
    "vortex bytes": {"ome_image.chunks.pixel_bytes", "ome_image.chunks"},
    "vortex list": {"ome_image.chunks.pixels"},
    "duckdb bytes": {CHUNKS, f'"omearrow_ds_row" AS key, {CHUNKS}'},
    "duckdb list": {CHUNKS, f'"omearrow_ds_row" AS key, {CHUNKS}'},
    "parquet bytes by pyarrow": {"ome_image.chunks.list.element.pixel_bytes"},
    "parquet_duck bytes by duckdb": {CHUNKS, f"file_row_number AS key, {CHUNKS}"},
    "lance bytes by lance": {"ome_image.chunks.item.pixel_bytes"},
}

# How often a store is asked for columns by opening; none of it may be pixels.
OPENED = {
    "parquet": 2,
    "parquet_duck": 2,
    "lance": 3,
    "vortex": 3,
    "duckdb": 10,
    "arrow": 0,
    "parquet_duck bytes by duckdb": 5,
}
VERIFIED = "lance bytes"  # one image more is asked for: cut out of its page, it is compared to what Lance reads

# Of preloaded pixels, for a sample and a batch: images allocated for each, as above, and functions of this package
# that are called.
PRELOADED = {
    (OMEArrowDataset, 100): ((2, 3), (6, 10)),
    (OMEArrowDataset, 512): ((2, 0), (6, 19)),
    (OMEArrowDatasetNumpy, 100): ((2, 3), (6, 7)),
    (OMEArrowDatasetNumpy, 512): ((2, 2), (6, 10)),
}
