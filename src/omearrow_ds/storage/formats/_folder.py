"""`FolderSource`: the base of the two folder formats: the sidecar table, natural order, one image per member."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.codec.encode import Image, beside, with_checksums
from omearrow_ds.codec.leaves import numbers
from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats._base import Array, BaseSource, files_below
from omearrow_ds.storage.formats._detect import (
    SIDECAR,
    SIDECAR_FORMAT_KEY,
    entries_below,
    is_hidden,
    is_zarr_node,
    refuse_special,
)
from omearrow_ds.storage.formats._failures import MALFORMED, refusing

Described = TypeVar("Described")
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

_DESCRIBED_AT_ONCE = 8  # files that are fetched in parallel
_ALWAYS_LISTED = ("file", "id", "shape", "dtype")
_FOUND = (
    *("columns", "checksums", "_root", "_listed", "_alike", "_split_along", "_members", "shapes", "stamp", "variant"),
)


class ListedPage(NamedTuple):
    """Image series and page of a file, counted from 0; None means the only series, or all pages."""

    series: int | None
    page: int | None
    where: str  # Table, row and channel, for errors.


class Member(NamedTuple):
    """One image of a folder: its file's name, its id, its shape (T, C, Z, Y, X) and its dtype.

    ``pixel_offset`` is set if the file stores the pixels as they are in memory on a little-endian machine; the file
    then had ``size_bytes``. ``modified_ns`` is the modification time of a file that was not listed by a sidecar.
    """

    file: str
    image_id: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size_bytes: int | None = None
    pixel_offset: int | None = None
    modified_ns: int | None = None
    listed: ListedPage | None = None


def member_name(index: int, image_id: str, suffix: str) -> str:
    """Return a file name that sorts in image order and contains the image's id."""
    return f"{index:06d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', image_id)[:80]}{suffix}"


def write_sidecar(path: Path, format_name: str, members: Sequence[Member], columns: pa.Table) -> None:
    """Write the sidecar table: ``columns``, and the file, id, shape, dtype and pixel offset of each image."""
    columns_of_members = dict(zip((field.name for field in _MEMBER), zip(*members, strict=True), strict=False))
    arrays = [_listed(field, columns_of_members.get(field.name, ())) for field in _MEMBER]
    listing = pa.StructArray.from_arrays(arrays, fields=list(_MEMBER))
    table = beside(schema.SIDECAR_COLUMN, listing, columns)
    pq.write_table(table.replace_schema_metadata({SIDECAR_FORMAT_KEY: format_name.encode()}), path / SIDECAR)


def _listed(field: pa.Field, values: Iterable[Any]) -> pa.Array:
    """Return one field of all members as an Arrow array, dtypes by name."""
    return pa.array([value.name if isinstance(value, np.dtype) else value for value in values], field.type)


def link_refused(path: Path) -> FormatError:
    """Return the error for a symbolic link in a folder of images; links are refused because they may lead anywhere."""
    return FormatError(
        f"{path}: is a symbolic link, which is not followed in a folder of images; copy the folder with the targets of "
        f"its links (cp -rL)"
    )


def refuse_links(path: Path) -> None:
    """Raise `FormatError` if there is a symbolic link, a pipe or another special file below ``path``."""
    for entry in entries_below(path):
        if entry.is_symlink():
            raise link_refused(Path(entry.path))
        if not entry.is_file():
            raise FormatError(f"{entry.path}: is neither a file nor a folder; remove it from the image")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders the digits in names as numbers: ``a2`` before ``a10``."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part]


def _shared_rows(shapes: Array) -> Iterator[tuple[int, ...]]:
    """Yield each shape as a tuple; equal shapes share one tuple, to save memory and time."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for shape in zip(*shapes.T.tolist(), strict=True):
        yield known.setdefault(shape, shape)


class FolderSource(BaseSource):
    """Images stored one per file (or per Zarr node) in a folder, or a single such file.

    Raises
    ------
    FormatError
        If it contains no images, or the files are not those that the sidecar lists.
    """

    unheld_types = (pa.types.is_interval,)  # the sidecar is in Parquet
    _carried: ClassVar[Sequence[str]] = ()  # further attributes that are pickled
    _members: list[Member]
    _split_along = ""  # axes along which files may hold parts of their images
    _alike = False  # whether files are assumed to have the shape and dtype of others, without reading their headers

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None, *, skip_errors: bool = False) -> None:
        self.path, self._skip_errors = path, skip_errors
        vars(self).update(known or {})
        self._refuse_replaced()
        if known is None:
            self._look()
            self._refuse_replaced()
        self.image_ids = [member.image_id for member in self._members]
        self.dtypes = [member.dtype for member in self._members]

    @cached_property
    def _looked_at(self) -> str:
        """Path of the sidecar, which changes if the folder is replaced or overwritten; the folder if missing."""
        sidecar = self.path / SIDECAR
        return str(sidecar if sidecar.is_file() else self.path)

    def _look(self) -> None:
        path = self.path
        self.columns = pa.table({})
        single = self._is_member(path)
        if not single and not path.is_dir():
            raise FormatError(
                f"{path}: is not an image of format {self.name!r}; correct the path, or pass another format="
            )
        self._root = path.parent if single else path
        present = [path.name] if single else self._present()
        self._listed = not single and self._read_sidecar()
        if not self._listed:
            self._take_files(sorted(present, key=natural_key))
        self._refuse_strangers({member.file for member in self._members}, set(present))

    def _take_files(self, files: Sequence[str]) -> None:
        """Read the headers of files that no sidecar lists.

        With ``skip_errors``, all get the most frequent shape and dtype, so that reading an image of another one raises.
        """
        if not files:
            raise self._no_images()
        if self._skip_errors:
            kinds = self.kinds_of(files, [None] * len(files))
            most = self._describe(files[index_of_most(kinds, files, self.path)])
            self._members = [Member(file, self._image_id(file), most.shape, most.dtype) for file in files]
            self._alike = True
        else:
            self._members = self._map(self._describe, files)
        self.shapes = np.array([member.shape for member in self._members], np.int64).reshape(-1, 5)

    def _map(self, function: Callable[..., Described], *arguments: Sequence[Any]) -> list[Described]:
        """Return the results of a function for each file; it is called in threads if files are fetched."""
        if not self.fetches:
            return list(map(function, *arguments))
        with ThreadPoolExecutor(_DESCRIBED_AT_ONCE, "omearrow-ds-header") as pool:
            return list(pool.map(function, *arguments))

    def kinds_of(self, files: Sequence[str], pages: Sequence[ListedPage | None]) -> list[str | OMEArrowDSError]:
        """Return the shape and dtype of each file or requested page as text, or the error if it is unreadable."""
        return self._map(self._kind_of, files, pages)

    def _kind_of(self, file: str, listed: ListedPage | None) -> str | OMEArrowDSError:
        try:
            member = self._describe(file, listed)
        except (FormatError, MissingPathError) as error:
            return error
        return f"{member.shape} {member.dtype}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the listing, so that other processes need not read every file again."""
        return type(self), (self.path, {name: getattr(self, name) for name in (*_FOUND, *self._carried)})

    def _no_images(self) -> FormatError:
        """Return the error for a folder without images."""
        return FormatError(
            f"{self.path}: contains no image of format {self.name!r}; correct the path, or pass another format="
        )

    @classmethod
    def of_files(
        cls,
        path: Path,
        root: Path,
        files: Sequence[str],
        names: Sequence[str],
        like: Sequence[int],
        pages: Sequence[ListedPage | None] = (),
        *,
        split_along: str = "",
        **how: Any,
    ) -> Self:
        """Open files whose shapes and dtypes are assumed to be those of reference files, and are checked when read.

        Parameters
        ----------
        path
            The folder, or table of files, that errors name.
        root
            Folder of the relative paths in ``files``.
        names
            Description of each file, for errors.
        like
            Index of the file whose shape and dtype each is expected to have.
        pages
            Series and page of each file, if a table lists them.
        split_along
            Axes of T, C and Z along which files may hold parts of their images, which are joined by name.
        how
            Further keyword arguments of the class.
        """
        known: dict[str, Any] = {"columns": pa.table({}), "_root": root, "_listed": False, "_alike": True}
        known |= {"_members": [], "_split_along": split_along}
        opened = cls(path, {**known, "shapes": np.zeros((0, 5), np.int64)}, **how)
        pages = pages or [None] * len(files)
        described = {number: opened._describe(files[number], pages[number]) for number in sorted(set(like))}
        members = [
            Member(file, name, described[number].shape, described[number].dtype, listed=page)
            for file, name, number, page in zip(files, names, like, pages, strict=True)
        ]
        shapes = np.array([described[number].shape for number in like], np.int64).reshape(-1, 5)
        known |= {name: getattr(opened, name) for name in ("stamp", *cls._carried)}
        return cls(path, {**known, "_members": members, "shapes": shapes}, **how)

    def _at(self, file: str) -> Path:
        """Return the path of a file."""
        return self._root / file

    @abstractmethod
    def _is_member(self, path: Path | os.DirEntry[str]) -> bool:
        """Whether ``path`` is an image."""

    @abstractmethod
    def _describe(self, file: str, listed: ListedPage | None = None) -> Member:
        """Return the listing of a file, or of a series or page of it, without decoding pixels."""

    def _image_id(self, file: str) -> str:
        """Return the id of the image in a file."""
        return file.rpartition(".")[0] or file

    def _present(self) -> list[str]:
        """Return the names of the images of the folder, in any order."""
        names = []
        in_zarr = is_zarr_node(str(self.path))
        with self._reading(), os.scandir(self.path) as entries:
            for entry in entries:
                if (in_zarr or not is_hidden(entry.name)) and self._is_member(entry):
                    if entry.is_symlink():
                        raise link_refused(Path(entry.path))
                    names.append(entry.name)
        return names

    def _read_sidecar(self) -> bool:
        """Set members and columns from the sidecar; return False if it is missing or from another program."""
        sidecar = self.path / SIDECAR
        refuse_special(sidecar)
        if not sidecar.is_file():
            return False
        if sidecar.is_symlink():
            raise link_refused(sidecar)
        return self._take_sidecar(sidecar, sidecar)

    def _take_sidecar(self, sidecar: Path, file: Any) -> bool:
        with refusing(sidecar, "a Parquet file", (pa.ArrowException, *MALFORMED)):
            # Without pyarrow.dataset, which imports pandas.
            with pq.ParquetFile(file) as opened:
                table = opened.read()
            table.validate(full=True)
            if schema.SIDECAR_COLUMN not in table.column_names:
                return False
            self._set_columns(table.drop_columns(schema.SIDECAR_COLUMN))
            self._take_listing(table[schema.SIDECAR_COLUMN].combine_chunks(), str(sidecar))
        return True

    def _take_listing(self, listing: pa.StructArray, sidecar: str) -> None:
        """Set the members and their shapes by column, because a dict per row would dominate the time of opening."""
        columns = {field.name: pc.struct_field(listing, field.name).cast(field.type) for field in _MEMBER}
        for name in _ALWAYS_LISTED:
            if columns[name].null_count:
                raise ValueError(f"{name} of image {columns[name].is_null().index(True).as_py()} is null")
        sizes = columns["shape"].flatten()
        if sizes.null_count or len(sizes) != 5 * len(listing):
            raise ValueError("the shape of an image is null")
        self.shapes = numbers(sizes).reshape(-1, 5)
        names = columns["dtype"].dictionary_encode()
        dtypes = [schema.pixel_dtype(name, sidecar) for name in names.dictionary.to_pylist()]
        self._members = [
            Member(*fields)
            for fields in zip(
                columns["file"].to_pylist(),
                columns["id"].to_pylist(),
                _shared_rows(self.shapes),
                [dtypes[number] for number in names.indices.to_pylist()],
                columns["size_bytes"].to_pylist(),
                columns["pixel_offset"].to_pylist(),
                strict=True,
            )
        ]

    def _refuse_strangers(self, listed: set[str], present: set[str]) -> None:
        problems = (f"is missing, but listed in {SIDECAR}", f"is not listed in {SIDECAR}")
        for names, problem in zip((listed - present, present - listed), problems, strict=True):
            if names:
                msg = (
                    f"{self.path}: {min(names)} {problem} ({len(names)} such files); restore the folder, or remove "
                    f"{SIDECAR} to read the folder without it"
                )
                raise FormatError(msg)

    def _checked(self, index: int, image: Array) -> Array:
        """Return ``image`` if it has the listed shape and dtype, else raise `FormatError`."""
        member = self._members[index]
        if image.shape != member.shape or image.dtype != member.dtype:
            name, remedy = f"image {index}", "; it changed since the folder was written, restore it"
            if self._alike:
                name, remedy = member.image_id, " like most images; move it to another folder"
            msg = (
                f"{self._at(member.file)}: {name} is {image.shape} {image.dtype}, expected {member.shape} "
                f"{member.dtype}{remedy}"
            )
            raise FormatError(msg)
        return image

    def _new_images(self, rows: Sequence[int]) -> list[Array]:
        """Return arrays for images, if they fit the memory."""
        members = [self._members[row] for row in rows]
        return [new_image(member.shape, member.dtype, f"{self._root}/{member.file}") for member in members]

    @abstractmethod
    def _read_into(self, rows: Sequence[int], out: Sequence[Array] | None) -> list[Array]:
        """Return whole images: filled arrays of ``out``, or other arrays."""

    @property
    def fills_out(self) -> bool:
        return True

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
        if regions is None:
            return self._read_into(rows, out)
        with nullcontext() if self._in_place else self._opening():
            arrays = self._read_located(rows, regions)
        missing = [position for position, pixels in enumerate(arrays) if pixels is None]
        if missing:
            whole = super()._read_regions([rows[n] for n in missing], [regions[n] for n in missing])
            for position, pixels in zip(missing, whole, strict=True):
                arrays[position] = pixels
        return arrays

    @cached_property
    def _in_place(self) -> bool:
        """Whether pixels of all files are read in place, through the folder that was opened."""
        return all(member.pixel_offset is not None for member in self._members)

    @abstractmethod
    def _read_located(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Any]:
        """Return an array per region; None if it must be cropped from the whole image."""

    def stored_files(self) -> Iterator[Path]:
        """Yield the files of the images; folders of other programs may contain further files."""
        if self._listed:
            return super().stored_files()
        return files_below(map(self._at, dict.fromkeys(member.file for member in self._members)))

    def close(self) -> None:
        """Close open handles, if any; the formats that have none inherit this method, which does nothing."""


def index_of_most(kinds: Sequence[str | OMEArrowDSError], names: Sequence[str], path: Path) -> int:
    """Return the index of the first image with the most frequent shape and dtype; unreadable images do not count.

    Raises `FormatError` for a tie, and the error of the first image if none can be read.
    """
    counts = Counter(kind for kind in kinds if isinstance(kind, str))
    if not counts and isinstance(kinds[0], OMEArrowDSError):
        raise kinds[0]
    (most, number), *others = counts.most_common(2)
    if others and others[0][1] == number:
        first, second = (f"{names[kinds.index(kind)]} is {kind}" for kind in (most, others[0][0]))
        raise FormatError(
            f"{path}: two combinations of shape and dtype are equally frequent ({number:,} images each): "
            f"{first}, {second}; move the images of one of them to another folder"
        )
    return kinds.index(most)


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
    members, checksums = [], []
    for index, image in enumerate(images):
        file = path / member_name(index, image.image_id, suffix)
        offset = write_one(file, image)
        size_bytes = None if offset is None else file.stat().st_size
        checksums.append(image.checksum)
        members.append(Member(file.name, image.image_id, image.pixels.shape, image.pixels.dtype, size_bytes, offset))
    write_sidecar(path, format_name, members, with_checksums(columns, checksums))
