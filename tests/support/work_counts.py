"""Current counts of work on the hot paths; `test_work_counts` compares the package with them, and states the remedy."""

from __future__ import annotations

from omearrow_ds import OMEArrowDataset, OMEArrowDatasetNumpy
from tests.support.strategies import ENCODED

SIDES = {100: 32, 512: 8}  # Height and width of the images, and their number; every second one is in a batch.
SLOW_ENGINES = ["parquet bytes by pyarrow", "parquet_duck bytes by duckdb", "lance bytes by lance"]
CASES = [*map(" ".join, ENCODED), *SLOW_ENGINES]

# Images, in stored size, that NumPy allocates per image read, of 100 x 100 and of 512 x 512: for a sample, a batch,
# `take`, and decoding all into existing memory. A float32 sample counts as two; a batch that is gathered before scaling
# as one more. Batches from 1 MiB on reuse the memory of earlier batches.
ALLOCATED = {
    "parquet bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "parquet list": ((3, 3, 2, 1), (3, 1, 2, 1)),  # Pixels are stored as int32, and cast.
    "parquet_duck bytes": ((2, 2, 1, 0), (2, 0, 1, 0)),
    "parquet_duck list": ((3, 3, 2, 1), (3, 1, 2, 1)),  # Pixels are stored as int32, and cast.
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

# Peak number of images of 512 x 512 that NumPy and Python hold in addition to earlier ones: for a sample, a batch of
# 4, `take` of 4, and decoding all 8.
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

# Images of 512 x 512 that Arrow allocates for `take` of 4 and for decoding all 8, which its readers decode.
ARROW = {"parquet bytes by pyarrow": (8, 8)}

# Calls of this package's functions for a sample, a batch of 16, `take` of 16, and decoding all 32, 100 x 100.
# One call per access checks whether a mapped file was truncated.
CALLED = {
    "parquet bytes": (8, 27, 50, 16),
    "parquet list": (26, 96, 70, 22),
    "parquet_duck bytes": (8, 27, 50, 16),
    "parquet_duck list": (26, 95, 69, 16),
    "lance bytes": (8, 27, 47, 11),
    "lance list": (47, 86, 60, 47),
    "vortex bytes": (22, 80, 54, 31),
    "vortex list": (8, 12, 31, 10),
    "duckdb bytes": (69, 108, 82, 62),
    "duckdb list": (66, 105, 79, 59),
    "arrow bytes": (8, 12, 30, 13),
    "arrow list": (8, 12, 30, 13),
    "tiff bytes": (15, 83, 57, 43),
    "ome_zarr bytes": (33, 284, 258, 436),
    "ome_arrow bytes": (21, 75, 49, 16),
    "parquet bytes by pyarrow": (119, 50),
    "parquet_duck bytes by duckdb": (82, 62),
    "lance bytes by lance": (37, 24),
}

# Calls into the store for a batch of 16 (engines: `take`) and for decoding all 32. Formats that are not listed read
# mapped memory without calls.
# After each request, and in scans after each batch, a file is checked, as a writer may have replaced it. So are the
# files of DuckDB's log, whether they exist or not.
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
        dict.fromkeys(["open", "fstat", "preadv", "close"], 32),
    ),
    "ome_zarr bytes": (
        {"stat": 1, "open": 32, "read": 32, "close": 32},
        {"stat": 1, "open": 64, "read": 64, "close": 64},
    ),
    "parquet bytes by pyarrow": ({"ParquetFile.read_row_group": 1}, {"ParquetFile.read_row_group": 1}),
    "parquet_duck bytes by duckdb": (QUERY, SCAN),
    "lance bytes by lance": ({"FragmentSession.take": 1}, {"FragmentSession.take": 1}),
}

# Columns that `take` and reading all request from tables that are not memory-mapped: only the pixel leaf, if the
# library supports this.
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

# Number of column requests to a store while opening; none may be for pixels.
OPENED = {
    "parquet": 1,
    "parquet_duck": 1,
    "lance": 3,
    "vortex": 2,
    "duckdb": 10,
    "arrow": 0,
    "parquet_duck bytes by duckdb": 5,
}
VERIFIED = "lance bytes"  # One more image is requested, and compared with its pixels cut out of the page.

# Preloaded pixels: allocated images per image read, as in ALLOCATED, and calls of this package's functions, for a
# sample and a batch.
PRELOADED = {
    (OMEArrowDataset, 100): ((2, 3), (6, 10)),
    (OMEArrowDataset, 512): ((2, 0), (6, 17)),
    (OMEArrowDatasetNumpy, 100): ((2, 3), (6, 7)),
    (OMEArrowDatasetNumpy, 512): ((2, 2), (6, 10)),
}
