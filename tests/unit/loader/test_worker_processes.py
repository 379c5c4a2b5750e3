"""Workers: every format with every start method, without a main guard, killed, and interrupted."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.synchronize import SemLock
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from omearrow_ds import ArgumentError, FormatError, OMEArrowDataLoader, OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.loader import worker_processes
from omearrow_ds.loader.worker_processes import _rebuild_process, warn_of_fork
from tests.support.errors import raises, warns
from tests.support.loops import made_by
from tests.support.strategies import NAMES, NAMES_OR_LONG, image_of, same

LARGE = (1, 1, 1, 64, 130)  # At least 16 KiB per batch, so it is sent in a shared block.
pytestmark = pytest.mark.timeout(180)


def stacked(dataset, batches):
    return [torch.stack([dataset[index] for index in batch]) for batch in batches]


def equal(batches, expected):
    return len(batches) == len(expected) and all(map(torch.equal, batches, expected))


@pytest.fixture
def numbered(stored):
    """Store images whose pixels encode the image number."""

    def store(name, count=7, shape=LARGE, **kwargs):
        return stored(name, [image_of(shape, "uint16", number) for number in range(count)], **kwargs)

    return store


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_an_epoch_is_that_of_the_process_itself(numbered, name):
    dataset = OMEArrowDataset(numbered(name), preload=False)
    expected = stacked(dataset, [[0, 1, 2], [3, 4, 5], [6]])  # Open a handle before workers start.
    assert equal(list(OMEArrowDataLoader(dataset, 3, num_workers=0)), expected)
    loader = OMEArrowDataLoader(dataset, 3, num_workers=2, timeout=120)
    for _ in range(2):
        assert equal(list(loader), expected)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_epoch_of_every_format_by_pythons_own_start_methods(numbered, method):
    """One worker, as it may have to import torch itself."""
    parts = [OMEArrowDataset(numbered(name, count=3), preload=False) for name in NAMES]
    expected = [torch.stack([part[index] for index in range(3)]) for part in parts]
    loader = OMEArrowDataLoader(ConcatDataset(parts), 3, num_workers=1, timeout=120, multiprocessing_context=method)
    for _ in range(2):
        assert equal(list(loader), expected)


TURNS = pytest.mark.parametrize("turns", [2, pytest.param(20, marks=pytest.mark.slow)])


@TURNS
@pytest.mark.parametrize("name", ["duckdb", pytest.param("parquet_duck", marks=pytest.mark.slow), "lance"])
def test_the_worst_never_hang(numbered, name, turns):
    dataset = OMEArrowDataset(numbered(name), preload=False)
    expected = stacked(dataset, [[0, 1, 2], [3, 4, 5], [6]])
    for _ in range(turns):
        assert equal(list(OMEArrowDataLoader(dataset, 3, num_workers=2, timeout=60)), expected)


PLAIN = """
import sys, torch
from torch.utils.data import DataLoader
from omearrow_ds import OMEArrowDataset
for path in sys.argv[2:]:
    dataset = OMEArrowDataset(path, preload=False)
    wanted = [dataset[index] for index in range(7)]
    for _ in range(int(sys.argv[1])):
        loader = DataLoader(dataset, 3, num_workers=2, timeout=60, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(loader)), torch.stack(wanted)), path
    print("equal")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
@TURNS
def test_torchs_own_loader_forks_and_reads(programs, numbered, turns):
    """A separate process: Lance, once imported, warns of every fork, and threads of pytest would count."""
    paths = [numbered(name) for name in ("arrow", "duckdb", "parquet_duck", "vortex", "lance")]
    done = programs.run(PLAIN, turns, *paths, timeout_s=170)
    assert done.stdout == "equal\n" * len(paths), done.stderr


UNGUARDED = """
import collections, sys, torch
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset

class Pair(collections.namedtuple("Pair", "image label")):
    pass

offset = 2.0

def moved(image):
    return image + offset

class Scaled:
    def __call__(self, image):
        return moved(image) * 3

def paired(samples):
    return Pair(torch.stack(samples), len(samples))

dataset = OMEArrowDataset(sys.argv[1], preload=False, transform=Scaled())
for batch in OMEArrowDataLoader(dataset, 4, num_workers=2, collate_fn=paired, timeout=60):
    assert type(batch) is Pair
    assert torch.equal(batch.image[0], (OMEArrowDataset(sys.argv[1])[0 if batch.label == 4 else 4] + 2) * 3)
plain = OMEArrowDataset(sys.argv[1], transform=lambda image: image - offset)
assert len(list(OMEArrowDataLoader(plain, 4, num_workers=1, worker_init_fn=lambda number: None))) == 2
print("done", __name__)
"""


def test_a_script_or_a_notebook_needs_no_guard_and_its_functions_are_transforms(programs, numbered, tmp_path):
    """A notebook's cell is compiled in a main module without a file, as in the last line here."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    code = f"""if True:
        import warnings
        warnings.simplefilter("error")
        __file__, code = {str(script)!r}, {UNGUARDED!r}
        exec(compile(code, __file__, "exec"))
        del __file__
        exec(compile(code, "<cell>", "exec"))
    """
    done = programs.run(code, numbered("parquet"), has_workers=True)
    assert done.stdout == "done __main__\n" * 2, done.stderr


def test_what_cannot_be_sent_is_named(numbered):
    lock = threading.Lock()
    dataset = OMEArrowDataset(numbered("arrow"), transform=lambda image: image if lock else None)
    with raises(ArgumentError, mentions=("lock", "num_workers=0")):
        list(OMEArrowDataLoader(dataset, 3, num_workers=1))


def failing(image):
    if image.max() > 0:
        raise ValueError("this image is odd")
    return image


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [OMEArrowDataLoader, DataLoader])
def test_an_error_says_where_it_was_raised(stored, kind, workers):
    images = [np.full((6, 7), value, np.uint16) for value in (0, 0, 0, 5, 0)]
    path = stored("vortex", images)
    context = {"multiprocessing_context": "forkserver"} if workers and kind is DataLoader else {}
    dataset = OMEArrowDataset(path, transform=failing)
    batches = iter(kind(dataset, 5, num_workers=workers, **context))
    with pytest.raises(ValueError, match="is odd") as raised:
        next(batches)
    if context:
        batches._shutdown_workers()  # Without this, torch's iterator waits 5 s for its worker.
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert f"creating sample 3 of {path} (format vortex)" in text


def test_an_unreadable_image_in_a_worker_is_named(stored):
    path = stored("tiff", [image_of((6, 7), "uint16", number) for number in range(4)])
    dataset = OMEArrowDataset(path, preload=False)
    file = sorted(path.glob("*.tif"))[2]
    file.write_bytes(b"II*\0")
    loader = OMEArrowDataLoader(dataset, 2, num_workers=1)
    with raises(FormatError, path=file, mentions=("2, 3", "tiff"), remedy=False):
        list(loader)


def test_a_killed_worker_is_an_error_within_seconds_and_the_loader_goes_on(numbered):
    loader = OMEArrowDataLoader(OMEArrowDataset(numbered("arrow", count=40)), 2, num_workers=2)
    batches = iter(loader)
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"worker.* exited unexpectedly|killed"):
        list(batches)
    assert time.monotonic() - start < 30
    del batches
    assert len(list(loader)) == 20


ENDLESS = """
import multiprocessing, os, sys, time
import torch
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset

multiprocessing.current_process()._config["semprefix"] = f"/endless{os.getpid()}"

os.setpgrp()

def slow(image):
    time.sleep(0.05)
    return image

dataset = OMEArrowDataset(sys.argv[1], transform=slow)
endless = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=10**6)
batches = iter(OMEArrowDataLoader(dataset, 2, sampler=endless, num_workers=2))
next(batches)
print(*[worker.pid for worker in batches._workers], flush=True)
# No loader starts from here on: between making a semaphore and telling its tracker, Python itself would leave it.
for batch in batches:
    pass
"""


def shared_files():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208


def semaphores_of(program):
    """Return the named semaphores of a program; they have no names under fork."""
    return [name for name in shared_files() if name.startswith(f"sem.endless{program.pid}-")]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder here")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_nothing_outlives_a_program_that_was_ended(programs, numbered, number):
    program = programs.start(ENDLESS, numbered("arrow", count=20), has_workers=True)
    workers = [psutil.Process(int(pid)) for pid in program.first_line().split()]
    everyone = [*workers, *psutil.Process(program.pid).children(recursive=True)]
    assert len(workers) == 2
    assert semaphores_of(program)
    # A terminal signals the whole foreground process group.
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    assert program.wait().returncode != 0
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    deadline = time.monotonic() + 30  # After a kill, the resource tracker of multiprocessing removes the semaphores.
    while semaphores_of(program) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not semaphores_of(program)


def test_worker_ends_without_a_traceback_when_it_is_interrupted_before_torchs_loop(capfd):
    class Interrupted(dict):
        def __iter__(self):
            raise KeyboardInterrupt

    process = worker_processes.worker_context().Process(target=pytest.fail, args=("the loop began",))
    process.environment = Interrupted(A="1")
    process.run()
    assert capfd.readouterr() == ("", "")


def test_200_loaders_leave_nothing(numbered):
    dataset = OMEArrowDataset(numbered("arrow"))
    me = psutil.Process()

    def resources():
        maps = Path("/proc/self/maps").read_text().split()  # Other programs have files in /dev/shm too.
        mapped = {path for path in maps if path.startswith("/dev/shm/")}
        return me.num_fds(), me.num_threads(), len(me.children(recursive=True)), len(mapped)

    def use(workers):
        return [list(OMEArrowDataLoader(dataset, 3, num_workers=workers, persistent_workers=workers > 0, device="cpu"))]

    use(0), use(1)
    before = resources()
    for number in range(200):
        use(int(number % 10 == 0))
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(resources(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(now <= then for now, then in zip(resources(), before, strict=True)), (before, resources())


def test_a_start_method_that_may_hang_is_warned_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", object())
    with warns(UserWarning, option="multiprocessing_context", mentions="lancedb") as warned:
        warn_of_fork("fork")
    assert len(warned) == 1
    warn_of_fork("spawn")
    monkeypatch.setattr("omearrow_ds.loader.worker_processes._UNSAFE_TO_FORK", ())
    warn_of_fork("fork")


def test_the_users_start_method_is_used_and_the_global_one_left(numbered):
    method = torch.multiprocessing.get_start_method(allow_none=True)
    dataset = OMEArrowDataset(numbered("arrow"))
    loader = OMEArrowDataLoader(dataset, 3, num_workers=1, multiprocessing_context="spawn")
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.settings["multiprocessing_context"].why == "as given"
    assert OMEArrowDataLoader(dataset, 3, num_workers=1).multiprocessing_context.get_start_method() == "forkserver"
    assert torch.multiprocessing.get_start_method(allow_none=True) == method


def rendered(image):
    """Add numbers from all three generators that transforms use to an image."""
    import random

    return image * 0 + torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])[:, None, None]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_are_the_seeds(numbered, workers):
    dataset = OMEArrowDataset(numbered("arrow", count=8, shape=(1, 3, 1, 2, 2)), transform=rendered)

    def epochs():
        import random

        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        loader = OMEArrowDataLoader(dataset, 2, shuffle=True, num_workers=workers, timeout=60 if workers else 0)
        return [torch.cat(list(loader)) for _ in range(3)]

    first = epochs()
    assert all(map(torch.equal, first, epochs()))
    drawn = [epoch[:, generator, 0, 0] for epoch in first for generator in range(3)]
    assert len({value for values in drawn for value in values.tolist()}) == 9 * 8


@pytest.mark.parametrize(("generator", "persistent"), [(False, False), (True, True)])
def test_the_order_is_the_seeds_alone(numbered, generator, persistent):
    """Draws in workers and in the program do not change the order; the first epoch has torch's own order."""
    path = numbered("arrow", count=12, shape=(1, 3, 1, 2, 2), columns={"number": [*range(12)]})
    dataset = OMEArrowDataset(path, transform=rendered, target="number")

    def orders(workers, kind=OMEArrowDataLoader, **kwargs):
        torch.manual_seed(5)
        options = {"generator": torch.Generator().manual_seed(9)} if generator else {}
        loader = kind(dataset, 5, shuffle=True, num_workers=workers, **options, **kwargs)
        return [torch.cat([numbers for _, numbers in loader]).tolist() for _ in range(3)]

    expected = orders(0)
    assert sorted(expected[0]) == [*range(12)]
    assert expected[0] != expected[1] != expected[2]
    assert orders(0, DataLoader)[0] == expected[0]
    assert orders(2, persistent_workers=persistent) == expected


def test_numpy_datasets_arrive_as_tensors(numbered):
    dataset = OMEArrowDatasetNumpy(numbered("arrow"), normalize=False)
    (batch,) = OMEArrowDataLoader(dataset, 7, num_workers=1, timeout=60)
    assert same(batch.numpy(), np.stack([dataset[index] for index in range(7)]))


class Unpickled:
    """An object that calls a function when it is unpickled."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call, ()


def semaphore_that_is_gone():
    SemLock.__new__(SemLock).__setstate__((0, 0, 1, "/omearrow-ds-none-such"))


def file_that_is_missing():
    Path("/no/such/file").read_bytes()


def test_a_worker_whose_program_has_ended_meanwhile_says_nothing():
    """Regression: a traceback followed 'stopped' if Ctrl-C ended a program during the start of its workers."""
    with pytest.raises(SystemExit):
        _rebuild_process(pickle.dumps(Unpickled(semaphore_that_is_gone)))
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        _rebuild_process(pickle.dumps(Unpickled(file_that_is_missing)))


def local(samples):
    class Local:
        pass

    return Local()


def test_a_batch_that_cannot_be_pickled_is_an_error(numbered):
    with raises(Exception, mentions=("collate_fn", "Local"), remedy=False):
        list(OMEArrowDataLoader(OMEArrowDataset(numbered("arrow")), 3, num_workers=1, collate_fn=local, timeout=60))


def environment_value(samples):
    return os.environ.get("OMEARROW_DS_TOLD")


def test_workers_know_the_environment(numbered, monkeypatch):
    dataset = OMEArrowDataset(numbered("arrow"))
    list(OMEArrowDataLoader(dataset, 8, num_workers=1, timeout=60))
    monkeypatch.setenv("OMEARROW_DS_TOLD", "late")
    assert list(OMEArrowDataLoader(dataset, 8, num_workers=1, collate_fn=environment_value, timeout=60)) == ["late"]


@pytest.mark.parametrize("which", ["numba", "numpy"])
def test_workers_are_forked_from_where_numba_is_ready_if_they_will_need_it(programs, which):
    with made_by(which):
        imported = worker_processes._server.__wrapped__(0)._preload_modules
    assert ("omearrow_ds.kernels.ready" in imported) == (which == "numba")
    if which == "numba":
        code = "import sys, omearrow_ds.kernels.ready; print('llvmlite.binding' in sys.modules)"
        assert programs.run(code).stdout.split() == ["True"]
