"""``omearrow-ds crops``: writes the crops around objects as a new collection."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import (
    FORMAT,
    OF_SOURCE,
    PATH,
    crop_option,
    echo_json,
    json_option,
    layout_options,
    opening_options,
    place_options,
    warn_of_layout,
)
from omearrow_ds.cli.parts import OfParts, describe_written, in_words, parts_options, tell_share
from omearrow_ds.dataset.write_crops import write_crops
from omearrow_ds.options import WriteSettings
from omearrow_ds.storage.objects import on_of_objects, types_with_objects
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.writing import Target


@click.command(short_help="Write the crops around cells as a new collection.")
@click.argument("fields", type=PATH)
@click.argument("objects", type=PATH)
@click.argument("dst", type=PATH)
@crop_option
@place_options
@click.option("--format", "format", type=FORMAT, help="Format of DST; by default from its suffix.")
@layout_options
@click.option("--src-format", type=FORMAT, help="Format of FIELDS; by default detected.")
@opening_options
@click.option("--overwrite", is_flag=True, help="Replace DST when the new one is complete.")
@parts_options
@json_option
def crops(
    fields: Path,
    objects: Path,
    dst: Path,
    *,
    crop_size: tuple[int, int] | None,
    center: Sequence[str] | None,
    box: Sequence[str] | bool | None,
    pad: Any,
    format: str | None,  # noqa: A002  # as in Python
    layout: dict[str, Any],
    src_format: str | None,
    overwrite: bool,
    of_parts: OfParts,
    as_json: bool,
    **opening: Unpack[OpenOptions],
) -> None:
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
    started_s = time.perf_counter()
    of_parts = of_parts.beside(fields, dst, opening.get("storage"))
    # Check DST before FIELDS, which can take long to open.
    Target.choose(dst, format, WriteSettings(**layout, overwrite=overwrite, target_storage=of_parts.storage))
    on, nulls = on_of_objects(opening), opening.get("nulls", "error")
    types = types_with_objects(opening, objects)
    of_objects: OpenOptions = {"nulls": nulls} if on is None else {"nulls": nulls, "on": on}
    of_objects |= {"column_types": types} if types else {}
    warn_of_layout(fields, opening)
    with failures.naming(**OF_SOURCE):
        opened = open_source(fields, src_format, skip_errors=of_parts.options["on_error"] == "skip", **opening)
    with opened, of_parts.keywords() as keywords:
        write_crops(
            opened,
            objects,
            dst,
            format,
            crop_size=crop_size,
            center=center,
            box=box,
            pad=pad,
            **layout,
            progress=not as_json and sys.stderr.isatty(),
            overwrite=overwrite,
            **keywords,
            **of_objects,
        )
        read = len(opened)
    elapsed_s = time.perf_counter() - started_s
    if of_parts.task is not None:
        tell_share(dst, of_parts, elapsed_s, as_json=as_json)
        return
    written = describe_written(dst, of_parts.storage, format)
    if as_json:
        told = {"fields": str(fields.absolute()), "objects": str(objects.absolute()), "seconds": elapsed_s}
        echo_json({**told, "written": written.as_dict()})
        return
    number = f"{text.count(written.images, 'crop')} of {text.count(read, 'field')}"
    click.echo(f"{click.format_filename(dst)}: {in_words(written, number)}, in {text.duration(elapsed_s)}")
