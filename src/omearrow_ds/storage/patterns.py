"""Patterns of image file names: custom ones, and layouts of instruments with their files of channel names.

The layouts are those of exported file names: Opera Phenix and Operetta (Harmony), ImageXpress (MetaXpress),
CellVoyager (Yokogawa), Cytation (Gen5).
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from omearrow_ds.errors import ArgumentError, FormatError, StorageError
from omearrow_ds.options import refuse_value
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._urls import ObjectReader

AXIS_NAMES = ("t", "channel", "z")  # Group names that become axes, in the order of the axes.
_KNOWN = ("plate", "well", "site", "row", "column", "channel", "channel_index", "z", "t")
_ALIKE = 0.85  # Ratio of difflib for misspelled names, such as chanel for channel.
_NUMBERS = ("channel_index", "z", "t", "row", "column")
_FIELD = re.compile(r"\{(\w+)\}")
_HARMONY_INDEX = ("Index.idx.xml", "Index.xml")
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Pattern:
    """Compiled pattern that matches file paths relative to a folder, with ``/`` between folders."""

    text: str  # The pattern as passed.
    file: re.Pattern[str]  # Matches the whole relative path of an image.
    folders: tuple[re.Pattern[str], ...] | None = ()  # Match the folders in the path in order; None accepts any.
    no_image: re.Pattern[str] | None = None  # Matches image files that do not belong to a field.
    names: Mapping[str, str] = field(default_factory=dict)  # Name of each group, known ones in lower case.
    hidden: tuple[bool, ...] = ()  # Whether the pattern of each folder, and of the file, begins with a dot.

    def names_hidden(self, depth: int) -> bool:
        return depth < len(self.hidden) and self.hidden[depth]

    def parse(self, name: str) -> dict[str, str | None] | None:
        """Return the values that a file path has for the names in the pattern; None if the path does not match."""
        match = self.file.fullmatch(name)
        return None if match is None else {self.names[group]: value for group, value in match.groupdict().items()}

    def is_known(self, name: str) -> bool:
        """Whether a file is a plane of a field, or an image that the pattern excludes from fields."""
        return any(pattern.fullmatch(name) for pattern in (self.file, self.no_image) if pattern is not None)

    def enters(self, folder: str, depth: int) -> bool:
        """Whether matching files may be below a folder; ``depth`` is the number of folders above it."""
        return self.folders is None or bool(depth < len(self.folders) and self.folders[depth].fullmatch(folder))


# Regular expressions of the image files of an instrument, without their suffix.
LAYOUTS = {
    "phenix": r"r(?P<row>\d+)c(?P<column>\d+)f(?P<site>\d+)p(?P<z>\d+)-ch(?P<channel>\d+)sk(?P<t>\d+)fk\d+fl\d+",
    "imagexpress": r"(?P<plate>.+)_(?P<well>[A-Z]{1,2}\d{2})(?:_s(?P<site>\d+))?(?:_w(?P<channel>\d))?"
    r"(?:[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12})?",
    "cellvoyager": r"(?:(?P<plate>.+)_)?(?P<well>[A-Z]{1,2}\d{2})_T(?P<t>\d{4})F(?P<site>\d{3})L\d{2}A\d{2}"
    r"Z(?P<z>\d{2,3})C(?P<channel>\d{2})",
    "cytation": r"(?P<well>[A-Z]{1,2}\d{1,2})_\d{2}_(?P<channel_index>\d+)_(?P<site>\d+)_(?P<channel>[^_/]+)"
    r"_(?P<t>\d{3})",
}
_THUMBNAILS = {"imagexpress": r".*_thumb[0-9A-Fa-f-]*"}
_SUFFIX = r"\.(?i:tiff?)"


@cache
def _layout(name: str) -> Pattern:
    file = re.compile(LAYOUTS[name] + _SUFFIX)
    thumbnails = re.compile(_THUMBNAILS[name] + _SUFFIX) if name in _THUMBNAILS else None
    return Pattern(name, file, (), thumbnails, {group: group for group in file.groupindex})


def compiled(pattern: str | re.Pattern[str]) -> Pattern:
    if isinstance(pattern, str) and pattern in LAYOUTS:
        return _layout(pattern)
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        refuse_value("pattern", pattern, allowed="a pattern with braces, a regular expression or the name of a layout")
    is_regex = isinstance(pattern, re.Pattern) or "(?P<" in text
    steps = re.sub(r"\[[^]]*\]", "", text).split("/") if is_regex else text.split("/")
    hidden = tuple(step.startswith(("\\.", "^\\.") if is_regex else ".") for step in steps)
    folders: tuple[re.Pattern[str], ...] | None = None if len(steps) > 1 else ()
    try:
        file = re.compile(pattern if is_regex else _regex(text))
        if not is_regex:
            folders = tuple(re.compile(_regex("/".join(steps[: n + 1]))) for n in range(len(steps) - 1))
    except re.error as error:
        raise ArgumentError(f"is not a regular expression: {error}", option="pattern", value=text) from None
    if not file.groupindex:
        written = "write names in braces as in '{well}_{site}_{channel}.tif', or groups (?P<well>...)"
        remedy = f"{written}, or pass the name of a layout: {', '.join(map(repr, LAYOUTS))}"
        refuse_value("pattern", text, "contains no names", remedy)
    return Pattern(text, file, folders, names=_known_names(text, list(file.groupindex)), hidden=hidden)


def _known_names(text: str, groups: Sequence[str]) -> dict[str, str]:
    """Return the name of each group: known names in lower case, as CellProfiler capitalizes them."""
    names = {group: group.lower() if group.lower() in _KNOWN else group for group in groups}
    for group, name in names.items():
        close = [] if name in _KNOWN else difflib.get_close_matches(name.lower(), _KNOWN, 1, _ALIKE)
        if close:
            refuse_value("pattern", text, f"has the unknown name {group!r}", f"write {close[0]!r}, or rename it")
    refuse_equal_names(text, list(names.values()))
    return names


def refuse_equal_names(text: str, names: Sequence[str]) -> None:
    """Raise `ArgumentError` if two names in a pattern denote the same axis or column."""
    for name in names:
        if names.count(name) > 1:
            refuse_value("pattern", text, f"two of its names refer to the column {column_of(name)!r}", "rename one")


def _regex(pattern: str) -> str:
    first, *pieces = _FIELD.split(pattern)
    names, literals = pieces[::2], pieces[1::2]
    if any("{" in literal or "}" in literal for literal in (first, *literals)):
        refuse_value("pattern", pattern, "a brace is empty or not closed", "write names in braces: {well}")
    if "" in literals[:-1]:
        adjacent = " and ".join(f"{{{name}}}" for name in names[literals.index("") :][:2])
        remedy = "write a text between them, or a regular expression"
        refuse_value("pattern", pattern, f"{adjacent} are adjacent", remedy)
    regex = re.escape(first)
    for name, literal in zip(names, literals, strict=True):
        if name.startswith("_"):
            regex += "[^/]*?"
        elif f"(?P<{name}>" in regex:
            regex += f"(?P={name})"
        else:
            regex += f"(?P<{name}>{r'[0-9]+' if name.lower() in _NUMBERS else '[^/]+?'})"
        regex += re.escape(literal)
    return regex


def layout_of(names: Sequence[str]) -> Pattern | None:
    """Return the first layout that all files have; None without files."""
    return next((layout for layout in map(_layout, LAYOUTS) if names and all(map(layout.is_known, names))), None)


def column_of(name: str) -> str:
    """Return the column name for a name in a pattern, as in CellProfiler: ``Metadata_Well`` for ``well``."""
    return name if name.startswith("Metadata_") else f"Metadata_{name[:1].upper()}{name[1:]}"


def well_of(row: str, column: str) -> str:
    """Return the name of a well, such as ``B07`` for row 2 and column 7; row 27 is AA."""
    tens, ones = divmod(int(row) - 1, 26)
    return f"{chr(ord('A') + tens - 1) if tens > 0 else ''}{chr(ord('A') + ones)}{int(column):02d}"


def harmony_channels(
    folder: Path, channels: Sequence[str], objects: ObjectReader | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the channel names by number and the pixel sizes from the nearest Harmony index file."""
    # Both are empty without an index. Channels that the index does not name are left out. Elements ``Image``, or
    # ``Entry`` in newer versions, have ``ChannelID``, ``ChannelName``, and ``ImageResolutionX`` and ``-Y`` in meters.
    index, opened = _open_index(folder, objects)
    if index is None:
        return {}, {}
    numbers, names, sizes = {str(int(channel)): channel for channel in channels}, dict[str, str](), dict[str, Any]()
    try:
        with opened as file:
            if b"<!DOCTYPE" in file.read(_HEAD_BYTES):
                raise ET.ParseError("the XML has a document type (DOCTYPE)")  # noqa: TRY301  # The handler below adds the file name.
            file.seek(0)
            for _, element in ET.iterparse(file):  # noqa: S314  # Entities need a document type.
                values = {child.tag.rpartition("}")[2]: child.text or "" for child in element} | dict(element.attrib)
                channel = numbers.get(values.get("ChannelID", ""))
                if channel is not None:
                    for axis in "xy":
                        meters = values.get(f"ImageResolution{axis.upper()}")
                        if meters:
                            sizes |= {f"physical_size_{axis}": float(meters) * 1e6, f"physical_size_{axis}_unit": "µm"}
                    if values.get("ChannelName"):
                        names.setdefault(channel, values["ChannelName"].strip())
                if len(names) == len(numbers) and sizes:
                    break
                if len(element):
                    element.clear()
    except (ET.ParseError, ValueError) as error:
        raise FormatError(f"{index}: channel names cannot be read: {error}; restore or remove the file") from None
    if len(set(names.values())) < len(names):  # Two exposures of one dye.
        names = {number: f"{name} {number}" for number, name in names.items()}
    return names, sizes


def _open_index(folder: Path, objects: ObjectReader | None) -> tuple[Path | None, Any]:
    """Return path and open file of the index next to the images or above their folder ``Images``; None without one."""
    folders = [folder, *([folder.parent] if folder.name.lower() == "images" else [])]
    indexes: list[tuple[Path, Any]] = []
    for path in (parent / name for parent in folders for name in _HARMONY_INDEX):
        with suppress(FileNotFoundError, StorageError):  # Keys may allow to read the images only.
            if objects is None:
                refuse_special(path)
            indexes.append((path, path.open("rb") if objects is None else objects.open(str(path))))
    for path, unused in indexes[1:]:
        unused.close()
        problem = f"{path}: is ignored, because {indexes[0][0]} names the channels"
        warnings.warn(f"{problem}; remove one of them", UserWarning, stacklevel=2)
    return indexes[0] if indexes else (None, None)
