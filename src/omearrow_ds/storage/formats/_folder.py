"""Folders of image files: `FileReader`, which each format implements, and `FolderImages`, which reads any of them."""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.codec.encode import Image, table_of
from omearrow_ds.codec.leaves import numbers
from omearrow_ds.errors import FormatError, MissingPathError, OMEArrowDSError
from omearrow_ds.storage.byte_source import OPEN_FLAGS, STATUS_NS, LocalFile, OpenFolder, version_fingerprint
from omearrow_ds.storage.extents import ExtentReader, ImageChunks, Located, Region, Regions, Targets, consecutive_planes
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import Array, Block, Details, Header, Images, files_below, forwarded, local_files
from omearrow_ds.storage.formats._columns import ImageColumns, columns_and_checksums
from omearrow_ds.storage.formats._detect import SIDECAR, SIDECAR_FORMAT_KEY, is_hidden, is_zarr_node, refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._file_set import FileSet, ObjectFileSet
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._regions import rows_to_positions, slices_of
from omearrow_ds.storage.formats._stored import Stored, join_names
from omearrow_ds.storage.formats._urls import ObjectReader, Url, url_of
from omearrow_ds.text import count

Described = TypeVar("Described")
WriteImage = Callable[[Path, Image], int | None]
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

_ALWAYS_LISTED = ("file", "id", "shape", "dtype")


class ListedFile(NamedTuple):
    """File, and image series and page in it, counted from 0; None means the only series, or all pages."""

    file: str = ""
    series: int | None = None
    page: int | None = None
    origin: str = ""  # Table, row and channel, for errors; empty if no table lists series or pages.


NOT_LISTED = ListedFile()


class Member(NamedTuple):
    """One image of a folder: its file, its id, its shape (T, C, Z, Y, X) and its dtype."""

    file: str
    image_id: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size_bytes: int | None = None  # Size of the file when the offset was found.
    pixel_offset: int | None = None  # Offset of pixels that a little-endian machine has in memory like this.
    modified_ns: int | None = None  # Modification time of a file that no sidecar lists.
    listed: ListedFile = NOT_LISTED


def link_refused(path: Path) -> FormatError:
    """Return the error for a symbolic link in a folder of images."""
    problem = "is a symbolic link, which may lead anywhere and is not followed in a folder of images"
    return FormatError(problem, path=path, remedy="copy the folder with the targets of its links (cp -rL)")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders the digits in names as numbers: ``a2`` before ``a10``."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part]


class Folder:
    """Files of a collection, on this machine or at a URL, with one image each, and its columns."""

    def __init__(
        self, path: Path, format_name: str, errors: tuple[type[Exception], ...], objects: ObjectReader | None
    ) -> None:
        self.path, self.root, self.format_name = path, path, format_name
        self.files = FileSet() if objects is None else ObjectFileSet(objects)
        self.is_remote = self.files.is_remote
        sidecar = path / SIDECAR  # It changes if the folder is replaced or overwritten.
        tracked = sidecar if sidecar.is_file() else path
        self.guard = FileGuard(path, get_format(format_name).label, errors, tracked=tracked)
        self.set_members([])
        self.columns, self.checksums = pa.table({}), None
        self.variant: tuple[str, ...] = ()
        self.is_listed = False  # Whether a sidecar lists the files.
        self.are_alike = False  # Whether files are assumed to have the shape and dtype of others.
        self.split_along = ""  # Axes along which files may hold parts of their images.

    def path_of(self, file: str) -> Path:
        return (url_of(file) if self.is_remote else None) or self.root / file

    def set_members(self, members: list[Member]) -> None:
        self.members, self.shapes = members, np.array([member.shape for member in members], np.int64).reshape(-1, 5)

    def set_columns(self, columns: pa.Table) -> None:
        """Set the stored columns; the column of checksums is split off."""
        self.columns, self.checksums = columns_and_checksums(columns, str(self.path))

    def read_sidecar(self) -> None:
        """Set members and columns from the sidecar, unless it is missing or from another program."""
        sidecar = self.path / SIDECAR
        file = self.files.find_table(sidecar)
        if file is None:
            return
        if sidecar.is_symlink():
            raise link_refused(sidecar)
        with translate_errors(sidecar, "a Parquet file", (pa.ArrowException, *MALFORMED)):
            # Without pyarrow.dataset, which imports pandas.
            with pq.ParquetFile(file) as opened:
                table = opened.read()
            table.validate(full=True)
            if schema.SIDECAR_COLUMN in table.column_names:
                self.set_columns(table.drop_columns(schema.SIDECAR_COLUMN))
                listing = table[schema.SIDECAR_COLUMN].combine_chunks()
                self.members, self.shapes = _listed_members(listing, str(sidecar))
                self.is_listed = True

    def set_fingerprint(self, versions: Mapping[str, tuple[int, str]]) -> None:
        """Set the fingerprint of a collection on a server, and drop listed offsets of files with another size."""
        root = str(self.root)
        for row, member in enumerate(self.members):
            size_bytes, _ = versions.get(f"{root}/{member.file}", (None, ""))
            if size_bytes != member.size_bytes:
                self.members[row] = member._replace(pixel_offset=None)
        state = sorted(versions.items()), [(member.file, member.shape, member.dtype.str) for member in self.members]
        self.guard.fingerprint = version_fingerprint((len(self.members), repr(state)))

    def refuse_other(self, row: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Raise `FormatError` if an image has another shape or dtype than when the folder was opened."""
        member = self.members[row]
        if shape == member.shape and dtype == member.dtype:
            return
        name, remedy = f"image {row}", "; it changed since the folder was written, restore it"
        if self.are_alike:
            name, remedy = member.image_id, " like most images; move it to another folder"
        expected = f"expected {member.shape} {member.dtype}"
        raise FormatError(f"{self.path_of(member.file)}: {name} is {shape} {dtype}, {expected}{remedy}")


class FileReader(ABC):
    """Reader of the files of a folder in one format: it lists, describes, locates and decodes images.

    Files are opened by ``folder.files``. If images are files, ``suffixes`` are theirs, in lower case. Pixels at the
    ``pixel_offset`` of their `Member` are read without the reader. ``errors`` are the exceptions of its library. A
    reader with options overrides ``__reduce__``.
    """

    errors: ClassVar[tuple[type[Exception], ...]]
    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.chunks = ExtentReader(self.errors, folder.files.max_parallel_files)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    @abstractmethod
    def describe(self, file: str, listed: ListedFile = NOT_LISTED) -> Member:
        """Return the listing of a file, or of a series or page of it, without decoding pixels."""

    def locate(self, row: int) -> Located | None:  # noqa: ARG002  # By default, none are located.
        """Return the chunks of an image, or None if the library of the format must read it."""
        return None

    def decode(self, row: int, file: Any) -> Array:
        """Return an image (T, C, Z, Y, X) that the library decodes; ``file`` is a path, or a seekable file."""
        raise NotImplementedError

    @abstractmethod
    def metadata(self, row: int) -> dict[str, Any]:
        """Return the OME metadata of an image."""

    @abstractmethod
    def describe_storage(self) -> Stored:
        """Return how the images are stored; few files are opened."""

    def list_members(self, *, skip_errors: bool) -> None:
        """Set the members of the folder from its sidecar, or from its files in natural order."""
        folder = self.folder
        path = folder.path
        is_single = path.name.lower().endswith(self.suffixes) if folder.is_remote else self.is_member(path)
        if not (is_single or folder.is_remote or path.is_dir()):
            raise _wrong_format(folder, "is not an image")
        folder.root = path.parent if is_single else path
        names = [path.name] if is_single else self.list_names()
        if not is_single:
            folder.read_sidecar()
        if not folder.is_listed:
            describe_members(self, sorted(names, key=natural_key), skip_errors=skip_errors)
        listed, present = {member.file for member in folder.members}, set(names)
        for others, state in ((listed - present, "is missing, but"), (present - listed, "is not")):
            if others:
                problem = f"{min(others)} {state} listed in {SIDECAR} ({len(others)} such files)"
                remedy = f"restore the folder, or remove {SIDECAR} to read the folder without it"
                raise FormatError(problem, path=path, remedy=remedy)
        if isinstance(folder.files, ObjectFileSet):
            folder.set_fingerprint(folder.files.versions)

    def is_member(self, path: Path | os.DirEntry[str]) -> bool:
        if not path.name.lower().endswith(self.suffixes):
            return False
        if not path.is_file():
            refuse_special(path)
            return path.is_symlink() and not path.is_dir()  # A broken link is an image that cannot be read.
        return True

    def list_names(self) -> list[str]:
        path, files = self.folder.path, self.folder.files
        if isinstance(files, ObjectFileSet):
            return files.list_names(path, self.suffixes)
        names = []
        in_zarr = is_zarr_node(str(path))
        with self.folder.guard.reading(), os.scandir(path) as entries:
            for entry in entries:
                if (in_zarr or not is_hidden(entry.name)) and self.is_member(entry):
                    if entry.is_symlink():
                        raise link_refused(Path(entry.path))
                    names.append(entry.name)
        return names

    @property
    def fetches_whole(self) -> bool:
        """Whether whole images are read from files that are fetched whole, not as chunks or listed pages."""
        members = self.folder.members
        return self.folder.is_remote and bool(self.suffixes) and not (members and members[0].listed.origin)

    def read_by_library(self, row: int, regions: Sequence[Region]) -> list[Array]:
        """Return regions of an image that the library decodes whole, or whose plain pixels are in a fetched file."""
        folder, member, is_whole = self.folder, self.folder.members[row], self.fetches_whole
        path = folder.path_of(member.file)
        with folder.files.open_for_library(path, is_whole=is_whole) as file, folder.guard.reading(path):
            if is_whole and member.pixel_offset is not None:
                image = new_image(member.shape, member.dtype, path)
                file.read_into([(member.pixel_offset, image)])
            else:
                image = self.decode(row, file)
        folder.refuse_other(row, image.shape, image.dtype)
        crops = [image[slices_of(region)] for region in regions]
        return [image if crop.size == image.size else np.array(crop) for crop in crops]

    def files_of(self, row: int) -> Sequence[str]:
        member = self.folder.members[row]
        return () if member.listed.origin else (f"{self.folder.root}/{member.file}",)

    def label_images(self) -> list[str]:
        """Return the names of label images stored with a few images."""
        return []

    def open_labels(self, name: str) -> tuple[Images, Array] | None:  # noqa: ARG002  # Most formats store none.
        """Return the label images of a name, and the index of each image's; None if the format stores none."""
        return None

    def object_sizes(self, files: ObjectFileSet) -> tuple[int, int]:
        """Return number and size of all objects; an object of unknown size counts as average-sized."""
        sizes = [size for url, (size, _) in files.versions.items() if not url.endswith(f"/{SIDECAR}")]
        num_files = len({member.file for member in self.folder.members})
        return num_files + self.folder.is_listed, sum(sizes) * num_files // max(1, len(sizes))


def image_id_of(file: str, suffixes: Sequence[str]) -> str:
    """Return the name of an image file without its suffix, or that of a Zarr group, both without ``.ome``."""
    name = (file.rpartition(".")[0] or file) if suffixes else file.removesuffix(".zarr")
    return name.removesuffix(".ome")


def describe_members(reader: FileReader, files: Sequence[str], *, skip_errors: bool) -> None:
    """Set the members of a folder from the headers of files that no sidecar lists."""
    # With ``skip_errors``, all get the most frequent shape and dtype, which are compared when an image is read.
    folder = reader.folder
    if not files:
        raise _wrong_format(folder, "contains no image")
    if skip_errors:
        groups = ([number] for number in range(len(files)))
        most = reader.describe(files[index_of_most(reader, list(map(ListedFile, files)), groups, files)])
        folder.are_alike = True
        members = [Member(file, image_id_of(file, reader.suffixes), most.shape, most.dtype) for file in files]
    else:
        members = _map_files(folder, reader.describe, files)
    folder.set_members(members)


def index_of_most(
    reader: FileReader, files: Sequence[ListedFile], groups: Iterable[Iterable[int]], names: Sequence[str]
) -> int:
    """Return the index of the first group of files with the most frequent shapes and dtypes."""
    # Groups with unreadable files do not count. Raises `FormatError` for a tie, and the error of the first group if
    # none can be read. ``names`` are those of the groups.

    def kind_of(listed: ListedFile) -> str | OMEArrowDSError:
        try:
            member = reader.describe(listed.file, listed)
        except (FormatError, MissingPathError) as error:
            return error
        return f"{member.shape} {member.dtype}"

    of_files = _map_files(reader.folder, kind_of, files)
    kinds: list[str | OMEArrowDSError] = []
    for group in groups:
        of_group = [of_files[number] for number in group]
        errors = [kind for kind in of_group if isinstance(kind, OMEArrowDSError)]
        kinds.append(errors[0] if errors else " and ".join(dict.fromkeys(map(str, of_group))))
    counts = Counter(kind for kind in kinds if isinstance(kind, str))
    if not counts and isinstance(kinds[0], OMEArrowDSError):
        raise kinds[0]
    (most, number), *others = counts.most_common(2)
    if others and others[0][1] == number:
        examples = ", ".join(f"{names[kinds.index(kind)]} is {kind}" for kind in (most, others[0][0]))
        problem = f"two combinations of shape and dtype are equally frequent ({number:,} images each): {examples}"
        raise FormatError(problem, path=reader.folder.path, remedy="move the images of one of them to another folder")
    return kinds.index(most)


def describe_files(folder: Folder, codecs: Sequence[str], layouts: Sequence[str]) -> Stored:
    """Return how a folder is stored; ``codecs`` and ``layouts`` are those of the files that were opened."""
    total, num_placed = len(folder.members), sum(member.pixel_offset is not None for member in folder.members)
    library = f"by {get_format(folder.format_name).backend}"
    reading = {total: "in place: from the pixels in each file", 0: library}.get(
        num_placed, f"{count(num_placed, 'image')} in place, {total - num_placed:,} {library}"
    )
    if folder.is_remote:
        reading = "whole files, or for regions the byte ranges that they overlap"
    chunking = f"one file per image, {join_names(layouts)}"
    in_place = num_placed == total and not folder.is_remote
    num_opened = len(codecs) if len(codecs) < total else None
    return Stored(None, join_names(codecs), chunking, in_place, reading, num_opened)


class FolderImages(Images):
    """Images stored one per file (or per Zarr node) in a folder, or a single such file, on this machine or at a URL."""

    _check_ns = 0  # Time of the next check of the open folder.
    metadata = forwarded("_reader.metadata")

    def __init__(self, reader: FileReader) -> None:
        folder = self._folder = reader.folder
        self._reader = reader
        if sys.byteorder == "big":
            folder.members = [member._replace(pixel_offset=None) for member in folder.members]
        image_ids = [member.image_id for member in folder.members]
        self.header = Header(
            format=get_format(folder.format_name),
            path=folder.path,
            guard=folder.guard,
            image_ids=image_ids,
            shapes=folder.shapes,
            dtypes=[member.dtype for member in folder.members],
            columns=ImageColumns(folder.path, image_ids, folder.columns, None, lambda: folder.checksums),
            variant=folder.variant,
            row_count=len(image_ids),
        )
        self._fetches_whole = reader.fetches_whole
        are_placed = [member.pixel_offset is not None for member in folder.members]
        # Each read of pixels at an offset, or from a server, checks their file.
        self._has_offsets = any(are_placed)
        self._are_files_checked = isinstance(folder.path, Url) or all(are_placed)
        self.details = Details(
            storage_info=reader.describe_storage,
            files=partial(_files_in, folder),
            size=partial(_size_of_objects, reader),
            label_names=reader.label_images,
            files_of=(lambda _: ()) if folder.is_remote else reader.files_of,
            fills_out=lambda: not folder.is_remote,
        )
        self._open_folder = ProcessLocal(partial(_open_root, folder))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the listing, so that other processes need not read every file again."""
        return _reopen, (self._reader,)

    def prefetch(self, rows: Sequence[int]) -> None:
        if self._fetches_whole:
            folder = self._folder
            folder.files.prefetch(folder.path_of(folder.members[row].file) for row in rows)

    def stream(self) -> Iterator[Block]:
        self.prefetch(range(len(self)))
        return super().stream()

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        if regions is None:
            return self._read_whole(rows, out)
        with nullcontext() if self._are_files_checked else self._folder.guard:
            return self._read_located(rows, regions)

    def _read_whole(self, rows: Sequence[int], out: Targets) -> list[Array]:
        """Return whole images: filled arrays of ``out``, or other arrays."""
        images: list[Array] = []
        folder, others = self._folder, []
        members, root = folder.members, folder.root
        opened = self._checked_folder() if self._has_offsets and not folder.is_remote else None
        for number, row in enumerate(rows):
            member = members[row]
            image = new_image(member.shape, member.dtype, f"{root}/{member.file}") if out is None else out[number]
            if opened is None or member.pixel_offset is None or not read_in_place(opened, member, image):
                others.append(number)
            images.append(image)
        if not others:
            return images
        regions = [[0, 0, 0, 0, 0, *images[number].shape] for number in others]
        with folder.guard:
            if len(others) == len(rows):
                return self._read_located(rows, regions, images)
            arrays = self._read_located([rows[n] for n in others], regions, [images[n] for n in others])
        for number, pixels in zip(others, arrays, strict=True):
            images[number] = pixels
        return images

    def _read_located(self, rows: Sequence[int], regions: Sequence[Region], images: Targets = None) -> list[Array]:
        """Return an array per region, by default a new one; the library reads images that are not located."""
        is_fetched = images is not None and self._fetches_whole
        arrays: list[Any] = [None] * len(rows)
        if not is_fetched:
            locate = self._locate if self._has_offsets else self._reader.locate
            arrays = self._reader.chunks.read(locate, rows, regions, images)
        missing = [number for number, pixels in enumerate(arrays) if pixels is None]
        if not missing:
            return arrays
        if len(missing) > 1:
            self.prefetch([rows[number] for number in missing])
        for row, positions in rows_to_positions([rows[number] for number in missing]).items():
            numbers = [missing[position] for position in positions]
            decoded = self._reader.read_by_library(row, [regions[number] for number in numbers])
            for number, pixels in zip(numbers, decoded, strict=True):
                arrays[number] = pixels
        return arrays

    def _locate(self, row: int) -> Located | None:
        member = self._folder.members[row]
        if member.pixel_offset is None:
            return self._reader.locate(row)
        layout, offsets = consecutive_planes(member.shape, member.dtype, member.pixel_offset)
        if self._folder.is_remote:
            return ImageChunks(layout, self._folder.files.open(self._folder.path_of(member.file)), offsets)
        modified_ns = () if member.modified_ns is None else (member.modified_ns,)
        file = LocalFile(member.file, self._checked_folder(), (member.size_bytes or 0, *modified_ns))
        return ImageChunks(layout, file, offsets)

    def _checked_folder(self) -> OpenFolder:
        """Return the folder that was opened, so that a folder in its place is never read."""
        opened = self._open_folder.get()
        if self._folder.is_listed and monotonic_ns() >= self._check_ns:
            try:  # Moving the folder is allowed, another sidecar in it is not.
                status = os.stat(SIDECAR, dir_fd=opened.descriptor)
            except FileNotFoundError:
                problem, remedy = "was removed since it was opened", "restore it, and open it again"
                raise FormatError(problem, path=self._folder.path, remedy=remedy) from None
            self._folder.guard.compare((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
            self._check_ns = monotonic_ns() + STATUS_NS
        return opened

    def labels(self, name: str) -> tuple[Images, Array]:
        return self._reader.open_labels(name) or super().labels(name)

    def close(self) -> None:
        self._open_folder.close()
        self._folder.files.close()
        if self._folder.is_remote:
            self._reader.chunks.clear()


def _files_in(folder: Folder) -> Iterator[Path]:
    """Yield the local files of the images; folders of other programs may contain further files."""
    if folder.is_remote:
        return iter(())
    if folder.is_listed:
        return local_files(folder.path, folder.guard)
    return files_below(map(folder.path_of, dict.fromkeys(member.file for member in folder.members)))


def _size_of_objects(reader: FileReader) -> tuple[int, int, int] | None:
    if not isinstance(reader.folder.files, ObjectFileSet):
        return None
    num_files, size_bytes = reader.object_sizes(reader.folder.files)
    return num_files, size_bytes, size_bytes


def read_in_place(folder: OpenFolder, member: Member, image: Array) -> bool:
    """Read the pixels at the offset of the listing; return False if the file has changed since it was listed."""
    # A `LocalFile` reads the same bytes, but creating one per image took 15 % of a small sample.
    try:
        descriptor = os.open(member.file, OPEN_FLAGS, dir_fd=folder.descriptor)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_size != member.size_bytes or member.modified_ns not in (None, status.st_mtime_ns):
            return False
        return os.preadv(descriptor, [image.data], member.pixel_offset or 0) == image.nbytes
    except OSError:
        return False
    finally:
        os.close(descriptor)


def open_folder(
    name: str,
    reader_type: type[FileReader],
    path: Path,
    *,
    objects: ObjectReader | None = None,
    skip_errors: bool = False,
    **options: Any,
) -> FolderImages:
    """Open a folder of images, or one image, of the format ``name``; ``options`` are those of the reader.

    Raises `FormatError` if it contains no images, or other files than its sidecar lists. With ``skip_errors``, errors
    of files are raised when their images are read.
    """
    folder = Folder(path, name, reader_type.errors, objects)
    with folder.guard.interpreting():
        reader = reader_type(folder, **options)
        folder.guard.refuse_changed()
        reader.list_members(skip_errors=skip_errors)
        folder.guard.refuse_changed()
    return FolderImages(reader)


def open_files(
    reader: FileReader, files: Sequence[ListedFile], names: Sequence[str], like: Sequence[int]
) -> FolderImages:
    """Open files of a folder; each is assumed to have the shape and dtype of the file at its index in ``like``."""
    # Each file is expected to be like the file of its index in ``like``, and is compared when it is read. Errors name
    # the path of the reader's folder, which may be a table, and ``names``, descriptions of the files.
    folder = reader.folder
    folder.guard.refuse_changed()
    folder.are_alike = True
    described = {number: reader.describe(files[number].file, files[number]) for number in sorted(set(like))}
    folder.set_members(
        [
            Member(listed.file, name, described[number].shape, described[number].dtype, listed=listed)
            for listed, name, number in zip(files, names, like, strict=True)
        ]
    )
    return FolderImages(reader)


def _wrong_format(folder: Folder, problem: str) -> FormatError:
    remedy = "correct the path, or pass another format="
    return FormatError(f"{folder.path}: {problem} of format {folder.format_name!r}; {remedy}")


def _map_files(folder: Folder, function: Callable[[Any], Described], files: Sequence[Any]) -> list[Described]:
    """Return the results of a function for each file; it is called in threads if files are fetched."""
    if not folder.is_remote:
        return list(map(function, files))
    with ThreadPoolExecutor(folder.files.max_parallel_files, "omearrow-ds-header") as pool:
        return list(pool.map(function, files))


def _reopen(reader: FileReader) -> FolderImages:
    """Return the images of an unpickled reader; raise an error if the folder has changed."""
    reader.folder.guard.refuse_changed()
    return FolderImages(reader)


def _open_root(folder: Folder) -> OpenFolder:
    with folder.guard:
        return OpenFolder(folder.root)


def _listed_members(listing: pa.StructArray, sidecar: str) -> tuple[list[Member], Array]:
    """Return the members and their shapes; columns are converted as a whole, since a dict per row takes far longer."""
    columns = {field.name: pc.struct_field(listing, field.name).cast(field.type) for field in _MEMBER}
    for name in _ALWAYS_LISTED:
        if columns[name].null_count:
            raise ValueError(f"{name} of image {columns[name].is_null().index(True).as_py()} is null")
    sizes = columns["shape"].flatten()
    if sizes.null_count or len(sizes) != 5 * len(listing):
        raise ValueError("the shape of an image is null")
    shapes = numbers(sizes).reshape(-1, 5)
    names = columns["dtype"].dictionary_encode()
    dtypes = [schema.pixel_dtype(name, sidecar) for name in names.dictionary.to_pylist()]
    shared: dict[Any, tuple[int, ...]] = {}  # Equal shapes share a tuple, which saves memory.
    members = map(
        Member,
        columns["file"].to_pylist(),
        columns["id"].to_pylist(),
        [shared.setdefault(shape, shape) for shape in zip(*shapes.T.tolist(), strict=True)],
        [dtypes[number] for number in names.indices.to_pylist()],
        columns["size_bytes"].to_pylist(),
        columns["pixel_offset"].to_pylist(),
    )
    return list(members), shapes


def write_members(
    images: Iterable[Image], columns: pa.Table, path: Path, format_name: str, suffix: str, write_one: WriteImage
) -> None:
    """Write images, then the sidecar; ``write_one(file, image)`` returns the offset of pixels stored plainly."""
    members, checksums = [], []
    for index, image in enumerate(images):
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", image.image_id)[:80]
        file = path / f"{index:06d}_{name}{suffix}"  # Names sort in image order.
        offset = write_one(file, image)
        size_bytes, pixels = None if offset is None else file.stat().st_size, image.pixels
        member = {"file": file.name, "id": image.image_id, "shape": pixels.shape, "dtype": pixels.dtype.name}
        members.append({**member, "size_bytes": size_bytes, "pixel_offset": offset})
        checksums.append(image.checksum)
    table = table_of(schema.SIDECAR_COLUMN, pa.array(members, _MEMBER), columns, checksums)
    pq.write_table(table.replace_schema_metadata({SIDECAR_FORMAT_KEY: format_name.encode()}), path / SIDECAR)
