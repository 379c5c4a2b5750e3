"""A table beside the images: platemaps, labels and profiles, joined to a source's columns by key."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError
from omearrow_ds.storage import listed
from omearrow_ds.storage.formats._base import Array, BaseSource, Block, Done, Over, SupportsImages
from omearrow_ds.storage.formats._columns import plain_columns, refuse_extensions
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.formats._handles import Mapping as MappedFile
from omearrow_ds.storage.formats._regions import Window
from omearrow_ds.storage.protocol import On

IMAGE_ID, IMAGE_NUMBER = "image_id", "ImageNumber"
_METADATA = "Metadata_"
_NUMBERED = ("site", "field", "number")  # what a column is called whose texts are numbers
_WELL = re.compile(r"([A-Za-z]{1,2})0*([1-9][0-9]?)")
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")
_SHOWN = 3


class WithColumns(Over):
    """A source with other columns, one row an image."""

    def __init__(self, source: BaseSource, columns: pa.Table) -> None:
        super().__init__(source)
        self.columns = columns

    @property
    def mapping(self) -> MappedFile | None:
        return self._source.mapping

    def stacks(self) -> list[Array]:
        return self._source.stacks()

    def views(self, indices: Sequence[int]) -> list[Array]:
        return self._source.views(indices)

    def windows(self, wanted: Sequence[Window]) -> list[Array]:
        return self._source.windows(wanted)

    def blocks(self) -> Iterator[Block]:
        return self._source.blocks()

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        self._source.decode_into(images, done)

    def __reduce__(self) -> tuple[Any, ...]:
        return WithColumns, (self._source, self.columns)


def with_columns(source: BaseSource, columns: Any, on: On | None) -> BaseSource:
    """Return a source with the columns of a table beside its own, as of `omearrow_ds.open_images`.

    Raises
    ------
    ColumnError
        If there is nothing to join by, or a column of that name is not there.
    MetadataError
        If keys occur twice, none matches, or both have a column of one name.
    """
    table, where, renamed = _read(columns)
    pairs = _pairs(source, table, on, where, renamed)
    added = table.drop_columns([right for _, right in pairs])
    ours, theirs = [], []
    for left, right in pairs:
        own = pa.array(list(source.image_ids)) if left == IMAGE_ID else source.columns[left]
        theirs_type = table[right].type
        if pa.types.is_nested(own.type) or pa.types.is_nested(theirs_type):
            raise ColumnError(f"{where}: {right!r} cannot be joined with {left!r}: keys are texts, numbers or times")
        same = _comparable(left, own.type, theirs_type)
        ours.append([None if value is None else same(value) for value in own.to_pylist()])
        if left == IMAGE_ID and len(set(ours[-1])) < len(set(source.image_ids)):
            twice = next(key for key in ours[-1] if ours[-1].count(key) > 1)
            which = f"several images of {source.path} have an id that is {twice!r}"
            raise MetadataError(f"{where}: {which}, as {right!r} has it; give the ids as text")
        theirs.append([None if value is None else same(value) for value in table[right].to_pylist()])
    names = " and ".join(f"{left!r}" for left, _ in pairs)
    rows: dict[tuple[Any, ...], int] = {}
    for row, key in enumerate(zip(*theirs, strict=True)):
        if None in key:
            continue
        if key in rows:
            raise MetadataError(
                f"{where}: rows {rows[key]} and {row} have the same {names}, {_told(key)}; each key may occur once: "
                f"aggregate the table, or pass on= with columns that tell its rows apart"
            )
        rows[key] = row
    wanted = list(zip(*ours, strict=True))
    found = [rows.get(key) for key in wanted]
    joined = added.take(pa.array(found, pa.int64()))
    for name in sorted(set(added.column_names) & {*source.columns.column_names, IMAGE_ID}):
        if name == IMAGE_ID or not _agree(source.columns[name], joined[name], found):
            raise MetadataError(
                f"{where}: column {name!r} is a column of {source.path} too, with other values; rename or drop it, or "
                f"join by it with on="
            )
        joined = joined.drop_columns(name)
    _tell_unmatched(source, where, names, wanted, found, rows)
    every = {name: of[name] for of in (source.columns, joined) for name in of.column_names}
    return WithColumns(source, pa.table(every))


def _agree(ours: pa.ChunkedArray, theirs: pa.ChunkedArray, found: Sequence[int | None]) -> bool:
    """Whether a column that both have, as of profiles written of these images, has the same values where rows match."""
    matched = pa.array([row is not None for row in found])
    return bool(ours.type == theirs.type and ours.filter(matched).equals(theirs.filter(matched)))


def _read(columns: Any) -> tuple[pa.Table, str, dict[str, str]]:
    """Return a table of plain types, what to call it in errors, and new names of columns, those of CellProfiler."""
    where = "columns="
    if isinstance(columns, str | os.PathLike):
        path = Path(columns).absolute()
        where = str(path)
        if not path.is_file():
            raise missing(columns, "no such file; columns= is a table, a frame, or the path of a CSV or Parquet file")
        table = listed.read_table(path)
    else:
        table = _of_frame(columns)
    if len(set(table.column_names)) < table.num_columns:
        raise MetadataError(f"{where}: has two columns of one name; rename one")
    refuse_extensions(table.schema, where)
    renamed = {name: plain for plain, name in listed.described(table.column_names).items()}
    table = table.rename_columns([renamed.get(name, name) for name in table.column_names])
    return plain_columns(table, where), where, renamed


def _of_frame(columns: Any) -> pa.Table:
    try:
        if isinstance(columns, pa.Table | Mapping):
            return columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
        if type(columns).__module__.partition(".")[0] == "pandas" and columns.ndim > 1:
            # An index that has a name is a column too.
            named = any(name is not None for name in columns.index.names)
            return pa.Table.from_pandas(columns, preserve_index=named).replace_schema_metadata(None)
        if hasattr(columns, "__arrow_c_stream__") and getattr(columns, "ndim", 2) > 1:
            return pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise MetadataError(f"columns= cannot be made an Arrow table: {error}") from error
    raise ArgumentError(
        f"columns={type(columns).__name__}: it must be a pyarrow table, a pandas or polars frame, or the path of a CSV "
        f"or Parquet file"
    )


def _pairs(
    source: BaseSource, table: pa.Table, on: On | None, where: str, renamed: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return the names of what is joined by, in the source and in the table."""
    own = source.columns.column_names
    if on is None:
        if IMAGE_ID in table.column_names:
            return [(IMAGE_ID, IMAGE_ID)]
        common = [name for name in own if name.startswith(_METADATA) and name in table.column_names]
        common = common or [name for name in own if name == IMAGE_NUMBER and name in table.column_names]
        if not common:
            raise ColumnError(
                f"{where}: has neither {IMAGE_ID!r} nor a {_METADATA}* column in common with {source.path}: one has "
                f"{table.column_names[:20]}, the other {own}; pass on= with a name that both have, or "
                f"on={{'ours': 'theirs'}}"
            )
        return [(name, name) for name in common]
    names = on if isinstance(on, Sequence | Mapping) and not isinstance(on, str) else [on]
    pairs = list(names.items()) if isinstance(names, Mapping) else [(name, name) for name in names]
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        raise ArgumentError(f"on={on!r}; it must be the name of a column, several, or a mapping of ours to theirs")
    if not isinstance(names, Mapping):
        pairs = [(left if left in own else renamed.get(left, left), right) for left, right in pairs]
    pairs = [(left, right if right in table.column_names else renamed.get(right, right)) for left, right in pairs]
    for left, right in pairs:
        if left != IMAGE_ID and left not in own:
            raise ColumnError(f"{source.path}: no column {left!r} to join on; there are {[IMAGE_ID, *own]}")
        if right not in table.column_names:
            raise ColumnError(f"{where}: no column {right!r} to join on; there are {table.column_names[:20]}")
    return pairs


def _comparable(name: str, ours: pa.DataType, theirs: pa.DataType) -> Callable[[Any], Any]:
    """Return what brings keys into one form: wells B7 and B07 are one, and sites 1, 1.0 and "1"."""
    if "well" in name.lower():
        return _well
    numbers = any(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (ours, theirs))
    return _number if numbers or name.lower().endswith(_NUMBERED) else _text


def _text(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _well(value: Any) -> Any:
    found = _WELL.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if found is None else f"{found[1].upper()}{int(found[2]):02d}"


def _number(value: Any) -> Any:
    found = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if found is None else int(found[1])


def _told(key: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, key))


def _tell_unmatched(
    source: BaseSource,
    where: str,
    names: str,
    wanted: Sequence[tuple[Any, ...]],
    found: Sequence[int | None],
    rows: Mapping[tuple[Any, ...], int],
) -> None:
    """Warn of images without a row, and of rows without an image; raise `MetadataError` if nothing matches."""
    without = [key for key, row in zip(wanted, found, strict=True) if row is None]
    distinct = set(wanted)
    unused = [key for key in rows if key not in distinct]
    if wanted and len(without) == len(wanted):
        theirs = f"the table has {'; '.join(map(_told, list(rows)[:_SHOWN]))}" if rows else "the table has none"
        raise MetadataError(
            f"{where}: no image of {source.path} has a row, by {names}: images have e.g. {_told(wanted[0])}, {theirs}"
        )
    said = []
    if without:
        said.append(f"{len(without):,} of {len(wanted):,} images have no row, and null there: {_some(without)}")
    if unused:
        said.append(f"{len(unused):,} of {len(rows):,} rows have no image: {_some(unused)}")
    if said:
        warnings.warn(f"{where}, joined by {names}: {'; '.join(said)}", UserWarning, stacklevel=2)


def _some(keys: Sequence[tuple[Any, ...]]) -> str:
    distinct = list(dict.fromkeys(keys))
    return "; ".join(map(_told, distinct[:_SHOWN])) + (", ..." if len(distinct) > _SHOWN else "")
