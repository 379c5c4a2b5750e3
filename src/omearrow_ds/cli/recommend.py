"""``omearrow-ds recommend``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omearrow_ds.advise.recommend import recommend as measure
from omearrow_ds.advise.recommend.link import Link
from omearrow_ds.cli.options import (
    PATH,
    crop_option,
    echo_json,
    format_option,
    json_option,
    object_options,
    opening_options,
    size_in_bytes,
    warn_of_layout,
    work_dir_option,
)
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.formats import formats

_START_METHODS = ("forkserver", "spawn")


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    del ctx, param
    if value is None:
        return None
    known = [fmt.name for fmt in formats()]
    names = tuple(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"unknown format {name!r}; choose from {', '.join(known)}")
    return names


def _of_link(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Raise `click.BadParameter` for an invalid rate or time."""
    if value is not None:
        given = {"bandwidth": "1Gb", "latency": None, str(param.name): value}
        try:
            Link.of(**given)
        except ArgumentError as error:
            raise click.BadParameter(f"{value!r}; {str(error).partition('; ')[2]}", ctx, param) from error
    return value


@click.command(short_help="Measure which format and settings suit your images.")
@click.argument("path", type=PATH)
@format_option
@opening_options
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Number of epochs.")
@click.option(
    "--access", type=click.Choice(["random", "sequential"]), default="random", show_default=True, help="Order of reads."
)
@click.option(
    "--budget-bytes",
    callback=size_in_bytes,
    metavar="BYTES",
    help="Disk space for converted images, e.g. 20GB; by default the free space.",
)
@click.option(
    "--memory-bytes",
    callback=size_in_bytes,
    metavar="BYTES",
    help="Memory for preloaded pixels; by default half of the free memory.",
)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Samples per batch.")
@click.option("--seconds", type=click.FloatRange(1), default=90.0, show_default=True, help="Approximate total time.")
@click.option(
    "--tile", type=click.IntRange(1), metavar="N", help="Store single-channel tiles of N x N pixels instead of images."
)
@crop_option
@object_options
@click.option("--formats", callback=_names, metavar="NAME,...", help="Formats to try; by default all.")
@click.option(
    "--bandwidth",
    callback=_of_link,
    metavar="RATE",
    help="Bandwidth of the link to a bucket, e.g. 1Gb (bits/s) or 100MB (bytes/s).",
)
@click.option("--latency", callback=_of_link, metavar="TIME", help="Latency of that link, e.g. 20ms.")
@work_dir_option
@json_option
def recommend(*, path: Path, as_json: bool, **options: Any) -> None:
    """Measure how to store and load the images at PATH.

    A sample is written in every format, encoding and compression to a private folder, read like a training from a warm
    page cache (with --objects as crops), and removed. The output ranks the total cost of all epochs, including the
    conversion, and recommends one choice with its commands. PATH is only read.

    With --bandwidth, the output also estimates an epoch from parts in a bucket per format: the longer of transfer and
    decoding.

    \b
    Examples:
      omearrow-ds recommend plate1/
      omearrow-ds recommend plate1/ --epochs 100 --budget-bytes 20GB
      omearrow-ds recommend plate1/ --objects cells.csv --crop 64
      omearrow-ds recommend plate1/ --tile 100 --access sequential
      omearrow-ds recommend plate1/ --bandwidth 1Gb --latency 20ms
      omearrow-ds recommend cells.parquet --formats arrow,lance --seconds 30 --json
    """
    warn_of_layout(path, options)
    found = measure(path, progress=True, start_methods=_START_METHODS, **options)
    if as_json:
        echo_json(found.as_dict())
    else:
        click.echo(found.as_text())
