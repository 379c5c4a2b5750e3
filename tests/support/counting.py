"""Counts of work that do not depend on the clock: allocated memory, function calls, requests to a store."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from torch.profiler import ProfilerActivity

import omearrow_ds

PACKAGE = str(Path(omearrow_ds.__file__).parent)
LEAST_BYTES = 4096  # Smaller arrays hold offsets and positions, not pixels.
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
# Functions that read a store, and the argument that names the requested data.
_ASKING = {
    "ParquetFile.read": "columns",
    "ParquetFile.read_row_group": "columns",
    "LanceDataset.take": "columns",
    "LanceDataset.to_batches": "columns",
    "LanceDataset.to_table": "columns",
    "LanceFragment.open_session": "columns",
    "FragmentSession.take": None,
    "SpiedConnection.execute": "query",
    "SpiedConnection.sql": "query",
    "VortexFile.scan": "projection",
}
_SYSTEM_CALLS = ("open", "close", "read", "pread", "preadv", "stat", "fstat", "lstat")
_VORTEX_CALLS = ("scalar_at", "take", "to_arrow_array")


class Memory(NamedTuple):
    """Bytes that NumPy and Arrow allocate in one operation, and the peak bytes of NumPy and Python.

    NumPy's bytes are those of arrays of `LEAST_BYTES` or more, in the calling thread. Pixels are copied only to
    allocated memory or to the caller's memory, so these bytes limit the copied bytes. Internal allocations of DuckDB,
    Lance and Vortex are not counted.
    """

    numpy_bytes: int
    arrow_bytes: int
    peak_bytes: int


class Calls(NamedTuple):
    """Calls of an operation in its thread: the package's own functions, calls into a store, and requests to it."""

    own: int
    store: dict[str, int]
    requests: list[str]
    scaled_bytes: int


def memory_of(operation: Callable[[], Any]) -> Memory:
    """Count the memory of an ``operation`` that ran before."""
    pool = pa.default_memory_pool()
    with _steady():
        before_bytes = pool.total_bytes_allocated()
        with _numpy_allocations() as sizes:
            operation()
        arrow_bytes = pool.total_bytes_allocated() - before_bytes
        tracemalloc.start()
        try:
            held_bytes = tracemalloc.get_traced_memory()[0]
            operation()
            peak_bytes = tracemalloc.get_traced_memory()[1] - held_bytes
        finally:
            tracemalloc.stop()
    return Memory(sum(size for size in sizes if size >= LEAST_BYTES), arrow_bytes, peak_bytes)


def torch_bytes_of(operation: Callable[[], Any]) -> int:
    """Count the bytes that torch allocates for an ``operation``, without NumPy memory that it wraps."""
    with _steady(), torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        operation()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


def calls_of(operation: Callable[[], Any]) -> Calls:
    """Count the calls of an ``operation``, without calls of the interpreter and within the backends.

    A comprehension is a function only before Python 3.12, so it never counts.
    """
    own: list[str] = []
    store: Counter[str] = Counter()
    requests: list[str] = []
    scaled: list[int] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            name = frame.f_code.co_qualname
            if frame.f_code.co_filename.startswith(PACKAGE):
                own.extend([name] * (frame.f_code.co_name not in _COMPREHENSIONS))
                scaled.extend([frame.f_locals["out"].nbytes] if name == "scale" else [])
            elif name in _ASKING:
                store[name] += 1
                requests.extend([_text(frame.f_locals[_ASKING[name]])] if _ASKING[name] else [])
        elif event == "c_call" and _of_store(called):
            store[called.__name__] += 1

    with _steady():
        sys.setprofile(note)
        try:
            operation()
        finally:
            sys.setprofile(None)
    return Calls(len(own), dict(store), requests, sum(scaled))


def _text(request: Any) -> str:
    """Return a request in short: names of columns, the selection of a query, or the path of a Vortex expression."""
    if isinstance(request, list):
        return ", ".join(request)
    selected = re.match("SELECT (.*?) FROM", str(request))
    fields = re.findall(r'FieldName\("(\w+)"\)', str(request))
    return selected[1] if selected else ".".join(reversed(fields))


def _of_store(called: Any) -> bool:
    """Return whether a builtin function reads: a system call, or a call that decodes Vortex arrays."""
    if called.__module__ == os.open.__module__:
        return called.__name__ in _SYSTEM_CALLS
    return type(called.__self__).__module__.startswith("vortex") and called.__name__ in _VORTEX_CALLS


class SpiedConnection:
    """A DuckDB connection whose queries are calls of Python functions, so that they can be counted."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def cursor(self) -> SpiedConnection:
        return SpiedConnection(self._connection.cursor())

    def sql(self, query: str) -> Any:
        return self._connection.sql(query)

    def execute(self, query: str, *parameters: Any) -> Any:
        return self._connection.execute(query, *parameters)


@contextmanager
def _steady() -> Iterator[None]:
    """Disable garbage collection and threads, whose allocations and calls would not be counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


class _Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")]


class _Handler(ctypes.Structure):
    """``PyDataMem_Handler`` of NumPy's C API."""

    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator)]


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_MALLOC = ctypes.PYFUNCTYPE(_POINTER, _POINTER, _SIZE)
_TWO_SIZES = ctypes.PYFUNCTYPE(_POINTER, _POINTER, _SIZE, _SIZE)
_REALLOC = ctypes.PYFUNCTYPE(_POINTER, _POINTER, _POINTER, _SIZE)
_capsule_pointer = ctypes.PYFUNCTYPE(_POINTER, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, _POINTER, ctypes.c_char_p, _POINTER)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Counting:
    """NumPy's own allocator, which also records sizes. NumPy frees the memory, so arrays may outlive this."""

    def __init__(self) -> None:
        table = ctypes.cast(_capsule_pointer(np._core.multiarray._ARRAY_API, None), ctypes.POINTER(_POINTER))
        self.set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[304])  # PyDataMem_SetHandler
        plain = ctypes.PYFUNCTYPE(ctypes.py_object)(table[305])()  # PyDataMem_GetHandler
        self.sizes: list[int] = []
        self._handler = _Handler.from_buffer_copy(_Handler.from_address(_capsule_pointer(plain, b"mem_handler")))
        allocator = self._handler.allocator
        malloc, calloc, realloc = _MALLOC(allocator.malloc), _TWO_SIZES(allocator.calloc), _REALLOC(allocator.realloc)

        def noted_malloc(context, size):
            self.sizes.append(size)
            return malloc(context, size)

        def noted_calloc(context, count, size):
            self.sizes.append(count * size)
            return calloc(context, count, size)

        def noted_realloc(context, pointer, size):
            self.sizes.append(size)
            return realloc(context, pointer, size)

        self._callbacks = _MALLOC(noted_malloc), _TWO_SIZES(noted_calloc), _REALLOC(noted_realloc)
        for name, function in zip(("malloc", "calloc", "realloc"), self._callbacks, strict=True):
            setattr(allocator, name, ctypes.cast(function, _POINTER).value)
        self.capsule = _new_capsule(ctypes.addressof(self._handler), b"mem_handler", None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # It is never freed, because it frees arrays until exit.


_counting = _Counting()


@contextmanager
def _numpy_allocations() -> Iterator[list[int]]:
    """Yield the list of the bytes of each array that NumPy allocates in this thread."""
    sizes = _counting.sizes = []
    before = _counting.set(_counting.capsule)
    try:
        yield sizes
    finally:
        _counting.set(before)
