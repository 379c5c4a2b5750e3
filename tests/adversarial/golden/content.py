"""Content of golden files, computed from coordinates and never read from a file.

Nothing here may change, because existing files hold the results of these formulas. New content gets a new name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]
Kind = tuple[tuple[int, ...], str]

# Values by dtype: (factor * (position + 1000 * image) % modulus + offset) / divisor, exact in each dtype.
_RULES = {
    "uint8": (1, 251, 0, 1),
    "int8": (1, 251, -125, 1),
    "uint16": (3, 65_521, 0, 1),
    "int16": (3, 65_521, -32_760, 1),
    "uint32": (65_599, 2**32 - 5, 0, 1),
    "int32": (65_599, 2**32 - 5, -(2**31), 1),
    "float32": (1, 2**20, -100, 8),
    "float64": (1, 2**20, -100, 1024),
}


def pixels_of(kind: Kind, image: int) -> Array:
    """Return the pixels of image ``image``, each of which encodes the image and its own position in C order."""
    shape, dtype = kind
    factor, modulus, offset, divisor = _RULES[dtype]
    positions = np.arange(math.prod(shape), dtype=np.int64) + 1000 * image
    values = (factor * positions) % modulus + offset
    return (values / divisor if divisor > 1 else values).astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Content:
    """Content of one golden collection.

    ``kinds`` are the written shapes and dtypes. ``moved`` converts other axes to (T, C, Z, Y, X). ``metadata`` lists
    per image the fields that must be read. ``numbers`` are the image numbers if they do not count from 0.
    """

    kinds: tuple[Kind, ...]
    ids: tuple[str, ...]
    columns: dict[str, tuple[pa.DataType, list[Any]]] = field(default_factory=dict)
    metadata: tuple[dict[str, Any], ...] = ()
    numbers: tuple[int, ...] | None = None
    moved: tuple[tuple[int, ...], tuple[int, ...]] | None = (
        None  # Axes of the transposition to (T, C, Z, Y, X), then the shape.
    )
    storage_info: str | None = None  # The dtype in the file, if a writer changes it.

    @property
    def written(self) -> list[Array]:
        """Arrays as passed to the writer."""
        return [pixels_of(kind, number) for kind, number in zip(self.kinds, self._numbers, strict=True)]

    @property
    def images(self) -> list[Array]:
        """Images (T, C, Z, Y, X) that readers must return."""
        images = [image.astype(self.storage_info or image.dtype) for image in self.written]
        if self.moved is None:
            return images
        order, shape = self.moved
        return [np.ascontiguousarray(image.transpose(order).reshape(shape)) for image in images]

    @property
    def table(self) -> pa.Table:
        return pa.table({name: pa.array(values, kind) for name, (kind, values) in self.columns.items()})

    @property
    def _numbers(self) -> tuple[int, ...]:
        return self.numbers if self.numbers is not None else tuple(range(len(self.kinds)))


def _ids(count: int) -> tuple[str, ...]:
    return tuple(f"id-{number}" for number in range(count))


METADATA = {
    "name": "nuclei <&\"'> µm 細胞",
    "image_type": "label",
    "acquisition_datetime": datetime(2024, 2, 29, 23, 59, 58, 123456),  # noqa: DTZ001  # OME-Arrow dates have no zone
    "physical_size_x": 0.5,
    "physical_size_y": 0.25,
    "physical_size_z": 1.5,
    "physical_size_x_unit": "µm",
    "physical_size_y_unit": "µm",
    "physical_size_z_unit": "nm",
    "channels": [
        {
            "id": f"ch-{number}",
            "name": name,
            "emission_um": emission,
            "excitation_um": 0.5,
            "illumination": "Epifluorescence",
            "color_rgba": 0x0000FFFF + number,
        }
        for number, (name, emission) in enumerate([("DNA & <ER>", 0.75), ("Mito", None)])
    ],
}
_UNSAID = dict.fromkeys(METADATA) | {"channels": []}


def _columns(count: int) -> dict[str, tuple[pa.DataType, list[Any]]]:
    numbers = range(count)
    return {
        "count": (pa.int64(), [None if number == 1 else 2**40 * number - 3 for number in numbers]),
        "area": (pa.float64(), [None if number == 2 else number / 8 - 0.5 for number in numbers]),
        "well": (pa.string(), [["A1", "µ 細胞 '\"; --", "", None][number % 4] for number in numbers]),
        "control": (pa.bool_(), [[True, False, None][number % 3] for number in numbers]),
        "when": (pa.timestamp("us"), [datetime(2024, 1, 1 + number, 3, 4, 5, 678901) for number in numbers]),  # noqa: DTZ001
        "features": (pa.list_(pa.float32()), [[number / 2] * number for number in numbers]),
    }


_SHAPES = [
    (1, 2, 1, 5, 7),
    (1, 1, 1, 4, 6),
    (2, 2, 3, 5, 4),
    (1, 1, 4, 1, 1),
    (3, 1, 1, 2, 9),
    (1, 3, 1, 8, 3),
    (1, 1, 1, 33, 17),
    (2, 1, 2, 3, 5),
]


def _ragged(dtypes: list[str]) -> Content:
    kinds = tuple(zip(_SHAPES, dtypes, strict=True))
    metadata = ({**_UNSAID, **METADATA}, _UNSAID, {**_UNSAID, "name": "only a name"}, *([_UNSAID] * 5))
    return Content(kinds, _ids(8), _columns(8), metadata)


RAGGED = {"bytes": _ragged(list(_RULES)), "list": _ragged(["uint16", "uint8"] * 4)}
UNIFORM = Content((((1, 2, 1, 24, 30), "uint16"),) * 5, _ids(5), _columns(5), (_UNSAID,) * 5)

_TWO_COLUMNS = {name: values for name, values in _columns(5).items() if name in ("count", "well")}
SMALL = Content(
    (((1, 2, 1, 8, 9), "uint16"),) * 5,
    _ids(5),
    _TWO_COLUMNS,
    ({**_UNSAID, **METADATA}, _UNSAID, {**_UNSAID, "name": "only a name"}, _UNSAID, _UNSAID),
)


@dataclass(frozen=True)
class CropContent(Content):
    """Crops within the images of another collection.

    ``windows`` has (image, top, left) per crop, ``size`` is (height, width).
    """

    windows: tuple[tuple[int, int, int], ...] = ()
    size: tuple[int, int] = (0, 0)

    @property
    def images(self) -> list[Array]:
        """Crops (T, C, Z, Y, X) that readers must return."""
        fields, (height, width) = super().images, self.size
        return [fields[image][..., top : top + height, left : left + width] for image, top, left in self.windows]


OBJECTS = pa.table(
    {"image_id": ["id-0", "id-0", "id-3"], "y": [3.0, 4.0, 5.0], "x": [4.0, 2.0, 6.0], "area": [1.5, None, 3.0]}
)
CROPS = CropContent(
    SMALL.kinds,
    ("id-0:0", "id-0:1", "id-3:2"),
    {
        "Metadata_image_id": (pa.string(), ["id-0", "id-0", "id-3"]),
        **{name: (pa.float64(), OBJECTS[name].to_pylist()) for name in ("y", "x", "area")},
        **{name: (kind, [values[0], values[0], values[3]]) for name, (kind, values) in _TWO_COLUMNS.items()},
        "source_bbox_y_min": (pa.int64(), [1, 2, 3]),
        "source_bbox_x_min": (pa.int64(), [2, 0, 4]),
        "source_bbox_y_max": (pa.int64(), [6, 7, 8]),
        "source_bbox_x_max": (pa.int64(), [7, 5, 9]),
    },
    (SMALL.metadata[0], SMALL.metadata[0], SMALL.metadata[3]),
    windows=((0, 1, 2), (0, 2, 0), (3, 3, 4)),
    size=(5, 5),
)
