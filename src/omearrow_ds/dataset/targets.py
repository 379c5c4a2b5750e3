"""`Targets`: values of ``target=`` per sample, from columns or a callable on a row."""

from __future__ import annotations

import copy
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError
from omearrow_ds.options import check_names
from omearrow_ds.storage.formats._columns import ColumnReader, all_types, unknown_column
from omearrow_ds.text import nearest

Target = str | Sequence[str] | Callable[[dict[str, Any]], Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
_TEXT = (pa.string(), pa.large_string(), pa.string_view())
Classes = tuple[str, ...] | dict[str, tuple[str, ...]]
ChosenClasses = Iterable[str] | Mapping[str, Iterable[str]]
_NEAREST = 3


class Targets:
    """Training target of each image of a source, by image index.

    A callable ``target`` gets a row of the columns as a dict, which also has ``image_id`` and ``index`` unless a column
    has this name. With ``nulls``, columns may have nulls, and `present` is the mask of valid targets.
    """

    def __init__(
        self, source: ColumnReader, target: Target, classes: ChosenClasses | None, *, encode_targets: bool, nulls: bool
    ) -> None:
        self.text = reprlib.repr(target)
        allowed = "a column name, a list of distinct column names, or a callable that takes a row"
        names = [] if callable(target) else check_names("target", target, allowed)
        chosen = {} if classes is None else _chosen_classes(classes, target, names, encode_targets=encode_targets)
        read = partial(_column, source, encode_targets=encode_targets, nulls=nulls)
        self._of = {name: read(name, chosen.get(name)) for name in names}
        self._only = self._of[target] if isinstance(target, str) else None
        if callable(target):
            self._target, self._ids, self._columns = target, source.image_ids, source.table
        self.listed = bool(self._of)  # Whether targets are values of columns. Otherwise, a callable computes them.
        masks = [column.present for column in self._of.values() if column.present is not None]
        # One bool per image: whether the image has a target; None if all images have targets.
        self.present: Mask | None = np.logical_and.reduce(masks) if masks else None

    @property
    def classes(self) -> Classes | None:
        """Strings in the order of their codes, or a mapping from columns to them; None if no target has codes."""
        if self._only is not None:
            return self._only.classes
        return {name: column.classes for name, column in self._of.items() if column.classes is not None} or None

    def __getitem__(self, index: int) -> Any:
        """Return the target of image ``index`` as a copy that the caller may change."""
        only = self._only
        if only is not None:
            value = only.values[index]
            return value if only.copy is None else only.copy(value)
        if self._of:
            return {
                name: column.values[index] if column.copy is None else column.copy(column.values[index])
                for name, column in self._of.items()
            }
        row = self._columns.slice(index, 1).to_pylist() if self._columns.num_columns else [{}]
        return self._target({"image_id": self._ids[index], "index": index, **row[0]})


class _TargetColumn(NamedTuple):
    """Values of a column, a function that copies mutable values, texts of codes, and a mask of valid values."""

    values: list[Any]
    copy: Callable[[Any], Any] | None
    classes: tuple[str, ...] | None
    present: Mask | None = None


def _chosen_classes(
    classes: Any, target: Target, names: Sequence[str], *, encode_targets: bool
) -> dict[str, tuple[str, ...]]:
    error = partial(ArgumentError, option="classes", value=classes)
    if not encode_targets or callable(target):
        problem = "target= is a function" if encode_targets else "encode_targets=False creates no codes"
        raise error(problem, remedy="leave out one of them")
    if not isinstance(classes, Mapping) and not isinstance(target, str):
        raise error("target= names several columns", remedy="pass a mapping from column names to lists of strings")
    by_name: Mapping[Any, Any] = classes if isinstance(classes, Mapping) else {target: classes}
    chosen: dict[str, tuple[str, ...]] = {}
    for name, texts in by_name.items():
        if name not in names:
            raise error(f"{name!r} is not a column of target=", remedy=f"choose among {names}")
        ordered = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str | bytes) else [None]
        if not all(isinstance(text, str) for text in ordered):
            raise error(allowed=f"a list of the strings of {name!r} in code order", remedy="pass such a list")
        twice = [text for text, number in Counter(ordered).items() if number > 1]
        if twice:
            raise error(f"{twice[0]!r} occurs twice", remedy="remove one")
        chosen[name] = tuple(map(str, ordered))
    return chosen


def _column(
    source: ColumnReader, name: str, classes: tuple[str, ...] | None, *, encode_targets: bool, nulls: bool
) -> _TargetColumn:
    if name not in source.names:
        raise unknown_column(name, source.names, source.path, " for target")
    stored = source.column(name)
    column = _as_numbers(stored, f"{source.path}: column {name!r} is of type {stored.type}")
    if classes is not None:
        _refuse_unknown(source, name, column, classes)
    if not column.null_count:
        return _values(column, classes, encode_targets=encode_targets)
    present = column.is_valid().to_numpy()
    if not nulls:
        row, number = int(present.argmin()), f"{column.null_count:,} of {len(column):,} images"
        problem = f"column {name!r} is null for {number}, first for image {row} ({source.image_ids[row]!r})"
        remedy = "fill it, or pass nulls='skip' or a callable as target"
        raise ColumnError(f"{source.path}: {problem}; {remedy}", column=name)
    known = _values(column.drop_null(), classes, encode_targets=encode_targets)
    values = iter(known.values)
    return known._replace(values=[next(values) if valid else None for valid in present.tolist()], present=present)


def _as_numbers(column: pa.ChunkedArray, subject: str) -> pa.ChunkedArray:
    """Return a column in types that torch collates; decimals become int64 if they have no decimal places, else float64.

    Raises `ColumnError` for dates, times and integers beyond int64, which torch would refuse at the first batch.
    """
    remedy = "cast it, e.g. pyarrow.compute.cast(column, '{}'), or pass a callable as target"
    time = next(filter(pa.types.is_temporal, all_types(column.type)), None)
    if time is not None:
        number = "int32" if time == pa.date32() else "int64"  # Arrow casts to a number of the same width only.
        raise ColumnError(f"{subject}, expected numbers or strings; {remedy.format(number)}")
    # Text between, since Arrow does not round a decimal to the nearest float.
    kinds = [_number_type(column.type, decimals) for decimals in (pa.string(), pa.float64())]
    try:
        for kind in kinds:
            column = column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid:
        raise ColumnError(f"{subject} with integers beyond int64; {remedy.format('float64')}") from None
    return column


def _number_type(kind: pa.DataType, decimals: pa.DataType, *, in_list: bool = False) -> pa.DataType:
    """Return the type to cast to; lists keep uint64, as they become uint64 arrays if values exceed int64."""
    if pa.types.is_decimal(kind):
        return decimals if kind.scale else pa.int64()
    if pa.types.is_list(kind):
        return pa.list_(_number_type(kind.value_type, decimals, in_list=True))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _number_type(field.type, decimals, in_list=in_list)) for field in kind])
    return pa.int64() if kind == pa.uint64() and not in_list else kind


def _refuse_unknown(source: ColumnReader, name: str, column: pa.ChunkedArray, classes: tuple[str, ...]) -> None:
    error = partial(ArgumentError, path=source.path, column=name, option="classes")
    if not is_text(column.type) and column.null_count < len(column):
        raise error(f"column {name!r} is {column.type}, expected strings", remedy="leave it out")
    known = set(classes)
    unknown = [text for text in pc.unique(column.drop_null().cast(pa.large_string())).to_pylist() if text not in known]
    if unknown:
        near = nearest(unknown[0], classes, _NEAREST)
        classes_text = f"(nearest: {', '.join(map(repr, near))})" if near else reprlib.repr(classes)
        more = f" and {len(unknown) - 1:,} other values" if len(unknown) > 1 else ""
        problem = f"column {name!r} has {unknown[0]!r}{more} outside the {len(classes):,} classes {classes_text}"
        raise error(problem, remedy="add missing values to classes=, or correct the column")


def _values(column: pa.ChunkedArray, classes: tuple[str, ...] | None, *, encode_targets: bool) -> _TargetColumn:
    if encode_targets and (classes is not None or is_text(column.type)):
        column = column.cast(pa.large_string())
        classes = tuple(sorted(pc.unique(column).to_pylist())) if classes is None else classes
        codes = pc.index_in(column, pa.array(classes, pa.large_string())).to_numpy()
        return _TargetColumn(codes.tolist(), None, classes)
    values: list[Any] = column.to_pylist()
    if not pa.types.is_nested(column.type) and not isinstance(column.type, pa.BaseExtensionType):
        return _TargetColumn(values, None, None)  # Numbers, text and times are immutable.
    values = _as_arrays(values, column) if pa.types.is_list(column.type) else values
    are_plain = all(isinstance(value, np.ndarray) and not value.dtype.hasobject for value in values)
    return _TargetColumn(values, np.ndarray.copy if are_plain else copy.deepcopy, None)


def is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in _TEXT


def _as_arrays(values: list[Any], column: pa.ChunkedArray) -> list[Any]:
    """Return lists as arrays, numbers with one dtype (NumPy may infer others); uneven inner lists remain lists."""
    nulls = 0
    while pa.types.is_list(column.type):
        column = pc.list_flatten(column)
        nulls += column.null_count
    dtype: Any = None
    if not nulls and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        dtype = np.float64 if pa.types.is_floating(column.type) else np.int64
        if column.type == pa.uint64() and len(column) and pc.max(column).as_py() > np.iinfo(np.int64).max:
            dtype = np.uint64
    try:
        return [np.asarray(value, dtype) for value in values]
    except ValueError:
        return values
