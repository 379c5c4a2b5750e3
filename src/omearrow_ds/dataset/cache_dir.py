"""Decoded pixels in a file: built once under a lock, then memory-mapped by every process that needs them.

The pixels in a file are trusted, so the file must come from the user who reads it. Files are created readable for their
owner only. A file is ignored if it belongs to another user, if others can write to it, or if it is a link.

A file is identified by a fingerprint of the collection: its path, and the name, size, inode and times of each of its
files. Reading every byte for a checksum would cost about as much as decoding. The fingerprint includes the time of the
last inode change, which cannot be set back, so a replaced or edited collection never matches. It is taken before the
collection is opened and again after decoding, so that changes in between are detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from omearrow_ds.dataset.shared_block import SharedBlock
from omearrow_ds.errors import FormatError, WriteError
from omearrow_ds.resources import is_private_file
from omearrow_ds.storage.formats import FORMATS
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._detect import entries_below

_VERSION = 2  # Version of the file: pixels in the layout of `PixelCache`, then the digest.
_SUFFIX, _PARTIAL = ".pixels", ".partial"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MADE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIGEST_BYTES = 32

Build = Callable[[SharedBlock], None]
Fingerprint = list[tuple[str, int, int, int, int]]


def collection_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of the existing files of a collection; call this before opening the collection."""
    path = path.resolve()
    fingerprint: Fingerprint = []
    for file in (path, *(file for fmt in FORMATS for file in fmt.files_beside(path))):
        try:
            fingerprint += _files(file, path)
        except FileNotFoundError:
            continue
    return sorted(fingerprint)


def open_or_build(folder: Path, source: Images, fingerprint: Fingerprint, size_bytes: int, build: Build) -> SharedBlock:
    """Return the decoded pixels of ``source``, memory-mapped from a file in ``folder`` that is built if missing.

    The folder is created if missing, and pixels of earlier versions of the collection are removed. ``fingerprint`` is
    the result of `collection_fingerprint` before ``source`` was opened. ``build`` is called in only one process, with a
    zeroed block of ``size_bytes`` to fill. Raises `WriteError` if the folder is not writable or full; `FormatError` if
    the collection changed.
    """
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"{folder}: cache_dir is not a folder; choose another path")
    fingerprint = [*fingerprint, *_elsewhere(source)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = _digest(source, fingerprint)
        named = os.fsencode("\0".join([str(source.path.resolve()), *source.image_column, *source.variant]))
        stem = hashlib.blake2b(named, digest_size=8).hexdigest()
        file = folder / f"{source.path.stem}-{stem}-{digest.hex()[:16]}{_SUFFIX}"
        block = _mapped(file, size_bytes, digest)
        if block is None:
            with FileLock(folder / f".{stem}.lock", mode=0o600):
                block = _mapped(file, size_bytes, digest)  # Built by the previous lock holder.
                if block is None:
                    _build(file, size_bytes, digest, build, source, fingerprint)
                    for other in [*folder.glob(f"*-{stem}-*{_SUFFIX}"), *folder.glob(f"*-{stem}-*{_PARTIAL}")]:
                        if other != file:  # From an earlier version, or a killed process.
                            other.unlink(missing_ok=True)
                    block = _mapped(file, size_bytes, digest)
    except OSError as error:
        is_below = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(folder)
        if isinstance(error, WriteError) or not is_below:
            raise
        raise WriteError(f"{folder}: cache_dir is not writable: {error.strerror}; pass another folder") from error
    if block is None:
        raise FormatError(f"{file}: another process removed or changed the new file; pass another cache_dir")
    _refuse_changed(source, fingerprint)
    return block


def _build(file: Path, size_bytes: int, digest: bytes, build: Build, source: Images, fingerprint: Fingerprint) -> None:
    partial = file.with_suffix(_PARTIAL)
    partial.unlink(missing_ok=True)  # Left by a killed process: the lock excludes other builders.
    try:
        with os.fdopen(os.open(partial, _MADE, 0o600), "w+b") as stream:
            _reserve(stream.fileno(), size_bytes + _DIGEST_BYTES, file.parent)
            if size_bytes:
                memory = mmap.mmap(stream.fileno(), size_bytes)
                build(SharedBlock(memory, size_bytes))
                memory.flush()
            _refuse_changed(source, fingerprint)
            os.pwrite(stream.fileno(), digest, size_bytes)
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _reserve(descriptor: int, size_bytes: int, folder: Path) -> None:
    """Reserve disk space: writing to a mapped file on a full disk would kill the process."""
    try:
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.truncate(descriptor, size_bytes)
    except OSError as error:
        msg = f"{folder}: writing {size_bytes:,} bytes of pixels failed: {error.strerror}; pass another cache_dir"
        raise WriteError(msg) from error


def _mapped(file: Path, size_bytes: int, digest: bytes) -> SharedBlock | None:
    """Return the pixels of a complete file of this collection and user, or None."""
    try:
        with os.fdopen(os.open(file, _READ), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not is_private_file(status) or status.st_size != size_bytes + _DIGEST_BYTES:
                return None
            if os.pread(stream.fileno(), _DIGEST_BYTES, size_bytes) != digest:
                return None
            return SharedBlock.of_file(stream.fileno(), size_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):  # A link, or a file of another user.
            raise
        return None


def _refuse_changed(source: Images, fingerprint: Fingerprint) -> None:
    if [*collection_fingerprint(source.path), *_elsewhere(source)] != fingerprint:
        raise FormatError(f"{source.path}: the file changed while it was decoded; create the dataset again")


def _elsewhere(source: Images) -> Fingerprint:
    """Return the fingerprint of image files that a table refers to."""
    if source.path.is_dir():
        return []
    own = {source.path, *source.format.files_beside(source.path)}
    return sorted(entry for file in source.stored_files() if file not in own for entry in _files(file, source.path))


def _digest(source: Images, fingerprint: Fingerprint) -> bytes:
    """Return a hash of everything that the decoded pixels depend on."""
    path = source.path.resolve()
    version = (source.guard.fingerprint or ())[1:]  # Not the device, whose number may change at a restart.
    identity = [_VERSION, sys.byteorder, source.format.name, str(path), fingerprint, version]
    kinds = [source.shapes.tolist(), [dtype.str for dtype in source.dtypes]]
    picked = [source.image_column, source.variant, source.rows.tolist()]
    return hashlib.blake2b(json.dumps([identity, kinds, picked]).encode(), digest_size=_DIGEST_BYTES).digest()


def _files(path: Path, base: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield path relative to ``base``, inode, size and times of a file, or of all files below a folder."""
    for file in entries_below(path, linked=True) if path.is_dir() else [path]:
        status = file.stat()
        yield os.path.relpath(file, base), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
