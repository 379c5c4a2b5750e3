"""Normalization of samples per image: `normalize=` and ``illumination=``, applied in one pass."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from omearrow_ds.axes import Cut
from omearrow_ds.errors import ArgumentError, ColumnError, FormatError
from omearrow_ds.kernels.scaling import Array, Divisor, Scaling
from omearrow_ds.storage.extents import Shape
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.formats._columns import unknown_column
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.formats._pictures import HIGH, PixelRange
from omearrow_ds.storage.listed import ILLUM
from omearrow_ds.storage.stats import MEASURES, Stats, channel_names, read_stats

Normalize = bool | Mapping[str, Any] | Stats | str | os.PathLike[str]
Illum = bool | Mapping[str, Any] | Sequence[Any] | Array | str | os.PathLike[str]
_PAIRS = (("mean", "std"), ("low", "high"))
HAS_WARNED = Event()  # The warning sets it; setting it earlier silences the warning.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # Set by torchrun, Lightning and SLURM.


class _Factors(NamedTuple):
    pairs: list[tuple[Array, Array]]  # Offset and divisor per channel, of each group of images.
    clip: bool
    group_of: list[int] | None = None  # None for one group.
    is_measured: bool = False  # A single measured value is not broadcast to several channels.


class Normalizer:
    """Offset, divisor and illumination function of each image of a source.

    ``normalize`` and ``illumination`` are those of `omearrow_ds.OMEArrowDataset`, which documents their errors;
    ``source`` provides channel names and columns.
    """

    def __init__(self, source: Images, normalize: Any, illumination: Any) -> None:
        self._path = source.header.path
        self.is_float32 = normalize is not False
        self.by_dtype = normalize is True
        self._factors = None if isinstance(normalize, bool) else _read_factors(source, normalize)
        if illumination is not None and not self.is_float32:
            problem = "illumination= returns floats, but normalize=False keeps the stored dtype"
            raise ArgumentError(problem, option="normalize", value=False, remedy="leave out one of them")
        rows = [] if illumination is None else _rows_of_functions(source, illumination)
        absolute = functools.cache(os.path.abspath)  # Does not follow links.
        # The names per image, or one row for all images.
        self._names = [
            tuple(
                absolute(function) if _is_file(function) else f"illumination=, function {channel}"
                for channel, function in enumerate(row)
            )
            for row in rows
        ]
        by_name = dict(zip(chain.from_iterable(self._names), chain.from_iterable(rows), strict=True))
        self._functions = {name: _load_function(name if _is_file(item) else item) for name, item in by_name.items()}
        groups = None if self._factors is None else self._factors.group_of
        # One integer per image each; images with equal integers, shape and dtype have the same scaling.
        self.group_codes = [] if groups is None else [np.asarray(groups)]
        if len(self._names) > 1:
            self.group_codes.append(np.unique(np.array(self._names), axis=0, return_inverse=True)[1].reshape(-1))

    def divisor(self, index: int, dtype: np.dtype[Any], shape: Shape, cut: Cut) -> Divisor:
        factors, names = self._factors, self._names[index if len(self._names) > 1 else 0] if self._names else ()
        # The maximum of an integer dtype scales pixels to at most 1.
        largest = np.float32(np.iinfo(dtype).max) if self.is_float32 and dtype.kind in "iu" else None
        if factors is None and not names:
            return largest
        illumination = None
        if names:
            self._refuse_other_number(index, shape, len(names), "illumination")
            for name in names:
                size, image_size = (" x ".join(map(str, sides)) for sides in (self._functions[name].shape, shape[3:]))
                if size != image_size:
                    problem = f"{name} has {size} pixels but image {index} has {image_size}"
                    remedy = "pass functions of the image size"
                    raise ArgumentError(problem, path=self._path, image=index, option="illumination", remedy=remedy)
            stack = np.stack([self._functions[name] for name in names])
            illumination = cut(np.broadcast_to(stack[None, :, None], shape))
        if factors is None:
            return Scaling(illumination, None, largest, clip=False)
        offset, divisor = factors.pairs[0 if factors.group_of is None else factors.group_of[index]]
        if len(offset) > 1 or factors.is_measured:
            self._refuse_other_number(index, shape, len(offset), "normalize")
        pair = (values.astype(np.float32)[None, :, None, None, None] for values in (offset, divisor))
        return Scaling(illumination, *(cut(np.broadcast_to(values, shape)) for values in pair), clip=factors.clip)

    def _refuse_other_number(self, index: int, shape: Shape, number: int, option: str) -> None:
        if shape[1] != number:
            problem = f"has {number} values but image {index} of {self._path} has {shape[1]} channels"
            remedy = "pass one value per stored channel, also for channels that select= omits"
            raise ArgumentError(problem, option=option, remedy=remedy)


def _read_factors(source: Images, normalize: Any) -> _Factors:
    values = dict(normalize) if isinstance(normalize, Mapping) else {"stats": normalize}
    stats = values.pop("stats", None)
    if stats is not None:
        if not isinstance(stats, Stats | str | os.PathLike):
            raise _invalid(normalize)
        if not isinstance(stats, Stats) and not Path(stats).is_file():
            raise missing(stats, f"no such file for {_invalid(normalize)}")
        return _measured_factors(source, stats if isinstance(stats, Stats) else read_stats(stats), values, normalize)
    names = next((pair for pair in _PAIRS if set(values) == set(pair)), None)
    if names is None:
        raise _invalid(normalize)
    try:
        first, second = np.broadcast_arrays(*(np.atleast_1d(np.asarray(values[name], np.float64)) for name in names))
    except (TypeError, ValueError):
        raise _invalid(normalize) from None
    if first.ndim > 1 or not first.size:
        raise _invalid(normalize)
    return _Factors([_pair(first, second, names, normalize)], clip=names == _PAIRS[1])


def _pair(first: Array, second: Array, names: Sequence[str], normalize: Any, subject: str = "") -> tuple[Array, Array]:
    """Return offset and divisor per channel from mean and standard deviation, or from the ends of a range."""
    divisor = second if names == _PAIRS[0] else second - first
    with np.errstate(over="ignore"):
        narrow = np.array([first, divisor]).astype(np.float32)  # The precision of the arithmetic.
    if not (np.isfinite(narrow).all() and (narrow[1] > 0).all()):
        condition = "std above 0" if names == _PAIRS[0] else "high above low"
        problem = f"{subject}expected finite values with {condition} in each channel"
        raise ArgumentError(problem, option="normalize", value=normalize, remedy="correct these values")
    return first, divisor


def _measured_factors(source: Images, stats: Stats, options: dict[str, Any], normalize: Any) -> _Factors:
    header = source.header
    measures = tuple(options.get(name) for name in _PAIRS[1]) if options else _PAIRS[0]
    if set(options) - set(_PAIRS[1]) or any(measure not in MEASURES for measure in measures):
        raise _invalid(normalize)
    table = stats.table
    for name in set(stats.by) & set(header.columns.names):  # A CSV file has only strings.
        with suppress(pa.ArrowException):  # Reported later as a missing group.
            cast = table[name].cast(header.columns.schema.field(name).type)
            table = table.set_column(table.column_names.index(name), name, cast)
    rows = table.to_pylist()
    size_c = int(header.shapes[0, 1]) if len(source) else 0
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
    pairs = []
    for key, measured in groups.items():
        subject = f"{stats.path}{_of_group(stats, key)}"
        absent = next((channel for channel in channels if channel not in measured), None)
        if absent is not None:
            problem = f"{subject} has statistics of {list(measured)}, but not of channel {absent!r} of {header.path}"
            raise ArgumentError(problem, option="normalize", remedy="run omearrow-ds stats on these images")
        try:
            values = [[measured[channel][str(name)] for channel in channels] for name in measures]
            first, second = np.array(values, np.float64)
        except (TypeError, ValueError) as error:
            problem = f"invalid table of statistics: {error}; write it with omearrow-ds stats"
            raise FormatError(f"{subject}: {problem}") from None
        pairs.append(_pair(first, second, _PAIRS[1] if options else _PAIRS[0], ..., f"{subject}: "))
    group_of = _groups_of(source, stats, {key: number for number, key in enumerate(groups)}) if stats.by else None
    return _Factors(pairs, bool(options), group_of, is_measured=True)


def _of_group(stats: Stats, key: tuple[Any, ...]) -> str:
    return f", {dict(zip(stats.by, key, strict=True))}" if key else ""


def _groups_of(source: Images, stats: Stats, index_of: Mapping[tuple[Any, ...], int]) -> list[int]:
    header = source.header
    for name in stats.by:
        if name not in header.columns.names:
            raise unknown_column(name, header.columns.names, header.path, f" for the groups in {stats.path}")
    keys = list(zip(*(header.columns.column(name).to_pylist() for name in stats.by), strict=True))
    unknown = next((index for index, key in enumerate(keys) if key not in index_of), None)
    if unknown is not None:
        problem = f"no statistics for the group {keys[unknown]} of image {unknown}"
        remedy = "run omearrow-ds stats on all images"
        raise ArgumentError(problem, path=stats.path, image=unknown, option="normalize", remedy=remedy)
    return [index_of[key] for key in keys]


def _invalid(normalize: Any) -> ArgumentError:
    forms = "{'mean': ..., 'std': ...} or {'low': ..., 'high': ...} with one number, or one per channel"
    files = "a file written by omearrow-ds stats, or {'stats': FILE, 'low': 'p1', 'high': 'p99'}"
    return ArgumentError(option="normalize", value=normalize, allowed=f"True, False, {forms}, {files}")


def _rows_of_functions(source: Images, illumination: Any) -> list[Sequence[Any]]:
    """Return paths or arrays of illumination functions per image and channel; a single row applies to all images."""
    header = source.header
    named = channel_names(source, range(len(source)))
    if illumination is True:
        if not named:
            problem = "illumination=True needs channel names, which these images lack; pass one array per channel"
            raise ColumnError(f"{header.path}: {problem}")
        columns = []
        for channel in named:  # IllumDNA for the channels DNA and OrigDNA.
            candidates = [f"{ILLUM}{channel}", f"{ILLUM}{str(channel).removeprefix('Orig')}"]
            name = next((name for name in candidates if name in header.columns.names), None)
            if name is None:
                use = f" of illumination functions for channel {channel!r}"
                raise unknown_column(candidates[-1], header.columns.names, header.path, use)
            columns.append(header.columns.column(name))
            if columns[-1].null_count:
                problem = f"column {name!r} has nulls; fill them, or pass the functions with illumination="
                raise ColumnError(f"{header.path}: {problem}", column=name)
        return list(zip(*(column.to_pylist() for column in columns), strict=True))
    if isinstance(illumination, Mapping):
        absent = next((name for name in named if name not in illumination), None)
        if absent is not None or not named:
            problem = f"has the channels {list(illumination)}, expected {named}"
            raise ArgumentError(problem, option="illumination", remedy=f"add a function for {absent!r}")
        return [[illumination[name] for name in named]]
    if _is_file(illumination) or isinstance(illumination, np.ndarray):
        stack = _load_function(illumination)
        return [[stack] if stack.ndim < 3 else list(stack)]  # (C, Y, X)
    if isinstance(illumination, Sequence):
        return [list(illumination)]
    allowed = "True, None, a mapping of channel names to .npy files or arrays, or one array per channel"
    raise ArgumentError(option="illumination", value=illumination, allowed=allowed)


def _is_file(function: Any) -> bool:
    return isinstance(function, str | os.PathLike)


def _load_function(stored: Any) -> Array:
    """Return an illumination function, or a stack of them, as float32."""
    is_file = _is_file(stored)
    subject = stored if is_file else "illumination="
    try:
        stack = np.asarray(np.load(stored, allow_pickle=False) if is_file else stored)
    except FileNotFoundError:
        raise missing(str(subject), "no such file; pass .npy files as illumination=") from None
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise FormatError(f"{subject}: invalid illumination function: {error}; pass a .npy file of numbers") from None
    if stack.dtype.kind in "fiu" and stack.ndim in (2, 3):
        with np.errstate(over="ignore"):
            functions: Array = stack.astype(np.float32)
        if (np.isfinite(functions) & (functions > 0)).all():
            return functions
    problem = f"invalid illumination function of {stack.dtype}, expected numbers above 0 with axes YX or CYX"
    raise FormatError(f"{subject}: {problem}; correct the file")


def warn_of_dark_images(path: Path, images: Iterable[Array]) -> None:
    """Warn, once per process, if the first 64 uint16 images have at most 12 bits and are not black.

    ``normalize=True`` makes such images nearly black. Workers and ranks above 0 do not warn.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        is_main_process = torch.distributed.get_rank() == 0 and get_worker_info() is None
    else:
        is_first = all((os.environ.get(name) or "0") == "0" for name in _RANKS)
        is_main_process = is_first and multiprocessing.parent_process() is None
    if HAS_WARNED.is_set() or not is_main_process:
        return
    pixel_range = PixelRange.measure(images, limit=HIGH)
    if pixel_range is not None and pixel_range.normalize is not None:
        HAS_WARNED.set()
        warnings.warn(f"{path}: pixels have at most 12 bits: {pixel_range.text}", UserWarning, stacklevel=2)
