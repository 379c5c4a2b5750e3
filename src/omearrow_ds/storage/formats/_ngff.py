"""OME metadata in OME-Zarr (NGFF) attributes: written as version 0.5, read from 0.4 and 0.5.

Metadata without a key in the specification (https://ngff.openmicroscopy.org/0.5/) is stored under the key
``omearrow_ds``, so that nothing is lost.
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
Read = Callable[[str], bytes | list[float]]
_UNITS = {"µm": "micrometer", "nm": "nanometer", "mm": "millimeter", "cm": "centimeter", "m": "meter", "Å": "angstrom"}
_WORDS = {"time": "T", "channel": "C"}
_TYPES = {"T": "time", "C": "channel", "Z": "space", "Y": "space", "X": "space"}


def attributes(metadata: Mapping[str, Any], maximum: float) -> dict[str, Any]:
    """Return the OME-Zarr attributes of an image group whose only resolution level is the array ``"0"``."""
    # ``maximum`` is the largest value of the pixel dtype (1 for floating pixels), the end of the display window.
    axes: list[dict[str, str]] = []
    scale = []
    for name in AXES.lower():
        unit = _UNITS.get(metadata.get(f"physical_size_{name}_unit") or "")
        size = metadata.get(f"physical_size_{name}") or 0
        is_known = unit is not None and size > 0
        axes.append({"name": name, "type": _TYPES[name.upper()], **({"unit": unit} if unit and is_known else {})})
        scale.append(float(size) if is_known else 1.0)
    level = {"path": "0", _TRANSFORMS: [{"type": "scale", "scale": scale}]}
    multiscale: dict[str, Any] = {"axes": axes, "datasets": [level]}
    if metadata["name"] is not None:
        multiscale["name"] = metadata["name"]
    ome: dict[str, Any] = {"version": "0.5", "multiscales": [multiscale]}
    if metadata["channels"]:
        channels, window = [], {"min": 0, "max": maximum, "start": 0, "end": maximum}
        for channel in metadata["channels"]:
            color = "FFFFFF" if channel["color_rgba"] is None else f"{channel['color_rgba'] >> 8:06X}"
            label = {} if channel["name"] is None else {"label": channel["name"]}
            channels.append({"color": color, "active": True, "window": window, **label})
        ome["omero"] = {"channels": channels}
    stored = parse({"ome": ome}, "OME-Zarr")
    rest = {name: value for name, value in metadata.items() if stored[name] != value}
    return {"ome": ome} | ({REST_KEY: json.loads(json.dumps(rest, default=datetime.isoformat))} if rest else {})


def multiscales_of(group_attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first multiscale image in a group's attributes of NGFF 0.4 or 0.5, or None."""
    multiscales = group_attributes.get("ome", group_attributes).get("multiscales")
    return multiscales[0] if multiscales else None


def level_path(multiscale: Mapping[str, Any], subject: str, level: int, read: Read | None = None) -> str:
    """Return the path of a level of a multiscale image; raise an error if the first level is not the finest."""
    # See `parse` for ``read``. Raises `ArgumentError` if the level does not exist.
    levels = multiscale["datasets"]
    scales = [_scale_of(multiscale, subject, number, read) for number in range(len(levels))] if levels[1:] else []
    for other, finer in zip(levels, scales, strict=False):
        if scales[0] and finer and math.prod(finer) < math.prod(scales[0]):
            problem = f"{subject}: level {levels[0]['path']!r} is first in multiscales, but {other['path']!r} is finer"
            raise FormatError(f"{problem}; list levels from fine to coarse, or correct the scales")
    if level >= len(levels):
        problem, remedy = f"the image has {count(len(levels), 'level')}", f"pass a level from 0 to {len(levels) - 1}"
        raise ArgumentError(problem, path=subject, option="level", value=level, remedy=remedy)
    return str(levels[level]["path"])


def _scale_of(multiscale: Mapping[str, Any], group: str, level: int | None, read: Read | None) -> list[float] | None:
    """Return the scale of a level, or of all levels for ``level=None``; None without a scale."""
    # Raises `FormatError` with the key of a malformed scale. ``group`` is the path of the image in errors.
    num_axes, in_levels = len(multiscale.get("axes", AXES)), "" if level is None else f".datasets[{level}]"
    transforms = (multiscale if level is None else multiscale["datasets"][level]).get(_TRANSFORMS, [])
    subject = f"{group}: multiscales[0]{in_levels}.{_TRANSFORMS}"
    if not isinstance(transforms, list) or not all(isinstance(transform, Mapping) for transform in transforms):
        raise FormatError(f"{subject} is {transforms!r:.80}, expected a list of objects; correct it")
    number = next((number for number, transform in enumerate(transforms) if transform.get("type") == "scale"), None)
    if number is None:
        return None
    scale, path = (transforms[number].get(key) for key in ("scale", "path"))
    key = f"{subject}[{number}].{'scale' if path is None or scale is not None else 'path'}"
    if scale is None and read is not None and isinstance(path, str) and not {"..", "/"} & {*PurePosixPath(path).parts}:
        try:
            scale = read(path)
        except (FormatError, FileNotFoundError) as error:
            raise FormatError(f"{key} is {path!r}, which cannot be read: {error}; restore it") from error
        if isinstance(scale, bytes) and len(scale) in (4 * num_axes, 8 * num_axes):
            scale = np.frombuffer(scale, f"<f{len(scale) // num_axes}").tolist()
    if not isinstance(scale, list) or [type(factor) in (int, float) for factor in scale] != [True] * num_axes:
        expected = f"{num_axes} numbers, one per axis, or the path of such an array or file in the group"
        raise FormatError(f"{key} is {scale if key.endswith('scale') else path!r:.80}, expected {expected}; correct it")
    return scale


def plate_of(attributes: Mapping[str, Any], subject: str) -> tuple[str | None, list[str]] | None:
    """Return a plate's name and the paths of its wells from a group's attributes; None if it is not a plate."""
    plate = attributes.get("ome", attributes).get("plate")
    return (plate.get("name"), _paths(plate["wells"], subject)) if plate else None


def fields_of(attributes: Mapping[str, Any], subject: str) -> list[str] | None:
    """Return the paths of the fields of view from a well's attributes; None if they do not describe a well."""
    well = attributes.get("ome", attributes).get("well")
    return None if well is None else _paths(well["images"], subject)


def _paths(entries: Iterable[Mapping[str, Any]], subject: str) -> list[str]:
    """Return the paths of entries, which must be distinct and inside the folder."""
    paths = [str(entry["path"]).strip("/") for entry in entries]
    for path in paths:
        if not path or ".." in PurePosixPath(path).parts:
            raise FormatError(f"{subject}: lists {path!r}, which is not one of its folders; correct its attributes")
    if len(set(paths)) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise FormatError(f"{subject}: lists {repeated!r} twice; correct its attributes")
    return paths


def plate_columns(plate: str, listed: Iterable[str], files: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns plate, well, site (if fields are numbered) and field of the fields of a plate."""
    # Wells are named as in CellProfiler: ``A01`` for the path ``A/1``. Paths of fields may contain slashes.
    known, wells, paths, names = frozenset(listed), [], [], []
    for file in files:
        well = file
        while well not in known:
            well = well.rpartition("/")[0]
        *rows, column = well.split("/")
        wells.append(well)
        paths.append(file[len(well) + 1 :])
        names.append(f"{''.join(rows)}{column.zfill(2) if column.isdecimal() else column}")
    sites = _site_numbers(wells, paths)
    numbered = {} if sites is None else {"Metadata_Site": sites}
    return {"Metadata_Plate": [plate] * len(wells), "Metadata_Well": names, **numbered, "Metadata_Field": paths}


def _site_numbers(wells: Sequence[str], paths: Sequence[str]) -> list[int] | None:
    """Return the site of each field of a plate; None unless paths in each well are distinct whole numbers."""
    # CellProfiler counts sites from 1. Writers of plates count paths from 0 or from 1, which the smallest one shows.
    if not all(re.fullmatch("[0-9]{1,18}", path) for path in paths):
        return None
    numbers = [int(path) for path in paths]
    if len(set(zip(wells, numbers, strict=True))) < len(numbers):
        return None
    return [number + 1 for number in numbers] if 0 in numbers else numbers


def axes_of(multiscale: Mapping[str, Any]) -> str:
    """Return the axes of a multiscale image in array order, as capital letters."""
    axes = multiscale.get("axes", list("tczyx"))
    return _letters(axis["name"] if isinstance(axis, Mapping) else axis for axis in axes)


def axes_named(dimensions: Sequence[str | None] | None) -> str | None:
    """Return the dimension names of an array as capital letters; None if no dimension is named after an axis."""
    letters = [_letters([name or "?"]) for name in dimensions or ()]
    return "".join(letters) if set(letters) & set(AXES) else None


def _letters(names: Iterable[str]) -> str:
    return "".join(_WORDS.get(name.lower(), name.upper()) for name in names)


def parse(
    group_attributes: Mapping[str, Any], subject: str, level: int = 0, read: Read | None = None
) -> dict[str, Any]:
    """Return the OME metadata of a group's attributes, with every field of ome-arrow; errors name ``subject``."""
    # Sizes of pixels are those of ``level``. ``read`` returns the numbers of the Zarr array at a path in the group or
    # the bytes of a file there, which holds little-endian float64 or float32.
    metadata: dict[str, Any] = schema.normalize_metadata(None, 0, "")
    multiscale = multiscales_of(group_attributes)
    if multiscale is None:
        return metadata
    metadata["name"] = multiscale.get("name")
    scale, of_all = (_scale_of(multiscale, subject, which, read) for which in (level, None))
    if scale is not None and of_all is not None:  # The specification applies it after that of the level.
        scale = [one * other for one, other in zip(scale, of_all, strict=True)]
    symbols = {name: symbol for symbol, name in _UNITS.items()}
    for position, axis in enumerate(multiscale.get("axes", [])):
        unit = symbols.get(axis.get("unit", "")) if isinstance(axis, Mapping) else None
        if unit is not None and scale is not None and axis["name"] in {"z", "y", "x"}:
            metadata[f"physical_size_{axis['name']}"] = float(scale[position])
            metadata[f"physical_size_{axis['name']}_unit"] = unit
    metadata["channels"] = []
    for channel in group_attributes.get("ome", group_attributes).get("omero", {}).get("channels", []):
        color = channel.get("color")
        rgba = None if color is None else int(color[:6], 16) << 8 | 0xFF
        metadata["channels"].append({"name": channel.get("label"), "color_rgba": rgba})
    metadata |= revive(dict(group_attributes.get(REST_KEY, {})))
    return schema.normalize_metadata(metadata, len(metadata["channels"]), subject)
