"""OME metadata in OME-Zarr (NGFF) attributes: what is written for version 0.5, what is read of 0.4 and 0.5.

What the specification (https://ngff.openmicroscopy.org/0.5/) has a place for stands there; the rest stands under the
key ``omearrow_ds``, so that nothing is lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema
from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.storage.formats._ome_xml import revive
from omearrow_ds.text import count

REST_KEY = "omearrow_ds"
_TRANSFORMS = "coordinateTransformations"
_UNITS = {"µm": "micrometer", "nm": "nanometer", "mm": "millimeter", "cm": "centimeter", "m": "meter", "Å": "angstrom"}
_WORDS = {"time": "T", "channel": "C"}
_TYPES = {"T": "time", "C": "channel", "Z": "space", "Y": "space", "X": "space"}


def attributes(metadata: Mapping[str, Any], maximum: float) -> dict[str, Any]:
    """Return the attributes of an image group whose only level is the array ``"0"``.

    ``maximum`` is the largest value of the pixel dtype (1 for floating pixels), the end of the display window.
    """
    axes: list[dict[str, str]] = []
    scale = []
    for axis in AXES:
        entry = {"name": axis.lower(), "type": _TYPES[axis]}
        unit = _UNITS.get(metadata.get(f"physical_size_{axis.lower()}_unit") or "")
        size = metadata.get(f"physical_size_{axis.lower()}")
        known = unit is not None and size is not None and size > 0
        axes.append(entry | ({"unit": unit} if known and unit else {}))
        scale.append(float(size) if known and size else 1.0)
    transform = {"type": "scale", "scale": scale}
    multiscale: dict[str, Any] = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": [transform]}]}
    if metadata["name"] is not None:
        multiscale["name"] = metadata["name"]
    ome: dict[str, Any] = {"version": "0.5", "multiscales": [multiscale]}
    if metadata["channels"]:
        ome["omero"] = {"channels": [_omero(channel, maximum) for channel in metadata["channels"]]}
    stored = parse({"ome": ome}, "OME-Zarr")
    rest = {name: value for name, value in metadata.items() if stored[name] != value}
    found: dict[str, Any] = {"ome": ome}
    if rest:
        found[REST_KEY] = json.loads(json.dumps(rest, default=datetime.isoformat))
    return found


def _omero(channel: Mapping[str, Any], maximum: float) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "color": "FFFFFF",
        "active": True,
        "window": {"min": 0, "max": maximum, "start": 0, "end": maximum},
    }
    if channel["name"] is not None:
        entry["label"] = channel["name"]
    if channel["color_rgba"] is not None:
        entry["color"] = f"{channel['color_rgba'] >> 8:06X}"
    return entry


def multiscales_of(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first multiscale image of a group's attributes (0.5: under ``ome``, 0.4: at the top), if any."""
    multiscales = found.get("ome", found).get("multiscales")
    return multiscales[0] if multiscales else None


def level_path(multiscale: Mapping[str, Any], where: str, level: int = 0) -> str:
    """Return the path of a level of a multiscale image; refuse one whose first is not the finest by its own scale.

    Raises `ArgumentError` if there is no such level.
    """
    levels = multiscale["datasets"]
    first, *others = levels
    scale = _scale_of(first)
    for other in others:
        finer = _scale_of(other)
        if scale and finer and math.prod(finer) < math.prod(scale):
            raise FormatError(
                f"{where}: its multiscales list {first['path']!r} first, as the full resolution, but {other['path']!r} "
                f"is finer by its scale; list that first there, or mend the scales"
            )
    if level >= len(levels):
        raise ArgumentError(f"{where}: level={level}: it has {count(len(levels), 'level')}, the first of which is 0")
    return str(levels[level]["path"])


def _scale_of(transformed: Mapping[str, Any]) -> list[float] | None:
    """Return the scale of a level or of all levels; `with_scales` has replaced those that a ``path`` leads to."""
    transforms = transformed.get(_TRANSFORMS, [])
    return next((each["scale"] for each in transforms if each.get("type") == "scale"), None)


def with_scales(found: Mapping[str, Any], read: Callable[[str], bytes | Sequence[float]], where: str) -> dict[str, Any]:
    """Return attributes of a group whose first multiscale image has a list for each scale.

    ``read`` returns the numbers of the Zarr array at a ``path`` within the group, or the bytes of the file, which holds
    little-endian float64 or float32. Raises `FormatError` for a malformed scale, naming its key.
    """
    multiscale = multiscales_of(found)
    if multiscale is None:
        return dict(found)
    size = len(multiscale.get("axes", AXES))
    image = {**multiscale, "datasets": [dict(level) for level in multiscale["datasets"]]}
    levels = {f"multiscales[0].datasets[{number}]": level for number, level in enumerate(image["datasets"])}
    for key, transformed in {"multiscales[0]": image, **levels}.items():
        if _TRANSFORMS in transformed:
            place = f"{where}: {key}.{_TRANSFORMS}"
            transformed[_TRANSFORMS] = _with_scales(transformed[_TRANSFORMS], size, read, place)
    inner = {"multiscales": [image, *found.get("ome", found)["multiscales"][1:]]}
    return {**found, "ome": {**found["ome"], **inner}} if "ome" in found else {**found, **inner}


def _with_scales(
    transforms: Any, size: int, read: Callable[[str], bytes | Sequence[float]], where: str
) -> list[dict[str, Any]]:
    if not isinstance(transforms, list) or not all(isinstance(each, Mapping) for each in transforms):
        raise FormatError(f"{where} is {transforms!r:.80}, expected a list of objects; correct it")
    resolved = [dict(each) for each in transforms]
    for number, each in enumerate(resolved):
        if each.get("type") != "scale":
            continue
        if "scale" not in each:
            each["scale"] = _read_vector(each.get("path"), size, read, f"{where}[{number}]")
        numbers = each["scale"]
        sound = isinstance(numbers, list) and all(type(value) in (int, float) for value in numbers)
        if not sound or len(numbers) != size:
            raise FormatError(f"{where}[{number}].scale is {numbers!r:.80}, expected {size} numbers; correct it")
    return resolved


def _read_vector(path: Any, size: int, read: Callable[[str], bytes | Sequence[float]], where: str) -> list[float]:
    """Return the numbers that a path leads to."""
    inside = isinstance(path, str) and path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
    if not inside:
        has = "neither scale nor path" if path is None else f"the path {path!r:.80}, which leads out of the group"
        raise FormatError(f"{where} has {has}; write the scale as a list of {size} numbers")
    try:
        stored = read(path)
    except (FormatError, FileNotFoundError) as error:
        raise FormatError(f"{where}.path leads to {path!r}, which cannot be read: {error}; restore it") from error
    if not isinstance(stored, bytes):
        return list(stored)
    if len(stored) not in (4 * size, 8 * size):
        what = f"{len(stored):,} bytes, expected {size} numbers of float32 or float64"
        raise FormatError(f"{where}.path leads to {path!r} with {what}; correct it")
    values: list[float] = np.frombuffer(stored, f"<f{len(stored) // size}").tolist()
    return values


def plate_of(found: Mapping[str, Any], where: str) -> tuple[str | None, list[str]] | None:
    """Return a plate's name and the paths of its wells, of a group's attributes; None if it is no plate."""
    plate = found.get("ome", found).get("plate")
    return (plate.get("name"), _paths(plate["wells"], where)) if plate else None


def is_of_plate(found: Mapping[str, Any]) -> bool:
    """Whether a group is a plate or a well, by its attributes."""
    return not {"plate", "well"}.isdisjoint(found.get("ome", found))


def fields_of(found: Mapping[str, Any], where: str) -> list[str] | None:
    """Return the paths of the fields of view in a well, of its group's attributes; None where these do not tell."""
    well = found.get("ome", found).get("well")
    return None if well is None else _paths(well["images"], where)


def _paths(entries: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """Return the paths of entries, which must be distinct and inside the folder."""
    paths = [str(entry["path"]).strip("/") for entry in entries]
    for path in paths:
        if not path or ".." in PurePosixPath(path).parts:
            raise FormatError(f"{where}: lists {path!r}, which is not a folder in it; correct its attributes")
    if len(set(paths)) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise FormatError(f"{where}: lists {repeated!r} twice; correct its attributes")
    return paths


def well_name(path: str) -> str:
    """Return a well's name as CellProfiler has it: ``A01`` of the path ``A/1``."""
    *rows, column = path.split("/")
    return f"{''.join(rows)}{column.zfill(2) if column.isdecimal() else column}"


def site_numbers(wells: Sequence[str], paths: Sequence[str]) -> list[int] | None:
    """Return the site of each field of a plate, or None if paths are not whole numbers, distinct in each well.

    CellProfiler counts sites from 1. Writers of plates count paths from 0 or from 1, which the smallest one shows.
    """
    if not all(re.fullmatch("[0-9]{1,18}", path) for path in paths):
        return None
    numbers = [int(path) for path in paths]
    if len(set(zip(wells, numbers, strict=True))) < len(numbers):
        return None
    return [number + 1 for number in numbers] if 0 in numbers else numbers


def labels_of(found: Mapping[str, Any]) -> list[str]:
    """Return the names of the label images that the attributes of a ``labels`` group list."""
    return [str(name) for name in found.get("ome", found).get("labels", [])]


def axes_of(multiscale: Mapping[str, Any]) -> str:
    """Return the axes of a multiscale image in array order, in capitals; versions up to 0.3 name them as strings."""
    axes = multiscale.get("axes", list("tczyx"))
    return _letters(axis["name"] if isinstance(axis, Mapping) else axis for axis in axes)


def axes_named(dimensions: Sequence[str | None] | None) -> str | None:
    """Return the axes that the names of an array's dimensions tell, in capitals; None if no axis is among them."""
    letters = [_letters([name or "?"]) for name in dimensions or ()]
    return "".join(letters) if set(letters) & set(AXES) else None


def _letters(names: Iterable[str]) -> str:
    return "".join(_WORDS.get(name.lower(), name.upper()) for name in names)


def parse(found: Mapping[str, Any], where: str, level: int = 0) -> dict[str, Any]:
    """Return the OME metadata of a group's attributes, every field of ome-arrow's present; errors name ``where``.

    Sizes of pixels are those of ``level``.
    """
    metadata: dict[str, Any] = schema.normalise_metadata(None, 0, "")
    multiscale = multiscales_of(found)
    if multiscale is None:
        return metadata
    metadata["name"] = multiscale.get("name")
    scale = _scale_of(multiscale["datasets"][level])
    of_all = _scale_of(multiscale)
    if scale is not None and of_all is not None:  # The specification applies it after that of the level.
        scale = [one * other for one, other in zip(scale, of_all, strict=True)]
    symbols = {name: symbol for symbol, name in _UNITS.items()}
    for position, axis in enumerate(multiscale.get("axes", [])):
        unit = symbols.get(axis.get("unit", "")) if isinstance(axis, Mapping) else None
        if unit is not None and scale is not None and axis["name"] in {"z", "y", "x"}:
            metadata[f"physical_size_{axis['name']}"] = float(scale[position])
            metadata[f"physical_size_{axis['name']}_unit"] = unit
    omero = found.get("ome", found).get("omero", {})
    metadata["channels"] = [_parse_omero(channel) for channel in omero.get("channels", [])]
    metadata |= revive(dict(found.get(REST_KEY, {})))
    return schema.normalise_metadata(metadata, len(metadata["channels"]), where)


def _parse_omero(channel: Mapping[str, Any]) -> dict[str, Any]:
    color = channel.get("color")
    return {
        "id": None,
        "name": channel.get("label"),
        "emission_um": None,
        "excitation_um": None,
        "illumination": None,
        "color_rgba": None if color is None else int(color[:6], 16) << 8 | 0xFF,
    }
