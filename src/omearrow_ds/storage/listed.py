"""Fields whose files are listed in a table: LoadData and Image tables of CellProfiler, and single-cell profiles."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError
from omearrow_ds.storage import fields
from omearrow_ds.storage.formats._columns import plain_columns
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES, missing
from omearrow_ds.storage.formats._ranged import Objects
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.listed_files import (
    ChannelColumns,
    Folders,
    ListedFile,
    channels_of,
    is_listing,
    refuse_doubled,
    whole_numbers,
)
from omearrow_ds.storage.table_files import NAMED_BY, ColumnTypes, TableFile, described

_ILLUM = "Illum"  # Channels of this name are illumination functions, regardless of their files.
ILLUM = f"FileName_{_ILLUM}"
_SAID = re.compile(r"(Image_)?(FileName|PathName|URL|Series|Frame|Metadata)_.+|ImageNumber")
_OF_ANY_TABLE = ("s3", "gs", "az")  # Schemes of URLs that name no host.


def lists_files(path: Path) -> bool:
    """Whether a CSV or Parquet file has columns that name image files."""
    return any(map(is_listing, TableFile(path).names))


def open_listed(
    path: Path,
    channels: Sequence[str] | None,
    incomplete: str,
    root: str | os.PathLike[str] | None,
    objects: Objects,
    types: ColumnTypes,
    copy: Path | None = None,
    *,
    skip_errors: bool = False,
) -> fields.FieldSource:
    """Open the fields of a table with a column ``FileName_<channel>`` or ``Image_FileName_<channel>`` per channel.

    Rows with equal files, series and pages, such as the cells of one field, are one image. Columns ``Metadata_*`` with
    one value per field are columns of the images. Files at URLs are read by ``objects``; a table at a URL is read from
    its local ``copy``. Raises `ColumnError` if the table lists no TIFF files; `ArgumentError` if a channel is unknown;
    `FormatError` if the table cannot be read, or if files are missing, differ, or are of two channels or fields.
    """
    if root is not None and not isinstance(root, str | os.PathLike):
        raise ArgumentError(option="root", value=root, allowed="the path of a folder")
    listing = TableFile(path if copy is None else copy, path)
    names = listing.names
    _refuse_names(path, names)
    listed = channels_of(names)
    meant = described(names)
    of_files = dict.fromkeys(filter(None, chain.from_iterable(columns[1:] for columns in listed.values())), "text")
    needed = {*of_files, *meant.values()}
    read = listing.read([name for name in names if name in needed], {**types.of_table(listing), **of_files})
    table = plain_columns(read, str(path))
    images = (channel for channel in listed if not channel.startswith(_ILLUM))
    known = {channel: channel for channel in images if _are_images(path, table, listed[channel].file)}
    if not known:
        raise ColumnError(
            f"{path}: no column FileName_<channel> or Image_FileName_<channel> lists TIFF files; there are {names[:20]}"
        )
    chosen = list(known) if channels is None else fields.picked_channels(path, channels, known)
    followed, unread = _Followed(path, root), _Followed(path, None, refuse=False)
    columns = [followed.files(table, listed[channel]) for channel in chosen]
    first, field_of_row = _fields(list(zip(*columns, strict=True)))
    files_of = [[column[row] for column in columns] for row in first.tolist()]
    if len(first) < table.num_rows:
        _refuse_other_places(path, table, meant, columns[0], first[field_of_row])
    metadata = _of_fields(table, meant, first, field_of_row)
    ids = _ids(metadata, files_of, first)
    for channel in (channel for channel in listed if channel.startswith(_ILLUM)):
        functions = unread.files(table, listed[channel]._replace(series=None, page=None))
        paths = _functions([file and file.file for file in functions], path, root)
        # Not by append_column: a table without columns has no rows.
        columns_of = dict(zip(metadata.column_names, metadata.columns, strict=True))
        metadata = pa.table(columns_of | {f"FileName_{channel}": [paths[row] for row in first.tolist()]})
    identity = Folders(path.parent).identity
    identities = [[file and identity(file.file) for file in of_field] for of_field in files_of]
    complete = _complete(path, identities, files_of, chosen, ids, incomplete, root)
    refuse_doubled(path, chosen, ((int(first[number]), files_of[number], identities[number]) for number in complete))
    metadata = metadata.take(complete) if metadata.num_columns else metadata
    files = [file for number in complete for file in files_of[number] if file is not None]
    grids = list(np.arange(len(files)).reshape(-1, 1, len(chosen), 1))
    image_ids, pages = [ids[number] for number in complete], [(file.series, file.page) for file in files]
    names = [file.file for file in files]
    found = fields.Fields(names, grids, image_ids, metadata, chosen, first[complete], split_along="C")
    found = replace(found, pages=pages) if set(pages) - {(None, None)} else found
    at_urls = {url_of(file) is not None for file in found.files}
    if len(at_urls) > 1:
        raise FormatError(f"{path}: lists files at URLs and files of this machine; choose those of one with channels=")
    read_by = objects if True in at_urls else None
    return fields.joined_files(path, path.parent, found, objects=read_by, skip_errors=skip_errors)


def _refuse_names(path: Path, names: Sequence[str]) -> None:
    """Raise `ColumnError` if a name with a meaning is duplicate, or would have a meaning except for a space."""
    for name in names:
        plain = name.strip()
        if _SAID.fullmatch(plain) is None:
            continue
        if name != plain:
            raise ColumnError(
                f"{path}: the column {name!r} has a space at an end of its name; take it away", column=name
            )
        if names.count(name) > 1:
            raise ColumnError(f"{path}: has two columns {name!r}; rename or drop one")


def _are_images(path: Path, table: pa.Table, name: str) -> bool:
    """Whether all files of a column are images: tables also name illumination functions (.npy) and outlines (.png)."""
    column = table[name]
    if not pa.types.is_string(column.type):
        return False
    files = pc.unique(column.drop_null()).to_pylist()
    others = [file for file in files if not file.lower().endswith(TIFF_SUFFIXES)]
    if others and len(others) < len(files):
        raise FormatError(
            f"{path}: column {name!r} names TIFF files, and {others[0]!r}; leave such rows out, or convert their files"
        )
    return bool(files) and not others


class _Followed:
    """Resolves and restricts the files that a table lists.

    The table may be from an untrusted source. Requests to ``s3://``, ``gs://`` and ``az://`` go to the user's own
    endpoint, for any bucket. Other URLs name a host, and are only allowed if the user named that host.

    Parameters
    ----------
    path
        The table.
    root
        Folder or URL that replaces the listed folders; files listed below that URL are unchanged.
    refuse
        Whether files that are not allowed raise an error; False if they are not opened.
    """

    def __init__(self, path: Path, root: str | os.PathLike[str] | None, *, refuse: bool = True) -> None:
        self._path, self._refuse = path, refuse
        url = None if root is None else url_of(root)
        self._root = None if root is None else str(url or Path(root).absolute())
        self._named = {_host(str(each)) for each in (path, url) if isinstance(each, Url)}

    def files(self, table: pa.Table, channel: ChannelColumns) -> list[ListedFile | None]:
        """Return the file that each row lists for a channel, or None for a row without a file."""
        names: list[str | None] = table[channel.file].to_pylist()
        folders = [None] * len(names) if channel.folder is None else table[channel.folder].to_pylist()
        numbers = [whole_numbers(self._path, table, name, names) for name in (channel.series, channel.page)]
        rows = list(zip(folders, names, *numbers, strict=True))
        files = {}
        for folder, name, series, page in set(rows):  # Many rows, one per cell, list one file.
            if name is not None:
                file = self._of_url(name) if channel.kind == "URL" else self._joined(folder or "", name)
                files[folder, name, series, page] = ListedFile(file, series, page)
        return [files.get(row) for row in rows]

    def _joined(self, where: str, name: str) -> str:
        if self._root is not None and not self._is_below(where):
            where = self._root
        if url_of(where) is not None and url_of(name) is None:
            return self._allowed(f"{where.rstrip('/')}/{name.lstrip('/')}")
        return self._allowed(os.path.join(where, name))  # noqa: PTH118  # Many files: pathlib is slower.

    def _of_url(self, url: str) -> str:
        parts = urlsplit(url)
        if self._root is not None and not self._is_below(url):
            return self._joined(self._root, Path(unquote(parts.path)).name)
        if url_of(url) is not None:
            return self._allowed(url)
        if parts.scheme not in ("", "file"):
            raise missing(url)
        return self._allowed(unquote(parts.path))

    def _is_below(self, where: str) -> bool:
        """Whether a URL is ``root``, or below it."""
        return url_of(where) is not None and f"{where}/".startswith(f"{str(self._root).rstrip('/')}/")

    def _allowed(self, file: str) -> str:
        """Return a path, or a normalized URL, if the table may list it."""
        if not self._refuse:
            return file
        url = url_of(file)
        if url is None and isinstance(self._path, Url):
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise FormatError(f"{self._path}: lists {file!r}, which is not on its server; pass root= with a URL")
            file = f"{self._path.parent}/{file}"
            url = url_of(file)
        if url is not None and url.scheme not in _OF_ANY_TABLE and _host(str(url)) not in self._named:
            raise FormatError(
                f"{self._path}: lists {url}, of a host that you did not name; if it may be asked for there, pass "
                f"root={_host(str(url))!r}, else root= with where they are"
            )
        return file if url is None else str(url)


def _host(url: str) -> str:
    return "/".join(url.split("/")[:3])


def _functions(paths: list[str | None], path: Path, root: str | os.PathLike[str] | None) -> list[str | None]:
    """Return absolute paths of illumination functions, in ``root`` if they do not exist at the listed path."""
    found: dict[str | None, str | None] = {None: None}
    for name in set(paths) - {None}:
        if url_of(str(name)) is not None:
            found[name] = name
            continue
        place = path.parent / str(name)
        moved = root is not None and not place.exists()
        found[name] = os.fspath(Path(str(root)).absolute() / place.name if moved else place)
    return [found[name] for name in paths]


def _fields(files: Sequence[tuple[ListedFile | None, ...]]) -> tuple[Any, Any]:
    """Return the first row of each field, and the field of each row: rows of equal files are one field."""
    numbers: dict[Hashable, int] = {}
    keys = (each if any(each) else row for row, each in enumerate(files))  # Rows without files are not one field.
    field_of_row = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    first = np.unique(field_of_row, return_index=True)[1] if len(files) else np.zeros(0, np.int64)
    return first, field_of_row


def _refuse_other_places(
    path: Path, table: pa.Table, described: Mapping[str, str], files: Sequence[ListedFile | None], same_row: Any
) -> None:
    """Raise `FormatError` if rows of equal files are of different plates, wells or sites; null and NaN are unknown."""
    for name in (described[plain] for plain in NAMED_BY if plain in described):
        column = table[name].combine_chunks()
        expected = column.take(pa.array(same_row))
        known = pc.and_(pc.equal(column, column), pc.equal(expected, expected))
        row = pc.index(pc.and_(pc.not_equal(column, expected), known), True).as_py()
        if row >= 0:
            file = getattr(files[row], "file", None)
            raise FormatError(
                f"{path}: rows {same_row[row]} and {row} list the same files ({file}), but {name} is {expected[row]} "
                f"and {column[row]}; correct the table, or choose other channels with channels="
            )


def _of_fields(table: pa.Table, described: Mapping[str, str], first: Any, field_of_row: Any) -> pa.Table:
    """Return the columns of the fields, one row each; columns that differ within a field describe its cells."""
    columns: dict[str, Any] = {}
    same_row = first[field_of_row]
    for plain, name in described.items():
        column = table[name].combine_chunks()
        if len(first) < len(column) and not column.equals(column.take(pa.array(same_row))):
            continue
        values = column.take(pa.array(first))
        columns[plain] = pa.array(fields.typed(plain, values.to_pylist())) if values.type == pa.string() else values
    return pa.table(columns)


def _ids(metadata: pa.Table, files: Sequence[Sequence[ListedFile | None]], first: Any) -> list[str]:
    """Return distinct ids of fields: plate, well and site, or file, or file with series and page, or row."""
    known = [metadata[name].to_pylist() for name in NAMED_BY if name in metadata.column_names]
    by_place = ["_".join(map(str, values)) for values in zip(*known, strict=True)]
    firsts = [each[0] or ListedFile("") for each in files]
    by_file = [Path(file.file).stem for file in firsts]
    numbers = [[str(number) for number in file[1:] if number is not None] for file in firsts]
    by_page = ["_".join([stem, *of_file]) for stem, of_file in zip(by_file, numbers, strict=True)]
    by_row = [f"row-{row}" for row in first.tolist()]
    return next(ids for ids in (by_place, by_file, by_page, by_row) if len(set(ids)) == len(files))


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
    complete, lacking = [], []
    for number, of_field in enumerate(identities):
        if None not in of_field:
            complete.append(number)
        else:
            absent = of_field.index(None)
            name = getattr(files[number][absent], "file", None)
            lacking.append(f"field {ids[number]} has no file for channel {channels[absent]} ({name})")
    if lacking and (incomplete == "error" or not complete):
        more = f" ({len(lacking):,} such fields of {len(files):,})" if len(lacking) > 1 else ""
        elsewhere = "" if root is not None else "pass root= with the folder that the files are in now, "
        raise FormatError(f"{path}: {lacking[0]}{more}; {elsewhere}restore it, or pass incomplete='skip'")
    if lacking:
        fields.tell_skipped(path, len(lacking), len(files), lacking[0])
    return complete
