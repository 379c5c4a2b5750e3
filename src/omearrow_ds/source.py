"""Collections of images in storage: open, write and convert."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds import codec, incoming, schema
from omearrow_ds.errors import (
    ArgumentError,
    FormatError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
    WriteError,
)
from omearrow_ds.formats import Format, detect, format_of_target, get_format
from omearrow_ds.formats._base import first_line
from omearrow_ds.incoming import Columns
from omearrow_ds.publish import check_target, publish

StrPath = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
Encoding = Literal["bytes", "list"]


@runtime_checkable
class ImageSource(Protocol):
    """An open collection of images in one format.

    Attributes
    ----------
    format
        The storage format.
    path
        Where the collection is stored.
    image_ids
        One id an image.
    shapes
        (N, 5) int64, an image's (T, C, Z, Y, X) a row, known without decoding pixels.
    dtypes
        N pixel dtypes.
    columns
        The other columns of the table, one row an image.
    """

    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table

    @property
    def format(self) -> Format:
        """The storage format."""

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image: name, image_type, acquisition_datetime, physical_size_*, channels."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Array:
        """Return one image (T, C, Z, Y, X) in writable memory of its own."""

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the store's memory."""

    def stacks(self) -> list[Array]:
        """Return all images as read-only views (n, T, C, Z, Y, X) of memory that holds them decoded, else []."""

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""

    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_images(path: StrPath, format: str | None = None) -> ImageSource:  # noqa: A002  # the public name
    """Open a stored collection of images.

    Parameters
    ----------
    path
        A file, or the folder of a Lance dataset, of TIFF files or of OME-Zarr images.
    format
        Name of a format in `FORMATS`; ``None`` finds it from content or suffix.

    Raises
    ------
    MissingPathError
        If nothing is stored at ``path``.
    FormatError
        If the format is unknown or ambiguous, or what is stored is damaged.
    ColumnError
        If a table has no OME-Arrow column.
    BackendError
        If the format's library is not installed.
    """
    where = Path(path).absolute()
    if not where.exists():
        raise MissingPathError(f"{where}: no such file or folder")
    fmt = detect(where) if format is None else get_format(format)
    if where.is_dir() and not fmt.in_folder:
        raise FormatError(f"{where}: is a folder, {fmt.label} is a file; pass the file's path, or another format=")
    source: ImageSource = fmt.module().Source(where)
    return source


def write_images(
    images: Iterable[Array],
    path: StrPath,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    axes: str | None = None,
    encoding: Encoding = "bytes",
    image_ids: Iterable[str] | None = None,
    metadata: Iterable[Mapping[str, Any] | None] | None = None,
    columns: Columns | None = None,
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
    image_ids
        Distinct ids, one an image; by default ``image-00000`` and so on.
    metadata
        One dict an image with ome-arrow's field names (`omearrow_ds.schema.METADATA_FIELDS`); missing fields are null.
    columns
        Further columns, one row an image.
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
    """
    where = str(path)
    ids = None if image_ids is None else incoming.distinct_ids(image_ids, where)
    described = incoming.describe(images, axes, ids, metadata, where)
    total = len(images) if isinstance(images, Sequence) else None
    table = incoming.as_table(columns, where)
    _write(described, Path(path), format, encoding, table, total, progress=progress, overwrite=overwrite)


def convert(
    src: StrPath | ImageSource,
    dst: StrPath,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    encoding: Encoding = "bytes",
    progress: bool = False,
    overwrite: bool = False,
) -> None:
    """Copy a collection to another format: pixels, ids, OME metadata and columns.

    Parameters
    ----------
    src
        Path of a collection, or an open source.
    dst, format, encoding, progress, overwrite
        As in `write_images`.

    Raises
    ------
    OMEArrowDSError
        As in `open_images` and `write_images`.
    """
    if isinstance(src, str | os.PathLike):
        with open_images(src) as source:
            convert(source, dst, format, encoding=encoding, progress=progress, overwrite=overwrite)
        return
    target = Path(dst)
    if target.exists() and src.path.resolve().is_relative_to(target.resolve()):
        raise PathExistsError(f"{target}: is the source, or the folder that it is in; convert to another path")
    columns = src.columns if src.columns.num_columns else None
    _write(_images_of(src), target, format, encoding, columns, len(src), progress=progress, overwrite=overwrite)


def _images_of(source: ImageSource) -> Iterator[codec.Image]:
    for start, images in source.scan():
        for index, pixels in enumerate(images, start=start):
            yield codec.Image(pixels, source.image_ids[index], source.metadata(index))


def _write(
    images: Iterator[codec.Image],
    path: Path,
    format_name: str | None,
    encoding: str,
    columns: pa.Table | None,
    total: int | None,
    *,
    progress: bool,
    overwrite: bool,
) -> None:
    fmt = get_format(format_name) if format_name is not None else format_of_target(path)
    if encoding not in schema.ENCODINGS:
        raise ArgumentError(f"unknown encoding {encoding!r}; the encodings are {', '.join(schema.ENCODINGS)}")
    module = fmt.module()
    check_target(path, overwrite=overwrite)
    module.Source.refuse_target(path, pa.schema([]) if columns is None else columns.schema)
    shown = tqdm(images, total=total, unit="image", desc=fmt.label, disable=not progress)
    checked = incoming.checked(shown, encoding if fmt.kind == "table" else "bytes", columns, str(path))
    table = pa.table({}) if columns is None else columns

    def fill(temporary: Path) -> None:
        if fmt.kind == "directory":
            temporary.mkdir()
            stream = incoming.Stream(checked)
            write = partial(module.write, stream, table, temporary)
        else:
            policy = {"max_rows": module.MAX_ROWS, "max_bytes": module.MAX_BYTES}
            stream = incoming.Stream(codec.encode_tables(checked, table, encoding, **policy))
            image_field = pa.field(schema.COLUMN, schema.image_struct(encoding))
            write = partial(module.write, stream, pa.schema([image_field, *table.schema]), temporary)
        try:
            write()
        except BaseException as error:
            stream.stop()
            if stream.failure is not None:
                raise stream.failure from None
            if "KeyboardInterrupt" in str(
                error
            ):  # it came as the library was entering the stream: only its text is left
                raise KeyboardInterrupt from error
            if isinstance(error, module.Source.errors) and not isinstance(error, OMEArrowDSError):
                why = first_line(error)
                msg = f"{path}: could not be written as {fmt.label}; nothing is left of it: {why}"
                raise WriteError(msg) from error
            raise

    publish(path, fill, overwrite=overwrite)
