"""Checks of tables that are joined to the fields of OME-Zarr plates by site or path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import MetadataError
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.keys import Given, Keys, numbers_of, pairs_of
from omearrow_ds.storage.protocol import On

Pairs = Sequence[tuple[str, str]]
PLATE, SITE, FIELD = "Metadata_Plate", "Metadata_Site", "Metadata_Field"


def choose_pairs(source: BaseSource, given: Given, on: On | None) -> Pairs:
    """Return the columns to join by (see `pairs_of`); refuse a table that may number the fields of a plate differently.

    Sites of plates count from 1, paths of fields often from 0. Raises `MetadataError` if a table has sites that its
    plate cannot have, or if it only has paths and these may be sites.
    """
    pairs: Pairs = pairs_of(source, given, on)
    names, tables = dict(pairs), (source.columns, given.table)
    plates = [_is_plate(table) for table in tables]
    if any(plates) and on is None and {SITE, FIELD} <= set(names):
        pairs = [pair for pair in pairs if pair[0] != FIELD]  # The site is equivalent.
    if SITE in names:
        for plate in (0, 1):
            if plates[plate] and (plate == 0 or names[SITE] == SITE):
                _refuse_sites(source, given, pairs, plate)
    elif any(plates) and on is None and FIELD in names:
        _refuse_paths(source, given, pairs)
    return pairs


def _is_plate(columns: pa.Table) -> bool:
    """Return whether sites were made of the paths of fields, as for OME-Zarr plates and their conversions."""
    if not {SITE, FIELD} <= set(columns.column_names):
        return False
    if not (pa.types.is_string(columns[FIELD].type) or pa.types.is_large_string(columns[FIELD].type)):
        return False
    sites = numbers_of(columns[SITE])
    numbered = np.isfinite(sites)
    return bool(numbered.any() and np.isin((sites - numbers_of(columns[FIELD]))[numbered], (0, 1)).all())


def _codes(source: BaseSource, given: Given, pairs: Pairs) -> tuple[Array, Array]:
    """Return keys of images and of rows, see `Keys`, or equal keys for all without pairs."""
    if not pairs:
        return np.zeros(len(source), np.int64), np.zeros(given.table.num_rows, np.int64)
    keys = Keys(source, given, pairs)
    return keys.images, keys.rows


def _refuse_sites(source: BaseSource, given: Given, pairs: Pairs, plate: int) -> None:
    """Raise `MetadataError` if a site is 0 or above the largest of its plate.

    The plate is the images (0) or the table (1).
    """
    others = [pair for pair in pairs if pair[0] != SITE]
    column = dict(pairs)[SITE]
    numbers = numbers_of(source.columns[SITE]), numbers_of(given.table[column])
    keys, plates = _codes(source, given, others), _codes(source, given, [pair for pair in others if pair[0] == PLATE])
    largest = np.zeros(max(codes.max(initial=0) for codes in plates) + 1)
    np.fmax.at(largest, plates[plate], numbers[plate])
    other = 1 - plate
    shared = np.isin(keys[other], keys[plate]) & (keys[other] >= 0)
    unfit = shared & ((numbers[other] == 0) | (numbers[other] > largest[plates[other]]))
    if unfit.any():
        index = int(unfit.argmax())
        where = f"{given.where}: row {index}" if other else f"{source.path}: image {index}"
        field = {FIELD: column} if other else {SITE: FIELD}
        raise MetadataError(
            f"{where} has site {numbers[other][index]:g}, but sites of its plate are 1 to "
            f"{largest[plates[other][index]]:g}; if these are paths of fields, which often count from 0, pass "
            f"on={ {**dict(others), **field} }"
        )


def _refuse_paths(source: BaseSource, given: Given, pairs: Pairs) -> None:
    """Raise `MetadataError` if only one of images and table has a path 0, since the other one may have sites."""
    others = [pair for pair in pairs if pair[0] != FIELD]
    keys = _codes(source, given, others)
    shared = np.isin(keys[1], keys[0]) & (keys[1] >= 0)
    paths, numbers = numbers_of(source.columns[FIELD]), numbers_of(given.table[FIELD])[shared]
    if (paths == 0).any() != (numbers == 0).any() and len(numbers):
        path, site = ({**dict(others), left: FIELD} for left in (FIELD, SITE))
        raise MetadataError(
            f"{given.where}: {FIELD!r} may be the paths of the fields of {source.path}, or sites, which count from 1; "
            f"pass on={path} for paths, or on={site} for sites"
        )
