"""Options of collections in parts, their executors, and ``omearrow-ds publish``."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import (
    FORMAT,
    PATH,
    Decorator,
    all_of,
    echo_json,
    flags,
    json_option,
    opening_options,
    storage_options,
)
from omearrow_ds.options import LAYOUT, PARTS, WriteSettings
from omearrow_ds.storage import listed, source
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.describe import Description, describe
from omearrow_ds.storage.fields import warn_of_layout
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.jobs import return_memory
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.writing import Target

_CONNECT_S, _AGAIN_S = 30, 0.1
_HOW = "write local:8 for local processes, dask:tcp://HOST:PORT or dask:SCHEDULER_FILE"


def writing_options(src: str) -> Decorator:
    """Add the options of a command that writes a collection DST; ``src`` is the name of its source in the help."""
    return all_of(
        click.option("--format", "format", type=FORMAT, help="Format of DST; by default from its suffix."),
        flags(WriteSettings, *LAYOUT),
        click.option("--src-format", type=FORMAT, help=f"Format of {src}; by default detected."),
        opening_options,
        click.option("--overwrite", is_flag=True, help="Replace DST when the new one is complete."),
        flags(WriteSettings, *PARTS),
        storage_options("target-"),
        json_option,
    )


class Writing:
    """One run of a command that writes a collection; ``opening`` are the options of its source."""

    def __init__(
        self, src: Path, dst: Path, *, src_format: str | None, executor: str | None, as_json: bool, **options: Any
    ) -> None:
        self._start_s = time.perf_counter()
        opening = {name: options.pop(name) for name in OpenOptions.__annotations__ if name in options}
        self.opening = cast(OpenOptions, opening)
        storage = target_storage(src, dst, self.opening.get("storage"), options["target_storage"])
        self._keywords = {**options, "target_storage": storage, "progress": not as_json and sys.stderr.isatty()}
        self._src, self._src_format, self._dst = src, src_format, dst
        self._executor, self._as_json = executor, as_json
        self._settings = WriteSettings.take(self._keywords)
        Target.choose(dst, options["format"], self._settings)  # Before the source, which can take long to open.

    @contextmanager
    def open(self) -> Iterator[tuple[CollectionSource, dict[str, Any]]]:
        """Open the source, start the executor, and yield the source and the keywords of the library function."""
        warn_of_layout(self._src, self.opening)
        skips_errors = self._settings.skips_errors
        with failures.naming(format="--src-format"):
            images = open_source(self._src, self._src_format, skip_errors=skips_errors, **self.opening)
        return_memory()
        with CollectionSource(images) as source, executor_of(self._executor) as executor:
            yield source, {**self._keywords, "executor": executor}

    def report(self, noun: str, paths: Mapping[str, Path], details: Mapping[str, Any] | None = None) -> bool:
        """Print the result, and return whether the printed line describes a complete collection.

        ``noun`` is that of an image, and of its sources if it has them, such as ``"crop of 2 fields"``.
        """
        elapsed_s, settings = time.perf_counter() - self._start_s, self._settings
        if settings.task is not None:
            tell_share(self._dst, settings.task, settings.target_storage, elapsed_s, as_json=self._as_json)
            return False
        written = describe(self._dst, self._keywords["format"], storage=settings.target_storage)
        if self._as_json:
            absolute = {name: str(path.absolute()) for name, path in paths.items()}
            echo_json({**absolute, "seconds": elapsed_s, "written": written.as_dict(), **(details or {})})
            return False
        click.echo(f"{click.format_filename(self._dst)}: {in_words(written, noun)}, in {text.duration(elapsed_s)}")
        return True


def target_storage(src: Path, dst: Path, storage: Storage | None, target: Storage | None) -> Storage | None:
    """Return the storage of the target; by default, a copy within S3 uses the storage of the source."""
    if isinstance(src, Url):
        is_within_s3 = isinstance(dst, Url) and src.scheme == dst.scheme == "s3"
        return replace(storage, anonymous=False) if is_within_s3 and storage and target is None else target
    if storage is not None and isinstance(dst, Url) and (src.is_dir() or not listed.lists_files(src)):
        options = " ".join(text.as_flags({"storage": storage}))
        raise failures.Failure(
            f"{options}: only valid for a source URL; use --target-endpoint and similar options for {dst}"
        )
    return target


def in_words(written: Description, noun: str = "image") -> str:
    """Describe the written collection in words: number of images, size and format."""
    size = f"{text.size(written.disk_bytes)} ({text.size(written.decoded_bytes)} decoded)"
    image, *origin = noun.partition(" of ")
    return f"{text.count(written.images, image)}{''.join(origin)}, {size}, {written.format_label}"


@contextmanager
def executor_of(executor_name: str | None) -> Iterator[Executor | None]:
    """Start the executor or connect to the cluster that ``--executor`` names; close the connection at the end."""
    kind, _, which = (executor_name or "").partition(":")
    if executor_name is None:
        yield None
    elif kind == "local" and which.isdecimal() and int(which):
        with ProcessPoolExecutor(
            int(which), mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
        ) as pool:
            yield pool
    elif kind == "dask" and which:
        yield from _of_dask(which)
    else:
        raise failures.Failure(f"--executor {executor_name}: unknown executor; {_HOW}")


def _of_dask(which: str) -> Iterator[Executor]:
    try:
        from distributed import Client  # noqa: PLC0415  # The import takes 1 s, and Dask is optional.
        from distributed.comm.addressing import resolve_address  # noqa: PLC0415
    except ImportError as error:
        raise failures.Failure(
            f"--executor dask:{which}: Dask is not installed; run pip install 'omearrow-ds[dask]'"
        ) from error
    try:
        address = which if "://" in which else _address_in(Path(which))
        resolve_address(address)  # A client takes a minute to reject an invalid address.
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # TypeError: tls:// without TLS settings of Dask.
        raise failures.Failure(f"--executor dask:{which}: no scheduler answers: {error}") from error
    with client:
        yield client.get_executor()


def _address_in(file: Path) -> str:
    """Return the address in a scheduler file; wait at most 30 s until it is written, whereas Dask waits forever."""
    end_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > end_s:
                why = "no such file" if isinstance(error, OSError) else "not a scheduler file"
                raise ValueError(f"{why} after {_CONNECT_S} s; {_HOW}") from error
            time.sleep(_AGAIN_S)


def _begin_worker() -> None:
    """Ignore Ctrl-C, which only the main process handles, and end this worker when the main process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def tell_share(dst: Path, task: tuple[int, int], storage: Storage | None, elapsed_s: float, *, as_json: bool) -> None:
    """Print the progress of a collection in parts after one task wrote its share."""
    target = source.parts_target(dst, storage)
    total = (target.plan or {"parts": 0})["parts"]
    num_ready = total if target.is_published else len(target.finished_parts())
    if as_json:
        counts = {"share": "{}/{}".format(*task), "made": num_ready, "parts": total}
        echo_json({"path": str(dst.absolute()), **counts, "seconds": elapsed_s})
        return
    words = ["omearrow-ds", "publish", str(dst), *text.as_flags({"storage": storage})]
    rest = f"publish it: {shlex.join(words)}" if num_ready == total else "publish it after all parts are written"
    progress = f"{num_ready:,} of {text.count(total, 'part')} {'is' if total == 1 else 'are'} written"
    share = "task {} of {}".format(*task)
    click.echo(f"{click.format_filename(dst)}: {share} in {text.duration(elapsed_s)}; {progress}; {rest}")


@click.command()
@click.argument("dst", type=PATH)
@storage_options(owner="DST")
@json_option
def publish(dst: Path, storage: Storage | None, *, as_json: bool) -> None:
    """Complete a collection whose parts were written with --task.

    If parts are missing, the error lists them. If the collection is already published, nothing happens, so that a job
    can be repeated. In a SLURM array, each task runs convert SRC DST --task $SLURM_ARRAY_TASK_ID/384.

    \b
    Examples:
      omearrow-ds publish plate1.parts
      omearrow-ds publish s3://bucket/plate1.parts --profile lab
    """
    already = source.parts_target(dst, storage).is_finished
    if not already:
        source.publish(dst, storage=storage)
    written = describe(dst, storage=storage)
    if as_json:
        echo_json({"written": written.as_dict()})
        return
    click.echo(f"{click.format_filename(dst)}: {'is published already; ' if already else ''}{in_words(written)}")
