"""`SharedBlock`: private until it is shared, then the same bytes at the same address."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import sys
import threading

import numpy as np
import pytest

from omearrow_ds.dataset import shared_memory
from omearrow_ds.dataset.shared_memory import SharedBlock

PIECE = 4 * 2**20  # A quarter of the actual size: more than one huge page, and less than caches.
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a block is a file from the start")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(shared_memory, "_MOVED_BYTES", PIECE)


def filled(size_bytes):
    block = SharedBlock.create(size_bytes)
    assert not block.bytes.any()
    block.bytes[:] = np.arange(size_bytes, dtype=np.uint64) * 2654435761 >> 7
    return block, block.bytes.copy()


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4097, PIECE, 2 * PIECE + 12345])
def test_sharing_moves_nothing_a_reader_can_see(size_bytes):
    block, expected = filled(size_bytes)
    view, address = block.bytes, block.bytes.ctypes.data
    assert block.share() == block.share()
    assert block._descriptor is not None
    assert block.bytes.ctypes.data == address
    assert np.array_equal(view, expected)
    attached = pickle.loads(pickle.dumps(block))
    assert np.array_equal(attached.bytes, expected)
    if size_bytes:
        attached.bytes[-1] ^= 255
        assert view[-1] == expected[-1] ^ 255  # Shared memory, not a copy.


@linux
def test_a_block_is_private_until_it_is_pickled():
    block, _ = filled(1000)
    assert block._descriptor is None
    pickle.dumps(block)
    assert block._descriptor is not None


@linux
def test_a_thread_reads_the_same_while_the_block_moves():
    block, expected = filled(3 * PIECE)
    total, odd, stop = int(expected.sum()), [], threading.Event()

    def read():
        while not stop.is_set():
            if int(block.bytes.sum()) != total:
                odd.append(1)

    thread = threading.Thread(target=read)
    thread.start()
    block.share()
    stop.set()
    thread.join()
    assert not odd


@linux
def test_a_move_that_fails_loses_nothing(monkeypatch):
    block, expected = filled(3 * PIECE)
    pwrite, calls = os.pwrite, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "no memory")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="no memory"):
        block.share()
    assert block._descriptor is None
    assert np.array_equal(block.bytes, expected)
    block.share()
    assert np.array_equal(pickle.loads(pickle.dumps(block)).bytes, expected)


def checksum(block, results):
    results.put(int(block.bytes.sum()))


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_that_inherits_nothing_sees_the_bytes(method):
    block, expected = filled(PIECE + 5)
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=checksum, args=(block, results))
    process.start()
    assert results.get() == int(expected.sum())
    process.join()


@linux
@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_process_sees_the_bytes(programs, shared):
    code = f"""if True:
        import os
        from omearrow_ds.dataset.shared_memory import SharedBlock
        block = SharedBlock.create(100_000)
        block.bytes[:] = 7
        if {shared}:
            block.share()
        child = os.fork()
        if not child:
            os._exit(0 if int(block.bytes.sum()) == 700_000 else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert programs.run(code).returncode == 0


def test_a_block_whose_owner_is_gone_is_none():
    block, _ = filled(10)
    pickled = pickle.dumps(block)
    del block
    assert pickle.loads(pickled) is None
