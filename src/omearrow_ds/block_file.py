"""Decoded pixels in a file: built once, under a lock, then mapped by every process that wants them, now or later.

A file is found by what the collection is: its path, and the name, size, inode and times of each of its files. Reading
every byte for a checksum would cost about what decoding costs. The time of the last change of an inode is among them,
which nothing can set back, so a collection that was replaced or edited is never taken for the one that was decoded.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from omearrow_ds.errors import FormatError, WriteError
from omearrow_ds.shared_block import SharedBlock
from omearrow_ds.source import ImageSource

_VERSION = 1  # of the file: pixels as `PixelCache` lays them out, then the key's digest
_SUFFIX = ".pixels"
_DIGEST_BYTES = 32

Build = Callable[[SharedBlock], None]


def open_or_build(folder: Path, source: ImageSource, size_bytes: int, build: Build) -> SharedBlock:
    """Return the decoded pixels of ``source``, mapped from a file in ``folder``; it is built where there is none.

    Parameters
    ----------
    folder
        Made if missing. What was decoded of an earlier state of the same collection is removed.
    source
        The collection.
    size_bytes
        Bytes that ``build`` fills.
    build
        Called with a zeroed block to fill, in the one process that builds.

    Raises
    ------
    WriteError
        If the folder cannot be written, or has no room.
    FormatError
        If the collection changed while it was decoded.
    """
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"{folder}: is no folder, and cannot be used as cache_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = _digest(source)
        stem = hashlib.blake2b(os.fsencode(source.path.resolve()), digest_size=8).hexdigest()
        file = folder / f"{source.path.stem}-{stem}-{digest.hex()[:16]}{_SUFFIX}"
        block = _mapped(file, size_bytes, digest)
        if block is not None:
            return block
        with FileLock(folder / f".{stem}.lock"):
            block = _mapped(file, size_bytes, digest)  # by whoever had the lock before
            if block is None:
                _build(file, size_bytes, digest, build, source)
                for other in folder.glob(f"*-{stem}-*{_SUFFIX}"):
                    if other != file:
                        other.unlink(missing_ok=True)
                block = _mapped(file, size_bytes, digest)
    except OSError as error:
        if isinstance(error, WriteError) or error.filename is None or not _within(error.filename, folder):
            raise
        msg = f"{folder}: cannot be used as cache_dir: {error.strerror}; pass another"
        raise WriteError(msg) from error
    if block is None:
        raise FormatError(f"{file}: was removed or changed as soon as it was written; pass another cache_dir")
    return block


def _within(name: Any, folder: Path) -> bool:
    return Path(os.fsdecode(name)).is_relative_to(folder)


def _build(file: Path, size_bytes: int, digest: bytes, build: Build, source: ImageSource) -> None:
    partial = file.with_suffix(".partial")  # the lock keeps other builders away, and one that was killed is overwritten
    try:
        with partial.open("w+b") as stream:
            _reserve(stream.fileno(), size_bytes + _DIGEST_BYTES, file.parent)
            if size_bytes:
                memory = mmap.mmap(stream.fileno(), size_bytes)
                build(SharedBlock(memory, size_bytes))
                memory.flush()
            if _digest(source) != digest:
                raise FormatError(f"{source.path}: changed while it was decoded; make the dataset again")
            os.pwrite(stream.fileno(), digest, size_bytes)
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _reserve(descriptor: int, size_bytes: int, folder: Path) -> None:
    """Have the disk keep room: a mapped file that outgrows it ends the process, not the call."""
    try:
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.truncate(descriptor, size_bytes)
    except OSError as error:
        msg = f"{folder}: no room for {size_bytes:,} bytes of pixels: {error.strerror}; pass another cache_dir"
        raise WriteError(msg) from error


def _mapped(file: Path, size_bytes: int, digest: bytes) -> SharedBlock | None:
    """Return the pixels of a file that is whole and of this collection, else None."""
    try:
        with file.open("rb") as stream:
            whole = os.fstat(stream.fileno()).st_size == size_bytes + _DIGEST_BYTES
            if not whole or os.pread(stream.fileno(), _DIGEST_BYTES, size_bytes) != digest:
                return None
            return SharedBlock.of_file(stream.fileno(), size_bytes)
    except FileNotFoundError:
        return None


def _digest(source: ImageSource) -> bytes:
    """Return a hash of everything that the decoded pixels depend on."""
    path = source.path.resolve()
    said = [_VERSION, sys.byteorder, source.format.name, str(path), sorted(_files(path))]
    kinds = [source.shapes.tolist(), [dtype.str for dtype in source.dtypes]]
    return hashlib.blake2b(json.dumps([said, kinds]).encode(), digest_size=_DIGEST_BYTES).digest()


def _files(path: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the name, inode, size and times of a file, or of all files below a folder."""
    names = [str(path)]
    while names:
        name = names.pop()
        status = os.stat(name)  # noqa: PTH116  # thousands of files: pathlib would double its cost
        if os.path.isdir(name):  # noqa: PTH112
            names += [entry.path for entry in os.scandir(name)]
        else:
            yield os.path.relpath(name, path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
