"""Options of collections in parts, their executors, and ``omearrow-ds publish``."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import (
    PATH,
    Command,
    added,
    echo_json,
    flags,
    json_option,
    storage_options,
)
from omearrow_ds.options import PARTS, WriteSettings
from omearrow_ds.storage import listed, source
from omearrow_ds.storage.describe import Description, describe
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.jobs import return_memory
from omearrow_ds.storage.remote import Storage

_CONNECT_S, _AGAIN_S = 30, 0.1
_HOW = "write local:8 for local processes, dask:tcp://HOST:PORT or dask:SCHEDULER_FILE"


@dataclass(frozen=True)
class OfParts:
    """Options of a collection in parts."""

    options: Mapping[str, Any]
    executor: str | None

    @contextmanager
    def keywords(self) -> Iterator[dict[str, Any]]:
        """Yield keywords for library functions, including the running executor."""
        return_memory()
        with executor_of(self.executor) as executor:
            yield {**self.options, "executor": executor}

    @property
    def task(self) -> tuple[int, int] | None:
        """Task ``(K, N)``, which writes its share of the parts, or None for all parts."""
        task: tuple[int, int] | None = self.options["task"]
        return task

    @property
    def storage(self) -> Storage | None:
        """Endpoint and credentials of the target."""
        storage: Storage | None = self.options["target_storage"]
        return storage

    def beside(self, src: Path, dst: Path, storage: Storage | None) -> Self:
        """Return the options with the target storage, which defaults to that of the source from S3 to S3.

        Raises `Failure` if options of an object store are passed for a local source, before any request.
        """
        if isinstance(src, Url):
            same = isinstance(dst, Url) and src.scheme == dst.scheme == "s3" and self.storage is None and storage
            kept = replace(storage, anonymous=False) if same and storage else self.storage
            return replace(self, options={**self.options, "target_storage": kept})
        if storage is not None and isinstance(dst, Url) and (src.is_dir() or not listed.lists_files(src)):
            said = " ".join(text.as_flags({"storage": storage}))
            raise failures.Failure(
                f"{said}: only valid for a source URL; use --target-endpoint and similar options for {dst}"
            )
        return self


def parts_options(command: Command) -> Command:
    """Add the options of collections in parts, which the command receives as ``of_parts``."""
    names = {*PARTS, "target_storage"} - {"executor"}

    def collected(given: dict[str, Any]) -> dict[str, Any]:
        options = {name: given.pop(name) for name in names}
        return {"of_parts": OfParts(options, given.pop("executor")), **given}

    return added(flags(WriteSettings, *PARTS), storage_options("target-")(added((), command, collected)), dict)


def describe_written(dst: Path, storage: Storage | None, format_name: str | None = None) -> Description:
    """Return the description of the written collection, local or remote."""
    return describe(dst, format_name) if storage is None else describe(dst, format_name, storage=storage)


def in_words(written: Description, what: str = "") -> str:
    """Describe the written collection in words: number of images (or ``what``), size and format."""
    size = f"{text.size(written.disk_bytes)} ({text.size(written.decoded_bytes)} decoded)"
    return f"{what or text.count(written.images, 'image')}, {size}, {written.format_label}"


@contextmanager
def executor_of(asked: str | None) -> Iterator[Executor | None]:
    """Start the executor that ``--executor`` names, or connect to it, and close it at the end."""
    kind, _, which = (asked or "").partition(":")
    if asked is None:
        yield None
    elif kind == "local" and which.isdecimal() and int(which):
        with ProcessPoolExecutor(
            int(which), mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
        ) as pool:
            yield pool
    elif kind == "dask" and which:
        yield from _of_dask(which)
    else:
        raise failures.Failure(f"--executor {asked}: unknown executor; {_HOW}")


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


def tell_share(dst: Path, of_parts: OfParts, elapsed_s: float, *, as_json: bool) -> None:
    """Print the progress of a collection in parts after one task wrote its share."""
    assert of_parts.task is not None
    unfinished = source.unfinished_at(dst, of_parts.storage)
    total = (unfinished.plan or {"parts": 0})["parts"]
    made = total if unfinished.published else len(unfinished.made)
    if as_json:
        share = "{}/{}".format(*of_parts.task)
        echo_json({"path": str(dst.absolute()), "share": share, "made": made, "parts": total, "seconds": elapsed_s})
        return
    share = "share {} of {}".format(*of_parts.task)
    words = ["omearrow-ds", "publish", str(dst), *text.as_flags({"storage": of_parts.storage})]
    rest = f"publish it: {shlex.join(words)}" if made == total else "publish it after all parts are written"
    where = click.format_filename(dst)
    are = "is" if total == 1 else "are"
    click.echo(
        f"{where}: {share} in {text.duration(elapsed_s)}; {made:,} of {text.count(total, 'part')} {are} made; {rest}"
    )


@click.command(short_help="Complete a collection whose parts were written by tasks.")
@click.argument("dst", type=PATH)
@storage_options(of="DST")
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
    unfinished = source.unfinished_at(dst, storage)
    already = unfinished.place.stands and not unfinished.place.begun
    if not already:
        source.publish(dst, storage=storage)
    written = describe_written(dst, storage)
    if as_json:
        echo_json({"written": written.as_dict()})
        return
    click.echo(f"{click.format_filename(dst)}: {'is published already; ' if already else ''}{in_words(written)}")
