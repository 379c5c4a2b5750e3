"""Collections of images in storage: open, write and convert."""

from __future__ import annotations

import glob
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError, ImageColumnError, MissingPathError, PathExistsError
from omearrow_ds.options import OpenSettings, WriteSettings, check_path, refuse_options, refuse_unknown, refuse_value
from omearrow_ds.storage import fields, listed, writing
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.compositions import refuse_label_dtypes, select_rows
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._detect import found_at, missing, refuse_open_table, table_path
from omearrow_ds.storage.formats._error_translation import refuse_odd_name, translate_errors
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.jobs import Material, SourceImages, make_parts
from omearrow_ds.storage.joined_parts import MixedColumnError, Part, open_joined
from omearrow_ds.storage.keys import with_columns
from omearrow_ds.storage.manifest import is_published
from omearrow_ds.storage.part_cache import PartCache
from omearrow_ds.storage.part_files import ICEBERG_METADATA, is_path, is_several, open_below, open_several
from omearrow_ds.storage.parts_stores import is_unfinished, parts_store
from omearrow_ds.storage.parts_target import PartsTarget
from omearrow_ds.storage.protocol import ImageSource, On, OpenOptions, Paths, StrPath
from omearrow_ds.storage.published_parts import PublishedParts, open_published
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.remote_parts import RemoteParts
from omearrow_ds.storage.row_filter import RowFilter
from omearrow_ds.storage.table_files import CSV_SUFFIXES, ColumnTypes
from omearrow_ds.storage.tables import open_with
from omearrow_ds.storage.urls import BucketReader, open_stored_url, refuse_cache, urls_of
from omearrow_ds.storage.verified import VerifiedSource
from omearrow_ds.storage.writing import Columns, Target, is_parts, write
from omearrow_ds.text import count

Encoding = Literal["bytes", "list"]
_URL_OPTIONS = ("storage", "part_cache", "part_cache_bytes")
_PATH_OPTIONS = ("root", "columns", "part_cache")
_LISTING_OPTIONS = ("pattern", "channels", "incomplete", "root")


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
    filter: str | pc.Expression | None = None,  # noqa: A002  # the public name
    storage: Storage | None = None,
    part_cache: StrPath | None = None,
    part_cache_bytes: int | None = None,
) -> ImageSource:
    """Open a collection of images from a file, folder, table or URL.

    Options by topic:

    - files: ``format``, ``engine``, ``verify``, ``level``;
    - tables: ``image_column``, ``nulls``, ``table``, ``filter``;
    - plates: ``pattern``, ``channels``, ``incomplete``, ``root``, ``columns``, ``on``, ``column_types``;
    - URLs: ``storage``, ``part_cache``, ``part_cache_bytes``.

    Parameters
    ----------
    path
        File, folder, glob, list of files, or URL of a collection, or a CSV or Parquet table that lists TIFF files. See
        `docs/how-to/plate-folders.md`.
    format
        ``None`` detects the format from content or suffix. Otherwise a name in `FORMATS`.
    engine
        ``None`` chooses the fastest reader of the file. Parquet has ``"pages"`` (memory-mapped) and ``"pyarrow"``,
        ``"parquet_duck"`` also ``"duckdb"``, Lance ``"pages"`` and ``"lance"``.
    verify
        ``True`` compares every image with its checksum at each read. ``None`` and ``False`` do not; datasets with
        ``None`` compare images that they preload.
    image_column
        ``None`` uses the only image column of a table, or the one named ``ome_image``; a name chooses another column.
        Several names join their images along C; T, Z, Y, X and dtype must be equal.
    nulls
        ``"error"`` refuses rows with a null image. ``"skip"`` leaves them out; `ImageSource.rows` lists the others.
    level
        Resolution level of OME-Zarr images. 0 is the full resolution.
    table
        ``None`` uses the only image table of a DuckDB file, or the one named ``images``. Otherwise ``"table"`` or
        ``"schema.table"``, or the name of a table in a LanceDB folder.
    pattern
        ``None`` treats each TIFF file as an image. Otherwise a file name pattern such as
        ``"{well}_{site}_{channel}.tif"``, a regular expression with named groups, or the layout ``"phenix"``,
        ``"imagexpress"``, ``"cellvoyager"`` or ``"cytation"`` (`docs/reference/file-names.md`).
    channels
        ``None`` reads all channels in natural order. Otherwise names of channels in the order to read them, for
        ``pattern`` or a table that lists files.
    incomplete
        ``"error"`` refuses images without all of their files. ``"skip"`` leaves them out, with a warning.
    root
        ``None`` uses the folders of a table that lists files. Otherwise the folder or URL of its files.
    columns
        ``None``, or a table whose columns are joined to those of the images: a `pyarrow.Table`, a pandas or polars
        frame, or a local CSV, TSV or Parquet file. Images without a row get nulls, with a warning.
    on
        ``None`` joins by ``image_id`` if the table has it, else by the ``Metadata_*`` columns that both have, else by
        ``ImageNumber``. Otherwise names of columns, or a mapping from image columns to table columns.
    column_types
        ``None`` derives types of CSV and TSV columns from their values (`docs/reference/column-types.md`). A mapping
        such as ``{"code": "text"}`` overrides them with ``"text"``, ``"integer"`` or ``"float"``.
    filter
        ``None`` opens all images. Otherwise those for which a condition on their columns, those of ``columns`` or
        ``image_id`` is true: a text such as ``"dose > 1 and treatment in ('DMSO', 'TAXOL')"``, or a
        `pyarrow.compute.Expression` (`docs/how-to/filter-images.md`).
    storage
        ``None`` is ``Storage()``. Otherwise endpoint, region and credentials for URLs.
    part_cache
        ``None`` is ``omearrow_ds/parts`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; otherwise a folder for parts and files
        that are fetched from URLs. Without this and ``part_cache_bytes``, single images of Parquet and Arrow parts are
        fetched until all images are requested.
    part_cache_bytes
        Size limit of the cache in bytes. ``None`` is a tenth of the free space of its disk.

    Returns
    -------
    ImageSource
        The open collection. Close it, or use it as a context manager.

    Raises
    ------
    MissingPathError
        If nothing exists at ``path``.
    FormatError
        If the format is unknown or ambiguous, the file is damaged, or images are null.
    ColumnError
        If a table, image column, or column of ``column_types`` or ``filter`` does not exist, joined images differ, or
        ``filter`` compares values of different types.
    ImageColumnError
        If a table has several image columns, and none was chosen.
    BackendError
        If the library of the format is not installed.
    ArgumentError
        If an option is invalid for this collection, or ``verify=True`` and no checksums are stored.
    SelectError
        If no image fulfills ``filter``.
    MetadataError
        If keys of ``columns`` are duplicate, none matches, or a column name already has other values.
    StorageError
        If a server does not answer or refuses.

    Examples
    --------
    >>> import omearrow_ds
    >>> names = "{well}_01_{channel_index}_{site}_{channel}_001.tif"
    >>> with omearrow_ds.open_images("plate", pattern=names) as fields:
    ...     print(len(fields), fields.shapes[0].tolist(), fields.columns.column_names)
    10 [1, 2, 1, 160, 160] ['Metadata_Well', 'Metadata_Site']
    """
    return CollectionSource(open_source(**locals()))


def open_source(
    path: Paths,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    are_labels: bool = False,
    skip_errors: bool = False,
    **opening: Unpack[OpenOptions],
) -> Images:
    """Open a collection as `open_images` does, and return the internal type `Images`.

    Label images may have more dtypes (`LabelSource`). With ``skip_errors``, unreadable or odd files fail when read.
    """
    options = OpenSettings.checked(opening, OpenOptions.__annotations__, "open_images", str(path)).chosen
    columns, on, verify = options.pop("columns", None), options.pop("on", None), options.pop("verify", None)
    condition = options.pop("filter", None)
    row_filter = None if condition is None else RowFilter(condition)
    if on is not None and columns is None:
        refuse_value("on", on, "applies only together with columns=", "pass columns= too, or leave it out")
    if skip_errors:
        options["skip_errors"] = True
    types = options["column_types"] = ColumnTypes.of(opening.get("column_types"))
    source = _open_paths(path, format, options)
    if not are_labels:
        refuse_label_dtypes(source)
    if columns is not None:
        source = with_columns(source, columns, on, types)
    if types:
        types.refuse_unknown()
    if row_filter is not None:
        source = select_rows(source, row_filter.choose(source.header.columns), row_filter.text)
    if verify:
        source = VerifiedSource(source)
    reopening: dict[str, Any] = {**opening, "column_types": types or None}
    for name in _PATH_OPTIONS:
        if isinstance(reopening.get(name), str | os.PathLike):
            reopening[name] = _absolute(reopening[name])
    reopening |= {"are_labels": are_labels, "skip_errors": skip_errors}
    source.header.requested_path = path
    same_path = path if isinstance(path, Path) and path.is_absolute() else _absolute(path)
    source.header.opened_by = partial(open_source, same_path, format, **reopening)
    return source


def _open_paths(path: Paths, format_name: str | None, options: Mapping[str, Any]) -> Images:
    """Open one or several paths; a column that is text in one text table is read as text in all of them."""
    if isinstance(path, str | os.PathLike) and not glob.has_magic(str(path)):
        return _open_one(path, format_name, **options)
    open_one = partial(_open_one, format_name=format_name, **options)
    glob_text, has_several = path if isinstance(path, str | os.PathLike) else None, is_several(path)
    is_local = glob_text is not None and url_of(glob_text) is None
    urls = urls_of(path, _bucket_reader(options)) if has_several and not is_local else None
    try:
        if urls is not None:
            label = Url(os.path.commonpath([url.parent for url in urls])) / f"({count(len(urls), 'URL')})"
            parts = [Part(url, str(url).removeprefix(f"{label.parent}/"), {}) for url in urls]
            return open_joined(label, parts, open_one, glob_text or urls)
        if has_several and (is_local or glob_text is None):
            return open_several(path, format_name, open_one)
    except MixedColumnError as error:
        types: ColumnTypes = options["column_types"]
        if error.column in types or error.column not in types.names:
            raise
        types[error.column] = "text"
        return _open_paths(path, format_name, options)
    if glob_text is not None:
        return _open_one(glob_text, format_name, **options)
    refuse_open_table(path)
    allowed, remedy = "the path of a collection, a list of paths, or a glob pattern", "pass one of these"
    raise ArgumentError(option="path", value=path, allowed=allowed, remedy=remedy)


def _absolute(path: Any) -> Any:
    """Return a path, several paths, or a glob in absolute form, so that any process finds it."""
    if isinstance(path, str):
        return str(_locate(path))
    return _locate(path) if isinstance(path, os.PathLike) else list(map(_absolute, path))


def _open_one(
    path: StrPath,
    format_name: str | None,
    *,
    column_types: ColumnTypes,
    look: bool = False,
    skip_errors: bool = False,
    **options: Any,
) -> Images:
    """Open the collection at one path; see `_open_stored` for ``look``, and `open_source` for ``skip_errors``."""
    listing_options, url_options = dict[str, Any](), dict[str, Any]()
    if options:
        listing_options = {name: options.pop(name) for name in _LISTING_OPTIONS if name in options}
        url_options = {name: options.pop(name) for name in _URL_OPTIONS if name in options}
    location = _locate(path)
    is_url, only_urls = isinstance(location, Url), f"applies only to URLs, not to {location}"
    if url_options and not is_url:
        refuse_options({name: value for name, value in url_options.items() if name != "storage"}, only_urls)
        _bucket_reader(url_options)  # Raises an error if the storage has another type.
    refuse_odd_name(location)
    open_listing = partial(_open_fields, location, url_options=url_options, types=column_types, skip_errors=skip_errors)
    fields_source = None
    with translate_errors(location, "a collection of images", (OSError,)):
        if not is_url and not location.exists():
            raise missing(path)
        if listing_options or location.name.lower().endswith(CSV_SUFFIXES):
            fields_source = open_listing(listing_options)
        is_folder = fields_source is None and not is_url and location.is_dir()
        is_complete = is_parts(location) if is_url else is_folder and is_published(location)
        if is_folder and not is_complete and is_unfinished(location):
            parts_target(location).refuse_unfinished()
    if fields_source is None:
        open_stored = partial(_open_stored, look=look)
        if is_url:
            open_stored = partial(open_stored_url, reach=_bucket_reader(url_options))
        try:
            source = (
                _open_published(location, format_name, url_options, **options)
                if is_complete
                else open_stored(location, format_name, skip_errors=skip_errors, **options)
            )
        except ColumnError as error:
            has_images = isinstance(error, ImageColumnError) or "image_column" in options
            fields_source = None if has_images or is_complete else open_listing({})
            if fields_source is None:
                raise
        else:
            if url_options and not is_url:  # A table may list files at URLs.
                refuse_options(url_options, only_urls)
            return source
    unused = {name: options[name] for name in ("engine", "image_column", "level", "table") if options.get(name)}
    unused |= {"format": format_name} if format_name not in (None, fields_source.header.format.name) else {}
    refuse_options(unused, f"images of {location} are joined from TIFF files")
    return fields_source


def _locate(path: StrPath) -> Path:
    """Return the location of a collection: a URL if it looks like one and no local file has that name."""
    url, local = url_of(path), Path(path).absolute()
    return local if url is None or local.exists() else url


def _bucket_reader(options: Mapping[str, Any]) -> BucketReader:
    """Return a reader with the options of URLs; raise `ArgumentError` if ``storage`` has another type."""
    storage = options.get("storage")
    if not isinstance(storage, Storage | None):
        allowed = "omearrow_ds.Storage(...) or None"
        raise ArgumentError(f"has the type {type(storage).__name__}", option="storage", allowed=allowed)
    return BucketReader(storage or Storage(), (options.get("part_cache"), options.get("part_cache_bytes")))


def _open_fields(
    path: Path, options: Mapping[str, Any], *, url_options: Mapping[str, Any], types: ColumnTypes, skip_errors: bool
) -> fields.FieldSource | None:
    """Open images of several files each, by a pattern or a table that lists them; None without either."""
    reach = _bucket_reader(url_options)
    open_listing = partial(listed.open_fields, path, options, reach, types, skip_errors=skip_errors)
    is_stored_at_url = isinstance(path, Url) and not is_parts(path)
    if is_stored_at_url:
        refuse_cache(path, reach)
    if "pattern" in options or (path.is_file() and listed.lists_files(path)):
        return open_listing(path)
    if is_stored_at_url:
        with tempfile.TemporaryDirectory(prefix="omearrow_ds.") as folder:
            copy = Path(folder, path.name)
            copy.write_bytes(reach.read(str(path)))
            if listed.lists_files(copy):
                return open_listing(copy)
        if not options and not path.name.lower().endswith(CSV_SUFFIXES):
            return None
        option, value = next(iter(options.items()), (None, ...))
        problem, remedy = "the table lists no TIFF files", "pass another table"
        raise ArgumentError(problem, path=path, option=option, value=value, remedy=remedy)
    for name, value in options.items():
        needed = "a table that lists TIFF files" if name == "root" else "pattern= or a table that lists TIFF files"
        hint = ", and choose channels by number with select={'C': [0]}" if name == "channels" else ""
        refuse_value(name, value, f"applies only to {needed}", f"leave it out{hint}", path)
    return None


def _open_published(
    location: Path, format_name: str | None, url_options: Mapping[str, Any], *, engine: str | None = None, **other: Any
) -> Images:
    """Open a folder of parts written by this package, which have no null images, locally or on a server."""
    other.pop("nulls", None)
    refuse_options(other, f"the parts of {location} have only one image column")
    open_part = partial(_open_part, engine=engine)
    if isinstance(location, Url):
        storage = _bucket_reader(url_options).storage
        choice = url_options.get("part_cache"), url_options.get("part_cache_bytes")
        # If a cache is chosen, parts are fetched as a whole. Otherwise, a reader without copies reads their ranges.
        open_ranged = partial(open_stored_url, reach=BucketReader(storage), engine=engine)
        ranged = open_ranged if choice == (None, None) else None
        try:
            parts: PublishedParts = RemoteParts(location, open_part, storage, PartCache.choose(*choice), ranged)
        except MissingPathError:
            target = None if location.is_web else parts_target(location, storage)
            if target is None or not target.store.is_begun:
                raise
            target.refuse_unfinished()
    else:
        parts = open_published(location, open_part)
    if format_name not in (None, parts.format.name):
        refuse_options({"format": format_name}, f"the parts of {location} are {parts.format.label}")
    return parts.images()


def _open_stored(
    location: Path, format_name: str | None, *, look: bool = False, skip_errors: bool = False, **options: Any
) -> Images:
    """Open a collection in one of the formats; ``look`` reads only ids, shapes, dtypes and columns."""
    with translate_errors(location, "a collection of images", (OSError,)):
        named = None if format_name is None else get_format(format_name)
        fmt = found_at(location) if named is None and not location.name.endswith(ICEBERG_METADATA) else named
        if fmt is None or (location.is_dir() and not fmt.is_folder):
            opened = table_path(location, options.get("table")) if fmt is None and location.is_dir() else None
            if opened is not None:
                return _open_stored(opened, None, **{**options, "table": None})
            return open_below(location, format_name, partial(_open_stored, format_name=format_name, **options))
    engine, image_column = options.get("engine"), options.get("image_column")
    if engine is not None and engine not in fmt.engines:
        fmt.module()  # Raises an error if its library is missing.
        known = f"one of {', '.join(fmt.engines)}" if fmt.engines else "None, because there is only one reader"
        raise ArgumentError(option="engine", value=engine, allowed=f"{known} for format {fmt.name!r}")
    for option, is_supported, lacking in (
        ("image_column", fmt.kind == "table", "does not store columns"),
        ("level", "level" in fmt.open_options, "does not store resolution levels"),
        ("table", "table" in fmt.open_options, "does not store several tables"),
    ):
        if options.get(option) not in (None, 0) and not is_supported:
            fmt.module()
            refuse_options({option: options[option]}, f"{fmt.label} {lacking}")
    # An engine may refuse pixels, and several columns may not match each other.
    look = look and engine is None and isinstance(image_column, str | None) and "look" in fmt.open_options
    skip_errors = skip_errors and "skip_errors" in fmt.open_options
    return open_with(fmt, location, look=look, skip_errors=skip_errors, **options)


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
    """Write an iterable of arrays as a new collection of images, atomically.

    Parameters
    ----------
    images
        Iterable of arrays, which may differ in shape and dtype. Only a few are in memory at a time.
    path
        Target. Its suffix names the format if ``format`` is ``None``.
    format
        ``None``, or a name in `FORMATS`.
    axes
        Axes of every array, such as ``"CYX"``. ``None`` accepts 2-D arrays as ``"YX"`` and 5-D arrays as ``"TCZYX"``.
    encoding
        ``"bytes"`` stores every dtype, ``"list"`` only uint8 and uint16. Table formats only.
    compression
        ``None`` is the default of the format. Otherwise ``"none"`` or a compression of the format.
    rows_per_group
        ``None`` is the default of the format; otherwise images per row group or record batch of Parquet and Arrow IPC.
        One group is in memory while it is written.
    chunk_shape
        ``None`` is 1,024 x 1,024 for OME-Zarr, else one chunk per plane or image; otherwise ``(height, width)`` of the
        chunks or tiles of OME-Zarr, OME-TIFF and ome-arrow datasets, in pixels. TIFF needs multiples of 16.
    image_ids
        Distinct ids, one per image. ``None`` gives ``image-00000`` and so on.
    metadata
        One dict per image with the field names of ome-arrow (`omearrow_ds.codec.schema.METADATA_FIELDS`). Missing
        fields are null.
    columns
        Further columns, one row per image.
    checksum
        ``True`` stores a checksum of dtype, shape and pixels of each image.
    progress
        ``False``, or ``True`` for a progress bar.
    overwrite
        ``False``, or ``True`` to replace an existing ``path`` when the new collection is complete.

    Returns
    -------
    None

    Raises
    ------
    PathExistsError
        If ``path`` exists and ``overwrite`` is False.
    ImageError
        If the rank of an image does not fit ``axes``, or its dtype does not fit the encoding.
    MetadataError
        If ids, metadata or columns do not fit the images.
    ArgumentError
        If the format does not support the encoding, compression, row groups or chunks.
    WriteError
        If the collection cannot be written, for example because the disk is full.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import open_images, write_images
    >>> images = [np.full((3, 64, 64), number, np.uint16) for number in range(4)]
    >>> write_images(images, "images.parquet", axes="CYX", columns={"label": [0, 1, 0, 1]})
    >>> with open_images("images.parquet") as source:
    ...     print(source.image_ids[1], source.read(1).shape, source.read(1).max())
    image-00001 (1, 3, 1, 64, 64) 1
    """
    settings = WriteSettings.take(locals())
    check_path("path", path)
    if isinstance(images, str | os.PathLike) or not isinstance(images, Iterable):
        refuse_value("images", images, "", "write a path or source with convert()", allowed="arrays")
    subject = str(path)
    ids = None if image_ids is None else writing.distinct_ids(image_ids, subject)
    described = writing.describe_images(images, axes, ids, metadata, subject)
    total = len(images) if isinstance(images, Sequence) else None
    table = writing.as_table(columns, subject)
    if is_parts(path):
        remedy = "write one file, and convert it to parts"
        raise ArgumentError("images cannot be written as parts", option="path", value=path, remedy=remedy)
    target = Target.choose(path, format, settings)
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
    """Convert a collection to another format, with pixels, ids, OME metadata and columns.

    Images with a checksum are verified, and keep it. If a table has several image columns, choose with
    ``image_column``; otherwise the used one is reported in a warning.

    A target that ends with ``.parts`` is a folder of parts, each a collection of ``format``. It can be a URL
    (``s3://``, ``gs://``, ``az://``). If a conversion to parts is interrupted, the same call continues it.

    Parameters
    ----------
    src
        Path of a collection, or an open source.
    dst, format, encoding, compression, rows_per_group, chunk_shape, checksum, progress, overwrite
        See `write_images`. The default format of parts is ``"arrow"``.
    part_bytes
        Maximum decoded size of a part. ``None`` is 64 MiB, or less for formats whose writers hold more than three
        times their data.
    shuffle_seed
        ``None`` keeps the order. An integer permutes the images over all parts of a plate.
    group_by
        ``None``, or columns; images with different values are never in one part. Plates are never mixed.
    executor
        ``None`` writes the parts in this process. Otherwise a `concurrent.futures.Executor` whose workers write them,
        such as ``client.get_executor()`` of a Dask client.
    on_error
        ``"raise"`` stops at an unreadable image; ``"skip"`` leaves it out and lists it in ``failed.csv`` and
        ``parts.json``. For a path of TIFF or OME-Zarr files, ``"skip"`` also leaves out images that differ from the
        majority in shape or dtype; a tie is an error.
    task
        ``None``, or ``(K, N)`` to write only share K of N, counted from 1. `publish` then completes the collection.
    target_storage
        ``None`` is ``Storage()``. Otherwise endpoint, region and credentials of a target URL; ``storage`` is for
        ``src``.
    **opening
        See `open_images`.

    Returns
    -------
    None

    Raises
    ------
    ArgumentError
        If options contradict each other, or an open source is combined with options of `open_images`.
    PathExistsError
        If ``dst`` exists and ``overwrite`` is False.
    OMEArrowDSError
        Errors of `open_images` and `write_images`.

    Examples
    --------
    >>> from omearrow_ds import convert, open_images
    >>> convert("plate.arrow", "plate.zarr")
    >>> with open_images("plate.zarr") as source:
    ...     print(source.format.label, len(source))
    OME-Zarr 10
    """
    settings = WriteSettings.take(locals())
    check_path("dst", dst)
    refuse_unknown(opening, OpenOptions.__annotations__, convert)
    if is_path(src):
        fields.warn_of_layout(src, opening)
    with opened("src", src, opening, skip_errors=settings.skips_errors) as source:
        header = source.header
        if is_path(src) and header.other_image_columns and opening.get("image_column") is None:
            left = ", ".join(map(repr, header.other_image_columns))
            problem = f"{header.path}: only images of {header.image_column[0]!r} are converted, not of {left}"
            warnings.warn(f"{problem}; pass image_column= to choose", UserWarning, stacklevel=2)
        refuse_over_source(source, dst)
        target = Target.choose(dst, format, settings)
        material = SourceImages(source)
        if is_parts(target.path):
            write_parts(material, target, settings)
            return
        write(material.in_order(), target, header.columns.table, len(source), progress=progress)


def opened(
    option: str,
    images: Paths | ImageSource,
    opening: OpenOptions,
    format_name: str | None = None,
    *,
    skip_errors: bool = False,
    allowed: str = "a path or a source of open_images",
) -> AbstractContextManager[Images]:
    """Open a path as a source that is closed at exit, or return a context that leaves the source ``images`` open.

    ``option`` is the name of the argument ``images`` in the public function, for errors.
    """
    if is_path(images):
        return closing(open_source(images, format_name, skip_errors=skip_errors, **opening))
    refuse_opening_again(opening, "a source")
    if not isinstance(images, CollectionSource):
        refuse_open_table(images)
        raise ArgumentError(option=option, value=images, allowed=allowed, remedy="pass one of these")
    return nullcontext(images.images)


def write_parts(material: Material, target: Target, settings: WriteSettings) -> None:
    parts = make_parts(material, target, settings, _open_part)
    if settings.task is None:
        parts.publish()


def parts_target(path: StrPath, storage: Storage | None = None) -> PartsTarget:
    return PartsTarget(parts_store(url_of(path) or Path(path).absolute(), storage), _open_part)


def publish(path: StrPath, *, storage: Storage | None = None) -> None:
    """Combine the parts written by several tasks into one collection that can be opened.

    Call it once after all tasks of ``convert(..., task=(K, N))`` or ``write_crops(..., task=(K, N))`` have finished.

    Parameters
    ----------
    path
        Target of the tasks.
    storage
        ``None`` is ``Storage()``. Otherwise endpoint, region and credentials of a URL.

    Returns
    -------
    None

    Raises
    ------
    FormatError
        If parts are missing. The message lists them.
    PathExistsError
        If the collection is already published.

    Examples
    --------
    >>> from omearrow_ds import convert, open_images, publish
    >>> for number in (1, 2):  # for example tasks 1 and 2 of a SLURM array
    ...     convert("plate.arrow", "plate.parts", part_bytes=200_000, task=(number, 2))
    >>> publish("plate.parts")
    >>> with open_images("plate.parts") as source:
    ...     print(len(source))
    10
    """
    check_path("path", path)
    parts_target(path, storage).publish()


def _open_part(path: Path, engine: str | None = None) -> Images:
    return _open_stored(path, None, engine=engine)


def refuse_opening_again(opening: OpenOptions, kind: str) -> None:
    """Raise `ArgumentError` if options of `open_images` are passed with an object that is already open."""
    refuse_unknown(opening, OpenOptions.__annotations__, kind)
    refuse_options(opening, f"cannot be applied to {kind} that is already open", "pass a path instead")


def refuse_over_source(src: Images, dst: StrPath) -> None:
    """Raise `PathExistsError` if writing to ``dst`` would overwrite the source, or add a file to the source folder."""
    header = src.header
    url = url_of(dst)
    if url is not None:
        if header.path == url:
            raise PathExistsError(f"{dst}: the target is the source; choose another URL")
        return
    target = Path(dst).resolve()
    if target.exists():
        is_inside = any(file.resolve() == target for file in src.details.files())
        if is_inside or header.path.resolve().is_relative_to(target):
            raise PathExistsError(f"{dst}: the target is or contains the source; choose another path")
    of_parts = header.path.is_dir() and header.format.kind == "table" and not header.format.is_folder
    if of_parts and target.is_relative_to(header.path.resolve()):
        raise PathExistsError(f"{dst}: the target is inside the source folder; choose another path")
