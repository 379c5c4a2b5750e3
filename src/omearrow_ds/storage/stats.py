"""`stats`: statistics of the pixels of a collection by channel and group, in one pass."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from tqdm import tqdm

from omearrow_ds import text
from omearrow_ds.errors import ColumnError, FormatError
from omearrow_ds.options import check_names, refuse_unknown, refuse_value
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._detect import missing
from omearrow_ds.storage.formats._error_translation import MALFORMED, refuse, translate_errors
from omearrow_ds.storage.formats._stored import spread
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.protocol import ImageSource, OpenOptions, Paths, StrPath
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.storage.source import opened
from omearrow_ds.storage.table_files import TableFile
from omearrow_ds.storage.verified import verified_where_stored

PERCENTILES = {"p0.1": 0.1, "p1": 1.0, "p50": 50.0, "p99": 99.0, "p99.9": 99.9}
MEASURES = ("min", "max", "mean", "std", *PERCENTILES)
_SCHEMA = pa.schema(
    [
        *(("channel", pa.int64()), ("channel_name", pa.string()), ("images", pa.int64()), ("pixels", pa.int64())),
        *((name, pa.float64()) for name in MEASURES),
        *(("left_out", pa.int64()), ("saturated", pa.float64()), ("exact", pa.bool_())),
    ]
)
_OPTIONAL = {"left_out", "saturated", "exact"}  # Columns that older tables lack.
_TEXT_TYPES = {pa.int64(): "integer", pa.float64(): "float"}
_LOWEST, _VALUES = -(2**15), 2**15 + 2**16  # Range of integers of 8 and 16 bits.
_SAMPLE_SIZE = 2**20  # Maximum sample per channel and group for percentiles that are not exact.


@dataclass(frozen=True)
class Stats:
    """Pixel statistics of a collection, per group and channel.

    Attributes
    ----------
    path : pathlib.Path
        Path of the collection.
    by : tuple of str
        Columns by which images were grouped.
    table : pyarrow.Table
        One row per group and channel. Columns: those of ``by``; ``channel`` (from 0) and ``channel_name``; numbers of
        ``images`` and ``pixels``; ``min``, ``max``, ``mean``, ``std`` and percentiles ``p0.1``, ``p1``, ``p50``,
        ``p99``, ``p99.9`` in stored pixel values; ``left_out``, the number of infinite or NaN pixels, which other
        columns omit; ``saturated``, the share of pixels at the maximum of an integer dtype; ``exact``, whether
        percentiles cover all pixels (8 and 16 bits) or a sample of a million.

    Examples
    --------
    >>> from omearrow_ds import stats
    >>> measured = stats("plate.arrow")
    >>> measured.table["max"].to_pylist()
    [25608.0, 51208.0]
    >>> measured.write("stats.parquet")
    """

    path: Path
    by: tuple[str, ...]
    table: pa.Table

    @property
    def columns(self) -> pa.Table:
        """Statistics as a table with one row per group and columns such as ``Stats_mean_DNA``."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.table.to_pylist():
            group = {name: row[name] for name in self.by}
            name = row["channel"] if row["channel_name"] is None else row["channel_name"]
            measures = {f"Stats_{measure}_{name}": row[measure] for measure in (*MEASURES, "saturated")}
            rows.setdefault(tuple(group.values()), group).update(measures)
        return pa.Table.from_pylist(list(rows.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as a dictionary that `json.dumps` accepts, with NaN and infinity as None."""
        rows = self.table.to_pylist()
        for row in rows:
            row |= {name: None for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        return {"path": str(self.path), "by": list(self.by), "stats": rows}

    def __repr__(self) -> str:
        return self.as_text()

    def as_text(self) -> str:
        """Return the table as text."""
        table = self.table.to_pylist()
        has_left_out = any(row.get("left_out") for row in table)
        rows = [[", ".join((*self.by, "channel")), *MEASURES, "saturated", *["infinite or NaN"] * has_left_out, ""]]
        for row in table:
            group = ", ".join(str(row[name]) for name in self.by)
            name = row["channel_name"] or f"channel {row['channel']}"
            measures = ["" if row[measure] is None else f"{row[measure]:.6g}" for measure in MEASURES]
            saturated = "" if row["saturated"] is None else f"{row['saturated']:.2%}"
            left_out = [f"{row['left_out']:,}"] if has_left_out else []
            exact = "" if row["exact"] else "of a sample"
            rows.append([f"{group}  {name}".strip(), *measures, saturated, *left_out, exact])
        return "\n".join([str(self.path), *text.table(rows)])

    def write(self, path: StrPath, *, overwrite: bool = False) -> None:
        """Write the table atomically as Parquet, CSV or JSON, by the suffix of ``path``.

        Raises
        ------
        ArgumentError
            If the suffix is unknown.
        PathExistsError
            If ``path`` exists and ``overwrite`` is false.
        """
        target = Path(path)
        check_output(target, overwrite=overwrite)

        def fill(temporary: Path) -> None:
            if target.suffix == ".parquet":
                pq.write_table(self.table, temporary)
            elif target.suffix == ".csv":
                pyarrow.csv.write_csv(self.table, temporary)
            else:
                temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

        publish(target, fill, overwrite=overwrite)


class Samples(Protocol):
    """Interface of a dataset or a view: its source, and the image index of each sample."""

    @property
    def source(self) -> Images:
        """Open source of the images."""

    @property
    def fields(self) -> Array:
        """Image index of each sample, as an integer array (n,)."""


def stats(
    path: Paths | ImageSource | Samples,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    by: str | Sequence[str] | None = None,
    progress: bool = False,
    **opening: Unpack[OpenOptions],
) -> Stats:
    """Measure minimum, maximum, mean, standard deviation and percentiles of the pixels of a collection.

    Parameters
    ----------
    path
        Path of a collection, an open source, a dataset, or a view. Each image of a dataset is measured once and whole.
    format, **opening
        See `open_images`. Images with a checksum are verified unless ``verify=False``.
    by
        ``None`` measures all images together. Otherwise one or several columns to group by, such as
        ``"Metadata_Plate"``.
    progress
        ``False``, or ``True`` for a progress bar.

    Returns
    -------
    Stats
        A table with one row per group and channel.

    Raises
    ------
    ColumnError
        If a column of ``by`` does not exist.
    FormatError
        If the collection is empty, a channel mixes floating-point or 32-bit pixels with other dtypes, or channels
        have different orders.
    OMEArrowDSError
        Errors of `open_images`.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset, stats
    >>> measured = stats("plate.arrow", by="Metadata_Well")
    >>> print(measured.table.num_rows)  # 5 wells with 2 channels
    10
    >>> measured.write("stats.parquet")
    >>> dataset = OMEArrowDataset("plate.arrow", normalize="stats.parquet")
    """
    refuse_unknown(opening, OpenOptions.__annotations__, stats)
    source: Any = path if is_path(path) else getattr(path, "source", path)
    picked = getattr(path, "fields", None)
    picked = None if picked is None else np.unique(picked).tolist()
    with opened("path", source, opening, format, allowed="a path, an open source or a dataset") as images:
        is_verified = opening.get("verify") is not False
        names = () if by is None or by == [] else tuple(check_names("by", by, "the name of a column, or several"))
        if set(names) & set(_SCHEMA.names):
            refuse_value("by", by, "names must differ from the measures", "rename the column")
        return _measured(images, picked, names, verify=is_verified, progress=progress)


def _measured(
    source: Images, of_dataset: Sequence[int] | None, names: tuple[str, ...], *, verify: bool, progress: bool
) -> Stats:
    header = source.header
    by = header.columns.select(names)
    for name, kind in zip(names, by.schema.types, strict=True):
        if pa.types.is_nested(kind):
            problem, remedy = f"column {name!r} is of type {kind}", "pass a column of strings, numbers or times"
            raise ColumnError(problem, path=header.path, column=name, remedy=remedy)
    indices = range(len(source)) if of_dataset is None else of_dataset
    if not len(indices):
        refuse(header.path, "has no images to measure", "pass a collection with images")
    checked = verified_where_stored(source) if verify else source
    images = (image for _, images in checked.stream() for image in images)
    if of_dataset is not None:
        images = (checked.read([index])[0] for index in indices)
    keys = list(zip(*(column.to_pylist() for column in by.columns), strict=True)) or [()] * len(source)
    groups: dict[tuple[Any, ...], list[tuple[str, _Histogram | _Moments]]] = {}
    images = tqdm(images, total=len(indices), unit="image", disable=not progress)
    for index, image in zip(indices, images, strict=True):
        channels = groups.setdefault(keys[index], [])
        kind = "float" if image.dtype.kind == "f" else "small" if image.dtype.itemsize < 4 else "integer"
        for channel in range(image.shape[1]):
            if channel == len(channels):
                channels.append((kind, _Histogram() if kind == "small" else _Moments(is_float=kind == "float")))
            expected, values = channels[channel]
            if kind != expected:
                problem = f"image {index} is {image.dtype}, but previous images have another dtype"
                raise FormatError(problem, path=header.path, image=index, remedy="measure them separately, with by=")
            values.add(image[:, channel])
    labels = [*channel_names(source, indices), *[None] * max(map(len, groups.values()))]
    rows = [
        (*key, channel, labels[channel], *values.measured())
        for key, channels in groups.items()
        for channel, (_, values) in enumerate(channels)
    ]
    schema = pa.schema([*by.schema, *_SCHEMA])
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    return Stats(header.path, names, table)


def channel_names(source: Images, picked: Sequence[int]) -> list[str | None]:
    """Return the channel names of images, read from a few of them; the longest list of names counts."""
    longest: list[str | None] = []
    for position in spread(len(picked)):
        names = [channel["name"] for channel in source.metadata(picked[position])["channels"]]
        longest, shorter = (names, longest) if len(names) > len(longest) else (longest, names)
        if longest[: len(shorter)] != shorter:
            problem = f"image {picked[position]} has the channels {names} but a previous image has {longest}"
            remedy = "measure images with different channels separately"
            raise FormatError(problem, path=source.header.path, image=picked[position], remedy=remedy)
    return longest


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raise an error if statistics cannot be written to ``path``, because of its suffix or because it exists."""
    if path.suffix not in (".parquet", ".csv", ".json"):
        refuse_value("path", path, allowed="a path that ends in .parquet, .csv or .json", remedy="rename it")
    check_target(path, overwrite=overwrite)


def read_stats(path: StrPath) -> Stats:
    """Read a file written by `Stats.write` or by ``omearrow-ds stats --json``."""
    file = TableFile(Path(path).absolute())
    if not file.path.is_file():
        raise missing(path)
    if file.path.suffix == ".json":
        with translate_errors(file.path, "a table of statistics", (pa.ArrowException, *MALFORMED)):
            table = pa.Table.from_pylist(json.loads(file.path.read_text(encoding="utf-8"))["stats"])
    else:
        kinds = {field.name: _TEXT_TYPES.get(field.type, "text") for field in _SCHEMA}  # Plates 001 are text.
        table = file.read(types={name: kinds.get(name, "text") for name in file.names})
        if "exact" in table.column_names:
            table = table.set_column(table.column_names.index("exact"), "exact", table["exact"].cast(pa.bool_()))
    absent = set(_SCHEMA.names) - _OPTIONAL - set(table.column_names)
    if absent:
        problem = f"{file.path}: is not a table of statistics, as it lacks the column {min(absent)!r}"
        raise FormatError(f"{problem}; pass a file written by omearrow-ds stats")
    return Stats(file.path, tuple(name for name in table.column_names if name not in _SCHEMA.names), table)


class _Histogram:
    def __init__(self) -> None:
        self._counts = np.zeros(_VALUES, np.int64)
        self._images = self._saturated = 0

    def add(self, pixels: Array) -> None:
        info = np.iinfo(pixels.dtype)
        flat = pixels.reshape(-1)
        counts = np.bincount(flat if info.min == 0 else flat.astype(np.int64) - info.min)
        self._counts[info.min - _LOWEST :][: len(counts)] += counts
        self._saturated += int(counts[info.max - info.min :].sum())
        self._images += 1

    def measured(self) -> tuple[Any, ...]:
        """Return the values of the columns of `_SCHEMA` that begin with ``images``."""
        values = np.flatnonzero(self._counts)
        counts, values = self._counts[values], (values + _LOWEST).astype(np.float64)
        number = int(counts.sum())
        mean = float((counts * values).sum() / number)
        ranks = np.array(list(PERCENTILES.values())) / 100 * (number - 1)
        stops = np.cumsum(counts)
        low, high = (values[np.searchsorted(stops, rank, side="right")] for rank in (np.floor(ranks), np.ceil(ranks)))
        percentiles = low + (high - low) * (ranks - np.floor(ranks))  # Linear interpolation, as in numpy.percentile.
        std = float(np.sqrt((counts * (values - mean) ** 2).sum() / number))
        measures = float(values[0]), float(values[-1]), mean, std, *percentiles.tolist()
        return self._images, number, *measures, 0, self._saturated / number, True


class _Moments:
    """Statistics of finite values of other dtypes: moments of all, percentiles of a sample spread over the images."""

    def __init__(self, *, is_float: bool) -> None:
        self._is_float = is_float
        self._images = self._number = self._left_out = self._saturated = 0
        self._mean = self._squares = 0.0
        self._min, self._max = np.inf, -np.inf
        self._sample: list[Array] = []
        self._step = 1  # Stride of the sampled pixels.

    def add(self, pixels: Array) -> None:
        flat = pixels.reshape(-1)
        self._images += 1
        if self._is_float:
            is_finite = np.isfinite(flat)
            self._left_out += len(flat) - int(np.count_nonzero(is_finite))
            flat = flat[is_finite]
        else:
            self._saturated += int(np.count_nonzero(flat == np.iinfo(flat.dtype).max))
        if not len(flat):
            return
        number = self._number + len(flat)
        with np.errstate(over="ignore", invalid="ignore"):  # Squares of float64 may be infinite.
            mean = float(flat.mean(dtype=np.float64))
            squares = float(np.square(np.subtract(flat, mean, dtype=np.float64)).sum())
        # Merge the moments of two parts (Chan, Golub and LeVeque, 1979).
        difference = mean - self._mean
        self._squares += squares + difference * difference * self._number * len(flat) / number
        self._mean += difference * len(flat) / number
        self._number = number
        self._min, self._max = min(self._min, float(flat.min())), max(self._max, float(flat.max()))
        self._sample.append(flat[:: self._step].copy())
        while sum(map(len, self._sample)) > _SAMPLE_SIZE:
            self._step *= 2
            self._sample = [np.concatenate(self._sample)[::2]]

    def measured(self) -> tuple[Any, ...]:
        if not self._number:
            return self._images, 0, *[None] * len(MEASURES), self._left_out, None, True
        with np.errstate(over="ignore", invalid="ignore"):
            sample = np.concatenate(self._sample).astype(np.float64)
            percentiles = np.percentile(sample, list(PERCENTILES.values())).tolist()
        measures = self._min, self._max, self._mean, math.sqrt(self._squares / self._number), *percentiles
        saturated = None if self._is_float else self._saturated / self._number
        return self._images, self._number, *measures, self._left_out, saturated, self._step == 1
