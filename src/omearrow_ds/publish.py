"""What is written appears whole or not at all: a temporary folder beside the target, and one move."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from omearrow_ds.errors import FormatError, MissingPathError, PathExistsError
from omearrow_ds.formats import detect


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise an error if ``path`` must not be written: it exists, or has no folder to stand in.

    With ``overwrite`` only a file, an empty folder or a collection of images is replaced, no folder of other things.

    Raises
    ------
    PathExistsError
        If there is something that must not be replaced.
    MissingPathError
        If the folder of ``path`` is missing.
    """
    if os.path.lexists(path) and not overwrite:
        raise PathExistsError(f"{path}: exists already; pass overwrite=True to replace it, or choose another path")
    if not path.parent.is_dir():
        raise MissingPathError(f"{path}: the folder {path.parent} does not exist; make it first")
    if path.is_dir() and any(path.iterdir()) and not _is_collection(path):
        raise PathExistsError(f"{path}: is a folder of other things than images; remove it, or choose another path")


def _is_collection(path: Path) -> bool:
    try:
        detect(path)
    except FormatError:
        return False
    return True


def publish(path: Path, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let ``fill`` write in a temporary folder beside ``path``, then move the result there in one step.

    Whatever ends the writing early, ``path`` is as it was and the temporary folder is removed; only a killed process
    leaves a ``.NAME.partial-*`` behind, which no source opens as complete.
    """
    folder = path.with_name(f".{path.name[:40]}.partial-{uuid.uuid4().hex[:12]}")
    folder.mkdir()
    try:
        fill(folder / path.name)
        _move(folder / path.name, path, overwrite=overwrite)
    finally:
        shutil.rmtree(folder)


def _move(temporary: Path, path: Path, *, overwrite: bool) -> None:
    if not overwrite:
        try:
            _move_without_replacing(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise PathExistsError(f"{path}: was made by somebody else while it was written here") from None
        return
    if not path.is_dir() and not temporary.is_dir():
        temporary.replace(path)
        return
    replaced = temporary.with_name(f"{temporary.name}.replaced")
    if os.path.lexists(path):
        path.rename(replaced)
    try:
        temporary.rename(path)
    except BaseException:
        if not os.path.lexists(path):
            replaced.rename(path)
        raise


def _move_without_replacing(temporary: Path, path: Path) -> None:
    if temporary.is_dir():
        temporary.rename(path)
        return
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        if os.path.lexists(path):  # a file system without hard links: not atomic against another writer
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)
