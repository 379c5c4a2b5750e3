"""Sequence of the strings of an Arrow array."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds.dataset.preload import group_into_kinds
from omearrow_ds.storage import published_parts
from omearrow_ds.storage.published_parts import LazyStrings


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20), st.slices(20), st.integers(0, 3))
def test_they_are_a_list_of_strings(values, part, offset):
    strings = LazyStrings(pa.array([*"abc"[:offset], *values], pa.string())[offset:])
    assert list(strings) == values == [strings[index] for index in range(len(strings))]
    assert strings == values
    assert values == strings
    assert strings[part] == values[part]
    assert strings != [*values, "more"]
    assert pa.array(strings).to_pylist() == values
    assert pickle.loads(pickle.dumps(strings)) == strings
    assert strings.__eq__("text") is NotImplemented


def test_they_are_gone_through_in_pieces(monkeypatch):
    monkeypatch.setattr(published_parts, "_NUM_STRINGS", 3)
    assert list(LazyStrings(pa.array([*"abcdefgh"]))) == [*"abcdefgh"]
    with pytest.raises(IndexError):
        LazyStrings(pa.array(["a"]))[1]


IMAGES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from(["u1", "u2"]), st.integers(0, 2))


@settings(deadline=None, max_examples=100)
@given(st.lists(IMAGES, max_size=12))
def test_kinds_are_those_of_a_dict(images):

    shapes = np.array([[1, 1, 1, y, x] for y, x, _, _ in images], np.int64).reshape(-1, 5)
    kinds = group_into_kinds(
        shapes, [np.dtype(kind) for _, _, kind, _ in images], np.array([column for *_, column in images])
    )
    first: dict[tuple[object, ...], int] = {}
    for index, image in enumerate(images):
        first.setdefault(image, index)
    assert kinds.first == list(first.values())
    assert kinds.spread(kinds.first) == [first[image] for image in images]
