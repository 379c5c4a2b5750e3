"""Cache folder of fetched files, shared by all processes of a host: each file is fetched once, LRU files are evicted.

A file is named by a hash of its bytes, so one folder serves any number of collections and runs. A reader holds a
shared lock (``flock``) on each file in use, and a fetching process holds an exclusive lock. Locks end with their
processes, so killed processes need no cleanup. Names change only under the lock of the folder.

Writes are not flushed to disk, so a system crash may lose parts of a file. The hash of a file from before the last
system start is compared again at its first use. Its modification time records this: a number per system start.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from omearrow_ds.errors import MissingPathError, StorageError, WriteError
from omearrow_ds.options import refuse_value
from omearrow_ds.resources import is_private_file
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.hashes import new_hash, part_hash
from omearrow_ds.storage.manifest import MANIFEST, PART_NAME, PublishedPart

PARTIAL, _LOCK = ".partial", ".lock"
_MARK = b"parts of omearrow-ds, which may be removed\n"  # Content of the lock file, which identifies a cache folder.
_SHARE = 10  # The default limit is a tenth of the free space of the disk.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_POLL_S, _MAX_FULL_S, _MAX_SILENT_S = 0.01, 60.0, 120.0
_ON_DISK_S = 2  # Modification time of files that were flushed to disk.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
Fetch = Callable[[int], object]  # Writes to a descriptor, or raises; True if the name is not a hash of the bytes.


class PinnedFile:
    """Cached file that is not evicted until this instance is closed or the process ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        close = weakref.finalize(self, os.close, descriptor)  # Not unlocked: a forked child may use it too.
        close.atexit = False  # Functions that run at exit may still read the file.
        self.close: Callable[[], None] = close

    @property
    def is_intact(self) -> bool:
        """Whether the contents match the hash in the name; computed at most once per system start."""
        status = os.fstat(self.descriptor)
        if status.st_mtime in (_this_start_s(), _ON_DISK_S):
            return True
        expected = PublishedPart(self.path.name, 0, status.st_size).hash
        with open(self.descriptor, "rb", buffering=0, closefd=False) as file:
            digest = hashlib.file_digest(file, functools.partial(part_hash, expected)).hexdigest()
        if digest == expected:
            os.utime(self.descriptor, (status.st_atime, _this_start_s()))
        return digest == expected


class CacheEntry(NamedTuple):
    """Name, size in bytes and last use of a cached file, in seconds since 1970."""

    name: str
    size_bytes: int
    used_s: float
    is_pinned: bool  # Whether a process uses or fetches the file.


@dataclass(frozen=True)
class PartCache:
    folder: Path
    limit_bytes: int  # Maximum size of all files, including those being fetched.

    @classmethod
    def choose(cls, folder: str | os.PathLike[str] | None, limit_bytes: int | None) -> PartCache:
        """Return the cache in ``folder``; defaults are the user's cache folder and a tenth of the free disk space."""
        path = default_folder() if folder is None else Path(folder).absolute()
        try:
            if (path.parent / MANIFEST).exists():
                problem = "contains the parts of a collection, which a cache could remove"
                refuse_value("part_cache", path, problem, "pass another folder")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if limit_bytes is None:
                limit_bytes = (shutil.disk_usage(path).free + _used_bytes(path)) // _SHARE
        except OSError as error:
            raise _unusable(path, error) from error
        return cls(path, limit_bytes)

    @classmethod
    def existing(cls, folder: str | os.PathLike[str], limit_bytes: int = 0) -> PartCache:
        """Return the cache in a folder, which must exist and be a cache."""
        path = Path(folder).absolute()
        if not path.is_dir():
            raise MissingPathError(f"{path}: is not a folder; pass the folder of a part cache")
        mark = b""
        with suppress(OSError), _opened(path / _LOCK) as lock:
            if is_private_file(os.fstat(lock.fileno())):
                mark = lock.read(len(_MARK))
        if mark != _MARK and any(path.iterdir()):
            refuse(path, "contains files that are not from a part cache of this user", "pass another folder")
        return cls(path, limit_bytes)

    def entries(self) -> list[CacheEntry]:
        entries: list[CacheEntry] = []
        # A listing must not create the folder or its lock.
        with self._locked_names() if list(_files_in(self.folder)) else nullcontext():
            for status, path in sorted(_files_in(self.folder), key=lambda file: file[0].st_atime_ns, reverse=True):
                with suppress(OSError), _opened(path) as file:  # It may belong to another user.
                    entries.append(CacheEntry(path.name, status.st_size, status.st_atime, not _try_lock(file.fileno())))
        return entries

    def shrink(self) -> None:
        """Evict least recently used files until the cache is within its limit or all remaining files are in use."""
        with self._locked_names(), suppress(BlockingIOError):
            self._make_room(0, self.folder)

    def get(self, name: str, size_bytes: int | None = None) -> PinnedFile | None:
        """Return a cached file, of any size by default; None if it is missing or damaged."""
        pinned = self._pin(name, size_bytes)
        if pinned is None or pinned.is_intact:
            return pinned
        with self._locked_names(), suppress(FileNotFoundError):
            if os.path.samestat(pinned.path.stat(follow_symlinks=False), os.fstat(pinned.descriptor)):
                pinned.path.unlink()
        pinned.close()
        return None

    def acquire(self, name: str, size_bytes: int, fetch: Fetch, *, release: Callable[[], bool] = bool) -> PinnedFile:
        """Return a cached file; if it is missing, fetch the file, or wait for another process that fetches it.

        If the cache is full, ``release`` releases a file that this process uses, or returns False if it uses none.
        Raises `WriteError` if the cache is full, and no file in use is released; `StorageError` if another process
        fetches the file without progress.
        """
        started_s = time.monotonic()
        while True:
            try:
                pinned = self.try_acquire(name, size_bytes, fetch)
                if pinned is not None:
                    return pinned
            except BlockingIOError:
                waited_s = time.monotonic() - started_s
                if size_bytes > self.limit_bytes or (not release() and waited_s > _MAX_FULL_S):
                    raise self._no_room(name, size_bytes) from None
            self._refuse_stuck(name)
            time.sleep(_POLL_S)

    def try_acquire(self, name: str, size_bytes: int, fetch: Fetch) -> PinnedFile | None:
        """Return a cached or fetched file; None if another process fetches it. Raises `BlockingIOError` if full."""
        pinned, partial, path = self.get(name, size_bytes), self._partial_path(name), self.folder / name
        if pinned is not None:
            return pinned
        with self._locked_names():
            if self._pin(name, size_bytes) is not None:  # Another process has completed it.
                return None
            descriptor = os.open(partial, _WRITE, 0o600)
            if not _try_lock(descriptor):
                os.close(descriptor)
                return None
            os.ftruncate(descriptor, 0)  # Waiters take the old time of a killed process as stuck.
        try:
            with self._locked_names():
                self._make_room(size_bytes, partial)
                os.ftruncate(descriptor, size_bytes)  # Evictions by other processes must count it.
            self._reserve(descriptor, size_bytes, partial)
            written_s = _this_start_s()
            if fetch(descriptor) is True:
                os.fdatasync(descriptor)  # A crash could leave holes, and the name is not a hash that detects them.
                written_s = _ON_DISK_S
            with self._locked_names():
                partial.rename(path)
                os.utime(descriptor, (time.time(), written_s))  # After the rename: waiters take an old time as stuck.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException as error:
            with self._locked_names():
                partial.unlink(missing_ok=True)
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                raise self._no_room(name, size_bytes) from error
            raise
        return PinnedFile(path, descriptor)

    def _pin(self, name: str, size_bytes: int | None) -> PinnedFile | None:
        path = self.folder / name
        try:
            descriptor = os.open(path, _READ)
        except OSError:  # It is missing, a link, or belongs to another user.
            return None
        pinned = PinnedFile(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        # It may have been removed before it was locked.
        if not (is_private_file(status) and status.st_nlink and size_bytes in (None, status.st_size)):
            pinned.close()
            return None
        os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))  # The access time orders evictions.
        return pinned

    def _partial_path(self, name: str) -> Path:
        return self.folder / f".{name}{PARTIAL}"

    def _reserve(self, descriptor: int, size_bytes: int, partial: Path) -> None:
        """Reserve disk space; if the disk is full, evict the oldest files even within the limit."""
        while size_bytes:
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
                break
            except OSError as error:
                with self._locked_names():
                    if error.errno not in _NO_SPACE or next(self._evict(partial), None) is None:
                        raise

    def _make_room(self, size_bytes: int, excluded: Path) -> None:
        """Evict files until ``size_bytes`` more fit; raise `BlockingIOError` if all remaining files are in use."""
        excess_bytes, evicted = _used_bytes(self.folder) + size_bytes - self.limit_bytes, self._evict(excluded)
        while excess_bytes > 0:
            freed_bytes = next(evicted, None)
            if freed_bytes is None:
                raise BlockingIOError
            excess_bytes -= freed_bytes

    def _evict(self, excluded: Path) -> Iterator[int]:
        """Remove files that are not in use, and yield their sizes: first those of killed processes, then the oldest."""
        files = sorted(_files_in(self.folder), key=lambda file: (not file[1].name.startswith("."), file[0].st_atime_ns))
        for status, path in files:
            if path == excluded:
                continue
            with suppress(OSError), _opened(path) as file:  # It may be missing, or belong to another user.
                if _try_lock(file.fileno()):
                    path.unlink()
                    yield status.st_size

    def _no_room(self, name: str, size_bytes: int) -> WriteError:
        used = f"{_used_bytes(self.folder):,} of part_cache_bytes={self.limit_bytes:,}"
        free = f"the disk has {shutil.disk_usage(self.folder).free:,} free bytes"
        problem = f"{name} needs {size_bytes:,} bytes, but processes on this host use {used} and {free}"
        remedy = "raise part_cache_bytes, use fewer processes, or pass another part_cache"
        return WriteError(problem, path=self.folder, remedy=remedy)

    def _refuse_stuck(self, name: str) -> None:
        try:
            silent_s = time.time() - self._partial_path(name).stat().st_mtime
        except FileNotFoundError:
            return
        if silent_s > _MAX_SILENT_S:
            problem = f"{name} is being fetched by another process, which received nothing for {silent_s:.0f} s"
            raise StorageError(problem, path=self.folder, remedy="end that process, or pass another part_cache")

    @contextmanager
    def _locked_names(self) -> Iterator[None]:
        """Lock the names of the folder against other processes; create the folder again if it was removed."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.folder / _LOCK, _WRITE, 0o600)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_size:
                with suppress(OSError):  # The disk may be full; the caller is about to free space.
                    os.write(descriptor, _MARK)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # Unlocks it also for children that were forked meanwhile.
            os.close(descriptor)


def _unusable(folder: Path, error: OSError) -> WriteError:
    return WriteError(f"{folder}: cannot be used as part_cache: {error.strerror}; pass another folder")


def write_all(descriptor: int, data: memoryview, offset: int | None = None) -> None:
    """Write all bytes of ``data`` at an offset of a file, or at the current file position for None."""
    while data:
        count = os.write(descriptor, data) if offset is None else os.pwrite(descriptor, data, offset)
        data, offset = data[count:], None if offset is None else offset + count


@functools.cache
def _this_start_s() -> int:
    """Return a number that differs per system start, as a modification time; it is even, and before 2004."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # Not on Linux: the number differs per process.
        boot_id = os.urandom(16)
    return 2 * (int.from_bytes(new_hash(boot_id).digest()) % 2**29) + 2 * _ON_DISK_S


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "omearrow_ds" / "parts"


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, _READ), "rb")


def _try_lock(descriptor: int) -> bool:
    """Lock a file without waiting; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _used_bytes(folder: Path) -> int:
    return sum(status.st_size for status, _ in _files_in(folder))


def _files_in(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    """Yield the cached files in a folder; other files are ignored."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name.removeprefix(".").removesuffix(PARTIAL)):
            with suppress(FileNotFoundError):  # It was evicted meanwhile.
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status, Path(entry.path)
