"""Writing of a collection: checks of images and columns, target and layout, and the stream to the writer."""

from __future__ import annotations

import operator
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds.axes import Array, to_tczyx
from omearrow_ds.codec import encode as codec
from omearrow_ds.codec import schema
from omearrow_ds.errors import ArgumentError, ImageError, MetadataError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.options import PARTS, WriteSettings, refuse_options, refuse_value
from omearrow_ds.storage.formats import CHUNK_PREFIX, Format, format_of_target, formats, get_format
from omearrow_ds.storage.formats._columns import plain_columns, refuse_extensions, refuse_types
from omearrow_ds.storage.formats._error_translation import first_line, is_panic, is_stop, refuse_odd_name
from omearrow_ds.storage.formats._stream import Stream
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.hashes import checksum_of
from omearrow_ds.storage.manifest import SUFFIX
from omearrow_ds.storage.parts_stores import parts_store
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.storage.remote import Storage

_ANY_BYTES = 2**31 - 1
_WIDE, _MAX_COLUMN_CHUNKS = 256, 40_000  # Columns of a wide table, and chunks of all its columns and row groups.
_WIDE_BYTES = 2**28  # Pixels of a row group of a wide table.
_OF_PARTS = "arrow"  # Memory-mapped, so read at memory speed, and written with the least memory.
# Messages of libraries for a full disk, a quota and a file size limit; most have no errno. The last is NumPy's.
_NO_ROOM = re.compile("No space left|quota exceeded|File too large|requested and [0-9]+ written", re.IGNORECASE)
Columns: TypeAlias = pa.Table | Mapping[str, Sequence[Any]]
_TAKEN = (schema.COLUMN, schema.SIDECAR_COLUMN, schema.CHECKSUM_COLUMN)
Metadata: TypeAlias = Iterable[Mapping[str, Any] | None]
_ARRAYS = (np.ndarray, np.memmap)
_HELD = (list, tuple, *_ARRAYS)  # Containers that hold all images, so they do not reuse the memory of one.


@dataclass(frozen=True)
class Layout:
    """Encoding and compression of pixels, and maximum numbers of images and of pixel bytes per row group."""

    encoding: str
    compression: str
    max_rows: int
    max_bytes: int
    chunk_codec: str | None = None  # If it compresses chunks of a table, the format compresses as little as it can.
    chunk_shape: tuple[int, int] | None = None  # (Y, X) pixels per chunk; None is the default of the format.

    @classmethod
    def choose(cls, fmt: Format, settings: WriteSettings) -> Layout:
        """Return the layout that write settings specify; the value None becomes the default of the format."""
        fmt.module()  # Raises an error if its backend is missing.
        rows_per_group, known = settings.rows_per_group, fmt.compressions_of(settings.encoding)
        compression = fmt.writer.compressions[0] if settings.compression is None else settings.compression
        if compression not in known:
            of_encoding = f" with encoding={settings.encoding!r}" if fmt.kind == "table" else ""
            allowed = f"one of {', '.join(map(repr, known))} for {fmt.label}{of_encoding}"
            refuse_value("compression", compression, allowed=allowed)
        if rows_per_group is not None and not fmt.writer.has_row_groups:
            refuse_value("rows_per_group", rows_per_group, f"not supported by {fmt.label}", "leave it out")
        chunk_shape = None if settings.chunk_shape is None else _chunk_shape(fmt, settings.chunk_shape)
        encoding = settings.encoding if fmt.kind == "table" else "bytes"
        chunk_codec = None
        if compression.startswith(CHUNK_PREFIX):
            chunk_codec = compression.removeprefix(CHUNK_PREFIX)
            compression = fmt.writer.compressions[0] if "none" not in fmt.writer.compressions else "none"
        max_bytes = fmt.writer.max_bytes if rows_per_group is None else _ANY_BYTES
        return cls(encoding, compression, rows_per_group or fmt.writer.max_rows, max_bytes, chunk_codec, chunk_shape)

    def for_columns(self, columns: pa.Table) -> Layout:
        """Return a layout with larger row groups for a wide table: the footer lists each column of each group."""
        rows = -(-columns.num_rows * columns.num_columns // _MAX_COLUMN_CHUNKS)
        if columns.num_columns < _WIDE or rows < 2 or self.max_bytes == _ANY_BYTES:
            return self
        return replace(self, max_rows=max(self.max_rows, rows), max_bytes=max(self.max_bytes, _WIDE_BYTES))


def options_of_layout(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of a plan as the options that `Layout.choose` takes; its other fields become None."""
    codec, grouped_formats = layout.get("chunk_codec"), {fmt.name for fmt in formats() if fmt.writer.has_row_groups}
    is_chosen = layout.get("max_bytes") == _ANY_BYTES and layout.get("format") in grouped_formats
    return {
        **layout,
        **dict.fromkeys(("max_rows", "max_bytes", "chunk_codec")),
        "compression": layout.get("compression") if codec is None else f"{CHUNK_PREFIX}{codec}",
        "rows_per_group": layout.get("max_rows") if is_chosen else None,
    }


def _chunk_shape(fmt: Format, chunk_shape: Sequence[int]) -> tuple[int, int]:
    error = partial(ArgumentError, option="chunk_shape", value=chunk_shape)
    multiple = fmt.writer.chunk_multiple
    if multiple is None:
        chunked = ", ".join(known.name for known in formats() if known.writer.chunk_multiple is not None)
        remedy = f"leave it out, or choose one of the formats {chunked}"
        raise error(f"{fmt.label} stores each image as one chunk", remedy=remedy)
    try:
        height, width = map(operator.index, chunk_shape)
    except (TypeError, ValueError):
        raise error(allowed="(height, width) in whole pixels") from None
    if min(height, width) < 1 or height % multiple or width % multiple:
        numbers = f"multiples of {multiple}" if multiple > 1 else "1 or more"
        raise error(allowed=f"{numbers} as height and width for {fmt.label}")
    return height, width


def is_parts(path: str | os.PathLike[str]) -> bool:
    return Path(path).name.lower().endswith(SUFFIX)


@dataclass(frozen=True)
class Target:
    path: Path
    format: Format
    layout: Layout
    overwrite: bool
    checksum: bool

    @classmethod
    def choose(cls, path: str | os.PathLike[str], format_name: str | None, settings: WriteSettings) -> Target:
        """Check all options and return the target; for a collection in parts, ``format`` is the format of the parts."""
        target_path: Path = url_of(path) or Path(path)
        refuse_odd_name(target_path)
        storage, overwrite = settings.target_storage, settings.overwrite
        _refuse_url(target_path, storage)
        in_parts = is_parts(target_path)
        format_name = _OF_PARTS if in_parts and format_name is None else format_name
        fmt = format_of_target(target_path) if format_name is None else get_format(format_name)
        layout = Layout.choose(fmt, settings)
        if in_parts:
            store = parts_store(target_path.absolute(), storage)
            store.check(fmt, overwrite=overwrite)
            target_path = store.path
            _check_executor(settings.executor)
        else:
            check_target(target_path, overwrite=overwrite)
            passed = ((name, ... if name == "executor" else value) for name, value in settings.chosen.items())
            of_parts = {name: value for name, value in passed if name in PARTS}
            refuse_options(of_parts, f"needs a target with the suffix {SUFFIX}, not {target_path}")
        return cls(target_path, fmt, layout, overwrite, settings.checksum)


def _check_executor(executor: Executor | None) -> None:
    if not isinstance(executor, Executor | None):
        allowed = "a concurrent.futures.Executor such as a process pool, or client.get_executor() of a Dask client"
        refuse_value("executor", executor, allowed=allowed)
    context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method() == "fork":
        problem = "a pool of forked processes hangs with libraries that start threads (Lance, DuckDB)"
        remedy = "create it with ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
        refuse_value("executor", ..., problem, remedy)


def _refuse_url(target: Path, storage: Storage | None) -> None:
    """Raise `ArgumentError` for a URL without parts, and for ``storage`` without a URL."""
    if isinstance(target, Url) and not is_parts(target):
        parts = target.with_suffix(SUFFIX)
        remedy = f"convert to {parts}, a collection in parts, or to a local file, and copy that file"
        raise ArgumentError("a single file cannot be written to a URL", path=target, remedy=remedy)
    if not isinstance(storage, Storage | None):
        problem = f"has the type {type(storage).__name__}"
        refuse_value("target_storage", ..., problem, allowed="omearrow_ds.Storage or None")
    if storage is not None and not isinstance(target, Url):
        refuse_value("target_storage", storage, f"applies only to URLs, not to {target}", "leave it out")


def write(
    images: Iterator[codec.Image], target: Target, columns: pa.Table, total: int | None, *, progress: bool
) -> None:
    """Write the images and their columns to the target atomically; ``total`` is for the progress bar."""
    path, fmt = target.path, target.format
    module = fmt.module()
    num_rows = columns.num_rows if columns.num_columns else None
    layout = target.layout.for_columns(columns) if fmt.writer.has_row_groups else target.layout
    refuse_names(columns.column_names, str(path))
    refuse_target = partial(_refuse_target, module, fmt, path, columns.schema)
    refuse_target()
    progress_images = tqdm(images, total=total, unit="image", desc=fmt.label, disable=not progress)
    stopping = threading.Event()
    checked = _check_images(progress_images, target, num_rows)
    checked = takewhile(lambda _: not stopping.is_set(), checked)

    def fill(temporary: Path) -> None:
        items: Iterator[Any] = checked
        header, chunks = columns, {} if layout.chunk_shape is None else {"chunk_shape": layout.chunk_shape}
        if fmt.kind == "directory":
            temporary.mkdir()
        else:
            items = codec.encode_tables(
                checked,
                columns,
                layout.encoding,
                max_rows=layout.max_rows,
                max_bytes=layout.max_bytes,
                written_at_once=fmt.writer.is_incremental,
                chunk_codec=layout.chunk_codec,
            )
            fields = [pa.field(schema.COLUMN, schema.image_struct(layout.encoding)), *columns.schema]
            header = pa.schema(fields + [pa.field(schema.CHECKSUM_COLUMN, pa.string())] * target.checksum)
        stream = Stream(items, stopping)
        try:
            module.write_collection(stream, header, temporary, layout.compression, **chunks)
        except BaseException as error:
            stream.stop()
            if stream.failure is not None:
                raise stream.failure from None
            # For an exception outside the stream, only its text is available.
            if is_stop(error) or "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from error
            if (isinstance(error, module.ERRORS) and not isinstance(error, OMEArrowDSError)) or is_panic(error):
                problem, why, remedy = "writing failed", first_line(error), "correct this, and write again"
                if _NO_ROOM.search(why):
                    problem, remedy = "the disk is full", "free space or choose another path"
                problem = f"{problem} ({fmt.label}), and no incomplete file is left: {why}"
                raise WriteError(problem, path=path, remedy=remedy) from error
            raise
        refuse_target()  # Checked again: other files may have appeared meanwhile.

    publish(path, fill, overwrite=target.overwrite)


def _refuse_target(module: ModuleType, fmt: Format, path: Path, columns: pa.Schema) -> None:
    """Raise an error if the format cannot be stored at this path, next to existing files, or with these columns."""
    for suffix in fmt.sidecar_suffixes:
        if os.path.lexists(f"{path}{suffix}"):
            problem = "contains changes of a previous file that would be read as part of the new one"
            remedy = "merge them (with DuckDB: CHECKPOINT), or remove this file"
            raise PathExistsError(problem, path=f"{path}{suffix}", remedy=remedy)
    in_parquet = (pa.types.is_interval,) if fmt.kind == "directory" else ()
    refuse_types(columns, getattr(module, "UNSUPPORTED_TYPES", in_parquet), fmt.label, str(path))
    if hasattr(module, "refuse_target"):
        module.refuse_target(path, columns)


def describe_images(
    images: Iterable[Array],
    axes: str | None,
    image_ids: Sequence[str] | None,
    metadata: Metadata | None,
    subject: str,
) -> Iterator[codec.Image]:
    """Yield each image as (T, C, Z, Y, X) with its id and metadata; ``subject`` is the path in errors."""
    error, one_id, one_record = partial(MetadataError, path=subject), "pass one id per image", "pass one dict per image"
    if isinstance(metadata, Mapping):
        raise error("metadata is one dict, expected a sequence", remedy=one_record)
    ids = map("image-{:05d}".format, count()) if image_ids is None else iter(image_ids)
    records = repeat(None) if metadata is None else iter(metadata)
    fleeting = type(images) not in _HELD
    num_images = 0
    for index, image in enumerate(images):
        name = f"{subject}: image {index}"
        _refuse_other(image, index, subject)
        pixels = to_tczyx(image, axes, name)
        image_id, record = next(ids, None), next(records, ...)
        if image_id is None:
            raise error(f"image_ids has {index} entries, expected one per image", remedy=one_id)
        if record is ...:
            raise error(f"metadata has {index} entries, expected one per image", remedy=one_record)
        values = schema.normalize_metadata(record, pixels.shape[1], name)
        native = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
        yield codec.Image(native, image_id, values, fleeting=fleeting)
        num_images += 1
    if image_ids is not None and len(image_ids) != num_images:
        raise error(f"image_ids has {len(image_ids)} entries, expected {num_images}", remedy=one_id)
    if next(records, None) is not None:
        raise error(f"metadata has more than {num_images} entries", remedy=one_record)


def _refuse_other(image: Array, index: int, subject: str) -> None:
    """Raise `ImageError` unless ``image`` is a plain numeric array: a mask or unit would be lost."""
    kind = type(image)
    if kind in _ARRAYS:
        return
    problem, remedy = f"image {index} is a {kind.__name__}, expected a numpy array", "convert it"
    if isinstance(image, np.ma.MaskedArray):
        problem = f"image {index} is a masked array, and its mask cannot be stored"
        remedy = "pass image.filled(0), and store the mask as another image"
    elif isinstance(image, np.ndarray):
        remedy = "pass numpy.asarray(image) to store only its numbers"
    raise ImageError(problem, path=subject, image=index, remedy=remedy)


def _check_images(images: Iterator[codec.Image], target: Target, num_rows: int | None) -> Iterator[codec.Image]:
    """Yield the images with checksums; raise an error if an image is unsupported, or has no row in the columns."""
    error = partial(MetadataError, path=target.path, remedy="pass one row per image")
    num_images = 0
    for image in images:
        codec.check_image(image, target.layout.encoding, f"{target.path}: image {num_images} ({image.image_id})")
        num_images += 1
        if num_rows is not None and num_images > num_rows:
            raise error(f"columns have {num_rows} rows, expected one per image")
        image.checksum = (image.checksum or checksum_of(image.pixels)) if target.checksum else None
        yield image
    if num_rows not in (None, num_images):
        raise error(f"columns have {num_rows} rows, expected {num_images}")


def distinct_ids(image_ids: Iterable[str], subject: str) -> list[str]:
    """Return the image ids as a list; raise `MetadataError` unless all are distinct, non-empty Unicode strings."""
    error = partial(MetadataError, path=subject)
    if isinstance(image_ids, str) or not isinstance(image_ids, Iterable):
        raise error(f"image_ids is {image_ids!r}, expected a sequence", remedy="pass one string per image")
    ids = list(image_ids)
    previous = set()
    for index, image_id in enumerate(ids):
        if not isinstance(image_id, str) or not image_id or image_id in previous or not is_unicode(image_id):
            problem, allowed = f"image_ids has {image_id!r} for image {index}", "distinct, non-empty Unicode strings"
            raise error(problem, image=index, allowed=allowed, remedy="correct this id")
        previous.add(image_id)
    return ids


def as_table(columns: Columns | None, subject: str) -> pa.Table:
    """Convert columns to a table of plain Arrow types; raise `MetadataError` if they are invalid."""
    try:
        table = columns if isinstance(columns, pa.Table) else _owned_table({} if columns is None else columns, subject)
        table.validate(full=True)  # Otherwise a format could store invalid data, and report it as damage later.
    except (pa.ArrowException, TypeError, ValueError) as error:
        problem = f"columns cannot be converted to an Arrow table: {error}"
        raise MetadataError(problem, path=subject, remedy="correct them") from error
    refuse_extensions(table.schema, subject)
    return plain_columns(table, subject).replace_schema_metadata(None)


def refuse_names(names: Sequence[str], subject: str) -> None:
    """Raise `MetadataError` if column names are empty, duplicate or reserved."""
    if {*_TAKEN, ""} & set(names) or len(set(names)) != len(names):
        allowed = f"distinct, non-empty names other than {', '.join(map(repr, _TAKEN))}"
        raise MetadataError(f"columns have the names {names}", path=subject, allowed=allowed, remedy="rename columns")


def _owned_table(columns: Mapping[str, Sequence[Any]], subject: str) -> pa.Table:
    """Return a copy of columns: Arrow would share an array's memory, which the caller may modify during writing."""
    owned = {}
    for name, values in dict(columns).items():
        if isinstance(values, list | tuple) or isinstance(getattr(values, "dtype", None), np.dtypes.ObjectDType):
            masked = (row for row, value in enumerate(values) if isinstance(value, np.ma.MaskedArray) and value.ndim)
            row = next(masked, None)
            if row is not None:
                problem = f"column {name!r}: row {row} is a masked array"
                remedy = "pass its .tolist(), with None for masked values"
                raise MetadataError(problem, path=subject, column=name, remedy=remedy)
        copied = getattr(values, "copy", None)  # Arrays and series have this method.
        owned[name] = values if copied is None else copied()
    return pa.table(owned)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a file name with lone surrogates cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
