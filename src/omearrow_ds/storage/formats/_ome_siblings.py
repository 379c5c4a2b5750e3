"""OME-XML that lists several files of a dataset, reduced to the image in one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree as ET

import numpy as np

_PLANE_AXES = "TCZ"
_UUIDS = "{*}Image/{*}Pixels/{*}TiffData/{*}UUID"


class _Part(NamedTuple):
    """An image with planes in a file."""

    image: ET.Element
    pixels: ET.Element
    sizes: Mapping[str, int]  # of T, C and Z; samples of one page are one channel
    pages: Mapping[tuple[int, ...], int]  # page of each plane (t, c, z) in this file
    is_shared: bool  # whether other files hold planes, too


def own_files(root: ET.Element, own_name: str) -> Callable[[ET.Element], bool]:
    """Return a function that checks whether a UUID element refers to the file that contains the OME-XML.

    It compares the identifier, which survives renaming, unless files of several names share it. Then, or if no element
    has the identifier, it compares the file name.
    """
    own_id, name = root.get("UUID"), own_name.lower()
    names = {uuid.get("FileName", "").lower() for uuid in root.iterfind(_UUIDS) if uuid.text == own_id}
    if own_id is not None and len(names) == 1:
        return lambda uuid: uuid.text == own_id
    return lambda uuid: uuid.get("FileName", name).lower() == name


def names_other_files(root: ET.Element, own_name: str) -> bool:
    """Whether OME-XML lists planes in files other than the one that contains it."""
    return not all(map(own_files(root, own_name), root.iterfind(_UUIDS)))


def own_description(root: ET.Element, own_name: str, num_pages: int, split_along: str) -> str | None:
    """Return the OME-XML of only those images that a file contains; None if an image needs planes of other files.

    Planes of other files may be absent along the axes ``split_along``: then the image has the planes of this file only.
    """
    is_own = own_files(root, own_name)
    parts = [part for image in root.iterfind("{*}Image") if (part := _part(image, is_own, num_pages))]
    for part in parts:
        if part.is_shared and not _keep_own_planes(part, split_along):
            return None
    for image in root.findall("{*}Image"):
        if not any(image is part.image for part in parts):
            root.remove(image)
    for data in root.iterfind("{*}Image/{*}Pixels/{*}TiffData"):
        for uuid in data.findall("{*}UUID"):
            data.remove(uuid)
    return ET.tostring(root, encoding="unicode") if parts else None


def _part(image: ET.Element, is_own: Callable[[ET.Element], bool], num_pages: int) -> _Part | None:
    """Return an image with the pages of its planes in this file; None without any."""
    pixels = image.find("{*}Pixels")
    if pixels is None:
        return None
    sizes = {axis: int(pixels.get(f"Size{axis}", "1")) for axis in _PLANE_AXES}
    channel = pixels.find("{*}Channel")
    sizes["C"] //= 1 if channel is None else int(channel.get("SamplesPerPixel", "1"))
    order = pixels.get("DimensionOrder", "XYCZT")[:1:-1]  # slowest first
    pages: dict[tuple[int, ...], int] = {}
    is_shared = False
    for data in pixels.iterfind("{*}TiffData"):
        if not all(map(is_own, data.iterfind("{*}UUID"))):
            is_shared = True
            continue
        page = int(data.get("IFD", "0"))
        num_planes = int(data.get("PlaneCount", data.get("NumPlanes", "1" if "IFD" in data.attrib else num_pages)))
        first = np.ravel_multi_index([int(data.get(f"First{axis}", "0")) for axis in order], [sizes[a] for a in order])
        for number in range(min(num_planes, num_pages)):
            place = dict(zip(order, np.unravel_index(int(first) + number, [sizes[a] for a in order]), strict=True))
            pages[tuple(int(place[axis]) for axis in _PLANE_AXES)] = page + number
    return _Part(image, pixels, sizes, pages, is_shared) if pages else None


def _keep_own_planes(part: _Part, split_along: str) -> bool:
    """Remove planes of other files from the description; return False if the others do not form an image."""
    kept = [sorted(set(positions)) for positions in zip(*part.pages, strict=True)]
    split = {axis for axis, positions in zip(_PLANE_AXES, kept, strict=True) if len(positions) < part.sizes[axis]}
    if math.prod(map(len, kept)) != len(part.pages) or not split <= set(split_along):
        return False
    pixels = part.pixels
    for axis, positions in zip(_PLANE_AXES, kept, strict=True):
        pixels.set(f"Size{axis}", str(int(pixels.get(f"Size{axis}", "1")) // part.sizes[axis] * len(positions)))
    channels = pixels.findall("{*}Channel")
    for number, channel in enumerate(channels):
        if len(channels) == part.sizes["C"] and number not in kept[1]:
            pixels.remove(channel)
    data, *others = pixels.findall("{*}TiffData")
    for other in others:
        pixels.remove(other)
    at = list(pixels).index(data)
    pixels.remove(data)
    for plane, page in part.pages.items():
        first = {f"First{axis}": str(kept[n].index(plane[n])) for n, axis in enumerate(_PLANE_AXES)}
        pixels.insert(at, ET.Element(data.tag, {"IFD": str(page), "PlaneCount": "1", **first}))
    return True
