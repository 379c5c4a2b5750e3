"""Options that several commands share, and JSON output."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import click

from omearrow_ds import text
from omearrow_ds.cli import failures
from omearrow_ds.options import (
    LAYOUT,
    OpenSettings,
    OptionRecord,
    SampleSettings,
    WriteSettings,
    flag_of,
    options_of,
    rule_of,
)
from omearrow_ds.storage.fields import suggestion
from omearrow_ds.storage.formats import formats
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage


class _PathOrUrl(click.Path):
    """Type of an argument that is an existing local path, or a URL, or a new local path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value as a `Path` or `Url`."""
        path = super().convert(value, param, ctx)
        return path if os.path.lexists(path) else url_of(os.fsdecode(path)) or path


PATH = _PathOrUrl(path_type=Path)
FORMAT = click.Choice([fmt.name for fmt in formats()])

# Flags of the source in commands that also have a format of the target.
OF_SOURCE = {
    "format": "--src-format",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (*OpenOptions.__annotations__, *(each.name for each in fields(Storage)))
        if name not in ("verify", "storage")
    },
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
format_option = click.option("--format", "format", type=FORMAT, help="Format of PATH. By default, it is detected.")


def names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """Parse names that are separated by commas or passed in repeated options."""
    del ctx, param
    return [name.strip() for value in values for name in value.split(",")] or None


def _column_types(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Parse column types such as ``code=text,dose=float`` to a mapping."""
    types: dict[str, str] = {}
    for value in names(ctx, param, values) or ():
        name, separator, kind = value.rpartition("=")
        if not separator:
            raise click.BadParameter(f"{value!r} is not NAME=TYPE; write e.g. code=text", ctx, param)
        types[name] = kind
    return types or None


def size_in_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse a number of bytes, with or without a decimal unit."""
    del ctx, param
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a number of bytes; write e.g. 2500000, 2.5MB or 20GB")
    return int(float(found[1]) * _UNITS[found[2]])


def _one_or_more(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | tuple[str, ...] | None:
    del ctx, param
    return values[0] if len(values) == 1 else values or None


Command = Callable[..., Any]
Given = Callable[[dict[str, Any]], dict[str, Any]]


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse height and width in pixels: ``256`` or ``256x512``."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size; write 256 or 256x512 (height x width)", ctx, param)
    return int(found[1]), int(found[2] or found[1])


def _box(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | Literal[True] | None:
    found = names(ctx, param, values)
    return True if found == ["auto"] else found


def _task(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", value)
    if found is None or int(found[1]) > int(found[2]):
        raise click.BadParameter(f"{value!r} is not a task; write 3/384 for task 3 of 384, from 1", ctx, param)
    return int(found[1]), int(found[2])


_READERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "bytes": size_in_bytes,
        "names": names,
        "names or auto": _box,
        "repeated": _one_or_more,
        "types": _column_types,
        "size": _size,
        "task": _task,
    }
)


def flags(record: type[OptionRecord], *chosen: str) -> tuple[Command, ...]:
    """Return click options for the options of a record: all, or only those whose names are in ``chosen``."""
    declared = [each for each in options_of(record) if flag_of(each)]
    return tuple(_flag(each) for each in declared if not chosen or each.name in chosen)


def _flag(declared: Field[Any]) -> Command:
    rule, flag = rule_of(declared), str(flag_of(declared))
    shown: dict[str, Any] = {"default": declared.default, "show_default": True} if rule.shows_default else {}
    if rule.kind == "switch":
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", help=rule.help, **shown)
    choice = click.Choice(rule.choices) if rule.choices else None
    number = click.IntRange(rule.minimum) if rule.kind == "integer" else None
    is_repeated = rule.kind in ("names", "names or auto", "repeated", "types")
    return click.option(
        flag,
        declared.name,
        type=choice or number,
        callback=_READERS.get(rule.kind),
        multiple=is_repeated,
        metavar=rule.metavar,
        help=rule.help,
        **shown,
    )


crop_option = flags(SampleSettings, "crop_size")[0]


def added(options: Sequence[Command], command: Command, given_as: Given) -> Command:
    """Add options to a command, which is called with the result of ``given_as`` on the parsed values."""

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        return command(**given_as(given))

    for option in reversed(options):
        called = option(called)
    return called


def _those_given(names: Iterable[str]) -> Given:
    """Return a function that removes options with these names if they are None."""
    known = set(names)
    return lambda given: {name: value for name, value in given.items() if value is not None or name not in known}


def storage_options(prefix: str = "", of: str | None = None) -> Callable[[Command], Command]:
    """Add the options of an object store, such as ``--PREFIXendpoint``.

    The command receives them as one `Storage` in ``PREFIXstorage``, or None if none is set.
    """
    start, of = prefix.replace("-", "_"), of or f"the {prefix.rstrip('-') or 'source'}"
    default = "the endpoint of an s3:// source, or AWS" if prefix else "AWS_ENDPOINT_URL, or AWS"
    options = (
        click.option(f"--{prefix}anonymous", is_flag=True, help=f"Do not sign requests to {of}."),
        click.option(f"--{prefix}endpoint", metavar="URL", help=f"S3-compatible endpoint. The default is {default}."),
        click.option(f"--{prefix}region", metavar="NAME", help="Region of the S3 bucket."),
        click.option(f"--{prefix}profile", metavar="NAME", help="Profile in ~/.aws with the credentials."),
    )

    def collected(given: dict[str, Any]) -> dict[str, Any]:
        said = {each.name: given.pop(f"{start}{each.name}") for each in fields(Storage)}
        with failures.naming(**{name: f"--{prefix}{name}" for name in said}):
            storage = Storage(**said) if any(said.values()) else None
        return {**given, f"{start}storage": storage}

    return lambda command: added(options, command, collected)


def opening_options(command: Command) -> Command:
    """Add the options of opening. The command receives those that differ from their defaults, as `OpenOptions`."""
    reached = storage_options()(added((), command, _those_given(OpenOptions.__annotations__)))
    return added(flags(OpenSettings), reached, dict)


work_dir_option = click.option(
    "--work-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder for temporary copies.  [default: temporary folder of the system]",
)


def layout_options(command: Command) -> Command:
    """Add the options of the storage layout. The command receives them as ``layout``, a dict of keywords."""
    layout = flags(WriteSettings, *LAYOUT)
    return added(layout, command, lambda given: {"layout": {name: given.pop(name) for name in LAYOUT}, **given})


def object_options(command: Command) -> Command:
    """Add the options of objects. The command receives only the options that the user passed."""
    placed = place_options(added((), command, _those_given(("objects", "center", "box", "pad"))))
    return added(flags(SampleSettings, "objects"), placed, dict)


def place_options(command: Command) -> Command:
    """Add the options for positions of objects."""
    return added(flags(SampleSettings, "center", "box", "pad"), command, dict)


def warn_of_layout(path: Path, opening: Mapping[str, Any]) -> None:
    """Warn on stderr if file names suggest one plane per file, but each file is read as an image."""
    if opening.get("pattern") or not path.is_dir():
        return
    found = suggestion(path)
    if found is not None and found[2] > 1:
        whole = f"{text.count(found[1], 'field')} x {text.count(found[2], 'channel')}"
        problem = f"{click.format_filename(path)}: each file is read as one image, but names suggest {whole}"
        click.echo(f"warning: {problem}; add --pattern {found[0]}", err=True)


def echo_json(found: Any) -> None:
    """Write one JSON document to stdout, in ASCII."""
    click.echo(json.dumps(found, indent=2, allow_nan=False))
