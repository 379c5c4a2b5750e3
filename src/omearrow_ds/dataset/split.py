"""Splitting of samples into parts with given shares, grouped by columns and stratified by classes.

The algorithm does not depend on other libraries, so a seed gives the same split on every machine and with every library
version. Its only random source is ``numpy.random.RandomState(seed).permutation``, whose stream NumPy has frozen
(NEP 19). Shares are exact rational numbers; the remaining arithmetic uses IEEE 754 doubles in a fixed order.

- Without groups: the samples are permuted, and each part takes its share of them, rounded by largest remainder
  (Hamilton; the earlier part first if remainders are equal). With classes, this is done per class in sorted order:
  every part gets its share of the class rounded down. The remaining samples, at most one per part, go to the parts
  furthest below their share of all classes so far.
- With groups: groups are sorted by key, permuted, then stably sorted by size, the largest first (like Graham's rule of
  1969 for machines). Each goes to the part that is furthest below its share in samples. With classes, it goes to the
  part where the sum over parts and classes of the squared relative deviation from the class's share grows least. When
  the number of remaining groups equals the number of empty parts, each empty part gets one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.axes import Array
from omearrow_ds.dataset.targets import is_text
from omearrow_ds.errors import ArgumentError, ColumnError
from omearrow_ds.options import check_integer
from omearrow_ds.storage.formats._columns import unknown_column
from omearrow_ds.text import count

_OFF = Fraction(1, 10**6)  # Tolerance for the sum of fractions as typed.


def split_positions(
    samples: int, fractions: Sequence[float], groups: Array | None, classes: Array | None, seed: int, path: str
) -> list[Array]:
    """Divide ``samples`` into parts, and return the sorted positions (int64) of each part.

    ``groups`` and ``classes`` are (N,) int64 codes of groups and classes, from 0 without gaps, in order of sorted keys.
    """
    shares = _shares(fractions)
    random = np.random.RandomState(checked_seed(seed))  # Its stream is frozen, unlike that of a Generator.
    if groups is None:
        parts = _by_samples(samples, shares, classes, random)
    else:
        num_groups = int(groups.max(initial=-1)) + 1
        if num_groups < len(shares):
            problem = f"has only {count(num_groups, 'group')} for {len(shares)} parts"
            remedy = "pass fewer fractions, or a column with more values"
            raise ArgumentError(problem, path=path, option="by", remedy=remedy)
        part_of_group = _by_groups(groups, num_groups, shares, classes, random)
        parts = [np.flatnonzero(part_of_group[groups] == part) for part in range(len(shares))]
    for part, positions in enumerate(parts):
        if not len(positions):
            problem = f"part {part} would contain none of {count(samples, 'sample')}"
            remedy, value = "raise its fraction, or pass fewer fractions", tuple(fractions)
            raise ArgumentError(problem, path=path, option="fractions", value=value, remedy=remedy)
    return parts


def checked_seed(seed: int) -> int:
    return check_integer("seed", seed, 0, "a whole number from 0 to 2**32 - 1", 2**32 - 1)


def codes_of(columns: Any, names: Any, option: str, path: str) -> Array:
    """Return one int64 code per row, equal for rows with equal values in all columns, in the order of sorted values.

    ``columns`` is a table, a dataset or a `ColumnReader`.
    """
    chosen = [names] if isinstance(names, str) else list(names) if isinstance(names, Sequence) else []
    if not chosen or not all(isinstance(name, str) for name in chosen):
        raise ArgumentError(option=option, value=names, allowed="one or more names of columns")
    coded = []
    for name in chosen:
        if name not in columns.column_names:
            raise unknown_column(name, columns.column_names, path, f" for {option}")
        coded.append(_codes(columns.column(name), f"{path}: column {name!r}", option))
    return combine_codes(coded)


def combine_codes(columns: Iterable[Array]) -> Array:
    """Return one code per row, equal for rows with equal integers in all columns, in the order of their values."""
    codes: Array = np.zeros(1, np.int64)
    for column in columns:
        distinct = np.unique(column, return_inverse=True)[1].reshape(-1)
        codes = np.unique(codes * (distinct.max(initial=0) + 1) + distinct, return_inverse=True)[1].reshape(-1)
    return codes


def _codes(column: pa.ChunkedArray, subject: str, option: str) -> Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    plain = column.cast(pa.large_string() if is_text(kind) else kind)
    missing = plain.is_null(nan_is_null=pa.types.is_floating(plain.type)).to_numpy()
    if missing.any():
        msg = f"{subject} has {count(int(missing.sum()), 'null')}, the first at sample {missing.argmax()}"
        raise ColumnError(f"{msg}; fill them, or remove these images, to use the column for {option}")
    if pa.types.is_nested(plain.type) or pa.types.is_null(plain.type):
        problem = f"has the type {plain.type}, invalid for {option}; choose a column of strings, numbers or times"
        raise ColumnError(f"{subject} {problem}")
    distinct = pc.unique(plain)
    codes: Array = pc.index_in(plain, distinct.take(pc.sort_indices(distinct))).to_numpy().astype(np.int64)
    return codes


def _shares(fractions: Any) -> list[Fraction]:
    """Return shares with sum 1, each the exact decimal number as typed: 0.1 is a tenth."""
    try:
        shares = [Fraction(str(fraction)) for fraction in fractions]
    except (TypeError, ValueError):
        shares = []
    total = sum(shares, Fraction())
    if not shares or min(shares) <= 0 or abs(total - 1) > _OFF:
        summed = f"the sum is {float(total):g}" if shares else ""
        allowed = "one positive number per part, with sum 1, e.g. (0.8, 0.1, 0.1)"
        raise ArgumentError(summed, option="fractions", value=fractions, allowed=allowed)
    return [share / total for share in shares]


def _by_samples(samples: int, shares: Sequence[Fraction], classes: Array | None, random: Any) -> list[Array]:
    order = random.permutation(samples)
    if classes is not None:
        order = order[np.argsort(classes[order], kind="stable")]
    owed = [Fraction()] * len(shares)  # Deficit over the classes so far.
    sizes = list[int]()  # Sizes of consecutive pieces of the order, which belong to each part in turn.
    for length in [samples] if classes is None else np.bincount(classes).tolist():
        wholes, remainders = zip(*(divmod(share * length, 1) for share in shares), strict=True)
        owed = [owes + remainder for owes, remainder in zip(owed, remainders, strict=True)]
        open_to = [part for part, remainder in enumerate(remainders) if remainder]
        more = sorted(open_to, key=owed.__getitem__, reverse=True)[: length - sum(wholes)]
        for part, whole in enumerate(wholes):
            owed[part] -= part in more
            sizes.append(whole + (part in more))
    parts = np.tile(np.arange(len(shares)), len(sizes) // len(shares))
    part_of = np.repeat(parts, np.array(sizes, np.int64))
    return [np.sort(order[part_of == part]).astype(np.int64) for part in range(len(shares))]


def _by_groups(groups: Array, count: int, shares: Sequence[Fraction], classes: Array | None, random: Any) -> Array:
    """Return the part for each group. Without classes, it is the part that lacks most samples of its share.

    With classes, it is the part where the sum of the squared deviations of classes from their shares grows least. For
    ``g`` samples of a class of ``n`` and a part that lacks ``b``, it grows by ``(g * g - 2 * g * b) / n**2``.
    """
    sizes = np.bincount(groups, minlength=count)
    if classes is None:
        whole = math.lcm(*(share.denominator for share in shares))
        contents = [[(0, size * whole)] for size in sizes.tolist()]  # Classes and their numbers of samples per group.
        lacking: list[list[Any]] = [[int(share * whole) * len(groups)] for share in shares]  # In units of 1 / whole.
    else:
        totals = np.bincount(classes).tolist()
        pairs, counts = np.unique(groups * len(totals) + classes, return_counts=True)
        contents = [[] for _ in range(count)]
        for pair, number in zip(pairs.tolist(), counts.tolist(), strict=True):
            contents[pair // len(totals)].append((pair % len(totals), number))
        lacking = [[float(share * total) for total in totals] for share in shares]
    order = random.permutation(count)
    part_of_group = np.zeros(count, np.int64)
    empty = list(range(len(shares)))
    for done, group in enumerate(order[np.argsort(-sizes[order], kind="stable")].tolist()):
        allowed = empty if len(empty) == count - done else range(len(shares))
        if classes is None:
            gains = [lacking[part][0] for part in allowed]
        else:
            gains = [math.fsum(g * lacking[part][c] / totals[c] ** 2 for c, g in contents[group]) for part in allowed]
        part = allowed[gains.index(max(gains))]  # The first of equally good parts.
        for c, number in contents[group]:
            lacking[part][c] -= number
        part_of_group[group] = part
        if part in empty:
            empty.remove(part)
    return part_of_group
