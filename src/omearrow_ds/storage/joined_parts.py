"""Third-party collections opened as one: ids made distinct, columns joined by name, checksums preserved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, combinations, repeat
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import ColumnError, FormatError, OMEArrowDSError
from omearrow_ds.storage.concat import Concat, Index, Parts
from omearrow_ds.storage.formats._base import Header, Images
from omearrow_ds.storage.formats._columns import ColumnReader, ImageColumns, columns_and_checksums, is_narrow
from omearrow_ds.storage.formats._error_translation import MALFORMED
from omearrow_ds.storage.formats._image_columns import kinds_of
from omearrow_ds.storage.formats._table import native, read_ids
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.protocol import Paths

_Opening = Callable[..., Images]  # Opens a part; with ``look=True``, the part is only inspected.
_Inspected = tuple[Header, tuple[pa.Table, pa.Table] | None]  # With stored info and columns that are not yet decoded.
_IN_THREADS = ("parquet", "parquet_duck", "vortex")  # Their libraries release the GIL while reading.
_THREADS = 2  # More threads would wait for the GIL.


class MixedColumnError(ColumnError):
    """Error for a column that has different types in two parts, and no type can store the values of both."""


class Part(NamedTuple):
    """Path, name and Hive keys of a part of a joined collection."""

    path: Path
    name: str  # Path relative to the folder of all parts, with ``/`` between names.
    keys: Mapping[str, str | None]  # Values of the Hive folders in the path, as text; None is null.


class JoinedParts(Parts):
    """Parts whose columns are read on request, and then joined."""

    def __init__(self, joined_parts: Sequence[Part], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._joined = joined_parts

    def read_columns(self, names: list[str]) -> pa.Table:
        if not names:
            return pa.table({})
        empty = pa.schema(map(self.index.columns.field, names)).empty_table()
        kinds = dict(zip(names, empty.schema.types, strict=True))
        tables = []
        for number, part in enumerate(self._joined):
            source = self.get(number)
            columns = source.header.columns
            stored = _all_owned(columns.select([name for name in names if name in columns.names]))
            keys = {name: value for name, value in part.keys.items() if name in kinds}
            tables.append(_with_keys(stored, keys, kinds, len(source)))
        return _join([empty, *tables], self._joined, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedParts, (self._joined, *super().__reduce__()[1])


def open_joined(path: Path, parts: Sequence[Part], opening: _Opening, paths: Paths | None = None) -> Concat:
    """Open one or more collections in the folder ``path`` as one collection, which can be reopened from ``paths``."""
    # ``opening`` is a picklable function that opens a part. With ``look=True``, the part is only inspected. Raises
    # `FormatError` if parts have several formats; `ColumnError` if images are in columns of different names, or a
    # column has types without a common one.
    known = _inspect_all(opening, parts)
    first = known[0]
    for part, info in zip(parts, known, strict=True):
        if info.format is not first.format:
            kinds = f"{parts[0].path} is {first.format.label}, {part.path} is {info.format.label}"
            raise FormatError(f"{path}: parts have different formats ({kinds}); convert one of them")
        if info.image_column != first.image_column:
            names = f"{first.image_column} in {parts[0].path}, {info.image_column} in {part.path}"
            raise ColumnError(f"{path}: image columns differ ({names}); pass image_column=, or rename one")
    others = dict.fromkeys(chain.from_iterable(info.other_image_columns for info in known))
    files, fingerprints = [part.path for part in parts], [info.guard.fingerprint for info in known]
    first_rows = accumulate((info.row_count for info in known[:-1]), initial=0)
    rows = np.concatenate([info.rows + row for row, info in zip(first_rows, known, strict=True)])
    lengths = [len(info.image_ids) for info in known]
    columns = _columns(parts, known, path)
    is_lazy = isinstance(columns, pa.Schema)
    index = Index(
        list(accumulate(lengths, initial=0)),
        _distinct_ids(parts, known),
        np.concatenate([info.shapes for info in known]),
        list(chain.from_iterable(info.dtypes for info in known)),
        columns,
        _checksums(known),
        rows,
    )
    arguments = (path, first.format, files, index, opening, fingerprints)
    collection = JoinedParts(parts, *arguments) if is_lazy else Parts(*arguments)
    return Concat(collection, path if paths is None else paths, first.image_column, tuple(others))


def _inspect_all(opening: _Opening, parts: Sequence[Part]) -> list[Header]:
    """Return ids, shapes, dtypes and columns of several collections, opened in threads if that is faster."""
    # Parts with equal schemas are decoded together. A part with null images, or one that cannot be read, is opened:
    # that leaves nulls out, or raises its error.
    inspect = partial(_inspect, opening)
    inspected = [inspect(parts[0])]
    if inspected[0][0].format.name not in _IN_THREADS or isinstance(parts[0].path, Url):
        inspected += map(inspect, parts[1:])
    else:
        with ThreadPoolExecutor(_THREADS, "omearrow_ds-look") as pool:  # An error cancels collections not yet started.
            inspected += pool.map(inspect, parts[1:])
    headers: dict[int, Header | None] = {}
    alike: dict[Any, list[int]] = {}
    for number, (header, looked) in enumerate(inspected):
        if looked is None:
            headers[number] = header
        else:
            alike.setdefault((looked[0].schema, looked[1].schema, header.image_column), []).append(number)
    for numbers in alike.values():
        with suppress(OMEArrowDSError, *MALFORMED, pa.ArrowException):
            headers |= zip(numbers, _decode_alike([inspected[number] for number in numbers]), strict=True)
    return [headers.get(number) or _inspect(opening, part, look=False)[0] for number, part in enumerate(parts)]


def _inspect(opening: _Opening, part: Part, *, look: bool = True) -> _Inspected:
    """Return the header of a collection, with all columns unless the table is wide, and close the collection."""
    # If it can be inspected without reading, the stored info and columns are also returned, and are not in the header.
    with closing(opening(part.path, look=look)) as source:
        header, stored = replace(source.header, find_groups=lambda: None), source.header.columns
        looked = getattr(source, "looked", None)
        if looked is not None:
            return header, (looked[0], _all_owned(looked[1]))
        checksums = None if stored.checksums is None else _owned(stored.checksums)
        if is_narrow(stored.names):
            owned = _all_owned(stored.table)
        else:
            owned = stored.schema
            _refuse_other_values(part, stored)
        columns = ImageColumns(header.path, header.image_ids, owned, None, lambda: checksums)
        return replace(header, columns=columns), None


def _decode_alike(inspected: Sequence[_Inspected]) -> Iterator[Header | None]:
    """Yield the headers of inspected parts with equal schemas; None for a part with null images."""
    looked = [tables for _, tables in inspected if tables is not None]
    info, columns = (pa.concat_tables(tables) for tables in zip(*looked, strict=True))
    kinds = kinds_of(info, "")
    dtypes = native(kinds.dtypes)
    columns, checksums = columns_and_checksums(columns, "")
    checksums = checksums if inspected[0][0].image_column == (schema.COLUMN,) else None
    stop = 0
    for (header, _), (part_info, _) in zip(inspected, looked, strict=True):
        first, stop = stop, stop + len(part_info)
        rows, count = slice(first, stop), stop - first
        if kinds.null[rows].any():
            yield None
            continue
        image_ids = read_ids(info.slice(first, count))
        find_checksums = (lambda: None) if checksums is None else partial(checksums.slice, first, count)
        yield replace(
            header,
            image_ids=image_ids,
            shapes=kinds.shapes[rows],
            dtypes=dtypes[rows],
            columns=ImageColumns(header.path, image_ids, columns.slice(first, count), None, find_checksums),
            row_count=count,
        )


def _all_owned(columns: pa.Table) -> pa.Table:
    return pa.table({name: _owned(columns[name]) for name in columns.column_names})


def _owned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a copy of a column: a view would keep the memory-mapped file of each part open."""
    return pa.chunked_array([pa.concat_arrays([*column.chunks, pa.nulls(0, column.type)])])


def _distinct_ids(parts: Sequence[Part], known: Sequence[Header]) -> list[str]:
    """Return the stored ids if distinct; otherwise prefix the part's name, without suffix if that is distinct."""
    stored = list(chain.from_iterable(info.image_ids for info in known))
    if len(set(stored)) == len(stored):
        return stored
    short = [str(PurePosixPath(part.name).with_suffix("")) for part in parts]
    names = short if len(set(short)) == len(short) else [part.name for part in parts]
    return [f"{name}/{image_id}" for name, info in zip(names, known, strict=True) for image_id in info.image_ids]


def _checksums(known: Sequence[Header]) -> pa.ChunkedArray | None:
    """Return the checksums of all parts, null for parts without; None if no part has any."""
    sums = [info.columns.checksums for info in known]
    if all(checksums is None for checksums in sums):
        return None
    lengths = (len(info.image_ids) for info in known)
    columns = [one or pa.chunked_array([pa.nulls(n, pa.string())]) for one, n in zip(sums, lengths, strict=True)]
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())


def _columns(parts: Sequence[Part], known: Sequence[Header], path: Path) -> pa.Table | pa.Schema:
    """Return the columns of all parts, joined by name, or only their schema if a table is wide."""
    # Raises `ColumnError` if a column contradicts a key of its folder; `_inspect` compares those of wide tables.
    is_lazy = not all(is_narrow(info.columns.names) for info in known)
    tables = []
    for part, info in zip(parts, known, strict=True):
        if is_narrow(info.columns.names):
            _refuse_other_values(part, info.columns)
        tables.append(info.columns.schema.empty_table() if is_lazy else info.columns.table)
    pairs = [pair for part in parts for pair in part.keys.items()]
    texts = {name for name, value in pairs if value is not None and not _is_whole(value)}
    kinds = {name: pa.string() if name in texts else pa.int64() for name, _ in pairs}
    all_keys, lengths = [part.keys for part in parts], [0 if is_lazy else len(info.image_ids) for info in known]
    with_keys = list(map(_with_keys, tables, all_keys, repeat(kinds), lengths))
    columns = _join(with_keys, parts, path) if any(table.num_columns for table in with_keys) else tables[0]
    return columns.schema if is_lazy else columns


def _join(tables: Sequence[pa.Table], parts: Sequence[Part], path: Path) -> pa.Table:
    """Join tables by column name, the last of which are those of ``parts``; refuse types without a common type."""
    table = _promoted(tables)
    if table is not None:
        return table.combine_chunks()
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        both = zip(parts, tables[-len(parts) :], strict=True)
        holders = [(part.path, table.select([name])) for part, table in both if name in table.column_names]
        for (path_1, table_1), (path_2, table_2) in combinations(holders, 2):  # 2**53 + 1 is not a double.
            if _promoted([table_1, table_2]) is None:
                types = f"{table_1.schema.types[0]} in {path_1} and {table_2.schema.types[0]} in {path_2}"
                remedy = "cast or drop the column, or pass column_types= for CSV files"
                problem = f"column {name!r} is {types}, which have no common type"
                raise MixedColumnError(f"{path}: {problem}; {remedy}", column=name)
    raise ColumnError(f"{path}: columns of the parts have no common types; cast them to equal types")


def _promoted(tables: Sequence[pa.Table]) -> pa.Table | None:
    """Return tables joined by name with types that hold all values; None if no such types exist."""
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        return None
    # Arrow promotes text and bytes to bytes.
    binary = {field.name for field in table.schema if field.type == pa.binary()}
    is_mixed = any(field.name in binary and field.type == pa.string() for part in tables for field in part.schema)
    return None if is_mixed else table


def _is_whole(value: str) -> bool:
    """Whether a text is the canonical form of a 64-bit integer; 007 is not."""
    return re.fullmatch("0|-?[1-9][0-9]{0,18}", value) is not None and abs(int(value)) < 2**63


def _with_keys(
    table: pa.Table, keys: Mapping[str, str | None], kinds: Mapping[str, pa.DataType], length: int
) -> pa.Table:
    """Return the columns of a part, followed by the keys that it lacks, in a table of ``length`` rows."""
    # A table without columns has no rows, unless its columns were removed by `select`.
    table = table if table.num_columns else pa.table({"": pa.nulls(length)}).select([])
    for name in [name for name in keys if name not in table.column_names]:
        column = pa.repeat(pa.scalar(keys[name], pa.string()).cast(kinds[name]), length)
        table = table.append_column(name, column)
    return table


def _refuse_other_values(part: Part, columns: ColumnReader) -> None:
    """Raise `ColumnError` if a column of a part differs from the key with the same name in its folder."""
    for name in part.keys.keys() & set(columns.names):
        column, value = columns.column(name), part.keys[name]
        is_equal = value is None and column.null_count == len(column)
        if value is not None:
            with suppress(pa.ArrowException):
                is_equal = column.equals(pa.chunked_array([pa.repeat(pa.scalar(value).cast(column.type), len(column))]))
        if not is_equal:
            expected = "no value" if value is None else repr(value)
            problem = f"{part.path}: column {name!r} differs from the value in the folder name, {expected}"
            raise ColumnError(problem, column=name, remedy="correct one of them, or drop the column")
