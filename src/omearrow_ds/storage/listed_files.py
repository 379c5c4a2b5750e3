"""Files that a table lists: their columns, paths, series and pages, and whether two paths are one file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.formats._urls import Url, url_of

_FILE = re.compile(r"((?:Image_)?)(FileName|URL)_(.+)")
_OF_ANY_TABLE = ("s3", "gs", "az")  # Schemes of URLs that name no host.
_ANY = -1  # Matches any page of a series.
_WHOLE = re.compile(r"\s*([0-9]+)(?:\.0*)?\s*")


class ChannelColumns(NamedTuple):
    """Names of the table columns with the files of a channel; missing columns have the name None."""

    kind: str  # FileName or URL.
    file: str
    folder: str | None
    series: str | None
    page: str | None


class ListedFile(NamedTuple):
    """File that a table lists, with the numbers of image series and page from 0; None if the table lists no numbers."""

    file: str
    series: int | None = None
    page: int | None = None


def channels_of(names: Sequence[str]) -> dict[str, ChannelColumns]:
    """Return the file columns of each channel in table order; a column of file names is preferred to one of URLs."""
    matches = [match for match in map(_FILE.fullmatch, names) if match is not None]
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
    """Return the series or page number of each row; None everywhere if the column is missing or empty.

    Raises `FormatError` if a row with a file has no whole number.
    """
    if column is None or table[column].null_count == table.num_rows:
        return [None] * table.num_rows
    values = table[column].to_pylist()
    matches = {value: _WHOLE.fullmatch(str(value)) for value in set(values)}
    numbers = {value: None if match is None else int(match[1]) for value, match in matches.items()}
    row = next((row for row, value in enumerate(values) if numbers[value] is None and files[row] is not None), None)
    if row is not None:
        raise FormatError(
            f"{path}: row {row} has {column} {values[row]!r}, expected an integer from 0; correct it, or drop the "
            f"column"
        )
    return [numbers[value] for value in values]


def identify_below(base: Path) -> Callable[[str], Hashable]:
    """Return a function of a file path whose result is equal for all paths to the same file, even through links.

    For a missing local file, it returns None. The existence of a file at a URL is checked only when the file is read.
    Relative paths start from ``base``. Each folder is read once.
    """
    base_folder, read_folder = os.fspath(base), functools.cache(_read_folder)

    def identity(file: str) -> Hashable:
        url = url_of(file) if ":" in file else None
        if url is not None:
            return unquote(str(url)) if url.scheme in ("http", "https") else str(url)
        folder, _, name = (file if file.startswith("/") else f"{base_folder}/{file}").rpartition("/")
        state, links = read_folder(folder)
        is_link = links.get(name)
        if is_link:
            return identity(os.path.realpath(f"{folder}/{name}"))
        return None if is_link is None else (state, name)

    return identity


def _read_folder(folder: str) -> tuple[Hashable, dict[str, bool]]:
    """Return device and inode of a folder, and its names with whether each is a symbolic link."""
    try:
        with os.scandir(folder or "/") as entries:
            links = {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return folder, {}
    status = os.stat(folder or "/")  # noqa: PTH116
    return (status.st_dev, status.st_ino), links


def refuse_doubled(
    path: Path, channels: Sequence[str], fields: Iterable[tuple[int, Sequence[ListedFile | None], Sequence[Hashable]]]
) -> None:
    """Raise `FormatError` if two channels or fields refer to the same page of the same file."""
    known: dict[Hashable, tuple[int, str, ListedFile]] = {}
    for row, files, identities in fields:
        for channel, file, identity in zip(channels, files, identities, strict=True):
            if file is None:
                continue
            series, page = file.series or 0, file.page
            other = known.get((identity, series, page)) or known.get((identity, series, _ANY if page is None else None))
            if other is not None:
                raise FormatError(
                    f"{path}: {_in_words(*other)} and {_in_words(row, channel, file)} are the same plane; correct the "
                    f"table, or pass channels= without one of them"
                )
            known[identity, series, page] = row, channel, file
            if page is not None:
                known[identity, series, _ANY] = row, channel, file


def _in_words(row: int, channel: str, file: ListedFile) -> str:
    page = "" if file.page is None else f", page {file.page}"
    return f"channel {channel!r} of row {row} ({file.file}{page})"


class FilePathResolver:
    """Resolves and restricts the files that a table lists.

    The table may be from an untrusted source. Requests to ``s3://``, ``gs://`` and ``az://`` go to the user's own
    endpoint, for any bucket. Other URLs name a host, and are only allowed if the user named that host. ``root`` is the
    folder or URL that replaces the listed folders; files listed below that URL are unchanged.
    """

    def __init__(self, path: Path, root: str | os.PathLike[str] | None) -> None:
        url = None if root is None else url_of(root)
        self._path = path
        self._root = None if root is None else str(url or Path(root).absolute())
        self._hosts = {_host(str(location)) for location in (path, url) if isinstance(location, Url)}

    def files(self, table: pa.Table, channel: ChannelColumns) -> list[ListedFile | None]:
        """Return the file that each row lists for a channel, or None for a row without a file."""
        paths = self._each_path(table, channel, self._allowed_file)
        numbers = [whole_numbers(self._path, table, name, paths) for name in (channel.series, channel.page)]
        rows = list(zip(paths, *numbers, strict=True))
        files = {row: ListedFile(*row) for row in set(rows) if row[0] is not None}
        return [files.get(row) for row in rows]

    def functions(self, table: pa.Table, channel: ChannelColumns) -> list[str | None]:
        """Return the path of each row's illumination function: as listed if it exists, else in the root folder."""
        return self._each_path(table, channel, self._function)

    def _each_path(
        self, table: pa.Table, channel: ChannelColumns, resolve: Callable[[str, str, str], str]
    ) -> list[str | None]:
        names: list[str | None] = table[channel.file].to_pylist()
        folders = [None] * len(names) if channel.folder is None else table[channel.folder].to_pylist()
        rows = list(zip(folders, names, strict=True))
        # Many rows, one per cell, list one file.
        paths = {
            (folder, name): resolve(channel.kind, folder or "", name) for folder, name in set(rows) if name is not None
        }
        return [paths.get(row) for row in rows]  # type: ignore[arg-type]

    def _function(self, kind: str, folder: str, name: str) -> str:
        listed = _listed_path(kind, folder, name)
        if url_of(listed) is not None:
            return listed
        local = self._path.parent / listed
        is_moved = self._root is not None and not local.exists()
        return os.fspath(Path(str(self._root)) / local.name if is_moved else local)

    def _allowed_file(self, kind: str, folder: str, name: str) -> str:
        """Return the path of a file, or a normalized URL, if the table may list it."""
        location = name if kind == "URL" else folder
        if self._root is not None and (
            url_of(location) is None or not f"{location}/".startswith(f"{self._root.rstrip('/')}/")
        ):
            file = _join(self._root, Path(unquote(urlsplit(name).path)).name if kind == "URL" else name)
        else:
            file = _listed_path(kind, folder, name)
        url = url_of(file)
        if url is None and isinstance(self._path, Url):
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise FormatError(
                    f"{self._path}: lists {file!r}, which is not below the URL of the table; pass root= with a URL"
                )
            url = url_of(f"{self._path.parent}/{file}")
        if url is not None and url.scheme not in _OF_ANY_TABLE and _host(str(url)) not in self._hosts:
            raise FormatError(
                f"{self._path}: lists {url} on another host, which is refused for safety; pass "
                f"root={_host(str(url))!r} to allow this host, or root= with the folder or URL of the files"
            )
        return file if url is None else str(url)


def _join(folder: str, name: str) -> str:
    if url_of(folder) is not None and url_of(name) is None:
        return f"{folder.rstrip('/')}/{name.lstrip('/')}"
    return os.path.join(folder, name)  # noqa: PTH118  # Many files: pathlib is slower.


def _listed_path(kind: str, folder: str, name: str) -> str:
    """Return the URL of a file on a server, or the path of a local file."""
    if kind == "FileName" or url_of(name) is not None:
        return _join(folder, name)
    parts = urlsplit(name)
    if parts.scheme not in ("", "file"):
        raise missing(name)
    return unquote(parts.path)


def _host(url: str) -> str:
    return "/".join(url.split("/")[:3])
