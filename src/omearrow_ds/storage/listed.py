"""Fields whose files are listed in a table: LoadData and Image tables of CellProfiler, and single-cell profiles."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError
from omearrow_ds.storage import fields
from omearrow_ds.storage.formats._columns import plain_columns
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES
from omearrow_ds.storage.formats._ranged import Objects
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.listed_files import (
    ChannelColumns,
    FilePathResolver,
    ListedFile,
    channels_of,
    identify_below,
    refuse_doubled,
)
from omearrow_ds.storage.table_files import NAMED_BY, ColumnTypes, TableFile, described

_ILLUM = "Illum"  # Channels of this name are illumination functions, regardless of their files.
ILLUM = f"FileName_{_ILLUM}"
_INTERPRETED = re.compile(r"(Image_)?(FileName|PathName|URL|Series|Frame|Metadata)_.+|ImageNumber")


def lists_files(path: Path) -> bool:
    return bool(channels_of(TableFile(path).names))


def open_fields(
    path: Path,
    options: Mapping[str, Any],
    objects: Objects,
    types: ColumnTypes,
    copy: Path | None = None,
    *,
    skip_errors: bool = False,
) -> fields.FieldSource:
    """Open images of several TIFF files each: those that a ``pattern`` matches, or that a table lists.

    Files at URLs are read by ``objects``; a table at a URL is read from its local ``copy``. The table has a column
    ``FileName_<channel>`` or ``Image_FileName_<channel>`` per channel. Rows with equal files, series and pages, such as
    the cells of one field, are one image. Columns ``Metadata_*`` with one value per field are columns of the images.
    """
    channels, incomplete, root = options.get("channels"), options.get("incomplete", "error"), options.get("root")
    if "pattern" in options:
        if root is not None:
            raise ArgumentError(
                "applies only to tables that list files, not to pattern=",
                option="root",
                value=root,
                remedy="leave it out",
            )
        read_by = objects if isinstance(path, Url) else None
        return fields.open_pattern(path, options["pattern"], channels, incomplete, read_by, skip_errors=skip_errors)
    if not isinstance(root, str | os.PathLike | None):
        raise ArgumentError(option="root", value=root, allowed="the path of a folder")
    listing = TableFile(path if copy is None else copy, path)
    listed, metadata_names = channels_of(listing.names), described(listing.names)
    table = _read_listing(path, listing, listed, metadata_names, types)
    functions = [channel for channel in listed if channel.startswith(_ILLUM)]
    files_columns = {channel: columns.file for channel, columns in listed.items() if channel not in functions}
    images = {channel: channel for channel, column in files_columns.items() if _are_images(path, table, column)}
    if not images:
        names = listing.names[:20]
        raise ColumnError(
            f"{path}: no column FileName_<channel> or Image_FileName_<channel> lists TIFF files (columns: {names}); "
            f"add such a column"
        )
    chosen = list(images) if channels is None else fields.picked_channels(path, channels, images)
    resolver = FilePathResolver(path, root)
    columns = [resolver.files(table, listed[channel]) for channel in chosen]
    rows: dict[Hashable, int] = {}
    # Rows without files are not one field.
    keys = (files if any(files) else row for row, files in enumerate(zip(*columns, strict=True)))
    first_row_of_field = np.array([rows.setdefault(key, row) for row, key in enumerate(keys)], np.int64)
    first = np.unique(first_row_of_field)
    files_of = [[column[row] for column in columns] for row in first.tolist()]
    if len(first) < table.num_rows:
        _refuse_other_places(path, table, metadata_names, columns[0], first_row_of_field)
    metadata = _of_fields(table, metadata_names, first, first_row_of_field)
    ids = _ids(metadata, files_of, first)
    metadata |= {
        f"FileName_{name}": pa.array(resolver.functions(table.take(first), listed[name])) for name in functions
    }
    identity = identify_below(path.parent)
    identities = [[file and identity(file.file) for file in of_field] for of_field in files_of]
    complete = _complete(path, identities, files_of, chosen, ids, incomplete, root)
    refuse_doubled(path, chosen, ((int(first[number]), files_of[number], identities[number]) for number in complete))
    files = [file for number in complete for file in files_of[number] if file is not None]
    if len({url_of(file.file) is None for file in files}) > 1:
        raise FormatError(f"{path}: lists both URLs and local files; pass channels= with channels of one kind")
    are_paged = any(file[1:] != (None, None) for file in files)
    source = fields.Fields(
        [file.file for file in files],
        list(np.arange(len(files)).reshape(-1, 1, len(chosen), 1)),
        [ids[number] for number in complete],
        pa.table({name: column.take(pa.array(complete)) for name, column in metadata.items()}),
        chosen,
        first[complete],
        pages=[(file.series, file.page) for file in files] if are_paged else (),
        split_along="C",
    )
    read_by = None if url_of(files[0].file) is None else objects
    return fields.joined_files(path, path.parent, source, objects=read_by, skip_errors=skip_errors)


def _read_listing(
    path: Path,
    listing: TableFile,
    channels: Mapping[str, ChannelColumns],
    metadata: Mapping[str, str],
    types: ColumnTypes,
) -> pa.Table:
    """Return the columns of files and metadata; the former are text."""
    _refuse_names(path, listing.names)
    of_files = dict.fromkeys(filter(None, chain.from_iterable(columns[1:] for columns in channels.values())), "text")
    used = {*of_files, *metadata.values()}
    table = listing.read([name for name in listing.names if name in used], {**types.of_table(listing), **of_files})
    return plain_columns(table, str(path))


def _refuse_names(path: Path, names: Sequence[str]) -> None:
    """Raise `ColumnError` if a name with a meaning is duplicate, or would have a meaning except for a space."""
    for name in (name for name in names if _INTERPRETED.fullmatch(name.strip())):
        if name != name.strip():
            raise ColumnError(
                f"{path}: column {name!r} has a space at the start or end of its name; rename it", column=name
            )
        if names.count(name) > 1:
            raise ColumnError(f"{path}: two columns have the name {name!r}; rename or drop one")


def _are_images(path: Path, table: pa.Table, name: str) -> bool:
    """Whether all files of a column are images: tables also name illumination functions (.npy) and outlines (.png)."""
    column = table[name]
    if not pa.types.is_string(column.type):
        return False
    files = pc.unique(column.drop_null()).to_pylist()
    others = [file for file in files if not file.lower().endswith(TIFF_SUFFIXES)]
    if others and len(others) < len(files):
        raise FormatError(
            f"{path}: column {name!r} lists {others[0]!r}, expected only TIFF files; drop this row, or convert the file"
        )
    return bool(files) and not others


def _refuse_other_places(
    path: Path, table: pa.Table, names: Mapping[str, str], files: Sequence[ListedFile | None], same_row: Any
) -> None:
    """Raise `FormatError` if rows of equal files are of different plates, wells or sites; null and NaN are unknown."""
    for name in (names[plain] for plain in NAMED_BY if plain in names):
        column = table[name].combine_chunks()
        expected = column.take(pa.array(same_row))
        known = pc.and_(pc.equal(column, column), pc.equal(expected, expected))
        row = pc.index(pc.and_(pc.not_equal(column, expected), known), True).as_py()
        if row >= 0:
            file = getattr(files[row], "file", None)
            raise FormatError(
                f"{path}: rows {same_row[row]} and {row} list the same files ({file}) with different values of {name}, "
                f"{expected[row]} and {column[row]}; correct the table, or pass other channels in channels="
            )


def _of_fields(table: pa.Table, names: Mapping[str, str], first: Any, first_row_of_field: Any) -> dict[str, Any]:
    """Return the columns of the fields, one row each; columns that differ within a field describe its cells."""
    columns: dict[str, Any] = {}
    for plain, name in names.items():
        column = table[name].combine_chunks()
        if len(first) < len(column) and not column.equals(column.take(pa.array(first_row_of_field))):
            continue
        values = column.take(pa.array(first))
        columns[plain] = pa.array(fields.typed(plain, values.to_pylist())) if values.type == pa.string() else values
    return columns


def _ids(metadata: Mapping[str, Any], files: Sequence[Sequence[ListedFile | None]], first: Any) -> list[str]:
    """Return distinct ids of fields: plate, well and site, or file, or file with series and page, or row."""
    known = [metadata[name].to_pylist() for name in NAMED_BY if name in metadata]
    by_position = ["_".join(map(str, values)) for values in zip(*known, strict=True)]
    firsts = [of_field[0] or ListedFile("") for of_field in files]
    by_file = [Path(file.file).stem for file in firsts]
    numbers = [[str(number) for number in file[1:] if number is not None] for file in firsts]
    by_page = ["_".join([stem, *of_file]) for stem, of_file in zip(by_file, numbers, strict=True)]
    by_row = [f"row-{row}" for row in first.tolist()]
    return next(ids for ids in (by_position, by_file, by_page, by_row) if len(set(ids)) == len(files))


def _complete(
    path: Path,
    identities: Sequence[Sequence[Hashable]],
    files: Sequence[Sequence[ListedFile | None]],
    channels: Sequence[str],
    ids: Sequence[str],
    incomplete: str,
    root: str | os.PathLike[str] | None,
) -> list[int]:
    """Return the numbers of the fields whose files exist; warn of others, or raise `FormatError`."""
    lacking = {}
    for number, of_field in enumerate(identities):
        if None in of_field:
            absent = of_field.index(None)
            name = getattr(files[number][absent], "file", None)
            lacking[number] = f"field {ids[number]} has no file for channel {channels[absent]} ({name})"
    moved = "" if root is not None else "pass root= with the current folder of the files, "
    remedy = f"{moved}restore the file, or pass incomplete='skip'"
    fields.report_incomplete(path, list(lacking.values()), len(files), remedy, skip=incomplete == "skip")
    return [number for number in range(len(files)) if number not in lacking]
