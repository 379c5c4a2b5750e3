"""``omearrow-ds show``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omearrow_ds import text
from omearrow_ds.cli.options import (
    PATH,
    crop_option,
    echo_json,
    format_option,
    json_option,
    object_options,
    opening_options,
)
from omearrow_ds.dataset.show import show as draw


@click.command(short_help="Draw a grid of random images.")
@click.argument("path", type=PATH)
@click.option("--out", type=PATH, metavar="FILE.png", required=True, help="PNG file to write.")
@click.option("--sample", type=click.IntRange(1, 1024), default=16, show_default=True, help="Number of images.")
@click.option("--by", metavar="COLUMN", help="Column with one row of the grid per value.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the random choice."
)
@format_option
@opening_options
@crop_option
@object_options
@click.option("--overwrite", is_flag=True, help="Replace FILE.png.")
@json_option
def show(
    path: Path,
    *,
    out: Path,
    sample: int,
    by: str | None,
    seed: int,
    format: str | None,  # noqa: A002  # as in Python
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a sample of the images at PATH as a grid of thumbnails.

    All thumbnails have the same contrast per channel, from percentile 1 to 99.8, so that they can be compared; the grid
    states the range in stored values. Common stains have fixed colors (DAPI blue, GFP green, RFP red). The first T and
    the middle Z are shown. An image that cannot be read is shown as its error.

    With --objects and --crop, thumbnails are crops around cells. With --by, each value of the column gets an equal
    number of images. --channels chooses channels in any format. Needs Pillow (extra show).

    \b
    Examples:
      omearrow-ds show plate1.parquet --out grid.png
      omearrow-ds show plate1/ --pattern phenix --by Metadata_Well --sample 96 --out wells.png
      omearrow-ds show plate1.parquet --objects cells.csv --crop 64 --sample 64 --by treatment --out cells.png
      omearrow-ds show plate1.parquet --channels DAPI --out dapi.png --json
    """
    found = draw(path, out, sample=sample, by=by, seed=seed, format=format, overwrite=overwrite, **options)
    if as_json:
        echo_json({"out": str(out.absolute()), **found.as_dict()})
        return
    whole = f"{len(found.images):,} of {text.count(found.total, 'image')}"
    rows = len({each["group"] for each in found.images})
    of_groups = "" if found.groups is None else f", {rows:,} of {text.count(found.groups, 'value')} of {by}"
    size = text.size(len(found.png))
    click.echo(
        f"{click.format_filename(out)}: {whole}{of_groups}, {text.count(len(found.channels), 'channel')}, {size}"
    )
    if found.pixel_range is not None:
        click.echo(f"pixels: {found.pixel_range.text}")
