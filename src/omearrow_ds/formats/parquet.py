"""Parquet by pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.formats._parquet import ParquetSource

COMPRESSIONS = ("none", "lz4", "zstd", "snappy")
GROUPED = True
MAX_ROWS = 256
MAX_BYTES = 16 * 2**20

_PAGE_BYTES = 2**20
_SMALL_PAGE_BYTES = 2**12


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Parquet file, a row group each; if compressed, an image a page, which can be read alone."""
    options = {
        "compression": compression,
        "use_dictionary": False,
        "data_page_version": "2.0",  # a page of version 1 may end within an image
        "data_page_size": _PAGE_BYTES if compression == "none" else _SMALL_PAGE_BYTES,
        "write_batch_size": 1,  # a page's size is looked at after a batch of rows
        # of pixels they would be the least and the greatest image, in every page
        "write_statistics": [field.name for field in table_schema if not pa.types.is_nested(field.type)],
    }
    with pq.ParquetWriter(path, table_schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(len(table), 1))


class Source(ParquetSource):
    """Images of a Parquet file; see `ParquetSource`."""

    name = "parquet"
