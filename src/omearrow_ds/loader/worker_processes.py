"""Worker processes, forked from a server with all imports, without running the main script again.

Forking the main process is unsafe: storage libraries have threads and handles that do not survive a fork (DuckDB over
Parquet hung 3 of 3, LanceDB hung or crashed). Python's forkserver is safe, but all users share one server, and each
worker imports torch again and runs the main script, which then needs a ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import current_process, get_all_start_methods, spawn, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.popen_forkserver import Popen
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from typing import Any

import cloudpickle
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from omearrow_ds.dataset import shared_memory
from omearrow_ds.errors import ArgumentError
from omearrow_ds.kernels.compiled import pending_jit_loops
from omearrow_ds.resources import end_with_parent

START_METHOD = "omearrow_ds forkserver"
_IMPORTED = ("torch", "pyarrow", "omearrow_ds.loader.dataloader")  # Importing omearrow_ds does not import torch.
_ARROW_MODULES = ("pandas", "pyarrow.pandas_compat", "pyarrow.dataset")
_IMPORTED_IF_USED = (*_ARROW_MODULES, "tifffile", "imagecodecs", "imagecodecs._blosc", "zarr", "numba")
_UNSAFE_TO_FORK = ("lance", "lancedb", "duckdb", "vortex")
UNPICKLABLE = (TypeError, AttributeError, ValueError, LookupError, RuntimeError, ImportError, pickle.PickleError)
_MAIN_SCRIPT = ("init_main_from_path", "init_main_from_name")


def worker_context() -> BaseContext | None:
    return _WorkerContext() if "forkserver" in get_all_start_methods() else None


def warn_of_fork(method: str) -> None:
    loaded = [name for name in _UNSAFE_TO_FORK if name in sys.modules]
    if method == "fork" and loaded:
        problem = f"threads and handles of {', '.join(loaded)} do not survive a fork, so workers may hang or crash"
        msg = f"multiprocessing_context='fork': {problem}; leave out multiprocessing_context"
        warnings.warn(msg, UserWarning, stacklevel=5)


def refuse_in_daemon(num_workers: int) -> None:
    if current_process().daemon:
        such = "such as a worker of multiprocessing.Pool, Dask or a DataLoader"
        problem, remedy = f"a daemonic process, {such}, cannot start workers", "pass num_workers=0 or 'auto'"
        raise ArgumentError(problem, option="num_workers", value=num_workers, remedy=remedy)


class _Process(ForkServerProcess):
    """A worker that ends with its parent, also if that is killed."""

    main_objects: Any = None
    environment: dict[str, str] | None = None

    @staticmethod
    def _Popen(process: Any) -> Popen:  # noqa: N802  # Name from multiprocessing.
        return _Popen(process)

    def run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            end_with_parent()
            os.environ.update(self.environment or {})  # Variables may have changed since the server started.
            shared_memory.enable_shared_memory_transfer()
            # Workers pickle results by name, so they need the classes of the main script.
            names = vars(sys.modules["__main__"])
            names.update({name: value for name, value in self.main_objects.items() if name not in names})
            super().run()


class _Results(Queue):  # type: ignore[type-arg]  # Generic only in its stubs.
    """A queue in which a worker sends an error in place of a batch that cannot be pickled.

    The pipe outlives the queue. The garbage collector finalizes torch's iterator in a reference cycle and both ends of
    the pipe in any order, but the iterator still sends to workers then. The sending thread would then close the same
    descriptors again, which may belong to another file.
    """

    def __init__(self, maxsize: int, *, ctx: BaseContext) -> None:
        super().__init__(maxsize, ctx=ctx)
        ends = self._reader, self._writer  # type: ignore[attr-defined]  # Not in its stubs.
        weakref.finalize(self, tuple, ends).atexit = False  # Its arguments are never garbage.

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if get_worker_info() is None:
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
            return
        raised = (type(error), error, error.__traceback__)
        origin = "in a DataLoader worker, sending the result of collate_fn"
        self.put((item[0], ExceptionWrapper(raised, origin)))  # type: ignore[no-untyped-call]


class _WorkerContext(ForkServerContext):
    Process = _Process

    def Queue(self, maxsize: int = 0) -> _Results:  # noqa: N802  # Name from multiprocessing.
        return _Results(maxsize, ctx=self.get_context())

    def __repr__(self) -> str:
        return START_METHOD


@functools.cache
def _server(pid: int) -> ForkServer:
    """Return the server of this process, ``pid``; a forked child cannot use its parent's."""
    del pid
    server = ForkServer()
    used = (name for name in _IMPORTED_IF_USED if name in sys.modules)
    server.set_forkserver_preload([*_IMPORTED, *used, *pending_jit_loops()])
    return server


class _Popen(Popen):
    """`multiprocessing.popen_forkserver.Popen` with our server, and without the main script."""

    def _launch(self, process: Any) -> None:
        described = spawn.get_preparation_data(process.name)
        buffer, pickled = io.BytesIO(), io.BytesIO()
        pickler = _WorkerPickler(pickled)
        process.environment = dict(os.environ)
        process.main_objects = PickledCall(dict, pickler.main_objects)  # The last attribute, so it is pickled last.
        set_spawning_popen(self)
        try:
            ForkingPickler(buffer).dump({name: value for name, value in described.items() if name not in _MAIN_SCRIPT})
            pickler.dump(process)
        except UNPICKLABLE as error:
            problem = f"the dataset, collate_fn or worker_init_fn cannot be pickled for a worker: {error}"
            remedy = "remove locks, open files and handles from their attributes, or pass num_workers=0"
            raise ArgumentError(problem, option="num_workers", remedy=remedy) from error
        finally:
            set_spawning_popen(None)
        pickle.dump(PickledCall(_rebuild_process, pickled.getvalue()), buffer)
        self.sentinel, writing = _server(os.getpid()).connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        keep_open = os.dup(writing)  # The worker sees its other end close when this process ends.
        self.finalizer = util.Finalize(self, util.close_fds, (keep_open, self.sentinel))  # type: ignore[attr-defined]
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(buffer.getbuffer())
        del pickler  # It owns temporary objects, such as shared generator states, until they are sent.
        self.pid = read_signed(self.sentinel)


class PickledCall:
    """An object that is unpickled by calling ``function(*arguments)``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _rebuild_process(pickled: bytes) -> _Process:
    """Return the unpickled process; exit if its parent has ended and its semaphores are missing."""
    try:
        process: _Process = pickle.loads(pickled)  # noqa: S301  # Pickled by this module.
    except FileNotFoundError as error:
        modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if modules[-1] == SemLock.__module__:
            raise SystemExit(1) from None
        raise
    return process


class _WorkerPickler(cloudpickle.Pickler):  # type: ignore[misc]  # Untyped.
    """Pickler of the main script's functions and classes by value, and of shared objects like `ForkingPickler`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.main_objects: dict[str, Any] = {}
        self._reducers = ForkingPickler(io.BytesIO()).dispatch_table

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            name = value.__qualname__
            if getattr(sys.modules["__main__"], name, None) is value:
                self.main_objects[name] = value
        reduce: Callable[[Any], Any] | None = self._reducers.get(type(value))
        return super().reducer_override(value) if reduce is None else reduce(value)
