"""Tables written and read by the formats' own libraries, without code of the package."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.conftest import needs
from tests.support.strategies import record_of, whole_chunks


def raw_table(name: str, path: Path) -> pa.Table:
    """Return the table at ``path`` as the library of format ``name`` reads it."""
    if name in ("parquet", "parquet_duck"):
        return pq.read_table(path)
    if name == "arrow":
        return pa.ipc.open_file(path).read_all()
    if name == "lance":
        import lance

        return lance.dataset(str(path)).to_table()
    if name == "vortex":
        import vortex

        return vortex.open(str(path)).to_arrow().read_all()
    import duckdb

    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.sql("FROM images").to_arrow_table()


def store_table(name: str, table: pa.Table, path: Path, compression: str | None = None) -> Path:
    """Store any table with the format's own library, in groups of three rows if it supports them."""
    needs(name)
    if name in ("parquet", "parquet_duck"):
        pq.write_table(table, path, row_group_size=3, compression=compression or "snappy")
    elif name == "arrow":
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, max_chunksize=3)
    elif name == "lance":
        import lance

        lance.write_dataset(table, str(path), max_rows_per_file=5)
    elif name == "vortex":
        import vortex.io

        vortex.io.write(table, str(path))
    else:
        import duckdb

        with duckdb.connect(str(path)) as connection:
            connection.register("incoming", table)
            connection.execute("CREATE TABLE images AS FROM incoming")
    return path


def struct_of(images, encoding="bytes", **fields):
    from ome_arrow import meta  # The import takes seconds, which programs that only read do not need.

    records = [image and record_of(image[0], whole_chunks(image[0], encoding), [], **fields) for image in images]
    return pa.array(records, meta.OME_ARROW_BYTE_STRUCT if encoding == "bytes" else meta.OME_ARROW_STRUCT)
