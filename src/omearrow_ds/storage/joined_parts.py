"""Third-party collections opened as one: ids made distinct, columns joined by name, checksums preserved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, combinations
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.errors import ColumnError, FormatError, OMEArrowDSError
from omearrow_ds.storage.concat import Concat, Index, Open, Parts
from omearrow_ds.storage.formats._base import Header, Images
from omearrow_ds.storage.formats._columns import ImageColumns, columns_and_checksums, is_narrow
from omearrow_ds.storage.formats._error_translation import MALFORMED
from omearrow_ds.storage.formats._image_columns import kinds_of
from omearrow_ds.storage.formats._table import native, read_ids
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.protocol import Paths

_Opening = Callable[..., Images]  # Opens a part; with ``look=True``, the part is only inspected.
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
        """Return some columns of all parts; raise `ColumnError` if values of two parts have no common type."""
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
            tables.append(_filled(_with_keys(stored, keys, kinds, len(source)), names[0], len(source)))
        return _join([empty, *tables], self._joined, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedParts, (self._joined, *super().__reduce__()[1])


def joined(path: Path, parts: Sequence[Part], opening: _Opening, paths: Paths | None = None) -> Concat:
    """Open one or more collections in the folder ``path`` as one collection, which can be reopened from ``paths``."""
    # ``opening`` is a picklable function that opens a part. With ``look=True``, the part is only inspected. Raises
    # `FormatError` if parts have several formats; `ColumnError` if images are in columns of different names, or a
    # column has types without a common one.
    known = _look_at_all(opening, [part.path for part in parts])
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
    tables = [info.columns.table for info in known if is_narrow(info.columns.names)]
    is_lazy = len(tables) < len(known)
    index = Index(
        list(accumulate(lengths, initial=0)),
        _distinct_ids(parts, known),
        np.concatenate([info.shapes for info in known]),
        list(chain.from_iterable(info.dtypes for info in known)),
        _column_schema(parts, known, opening, path) if is_lazy else _columns(parts, tables, lengths, path),
        _checksums(known),
        rows,
    )
    arguments = (path, first.format, files, index, opening, fingerprints)
    collection = JoinedParts(parts, *arguments) if is_lazy else Parts(*arguments)
    return Concat(collection, path if paths is None else paths, first.image_column, tuple(others))


class InspectedPart(NamedTuple):
    """Properties of a part that was inspected, and the stored fields of its images and columns, not yet decoded."""

    header: Header
    info: pa.Table
    columns: pa.Table


def _look_at_all(opening: _Opening, paths: Sequence[Path]) -> list[Header]:
    """Return ids, shapes, dtypes and columns of several collections, opened in threads if that is faster."""
    # Parts with equal schemas are decoded together. A part with null images, or one that cannot be read, is opened:
    # that leaves nulls out, or raises its error.
    inspect = partial(_look, opening)
    known = [inspect(paths[0])]
    first = known[0].header if isinstance(known[0], InspectedPart) else known[0]
    if first.format.name not in _IN_THREADS or isinstance(paths[0], Url):
        known += map(inspect, paths[1:])
    else:
        with ThreadPoolExecutor(_THREADS, "omearrow_ds-look") as pool:  # An error cancels collections not yet started.
            known += pool.map(inspect, paths[1:])
    alike: dict[Any, dict[int, InspectedPart]] = {}
    for number, part in enumerate(known):
        if isinstance(part, InspectedPart):
            alike.setdefault((part.info.schema, part.columns.schema, part.header.image_column), {})[number] = part
    for parts in alike.values():
        with suppress(OMEArrowDSError, *MALFORMED, pa.ArrowException):
            for number, contents in zip(parts, _known_at_once(list(parts.values())), strict=True):
                known[number] = contents
    return [
        read_part_header(opening, path) if isinstance(part, InspectedPart) else part
        for part, path in zip(known, paths, strict=True)
    ]


def read_part_header(opening: Open, path: Path) -> Header:
    with closing(opening(path)) as source:
        return _header_of(source)


def _header_of(source: Images) -> Header:
    """Return properties that are available after the part is closed, with all columns unless the table is wide."""
    header, stored = source.header, source.header.columns
    checksums = None if stored.checksums is None else _owned(stored.checksums)
    is_at_once = is_narrow(stored.names)
    owned, read = (_all_owned(stored.table), None) if is_at_once else (stored.schema, stored.select)
    columns = ImageColumns(header.path, header.image_ids, owned, read, lambda: checksums)
    return replace(header, columns=columns, find_groups=lambda: None)


def _look(opening: _Opening, path: Path) -> Header | InspectedPart:
    """Return the properties of a collection, or its stored info and columns if it can be inspected without reading."""
    with closing(opening(path, look=True)) as source:
        looked = getattr(source, "looked", None)
        if looked is None:
            return _header_of(source)
        return InspectedPart(replace(source.header, find_groups=lambda: None), looked[0], _all_owned(looked[1]))


def _known_at_once(looked: Sequence[InspectedPart]) -> Iterator[Header | InspectedPart]:
    """Yield the properties of parts with equal schemas; yield parts with null images unchanged."""
    info = pa.concat_tables([part.info for part in looked])
    kinds = kinds_of(info, "")
    dtypes = native(kinds.dtypes)
    columns, checksums = columns_and_checksums(pa.concat_tables([part.columns for part in looked]), "")
    checksums = checksums if looked[0].header.image_column == (schema.COLUMN,) else None
    starts = accumulate((len(part.info) for part in looked), initial=0)
    for part, first in zip(looked, starts, strict=False):
        count = len(part.info)
        rows = slice(first, first + count)
        if kinds.null[rows].any():
            yield part
            continue
        path, image_ids = part.header.path, read_ids(info.slice(first, count))
        find_checksums = (lambda: None) if checksums is None else partial(checksums.slice, first, count)
        yield replace(
            part.header,
            image_ids=image_ids,
            shapes=kinds.shapes[rows],
            dtypes=dtypes[rows],
            columns=ImageColumns(path, image_ids, columns.slice(first, count), None, find_checksums),
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


def _columns(parts: Sequence[Part], tables: Sequence[pa.Table], lengths: Sequence[int], path: Path) -> pa.Table:
    """Return the columns of all parts, joined by name; raise `ColumnError` if one contradicts a key of its folder."""
    pairs = [pair for part in parts for pair in part.keys.items()]
    texts = {name for name, value in pairs if value is not None and not _is_whole(value)}
    kinds = {name: pa.string() if name in texts else pa.int64() for name, _ in pairs}
    for part, table in zip(parts, tables, strict=True):
        for name in part.keys.keys() & set(table.column_names):
            _refuse_other(table[name], name, part.keys[name], part.path)
    with_keys = [
        _with_keys(table, part.keys, kinds, length) for part, table, length in zip(parts, tables, lengths, strict=True)
    ]
    first = next((table.column_names[0] for table in with_keys if table.num_columns), None)
    if first is None:
        return tables[0]
    return _join([_filled(table, first, length) for table, length in zip(with_keys, lengths, strict=True)], parts, path)


def _column_schema(parts: Sequence[Part], known: Sequence[Header], opening: _Opening, path: Path) -> pa.Schema:
    """Return the schema of columns that are read on request; types and keys are checked as by `_columns`."""
    for part, info in zip(parts, known, strict=True):
        names = part.keys.keys() & set(info.columns.schema.names)
        if names:
            with closing(opening(part.path)) as source:
                for name in names:
                    _refuse_other(source.header.columns.column(name), name, part.keys[name], part.path)
    empty = [info.columns.schema.empty_table() for info in known]
    return _columns(parts, empty, [0] * len(parts), path).schema


def _filled(table: pa.Table, name: str, length: int) -> pa.Table:
    """Return the table, or nulls if it has no columns, because then it would have no rows."""
    return table if table.num_columns else pa.table({name: pa.nulls(length)})


def _join(tables: Sequence[pa.Table], parts: Sequence[Part], path: Path) -> pa.Table:
    """Return tables, the last ones of ``parts``, joined by name; raise `ColumnError` for types without a common one."""
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
    try:
        return str(int(value)) == value and abs(int(value)) < 2**63
    except ValueError:
        return False


def _with_keys(
    table: pa.Table, keys: Mapping[str, str | None], kinds: Mapping[str, pa.DataType], length: int
) -> pa.Table:
    """Return the columns of a part, followed by the keys that it lacks."""
    for name in [name for name in keys if name not in table.column_names]:
        column = pa.repeat(pa.scalar(keys[name], pa.string()).cast(kinds[name]), length)
        table = table.append_column(name, column) if table.num_columns else pa.table({name: column})
    return table


def _refuse_other(column: pa.ChunkedArray, name: str, value: str | None, path: Path) -> None:
    is_equal = value is None and column.null_count == len(column)
    if value is not None:
        with suppress(pa.ArrowException):
            equal = pc.equal(column, pa.scalar(value).cast(column.type))
            is_equal = all(chunk.true_count == len(chunk) for chunk in equal.chunks)
    if not is_equal:
        expected = "no value" if value is None else repr(value)
        problem = f"{path}: column {name!r} differs from the value in the folder name, {expected}"
        raise ColumnError(problem, column=name, remedy="correct one of them, or drop the column")
