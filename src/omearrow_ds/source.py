"""Collections of images in storage: open, write and convert."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from omearrow_ds import codec, schema
from omearrow_ds.axes import to_tczyx
from omearrow_ds.errors import (
    ArgumentError,
    FormatError,
    ImageError,
    MetadataError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
    WriteError,
)
from omearrow_ds.formats import Format, detect, format_of_target, get_format
from omearrow_ds.formats._base import plain_columns

StrPath = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
Encoding = Literal["bytes", "list"]
Columns: TypeAlias = pa.Table | Mapping[str, Sequence[Any]]


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
    image_ids: Sequence[str] | None = None,
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
    if image_ids is not None:
        _check_ids(image_ids)
    described = _describe(images, axes, image_ids, metadata)
    total = len(images) if isinstance(images, Sequence) else None
    _write(described, Path(path), format, encoding, _as_table(columns), total, progress=progress, overwrite=overwrite)


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
    if target.exists() and target.samefile(src.path):
        raise PathExistsError(f"{target}: source and target are the same; convert to another path")
    columns = src.columns if src.columns.num_columns else None
    _write(_images_of(src), target, format, encoding, columns, len(src), progress=progress, overwrite=overwrite)


def _images_of(source: ImageSource) -> Iterator[codec.Image]:
    for start, images in source.scan():
        for index, pixels in enumerate(images, start=start):
            yield codec.Image(pixels, source.image_ids[index], source.metadata(index))


def _describe(
    images: Iterable[Array],
    axes: str | None,
    image_ids: Sequence[str] | None,
    metadata: Iterable[Mapping[str, Any] | None] | None,
) -> Iterator[codec.Image]:
    """Yield the images as (T, C, Z, Y, X) with their ids and metadata, refusing what does not go together."""
    records = None if metadata is None else iter(metadata)
    count = 0
    for index, image in enumerate(images):
        where = f"image {index}"
        if not isinstance(image, np.ndarray):
            raise ImageError(f"{where} is a {type(image).__name__}; a numpy array is needed")
        pixels = to_tczyx(image, axes, where)
        if image_ids is not None and index >= len(image_ids):
            raise MetadataError(f"image_ids has {len(image_ids)} entries, there are more images")
        image_id = f"image-{index:05d}" if image_ids is None else image_ids[index]
        try:
            record = None if records is None else next(records)
        except StopIteration:
            raise MetadataError(f"metadata has {index} entries, there are more images") from None
        given = schema.normalise_metadata(record, pixels.shape[1], where)
        yield codec.Image(pixels.astype(pixels.dtype.newbyteorder("="), copy=False), image_id, given)
        count += 1
    if image_ids is not None and len(image_ids) != count:
        raise MetadataError(f"image_ids has {len(image_ids)} entries, there are {count} images")
    if records is not None and next(records, None) is not None:
        raise MetadataError(f"metadata has more entries than the {count} images")


def _check_ids(image_ids: Sequence[str]) -> None:
    seen = set()
    for index, image_id in enumerate(image_ids):
        if not isinstance(image_id, str) or not image_id or image_id in seen or not _is_unicode(image_id):
            raise MetadataError(
                f"image_ids must be distinct, non-empty Unicode strings; image {index} has {image_id!r}"
            )
        seen.add(image_id)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _as_table(columns: Columns | None) -> pa.Table | None:
    if columns is None:
        return None
    try:
        table = plain_columns(columns if isinstance(columns, pa.Table) else pa.table(dict(columns)))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MetadataError(f"columns cannot be made an Arrow table: {error}") from error
    reserved = {schema.COLUMN, schema.SIDECAR_COLUMN} & set(table.column_names)
    if reserved or len(set(table.column_names)) != table.num_columns:
        raise MetadataError(
            f"columns are called {table.column_names}; names must differ, and {schema.COLUMN!r} and "
            f"{schema.SIDECAR_COLUMN!r} are taken"
        )
    return table.replace_schema_metadata(None) if table.num_columns else None


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
    _check_target(path, overwrite=overwrite)
    module.Source.refuse_target(path, pa.schema([]) if columns is None else columns.schema)
    checked = _checked(images, encoding if fmt.kind == "table" else "bytes", columns, fmt, total, progress=progress)
    table = pa.table({}) if columns is None else columns
    failures: list[BaseException] = []

    def fill(temporary: Path) -> None:
        try:
            write_to(temporary, _remembering(checked, failures))
        except BaseException as error:
            if failures:
                raise failures[0] from None
            if isinstance(error, module.Source.errors) and not isinstance(error, OMEArrowDSError):
                raise WriteError(
                    f"{path}: could not be written as {fmt.label}; nothing is left of it: {error}"
                ) from error
            raise

    def write_to(temporary: Path, checked: Iterator[codec.Image]) -> None:
        if fmt.kind == "directory":
            temporary.mkdir()
            module.write(checked, table, temporary)
            return
        image_field = pa.field(schema.COLUMN, schema.image_struct(encoding))
        batches = codec.encode_tables(checked, table, encoding, max_rows=module.MAX_ROWS, max_bytes=module.MAX_BYTES)
        module.write(batches, pa.schema([image_field, *table.schema]), temporary)

    publish(path, fill, overwrite=overwrite)


def _remembering(images: Iterator[codec.Image], failures: list[BaseException]) -> Iterator[codec.Image]:
    """Pass the images on, keeping the exception that ends them: stream readers turn it into one of their own."""
    try:
        yield from images
    except BaseException as error:
        failures.append(error)
        raise


def _checked(
    images: Iterator[codec.Image],
    encoding: str,
    columns: pa.Table | None,
    fmt: Format,
    total: int | None,
    *,
    progress: bool,
) -> Iterator[codec.Image]:
    """Pass the images on; what cannot be stored, or columns of another length, is refused before publishing."""
    count = 0
    for image in tqdm(images, total=total, unit="image", desc=fmt.label, disable=not progress):
        codec.check_image(image, encoding, f"image {count} ({image.image_id})")
        count += 1
        if columns is not None and count > columns.num_rows:
            raise MetadataError(f"columns have {columns.num_rows} rows, there are more images")
        yield image
    if columns is not None and count != columns.num_rows:
        raise MetadataError(f"columns have {columns.num_rows} rows, there are {count} images")


def _check_target(path: Path, *, overwrite: bool) -> None:
    if os.path.lexists(path) and not overwrite:
        raise PathExistsError(f"{path}: exists already; pass overwrite=True to replace it, or choose another path")
    if not path.parent.is_dir():
        raise MissingPathError(f"{path}: the folder {path.parent} does not exist; make it first")


def publish(path: Path, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let ``fill`` write in a temporary folder beside ``path``, then move the result there in one step.

    Whatever ends the writing early, ``path`` is as it was and the temporary folder is removed; only a killed process
    leaves a ``.NAME.partial-*`` behind, which no source opens as complete.
    """
    folder = path.with_name(f".{path.name[:40]}.partial-{uuid.uuid4().hex[:12]}")
    folder.mkdir()
    try:
        fill(folder / path.name)
        _move(folder / path.name, path, overwrite=overwrite)
    finally:
        shutil.rmtree(folder)


def _move(temporary: Path, path: Path, *, overwrite: bool) -> None:
    if not overwrite:
        try:
            _move_without_replacing(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise PathExistsError(f"{path}: was made by somebody else while it was written here") from None
        return
    if not path.is_dir() and not temporary.is_dir():
        temporary.replace(path)
        return
    replaced = temporary.with_name(f"{temporary.name}.replaced")
    if os.path.lexists(path):
        path.rename(replaced)
    try:
        temporary.rename(path)
    except BaseException:
        if not os.path.lexists(path):
            replaced.rename(path)
        raise


def _move_without_replacing(temporary: Path, path: Path) -> None:
    if temporary.is_dir():
        temporary.rename(path)
        return
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        if os.path.lexists(path):  # a file system without hard links: not atomic against another writer
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)
