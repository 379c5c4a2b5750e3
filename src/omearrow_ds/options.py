"""Options of opening, sampling and writing, each declared once.

Checks, flags of the command line, ``--help`` and the table in ``docs/API.md`` are made from these records. A test
compares the records with the signatures of the public functions.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from omearrow_ds.errors import ArgumentError

if TYPE_CHECKING:
    import re
    from concurrent.futures import Executor

Kind = Literal[
    "any",
    "text",
    "integer",
    "bytes",
    "names",
    "names or auto",
    "repeated",
    "types",
    "mapping",
    "size",
    "task",
    "switch",
]
CROPS = ("center", "random", "grid")
PADS = ("constant", "edge", "reflect", "shift", "drop")


@dataclass(frozen=True)
class Rule:
    """Allowed values and help of one option.

    Attributes
    ----------
    kind
        Form of the value, and of its flag.
    choices, minimum
        Values that the check allows, besides the default.
    flag
        Name of the flag, None for an option that the command line does not have.
    metavar, help, shows_default
        Texts of the flag.
    """

    help: str
    kind: Kind = "any"
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    flag: str | None = ""
    metavar: str | None = None
    shows_default: bool = False


def option(default: Any, help: str, **rule: Any) -> Any:  # noqa: A002  # as click calls it
    """Return a field of a record with a rule."""
    return field(default=default, metadata={"rule": Rule(help, **rule)})


def rule_of(declared: Field[Any]) -> Rule:
    """Return the rule of a field."""
    rule: Rule = declared.metadata["rule"]
    return rule


def flag_of(declared: Field[Any]) -> str | None:
    """Return the flag of an option, or None."""
    flag = rule_of(declared).flag
    return f"--{declared.name.replace('_', '-')}" if flag == "" else flag


def check_integer(
    name: str, value: Any, minimum: int, allowed: str | None = None, maximum: float = float("inf")
) -> int:
    """Return a whole number as Python's int, or raise `ArgumentError`; ``allowed`` describes the allowed values."""
    try:
        number = minimum - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise ArgumentError(option=name, value=value, allowed=allowed or f"a whole number from {minimum}")
    return number


def check_choice(name: str, value: Any, choices: Sequence[str], also: str = "") -> None:
    """Raise `ArgumentError` if a value is not one of the choices."""
    if value not in choices:
        raise ArgumentError(option=name, value=value, allowed=f"one of {', '.join(map(repr, choices))}{also}")


@dataclass(frozen=True, kw_only=True)
class OptionRecord:
    """Base of the records: values that were checked.

    Attributes
    ----------
    chosen
        Options that differ from their defaults.
    """

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
        """Return the record of the options among some values, which may hold other names."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `ArgumentError` for a keyword that is none of those known, which ``**`` takes as well."""
    names = sorted(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}=?" if close else f"there are {', '.join(names)}"
            raise ArgumentError(f"is not an option of {where}", option=name, remedy=hint)


def options_of(record: type[OptionRecord]) -> list[Field[Any]]:
    """Return the declared options of a record."""
    return [declared for declared in record.__dataclass_fields__.values() if declared.init]


def describe_options(record: type[OptionRecord]) -> str:
    """Return a Markdown table of the options of a record, for the reference."""
    lines = ["| option | flag | default | allowed | meaning |", "|---|---|---|---|---|"]
    for declared in options_of(record):
        rule, flag = rule_of(declared), flag_of(declared)
        least = "" if rule.minimum is None else f"from {rule.minimum}"
        allowed = ", ".join(f"`{choice!r}`" for choice in rule.choices) or least
        name, shown = f"`{declared.name}=`", f"`{flag}`" if flag else ""
        lines.append(
            f"| {name} | {shown} | `{declared.default!r}` | {allowed} | {rule.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines)


def _checked(declared: Field[Any], value: Any) -> Any:
    """Return a value that is not the default, or raise `ArgumentError` if it is invalid."""
    name, rule, or_none = declared.name, rule_of(declared), ", or None" if declared.default is None else ""
    if rule.choices:
        check_choice(name, value, rule.choices, or_none)
    elif rule.minimum is not None:
        unit = "number of bytes" if rule.kind == "bytes" else "whole number"
        return check_integer(name, value, rule.minimum, f"a {unit} from {rule.minimum}{or_none}")
    elif rule.kind == "text" and not isinstance(value, str | os.PathLike):
        raise ArgumentError(option=name, value=value, allowed=f"a text{or_none}")
    elif rule.kind == "mapping" and not isinstance(value, Mapping):
        raise ArgumentError(option=name, value=value, allowed="a mapping of axes, e.g. {'C': [0, 2]}")
    elif rule.kind == "task" and not _is_task(value):
        raise ArgumentError(option=name, value=value, allowed="(K, N), task K of N, from 1")
    return value


def _is_task(task: Any) -> bool:
    whole = isinstance(task, Sequence) and [type(number) for number in task] == [int, int]
    return whole and 1 <= task[0] <= task[1]


@dataclass(frozen=True, kw_only=True)
class OpenSettings(OptionRecord):
    """Options of `omearrow_ds.open_images`, in the order of ``--help``; ``Any`` is a type of a later layer."""

    image_column: str | Sequence[str] | None = option(
        None,
        "Column of images in a table; several, an option each, are joined along C.",
        kind="repeated",
        metavar="COLUMN",
    )
    nulls: Literal["error", "skip"] = option(
        "error",
        "Rows of a table whose image is null: error, or skip to leave them out.",
        choices=("error", "skip"),
    )
    level: int = option(0, "Resolution of OME-Zarr images; 0 is the full one.", kind="integer", minimum=0, metavar="N")
    pattern: str | re.Pattern[str] | None = option(
        None,
        "Pattern of file names if several TIFF files make an image, e.g. {well}_{site}_{channel}.tif, or the name of a "
        "layout.",
        metavar="PATTERN",
    )
    channels: Sequence[str] | None = option(
        None, "Channels of such images, in order.", kind="names", metavar="NAME,..."
    )
    incomplete: Literal["error", "skip"] = option(
        "error",
        "Such images with missing files: error, or skip to leave them out.",
        choices=("error", "skip"),
    )
    root: str | os.PathLike[str] | None = option(
        None, "Folder of the files that a table (LoadData) lists.", metavar="FOLDER"
    )
    columns: Any = option(None, "CSV or Parquet file whose columns are joined to the images'.", metavar="TABLE")
    on: Any = option(None, "Columns to join by.", kind="names", metavar="NAME,...")
    column_types: Mapping[str, str] | None = option(
        None,
        "Types of columns in CSV and TSV tables, text, integer or float, e.g. code=text.",
        kind="types",
        metavar="NAME=TYPE,...",
    )
    table: str | None = option(
        None, "Table of a DuckDB file that has several with images.", kind="text", metavar="TABLE"
    )
    engine: str | None = option(
        None, "Reader of pixels, for formats that have several, e.g. pages or pyarrow.", metavar="NAME"
    )
    part_cache: str | os.PathLike[str] | None = option(
        None, "Folder for parts fetched from a URL, which later runs use too.", metavar="DIR"
    )
    part_cache_bytes: int | None = option(
        None, "Largest size of the part cache, e.g. 200GB.", kind="bytes", minimum=0, metavar="BYTES"
    )
    verify: bool | None = option(None, "Compare each image with its stored checksum whenever it is read.", flag=None)
    storage: Any = option(None, "How the server of a URL is reached.", flag=None)


@dataclass(frozen=True, kw_only=True)
class SampleSettings(OptionRecord):
    """Options of `omearrow_ds.OMEArrowDataset` other than those of opening."""

    preload: Any = option(True, "Hold all pixels decoded in memory; auto: if they fit.", flag=None)
    axes: str = option("CYX", "Axes of a sample.", kind="text", flag=None)
    select: Any = option(None, "Indices picked of an axis, e.g. C=0,2.", kind="mapping", flag=None)
    crop_size: tuple[int, int] | None = option(
        None,
        "Crop of samples in pixels, in the middle of images or around objects, e.g. 256 or 256x512.",
        kind="size",
        flag="--crop",
        metavar="SIZE",
    )
    normalize: Any = option(True, "Scale pixels to float32.", flag=None)
    illumination: Any = option(None, "Illumination functions that pixels are divided by.", flag=None)
    transform: Any = option(None, "Callable on each sample's tensor.", flag=None)
    masks: Any = option(None, "Masks that samples come with: a path, a column, or names in braces.", flag=None)
    mask_background: bool = option(False, "Set pixels outside the object of a crop to 0, by its mask.", flag=None)
    target: Any = option(None, "Column that samples come with.", flag=None)
    encode_targets: bool = option(True, "Return codes in place of the texts of a target.", flag=None)
    classes: Any = option(None, "Texts of a target in the order of their codes.", flag=None)
    return_ids: bool = option(False, "Return the id of the image as the last item of a sample.", flag=None)
    max_bytes: int | None = option(None, "Limit for preloading.", kind="bytes", minimum=0, flag=None)
    cache_bytes: int = option(0, "Size of the cache of decoded images.", kind="bytes", minimum=0, flag=None)
    cache_dir: str | os.PathLike[str] | None = option(
        None, "Folder for preloaded pixels that processes share.", flag=None
    )
    progress: bool | None = option(None, "Show a progress bar while preloading.", flag=None)
    objects: Any = option(None, "CSV or Parquet file of cells: samples are the crops around them.", metavar="TABLE")
    center: Sequence[str] | None = option(
        None,
        "Columns with object centers in pixels; by default found by known names.",
        kind="names",
        metavar="Y,X",
    )
    box: Sequence[str] | bool | None = option(
        None,
        "Columns with object boxes, in place of centers; auto finds them by known names.",
        kind="names or auto",
        metavar="Y0,Y1,X0,X1",
    )
    crop: Literal["center", "random", "grid"] | None = option(
        None, "Position of crops without objects.", choices=CROPS, flag=None
    )
    overlap: int | tuple[int, int] | None = option(None, "Pixels that neighboring tiles share.", flag=None)
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None = option(
        None, "Pixels of a crop beyond the edge of its field.  [default: constant]", choices=PADS
    )
    resize: tuple[int, int] | None = option(None, "Size that boxes are scaled to.", flag=None)
    pad_to: tuple[int, int] | None = option(None, "Size of zeros that boxes are put into.", flag=None)


@dataclass(frozen=True, kw_only=True)
class WriteSettings(OptionRecord):
    """Options of `omearrow_ds.write_images`, `convert` and `write_crops` on the target."""

    encoding: Literal["bytes", "list"] = option(
        "bytes",
        "Encoding of table formats; list holds only uint8 and uint16.",
        choices=("bytes", "list"),
        shows_default=True,
    )
    compression: str | None = option(None, "Compression of pixels: none, zstd, ..., as the format of DST supports.")
    rows_per_group: int | None = option(
        None, "Images per row group or record batch (Parquet, Arrow IPC).", kind="integer", minimum=1
    )
    chunk_shape: Sequence[int] | None = option(
        None,
        "Chunks (OME-Zarr, ome-arrow) or tiles (TIFF) in pixels, e.g. 256 or 256x512.",
        kind="size",
        metavar="SIZE",
    )
    checksum: bool = option(
        True,
        "Store a checksum of each image, which is compared when a dataset preloads it.",
        kind="switch",
        shows_default=True,
    )
    part_bytes: int | None = option(
        None,
        "Decoded size of a part of DST.parts.  [64 MiB]",
        kind="bytes",
        minimum=1,
        metavar="BYTES",
    )
    shuffle_seed: int | None = option(None, "Permute images over all parts of a plate.", kind="integer", minimum=0)
    group_by: str | Sequence[str] | None = option(
        None, "Keep different values of these columns in different parts.", kind="names", metavar="NAME,..."
    )
    executor: Executor | None = option(
        None,
        "Processes that write parts: N of this machine, or a Dask cluster by tcp://HOST:PORT or its scheduler file.",
        metavar="local:N|dask:...",
    )
    task: tuple[int, int] | None = option(
        None, "Write only the share of task K of N; then publish DST.", kind="task", metavar="K/N"
    )
    on_error: Literal["raise", "skip"] = option(
        "raise",
        "Images that are unreadable or unlike most: raise an error, or skip to leave them out and list them.",
        choices=("raise", "skip"),
        shows_default=True,
    )
    target_storage: Any = option(None, "How the server of a target at a URL is reached.", flag=None)
    progress: bool = option(False, "Show a progress bar.", flag=None)
    overwrite: bool = option(False, "Replace what exists, once the new collection is complete.", flag=None)

    @property
    def skips_errors(self) -> bool:
        """Whether unreadable images are left out."""
        return self.on_error == "skip"


LAYOUT = ("encoding", "compression", "rows_per_group", "chunk_shape", "checksum")
PARTS = ("part_bytes", "shuffle_seed", "group_by", "executor", "task", "on_error")
