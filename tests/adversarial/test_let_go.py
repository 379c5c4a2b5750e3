"""Dropped objects are freed at once, with their files, connections and threads, without a garbage collection."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import Counter
from multiprocessing.connection import Connection

import pytest

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, open_images
from omearrow_ds.errors import DecodeError
from omearrow_ds.loader.worker_processes import worker_context
from omearrow_ds.storage.formats import _handles
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._handles import ProcessLocal
from tests.support.errors import raises
from tests.support.strategies import NAMES, NAMES_OR_LONG, image_of

formats = pytest.mark.parametrize("name", NAMES)
IMAGES = [image_of((1, 1, 1, 6, 7), "uint16", number) for number in range(5)]


@pytest.fixture
def alive():
    """Disable garbage collection; return a function that counts the sources, datasets and loaders created since."""
    kinds = (Images, OMEArrowDataset, OMEArrowDataLoader)

    def count():
        by_type = Counter(map(type, gc.get_objects()))
        return sum(number for kind, number in by_type.items() if issubclass(kind, kinds))

    gc.disable()
    before = count()
    yield lambda: count() - before
    gc.enable()


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_source_is_gone_with_its_last_reference(stored, alive, name):
    source = open_images(stored(name, IMAGES), name)
    source.read(3)
    source.take([1, 2])
    list(source.images.stream())
    assert alive() >= 1
    del source
    assert alive() == 0


@formats
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.share(2, "name", "preload")
def test_a_dataset_and_its_loader_are_gone_with_their_last_reference(stored, alive, name, preload):
    dataset = OMEArrowDataset(stored(name, IMAGES), name, preload=preload)
    loader = OMEArrowDataLoader(dataset, 2, num_workers=0)
    assert len(list(loader)) == 3
    assert alive() >= 2
    del dataset, loader
    assert alive() == 0


class Told:
    """A handle that reports its finalization."""

    def __init__(self, closers):
        self.closers = closers

    def __del__(self):
        self.closers.append(os.getpid())


@pytest.mark.parametrize("ending", [False, True])
def test_what_a_process_inherited_is_not_let_go_of(monkeypatch, ending):
    """This includes the end of the interpreter, which clears modules before objects. Any message is an error here."""
    closers = []
    inherited_only, dropped, used = (ProcessLocal(lambda: Told(closers)) for _ in range(3))
    for handle in (inherited_only, dropped, used):
        handle.get()
    for inherited in (inherited_only, used):  # A child inherits it.
        inherited._owner = (os.getpid() + 1, inherited._owner[1])
    used.get()
    if ending:
        for name in [name for name in vars(_handles) if not name.startswith("__")]:
            monkeypatch.setattr(_handles, name, None)
    del inherited_only, dropped, used, handle, inherited
    assert closers == [os.getpid()] * 2, "its own handles, but not those that it inherited"


FORKING = """
import gc, os, signal, sys
from omearrow_ds import open_images

for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    source = open_images(path, name, **({"engine": "duckdb"} if name == "parquet_duck" else {}))
    expected = source.read(3).tobytes()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = source.read(3).tobytes() == expected
        source.close()
        del source
        gc.collect()
        os._exit(0 if same else 1)
    status = os.waitpid(child, 0)[1]
    print(name, status, source.take([3])[0].tobytes() == expected)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_child_that_drops_a_source_goes_on(programs, stored):
    """DuckDB ended the child, whose connection waited for missing threads. Runs in its own process."""
    names = [name for name in NAMES if "duck" in name]
    arguments = [part for name in names for part in (name, str(stored(name, IMAGES)))]
    done = programs.run(FORKING, *arguments)
    assert done.stdout.splitlines() == [f"{name} 0 True" for name in names], done.stderr


class Broken:
    """A dataset that a worker cannot read."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise DecodeError(f"image {index} is damaged")


def test_workers_are_gone_with_their_error(alive):
    batches = iter(OMEArrowDataLoader(Broken(), 1, num_workers=1))
    gone = weakref.ref(batches._batches)
    with raises(DecodeError, mentions="damaged", remedy=False) as caught:
        next(batches)
    del batches, caught
    assert gone() is None, "torch's iterator, with its workers and pipes, is left to the garbage collector"


class Sender:
    """Sends to a worker when finalized, and references itself, as torch's iterator does within a cycle."""

    def __init__(self, queue, threads):
        self.queue, self.threads, self.itself = queue, threads, self

    def __del__(self):
        self.queue.put(None)
        self.threads.append(self.queue._thread)
        self.queue.cancel_join_thread()
        self.queue.close()


@pytest.mark.skipif(worker_context() is None, reason="the system has no forkserver, so workers are torch's own")
def test_a_pipe_is_closed_once_where_its_sender_is_garbage(alive, monkeypatch, capsys):
    closed, threads = [], []
    close = Connection._close

    def counted(self, *args):
        closed.append(id(self))
        close(self, *args)

    monkeypatch.setattr(Connection, "_close", counted)
    Sender(worker_context().Queue(), threads)
    gc.collect()
    for thread in threads:
        thread.join()
    assert len(closed) == len(set(closed)) == 2
    assert capsys.readouterr().err == ""
