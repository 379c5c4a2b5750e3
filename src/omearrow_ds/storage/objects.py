"""Objects of fields, cells or nuclei: rows of a table, each with a position in an image."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError
from omearrow_ds.options import check_names
from omearrow_ds.storage.compositions import select_rows
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import ColumnReader, unknown_column
from omearrow_ds.storage.keys import (
    IMAGE_ID,
    IMAGE_NUMBER,
    JoinKeys,
    choose_pairs,
    column_names_of,
    refuse_contradiction,
)
from omearrow_ds.storage.protocol import On, OpenOptions
from omearrow_ds.storage.row_filter import RowFilter
from omearrow_ds.storage.table_files import (
    ColumnTypes,
    InputTable,
    UnreadColumns,
    parse_as,
    read_input_table,
    table_file,
)
from omearrow_ds.text import count

# The first names of each kind that a table has are used. CellProfiler's per-object tables omit the object's name, and
# CytoTable may prefix ``Metadata_``; ``centroid-0`` is scikit-image's `regionprops_table`.
_KINDS = tuple(f"{before}{kind}_" for kind in ("Nuclei", "Cells", "Cytoplasm") for before in ("", "Metadata_"))
_PREFIXES = (*_KINDS, "")
_CENTERS = (
    *((f"{prefix}Location_Center_Y", f"{prefix}Location_Center_X") for prefix in _PREFIXES),
    ("centroid_y", "centroid_x"),
    ("centroid-0", "centroid-1"),
)
_BOXES = (
    *(
        tuple(f"{prefix}AreaShape_BoundingBox{end}_{axis}" for axis in "YX" for end in ("Minimum", "Maximum"))
        for prefix in _PREFIXES
    ),
    ("bbox-0", "bbox-2", "bbox-1", "bbox-3"),
)
_SHAPES = b"ome.arrow.shapes"  # Metadata key of ome-arrow's shape tables.
_EXACT = 2**53  # Integers below it are exact in float64.
_LABELS = (
    "label_value",
    *(f"{kind}Number_Object_Number" for kind in _KINDS),
    "Metadata_ObjectNumber",
    "ObjectNumber",
    "label",
)
_USED_COLUMNS = {IMAGE_ID, IMAGE_NUMBER, "centroid", "bbox", *_LABELS, *chain.from_iterable((*_CENTERS, *_BOXES))}


@dataclass(frozen=True)
class Objects:
    """Objects, such as cells, in the images of a source."""

    table: pa.Table  # One row per object, without objects that have no image or no position.
    rows: Array  # (n,) int64, the row of each in the given table
    fields: Array  # (n,) int64, the index of each object's image
    # (n, 2) float64, (Y, X) in pixels from the center of the first one; None with boxes
    centers: Array | None
    boxes: Array | None  # (n, 4) int64, (y0, y1, x0, x1) half-open; None with centers
    name: str  # Name of the table in messages.
    column_schema: pa.Schema  # Columns of the given table.
    unread: UnreadColumns | None = None  # Columns that ``table`` lacks, if the given table is wide.

    def keep(self, selected: Array) -> Objects:
        numbers = np.flatnonzero(selected) if selected.dtype == np.bool_ else selected
        if np.array_equal(numbers, np.arange(len(self.rows))):
            return self
        centers, boxes = (known if known is None else known[numbers] for known in (self.centers, self.boxes))
        table, rows, fields = self.table.take(pa.array(numbers)), self.rows[numbers], self.fields[numbers]
        return replace(self, table=table, rows=rows, fields=fields, centers=centers, boxes=boxes)

    def column_table(self, names: Sequence[str]) -> pa.Table:
        """Return columns of the given table, one row per object; columns of a wide table are read."""
        if self.unread is None:
            return self.table.select(list(names))
        return self.unread.column_table(names, self.table, pa.array(self.rows))

    def labels(self) -> tuple[str, Array] | None:
        name = next((name for name in _LABELS if name in self.table.column_names), None)
        if name is None or not _is_number(self.table[name].type):
            return None
        return name, self.table[name].cast(pa.float64(), safe=False).to_numpy()


@dataclass(frozen=True)
class _PositionColumns:
    """Option with the names of columns that hold positions, and columns that are used without it."""

    option: str
    axes: str  # Values of the columns, in order.
    known: Sequence[tuple[str, ...]]  # Known names, by priority.
    column: str  # Known column with lists of coordinates, as ome-arrow writes them.
    ends: tuple[str, ...]  # Fields of that column with lists; empty if the column itself has lists.
    example: str


_CENTER = _PositionColumns("center", "(Y, X)", _CENTERS, "centroid", (), "Nuclei_Location_Center_Y and _X")
_BOX = _PositionColumns(
    "box", "(y0, y1, x0, x1)", _BOXES, "bbox", ("min", "max"), "Nuclei_AreaShape_BoundingBoxMinimum_Y and so on"
)


@dataclass(frozen=True)
class ObjectSettings:
    """Options of `open_images` for a table of objects; ``skip_nulls`` leaves out objects without a position."""

    on: On | None
    skip_nulls: bool
    types: ColumnTypes
    row_filter: RowFilter | None

    @classmethod
    def take(cls, opening: OpenOptions, objects: Any) -> Self:
        """Return the options for a table of objects; those that apply only to it are removed from ``opening``."""
        types = ColumnTypes.of(opening.get("column_types"))
        file = table_file(objects, "objects") if types else None
        if file is not None:
            types.of_table(file)
            opening["column_types"] = types
        skip_nulls = opening.get("nulls") == "skip"
        if objects is None:
            return cls(None, skip_nulls, types, None)
        on = opening.pop("on", None) if opening.get("columns") is None else None
        condition = opening.pop("filter", None)
        return cls(on, skip_nulls, types, None if condition is None else RowFilter(condition))

    def open(self, source: Images, objects: Any, center: Any, box: Any) -> tuple[Images, Objects]:
        """Return the source of images, and the objects of a table in these images; see `_locate` for the parameters."""
        # With a filter, these are the objects that it chooses, and the images that contain any of them.
        located = self._locate(source, objects, center, box)
        if self.row_filter is None:
            return source, located
        chosen = located.keep(self.row_filter.choose(CropRows.of_objects(source, located)))
        fields, field_of = np.unique(chosen.fields, return_inverse=True)
        return select_rows(source, fields, self.row_filter.text), replace(chosen, fields=field_of.reshape(-1))

    def _locate(self, source: Images, objects: Any, center: Any, box: Any) -> Objects:
        """Return the objects of a table whose images are in a source."""
        # ``center`` names the columns (Y, X), ``box`` those of (y0, y1, x0, x1), or True for known names. The default
        # is a center with known names.
        if center is not None and box:
            problem, remedy = f"box={box!r} also sets positions", "pass only one of them"
            raise ArgumentError(problem, option="center", value=center, remedy=remedy)
        needed = {*_USED_COLUMNS, *source.column_names}
        needed.update(*map(column_names_of, (self.on, center, box)))
        joined = read_input_table(objects, "objects", self.types, needed)
        self.types.refuse_unknown()
        pairs = choose_pairs(source, joined, self.on)
        keys = JoinKeys(source, joined, pairs)
        fields = keys.match("object", "pass on= with columns that distinguish the images", are_objects=True)
        without = np.flatnonzero(fields < 0)
        if len(without):
            examples = keys.examples(without, row=True)
            keys.warn(f"{len(without):,} of {len(fields):,} objects have no image and are skipped: {examples}")
        if self.on is None and pairs[0][0] == IMAGE_ID:
            refuse_contradiction(source, joined, fields, np.arange(len(fields)))
        boxed = box is not None and box is not False
        names, positions = _positions(joined, *((_BOX, None if box is True else box) if boxed else (_CENTER, center)))
        table = joined.table
        for name, numbers in zip(names, positions.T, strict=False):  # One list column has several numbers per row.
            if pa.types.is_string(table[name].type):
                numbers_column = pa.array(numbers, from_pandas=True)
                table = table.set_column(table.column_names.index(name), name, numbers_column)
        is_known = np.isfinite(positions).all(axis=1)
        unknown = np.flatnonzero((fields >= 0) & ~is_known)
        if len(unknown) and not self.skip_nulls:
            nulls = f"null for {count(len(unknown), 'object')}, the first in row {unknown[0]}"
            problem = f"{', '.join(map(repr, names))} are {nulls}"
            raise MetadataError(problem, **joined.subject, remedy="pass nulls='skip' to skip them")
        rows = np.flatnonzero((fields >= 0) & is_known)
        positions, fields = positions[rows], fields[rows]
        _refuse_outside(source, joined, names, positions, fields, rows)
        table = table if len(rows) == table.num_rows else table.take(pa.array(rows))
        boxes = None
        if boxed:
            boxes = np.where([True, False, True, False], np.floor(positions), np.ceil(positions)).astype(np.int64)
        centers = None if boxed else positions
        column_schema = joined.column_schema(table.schema)
        return Objects(table, rows, fields, centers, boxes, joined.name, column_schema, joined.unread)


class CropRows(ColumnReader):
    """Ids and columns of objects or tiles, with the columns of their images appended.

    ``name_rows`` returns the ids, ``read_own`` columns of objects. A process that unpickles it sets ``source``, the
    images, before it reads columns.
    """

    def __init__(
        self,
        source: Images,
        own_schema: pa.Schema,
        read_own: Callable[[list[str]], pa.Table],
        fields: Array,
        name_rows: Callable[[], list[str]],
    ) -> None:
        self.path, self._own_schema, self._read_own = source.path, own_schema, read_own
        self._fields, self._name_rows = fields, name_rows
        self.source: Images | None = source
        self.objects: Objects | None = None

    @classmethod
    def of_objects(cls, source: Images, objects: Objects) -> Self:
        name_rows = partial(object_ids, objects, source.image_ids)
        rows = cls(source, objects.column_schema, objects.column_table, objects.fields, name_rows)
        rows.objects = objects
        return rows

    @property
    def own_columns(self) -> pa.Table:
        """Columns of objects or tiles, without those of images."""
        return self._read_own(self._own_schema.names)

    @cached_property
    def image_ids(self) -> Sequence[str]:  # type: ignore[override]  # Named lazily.
        return self._name_rows()

    @cached_property
    def column_schema(self) -> pa.Schema:
        assert self.source is not None
        own = set(self._own_schema.names)
        return pa.schema([*self._own_schema, *(field for field in self.source.column_schema if field.name not in own)])

    def _read_columns(self, names: list[str]) -> pa.Table:
        assert self.source is not None
        own = [name for name in names if name in self._own_schema.names]
        of_images = self.source.column_table([name for name in names if name not in own])
        of_images = of_images.take(pa.array(self._fields)) if of_images.num_columns else of_images
        of_objects = self._read_own(own) if own else pa.table({})
        return pa.table({name: (of_objects if name in own else of_images)[name] for name in names})

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("image_ids", "columns")}
        return {**state, "source": None}


def _positions(joined: InputTable, columns: _PositionColumns, names: Any) -> tuple[tuple[str, ...], Array]:
    """Return the names of the columns with the positions, and their numbers as (n, 2 or 4) float64; NaN is null."""
    table, number = joined.table, len(columns.known[0])
    chosen = next((known for known in columns.known if set(known) <= set(table.column_names)), ())
    if names is not None:
        chosen = tuple(check_names(columns.option, names, f"the names of {number} columns, {columns.axes}", number))
    if chosen:
        chosen = tuple(joined.renamed.get(name, name) if name not in table.column_names else name for name in chosen)
        return chosen, np.stack([_numbers(joined, name) for name in chosen], axis=1)
    is_nested = pa.types.is_struct if columns.ends else pa.types.is_list
    if columns.column in table.column_names and is_nested(table[columns.column].type):
        column = table[columns.column]
        points = [_points(pc.struct_field(column, end)) for end in columns.ends] or [_points(column)]
        axes = _axes_of(joined, points[0].shape[1])
        return (columns.column,), np.stack([ends[:, axis] for axis in axes for ends in points], axis=1)
    raise ColumnError(
        f"found no columns with known names for {columns.axes}, such as {columns.example}",
        **joined.subject,
        remedy=f"pass {columns.option}= with {number} of the names {table.column_names[:40]}",
    )


def _numbers(joined: InputTable, name: str) -> Array:
    if name not in joined.table.column_names:
        raise unknown_column(name, joined.table.column_names, joined.name)
    column = joined.table[name]
    if joined.is_text and pa.types.is_string(column.type):
        column = parse_as("float", column, joined.name, name)
    if not _is_number(column.type):
        problem = f"column {name!r} is of type {column.type}, expected numbers in pixels"
        raise ColumnError(problem, **joined.subject, column=name, remedy="cast it, or choose another column")
    numbers: Array = column.cast(pa.float64()).to_numpy()
    return numbers


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _points(column: pa.ChunkedArray) -> Array:
    """Return a column of lists as (n, d) float64, with NaN for nulls; all NaN if list lengths differ."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(lengths.max(initial=0))
    points = np.full((len(column), max(size, 2)), np.nan)
    if np.isin(lengths, (0, size)).all():
        points[lengths > 0] = pc.list_flatten(column).cast(pa.float64()).to_numpy().reshape(-1, size)
    return points


def _axes_of(joined: InputTable, num_axes: int) -> tuple[int, int]:
    """Return the indices of Y and X in the points of an ome-arrow shape table."""
    shapes: Mapping[str, Any] = json.loads(joined.metadata.get(_SHAPES, b"{}"))
    axes = [str(axis).lower() for axis in shapes.get("axes", ())] or list("zyx"[-num_axes:])
    units = dict(zip(axes, shapes.get("units", ["pixel"] * len(axes)), strict=False))
    problem, remedy = "", "pass center= in pixels"
    if not {"y", "x"} <= set(axes):
        problem, remedy = f"points have the axes {axes}, expected y and x", "pass center= with two columns"
    elif {units["y"], units["x"]} != {"pixel"}:
        problem = f"points are in {units['y']}, expected pixels"
    if problem:
        raise MetadataError(problem, **joined.subject, remedy=remedy)
    return axes.index("y"), axes.index("x")


def _refuse_outside(
    source: Images, joined: InputTable, names: Sequence[str], positions: Array, fields: Array, rows: Array
) -> None:
    """Raise `MetadataError` for objects outside their image, as columns may be swapped or have another unit."""
    sizes, are_boxes = source.shapes[fields][:, 3:], positions.shape[1] > 2
    starts, stops = (positions[:, ::2], positions[:, 1::2]) if are_boxes else (positions + 0.5, positions + 0.5)
    is_outside = ((starts < 0) | (stops > sizes) | (are_boxes & (starts >= stops))).any(axis=1)
    if not is_outside.any():
        return
    first = int(is_outside.argmax())
    height, width = sizes[first].tolist()
    subject = "box (y0, y1, x0, x1)" if are_boxes else "center (Y, X)"
    values = ", ".join(f"{value:g}" for value in positions[first])
    raise MetadataError(
        f"{count(int(is_outside.sum()), 'object')} of {len(rows):,} are outside their image, first in row "
        f"{rows[first]}: the {subject} in {', '.join(map(repr, names))} is ({values}) but image "
        f"{source.image_ids[int(fields[first])]!r} has {height} x {width} pixels",
        **joined.subject,
        remedy="pass columns in this order and in pixels of this image",
    )


def object_ids(objects: Objects, image_ids: Sequence[str]) -> list[str]:
    """Return one id per object, made of the id of its image and the object's label, or its row if labels repeat."""
    labels = objects.labels()
    numbers = objects.rows
    if labels is not None and np.isfinite(labels[1]).all():
        known = labels[1].astype(np.int64)
        exact = (known == labels[1]).all() and known.min(initial=0) >= 0 and known.max(initial=0) < _EXACT
        if exact and len(np.unique(objects.fields * (known.max(initial=0) + 1) + known)) == len(known):
            numbers = known
    both = zip(objects.fields.tolist(), numbers.tolist(), strict=True)
    return [f"{image_ids[field]}:{number}" for field, number in both]
