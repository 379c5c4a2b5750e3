"""Fixtures that several test modules share."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest

from benchmarks.support import weed as weed_server
from benchmarks.support.proxy import proxying
from omearrow_ds.storage.formats import get_format
from tests.support.forked_runs import Runs
from tests.support.programs import forked_programs

_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 * 2**30
_FORKED = ["omearrow_ds.loader.dataloader", "tests.support.strategies", "tests.adversarial.damaged_child"]


def needs(name: str) -> None:
    """Skip the test, saying why, where the backend of the format is not installed."""
    missing = get_format(name).missing_backend
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session", autouse=True)
def _loops():
    """Have NumPy make samples, however many the tests before made; those of compiled loops say so."""
    from tests.support.loops import made_by

    with made_by("numpy"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _dark_images():
    """Silence the warning about 12-bit pixels, which most test images cause; its own tests expect it."""
    from omearrow_ds.dataset.dark_images import has_warned

    has_warned().set()


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes images as one format and gives the path."""
    from omearrow_ds import write_images
    from tests.support.strategies import SUFFIX

    def store(name, images, stem="images", **kwargs):
        needs(name)
        path = tmp_path / f"{stem}{SUFFIX[name]}"
        write_images(images, path, name, **kwargs)
        return path

    return store


@pytest.fixture(scope="session")
def runs(programs):
    """Runs of pytest at the repository's root, each a process of its own."""
    return Runs(programs)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Python programs, each a process of its own that does not have to import torch."""
    with forked_programs(tmp_path_factory.mktemp("programs")) as found:
        yield found


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    """A real server of objects, one for all processes of a run."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    if missing := weed_server.missing():
        pytest.skip(missing)
    base = tmp_path_factory.getbasetemp()
    with weed_server.serving((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "weed") as server:
        yield server


@pytest.fixture
def bucket(weed, monkeypatch):
    """The name of a new bucket on the real server; the environment has the keys and the endpoint."""
    name = f"b{uuid.uuid4().hex[:12]}"
    weed.make_bucket(name)
    for variable, value in {**weed.keys(), "AWS_ENDPOINT_URL": weed.url}.items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture(scope="session")
def session_proxy(weed):
    with proxying(weed.url) as found:
        yield found


@pytest.fixture
def proxy(session_proxy, bucket, monkeypatch):
    """A proxy in front of the real server, through which the environment leads, that does nothing yet."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", session_proxy.url)
    session_proxy.set()
    yield session_proxy
    session_proxy.set()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Take two processes a core: half of a test's time it waits, mostly for a process that it started."""
    return 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_collection():
    """Collect no garbage while tests are imported and made: nearly all that is made stays."""
    gc.disable()


def pytest_collection_finish():
    """Hide what there is by now from the garbage collector, which takes a second for the objects of a whole run.

    Pytest goes through all objects twice more when it ends, so they are shown again after that: of what the interpreter
    cannot remove at its end libraries say that it leaks.
    """
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_configure(config):
    """Let programs that tests start be stopped by signals, also where this one was started in the background.

    And let Python's own forkserver, which the first test that needs it starts, import once what its processes would;
    and let files of tests lie in memory, where there is room, as libraries wait for the disk at the end of each. Those
    of the long tests, which are large, lie on the disk.
    """
    in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    if in_memory and not config.option.markexpr.startswith("long"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    multiprocessing.set_forkserver_preload(_FORKED)
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_ignore_collect(collection_path, config):
    """Import no file without a test of the mark that is asked for: all files take longer to import than those tests."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark in ("alone", "long") and collection_path.name.startswith("test_"):
        return f"mark.{mark}" not in collection_path.read_text() or None
    return None
