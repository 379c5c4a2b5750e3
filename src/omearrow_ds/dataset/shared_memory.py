"""Memory that processes share: preloaded pixels, and batches that workers create.

**Pixels.** Fresh shared memory is slow to fill: the system allocates it in pages of 4 KiB, which took 12 ms for 20 MB
while a copy takes 1.5 ms. Private memory uses huge pages and took 2.4 ms (Linux 6.18, one core). So a block starts
private, and moves to shared memory when it is pickled for a worker; a loader without workers avoids this cost.

**Batches.** Torch allocates each batch in fresh shared memory, whose pages the system clears one by one, and passes its
descriptor through a new socket. Here a worker keeps a few buffers and sends only the location of a buffer. The loader's
process maps it, and marks it as free when the last tensor on it is released. A batch of 16 at 100 x 100 took 0.35 ms
instead of 1.0 ms, at 512 x 512 3.9 ms instead of 8.7 ms (two workers, two cores, the batch read once).

Both are anonymous files: they need no space in ``/dev/shm``, and no files remain.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import operator
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

Array = np.ndarray[Any, Any]
FileIdentity = tuple[int, int, int]
_MOVED_BYTES = 16 * 2**20  # Size of a moved piece, and so the additional memory of the move.
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAX_FLAGS = mmap.PAGESIZE  # Bytes after the pixels of a shared buffer: one per transfer, 1 when released.
_SPARE_BUFFERS = 3  # Free buffers that are kept for the next batches.
_BY_VALUE_BYTES = 16 * 1024
_POOLED_BYTES = 2**20  # glibc may unmap freed memory above 128 KiB, and does above 32 MiB.
_MAX_PENDING_COPIES = 8
_LOST = "a worker exited unexpectedly and its batch is lost; look for its error above"


class SharedBlock:
    """Zeroed memory that other processes of the same user can map while this process lives.

    Pickling transfers a handle. Except on Linux, it is a temporary file from the start. Forked children share it.
    """

    def __init__(
        self, memory: mmap.mmap, size_bytes: int, descriptor: int | None = None, *, writable: bool = True
    ) -> None:
        self.size_bytes, self.writable = size_bytes, writable
        self.bytes: Array = np.frombuffer(memory, np.uint8)[:size_bytes]
        self._descriptor = descriptor
        self._path: str | None = None
        self._moving = threading.Lock()
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size_bytes: int) -> SharedBlock:
        if sys.platform == "linux":
            memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size_bytes >= _MOVED_BYTES // 8:
                with suppress(OSError):  # Huge pages are optional.
                    memory.madvise(mmap.MADV_HUGEPAGE)
            return cls(memory, size_bytes)
        descriptor, path = tempfile.mkstemp(prefix="omearrow_ds-")
        os.truncate(descriptor, max(size_bytes, 1))
        block = cls(mmap.mmap(descriptor, max(size_bytes, 1)), size_bytes, descriptor)
        block._path = path
        weakref.finalize(block, Path(path).unlink, missing_ok=True)
        return block

    @classmethod
    def map(cls, descriptor: int, size_bytes: int, *, writable: bool) -> SharedBlock:
        """Return a block of the first ``size_bytes`` of an open file; the block closes the descriptor."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return cls(mmap.mmap(descriptor, max(size_bytes, 1), access=access), size_bytes, descriptor, writable=writable)

    @classmethod
    def attach(cls, path: str, identity: FileIdentity, size_bytes: int, *, writable: bool = True) -> SharedBlock | None:
        """Return the block of another process, or None if that process has ended."""
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError:
            return None
        if file_identity(descriptor) != identity:
            os.close(descriptor)
            return None
        return cls.map(descriptor, size_bytes, writable=writable)

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


def file_identity(descriptor: int) -> FileIdentity:
    """Return the device, inode and size of an open file, which together identify the file and its length."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino, stat.st_size


class _BufferLease:
    """Owner of memory in use, collected together with the last array, tensor, view or slice on it.

    NumPy shortens a chain of views to a reference to the owner, so intermediate arrays do not show such use.
    """

    def __init__(self, memory: Array, address: int, size_bytes: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}


class _ReceivedLease(_BufferLease):
    """Owner of memory of another process, which reuses it once the flag is set."""

    release_flag: Array | None = None

    def __del__(self) -> None:
        if self.release_flag is not None:
            self.release_flag[0] = 1


class _ReusableBuffer:
    """Memory that is reused when no array, no receiving process and no pending copy to a device uses it."""

    def __init__(self, memory: Array, num_flags: int = 0, descriptor: int | None = None) -> None:
        self.capacity_bytes, self.descriptor = memory.size - num_flags, descriptor
        self.address = int(memory.ctypes.data)
        self.copied: Any = None  # Event after the last copy to a device.
        self._memory, self._release_flags, self._num_transfers = memory, memory[self.capacity_bytes :], 0
        self._lease: weakref.ref[_BufferLease] | None = None

    @property
    def is_free(self) -> bool:
        if self._lease is not None and self._lease() is not None:
            return False
        if self._num_transfers and not self._release_flags[: self._num_transfers].all():
            return False
        return self.copied is None or bool(self.copied.query())

    def take(self, size_bytes: int) -> Array:
        self._release_flags[: self._num_transfers] = 0
        self._num_transfers = 0
        lease = _BufferLease(self._memory, self.address, size_bytes)
        self._lease = weakref.ref(lease)
        return np.asarray(lease)

    def add_transfer(self) -> int | None:
        """Return the index of the flag that the receiver sets to release the buffer, or None if all are used."""
        index = self._num_transfers
        if index == len(self._release_flags):
            return None
        self._num_transfers += 1
        return index


def _allocate_private(size_bytes: int) -> _ReusableBuffer:
    return _ReusableBuffer(np.empty(size_bytes, np.uint8))


def _allocate_pinned(size_bytes: int) -> _ReusableBuffer:
    return _ReusableBuffer(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy())


def _allocate_shared(size_bytes: int) -> _ReusableBuffer:
    descriptor = os.memfd_create("omearrow_ds-batch", os.MFD_CLOEXEC)
    os.truncate(descriptor, size_bytes + _MAX_FLAGS)
    memory = np.frombuffer(mmap.mmap(descriptor, size_bytes + _MAX_FLAGS), np.uint8)
    buffer = _ReusableBuffer(memory, _MAX_FLAGS, descriptor)
    weakref.finalize(buffer, os.close, descriptor)
    return buffer


_CAPACITY = operator.attrgetter("capacity_bytes")


class BatchBufferPool:
    """Reusable buffers for batches; a few free ones are kept.

    - Private memory serves large batches that are used in the process that creates them. The system allocator unmaps
      and remaps memory above 32 MiB, and each page is cleared again: a batch of 64 at 512 x 512 took 15 ms instead of
      11 ms.
    - Pinned memory serves batches that are copied to a CUDA device. Locking pages takes a millisecond or more, so a
      buffer is reused when the copy from it is complete, and `take` waits for the copies of 8 buffers.
    - Shared memory serves the batches of a worker.
    """

    def __init__(
        self, allocate: Callable[[int], _ReusableBuffer] = _allocate_private, min_bytes: int | None = None
    ) -> None:
        self.min_bytes = _POOLED_BYTES if min_bytes is None else min_bytes  # Smaller batches do not use the pool.
        self.buffers: list[_ReusableBuffer] = []
        self._allocate, self._lock = allocate, threading.Lock()

    @classmethod
    def pinned(cls) -> BatchBufferPool:
        return cls(_allocate_pinned, 0)

    def take(self, size_bytes: int) -> Array:
        """Return ``size_bytes`` of a free buffer that is at most 4 times as large, or of a new buffer."""
        whole_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            free = [buffer for buffer in self.buffers if buffer.is_free]
            if not free and len(self.buffers) >= _MAX_PENDING_COPIES:
                for buffer in self.buffers:
                    if buffer.copied is not None:
                        buffer.copied.synchronize()
                free = [buffer for buffer in self.buffers if buffer.is_free]
            # A larger buffer is left for a larger batch. A few of the other free buffers are kept.
            fitting = [buffer for buffer in free if size_bytes <= buffer.capacity_bytes <= 4 * whole_bytes]
            buffer = min(fitting, key=_CAPACITY, default=None) or self._allocate(whole_bytes)
            dropped = [other for other in free if other is not buffer][_SPARE_BUFFERS:]
            self.buffers = [*[other for other in self.buffers if other not in (buffer, *dropped)], buffer]
            return buffer.take(size_bytes)

    def find(self, tensor: Tensor) -> _ReusableBuffer | None:
        address = tensor.untyped_storage().data_ptr()
        return next((buffer for buffer in self.buffers if buffer.address == address), None)

    def record_copy(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Record that a copy from ``tensor`` was enqueued in a stream."""
        buffer = self.find(tensor)
        if buffer is not None:
            buffer.copied = stream.record_event(buffer.copied)


def batch_array(shape: Sequence[int], dtype: np.dtype[Any], pool: BatchBufferPool | None = None) -> Array:
    """Return an uninitialized array for a batch.

    In a loader's worker it is in memory that is transferred without a copy; elsewhere a large array is from ``pool``.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes <= _BY_VALUE_BYTES:
        return np.empty(shape, dtype)
    if get_worker_info() is not None and sys.platform == "linux":
        pool = _worker_buffer_pool(os.getpid())
    if pool is None or size_bytes <= pool.min_bytes:
        return np.empty(shape, dtype)
    return pool.take(size_bytes).view(dtype).reshape(shape)


@functools.cache
def _worker_buffer_pool(pid: int) -> BatchBufferPool:
    """Return the buffers of this worker, process ``pid``, and register them for pickling its tensors."""
    del pid
    ForkingPickler.register(Tensor, _reduce_tensor)
    return BatchBufferPool(_allocate_shared, 0)


def enable_shared_memory_transfer() -> None:
    """Make this worker process send all its tensors through this module instead of torch."""
    if sys.platform == "linux":
        _worker_buffer_pool(os.getpid())


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Pickle a tensor for the loader's process: by its location in a buffer, by value if small, else by torch."""
    tensor = tensor.resolve_conj().resolve_neg()  # Torch does not send these bits.
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    if is_plain and not tensor.is_nested and not tensor.requires_grad and tensor.numel():
        pool = _worker_buffer_pool(os.getpid())
        buffer = pool.find(tensor)
        if buffer is None and not tensor.is_shared():  # type: ignore[no-untyped-call]
            if tensor.nbytes <= _BY_VALUE_BYTES:
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                return _tensor_from_bytes, (data, tensor.dtype, tuple(tensor.shape))
            memory = torch.from_numpy(pool.take(tensor.nbytes))
            tensor = memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            buffer = pool.find(tensor)
        flag_index = None if buffer is None else buffer.add_transfer()
        if buffer is not None and buffer.descriptor is not None and flag_index is not None:
            path, identity = f"/proc/{os.getpid()}/fd/{buffer.descriptor}", file_identity(buffer.descriptor)
            layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            return _rebuild_tensor, (path, identity, flag_index, tensor.dtype, *layout)
    reduced: tuple[Any, ...] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return reduced


def _tensor_from_bytes(data: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _rebuild_tensor(path: str, identity: FileIdentity, flag_index: int, dtype: torch.dtype, *layout: Any) -> Tensor:
    """Return the tensor at a location in a worker, which reuses the buffer when no tensor uses it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EMFILE:
            error.add_note("Each batch that you keep needs an open file; keep its clone() instead, or raise ulimit -n")
            raise
        raise RuntimeError(f"{path}: {_LOST}") from error
    try:
        if file_identity(descriptor) != identity:
            raise RuntimeError(f"{path}: {_LOST}")
        memory = np.frombuffer(mmap.mmap(descriptor, identity[-1]), np.uint8)
    finally:
        os.close(descriptor)
    capacity_bytes = memory.size - _MAX_FLAGS
    lease = _ReceivedLease(memory, int(memory.ctypes.data), capacity_bytes)
    lease.release_flag = memory[capacity_bytes + flag_index :][:1]
    _received_leases().add(lease)
    return torch.from_numpy(np.asarray(lease)).view(dtype).as_strided(*layout)


@functools.cache
def _received_leases() -> weakref.WeakSet[_ReceivedLease]:
    """Return the received memory in use, which is never released if the process forks: the child uses it too."""
    leases = weakref.WeakSet[_ReceivedLease]()

    def retain_all() -> None:
        with suppress(KeyError):
            while True:
                leases.pop().release_flag = None

    os.register_at_fork(before=retain_all)
    return leases
