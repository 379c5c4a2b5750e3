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

from omearrow_ds.errors import ColumnError
from omearrow_ds.options import check_names, refuse_value
from omearrow_ds.storage.compositions import select_rows
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import ColumnReader, unknown_column
from omearrow_ds.storage.keys import IMAGE_ID, IMAGE_NUMBER, JoinKeys, column_names_of, refuse_contradiction
from omearrow_ds.storage.protocol import On, OpenOptions
from omearrow_ds.storage.row_filter import RowFilter
from omearrow_ds.storage.table_files import ColumnTypes, InputTable, parse_as, read_input_table, table_file
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
    joined: InputTable  # The given table, without rows that have no image or no position.
    rows: Array  # (n,) int64, the row of each in the given table
    fields: Array  # (n,) int64, the index of each object's image
    # (n, 2) float64, centers (Y, X) in pixels from the center of the first one; or (n, 4) int64, boxes
    # (y0, y1, x0, x1) half-open
    positions: Array
    are_boxes: bool

    def keep(self, selected: Array) -> Objects:
        numbers = np.flatnonzero(selected) if selected.dtype == np.bool_ else selected
        if np.array_equal(numbers, np.arange(len(self.rows))):
            return self
        joined = self.joined._replace(table=self.joined.table.take(pa.array(numbers)))
        return Objects(joined, self.rows[numbers], self.fields[numbers], self.positions[numbers], self.are_boxes)

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of all columns in the order of the given table."""
        table, unread, renamed = self.joined.table, self.joined.unread, self.joined.renamed
        if unread is None:
            return table.schema
        fields = {field.name: field for field in (*table.schema, *unread.column_schema)}
        return pa.schema([fields[renamed.get(name, name)] for name in unread.file.names])

    def select(self, names: Sequence[str]) -> pa.Table:
        """Return columns of the given table, one row per object; columns of a wide table are read."""
        table, unread = self.joined.table, self.joined.unread
        return table.select(list(names)) if unread is None else unread.column_table(names, table, pa.array(self.rows))

    def labels(self) -> tuple[str, Array] | None:
        table = self.joined.table
        name = next((name for name in _LABELS if name in table.column_names), None)
        if name is None or not _is_number(table[name].type):
            return None
        return name, table[name].cast(pa.float64(), safe=False).to_numpy()


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
        chosen = located.keep(self.row_filter.choose(CropRows.of_objects(source.header.columns, located)))
        fields, field_of = np.unique(chosen.fields, return_inverse=True)
        return select_rows(source, fields, self.row_filter.text), replace(chosen, fields=field_of.reshape(-1))

    def _locate(self, source: Images, objects: Any, center: Any, box: Any) -> Objects:
        # ``center`` names the columns (Y, X), ``box`` those of (y0, y1, x0, x1), or True for known names. The default
        # is a center with known names.
        if center is not None and box:
            refuse_value("center", center, f"box={box!r} also sets positions", "pass only one of them")
        needed = {*_USED_COLUMNS, *source.header.columns.names}
        needed.update(*map(column_names_of, (self.on, center, box)))
        joined = read_input_table(objects, "objects", self.types, needed)
        self.types.refuse_unknown()
        keys = JoinKeys.choose(source.header.columns, joined, self.on)
        fields = keys.match("object", "pass on= with columns that distinguish the images", are_objects=True)
        without = np.flatnonzero(fields < 0)
        if len(without):
            examples = keys.examples(without, row=True)
            keys.warn(f"{len(without):,} of {len(fields):,} objects have no image and are skipped: {examples}")
        if self.on is None and keys.pairs[0][0] == IMAGE_ID:
            refuse_contradiction(source.header.columns, joined, fields, np.arange(len(fields)))
        boxed = box is not None and box is not False
        names, positions = _positions(joined, *((_BOX, None if box is True else box) if boxed else (_CENTER, center)))
        table = joined.table
        for name, numbers in zip(names, positions.T, strict=False):  # One list column has several numbers per row.
            if pa.types.is_string(table[name].type):
                table = table.set_column(table.column_names.index(name), name, pa.array(numbers, from_pandas=True))
        is_known = np.isfinite(positions).all(axis=1)
        unknown = np.flatnonzero((fields >= 0) & ~is_known)
        if len(unknown) and not self.skip_nulls:
            nulls = f"null for {count(len(unknown), 'object')}, the first in row {unknown[0]}"
            joined.refuse(f"{', '.join(map(repr, names))} are {nulls}", "pass nulls='skip' to skip them")
        joined = joined._replace(table=table, metadata={})
        located = Objects(joined, np.arange(len(fields)), fields, positions, boxed).keep((fields >= 0) & is_known)
        _refuse_outside(source, located, names)
        if not boxed:
            return located
        corners = np.where([True, False, True, False], np.floor(located.positions), np.ceil(located.positions))
        return replace(located, positions=corners.astype(np.int64))


class CropRows(ColumnReader):
    """Ids and columns of objects or tiles, with the columns of their images appended.

    ``own`` are the objects, or a table of tiles, and ``name_rows`` returns the ids. A process that unpickles it sets
    ``source``, the images, before it reads columns.
    """

    def __init__(
        self, source: ColumnReader, own: Objects | pa.Table, fields: Array, name_rows: Callable[[], list[str]]
    ) -> None:
        self.path, self._own, self._fields, self._name_rows = source.path, own, fields, name_rows
        self.source: ColumnReader | None = source
        self.objects = own if isinstance(own, Objects) else None

    @classmethod
    def of_objects(cls, source: ColumnReader, objects: Objects) -> Self:
        return cls(source, objects, objects.fields, partial(object_ids, objects, source.image_ids))

    @property
    def own_columns(self) -> pa.Table:
        """Columns of objects or tiles, without those of images."""
        return self._own.select(self._own.schema.names)

    @cached_property
    def image_ids(self) -> Sequence[str]:  # type: ignore[override]  # Named lazily.
        return self._name_rows()

    @cached_property
    def schema(self) -> pa.Schema:
        assert self.source is not None
        own = set(self._own.schema.names)
        return pa.schema([*self._own.schema, *(field for field in self.source.schema if field.name not in own)])

    def _read(self, names: list[str]) -> pa.Table:
        assert self.source is not None
        known = set(self._own.schema.names)
        own = [name for name in names if name in known]
        of_images = self.source.select([name for name in names if name not in known])
        of_images = of_images.take(pa.array(self._fields)) if of_images.num_columns else of_images
        of_objects = self._own.select(own) if own else pa.table({})
        return pa.table({name: (of_objects if name in known else of_images)[name] for name in names})

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("image_ids", "table")}
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
    if columns.column not in table.column_names or not is_nested(table[columns.column].type):
        problem = f"found no columns with known names for {columns.axes}, such as {columns.example}"
        remedy = f"pass {columns.option}= with {number} of the names {table.column_names[:40]}"
        joined.refuse(problem, remedy, ColumnError)
    column = table[columns.column]
    points = [_points(pc.struct_field(column, end)) for end in columns.ends] or [_points(column)]
    axes = _axes_of(joined, points[0].shape[1])
    return (columns.column,), np.stack([ends[:, axis] for axis in axes for ends in points], axis=1)


def _numbers(joined: InputTable, name: str) -> Array:
    if name not in joined.table.column_names:
        raise unknown_column(name, joined.table.column_names, joined.name)
    column = joined.table[name]
    if joined.is_text and pa.types.is_string(column.type):
        column = parse_as("float", column, joined.name, name)
    if not _is_number(column.type):
        problem = f"column {name!r} is of type {column.type}, expected numbers in pixels"
        joined.refuse(problem, "cast it, or choose another column", ColumnError, name)
    return np.asarray(column.cast(pa.float64()))


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
    if not {"y", "x"} <= set(axes):
        joined.refuse(f"points have the axes {axes}, expected y and x", "pass center= with two columns")
    if {units["y"], units["x"]} != {"pixel"}:
        joined.refuse(f"points are in {units['y']}, expected pixels", "pass center= in pixels")
    return axes.index("y"), axes.index("x")


def _refuse_outside(source: Images, objects: Objects, names: Sequence[str]) -> None:
    """Raise `MetadataError` for objects outside their image, as columns may be swapped or have another unit."""
    sizes, positions, are_boxes = source.header.shapes[objects.fields][:, 3:], objects.positions, objects.are_boxes
    starts, stops = (positions[:, ::2], positions[:, 1::2]) if are_boxes else (positions + 0.5, positions + 0.5)
    is_outside = ((starts < 0) | (stops > sizes) | (are_boxes & (starts >= stops))).any(axis=1)
    if not is_outside.any():
        return
    first = int(is_outside.argmax())
    height, width = sizes[first].tolist()
    subject = "box (y0, y1, x0, x1)" if are_boxes else "center (Y, X)"
    values = ", ".join(f"{value:g}" for value in positions[first])
    image_id = source.header.image_ids[int(objects.fields[first])]
    stated = f"the {subject} in {', '.join(map(repr, names))} is ({values})"
    outside = f"{count(int(is_outside.sum()), 'object')} of {len(positions):,} are outside their image"
    problem = f"{outside}, first in row {objects.rows[first]}: {stated} but image {image_id!r} has"
    remedy = "pass columns in this order and in pixels of this image"
    objects.joined.refuse(f"{problem} {height} x {width} pixels", remedy)


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
