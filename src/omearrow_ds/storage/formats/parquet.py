"""Parquet written by pyarrow, in a layout that allows reading one image of a page (``docs/explanation/layouts.md``).

Uncompressed by default; row groups large enough for a small footer, but small for readers that decode a whole one. If
compressed, one image per page: preloading is half as fast as from pages of 1 MiB, and random access gains most.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.storage.formats._parquet import ParquetSource, page_options

UNSUPPORTED_TYPES = (pa.types.is_interval,)


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write each table as a row group of a Parquet file; a compressed file has one image per page."""
    options = page_options(compression, table_schema, [schema.CHECKSUM_COLUMN])
    with pq.ParquetWriter(path, table_schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(len(table), 1))


class Source(ParquetSource):
    """Images of a Parquet file; see `ParquetSource`."""

    name = "parquet"
