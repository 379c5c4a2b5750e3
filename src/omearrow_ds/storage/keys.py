"""Tables that are joined to images by key: plates, wells and sites, ids, or columns that a user names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ColumnError, MetadataError
from omearrow_ds.options import refuse_value
from omearrow_ds.storage.compositions import SourceWithColumns
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._columns import ColumnReader, unknown_column
from omearrow_ds.storage.protocol import On
from omearrow_ds.storage.table_files import NAMED_BY, ColumnTypes, InputTable, read_input_table

IMAGE_ID, IMAGE_NUMBER = "image_id", "ImageNumber"
PLATE, SITE, FIELD = "Metadata_Plate", "Metadata_Site", "Metadata_Field"
_METADATA = "Metadata_"
_NUMBERED = ("site", "field", "number")  # Parts of column names whose text values are compared as numbers.
_WELL = re.compile(r"([A-Za-z]{1,2})0*([1-9][0-9]?)")
_NUM_EXAMPLES = 3
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")
Pairs = Sequence[tuple[str, str]]  # Names in the source and in the table.


class JoinKeys:
    """Join keys of ``images`` and of table ``rows``, encoded as int64 numbers; -1 is a key that contains a null.

    Without ``pairs`` of columns, all keys are equal. ``names`` is the name of the key in messages.
    """

    def __init__(self, source: ColumnReader, joined: InputTable, pairs: Pairs) -> None:
        self._columns: list[tuple[list[Any], Array]] = []  # Distinct values, and the code of each image and row.
        self.pairs, self.names = pairs, " and ".join(f"{left!r}" for left, _ in pairs)
        self._source_path, self._joined = source.path, joined
        keys = np.zeros(len(source.image_ids) + len(joined.table), np.int64)
        is_null = np.zeros(len(keys), np.bool_)
        for left, right in pairs:
            ours = pa.chunked_array([pa.array(source.image_ids)]) if left == IMAGE_ID else source.column(left)
            theirs = joined.table[right]
            if pa.types.is_nested(ours.type) or pa.types.is_nested(theirs.type):
                problem, remedy = f"column {right!r} cannot be joined with {left!r}", "pass strings, numbers or times"
                joined.refuse(problem, remedy, ColumnError, right)
            normalize, known = _normalizer(left, ours.type, theirs.type), dict[Any, int]()
            codes = np.concatenate([_encode(column, normalize, known) for column in (ours, theirs)])
            is_null |= codes < 0
            keys = np.unique(keys * (len(known) + 1) + codes, return_inverse=True)[1].reshape(-1)
            self._columns.append(([*known, None], codes))
        keys[is_null] = -1
        self.images, self.rows = self.sides = keys[: len(source.image_ids)], keys[len(source.image_ids) :]

    @classmethod
    def choose(cls, source: ColumnReader, joined: InputTable, on: On | None) -> Self:
        """Return the keys in the columns that ``on`` names, by default in common columns."""
        return cls(source, joined, _choose_pairs(source, joined, on))

    def match(self, noun: str, remedy: str, *, are_objects: bool = False) -> Array:
        """Return the row of each image, or the image of each row if rows are objects, as int64; -1 without a match.

        Raises `MetadataError` if a match is ambiguous, or nothing matches; messages call each row a ``noun``.
        """
        keys, requests = self.sides if are_objects else self.sides[::-1]
        equal = first_duplicate(np.where(np.isin(keys, requests), keys, -1) if are_objects else keys)
        if equal is not None:
            owner = f"images {equal[0]} and {equal[1]} of {self._source_path}"
            owner = owner if are_objects else f"{noun}s {equal[0]} and {equal[1]}"
            problem = f"{owner} have the same {self.names}, {self.describe(equal[1], row=not are_objects)}"
            self._joined.refuse(problem, remedy)
        matches = match_rows(keys, requests)
        if len(matches) and (matches < 0).all():
            of_images, of_rows = (
                self.examples(np.flatnonzero(keys >= 0), row=is_row) or "none" for is_row, keys in enumerate(self.sides)
            )
            examples = f"images have {of_images}, {noun}s have {of_rows}"
            problem = f"no {noun} matches an image of {self._source_path} by {self.names}: {examples}"
            self._joined.refuse(problem, "pass on= with columns that have equal values")
        return matches

    def warn(self, problem: str) -> None:
        warnings.warn(f"{self._joined.name}, joined by {self.names}: {problem}", UserWarning, stacklevel=3)

    def describe(self, index: int, *, row: bool | int) -> str:
        position = index + len(self.images) * row
        return ", ".join(repr(values[codes[position]]) for values, codes in self._columns)

    def examples(self, indices: Array, *, row: bool | int) -> str:
        """Return the first few distinct keys of the given images or table rows as text, for messages."""
        first = np.sort(np.unique(self.sides[row][indices], return_index=True)[1])
        keys = [self.describe(int(indices[position]), row=row) for position in first[:_NUM_EXAMPLES]]
        return "; ".join(keys) + (", ..." if len(first) > _NUM_EXAMPLES else "")


def _encode(column: pa.ChunkedArray, normalize: Callable[[Any], Any], known: dict[Any, int]) -> Array:
    """Return a column as codes of its normalized values, which are added to ``known``; -1 is null."""
    encoded = column.combine_chunks().dictionary_encode()
    values = map(normalize, encoded.dictionary.to_pylist())
    codes = np.array([*[known.setdefault(value, len(known)) for value in values], -1], np.int64)
    encoded_rows: Array = codes[encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)]
    return encoded_rows


def _numbers_of(column: pa.ChunkedArray) -> Array:
    """Convert the numbers in a column, including numeric text, to float64; other values become NaN."""
    known = dict[Any, int]()
    codes = np.full(len(column), -1) if pa.types.is_nested(column.type) else _encode(column, _number, known)
    numbers: Array = np.array([*[value if isinstance(value, int | float) else np.nan for value in known], np.nan])
    return numbers[codes]


def first_duplicate(keys: Array) -> tuple[int, int] | None:
    """Return the indices of the first pair of equal keys, the smaller one first; None if all keys differ."""
    first = match_rows(keys, keys)
    repeated = np.flatnonzero((first >= 0) & (first < np.arange(len(keys))))
    return (int(first[repeated[0]]), int(repeated[0])) if len(repeated) else None


def match_rows(keys: Array, requests: Array) -> Array:
    """Return, as int64, the first index in ``keys`` of each requested key; -1 if the key is null or missing."""
    rows = pc.index_in(pa.array(requests), pa.array(keys)).fill_null(-1).to_numpy().astype(np.int64)
    return np.where(requests < 0, -1, rows)


def refuse_contradiction(source: ColumnReader, joined: InputTable, images: Array, rows: Array) -> None:
    """Raise `MetadataError` if an image and the table row with its id have different plates, wells or sites."""
    # Ids such as ``image-00000`` occur in many collections. ``images`` and ``rows`` are pairs, -1 without a match.
    for name in set(NAMED_BY) & set(source.names) & set(joined.table.column_names):
        keys = JoinKeys(source, joined, [(name, name)])
        ours, theirs = keys.images[images], keys.rows[rows]
        differs = (images >= 0) & (rows >= 0) & (ours >= 0) & (theirs >= 0) & (ours != theirs)
        if differs.any():
            image, row = int(images[differs][0]), int(rows[differs][0])
            differing = f"{keys.describe(row, row=True)} in the row and {keys.describe(image, row=False)} for the image"
            problem = f"row {row} has the id of image {source.image_ids[image]!r} of {source.path}, but {name} is"
            joined.refuse(f"{problem} {differing}", "pass on= with columns that identify the image")


def _normalizer(name: str, left: pa.DataType, right: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that normalizes keys: wells B7 and B07 are equal, and sites 1, 1.0 and "1"."""
    if "well" in name.lower():
        return _well
    are_numbers = any(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (left, right))
    return _number if are_numbers or name.lower().endswith(_NUMBERED) else _text


def _text(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _well(value: Any) -> Any:
    match = _WELL.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if match is None else f"{match[1].upper()}{int(match[2]):02d}"


def _number(value: Any) -> Any:
    match = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    return _text(value) if match is None else int(match[1])


def column_names_of(on: Any) -> list[str]:
    """Return the columns of a table that an option names; other values than names are refused later."""
    return [] if on is None else [right for _, right in _named_pairs(on) if isinstance(right, str)]


def _named_pairs(on: Any) -> Pairs:
    if isinstance(on, Mapping):
        return list(on.items())
    return [(name, name) for name in (on if isinstance(on, Sequence) and not isinstance(on, str) else [on])]


def _choose_pairs(source: ColumnReader, joined: InputTable, on: On | None) -> Pairs:
    """Return the columns to join by; raise an error if the table may number the fields of a plate differently."""
    # Sites of plates count from 1, paths of fields often from 0.
    pairs: Pairs = _column_pairs(source, joined, on)
    names = dict(pairs)
    ours = source.select([name for name in source.names if name in (SITE, FIELD)])
    are_plates = [_is_plate(table) for table in (ours, joined.table)]
    if any(are_plates) and on is None and {SITE, FIELD} <= set(names):
        pairs = [pair for pair in pairs if pair[0] != FIELD]  # The site is equivalent.
    if SITE in names:
        for plate, is_plate in enumerate(are_plates):
            if is_plate and (plate == 0 or names[SITE] == SITE):
                _refuse_sites(source, joined, pairs, plate)
    elif any(are_plates) and on is None and FIELD in names:
        _refuse_paths(source, joined, pairs)
    return pairs


def _column_pairs(source: ColumnReader, joined: InputTable, on: On | None) -> Pairs:
    """Return pairs of a name in the source and a name in the table, by default those of common columns."""
    left_names, right_names = source.names, joined.table.column_names
    if on is None:
        in_table = set(right_names)
        shared = [name for name in left_names if name in in_table]
        metadata = [name for name in shared if name.startswith(_METADATA)]
        tables = source.select(metadata), joined.table
        common = [name for name in metadata if all(table[name].null_count < len(table) for table in tables)]
        common = [IMAGE_ID] if IMAGE_ID in right_names else common or [name for name in shared if name == IMAGE_NUMBER]
        if not common:
            names = f"the table has {right_names[:20]}, the images have {left_names}"
            problem = f"has neither {IMAGE_ID!r} nor a {_METADATA}* column in common with {source.path}: {names}"
            joined.refuse(problem, "pass on= with a common name, or on={NAME_IN_SOURCE: NAME_IN_TABLE}", ColumnError)
        return [(name, name) for name in common]
    pairs = _named_pairs(on)
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        allowed = "one or several column names, or a mapping from names in the source to names in the table"
        refuse_value("on", on, allowed=allowed)

    def resolve(name: str, known: Sequence[str]) -> str:
        return name if name in known else joined.renamed.get(name, name)

    pairs = [(resolve(left, left_names), resolve(right, right_names)) for left, right in pairs]
    for left, right in pairs:
        for name, known, table in ((left, [IMAGE_ID, *left_names], source.path), (right, right_names, joined.name)):
            if name not in known:
                raise unknown_column(name, known, table, " for on=")
    return pairs


def _is_plate(columns: pa.Table) -> bool:
    """Return whether sites were made of the paths of fields, as for OME-Zarr plates and their conversions."""
    is_known = {SITE, FIELD} <= set(columns.column_names)
    if not is_known or columns[FIELD].type not in (pa.string(), pa.large_string()):
        return False
    sites = _numbers_of(columns[SITE])
    is_numbered = np.isfinite(sites)
    return bool(is_numbered.any() and np.isin((sites - _numbers_of(columns[FIELD]))[is_numbered], (0, 1)).all())


def _refuse_sites(source: ColumnReader, joined: InputTable, pairs: Pairs, plate: int) -> None:
    """Raise `MetadataError` for a site that is 0 or too large; side ``plate`` (0: images, 1: table) has valid sites."""
    others = [pair for pair in pairs if pair[0] != SITE]
    column = dict(pairs)[SITE]
    numbers = _numbers_of(source.column(SITE)), _numbers_of(joined.table[column])
    of_plate = [pair for pair in others if pair[0] == PLATE]
    keys, plates = (JoinKeys(source, joined, chosen).sides for chosen in (others, of_plate))
    largest = np.zeros(max(codes.max(initial=0) for codes in plates) + 1)
    np.fmax.at(largest, plates[plate], numbers[plate])
    other = 1 - plate
    is_shared = np.isin(keys[other], keys[plate]) & (keys[other] >= 0)
    unfit = is_shared & ((numbers[other] == 0) | (numbers[other] > largest[plates[other]]))
    if unfit.any():
        index = int(unfit.argmax())
        field = {FIELD: column} if other else {SITE: FIELD}
        sites = f"sites of its plate are 1 to {largest[plates[other]][index]:g}"
        problem = f"{'row' if other else 'image'} {index} has site {numbers[other][index]:g}, but {sites}"
        remedy = f"for field paths (often counted from 0), pass on={ {**dict(others), **field} }"
        if other:
            joined.refuse(problem, remedy)
        raise MetadataError(problem, path=source.path, image=index, remedy=remedy)


def _refuse_paths(source: ColumnReader, joined: InputTable, pairs: Pairs) -> None:
    """Raise `MetadataError` if only the images, or only the table, contain 0: the others may be sites, from 1."""
    others = [pair for pair in pairs if pair[0] != FIELD]
    keys = JoinKeys(source, joined, others)
    is_shared = np.isin(keys.rows, keys.images) & (keys.rows >= 0)
    paths, numbers = _numbers_of(source.column(FIELD)), _numbers_of(joined.table[FIELD])[is_shared]
    if (paths == 0).any() != (numbers == 0).any() and len(numbers):
        path, site = ({**dict(others), left: FIELD} for left in (FIELD, SITE))
        problem = f"{FIELD!r} is ambiguous: it may contain field paths of {source.path} or sites counted from 1"
        joined.refuse(problem, f"pass on={path} for paths, or on={site} for sites")


def with_columns(source: Images, columns: Any, on: On | None, types: ColumnTypes) -> Images:
    """Return ``source`` with the columns of a joined table added; see `omearrow_ds.open_images`."""
    stored = source.header.columns
    needed = {IMAGE_ID, IMAGE_NUMBER, *stored.names, *column_names_of(on)}
    joined = read_input_table(columns, "columns", types, needed)
    keys = JoinKeys.choose(stored, joined, on)
    equal = first_duplicate(keys.images) if keys.pairs[0][0] == IMAGE_ID else None
    if equal is not None and stored.image_ids[equal[0]] != stored.image_ids[equal[1]]:
        problem = f"several images of {stored.path} have the same id {keys.describe(equal[0], row=False)}"
        joined.refuse(f"{problem}, compared as numbers with column {keys.pairs[0][1]!r}", "pass the ids as strings")
    rows = keys.match("row", "aggregate the table, or pass on= with columns that distinguish its rows")
    added = joined.table.drop_columns([right for _, right in keys.pairs])
    row_or_null = pa.array(rows, mask=rows < 0)
    added = added.take(row_or_null) if added.num_columns else added
    is_matched = pa.array(rows >= 0)
    for name in sorted(set(added.column_names) & {*stored.names, IMAGE_ID}):
        # Profiles written from these images have equal columns.
        ours = None if name == IMAGE_ID else stored.column(name).filter(is_matched)
        if ours is None or ours.type != added[name].type or not ours.equals(added[name].filter(is_matched)):
            problem = f"values of column {name!r} differ from those in {stored.path}"
            joined.refuse(problem, "rename or drop the column, or pass it in on=", MetadataError, name)
        added = added.drop_columns(name)
    without, is_key = np.flatnonzero(rows < 0), keys.rows >= 0
    unused, notes = np.flatnonzero(is_key & ~np.isin(keys.rows, keys.images)), []
    if len(without):
        examples = keys.examples(without, row=False)
        notes.append(f"{len(without):,} of {len(rows):,} images have no row, so their values are null: {examples}")
    if len(unused):
        examples = keys.examples(unused, row=True)
        notes.append(f"{len(unused):,} of {int(is_key.sum()):,} rows have no image: {examples}")
    if notes:
        keys.warn("; ".join(notes))
    return SourceWithColumns(source, added, joined.unread, row_or_null)
