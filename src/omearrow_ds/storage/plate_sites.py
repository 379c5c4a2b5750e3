"""Checks of tables that are joined to the fields of OME-Zarr plates by site or path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import MetadataError
from omearrow_ds.storage.formats._base import Images
from omearrow_ds.storage.keys import InputTable, JoinKeys, join_column_pairs, numbers_of
from omearrow_ds.storage.protocol import On

Pairs = Sequence[tuple[str, str]]
PLATE, SITE, FIELD = "Metadata_Plate", "Metadata_Site", "Metadata_Field"


def choose_pairs(source: Images, joined: InputTable, on: On | None) -> Pairs:
    """Return the columns to join by; raise an error if the table may number the fields of a plate differently.

    Sites of plates count from 1, paths of fields often from 0. See `join_column_pairs` for other errors.
    """
    pairs: Pairs = join_column_pairs(source, joined, on)
    names = dict(pairs)
    ours = source.column_table([name for name in source.column_names if name in (SITE, FIELD)])
    are_plates = [_is_plate(table) for table in (ours, joined.table)]
    if any(are_plates) and on is None and {SITE, FIELD} <= set(names):
        pairs = [pair for pair in pairs if pair[0] != FIELD]  # The site is equivalent.
    if SITE in names:
        for plate in (0, 1):
            if are_plates[plate] and (plate == 0 or names[SITE] == SITE):
                _refuse_sites(source, joined, pairs, plate)
    elif any(are_plates) and on is None and FIELD in names:
        _refuse_paths(source, joined, pairs)
    return pairs


def _is_plate(columns: pa.Table) -> bool:
    """Return whether sites were made of the paths of fields, as for OME-Zarr plates and their conversions."""
    if not {SITE, FIELD} <= set(columns.column_names):
        return False
    if columns[FIELD].type not in (pa.string(), pa.large_string()):
        return False
    sites = numbers_of(columns[SITE])
    is_numbered = np.isfinite(sites)
    return bool(is_numbered.any() and np.isin((sites - numbers_of(columns[FIELD]))[is_numbered], (0, 1)).all())


def _refuse_sites(source: Images, joined: InputTable, pairs: Pairs, plate: int) -> None:
    """Raise `MetadataError` if a site is 0 or above the largest of its plate.

    The plate is the images (0) or the table (1).
    """
    others = [pair for pair in pairs if pair[0] != SITE]
    column = dict(pairs)[SITE]
    numbers = numbers_of(source.column(SITE)), numbers_of(joined.table[column])
    keys, plates = (
        (codes.images, codes.rows)
        for codes in (JoinKeys(source, joined, others), JoinKeys(source, joined, [p for p in others if p[0] == PLATE]))
    )
    largest = np.zeros(max(codes.max(initial=0) for codes in plates) + 1)
    np.fmax.at(largest, plates[plate], numbers[plate])
    other = 1 - plate
    is_shared = np.isin(keys[other], keys[plate]) & (keys[other] >= 0)
    unfit = is_shared & ((numbers[other] == 0) | (numbers[other] > largest[plates[other]]))
    if unfit.any():
        index = int(unfit.argmax())
        subject = joined.subject if other else {"path": source.path, "image": index}
        field = {FIELD: column} if other else {SITE: FIELD}
        raise MetadataError(
            f"{'row' if other else 'image'} {index} has site {numbers[other][index]:g}, but sites of its plate are 1 "
            f"to {largest[plates[other]][index]:g}",
            **subject,
            remedy=f"for field paths (often counted from 0), pass on={ {**dict(others), **field} }",
        )


def _refuse_paths(source: Images, joined: InputTable, pairs: Pairs) -> None:
    """Raise `MetadataError` if only one of images and table has a path 0, since the other one may have sites."""
    others = [pair for pair in pairs if pair[0] != FIELD]
    keys = JoinKeys(source, joined, others)
    is_shared = np.isin(keys.rows, keys.images) & (keys.rows >= 0)
    paths, numbers = numbers_of(source.column(FIELD)), numbers_of(joined.table[FIELD])[is_shared]
    if (paths == 0).any() != (numbers == 0).any() and len(numbers):
        path, site = ({**dict(others), left: FIELD} for left in (FIELD, SITE))
        raise MetadataError(
            f"{FIELD!r} is ambiguous: it may contain field paths of {source.path} or sites counted from 1",
            **joined.subject,
            remedy=f"pass on={path} for paths, or on={site} for sites",
        )
