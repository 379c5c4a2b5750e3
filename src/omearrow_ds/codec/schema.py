"""OME-Arrow struct types, their pixel dtypes, and OME metadata as Python dicts.

The two struct types equal ``ome_arrow.OME_ARROW_STRUCT`` and ``ome_arrow.OME_ARROW_BYTE_STRUCT`` of ome-arrow 0.1.0,
which a test checks. They are repeated here because importing ``ome_arrow`` takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import DecodeError, MetadataError

COLUMN = "ome_image"
SIDECAR_COLUMN = "omearrow_ds"
CHECKSUM_COLUMN = "omearrow_ds_checksum"
STRUCT_TAG = "ome.arrow"
STRUCT_VERSION = "0.1.0"
DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "uint32", "int8", "int16", "int32", "float32", "float64"))
LIST_DTYPES = DTYPES[:2]
# Stored dtypes of label images, and the dtypes that they are read as.
LABEL_DTYPES = {
    np.dtype(stored): np.dtype(read) for stored, read in (("bool", "uint8"), ("int64", "int32"), ("uint64", "int32"))
}
CHUNK_DTYPES = (*DTYPES, *(np.dtype(name) for name in ("int64", "uint64", "float16", "bool")))  # Cast to image dtype.
ENCODINGS = ("bytes", "list")
_DTYPE_NAME = re.compile(r"[<>=|]?(?!a)[a-zA-Z_]+[0-9]*", re.ASCII)

_TEXT, _INT, _FLOAT = pa.string(), pa.int32(), pa.float32()
_INDICES = {axis: pa.int16() if axis == "c" else _INT for axis in "tczyx"}
_LIST_PIXELS = pa.list_(pa.uint16())
_CHANNEL = pa.struct(
    {
        **dict.fromkeys(("id", "name"), _TEXT),
        **dict.fromkeys(("emission_um", "excitation_um"), _FLOAT),
        "illumination": _TEXT,
        "color_rgba": pa.uint32(),
    }
)
PIXELS_META = pa.struct(
    {
        **dict.fromkeys(("dimension_order", "type"), _TEXT),
        **{f"size_{axis}": _INDICES[axis] for axis in "xyzct"},
        **{f"physical_size_{axis}": _FLOAT for axis in "xyz"},
        **{f"physical_size_{axis}_unit": _TEXT for axis in "xyz"},
        "channels": pa.list_(_CHANNEL),
    }
)
CHUNK_GRID = pa.struct(
    {"order": _TEXT, **{f"chunk_{axis}": kind for axis, kind in _INDICES.items()}, "chunk_order": _TEXT}
)
CHUNK_PLACE = _INDICES | {f"shape_{axis}": _INT for axis in "zyx"}
CHUNKS = {
    "bytes": pa.list_(
        pa.struct({**CHUNK_PLACE, "dtype": _TEXT, "compression": _TEXT, "pixel_bytes": pa.large_binary()})
    ),
    "list": pa.list_(pa.struct({**CHUNK_PLACE, "pixels": _LIST_PIXELS})),
}
PLANES = pa.list_(pa.struct({**{axis: _INDICES[axis] for axis in "ztc"}, "pixels": _LIST_PIXELS}))


def image_struct(encoding: str) -> pa.StructType:
    """Return the OME-Arrow struct type of ``encoding`` (``"bytes"`` or ``"list"``)."""
    return pa.struct(
        {
            **dict.fromkeys(("type", "version", "id", "name", "image_type"), _TEXT),
            "acquisition_datetime": pa.timestamp("us"),
            "pixels_meta": PIXELS_META,
            "chunk_grid": CHUNK_GRID,
            "chunks": CHUNKS[encoding],
            "planes": PLANES,
            "masks": pa.null(),
        }
    )


_IMAGE_FIELDS = {"name": _TEXT, "image_type": _TEXT, "acquisition_datetime": pa.timestamp("us")}
METADATA = pa.struct(
    _IMAGE_FIELDS | {field.name: field.type for field in PIXELS_META if field.name.startswith(("physical", "channels"))}
)
METADATA_FIELDS = tuple(METADATA.names)
_NO_CHANNEL: dict[str, Any] = dict.fromkeys(_CHANNEL.names)


def normalize_metadata(metadata: Mapping[str, Any] | None, size_c: int, subject: str) -> dict[str, Any]:
    """Return ``metadata`` with all fields of OME-Arrow, converted to the values that OME-Arrow would store.

    Physical sizes are float32 in the unit of their own field, wavelengths float32 in µm, colors ``0xRRGGBBAA``.
    """
    if not metadata:
        return dict.fromkeys(METADATA_FIELDS) | {"channels": []}
    if not isinstance(metadata, Mapping):
        raise MetadataError(f"{subject}: metadata is a {type(metadata).__name__}, expected a dict; pass one per image")
    channels = metadata.get("channels") or []
    if isinstance(channels, str | Mapping) or not all(isinstance(channel, Mapping) for channel in channels):
        problem = f"metadata has channels={channels!r}, expected a list of dicts"
        raise MetadataError(f"{subject}: {problem}; pass one dict per channel")
    channels = [*map(dict, channels)]
    values = {**metadata, "channels": channels}
    _refuse_unknown(values, METADATA_FIELDS, f"{subject}: metadata")
    for channel in channels:
        _refuse_unknown(channel, _CHANNEL.names, f"{subject}: metadata of a channel")
    if len(channels) not in (0, size_c):
        problem = f"{subject}: metadata has {len(channels)} channels but the image has {size_c}"
        raise MetadataError(f"{problem}; pass one dict per channel")
    try:
        stored: dict[str, Any] = pa.scalar(values, type=METADATA).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise MetadataError(
            f"{subject}: metadata {values!r} cannot be converted to the types of ome-arrow: {error}; correct its values"
        ) from error
    return stored


def _refuse_unknown(values: Mapping[str, Any], allowed: Any, name: str) -> None:
    unknown = sorted(set(map(str, values)) - set(allowed))
    if unknown:
        raise MetadataError(f"{name} has unknown fields {unknown}; pass only {list(allowed)}")


def metadata_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an OME-Arrow record, where ``record`` is its struct without pixels as a dict."""
    pixels_meta = record.get("pixels_meta") or {}
    both = {**pixels_meta, **record}
    channels = [channel_of(channel or {}) for channel in pixels_meta.get("channels") or []]
    return {name: both.get(name) for name in METADATA_FIELDS} | {"channels": channels}


def channel_of(channel: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a channel with all fields of ome-arrow, where None replaces missing values."""
    return _NO_CHANNEL | {name: value for name, value in channel.items() if name in _NO_CHANNEL}


def pixel_dtype(name: str, subject: str, allowed: Sequence[np.dtype[Any]] = (*DTYPES, *LABEL_DTYPES)) -> np.dtype[Any]:
    """Return the NumPy dtype with a name in OME-Arrow, or raise `DecodeError` if the name is unknown."""
    try:  # NumPy would interpret other names as structures, or warn.
        dtype = np.dtype(name) if _DTYPE_NAME.fullmatch(name) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.newbyteorder("=") not in allowed:
        names = ", ".join(known.name for known in allowed)
        raise DecodeError(f"{subject}: dtype {name!r} is not supported, expected one of {names}; convert the pixels")
    return dtype
