"""What the two folder formats share: the sidecar table, natural order, and a source of one image a member."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds import schema
from omearrow_ds.codec import Image, beside
from omearrow_ds.errors import FormatError
from omearrow_ds.formats import SIDECAR, SIDECAR_FORMAT_KEY
from omearrow_ds.formats._base import Array, BaseSource, damaged, plain_columns

_MEMBER = pa.struct({"file": pa.string(), "id": pa.string(), "shape": pa.list_(pa.int64(), 5), "dtype": pa.string()})


class Member(NamedTuple):
    """One image of a folder: its file's name, its id, its shape (T, C, Z, Y, X) and its dtype."""

    file: str
    image_id: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def member_name(index: int, image_id: str, suffix: str) -> str:
    """Return a file name that sorts as the images do and shows the image's id."""
    return f"{index:06d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', image_id)[:80]}{suffix}"


def write_sidecar(path: Path, format_name: str, members: Sequence[Member], columns: pa.Table) -> None:
    """Write the table beside the images: ``columns``, and what a source needs to know of each file."""
    rows = [(member.file, member.image_id, list(member.shape), member.dtype.name) for member in members]
    names = [field.name for field in _MEMBER]
    listing = pa.array([dict(zip(names, row, strict=True)) for row in rows], _MEMBER)
    table = beside(schema.SIDECAR_COLUMN, listing, columns)
    pq.write_table(table.replace_schema_metadata({SIDECAR_FORMAT_KEY: format_name.encode()}), path / SIDECAR)


def member_of(image: Image, file: str) -> Member:
    """Return the listing of an image stored as ``file``."""
    return Member(file, image.image_id, image.pixels.shape, image.pixels.dtype)


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

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refuse_replaced()
        self.columns = pa.table({})
        single = self._is_member(path)
        if not single and not path.is_dir():
            raise FormatError(f"{path}: is a file, and no image of format {self.name!r}; pass another format=")
        self._root = path.parent if single else path
        present = [path.name] if single else self._present()
        listed = None if single else self._read_sidecar()
        self._listed = listed is not None
        members = listed if listed is not None else [self._describe(file) for file in present]
        if listed is None and not present:
            raise FormatError(f"{path}: holds no image of format {self.name!r}")
        self._refuse_strangers({member.file for member in members}, set(present))
        self._files = [member.file for member in members]
        self.image_ids = [member.image_id for member in members]
        self.shapes = np.array([member.shape for member in members], np.int64).reshape(-1, 5)
        self.dtypes = [member.dtype for member in members]

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
            Member(row["file"], row["id"], tuple(row["shape"]), schema.pixel_dtype(row["dtype"], str(sidecar)))
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
        if image.shape != tuple(self.shapes[index]) or image.dtype != self.dtypes[index]:
            msg = (
                f"{self._root / self._files[index]}: image {index} is {image.shape} {image.dtype}, expected "
                f"{tuple(self.shapes[index].tolist())} {self.dtypes[index]}; it changed since the folder was written"
            )
            raise FormatError(msg)
        return image

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``, each in memory of its own."""
        self._refuse_replaced()
        return [self._checked(index, self._read(index)) for index in indices.tolist()]

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(index, [image])``."""
        self._refuse_replaced()
        for index in range(len(self)):
            yield index, [self._checked(index, self._read(index))]

    def close(self) -> None:
        """Do nothing: a folder holds no handle."""


def write_members(
    images: Iterable[Image], columns: pa.Table, path: Path, format_name: str, suffix: str, write_one: Any
) -> None:
    """Write each image with ``write_one(file, image)`` into the new folder ``path``, then the sidecar."""
    members = []
    for index, image in enumerate(images):
        member = member_of(image, member_name(index, image.image_id, suffix))
        write_one(path / member.file, image)
        members.append(member)
    write_sidecar(path, format_name, members, columns)
