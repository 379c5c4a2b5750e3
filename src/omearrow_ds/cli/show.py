"""``omearrow-ds show``: a sample of the images as one picture."""

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


@click.command(short_help="Draw a sample of the images as one picture.")
@click.argument("path", type=PATH)
@click.option("--out", type=PATH, metavar="FILE.png", required=True, help="The picture to write.")
@click.option("--sample", type=click.IntRange(1, 1024), default=16, show_default=True, help="How many images.")
@click.option("--by", metavar="COLUMN", help="Column whose values have a row of the grid each.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of what is drawn.")
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
    """Draw a sample of the images at PATH as one picture, a grid of thumbnails.

    The contrast of a channel is the same in all of them, from percentile 1 to 99.8 of its pixels in the grid, so that
    images can be compared; the picture says what that is in stored values. Channels are composed in colours, by name
    for common stains (DAPI blue, GFP green, RFP red); of several T the first is shown, of several Z the middle one. An
    image that cannot be read is shown as what is wrong with it.

    With --objects and --crop it draws crops around cells, of which --sample are drawn.

    With --by the images are shared out evenly between the values of the column. --channels chooses among the channels
    of any format. Needs Pillow, which 'omearrow-ds[show]' installs.

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
