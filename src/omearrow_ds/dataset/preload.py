"""All decoded pixels of a source, in shared memory or in a file that every process maps.

A file is built once under a lock. Its pixels are trusted, so it must come from the user who reads it. Files are created
readable for their owner only. A file is ignored if it is a link, belongs to another user, or others can write to it.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from omearrow_ds.dataset.shared_memory import SharedBlock
from omearrow_ds.dataset.split import combine_codes
from omearrow_ds.errors import FormatError, WriteError
from omearrow_ds.resources import image_bytes, is_private_file, one_of, pixel_count
from omearrow_ds.storage.formats import FORMATS, accompanying_files
from omearrow_ds.storage.formats._base import Array, Done, Images
from omearrow_ds.storage.formats._detect import entries_below
from omearrow_ds.storage.verified import VerifiedSource, decode

_ALIGNMENT = 64
_VERSION = 2  # Version of the file: pixels in the layout of `PixelCache`, then the digest.
_SUFFIX, _PARTIAL = ".pixels", ".partial"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MADE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIGEST_BYTES = 32
_BAR_OPTIONS = {"delay": 2.0}  # Seconds.

Fingerprint = list[tuple[str, int, int, int, int]]
Build = Callable[[SharedBlock], object]  # Fills a block.


class ImageKinds(NamedTuple):
    """Groups of similar images: first image of each group, number of images, and group of each (None for one group)."""

    first: list[int]
    num_images: int
    of_each: Array | None

    def spread(self, values: list[Any]) -> list[Any]:
        return values * self.num_images if self.of_each is None else [values[kind] for kind in self.of_each.tolist()]


def group_into_kinds(shapes: Array, dtypes: Sequence[np.dtype[Any]], *others: Array) -> ImageKinds:
    """Group images that are equal in shape, dtype and all codes of ``others``, in the order of their first images."""
    count = len(shapes)
    keys = [*shapes.T, *others]
    if not one_of(dtypes):
        number = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
        keys.append(np.fromiter(map(number.__getitem__, dtypes), np.int64, count))
    keys = [codes for codes in keys if (codes != codes[:1]).any()]
    if not keys:
        return ImageKinds([0] if count else [], count, None)
    _, first, of_each = np.unique(combine_codes(keys), return_index=True, return_inverse=True)
    order = np.argsort(first)
    return ImageKinds(first[order].tolist(), count, np.argsort(order)[of_each.reshape(-1)])


class PixelCache:
    """Decoded images of ``shapes`` (N, 5), int64, at offsets in one `SharedBlock`, by default a new one."""

    def __init__(self, shapes: Array, dtypes: Sequence[np.dtype[Any]], block: SharedBlock | None = None) -> None:
        self.uniform, self._offsets = _layout(shapes, dtypes)
        self._shapes = [tuple(shape) for shape in shapes.tolist()]
        self._dtypes = list(dtypes)
        self.block = SharedBlock.create(self._offsets[-1]) if block is None else block

    @classmethod
    def load(
        cls,
        source: Images,
        folder: Path | None = None,
        fingerprint: Fingerprint | None = None,
        *,
        progress: bool | None = False,
    ) -> PixelCache:
        """Decode every image of ``source`` once, into memory or into a memory-mapped file in ``folder``.

        ``fingerprint`` is that of `collection_fingerprint`, by default before decoding.
        """
        header = source.header
        shapes, dtypes = header.shapes, header.dtypes
        with preload_progress(source, progress) as done:

            def build(block: SharedBlock | None = None) -> PixelCache:
                cache = cls(shapes, dtypes, block)
                cache.decode(source, done)
                return cache

            if folder is None:
                return build()
            size_bytes = _layout(shapes, dtypes)[1][-1]
            fingerprint = fingerprint or collection_fingerprint(header.path)
            block, is_new = open_or_build(folder, source, fingerprint, size_bytes, build)
            cache = cls(shapes, dtypes, block)
            if isinstance(source, VerifiedSource) and not is_new:  # Decoded earlier, without verification.
                source.check_all(cache, f"pixels kept in {folder} of {header.path}", done)
            return cache

    def decode(self, source: Images, done: Done | None) -> None:
        stack = self.stack()
        decode(source, self if stack is None else stack, done)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Array:
        pixels = self.block.bytes[self._offsets[index] : self._offsets[index + 1]]
        dtype, shape = self._dtypes[index], self._shapes[index]
        return pixels[: pixel_count(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def stack(self) -> Array | None:
        if not self.uniform:
            return None
        return self.block.bytes.view(self._dtypes[0]).reshape(len(self), *self._shapes[0])


class _ThreadlessBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Progress bar without a monitor thread, which would be unsafe if the process forks."""

    monitor_interval = 0
    _lock = threading.RLock()  # The default lock of tqdm would choose the start method of processes.


def preload_progress(source: Images, progress: bool | None) -> AbstractContextManager[Done | None]:
    """Return a context that shows a progress bar if decoding takes longer than 2 s.

    Its value is the function to call with decoded images, or None. ``progress=None`` shows the bar only in a terminal.
    """
    err = sys.stderr
    is_shown = err is not None and not err.closed and bool(progress or (progress is None and err.isatty()))
    return _progress_bar(source) if is_shown else nullcontext()


@contextmanager
def _progress_bar(source: Images) -> Iterator[Done | None]:
    """Show a progress bar of images, or of bytes if the source downloads them."""
    header = source.header
    fetches = header.part_fetches if len(source) == header.row_count else None  # Otherwise, bytes are unknown.
    with _ThreadlessBar(
        desc=f"preloading {header.path.name}", unit="image", total=len(source), leave=False, **_BAR_OPTIONS
    ) as bar:
        num_bytes = 0 if fetches is None else fetches.report(bar.update)
        if num_bytes:
            bar.total, bar.unit, bar.unit_scale = num_bytes, "B", True
        try:
            yield None if num_bytes else lambda first, stop: bar.update(stop - first)
        finally:
            if fetches is not None:
                fetches.report(None)


def _layout(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> tuple[bool, list[int]]:
    """Return whether all images are alike, and N + 1 byte offsets, which are aligned if images differ."""
    is_uniform = len(shapes) > 0 and bool((shapes == shapes[0]).all()) and len(set(dtypes)) == 1
    lengths = image_bytes(shapes, dtypes)
    if not is_uniform:
        lengths = -(-lengths // _ALIGNMENT) * _ALIGNMENT
    return is_uniform, np.concatenate([[0], np.cumsum(lengths)]).tolist()


def collection_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of the existing files of a collection; call this before opening the collection."""
    path = path.resolve()
    fingerprint: Fingerprint = []
    for file in (path, *(file for fmt in FORMATS for file in accompanying_files(fmt, path))):
        try:
            fingerprint += _files(file, path)
        except FileNotFoundError:
            continue
    return sorted(fingerprint)


def open_or_build(
    folder: Path, source: Images, fingerprint: Fingerprint, size_bytes: int, build: Build
) -> tuple[SharedBlock, bool]:
    """Return the decoded pixels of ``source``, memory-mapped from a file in ``folder``, and whether this call built it.

    Pixels of earlier versions of the collection are removed. ``build`` is called in only one process, with a zeroed
    block of ``size_bytes`` to fill. Raises `WriteError` if the folder is not writable or full; `FormatError` if the
    collection changed since ``fingerprint`` was taken.
    """
    header = source.header
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"{folder}: cache_dir is not a folder; choose another path")
    fingerprint, is_new = [*fingerprint, *_elsewhere(source)], False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = _digest(source, fingerprint)
        named = os.fsencode("\0".join([str(header.path.resolve()), *header.image_column, *header.variant]))
        stem = hashlib.blake2b(named, digest_size=8).hexdigest()
        file = folder / f"{header.path.stem}-{stem}-{digest.hex()[:16]}{_SUFFIX}"
        block = _mapped(file, size_bytes, digest)
        if block is None:
            with FileLock(folder / f".{stem}.lock", mode=0o600):
                block = _mapped(file, size_bytes, digest)  # Built by the previous lock holder.
                if block is None:
                    is_new = True
                    _write(file, size_bytes, digest, build, lambda: _refuse_changed(source, fingerprint))
                    for other in folder.glob(f"*-{stem}-*"):
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
    return block, is_new


def _write(file: Path, size_bytes: int, digest: bytes, build: Build, check: Callable[[], None]) -> None:
    partial = file.with_suffix(_PARTIAL)
    partial.unlink(missing_ok=True)  # Left by a killed process: the lock excludes other builders.
    try:
        with os.fdopen(os.open(partial, _MADE, 0o600), "w+b") as stream:
            _reserve(stream.fileno(), size_bytes + _DIGEST_BYTES, file.parent)
            if size_bytes:
                memory = mmap.mmap(stream.fileno(), size_bytes)
                build(SharedBlock(memory, size_bytes))
                memory.flush()
            check()
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
    try:
        with os.fdopen(os.open(file, _READ), "rb") as stream:
            status = os.fstat(stream.fileno())
            size_matches = is_private_file(status) and status.st_size == size_bytes + _DIGEST_BYTES
            if size_matches and os.pread(stream.fileno(), _DIGEST_BYTES, size_bytes) == digest:
                return SharedBlock.map(os.dup(stream.fileno()), size_bytes, writable=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EACCES):  # Missing, a link, or of another user.
            raise
    return None


def _refuse_changed(source: Images, fingerprint: Fingerprint) -> None:
    if [*collection_fingerprint(source.header.path), *_elsewhere(source)] != fingerprint:
        raise FormatError(f"{source.header.path}: the file changed while it was decoded; create the dataset again")


def _elsewhere(source: Images) -> Fingerprint:
    """Return the fingerprint of image files that a table refers to."""
    header = source.header
    if header.path.is_dir():
        return []
    own = {header.path, *accompanying_files(header.format, header.path)}
    return sorted(entry for file in source.details.files() if file not in own for entry in _files(file, header.path))


def _digest(source: Images, fingerprint: Fingerprint) -> bytes:
    header = source.header
    path = header.path.resolve()
    version = (header.guard.fingerprint or ())[1:]  # Not the device, whose number may change at a restart.
    identity = [_VERSION, sys.byteorder, header.format.name, str(path), fingerprint, version]
    kinds = [header.shapes.tolist(), [dtype.str for dtype in header.dtypes]]
    picked = [header.image_column, header.variant, header.rows.tolist()]
    return hashlib.blake2b(json.dumps([identity, kinds, picked]).encode(), digest_size=_DIGEST_BYTES).digest()


def _files(path: Path, base: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield path relative to ``base``, inode, size and times of a file, or of all files below a folder."""
    for file in entries_below(path, linked=True) if path.is_dir() else [path]:
        status = file.stat()
        yield os.path.relpath(file, base), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
