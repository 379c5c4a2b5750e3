"""OME-XML of TIFF files: metadata for tifffile when writing, parsed or reduced to one file when reading.

Metadata with a place in OME-XML is stored there (https://docs.openmicroscopy.org/ome-model/6.2.2/). Other metadata
(channel ids, image type, free illumination names) is stored as JSON in a map annotation, so that nothing is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from xml.etree import ElementTree as ET

from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema

ANNOTATION_KEY = "omearrow_ds"
_ILLUMINATIONS = ("Transmitted", "Epifluorescence", "Oblique", "NonLinear", "Other")
_NOT_XML = re.compile("[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OME, _CHANNEL = re.compile(r"<(?:\w+:)?OME[\s>]"), re.compile(r"<(?:\w+:)?Channel[\s/>]")
_UUIDS = "{*}Image/{*}Pixels/{*}TiffData/{*}UUID"
_PER_MICROMETRE = {"µm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6, "Å": 1e-4}


def tiff_metadata(metadata: Mapping[str, Any], size_c: int) -> dict[str, Any]:
    from tifffile import OmeXml  # noqa: PLC0415  # The backend of the TIFF format.

    tags: dict[str, Any] = {"axes": "TCZYX"}
    if metadata["name"] is not None and _is_xml(metadata["name"]):
        tags["Name"] = metadata["name"]
    if metadata["acquisition_datetime"] is not None:
        tags["AcquisitionDate"] = metadata["acquisition_datetime"].isoformat()
    for axis in "XYZ":
        size, unit = metadata[f"physical_size_{axis.lower()}"], metadata[f"physical_size_{axis.lower()}_unit"]
        if size is not None and size > 0 and unit in _PER_MICROMETRE:
            tags |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": unit}
    if len(metadata["channels"]) == size_c:
        tags["Channel"] = _channels(metadata["channels"])
    xml = OmeXml()
    xml.addimage("uint16", (1, size_c, 1, 1, 1), (size_c, 1, 1, 1, 1, 1), **tags)
    stored = parse(xml.tostring(), "OME-XML")
    rest = {name: value for name, value in metadata.items() if stored[name] != value}
    if rest:
        tags["MapAnnotation"] = {ANNOTATION_KEY: json.dumps(rest, default=datetime.isoformat)}
    return tags


def _channels(channels: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return tifffile's per-channel lists; a list is included only if every channel has a value for it."""
    colors = [channel["color_rgba"] for channel in channels]
    known: dict[str, list[Any]] = {
        "Name": [channel["name"] if _is_xml(channel["name"] or "") else None for channel in channels],
        "EmissionWavelength": [channel["emission_um"] or None for channel in channels],
        "ExcitationWavelength": [channel["excitation_um"] or None for channel in channels],
        "IlluminationType": [
            channel["illumination"] if channel["illumination"] in _ILLUMINATIONS else None for channel in channels
        ],
        "Color": [color and (color + 2**31) % 2**32 - 2**31 for color in colors],  # Signed.
    }
    lists = {name: values for name, values in known.items() if None not in values}
    for name in ("EmissionWavelength", "ExcitationWavelength"):
        if name in lists:
            lists[f"{name}Unit"] = ["µm"] * len(channels)
    return lists


def _is_xml(text: str) -> bool:
    """Whether XML 1.0 can store the text and return it unchanged (it turns CR into LF)."""
    return not _NOT_XML.search(text)


def parse(xml: str, where: str, series: int = 0) -> dict[str, Any]:
    """Return the OME metadata of an image of OME-XML, with all fields of ome-arrow; errors name ``where``."""
    metadata: dict[str, Any] = schema.normalize_metadata(None, 0, "")
    root = _parse_root(xml)
    image = next(islice(root.iterfind("{*}Image"), series, None), None)
    pixels = None if image is None else image.find("{*}Pixels")
    if image is None or pixels is None:
        return metadata
    metadata["name"] = image.get("Name")
    date = image.findtext("{*}AcquisitionDate")
    if date:
        metadata["acquisition_datetime"] = _naive_utc(date)
    for axis in "XYZ":
        size = pixels.get(f"PhysicalSize{axis}")
        if size is not None:
            metadata[f"physical_size_{axis.lower()}"] = float(size)
            metadata[f"physical_size_{axis.lower()}_unit"] = pixels.get(f"PhysicalSize{axis}Unit", "µm")
    metadata["channels"] = [
        _parse_channel(channel)
        for channel in pixels.findall("{*}Channel")
        for _ in range(int(channel.get("SamplesPerPixel", "1")))
    ]
    if all(set(channel.values()) == {None} for channel in metadata["channels"]):
        metadata["channels"] = []
    metadata |= _parse_annotation(root)
    return schema.normalize_metadata(metadata, len(metadata["channels"]), where)


def _parse_root(xml: str) -> ET.Element:
    """Return the root of OME-XML; a document type is refused, because entities could expand to a very long text."""
    if "<!DOCTYPE" in xml:
        raise ValueError("the OME-XML has a document type (DOCTYPE), which is not allowed")
    return ET.fromstring(xml)  # noqa: S314  # It has no entities, and expat resolves no external ones.


def is_ome_xml(description: str) -> bool:
    return _OME.search(description) is not None


def max_channels(xml: str) -> int:
    """Return an upper bound for the number of channels of an image, without parsing the XML."""
    return len(_CHANNEL.findall(xml))


def image_sizes(xml: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the shape (T, C, Z, Y, X) and the number of channel elements of each image; [] if malformed."""
    try:
        root = _parse_root(xml)
    except ET.ParseError:
        return []
    return [
        (tuple(int(pixels.get(f"Size{axis}", "1")) for axis in AXES), len(pixels.findall("{*}Channel")))
        for pixels in root.iterfind("{*}Image/{*}Pixels")
    ]


def _parse_channel(channel: ET.Element) -> dict[str, Any]:
    color = channel.get("Color")
    return {
        "name": channel.get("Name"),
        "emission_um": _wavelength_um(channel, "Emission"),
        "excitation_um": _wavelength_um(channel, "Excitation"),
        "illumination": channel.get("IlluminationType"),
        "color_rgba": None if color is None else int(color) % 2**32,
    }


def _wavelength_um(channel: ET.Element, kind: str) -> float | None:
    value = channel.get(f"{kind}Wavelength")
    factor = _PER_MICROMETRE.get(channel.get(f"{kind}WavelengthUnit", "nm"))
    return None if value is None or factor is None else float(value) * factor


def _parse_annotation(root: ET.Element) -> dict[str, Any]:
    for entry in root.iterfind("{*}StructuredAnnotations/{*}MapAnnotation/{*}Value/{*}M"):
        if entry.get("K") == ANNOTATION_KEY and entry.text:
            return revive(json.loads(entry.text))
    return {}


def revive(rest: dict[str, Any]) -> dict[str, Any]:
    """Return metadata fields that were read from JSON, with the acquisition date converted to a datetime."""
    if rest.get("acquisition_datetime"):
        rest["acquisition_datetime"] = _naive_utc(rest["acquisition_datetime"])
    return rest


def _naive_utc(text: str) -> datetime:
    date = datetime.fromisoformat(text)
    return date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)


def _own_files(root: ET.Element, own_name: str) -> Callable[[ET.Element], bool]:
    """Return a function that checks whether a UUID element refers to the file that contains the OME-XML."""
    # It compares the identifier, which survives renaming, unless files of several names share it. Then, or if no
    # element has the identifier, it compares the file name.
    own_id, name = root.get("UUID"), own_name.lower()
    names = {uuid.get("FileName", "").lower() for uuid in root.iterfind(_UUIDS) if uuid.text == own_id}
    if own_id is not None and len(names) == 1:
        return lambda uuid: uuid.text == own_id
    return lambda uuid: uuid.get("FileName", name).lower() == name


def own_description(description: str, own_name: str) -> str | None:
    """Return the OME-XML of the planes in this file; None if it has none, "" if the OME-XML names no other file."""
    # Raises `ValueError` or `xml.etree.ElementTree.ParseError` if the text is malformed or unsafe to parse.
    if "<!DOCTYPE" not in description and "FileName" not in description:
        return ""
    root = _parse_root(description)
    is_own = _own_files(root, own_name)
    if all(map(is_own, root.iterfind(_UUIDS))):
        return ""
    for image in root.findall("{*}Image"):
        own: list[ET.Element] = []
        for pixels in image.findall("{*}Pixels"):
            for data in pixels.findall("{*}TiffData"):
                uuids = data.findall("{*}UUID")
                if not all(map(is_own, uuids)):
                    pixels.remove(data)
                    continue
                own.append(data)
                for uuid in uuids:
                    data.remove(uuid)
            channels = pixels.findall("{*}Channel")
            if len(channels) == int(pixels.get("SizeC", "1")) and all(data.get("PlaneCount") == "1" for data in own):
                listed = {int(data.get("FirstC", "0")) for data in own}
                for channel in (channel for number, channel in enumerate(channels) if number not in listed):
                    pixels.remove(channel)
        if not own:
            root.remove(image)
    return None if root.find("{*}Image") is None else ET.tostring(root, encoding="unicode")
