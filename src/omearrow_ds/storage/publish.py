"""`publish`: atomic writes of files and folders, through a temporary folder next to the target and one rename."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omearrow_ds.errors import FormatError, PathExistsError
from omearrow_ds.storage.formats._detect import found_at, missing, special_kind
from omearrow_ds.storage.manifest import is_published

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and a flag of Linux's renameat2


def check_target(path: Path, *, overwrite: bool, is_file: bool = False) -> None:
    """Raise an error if ``path`` exists and must not be replaced, or if its parent folder does not exist.

    With ``overwrite`` only a file, an empty folder or a collection of images is replaced, never another folder; with
    ``is_file`` only a file.
    """
    if is_file and path.is_dir():
        raise PathExistsError(f"{path}: the target is a folder; choose the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise PathExistsError(f"{path}: already exists; pass overwrite=True to replace it, or choose another path")
    kind = special_kind(path)
    if kind is not None:
        raise PathExistsError(f"{path}: is {kind}, which is never replaced; choose another path")
    if not path.parent.is_dir():
        raise missing(path, f"the folder {path.parent} does not exist; create it first")
    if path.is_dir() and any(path.iterdir()) and not is_published(path):
        with suppress(FormatError):
            if found_at(path) is not None:
                return
        remedy = "remove the folder, or choose another path"
        raise PathExistsError("the folder contains files that are not images", path=path, remedy=remedy)


def publish(path: Path, fill: Callable[[Path], object], *, overwrite: bool) -> None:
    """Call ``fill`` to write in a temporary folder next to ``path``, then move the result to ``path`` in one step.

    If writing fails, ``path`` is unchanged and the temporary folder is removed. A killed process leaves a
    ``.NAME.partial-*`` behind, which no source opens as complete, and which the next writer of ``path`` on this host
    removes. A symbolic link at ``path`` is replaced, not followed.
    """
    # Locks of other hosts on a shared file system may not be visible here.
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    with private_folder(path.parent, f".{path.name[:40]}.partial-{host}-") as folder:
        fill(folder / path.name)
        move(folder / path.name, path, overwrite=overwrite)


@contextmanager
def private_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new private folder, which is removed at exit; also remove folders that killed processes left behind."""
    _remove_leftovers(parent, prefix)
    folder, lock = _locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except KeyboardInterrupt:  # The user interrupted again; finish the removal first.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        os.close(lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new private folder, and a descriptor that locks it while this process runs."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
        folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, _FOLDER)
        except FileNotFoundError:  # Another writer removed it, as if left by a killed process.
            continue
        with suppress(OSError):  # Its file system may not support locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # It may also have been removed before it was locked.
            return folder, descriptor
        os.close(descriptor)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove leftovers of killed writers: unlocked folders of this user and host."""
    for folder in [entry for entry in parent.iterdir() if entry.name.startswith(prefix)]:
        with suppress(OSError):  # It is missing, locked, or not a folder that this user can open.
            descriptor = os.open(folder, _FOLDER)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def move(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Move a complete file or folder to ``path``, atomically if supported; an old one goes next to ``temporary``."""
    if not overwrite:
        try:
            move_without_replacing(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise PathExistsError(f"{path}: another process created this path meanwhile; choose another path") from None
        return
    if not path.is_dir() and not temporary.is_dir():
        temporary.replace(path)
        return
    if os.path.lexists(path) and _exchange(temporary, path):
        return
    replaced = temporary.with_name(f"{temporary.name}.replaced")
    if os.path.lexists(path):
        path.rename(replaced)
    try:
        temporary.rename(path)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(path):
            replaced.rename(path)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically, which replacing a folder needs; False if the system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # The file system does not support it.
        return False
    raise OSError(number, os.strerror(number), str(second))


def move_without_replacing(temporary: Path, path: Path) -> None:
    """Move a file or a folder to a path that must not exist; only one of several concurrent calls succeeds."""
    if temporary.is_dir():
        temporary.rename(path)
        return
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        if os.path.lexists(path):  # Without hard links, this is not atomic against another writer.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)
