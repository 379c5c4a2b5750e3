"""OME metadata in OME-Zarr (NGFF) attributes: what is written for version 0.5, what is read of 0.4 and 0.5.

What the specification (https://ngff.openmicroscopy.org/0.5/) has a place for stands there; the rest stands under the
key ``omearrow_ds``, so that nothing is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._ome_xml import revive

REST_KEY = "omearrow_ds"
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


def first_level(multiscale: Mapping[str, Any], where: str) -> str:
    """Return the path of a multiscale image's first level; refuse one that is not the finest by its own scale."""
    first, *others = multiscale["datasets"]
    scale = _scale_of(first)
    for other in others:
        finer = _scale_of(other)
        if scale and finer and math.prod(finer) < math.prod(scale):
            raise FormatError(
                f"{where}: its multiscales list {first['path']!r} first, as the full resolution, but {other['path']!r} "
                f"is finer by its scale; list that first there, or mend the scales"
            )
    return str(first["path"])


def _scale_of(level: Mapping[str, Any]) -> list[float] | None:
    transforms = level.get("coordinateTransformations", [])
    return next((each["scale"] for each in transforms if each.get("type") == "scale"), None)


def wells_of(found: Mapping[str, Any]) -> list[str]:
    """Return the paths of a plate's wells, of a group's attributes; [] if it is no plate."""
    plate = found.get("ome", found).get("plate")
    return [str(well["path"]) for well in plate["wells"]] if plate else []


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


def parse(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the OME metadata of a group's attributes, every field of ome-arrow's present; errors name ``where``."""
    metadata: dict[str, Any] = schema.normalise_metadata(None, 0, "")
    multiscale = multiscales_of(found)
    if multiscale is None:
        return metadata
    metadata["name"] = multiscale.get("name")
    scale = _scale_of(multiscale["datasets"][0])
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
