"""Fields of view with one file per plane, found by file name or listed in a table, and joined when read."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from omearrow_ds.codec.schema import channel_of
from omearrow_ds.errors import FormatError
from omearrow_ds.options import check_names, refuse_value
from omearrow_ds.storage import patterns
from omearrow_ds.storage.extents import Region, Regions, Targets, chunk_windows, size_of
from omearrow_ds.storage.formats import _detect, get_format
from omearrow_ds.storage.formats._base import Array, Block, Images, ImagesWrapper, copy_others
from omearrow_ds.storage.formats._columns import ImageColumns
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._folder import (
    FileReader,
    Folder,
    ListedFile,
    index_of_most,
    link_refused,
    natural_key,
    open_files,
)
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._urls import ObjectReader
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.writing import is_unicode
from omearrow_ds.text import count

_NUM_EXAMPLES = 6
_PLANE_AXES = {"t": "T", "channel": "C", "z": "Z"}
File = TypeVar("File")
_Key = tuple[str, ...]  # Values of the columns of a field.
Plane = tuple[str, str, str]  # Time, channel and Z of a plane in its field, as spelled in file names.


@dataclass(frozen=True)
class Fields:
    files: Sequence[ListedFile]  # Names are relative to a folder, or absolute.
    grids: Sequence[Array]  # One array (T, C, Z) of file indices per field.
    image_ids: Sequence[str]  # One id per field.
    columns: pa.Table  # One row per field.
    channels: Sequence[str]  # Names of the channels; empty if the files are whole images.
    rows: Array  # (N,) int64, the index of each field, or of its first row in the table that lists it
    sizes: Mapping[str, Any] = field(default_factory=dict)  # Physical sizes from a file of metadata.
    kinds: Sequence[int] = ()  # One number per field, equal for fields whose files have one size.
    split_along: str = ""  # Axes in file names, along which files may hold parts of their own images.

    @cached_property
    def shared_files(self) -> set[str]:
        """Files with pages of several fields, whose names do not identify a field."""
        of_fields = ({self.files[number].file for number in grid.flat} for grid in self.grids)
        return {file for file, count in Counter(chain.from_iterable(of_fields)).items() if count > 1}

    def file_stems(self, row: int) -> list[str]:
        files = [self.files[number].file for number in self.grids[row].flat]
        return [Path(file).stem for file in files if file not in self.shared_files]


class FieldSource(ImagesWrapper):
    """Fields of view, each of which is assembled from several image files along T, C and Z."""

    def __init__(self, files: Images, fields: Fields) -> None:
        header = files.header
        first = [int(grid.flat[0]) for grid in fields.grids]
        self._fields, self._plane = fields, header.shapes[first].reshape(-1, 5)
        self._are_planes = bool((self._plane[:, :3] == 1).all())
        shapes = self._plane.copy()
        shapes[:, :3] *= np.array([grid.shape for grid in fields.grids], np.int64).reshape(-1, 3)
        pages = (file[1:3] for file in fields.files if file.origin)
        joined = repr([list(map(attrgetter("file"), fields.files)), [grid.tolist() for grid in fields.grids], *pages])
        super().__init__(
            files,
            image_ids=fields.image_ids,
            shapes=shapes,
            dtypes=[header.dtypes[number] for number in first],
            columns=ImageColumns(header.path, fields.image_ids, fields.columns),
            selected_rows=fields.rows,
            variant=(digest_of(joined.encode(errors="surrogateescape")),),
        )
        of_files = files.details
        self.details = replace(
            of_files,
            storage_info=partial(_storage_of_fields, of_files.storage_info, fields),
            file_stems=fields.file_stems,
            files_of=lambda row: [file for number in fields.grids[row].flat for file in of_files.files_of(int(number))],
        )

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        if regions is None or not self._are_planes:
            return self._read_files(rows, regions, out)
        files: list[int] = []
        in_files: list[Region] = []
        shapes = []
        for row, (t0, c0, z0, y0, x0, t1, c1, z1, y1, x1) in zip(rows, regions, strict=True):
            grid = self._fields.grids[row][t0:t1, c0:c1, z0:z1]
            files += grid.ravel().tolist()
            in_files += [[0, 0, 0, y0, x0, 1, 1, 1, y1, x1]] * grid.size
            shapes.append((*grid.shape, y1 - y0, x1 - x0))
        planes = self.source.read(files, in_files)
        if len(planes) == len(rows):
            return planes
        arrays, first = [], 0
        for shape in shapes:
            stop = first + math.prod(shape[:3])
            arrays.append(np.concatenate(planes[first:stop]).reshape(shape))
            first = stop
        return arrays

    def _read_files(self, rows: Sequence[int], regions: Regions, out: Targets) -> list[Array]:
        """Return whole images or regions, made of those parts of files that they contain."""
        files: list[int] = []
        in_files: list[Region] = []
        windows: list[tuple[int, tuple[slice, ...]]] = []
        shapes = [self.header.shapes[row].tolist() for row in rows] if regions is None else list(map(size_of, regions))
        for number, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            region = [0, 0, 0, 0, 0, *shape] if regions is None else regions[number]
            lead = [*region[:3], *region[5:8]]
            for position, inner, outer in chunk_windows(lead, self._plane[row, :3].tolist()):
                files.append(self._fields.grids[row].item(position))
                windows.append((number, outer))
                if regions is not None:
                    starts, stops = [cut.start for cut in inner], [cut.stop for cut in inner]
                    in_files.append([*starts, *region[3:5], *stops, *region[8:]])
        if out is None and len(files) == len(rows):
            return self.source.read(files, in_files or None)
        images = out or [np.empty(shape, self.header.dtypes[row]) for row, shape in zip(rows, shapes, strict=True)]
        targets = [images[number][outer] for number, outer in windows]
        can_fill = regions is None and all(target.flags.c_contiguous for target in targets)
        copy_others(self.source.read(files, in_files or None, targets if can_fill else None), targets)
        return list(images)

    def prefetch(self, rows: Sequence[int]) -> None:
        self.source.prefetch([int(number) for row in rows for number in self._fields.grids[row].flat])

    def stream(self) -> Iterator[Block]:
        self.prefetch(range(len(self)))
        return super().stream()

    def metadata(self, index: int) -> dict[str, Any]:
        metadata = {**self.source.metadata(int(self._fields.grids[index].flat[0])), **self._fields.sizes}
        names, size_c = self._fields.channels, int(self._plane[index, 1])
        if not names:
            return metadata
        if size_c > 1:
            names = [f"{name} {number}" for name in names for number in range(size_c)]
        of_file = metadata["channels"][0] if len(metadata["channels"]) == len(names) == 1 else channel_of({})
        return {**metadata, "name": None, "channels": [{**of_file, "id": None, "name": name} for name in names]}

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldSource, (self.source, self._fields)


def _storage_of_fields(storage_of_files: Callable[[], Stored], fields: Fields) -> Stored:
    stored = storage_of_files()
    sizes = sorted({grid.size for grid in fields.grids})
    number = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    return replace(stored, chunking=f"{number} files per image, {stored.chunking.partition(', ')[2]}")


def open_pattern(
    path: Path, options: Mapping[str, Any], objects: ObjectReader | None, *, skip_errors: bool
) -> FieldSource:
    """Open image files in a folder as fields of view; a pattern assigns files to fields, see `open_images`."""
    compiled, channels = patterns.compiled(options["pattern"]), options.get("channels")
    if not path.is_dir() if objects is None else path.name.lower().endswith(_detect.TIFF_SUFFIXES):
        refuse_value("pattern", compiled.text, f"{path} is a file", "pass the folder of the files")
    files_below = _files_below(path, compiled) if objects is None else _objects_below(path, compiled, objects)
    parsed = _matched(path, compiled, sorted(files_below))  # The order of a folder differs between disks.
    names = _names(parsed, f"{path}: pattern={compiled.text!r}")
    by_index = dict[str, Any]()
    if "channel_index" in names:
        names.remove("channel_index")
        names.append("channel")
        by_index = _by_index(path, parsed)
    if channels is not None and "channel" not in names:
        problem, remedy = f"pattern={compiled.text!r} does not contain {{channel}}", "add {channel} to the pattern"
        refuse_value("channels", channels, problem, remedy)
    keys = [name for name in names if name not in patterns.AXIS_NAMES]
    columns = [patterns.column_of(key) for key in keys]
    patterns.refuse_equal_names(compiled.text, columns)
    planes = _planes(path, parsed, keys)
    known = sorted({channel for field in planes.values() for _, channel, _ in field}, key=natural_key)
    known.sort(key=lambda channel: by_index.get(channel, []))
    renamed, sizes = patterns.harmony_channels(path, known, objects) if compiled.text == "phenix" else ({}, {})
    labels = {channel: renamed.get(channel, channel) for channel in known}
    chosen = known if channels is None else picked_channels(path, channels, {labels[name]: name for name in known})
    order = sorted(planes, key=lambda key: list(map(natural_key, key)))

    def describe(_: int, plane: Plane) -> str:
        values = zip(_PLANE_AXES, (plane[0], labels[plane[1]], plane[2]), strict=True)
        return ", ".join(f"{name} {value}" for name, value in values if value)

    of_fields = [{plane: name for plane, name in planes[key].items() if plane[1] in chosen} for key in order]
    current = ", ".join(map(labels.__getitem__, chosen[:_NUM_EXAMPLES])) or "none"
    more = ", ..." if len(chosen) > _NUM_EXAMPLES else ""
    others = f", pass other channels in channels=, or correct the channel names of pattern= (now: {current}{more})"
    remedies = "restore the file", others
    names_of = list(map("_".join, order))
    skip = options.get("incomplete") == "skip"
    files, grids, complete = assemble(path, of_fields, names_of, chosen, describe, remedies, skip=skip)
    keys_of = list(map(order.__getitem__, complete))
    ids = ["_".join(key) or path.absolute().name for key in keys_of]
    fields = Fields(
        list(map(ListedFile, files)),
        grids,
        ids if len(set(ids)) == len(ids) else list(map(json.dumps, keys_of)),  # Two keys may have one id.
        pa.table({name: typed(name, [key[n] for key in keys_of]) for n, name in enumerate(columns)}),
        [labels[name] for name in chosen if name],
        np.arange(len(keys_of)),
        sizes,
        split_along="".join(axis for name, axis in _PLANE_AXES.items() if name in names),
    )
    return joined_files(path, path, fields, objects, skip_errors=skip_errors)


def _matched(path: Path, pattern: patterns.Pattern, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the image files of a folder with the values in their names; raise `FormatError` if some do not match."""
    parsed: dict[str, dict[str, Any]] = {}
    others = []
    for name in names:
        values = pattern.parse(name)
        if values is not None:
            parsed[name] = values
        elif _is_tiff(name) and not _detect.is_hidden(name.rpartition("/")[2]) and not pattern.is_known(name):
            others.append(name)
    subject = f"pattern={pattern.text!r}"
    if not parsed and not others:
        _detect.refuse_folder_of_others(path)
        problem = f"contains no TIFF file at the folder depth of {subject}"
        refuse(path, problem, "pass the folder of the images, or change the pattern")
    if others:
        number = f"{len(others):,} of {len(parsed) + len(others):,} TIFF files"
        problem = f"{number} do not match {subject}, e.g. {min(others, key=natural_key)!r}"
        refuse(path, problem, "correct the pattern, or move these files to another folder")
    for name in parsed:
        if not _is_tiff(name):
            raise FormatError(f"{path}: {subject} matches {name!r}, expected TIFF files only; narrow the pattern")
    for name in parsed:
        if not is_unicode(name):
            raise FormatError(f"{path}: the name {name!r} is not UTF-8, so no column can store it; rename the file")
    return parsed


def _planes(path: Path, parsed: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> dict[_Key, dict[Plane, str]]:
    planes: dict[_Key, dict[Plane, str]] = {}
    for name, values in parsed.items():
        plane = (values.get("t", ""), values.get("channel", ""), values.get("z", ""))
        key = tuple(map(values.__getitem__, keys))
        other = planes.setdefault(key, {}).setdefault(plane, name)
        if other != name:
            remedy = "in pattern=, name the part of the file names that differs, or move one file to another folder"
            refuse(path, f"{other} and {name} are both the same plane of field {'_'.join(key)}", remedy)
    return planes


def joined_files(
    path: Path, root: Path, fields: Fields, objects: ObjectReader | None = None, *, skip_errors: bool = False
) -> FieldSource:
    """Return a source of fields whose files are in the folder ``root``, or at URLs if ``objects`` is passed."""
    # Shape and dtype are those of the first field's files, by channel. Other files are compared with them when they are
    # read. With `Fields.kinds`, the first field of each kind is the reference. With ``skip_errors``, all files are
    # inspected, and a field with the most frequent shape and dtype is the reference.
    module: Any = get_format("tiff").module()
    folder = Folder(path, "tiff", module.ERRORS, objects)
    folder.root, folder.split_along = root, fields.split_along
    reader: FileReader = module.TiffReader(folder)
    names = [""] * len(fields.files)
    of_channels = list(map(", channel {}".format, fields.channels)) or [""]
    for image_id, grid in zip(fields.image_ids, fields.grids, strict=True):
        for (_, c, _), number in np.ndenumerate(grid):
            names[number] = f"field {image_id}{of_channels[c]}"
    model = 0
    if skip_errors:
        model = index_of_most(reader, fields.files, (grid.flat for grid in fields.grids), fields.image_ids)
    first, like = fields.grids[model][0, :, 0], np.zeros(len(names), np.int64)
    of_kind = fields.kinds or [0] * len(fields.grids)
    firsts: dict[int, Array] = {of_kind[model]: first}
    for grid, kind in zip(fields.grids, of_kind, strict=True):
        like[grid] = firsts.setdefault(kind, grid[0, :, 0])[:, None]
    source = open_files(reader, fields.files, names, like.tolist())
    examples: dict[str, str] = {}
    for number in first.tolist():
        layout = f"{tuple(source.header.shapes[number].tolist())} {source.header.dtypes[number]}"
        examples.setdefault(layout, f"{fields.files[number].file} is {layout}")
    if len(examples) > 1:
        problem = f"{path}: channels of field {fields.image_ids[model]} differ: {', '.join([*examples.values()][:2])}"
        raise FormatError(f"{problem}; pass channels= with channels of one shape and dtype")
    return FieldSource(source, fields)


def suggestion(path: Path) -> tuple[str, int, int] | None:
    """Return the file name layout that matches all images of a folder, and the numbers of fields and channels."""
    names = list(filter(_is_tiff, _files_below(path, patterns.Pattern("", re.compile("")))))
    layout = patterns.layout_of(names)
    if layout is None:
        return None
    parsed = list(filter(None, map(layout.parse, names)))
    not_of_fields = (*patterns.AXIS_NAMES, "channel_index")
    fields = {tuple(value for name, value in values.items() if name not in not_of_fields) for values in parsed}
    return layout.text, len(fields), len({values.get("channel") for values in parsed})


def warn_of_layout(path: Paths, opening: OpenOptions) -> None:
    """Warn if file names suggest that each file is one channel of a field, but each file is read as an image."""
    if opening.get("pattern") is not None or not isinstance(path, str | os.PathLike) or not Path(path).is_dir():
        return
    if (Path(path) / _detect.SIDECAR).is_file():  # This package wrote the files.
        return
    try:
        layout, num_fields, num_channels = suggestion(Path(path)) or ("", 0, 0)
    except (OSError, FormatError):  # Opening reports unreadable entries.
        return
    if num_channels > 1:
        names = f"{count(num_fields, 'field')} x {count(num_channels, 'channel')}"
        problem = f"{path}: each file is read as one image, but file names suggest {names}"
        warnings.warn(f"{problem}; pass pattern={layout!r}", UserWarning, stacklevel=3)


def _is_tiff(name: str) -> bool:
    return name.lower().endswith(_detect.TIFF_SUFFIXES)


def _files_below(path: Path, pattern: patterns.Pattern) -> Iterator[str]:
    folders = [("", 0)]
    while folders:
        inside, depth = folders.pop()
        is_deepest = pattern.folders is None or depth == len(pattern.folders)
        with os.scandir(path / inside) as entries:
            for entry in entries:
                name, is_folder, is_image = f"{inside}{entry.name}", entry.is_dir(), _is_tiff(entry.name)
                is_used = pattern.enters(name, depth) if is_folder else is_image or is_deepest
                if not is_used or (_detect.is_hidden(entry.name) and not pattern.names_hidden(depth)):
                    continue
                if (is_folder or is_image) and entry.is_symlink():
                    raise link_refused(Path(entry.path))
                if is_folder:
                    folders.append((f"{name}/", depth + 1))
                    continue
                if is_image and not entry.is_file():
                    _detect.refuse_special(entry.path)
                yield name


def _objects_below(path: Path, pattern: patterns.Pattern, objects: ObjectReader) -> Iterator[str]:
    for name in filter(_is_tiff, objects.inside(str(path))):
        steps = name.split("/")
        parents = ["/".join(steps[:depth]) for depth in range(1, len(steps))]
        is_deepest = pattern.folders is None or len(parents) == len(pattern.folders)
        is_shown = all(pattern.names_hidden(depth) for depth, step in enumerate(steps) if _detect.is_hidden(step))
        if is_deepest and is_shown and all(map(pattern.enters, parents, range(len(parents)))):
            yield name


def _names(parsed: dict[str, dict[str, str | None]], subject: str) -> list[str]:
    """Return the group names; replace row and column by well, and leave out names that no file has."""
    names = list(next(iter(parsed.values())))
    for name in list(names):
        absent = [file for file, values in parsed.items() if values[name] is None]
        if len(absent) == len(parsed):
            names.remove(name)
        elif absent:
            raise FormatError(f"{subject} matches {name} in some file names but not in {absent[0]!r}; rename the files")
    if "well" not in names and {"row", "column"} <= set(names):
        names[names.index("row")] = "well"
        names.remove("column")
        for file, values in parsed.items():
            row, column = values["row"] or "", values["column"] or ""
            if not row.isdecimal() or not column.isdecimal():
                problem = f"{subject}: row and column in {file!r} are not numbers"
                raise FormatError(f"{problem}; rename them in the pattern, e.g. to well")
            values["well"] = patterns.well_of(row, column)
    return names


def _by_index(path: Path, parsed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a sort key of each channel by name, from its index; if files have no name, the index is the name."""
    known: dict[str, tuple[int, str]] = {}
    for file, values in parsed.items():
        index = values["channel_index"]
        channel = values.setdefault("channel", index)
        number = int(index) if index.isdecimal() else index
        other, example = known.setdefault(channel, (number, file))
        if other != number:
            problem = f"channel {channel} has the index {other} in {example!r} and {number} in {file!r}"
            refuse(path, problem, "replace {channel_index} in pattern= with {_}, and order channels with channels=")
    return {channel: natural_key(str(number)) for channel, (number, _) in known.items()}


def picked_channels(path: Path, channels: Any, known: Mapping[str, str]) -> list[str]:
    """Look up each name of ``channels`` in ``known``; raise `ArgumentError` for unknown or repeated names."""
    allowed = f"distinct names of {', '.join(map(repr, known))}"
    names = check_names("channels", channels, allowed, path=path)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        refuse_value("channels", channels, f"no channel {unknown!r}", f"pass {allowed}", path)
    return [known[name] for name in names]


def assemble(
    path: Path,
    planes: Sequence[Mapping[Plane, File]],
    names: Sequence[str],
    chosen: Sequence[str],
    describe: Callable[[int, Plane], str],
    remedies: tuple[str, str],
    *,
    skip: bool,
) -> tuple[list[File], list[Array], list[int]]:
    """Return files in the order of their planes, the grids of complete fields, and the numbers of these fields.

    ``planes`` are those of the ``chosen`` channels per field, and ``names`` the names of fields for errors. With
    ``skip``, warns of incomplete fields. Raises `FormatError` if all are incomplete, or any without ``skip``.
    """
    files: list[File] = []
    grids, complete, lacking = [], [], []
    # A `Plane` is time, channel and Z. Times and Z may differ between fields, channels may not.
    steps = [_steps([{plane[axis] for plane in of_field} for of_field in planes]) for axis in (0, 2)]
    for number, (of_field, times, depths) in enumerate(zip(planes, *steps, strict=True)):
        expected = list(product(times or [""], chosen, depths or [""]))
        missing = next((plane for plane in expected if plane not in of_field), None)
        if missing is not None:
            lacking.append(f"field {names[number]} has no file for {describe(number, missing)}")
            continue
        shape = (-1, len(chosen), max(len(depths), 1))
        grids.append(np.arange(len(files), len(files) + len(expected)).reshape(shape))
        files += [of_field[plane] for plane in expected]
        complete.append(number)
    if lacking and not (skip and complete):
        more = f" ({len(lacking):,} of {len(planes):,} fields are incomplete)" if len(lacking) > 1 else ""
        skipping = ", pass incomplete='skip' to skip these fields" if complete else ""
        raise FormatError(f"{path}: {lacking[0]}{more}; {skipping.join(remedies)}")
    if lacking:
        message = f"{path}: {len(lacking):,} of {len(planes):,} fields are incomplete, the first: {lacking[0]}"
        warnings.warn(f"{message}; incomplete fields are skipped", UserWarning, stacklevel=2)
    return files, grids, complete


def _steps(existing: Sequence[set[str]]) -> list[list[str]]:
    """Return the sorted times or Z positions that each field should have, based on its existing files."""
    # Fields may end early. If one field has all, no other may omit one before its last, as later ones would shift.
    every = sorted(set[str]().union(*existing), key=natural_key)
    if len(every) not in map(len, existing):
        return [sorted(steps, key=natural_key) for steps in existing]
    position = {step: number for number, step in enumerate(every)}
    return [every[: 1 + max(map(position.__getitem__, steps), default=-1)] for steps in existing]


def typed(name: str, values: list[str | None]) -> list[Any]:
    """Return the values of a column; ``Metadata_Site`` becomes integers if all of its values are digits or None."""
    numbers = name == "Metadata_Site" and all(value is None or re.fullmatch("[0-9]{1,18}", value) for value in values)
    return [None if value is None else int(value) for value in values] if numbers else values
