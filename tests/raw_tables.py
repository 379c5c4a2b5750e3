"""Tables as the formats' own libraries read them, without any code of the package."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


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
