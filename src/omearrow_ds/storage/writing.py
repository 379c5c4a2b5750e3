"""Writing of a collection: its target, its layout, and the stream from images to the format's writer."""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pyarrow as pa
from tqdm import tqdm

from omearrow_ds.codec import encode as codec
from omearrow_ds.codec import schema
from omearrow_ds.errors import ArgumentError, OMEArrowDSError, PathExistsError, WriteError
from omearrow_ds.options import PARTS, WriteSettings
from omearrow_ds.storage import incoming
from omearrow_ds.storage.formats import CHUNK_PREFIX, Format, format_of_target, formats, get_format
from omearrow_ds.storage.formats._columns import refuse_types
from omearrow_ds.storage.formats._error_translation import first_line, is_panic, is_stop, refuse_odd_name
from omearrow_ds.storage.formats._stream import Stream
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.manifest import SUFFIX
from omearrow_ds.storage.parts_stores import parts_store
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.storage.remote import Storage

_TYPES = "UNSUPPORTED_TYPES"  # Name in a format's module: tests of types that it cannot store.
_ANY_BYTES = 2**31 - 1
_WIDE, _MAX_COLUMN_CHUNKS = 256, 40_000  # Columns of a wide table, and chunks of all its columns and row groups.
_WIDE_BYTES = 2**28  # Pixels of a row group of a wide table.
_OF_PARTS = "arrow"  # Memory-mapped, so read at memory speed, and written with the least memory.
# Messages of libraries for a full disk, a quota and a file size limit; most have no errno. The last is NumPy's.
_NO_ROOM = re.compile("No space left|quota exceeded|File too large|requested and [0-9]+ written", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """Encoding and compression of pixels, and maximum numbers of images and of pixel bytes per row group.

    If ``chunk_codec`` compresses each chunk of a table, the format itself compresses as little as it can.
    ``chunk_shape`` are the (Y, X) pixels per chunk; None is the default of the format.
    """

    encoding: str
    compression: str
    max_rows: int
    max_bytes: int
    chunk_codec: str | None = None
    chunk_shape: tuple[int, int] | None = None

    @classmethod
    def choose(cls, fmt: Format, settings: WriteSettings) -> Layout:
        """Return the layout that write settings specify; the value None becomes the default of the format."""
        fmt.module()  # Raises an error if its backend is missing.
        encoding, compression, rows_per_group = settings.encoding, settings.compression, settings.rows_per_group
        known = fmt.compressions_of(encoding)
        if compression is not None and compression not in known:
            names = ", ".join(map(repr, known))
            of_encoding = f" with encoding={encoding!r}" if fmt.kind == "table" else ""
            raise ArgumentError(
                option="compression", value=compression, allowed=f"one of {names} for {fmt.label}{of_encoding}"
            )
        if rows_per_group is not None and not fmt.grouped:
            raise ArgumentError(
                f"not supported by {fmt.label}", option="rows_per_group", value=rows_per_group, remedy="leave it out"
            )
        chunk = None if settings.chunk_shape is None else _chunk_shape(fmt, settings.chunk_shape)
        compression = compression or fmt.compressions[0]
        if fmt.kind == "directory":
            return cls("bytes", compression, 1, _ANY_BYTES, chunk_shape=chunk)
        chunk_codec = compression.removeprefix(CHUNK_PREFIX) if compression.startswith(CHUNK_PREFIX) else None
        if chunk_codec is not None:
            compression = fmt.compressions[0] if "none" not in fmt.compressions else "none"
        rows, most_bytes = (fmt.max_rows, fmt.max_bytes) if rows_per_group is None else (rows_per_group, _ANY_BYTES)
        return cls(encoding, compression, rows, most_bytes, chunk_codec)

    def for_columns(self, columns: pa.Table) -> Layout:
        """Return a layout with larger row groups for a wide table: the footer lists each column of each group."""
        rows = -(-columns.num_rows * columns.num_columns // _MAX_COLUMN_CHUNKS)
        if columns.num_columns < _WIDE or rows < 2 or self.max_bytes == _ANY_BYTES:
            return self
        return replace(self, max_rows=max(self.max_rows, rows), max_bytes=max(self.max_bytes, _WIDE_BYTES))


def _chunk_shape(fmt: Format, chunk_shape: Sequence[int]) -> tuple[int, int]:
    error = partial(ArgumentError, option="chunk_shape", value=chunk_shape)
    multiple = fmt.chunk_multiple
    if multiple is None:
        chunked = ", ".join(known.name for known in formats() if known.chunk_multiple is not None)
        raise error(
            f"{fmt.label} stores each image as one chunk",
            remedy=f"leave it out, or choose one of the formats {chunked}",
        )
    try:
        height, width = map(operator.index, chunk_shape)
    except (TypeError, ValueError):
        raise error(allowed="(height, width) in whole pixels") from None
    if min(height, width) < 1 or height % multiple or width % multiple:
        numbers = f"multiples of {multiple}" if multiple > 1 else "1 or more"
        raise error(allowed=f"{numbers} as height and width for {fmt.label}")
    return height, width


def is_parts(path: str | os.PathLike[str]) -> bool:
    """Whether a target path has the suffix of a collection in parts."""
    return Path(path).name.lower().endswith(SUFFIX)


@dataclass(frozen=True)
class Target:
    """Path, format and layout of a collection to write."""

    path: Path
    format: Format
    layout: Layout
    overwrite: bool
    checksum: bool
    storage: Storage | None = None

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
            _refuse_part_options(target_path, settings)
        return cls(target_path, fmt, layout, overwrite, settings.checksum, storage)

    @property
    def in_parts(self) -> bool:
        """Whether the target is a collection in parts."""
        return is_parts(self.path)


def _check_executor(executor: Executor | None) -> None:
    """Raise `ArgumentError` if parts cannot be written by this executor."""
    if not isinstance(executor, Executor | None):
        raise ArgumentError(
            option="executor",
            value=executor,
            allowed="a concurrent.futures.Executor such as a process pool, or client.get_executor() of a Dask client",
        )
    context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method() == "fork":
        raise ArgumentError(
            "a pool of forked processes hangs with libraries that start threads (Lance, DuckDB)",
            option="executor",
            remedy="create it with ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))",
        )


def _refuse_part_options(path: Path, settings: WriteSettings) -> None:
    """Raise `ArgumentError` if settings have an option that applies only to collections in parts."""
    for name, value in settings.chosen.items():
        if name in PARTS:
            problem = f"needs a target with the suffix {SUFFIX}, not {path}"
            displayed = ... if name == "executor" else value
            raise ArgumentError(problem, option=name, value=displayed, remedy="leave it out")


def _refuse_url(target: Path, storage: Storage | None) -> None:
    """Raise `ArgumentError` for a URL without parts, and for ``storage`` without a URL."""
    if isinstance(target, Url) and not is_parts(target):
        raise ArgumentError(
            "a single file cannot be written to a URL",
            path=target,
            remedy=f"convert to {target.with_suffix(SUFFIX)}, a collection in parts, or to a local file, and copy that "
            f"file",
        )
    if not isinstance(storage, Storage | None):
        raise ArgumentError(
            f"has the type {type(storage).__name__}", option="target_storage", allowed="omearrow_ds.Storage or None"
        )
    if storage is not None and not isinstance(target, Url):
        raise ArgumentError(
            f"applies only to URLs, not to {target}", option="target_storage", value=storage, remedy="leave it out"
        )


def write(
    images: Iterator[codec.Image], target: Target, columns: pa.Table | None, total: int | None, *, progress: bool
) -> None:
    """Write the images and their columns to the target atomically, with larger row groups for a wide table.

    ``total`` is for the progress bar.
    """
    path, fmt = target.path, target.format
    module = fmt.module()
    table = pa.table({}) if columns is None else columns
    num_rows = table.num_rows if table.num_columns else None
    layout = target.layout.for_columns(table) if fmt.grouped else target.layout
    incoming.refuse_names(table.column_names, str(path))
    refuse_target = partial(_refuse_target, module, fmt, path, table.schema)
    refuse_target()
    progress_images = tqdm(images, total=total, unit="image", desc=fmt.label, disable=not progress)
    stopping = threading.Event()
    checked = incoming.checked(progress_images, layout.encoding, num_rows, str(path))
    checked = takewhile(lambda _: not stopping.is_set(), checked)

    def fill(temporary: Path) -> None:
        if fmt.kind == "directory":
            temporary.mkdir()
            stream = Stream(checked, stopping)
            chunks = {} if layout.chunk_shape is None else {"chunk_shape": layout.chunk_shape}
            write_stream = partial(module.write, stream, table, temporary, layout.compression, **chunks)
        else:
            tables = codec.encode_tables(
                checked,
                table,
                layout.encoding,
                max_rows=layout.max_rows,
                max_bytes=layout.max_bytes,
                written_at_once=fmt.written_at_once,
                chunk_codec=layout.chunk_codec,
            )
            stream = Stream(tables, stopping)
            fields = [pa.field(schema.COLUMN, schema.image_struct(layout.encoding)), *table.schema]
            fields += [pa.field(schema.CHECKSUM_COLUMN, pa.string())] if target.checksum else []
            write_stream = partial(module.write, stream, pa.schema(fields), temporary, layout.compression)
        try:
            write_stream()
        except BaseException as error:
            stream.stop()
            if stream.failure is not None:
                raise stream.failure from None
            # For an exception outside the stream, only its text is available.
            if is_stop(error) or "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from error
            if (isinstance(error, module.Source.errors) and not isinstance(error, OMEArrowDSError)) or is_panic(error):
                why = first_line(error)
                problem, remedy = "writing failed", "correct this, and write again"
                if _NO_ROOM.search(why):
                    problem, remedy = "the disk is full", "free space or choose another path"
                text = f"{path}: {problem} ({fmt.label}), and no incomplete file is left: {why}; {remedy}"
                raise WriteError(text) from error
            raise
        refuse_target()  # Checked again: other files may have appeared meanwhile.

    publish(path, fill, overwrite=target.overwrite)


def _refuse_target(module: ModuleType, fmt: Format, path: Path, columns: pa.Schema) -> None:
    """Raise an error if the format cannot be stored at this path or cannot hold these columns, by name or type.

    Raises
    ------
    FormatError
        For the path.
    PathExistsError
        If an existing file next to it would be read as part of the new one.
    MetadataError
        For a column.
    """
    for suffix in fmt.beside:
        if os.path.lexists(f"{path}{suffix}"):
            msg = (
                f"{path}{suffix}: contains changes of a previous file that would be read as part of the new one; "
                f"merge them (with DuckDB: CHECKPOINT), or remove this file"
            )
            raise PathExistsError(msg)
    in_parquet = (pa.types.is_interval,) if fmt.kind == "directory" else ()
    # A format of another package may reuse the source, and so the limits, of a format of this package.
    modules = [module, *(sys.modules[parent.__module__] for parent in module.Source.__mro__)]
    types = next((vars(owner)[_TYPES] for owner in modules if _TYPES in vars(owner)), in_parquet)
    refuse_types(columns, types, fmt.label, str(path))
    refuse_target = next((owner.refuse_target for owner in modules if hasattr(owner, "refuse_target")), None)
    if refuse_target is not None:
        refuse_target(path, columns)
