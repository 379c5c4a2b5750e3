"""`ImageSource`: an open collection, and `OpenOptions`: the keywords that it is opened with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.storage.formats import Format, _detect
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._regions import Pick
from omearrow_ds.storage.remote import Storage

StrPath = _detect.StrPath
Paths = _detect.Paths
On = str | Sequence[str] | Mapping[str, str]


@runtime_checkable
class ImageSource(Protocol):
    """An open collection of images.

    Attributes
    ----------
    format : Format
        Storage format.
    path : pathlib.Path
        Path of the collection.
    image_ids : sequence of str
        One id per image, as stored. Ids of other programs may repeat. A null id is replaced by the row number.
    shapes : numpy.ndarray
        (N, 5) int64: T, C, Z, Y, X of each image, known without decoding pixels.
    dtypes : sequence of numpy.dtype
        Pixel dtype of each image.
    columns : pyarrow.Table
        Other columns of the table, one row per image. All are read at the first access; `column` and `column_table`
        read single columns.
    rows : numpy.ndarray
        (N,) int64: row number of each image in the table. Skipped null images are missing.

    Examples
    --------
    >>> from omearrow_ds import open_images
    >>> with open_images("plate.arrow") as source:
    ...     print(source.image_ids[0], source.dtypes[0], source.columns["label"][1])
    ...     print(source.read(0, region=(0, 32, 0, 64), channels=[1]).shape)
    B02_1 uint16 1
    (1, 1, 1, 32, 64)
    """

    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]

    @property
    def columns(self) -> pa.Table:
        """Columns other than the image column, one row per image."""

    @property
    def rows(self) -> Array:
        """Row number of each image in the stored table."""

    @property
    def format(self) -> Format:
        """The storage format."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns other than the image column.

        Examples
        --------
        >>> from omearrow_ds import open_images
        >>> with open_images("plate.arrow") as source:
        ...     print(source.column_names)
        ['Metadata_Well', 'label']
        """

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column, one value per image, without reading the others.

        Parameters
        ----------
        name
            Name of the column.

        Returns
        -------
        pyarrow.ChunkedArray
            (N,) values of the images.

        Raises
        ------
        ColumnError
            If the column does not exist.
        FormatError
            If the column cannot be read, or the file changed after it was opened.

        Examples
        --------
        >>> from omearrow_ds import open_images
        >>> with open_images("plate.arrow") as source:
        ...     print(source.column("label").to_pylist()[:3])
        [0, 1, 0]
        """

    def column_table(self, names: Sequence[str]) -> pa.Table:
        """Return some columns as a table, one row per image, without reading the others.

        Parameters
        ----------
        names
            Distinct names of columns, in the order of the table.

        Returns
        -------
        pyarrow.Table
            N rows.

        Raises
        ------
        ArgumentError
            If ``names`` is a string, or repeats a name.
        ColumnError
            If a column does not exist.
        FormatError
            If a column cannot be read, or the file changed after it was opened.

        Examples
        --------
        >>> from omearrow_ds import open_images
        >>> with open_images("plate.arrow") as source:
        ...     print(source.column_table(["label", "Metadata_Well"]).schema.names)
        ['label', 'Metadata_Well']
        """

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image as a dictionary.

        Keys: ``name``, ``image_type``, ``acquisition_datetime``, ``physical_size_*`` and ``channels``.
        """

    def __len__(self) -> int: ...

    def read(
        self,
        index: int,
        region: Sequence[int] | None = None,
        channels: Pick | None = None,
        *,
        z: Pick | None = None,
        t: Pick | None = None,
    ) -> Array:
        """Return one image, or a region of it, as a new writable array.

        Formats that allow it read only the rows, tiles or chunks that the region covers (`docs/reference/formats.md`).

        Parameters
        ----------
        index
            Index of the image.
        region
            ``None`` reads whole planes. Otherwise ``(y0, y1, x0, x1)`` in pixels; ``y1`` and ``x1`` are exclusive.
        channels
            ``None`` reads all channels. Otherwise an index or name, a list of these in any order, or a slice.
        z, t
            ``None`` reads all. Otherwise an index, a list of indices in any order, or a slice.

        Returns
        -------
        numpy.ndarray
            (T, C, Z, Y, X) in the stored dtype. All axes are kept.

        Raises
        ------
        ImageIndexError
            If ``index`` is out of range.
        SelectError, ArgumentError
            If the region or an index is outside the image.
        DecodeError
            If the stored image is damaged.
        """

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return several images as a list of new arrays, in the order of ``indices``.

        Indices may repeat.
        """

    def close(self) -> None:
        """Close the files and connections of the source."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OpenOptions(TypedDict, total=False):
    """Typed dictionary of the keyword arguments of `open_images`.

    Other functions, such as `convert`, accept the same arguments.

    Examples
    --------
    >>> from omearrow_ds import OpenOptions, convert
    >>> options: OpenOptions = {"pattern": "{well}_01_{channel_index}_{site}_{channel}_001.tif"}
    >>> convert("plate", "converted.arrow", **options)
    """

    engine: str | None
    verify: bool | None
    image_column: str | Sequence[str] | None
    nulls: Literal["error", "skip"]
    level: int
    table: str | None
    pattern: str | re.Pattern[str] | None
    channels: Sequence[str] | None
    incomplete: Literal["error", "skip"]
    root: StrPath | None
    columns: Any
    on: On | None
    column_types: Mapping[str, str] | None
    filter: str | pc.Expression | None
    storage: Storage | None
    part_cache: StrPath | None
    part_cache_bytes: int | None


class FormatModule(Protocol):
    """Attributes that the module of a `Format` must have.

    Attributes
    ----------
    open_collection
        Opens a collection: ``open_collection(path, **options)``. Options are ``objects``, ``image_column`` for tables,
        and `Format.open_options`, as far as they are passed. For tables it is ``partial(TableImages, name, type,
        ERRORS)`` with a subclass of ``StoredTable``; for directories ``partial(open_folder, name, type)`` with a
        subclass of ``FileReader``. These classes declare the methods that a format must implement.
    write_collection
        Writes a collection. For tables it is ``write_collection(tables, schema, path, compression)``: an iterator of
        `pyarrow.Table`, each a row group with the images in column ``ome_image``, their common schema, and the file or
        folder to create. For directories it is ``write_collection(images, columns, path, compression)``: an iterator of
        `omearrow_ds.codec.encode.Image`, the other columns as a `pyarrow.Table` with one row per image or none, and an
        existing empty folder.
    ERRORS
        Exceptions that the library of the format raises for unreadable data and failed writes.
    UNSUPPORTED_TYPES
        Optional. Tests for Arrow types that the format cannot store in columns; by default none for tables, and
        ``(pa.types.is_interval,)`` for directories, whose columns are stored in Parquet.
    refuse_target
        Optional. Raises an error if the format cannot be stored at a path or cannot hold columns:
        ``refuse_target(path, schema)``. A module that writes with the functions of another format imports its
        ``UNSUPPORTED_TYPES`` and ``refuse_target`` too.
    STAGES
        Optional. Functions that ``profile`` reports as separate stages of an epoch, for instance
        ``{"PapyrusTable.read_images": "read+decode"}``; without it all of reading is ``"read"``.
    """

    open_collection: Callable[..., Images]
    write_collection: Callable[[Any, Any, Path, str], None]
    ERRORS: tuple[type[Exception], ...]
