"""Files that a table lists: columns of each channel, series and pages, and whether two paths are one file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._urls import url_of

_FILE = re.compile(r"((?:Image_)?)(FileName|URL)_(.+)")
_WHOLE = re.compile(r"\s*([0-9]+)(?:\.0*)?\s*")


class ChannelColumns(NamedTuple):
    """Names of the columns that list the files of a channel; None for those that the table does not have."""

    kind: str  # FileName or URL.
    file: str
    folder: str | None
    series: str | None
    page: str | None


class ListedFile(NamedTuple):
    """File that a table lists, with its image series and page, counted from 0, if the table names them."""

    file: str
    series: int | None = None
    page: int | None = None


def is_listing(name: str) -> bool:
    """Return whether a column of this name may list files."""
    return _FILE.fullmatch(name) is not None


def channels_of(names: Sequence[str]) -> dict[str, ChannelColumns]:
    """Return the columns of each channel, in the order of the table; file names are preferred to URLs."""
    matches = [match for match in map(_FILE.fullmatch, names) if match is not None]
    preferred = {match[3]: match for match in sorted(matches, key=lambda match: match[2] != "URL")}
    channels = {}
    for match in sorted(preferred.values(), key=lambda match: names.index(match[0])):
        prefix, kind, channel = match.groups()
        path = f"{prefix}PathName_{channel}"
        series, page = (
            next((name for each in (prefix, "", "Image_") if (name := f"{each}{column}_{channel}") in names), None)
            for column in ("Series", "Frame")
        )
        folder = path if kind == "FileName" and path in names else None
        channels[channel] = ChannelColumns(kind, match[0], folder, series, page)
    return channels


def whole_numbers(path: Path, table: pa.Table, column: str | None, files: Sequence[str | None]) -> list[int | None]:
    """Return a column of series or pages, which may be text; None per row if it is missing or empty.

    Raises `FormatError` if a row with a file has no whole number.
    """
    if column is None or table[column].null_count == table.num_rows:
        return [None] * table.num_rows
    values = table[column].to_pylist()
    matches = {value: _WHOLE.fullmatch(str(value)) for value in set(values)}
    numbers = {value: None if match is None else int(match[1]) for value, match in matches.items()}
    if None in numbers.values():
        wrong = (row for row, value in enumerate(values) if numbers[value] is None and files[row] is not None)
        row = next(wrong, None)
        if row is not None:
            raise FormatError(
                f"{path}: row {row} has {column} {values[row]!r}; write a whole number, counted from 0, or leave the "
                f"column out"
            )
    return [numbers[value] for value in values]


class Folders:
    """Folders of listed files on this machine, each of which is read once.

    Parameters
    ----------
    base
        Folder that relative paths start from.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._names: dict[str, set[str]] = {}

    def has(self, file: str) -> bool:
        """Return whether a file exists; for a URL it is True, since reading shows that."""
        folder, name = os.path.split(os.path.join(self._base, file))  # noqa: PTH118  # There may be 100,000 files.
        return url_of(file) is not None or name in self._names_in(folder)

    def _names_in(self, folder: str) -> set[str]:
        if folder not in self._names:
            try:
                self._names[folder] = set(os.listdir(folder))  # noqa: PTH208  # Only names are needed.
            except (FileNotFoundError, NotADirectoryError):
                self._names[folder] = set()
        return self._names[folder]
