"""``omearrow-ds info``, ``convert``, ``verify``, ``stats`` and ``show``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from tqdm import tqdm

from omearrow_ds import text
from omearrow_ds.axes import AXES
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import NAMES, PATH, Printed, flags, has_bar, json_option, source_options, writing_options
from omearrow_ds.cli.parts import writing
from omearrow_ds.dataset.show import show as draw
from omearrow_ds.options import OBJECTS, SampleSettings
from omearrow_ds.storage import source
from omearrow_ds.storage.compositions import SelectedRows
from omearrow_ds.storage.describe import Description, describe
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.stats import check_output
from omearrow_ds.storage.stats import stats as measure
from omearrow_ds.storage.verified import VerifiedSource
from omearrow_ds.storage.writing import is_parts

_MANY = 12  # Maximum number of shapes, channels or columns in a list.


@click.command()
@source_options
@json_option
def info(path: Path, **options: Any) -> Printed:
    """Describe a collection: images, shapes, channels, columns, size and storage.

    If a table has several image columns, all are listed, and the rest describes the one that is opened. Up to 64 local
    uint16 images are decoded to find their largest value. The line "preload" states whether the decoded images fit half
    of the available memory, the limit of OMEArrowDataset(PATH).

    \b
    Examples:
      omearrow-ds info plate1/
      omearrow-ds info plate1.parquet --json
      omearrow-ds info plate1.pq --format parquet
    """
    description = describe(path, options.pop("format"), read_pixels=True, **options)
    return description.as_dict(), text.table(_facts(description, is_filtered=options.get("filter") is not None))


def _facts(description: Description, *, is_filtered: bool) -> list[tuple[str, str]]:
    stored, sizes = description.stored, description.sizes
    # Files also contain the images that a filter leaves out.
    has_percent = sizes.decoded_bytes and not is_filtered
    share = f", {sizes.allocated_bytes / sizes.decoded_bytes:.0%} of decoded" if has_percent else ""
    files = f"{text.size(sizes.disk_bytes)} in {text.count(sizes.disk_files, 'file')}"
    pixel_size = (f"{axis} {size:g} {unit or ''}".rstrip() for axis, (size, unit) in description.physical_sizes.items())
    looked_at = "" if not stored.looked_at else f" (in {text.count(stored.looked_at, 'file')} read)"
    looks_like = None
    if description.looks_like is not None:
        pattern, fields, channels = description.looks_like
        whole = f"{text.count(fields, 'field')} x {text.count(channels, 'channel')}"
        looks_like = f"{whole}, one file per channel; add --pattern {pattern}"
    fits = "fits in" if sizes.preload_fits else "larger than"
    rows: list[tuple[str, Any]] = [
        ("path", click.format_filename(description.path)),
        ("format", f"{description.format_label} ({description.format_name})"),
        *_image_columns(description),
        ("images", f"{description.images:,}"),
        ("shape", f"{_kinds({' x '.join(map(str, shape)): n for shape, n in description.shapes.items()})} ({AXES})"),
        ("dtype", _kinds(description.dtypes)),
        ("pixels", description.pixel_range and description.pixel_range.text),
        ("channels", _channels(description)),
        ("looks like", looks_like),
        ("pixel size", ", ".join(pixel_size)),
        ("columns", _some([f"{name} ({kind})" for name, kind in description.columns.items()]) or "none"),
        ("on disk", f"{text.size(sizes.allocated_bytes)}{share}, {files}"),
        ("decoded", text.size(sizes.decoded_bytes)),
        ("preload", f"{fits} half of the {text.size(sizes.available_bytes)} of available memory"),
        ("labels", description.labels and f"{_some(list(description.labels))}, separate images in the collection"),
        ("encoding", stored.encoding),
        ("checksums", "one per image" if description.checksums else "none"),
        ("compression", f"{stored.compression}{looked_at}"),
        ("chunking", f"{stored.chunking}{looked_at}"),
        ("reading", stored.reading),
    ]
    return [(name, value) for name, value in rows if value]


def _image_columns(facts: Description) -> list[tuple[str, str]]:
    """Return lines on the opened image columns, and on all image columns if there are several or one has nulls."""
    opened = " and ".join(facts.image_column)
    if len(facts.image_column) > 1:
        opened = f"{opened}, joined along C"
    if not facts.chosen:
        opened = f"{opened}, as an example; name one by --image-column, or several to join them along C"
    listed = [("", f"{contents.name}: {contents.text}") for contents in facts.image_columns]
    several = len(listed) > 1 or any(contents.nulls for contents in facts.image_columns)
    return [("images in", opened), *(listed if several else [])] if listed else []


def _kinds(numbers: Mapping[str, int]) -> str:
    """Return values, with their numbers of images if there are several."""
    if len(numbers) < 2:
        return "".join(numbers) or "none"
    return _some([f"{value}: {text.count(number, 'image')}" for value, number in numbers.items()], "; ")


def _channels(facts: Description) -> str:
    numbers = sorted({shape[1] for shape in facts.shapes})
    number = " to ".join(map(str, dict.fromkeys([numbers[0], numbers[-1]]))) if numbers else "0"
    if facts.channels is None:
        unknown = "names unknown until a part is fetched"
        return f"{number}, {unknown if facts.stored.looked_at == 0 else 'not the same in all images'}"
    if not any(name is not None for name in facts.channels):
        return f"{number}, no names"
    return f"{number}: {_some([name or '(no name)' for name in facts.channels])}"


def _some(names: list[str], between: str = ", ") -> str:
    more = len(names) - _MANY
    return between.join(names[:_MANY]) + (f"{between}and {more:,} more" if more > 0 else "")


@click.command()
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@writing_options("SRC")
def convert(src: Path, dst: Path, **options: Any) -> Printed:
    """Copy a collection to another format or layout: pixels, ids, OME metadata and columns.

    The write is atomic: if it is stopped, nothing of DST remains, and with --overwrite the old DST is kept. A DST that
    ends with .parts is a folder of parts in the format --format (default: arrow), written here or by --executor. If it
    is stopped, the same command continues it. DST can be at s3://, gs:// or az://. From s3:// to s3:// without a
    --target option, endpoint, region and profile are those of the source.

    \b
    Examples:
      omearrow-ds convert plate1/ plate1.parquet
      omearrow-ds convert load_data.csv plate1.parts --executor local:8 --shuffle-seed 0
      omearrow-ds convert load_data.csv s3://bucket/plate1.parts --target-endpoint http://minio:9000
      omearrow-ds convert plate1.parquet archive.parquet --compression zstd
      omearrow-ds convert plate1.parquet plate1.zarr --overwrite
    """
    with writing({"src": src}, dst, **options) as (opened, keywords, report):
        source.convert(opened, dst, **keywords)
        images, others = opened.images, list(opened.images.header.other_image_columns)
        columns = [column for column in images.details.image_columns() if column.name in images.header.image_column]
        num_filtered = images.num_filtered if isinstance(images, SelectedRows) else 0
        rows = columns[0].images + columns[0].nulls - num_filtered - len(images) if columns else 0
        skipped = [f"skipped: {text.count(rows, 'row')} without an image"] if rows else []
        skipped += [f"skipped: images in {_some(others)}; select columns with --image-column"] if others else []
        return report("image", skipped, left_out={"rows": rows, "image_columns": others})


@click.command()
@source_options
@json_option
def verify(path: Path, **options: Any) -> Printed:
    """Read every image and compare it with its stored checksum.

    The first image that differs or cannot be read is an error. convert and write_images store checksums of pixels,
    shape and dtype by default.

    Parts at a URL are fetched again, without the cache, and compared with the hash in their names first. They pass
    through a temporary folder, in --part-cache if it is given.

    \b
    Examples:
      omearrow-ds verify plate1.parquet
      omearrow-ds verify s3://bucket/plate1.parts --anonymous
      omearrow-ds verify plate1/ --json
    """
    started_s = time.perf_counter()
    with ExitStack() as stack:
        if isinstance(path, Url) and is_parts(path):  # An empty part cache, so that the files on the server are read.
            parent = options.get("part_cache")
            if parent is not None:
                Path(parent).mkdir(mode=0o700, parents=True, exist_ok=True)
            options["part_cache"] = stack.enter_context(TemporaryDirectory(prefix="omearrow-ds-", dir=parent))
        plain = stack.enter_context(closing(source.open_source(path, **options)))
        if plain.header.columns.checksums is None and len(plain):
            remedy = f"create a copy with checksums while the images are intact: omearrow-ds convert {path} COPY"
            raise failures.Failure(f"{plain.header.path}: the collection has no checksums; {remedy}")
        with tqdm(total=len(plain), unit="image", desc="verifying", disable=not has_bar()) as bar:
            for _, images in VerifiedSource(plain).stream():
                bar.update(len(images))
    elapsed_s = time.perf_counter() - started_s
    values = {"path": str(plain.header.path), "images": len(plain), "seconds": elapsed_s}
    count, took = text.count(len(plain), "image"), text.duration(elapsed_s)
    return values, [f"{click.format_filename(plain.header.path)}: {count} as written; {took}"]


@click.command()
@source_options
@click.option(
    "--by", metavar="NAME,...", multiple=True, callback=NAMES, help="Columns to group images by, e.g. Metadata_Plate."
)
@click.option("--out", type=click.Path(path_type=Path), help="File for the table: .parquet, .csv or .json.")
@click.option("--overwrite", is_flag=True, help="Replace that file.")
@json_option
def stats(path: Path, *, out: Path | None, overwrite: bool, **options: Any) -> Printed:
    """Measure pixel statistics per channel in one pass.

    Minimum, maximum, mean, standard deviation, percentiles, and share of saturated pixels. Percentiles are exact for 8
    and 16 bits, and from a sample otherwise, as the table states. Datasets take the file of --out as normalize=.

    \b
    Examples:
      omearrow-ds stats plate1.parquet
      omearrow-ds stats plates/ --pattern "{plate}/{well}_{site}_{channel}.tif" --by Metadata_Plate --out stats.parquet
    """
    if out is not None:
        with failures.naming(path="--out"):
            check_output(out, overwrite=overwrite)
    table = measure(path, progress=has_bar(), **options)
    if out is not None:
        table.write(out, overwrite=overwrite)
    return table.as_dict(), [table.as_text()]


@click.command()
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
def show(path: Path, *, out: Path, by: str | None, **options: Any) -> Printed:
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
    facts = [f"{len(grid.images):,} of {text.count(grid.total, 'image')}"]
    if grid.groups is not None:
        rows = len({image["group"] for image in grid.images})
        facts.append(f"{rows:,} of {text.count(grid.groups, 'value')} of {by}")
    facts += [text.count(len(grid.channels), "channel"), text.size(len(grid.png))]
    lines = [f"{click.format_filename(out)}: {', '.join(facts)}"]
    lines += [] if grid.pixel_range is None else [f"pixels: {grid.pixel_range.text}"]
    return {"out": str(out.absolute()), **grid.as_dict()}, lines
