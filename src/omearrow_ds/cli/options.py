"""Options that several commands share, and their output as text or JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from omearrow_ds import text
from omearrow_ds.axes import AXES
from omearrow_ds.cli import failures
from omearrow_ds.options import LAYOUT, PARTS, OpenSettings, OptionRecord, WriteSettings, flag_of, options_of, rule_of
from omearrow_ds.storage.formats import formats
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote import Storage


class _PathOrUrl(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        return path if os.path.lexists(path) else url_of(os.fsdecode(path)) or path


PATH = _PathOrUrl(path_type=Path)
FORMAT = click.Choice([fmt.name for fmt in formats()])

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
Printed = tuple[Mapping[str, Any], Sequence[str]]  # Values for ``--json``, and lines of text.


def json_option(command: Callable[..., Printed]) -> Command:
    """Add ``--json`` to a command, and print its lines of text, or its values and filter as one JSON document."""

    @functools.wraps(command)
    def printed(*, as_json: bool, **options: Any) -> None:
        values, lines = command(**options)
        params = click.get_current_context().params
        values = {**values, "filter": params["filter"]} if "filter" in params else values
        click.echo(json.dumps(values, indent=2, allow_nan=False) if as_json else "\n".join(lines))

    return click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")(printed)


def has_bar() -> bool:
    return not click.get_current_context().params["as_json"] and sys.stderr.isatty()


def names(values: Sequence[str]) -> list[str] | None:
    """Return names that are separated by commas or passed in repeated options."""
    return [name.strip() for value in values for name in value.split(",")] or None


def _reader(pattern: str, expected: str, convert: Callable[..., Any]) -> Callable[[str], Any]:
    """Return a function that converts the groups of ``pattern``; values that do not match or give None are errors."""

    def read(value: str) -> Any:
        match = re.fullmatch(pattern, value.strip())
        result = None if match is None else convert(*match.groups())
        if result is None:
            raise click.BadParameter(f"{value!r} is not {expected}")
        return result

    return read


size_in_bytes = _reader(
    r"(?i)(\d+(?:\.\d+)?)\s*([kmgt]?)b?",
    "a number of bytes; write e.g. 2500000, 2.5MB or 20GB",
    lambda number, unit: int(float(number) * 1000 ** " kmgt".index(unit.lower() or " ")),
)
_type_of_column = _reader("(.*)=([^=]*)", "NAME=TYPE; write e.g. code=text", lambda *pair: pair)
_format_name = _reader(f"({'|'.join(FORMAT.choices)})", f"a format; choose from {', '.join(FORMAT.choices)}", str)
_indices_of_axis = _reader(
    rf"([{AXES}])=(-?\d+(?:,-?\d+)*)",
    f"AXIS=I,...; write an axis of {AXES} and indices, e.g. C=0,2",
    lambda axis, indices: (axis, list(map(int, indices.split(","))) if "," in indices else int(indices)),
)
_REPEATED = ("names", "names or auto", "repeated", "types", "selection")  # Kinds of flags that may be repeated.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "names": names,
    "names or auto": lambda values: True if names(values) == ["auto"] else names(values),
    "repeated": lambda values: values[0] if len(values) == 1 else values or None,
    "types": lambda values: dict(map(_type_of_column, names(values) or ())) or None,
    "selection": lambda values: dict(map(_indices_of_axis, values)) or None,
    "bytes": size_in_bytes,
    "size": _reader(
        r"([1-9]\d*)(?:x([1-9]\d*))?",
        "a size; write 256 or 256x512 (height x width)",
        lambda height, width: (int(height), int(width or height)),
    ),
    "task": _reader(
        r"([1-9]\d*)/([1-9]\d*)",
        "a task; write 3/384 for the third of 384 tasks",
        lambda number, tasks: (int(number), int(tasks)) if int(number) <= int(tasks) else None,
    ),
    "workers": _reader(
        r"(auto|\d+)", "a number from 0 or 'auto'", lambda value: value if value == "auto" else int(value)
    ),
    "preload": lambda value: {"yes": True, "no": False}.get(value, value),
    "formats": lambda value: tuple(map(_format_name, dict.fromkeys(value.split(",")))),
    "rate": _reader("(.*)", f"a rate; {text.RATES}", lambda value: value if text.as_rate(value) else None),
    "time": _reader("(.*)", f"a time; {text.TIMES}", lambda value: None if text.as_seconds(value) is None else value),
}


def read_by(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    return lambda _context, _parameter, value: None if value is None else read(value)


NAMES, BYTES = read_by(names), read_by(size_in_bytes)


def all_of(*options: Decorator) -> Decorator:
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def flags(record: type[OptionRecord], *chosen: str) -> Decorator:
    """Return a decorator that adds the flags of the options in ``chosen``, or of all options of a record."""
    declared = {option.name: option for option in options_of(record) if flag_of(option)}
    return all_of(*(_flag(declared[name]) for name in chosen or declared))


def _flag(declared: Field[Any]) -> Decorator:
    rule, flag = rule_of(declared), str(flag_of(declared))
    types: dict[str, click.ParamType[Any]] = {
        "preload": click.Choice(["yes", "no", "auto"]),
        "number": click.FloatRange(rule.typed_minimum or rule.minimum, min_open=rule.typed_minimum is None),
        "folder": click.Path(exists=True, file_okay=False, path_type=Path),
        "integer": click.IntRange(rule.minimum),
    }
    choice = click.Choice(rule.choices) if rule.choices else None
    settings: dict[str, Any] = {"help": rule.help, "metavar": rule.metavar, "type": types.get(rule.kind, choice)}
    settings["is_flag"] = rule.kind == "flag" or None
    if rule.shows_default:
        default = rule.shows_default if isinstance(rule.shows_default, str) else declared.default
        settings |= {"default": default, "show_default": True}
    if rule.kind in _READERS:
        settings |= {"callback": read_by(_READERS[rule.kind]), "multiple": rule.kind in _REPEATED}
    names = f"{flag}/--no-{flag.removeprefix('--')}" if rule.kind == "switch" else flag
    return click.option(names, declared.name, **settings)


def storage_options(prefix: str = "", owner: str | None = None) -> Decorator:
    """Add the options of an object store, which the command receives as one `Storage` in ``PREFIXstorage``, or None."""
    start, owner = prefix.replace("-", "_"), owner or f"the {prefix.rstrip('-') or 'source'}"
    default = "the endpoint of an s3:// source, or AWS" if prefix else "AWS_ENDPOINT_URL, or AWS"

    def collect(command: Command) -> Command:
        @functools.wraps(command)
        def collected(**values: Any) -> Any:
            stated = {option.name: values.pop(f"{start}{option.name}") for option in fields(Storage)}
            with failures.naming(**{name: f"--{prefix}{name}" for name in stated}):
                storage = Storage(**stated) if any(stated.values()) else None
            return command(**values, **{f"{start}storage": storage})

        return collected

    return all_of(
        click.option(f"--{prefix}anonymous", is_flag=True, help=f"Do not sign requests to {owner}."),
        click.option(f"--{prefix}endpoint", metavar="URL", help=f"S3-compatible endpoint. The default is {default}."),
        click.option(f"--{prefix}region", metavar="NAME", help="Region of the S3 bucket."),
        click.option(f"--{prefix}profile", metavar="NAME", help="Profile in ~/.aws with the credentials."),
        collect,
    )


def opening_options(command: Command) -> Command:
    """Add the options of `omearrow_ds.open_images` to a command, which receives only those that the user passed."""
    keywords = OpenOptions.__annotations__

    @functools.wraps(command)
    def opening(**values: Any) -> Any:
        return command(**{name: value for name, value in values.items() if value is not None or name not in keywords})

    return all_of(flags(OpenSettings), storage_options())(opening)


source_options = all_of(
    click.argument("path", type=PATH),
    click.option("--format", "format", type=FORMAT, help="Format of PATH. By default, it is detected."),
    opening_options,
)


def writing_options(src: str) -> Decorator:
    """Add the options of a command that writes a collection DST; ``src`` is the name of its source in the help."""
    return all_of(
        click.option("--format", "format", type=FORMAT, help="Format of DST; by default from its suffix."),
        flags(WriteSettings, *LAYOUT),
        click.option("--src-format", type=FORMAT, help=f"Format of {src}; by default detected."),
        opening_options,
        click.option("--overwrite", is_flag=True, help="Replace DST when the new one is complete."),
        flags(WriteSettings, *PARTS),
        storage_options("target-"),
        json_option,
    )
