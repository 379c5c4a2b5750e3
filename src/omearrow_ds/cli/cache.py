"""``omearrow-ds cache``: lists and evicts cached parts of remote collections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import echo_json, json_option, size_in_bytes
from omearrow_ds.storage.part_cache import PARTIAL, Kept, PartCache, default_folder


@click.command(short_help="List or evict cached parts of remote collections.")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--limit", callback=size_in_bytes, metavar="BYTES", help="Evict the oldest parts down to this size, e.g. 100GB."
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
    found = PartCache.existing(folder or default_folder(), -1 if clear else limit or 0)
    before = found.kept()
    kept = before
    if before and (clear or limit is not None):
        found.shrink()
        kept = found.kept()
    held, left = _bytes([each for each in kept if each.held]), _bytes(kept)
    removed = max(0, _bytes(before) - left)
    if limit is not None and left > limit:
        raise failures.Failure(
            f"{found.folder}: {text.size(left)} remain above --limit {text.size(limit)}, as local processes use "
            f"{text.size(held)} ({text.size(removed)} removed); run it again after they end"
        )
    if as_json:
        parts = [
            {"name": each.name, "size_bytes": each.size_bytes, "last_used": _time(each.used_s), "held": each.held}
            for each in kept
        ]
        totals = {"path": str(found.folder), "bytes": left, "held_bytes": held, "removed_bytes": removed}
        echo_json({**totals, "parts": parts})
        return
    told = [text.count(len(kept), "file"), text.size(left), f"{text.size(held)} of it in use"]
    told += [f"{text.size(removed)} removed"] if clear or limit is not None else []
    click.echo(f"{click.format_filename(found.folder)}: {', '.join(told)}")
    if kept:
        rows = [[f"  {each.name}", text.size(each.size_bytes), _ago(each.used_s), _use(each)] for each in kept]
        click.echo("\n".join(text.table(rows)))


def _bytes(kept: Sequence[Kept]) -> int:
    return sum(each.size_bytes for each in kept)


def _time(used_s: float) -> str:
    return datetime.fromtimestamp(used_s, UTC).isoformat(timespec="seconds")


def _ago(used_s: float) -> str:
    return f"used {text.duration(max(0.0, time.time() - used_s))} ago"


def _use(kept: Kept) -> str:
    partial = kept.name.endswith(PARTIAL)
    if kept.held:
        return "being fetched" if partial else "in use"
    return "left unfinished" if partial else ""
