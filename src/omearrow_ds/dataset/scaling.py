"""Scaling of samples per image: `normalize=` and ``illumination=``, applied in one pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import Cut
from omearrow_ds.errors import ArgumentError, ColumnError, FormatError
from omearrow_ds.kernels.scaling import Array, Scaling
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.formats._columns import unknown_column
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.listed import ILLUM
from omearrow_ds.storage.stats import MEASURES, Stats, channel_names, read_stats

Normalize = bool | Mapping[str, Any] | Stats | str | os.PathLike[str]
Illum = bool | Mapping[str, Any] | Sequence[Any] | Array | str | os.PathLike[str]
_PAIRS = (("mean", "std"), ("low", "high"))


def largest_of(dtype: np.dtype[Any]) -> np.float32 | None:
    """Return the maximum of an integer dtype, which scales pixels to at most 1, or None for a floating dtype."""
    return np.float32(np.iinfo(dtype).max) if dtype.kind in "iu" else None


class Scalings:
    """Offset, divisor and illumination function of each image of a source.

    Raises `ArgumentError` if an option is invalid or does not fit the images; `ColumnError` if a group column of the
    statistics or the columns of illumination functions are missing; `FormatError` if a file of statistics or of an
    illumination function is invalid. ``normalize`` and ``illumination`` are those of `omearrow_ds.OMEArrowDataset`;
    ``source`` provides channel names and columns.
    """

    def __init__(self, source: BaseSource, normalize: Any, illumination: Any) -> None:
        self._path = source.path
        self.floating = normalize is not False
        self.by_dtype = normalize is True
        self._pairs: list[tuple[Array, Array]] = []  # Offset and divisor per group, one value per channel.
        self._group_of: list[int] | None = None
        self._clip = False
        self._measured = False  # Measured per channel: a single value is not broadcast.
        if not isinstance(normalize, bool):
            self._take(source, normalize)
        if illumination is not None and not self.floating:
            raise ArgumentError(
                "illumination= returns floats, but normalize=False keeps the stored dtype",
                option="normalize",
                value=False,
                remedy="leave out one of them",
            )
        self._loaded: dict[str, Array] = {}  # Pickled too, since the file may have changed by then.
        self._illumination = None if illumination is None else self._illumination_of(source, illumination)

    @property
    def apart(self) -> list[Array]:
        """Arrays of one integer per image; images with equal integers, shape and dtype have the same scaling."""
        codes: list[Array] = [] if self._group_of is None or not self.floating else [np.asarray(self._group_of)]
        if self._illumination is not None and len(self._illumination) > 1:
            number: dict[tuple[str, ...], int] = {}
            codes.append(
                np.array([number.setdefault(tuple(names), len(number)) for names in self._illumination], np.int64)
            )
        return codes

    def of(self, index: int, dtype: np.dtype[Any], shape: Sequence[int], cut: Cut) -> tuple[Any, Any]:
        """Return a key that identifies the scaling of an image, and a function that creates this scaling."""
        if not self.floating:
            return None, lambda: None
        group = None if self._group_of is None else self._group_of[index]
        functions = (
            None if self._illumination is None else self._illumination[index if len(self._illumination) > 1 else 0]
        )
        if not self._pairs and functions is None:
            return dtype, lambda: largest_of(dtype)
        key = (dtype, tuple(shape), group, None if functions is None else tuple(functions))
        return key, lambda: self._made(index, dtype, shape, cut, functions)

    def _made(
        self, index: int, dtype: np.dtype[Any], shape: Sequence[int], cut: Cut, functions: Sequence[str] | None
    ) -> Scaling:
        def of_sample(values: Array) -> Array:
            return cut(np.broadcast_to(values, tuple(shape)))

        illumination = None
        if functions is not None:
            _refuse_other_number(self._path, index, shape, len(functions), "illumination")
            stack = np.stack([self._function(name, shape, index) for name in functions])
            illumination = of_sample(stack[None, :, None])
        if not self._pairs:
            return Scaling(illumination, None, largest_of(dtype) if self.by_dtype else None, clip=False)
        offset, divisor = self._pairs[0 if self._group_of is None else self._group_of[index]]
        if len(offset) > 1 or self._measured:
            _refuse_other_number(self._path, index, shape, len(offset), "normalize")
        pair = (values.astype(np.float32)[None, :, None, None, None] for values in (offset, divisor))
        return Scaling(illumination, *map(of_sample, pair), clip=self._clip)

    def _function(self, name: str, shape: Sequence[int], index: int) -> Array:
        """Return an illumination function (Y, X) as float32, loaded once."""
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        function = self._loaded[name]
        if function.shape != tuple(shape[-2:]):
            raise ArgumentError(
                f"{name} has {' x '.join(map(str, function.shape))} pixels but image {index} has {shape[-2]} x "
                f"{shape[-1]}",
                path=self._path,
                image=index,
                option="illumination",
                remedy="pass functions of that size",
            )
        return function

    def _illumination_of(self, source: BaseSource, illumination: Any) -> list[Sequence[str]]:
        """Return the names of the illumination functions per image and channel; a single row applies to all images."""
        names: dict[Any, str] = {}

        def name_of(function: Any) -> str:
            key = function if isinstance(function, str | os.PathLike) else id(function)
            if key not in names:
                names[key] = self._named(function, len(names))
            return names[key]

        rows = _illumination_of(source, illumination)
        return [[name_of(function) for function in row] for row in rows]

    def _named(self, function: Any, number: int) -> str:
        """Return the name of an illumination function: its absolute path or its number."""
        if isinstance(function, str | os.PathLike):
            return os.path.abspath(function)  # noqa: PTH100  # Does not follow links.
        name = f"illumination=, function {number}"
        self._loaded[name] = _load(function)
        return name

    def _take(self, source: BaseSource, normalize: Any) -> None:
        values = dict(normalize) if isinstance(normalize, Mapping) else {"stats": normalize}
        stats = values.pop("stats", None)
        if stats is not None:
            if not isinstance(stats, Stats | str | os.PathLike):
                raise _invalid(normalize)
            if not isinstance(stats, Stats) and not Path(stats).is_file():
                raise missing(stats, f"no such file for {_invalid(normalize)}")
            self._take_stats(source, read_stats(stats) if not isinstance(stats, Stats) else stats, values, normalize)
            return
        names = next((pair for pair in _PAIRS if set(values) == set(pair)), None)
        if names is None:
            raise _invalid(normalize)
        try:
            first, second = (np.atleast_1d(np.asarray(values[name], np.float64)) for name in names)
        except (TypeError, ValueError):
            raise _invalid(normalize) from None
        sizes = {*first.shape, *second.shape}
        if first.ndim > 1 or second.ndim > 1 or len(sizes - {1}) > 1 or 0 in sizes:
            raise _invalid(normalize)
        first, second = np.broadcast_arrays(first, second)
        self._add(first, second, names, normalize)

    def _add(self, first: Array, second: Array, names: Sequence[str], value: Any, subject: str = "") -> None:
        divisor = second if names == _PAIRS[0] else second - first
        with np.errstate(over="ignore"):
            narrow = np.array([first, divisor]).astype(np.float32)  # The precision of the arithmetic.
        if not (np.isfinite(narrow).all() and (narrow[1] > 0).all()):
            condition = "std above 0" if names == _PAIRS[0] else "high above low"
            raise ArgumentError(
                f"{subject}expected finite values with {condition} in each channel",
                option="normalize",
                value=value,
                remedy="correct them",
            )
        self._pairs.append((first, divisor))
        self._clip = names == _PAIRS[1]

    def _take_stats(self, source: BaseSource, stats: Stats, options: dict[str, Any], normalize: Any) -> None:
        measures = tuple(options.get(name) for name in _PAIRS[1]) if options else _PAIRS[0]
        if set(options) - set(_PAIRS[1]) or any(measure not in MEASURES for measure in measures):
            raise _invalid(normalize)
        rows = _typed(stats, source).to_pylist()
        size_c = int(source.shapes[0, 1]) if len(source) else 0
        named = channel_names(source, range(len(source)))
        # Channels are matched by name if images and statistics have unique names for all channels, so that their order
        # does not matter; otherwise by index.
        known = {row["channel_name"] for row in rows}
        by_name = len(set(named)) == len(named) == size_c and None not in known and None not in named
        channels = named if by_name else list(range(size_c))
        groups: dict[tuple[Any, ...], dict[Any, dict[str, Any]]] = {}
        for row in rows:
            key = tuple(row[name] for name in stats.by)
            channel = row["channel_name" if by_name else "channel"]
            if groups.setdefault(key, {}).setdefault(channel, row) is not row:
                raise FormatError(f"{stats.path}: two rows for channel {channel!r}{_of_group(stats, key)}; remove one")
        self._measured = True
        group_indices = {key: number for number, key in enumerate(groups)}
        for key, measured in groups.items():
            subject = f"{stats.path}{_of_group(stats, key)}"
            if not set(channels) <= set(measured):
                absent = next(column for column in channels if column not in measured)
                known_channels = f"of {source.path}, but only {list(measured)}"
                raise ArgumentError(
                    f"{subject} has no channel {absent!r} {known_channels}",
                    option="normalize",
                    remedy="measure these images",
                )
            try:
                first, second = (
                    np.array([measured[column][str(name)] for column in channels], np.float64) for name in measures
                )
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"{subject}: invalid table of statistics: {error}; write it with omearrow-ds stats"
                ) from None
            self._add(first, second, _PAIRS[1] if options else _PAIRS[0], ..., f"{subject}: ")
        if stats.by:
            self._group_of = _groups_of(source, stats, group_indices)


def _typed(stats: Stats, source: BaseSource) -> pa.Table:
    """Return the table of statistics with groups cast to the types of the columns: a CSV file has only strings."""
    table = stats.table
    for name in set(stats.by) & set(source.column_names):
        kind = source.column_schema.field(name).type
        try:
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        except pa.ArrowException:
            continue  # Reported later as a missing group.
    return table


def _of_group(stats: Stats, key: tuple[Any, ...]) -> str:
    return f", {dict(zip(stats.by, key, strict=True))}" if key else ""


def _groups_of(source: BaseSource, stats: Stats, index_of: Mapping[tuple[Any, ...], int]) -> list[int]:
    for name in stats.by:
        if name not in source.column_names:
            raise unknown_column(name, source.column_names, source.path, f" for the groups in {stats.path}")
    keys = list(zip(*(source.column(name).to_pylist() for name in stats.by), strict=True))
    groups = [index_of.get(key) for key in keys]
    if None in groups:
        index = groups.index(None)
        raise ArgumentError(
            f"no statistics for the group {keys[index]} of image {index}",
            path=stats.path,
            image=index,
            option="normalize",
            remedy="measure all images",
        )
    return [number for number in groups if number is not None]


def _invalid(normalize: Any) -> ArgumentError:
    forms = "{'mean': ..., 'std': ...} or {'low': ..., 'high': ...} with one number, or one per channel"
    files = "a file written by omearrow-ds stats, or {'stats': FILE, 'low': 'p1', 'high': 'p99'}"
    return ArgumentError(option="normalize", value=normalize, allowed=f"True, False, {forms}, {files}")


def _refuse_other_number(path: Path, index: int, shape: Sequence[int], number: int, option: str) -> None:
    if shape[1] != number:
        raise ArgumentError(
            f"has {number} values but image {index} of {path} has {shape[1]} channels",
            option=option,
            remedy="pass one value per stored channel, before select=",
        )


def _illumination_of(source: BaseSource, illumination: Any) -> list[Sequence[Any]]:
    """Return paths or arrays of illumination functions per image and channel; a single row applies to all images."""
    named = channel_names(source, range(len(source)))
    if illumination is True:
        columns = [_column_for(source, name) for name in named]
        if not columns:
            raise ColumnError(
                f"{source.path}: channels have no names for illumination=True; pass the functions instead"
            )
        return list(zip(*(source.column(name).to_pylist() for name in columns), strict=True))
    if isinstance(illumination, Mapping):
        absent = next((name for name in named if name not in illumination), None)
        if absent is not None or not named:
            raise ArgumentError(
                f"has the channels {list(illumination)}, expected {named}",
                option="illumination",
                remedy=f"add a function for {absent!r}",
            )
        return [[illumination[name] for name in named]]
    if isinstance(illumination, str | os.PathLike | np.ndarray):
        stack = _load(illumination)
        return [[stack] if stack.ndim < 3 else list(stack)]  # (C, Y, X)
    if isinstance(illumination, Sequence):
        return [list(illumination)]
    raise ArgumentError(
        option="illumination",
        value=illumination,
        allowed="True, None, a mapping of channel names to .npy files or arrays, or one array per channel",
    )


def _column_for(source: BaseSource, channel: str | None) -> str:
    """Return the column of a channel's illumination function: IllumDNA for the channels DNA and OrigDNA."""
    candidates = [f"{ILLUM}{channel}", f"{ILLUM}{str(channel).removeprefix('Orig')}"]
    column = next((name for name in candidates if name in source.column_names), None)
    if column is None:
        use = f" of illumination functions for channel {channel!r}"
        raise unknown_column(candidates[-1], source.column_names, source.path, use)
    if source.column(column).null_count:
        raise ColumnError(
            f"{source.path}: column {column!r} has nulls; fill them, or pass functions as illumination=",
            column=column,
        )
    return column


def _load(stored: Any) -> Array:
    """Return an illumination function, or a stack of them, as float32.

    Raises `MissingPathError` if the file is missing; `FormatError` if it is not an array of positive, finite numbers.
    """
    subject = stored if isinstance(stored, str | os.PathLike) else "illumination="
    try:
        function = np.load(stored, allow_pickle=False) if isinstance(stored, str | os.PathLike) else np.asarray(stored)
        if not isinstance(function, np.ndarray) or function.dtype.kind not in "fiu":
            raise TypeError(f"its dtype is {getattr(function, 'dtype', 'not that of one array')}")  # noqa: TRY301  # Handled below.
        with np.errstate(over="ignore"):
            function = function.astype(np.float32)
    except FileNotFoundError:
        raise missing(str(subject), "no such file; illumination= takes .npy files") from None
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise FormatError(f"{subject}: invalid illumination function: {error}; pass a .npy file of numbers") from None
    if function.ndim not in (2, 3) or not (np.isfinite(function) & (function > 0)).all():
        raise FormatError(
            f"{subject}: invalid illumination function, expected values above 0 with axes YX or CYX; correct the file"
        )
    return function
