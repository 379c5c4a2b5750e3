"""`SharedBlock`: memory that becomes shared when it is first pickled for another process.

Fresh shared memory is slow to fill: the system allocates it in pages of 4 KiB, which took 12 ms for 20 MB while a copy
takes 1.5 ms. Private memory uses huge pages and took 2.4 ms (Linux 6.18, one core). So a block starts private, and
moves to shared memory when it is pickled for a worker; a loader without workers avoids this cost.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_MOVED_BYTES = 16 * 2**20  # Size of a moved piece, and so the additional memory of the move.
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedBlock:
    """Zeroed memory that other processes of the same user can map while this process lives.

    Pickling transfers a handle. A shared block is an anonymous file (``memfd_create``): it needs no space in
    ``/dev/shm``, and no file remains even if the process is killed. On systems other than Linux, it is a temporary file
    from the start. A forked child shares the pages in either case.
    """

    def __init__(
        self, memory: mmap.mmap, size_bytes: int, descriptor: int | None = None, *, writable: bool = True
    ) -> None:
        self.size_bytes = size_bytes
        self.writable = writable
        self.bytes: Array = np.frombuffer(memory, np.uint8)[:size_bytes]
        self._descriptor = descriptor
        self._path: str | None = None
        self._moving = threading.Lock()
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size_bytes: int) -> SharedBlock:
        """Return a new block; on Linux, its memory is private until `share` is called."""
        if sys.platform == "linux":
            memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size_bytes >= _MOVED_BYTES // 8:
                _ask_for_huge_pages(memory)
            return cls(memory, size_bytes)
        descriptor, path = tempfile.mkstemp(prefix="omearrow_ds-")
        os.truncate(descriptor, max(size_bytes, 1))
        block = cls(mmap.mmap(descriptor, max(size_bytes, 1)), size_bytes, descriptor)
        block._path = path
        weakref.finalize(block, Path(path).unlink, missing_ok=True)
        return block

    @classmethod
    def of_file(cls, descriptor: int, size_bytes: int) -> SharedBlock:
        """Return a read-only block of the first ``size_bytes`` of an open file; the caller must close the file."""
        return cls._map(os.dup(descriptor), size_bytes, writable=False)

    @classmethod
    def attach(
        cls, path: str, identity: tuple[int, int, int], size_bytes: int, *, writable: bool = True
    ) -> SharedBlock | None:
        """Return the block of another process, or None if that process has ended."""
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError:
            return None
        if file_identity(descriptor) != identity:
            os.close(descriptor)
            return None
        return cls._map(descriptor, size_bytes, writable=writable)

    @classmethod
    def _map(cls, descriptor: int, size_bytes: int, *, writable: bool) -> SharedBlock:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return cls(mmap.mmap(descriptor, max(size_bytes, 1), access=access), size_bytes, descriptor, writable=writable)

    @property
    def shared(self) -> bool:
        return self._descriptor is not None

    def share(self) -> int:
        """Move the block to shared memory if it is private, and return its descriptor.

        Each piece is copied and then mapped over the private one at the same address. Views of the block remain valid,
        readers in other threads always see the same bytes, and only one piece is in memory twice.
        """
        with self._moving:
            if self._descriptor is None:
                descriptor = os.memfd_create("omearrow_ds", os.MFD_CLOEXEC)
                try:
                    os.truncate(descriptor, max(self.size_bytes, 1))
                    for start in range(0, self.size_bytes, _MOVED_BYTES):
                        self._move(descriptor, start, min(_MOVED_BYTES, self.size_bytes - start))
                except BaseException:
                    os.close(descriptor)  # Moved pieces remain mapped.
                    raise
                self._descriptor = descriptor
                weakref.finalize(self, os.close, descriptor)
            return self._descriptor

    def _move(self, descriptor: int, start: int, length: int) -> None:
        # The bytes are written to the file, then the file is mapped over them in one system call, so that views in
        # other threads always have these bytes. Python's mmap cannot map at an address; libc's can.
        piece = self.bytes[start : start + length].data
        while piece:
            piece = piece[os.pwrite(descriptor, piece, start + length - len(piece)) :]
        address = self.bytes.ctypes.data + start
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(length), protection, mmap.MAP_SHARED | _MAP_FIXED)
        if libc.mmap(*arguments, descriptor, ctypes.c_long(start)) == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"sharing preloaded images: mmap failed, {os.strerror(number)}")

    def __reduce__(self) -> tuple[Any, ...]:
        descriptor = self.share()
        path = self._path or f"/proc/{os.getpid()}/fd/{descriptor}"
        attach = functools.partial(SharedBlock.attach, writable=self.writable)
        return attach, (path, file_identity(descriptor), self.size_bytes)


def file_identity(descriptor: int) -> tuple[int, int, int]:
    """Return the device, inode and size of an open file, which together identify the file and its length."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino, stat.st_size


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # Huge pages are optional.
