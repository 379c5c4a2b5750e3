"""Memory of an operation, measured in a separate process.

The child process imports its modules and opens the collection before the operation starts. Meanwhile the parent reads
the child's memory every millisecond. Private and shared pages count. Pages of mapped files belong to the page cache,
which can reclaim them, so they are reported separately.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from benchmarks.support.library import PixelCache, decoded_bytes, images_of
from benchmarks.support.workload import Workload
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, open_images, write_images

Figures = dict[str, Any]
Image = np.ndarray[Any, Any]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Modules imported once for all processes, if installed. Pyarrow imports pandas at its first conversion.
_IMPORTED = ["omearrow_ds.loader.dataloader", "pandas", "pyarrow.pandas_compat", "pyarrow.dataset", "tifffile", "zarr"]
_LOOK_EVERY_S = 1e-3
_WORKERS = 4
_DISTINCT = 16  # Distinct images of a collection, which repeats shifted copies of them.


class Held(NamedTuple):
    """Memory of a process in bytes: private pages, shared pages, pages of mapped files, and the peak of their sum."""

    private_bytes: int
    shared_bytes: int
    mapped_bytes: int
    peak_bytes: int

    @property
    def own_bytes(self) -> int:
        """Bytes of private and shared pages, without the page cache."""
        return self.private_bytes + self.shared_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident pages."""
        return self.own_bytes + self.mapped_bytes


def held(pid: int | str = "self") -> Held:
    """Return the memory of a process from ``/proc``, or zeros if it has ended."""
    text = ""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in text.splitlines())
    names = ("RssAnon", "RssShmem", "RssFile", "VmHWM")
    return Held(*(int(lines.get(name, "0").split()[0]) * 1024 for name in names))


class Measured:
    """Operation in a fresh process, which is prepared by the constructor.

    The operation is a key of `_PREPARE`, and the arguments are those of its function.
    """

    def __init__(self, operation: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, operation, arguments))
        self._process.start()
        theirs.close()
        self.before: Held = self._answer()
        self.figures: Figures = {}

    def run(self) -> None:
        """Run the operation in the process, and record its memory meanwhile."""
        self._connection.send("start")
        most_bytes = 0
        while not self._connection.poll(_LOOK_EVERY_S):
            most_bytes = max(most_bytes, held(self._process.pid or 0).own_bytes)
        after, figures = self._answer()
        most_bytes = max(most_bytes, after.own_bytes)
        self.figures = {
            "growth_bytes": most_bytes - self.before.own_bytes,
            "mapped_bytes": after.mapped_bytes - self.before.mapped_bytes,
            "resident_bytes": after.peak_bytes - self.before.peak_bytes,
            **figures,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the measured process ended early, with code {self._process.exitcode}") from None


def shifted(few: Sequence[Image], count: int) -> Iterator[Image]:
    """Stream ``count`` images, each in new memory: cheap shifted copies of the images of `few_of`."""
    return (np.roll(few[index % len(few)], index) for index in range(count))


def few_of(workload: Workload) -> list[Image]:
    """Return the first images of a workload, from which `shifted` generates a collection."""
    return list(islice(workload.images(), _DISTINCT))


def _child(connection: Connection, operation: str, arguments: tuple[Any, ...]) -> None:
    act = _PREPARE[operation](*arguments)
    gc.collect()
    _forget_peak()
    connection.send(held())
    connection.recv()
    figures, result = act()
    connection.send((held(), figures))
    del result  # The result must live until its memory is read.


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _preload(path: Path, format_name: str) -> Callable[[], tuple[Figures, object]]:
    source: Any = open_images(path, format_name)
    return lambda: ({"decoded_bytes": decoded_bytes(source.shapes, source.dtypes)}, PixelCache.load(images_of(source)))


def _open(path: Path) -> Callable[[], tuple[Figures, object]]:
    def act() -> tuple[Figures, object]:
        start = perf_counter()
        source = open_images(path)
        return {"open_s": perf_counter() - start}, source

    return act


def _epoch(path: Path, format_name: str, batch_size: int) -> Callable[[], tuple[Figures, object]]:
    dataset = OMEArrowDataset(path, format_name, preload=False, axes="TCZYX")
    loader = OMEArrowDataLoader(dataset, batch_size, shuffle=True, num_workers=0)
    return partial(_growth_of_epoch, loader, dataset.nbytes)


def _growth_of_epoch(loader: OMEArrowDataLoader, size_bytes: int) -> tuple[Figures, None]:
    """Iterate over an epoch; report separately the growth of memory after the first tenth of its batches."""
    warm_up = -(-len(loader) // 10)
    own_bytes = []
    for batch in loader:
        del batch
        own_bytes.append(held().own_bytes)
    later_bytes = max(own_bytes[warm_up - 1 :]) - own_bytes[warm_up - 1]
    return {"later_bytes": later_bytes, "decoded_bytes": size_bytes}, None


def _workers(path: Path, format_name: str, batch_size: int) -> Callable[[], tuple[Figures, object]]:
    """Prepare an epoch with workers: preload the pixels, and start the server process that forks workers."""
    dataset = OMEArrowDataset(path, format_name, axes="TCZYX")
    for _ in OMEArrowDataLoader(dataset, batch_size, num_workers=1):
        break
    children = psutil.Process().children
    server_bytes = sum(map(_anonymous, children(recursive=True)))
    loader = OMEArrowDataLoader(dataset, batch_size, shuffle=True, num_workers=_WORKERS)

    def epoch() -> tuple[Figures, object]:
        batches = iter(loader)
        for batch in batches:
            del batch
        growth_bytes = sum(map(_anonymous, children(recursive=True))) - server_bytes
        return {"growth_bytes": growth_bytes, "decoded_bytes": dataset.nbytes}, batches

    return epoch


def _anonymous(process: psutil.Process) -> int:
    """Return the proportional set size (Pss) of a process's anonymous memory in bytes."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss_Anon:"))


def _write(path: Path, format_name: str, few: list[Image], count: int) -> Callable[[], tuple[Figures, object]]:
    images = shifted(few, count)
    size_bytes = 0

    def counted() -> Iterator[Image]:
        nonlocal size_bytes
        for image in images:
            size_bytes += image.nbytes
            yield image

    def write() -> tuple[Figures, None]:
        write_images(counted(), path, format_name)
        return {"decoded_bytes": size_bytes}, None

    return write


_PREPARE: Mapping[str, Callable[..., Callable[[], tuple[Figures, object]]]] = {
    "open": _open,
    "preload": _preload,
    "epoch": _epoch,
    "workers": _workers,
    "write": _write,
}
