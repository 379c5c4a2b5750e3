"""The files and folders that are the parts of a collection: those of a list, of a glob, or below a folder."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeGuard
from urllib.parse import unquote

from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._detect import found_at, found_in_file, found_in_folder, is_plain, missing
from omearrow_ds.storage.formats._folder import natural_key
from omearrow_ds.storage.formats._others import endings_of, others_in
from omearrow_ds.storage.iceberg import is_metadata
from omearrow_ds.storage.joined import Part
from omearrow_ds.storage.manifest import SUFFIX, is_published
from omearrow_ds.storage.protocol import Paths
from omearrow_ds.text import count

_ABSENT = "__HIVE_DEFAULT_PARTITION__"  # as Hive names the folder of what has no value
_HIDDEN = ("_", ".")  # names of what no reader of tables takes for a part
_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_MOST_ENTRIES = 10**6


def has_hidden(names: Sequence[str], steps: Sequence[str]) -> bool:
    """Return whether a path has a hidden name that no step of the glob matches from its first character on."""
    hidden = [name for name in names if name.startswith(_HIDDEN)]
    return any(not any(step[:1] == name[0] and fnmatchcase(name, step) for step in steps) for name in hidden)


def is_several(path: object) -> bool:
    """Whether it is several paths: a sequence of them, or a glob that is not itself a path."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        return isinstance(text, str) and glob.has_magic(text) and not os.path.lexists(text)
    return isinstance(path, Sequence) and all(isinstance(each, str | os.PathLike) for each in path)


def is_path(path: object) -> TypeGuard[Paths]:
    """Whether it is a path, or several."""
    return isinstance(path, str | os.PathLike) or is_several(path)


def label_of(paths: Paths) -> Path:
    """Return what several paths are called: the glob, or the folder that all are in and how many they are."""
    if isinstance(paths, str | os.PathLike):
        return Path(paths).absolute()
    folders = [Path(each).absolute().parent for each in paths]
    return Path(os.path.commonpath(folders) if folders else "", f"({count(len(folders), 'path')})")


def parts_of(paths: Paths, only: str | None) -> list[Part]:
    """Return the parts that several paths lead to; of a folder that is no collection itself, those below it.

    Parameters
    ----------
    paths
        As `is_several` tells them. What a glob fits is in natural order.
    only
        Name of the only format that is wanted in folders; None is the one that is there.

    Raises
    ------
    MissingPathError
        If a path is none, or nothing is there that a glob fits.
    FormatError
        If something is there twice, or a folder is of several formats or of none.
    """
    if isinstance(paths, str | os.PathLike):
        found = _globbed(os.fspath(paths))
        if not found:
            raise missing(paths, "nothing is there that fits")
    else:
        found = [Path(each) for each in paths]
        if not found:
            raise ArgumentError("the list of paths is empty", remedy="pass one or more")
    files: list[Path] = []
    for path in (each.absolute() for each in found):
        alone = not path.is_dir() or is_published(path) or found_at(path) is not None
        files += [path] if alone else files_below(path, only)
    twice = next((path for path, number in Counter(files).items() if number > 1), None)
    if twice is not None:
        raise FormatError(f"{twice}: is there twice among the paths; pass it once")
    common = os.path.commonpath([path.parent for path in files])
    return [_part(path, Path(common), path.parent.parts) for path in files]


def parts_below(folder: Path, only: str | None) -> list[Part]:
    """Return the parts that stand below a folder, which alone are keyed; else as `parts_of`."""
    return [_part(path, folder, path.parent.relative_to(folder).parts) for path in files_below(folder, only)]


def _part(path: Path, root: Path, folders: Sequence[str]) -> Part:
    """Return a part with the keys that its folders are, as Hive names them."""
    pairs = [unquote(name, errors="surrogateescape").partition("=") for name in folders if "=" in name]
    keys = {name: None if value == _ABSENT else value for name, _, value in pairs if name}
    return Part(path, path.relative_to(root).as_posix(), keys)


def _globbed(pattern: str) -> list[Path]:
    """Return the matches of a glob in natural order, but no hidden ones, parts of others or plain folders of ``**``."""
    steps = Path(pattern).parts
    deep = "**" in steps
    found: list[Path] = []
    for path in map(Path, sorted(glob.glob(pattern, recursive=True), key=lambda name: Path(name).parts)):  # noqa: PTH207
        if has_hidden(path.parts, steps):
            continue
        if found and path.is_relative_to(found[-1]):
            continue
        if deep and path.is_dir() and not is_published(path) and found_in_folder(path) is None:
            continue
        found.append(path)
    return sorted(found, key=lambda path: _natural(path.parts))


def files_below(folder: Path, only: str | None) -> list[Path]:
    """Return the tables below a folder that is no collection itself, in natural order of their names from it.

    Raises
    ------
    FormatError
        If they are of several formats and none is wanted alone, images of other kinds are among them, or it has none.
    """
    tables: dict[Format, list[Path]] = {}
    others: list[str] = []
    for path, fmt in _collections_below(folder):
        if fmt is None:
            others.append(path.name)
        else:
            tables.setdefault(fmt, []).append(path)
            if only is None and fmt.kind == "directory":  # there may be many more
                break
    if only is not None:
        tables, others = {fmt: files for fmt, files in tables.items() if fmt.name == only}, []
    if len(tables) > 1:
        tables = {
            fmt: images for fmt, files in tables.items() if (images := [each for each in files if not is_plain(each)])
        }
    pictures = {other.noun: number for other, number in others_in(endings_of(others)).items() if other.is_image}
    if tables and len(tables) + len(pictures) > 1:
        told = [
            f"{count(len(files), f'{fmt.label} table')}, e.g. {files[0].relative_to(folder)}"
            for fmt, files in tables.items()
        ]
        told += [count(number, noun) for noun, number in pictures.items()]
        first = next(iter(tables)).name
        raise FormatError(
            f"{folder}: holds mixed files, {'; '.join(told)}; pass format={first!r} to read the former alone, or a glob"
        )
    found = next(iter(tables.values()), []) if all(fmt.kind == "table" for fmt in tables) else []
    return sorted(found, key=lambda path: _natural(path.relative_to(folder).parts))


def _natural(names: Sequence[str]) -> list[list[tuple[int, int, str]]]:
    return [natural_key(name) for name in names]


def _collections_below(folder: Path) -> Iterator[tuple[Path, Format | None]]:
    """Yield the files below a folder, and the folders that are collections, with the format of each.

    Raises
    ------
    FormatError
        If a folder is there twice by links, is a collection in parts of its own, or keeps a log of which files count;
        or if there is so much that it is hardly meant.
    """
    folders, number = [folder], 0
    seen: set[tuple[int, int]] = set()
    while folders:
        here = folders.pop()
        status = here.stat()
        if (status.st_dev, status.st_ino) in seen:
            raise FormatError(f"{here}: is there twice below {folder}, by links; pass a list, or a glob")
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.is_dir()):
                number += 1
                if number > _MOST_ENTRIES:
                    raise FormatError(f"{folder}: holds more than {_MOST_ENTRIES:,} files; pass one below, or a glob")
                if entry.name in _LOGS:
                    table = f"is a {_LOGS[entry.name]} table, whose folder may hold files that count no more"
                    raise FormatError(f"{here}: {table}; pass the list of those that do, as its library gives it")
                if entry.name.startswith(_HIDDEN):
                    continue
                path = Path(entry.path)
                if not entry.is_dir():
                    yield path, found_in_file(path)
                    continue
                if entry.name == "metadata" and is_metadata(path):
                    raise FormatError(f"{here}: is an Iceberg table, whose folder may hold old files; pass it alone")
                if entry.name.endswith(SUFFIX):
                    raise FormatError(f"{path}: is a collection of its own; pass it, or a list or a glob of such")
                fmt = found_in_folder(path)
                if fmt is None:
                    folders.append(path)
                else:
                    yield path, fmt
