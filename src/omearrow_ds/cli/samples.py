"""``omearrow-ds crops``, ``profile`` and ``recommend``, which create samples and therefore import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from omearrow_ds import text
from omearrow_ds.advise.profile import profile_dataset
from omearrow_ds.advise.profile.loop import named
from omearrow_ds.advise.recommend import recommend as measure
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import PATH, Printed, flags, json_option, source_options, writing_options
from omearrow_ds.cli.parts import writing
from omearrow_ds.dataset.write_crops import write_crops
from omearrow_ds.options import OBJECTS, ProfileSettings, RecommendSettings, SampleSettings

_PROFILED = ("axes", "select", "crop_size", *OBJECTS, "masks", "mask_background", "normalize", "target", "transform")
_START_METHODS = ("forkserver", "spawn")


@click.command()
@click.argument("fields", type=PATH)
@click.argument("objects", type=PATH)
@click.argument("dst", type=PATH)
@flags(SampleSettings, "crop_size", *OBJECTS[1:])
@writing_options("FIELDS")
def crops(fields: Path, objects: Path, dst: Path, **options: Any) -> Printed:
    """Write the crop around each of OBJECTS, a CSV, TSV or Parquet table of cells, in the images FIELDS, to a new DST.

    Pixels stay as stored. A crop has the columns of its object and its field, and its position in the field. Objects
    are assigned to fields by image_id or Metadata_* columns; --on overrides this unless --columns is given. With
    --crop, crops of that size are around the centers. With --box and without --crop, a crop is the box of the object.

    \b
    Examples:
      omearrow-ds crops plate1.parquet cells.csv cells.arrow --crop 64
      omearrow-ds crops plate1/ cells.parquet cells.zarr --pattern phenix --crop 96x96 --pad drop
      omearrow-ds crops plate1.zarr cells.parquet boxes.parquet --box auto
    """
    with writing({"fields": fields, "objects": objects}, dst, **options) as (source, keywords, report):
        write_crops(source, objects, dst, **keywords)
        return report(f"crop of {text.count(len(source), 'field')}")


@click.command()
@source_options
@flags(ProfileSettings, "batch_size", "num_workers", "preload")
@flags(SampleSettings, *_PROFILED)
@flags(ProfileSettings, "model", "optimizer", "device", "shuffle", "seconds", "epochs", "trials", "work_dir")
@json_option
@click.option(
    "--traceback", "show_traceback", is_flag=True, help="Where your own function raises an error, show where."
)
def profile(path: Path, *, show_traceback: bool, **options: Any) -> Printed:
    """Measure the time of an epoch by stage, and report which setting to try first.

    An epoch of the ordinary loader is measured and split into stages, with the possible gain of each. Then other
    settings are compared with the current ones: preloading, a mapped cache, Arrow IPC, workers, batch size.

    MODULE:NAME is imported from the current folder.

    \b
    Examples:
      omearrow-ds profile plate1.parquet
      omearrow-ds profile plate1/ --batch-size 64 --workers 4 --crop 256
      omearrow-ds profile plate1.parquet --objects cells.csv --crop 64 --batch-size 256
      omearrow-ds profile plate1.parquet --transform augment:flip --model models:make --device cuda
      omearrow-ds profile plate1.parquet --seconds 5 --json > profile.json
    """
    own = " or ".join(f"{name} {options[name]}" for name in ("transform", "model") if options[name] is not None)
    with failures.calling(own, show_traceback=show_traceback):
        sys.path.insert(0, str(Path.cwd()))
        if options["transform"] is not None:
            options["transform"] = named(options["transform"], "transform")
        result = profile_dataset(path, **options, progress=sys.stderr.isatty())
    return result.as_dict(), [result.as_text()]


@click.command()
@source_options
@flags(RecommendSettings, "epochs", "access", "budget_bytes", "memory_bytes", "batch_size", "seconds", "tile")
@flags(SampleSettings, "crop_size", *OBJECTS)
@flags(RecommendSettings, "formats", "bandwidth", "latency", "work_dir")
@json_option
def recommend(path: Path, **options: Any) -> Printed:
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
    result = measure(path, progress=True, start_methods=_START_METHODS, **options)
    return result.as_dict(), [result.as_text()]
