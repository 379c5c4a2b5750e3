"""``omearrow-ds show``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omearrow_ds import text
from omearrow_ds.cli.options import OBJECTS, PATH, echo_json, flags, json_option, source_options
from omearrow_ds.dataset.show import show as draw
from omearrow_ds.options import SampleSettings


@click.command(short_help="Draw a grid of random images.")
@click.option("--out", type=PATH, metavar="FILE.png", required=True, help="PNG file to write.")
@click.option("--sample", type=click.IntRange(1, 1024), default=16, show_default=True, help="Number of images.")
@click.option("--by", metavar="COLUMN", help="Column with one row of the grid per value.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the random choice."
)
@source_options
@flags(SampleSettings, "crop_size", *OBJECTS)
@click.option("--overwrite", is_flag=True, help="Replace FILE.png.")
@json_option
def show(path: Path, *, out: Path, by: str | None, as_json: bool, **options: Any) -> None:
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
    grid = draw(path, out, by=by, **options)
    if as_json:
        echo_json({"out": str(out.absolute()), **grid.as_dict()})
        return
    facts = [f"{len(grid.images):,} of {text.count(grid.total, 'image')}"]
    if grid.groups is not None:
        rows = len({image["group"] for image in grid.images})
        facts.append(f"{rows:,} of {text.count(grid.groups, 'value')} of {by}")
    facts += [text.count(len(grid.channels), "channel"), text.size(len(grid.png))]
    click.echo(f"{click.format_filename(out)}: {', '.join(facts)}")
    if grid.pixel_range is not None:
        click.echo(f"pixels: {grid.pixel_range.text}")
