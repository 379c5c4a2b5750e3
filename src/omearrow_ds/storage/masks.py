"""Masks of images: another collection, another column of the same table, or files named by images."""

from __future__ import annotations

import bisect
import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ArgumentError, ColumnError, MetadataError, MissingPathError
from omearrow_ds.storage import fields
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.formats._detect import is_hidden
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.keys import (
    IMAGE_ID,
    Given,
    Keys,
    first_equal,
    places,
    refuse_contradiction,
    some_keys,
)
from omearrow_ds.storage.label_images import with_label_dtypes
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.patterns import column_of
from omearrow_ds.storage.plate_sites import choose_pairs
from omearrow_ds.storage.protocol import OpenOptions, Paths
from omearrow_ds.storage.source import open_source

Masks = Paths | Mapping[str, Any] | BaseSource
_FIELD, _ANY = "field", "_"
_SHOWN = 3


def open_masks(source: BaseSource, masks: Any, opening: OpenOptions, *, skip_nulls: bool) -> tuple[BaseSource, Array]:
    """Return a source of masks, and (n,) int64, the mask index of each image, which is -1 for an image without a mask.

    Raises `ArgumentError` if ``masks`` is invalid; `MetadataError` if an image has no mask or several, or a mask has
    another size.

    Parameters
    ----------
    source
        The images.
    masks
        An open source; the path of a collection; a mapping of ``path`` and further keywords of `open_images`, with the
        columns to join by as ``on``; the name of another image column of the same table, or of label images stored
        with OME-Zarr images; or a file path with names in braces: ``{field}`` (the image's id or the stem of one of
        its files), columns of the images (``{well}`` is ``Metadata_Well``), and ``{_}`` for any text.
    opening
        Options that opened the images.
    skip_nulls
        Whether images may be without a mask.
    """
    found, mask_of = _paired(source, masks, opening)
    found = with_label_dtypes(found)
    without = np.flatnonzero(mask_of < 0)
    if len(without) and (not skip_nulls or len(without) == len(mask_of)):
        shown = ", ".join(repr(source.image_ids[number]) for number in without[:_SHOWN].tolist())
        more = ", ..." if len(without) > _SHOWN else ""
        remedy = "" if len(without) == len(mask_of) else "; pass nulls='skip' to leave them out"
        ids = ", ".join(map(repr, found.image_ids[:_SHOWN]))
        raise MetadataError(
            f"{found.path}: {len(without):,} of {len(mask_of):,} images of {source.path} have no mask: {shown}{more} "
            f"(masks: {ids}, ...){remedy}"
        )
    with_mask = np.flatnonzero(mask_of >= 0)
    sizes, own = found.shapes[mask_of[with_mask]][:, 3:], source.shapes[with_mask][:, 3:]
    other = (sizes != own).any(axis=1)
    if other.any():
        at = int(other.argmax())
        index, mask = int(with_mask[at]), int(mask_of[with_mask[at]])
        raise MetadataError(
            f"{found.path}: mask {found.image_ids[mask]!r} has {' x '.join(map(str, sizes[at]))} pixels, its image "
            f"{source.image_ids[index]!r} of {source.path} has {' x '.join(map(str, own[at]))}; they must be the same"
        )
    return found, mask_of


def _paired(source: BaseSource, masks: Any, opening: OpenOptions) -> tuple[BaseSource, Array]:
    if isinstance(masks, BaseSource):
        return masks, _by_key(source, masks, None)
    if isinstance(masks, Mapping) or (is_path(masks) and not isinstance(masks, str | os.PathLike)):
        given: dict[str, Any] = dict(masks) if isinstance(masks, Mapping) else {"path": masks}
        path, on = given.pop("path", None), given.pop("on", None)
        wrong = sorted(set(given) - {*OpenOptions.__annotations__, "format"})
        if not is_path(path) or wrong:
            raise ArgumentError(option="masks", value=masks, allowed="path, and keywords of open_images")
        found = open_source(path, are_labels=True, **{**_server(path, opening), **given})
        return found, _by_key(source, found, on)
    if not isinstance(masks, str | os.PathLike):
        what = "a path, an open source, a mapping with a path, the name of an image column, or of files in braces"
        raise ArgumentError(option="masks", value=masks, allowed=what)
    name = os.fspath(masks)
    if name in source.other_image_columns:
        changed = {"image_column": name, "nulls": "skip", "columns": None, "on": None, "column_types": None}
        same = {key: value for key, value in {**opening, **changed}.items() if value is not None}
        column = open_source(source.given, are_labels=True, **same)  # type: ignore[arg-type]
        return column, places(column.rows, source.rows)
    if "{" in name:
        return _by_name(source, name)
    label = name.removeprefix("labels/")
    if label in source.label_images() or (label != name and not Path(name).exists()):
        return source.labels(label)
    try:
        found = open_source(name, are_labels=True, **_server(name, opening))
    except MissingPathError:
        columns = [*source.other_image_columns, *(f"labels/{label}" for label in source.label_images())]
        there = f"; {source.path} has {', '.join(map(repr, columns))}" if columns else ""
        raise MissingPathError(f"masks={name!r}: no such collection of images{there}") from None
    return found, _by_key(source, found, None)


def _server(path: Any, opening: OpenOptions) -> OpenOptions:
    """Return the access options for masks at a URL, by default those of the images."""
    storage = opening.get("storage")
    at_url = isinstance(path, str | os.PathLike) and url_of(path) is not None
    return {"storage": storage} if at_url and storage is not None else {}


def _by_key(source: BaseSource, masks: BaseSource, on: Any) -> Array:
    """Return the mask of each image, matched by id, or otherwise by plate, well and site."""
    ids = pa.chunked_array([pa.array(list(masks.image_ids), pa.string())])
    columns = {**{name: masks.columns[name] for name in masks.columns.column_names}, IMAGE_ID: ids}
    given = Given(pa.table(columns), str(masks.path), {}, {})
    if on is None and set(source.image_ids).isdisjoint(masks.image_ids):
        try:
            pairs = choose_pairs(source, given._replace(table=given.table.drop_columns(IMAGE_ID)), None)
        except ColumnError:
            raise MetadataError(
                f"{masks.path}: no mask has the id of an image of {source.path}: masks have "
                f"{list(masks.image_ids[:_SHOWN])}, images {list(source.image_ids[:_SHOWN])}; pass "
                f"masks={{'path': ..., 'on': ...}} with columns that both have, or names of files in braces"
            ) from None
    else:
        pairs = choose_pairs(source, given, on)
    keys = Keys(source, given, pairs)
    twice = first_equal(keys.rows)
    if twice is not None:
        raise MetadataError(
            f"{masks.path}: masks {twice[0]} and {twice[1]} have the same {keys.names}, "
            f"{keys.told(twice[1], row=True)}; one is needed for each image"
        )
    found = places(keys.rows, keys.images)
    if on is None:
        with_mask = np.flatnonzero(found >= 0)
        refuse_contradiction(source, given, with_mask, found[with_mask])
    if len(found) and (found < 0).all():
        theirs = some_keys(keys, np.arange(len(keys.rows)), row=True)
        raise MetadataError(
            f"{masks.path}: no image of {source.path} has a mask, by {keys.names}: images have e.g. "
            f"{keys.told(0, row=False)}, masks {theirs}"
        )
    return found


def _by_name(source: BaseSource, name: str) -> tuple[BaseSource, Array]:
    """Return the files that are named by images, and the index of each image's file."""
    if url_of(name) is not None:
        raise ArgumentError(
            "files named in braces are looked for on this machine",
            option="masks",
            value=name,
            remedy="copy their folder, or pass the URL of a collection of masks",
        )
    path = Path(name).absolute()
    folder = path.parent
    if "{" in str(folder):
        raise ArgumentError("names in braces are for the file, not for its folders", option="masks", value=name)
    if not folder.is_dir():
        raise MissingPathError(f"masks={name!r}: no such folder: {folder}")
    try:
        parsed = list(string.Formatter().parse(path.name))
    except ValueError as error:
        raise ArgumentError(str(error), option="masks", value=name) from None
    if not len(source):
        raise MetadataError(f"{source.path}: holds no images, and so no masks belong to it")
    values = _values(source, [field for _, field, _, _ in parsed if field is not None], name)
    there = sorted(os.listdir(folder))  # noqa: PTH208  # Only names are needed.
    files: list[str] = []
    mask_of = np.full(len(source), -1)
    for index in range(len(source)):
        stems = source.stems(index) if any(field == _FIELD for _, field, _, _ in parsed) else [""]
        for stem in stems:
            matches = _matching(parsed, {**{key: of[index] for key, of in values.items()}, _FIELD: stem}, there)
            if len(matches) > 1:
                raise MetadataError(
                    f"{folder}: image {source.image_ids[index]!r} has several masks by {path.name!r}, {matches[0]!r} "
                    f"and {matches[1]!r}; let the name say which"
                )
            if matches:
                mask_of[index] = len(files)
                files += matches
                break
    if not files:
        raise MetadataError(
            f"{folder}: no file is the mask of an image of {source.path} by {path.name!r}: for image "
            f"{source.image_ids[0]!r} {{field}} is {source.stems(0)}; other parts of the name are columns, such as "
            "{well} and {site}, or {_} for anything (after a conversion the names of the first files are gone)"
        )
    grids = list(np.arange(len(files)).reshape(-1, 1, 1, 1))
    masked = np.flatnonzero(mask_of >= 0)
    ids = [source.image_ids[index] for index in masked.tolist()]
    sizes = np.unique(source.shapes[masked][:, 3:], axis=0, return_inverse=True)[1].reshape(-1)
    found = fields.Fields(files, grids, ids, pa.table({}), [], np.arange(len(files)))
    return fields.joined_files(folder, folder, found, sizes), mask_of


def _values(source: BaseSource, names: Sequence[str], text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in set(names) - {_FIELD, _ANY}:
        column = next((each for each in (name, column_of(name)) if each in source.columns.column_names), None)
        if column is None:
            raise ColumnError(
                f"masks={text!r}: {{{name}}} is no column of {source.path}; there are {source.columns.column_names}, "
                f"{{field}} for the id or the file of an image, and {{_}} for anything"
            )
        found[name] = source.columns[column].to_pylist()
    return found


def _matching(parsed: Sequence[tuple[Any, ...]], values: Mapping[str, Any], there: Sequence[str]) -> list[str]:
    """Return the names in a sorted list that match a parsed template."""
    parts = []
    for literal, field, spec, _ in parsed:
        parts.append(literal)
        if field is not None:
            parts.append(None if field == _ANY else format(values[field], spec or ""))
    prefix = "".join(parts[: parts.index(None)] if None in parts else parts)
    first = bisect.bisect_left(there, prefix)
    if None not in parts:
        return [prefix] if first < len(there) and there[first] == prefix else []
    pattern = re.compile("".join(".*" if part is None else re.escape(part) for part in parts))
    found = []
    while first < len(there) and there[first].startswith(prefix):
        if pattern.fullmatch(there[first]) and is_hidden(there[first]) == is_hidden(prefix):
            found.append(there[first])
        first += 1
    return found
