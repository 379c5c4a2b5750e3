"""Options of collections in parts, their executors, and ``omearrow-ds publish`` and ``cache``."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
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
    echo,
    flags,
    json_option,
    opening_options,
    read_by,
    size_in_bytes,
    storage_options,
)
from omearrow_ds.options import LAYOUT, PARTS, WriteSettings
from omearrow_ds.storage import listed, source
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.describe import Description, describe
from omearrow_ds.storage.fields import warn_of_layout
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.jobs import return_memory
from omearrow_ds.storage.part_cache import PARTIAL, PartCache, default_folder
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.writing import Target

_CONNECT_S, _AGAIN_S = 30, 0.1
# State of a cached file by whether it is pinned, and whether it is incomplete.
_USES = {(True, True): "being fetched", (True, False): "in use", (False, True): "left unfinished", (False, False): ""}
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

    def report(self, noun: str, paths: Mapping[str, Path], more: Sequence[str] = (), **details: Any) -> None:
        """Print the result, with ``more`` lines or ``details`` in JSON if the collection is complete.

        ``noun`` is that of an image, and of its sources if it has them, such as ``"crop of 2 fields"``.
        """
        elapsed_s, settings = time.perf_counter() - self._start_s, self._settings
        if settings.task is not None:
            tell_share(self._dst, settings.task, settings.target_storage, elapsed_s, as_json=self._as_json)
            return
        written = describe(self._dst, self._keywords["format"], storage=settings.target_storage)
        absolute = {name: str(path.absolute()) for name, path in paths.items()}
        values = {**absolute, "seconds": elapsed_s, "written": written.as_dict(), **details}
        line = f"{click.format_filename(self._dst)}: {in_words(written, noun)}, in {text.duration(elapsed_s)}"
        echo(values, line, *more, as_json=self._as_json)


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
    counts = {"share": "{}/{}".format(*task), "made": num_ready, "parts": total}
    words = ["omearrow-ds", "publish", str(dst), *text.as_flags({"storage": storage})]
    rest = f"publish it: {shlex.join(words)}" if num_ready == total else "publish it after all parts are written"
    progress = f"{num_ready:,} of {text.count(total, 'part')} {'is' if total == 1 else 'are'} written"
    share = f"{click.format_filename(dst)}: {'task {} of {}'.format(*task)} in {text.duration(elapsed_s)}"
    values = {"path": str(dst.absolute()), **counts, "seconds": elapsed_s}
    echo(values, f"{share}; {progress}; {rest}", as_json=as_json)


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
    line = f"{click.format_filename(dst)}: {'is published already; ' if already else ''}{in_words(written)}"
    echo({"written": written.as_dict()}, line, as_json=as_json)


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--limit",
    callback=read_by(size_in_bytes),
    metavar="BYTES",
    help="Evict the oldest parts down to this size, e.g. 100GB.",
)
@click.option("--clear", is_flag=True, help="Evict all parts that no process uses.")
@json_option
def cache(folder: Path | None, *, limit: int | None, clear: bool, as_json: bool) -> None:
    """List the parts in a part cache: the folder of --part-cache or part_cache=, or the default folder.

    --limit and --clear evict parts that no process uses, the least recently used first. This is safe while trainings
    run: they fetch evicted parts again. A folder that is not a part cache is an error.

    \b
    Examples:
      omearrow-ds cache /scratch/cache
      omearrow-ds cache /scratch/cache --limit 100GB
      omearrow-ds cache --clear --json
    """
    if clear and limit is not None:
        raise click.UsageError("--clear removes all parts, so --limit has no effect; pass only one of them")
    part_cache = PartCache.existing(folder or default_folder(), -1 if clear else limit or 0)
    parts = before = part_cache.entries()
    if before and (clear or limit is not None):
        part_cache.shrink()
        parts = part_cache.entries()
    num_bytes, before_bytes = (sum(part.size_bytes for part in entries) for entries in (parts, before))
    used_bytes = sum(part.size_bytes for part in parts if part.is_pinned)
    removed_bytes = max(0, before_bytes - num_bytes)
    used, removed = text.size(used_bytes), f"{text.size(removed_bytes)} removed"
    if limit is not None and num_bytes > limit:
        raise failures.Failure(
            f"{part_cache.folder}: {text.size(num_bytes)} exceed --limit {text.size(limit)}, because running processes "
            f"use {used} ({removed}); run the command again after they end"
        )
    values, rows = [], []
    for part in parts:
        used_at = datetime.fromtimestamp(part.used_s, UTC).isoformat(timespec="seconds")
        age = f"used {text.duration(max(0.0, time.time() - part.used_s))} ago"
        use = _USES[part.is_pinned, part.name.endswith(PARTIAL)]
        sizes = {"name": part.name, "size_bytes": part.size_bytes}
        values.append({**sizes, "last_used": used_at, "held": part.is_pinned})
        rows.append([f"  {part.name}", text.size(part.size_bytes), age, use])
    facts = [text.count(len(parts), "file"), text.size(num_bytes), f"{used} of it in use"]
    facts += [removed] if clear or limit is not None else []
    line = f"{click.format_filename(part_cache.folder)}: {', '.join(facts)}"
    totals = {"path": str(part_cache.folder), "bytes": num_bytes, "held_bytes": used_bytes}
    totals = {**totals, "removed_bytes": removed_bytes, "parts": values}
    echo(totals, line, *(text.table(rows) if rows else []), as_json=as_json)
