"""Files that a table lists: columns of each channel, series and pages, and whether two paths are one file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._urls import url_of

_FILE = re.compile(r"((?:Image_)?)(FileName|URL)_(.+)")
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


def is_listing(name: str) -> bool:
    return _FILE.fullmatch(name) is not None


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


class Folders:
    """Cache of the local folders of listed files, each of which is read once; relative paths start from ``base``."""

    def __init__(self, base: Path) -> None:
        self._base = os.fspath(base)
        self._read = functools.cache(_read_folder)

    def identity(self, file: str) -> Hashable:
        """Return a value that is equal for all paths to the same file, even through links; None if it is missing.

        The existence of a file at a URL is checked only when the file is read.
        """
        url = url_of(file) if ":" in file else None
        if url is not None:
            return unquote(str(url)) if url.scheme in ("http", "https") else str(url)
        folder, _, name = (file if file.startswith("/") else f"{self._base}/{file}").rpartition("/")
        state, links = self._read(folder)
        is_link = links.get(name)
        if is_link:
            return self.identity(os.path.realpath(f"{folder}/{name}"))
        return None if is_link is None else (state, name)


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
