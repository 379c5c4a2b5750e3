"""Images of one column of a table, or of several joined along C, with or without null rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from omearrow_ds.storage.formats._base import Array, Images, ImagesWrapper
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._stored import Stored, joined
from omearrow_ds.storage.formats._table import TableImages


def open_with(fmt: Format, path: Path, *, image_column: Any = None, nulls: str = "error", **options: Any) -> Images:
    """Open a stored collection with its format; options with the values None, False or 0 are not passed on."""
    for name in list(options):
        if options[name] in (None, 0):
            del options[name]
    open_collection = fmt.module().open_collection
    try:
        if fmt.kind == "table":
            return _open_table(open_collection, path, image_column, nulls, **options)
        images: Images = open_collection(path, **options)
    except OMEArrowDSError as error:
        error.path = error.path or str(path)
        raise
    return images


def _open_table(open_one: Callable[..., TableImages], path: Path, image_column: Any, nulls: str, **how: Any) -> Images:
    names = image_column
    if image_column is not None:
        allowed = "a column name, several distinct names, or None"
        names = check_names("image_column", image_column, allowed, remedy="correct it", path=path)
    name, *others = names or (None,)
    tables = [open_one(path, image_column=name, **how)]
    if not others and (tables[0].looked is not None or not tables[0].header.null.any()):
        return tables[0]
    how["known"] = tables[0].table.options.known
    tables += [open_one(path, image_column=other, with_columns=False, **how) for other in others]
    null = np.logical_or.reduce([table.header.null for table in tables])
    reopen = partial(_open_table, open_one, path, image_column, nulls, **how)
    sources: list[Images] = [*tables]
    if null.any():
        if nulls == "error":
            _refuse_nulls(tables)
        rows = np.flatnonzero(~null)
        sources = [SelectedRows(table, rows, reopen) for table in tables]
    return sources[0] if len(sources) == 1 else JoinedColumns(sources, reopen)


def _refuse_nulls(tables: Sequence[TableImages]) -> NoReturn:
    first, *others = (table for table in tables if table.header.null.any())
    null = first.header.null
    also = "".join(f", {other.header.null.sum():,} in {other.image_column[0]!r}" for other in others)
    verb = "is" if null.sum() == 1 and not others else "are"
    images = f"{null.sum():,} of the {len(first):,} images in column {first.image_column[0]!r}{also}"
    refuse(first.path, f"{images} {verb} null, first image {null.argmax()}", "pass nulls='skip' to skip these rows")


class JoinedColumns(ImagesWrapper):
    """Images of several columns of a table; the images of each row are joined along C.

    Ids and metadata are those of the first column, channels those of each. If their names are missing or not distinct,
    they are named after their columns. Joined images have no checksums. ``reopen`` opens it again.
    """

    def __init__(self, sources: Sequence[Images], reopen: partial[Images]) -> None:
        super().__init__(sources[0])
        first, self._sources, self._reopen = sources[0], sources, reopen
        if any(source.guard.fingerprint != first.guard.fingerprint or len(source) != len(first) for source in sources):
            raise FormatError(f"{self.path}: was replaced or changed while it was opened; open it again")
        for source in sources[1:]:
            _refuse_other_kinds(first, source)
        channels = np.stack([source.shapes[:, 1] for source in sources])
        self._stops = np.cumsum(channels, axis=0)
        self._starts = self._stops - channels
        self.shapes = first.shapes.copy()
        self.shapes[:, 1] = self._stops[-1]
        self.checksums = None
        self.image_column = tuple(name for source in sources for name in source.image_column)
        self.other_image_columns = tuple(name for name in first.other_image_columns if name not in self.image_column)

    def read_arrays(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        if regions is not None:
            return self._read_regions(rows, regions)
        parts = zip(*(source.read_arrays(rows) for source in self._sources), strict=True)
        targets = repeat(None, len(rows)) if out is None else out
        return [np.concatenate(images, axis=1, out=target) for images, target in zip(parts, targets, strict=True)]

    @property
    def fills_out(self) -> bool:
        return True

    def read_groups(self) -> Iterable[slice]:
        return self._sources[0].read_groups()

    def _read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        parts: list[list[Array]] = [[] for _ in rows]
        for source, starts, stops in zip(self._sources, self._starts, self._stops, strict=True):
            positions, in_source = [], []
            for position, (row, region) in enumerate(zip(rows, regions, strict=True)):
                first, stop = int(starts[row]), int(stops[row])
                channels = max(region[1] - first, 0), min(region[6], stop) - first
                if channels[0] < channels[1]:
                    positions.append(position)
                    in_source.append([region[0], channels[0], *region[2:6], channels[1], *region[7:]])
            read = source.read_arrays([rows[position] for position in positions], in_source) if positions else []
            for position, array in zip(positions, read, strict=True):
                parts[position].append(array)
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1) for arrays in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def metadata(self, index: int) -> dict[str, Any]:
        of_columns = [source.metadata(index) for source in self._sources]
        channels, names = list[dict[str, Any]](), list[str]()
        for source, metadata in zip(self._sources, of_columns, strict=True):
            (column,), size_c = source.image_column, int(source.shapes[index, 1])
            of_column = metadata["channels"] or [channel_of({})] * size_c
            names += [column if size_c == 1 else f"{column} {number}" for number in range(len(of_column))]
            channels += of_column
        if len({channel["name"] for channel in channels} - {None}) < len(channels):
            channels = [{**channel, "id": None, "name": name} for channel, name in zip(channels, names, strict=True)]
        return {**of_columns[0], "channels": channels}

    def storage_info(self) -> Stored:
        stored = [source.storage_info() for source in self._sources]
        reading = "; ".join(dict.fromkeys(column.reading for column in stored))
        return replace(
            stored[0],
            encoding=joined(str(column.encoding) for column in stored),
            compression=joined(column.compression for column in stored),
            in_place=all(column.in_place for column in stored),
            reading=f"{reading}; {len(stored)} columns joined along C",
        )

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _refuse_other_kinds(first: Images, other: Images) -> None:
    differ = (first.shapes != other.shapes)[:, [0, 2, 3, 4]].any(axis=1)
    differ |= np.array([one != two for one, two in zip(first.dtypes, other.dtypes, strict=True)], bool)
    if differ.any():
        index = int(differ.argmax())
        kinds = [f"{tuple(source.shapes[index].tolist())} {source.dtypes[index]}" for source in (first, other)]
        raise ColumnError(
            f"{first.path}: image {index} is {kinds[1]} in column {other.image_column[0]!r} but {kinds[0]} in "
            f"{first.image_column[0]!r}; open the columns separately, as joined images need equal T, Z, Y, X and dtype"
        )
