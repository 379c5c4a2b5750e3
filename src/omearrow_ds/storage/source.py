"""Collections of images in storage: open, write and convert."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from omearrow_ds.errors import ArgumentError, ColumnError, ImageColumnError, MissingPathError, PathExistsError
from omearrow_ds.storage import fields, incoming, listed
from omearrow_ds.storage.beside import with_columns
from omearrow_ds.storage.checksums import Hasher
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.formats._detect import found_at, missing
from omearrow_ds.storage.formats._failures import refuse_odd_name, refusing
from omearrow_ds.storage.formats._lancedb import refuse_open_table, table_path
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.iceberg import is_metadata_file
from omearrow_ds.storage.incoming import Columns
from omearrow_ds.storage.jobs import Jobs, chosen_parts, is_skipping, make_parts
from omearrow_ds.storage.joined import MixedColumnError, Part, joined
from omearrow_ds.storage.label_images import refuse_label_dtypes
from omearrow_ds.storage.manifest import PublishedSource, is_published
from omearrow_ds.storage.many import open_below, open_several
from omearrow_ds.storage.materials import Material, Stored
from omearrow_ds.storage.part_cache import PartCache
from omearrow_ds.storage.part_files import is_path, is_several
from omearrow_ds.storage.place import Folder, is_unfinished
from omearrow_ds.storage.planning import Cut
from omearrow_ds.storage.prefix import Prefix
from omearrow_ds.storage.protocol import ImageSource, On, OpenOptions, Paths, StrPath, refuse_unknown
from omearrow_ds.storage.reach import Reach
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.remote_parts import RemoteParts
from omearrow_ds.storage.table_files import ColumnTypes, is_csv
from omearrow_ds.storage.tables import NULLS, open_as
from omearrow_ds.storage.unfinished import Unfinished, place_of, refuse_unfinished
from omearrow_ds.storage.urls import look_at, open_url, urls_of
from omearrow_ds.storage.verified import VerifiedSource
from omearrow_ds.storage.writing import Target, is_parts, write
from omearrow_ds.text import count

Array = np.ndarray[Any, Any]
Encoding = Literal["bytes", "list"]
_OF_URLS = ("storage", "part_cache", "part_cache_bytes")
_PATHS = ("root", "columns", "part_cache")
_OF_FILES = ("pattern", "channels", "incomplete", "root")


def open_images(
    path: Paths,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    engine: str | None = None,
    verify: bool | None = None,
    image_column: str | Sequence[str] | None = None,
    nulls: Literal["error", "skip"] = "error",
    level: int = 0,
    table: str | None = None,
    pattern: str | re.Pattern[str] | None = None,
    channels: Sequence[str] | None = None,
    incomplete: Literal["error", "skip"] = "error",
    root: StrPath | None = None,
    columns: Any = None,
    on: On | None = None,
    column_types: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    part_cache: StrPath | None = None,
    part_cache_bytes: int | None = None,
) -> ImageSource:
    """Open a stored collection of images.

    Parameters
    ----------
    path
        A file, or the folder of a Lance dataset, of TIFF files or of OME-Zarr images. Or a table, CSV or Parquet, that
        lists TIFF files: a column ``FileName_<channel>`` or ``Image_FileName_<channel>`` a channel, with or without
        ``PathName_``, or ``URL_``, as CellProfiler and CytoTable have them. ``Frame_<channel>``, ``Series_<channel>``
        are pages and image series of the files, counted from 0. Rows of equal files and pages are one image.
        Files of one format are read as one collection if they are in a list, fit a text with ``*``, ``?`` or ``[``, or
        stand in a folder that is none of these; so is an Iceberg table, its folder or a metadata file.
        Or a URL, ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://``: of a collection in parts, of which whole
        parts are fetched when they are asked for; or of what is read by ranges, Parquet, uncompressed Arrow IPC, TIFF,
        OME-Zarr; or of a table that lists TIFF files, which may themselves be at URLs.
    format
        Name of a format in `FORMATS`; ``None`` finds it from content or suffix.
    engine
        What reads the pixels of a format that has several readers: of Parquet ``"pages"`` (of the mapped file) or
        ``"pyarrow"``, of ``"parquet_duck"`` also ``"duckdb"``, of Lance ``"pages"`` or ``"lance"``. ``None`` is the
        fastest that can read the file.
    verify
        ``True`` compares every image with its stored checksum each time that it is read, mapped images too. ``None``
        and ``False`` do not; datasets with ``verify=None`` do it once, where they preload.
    image_column
        Of a table: the column that the images are in, or several, whose images are joined along C in that order; they
        must have the same T, Z, Y, X and dtype. ``None`` is the only one, of several the one called ``ome_image``. Of
        other image columns nothing is read. Ids and metadata are of the first one, checksums of ``ome_image`` alone.
    nulls
        What to do about rows of a table whose image, in one of these columns, is null: ``"error"``, or ``"skip"``,
        which leaves them out of everything; ``rows`` then tells which are there.
    level
        Of OME-Zarr: which resolution of the images, 0 is the full one.
    table
        Of a DuckDB file: the table that the images are in, ``"schema.table"`` where several have its name. ``None`` is
        the only one with images, of several the one called ``images``. Of a folder of LanceDB's: its name.
    pattern
        Of a folder of TIFF files, of which several make an image: what their names say, in braces, as
        ``"{well}_{site}_{channel}.tif"``, or in named groups of a regular expression; or the name of a known layout,
        ``"phenix"``, ``"imagexpress"``, ``"cellvoyager"`` or ``"cytation"``. ``channel``, ``z`` and ``t`` become axes,
        in natural order; ``channel_index`` only orders the channels; ``{_}`` stands for anything; ``row`` and
        ``column`` make a well; all else becomes a column, ``Metadata_Well`` and so on, and tells the images apart.
        Folders within take part where the pattern has a ``/``. An image's dtype and shape are taken for those of the
        first one, and compared when it is read.
    channels
        With ``pattern``, or of a table that lists files: which channels, in which order.
    incomplete
        With these: what to do about images of which a file is missing, ``"error"``, or ``"skip"``, which leaves them
        out, with a warning that says how many.
    root
        Of a table that lists files: the folder or URL that they are in, in place of what the table says.
    columns
        A table beside the images: a `pyarrow.Table`, a pandas or polars frame, or the path of a CSV or Parquet file,
        whose columns are joined to those of the images, a row to each image that has its key; nulls where there is
        none. A warning says how many keys match nothing.
    on
        Names of columns to join by, or a mapping of ours to theirs; ``None`` is ``image_id`` where the table has it,
        else the ``Metadata_*`` columns that both have. Wells B7 and B07 are the same, and sites 1 and "1".
    column_types
        Types of columns in CSV and TSV tables, by name: ``{"code": "text"}``, or ``"integer"`` or ``"float"``. By
        default a column is int64 if all values are whole numbers without leading zeros, float64 if they are numbers
        such as ``0.10`` and ``1e-05`` too, and else text, as are ``007``, ``1E5``, ``true`` and dates.
    storage
        Of a URL, or of a table that lists files at URLs: how its server is reached; ``None`` is ``Storage()``.
    part_cache
        Of parts at a URL: a folder that parts are fetched to, which processes of a host and later runs share; ``None``
        is ``omearrow_ds/parts`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Where neither this nor ``part_cache_bytes`` is
        passed, single images of Parquet and Arrow parts are fetched by themselves until all are wanted. Single files
        of Vortex and compressed Arrow IPC at URLs are copied there too, whole, when they are opened.
    part_cache_bytes
        What it holds at most; ``None`` is a tenth of what its disk has free.

    Raises
    ------
    MissingPathError
        If nothing is stored at ``path``.
    FormatError
        If the format is unknown or ambiguous, what is stored is damaged, or images are null.
    ColumnError
        If a table has no OME-Arrow column, or not the one asked for, or images to be joined differ; or if a file has no
        such table, or several, and none was chosen; or if no table has a column of ``column_types``.
    ImageColumnError
        If a table has several, and none was chosen.
    BackendError
        If the format's library is not installed.
    ArgumentError
        If there is no such engine, or ``verify=True`` and no checksums are stored; or ``image_column``, ``nulls``,
        ``level`` or ``table`` is none that can be; or there is no such channel, or ``pattern`` cannot be understood.
    MetadataError
        If keys of ``columns`` occur twice, none matches, or it has a column of a name that is taken.
    """
    opening: OpenOptions = {
        "engine": engine,
        "verify": verify,
        "image_column": image_column,
        "nulls": nulls,
        "level": level,
        "table": table,
        "pattern": pattern,
        "channels": channels,
        "incomplete": incomplete,
        "root": root,
        "columns": columns,
        "on": on,
        "column_types": column_types,
        "storage": storage,
        "part_cache": part_cache,
        "part_cache_bytes": part_cache_bytes,
    }
    return open_source(path, format, **opening)


def open_source(
    path: Paths,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    are_labels: bool = False,
    skip_errors: bool = False,
    **opening: Unpack[OpenOptions],
) -> BaseSource:
    """Open a collection like `open_images`, as the source that this package uses.

    Label images may also be of the dtypes that `omearrow_ds.storage.label_images.LabelSource` reads. With
    ``skip_errors``, files that cannot be read, or differ from most in shape or dtype, are an error when they are read.
    """
    refuse_unknown(opening, OpenOptions.__annotations__, str(path))
    given: dict[str, Any] = {name: value for name, value in opening.items() if value is not None}
    columns, on, verify = (given.pop(name, None) for name in ("columns", "on", "verify"))
    if on is not None and columns is None:
        raise ArgumentError(f"on={on!r}: it says what columns= is joined by; pass columns= with it")
    fields.refuse_incomplete(given.get("incomplete", "error"))
    if given.get("incomplete") == "error":  # as by default
        del given["incomplete"]
    if skip_errors:
        given["skip_errors"] = True
    types = given["column_types"] = ColumnTypes.of(opening.get("column_types"))
    source = _open_paths(path, format, given)
    if not are_labels:
        refuse_label_dtypes(source)
    if columns is not None:
        source = with_columns(source, columns, on, types)
    types.refuse_unknown()
    if verify:
        source = VerifiedSource(source)
    named: dict[str, Any] = {**opening, "column_types": types or None}
    named |= {name: _absolute(named[name]) for name in _PATHS if isinstance(named.get(name), str | os.PathLike)}
    named |= {"are_labels": are_labels, "skip_errors": skip_errors}
    source.opened_by = partial(open_source, _absolute(path), format, **named)
    return source


def _open_paths(path: Paths, format_name: str | None, given: Mapping[str, Any]) -> BaseSource:
    """Open what a path leads to, or several paths.

    A column of text tables with text in one of them and numbers in another is text in all of them.
    """
    urls = _urls(path, given)
    try:
        if urls is not None:
            return _open_urls(path, urls, format_name, given)
        if is_several(path) and not _is_url(path):
            return open_several(path, format_name, partial(_open_one, format_name=format_name, **given))
    except MixedColumnError as error:
        types: ColumnTypes = given["column_types"]
        if error.column in types or error.column not in types.names:
            raise
        types[error.column] = "text"
        return _open_paths(path, format_name, given)
    if isinstance(path, str | os.PathLike):
        return _open_one(path, format_name, **given)
    refuse_open_table(path)
    raise ArgumentError(f"{path!r}: expected a path; pass one, a list of paths, or a glob pattern that matches files")


def _is_url(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and url_of(path) is not None


def _urls(path: Any, given: Mapping[str, Any]) -> list[Url] | None:
    """Return the URLs that several paths are, or that a URL with a wildcard fits; None where it is not so."""
    text = isinstance(path, str | os.PathLike)
    if not is_several(path) or (text and not _is_url(path)):
        return None
    return urls_of(path, Reach(_storage(given.get("storage"))))


def _open_urls(path: Any, urls: Sequence[Url], format_name: str | None, given: Mapping[str, Any]) -> BaseSource:
    """Open several URLs as one collection."""
    label = Url(os.path.commonpath([url.parent for url in urls])) / f"({count(len(urls), 'URL')})"
    parts = [Part(url, str(url).removeprefix(f"{label.parent}/"), {}) for url in urls]
    given_again = path if isinstance(path, str | os.PathLike) else list(urls)
    return joined(label, parts, partial(_open_one, format_name=format_name, **given), given_again)


def _absolute(path: Any) -> Any:
    """Return a path, or several, or a text that they fit, as any process finds it."""
    if isinstance(path, str):
        return str(_place(path))
    return _place(path) if isinstance(path, os.PathLike) else list(map(_absolute, path))


def _open_one(
    path: StrPath,
    format_name: str | None,
    *,
    column_types: ColumnTypes,
    look: bool = False,
    skip_errors: bool = False,
    **given: Any,
) -> BaseSource:
    """Open the collection at one path; ``look`` and ``skip_errors`` are as in `_open_stored`."""
    of_files = {name: given.pop(name) for name in _OF_FILES if name in given}
    where = _place(path)
    of_urls = _of_urls(where, given)
    refuse_odd_name(where)
    reach = Reach(_storage(of_urls.get("storage")), (of_urls.get("part_cache"), of_urls.get("part_cache_bytes")))
    if isinstance(where, Url) and not is_parts(where):
        return open_url(where, format_name, of_files, reach, column_types, skip_errors=skip_errors, **given)
    open_listing = partial(_open_fields, where, reach=reach, types=column_types, skip_errors=skip_errors)
    with refusing(where, "a collection of images", (OSError,)):
        if not isinstance(where, Url) and not where.exists():
            raise missing(path)
        opened = open_listing(of_files) if of_files or is_csv(where) else None
    try:
        source: BaseSource
        if opened is not None:
            source = opened
        elif isinstance(where, Url) or is_published(where):
            source = _open_published(where, format_name, of_urls, **given)
        else:
            if is_unfinished(where):
                refuse_unfinished(Folder(where), _open_part)
            source = _open_stored(where, format_name, look=look, skip_errors=skip_errors, **given)
    except ColumnError as error:
        has_images = isinstance(error, ImageColumnError) or "image_column" in given
        opened = None if has_images or isinstance(where, Url) else open_listing({})
        if opened is None:
            raise
        source = opened
    if opened is None and not isinstance(where, Url):  # a table may list files at URLs
        _refuse_of_urls(where, of_urls)
    if opened is not None:
        wrong = {name: given.get(name) for name in ("engine", "image_column", "level", "table") if given.get(name)}
        wrong |= {"format": format_name} if format_name not in (None, source.format.name) else {}
        for name, value in wrong.items():
            raise ArgumentError(f"{name}={value!r}: images of {where} are joined of TIFF files; leave it out")
    return source


def _place(path: StrPath) -> Path:
    """Return where a collection is: at a URL if it is called as one, and nothing of that name is here."""
    url, here = url_of(path), Path(path).absolute()
    return here if url is None or here.exists() else url


def _of_urls(where: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Take what is for URLs alone of the options that were given."""
    found = {name: given.pop(name) for name in _OF_URLS if name in given}
    if not isinstance(where, Url):
        _refuse_of_urls(where, {name: value for name, value in found.items() if name != "storage"})
    return found


def _refuse_of_urls(where: Path, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        raise ArgumentError(f"{name}={value!r}: it is for URLs; {where} is none, leave it out")


def _storage(given: Any) -> Storage:
    """Return how servers are reached, or raise `ArgumentError`."""
    if not isinstance(given, Storage | None):
        raise ArgumentError(f"storage={type(given).__name__}(...); it must be omearrow_ds.Storage(...), or None")
    return given or Storage()


def _open_fields(
    where: Path, given: Mapping[str, Any], *, reach: Reach, types: ColumnTypes, skip_errors: bool
) -> fields.FieldSource | None:
    """Open images of several files each, by a pattern or a table that lists them; None if there is neither."""
    channels, incomplete = given.get("channels"), given.get("incomplete", "error")
    if "pattern" in given:
        if "root" in given:
            raise ArgumentError(f"root={given['root']!r}: it is for tables that list files, not for pattern=")
        return fields.open_pattern(where, given["pattern"], channels, incomplete, skip_errors=skip_errors)
    if where.is_file() and listed.lists_files(where):
        return listed.open_listed(where, channels, incomplete, given.get("root"), reach, types, skip_errors=skip_errors)
    for name, value in given.items():
        also = "" if name == "root" else ", and beside pattern= for folders of TIFF files"
        raise ArgumentError(f"{name}={value!r}: it is for tables that list TIFF files{also}; {where} is none")
    return None


def _open_published(
    where: Path, format_name: str | None, of_urls: Mapping[str, Any], *, engine: str | None = None, **given: Any
) -> BaseSource:
    """Open a folder of parts of our own, which hold no null images, here or on a server."""
    for name, value in given.items() - {("nulls", "skip"), ("nulls", "error"), ("level", 0)}:
        raise ArgumentError(f"{name}={value!r}: {where} holds parts that were written with one column; leave it out")
    opening = partial(_open_part, engine=engine)
    found = _open_remote(where, opening, **of_urls) if isinstance(where, Url) else PublishedSource(where, opening)
    if format_name not in (None, found.format.name):
        raise ArgumentError(f"format={format_name!r}: the parts of {where} are {found.format.label}; leave it out")
    return found


def _open_remote(
    where: Url,
    opening: partial[BaseSource],
    *,
    storage: Storage | None = None,
    part_cache: StrPath | None = None,
    part_cache_bytes: int | None = None,
) -> RemoteParts:
    """Open a collection in parts on a server."""
    reach = Reach(_storage(storage))
    looking = (
        partial(look_at, reach=reach, **opening.keywords) if (part_cache, part_cache_bytes) == (None, None) else None
    )
    try:
        return RemoteParts(where, opening, reach.storage, PartCache.choose(part_cache, part_cache_bytes), looking)
    except MissingPathError:
        place = None if where.scheme in ("http", "https") else Prefix(where, reach.storage)
        if place is None or not place.begun:
            raise
        refuse_unfinished(place, opening)


def _open_stored(
    where: Path,
    format_name: str | None,
    *,
    engine: str | None = None,
    image_column: str | Sequence[str] | None = None,
    nulls: str = "error",
    level: int = 0,
    table: str | None = None,
    look: bool = False,
    skip_errors: bool = False,
) -> BaseSource:
    """Open a collection in one of the formats.

    With ``look``, only ids, shapes, dtypes and columns are found out. ``skip_errors`` is as in `open_source`.
    """
    if nulls not in NULLS:
        raise ArgumentError(f"nulls={nulls!r}; it must be one of {', '.join(map(repr, NULLS))}")
    with refusing(where, "a collection of images", (OSError,)):
        named = None if format_name is None else get_format(format_name)
        fmt = found_at(where) if named is None and not is_metadata_file(where) else named
        if fmt is None or (where.is_dir() and not fmt.in_folder):
            how: dict[str, Any] = {"engine": engine, "image_column": image_column, "nulls": nulls, "level": level}
            opened = table_path(where, table) if fmt is None and where.is_dir() else None
            if opened is not None:
                return _open_stored(opened, None, **how)
            return open_below(where, format_name, partial(_open_stored, format_name=format_name, table=table, **how))
    source_type = fmt.module().Source
    engines = getattr(source_type, "engines", ())
    if engine is not None and engine not in engines:
        known = f"one of {', '.join(engines)}" if engines else "None: it has one reader only"
        raise ArgumentError(f"engine={engine!r}; for format {fmt.name!r} it must be {known}")
    if image_column is not None and fmt.kind != "table":
        raise ArgumentError(f"image_column={image_column!r}: {fmt.label} is no table with columns; leave it out")
    if isinstance(level, bool) or not isinstance(level, int) or level < 0:
        raise ArgumentError(f"level={level!r}; it must be a whole number from 0")
    if level and not getattr(source_type, "has_levels", False):
        raise ArgumentError(f"level={level}: {fmt.label} has no levels of resolution; leave it out")
    if not isinstance(table, str | None):
        raise ArgumentError(f"table={table!r}; it must be the name of a table, or None")
    if table is not None and not getattr(source_type, "has_tables", False):
        raise ArgumentError(f"table={table!r}: {fmt.label} has no tables to choose from; leave it out")
    # An engine may refuse pixels, and several columns may not fit each other.
    alone = engine is None and (image_column is None or isinstance(image_column, str))
    look = look and alone and getattr(source_type, "looks", False)
    skip_errors = skip_errors and getattr(source_type, "can_skip", False)
    given = {"engine": engine, "level": level, "table": table, "look": look, "skip_errors": skip_errors}
    return open_as(fmt, source_type, where, image_column=image_column, nulls=nulls, **given)


def write_images(
    images: Iterable[Array],
    path: StrPath,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    axes: str | None = None,
    encoding: Encoding = "bytes",
    compression: str | None = None,
    rows_per_group: int | None = None,
    chunk_shape: Sequence[int] | None = None,
    image_ids: Iterable[str] | None = None,
    metadata: Iterable[Mapping[str, Any] | None] | None = None,
    columns: Columns | None = None,
    checksum: bool = True,
    progress: bool = False,
    overwrite: bool = False,
) -> None:
    """Write images to a new collection; it appears whole or not at all.

    Parameters
    ----------
    images
        Arrays, from any iterable: a few at a time are in memory. Shapes and dtypes may differ.
    path
        Target; its suffix names the format where ``format`` is ``None``.
    axes
        Axes of every array, e.g. ``"CYX"``. ``None`` accepts 2-D as ``"YX"`` and 5-D as ``"TCZYX"``.
    encoding
        Of the table formats: ``"bytes"`` holds every dtype, ``"list"`` only uint8 and uint16.
    compression
        Of the pixels, ``"none"`` or one that the format takes; ``None`` is the format's own choice, for which
        ``docs/explanation/layouts.md`` has the measurements.
    rows_per_group
        Of Parquet and Arrow IPC: images a row group or record batch, all of which is in memory while it is written;
        ``None`` is the format's own choice.
    chunk_shape
        Of OME-Zarr, OME-TIFF and ome-arrow: ``(height, width)`` in pixels of the chunks, or tiles, that a plane is cut
        into, of TIFF multiples of 16. A part of an image, ``source.read(index, region=...)``, is read by the chunks
        that it meets. ``None`` is the format's own choice: chunks of 1,024 x 1,024, whole planes, whole images.
    image_ids
        Distinct ids, one an image; by default ``image-00000`` and so on.
    metadata
        One dict an image with ome-arrow's field names (`omearrow_ds.codec.schema.METADATA_FIELDS`);
        missing fields are null.
    columns
        Further columns, one row an image.
    checksum
        Store a checksum of each image's dtype, shape and pixels, which is compared when a dataset preloads it. It is
        the same in every format. Ids, metadata and columns are not part of it.
    progress
        Show a progress bar.
    overwrite
        Replace what exists at ``path``, once the new collection is complete.

    Raises
    ------
    PathExistsError
        If ``path`` exists and ``overwrite`` is not set.
    ImageError
        If an image's rank does not fit ``axes``, or its dtype does not fit the encoding.
    MetadataError
        If ids, metadata or columns do not fit the images.
    ArgumentError
        If the format has no such encoding, compression, row groups or chunks.
    """
    where = str(path)
    ids = None if image_ids is None else incoming.distinct_ids(image_ids, where)
    described = incoming.describe(images, axes, ids, metadata, where, Hasher() if checksum else None)
    total = len(images) if isinstance(images, Sequence) else None
    table = incoming.as_table(columns, where)
    layout = (encoding, compression, rows_per_group, chunk_shape)
    if is_parts(path):
        raise ArgumentError(
            f"{path}: parts are made of a collection; write one file, and convert that, or choose a suffix"
        )
    target = Target.choose(path, format, *layout, checksum=checksum, overwrite=overwrite)
    write(described, target, table, total, progress=progress)


def convert(
    src: Paths | ImageSource,
    dst: StrPath,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    encoding: Encoding = "bytes",
    compression: str | None = None,
    rows_per_group: int | None = None,
    chunk_shape: Sequence[int] | None = None,
    checksum: bool = True,
    progress: bool = False,
    overwrite: bool = False,
    part_bytes: int | None = None,
    shuffle_seed: int | None = None,
    group_by: str | Sequence[str] | None = None,
    executor: Executor | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    task: tuple[int, int] | None = None,
    target_storage: Storage | None = None,
    **opening: Unpack[OpenOptions],
) -> None:
    """Copy a collection to another format: pixels, ids, OME metadata and columns.

    Of a table, one image column goes along, or what several make joined, and is called ``ome_image`` where the target
    is a table; that there are others is warned of, unless ``image_column`` says what is wanted.

    Images that have a checksum are verified, whatever ``checksum`` says, and it goes along: what was damaged before is
    an error, and never gets a checksum that says it is right.

    A target called ``.parts`` is a folder of parts, each an ordinary collection of ``format``, ``"arrow"`` by default,
    which become one when the last one is there. The same call goes on where an earlier one was ended. It may be a URL,
    ``s3://``, ``gs://`` or ``az://``: each part is made in a private temporary file, and sent.

    Parameters
    ----------
    src
        Path of a collection, or an open source.
    dst, format, encoding, compression, rows_per_group, chunk_shape, checksum, progress, overwrite
        As in `write_images`.
    part_bytes, shuffle_seed, group_by, executor, on_error, task
        Of a target in parts. ``part_bytes``: how much the decoded images of a part take at most, by default 64 MiB,
        less of formats whose writers hold more than three times their data, as others may register. What makes a part
        takes 90 MB and 2.3 times that with Vortex, 80 MB and 2.1 times with DuckDB.
        ``shuffle_seed``: images are permuted over all parts of a plate. ``group_by``: columns; no part has images of
        two values of theirs, nor of two plates (``Metadata_Plate``). ``executor``: a `concurrent.futures.Executor`
        whose workers make the parts, e.g. ``client.get_executor()`` of a Dask client; None makes them here.
        ``on_error="skip"``: images that cannot be read are skipped, and listed in ``failed.csv`` and ``parts.json``.
        In folders and tables of TIFF or OME-Zarr files, so are images that differ from most in shape or dtype. To find
        these, the header of each file is read before. A tie is an error. This needs a path, not an open source.
        ``task=(K, N)``: make only the K-th of N shares, from 1; `publish` makes them one when all are there.
    target_storage
        Of a target at a URL: how its server is reached; ``None`` is ``Storage()``. Workers look credentials up where
        they are. ``storage`` is for the URL of ``src``.
    opening
        How to open a path, as in `open_images`.

    Raises
    ------
    OMEArrowDSError
        As in `open_images` and `write_images`; an `ArgumentError` if an open source is to be opened in some way.
    """
    skip_errors = is_skipping(on_error)
    with opened(src, opening, skip_errors=skip_errors) as source:
        if is_path(src) and source.other_image_columns and opening.get("image_column") is None:
            left = ", ".join(map(repr, source.other_image_columns))
            what = f"{source.path}: {source.image_column[0]!r} is converted, the images in {left} are not"
            warnings.warn(f"{what}; pass image_column= to choose", UserWarning, stacklevel=2)
        refuse_over_source(source, dst)
        layout = (encoding, compression, rows_per_group, chunk_shape)
        target = Target.choose(dst, format, *layout, checksum=checksum, overwrite=overwrite, storage=target_storage)
        in_parts = chosen_parts(target, part_bytes, shuffle_seed, group_by, executor, skip_errors, task)
        material = Stored(source, checksum=checksum)
        if in_parts is not None:
            write_parts(material, target, *in_parts, progress=progress)
            return
        columns = source.columns if source.columns.num_columns else None
        write(material.in_order(), target, columns, len(source), progress=progress)


def opened(
    images: Paths | ImageSource, opening: OpenOptions, *, skip_errors: bool = False
) -> AbstractContextManager[BaseSource]:
    """Return an open source, which stays open, or that of a path, which is closed; the former is not opened again."""
    if is_path(images):
        return open_source(images, skip_errors=skip_errors, **opening)
    refuse_opening_again(opening, "a source")
    if not isinstance(images, BaseSource):
        refuse_open_table(images)
        raise ArgumentError(f"{images!r}: is no source that open_images returned; pass one, or a path")
    return nullcontext(images)


def write_parts(material: Material, target: Target, cut: Cut, jobs: Jobs, *, progress: bool) -> None:
    """Make a collection in parts of any material, or a share of its parts."""
    unfinished = make_parts(material, target, cut, jobs, _open_part, progress=progress)
    if jobs.task is None:
        unfinished.publish()


def unfinished_at(path: StrPath, storage: Storage | None = None) -> Unfinished:
    """Return a collection in parts that is being made, at a path or a URL."""
    return Unfinished(place_of(url_of(path) or Path(path).absolute(), storage), _open_part)


def publish(path: StrPath, *, storage: Storage | None = None) -> None:
    """Make the parts that ``convert(..., task=(K, N))`` or ``write_crops`` made a collection, once all are there.

    Parameters
    ----------
    path
        What they were told as target.
    storage
        Of a URL, or of a table that lists files at URLs: how its server is reached; ``None`` is ``Storage()``.

    Raises
    ------
    FormatError
        If parts are missing; it says which.
    PathExistsError
        If it is published already.
    """
    unfinished_at(path, storage).publish()


def _open_part(path: Path, engine: str | None = None) -> BaseSource:
    return _open_stored(path, None, engine=engine)


def refuse_opening_again(opening: OpenOptions, what: str) -> None:
    """Raise `ArgumentError` if ``what``, which is open, is to be opened in some way."""
    refuse_unknown(opening, OpenOptions.__annotations__, what)
    if opening:
        given = ", ".join(f"{name}=" for name in opening)
        raise ArgumentError(f"{given}: {what} that is open was opened as it is; pass a path with it")


def refuse_over_source(src: BaseSource, dst: StrPath) -> None:
    """Raise `PathExistsError` if what is written would replace what it is read from, or be a part of it hereafter."""
    url = url_of(dst)
    if url is not None:
        if src.path == url:
            raise PathExistsError(f"{dst}: is the source; convert to another URL")
        return
    target = Path(dst).resolve()
    if target.exists():
        held = any(each.resolve() == target for each in src.stored_files())
        if held or src.path.resolve().is_relative_to(target):
            raise PathExistsError(f"{dst}: is the source, or the folder that it is in; convert to another path")
    of_parts = src.path.is_dir() and src.format.kind == "table" and not src.format.in_folder
    if of_parts and target.is_relative_to(src.path.resolve()):
        raise PathExistsError(f"{dst}: is in the source's folder, and would be a part of it; convert to another path")
