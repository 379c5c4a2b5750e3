"""Writing of collections by commands, executors of parts, and ``omearrow-ds publish`` and ``cache``."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import BYTES, PATH, Printed, has_bar, json_option, storage_options
from omearrow_ds.options import WriteSettings
from omearrow_ds.resources import end_with_parent
from omearrow_ds.storage import listed, source
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.describe import Description, describe
from omearrow_ds.storage.fields import warn_of_layout
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.jobs import return_memory
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.part_cache import PARTIAL, PartCache, default_folder
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.writing import Target

_CONNECT_S, _AGAIN_S = 30, 0.1
# State of a cached file by whether it is pinned, and whether it is incomplete.
_USES = {(True, True): "being fetched", (True, False): "in use", (False, True): "left unfinished", (False, False): ""}
_HOW = "write local:8 for local processes, dask:tcp://HOST:PORT or dask:SCHEDULER_FILE"


@contextmanager
def writing(
    sources: Mapping[str, Path], dst: Path, *, src_format: str | None, executor: str | None, **options: Any
) -> Iterator[tuple[CollectionSource, dict[str, Any], Callable[..., Printed]]]:
    """Open the first of ``sources``, and yield it, the keywords of the library function, and a function to report."""
    start_s, (src, *objects) = time.perf_counter(), sources.values()
    opening = cast(OpenOptions, {name: options.pop(name) for name in OpenOptions.__annotations__ if name in options})
    storage = target_storage(src, dst, opening.get("storage"), options["target_storage"])
    keywords = {**options, "target_storage": storage, "progress": has_bar()}
    settings = WriteSettings.take(keywords)
    Target.choose(dst, options["format"], settings)  # Before the source, which can take long to open.
    if objects:
        keywords |= {"nulls": opening.get("nulls", "error"), "filter": opening.get("filter")}
        of_objects = ObjectSettings.take(opening, objects[0])
        keywords |= {"on": of_objects.on, "column_types": of_objects.types or None}
    warn_of_layout(src, opening)
    with failures.naming(format="--src-format"):
        images = source.open_source(src, src_format, skip_errors=settings.skips_errors, **opening)
    return_memory()

    def report(noun: str, more: Sequence[str] = (), **details: Any) -> Printed:
        """Return the result in JSON and lines; ``noun`` is that of an image, such as ``"crop of 2 fields"``."""
        elapsed_s = time.perf_counter() - start_s
        if settings.task is not None:
            return describe_share(dst, settings.task, storage, elapsed_s)
        written = describe(dst, options["format"], storage=storage)
        absolute = {name: str(path.absolute()) for name, path in sources.items()}
        line = f"{click.format_filename(dst)}: {in_words(written, noun)}, in {text.duration(elapsed_s)}"
        return {**absolute, "seconds": elapsed_s, "written": written.as_dict(), **details}, [line, *more]

    with CollectionSource(images) as opened, executor_of(executor) as pool:
        yield opened, {**keywords, "executor": pool}, report


def target_storage(src: Path, dst: Path, storage: Storage | None, target: Storage | None) -> Storage | None:
    """Return the storage of the target; by default, a copy within S3 uses the storage of the source."""
    if isinstance(src, Url):
        is_within_s3 = isinstance(dst, Url) and src.scheme == dst.scheme == "s3"
        return replace(storage, anonymous=False) if is_within_s3 and storage and target is None else target
    if storage is not None and isinstance(dst, Url) and (src.is_dir() or not listed.lists_files(src)):
        options = " ".join(text.as_flags({"storage": storage}))
        remedy = f"use --target-endpoint and similar options for {dst}"
        raise failures.Failure(f"{options}: only valid for a source URL; {remedy}")
    return target


def in_words(written: Description, noun: str = "image") -> str:
    size = f"{text.size(written.sizes.disk_bytes)} ({text.size(written.sizes.decoded_bytes)} decoded)"
    image, *origin = noun.partition(" of ")
    return f"{text.count(written.images, image)}{''.join(origin)}, {size}, {written.format_label}"


@contextmanager
def executor_of(executor_name: str | None) -> Iterator[Executor | None]:
    """Start the executor or connect to the cluster that ``--executor`` names; close the connection at the end."""
    kind, _, which = (executor_name or "").partition(":")
    if executor_name is None:
        yield None
    elif kind == "local" and which.isdecimal() and int(which):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(int(which), spawn, _begin_worker) as pool:
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
        problem = "Dask is not installed; run pip install 'omearrow-ds[dask]'"
        raise failures.Failure(f"--executor dask:{which}: {problem}") from error
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
    end_with_parent()


def describe_share(dst: Path, task: tuple[int, int], storage: Storage | None, elapsed_s: float) -> Printed:
    """Return the progress of a collection in parts after one task wrote its share."""
    target, (number, num_tasks) = source.parts_target(dst, storage), task
    total = (target.plan or {"parts": 0})["parts"]
    num_ready = total if target.is_published else len(target.finished_parts())
    counts = {"share": f"{number}/{num_tasks}", "made": num_ready, "parts": total, "seconds": elapsed_s}
    words = ["omearrow-ds", "publish", str(dst), *text.as_flags({"storage": storage})]
    rest = f"publish it: {shlex.join(words)}" if num_ready == total else "publish it after all parts are written"
    progress = f"{num_ready:,} of {text.count(total, 'part')} {'is' if total == 1 else 'are'} written"
    share = f"{click.format_filename(dst)}: task {number} of {num_tasks} in {text.duration(elapsed_s)}"
    return {"path": str(dst.absolute()), **counts}, [f"{share}; {progress}; {rest}"]


@click.command()
@click.argument("dst", type=PATH)
@storage_options(owner="DST")
@json_option
def publish(dst: Path, storage: Storage | None) -> Printed:
    """Complete a collection whose parts were written with --task.

    If parts are missing, the error lists them. If the collection is already published, nothing happens, so that a job
    can be repeated. In a SLURM array, each task runs convert SRC DST --task $SLURM_ARRAY_TASK_ID/384.

    \b
    Examples:
      omearrow-ds publish plate1.parts
      omearrow-ds publish s3://bucket/plate1.parts --profile lab
    """
    store = source.parts_target(dst, storage).store
    already = store.has_collection and not store.is_begun
    if not already:
        source.publish(dst, storage=storage)
    written = describe(dst, storage=storage)
    line = f"{click.format_filename(dst)}: {'is published already; ' if already else ''}{in_words(written)}"
    return {"written": written.as_dict()}, [line]


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--limit", callback=BYTES, metavar="BYTES", help="Evict the oldest parts down to this size, e.g. 100GB.")
@click.option("--clear", is_flag=True, help="Evict all parts that no process uses.")
@json_option
def cache(folder: Path | None, *, limit: int | None, clear: bool) -> Printed:
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
        problem = f"{text.size(num_bytes)} exceed --limit {text.size(limit)}, because running processes use {used}"
        remedy = "run the command again after they end"
        raise failures.Failure(f"{part_cache.folder}: {problem} ({removed}); {remedy}")
    values, rows = [], []
    for part in parts:
        used_at = datetime.fromtimestamp(part.used_s, UTC).isoformat(timespec="seconds")
        age, use = time.time() - part.used_s, _USES[part.is_pinned, part.name.endswith(PARTIAL)]
        values.append({"name": part.name, "size_bytes": part.size_bytes, "last_used": used_at, "held": part.is_pinned})
        rows.append([f"  {part.name}", text.size(part.size_bytes), f"used {text.duration(max(0.0, age))} ago", use])
    facts = [text.count(len(parts), "file"), text.size(num_bytes), f"{used} of it in use"]
    facts += [removed] if clear or limit is not None else []
    line = f"{click.format_filename(part_cache.folder)}: {', '.join(facts)}"
    totals = {"bytes": num_bytes, "held_bytes": used_bytes, "removed_bytes": removed_bytes, "parts": values}
    return {"path": str(part_cache.folder), **totals}, [line, *(text.table(rows) if rows else [])]
