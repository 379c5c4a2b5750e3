"""Tables joined to a source's columns by key: platemaps, labels and profiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import MetadataError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats._base import Array, Block, Images, ImagesWrapper
from omearrow_ds.storage.formats._columns import is_narrow
from omearrow_ds.storage.formats._stored import Outline
from omearrow_ds.storage.keys import (
    IMAGE_ID,
    IMAGE_NUMBER,
    JoinKeys,
    UnreadColumns,
    column_names_of,
    first_duplicate,
    match_rows,
    read_input_table,
)
from omearrow_ds.storage.plate_sites import choose_pairs
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import ColumnTypes


class SourceWithColumns(ImagesWrapper):
    """A source with the columns of another source and those of a joined table.

    ``added`` has one row per image. Other columns are read from ``unread`` at ``rows``, where null is an absent row.
    """

    def __init__(self, source: Images, added: pa.Table, unread: UnreadColumns | None, rows: pa.Array) -> None:
        super().__init__(source)
        self._added, self._unread, self._rows = added, unread, rows
        more = () if unread is None else unread.column_schema
        self.column_schema = pa.schema([*source.column_schema, *added.schema, *more])
        if is_narrow(self.column_names):
            self.columns = self._read_columns(self.column_names)

    def _read_columns(self, names: list[str]) -> pa.Table:
        own, added = set(self._source.column_names), set(self._added.column_names)
        tables = [self._source.column_table([name for name in names if name in own]), self._added]
        later = [name for name in names if name not in own and name not in added]
        if later:
            assert self._unread is not None
            tables.append(self._unread.column_table(later).take(self._rows))
        columns = dict(chain.from_iterable(zip(table.column_names, table.columns, strict=True) for table in tables))
        return pa.table({name: columns[name] for name in names})

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
        return self._source.read_arrays(rows, regions, out)

    def read_groups(self) -> Iterable[slice]:
        return self._source.read_groups()

    def mapped_stacks(self) -> Stacks | None:
        return self._source.mapped_stacks()

    def stream(self) -> Iterator[Block]:
        return self._source.stream()

    def outline(self) -> Outline:
        return self._source.outline()

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceWithColumns, (self._source, self._added, self._unread, self._rows)


def with_columns(source: Images, columns: Any, on: On | None, types: ColumnTypes) -> Images:
    """Return ``source`` with the columns of a joined table added; see `omearrow_ds.open_images`."""
    joined = read_input_table(
        columns, "columns", types, {IMAGE_ID, IMAGE_NUMBER, *source.column_names, *column_names_of(on)}
    )
    pairs = choose_pairs(source, joined, on)
    keys = JoinKeys(source, joined, pairs)
    equal = first_duplicate(keys.images) if pairs[0][0] == IMAGE_ID else None
    if equal is not None and source.image_ids[equal[0]] != source.image_ids[equal[1]]:
        raise MetadataError(
            f"several images of {source.path} have the same id {keys.describe(equal[0], row=False)}, compared as "
            f"numbers with column {pairs[0][1]!r}",
            **joined.subject,
            remedy="pass the ids as strings",
        )
    keys.refuse_duplicate_rows("row", "aggregate the table, or pass on= with columns that distinguish its rows")
    rows = match_rows(keys.rows, keys.images)
    added = joined.table.drop_columns([right for _, right in pairs])
    row_or_null = pa.array(rows, mask=rows < 0)
    added = added.take(row_or_null) if added.num_columns else added
    for name in sorted(set(added.column_names) & {*source.column_names, IMAGE_ID}):
        if name == IMAGE_ID or not _agree(source.column(name), added[name], rows):
            raise MetadataError(
                f"values of column {name!r} differ from those in {source.path}",
                **joined.subject,
                column=name,
                remedy="rename or drop the column, or pass it in on=",
            )
        added = added.drop_columns(name)
    _warn_unmatched(keys, rows)
    return SourceWithColumns(source, added, joined.unread, row_or_null)


def _agree(ours: pa.ChunkedArray, theirs: pa.ChunkedArray, rows: Array) -> bool:
    """Whether a column of both, as in profiles written from these images, has equal values in matching rows."""
    is_matched = pa.array(rows >= 0)
    return bool(ours.type == theirs.type and ours.filter(is_matched).equals(theirs.filter(is_matched)))


def _warn_unmatched(keys: JoinKeys, rows: Array) -> None:
    """Warn of images without a row, and of rows without an image; raise `MetadataError` if nothing matches."""
    without = np.flatnonzero(rows < 0)
    is_key = keys.rows >= 0
    unused = np.flatnonzero(is_key & ~np.isin(keys.rows, keys.images))
    if len(rows) and len(without) == len(rows):
        raise keys.no_match("row")
    notes = []
    if len(without):
        examples = keys.examples(without, row=False)
        notes.append(f"{len(without):,} of {len(rows):,} images have no row, so their values are null: {examples}")
    if len(unused):
        examples = keys.examples(unused, row=True)
        notes.append(f"{len(unused):,} of {int(is_key.sum()):,} rows have no image: {examples}")
    if notes:
        keys.warn("; ".join(notes))
