"""What several commands take: a path, its format, a size, a folder to work in, and JSON."""

from __future__ import annotations

import re
from pathlib import Path

import click

from omearrow_ds.formats import FORMATS

PATH = click.Path(path_type=Path)
FORMAT = click.Choice([fmt.name for fmt in FORMATS])

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, for programs.")
format_option = click.option(
    "--format", "format", type=FORMAT, help="Format of PATH; by default found from its content or suffix."
)
work_dir_option = click.option(
    "--work-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder for what is tried, removed again.  [default: the system's temporary folder]",
)


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Read height and width in pixels: ``256``, or ``256x512``."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no size; write 256 or 256x512 (height x width)", ctx, param)
    return int(found[1]), int(found[2] or found[1])


crop_option = click.option(
    "--crop",
    "crop_size",
    callback=_size,
    metavar="SIZE",
    help="Centre crop of samples in pixels, e.g. 256 or 256x512.",
)
