"""Strips, tiles and planes of TIFF images, located by tifffile and decoded by its functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tifffile

from omearrow_ds.storage.extents import Array, ChunkFile, ChunkLayout, Decode, ImageChunks, plane_layout

_CODECS = {"NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "ZSTD", "LZMA", "PACKBITS"}


def locate_chunks(
    series: tifffile.TiffPageSeries,
    planes: Array,
    side: Sequence[int],
    file: ChunkFile,
    decoders: dict[int, Decode],
) -> ImageChunks | None:
    """Return the chunks of a series, or None if only tifffile can read its pixels.

    Parameters
    ----------
    planes
        (T, C, Z), index in the series of each plane.
    side
        Shape (Y, X) of a plane.
    decoders
        Decoder by the hash of pages that are stored alike, which grows.
    """
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
    """Whether a page is (Y, X) in whole bytes per pixel, in chunks that can be decoded one by one.

    A page with a predictor but without compression is not: tifffile decodes its strips one by one to other values
    than the whole page if they are contiguous. libtiff ignores such a predictor.
    """
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
