"""`ImageSource`: an open collection, and `OpenOptions`: the keywords that it is opened with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.formats import Format, _detect
from omearrow_ds.storage.formats._columns import Named
from omearrow_ds.storage.formats._regions import Pick
from omearrow_ds.storage.remote import Storage

StrPath = _detect.StrPath
Paths = _detect.Paths
Array = np.ndarray[Any, Any]
On = str | Sequence[str] | Mapping[str, str]


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
    rows
        (N,) int64, the row number of each image in the table; fewer than there are where null images were skipped.
    """

    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table

    @property
    def rows(self) -> Array:
        """Row number of each image in the table."""

    @property
    def format(self) -> Format:
        """The storage format."""

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image: name, image_type, acquisition_datetime, physical_size_*, channels."""

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
        """Return one image (T, C, Z, Y, X) in writable memory of its own, or a part of it.

        ``region`` is ``(y0, y1, x0, x1)`` in pixels, half-open, within the image. ``channels`` are indices or names,
        ``z`` and ``t`` indices: one, several in any order, or a slice. All axes stay. What a part has no use for is
        not read where the store can do without.
        """

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""

    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Beside(Protocol):
    """What is known of samples beside their pixels: where they are from, and an id and a row of columns for each."""

    path: Path

    @property
    def image_ids(self) -> Sequence[str]:
        """One id a sample."""

    @property
    def columns(self) -> pa.Table:
        """One row a sample."""

    @property
    def named(self) -> Named:
        """The same, where not all of them are wanted."""


class OpenOptions(TypedDict, total=False):
    """The keywords of `open_images`, which says what they mean; whatever takes a path takes and passes them too."""

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
    storage: Storage | None
    part_cache: StrPath | None
    part_cache_bytes: int | None


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `ArgumentError` for a keyword that is none of those known, which ``**`` takes as well."""
    names = sorted(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}=?" if close else f"there are {', '.join(names)}"
            raise ArgumentError(f"{where}: there is no option {name}=; {hint}")


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
        Opens it, ``Source(path)``, made on ``TableSource`` or ``FolderSource``, which say what of reading a format has
        to give. Its class has ``name``, that of the format, and ``errors``, what its library raises where something
        cannot be read.
    STAGES
        Where it is there: which of its functions are a stage of an epoch, as ``profile`` tells them apart, for instance
        ``{"Source.views": "read+decode"}``; without it all of reading is ``"read"``.
    """

    write: Callable[[Any, Any, Path, str], None]
    Source: type[Any]
