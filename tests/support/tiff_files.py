"""TIFF files with chosen pages, descriptions and tags."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile

Array = np.ndarray[Any, Any]
SIDE = (12, 16)  # A header is too small to pass for a plane.
ENCODERS = {
    1: bytes,
    5: imagecodecs.lzw_encode,
    8: imagecodecs.zlib_encode,
    32773: imagecodecs.packbits_encode,
    32946: imagecodecs.zlib_encode,
    34925: imagecodecs.lzma_encode,
    50000: imagecodecs.zstd_encode,
}


def planes_of(num_planes: int, side: Sequence[int] = SIDE) -> Array:
    """Return planes (N, *side), uint16, in which each pixel encodes its plane and its position."""
    size = int(np.prod(side))
    return (np.arange(num_planes)[:, None] * 1000 + np.arange(size)).astype(np.uint16).reshape(num_planes, *side)


def write_pages(
    file: Path, planes: Sequence[Array], description: str | None, *, every: bool = False, **options: Any
) -> None:
    """Write each plane as a page; the first one (or every one) has a description, which tifffile does not change."""
    options = {"photometric": "minisblack", "contiguous": False} | options
    with tifffile.TiffWriter(file, byteorder=options.pop("byteorder", "<"), ome=False) as writer:
        for number, plane in enumerate(planes):
            text = description if number == 0 or every else None
            writer.write(plane, metadata=None, description=text, **options)


def ome_xml(
    sizes: str, planes: str = "", *, channels: int = 0, samples: int = 1, side: Sequence[int] = SIDE, more: str = ""
) -> str:
    """Return OME-XML of one image with sizes such as ``"T1 C2 Z1"``, and elements of its planes."""
    attributes = " ".join(f'Size{size[0]}="{size[1:]}"' for size in (*sizes.split(), f"Y{side[0]}", f"X{side[1]}"))
    elements = "".join(f'<Channel ID="Channel:0:{c}" SamplesPerPixel="{samples}"/>' for c in range(channels))
    return (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
        f'DimensionOrder="XYCZT" Type="uint16" {attributes}>{elements}{planes}</Pixels></Image>{more}</OME>'
    )


def tiff_data(*assigned: tuple[int, str, int]) -> str:
    """Return TiffData elements that assign the page IFD to the plane with this First attribute."""
    return "".join(f'<TiffData IFD="{ifd}" First{axis}="{first}" PlaneCount="1"/>' for ifd, axis, first in assigned)


def imagej(**values: object) -> str:
    """Return a description in ImageJ's format."""
    return "ImageJ=1.53t\n" + "".join(f"{name}={value}\n" for name, value in values.items())


def write_raw(
    file: Path,
    side: tuple[int, int],
    *,
    byteorder: str = "<",
    bits: int = 16,
    sample_format: int = 1,
    samples: int = 1,
    planar: int = 1,
    compression: int = 1,
    predictor: int = 1,
    fill_order: int = 1,
    tile: tuple[int, int] | None = None,
    rows_per_strip: int | None = None,
    gap_bytes: int = 0,
    seed: int = 0,
    more_tags: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write a page tag by tag, in combinations that no library writes, with random stored numbers.

    The oracle for their meaning is tifffile.
    """
    random, (height, width) = np.random.default_rng(seed), side
    if tile is None:
        rows = rows_per_strip or height
        parts = [(min(rows, height - first), width) for first in range(0, height, rows)]
        size_tags = {278: (rows,)}
    else:
        parts = [tile] * (-(-height // tile[0]) * -(-width // tile[1]))
        size_tags = {322: (tile[1],), 323: (tile[0],)}
    body, offsets, sizes = b"", [], []
    for part_rows, part_width in parts * (samples if planar == 2 else 1):
        num_bytes = part_rows * -(-part_width * (1 if planar == 2 else samples) * bits // 8)
        encoded = bytes(ENCODERS[compression](random.integers(0, 256, num_bytes, np.uint8).tobytes()))
        encoded = bytes(imagecodecs.bitorder_encode(encoded)) if fill_order == 2 else encoded
        offsets.append(8 + len(body))
        sizes.append(len(encoded))
        body += encoded + bytes(gap_bytes)
    tags: dict[int, Sequence[int]] = {256: (width,), 257: (height,), 258: [bits] * samples, 259: (compression,)}
    tags |= {262: (2 if samples == 3 else 1,), 266: (fill_order,), 277: (samples,), 284: (planar,)}
    tags |= {317: (predictor,), 338: (0,), 339: [sample_format] * samples, **size_tags, **(more_tags or {})}
    tags |= {273: offsets, 279: sizes} if tile is None else {324: offsets, 325: sizes}
    if samples != 2:
        del tags[338]
    body += bytes(len(body) % 2)
    header, values = struct.pack(f"{byteorder}H", len(tags)), b""
    first_value = 8 + len(body) + 2 + 12 * len(tags) + 4
    for tag, numbers in sorted(tags.items()):
        kind, letter = (4, "I") if tag in (256, 257, 273, 278, 279, 324, 325) else (3, "H")
        kind, letter = (2, "B") if isinstance(numbers, bytes) else (kind, letter)
        packed = struct.pack(f"{byteorder}{len(numbers)}{letter}", *numbers)
        if len(packed) > 4:
            values, packed = values + packed, struct.pack(f"{byteorder}I", first_value + len(values))
        header += struct.pack(f"{byteorder}HHI", tag, kind, len(numbers)) + packed.ljust(4, b"\0")
    start = struct.pack(f"{byteorder}2sHI", b"II" if byteorder == "<" else b"MM", 42, 8 + len(body))
    file.write_bytes(start + body + header + bytes(4) + values)


def write_micro_manager(file: Path, planes: Array, index: Sequence[Sequence[int]], lengths: str, xml: str) -> None:
    """Write planes like Micro-Manager: an index of their C, Z, T and position, and OME-XML, in addition to the pages.

    ``lengths`` are those of the acquisition, such as ``"C2 Z3 T1"``.
    """
    sizes = {length[0]: int(length[1:]) for length in lengths.split()}
    counts = {"Channels": sizes["C"], "Slices": sizes["Z"], "Frames": sizes["T"], "Positions": 1}
    order = {"SlicesFirst": False, "TimeFirst": False}
    summary = json.dumps({"MicroManagerVersion": "2.0.0", **counts, **order}).encode()
    (height, width), page_bytes = planes[0].shape, 162 + planes[0].nbytes
    first = 40 + len(summary)
    end = first + len(planes) * page_bytes
    description, settings = xml.encode() + b"\0", b'{"Binning": 1}\0'
    pages = b""
    for number, plane in enumerate(planes):
        offset = first + number * page_bytes
        long_tags = {256: width, 257: height, 273: offset + 162, 278: height, 279: plane.nbytes}
        short_tags = {258: 16, 259: 1, 262: 1, 277: 1, 282: 1, 283: 1, 296: 1}
        entries = {tag: (4, 1, value) for tag, value in long_tags.items()}
        entries |= {tag: (3, 1, value) for tag, value in short_tags.items()}
        entries |= {51123: (2, len(settings), end + len(description))}
        if number == 0:  # All pages have equally many tags.
            del entries[282]
            entries[270] = (2, len(description), end)
        pages += struct.pack("<H", len(entries))
        pages += b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(entries.items()))
        pages += struct.pack("<I", offset + page_bytes if number + 1 < len(planes) else 0) + plane.tobytes()
    header = struct.pack("<2sHI", b"II", 42, first)
    header += struct.pack("<8I", 54773648, end + len(description) + len(settings), 0, 0, 0, 0, 2355492, len(summary))
    index_entries = [(*position, first + number * page_bytes) for number, position in enumerate(index)]
    table = struct.pack("<II", 3453623, len(index_entries)) + b"".join(
        struct.pack("<5I", *entry) for entry in index_entries
    )
    file.write_bytes(header + summary + pages + description + settings + table)
