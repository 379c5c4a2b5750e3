"""Objects of fields, cells or nuclei: rows of a table, each with a position in an image."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.keys import (
    Given,
    Keys,
    first_equal,
    places,
    read_given,
    refuse_contradiction,
    some_keys,
    table_file,
)
from omearrow_ds.storage.plate_sites import choose_pairs
from omearrow_ds.storage.protocol import On, OpenOptions
from omearrow_ds.storage.table_files import ColumnTypes
from omearrow_ds.storage.text_columns import parse_as
from omearrow_ds.text import count

# The first names of each kind that a table has are used. CellProfiler's per-object tables omit the object's name, and
# CytoTable may prefix ``Metadata_``; ``centroid-0`` is scikit-image's `regionprops_table`.
_OF = (*(f"{before}{of}_" for of in ("Nuclei", "Cells", "Cytoplasm") for before in ("", "Metadata_")), "")
_CENTERS = (
    *((f"{of}Location_Center_Y", f"{of}Location_Center_X") for of in _OF),
    ("centroid_y", "centroid_x"),
    ("centroid-0", "centroid-1"),
)
_BOXES = (
    *(tuple(f"{of}AreaShape_BoundingBox{end}_{axis}" for axis in "YX" for end in ("Minimum", "Maximum")) for of in _OF),
    ("bbox-0", "bbox-2", "bbox-1", "bbox-3"),
)
_SHAPES = b"ome.arrow.shapes"  # Metadata key of ome-arrow's shape tables.
_EXACT = 2**53  # Integers below it are exact in float64.
_LABELS = (
    "label_value",
    *(f"{before}{of}_Number_Object_Number" for of in ("Nuclei", "Cells", "Cytoplasm") for before in ("", "Metadata_")),
    "Metadata_ObjectNumber",
    "ObjectNumber",
    "label",
)


@dataclass(frozen=True)
class Objects:
    """Objects, such as cells, in the images of a source."""

    table: pa.Table  # One row per object, without objects that have no image or no position.
    rows: Array  # (n,) int64, the row of each in the given table
    fields: Array  # (n,) int64, the index of each object's image
    # (n, 2) float64, (Y, X) in pixels from the center of the first one; None with boxes
    centers: Array | None
    boxes: Array | None  # (n, 4) int64, (y0, y1, x0, x1) half-open; None with centers
    where: str  # Name of the table in messages.

    def keep(self, kept: Array) -> Objects:
        """Return the objects that indices or a boolean mask select."""
        numbers = np.flatnonzero(kept) if kept.dtype == np.bool_ else kept
        if len(numbers) == len(self.rows) and (numbers == np.arange(len(numbers))).all():
            return self
        centers = None if self.centers is None else self.centers[numbers]
        boxes = None if self.boxes is None else self.boxes[numbers]
        table = self.table.take(pa.array(numbers))
        return Objects(table, self.rows[numbers], self.fields[numbers], centers, boxes, self.where)

    def labels(self) -> tuple[str, Array] | None:
        """Return name and values of the column with the labels of the objects; None without such a column."""
        name = next((name for name in _LABELS if name in self.table.column_names), None)
        if name is None or not _is_number(self.table[name].type):
            return None
        values = self.table[name].cast(pa.float64(), safe=False).to_numpy()
        return name, values


def open_objects(
    source: BaseSource,
    objects: Any,
    center: Sequence[str] | None = None,
    box: Sequence[str] | bool | None = None,
    on: On | None = None,
    *,
    types: ColumnTypes,
    skip_nulls: bool = False,
) -> Objects:
    """Return the objects of a table whose images are in a source.

    Raises `ArgumentError` if an option is invalid; `ColumnError` if a column does not exist, or none has a known name;
    `MetadataError` if no object has an image, image keys are duplicate, or a position is null or outside its image.

    Parameters
    ----------
    source
        The images, fields of view.
    objects
        A `pyarrow.Table`, a frame, or the path of a CSV or Parquet file.
    center, box
        Names of the columns (Y, X) of a center, or (y0, y1, x0, x1) of a box. ``box=True`` finds columns with known
        names. The default is a center with known names.
    on
        Columns that join images and objects; see `omearrow_ds.open_images`.
    types
        Types of columns in text tables.
    skip_nulls
        Whether objects without a position are left out instead of raising an error.
    """
    if center is not None and box:
        raise ArgumentError(
            f"box={box!r} gives positions too", option="center", value=center, remedy="leave one of them out"
        )
    given = read_given(objects, "objects", types)
    types.refuse_unknown()
    keys = Keys(source, given, choose_pairs(source, given, on))
    fields = places(keys.images, keys.rows)
    _refuse_unplaced(source, given, keys, fields)
    if on is None:
        rows = np.flatnonzero(fields >= 0)
        refuse_contradiction(source, given, fields[rows], rows)
    boxed = box is not None and box is not False
    names, placed = _boxes(given, box) if boxed else _centers(given, center)
    for name, numbers in zip(names, placed.T, strict=False):  # One list column has several numbers per row.
        plain = _plain(given, name)
        if pa.types.is_string(given.table[plain].type):
            index = given.table.column_names.index(plain)
            given = given._replace(table=given.table.set_column(index, plain, pa.array(numbers, from_pandas=True)))
    there = np.isfinite(placed).all(axis=1)
    missing = np.flatnonzero((fields >= 0) & ~there)
    if len(missing) and not skip_nulls:
        raise MetadataError(
            f"{given.where}: {', '.join(map(repr, names))} have no value for {count(len(missing), 'object')}, the "
            f"first in row {missing[0]}; pass nulls='skip' to leave them out"
        )
    rows = np.flatnonzero((fields >= 0) & there)
    placed, fields = placed[rows], fields[rows]
    _refuse_outside(source, given, names, placed, fields, rows, boxed=boxed)
    whole = len(rows) == given.table.num_rows
    table = given.table if whole else given.table.take(pa.array(rows))
    if not boxed:
        return Objects(table, rows, fields, placed, None, given.where)
    boxes = np.where([True, False, True, False], np.floor(placed), np.ceil(placed)).astype(np.int64)
    return Objects(table, rows, fields, None, boxes, given.where)


def _refuse_unplaced(source: BaseSource, given: Given, keys: Keys, fields: Array) -> None:
    """Warn of objects without an image; raise `MetadataError` if no object has one, or image keys are duplicate."""
    equal = first_equal(keys.images)
    if equal is not None and np.isin(keys.images[equal[0]], keys.rows):
        raise MetadataError(
            f"{given.where}: images {equal[0]} and {equal[1]} of {source.path} have the same {keys.names}, "
            f"{keys.told(equal[0], row=False)}, so an object may be in either; pass on= with columns that tell them "
            f"apart"
        )
    without = np.flatnonzero(fields < 0)
    if not len(without):
        return
    shown = some_keys(keys, without, row=True)
    if len(without) == len(fields):
        images = some_keys(keys, np.arange(len(source)), row=False) if len(source) else "none"
        raise MetadataError(
            f"{given.where}: no object is in an image of {source.path}, by {keys.names}: objects have {shown}, images "
            f"{images}; pass on= with columns whose values agree"
        )
    said = f"{len(without):,} of {len(fields):,} objects have no image, and are left out: {shown}"
    warnings.warn(f"{given.where}, joined by {keys.names}: {said}", UserWarning, stacklevel=2)


def _centers(given: Given, center: Any) -> tuple[tuple[str, ...], Array]:
    if center is not None:
        names = _names(center, 2, "center", "(Y, X)")
        return names, _numbers(given, names)
    names = next((pair for pair in _CENTERS if set(pair) <= set(given.table.column_names)), ())
    if names:
        return names, _numbers(given, names)
    if _is_list(given.table, "centroid"):
        y, x = _axes_of(given)
        points = _points(given.table["centroid"])
        return ("centroid",), points[:, [y, x]]
    raise ColumnError(
        f"{given.where}: no columns of a known name say where objects are, as Nuclei_Location_Center_Y and _X do; pass "
        f"center= with two names, (Y, X), or box= with four; there are {given.table.column_names[:40]}"
    )


def _boxes(given: Given, box: Any) -> tuple[tuple[str, ...], Array]:
    if box is not True:
        names = _names(box, 4, "box", "(y0, y1, x0, x1)")
        return names, _numbers(given, names)
    names = next((four for four in _BOXES if set(four) <= set(given.table.column_names)), ())
    if names:
        return names, _numbers(given, names)
    if "bbox" in given.table.column_names and pa.types.is_struct(given.table["bbox"].type):
        y, x = _axes_of(given)
        low, high = (_points(pc.struct_field(given.table["bbox"], end)) for end in ("min", "max"))
        return ("bbox",), np.stack([low[:, y], high[:, y], low[:, x], high[:, x]], axis=1)
    raise ColumnError(
        f"{given.where}: no columns of a known name are boxes, as Nuclei_AreaShape_BoundingBoxMinimum_Y and so on are; "
        f"pass box= with four names, (y0, y1, x0, x1); there are {given.table.column_names[:40]}"
    )


def _names(given: Any, number: int, option: str, what: str) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(names) != number or not all(isinstance(name, str) for name in names) or len(set(names)) < number:
        raise ArgumentError(option=option, value=given, allowed=f"the names of {number} columns, {what}")
    return names


def _numbers(given: Given, names: Sequence[str]) -> Array:
    """Return columns as (n, len(names)) float64, NaN where they are null."""
    found = []
    for name in names:
        column = given.table[_plain(given, name)]
        if given.is_text and pa.types.is_string(column.type):
            column = parse_as("float", column, given.where, name)
        if not _is_number(column.type):
            raise ColumnError(
                f"{given.where}: column {name!r} holds {column.type}; a place is numbers, in pixels", column=name
            )
        found.append(column.cast(pa.float64()).to_numpy())
    return np.stack(found, axis=1)


def _plain(given: Given, name: str) -> str:
    """Return the current name of a column that may have been renamed."""
    plain = name if name in given.table.column_names else given.renamed.get(name, name)
    if plain not in given.table.column_names:
        names = given.table.column_names[:40]
        raise ColumnError(f"{given.where}: there is no column {name!r}; choose among {names}", column=name)
    return plain


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(table: pa.Table, name: str) -> bool:
    return name in table.column_names and bool(pa.types.is_list(table[name].type))


def _points(column: pa.ChunkedArray) -> Array:
    """Return a column of lists as (n, d) float64, with NaN for nulls; all NaN if list lengths differ."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(lengths.max(initial=0))
    points = np.full((len(column), max(size, 2)), np.nan)
    if ((lengths != 0) & (lengths != size)).any():
        return points
    points[lengths > 0] = pc.list_flatten(column).cast(pa.float64()).to_numpy().reshape(-1, size)
    return points


def _axes_of(given: Given) -> tuple[int, int]:
    """Return the indices of Y and X in the points of an ome-arrow shape table."""
    told: Mapping[str, Any] = json.loads(given.metadata.get(_SHAPES, b"{}"))
    axes = [str(axis).lower() for axis in told.get("axes", ())]
    if not axes:
        column = (
            given.table["centroid"]
            if _is_list(given.table, "centroid")
            else pc.struct_field(given.table["bbox"], "min")
        )
        axes = list("zyx")[-_points(column).shape[1] :]
    if not {"y", "x"} <= set(axes):
        raise MetadataError(f"{given.where}: its points have the axes {axes}, without y and x; pass center=")
    y, x = axes.index("y"), axes.index("x")
    units = told.get("units", ["pixel"] * len(axes))
    if {units[y], units[x]} != {"pixel"}:
        raise MetadataError(f"{given.where}: its points are in {units[y]}, not in pixels; pass center= in pixels")
    return y, x


def _refuse_outside(
    source: BaseSource, given: Given, names: Sequence[str], placed: Array, fields: Array, rows: Array, *, boxed: bool
) -> None:
    """Raise `MetadataError` for objects outside their image, as columns may be swapped or have another unit."""
    sizes = source.shapes[fields][:, 3:]
    if boxed:
        y0, y1, x0, x1 = placed.T
        wrong = (y0 < 0) | (x0 < 0) | (y1 > sizes[:, 0]) | (x1 > sizes[:, 1]) | (y0 >= y1) | (x0 >= x1)
    else:
        wrong = ((placed < -0.5) | (placed > sizes - 0.5)).any(axis=1)
    if not wrong.any():
        return
    first = int(wrong.argmax())
    height, width = sizes[first].tolist()
    what = "box (y0, y1, x0, x1)" if boxed else "centre (Y, X)"
    at = ", ".join(f"{value:g}" for value in placed[first])
    raise MetadataError(
        f"{given.where}: {count(int(wrong.sum()), 'object')} of {len(rows):,} lie outside their image, the first in "
        f"row {rows[first]}: its {what} by {', '.join(map(repr, names))} is ({at}), image "
        f"{source.image_ids[int(fields[first])]!r} has {height} x {width} pixels; are they in this order, in pixels of "
        f"this image?"
    )


def types_with_objects(opening: OpenOptions, objects: Any) -> ColumnTypes:
    """Return the column types in ``opening``, after adding the column names of the table of objects."""
    types = ColumnTypes.of(opening.get("column_types"))
    file = table_file(objects, "objects") if types else None
    if file is not None:
        types.of_table(file)
        opening["column_types"] = types
    return types


def on_of_objects(opening: OpenOptions) -> On | None:
    """Remove ``on`` from ``opening`` and return it; if ``on`` applies to ``columns``, keep it and return None."""
    return opening.pop("on", None) if opening.get("columns") is None else None


def object_ids(objects: Objects, image_ids: Sequence[str]) -> list[str]:
    """Return one id per object: the id of its image and its label or, if labels are not distinct, its row number."""
    labels = objects.labels()
    numbers = objects.rows
    if labels is not None and np.isfinite(labels[1]).all():
        known = labels[1].astype(np.int64)
        pairs = objects.fields * (known.max(initial=0) + 1) + known
        exact = (known == labels[1]).all() and known.min(initial=0) >= 0 and known.max(initial=0) < _EXACT
        if exact and len(np.unique(pairs)) == len(known):
            numbers = known
    both = zip(objects.fields.tolist(), numbers.tolist(), strict=True)
    return [f"{image_ids[field]}:{number}" for field, number in both]
