"""Crops by the loops and by NumPy; the oracle is `numpy.pad` of scaled fields, for any strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds.kernels import crops
from omearrow_ds.kernels.crops import PADS
from omearrow_ds.kernels.scaling import FLOAT32, Scaling, scale
from omearrow_ds.kernels.stacks import Stacks
from tests.support.errors import raises
from tests.support.loops import made_by
from tests.support.strategies import DTYPES, image_of

COMPILED = [np.dtype("uint16")]  # Each takes some seconds to compile; float64 has its own test.


@pytest.fixture(scope="module", params=["numba", "numpy"])
def dtypes(request):
    """Yield the dtypes to test with compiled loops or with NumPy."""
    with made_by(request.param):
        yield COMPILED if request.param == "numba" else [*DTYPES, *(dtype.newbyteorder() for dtype in DTYPES)]


def oracle(stack, corners, window, divisor, pad, dtype):
    """Scale whole fields, pad them by NumPy, and cut the windows out."""
    windows = []
    for field, top, left in corners:
        scaled = np.empty(stack.shape[1:], dtype)
        scale(stack[field], divisor, scaled)
        sides = [
            (max(0, -first), max(0, first + length - size))
            for first, length, size in zip((top, left), window, stack.shape[-2:], strict=True)
        ]
        padded = np.pad(scaled, [(0, 0)] * 3 + sides, mode=pad)
        rows, columns = (
            slice(first + before, first + before + length)
            for first, (before, _), length in zip((top, left), sides, window, strict=True)
        )
        windows.append(padded[..., rows, columns])
    return np.array(windows, dtype)


def divisors(stack, which):
    """Return divisors of the given kind."""
    size_c, plane = stack.shape[2], stack.shape[-2:]
    per_channel = np.linspace(0.3, 7, size_c, dtype=np.float32)[:, None, None, None]
    whole = np.broadcast_to(per_channel, stack.shape[1:])
    illumination = np.linspace(0.5, 2, plane[0] * plane[1], dtype=np.float32).reshape(plane)
    return {
        "none": None,
        "largest": np.float32(255),
        "mean": Scaling(None, per_channel, whole, clip=False),
        "low": Scaling(None, whole, np.float32(3), clip=True),
        "illumination": Scaling(illumination, None, np.float32(255), clip=False),
        "all": Scaling(np.broadcast_to(illumination, stack.shape[1:]), per_channel, per_channel, clip=True),
        "within": Scaling(None, illumination, illumination, clip=True),
    }[which]


@st.composite
def cases(draw):
    shape = draw(st.tuples(*[st.integers(1, 3)] * 4, *[st.integers(1, 9)] * 2))
    window = draw(st.tuples(*[st.integers(1, 20)] * 2))
    corner = st.tuples(st.integers(0, shape[0] - 1), *[st.integers(-30, 30)] * 2)
    laid = draw(st.sampled_from(["C", "F", "mirrored", "every second", "odd", "headers"]))
    return shape, window, draw(st.lists(corner, min_size=1, max_size=4)), laid, draw(st.booleans())


def laid_out(stack, how):
    """Return the stack, or a part of it, in another memory layout."""
    if how == "odd":  # Misaligned.
        memory = np.empty(stack.nbytes + 1, np.uint8)[1:].view(stack.dtype).reshape(stack.shape)
        memory[:] = stack
        return memory
    if how == "headers":  # Nine bytes before each plane, as in Lance files.
        steps = np.cumprod([1, *stack.shape[3:0:-1]])[::-1] * (9 + stack[0, 0, 0, 0].nbytes)
        memory = np.zeros(stack.shape[0] * steps[0] + 9, np.uint8)
        memory_view = np.ndarray(stack.shape, stack.dtype, memory, 9, (*map(int, steps), *stack.strides[4:]))
        memory_view[...] = stack
        return memory_view
    views = {"mirrored": np.s_[::-1, ..., ::-1, ::-1], "every second": np.s_[:, ::2, ::-2, :, ::2, ::2]}
    return np.asfortranarray(stack) if how == "F" else stack[views.get(how, np.s_[:])]


@given(
    pad=st.sampled_from(PADS),
    case=cases(),
    which=st.sampled_from(["none", "largest", "mean", "low", "illumination", "all", "within"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_crops_are_those_of_padded_fields(dtypes, pad, case, which, data):
    shape, window, corners, laid, turned = case
    dtype = data.draw(st.sampled_from(dtypes))
    stack = laid_out(np.stack([image_of(shape[1:], dtype.newbyteorder("="), seed) for seed in range(shape[0])]), laid)
    stack = stack.astype(dtype, copy=False)
    divisor = divisors(stack, which)
    result_dtype = FLOAT32 if divisor is not None or (dtype.kind == "f" and turned) else dtype
    want = oracle(stack, corners, window, divisor, pad, result_dtype)
    out = np.full((len(corners), *window, *stack.shape[1:4]), 77, result_dtype).transpose(0, 3, 4, 5, 1, 2)
    out = out if turned else np.ascontiguousarray(out)
    before = stack.tobytes()
    parts = data.draw(st.sampled_from([Stacks([stack]), Stacks([stack[:1], stack[1:]]), Stacks([*stack[:, None]])]))
    crops.crops(parts, np.array(corners).T.copy(), out, divisor, pad)
    assert out.tobytes() == want.tobytes()
    assert stack.tobytes() == before


def test_pixels_that_tell_where_they_stand(dtypes):
    y, x = np.indices((40, 50), dtype=np.uint16)
    field = (y * 256 + x)[None, None, None, None]
    out = np.empty((2, 1, 1, 1, 8, 8), np.uint16)
    crops.crops(Stacks([field]), np.array([[0, 0], [10, -3], [20, 46]]), out)
    assert out[0, 0, 0, 0, 2, 3] == 12 * 256 + 23
    assert out[1, 0, 0, 0, :3].max() == 0
    assert out[1, 0, 0, 0, :, 4:].max() == 0
    assert out[1, 0, 0, 0, 3, 0] == 46


def test_a_constant_pad_is_zero_after_scaling(dtypes):
    stack = np.full((1, 1, 1, 1, 2, 2), 200, np.uint16)
    out = np.empty((1, 1, 1, 1, 4, 4), np.float32)
    crops.crops(
        Stacks([stack]), np.array([[0], [-1], [-1]]), out, Scaling(None, np.float32(100), np.float32(50), clip=False)
    )
    assert out[0, 0, 0, 0].tolist() == [[0, 0, 0, 0], [0, 2, 2, 0], [0, 2, 2, 0], [0, 0, 0, 0]]


def test_what_is_no_number_or_beyond_float32_stays_what_numpy_makes_of_it(dtypes):
    pixels = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300, -1e-300, 2.5, 0], np.float64).reshape(1, 1, 1, 1, 2, 4)
    for divisor in (None, Scaling(None, np.float32(0), np.float32(1), clip=True)):
        out, want = np.empty(pixels.shape, np.float32), np.empty(pixels.shape[1:], np.float32)
        with np.errstate(over="ignore"):
            crops.crops(Stacks([pixels]), np.zeros((3, 1), np.int64), out, divisor)
            scale(pixels[0], divisor, want)
        assert out[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("field", [-1, 2])
def test_a_field_that_is_not_there(dtypes, field):
    stack, out = np.zeros((2, 1, 1, 1, 3, 3), np.uint8), np.empty((1, 1, 1, 1, 2, 2), np.uint8)
    with raises(IndexError, mentions=(field, 2), remedy=False):
        crops.crops(Stacks([stack]), np.array([[field], [0], [0]]), out)


def test_no_windows_and_no_pixels(dtypes):
    stack = np.zeros((2, 1, 1, 1, 3, 3), np.uint8)
    crops.crops(Stacks([stack]), np.zeros((3, 0), np.int64), np.empty((0, 1, 1, 1, 2, 2), np.uint8))
    with pytest.raises(IndexError):
        crops.crops(Stacks([stack[..., :0]]), np.zeros((3, 1), np.int64), np.empty((1, 1, 1, 1, 2, 2), np.uint8))
