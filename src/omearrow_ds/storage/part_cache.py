"""Files that were fetched, in a folder that all processes of a host share: each is fetched once, the oldest go first.

A file is called by a hash of its bytes, so one folder serves any number of collections and runs. Whatever is in use is
held by a shared lock (``flock``) of who uses it, whatever is fetched by a lock of who fetches; the locks go with their
processes, so there is nothing to clean after one was killed. Names change only under the lock of the folder.

Nobody waits for the disk: of what was written before the system started, which it may have lost in part, the hash is
compared again when it is used first. That it was written, or compared, since then is what its time of modification
says: a number that is another one each time that the system starts.
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
_MARK = b"parts of omearrow-ds, which may be removed\n"  # in the lock of a folder that is a cache
_SHARE = 10  # of what the disk has free: a tenth, unless a limit is given
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITTEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOK_S, _ROOM_S, _STUCK_S = 0.01, 60.0, 120.0
_ON_DISK_S = 2  # the time of modification of what the disk has, whatever happens
Fetch = Callable[[int], object]  # writes to a descriptor, or raises; True where the name is no hash of what it wrote


class Held:
    """A file that stays in the cache until it is let go of, or the process ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def close(self) -> None:
        """Let go of it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)  # not unlocked: a forked child may use it too

    @property
    def sound(self) -> bool:
        """Whether its bytes are those that were written, also if the system stopped since; seen once each time."""
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
        """Remove it, if it was not replaced."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self._descriptor)):
                self.path.unlink()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)


@dataclass(frozen=True)
class Kept:
    """A file in the cache.

    Attributes
    ----------
    name, size_bytes
        Which one, and how large it is.
    used_s
        When it was used last, in seconds since 1970.
    held
        Whether a process uses it, or fetches it.
    """

    name: str
    size_bytes: int
    used_s: float
    held: bool


@dataclass(frozen=True)
class PartCache:
    """A folder of files that were fetched.

    Attributes
    ----------
    folder
        Where they are.
    limit_bytes
        What all of them take at most, those that are being fetched included.
    """

    folder: Path
    limit_bytes: int

    @classmethod
    def choose(cls, folder: str | os.PathLike[str] | None, limit_bytes: int | None) -> PartCache:
        """Return a cache; by default in the user's folder of caches, of a tenth of what its disk has free.

        Raises
        ------
        ArgumentError
            If the limit is no number of bytes.
        WriteError
            If the folder cannot be made.
        """
        where = default_folder() if folder is None else Path(folder).absolute()
        try:
            if (where.parent / MANIFEST).exists():
                raise ArgumentError(f"{where}: holds a collection's own parts, of which a cache would remove some")
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            if limit_bytes is None:
                held_bytes = sum(status.st_size for status, _ in _files_in(where))
                limit_bytes = (shutil.disk_usage(where).free + held_bytes) // _SHARE
        except OSError as error:
            raise _unusable(where, error) from error
        return cls(where, limit_bytes)

    @classmethod
    def existing(cls, folder: str | os.PathLike[str], limit_bytes: int = 0) -> PartCache:
        """Return the cache that a folder is, of which parts may be removed.

        Raises
        ------
        MissingPathError
            If there is no such folder.
        FormatError
            If it is something else than a cache.
        """
        where = Path(folder).absolute()
        if not where.is_dir():
            raise MissingPathError(f"{where}: is no folder, so nothing was fetched to it")
        try:
            descriptor = os.open(where / _LOCK, _READ)
        except OSError:
            said = b""
        else:
            said = os.read(descriptor, len(_MARK)) if is_private_file(os.fstat(descriptor)) else b""
            os.close(descriptor)
        if said != _MARK and any(where.iterdir()):
            raise FormatError(f"{where}: is no folder that parts were fetched to by this user; nothing was done there")
        return cls(where, limit_bytes)

    def kept(self) -> list[Kept]:
        """Return what is there, what was used last first."""
        found: list[Kept] = []
        if not list(_files_in(self.folder)):  # nor a lock, perhaps, and none is made by looking
            return found
        with self._names():
            for status, path in sorted(_files_in(self.folder), key=lambda each: each[0].st_atime_ns, reverse=True):
                try:
                    descriptor = os.open(path, _READ)
                except OSError:  # somebody else's
                    continue
                found.append(Kept(path.name, status.st_size, status.st_atime, held=not _locked(descriptor)))
                os.close(descriptor)
        return found

    def shrink(self) -> None:
        """Remove what was used longest ago until it is within the limit, or all that is left is in use."""
        with self._names(), suppress(BlockingIOError):
            self._make_room(0, self.folder)

    def there(self, name: str) -> Held | None:
        """Return a file if it is there, of whatever size."""
        return self._there(name, None)

    def hold(self, name: str, size_bytes: int, fetch: Fetch, *, let_go: Callable[[], bool] = bool) -> Held:
        """Return a file, fetched if it is not there; where another process fetches it already, that is waited for.

        Parameters
        ----------
        name, size_bytes
            Which one, and how large it is.
        fetch
            Writes it.
        let_go
            Lets go of something that this process holds, where there is no room; False if there is nothing.

        Raises
        ------
        WriteError
            If there is no room for it, and none comes free.
        StorageError
            If another process fetches it, and does not get on.
        """
        started_s = time.monotonic()
        while True:
            try:
                held = self._there(name, size_bytes) or self._tried(name, size_bytes, fetch)
            except BlockingIOError:
                held = None
                waited_s = time.monotonic() - started_s
                if size_bytes > self.limit_bytes or (not let_go() and waited_s > _ROOM_S):
                    raise WriteError(self._no_room(name, size_bytes)) from None
            if held is not None:
                return held
            self._refuse_stuck(name)
            time.sleep(_LOOK_S)

    def hold_if_room(self, name: str, size_bytes: int, fetch: Fetch) -> Held | None:
        """As `hold`, but None if there is no room, or another process fetches it."""
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
            f"{self.folder}: no room for {name} of {size_bytes:,} bytes: {used:,} of part_cache_bytes="
            f"{self.limit_bytes:,} are in use by processes of this host, {shutil.disk_usage(self.folder).free:,} are "
            f"free on its disk; raise part_cache_bytes, let fewer processes share it, or pass another part_cache"
        )

    def _refuse_stuck(self, name: str) -> None:
        try:
            silent_s = time.time() - (self.folder / f".{name}{PARTIAL}").stat().st_mtime
        except FileNotFoundError:
            return
        if silent_s > _STUCK_S:
            raise StorageError(
                f"{self.folder}: {name} is being fetched by another process, which has not got on for {silent_s:.0f} "
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
        except OSError:  # it is not there, or a link, or somebody else's
            return None
        held = Held(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        own = is_private_file(status)
        as_large = size_bytes in (None, status.st_size)
        if not own or not as_large or not status.st_nlink:  # it may have gone before it was locked
            held.close()
            return None
        os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))  # the one that was used last goes last
        return held

    def _claimed(self, name: str, size_bytes: int) -> int | None:
        """Return a descriptor to write to, locked; None if another process has it.

        Raises
        ------
        BlockingIOError
            If there is no room, as what is there is in use.
        """
        path = self.folder / f".{name}{PARTIAL}"
        with self._names():
            if self._is_there(name, size_bytes):  # since it was looked for
                return None
            descriptor = os.open(path, _WRITTEN, 0o600)
            try:
                if not _locked(descriptor):
                    os.close(descriptor)
                    return None
                os.ftruncate(descriptor, 0)
                self._make_room(size_bytes, path)
                os.ftruncate(descriptor, size_bytes)  # counts, for whoever makes room next
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
                os.fdatasync(descriptor)  # else a machine that stops may leave it with holes, which no hash would tell
                written_s = _ON_DISK_S
            with self._names():
                partial.rename(path)
                os.utime(descriptor, (time.time(), written_s))  # before it, who waits would think that nobody gets on
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
        """Have the disk keep room, of which others may take some: the oldest go, within the limit too."""
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
        """Remove what nobody holds, and yield what each took: first what killed processes left, then the oldest."""
        for status, path in sorted(
            _files_in(self.folder), key=lambda each: (not _partial(each[1]), each[0].st_atime_ns)
        ):
            if path == but:
                continue
            try:
                descriptor = os.open(path, _READ)
            except OSError:  # it is gone, or somebody else's
                continue
            try:
                if _locked(descriptor):
                    path.unlink()
                    yield status.st_size
            finally:
                os.close(descriptor)

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Let no other process change which files there are, for a moment; a folder that somebody removed is made anew.

        Raises `WriteError` if it cannot be used any more.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.folder / _LOCK, _WRITTEN, 0o600)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_size:
                with suppress(OSError):  # of a full disk, where parts are about to go
                    os.write(descriptor, _MARK)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
            os.close(descriptor)


def _unusable(folder: Path, error: OSError) -> WriteError:
    return WriteError(f"{folder}: cannot be used as part_cache: {error.strerror}; pass another")


def write_all(descriptor: int, piece: memoryview, at: int | None = None) -> None:
    """Write bytes, however few are taken at once: to a place in a file, or after what was written before."""
    while piece:
        count = os.write(descriptor, piece) if at is None else os.pwrite(descriptor, piece, at)
        piece, at = piece[count:], None if at is None else at + count


@functools.cache
def _this_start_s() -> int:
    """Return a number, as a time, that is another one each time that the system starts; even, and before 2004."""
    try:
        said = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not of Linux: then of this process alone
        said = os.urandom(16)
    return 2 * (int.from_bytes(new_hash(said).digest()) % 2**29) + 2 * _ON_DISK_S


def default_folder() -> Path:
    """Return where parts are fetched to unless something else is said: in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "omearrow_ds" / "parts"


def _locked(descriptor: int) -> bool:
    """Lock a file that nobody else has locked; False if somebody has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _partial(path: Path) -> bool:
    return path.name.startswith(".")


def _files_in(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    """Yield what is ours in a folder: whatever else somebody keeps there is let alone."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name.removeprefix(".").removesuffix(PARTIAL)):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # it was let go of meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                yield status, Path(entry.path)
