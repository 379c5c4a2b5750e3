"""What the two folder formats share: the sidecar table, natural order, and a source of one image a member."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds import schema
from omearrow_ds.codec import Image, beside
from omearrow_ds.errors import FormatError
from omearrow_ds.formats import SIDECAR, SIDECAR_FORMAT_KEY
from omearrow_ds.formats._base import Array, BaseSource, SupportsImages, damaged, plain_columns

_MEMBER = pa.struct(
    {
        "file": pa.string(),
        "id": pa.string(),
        "shape": pa.list_(pa.int64(), 5),
        "dtype": pa.string(),
        "size_bytes": pa.int64(),
        "pixel_offset": pa.int64(),
    }
)


_FOUND = ("columns", "_root", "_listed", "_members", "_stamp")


class Member(NamedTuple):
    """One image of a folder: its file's name, its id, its shape (T, C, Z, Y, X) and its dtype.

    Where a file holds the pixels as they are in memory on a little-endian machine, ``pixel_offset`` is where they start
    in the file, which then had ``size_bytes`` in all; one that was looked at since was last ``modified_ns``.
    """

    file: str
    image_id: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size_bytes: int | None = None
    pixel_offset: int | None = None
    modified_ns: int | None = None


def member_name(index: int, image_id: str, suffix: str) -> str:
    """Return a file name that sorts as the images do and shows the image's id."""
    return f"{index:06d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', image_id)[:80]}{suffix}"


def write_sidecar(path: Path, format_name: str, members: Sequence[Member], columns: pa.Table) -> None:
    """Write the table beside the images: ``columns``, and what a source needs to know of each file."""
    columns_of_members = dict(zip((field.name for field in _MEMBER), zip(*members, strict=True), strict=False))
    arrays = [_listed(field, columns_of_members.get(field.name, ())) for field in _MEMBER]
    listing = pa.StructArray.from_arrays(arrays, fields=list(_MEMBER))
    table = beside(schema.SIDECAR_COLUMN, listing, columns)
    pq.write_table(table.replace_schema_metadata({SIDECAR_FORMAT_KEY: format_name.encode()}), path / SIDECAR)


def _listed(field: pa.Field, values: Iterable[Any]) -> pa.Array:
    """Return one field of all members as an Arrow array; a dtype stands there by its name."""
    return pa.array([value.name if isinstance(value, np.dtype) else value for value in values], field.type)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders the digits in names as numbers: ``a2`` before ``a10``."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part]


class FolderSource(BaseSource):
    """Images stored one a file (or one a Zarr node) in a folder, or a single such file.

    Raises
    ------
    FormatError
        If there is no image, or the files are not those that the sidecar lists.
    """

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None) -> None:
        self.path = path
        vars(self).update(known or {})
        self._refuse_replaced()
        if known is None:
            self._look()
        self.image_ids = [member.image_id for member in self._members]
        self.shapes = np.array([member.shape for member in self._members], np.int64).reshape(-1, 5)
        self.dtypes = [member.dtype for member in self._members]

    def _look(self) -> None:
        """Find out what the folder holds."""
        path = self.path
        self.columns = pa.table({})
        single = self._is_member(path)
        if not single and not path.is_dir():
            raise FormatError(f"{path}: is a file, and no image of format {self.name!r}; pass another format=")
        self._root = path.parent if single else path
        present = [path.name] if single else self._present()
        listed = None if single else self._read_sidecar()
        self._listed = listed is not None
        self._members: list[Member] = listed if listed is not None else [self._describe(file) for file in present]
        if listed is None and not present:
            raise FormatError(f"{path}: holds no image of format {self.name!r}")
        self._refuse_strangers({member.file for member in self._members}, set(present))

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Carry what was found, lest each process looks into every file again."""
        return type(self), (self.path, {name: getattr(self, name) for name in _FOUND})

    @abstractmethod
    def _is_member(self, path: Path) -> bool:
        """Whether ``path`` is one image by itself."""

    @abstractmethod
    def _describe(self, file: str) -> Member:
        """Return the listing of a file, without decoding pixels."""

    @abstractmethod
    def _read(self, index: int) -> Array:
        """Return one image (T, C, Z, Y, X) in memory of its own."""

    def _present(self) -> list[str]:
        names = (entry.name for entry in self.path.iterdir() if self._is_member(entry))
        return sorted(names, key=natural_key)

    def _read_sidecar(self) -> list[Member] | None:
        """Return the members that the sidecar lists, and take its columns; None where there is no sidecar of ours."""
        sidecar = self.path / SIDECAR
        if not sidecar.is_file():
            return None
        try:
            table = pq.read_table(sidecar)
        except (pa.ArrowException, OSError) as error:
            raise damaged(sidecar, "a Parquet file", error) from error
        if schema.SIDECAR_COLUMN not in table.column_names:
            return None
        self.columns = plain_columns(table.drop_columns(schema.SIDECAR_COLUMN))
        return [
            Member(
                row["file"],
                row["id"],
                tuple(row["shape"]),
                schema.pixel_dtype(row["dtype"], str(sidecar)),
                row["size_bytes"],
                row["pixel_offset"],
            )
            for row in table[schema.SIDECAR_COLUMN].to_pylist()
        ]

    def _refuse_strangers(self, listed: set[str], present: set[str]) -> None:
        for names, what in ((listed - present, "is listed but missing"), (present - listed, "is there but not listed")):
            if names:
                msg = (
                    f"{self.path}: {min(names)} {what} in {SIDECAR} ({len(names)} such); restore the folder, "
                    f"or remove {SIDECAR} to read what is there as a plain folder"
                )
                raise FormatError(msg)

    def _checked(self, index: int, image: Array) -> Array:
        """Return ``image`` if it is what the listing says, else raise `FormatError`."""
        member = self._members[index]
        if image.shape != member.shape or image.dtype != member.dtype:
            msg = (
                f"{self._root / member.file}: image {index} is {image.shape} {image.dtype}, expected {member.shape} "
                f"{member.dtype}; it changed since the folder was written"
            )
            raise FormatError(msg)
        return image

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``, each in memory of its own."""
        self._refuse_replaced()
        return [self._checked(index, self._read(index)) for index in indices.tolist()]

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``, in memory of its own."""
        self._refuse_replaced()
        return self._checked(index, self._read(index))

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(index, [image])``."""
        self._refuse_replaced()
        for index in range(len(self)):
            yield index, [self._checked(index, self._read(index))]

    def decode_into(self, images: SupportsImages) -> None:
        """Decode every image once into ``images[index]``, an array of its shape and dtype; it may be a stack."""
        self._refuse_replaced()
        for index in range(len(self)):
            self._read_into(index, images[index])

    def _read_into(self, index: int, image: Array) -> None:
        """Read one image into an array of its shape and dtype, in C order."""
        image[...] = self.view(index)

    def close(self) -> None:
        """Do nothing, where the format keeps no handle open."""


def write_members(
    images: Iterable[Image],
    columns: pa.Table,
    path: Path,
    format_name: str,
    suffix: str,
    write_one: Callable[[Path, Image], int | None],
) -> None:
    """Write each image with ``write_one`` into the new folder ``path``, then the sidecar.

    ``write_one(file, image)`` returns the offset of plainly stored pixels, or None.
    """
    members = []
    for index, image in enumerate(images):
        file = path / member_name(index, image.image_id, suffix)
        offset = write_one(file, image)
        size_bytes = None if offset is None else file.stat().st_size
        members.append(Member(file.name, image.image_id, image.pixels.shape, image.pixels.dtype, size_bytes, offset))
    write_sidecar(path, format_name, members, columns)
