"""Folder of TIFF files, one per image: written as OME-TIFF; any TIFF that tifffile supports can be read."""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import tifffile

from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.codec.encode import Image
from omearrow_ds.errors import FormatError, OMEArrowDSError
from omearrow_ds.storage.byte_source import (
    STATUS_NS,
    ChangedFileError,
    LocalFile,
    ObjectFile,
    OpenFolder,
)
from omearrow_ds.storage.extents import ChunkFile, Decode, ExtentReader, ImageChunks, Region
from omearrow_ds.storage.formats import _ome_siblings, _ome_xml
from omearrow_ds.storage.formats._base import Array, Block
from omearrow_ds.storage.formats._detect import SIDECAR, TIFF_SUFFIXES, is_hidden, refuse_special
from omearrow_ds.storage.formats._failures import MALFORMED
from omearrow_ds.storage.formats._folder import FolderSource, ListedPage, Member, natural_key, write_members
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._ranged import Objects
from omearrow_ds.storage.formats._stored import Stored, joined, spread
from omearrow_ds.storage.formats._tiff_chunks import listed_planes, locate_chunks
from omearrow_ds.storage.formats._tiff_series import TiffImage, find_image, refuse_mixed_pages, with_axes
from omearrow_ds.storage.formats._urls import Url, url_of

_SUFFIX = ".ome.tif"
_CODECS = {"ADOBE_DEFLATE": "zlib", "DEFLATE": "zlib"}  # as this package calls them; the others have their own names
_CHECKED = 4096  # pixels in the checksum of the UUID
_DESCRIBED_AT_ONCE = 8  # files of a server whose headers or regions are fetched in parallel
_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_RECENT_FILES = 64  # files of a server whose fetched headers are cached
_ERRORS = (ET.ParseError, tifffile.TiffFileError, RuntimeError, AssertionError, struct.error, *MALFORMED)


def write(
    images: Iterable[Image], columns: pa.Table, path: Path, compression: str, chunk_shape: tuple[int, int] | None = None
) -> None:
    """Write images as OME-TIFF files, whole or tiled, and the columns as a sidecar into the new folder ``path``."""
    write_one = partial(_write_one, compression=compression, tile=chunk_shape)
    write_members(images, columns, path, "tiff", _SUFFIX, write_one)


def _write_one(file: Path, image: Image, compression: str, tile: tuple[int, int] | None) -> int | None:
    """Write one image; return the offset of its pixels if they are stored as in memory, else None."""
    metadata = _ome_xml.tiff_metadata(image.metadata, image.pixels.shape[1])
    placed = tifffile.imwrite(
        file,
        image.pixels,
        ome=True,
        photometric="minisblack",
        metadata={**metadata, "UUID": _identifier(file.name, image.pixels)},
        byteorder="<",
        compression=None if compression == "none" else compression,
        predictor=compression != "none",
        tile=tile,
        returnoffset=True,
    )
    if placed is None or compression != "none" or tile is not None:
        return None
    offset, page_bytes = placed
    if page_bytes == image.pixels.nbytes:
        return offset
    stored = np.fromfile(file, image.pixels.dtype, image.pixels.size, offset=offset)  # pages should follow each other
    return (
        offset if np.array_equal(stored, image.pixels.reshape(-1), equal_nan=image.pixels.dtype.kind == "f") else None
    )


def _identifier(name: str, pixels: Array) -> str:
    """Return the file's UUID, a hash of its name and first pixels, so that equal images give equal bytes.

    tifffile's default UUID contains the time and the network address of the machine. A checksum of all pixels would
    make writing 512 x 512 images a third slower.
    """
    checksum = zlib.crc32(np.ascontiguousarray(pixels.reshape(-1)[:_CHECKED]).data)
    return str(uuid5(NAMESPACE_OID, f"{name} {pixels.shape} {pixels.dtype} {checksum}"))


class Source(FolderSource):
    """Images of a folder of TIFF files, in sidecar order or, without a sidecar, in natural order of file names.

    In a file without OME axes, samples are channels, an unnamed stack is Z, and a stack of stacks is T and Z. Pixels
    stored as in memory are read directly; tifffile reads the others. Raises `FormatError` if a file is not a readable
    TIFF, holds several images, or has pixels of an unsupported dtype.
    """

    name = "tiff"
    errors = _ERRORS
    can_skip = True
    _look_ns = 0  # time of the next check of the folder

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None, **how: Any) -> None:
        super().__init__(path, known, **how)
        self._folder = ProcessLocal(self._open_folder)
        self._chunks = ExtentReader(_ERRORS)
        self._decoders: dict[int, Decode] = {}

    def _open_folder(self) -> OpenFolder:
        with self._opening():
            return OpenFolder(self._root)

    def close(self) -> None:
        self._folder.close()

    def stored_as(self) -> Stored:
        looked_at = spread(len(self))
        codecs, layouts = [], []
        for index in looked_at:
            file = self._file(index)
            with self._open(file) as tif, self._reading(file):
                page = self._image(tif, file, self._members[index].listed).series.keyframe
                name = tifffile.COMPRESSION(page.compression).name
                codecs.append(_CODECS.get(name, name.lower()))
                layouts.append(_page_layout(page))
        placed = sum(member.pixel_offset is not None for member in self._members)
        reading = {len(self): "in place: directly from the pixels in each file", 0: "by tifffile"}.get(
            placed, f"{placed:,} images in place, {len(self) - placed:,} by tifffile"
        )
        known = len(looked_at) if len(looked_at) < len(self) else None
        chunking = f"one file per image, {joined(layouts)}"
        return Stored(None, joined(codecs), chunking, placed == len(self), reading, known)

    def _is_member(self, path: Path | os.DirEntry[str]) -> bool:
        if not path.name.lower().endswith(TIFF_SUFFIXES):
            return False
        if not path.is_file():
            refuse_special(path)
            return path.is_symlink() and not path.is_dir()  # A broken link is an image that cannot be read.
        return True

    def _describe(self, file: str, listed: ListedPage | None = None) -> Member:
        path = self._at(file)
        with self._reading(path):
            status = path.stat()
        return self._described(file, path, listed)._replace(size_bytes=status.st_size, modified_ns=status.st_mtime_ns)

    def _described(self, file: str, path: Path, listed: ListedPage | None) -> Member:
        with self._open(path) as tif, self._reading(path):
            image = _page_of(self._image(tif, path, listed), listed, path)
            series = image.series
            refuse_mixed_pages(series, path)
            dtype = schema.pixel_dtype(str(series.dtype), str(path)).newbyteorder("=")
            moved = [position for position in image.order if image.lengths[position] > 1]
            is_plain = moved == sorted(moved) and (dtype.itemsize == 1 or tif.byteorder == "<")
            offset = series.dataoffset if is_plain and series.transform is None else None
        image_id = self._image_id(file)
        return Member(file, image_id, image.shape, dtype, pixel_offset=offset, listed=listed)

    def _image_id(self, file: str) -> str:
        return super()._image_id(file).removesuffix(".ome")

    def _file(self, index: int) -> Path:
        return self._at(self._members[index].file)

    def _open(self, path: Path, *, whole: bool = False) -> tifffile.TiffFile:  # noqa: ARG002  # for files of servers
        with self._reading(path):
            refuse_special(path)
            return tifffile.TiffFile(path)

    def _image(self, tif: tifffile.TiffFile, path: Path, listed: ListedPage | None = None) -> TiffImage:
        self._take_own_image(tif, path)
        number = None if listed is None else listed.series
        with self._reading(path):
            if listed is not None and number is not None:
                _refuse_beyond(listed, "image series", number, len(tif.series), path)
            image = find_image(tif, path, number)
        if self._listed and not tif.is_ome:
            raise FormatError(f"{path}: OME-XML is missing; restore the file, or move it out of this folder")
        return image

    def _take_own_image(self, tif: tifffile.TiffFile, path: Path) -> None:
        """Reduce OME-XML that lists all files of a dataset to the image of this file.

        This comes before `tif.series`: tifffile would open the other files wherever they are, and read missing ones as
        zeros. Raises `FormatError` if the image needs planes of other files.
        """
        with self._reading(path):
            root = _ome_xml.find_root(tif.pages.first.description)
            is_part = tif.is_ndtiff
            if root is not None and _ome_siblings.names_other_files(root, path.name):
                own = _ome_siblings.own_description(root, path.name, len(tif.pages), self._split_along)
                is_part = own is None
                tif._omexml = own  # noqa: SLF001  # As the argument omexml= of its constructor does.
                tif.is_mmstack = False  # The index of Micro-Manager's files lists all positions, too.
        if is_part:
            problem = "contains only one part of an image that is stored in several files"
            remedy = (
                "pass pattern= with the axes that the names state ({channel}, {z}, {t}), or write one image per file"
            )
            raise FormatError(f"{path}: {problem}; {remedy}")

    def _read_into(self, rows: Sequence[int], out: Sequence[Array] | None) -> list[Array]:
        images: list[Array] = []
        for number, index in enumerate(rows):
            member = self._members[index]
            file = f"{self._root}/{member.file}"
            image = new_image(member.shape, member.dtype, file) if out is None else out[number]
            images.append(image if self._read_in_place(member, image) else self._read_opened(index, image))
        return images

    def files_of(self, index: int) -> Sequence[str]:
        member = self._members[index]
        return () if member.listed is not None else (f"{self._root}/{member.file}",)

    def _read_opened(self, index: int, image: Array) -> Array:
        with self._opening():
            return self._read_image(index, image)

    def _read_located(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array | None]:
        return self._chunks.read(self._locate, rows, regions)

    def _locate(self, index: int) -> ImageChunks | None:
        """Return the chunks of an image.

        The pages of a series are located together, as planes along T: to locate each page of a movie of 1,000 pages
        would take 0.1 s per page.
        """
        member = self._members[index]
        if member.pixel_offset is not None and _IS_LITTLE_ENDIAN:
            layout, offsets = listed_planes(member.shape, member.dtype, member.pixel_offset)
            return ImageChunks(layout, self._listed_file(member), offsets)
        listed, locate = member.listed, partial(self._locate_series, index)
        if listed is None or listed.page is None:
            return self._chunks.cached(index, locate)
        chunks = self._chunks.cached((member.file, listed.series, member.shape, member.dtype), locate)
        if chunks is None or listed.page >= len(chunks.offsets):
            return None
        page = slice(listed.page, listed.page + 1)
        lengths = None if chunks.lengths is None else chunks.lengths[page]
        return chunks._replace(offsets=chunks.offsets[page], lengths=lengths)

    def _locate_series(self, index: int) -> ImageChunks | None:
        path, listed = self._file(index), self._members[index].listed
        file = self._chunk_file(path)
        with self._open(path) as tif, self._reading(path):
            series = self._image(tif, path, listed)
            image = _page_of(series, listed, path)
            shape = image.shape
            self._refuse_other(index, shape, image.series.dtype)
            if not image.axes.endswith("YX") or "S" in image.axes or (image is not series and image.axes != "YX"):
                return None
            if image is not series:
                image = TiffImage(series.series, "TYX", (_num_pages(series.series), *image.lengths))
                shape = image.shape
            lead = image.lengths[:-2]
            planes = np.arange(math.prod(lead)).reshape(*lead, 1, 1).transpose(image.order).reshape(*shape[:3])
            return locate_chunks(image.series, planes, shape[3:], file, self._decoders)

    def _chunk_file(self, path: Path) -> ChunkFile:
        return LocalFile.as_it_is(path)

    def _read_in_place(self, member: Member, image: Array) -> bool:
        """Read the pixels at the offset of the listing; return False if it is missing or the file has changed."""
        if member.pixel_offset is None or not _IS_LITTLE_ENDIAN:
            return False
        try:
            self._listed_file(member).read_into([(member.pixel_offset, image)])
        except (ChangedFileError, OSError):
            return False
        return True

    def _listed_file(self, member: Member) -> LocalFile:
        """Return a file in the folder that was opened, so that a folder in its place is never read."""
        folder = self._folder.get()
        if self._listed and monotonic_ns() >= self._look_ns:
            self._refuse_written_over(folder.descriptor)
            self._look_ns = monotonic_ns() + STATUS_NS
        size_bytes, modified_ns = member.size_bytes or 0, member.modified_ns
        return LocalFile(member.file, folder, (size_bytes,) if modified_ns is None else (size_bytes, modified_ns))

    def _refuse_written_over(self, folder: int) -> None:
        """Raise `FormatError` if the open folder has another sidecar; moving the folder is allowed."""
        try:
            status = os.stat(SIDECAR, dir_fd=folder)
        except FileNotFoundError:
            raise FormatError(f"{self.path}: was removed since it was opened; restore it, and open it again") from None
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != self.stamp:
            raise FormatError(f"{self.path}: was replaced or changed since it was opened; open it again")

    def _read_image(self, index: int, image: Array) -> Array:
        """Return an image: ``image`` if its chunks are located, otherwise an array of tifffile."""
        file, listed = self._file(index), self._members[index].listed
        if listed is not None or not self.fetches:
            (pixels,) = self._chunks.read(self._locate, [index], [[0, 0, 0, 0, 0, *image.shape]], [image])
            if pixels is not None:
                return pixels
        with self._open(file, whole=listed is None) as tif, self._reading(file):
            tiff_image = _page_of(self._image(tif, file, listed), listed, file)
            self._refuse_other(index, tiff_image.shape, tiff_image.series.dtype)
            pixels = tiff_image.series.asarray().reshape(tiff_image.lengths)
        pixels = pixels.transpose(tiff_image.order).reshape(tiff_image.shape)
        return self._checked(index, np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("=")))

    def _refuse_other(self, index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        member = self._members[index]
        if shape != member.shape or dtype.newbyteorder("=") != member.dtype:
            self._checked(index, np.broadcast_to(np.zeros((), dtype.newbyteorder("=")), shape))

    def metadata(self, index: int) -> dict[str, Any]:
        file, listed = self._file(index), self._members[index].listed
        with self._open(file) as tif, self._reading(file):
            self._take_own_image(tif, file)
            xml = tif.ome_metadata
        if not xml and self._listed:
            raise FormatError(f"{file}: OME-XML is missing; restore the file, or move it out of this folder")
        if not xml:
            return schema.normalize_metadata(None, 0, "")
        with self._reading(file):
            return _ome_xml.parse(xml, str(file), 0 if listed is None else listed.series or 0)


class RemoteSource(Source):
    """Images of TIFF files on servers; whole images are fetched as whole files, regions as byte ranges.

    ``path`` is the URL of a file or of a folder, or a table that lists files.
    """

    fetches = True
    _carried = ("_seen",)

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None, *, objects: Objects, **how: Any) -> None:
        self._objects = objects
        self._seen: dict[str, tuple[int, str]] = {}
        self._opened: ProcessLocal[_Recent] = ProcessLocal(_Recent)
        super().__init__(path, known, **how)
        self._chunks = ExtentReader(_ERRORS, max_parallel_files=_DESCRIBED_AT_ONCE)

    def __reduce__(self) -> tuple[Any, ...]:
        kind, given = super().__reduce__()
        return partial(kind, objects=self._objects), given

    def _refuse_replaced(self) -> None:
        """Check a table on this machine for changes; files on servers are checked when they are read."""
        if not isinstance(self.path, Url):
            super()._refuse_replaced()

    def failure(self, error: BaseException) -> OMEArrowDSError | None:
        """Return the fetch error that caused an error of tifffile; otherwise, the result of `Source.failure`."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OMEArrowDSError):
                return cause
            cause = cause.__cause__ or cause.__context__
        return super().failure(error)

    def _at(self, file: str) -> Path:
        return url_of(file) or super()._at(file)

    def _look(self) -> None:
        """List the TIFF files at a URL: one file, or the files directly below it."""
        self.columns = pa.table({})
        if self.path.name.lower().endswith(TIFF_SUFFIXES):
            self._root, self._listed, present = self.path.parent, False, [self.path.name]
        else:
            self._root, below = self.path, self._objects.inside(str(self.path))
            files = [name for name in below if "/" not in name and not is_hidden(name)]
            present = [name for name in files if name.lower().endswith(TIFF_SUFFIXES)]
            self._seen = {f"{self.path}/{name}": below[name] for name in (*present, SIDECAR) if name in below}
            sidecar = f"{self.path}/{SIDECAR}"
            self._listed = sidecar in self._seen and self._take_sidecar(
                self.path / SIDECAR, pa.py_buffer(self._objects.read(sidecar, self._seen[sidecar]))
            )
        if not self._listed:
            self._take_files(sorted(present, key=natural_key))
        self._members = [member._replace(pixel_offset=None) for member in self._members]
        self._refuse_strangers({member.file for member in self._members}, set(present))
        versions = repr(sorted(self._seen.items()))
        self.stamp = (int.from_bytes(hashlib.blake2b(versions.encode(), digest_size=16).digest()),)

    def _describe(self, file: str, listed: ListedPage | None = None) -> Member:
        with self._asking(self._at(file)):
            return self._described(file, self._at(file), listed)._replace(pixel_offset=None)

    def _open(self, path: Path, *, whole: bool = False) -> tifffile.TiffFile:
        url = str(path)
        if whole:
            opened: Any = io.BytesIO(self._objects.read(url, self._seen.get(url)))
        else:
            opened = self._ranged(url)
        with self._reading(path):
            return tifffile.TiffFile(opened)

    def _ranged(self, url: str) -> ObjectFile:
        """Return a recently used or newly opened file, positioned at its start."""
        opened = self._opened.get().file(url, self._objects.open)
        if self._seen.setdefault(url, opened.version) != opened.version:
            raise FormatError(f"{url}: was replaced or changed since it was opened; open it again")
        return opened

    @contextmanager
    def _asking(self, path: Path) -> Iterator[None]:
        """Raise the last fetching error after reading a header: tifffile may log it and use an incomplete header."""
        try:
            yield
        finally:
            self._opened.get().refuse_failed(str(path))

    def _image(self, tif: tifffile.TiffFile, path: Path, listed: ListedPage | None = None) -> TiffImage:
        with self._asking(path):
            return super()._image(tif, path, listed)

    def _locate_series(self, index: int) -> ImageChunks | None:
        with self._asking(self._file(index)):
            return super()._locate_series(index)

    def _chunk_file(self, path: Path) -> ChunkFile:
        return self._ranged(str(path))

    def metadata(self, index: int) -> dict[str, Any]:
        with self._asking(self._file(index)):
            return super().metadata(index)

    @property
    def fills_out(self) -> bool:
        return False  # Files are prefetched for a batch, not for an image.

    def files_of(self, index: int) -> Sequence[str]:  # noqa: ARG002  # as that of local files
        return ()

    def prefetch(self, rows: Sequence[int]) -> None:
        urls = [str(self._file(row)) for row in rows if self._members[row].listed is None]
        self._objects.expect({url: self._seen.get(url) for url in urls})

    def _read_into(self, rows: Sequence[int], out: Sequence[Array] | None) -> list[Array]:
        if len(rows) > 1:
            self.prefetch(rows)
        with self._opening():
            return list(map(self._read_image, rows, self._new_images(rows) if out is None else out))

    def stream(self) -> Iterator[Block]:
        self.prefetch(range(len(self)))
        return super().stream()

    def stored_files(self) -> Iterator[Path]:
        yield from ()

    def stored_as(self) -> Stored:
        return replace(
            super().stored_as(), in_place=False, reading="whole files, or for regions the byte ranges that they overlap"
        )

    def stored_size(self) -> tuple[int, int, int]:
        """Return the number, size and allocated bytes of all files; a file of unknown size counts as average-sized."""
        known = [seen[0] for url, seen in self._seen.items() if not url.endswith(f"/{SIDECAR}")]
        num_files = len({member.file for member in self._members})
        size_bytes = sum(known) * num_files // max(1, len(known))
        return num_files + self._listed, size_bytes, size_bytes

    def close(self) -> None:
        super().close()
        self._chunks.clear()
        self._opened.close()
        self._objects.forget()


class _Recent:
    """The recently used files of servers, with their fetched headers."""

    def __init__(self) -> None:
        self._files: dict[str, ObjectFile] = {}

    def file(self, url: str, open_file: Callable[[str], ObjectFile]) -> ObjectFile:
        """Return the file at a URL with a separate read position at 0; the most recently used files stay open."""
        opened = self._files.get(url) or open_file(url)
        self._files[url] = opened
        while len(self._files) > _RECENT_FILES:
            oldest = next(iter(list(self._files)))  # over a copy, because another thread may add one
            self._files.pop(oldest, None)
        return opened.reopen()

    def refuse_failed(self, url: str) -> None:
        """Raise the error that occurred while the file at ``url`` was read, if any."""
        opened = self._files.get(url)
        if opened is not None and opened.last_error is not None:
            self._files.pop(url, None)
            raise opened.last_error


def _num_pages(series: tifffile.TiffPageSeries) -> int:
    """Return the number of pages of a series, also if its file has one header for all of them."""
    if not series.is_truncated:
        return len(series)
    return math.prod(series.get_shape(squeeze=False)) // math.prod(series.keyframe.shape)


def _page_of(image: TiffImage, listed: ListedPage | None, path: Path) -> TiffImage:
    """Return a page as a separate image, or the whole image if no page is listed."""
    if listed is None or listed.page is None:
        return image
    series = image.series
    _refuse_beyond(listed, "page", listed.page, _num_pages(series), path)
    if not series.is_truncated:
        return with_axes(tifffile.TiffPageSeries([series[listed.page]]), path)
    key = series.keyframe
    start = key.dataoffsets[0] + listed.page * key.nbytes
    page = tifffile.TiffFrame(key.parent, listed.page, keyframe=key, dataoffsets=(start,), databytecounts=(key.nbytes,))
    return with_axes(tifffile.TiffPageSeries([page]), path)


def _refuse_beyond(listed: ListedPage, part: str, number: int, count: int, path: Path) -> None:
    """Raise `FormatError` if a file lacks the series or page that a table lists."""
    if number >= count:
        raise FormatError(
            f"{path}: {part} {number} is out of range for {count}, counted from 0; correct the table ({listed.where})"
        )


def _page_layout(page: tifffile.TiffPage) -> str:
    """Return a description of the pixels of a page that are stored together."""
    if page.is_tiled:
        return f"tiles of {page.tilelength} x {page.tilewidth}"
    rows = min(page.rowsperstrip, page.imagelength)
    return "whole planes" if rows == page.imagelength else f"strips of {rows} rows"
