"""Cache folder of fetched files, shared by all processes of a host: each file is fetched once, LRU files are evicted.

A file is named by a hash of its bytes, so one folder serves any number of collections and runs. A reader holds a
shared lock (``flock``) on each file in use, and a fetching process holds an exclusive lock. Locks end with their
processes, so killed processes need no cleanup. Names change only under the lock of the folder.

Writes are not flushed to disk: a system crash may lose parts of a file. So the hash of a file that was written before
the last system start is compared again at its first use. The modification time of a file records this check: it is a
number that differs per system start.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omearrow_ds.errors import ArgumentError, FormatError, MissingPathError, StorageError, WriteError
from omearrow_ds.resources import is_private_file
from omearrow_ds.storage.hashes import new_hash, part_hash
from omearrow_ds.storage.manifest import MANIFEST, PART_NAME, hash_in

PARTIAL, _LOCK = ".partial", ".lock"
_MARK = b"parts of omearrow-ds, which may be removed\n"  # Content of the lock file, which identifies a cache folder.
_SHARE = 10  # The default limit is a tenth of the free space of the disk.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITTEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOK_S, _ROOM_S, _STUCK_S = 0.01, 60.0, 120.0
_ON_DISK_S = 2  # Modification time of files that were flushed to disk.
Fetch = Callable[[int], object]  # Writes to a descriptor, or raises; True if the name is not a hash of the bytes.


class Held:
    """A cached file that is not evicted until this instance is closed or the process ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def close(self) -> None:
        """Allow the eviction of the cached file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)  # Not unlocked: a forked child may use it too.

    @property
    def sound(self) -> bool:
        """Whether the contents of the file match the hash in its name; computed at most once per system start."""
        status = os.fstat(self._descriptor)
        if status.st_mtime in (_this_start_s(), _ON_DISK_S):
            return True
        with open(self._descriptor, "rb", buffering=0, closefd=False) as file:
            named = hash_in(self.path.name)
            found = hashlib.file_digest(file, functools.partial(part_hash, named)).hexdigest()
        if found != named:
            return False
        os.utime(self._descriptor, (status.st_atime, _this_start_s()))
        return True

    def remove(self) -> None:
        """Remove the file from the cache, unless another file has replaced it."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self._descriptor)):
                self.path.unlink()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)


@dataclass(frozen=True)
class Kept:
    """Name, size and last use of a cached file.

    Attributes
    ----------
    name, size_bytes
        Name of the file, and size in bytes.
    used_s
        Time of the last use, in seconds since 1970.
    held
        Whether a process uses or fetches the file.
    """

    name: str
    size_bytes: int
    used_s: float
    held: bool


@dataclass(frozen=True)
class PartCache:
    """Cache folder of fetched files.

    Attributes
    ----------
    folder
        Path of the folder.
    limit_bytes
        Maximum size of all files, including those being fetched.
    """

    folder: Path
    limit_bytes: int

    @classmethod
    def choose(cls, folder: str | os.PathLike[str] | None, limit_bytes: int | None) -> PartCache:
        """Return the cache in ``folder``; defaults are the user's cache folder and a tenth of the free disk space.

        Raises
        ------
        ArgumentError
            If the limit is not a number of bytes.
        WriteError
            If the folder cannot be created.
        """
        path = default_folder() if folder is None else Path(folder).absolute()
        try:
            if (path.parent / MANIFEST).exists():
                raise ArgumentError(
                    f"{path}: contains the parts of a collection, which a cache could remove; pass another folder"
                )
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if limit_bytes is None:
                held_bytes = sum(status.st_size for status, _ in _files_in(path))
                limit_bytes = (shutil.disk_usage(path).free + held_bytes) // _SHARE
        except OSError as error:
            raise _unusable(path, error) from error
        return cls(path, limit_bytes)

    @classmethod
    def existing(cls, folder: str | os.PathLike[str], limit_bytes: int = 0) -> PartCache:
        """Return the cache in an existing folder; raise an error if the folder is not a cache.

        Raises
        ------
        MissingPathError
            If the folder does not exist.
        FormatError
            If the folder is not a cache.
        """
        path = Path(folder).absolute()
        if not path.is_dir():
            raise MissingPathError(f"{path}: is not a folder; pass the folder of a part cache")
        try:
            descriptor = os.open(path / _LOCK, _READ)
        except OSError:
            mark = b""
        else:
            mark = os.read(descriptor, len(_MARK)) if is_private_file(os.fstat(descriptor)) else b""
            os.close(descriptor)
        if mark != _MARK and any(path.iterdir()):
            raise FormatError(f"{path}: is not a part cache of this user; pass another folder")
        return cls(path, limit_bytes)

    def kept(self) -> list[Kept]:
        """Return the files in the cache, most recently used first."""
        found: list[Kept] = []
        if not list(_files_in(self.folder)):  # A listing must not create the folder or its lock.
            return found
        with self._names():
            for status, path in sorted(_files_in(self.folder), key=lambda each: each[0].st_atime_ns, reverse=True):
                try:
                    descriptor = os.open(path, _READ)
                except OSError:  # The file belongs to another user.
                    continue
                found.append(Kept(path.name, status.st_size, status.st_atime, held=not _locked(descriptor)))
                os.close(descriptor)
        return found

    def shrink(self) -> None:
        """Evict least recently used files until the cache is within its limit or all remaining files are in use."""
        with self._names(), suppress(BlockingIOError):
            self._make_room(0, self.folder)

    def there(self, name: str) -> Held | None:
        """Return the file called ``name`` with any size; None if it is not in the cache."""
        return self._there(name, None)

    def hold(self, name: str, size_bytes: int, fetch: Fetch, *, let_go: Callable[[], bool] = bool) -> Held:
        """Return a cached file; if it is missing, fetch the file, or wait for another process that fetches it.

        Parameters
        ----------
        name, size_bytes
            Name of the file, and size in bytes.
        fetch
            Function that writes the file.
        let_go
            Releases a file that this process uses if the cache is full; returns False if it uses none.

        Raises
        ------
        WriteError
            If the cache is full, and no file in use is released.
        StorageError
            If another process fetches the file without progress.
        """
        started_s = time.monotonic()
        while True:
            try:
                cached = self._there(name, size_bytes) or self._tried(name, size_bytes, fetch)
            except BlockingIOError:
                cached = None
                waited_s = time.monotonic() - started_s
                if size_bytes > self.limit_bytes or (not let_go() and waited_s > _ROOM_S):
                    raise WriteError(self._no_room(name, size_bytes)) from None
            if cached is not None:
                return cached
            self._refuse_stuck(name)
            time.sleep(_LOOK_S)

    def hold_if_room(self, name: str, size_bytes: int, fetch: Fetch) -> Held | None:
        """Return a cached file as `hold` does; None if the cache is full or another process is fetching the file."""
        try:
            return self._there(name, size_bytes) or self._tried(name, size_bytes, fetch)
        except BlockingIOError:
            return None

    def _tried(self, name: str, size_bytes: int, fetch: Fetch) -> Held | None:
        descriptor = self._claimed(name, size_bytes)
        return None if descriptor is None else self._fetched(name, size_bytes, descriptor, fetch)

    def _no_room(self, name: str, size_bytes: int) -> str:
        used = sum(status.st_size for status, _ in _files_in(self.folder))
        return (
            f"{self.folder}: {name} of {size_bytes:,} bytes does not fit: {used:,} of part_cache_bytes="
            f"{self.limit_bytes:,} are in use by processes of this host, {shutil.disk_usage(self.folder).free:,} are "
            f"free on its disk; raise part_cache_bytes, use fewer processes, or pass another part_cache"
        )

    def _refuse_stuck(self, name: str) -> None:
        try:
            silent_s = time.time() - (self.folder / f".{name}{PARTIAL}").stat().st_mtime
        except FileNotFoundError:
            return
        if silent_s > _STUCK_S:
            raise StorageError(
                f"{self.folder}: {name} is being fetched by another process, which received nothing for {silent_s:.0f} "
                f"s; end that process, or pass another part_cache"
            )

    def _there(self, name: str, size_bytes: int | None) -> Held | None:
        held = self._named(name, size_bytes)
        if held is None or held.sound:
            return held
        with self._names():
            held.remove()
        held.close()
        return None

    def _named(self, name: str, size_bytes: int | None) -> Held | None:
        path = self.folder / name
        try:
            descriptor = os.open(path, _READ)
        except OSError:  # It is missing, a link, or belongs to another user.
            return None
        held = Held(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        own = is_private_file(status)
        as_large = size_bytes in (None, status.st_size)
        if not own or not as_large or not status.st_nlink:  # It may have been removed before it was locked.
            held.close()
            return None
        os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))  # The access time orders evictions.
        return held

    def _claimed(self, name: str, size_bytes: int) -> int | None:
        """Return a locked descriptor to write to; None if another process has it.

        Raises
        ------
        BlockingIOError
            If the cache is full, and all files are in use.
        """
        path = self.folder / f".{name}{PARTIAL}"
        with self._names():
            if self._is_there(name, size_bytes):  # Another process may have fetched it meanwhile.
                return None
            descriptor = os.open(path, _WRITTEN, 0o600)
            try:
                if not _locked(descriptor):
                    os.close(descriptor)
                    return None
                os.ftruncate(descriptor, 0)
                self._make_room(size_bytes, path)
                os.ftruncate(descriptor, size_bytes)  # Evictions by other processes must count it.
            except BaseException:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
        return descriptor

    def _is_there(self, name: str, size_bytes: int) -> bool:
        held = self._named(name, size_bytes)
        if held is not None:
            held.close()
        return held is not None

    def _fetched(self, name: str, size_bytes: int, descriptor: int, fetch: Fetch) -> Held:
        partial, path = self.folder / f".{name}{PARTIAL}", self.folder / name
        try:
            self._reserve(descriptor, size_bytes, partial)
            written_s = _this_start_s()
            if fetch(descriptor) is True:
                os.fdatasync(descriptor)  # A crash could leave holes, and the name is not a hash that detects them.
                written_s = _ON_DISK_S
            with self._names():
                partial.rename(path)
                os.utime(descriptor, (time.time(), written_s))  # After the rename: waiters take an old time as stuck.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException as error:
            with self._names():
                partial.unlink(missing_ok=True)
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise WriteError(self._no_room(name, size_bytes)) from error
            raise
        return Held(path, descriptor)

    def _reserve(self, descriptor: int, size_bytes: int, partial: Path) -> None:
        """Reserve disk space; if the disk is full, evict the oldest files even within the limit."""
        while size_bytes:
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                with self._names():
                    if next(self._let_go_of(partial), None) is None:
                        raise
            else:
                return

    def _make_room(self, size_bytes: int, but: Path) -> None:
        over_bytes = sum(status.st_size for status, _ in _files_in(self.folder)) + size_bytes - self.limit_bytes
        freed = self._let_go_of(but) if over_bytes > 0 else iter(())
        while over_bytes > 0:
            try:
                over_bytes -= next(freed)
            except StopIteration:
                raise BlockingIOError from None

    def _let_go_of(self, but: Path) -> Iterator[int]:
        """Remove files that are not in use, and yield their sizes: first those of killed processes, then the oldest."""
        for status, path in sorted(
            _files_in(self.folder), key=lambda each: (not _partial(each[1]), each[0].st_atime_ns)
        ):
            if path == but:
                continue
            try:
                descriptor = os.open(path, _READ)
            except OSError:  # It is missing, or belongs to another user.
                continue
            try:
                if _locked(descriptor):
                    path.unlink()
                    yield status.st_size
            finally:
                os.close(descriptor)

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Lock the names of the folder against other processes; create the folder again if it was removed.

        Raises `WriteError` if it cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.folder / _LOCK, _WRITTEN, 0o600)
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


def write_all(descriptor: int, piece: memoryview, at: int | None = None) -> None:
    """Write all bytes of ``piece`` at the offset ``at`` of a file, or at the current file position for None."""
    while piece:
        count = os.write(descriptor, piece) if at is None else os.pwrite(descriptor, piece, at)
        piece, at = piece[count:], None if at is None else at + count


@functools.cache
def _this_start_s() -> int:
    """Return a number that differs per system start, as a modification time; it is even, and before 2004."""
    try:
        said = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # Not on Linux: the number differs per process.
        said = os.urandom(16)
    return 2 * (int.from_bytes(new_hash(said).digest()) % 2**29) + 2 * _ON_DISK_S


def default_folder() -> Path:
    """Return the default cache folder for fetched parts, which is inside the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "omearrow_ds" / "parts"


def _locked(descriptor: int) -> bool:
    """Lock a file without waiting; False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _partial(path: Path) -> bool:
    return path.name.startswith(".")


def _files_in(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    """Yield the cached files in a folder; other files are ignored."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name.removeprefix(".").removesuffix(PARTIAL)):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # It was evicted meanwhile.
                continue
            if stat.S_ISREG(status.st_mode):
                yield status, Path(entry.path)
