"""Fields whose files are listed in a table: LoadData and Image tables of CellProfiler, and single-cell profiles."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ColumnError, FormatError
from omearrow_ds.options import refuse_options, refuse_value
from omearrow_ds.storage import fields
from omearrow_ds.storage.formats._columns import plain_columns
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES, missing
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._folder import ListedFile
from omearrow_ds.storage.formats._urls import ObjectReader, Url, url_of
from omearrow_ds.storage.table_files import NAMED_BY, ColumnTypes, TableFile, described

_ILLUM = "Illum"  # Channels of this name are illumination functions, regardless of their files.
ILLUM = f"FileName_{_ILLUM}"
_INTERPRETED = re.compile(r"(Image_)?(FileName|PathName|URL|Series|Frame|Metadata)_.+|ImageNumber")
_FILE = re.compile(r"((?:Image_)?)(FileName|URL)_(.+)")
_OF_ANY_TABLE = ("s3", "gs", "az")  # Schemes of URLs that name no host.
_WHOLE = re.compile(r"\s*([0-9]+)(?:\.0*)?\s*")
_ANY = -1  # Matches any page of a series.


def lists_files(path: Path) -> bool:
    return bool(channels_of(TableFile(path).names))


def open_fields(
    path: Path, options: Mapping[str, Any], objects: ObjectReader, types: ColumnTypes, copy: Path, *, skip_errors: bool
) -> fields.FieldSource:
    """Open images of several TIFF files each: those that a ``pattern`` matches, or that a table lists.

    Files at URLs are read by ``objects``; a table at a URL is read from its local ``copy``. The table has a column
    ``FileName_<channel>`` or ``Image_FileName_<channel>`` per channel. Rows with equal files, series and pages, such as
    the cells of one field, are one image. Columns ``Metadata_*`` with one value per field are columns of the images.
    """
    channels, root = options.get("channels"), options.get("root")
    if "pattern" in options:
        if root is not None:
            refuse_options({"root": root}, "applies only to tables that list files, not to pattern=")
        return fields.open_pattern(path, options, objects if isinstance(path, Url) else None, skip_errors=skip_errors)
    if not isinstance(root, str | os.PathLike | None):
        refuse_value("root", root, allowed="the path of a folder")
    listing = TableFile(copy, path)
    listed, metadata_names = channels_of(listing.names), described(listing.names)
    table = _read_listing(listing, listed, metadata_names, types)
    functions = [name for name in listed if name.startswith(_ILLUM)]
    images = [name for name in listed if name not in functions and _are_images(path, table, listed[name].file)]
    if not images:
        problem = "no column FileName_<channel> or Image_FileName_<channel> lists TIFF files"
        raise ColumnError(f"{problem} (columns: {listing.names[:20]})", path=path, remedy="add such a column")
    chosen = images if channels is None else fields.picked_channels(path, channels, {name: name for name in images})
    base = None if root is None else str(url_of(root) or Path(root).absolute())
    columns = [_listed_files(path, base, table, listed[channel]) for channel in chosen]
    rows: dict[Hashable, int] = {}
    # Rows without files are not one field.
    of_rows = enumerate(zip(*columns, strict=True))
    first_row_of_field = np.array([rows.setdefault(files if any(files) else row, row) for row, files in of_rows])
    first = np.unique(first_row_of_field)
    files_of = [[column[row] for column in columns] for row in first.tolist()]
    metadata = _of_fields(path, table, metadata_names, columns[0], first, first_row_of_field)
    ids = _ids(metadata, files_of, first)
    first_rows, resolve = table.take(first), partial(_function_path, path, base)
    metadata |= {f"FileName_{name}": pa.array(_each_path(first_rows, listed[name], resolve)) for name in functions}
    identity = identify_below(path.parent)

    def describe(number: int, plane: fields.Plane) -> str:
        file = files_of[number][chosen.index(plane[1])]
        return f"channel {plane[1]} ({None if file is None else file.file})"

    moved = "pass root= with the current folder of the files" if root is None else "correct root="
    remedies, skip = (moved, ", or restore the file"), options.get("incomplete") == "skip"
    planes = [
        {("", name, ""): file for name, file in zip(chosen, of_field, strict=True) if file and identity(file.file)}
        for of_field in files_of
    ]
    files, grids, complete = fields.assemble(path, planes, ids, chosen, describe, remedies, skip=skip)
    positions = product(first[complete].tolist(), chosen)
    entries = [(row, channel, file) for (row, channel), file in zip(positions, files, strict=True)]
    refuse_doubled(path, entries, identity)
    if len({url_of(file.file) is None for file in files}) > 1:
        raise FormatError(f"{path}: lists both URLs and local files; pass channels= with channels of one kind")
    if any(file[1:3] != (None, None) for file in files):
        files = [file._replace(origin=f"{path}: row {row}, channel {name!r}") for row, name, file in entries]
    source = fields.Fields(
        files,
        grids,
        [ids[number] for number in complete],
        pa.table({name: column.take(pa.array(complete)) for name, column in metadata.items()}),
        chosen,
        first[complete],
        split_along="C",
    )
    read_by = None if url_of(files[0].file) is None else objects
    return fields.joined_files(path, path.parent, source, read_by, skip_errors=skip_errors)


def _read_listing(
    listing: TableFile, channels: Mapping[str, ChannelColumns], metadata: Mapping[str, str], types: ColumnTypes
) -> pa.Table:
    """Return the columns of files and metadata; the former are text."""
    for name in (name for name in listing.names if _INTERPRETED.fullmatch(name.strip())):
        if name != name.strip():
            problem = f"column {name!r} has a space at the start or end of its name"
            raise ColumnError(problem, path=listing.shown_path, column=name, remedy="rename it")
        if listing.names.count(name) > 1:
            raise ColumnError(f"{listing.shown_path}: two columns have the name {name!r}; rename or drop one")
    of_files = dict.fromkeys(filter(None, chain.from_iterable(columns[1:] for columns in channels.values())), "text")
    used = {*of_files, *metadata.values()}
    table = listing.read([name for name in listing.names if name in used], {**types.of_table(listing), **of_files})
    return plain_columns(table, str(listing.shown_path))


def _are_images(path: Path, table: pa.Table, name: str) -> bool:
    """Whether all files of a column are images: tables also name illumination functions (.npy) and outlines (.png)."""
    column = table[name]
    if not pa.types.is_string(column.type):
        return False
    files = pc.unique(column.drop_null()).to_pylist()
    others = [file for file in files if not file.lower().endswith(TIFF_SUFFIXES)]
    if others and len(others) < len(files):
        problem = f"column {name!r} lists {others[0]!r}, expected only TIFF files"
        refuse(path, problem, "drop this row, or convert the file")
    return bool(files) and not others


def _of_fields(
    path: Path, table: pa.Table, names: Mapping[str, str], files: Sequence[ListedFile | None], first: Any, same_row: Any
) -> dict[str, Any]:
    """Return the columns that are equal in all rows of a field, with one row per field; others describe cells.

    Raises `FormatError` if rows of equal files are of different plates, wells or sites; null and NaN are unknown.
    """
    columns: dict[str, Any] = {}
    for plain, name in names.items():
        column = table[name].combine_chunks()
        expected = column.take(pa.array(same_row))
        if len(first) == len(column) or column.equals(expected):
            values = column.take(pa.array(first))
            columns[plain] = pa.array(fields.typed(plain, values.to_pylist())) if values.type == pa.string() else values
        elif plain in NAMED_BY:
            known = pc.and_(pc.equal(column, column), pc.equal(expected, expected))
            row = pc.index(pc.and_(pc.not_equal(column, expected), known), True).as_py()
            if row >= 0:
                same = f"rows {same_row[row]} and {row} list the same files ({getattr(files[row], 'file', None)})"
                problem = f"{same} with different values of {name}, {expected[row]} and {column[row]}"
                refuse(path, problem, "correct the table, or pass other channels in channels=")
    return columns


def _ids(metadata: Mapping[str, Any], files: Sequence[Sequence[ListedFile | None]], first: Any) -> list[str]:
    """Return distinct ids of fields: plate, well and site, or file, or file with series and page, or row."""
    known = [metadata[name].to_pylist() for name in NAMED_BY if name in metadata]
    by_position = ["_".join(map(str, values)) for values in zip(*known, strict=True)]
    firsts = [of_field[0] or ListedFile() for of_field in files]
    by_file = [Path(file.file).stem for file in firsts]
    by_page = ["_".join([Path(file.file).stem, *(str(n) for n in file[1:3] if n is not None)]) for file in firsts]
    by_row = [f"row-{row}" for row in first.tolist()]
    return next(ids for ids in (by_position, by_file, by_page, by_row) if len(set(ids)) == len(files))


class ChannelColumns(NamedTuple):
    """Names of the table columns with the files of a channel; missing columns have the name None."""

    kind: str  # FileName or URL.
    file: str
    folder: str | None
    series: str | None
    page: str | None


def channels_of(names: Sequence[str]) -> dict[str, ChannelColumns]:
    """Return the file columns of each channel in table order; a column of file names is preferred to one of URLs."""
    matches = filter(None, map(_FILE.fullmatch, names))
    preferred = {match[3]: match for match in sorted(matches, key=lambda match: match[2] != "URL")}
    channels = {}
    for match in sorted(preferred.values(), key=lambda match: names.index(match[0])):
        prefix, kind, channel = match.groups()
        path = f"{prefix}PathName_{channel}"
        series, page = (
            next((name for start in (prefix, "", "Image_") if (name := f"{start}{column}_{channel}") in names), None)
            for column in ("Series", "Frame")
        )
        folder = path if kind == "FileName" and path in names else None
        channels[channel] = ChannelColumns(kind, match[0], folder, series, page)
    return channels


def whole_numbers(path: Path, table: pa.Table, column: str | None, files: Sequence[str | None]) -> list[int | None]:
    """Return the series or page number of each row; None everywhere if the column is missing or empty."""
    if column is None or table[column].null_count == table.num_rows:
        return [None] * table.num_rows
    values = table[column].to_pylist()
    matches = {value: _WHOLE.fullmatch(str(value)) for value in set(values)}
    numbers = {value: None if match is None else int(match[1]) for value, match in matches.items()}
    for row, (value, file) in enumerate(zip(values, files, strict=True)):
        if numbers[value] is None and file is not None:
            problem = f"row {row} has {column} {value!r}, expected an integer from 0"
            refuse(path, problem, "correct it, or drop the column")
    return [numbers[value] for value in values]


def identify_below(base: Path) -> Callable[[str], Hashable]:
    """Return a function of a path, which may start from ``base``, that is equal for all paths to one file.

    For a missing local file, it returns None; a file at a URL is not looked for. Each folder is read once.
    """
    base_folder = os.fspath(base)

    @functools.cache
    def read_folder(folder: str) -> tuple[Hashable, dict[str, bool]]:
        try:
            with os.scandir(folder or "/") as entries:
                links = {entry.name: entry.is_symlink() for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return folder, {}
        status = os.stat(folder or "/")  # noqa: PTH116
        return (status.st_dev, status.st_ino), links

    @functools.cache
    def identity(file: str) -> Hashable:
        url = url_of(file) if ":" in file else None
        if url is not None:
            return unquote(str(url)) if url.is_web else str(url)
        folder, _, name = (file if file.startswith("/") else f"{base_folder}/{file}").rpartition("/")
        state, links = read_folder(folder)
        is_link = links.get(name)
        if is_link:
            return identity(os.path.realpath(f"{folder}/{name}"))
        return None if is_link is None else (state, name)

    return identity


def refuse_doubled(
    path: Path, planes: Iterable[tuple[int, str, ListedFile]], identity: Callable[[str], Hashable]
) -> None:
    """Raise `FormatError` if two planes, each with row, channel and file, are the same page of the same file."""
    known: dict[Hashable, tuple[int, str, ListedFile]] = {}
    for plane in planes:
        file, series, page = identity(plane[2].file), plane[2].series or 0, plane[2].page
        other = known.get((file, series, page)) or known.get((file, series, _ANY if page is None else None))
        if other is not None:
            problem = f"{_in_words(*other)} and {_in_words(*plane)} are the same plane"
            refuse(path, problem, "correct the table, or pass channels= without one of them")
        known[file, series, page] = known[file, series, _ANY] = plane


def _in_words(row: int, channel: str, file: ListedFile) -> str:
    return f"channel {channel!r} of row {row} ({file.file}{'' if file.page is None else f', page {file.page}'})"


def _listed_files(path: Path, root: str | None, table: pa.Table, channel: ChannelColumns) -> list[ListedFile | None]:
    files = _each_path(table, channel, partial(_allowed_path, path, root))
    numbers = [whole_numbers(path, table, name, files) for name in (channel.series, channel.page)]
    listed_file = functools.cache(ListedFile)  # Many rows, one per cell, list one file.
    rows = zip(files, *numbers, strict=True)
    return [None if file is None else listed_file(file, series, page) for file, series, page in rows]


def _each_path(table: pa.Table, channel: ChannelColumns, resolve: Callable[[str, str, str], str]) -> list[str | None]:
    names: list[str | None] = table[channel.file].to_pylist()
    folders = [None] * len(names) if channel.folder is None else table[channel.folder].to_pylist()
    path_of = functools.cache(partial(resolve, channel.kind))
    return [None if name is None else path_of(folder or "", name) for folder, name in zip(folders, names, strict=True)]


def _function_path(path: Path, root: str | None, kind: str, folder: str, name: str) -> str:
    """Return the path of an illumination function: as listed if it exists, else in the root folder."""
    listed = _listed_path(kind, folder, name)
    if url_of(listed) is not None:
        return listed
    local = path.parent / listed
    return os.fspath(local if root is None or local.exists() else Path(root) / local.name)


def _allowed_path(path: Path, root: str | None, kind: str, folder: str, name: str) -> str:
    """Return the path of a file, or a normalized URL, if the table at ``path`` may list it.

    The table may be from an untrusted source. Requests to ``s3://``, ``gs://`` and ``az://`` go to the user's own
    endpoint, for any bucket. Other URLs name a host, and are only allowed if the user named that host. ``root`` is the
    folder or URL that replaces the listed folders; files listed below that URL are unchanged.
    """
    location = name if kind == "URL" else folder
    if root is not None and (url_of(location) is None or not f"{location}/".startswith(f"{root.rstrip('/')}/")):
        file = _join(root, Path(unquote(urlsplit(name).path)).name if kind == "URL" else name)
    else:
        file = _listed_path(kind, folder, name)
    url = url_of(file)
    if url is None and isinstance(path, Url):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            refuse(path, f"lists {file!r}, which is not below the URL of the table", "pass root= with a URL")
        url = url_of(f"{path.parent}/{file}")
    hosts = (_host(str(known)) for known in (path, url_of(root or "")) if isinstance(known, Url))
    if url is not None and url.scheme not in _OF_ANY_TABLE and _host(str(url)) not in hosts:
        remedy = f"pass root={_host(str(url))!r} to allow this host, or root= with the folder or URL of the files"
        refuse(path, f"lists {url} on another host, which is refused for safety", remedy)
    return file if url is None else str(url)


def _join(folder: str, name: str) -> str:
    if url_of(folder) is not None and url_of(name) is None:
        return f"{folder.rstrip('/')}/{name.lstrip('/')}"
    return os.path.join(folder, name)  # noqa: PTH118  # Many files: pathlib is slower.


def _listed_path(kind: str, folder: str, name: str) -> str:
    if kind == "FileName" or url_of(name) is not None:
        return _join(folder, name)
    parts = urlsplit(name)
    if parts.scheme not in ("", "file"):
        raise missing(name)
    return unquote(parts.path)


def _host(url: str) -> str:
    return "/".join(url.split("/")[:3])
