"""Masks of images: another collection, another column of the same table, or files named by images."""

from __future__ import annotations

import bisect
import os
import re
import string
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError, MissingPathError
from omearrow_ds.options import refuse_value
from omearrow_ds.storage import fields
from omearrow_ds.storage.collection_source import CollectionSource
from omearrow_ds.storage.compositions import select_rows, with_label_dtypes
from omearrow_ds.storage.formats._base import Array, Images, name_stems
from omearrow_ds.storage.formats._detect import is_hidden
from omearrow_ds.storage.formats._folder import ListedFile
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.keys import IMAGE_ID, JoinKeys, match_rows, refuse_contradiction
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.patterns import column_of
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import open_source
from omearrow_ds.storage.table_files import InputTable
from omearrow_ds.text import nearest

Masks = Paths | Mapping[str, Any] | CollectionSource
_FIELD, _ANY = "field", "_"
_NUM_EXAMPLES = 3


def open_masks(source: Images, masks: Any, opening: OpenOptions, *, skip_nulls: bool) -> tuple[Images, Array]:
    """Return the masks of images, and the index of each image's mask as int64, which is -1 for an image without a mask.

    ``masks`` is an open source; the path of a collection; a mapping of ``path`` and further keywords of `open_images`,
    with the columns to join by as ``on``; the name of another image column of the same table, or of label images stored
    with OME-Zarr images; or a file path with names in braces: ``{field}`` (the image's id or the stem of one of its
    files), columns of the images (``{well}`` is ``Metadata_Well``), and ``{_}`` for any text. ``opening`` are the
    options that opened the images. With ``skip_nulls``, images may be without a mask.
    """
    header = source.header
    opened, mask_of = _paired(source, masks, opening)
    opened = with_label_dtypes(opened)
    without = np.flatnonzero(mask_of < 0)
    if len(without) and (not skip_nulls or len(without) == len(mask_of)):
        images = ", ".join(repr(header.image_ids[number]) for number in without[:_NUM_EXAMPLES].tolist())
        more = ", ..." if len(without) > _NUM_EXAMPLES else ""
        lacking = f"{len(without):,} of {len(mask_of):,} images of {header.path} have no mask: {images}{more}"
        ids = ", ".join(map(repr, opened.header.image_ids[:_NUM_EXAMPLES]))
        remedy = "add masks" + ("" if len(without) == len(mask_of) else ", or pass nulls='skip' to skip these images")
        raise MetadataError(f"{lacking} (masks: {ids}, ...)", path=opened.header.path, remedy=remedy)
    differs = (mask_of >= 0) & (opened.header.shapes[mask_of] != header.shapes)[:, 3:].any(axis=1)
    if differs.any():
        index, mask = int(differs.argmax()), int(mask_of[differs.argmax()])
        sizes = [" x ".join(map(str, shape[3:])) for shape in (opened.header.shapes[mask], header.shapes[index])]
        image = f"{header.image_ids[index]!r} of {header.path} has {sizes[1]} pixels"
        problem = f"mask {opened.header.image_ids[mask]!r} has {sizes[0]} pixels but its image {image}"
        remedy = "pass masks of the same size as their images"
        raise MetadataError(problem, path=opened.header.path, image=mask, remedy=remedy)
    return opened, mask_of


def select_masks(masks: Images, mask_of: Array, condition: str) -> tuple[Images, Array]:
    """Return a source of only the masks in ``mask_of``, and the new mask index of each image, or -1 without a mask."""
    used = np.unique(mask_of[mask_of >= 0])
    return select_rows(masks, used, f"masks of {condition}"), np.where(mask_of < 0, -1, np.searchsorted(used, mask_of))


def _paired(source: Images, masks: Any, opening: OpenOptions) -> tuple[Images, Array]:
    header = source.header
    if isinstance(masks, CollectionSource):
        return masks.images, _by_key(source, masks.images, None)
    is_name = isinstance(masks, str | os.PathLike)
    known = _named(source, os.fspath(masks), opening) if is_name else None
    if known is not None:
        return known
    options: dict[str, Any] = dict(masks) if isinstance(masks, Mapping) else {"path": masks}
    path, on = options.pop("path", None), options.pop("on", None)
    if not is_path(path) or not set(options) <= {*OpenOptions.__annotations__, "format"}:
        allowed = "a path, an open source, the name of an image column, file names with braces, or a mapping of"
        refuse_value("masks", masks, allowed=f"{allowed} 'path' and options of open_images")
    if isinstance(path, str | os.PathLike) and url_of(path) is not None and opening.get("storage") is not None:
        options = {"storage": opening["storage"], **options}  # By default, masks are on the server of the images.
    try:
        opened = open_source(path, are_labels=True, **options)
    except MissingPathError:
        if not is_name:
            raise
        columns = [*header.other_image_columns, *(f"labels/{label}" for label in source.details.label_names())]
        remedy = "pass a path" + (f", or one of {', '.join(map(repr, columns))}" if columns else "")
        problem = f"masks={os.fspath(masks)!r}: no such path or image column{_similar_files(Path(path))}"
        raise MissingPathError(problem, path=header.path, remedy=remedy) from None
    return opened, _by_key(source, opened, on)


def _named(source: Images, name: str, opening: OpenOptions) -> tuple[Images, Array] | None:
    """Return masks that are stored with the images, or in files of a pattern; None if ``name`` is a path."""
    header = source.header
    if name in header.other_image_columns:
        changed = {"image_column": name, "nulls": "skip", "columns": None, "on": None, "column_types": None}
        options: Any = {**opening, **changed}
        column = open_source(header.requested_path or header.path, are_labels=True, **options)
        return column, match_rows(column.header.rows, header.rows)
    if "{" in name:
        return _by_name(source, name)
    label = name.removeprefix("labels/")
    is_stored = label in source.details.label_names() or (label != name and not Path(name).exists())
    return source.labels(label) if is_stored else None


def _by_key(source: Images, masks: Images, on: Any) -> Array:
    """Return the mask of each image, matched by id, or otherwise by plate, well and site."""
    header = masks.header
    columns = {name: header.columns.column(name) for name in header.columns.names}
    has_ids = on is not None or not set(source.header.image_ids).isdisjoint(header.image_ids)
    if has_ids:
        columns[IMAGE_ID] = pa.chunked_array([pa.array(list(header.image_ids), pa.string())])
    joined = InputTable(pa.table(columns), str(header.path))
    try:
        keys = JoinKeys.choose(source.header.columns, joined, on)
    except ColumnError:
        if has_ids:
            raise
        ids, of_images = (list(one.header.image_ids[:_NUM_EXAMPLES]) for one in (masks, source))
        problem = f"no mask has the id of an image of {source.header.path}: masks have {ids}, images have {of_images}"
        remedy = "pass masks={'path': ..., 'on': ...} with common columns, or a file name with braces"
        raise MetadataError(problem, path=header.path, remedy=remedy) from None
    mask_of = keys.match("mask", "pass one mask per image")
    if on is None:
        refuse_contradiction(source.header.columns, joined, np.arange(len(mask_of)), mask_of)
    return mask_of


def _by_name(source: Images, name: str) -> tuple[Images, Array]:
    header = source.header
    error = partial(ArgumentError, option="masks", value=name)
    if url_of(name) is not None:
        problem = "is a URL, but names with braces apply only to local files"
        raise error(problem, remedy="copy their folder, or pass the URL of a collection of masks")
    path = Path(name).absolute()
    folder = path.parent
    if "{" in str(folder):
        raise error("braces are allowed only in the file name", remedy="move them into the file name")
    if not folder.is_dir():
        raise MissingPathError(f"masks={name!r}: the folder {folder} does not exist; correct the path")
    try:
        template = list(string.Formatter().parse(path.name))
    except ValueError as invalid:
        raise error(str(invalid)) from None
    if not len(source):
        raise MetadataError(f"{header.path}: the collection is empty, so masks cannot be assigned; pass images")
    fields_of_template = {field for _, field, _, _ in template if field is not None}
    values: dict[str, list[Any]] = {}
    for field in fields_of_template - {_FIELD, _ANY}:
        column = next((known for known in (field, column_of(field)) if known in header.columns.names), None)
        if column is None:
            others = "{field} for the id or file name of an image, or {_} for any text"
            remedy = f"write one of {header.columns.names} in braces, {others}"
            raise ColumnError(f"masks={name!r}: {header.path} has no column for {{{field}}}; {remedy}")
        values[field] = header.columns.column(column).to_pylist()
    names = sorted(os.listdir(folder))  # noqa: PTH208  # Only names are needed.
    files: list[ListedFile] = []
    mask_of = np.full(len(source), -1)
    for index in range(len(source)):
        of_image = {field: column[index] for field, column in values.items()}
        for stem in name_stems(source, index) if _FIELD in fields_of_template else [""]:
            matches = _matching(template, {**of_image, _FIELD: stem}, names)
            if len(matches) > 1:
                examples = f"e.g. {matches[0]!r} and {matches[1]!r}; add a distinguishing column in braces to the name"
                problem = f"several masks match {path.name!r} for image {header.image_ids[index]!r}"
                raise MetadataError(f"{folder}: {problem}, {examples}")
            if matches:
                mask_of[index] = len(files)
                files += map(ListedFile, matches)
                break
    if not files:
        known = f"for image {header.image_ids[0]!r}, {{field}} is {name_stems(source, 0)}"
        others = "other names in braces are columns, and {_} is any text (converted collections lack file names)"
        problem = f"no file matches {path.name!r} for an image of {header.path}{_similar_files(path)}"
        raise MetadataError(f"{folder}: {problem}; correct the name: {known}, {others}")
    masked = np.flatnonzero(mask_of >= 0)
    ids = [header.image_ids[index] for index in masked.tolist()]
    sizes = np.unique(header.shapes[masked][:, 3:], axis=0, return_inverse=True)[1].reshape(-1)
    numbers = np.arange(len(files))
    grids = list(numbers.reshape(-1, 1, 1, 1))
    mask_fields = fields.Fields(files, grids, ids, pa.table({}), [], numbers, kinds=sizes.tolist())
    return fields.joined_files(folder, folder, mask_fields), mask_of


def _similar_files(path: Path) -> str:
    """Return a remark with files of the folder of ``path`` that have a similar name, or else the first file."""
    names = sorted(os.listdir(path.parent)) if path.parent.is_dir() else []  # noqa: PTH208  # Only names are needed.
    examples = nearest(path.name, names, 2) or names[:1]
    return f" (the folder contains e.g. {' and '.join(map(repr, examples))})" if examples else ""


def _matching(template: Sequence[tuple[Any, ...]], values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    parts: list[str | None] = []
    for literal, field, spec, _ in template:
        parts.append(literal)
        if field is not None:
            parts.append(None if field == _ANY else format(values[field], spec or ""))
    prefix = "".join(takewhile(lambda part: part is not None, parts))  # type: ignore[arg-type]
    candidates = islice(names, bisect.bisect_left(names, prefix), None)
    if None not in parts:
        return [name for name in islice(candidates, 1) if name == prefix]
    pattern = re.compile("".join(".*" if part is None else re.escape(part) for part in parts))
    begin_alike = takewhile(lambda name: name.startswith(prefix), candidates)
    return [name for name in begin_alike if pattern.fullmatch(name) and is_hidden(name) == is_hidden(prefix)]
