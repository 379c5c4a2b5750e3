"""Index arithmetic of input axes, selections and crops; the oracle is NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import AxesError, ImageError, SelectError
from omearrow_ds.axes import AXES, SampleAxes, checked_size, to_tczyx
from omearrow_ds.resources import pixel_count
from tests.support.errors import raises
from tests.support.strategies import image_of, same, shapes

quick = settings(max_examples=200, deadline=None)


@quick
@given(axes=st.lists(st.sampled_from(AXES), min_size=1, unique=True).map("".join), data=st.data())
def test_input_axes_land_where_they_belong(axes, data):
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in axes}
    image = image_of([sizes[axis] for axis in axes])
    laid_out = to_tczyx(image, axes, "image 0")
    assert laid_out.shape == tuple(sizes.get(axis, 1) for axis in AXES)
    for index in np.ndindex(image.shape):
        index_by_axis = dict(zip(axes, index, strict=True))
        assert laid_out[tuple(index_by_axis.get(axis, 0) for axis in AXES)] == image[index]


def test_two_and_five_axes_need_no_names():
    assert same(to_tczyx(image_of((3, 4)), None, ""), image_of((1, 1, 1, 3, 4)))
    assert same(to_tczyx(image_of((2, 1, 2, 3, 4)), None, ""), image_of((2, 1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((), "list"),
        ((4,), "list"),
        ((2, 3, 4), "CYX"),
        ((2, 3, 4, 5), "CYX"),
        ((1,) * 6, "CYX"),
    ],
)
def test_to_tczyx_refuses_other_ranks_without_axes(shape, word):
    with raises(ImageError, mentions=("image 7", word)):
        to_tczyx(np.zeros(shape), None, "image 7")


@pytest.mark.parametrize(("shape", "axes"), [((2, 3), "CYX"), ((2, 3, 4), "YX"), ((0, 3), "YX")])
def test_a_shape_that_does_not_fit_its_axes(shape, axes):
    with raises(ImageError, mentions="image 7", remedy=False):
        to_tczyx(np.zeros(shape), axes, "image 7")


@pytest.mark.parametrize("axes", ["", "YY", "SYX", "yx", None, 5, ["Y", "X"]])
def test_malformed_sample_axes(axes):
    with raises(AxesError, option="axes", mentions="TCZYX", remedy=False):
        SampleAxes(axes)


def picks(size):
    index = st.integers(-size, size - 1)
    part = st.slices(size).filter(lambda part: len(range(size)[part]) > 0)
    numpy_index = index.map(np.int64)
    return st.one_of(
        index, numpy_index, part, st.lists(index, min_size=1, max_size=4), st.lists(index, min_size=1).map(np.array)
    )


@st.composite
def cuts(draw):
    """Draw the shape of an image and arguments that fit it."""
    shape = draw(shapes(7))
    select = {axis: draw(picks(size)) for axis, size in zip(AXES, shape, strict=True) if draw(st.booleans())}
    sizes = {axis: len(pick(axis, size, select)) for axis, size in zip(AXES, shape, strict=True)}
    crop = tuple(draw(st.integers(1, sizes[axis])) for axis in "YX") if draw(st.booleans()) else None
    if crop is not None:
        sizes |= dict(zip("YX", crop, strict=True))
    optional = [axis for axis in AXES if sizes[axis] == 1]
    dropped = set(draw(st.lists(st.sampled_from(optional), unique=True))) if optional else set()
    axes = [axis for axis in AXES if axis not in dropped] or ["X"]
    return shape, "".join(draw(st.permutations(axes))), select or None, crop


def pick(axis, size, select):
    """Return the indices that a selection keeps along an axis."""
    return np.atleast_1d(np.arange(size)[select.get(axis, slice(None))])


def cut_by_numpy(image, axes, select, crop):
    """Return a sample, computed without optimizations."""
    for position, axis in enumerate(AXES):
        image = np.take(image, pick(axis, image.shape[position], select or {}), axis=position)
    if crop is not None:
        y, x = ((size - length) // 2 for size, length in zip(image.shape[3:], crop, strict=True))
        image = image[..., y : y + crop[0], x : x + crop[1]]
    image = image.squeeze(tuple(position for position, axis in enumerate(AXES) if axis not in axes))
    axes_in_order = [axis for axis in AXES if axis in axes]
    return image.transpose([axes_in_order.index(axis) for axis in axes])


@quick
@given(cuts())
def test_a_cut_is_what_numpy_gives(arguments):
    shape, axes, select, crop = arguments
    image = image_of(shape)
    expected = cut_by_numpy(image, axes, select, crop)
    cut = SampleAxes(axes, select, crop).cut(shape, "image 0")
    assert cut.shape == expected.shape
    assert same(np.ascontiguousarray(cut(image)), np.ascontiguousarray(expected))
    stack = np.stack([image, image + 1])
    assert same(np.ascontiguousarray(cut(stack)[1]), np.ascontiguousarray(expected + 1))


@pytest.mark.parametrize("pick", [3, -4, [0, 3], [-4], [], slice(3, None), slice(0, 0), np.array([5])], ids=str)
def test_a_selection_outside_the_image(pick):
    with raises(SelectError, option="select", mentions=("image 4", "'Z'", "length 3"), remedy=False) as caught:
        SampleAxes("TCZYX", {"Z": pick}).cut((1, 1, 3, 4, 5), "image 4")
    assert isinstance(caught.value, AxesError | IndexError)


@pytest.mark.parametrize(
    "pick", ["0", None, 1.5, True, [0.5], [None], [[0]], ["1"], np.array([[1]]), [True, False]], ids=str
)
def test_a_selection_that_is_none(pick):
    with raises(AxesError, option="select", mentions=("'Z'", "integer"), remedy=False):
        SampleAxes("TCZYX", {"Z": pick}).cut((1, 1, 3, 4, 5), "image 4")


@pytest.mark.parametrize("select", [{"S": 0}, {"CZ": 0}, {"": 0}, {0: 0}], ids=str)
def test_a_selection_of_no_axis(select):
    with raises(AxesError, option="select", mentions="TCZYX", remedy=False):
        SampleAxes("CYX", select)


@pytest.mark.parametrize("crop", [(4,), (4, 4, 4), 4, "ab", (0, 4), (4, -1), (None, 4), (1.5, 2)], ids=str)
def test_a_crop_that_is_none(crop):
    with raises(AxesError, option="crop_size", remedy=False):
        SampleAxes("CYX", None, crop)


@pytest.mark.parametrize("size", [64, np.int64(64)], ids=["int", "NumPy integer"])
def test_one_number_as_crop_size_is_refused_with_the_size_to_pass(size):
    with raises(AxesError, option="crop_size", mentions="pass (64, 64)"):
        SampleAxes("CYX", None, size)


@pytest.mark.parametrize("size", ["64", (64,), 64.0, None], ids=repr)
def test_other_crop_sizes_are_refused_with_an_example(size):
    with raises(AxesError, option="resize", mentions="(64, 64)"):
        checked_size(size, "resize")


@pytest.mark.parametrize("crop", [(5, 5), (4, 6)])
def test_a_crop_larger_than_the_image(crop):
    with raises(AxesError, option="crop_size", mentions=("image 4", "4 x 5")):
        SampleAxes("CYX", None, crop).cut((1, 1, 1, 4, 5), "image 4")


@pytest.mark.parametrize(("axes", "dropped"), [("YX", "C"), ("CYX", "Z"), ("CZYX", "T"), ("C", "T")])
def test_a_dropped_axis_longer_than_one(axes, dropped):
    with raises(AxesError, option="axes", mentions=("image 4", dropped, f"select={{'{dropped}': 0}}")):
        SampleAxes(axes).cut((2 if dropped == "T" else 1, 2, 2, 4, 5), "image 4")


def test_pixel_counts_do_not_overflow():
    assert pixel_count(np.array([2**20] * 5)) == 2**100
