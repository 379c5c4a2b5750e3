"""Collections in several files: from a list, a glob, a folder of part files, an Iceberg table, or a LanceDB folder."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from omearrow_ds.errors import ArgumentError, BackendError, ColumnError, FormatError
from omearrow_ds.storage.formats import Format, _detect
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors
from omearrow_ds.storage.formats._folder import natural_key
from omearrow_ds.storage.joined_parts import Part, open_joined
from omearrow_ds.storage.manifest import MANIFEST, SUFFIX, is_published
from omearrow_ds.storage.protocol import Paths
from omearrow_ds.text import count

_ABSENT = "__HIVE_DEFAULT_PARTITION__"  # Hive's folder name for null.
_HIDDEN = ("_", ".")  # Prefixes of names that readers of partitioned tables ignore.
_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_MOST_ENTRIES = 10**6
ICEBERG_METADATA, _HINT, _FOLDER = ".metadata.json", "version-hint.text", "metadata"
_ELSEWHERE = "write.metadata.path"  # Property of tables whose metadata is outside their folder.
_REWRITE = "(Spark: CALL system.rewrite_data_files)"
_VERSION = re.compile(r"v?(\d+)")


def has_hidden(names: Sequence[str], steps: Sequence[str]) -> bool:
    """Whether a glob skips a path: a name is hidden, and no step that begins with the same character matches it."""
    hidden = [name for name in names if name.startswith(_HIDDEN)]
    return any(not any(step[:1] == name[0] and fnmatchcase(name, step) for step in steps) for name in hidden)


def is_several(path: object) -> bool:
    """Whether ``path`` is a sequence of paths, or a glob pattern (and not the literal name of an existing file)."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        return isinstance(text, str) and glob.has_magic(text) and not os.path.lexists(text)
    return isinstance(path, Sequence) and all(isinstance(item, str | os.PathLike) for item in path)


def is_path(path: object) -> TypeGuard[Paths]:
    return isinstance(path, str | os.PathLike) or is_several(path)


def label_of(paths: Paths) -> Path:
    """Return a label for several paths in messages: the glob, or the common folder and the number of paths."""
    if isinstance(paths, str | os.PathLike):
        return Path(paths).absolute()
    folders = [Path(path).absolute().parent for path in paths]
    return Path(os.path.commonpath(folders) if folders else "", f"({count(len(folders), 'path')})")


def open_several(paths: Paths, only: str | None, opening: Callable[..., Images]) -> Images:
    """Open several paths as one collection; for a folder that is not a collection itself, open those below it.

    Matches of a glob are in natural order. ``only`` names the only format to find in folders; None accepts the format
    that exists.
    """
    if isinstance(paths, str | os.PathLike):
        matches = _globbed(os.fspath(paths))
        if not matches:
            raise _detect.missing(paths, "no file matches the pattern; correct the pattern")
        return _with_images(label_of(paths), _parts_at(matches, only), opening)
    if not paths:
        raise ArgumentError("the list of paths is empty", remedy="pass at least one path")
    parts = _parts_at(map(Path, paths), only)
    return open_joined(label_of(paths), parts, opening, [part.path for part in parts])


def _parts_at(candidates: Iterable[Path], only: str | None) -> list[Part]:
    files: list[Path] = []
    for path in (candidate.absolute() for candidate in candidates):
        alone = not path.is_dir() or is_published(path) or _detect.found_at(path) is not None
        files += [path] if alone else files_below(path, only)
    twice = next((path for path, number in Counter(files).items() if number > 1), None)
    if twice is not None:
        raise FormatError(f"{twice}: occurs more than once among the paths; pass it once")
    common = os.path.commonpath([path.parent for path in files])
    return [_part(path, Path(common), path.parent.parts) for path in files]


def _part(path: Path, root: Path, folders: Sequence[str]) -> Part:
    """Return a part with the keys in the names of its folders, as Hive writes them."""
    pairs = [unquote(name, errors="surrogateescape").partition("=") for name in folders if "=" in name]
    keys = {name: None if value == _ABSENT else value for name, _, value in pairs if name}
    return Part(path, path.relative_to(root).as_posix(), keys)


def _globbed(pattern: str) -> list[Path]:
    """Return the sorted matches of a glob, without hidden ones, parts of others, or plain folders of ``**``."""
    steps = Path(pattern).parts
    deep = "**" in steps
    matches: list[Path] = []
    for path in map(Path, sorted(glob.glob(pattern, recursive=True), key=lambda name: Path(name).parts)):  # noqa: PTH207
        if has_hidden(path.parts, steps) or (matches and path.is_relative_to(matches[-1])):
            continue
        if deep and path.is_dir() and not is_published(path) and _detect.found_in_folder(path) is None:
            continue
        matches.append(path)
    return sorted(matches, key=lambda path: list(map(natural_key, path.parts)))


def files_below(folder: Path, only: str | None) -> list[Path]:
    """Return the tables below a folder that is not a collection itself, in natural order of relative paths."""
    tables: dict[Format, list[Path]] = {}
    others: list[str] = []
    for path, fmt in _collections_below(folder):
        if fmt is not None and only in (None, fmt.name):
            tables.setdefault(fmt, []).append(path)
            if only is None and fmt.kind == "directory":  # The folder may have many more.
                break
        elif fmt is None and only is None:
            others.append(path.name)
    if len(tables) > 1:
        of_images = {fmt: [file for file in files if not _detect.is_plain(file)] for fmt, files in tables.items()}
        tables = {fmt: files for fmt, files in of_images.items() if files}
    pictures = [count(number, other.noun) for other, number in _detect.others_in(others).items() if other.is_image]
    if tables and len(tables) + len(pictures) > 1:
        kinds = [
            f"{count(len(files), f'{fmt.label} collection')} (e.g. {files[0].relative_to(folder)})"
            for fmt, files in tables.items()
        ]
        remedy = f"pass format={next(iter(tables)).name!r} for the first, or a glob pattern"
        refuse(folder, f"contains mixed files, {' and '.join((*kinds, *pictures))}", remedy)
    found_tables = [file for fmt, files in tables.items() if fmt.kind == "table" for file in files]
    return sorted(found_tables, key=lambda path: list(map(natural_key, path.relative_to(folder).parts)))


def _collections_below(folder: Path) -> Iterator[tuple[Path, Format | None]]:
    """Yield the files below a folder, and the folders that are collections, with the format of each."""
    folders, number = [folder], 0
    visited: set[tuple[int, int]] = set()
    while folders:
        current = folders.pop()
        status = current.stat()
        if (status.st_dev, status.st_ino) in visited:
            refuse(current, f"appears twice below {folder} through links", "pass a list of paths or a glob pattern")
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda entry: entry.is_dir()):
                number += 1
                if number > _MOST_ENTRIES:
                    refuse(folder, f"contains more than {_MOST_ENTRIES:,} files", "pass a subfolder or a glob pattern")
                if entry.name in _LOGS:
                    problem = f"is a {_LOGS[entry.name]} table, whose folder may contain deleted files"
                    refuse(current, problem, "pass a list of the files that the table's library lists as current")
                if entry.name.startswith(_HIDDEN):
                    continue
                path = Path(entry.path)
                if not entry.is_dir():
                    yield path, _detect.found_in_file(path)
                    continue
                if entry.name == _FOLDER and _metadata_files(path):
                    refuse(current, "is an Iceberg table, whose folder may contain old files", "pass only this table")
                if entry.name.endswith(SUFFIX):
                    refuse(path, "is a separate collection", "pass this path, or a list or glob pattern of collections")
                fmt = _detect.found_in_folder(path)
                if fmt is None:
                    folders.append(path)
                else:
                    yield path, fmt


def open_below(folder: Path, only: str | None, opening: Callable[..., Images]) -> Images:
    """Open the collections below a folder, or the Iceberg table at a folder or metadata file, as one collection."""
    if folder.name.endswith(SUFFIX):
        refuse(folder, f"{MANIFEST} does not exist, so the collection is incomplete", "write it again, or restore it")
    metadata = metadata_of(folder) if only is None else None
    if metadata is not None:
        return open_joined(folder, parts_of_table(metadata), opening)
    files = [] if (folder / _detect.OME_ARROW_MANIFEST).exists() else files_below(folder, only)
    parts = [_part(path, folder, path.parent.relative_to(folder).parts) for path in files]
    if not parts:
        _detect.refuse_folder_of_others(folder)
        table = "table of images" if only is None else f"table of format {only!r}"
        raise FormatError(f"{folder}: contains no {table}; pass another path")
    return _with_images(folder, parts, opening)


def _with_images(path: Path, parts: Sequence[Part], opening: Callable[..., Images]) -> Images:
    """Open the parts with images; tables without images, such as features, may be stored alongside them."""
    try:
        return open_joined(path, parts, opening)
    except ColumnError:
        of_images = [part for part in parts if not _detect.is_plain(part.path)]
        if len(of_images) in (0, len(parts)):
            raise
    return open_joined(path, of_images, opening)


def metadata_of(path: Path) -> Path | None:
    """Return the newest metadata file of the Iceberg table at a folder or metadata file; None for other paths."""
    if path.name.endswith(ICEBERG_METADATA):
        return path
    folder = path if (path / _HINT).is_file() else path / _FOLDER
    if not path.is_dir() or not _metadata_files(folder):
        return None
    if (folder / _HINT).is_file():
        hint = (folder / _HINT).read_text(encoding="utf-8", errors="replace").strip()
        if not hint.endswith(ICEBERG_METADATA):
            hint = f"{'v' if hint.isdecimal() else ''}{hint}{ICEBERG_METADATA}"
        return folder / Path(hint).name
    *others, newest = sorted(_metadata_files(folder), key=_version)
    if others and _version(others[-1]) == _version(newest):
        refuse(path, f"{others[-1].name} and {newest.name} have the same highest version", "pass one of these files")
    return newest


def _metadata_files(folder: Path) -> list[Path]:
    return [file for file in folder.glob(f"*{ICEBERG_METADATA}") if not _detect.is_hidden(file.name)]


def parts_of_table(metadata: Path) -> list[Part]:
    """Return the data files that an Iceberg metadata file lists for the newest snapshot."""
    try:
        from pyiceberg.exceptions import NotInstalledError, ValidationError  # noqa: PLC0415  # an optional backend
        from pyiceberg.table import StaticTable  # noqa: PLC0415
    except ImportError as error:
        remedy = f"run pip install 'omearrow-ds[iceberg]', or pass {str(metadata.parent.parent / 'data')!r}"
        problem = "pyiceberg, which reads Iceberg tables, is not installed"
        raise BackendError(f"{metadata}: {problem}; {remedy}") from error
    if not metadata.is_file():
        raise _detect.missing(metadata)
    with translate_errors(
        metadata, "the metadata of an Iceberg table", (*MALFORMED, NotInstalledError, ValidationError)
    ):
        table = StaticTable.from_metadata(str(metadata))
        root = _local(table.metadata.location)
        if metadata.parent.parent.resolve() != root.resolve() and _ELSEWHERE not in table.metadata.properties:
            problem = f"lists files below {root}, so the table was moved or copied"
            remedy = "move it back, register it again, or pass the data folder (which may contain old files)"
            refuse(metadata, problem, remedy)
        _refuse_renamed(table.metadata.schemas, metadata)
        tasks = list(table.scan().plan_files())
    deleted = next((task for task in tasks if task.delete_files), None)
    if deleted is not None:
        problem, remedy = f"rows of {deleted.file.file_path} are marked as deleted", "rewrite the table without them"
        refuse(metadata, problem, f"{remedy} {_REWRITE}")
    files = sorted((_local(task.file.file_path) for task in tasks), key=lambda file: natural_key(str(file)))
    if not files:
        raise FormatError(f"{metadata}: the newest snapshot has no files; add images to the table")
    names = [file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name for file in files]
    return [Part(file, name, {}) for file, name in zip(files, names, strict=True)]


def _version(file: Path) -> int:
    match = _VERSION.match(file.name)
    return int(match[1]) if match else -1


def _local(location: str) -> Path:
    """Return the path of a local file or folder, which may be recorded as a URL."""
    scheme = urlsplit(location).scheme
    if scheme not in ("", "file"):
        raise _detect.missing(location)
    path = Path(location if not scheme else urlsplit(location).path)
    decoded = Path(unquote(str(path)))
    return decoded if decoded.exists() and not path.exists() else path


def _refuse_renamed(schemas: Sequence[Any], metadata: Path) -> None:
    """Raise `FormatError` if a column was renamed, or its name reused: files keep the old names."""
    columns = {(field.field_id, field.name) for schema in schemas for field in schema.fields}
    for position in (0, 1):
        previous: dict[Any, Any] = {}
        for column in sorted(columns):
            if previous.setdefault(column[position], column[1 - position]) != column[1 - position]:
                problem = f"column {column[1]!r} was renamed or created again, so files may have old names"
                refuse(metadata, problem, f"rewrite the table {_REWRITE}")
