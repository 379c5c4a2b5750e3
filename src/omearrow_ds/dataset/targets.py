"""`Targets`: what a sample's ``target=`` is taken from, a column or a callable on a row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, ColumnError
from omearrow_ds.storage.protocol import ImageSource

Target = str | Callable[[dict[str, Any]], Any]


class Targets:
    """The targets of a source's images, by index.

    Parameters
    ----------
    source
        Open source whose columns are used.
    target
        Name of a column, or a callable on a row of the columns (a dict).

    Raises
    ------
    ColumnError
        If there is no such column, or it holds nulls; or if a callable has no column to work on.
    """

    def __init__(self, source: ImageSource, target: Target) -> None:
        if isinstance(target, str):
            self._values: list[Any] | None = _values(source, target)
            self._copy = _copier(source.columns.schema.field(target).type, self._values)
            return
        if not callable(target):
            raise ArgumentError(f"target={target!r}; it must be the name of a column, or a callable on a row")
        if not source.columns.num_columns:
            raise ColumnError(f"{source.path}: has no columns for target= to be called with")
        self._values, self._target, self._columns = None, target, source.columns

    @property
    def listed(self) -> bool:
        """Whether they are the values of a column, with nothing to call."""
        return self._values is not None

    def __getitem__(self, index: int) -> Any:
        """Return the target of image ``index``: the caller's own to write on."""
        if self._values is not None:
            value = self._values[index]
            return value if self._copy is None else self._copy(value)
        return self._target(self._columns.slice(index, 1).to_pylist()[0])


def _values(source: ImageSource, name: str) -> list[Any]:
    """Return the values of a column, lists as arrays, so that those of numbers collate to tensors."""
    if name not in source.columns.column_names:
        raise ColumnError(f"{source.path}: no column {name!r} for target; there are {source.columns.column_names}")
    column = source.columns[name]
    if column.null_count:
        row = int(column.is_null().to_numpy().argmax())
        raise ColumnError(
            f"{source.path}: column {name!r} is null at image {row}; fill it, or pass a callable as target"
        )
    values: list[Any] = column.to_pylist()
    return _as_arrays(values, column) if pa.types.is_list(column.type) else values


def _as_arrays(values: list[Any], column: pa.ChunkedArray) -> list[Any]:
    """Return lists as arrays, those of numbers of one dtype: an empty list, or a large number, tells NumPy another one.

    Where the lists within a list differ in length, they stay lists.
    """
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


def _copier(kind: pa.DataType, values: list[Any]) -> Callable[[Any], Any] | None:
    """Return what copies a value of a column, None if nobody can change one: a number, a text, a time."""
    if not pa.types.is_nested(kind) and not isinstance(kind, pa.BaseExtensionType):
        return None
    plain = all(isinstance(value, np.ndarray) and not value.dtype.hasobject for value in values)
    return np.ndarray.copy if plain else copy.deepcopy
