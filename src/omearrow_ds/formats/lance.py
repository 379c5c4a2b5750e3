"""Lance dataset: rows are taken by number, of the pixel column only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from omearrow_ds.errors import MetadataError
from omearrow_ds.formats._base import Array, ProcessLocal
from omearrow_ds.formats._table import TableSource, as_arrays, find_image_column

if TYPE_CHECKING:
    import lance

MAX_ROWS = 1024
MAX_BYTES = 32 * 2**20


def write(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path) -> None:
    """Write tables to a Lance dataset."""
    import lance  # noqa: PLC0415  # an optional backend

    batches = (batch for table in tables for batch in table.to_batches())
    lance.write_dataset(pa.RecordBatchReader.from_batches(table_schema, batches), str(path), mode="create")


class Source(TableSource):
    """Images of a Lance dataset.

    Raises
    ------
    FormatError
        If the folder is no Lance dataset, or holds a null or impossible image.
    ColumnError
        If no column is an OME-Arrow struct.
    """

    name = "lance"
    errors = (OSError, ValueError, RuntimeError)

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Refuse what Lance reserves: names with a dot, and those of its own row columns."""
        super().refuse_target(path, columns)
        odd = [name for name in columns.names if "." in name or name.lower().startswith("_row")]
        if odd:
            raise MetadataError(
                f"columns {odd}: Lance takes no name with a dot and none of its own ('_row...'); rename"
            )

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version: int | None = None
        self._dataset = ProcessLocal(self._open)
        dataset = self._dataset.get()
        self._column = find_image_column(dataset.schema, path)
        fields = self._column.info_fields
        others = [name for name in dataset.schema.names if name != self._column.name]
        with self._reading():
            info = dataset.to_table(columns=[f"{self._column.name}.{name}" for name in fields])
            columns = dataset.to_table(columns=others) if others else dataset.schema.empty_table().select([])
        self._set_header(info.rename_columns(fields), columns)
        self.close()

    def _open(self) -> lance.LanceDataset:
        import lance  # noqa: PLC0415  # an optional backend

        self._refuse_replaced()
        with self._reading():
            dataset = lance.dataset(str(self.path), version=self._version)
        self._version = dataset.version
        return dataset

    def close(self) -> None:
        """Let go of the dataset; a later read opens it again."""
        self._dataset.close()

    def _fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        with self._reading():
            taken = self._dataset.get().take(indices.tolist(), columns=[f"{self._column.name}.{field}"])
        return as_arrays(taken[self._column.name], field)

    def _fetch_all(self, field: str) -> Iterator[pa.Array]:
        with self._reading():
            for batch in self._dataset.get().to_batches(columns=[f"{self._column.name}.{field}"], batch_size=MAX_ROWS):
                yield from as_arrays(batch.column(0))
