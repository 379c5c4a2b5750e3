"""``omearrow-ds profile``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from omearrow_ds.advise.profile import profile_dataset
from omearrow_ds.advise.profile.training import named
from omearrow_ds.axes import AXES
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import (
    PATH,
    crop_option,
    echo_json,
    format_option,
    json_option,
    object_options,
    opening_options,
    work_dir_option,
)

_AUTO = "auto"
_PRELOAD = {"yes": True, "no": False, _AUTO: _AUTO}


def _workers(ctx: click.Context, param: click.Parameter, value: str) -> Any:
    if value != _AUTO and not value.isdecimal():
        raise click.BadParameter(f"{value!r} is not a number from 0 or {_AUTO!r}", ctx, param)
    return value if value == _AUTO else int(value)


def _select(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the indices of each axis: a list for ``C=0,2``, an integer for ``T=0``."""
    found: dict[str, Any] = {}
    for value in values:
        axis, _, indices = value.partition("=")
        picked = [index for index in indices.split(",") if index.removeprefix("-").isdecimal()]
        if axis not in tuple(AXES) or ",".join(picked) != indices or not picked:
            raise click.BadParameter(
                f"{value!r} is not AXIS=I,...; write an axis of {AXES} and indices, e.g. C=0,2", ctx, param
            )
        found[axis] = int(picked[0]) if len(picked) == 1 else list(map(int, picked))
    return found or None


@click.command(short_help="Measure the stages of an epoch, and what to try first.")
@click.argument("path", type=PATH)
@format_option
@opening_options
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Samples per batch.")
@click.option(
    "--workers",
    "num_workers",
    metavar="N|auto",
    callback=_workers,
    default=_AUTO,
    show_default=True,
    help="Worker processes.",
)
@click.option(
    "--preload",
    type=click.Choice(list(_PRELOAD)),
    default="no",
    show_default=True,
    help="Decode all pixels into memory; auto: if they fit.",
)
@click.option("--axes", default="CYX", show_default=True, help="Axes of a sample.")
@click.option("--select", metavar="AXIS=I,...", callback=_select, multiple=True, help="Indices of an axis, e.g. C=0,2.")
@crop_option
@object_options
@click.option("--masks", metavar="MASKS", help="Masks of the samples: a path, an image column, or a file pattern.")
@click.option("--mask-background", is_flag=True, help="Set pixels outside the object to 0.")
@click.option("--normalize/--no-normalize", default=True, show_default=True, help="Scale pixels to float32.")
@click.option("--target", metavar="COLUMN", help="Column of the targets.")
@click.option("--transform", metavar="MODULE:NAME", help="Function of the tensor of each sample.")
@click.option("--model", metavar="MODULE:NAME", help="torch.nn.Module, or function that returns one.")
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adam", "none"]),
    default="sgd",
    show_default=True,
    help="none: only the forward pass.",
)
@click.option("--device", help="Device of batches and model, e.g. cuda.  [default: cpu]")
@click.option("--shuffle/--no-shuffle", default=True, show_default=True, help="Random order.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), help="Time to measure the stages.  [default: 1 to 10]"
)
@click.option("--epochs", type=click.IntRange(1), help="Number of whole epochs to measure, instead of --seconds.")
@click.option("--trials/--no-trials", default=True, show_default=True, help="Try other settings, one at a time.")
@work_dir_option
@json_option
@failures.traceback_option
def profile(path: Path, *, as_json: bool, show_traceback: bool, **options: Any) -> None:
    """Measure the time of an epoch by stage, and report which setting to try first.

    An epoch of the ordinary loader is measured and split into stages, with the possible gain of each. Then other
    settings are tried in turns with the given ones: preloading, a mapped cache, Arrow IPC, workers, batch size.

    MODULE:NAME is imported from the current folder.

    \b
    Examples:
      omearrow-ds profile plate1.parquet
      omearrow-ds profile plate1/ --batch-size 64 --workers 4 --crop 256
      omearrow-ds profile plate1.parquet --objects cells.csv --crop 64 --batch-size 256
      omearrow-ds profile plate1.parquet --transform augment:flip --model models:make --device cuda
      omearrow-ds profile plate1.parquet --seconds 5 --json > profile.json
    """
    options["preload"] = _PRELOAD[options["preload"]]
    own = " or ".join(f"{name} {options[name]}" for name in ("transform", "model") if options[name] is not None)
    with failures.calling(own, show_traceback=show_traceback) if own else contextlib.nullcontext():
        sys.path.insert(0, str(Path.cwd()))
        if options["transform"] is not None:
            options["transform"] = named(options["transform"], "transform")
        found = profile_dataset(path, **options, progress=sys.stderr.isatty())
    if as_json:
        echo_json(found.as_dict())
    else:
        click.echo(found.as_text())
