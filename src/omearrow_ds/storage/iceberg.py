"""Parquet files of the newest snapshot of an Iceberg table, found with pyiceberg."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from omearrow_ds.errors import BackendError, FormatError
from omearrow_ds.storage.concat_source import Part
from omearrow_ds.storage.formats._detect import is_hidden, missing
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._folder import natural_key

_METADATA, _HINT, _FOLDER = ".metadata.json", "version-hint.text", "metadata"
_ELSEWHERE = "write.metadata.path"  # Property of tables whose metadata is outside their folder.
_VERSION = re.compile(r"v?(\d+)")


def metadata_of(path: Path) -> Path | None:
    """Return the newest metadata file of the Iceberg table at a folder or metadata file; None for other paths.

    Raises `FormatError` if two metadata files have the newest version, and no version hint names one of them.
    """
    if is_metadata_file(path):
        return path
    folder = path if (path / _HINT).is_file() else path / _FOLDER
    if not path.is_dir() or not is_metadata(folder):
        return None
    if (folder / _HINT).is_file():
        hint = (folder / _HINT).read_text(encoding="utf-8", errors="replace").strip()
        named = hint if hint.endswith(_METADATA) else f"{'v' if hint.isdecimal() else ''}{hint}{_METADATA}"
        return folder / Path(named).name
    *others, newest = sorted(_metadata_files(folder), key=_version)
    if others and _version(others[-1]) == _version(newest):
        raise FormatError(
            f"{path}: {others[-1].name} and {newest.name} have the same highest version; pass one of these files"
        )
    return newest


def is_metadata_file(path: Path) -> bool:
    return path.name.endswith(_METADATA)


def is_metadata(folder: Path) -> bool:
    return folder.is_dir() and bool(_metadata_files(folder))


def _metadata_files(folder: Path) -> list[Path]:
    return [file for file in folder.glob(f"*{_METADATA}") if not is_hidden(file.name)]


def parts_of_table(metadata: Path) -> list[Part]:
    """Return the data files that an Iceberg metadata file lists for the newest snapshot.

    Raises `BackendError` if pyiceberg is not installed; `MissingPathError` if the table's files are at a URL or
    missing; `FormatError` if the table was moved, has deleted rows or renamed columns, or has no files.
    """
    try:
        from pyiceberg.exceptions import NotInstalledError, ValidationError  # noqa: PLC0415  # an optional backend
        from pyiceberg.table import StaticTable  # noqa: PLC0415
    except ImportError as error:
        remedy = f"run pip install 'omearrow-ds[iceberg]', or pass {str(metadata.parent.parent / 'data')!r}"
        problem = "pyiceberg, which reads Iceberg tables, is not installed"
        raise BackendError(f"{metadata}: {problem}; {remedy}") from error
    if not metadata.is_file():
        raise missing(metadata)
    with translate_errors(
        metadata, "the metadata of an Iceberg table", (*MALFORMED, NotInstalledError, ValidationError)
    ):
        table = StaticTable.from_metadata(str(metadata))
        root = _local(table.metadata.location)
        moved = metadata.parent.parent.resolve() != root.resolve() and _ELSEWHERE not in table.metadata.properties
        if moved:
            raise FormatError(
                f"{metadata}: lists files below {root}, so the table was moved or copied; move it back, register it "
                f"again, or pass the data folder (which may contain files of old snapshots)"
            )
        _refuse_renamed(table.metadata.schemas, metadata)
        tasks = list(table.scan().plan_files())
    deleted = next((task for task in tasks if task.delete_files), None)
    if deleted is not None:
        raise FormatError(
            f"{metadata}: rows of {deleted.file.file_path} are marked as deleted; rewrite the table without them "
            f"(Spark: CALL system.rewrite_data_files)"
        )
    files = sorted((_local(task.file.file_path) for task in tasks), key=lambda file: natural_key(str(file)))
    if not files:
        raise FormatError(f"{metadata}: the newest snapshot has no files; add images to the table")
    return [Part(file, _name(file, root), {}) for file in files]


def _version(file: Path) -> int:
    match = _VERSION.match(file.name)
    return int(match[1]) if match else -1


def _local(location: str) -> Path:
    """Return the path of a local file or folder, which may be recorded as a URL."""
    scheme = urlsplit(location).scheme
    if scheme not in ("", "file"):
        raise missing(location)
    path = Path(location if not scheme else urlsplit(location).path)
    decoded = Path(unquote(str(path)))
    return decoded if decoded.exists() and not path.exists() else path


def _name(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def _refuse_renamed(schemas: Sequence[Any], metadata: Path) -> None:
    """Raise `FormatError` if a column was renamed, or its name reused: files keep the old names."""
    columns = {(field.field_id, field.name) for schema in schemas for field in schema.fields}
    for position in (0, 1):
        previous: dict[Any, Any] = {}
        for column in sorted(columns):
            other = previous.setdefault(column[position], column[1 - position])
            if other != column[1 - position]:
                raise FormatError(
                    f"{metadata}: column {column[1]!r} was renamed or created again, so files may have old names; "
                    f"rewrite the table (Spark: CALL system.rewrite_data_files)"
                )
