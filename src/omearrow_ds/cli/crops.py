"""``omearrow-ds crops``: writes the crops around objects as a new collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omearrow_ds import text
from omearrow_ds.cli.options import OBJECTS, PATH, flags
from omearrow_ds.cli.parts import Writing, writing_options
from omearrow_ds.dataset.write_crops import write_crops
from omearrow_ds.options import SampleSettings
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions


@click.command(short_help="Write the crops around cells as a new collection.")
@click.argument("fields", type=PATH)
@click.argument("objects", type=PATH)
@click.argument("dst", type=PATH)
@flags(SampleSettings, "crop_size", *OBJECTS[1:])
@writing_options("FIELDS")
def crops(fields: Path, objects: Path, dst: Path, **options: Any) -> None:
    """Write the crop around each of OBJECTS, a CSV or Parquet table of cells, in the images FIELDS, to a new DST.

    Pixels stay as stored. A crop has the columns of its object and its field, and its position in the field. Objects
    are assigned to fields by image_id or Metadata_* columns; --on overrides this unless --columns is given. With
    --crop, crops of that size are around the centers. With --box and without --crop, a crop is the box of the object.

    \b
    Examples:
      omearrow-ds crops plate1.parquet cells.csv cells.arrow --crop 64
      omearrow-ds crops plate1/ cells.parquet cells.zarr --pattern phenix --crop 96x96 --pad drop
      omearrow-ds crops plate1.zarr cells.parquet boxes.parquet --box auto
    """
    run = Writing(fields, dst, **options)
    of_objects: OpenOptions = {"nulls": run.opening.get("nulls", "error"), "filter": run.opening.get("filter")}
    settings = ObjectSettings.take(run.opening, objects)
    of_objects |= {"on": settings.on, "column_types": settings.types or None}
    with run.open() as (source, keywords):
        write_crops(source, objects, dst, **keywords, **of_objects)
        num_fields = text.count(len(source), "field")
    run.report(f"crop of {num_fields}", {"fields": fields, "objects": objects})
