"""Fixtures of several test modules."""

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
from tests.support.shares import mark_cases_outside_of_shares

_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 * 2**30
_SETTINGS = "_hypothesis_internal_use_settings"  # Where hypothesis and its plugin of pytest look for them.
_SAMPLED, _MIN_EXAMPLES = 10, 5  # A tenth of the examples of a property, if it has that many.
_FORKED = ["omearrow_ds.loader.dataloader", "tests.support.strategies", "tests.adversarial.damaged_child"]


def needs(name: str) -> None:
    """Skip the test, with the reason, if the backend of the format is not installed."""
    missing = get_format(name).missing_backend
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session", autouse=True)
def _loops():
    """Make samples with NumPy, independent of earlier tests; tests of compiled loops choose those."""
    from tests.support.loops import made_by

    with made_by("numpy"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _imports_of_workers():
    """Import common modules of tests once in the server of workers: each worker would take 0.1 s for them."""
    from omearrow_ds.loader import worker_processes

    worker_processes._IMPORTED += ("tests.support.strategies",)


@pytest.fixture(scope="session", autouse=True)
def _dark_images():
    """Silence the warning about 12-bit pixels, which most test images cause; its own tests expect it."""
    from omearrow_ds.dataset.normalization import HAS_WARNED

    HAS_WARNED.set()


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes images in one format and returns the path."""
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
    """Runs of pytest in the repository root, each in its own process."""
    return Runs(programs)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Python programs, each in its own process that does not have to import torch."""
    with forked_programs(tmp_path_factory.mktemp("programs")) as started:
        yield started


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    """A real object store, shared by all processes of a run."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    if missing := weed_server.missing():
        pytest.skip(missing)
    base = tmp_path_factory.getbasetemp()
    with weed_server.serving((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "weed") as server:
        yield server


@pytest.fixture
def bucket(weed, monkeypatch):
    """Name of a new bucket in the real store; the environment has the credentials and the endpoint."""
    name = f"b{uuid.uuid4().hex[:12]}"
    weed.make_bucket(name)
    for variable, value in {**weed.keys(), "AWS_ENDPOINT_URL": weed.url}.items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture(scope="session")
def session_proxy(weed):
    with proxying(weed.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy, bucket, monkeypatch):
    """A proxy of the real store, which is set as endpoint and does not interfere by default."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", session_proxy.url)
    session_proxy.set()
    yield session_proxy
    session_proxy.set()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Start one process more than there are cores: some wait, but each imports all tests, which takes 15 s."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases outside of shares before pytest selects by marks."""
    mark_cases_outside_of_shares(items)


def pytest_collection():
    """Disable garbage collection while tests are imported and created, because nearly all objects stay."""
    gc.disable()


def pytest_collection_finish():
    """Freeze all existing objects, and collect others less often: this took a tenth of the time of tests.

    Pytest collects twice more when it ends, so objects are unfrozen after that: libraries report leaks for objects that
    the interpreter cannot free at exit.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(5_000)
    atexit.register(gc.unfreeze)


def pytest_configure(config):
    """Restore the default signal handlers, so that signals stop programs of tests if pytest runs in the background.

    Python's forkserver preloads modules once for its processes. Files of tests are in memory if it has enough space,
    because libraries wait for the disk after each file. Files of the long tests are large, and stay on disk.
    """
    in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    if in_memory and not config.option.markexpr.startswith("slow"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    multiprocessing.set_forkserver_preload(_FORKED)
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_ignore_collect(collection_path, config):
    """Import no file without a serial test in a run of serial tests: importing all files takes longer."""
    if config.option.markexpr.startswith("serial") and collection_path.name.startswith("test_"):
        return "mark.serial" not in collection_path.read_text() or None
    return None


def pytest_itemcollected(item):
    """Sample the examples of a property if slow tests are deselected; count it as slow in a run of slow tests.

    The number of examples in the settings of a property is that of `make test-long`, and of runs without ``-m``.
    """
    full = vars(item.function).setdefault("_full_settings", getattr(item.function, _SETTINGS, None))
    num_examples = max(_MIN_EXAMPLES, full.max_examples // _SAMPLED) if full else 0
    if full is None or full.max_examples <= num_examples:
        return
    if item.config.option.markexpr.startswith("slow"):
        item.add_marker("slow")
    elif "not slow" in item.config.option.markexpr:
        setattr(item.function, _SETTINGS, type(full)(full, max_examples=num_examples))
