"""``omearrow-ds cache``: lists and evicts cached parts of remote collections."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import echo_json, json_option, read_by, size_in_bytes
from omearrow_ds.storage.part_cache import PARTIAL, PartCache, default_folder

# State of a file by whether it is pinned, and whether it is incomplete.
_USES = {(True, True): "being fetched", (True, False): "in use", (False, True): "left unfinished", (False, False): ""}


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
    if as_json:
        rows = [
            {
                "name": part.name,
                "size_bytes": part.size_bytes,
                "last_used": datetime.fromtimestamp(part.used_s, UTC).isoformat(timespec="seconds"),
                "held": part.is_pinned,
            }
            for part in parts
        ]
        totals = {"path": str(part_cache.folder), "bytes": num_bytes, "held_bytes": used_bytes}
        echo_json({**totals, "removed_bytes": removed_bytes, "parts": rows})
        return
    facts = [text.count(len(parts), "file"), text.size(num_bytes), f"{used} of it in use"]
    facts += [removed] if clear or limit is not None else []
    click.echo(f"{click.format_filename(part_cache.folder)}: {', '.join(facts)}")
    if parts:
        lines = []
        for part in parts:
            age = f"used {text.duration(max(0.0, time.time() - part.used_s))} ago"
            use = _USES[part.is_pinned, part.name.endswith(PARTIAL)]
            lines.append([f"  {part.name}", text.size(part.size_bytes), age, use])
        click.echo("\n".join(text.table(lines)))
