"""What an open collection offers, and the keywords that it is opened with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import pyarrow as pa

from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._base import Done, SupportsImages
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._stored import Stored

StrPath = str | os.PathLike[str]
Array = np.ndarray[Any, Any]


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
        One id an image, as stored: those that others wrote need not be distinct. Where it is null, the row's number.
    shapes
        (N, 5) int64, an image's (T, C, Z, Y, X) a row, known without decoding pixels.
    dtypes
        N pixel dtypes.
    columns
        The other columns of the table, one row an image.
    checksums
        What `write_images` stored of the images, a string or a null each; None if it stored none.
    rows
        (N,) int64, the row number of each image in the table; fewer than there are where null images were skipped.
    image_column, other_image_columns
        Names of the columns that the images are from, and of those with other images; of a folder none.
    stamp
        What tells the file or folder that was opened from one that was put in its place.
    """

    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None
    rows: Array
    image_column: tuple[str, ...]
    other_image_columns: tuple[str, ...]

    @property
    def format(self) -> Format:
        """The storage format."""

    @property
    def stamp(self) -> tuple[int, ...] | None:
        """What tells the file or folder that was opened from one that was put in its place."""

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image: name, image_type, acquisition_datetime, physical_size_*, channels."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Array:
        """Return one image (T, C, Z, Y, X) in writable memory of its own."""

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it may be a read-only view of the store's memory."""

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the store's memory."""

    def stacks(self) -> list[Array]:
        """Return all images as read-only views (n, T, C, Z, Y, X) of memory that holds them decoded, else []."""

    def guard(self) -> Callable[[], None] | None:
        """Return what must be called before each access to the `stacks`: it raises if their file was cut short."""

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        """Decode every image once into ``images[index]``, an array of its shape and dtype; it may be a stack.

        ``done(first, stop)`` is called when images ``first`` to ``stop - 1`` are there.
        """

    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""

    def image_columns(self) -> list[ImagesOf]:
        """Return what each image column of the table holds, without reading pixels; of a folder nothing."""

    def stored_files(self) -> Iterator[Path]:
        """Yield the files that hold the collection."""

    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OpenOptions(TypedDict, total=False):
    """The keywords of `open_images`, which says what they mean; whatever takes a path takes and passes them too."""

    engine: str | None
    verify: bool | None
    image_column: str | Sequence[str] | None
    nulls: Literal["error", "skip"]


class FormatModule(Protocol):
    """What the module has that a `Format` leads to.

    Attributes
    ----------
    write
        Writes a collection; what its library raises is a `WriteError` if it is among ``Source.errors``. Of a table
        ``write(tables, schema, path, compression)``: an iterator of `pyarrow.Table`, each a group of rows whose column
        ``ome_image`` holds the images, the schema that all of them have, and the file or folder to make. Of a directory
        ``write(images, columns, path, compression)``: an iterator of `omearrow_ds.codec.encode.Image`, the columns
        beside them as a `pyarrow.Table` of no or as many rows, and a folder that is there and empty.
    Source
        Opens it, ``Source(path)``: an `ImageSource`, made on ``TableSource`` or ``FolderSource``. Its class has
        ``name``, that of the format, and ``errors``, what its library raises where something cannot be read.
    """

    write: Callable[[Any, Any, Path, str], None]
    Source: type[Any]
