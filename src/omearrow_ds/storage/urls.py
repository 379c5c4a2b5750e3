"""Opens URLs that are not collections in parts: files and folders by range requests, and tables that list files."""

from __future__ import annotations

import fnmatch
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omearrow_ds.errors import ArgumentError, ColumnError, FormatError, ImageColumnError, MissingPathError
from omearrow_ds.storage import listed
from omearrow_ds.storage.formats import FORMATS, Format, get_format, of_suffix
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES, ZARR_FILES, is_hidden
from omearrow_ds.storage.formats._folder import natural_key
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.part_files import has_hidden
from omearrow_ds.storage.protocol import Paths
from omearrow_ds.storage.reach import BucketReader
from omearrow_ds.storage.table_files import ColumnTypes, is_csv
from omearrow_ds.storage.tables import open_as

_MAGIC = re.compile(r"[*\[]")  # A question mark is not a wildcard in URLs.


def open_url(
    url: Url,
    format_name: str | None,
    of_files: Mapping[str, Any],
    reach: BucketReader,
    types: ColumnTypes,
    *,
    skip_errors: bool = False,
    **given: Any,
) -> Images:
    """Open a collection at a URL; for options, see `omearrow_ds.open_images`, and for ``skip_errors``, `convert`."""
    open_table = partial(_open_table_of_files, url, of_files, reach, types, skip_errors=skip_errors)
    if of_files or is_csv(url):
        _refuse_cache(url, reach)
        if "pattern" in of_files:
            return listed.open_fields(url, of_files, reach, types, skip_errors=skip_errors)
        return open_table()
    try:
        return _open_stored(url, format_name, reach, skip_errors=skip_errors, **given)
    except ColumnError as error:
        if isinstance(error, ImageColumnError) or "image_column" in given:
            raise
        try:
            return open_table()
        except ArgumentError:
            raise error from None


def _open_table_of_files(
    url: Url, options: Mapping[str, Any], reach: BucketReader, types: ColumnTypes, *, skip_errors: bool
) -> Images:
    """Open the fields in a table that lists files; the table is fetched whole."""
    with tempfile.TemporaryDirectory(prefix="omearrow_ds.") as folder:
        copy = Path(folder, url.name)
        copy.write_bytes(reach.read(str(url)))
        if not listed.lists_files(copy):
            option, value = next(iter(options.items()), (None, ...))
            raise ArgumentError(
                "the table lists no TIFF files", path=url, option=option, value=value, remedy="pass another table"
            )
        return listed.open_fields(url, options, reach, types, copy, skip_errors=skip_errors)


def _refuse_cache(url: Url, reach: BucketReader) -> None:
    for name, value in zip(("part_cache", "part_cache_bytes"), reach.copies or (), strict=False):
        if value is not None:
            raise ArgumentError(
                f"applies only to parts (NAME.parts), Vortex and compressed Arrow files, not to {url}; leave it out",
                option=name,
                value=value,
            )


def open_remote_part(part: Path, *, reach: BucketReader, engine: str | None = None) -> Images:
    """Open one part of a collection in parts; ``part`` is its URL."""
    return _open_stored(Url(part), None, reach, engine=engine)


def _open_stored(
    url: Url, format_name: str | None, reach: BucketReader, *, skip_errors: bool = False, **options: Any
) -> Images:
    fmt = _format_at(url, reach) if format_name is None else get_format(format_name)
    if not (fmt.by_ranges or fmt.fetched_whole):
        known = ", ".join(other.name for other in FORMATS if other.by_ranges or other.fetched_whole)
        parts = ", ".join(other.name for other in FORMATS if not other.in_folder)
        raise FormatError(
            f"{url}: {fmt.label} cannot be read from URLs, only {known}; copy it to this machine, or convert it to "
            f"parts (NAME.parts) of {parts}"
        )
    if not fmt.fetched_whole:
        _refuse_cache(url, reach)
    module = fmt.module()
    source_type = getattr(module, "RemoteSource", module.Source)
    for name, value in options.items():
        if value not in (None, 0) and name not in ("nulls", *fmt.url_options):
            raise ArgumentError(
                f"not supported for {fmt.label} at a URL ({url})", option=name, value=value, remedy="leave it out"
            )
    skip_errors = skip_errors and "skip_errors" in fmt.open_options
    return open_as(fmt, source_type, url, objects=reach, skip_errors=skip_errors, **options)


def _format_at(url: Url, reach: BucketReader) -> Format:
    """Return the format at a URL, by its suffix, or otherwise by the names below it."""
    if url.name.lower().endswith(TIFF_SUFFIXES):
        return get_format("tiff")
    fmt = of_suffix(url.name)
    if fmt is not None:
        return fmt
    names = [name for name in reach.inside(str(url)) if name in ZARR_FILES or not is_hidden(name)]
    first = {name.partition("/")[0] for name in names}
    if any("/" not in name and name.lower().endswith(TIFF_SUFFIXES) for name in names):
        return get_format("tiff")
    if "_versions" in first:
        return get_format("lance")
    if any(name.rpartition("/")[2] in ZARR_FILES and name.count("/") < 2 for name in names):
        return get_format("ome_zarr")
    contents = ", ".join(map(repr, sorted(first)[:5])) or "hidden files"
    raise FormatError(
        f"{url}: contains no images that can be read from URLs, but {contents}; pass the URL of a folder with images, "
        f"format= with a name, or pattern= for images in subfolders"
    )


def urls_of(paths: Paths, reach: BucketReader) -> list[Url] | None:
    """Return the URLs in a list, or the sorted URLs that match a glob pattern; None if ``paths`` are local.

    A glob at a URL matches as a local glob does. Also None if an object has exactly the name of the glob. Raises
    `ArgumentError` if only some paths in a list are URLs; `MissingPathError` if no object matches.
    """
    if isinstance(paths, str | os.PathLike):
        text = str(url_of(paths))
        fixed = _MAGIC.split(text)[0].rpartition("/")[0]
        names = [f"{fixed}/{name}" for name in reach.inside(fixed)]
        if any(name == text or name.startswith(f"{text}/") for name in names):
            return None
        steps = text.split("/")
        visible = (name for name in names if not has_hidden(name.split("/"), steps))
        matches = sorted((name for name in visible if _fits(name.split("/"), steps)), key=natural_key)
        if not matches:
            raise MissingPathError(f"{text}: no object matches the pattern; correct the pattern")
        return [url for name in matches if (url := url_of(name)) is not None]
    urls = [url_of(path) for path in paths]
    known = [url for url in urls if url is not None]
    if known and len(known) < len(urls):
        raise ArgumentError(f"{paths!r}: expected only URLs or only local paths", remedy="copy the other files")
    return known or None


def _fits(names: Sequence[str], steps: Sequence[str]) -> bool:
    """Whether the names of folders and object in a path match the steps of a glob."""
    if not steps:
        return not names
    if steps[0] == "**":
        return any(_fits(names[first:], steps[1:]) for first in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], steps[0]) and _fits(names[1:], steps[1:])
