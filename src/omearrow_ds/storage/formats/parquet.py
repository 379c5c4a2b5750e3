"""Parquet by pyarrow, laid out so that one image can be cut out of its page.

Measured 2026-11-21, one of two shared cores, warm page cache, synthetic uint16. Preloading is in units of a memcpy of
the pixels; a random sample on demand, and one of a random batch of 16, in units of one ``tifffile.imread`` of 100 x 100
pixels (0.2 to 0.3 ms). The last column is what one row costs a reader that decodes its row group, here pyarrow.

    images of          encoding, compression, rows     MB   write   open  preload   one     16   row group
    1,000  100 x 100   bytes  none    16             20.5   130 ms  23 ms     8.3   0.05   0.06     0.3 ms
                       bytes  none    64             20.2    36 ms   6 ms     4.4   0.05   0.06     0.8 ms
                       bytes  none   256             20.2    44 ms   4 ms     4.8   0.05   0.06     2.3 ms
                       bytes  none  1024             20.2    32 ms   3 ms     7.9   0.05   0.06     5.5 ms
                       bytes  lz4    256             12.3   114 ms  10 ms      47   0.17   0.20     6.8 ms
                       bytes  zstd   256              8.0   219 ms   9 ms     104   0.35   0.37      18 ms
                       list   none   256             40.2   188 ms   5 ms     8.6   0.06   0.08      33 ms
                       list   lz4    256             19.7   276 ms   4 ms      78   0.27   0.28      41 ms
                       list   zstd   256              8.7   331 ms   7 ms     105   0.55   0.59      53 ms
    the same in pages of 1 MiB:
                       bytes  lz4    256             10.7   107 ms   5 ms      22   2.5    4.4      4.4 ms
                       bytes  zstd   256              8.0   116 ms   7 ms      43   6.9    8.8       13 ms
    10,000  100 x 100  bytes  none    16              205   698 ms 117 ms     3.7   0.07   0.08     0.2 ms
                       bytes  none    64              202   441 ms  39 ms     3.7   0.07   0.08     0.7 ms
                       bytes  none   256              202   485 ms  20 ms     3.7   0.07   0.07     1.9 ms
                       bytes  none  1024              202   452 ms  18 ms     3.9   0.07   0.07     5.2 ms
                       bytes  lz4    256              123   718 ms  18 ms      24   0.19   0.21     6.6 ms
                       bytes  zstd   256               81  1119 ms  38 ms      56   0.38   0.40      15 ms
    300  512 x 512     bytes  none    32 (16 MiB)     157   166 ms   4 ms     1.9   0.64   0.60     3.7 ms
                       bytes  lz4     32               84   410 ms   4 ms     6.1   1.5    1.8       12 ms
                       bytes  zstd    32               62   593 ms   9 ms      12   3.9    4.3       38 ms
                       list   none    32              315  1281 ms   5 ms     4.6   0.87   1.6      102 ms

Hence no compression; row groups large enough for a small footer, yet small for readers that decode all of one; pages of
an image if compressed, for which preloading pays (half as fast as from pages of 1 MiB) and random access gains most.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.storage.formats._parquet import ParquetSource

_PAGE_BYTES = 2**20
_SMALL_PAGE_BYTES = 2**12


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Parquet file, a row group each; if compressed, an image a page, which can be read alone."""
    options = {
        "compression": compression,
        "use_dictionary": False,
        "data_page_version": "2.0",  # a page of version 1 may end within an image
        "data_page_size": _PAGE_BYTES if compression == "none" else _SMALL_PAGE_BYTES,
        "write_batch_size": 1,  # rows, after which a page's size is looked at
        # not of pixels: of images below 4 KiB every page would repeat two; nobody looks for a range of checksums
        "write_statistics": [
            field.name
            for field in table_schema
            if not pa.types.is_nested(field.type) and field.name != schema.CHECKSUM_COLUMN
        ],
    }
    with pq.ParquetWriter(path, table_schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(len(table), 1))


class Source(ParquetSource):
    """Images of a Parquet file; see `ParquetSource`."""

    name = "parquet"
