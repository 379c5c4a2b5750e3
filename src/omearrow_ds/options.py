"""Options of opening, sampling and writing, from which checks, flags, ``--help`` and the reference page are made."""

from __future__ import annotations

import difflib
import inspect
import operator
import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from functools import cache, partial
from math import inf
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

from omearrow_ds.errors import ArgumentError

if TYPE_CHECKING:
    from concurrent.futures import Executor

StrPath = str | os.PathLike[str]
_METAVARS = {
    "names": "NAME,...",
    "types": "NAME=TYPE,...",
    "selection": "AXIS=I,...",
    "formats": "NAME,...",
    "bytes": "BYTES",
    "size": "SIZE",
    "task": "K/N",
    "workers": "N|auto",
    "folder": "DIRECTORY",
    "rate": "RATE",
    "time": "TIME",
}
PADS = ("constant", "edge", "reflect", "shift", "drop")


class Rule(NamedTuple):
    """Allowed values and help of one option."""

    help: str
    kind: str = "any"  # Form of the value, and of its flag: "integer", "names" or another one that `cli.options` reads.
    choices: tuple[str | bool, ...] = ()  # Allowed values, besides the default: those of a `Literal` annotation.
    minimum: int | None = None  # A number of kind "number" is above it, an integer at least equal.
    typed_minimum: int | None = None  # Minimum of the flag, if it is higher.
    flag: str | None = ""  # None for an option without flag; an empty string derives it from the name of the option.
    metavar: str | None = None
    shows_default: bool | str = False  # Whether the help states the default, or the default of the flag in other words.


def option(default: Any, help: str, kind: str = "any", **rule: Any) -> Any:  # noqa: A002  # as click calls it
    """Return a field of a record with a rule; numbers start at 0 by default."""
    least = 0 if kind in ("integer", "bytes", "number") else None
    settings = {"metavar": _METAVARS.get(kind), "minimum": least, **rule}
    return field(default=default, metadata={"rule": Rule(help, kind, **settings)})


keyword = partial(option, flag=None)  # For options of Python without flag.


@cache
def rule_of(declared: Field[Any]) -> Rule:
    rule: Rule = declared.metadata["rule"]
    literal = re.search(r"Literal\[(.*?)\]", str(declared.type))
    return rule if literal is None else rule._replace(choices=literal_eval(f"({literal[1]},)"))


def flag_of(declared: Field[Any]) -> str | None:
    """Return the flag of an option, or None."""
    flag = rule_of(declared).flag
    return f"--{declared.name.replace('_', '-')}" if flag == "" else flag


def check_integer(name: str, value: Any, minimum: int, allowed: str | None = None, maximum: float = inf) -> int:
    """Return a whole number as Python's int, or raise `ArgumentError`; ``allowed`` describes the allowed values."""
    try:
        number = minimum - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise ArgumentError(option=name, value=value, allowed=allowed or f"a whole number from {minimum}")
    return number


def check_choice(name: str, value: Any, choices: Sequence[Any], also: str) -> None:
    """Raise `ArgumentError` if a value is not one of the choices."""
    if value not in choices:
        raise ArgumentError(option=name, value=value, allowed=f"one of {', '.join(map(repr, choices))}{also}")


def check_names(name: str, value: Any, allowed: str, count: int | None = None, **fields: Any) -> list[str]:
    """Return one name, or ``count`` distinct names, as a list; ``fields`` are attributes of the `ArgumentError`."""
    # Sets are refused, because their order differs between processes.
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    are_strings = bool(names) and all(isinstance(item, str) for item in names)
    if not are_strings or len(set(names)) < len(names) or count not in (None, len(names)):
        raise ArgumentError(option=name, value=value, allowed=allowed, **fields)
    return names


def check_path(name: str, value: Any) -> Path:
    """Return a string or path as `Path`, or raise `ArgumentError`."""
    if not isinstance(value, str | os.PathLike):
        refuse_value(name, value, allowed="a path", remedy="pass a string or a Path")
    return Path(value)


@dataclass(frozen=True, kw_only=True)
class OptionRecord:
    """Base class of records with checked values; ``chosen`` are those that differ from their defaults."""

    chosen: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values, chosen = vars(self), {}
        for name, declared in self.__dataclass_fields__.items():
            value, default = values.get(name), declared.default
            if declared.init and (type(value) is not type(default) or value != default):
                values[name] = chosen[name] = _checked(declared, value)
        values["chosen"] = chosen

    @classmethod
    def take(cls, values: Mapping[str, Any]) -> Self:
        """Return a record created from those entries of ``values`` that are options of the record."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    @classmethod
    def checked(cls, passed: Mapping[str, Any], known: Iterable[str], owner: str, path: StrPath) -> Self:
        """Return a record of the keywords that are not None; raise an error for unknown ones, see `refuse_unknown`."""
        refuse_unknown(passed, known, owner, path)
        return cls(**{name: value for name, value in passed.items() if value is not None})


def refuse_unknown(
    passed: Mapping[str, Any], known: Iterable[str], owner: str | Callable[..., Any], path: StrPath | None = None
) -> None:
    """Raise `ArgumentError` if a keyword is unknown; the message names its ``owner``, and suggests its parameters."""
    keywords = set(known)
    for name, value in passed.items():
        if name not in keywords:
            if callable(owner):
                keywords |= set(inspect.signature(owner).parameters) - {"options", "opening", "kwargs"}
                owner = owner.__name__
            close = difflib.get_close_matches(name, keywords, 1)
            remedy = f"use {close[0]}=" if close else f"use one of {', '.join(sorted(keywords))}"
            refuse_value(name, value, f"unknown option of {owner}", remedy, path)


def refuse_value(
    name: str, value: Any, problem: str = "", remedy: str = "", path: StrPath | None = None, allowed: str = ""
) -> NoReturn:
    """Raise `ArgumentError` for the value of one option."""
    raise ArgumentError(problem, path=path, option=name, value=value, allowed=allowed, remedy=remedy)


def refuse_options(options: Mapping[str, Any], reason: str, remedy: str = "leave it out") -> None:
    """Raise `ArgumentError` for the first of these options, if any."""
    for name, value in options.items():
        refuse_value(name, value, reason, remedy)


def options_of(record: type[OptionRecord]) -> list[Field[Any]]:
    return [declared for declared in record.__dataclass_fields__.values() if declared.init]


def _checked(declared: Field[Any], value: Any) -> Any:
    """Return a value that is not the default, or raise `ArgumentError` if it is invalid."""
    name, rule, or_none = declared.name, rule_of(declared), ", or None" if declared.default is None else ""
    allowed = remedy = ""
    if rule.choices:
        check_choice(name, value, rule.choices, or_none)
    elif rule.kind == "number":
        if not isinstance(value, Real) or not 0 < value < inf:  # type: ignore[operator]
            allowed = f"a finite number above 0{or_none}"
    elif rule.kind == "bytes":
        allowed = f"a number of bytes from {rule.minimum}{or_none}"
        if not isinstance(value, str):
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            return check_integer(name, number, rule.minimum or 0, allowed)
        remedy = "pass e.g. 20e9 for 20 GB"
    elif rule.minimum is not None:
        return check_integer(name, value, rule.minimum, f"a whole number from {rule.minimum}{or_none}")
    elif rule.kind in ("text", "folder") and not isinstance(value, str | os.PathLike):
        allowed = f"a {'string' if rule.kind == 'text' else 'path'}{or_none}"
    elif rule.kind == "selection" and not isinstance(value, Mapping):
        allowed = "a mapping of axes, e.g. {'C': [0, 2]}"
    elif rule.kind == "formats" and (isinstance(value, str) or not isinstance(value, Iterable)):
        allowed = f"a list of names of formats{or_none}"
    elif rule.kind == "task":
        whole = isinstance(value, Sequence) and [type(number) for number in value] == [int, int]
        if not whole or not 1 <= value[0] <= value[1]:
            allowed = "(K, N) for task K of N, counted from 1"
    if allowed:
        raise ArgumentError(option=name, value=value, allowed=allowed, remedy=remedy)
    return value


@dataclass(frozen=True, kw_only=True)
class OpenSettings(OptionRecord):
    """Options of `omearrow_ds.open_images`, in the order of ``--help``."""

    image_column: str | Sequence[str] | None = option(
        None,
        "Image column of a table. Repeat the option to join several columns along C.",
        "repeated",
        metavar="COLUMN",
    )
    nulls: Literal["error", "skip"] = option("error", "Handling of table rows without an image: error, or skip them.")
    level: int = option(0, "Resolution level of OME-Zarr images; 0 is full resolution.", "integer", metavar="N")
    pattern: str | re.Pattern[str] | None = option(
        None,
        "Pattern of TIFF file names with one plane per file, e.g. {well}_{site}_{channel}.tif, or the name of an "
        "instrument layout, e.g. phenix.",
        metavar="PATTERN",
    )
    channels: Sequence[str] | None = option(
        None, "Channels to read with --pattern or from a LoadData table, in this order.", "names"
    )
    incomplete: Literal["error", "skip"] = option(
        "error", "Handling of images without all of their files: error, or skip them."
    )
    root: StrPath | None = option(
        None, "Folder or URL of the image files that a LoadData table lists.", metavar="FOLDER"
    )
    columns: Any = option(None, "CSV, TSV or Parquet file with columns to join to the images.", metavar="TABLE")
    on: Any = option(None, "Key columns of the join.", "names")
    column_types: Mapping[str, str] | None = option(
        None, "Column types in CSV and TSV tables: text, integer or float, e.g. code=text.", "types"
    )
    filter: Any = option(
        None,
        'Condition on columns that each image (or object) fulfills, e.g. "dose > 1 and site in (1, 2)".',
        metavar="CONDITION",
    )
    table: str | None = option(
        None, "Table of a DuckDB file or LanceDB folder, if several have images.", "text", metavar="TABLE"
    )
    engine: str | None = option(
        None, "Pixel reader, for formats with several readers, e.g. pages or pyarrow.", metavar="NAME"
    )
    part_cache: StrPath | None = option(None, "Folder that caches parts fetched from a URL.", metavar="DIR")
    part_cache_bytes: int | None = option(None, "Maximum size of the part cache, e.g. 200GB.", "bytes")
    verify: bool | None = keyword(None, "Compare each image with its stored checksum at every read.")
    storage: Any = keyword(None, "Endpoint and credentials for the URL.")


@dataclass(frozen=True, kw_only=True)
class SampleSettings(OptionRecord):
    """Options of `omearrow_ds.OMEArrowDataset`, except those that open the collection."""

    preload: Any = keyword(True, "Decode all pixels into memory; auto: if they fit.")
    axes: str = option("CYX", "Axes of a sample.", "text", shows_default=True)
    select: Any = option(None, "Indices of an axis, e.g. C=0,2.", "selection")
    crop_size: tuple[int, int] | None = option(
        None, "Crop size in pixels, at the image center or around objects, e.g. 256 or 256x512.", "size", flag="--crop"
    )
    normalize: Any = option(True, "Scale pixels to float32.", "switch", shows_default=True)
    illumination: Any = keyword(None, "Illumination functions to divide pixels by.")
    transform: Any = option(None, "Function of the tensor of each sample.", metavar="MODULE:NAME")
    masks: Any = option(None, "Masks of the samples: a path, an image column, or a file pattern.", metavar="MASKS")
    mask_background: bool = option(False, "Set pixels outside the object to 0.", "flag")
    target: Any = option(None, "Column of the targets.", metavar="COLUMN")
    encode_targets: bool = keyword(True, "Return integer codes instead of strings.")
    classes: Any = keyword(None, "Strings of the target in the order of their codes.")
    return_ids: bool = keyword(False, "Return the image id as the last item of a sample.")
    max_bytes: int | None = keyword(None, "Memory limit for preloading.", "bytes")
    cache_bytes: int = keyword(0, "Size of the cache of decoded images.", "bytes")
    cache_dir: StrPath | None = keyword(None, "Folder of preloaded pixels that processes share.")
    progress: bool | None = keyword(None, "Show a progress bar while preloading.")
    objects: Any = option(
        None, "CSV, TSV or Parquet file of segmented cells; samples are crops around them.", metavar="TABLE"
    )
    center: Sequence[str] | None = option(
        None, "Columns of object centers in pixels. By default, they are found by known names.", "names", metavar="Y,X"
    )
    box: Sequence[str] | bool | None = option(
        None,
        "Columns of bounding boxes, instead of centers; auto uses known column names.",
        "names or auto",
        metavar="Y0,Y1,X0,X1",
    )
    crop: Literal["center", "random", "grid"] | None = keyword(None, "Position of crops if there are no objects.")
    overlap: int | tuple[int, int] | None = keyword(None, "Pixels that neighboring tiles share.")
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None = option(
        None, "Fill of crops beyond the edge of the field.  [default: constant]"
    )
    resize: tuple[int, int] | None = keyword(None, "Size to scale boxes to.")
    pad_to: tuple[int, int] | None = keyword(None, "Size to pad boxes to with zeros.")


@dataclass(frozen=True, kw_only=True)
class WriteSettings(OptionRecord):
    """Options of `omearrow_ds.write_images`, `convert` and `write_crops` that determine how the target is written."""

    encoding: Literal["bytes", "list"] = option(
        "bytes", "Pixel encoding in table formats; list supports only uint8 and uint16.", shows_default=True
    )
    compression: str | None = option(
        None, "Pixel compression, such as none or zstd. The default depends on the format."
    )
    rows_per_group: int | None = option(
        None, "Images per row group (Parquet) or record batch (Arrow IPC).", "integer", minimum=1
    )
    chunk_shape: Sequence[int] | None = option(
        None, "Size of chunks (OME-Zarr, ome-arrow) or tiles (TIFF) in pixels, e.g. 256 or 256x512.", "size"
    )
    checksum: bool = option(
        True, "Store a checksum per image, which preloading compares.", "switch", shows_default=True
    )
    part_bytes: int | None = option(
        None, "Decoded size of a part in DST.parts.  [default: up to 64 MiB]", "bytes", minimum=1
    )
    shuffle_seed: int | None = option(None, "Seed of a permutation of images over the parts.", "integer")
    group_by: str | Sequence[str] | None = option(
        None, "Columns that separate parts; each part has one value of them.", "names"
    )
    executor: Executor | None = option(
        None,
        "Executor that writes parts: N processes, or a Dask cluster at tcp://HOST:PORT or with a scheduler file.",
        metavar="local:N|dask:...",
    )
    task: tuple[int, int] | None = option(
        None, "Write only task K of N, e.g. 3/384; run publish after all tasks.", "task"
    )
    on_error: Literal["raise", "skip"] = option(
        "raise",
        "Handling of unreadable or deviating images: raise an error, or skip and list them.",
        shows_default=True,
    )
    target_storage: Any = keyword(None, "Endpoint and credentials for a target URL.")
    progress: bool = keyword(False, "Show a progress bar.")
    overwrite: bool = keyword(False, "Replace an existing target after the new one is complete.")

    @property
    def skips_errors(self) -> bool:
        """Whether unreadable images are skipped."""
        return self.on_error == "skip"


_BATCH_SIZE = option(16, "Samples per batch.", "integer", minimum=1, shows_default=True)
_WORK_DIR = option(None, "Folder for temporary copies.  [default: temporary folder of the system]", "folder")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(OptionRecord):
    """Options of `omearrow_ds.profile_dataset`, except those that it passes to the dataset."""

    batch_size: int = _BATCH_SIZE
    num_workers: int | str = option("auto", "Worker processes.", "workers", flag="--workers", shows_default=True)
    preload: Literal[True, False, "auto"] | None = option(
        None, "Decode all pixels into memory; auto: if they fit.", "preload", shows_default="no"
    )
    model: Any = option(None, "torch.nn.Module, or function that returns one.", metavar="MODULE:NAME")
    optimizer: Literal["sgd", "adam", "none"] = option("sgd", "none: only the forward pass.", shows_default=True)
    device: Any = option(None, "Device of batches and model, e.g. cuda.  [default: cpu]")
    shuffle: bool = option(True, "Random order.", "switch", shows_default=True)
    seconds: float | None = option(None, "Time to measure the stages.  [default: 1 to 10]", "number")
    epochs: int | None = option(None, "Number of whole epochs to measure, instead of --seconds.", "integer", minimum=1)
    trials: bool = option(True, "Try other settings, one at a time.", "switch", shows_default=True)
    work_dir: StrPath | None = _WORK_DIR


@dataclass(frozen=True, kw_only=True)
class RecommendSettings(OptionRecord):
    """Options of `omearrow_ds.recommend`, except those that open the collection or create samples."""

    epochs: int = option(10, "Number of epochs.", "integer", minimum=1, shows_default=True)
    access: Literal["random", "sequential"] = option("random", "Order of reads.", shows_default=True)
    budget_bytes: int | None = option(
        None, "Disk space for converted images, e.g. 20GB; by default the free space.", "bytes"
    )
    memory_bytes: int | None = option(None, "Memory for preloaded pixels; by default half of the free memory.", "bytes")
    batch_size: int = _BATCH_SIZE
    seconds: float = option(90.0, "Approximate total time.", "number", typed_minimum=1, shows_default=True)
    tile: int | None = option(
        None, "Store single-channel tiles of N x N pixels instead of images.", "integer", minimum=1, metavar="N"
    )
    formats: Sequence[str] | None = option(None, "Formats to try; by default all.", "formats")
    bandwidth: str | float | None = option(
        None, "Bandwidth of the link to a bucket, e.g. 1Gb (bits/s) or 100MB (bytes/s).", "rate"
    )
    latency: str | float | None = option(None, "Latency of that link, e.g. 20ms.", "time")
    work_dir: StrPath | None = _WORK_DIR


OBJECTS = ("objects", "center", "box", "pad")
LAYOUT = ("encoding", "compression", "rows_per_group", "chunk_shape", "checksum")
PARTS = ("part_bytes", "shuffle_seed", "group_by", "executor", "task", "on_error")
