"""The only image of a TIFF file, whose description must agree with its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from tifffile.tifffile import shaped_description_metadata

from omearrow_ds.axes import AXES
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.extents import Array, ChunkFile, ChunkLayout, Decode, ImageChunks, plane_layout
from omearrow_ds.storage.formats import _ome_xml

_ORDER = (*AXES[:2], "S", *AXES[2:])
_UNNAMED = "IQ"  # tifffile's letters for a sequence of pages, and for an axis without a name
_PLANES_BY_PAGE = ("ome", "mmstack")  # kinds of series whose metadata assign each page to a plane
_PLANES_IN_SEQUENCE = ("shaped", "imagej")
NEEDS_OTHER_FILES = (
    "contains only one part of an image that is stored in several files; pass pattern= with the axes that the names "
    "state ({channel}, {z}, {t}), or write one image per file"
)
_IMAGEJ_KEYS = ("images", "channels", "slices", "frames")


class TiffImage(NamedTuple):
    """The pages of an image, with its axes in the order of the file."""

    series: tifffile.TiffPageSeries
    axes: str  # letters of TCZYX and S (samples)
    lengths: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """Positions in ``axes`` of T, C, S, Z, Y and X, without absent axes."""
        return [self.axes.index(axis) for axis in _ORDER if axis in self.axes]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (T, C, Z, Y, X); samples are channels."""
        sizes = dict(zip(self.axes, self.lengths, strict=True))
        samples = sizes.pop("S", 1)
        return tuple(sizes.get(axis, 1) * (samples if axis == "C" else 1) for axis in AXES)


def find_image(
    tif: tifffile.TiffFile, path: Path, number: int | None = None, split_along: str | None = None
) -> TiffImage:
    """Return the only image of an open file or, with ``number``, the image series of this number."""
    # Along the axes ``split_along``, other files may hold planes; None if the OME-XML names no other files.
    # Raises `FormatError` if there are several and none is chosen, if other files hold parts of the image, or if the
    # OME-XML, ImageJ or tifffile description of the only image contradicts the pages: planes would be dropped, or
    # channels be read as Z.
    remedy = "write one image per file, or list the series in columns Series_<channel> of a table"
    if number is None and len(tif.series) != 1:
        raise FormatError(f"{path}: contains {len(tif.series)} images, expected one; {remedy}")
    stored = _with_own_pages(tif, tif.series[number or 0])
    series = _own_planes(stored, split_along) if split_along is not None and None in stored.pages else stored
    if series is None or series.is_multifile:
        raise FormatError(f"{path}: {NEEDS_OTHER_FILES}")
    image = with_axes(series, path)
    if len(tif.series) > 1:
        if any(page is None for page in series):  # tifffile reads zeros.
            raise FormatError(f"{path}: image series {number} lacks planes that its OME-XML lists; restore the file")
        return image
    is_described = (split_along is not None and series.kind == "ome") or _is_described(tif, image)
    if not is_described or not _uses_all_pages(tif, image):
        problem = f"{path}: its {_describe(tif, image)}, but the file has {_describe_pages(tif, image)}"
        raise FormatError(f"{problem}; restore the file, or correct or remove its description")
    return image


def _own_planes(series: tifffile.TiffPageSeries, split_along: str) -> tifffile.TiffPageSeries | None:
    """Return the planes of a series that are in its file; None if they form no image without those of other files."""
    pages, axes, shape = series.pages, series.get_axes(squeeze=False), series.get_shape(squeeze=False)
    lead = shape[: len(axes.rstrip("SYX"))]
    is_own = np.array([page is not None for page in pages]).reshape(lead)
    positions = [np.unique(indices) for indices in is_own.nonzero()]
    split = {axis for axis, size, own in zip(axes, lead, positions, strict=False) if len(own) < size}
    block = np.ix_(*positions)
    if not is_own[block].all() or not split <= set(split_along):
        return None
    numbers = np.arange(len(pages)).reshape(lead)[block]
    sizes, own_pages = (*numbers.shape, *shape[len(lead) :]), [pages[number] for number in numbers.flat]
    return tifffile.TiffPageSeries(own_pages, sizes, series.dtype, axes, kind=series.kind, squeeze=False)


def _with_own_pages(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> tifffile.TiffPageSeries:
    """Return a series with one page per plane if the planes are not contiguous in the file."""
    # tifffile assumes contiguous planes if more bytes than those of all planes are between the first two headers.
    start = series.dataoffset if series.kind == "shaped" else None
    if start is None or not 1 < len(tif.pages) == len(series):
        return series
    if tif.pages[1].dataoffsets[0] == start + series.keyframe.nbytes:
        return series
    shape, axes = series.get_shape(squeeze=False), series.get_axes(squeeze=False)
    return tifffile.TiffPageSeries(list(tif.pages), shape, series.dtype, axes, kind=series.kind, squeeze=False)


def refuse_mixed_pages(series: tifffile.TiffPageSeries, path: Path) -> None:
    """Raise `FormatError` if planes differ in storage layout: tifffile would read all of them like the first."""
    planes = [page for page in series if page is not None and not page.is_virtual]
    if len(planes) > 1 and len({page.aspage().hash for page in planes}) > 1:
        problem = "planes differ in compression, strips or tiles"
        raise FormatError(f"{path}: {problem}; write all planes with the same layout")


def with_axes(series: tifffile.TiffPageSeries, path: Path) -> TiffImage:
    """Return the image of a series; unnamed axes become Z, or T and Z."""
    axes, shape = series.get_axes(squeeze=False), series.get_shape(squeeze=False)
    # By position: two axes may have one letter. An axis of one element has no influence on the order of the planes.
    long = [position for position, axis in enumerate(axes) if shape[position] != 1 or axis in "YX"]
    unnamed = [position for position in long if axes[position] in _UNNAMED]
    free = [axis for axis in "TZ" if axis not in {axes[position] for position in long}]
    names = dict(zip(unnamed, free[-len(unnamed) :], strict=False)) if unnamed else {}
    named = "".join(names.get(position, axes[position]) for position in long)
    if len(unnamed) > len(names) or not set("YX") <= set(named) <= set(_ORDER) or len(set(named)) < len(named):
        problem = f"axes {axes!r} of shape {shape} cannot be converted to {AXES}"
        raise FormatError(f"{path}: {problem}; write the file with only these axes")
    return TiffImage(series, named, tuple(shape[position] for position in long))


def _is_described(tif: tifffile.TiffFile, image: TiffImage) -> bool:
    """Whether the description of a file, if it has one, describes the planes of its image."""
    page = tif.pages.first
    if page.shaped_description is not None:
        return _is_described_by_tifffile(shaped_description_metadata(page.shaped_description), image.series)
    if _ome_xml.is_ome_xml(page.description):
        return _is_described_by_ome_xml(tif.ome_metadata or page.description, image)
    return tif.imagej_metadata is None or _is_described_by_imagej(tif.imagej_metadata, image)


def _is_described_by_tifffile(metadata: dict[str, Any], series: tifffile.TiffPageSeries) -> bool:
    shape = metadata["shape"]
    if len(metadata.get("axes") or shape) != len(shape):
        return False
    if series.kind == "shaped":
        return tuple(shape) == series.get_shape(squeeze=False)
    # The description may be that of only the first page.
    return [size for size in shape if size > 1] == [size for size in series.keyframe.shape if size > 1]


def _is_described_by_ome_xml(xml: str, image: TiffImage) -> bool:
    # tifffile takes the shape of a series of this kind from the OME-XML.
    if image.series.kind == "ome" and _ome_xml.max_channels(xml) <= image.shape[1]:
        return True
    sizes = _ome_xml.image_sizes(xml)
    # A writer may leave out elements of channels, but must not list channels without pixels.
    is_listed = any(shape == image.shape and num_channels <= shape[1] for shape, num_channels in sizes)
    if len(image.series) == 1:
        return is_listed or not sizes
    # Without TiffData elements, tifffile reads pages in their order in the file.
    return is_listed and image.series.kind in _PLANES_BY_PAGE


def _is_described_by_imagej(metadata: dict[str, Any], image: TiffImage) -> bool:
    num_images, *sizes = (metadata.get(key, 1) for key in _IMAGEJ_KEYS)
    num_t, num_c, num_z, *_ = image.shape
    samples = dict(zip(image.axes, image.lengths, strict=True)).get("S", 1)
    if sizes == [1, 1, 1]:  # Without axes, pages are read along Z.
        return num_images in (1, num_t * num_c * num_z // samples)
    # Bio-Formats counts the samples of a page as channels, ImageJ does not.
    return sizes in ([num_c, num_z, num_t], [num_c // samples, num_z, num_t])


def _uses_all_pages(tif: tifffile.TiffFile, image: TiffImage) -> bool:
    """Whether each plane of an image has a page, and each page is a plane or a small version of one."""
    series = image.series
    if series.kind not in (*_PLANES_BY_PAGE, *_PLANES_IN_SEQUENCE):
        return True
    num_pages = len(tif.pages)
    num_planes = math.prod(image.lengths) // math.prod(series.keyframe.shape)
    if series.kind in _PLANES_IN_SEQUENCE:
        return num_pages == num_planes or (num_pages == 1 and _has_planes_after_first(tif, num_planes))
    used = _used_offsets(series)
    others = () if len(used) == num_pages else (page for page in tif.pages if page.offset not in used)
    return len(used) == num_planes and all(page.aspage().is_reduced for page in others)


def _used_offsets(series: tifffile.TiffPageSeries) -> set[int]:
    return {page.offset for page in series if page is not None and page.offset}


def _has_planes_after_first(tif: tifffile.TiffFile, num_planes: int) -> bool:
    """Whether a file of one page has space for more planes, as ImageJ writes them, before or after its header."""
    page = tif.pages.first
    start = page.dataoffsets[0]
    stop = start + num_planes * page.nbytes
    headers = [page.offset, *(tag.valueoffset for tag in page.tags)]
    return page.is_final and stop <= tif.filehandle.size and not any(start <= offset < stop for offset in headers)


def _describe(tif: tifffile.TiffFile, image: TiffImage) -> str:
    page = tif.pages.first
    if page.shaped_description is not None:
        metadata = shaped_description_metadata(page.shaped_description)
        axes = f" with axes {metadata['axes']!r}" if metadata.get("axes") else ""
        return f"description gives the shape {list(metadata['shape'])}{axes}"
    if _ome_xml.is_ome_xml(page.description):
        sizes = _ome_xml.image_sizes(tif.ome_metadata or page.description)
        listed = [f"{shape}" + f" and {count} channels" * (count > shape[1]) for shape, count in sizes]
        is_assigned = len(image.series) == 1 or image.series.kind in _PLANES_BY_PAGE
        assigned = "" if is_assigned else " without a page for each plane"
        return f"OME-XML gives {AXES} = {', '.join(listed) or 'nothing'}{assigned}"
    if tif.imagej_metadata is None:
        return f"index of Micro-Manager gives {AXES} = {image.shape}"
    metadata = tif.imagej_metadata
    return f"ImageJ description gives {', '.join(f'{key}={metadata[key]}' for key in _IMAGEJ_KEYS if key in metadata)}"


def _describe_pages(tif: tifffile.TiffFile, image: TiffImage) -> str:
    page, num_pages = image.series.keyframe, len(tif.pages)
    samples = f" and {page.samplesperpixel} samples" if page.samplesperpixel > 1 else ""
    used = len(_used_offsets(image.series)) if image.series.kind in _PLANES_BY_PAGE else num_pages
    unused = f", {used} of them planes" if used < num_pages else ""
    return f"{num_pages} page{'s' * (num_pages > 1)} of {page.imagelength} x {page.imagewidth} pixels{samples}{unused}"


_CODECS = {"NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "ZSTD", "LZMA", "PACKBITS"}


def locate_chunks(
    series: tifffile.TiffPageSeries, planes: Array, side: Sequence[int], file: ChunkFile, decoders: dict[int, Decode]
) -> ImageChunks | None:
    """Return the chunks of a series, or None if only tifffile can read its pixels."""
    # ``planes`` (T, C, Z) is the index in the series of each plane of the shape ``side``. ``decoders``, by the hash of
    # pages that are stored alike, grows.
    page = series.keyframe
    if series.transform is not None:  # tifffile computes other values from the stored ones.
        return None
    dtype = series.dtype.newbyteorder(page.parent.byteorder)
    if series.dataoffset is not None:
        starts = series.dataoffset + math.prod(side) * dtype.itemsize * planes
        return ImageChunks(plane_layout(dtype, (side[0], side[1])), file, starts[..., None])
    pages = [other for other in series.pages if other is not None and not other.is_virtual]
    if page.shape != tuple(side) or not _is_plain(page) or not len(pages) == len(series.pages) == planes.size:
        return None
    if any(other.keyframe is None or other.keyframe.hash != page.hash for other in pages):
        return None
    if page.is_final:
        starts = np.array([other.dataoffsets[0] for other in pages], np.int64)
        return ImageChunks(plane_layout(dtype, (side[0], side[1])), file, starts[planes][..., None])
    shape = (page.tilelength, page.tilewidth) if page.is_tiled else (min(page.rowsperstrip, side[0]), side[1])
    num_down, num_across = (-(-size // length) for size, length in zip(side, shape, strict=True))
    tables = [(other.dataoffsets, other.databytecounts) for other in pages]
    if any(not len(starts) == len(lengths) == num_down * num_across for starts, lengths in tables):
        return None
    offsets, lengths = (np.array(table, np.int64)[planes] for table in zip(*tables, strict=True))
    if not offsets.all() or not lengths.all():  # tifffile returns the nodata value for missing chunks.
        return None
    if lengths.max() > file.size_bytes:
        return None
    if page.hash not in decoders:
        decoders[page.hash] = _decoder(page)
    layout = ChunkLayout((1, 1, 1, *shape), num_across, dtype, dtype.newbyteorder("="), decoders[page.hash])
    return ImageChunks(layout, file, offsets, lengths)


def _decoder(page: tifffile.TiffPage) -> Decode:
    """Return a function that decodes a strip or tile of a page, or of a page that is stored alike."""
    decode = page.decode

    def decode_chunk(data: memoryview, number: int) -> Array:
        pixels: Any = decode(data, number)[0]
        chunk: Array = pixels.reshape(1, 1, 1, *pixels.shape[1:3])
        return chunk

    return decode_chunk


def _is_plain(page: tifffile.TiffPage) -> bool:
    """Whether a page is (Y, X) in whole bytes per pixel, in chunks that can be decoded one by one."""
    # Not with a predictor but no compression: tifffile decodes contiguous strips one by one to other values than the
    # whole page, and libtiff ignores such a predictor.
    return bool(
        page.samplesperpixel == 1
        and page.imagedepth == 1
        and page.tiledepth in (0, 1)
        and page.fillorder == 1
        and page.dtype is not None
        and page.bitspersample == 8 * page.dtype.itemsize
        and tifffile.COMPRESSION(page.compression).name in _CODECS
        and page.predictor in ((1,) if page.compression == tifffile.COMPRESSION.NONE else (1, 2, 3))
    )
