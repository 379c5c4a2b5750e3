"""Opens several paths, folders of part files, and database folders of LanceDB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omearrow_ds.errors import ColumnError, FormatError
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.formats._detect import OME_ARROW_MANIFEST, is_plain, refuse_folder_of_others
from omearrow_ds.storage.iceberg import metadata_of, parts_of_table
from omearrow_ds.storage.joined import JoinedSource, Part, joined
from omearrow_ds.storage.manifest import MANIFEST, SUFFIX
from omearrow_ds.storage.part_files import label_of, parts_below, parts_of
from omearrow_ds.storage.protocol import Paths


def open_several(paths: Paths, only: str | None, opening: Callable[..., BaseSource]) -> BaseSource:
    """Open several paths as one collection; see `parts_of` for ``only``, and `parts_of` and `joined` for errors."""
    parts = parts_of(paths, only)
    listed = isinstance(paths, Sequence) and not isinstance(paths, str)
    label, reopened = label_of(paths), [part.path for part in parts] if listed else label_of(paths)
    return joined(label, parts, opening, reopened) if listed else _with_images(label, parts, opening)


def open_below(folder: Path, only: str | None, opening: Callable[..., BaseSource]) -> BaseSource:
    """Open the collections below a folder, or the Iceberg table at a folder or metadata file, as one collection.

    Raises
    ------
    FormatError
        If the folder is unfinished, or contains no readable collection or several formats.
    """
    if folder.name.endswith(SUFFIX):
        raise FormatError(
            f"{folder}: {MANIFEST} does not exist, so the collection is incomplete; write it again, or restore it"
        )
    metadata = metadata_of(folder) if only is None else None
    if metadata is not None:
        return joined(folder, parts_of_table(metadata), opening)
    parts = [] if (folder / OME_ARROW_MANIFEST).exists() else parts_below(folder, only)
    if not parts:
        refuse_folder_of_others(folder)
        table = "table of images" if only is None else f"table of format {only!r}"
        raise FormatError(f"{folder}: contains no {table}; pass another path")
    return _with_images(folder, parts, opening)


def _with_images(path: Path, parts: Sequence[Part], opening: Callable[..., BaseSource]) -> JoinedSource:
    """Open the parts with images; tables without images, such as features, may be stored alongside them."""
    try:
        return joined(path, parts, opening)
    except ColumnError:
        of_images = [part for part in parts if not is_plain(part.path)]
        if len(of_images) in (0, len(parts)):
            raise
    return joined(path, of_images, opening)
