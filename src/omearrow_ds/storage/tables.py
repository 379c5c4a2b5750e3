"""Images of one column of a table, or of several joined along C, with or without null rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from omearrow_ds.codec.schema import channel_of
from omearrow_ds.errors import ColumnError, FormatError, OMEArrowDSError
from omearrow_ds.options import check_names
from omearrow_ds.storage.compositions import SelectedRows
from omearrow_ds.storage.extents import Region, Regions, Targets
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._base import Array, Header, Images, ImagesWrapper
from omearrow_ds.storage.formats._columns import ImageColumns
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._stored import Stored, join_names
from omearrow_ds.storage.formats._table import TableImages


def open_with(fmt: Format, path: Path, *, image_column: Any = None, nulls: str = "error", **options: Any) -> Images:
    """Open a stored collection with its format; options with the values None, False or 0 are not passed on."""
    options = {option: value for option, value in options.items() if value not in (None, 0)}
    open_one = fmt.module().open_collection
    try:
        if fmt.kind != "table":
            images: Images = open_one(path, **options)
            return images
        if image_column is not None:
            allowed = "a column name, several distinct names, or None"
            image_column = check_names("image_column", image_column, allowed, remedy="correct it", path=path)
        name, *others = image_column or (None,)
        tables: list[TableImages] = [open_one(path, image_column=name, **options)]
        if not others and (tables[0].looked is not None or not tables[0].table.header.null.any()):
            return tables[0]
        options["known"] = tables[0].table.options.known
        tables += [open_one(path, image_column=other, with_columns=False, **options) for other in others]
    except OMEArrowDSError as error:
        error.path = error.path or str(path)
        raise
    null = np.logical_or.reduce([table.table.header.null for table in tables])
    reopen = partial(open_with, fmt, path, image_column=image_column, nulls=nulls, **options)
    sources: list[Images] = list(tables)
    if null.any():
        if nulls == "error":
            _refuse_nulls(tables)
        rows = np.flatnonzero(~null)
        sources = [SelectedRows(table, rows, reopen) for table in tables]
    return sources[0] if len(sources) == 1 else JoinedColumns(sources, reopen)


def _refuse_nulls(tables: Sequence[TableImages]) -> NoReturn:
    first, *others = (table for table in tables if table.table.header.null.any())
    null = first.table.header.null
    also = "".join(f", {other.table.header.null.sum():,} in {other.header.image_column[0]!r}" for other in others)
    verb = "is" if null.sum() == 1 and not others else "are"
    images = f"{null.sum():,} of the {len(first):,} images in column {first.header.image_column[0]!r}{also}"
    problem = f"{images} {verb} null, first image {null.argmax()}"
    refuse(first.header.path, problem, "pass nulls='skip' to skip these rows")


class JoinedColumns(ImagesWrapper):
    """Images of several columns of a table; the images of each row are joined along C.

    Ids and metadata are those of the first column, channels those of each. If their names are missing or not distinct,
    they are named after their columns. Joined images have no checksums. ``reopen`` opens it again.
    """

    def __init__(self, sources: Sequence[Images], reopen: partial[Images]) -> None:
        headers = [source.header for source in sources]
        first, names = headers[0], tuple(name for header in headers for name in header.image_column)
        if len({(header.guard.fingerprint, len(header.image_ids)) for header in headers}) > 1:
            raise FormatError(f"{first.path}: was replaced or changed while it was opened; open it again")
        for header in headers[1:]:
            _refuse_other_kinds(first, header)
        channels = np.stack([header.shapes[:, 1] for header in headers])
        self._sources, self._reopen, self._stops = sources, reopen, np.cumsum(channels, axis=0)
        self._starts = self._stops - channels
        shapes, stored = first.shapes.copy(), first.columns
        shapes[:, 1] = self._stops[-1]
        super().__init__(
            sources[0],
            shapes=shapes,
            columns=ImageColumns(first.path, first.image_ids, stored.schema, stored.select),
            image_column=names,
            other_image_columns=tuple(name for name in first.other_image_columns if name not in names),
        )
        storages = [source.details.storage_info for source in sources]
        self.details = replace(self.details, storage_info=partial(_joined_storage, storages), fills_out=lambda: True)

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        if regions is not None:
            return self._read_regions(rows, regions)
        parts = zip(*(source.read(rows) for source in self._sources), strict=True)
        targets = repeat(None, len(rows)) if out is None else out
        return [np.concatenate(images, axis=1, out=target) for images, target in zip(parts, targets, strict=True)]

    def _read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        parts: list[list[Array]] = [[] for _ in rows]
        for source, starts, stops in zip(self._sources, self._starts, self._stops, strict=True):
            in_source = np.array(regions)
            first, stop = starts[rows, None], stops[rows, None]
            in_source[:, [1, 6]] = np.clip(in_source[:, [1, 6]], first, stop) - first
            positions = np.flatnonzero(in_source[:, 1] < in_source[:, 6]).tolist()
            in_rows = [rows[position] for position in positions]
            read = source.read(in_rows, in_source[positions].tolist()) if in_rows else []
            for position, array in zip(positions, read, strict=True):
                parts[position].append(array)
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1) for arrays in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def metadata(self, index: int) -> dict[str, Any]:
        of_columns = [source.metadata(index) for source in self._sources]
        channels, names = list[dict[str, Any]](), list[str]()
        for source, metadata in zip(self._sources, of_columns, strict=True):
            (column,), size_c = source.header.image_column, int(source.header.shapes[index, 1])
            of_column = metadata["channels"] or [channel_of({})] * size_c
            names += [column if size_c == 1 else f"{column} {number}" for number in range(len(of_column))]
            channels += of_column
        if len({channel["name"] for channel in channels} - {None}) < len(channels):
            channels = [{**channel, "id": None, "name": name} for channel, name in zip(channels, names, strict=True)]
        return {**of_columns[0], "channels": channels}

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _joined_storage(storages: Sequence[Callable[[], Stored]]) -> Stored:
    stored = [storage_info() for storage_info in storages]
    reading = "; ".join(dict.fromkeys(column.reading for column in stored))
    return replace(
        stored[0],
        encoding=join_names(str(column.encoding) for column in stored),
        compression=join_names(column.compression for column in stored),
        in_place=all(column.in_place for column in stored),
        reading=f"{reading}; {len(stored)} columns joined along C",
    )


def _refuse_other_kinds(first: Header, other: Header) -> None:
    differ = (first.shapes != other.shapes)[:, [0, 2, 3, 4]].any(axis=1)
    differ |= np.array([one != two for one, two in zip(first.dtypes, other.dtypes, strict=True)], bool)
    if differ.any():
        index = int(differ.argmax())
        kinds = (f"{tuple(header.shapes[index].tolist())} {header.dtypes[index]}" for header in (other, first))
        names = (header.image_column[0] for header in (other, first))
        both = " but ".join(f"{kind} in column {name!r}" for kind, name in zip(kinds, names, strict=True))
        remedy = "open the columns separately, as joined images need equal T, Z, Y, X and dtype"
        raise ColumnError(f"{first.path}: image {index} is {both}; {remedy}")
