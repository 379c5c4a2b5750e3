"""Splits: complete, disjoint, grouped, stratified, and reproducible from a seed."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, ColumnError
from omearrow_ds.dataset.split import codes_of, split_positions
from tests.support.errors import raises

THIRDS = (0.8, 0.1, 0.1)
TABLE = pa.table(
    {
        "plate": [f"p{n % 7}" for n in range(60)],
        "site": [n % 3 for n in range(60)],
        "label": [f"drug{n % 5 * (n % 2)}" for n in range(60)],
    }
)


def split(table, fractions=THIRDS, by=None, stratify=None, seed=0):
    groups = None if by is None else codes_of(table, by, "by=", "here")
    classes = None if stratify is None else codes_of(table, stratify, "stratify=", "here")
    return split_positions(table.num_rows, fractions, groups, classes, seed, "here")


@st.composite
def cases(draw):
    """Draw fractions of one to five parts, and a table with at least one row and group per part."""
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    fractions = [weight / sum(weights) for weight in weights]
    rows = draw(st.integers(5 * sum(weights), 5 * sum(weights) + 100))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = random.integers(0, draw(st.integers(1, rows)), rows)
    groups[: len(weights)] = range(len(weights))
    labels = random.integers(0, draw(st.integers(1, 6)), rows).astype(str)
    return fractions, pa.table({"group": groups, "label": labels}), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=150, deadline=None)
@given(case=cases(), by=st.sampled_from([None, "group", ["group", "label"]]), stratify=st.sampled_from([None, "label"]))
def test_every_sample_is_in_one_part_and_groups_stay_together(case, by, stratify):
    fractions, table, seed = case
    parts = split(table, fractions, by, stratify, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(table.num_rows))
    assert all(len(part) and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert all(map(np.array_equal, parts, split(table, fractions, by, stratify, seed)))
    labels = np.array(table["label"].to_pylist())
    if by is not None:
        keys = [set(codes_of(table, by, "by=", "here")[part].tolist()) for part in parts]
        assert sum(map(len, keys)) == len(set.union(*keys))
    elif stratify is None:
        assert all(abs(len(part) - share * table.num_rows) < 1 for part, share in zip(parts, fractions, strict=True))
    else:
        for label, number in Counter(labels.tolist()).items():
            counts = [int((labels[part] == label).sum()) for part in parts]
            assert all(abs(count - share * number) < 1 + 1e-9 for count, share in zip(counts, fractions, strict=True))


def test_groups_and_classes_come_near_their_shares():
    random = np.random.default_rng(0)
    wells = np.repeat(np.arange(384), random.integers(3, 10, 384))
    table = pa.table({"well": wells, "label": np.where(wells % 8 == 0, "control", (wells % 30).astype(str))})
    labels = np.array(table["label"].to_pylist())
    for seed in range(5):
        sizes = [len(part) / table.num_rows for part in split(table, by="well", seed=seed)]
        assert np.allclose(sizes, THIRDS, atol=0.003)
        parts = split(table, by="well", stratify="label", seed=seed)
        off = [
            abs((labels[part] == label).mean() - (labels == label).mean()) for part in parts for label in set(labels)
        ]
        assert max(off) < 0.03


GOLDEN = {  # Frozen output of numpy.random.RandomState; a change would put test images into training.
    (None, None): "aed1325d93ac3194",
    (None, "label"): "39b4c922006f862f",
    ("plate", None): "b2c68026cc3209ed",
    ("plate", "label"): "b2c68026cc3209ed",
    (("plate", "site"), None): "7e131dfa3cc0fb23",
    (("plate", "site"), "label"): "043bd53a86ad0b2a",
}


@pytest.mark.parametrize(("by", "stratify"), GOLDEN, ids=str)
def test_a_seed_gives_the_split_that_it_always_gave(by, stratify):
    parts = split(TABLE, by=by, stratify=stratify, seed=42)
    split_text = " | ".join(" ".join(map(str, part.tolist())) for part in parts)
    assert hashlib.blake2b(split_text.encode(), digest_size=8).hexdigest() == GOLDEN[by, stratify], split_text
    assert any(map(lambda one, two: one.tolist() != two.tolist(), parts, split(TABLE, by=by, stratify=stratify)))


def test_groups_do_not_depend_on_the_order_of_the_rows():
    order = np.random.default_rng(0).permutation(60)
    for stratify in (None, "label"):
        parts = split(TABLE, by=["plate", "site"], stratify=stratify)
        moved = split(TABLE.take(order), by=["plate", "site"], stratify=stratify)
        assert [sorted(order[part].tolist()) for part in moved] == [part.tolist() for part in parts]


@pytest.mark.parametrize(
    "fractions", [(), (0.8, 0.1), (0.5, 0.6), (1.5, -0.5), (1, 0), "ab", 3, (0.5, None), (0.5, float("nan"))]
)
def test_fractions_that_are_none(fractions):
    with raises(ArgumentError, option="fractions", mentions=1, remedy=False):
        split(TABLE, fractions)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, None, True, "0"])
def test_seeds_that_are_none(seed):
    with raises(ArgumentError, option="seed", remedy=False):
        split(TABLE, seed=seed)


def test_fractions_are_meant_as_they_are_typed():
    table = pa.table({"n": range(10)})
    for fractions, sizes in [((0.7, 0.2, 0.1), [7, 2, 1]), ((1 / 3, 1 / 3, 1 / 3), [4, 3, 3]), ((1,), [10])]:
        assert [len(part) for part in split(table, fractions)] == sizes
    assert [len(part) for part in split(table, np.float32([0.7, 0.3]))] == [7, 3]


def test_what_cannot_be_split():
    with raises(ArgumentError, option="by", path="here", mentions=(7, 8)):
        split(TABLE, [1 / 8] * 8, by="plate")
    assert [len(part) > 0 for part in split(TABLE, [0.94, *[0.01] * 6], by="plate")] == [True] * 7
    with raises(ArgumentError, option="fractions", path="here", mentions=("part 1", 3)):
        split(TABLE.slice(0, 3), THIRDS)
    with raises(ArgumentError, option="fractions", path="here", mentions=("part 0", 0)):
        split(TABLE.slice(0, 0), (1.0,))
    with raises(
        ColumnError, option="by", path="here", mentions=("'plates'", "['plate', 'site', 'label']"), remedy=False
    ):
        split(TABLE, by="plates")
    for names in ([], 3, ["plate", 3], None):
        with raises(ArgumentError, option="by", remedy=False):
            codes_of(TABLE, names, "by=", "here")
    for column in ([1, None, 3], [0.5, float("nan"), 1.0], ["a", None, None]):
        with raises(
            ColumnError,
            option="by",
            path="here",
            mentions=("'c'", "sample 1", pa.array(column, from_pandas=True).null_count),
        ):
            split(pa.table({"c": column}), by="c")
    with raises(ColumnError, option="stratify", path="here", mentions=("'c'", "list<item: int64>")):
        split(pa.table({"c": [[1], [2]]}), stratify="c")


def test_keys_of_any_type_are_sorted():
    texts = ["b", "a", "β", "B"]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        table = pa.table({"c": pa.array(texts).cast(kind)})
        assert codes_of(table, "c", "by=", "here").tolist() == [2, 1, 3, 0]
    for values in ([2.5, -1.0, 7.0, -9.5], [2, -1, 7, -9], pa.array([2, -1, 7, -9], pa.timestamp("us"))):
        assert codes_of(pa.table({"c": values}), "c", "by=", "here").tolist() == [2, 1, 3, 0]
    table = pa.table({"a": [True, False, True, True], "b": ["x", "y", "x", "a"]})
    assert codes_of(table, ["a", "b"], "by=", "here").tolist() == [2, 0, 2, 1]
