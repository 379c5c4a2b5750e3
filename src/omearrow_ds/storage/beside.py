"""Tables joined to a source's columns by key: platemaps, labels and profiles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import MetadataError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import MappedFile
from omearrow_ds.storage.formats._base import Array, BaseSource, Block, Done, Over, Reader, SupportsImages
from omearrow_ds.storage.formats._regions import Region
from omearrow_ds.storage.formats._stored import Outline
from omearrow_ds.storage.keys import IMAGE_ID, Keys, first_equal, places, read_given, some_keys
from omearrow_ds.storage.plate_sites import choose_pairs
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import ColumnTypes


class WithColumns(Over):
    """A source whose columns come from a table with one row per image."""

    def __init__(self, source: BaseSource, columns: pa.Table) -> None:
        super().__init__(source)
        self.columns = columns

    @property
    def mapping(self) -> MappedFile | None:
        return self._source.mapping

    def stacked(self) -> Stacks | None:
        return self._source.stacked()

    def views(self, indices: Sequence[int]) -> list[Array]:
        return self._source.views(indices)

    def reader(self) -> Reader | None:
        return self._source.reader()

    def read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        return self._source.read_regions(rows, regions)

    def blocks(self) -> Iterator[Block]:
        return self._source.blocks()

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        self._source.decode_into(images, done)

    def outline(self) -> Outline:
        return self._source.outline()

    def __reduce__(self) -> tuple[Any, ...]:
        return WithColumns, (self._source, self.columns)


def with_columns(source: BaseSource, columns: Any, on: On | None, types: ColumnTypes) -> BaseSource:
    """Return a source with its own columns and those of a joined table; see `omearrow_ds.open_images`.

    Raises `ColumnError` if columns to join by are missing or do not exist; `MetadataError` if keys are
    duplicate, none matches, or the table and the source have different columns of one name.
    """
    given = read_given(columns, "columns", types)
    pairs, where = choose_pairs(source, given, on), given.where
    keys = Keys(source, given, pairs)
    equal = first_equal(keys.images) if pairs[0][0] == IMAGE_ID else None
    if equal is not None and source.image_ids[equal[0]] != source.image_ids[equal[1]]:
        which = f"several images of {source.path} have an id that is {keys.told(equal[0], row=False)}"
        raise MetadataError(f"{where}: {which}, as {pairs[0][1]!r} has it; give the ids as text")
    twice = first_equal(keys.rows)
    if twice is not None:
        raise MetadataError(
            f"{where}: rows {twice[0]} and {twice[1]} have the same {keys.names}, {keys.told(twice[1], row=True)}; "
            f"each key may occur once: aggregate the table, or pass on= with columns that tell its rows apart"
        )
    found = places(keys.rows, keys.images)
    joined = given.table.drop_columns([right for _, right in pairs])
    joined = joined.take(pa.array(found, mask=found < 0)) if joined.num_columns else joined
    for name in sorted(set(joined.column_names) & {*source.columns.column_names, IMAGE_ID}):
        if name == IMAGE_ID or not _agree(source.columns[name], joined[name], found):
            raise MetadataError(
                f"{where}: column {name!r} is a column of {source.path} too, with other values; rename or drop it, or "
                f"join by it with on=",
                column=name,
            )
        joined = joined.drop_columns(name)
    _tell_unmatched(source, where, keys, found)
    every = {name: of[name] for of in (source.columns, joined) for name in of.column_names}
    return WithColumns(source, pa.table(every))


def _agree(ours: pa.ChunkedArray, theirs: pa.ChunkedArray, found: Array) -> bool:
    """Whether a column of both, as in profiles written from these images, has equal values in matching rows."""
    matched = pa.array(found >= 0)
    return bool(ours.type == theirs.type and ours.filter(matched).equals(theirs.filter(matched)))


def _tell_unmatched(source: BaseSource, where: str, keys: Keys, found: Array) -> None:
    """Warn of images without a row, and of rows without an image; raise `MetadataError` if nothing matches."""
    without = np.flatnonzero(found < 0)
    unused = np.flatnonzero((keys.rows >= 0) & ~np.isin(keys.rows, keys.images))
    if len(found) and len(without) == len(found):
        rows = np.flatnonzero(keys.rows >= 0)
        theirs = f"the table has {some_keys(keys, rows, row=True)}" if len(rows) else "the table has none"
        raise MetadataError(
            f"{where}: no image of {source.path} has a row, by {keys.names}: images have e.g. "
            f"{keys.told(0, row=False)}, {theirs}"
        )
    said = []
    if len(without):
        shown = some_keys(keys, without, row=False)
        said.append(f"{len(without):,} of {len(found):,} images have no row, and null there: {shown}")
    if len(unused):
        shown = some_keys(keys, unused, row=True)
        said.append(f"{len(unused):,} of {int((keys.rows >= 0).sum()):,} rows have no image: {shown}")
    if said:
        warnings.warn(f"{where}, joined by {keys.names}: {'; '.join(said)}", UserWarning, stacklevel=2)
