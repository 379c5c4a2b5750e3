"""Options that several commands share: a path, its format, a size, a folder to work in; and JSON that they write."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.storage.fields import INCOMPLETE, suggestion
from omearrow_ds.storage.formats import formats
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.objects import PADS
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.source import Encoding
from omearrow_ds.storage.tables import NULLS


class _PathOrUrl(click.Path):
    """The name of something on this machine, or else, of a few schemes, a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return it as a path, which a `Url` is too."""
        path = super().convert(value, param, ctx)
        return path if os.path.lexists(path) else url_of(os.fsdecode(path)) or path


PATH = _PathOrUrl(path_type=Path)
FORMAT = click.Choice([fmt.name for fmt in formats()])

# What options are called where a command has a format of its target as well.
OF_SOURCE = {
    "format": "--src-format",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (*OpenOptions.__annotations__, *(each.name for each in fields(Storage)))
        if name not in ("verify", "storage")
    },
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, for programs.")
format_option = click.option(
    "--format", "format", type=FORMAT, help="Format of PATH; by default found from its content or suffix."
)


def names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """Read names that stand between commas, or each in an option of its own (``multiple``)."""
    del ctx, param
    return [name.strip() for value in values for name in value.split(",")] or None


def _column_types(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Read types of columns: of ``code=text,dose=float`` a mapping."""
    types: dict[str, str] = {}
    for value in names(ctx, param, values) or ():
        name, separator, kind = value.rpartition("=")
        if not separator:
            raise click.BadParameter(f"{value!r} names no type; write NAME=TYPE, e.g. code=text", ctx, param)
        types[name] = kind
    return types or None


def size_in_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes, with or without a decimal unit."""
    del ctx, param
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no number of bytes; write 2500000, 2.5MB or 20GB")
    return int(float(found[1]) * _UNITS[found[2]])


def _one_or_more(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | tuple[str, ...] | None:
    del ctx, param
    return values[0] if len(values) == 1 else values or None


_OPENING = (
    click.option(
        "--image-column",
        metavar="COLUMN",
        multiple=True,
        callback=_one_or_more,
        help="Column of images in a table; several, an option each, are joined along C.",
    ),
    click.option(
        "--nulls",
        type=click.Choice(NULLS),
        help="What to do about rows of a table whose image is null; skip leaves them out.",
    ),
    click.option(
        "--level", type=click.IntRange(0), metavar="N", help="Resolution of OME-Zarr images; 0 is the full one."
    ),
    click.option(
        "--pattern",
        metavar="PATTERN",
        help="Of TIFF files of which several make an image: what their names say, e.g. {well}_{site}_{channel}.tif, or "
        "the name of a layout.",
    ),
    click.option(
        "--channels", metavar="NAME,...", multiple=True, callback=names, help="Channels of such images, in order."
    ),
    click.option(
        "--incomplete",
        type=click.Choice(INCOMPLETE),
        help="Whether such images without all of their files are an error, or are left out.",
    ),
    click.option("--root", metavar="FOLDER", help="Folder of the files that a table (LoadData) lists."),
    click.option("--columns", metavar="TABLE", help="CSV or Parquet file whose columns are joined to the images'."),
    click.option("--on", metavar="NAME,...", multiple=True, callback=names, help="Columns to join by."),
    click.option(
        "--column-types",
        metavar="NAME=TYPE,...",
        multiple=True,
        callback=_column_types,
        help="Types of columns in CSV and TSV tables, text, integer or float, e.g. code=text.",
    ),
    click.option("--table", metavar="TABLE", help="Table of a DuckDB file that has several with images."),
    click.option(
        "--engine", metavar="NAME", help="Reader of pixels, for formats that have several, e.g. pages or pyarrow."
    ),
    click.option("--part-cache", metavar="DIR", help="Folder for parts fetched from a URL, which later runs use too."),
    click.option(
        "--part-cache-bytes",
        callback=size_in_bytes,
        metavar="BYTES",
        help="Largest size of the part cache, e.g. 200GB.",
    ),
)


Command = Callable[..., Any]
Given = Callable[[dict[str, Any]], dict[str, Any]]


def added(options: Sequence[Command], command: Command, given_as: Given) -> Command:
    """Add options to a command, which is called with what ``given_as`` makes of what was given."""

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        return command(**given_as(given))

    for option in reversed(options):
        called = option(called)
    return called


def _those_given(names: Iterable[str]) -> Given:
    """Return what leaves out options of some names where nothing was said of them."""
    known = set(names)
    return lambda given: {name: value for name, value in given.items() if value is not None or name not in known}


def storage_options(prefix: str = "", of: str | None = None) -> Callable[[Command], Command]:
    """Add the options that say how the server of a URL is reached, called ``--PREFIXendpoint`` and so on.

    The command gets them as one `Storage`, ``PREFIXstorage``, or None if none was given.
    """
    start, of = prefix.replace("-", "_"), of or prefix.rstrip("-") or "source"
    default = "; else that of a source at s3://, or Amazon's." if prefix else "; else Amazon's, or AWS_ENDPOINT_URL."
    options = (
        click.option(f"--{prefix}anonymous", is_flag=True, help=f"Of a URL as {of}: do not sign requests."),
        click.option(f"--{prefix}endpoint", metavar="URL", help=f"Server of S3's language{default}"),
        click.option(f"--{prefix}region", metavar="NAME", help="Region of an S3 bucket."),
        click.option(f"--{prefix}profile", metavar="NAME", help="Profile of ~/.aws that has the credentials."),
    )

    def collected(given: dict[str, Any]) -> dict[str, Any]:
        said = {each.name: given.pop(f"{start}{each.name}") for each in fields(Storage)}
        with failures.naming(**{name: f"--{prefix}{name}" for name in said}):
            storage = Storage(**said) if any(said.values()) else None
        return {**given, f"{start}storage": storage}

    return lambda command: added(options, command, collected)


def opening_options(command: Command) -> Command:
    """Add the options that say how a path is opened; the command gets those that were given, as `OpenOptions`."""
    reached = storage_options()(added((), command, _those_given(OpenOptions.__annotations__)))
    return added(_OPENING, reached, dict)


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
    help="Crop of samples in pixels, in the middle of images or around objects, e.g. 256 or 256x512.",
)


_LAYOUT = (
    click.option(
        "--encoding",
        type=click.Choice(get_args(Encoding)),
        default="bytes",
        show_default=True,
        help="Of table formats: list holds uint8 and uint16 alone.",
    ),
    click.option(
        "--compression", help="Of the pixels: none, zstd, ..., as DST's format takes; by default its own choice."
    ),
    click.option(
        "--rows-per-group", type=click.IntRange(1), help="Images a row group or record batch (Parquet, Arrow IPC)."
    ),
    click.option(
        "--chunk-shape",
        callback=_size,
        metavar="SIZE",
        help="Chunks (OME-Zarr, ome-arrow) or tiles (TIFF) in pixels, e.g. 256 or 256x512.",
    ),
    click.option(
        "--checksum/--no-checksum",
        default=True,
        show_default=True,
        help="Store a checksum of each image, which is compared when a dataset preloads it.",
    ),
)


def layout_options(command: Command) -> Command:
    """Add the options that say how a collection is written; the command gets them as ``layout``, a dict of keywords."""
    names = ("encoding", "compression", "rows_per_group", "chunk_shape", "checksum")
    return added(_LAYOUT, command, lambda given: {"layout": {name: given.pop(name) for name in names}, **given})


def _box(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | Literal[True] | None:
    found = names(ctx, param, values)
    return True if found == ["auto"] else found


_PLACES = (
    click.option(
        "--center",
        metavar="Y,X",
        multiple=True,
        callback=names,
        help="Columns of the objects' centres, in pixels; by default found by known names.",
    ),
    click.option(
        "--box",
        metavar="Y0,Y1,X0,X1",
        multiple=True,
        callback=_box,
        help="Columns of the objects' boxes, in place of centres; auto finds them by known names.",
    ),
    click.option(
        "--pad", type=click.Choice(PADS), help="What of a crop is beyond its field's edge.  [default: constant]"
    ),
)


_OBJECTS = click.option(
    "--objects", metavar="TABLE", help="CSV or Parquet file of cells: samples are the crops around them."
)


def object_options(command: Command) -> Command:
    """Add the options that make samples of objects; the command gets those that were given."""
    return _OBJECTS(place_options(added((), command, _those_given(("objects", "center", "box", "pad")))))


def place_options(command: Command) -> Command:
    """Add the options that say where objects are."""
    return added(_PLACES, command, dict)


def warn_of_layout(path: Path, opening: Mapping[str, Any]) -> None:
    """Warn on stderr if files of a folder that are named as an instrument names planes are taken for an image each."""
    if opening.get("pattern") or not path.is_dir():
        return
    found = suggestion(path)
    if found is not None and found[2] > 1:
        whole = f"{text.count(found[1], 'field')} x {text.count(found[2], 'channel')}"
        what = f"{click.format_filename(path)}: looks like {whole} in files of their own"
        click.echo(f"warning: {what}, which are taken for an image each; add --pattern {found[0]}", err=True)


def echo_json(found: Any) -> None:
    """Write one JSON document to stdout, in ASCII, as any terminal and any path takes it."""
    click.echo(json.dumps(found, indent=2, allow_nan=False))
