"""Folder of TIFF files, one per image: written as OME-TIFF; any TIFF that tifffile supports can be read."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import tifffile

from omearrow_ds.codec import schema
from omearrow_ds.codec.encode import Image
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.extents import Decode, ImageChunks
from omearrow_ds.storage.formats import _ome_xml
from omearrow_ds.storage.formats._base import Array
from omearrow_ds.storage.formats._detect import TIFF_SUFFIXES
from omearrow_ds.storage.formats._error_translation import MALFORMED
from omearrow_ds.storage.formats._folder import (
    NOT_LISTED,
    FileReader,
    ListedFile,
    Member,
    describe_files,
    image_id_of,
    open_folder,
    write_members,
)
from omearrow_ds.storage.formats._stored import Stored, spread
from omearrow_ds.storage.formats._tiff_series import (
    NEEDS_OTHER_FILES,
    TiffImage,
    find_image,
    locate_chunks,
    refuse_mixed_pages,
    with_axes,
)

_SUFFIX = ".ome.tif"
_CODECS = {"ADOBE_DEFLATE": "zlib", "DEFLATE": "zlib"}  # as this package calls them; the others have their own names
_CHECKED = 4096  # pixels in the checksum of the UUID
ERRORS = (ET.ParseError, tifffile.TiffFileError, RuntimeError, AssertionError, struct.error, *MALFORMED)


def write_collection(
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
    is_same = np.array_equal(stored, image.pixels.reshape(-1), equal_nan=image.pixels.dtype.kind == "f")
    return offset if is_same else None


def _identifier(name: str, pixels: Array) -> str:
    """Return the file's UUID, a hash of its name and first pixels, so that equal images give equal bytes."""
    # tifffile's default UUID contains the time and the network address of the machine. A checksum of all pixels would
    # make writing 512 x 512 images a third slower.
    checksum = zlib.crc32(np.ascontiguousarray(pixels.reshape(-1)[:_CHECKED]).data)
    return str(uuid5(NAMESPACE_OID, f"{name} {pixels.shape} {pixels.dtype} {checksum}"))


class TiffReader(FileReader):
    """Reader of TIFF files, in sidecar order or, without a sidecar, in natural order of file names.

    In a file without OME axes, samples are channels, an unnamed stack is Z, and a stack of stacks is T and Z. Pixels
    stored as in memory are read directly; tifffile reads the others. Raises `FormatError` if a file is not a readable
    TIFF, holds several images, or has pixels of an unsupported dtype.
    """

    errors = ERRORS
    suffixes = TIFF_SUFFIXES

    @cached_property
    def _decoders(self) -> dict[int, Decode]:
        return {}

    def describe_storage(self) -> Stored:
        codecs, layouts = [], []
        for index in spread(len(self.folder.members)):
            member = self.folder.members[index]
            with self._open(member.file) as tif:
                page = self._image(tif, self.folder.path_of(member.file), member.listed).series.keyframe
                name = tifffile.COMPRESSION(page.compression).name
            codecs.append(_CODECS.get(name, name.lower()))
            rows = min(page.rowsperstrip, page.imagelength)
            strips = "whole planes" if rows == page.imagelength else f"strips of {rows} rows"
            layouts.append(f"tiles of {page.tilelength} x {page.tilewidth}" if page.is_tiled else strips)
        return describe_files(self.folder, codecs, layouts)

    def describe(self, file: str, listed: ListedFile = NOT_LISTED) -> Member:
        path = self.folder.path_of(file)
        with self.folder.guard.reading(path):
            opened = self.folder.files.open(path)
        with self._open(file) as tif:
            image = _page_of(self._image(tif, path, listed), listed, path)
            series = image.series
            refuse_mixed_pages(series, path)
            dtype = schema.pixel_dtype(str(series.dtype), str(path)).newbyteorder("=")
            moved = [position for position in image.order if image.lengths[position] > 1]
            is_plain = moved == sorted(moved) and (dtype.itemsize == 1 or tif.byteorder == "<")
            offset = series.dataoffset if is_plain and series.transform is None else None
        image_id = image_id_of(file, self.suffixes)
        return Member(file, image_id, image.shape, dtype, opened.size_bytes, offset, opened.modified_ns, listed)

    @contextmanager
    def _open(self, file: str) -> Iterator[tifffile.TiffFile]:
        path = self.folder.path_of(file)
        with (
            self.folder.files.open_for_library(path) as opened,
            self.folder.guard.reading(path),
            tifffile.TiffFile(opened) as tif,
        ):
            yield tif

    def _image(self, tif: tifffile.TiffFile, path: Path, listed: ListedFile) -> TiffImage:
        is_part = self._take_own_planes(tif, path)
        if listed.series is not None:
            _refuse_beyond(listed, "image series", listed.series, len(tif.series), path)
        return find_image(tif, path, listed.series, self.folder.split_along if is_part else None)

    def _take_own_planes(self, tif: tifffile.TiffFile, path: Path) -> bool:
        """Reduce OME-XML of several files to the planes of this file; return False if it is of this file only."""
        # This precedes `tif.series`: tifffile would open other files wherever they are, and read missing ones as zeros.
        own = _ome_xml.own_description(tif.pages.first.description, path.name)
        if tif.is_ndtiff or own is None:
            raise FormatError(f"{path}: {NEEDS_OTHER_FILES}")
        if own:
            tif._omexml = own  # noqa: SLF001  # As the argument omexml= of its constructor does.
            tif.is_mmstack = False  # The index of Micro-Manager's files lists all positions, too.
        if self.folder.is_listed and not tif.is_ome:
            raise FormatError(f"{path}: OME-XML is missing; restore the file, or move it out of this folder")
        return bool(own)

    def locate(self, row: int) -> ImageChunks | None:
        """Return the chunks of an image; pages of a series are located together, which takes 0.1 s for 1,000 pages."""
        member = self.folder.members[row]
        listed, locate = member.listed, partial(self._locate_series, row)
        if listed.page is None:
            return self.chunks.cached(row, locate)
        chunks = self.chunks.cached((member.file, listed.series, member.shape, member.dtype), locate)
        if chunks is None or listed.page >= len(chunks.offsets):
            return None
        page = slice(listed.page, listed.page + 1)
        lengths = None if chunks.lengths is None else chunks.lengths[page]
        return chunks._replace(offsets=chunks.offsets[page], lengths=lengths)

    def _locate_series(self, row: int) -> ImageChunks | None:
        folder = self.folder
        member = folder.members[row]
        path, listed = folder.path_of(member.file), member.listed
        file = folder.files.open(path)
        with self._open(member.file) as tif:
            series = self._image(tif, path, listed)
            image = _page_of(series, listed, path)
            shape = image.shape
            folder.refuse_other(row, shape, image.series.dtype.newbyteorder("="))
            if not image.axes.endswith("YX") or "S" in image.axes or (image is not series and image.axes != "YX"):
                return None
            if image is not series:
                image = TiffImage(series.series, "TYX", (_num_pages(series.series), *image.lengths))
                shape = image.shape
            lead = image.lengths[:-2]
            planes = np.arange(math.prod(lead)).reshape(*lead, 1, 1).transpose(image.order).reshape(*shape[:3])
            return locate_chunks(image.series, planes, shape[3:], file, self._decoders)

    def decode(self, row: int, file: Any) -> Array:
        member = self.folder.members[row]
        path, listed = self.folder.path_of(member.file), member.listed
        with tifffile.TiffFile(file) as tif:
            image = _page_of(self._image(tif, path, listed), listed, path)
            self.folder.refuse_other(row, image.shape, image.series.dtype.newbyteorder("="))
            pixels = image.series.asarray().reshape(image.lengths)
        pixels = pixels.transpose(image.order).reshape(image.shape)
        return np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("="))

    def metadata(self, row: int) -> dict[str, Any]:
        member = self.folder.members[row]
        path, listed = self.folder.path_of(member.file), member.listed
        with self._open(member.file) as tif:
            self._take_own_planes(tif, path)
            xml = tif.ome_metadata
            return _ome_xml.parse(xml, str(path), listed.series or 0) if xml else schema.normalize_metadata(None, 0, "")


open_collection = partial(open_folder, "tiff", TiffReader)


def _num_pages(series: tifffile.TiffPageSeries) -> int:
    """Return the number of pages of a series, also if its file has one header for all of them."""
    if not series.is_truncated:
        return len(series)
    return math.prod(series.get_shape(squeeze=False)) // math.prod(series.keyframe.shape)


def _page_of(image: TiffImage, listed: ListedFile, path: Path) -> TiffImage:
    """Return a page as a separate image, or the whole image if no page is listed."""
    if listed.page is None:
        return image
    series = image.series
    _refuse_beyond(listed, "page", listed.page, _num_pages(series), path)
    if not series.is_truncated:
        return with_axes(tifffile.TiffPageSeries([series[listed.page]]), path)
    key = series.keyframe
    start = key.dataoffsets[0] + listed.page * key.nbytes
    page = tifffile.TiffFrame(key.parent, listed.page, keyframe=key, dataoffsets=(start,), databytecounts=(key.nbytes,))
    return with_axes(tifffile.TiffPageSeries([page]), path)


def _refuse_beyond(listed: ListedFile, part: str, number: int, count: int, path: Path) -> None:
    if number >= count:
        problem = f"{part} {number} is out of range for {count}, counted from 0"
        raise FormatError(f"{path}: {problem}; correct the table ({listed.origin})")
