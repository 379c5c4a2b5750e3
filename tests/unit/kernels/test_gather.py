"""Samples gathered by compiled loops and by NumPy; the oracle is one sample after the other."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
from omearrow_ds.dataset.batch import collate
from omearrow_ds.errors import ImageIndexError
from omearrow_ds.kernels.gather import DecodedRows, gather
from omearrow_ds.kernels.scaling import FLOAT32, Scaling, scale
from omearrow_ds.kernels.stacks import Stacks
from tests.support.errors import raises
from tests.support.loops import made_by
from tests.support.strategies import DTYPES, image_of, images_of, slow_except

LARGEST = {dtype: np.float32(np.iinfo(dtype).max) for dtype in DTYPES if dtype.kind != "f"}
DIVIDED = slow_except(["uint16"], LARGEST)  # Compiling the loops of a dtype takes seconds.


@pytest.fixture(scope="module", params=["numba", "numpy"])
def which(request):
    with made_by(request.param):
        yield request.param


def one_by_one(stack, positions, divisor, dtype):
    batch = np.empty((len(positions), *stack.shape[1:]), dtype)
    for index, position in enumerate(positions):
        if isinstance(divisor, np.float32):
            batch[index] = stack[position].astype(np.float32) / divisor
        else:
            scale(stack[position], divisor, batch[index])
    return batch


def stack_of(shape, dtype, laid):
    stack = np.stack([image_of(shape[1:], dtype, number) for number in range(shape[0])])
    if laid == "extreme" and dtype.kind != "f":
        stack.flat[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    return {"cropped": stack[..., : max(1, shape[-1] - 1)], "turned": stack.swapaxes(-1, -2)}.get(laid, stack)


@st.composite
def in_arrays(draw, stack):
    """Draw a layout of the same samples: one array, an array per sample at any byte, or two with other strides."""
    kind = draw(st.sampled_from(["one", "bytes", "strides"]))
    if kind == "one":
        return Stacks([stack])
    first = draw(st.integers(0, len(stack) - 1))
    halves = [half for half in (stack[:first], stack[first:]) if len(half)]
    if kind == "strides":
        return Stacks([halves[0].copy(order="F"), *halves[1:]])
    return Stacks([at_byte(sample[None], draw(st.integers(0, 9))) for half in halves for sample in half])


def at_byte(array, byte):
    """Copy an array to a byte offset, with the same order of axes."""
    like = np.empty_like(array)
    memory = np.empty(like.nbytes + 16, np.uint8)[byte:]
    copy_at_byte = np.ndarray(array.shape, array.dtype, memory, strides=like.strides)
    copy_at_byte[...] = array
    return copy_at_byte


@pytest.mark.parametrize("dtype", DIVIDED, ids=str)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(1, 9)),
    laid=st.sampled_from(["", "extreme"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_a_batch_is_its_samples_divided(which, shape, dtype, laid, data):
    stack = stack_of(shape, dtype, laid)
    stack.flags.writeable = data.draw(st.booleans())
    positions = data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=8))
    out = np.full((len(positions), *stack.shape[1:]), np.nan, np.float32)
    gather(data.draw(in_arrays(stack)), np.array(positions), out, LARGEST[dtype])
    assert out.tobytes() == one_by_one(stack, positions, LARGEST[dtype], FLOAT32).tobytes()


@pytest.mark.parametrize("dtype", ["uint16", pytest.param("float64", marks=pytest.mark.slow)])
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 9)),
    laid=st.sampled_from(["", "cropped", "turned", "extreme"]),
    kind=st.sampled_from(["none", "largest", "channels", "illumination"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_batch_of_any_strides_and_scaling(which, shape, dtype, laid, kind, data):
    stack = stack_of(shape, np.dtype(dtype), laid)
    factors = np.linspace(0.3, 7, shape[1], dtype=np.float32)[:, None, None]
    illumination = np.linspace(0.5, 2, stack[0].size, dtype=np.float32).reshape(stack.shape[1:])
    divisor = {
        "none": None,
        "largest": np.float32(255),
        "channels": Scaling(None, np.broadcast_to(factors, stack.shape[1:]), factors, clip=data.draw(st.booleans())),
        "illumination": Scaling(illumination, None, np.float32(65535), clip=False),
    }[kind]
    out_dtype = FLOAT32
    if divisor is None:
        out_dtype = FLOAT32 if dtype == "float64" else stack.dtype
    positions = data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=6))
    out = np.full((len(positions), *stack.shape[1:]), 77, out_dtype)
    gather(data.draw(in_arrays(stack)), np.array(positions), out, divisor)
    assert out.tobytes() == one_by_one(stack, positions, divisor, out_dtype).tobytes()


@pytest.mark.parametrize("dtype", DIVIDED, ids=str)
def test_every_value_is_divided_exactly(which, dtype):
    ends, count = (np.iinfo(dtype).min, np.iinfo(dtype).max), min(2 ** (8 * dtype.itemsize), 100_000)
    values = np.linspace(*ends, count).round().astype(np.int64)
    pixels = values.astype(dtype)
    out, want = np.empty((1, len(pixels)), np.float32), pixels.astype(np.float32) / LARGEST[dtype]
    gather(Stacks([pixels[None]]), np.array([0]), out, LARGEST[dtype])
    assert out[0].tobytes() == want.tobytes()
    scale(pixels, LARGEST[dtype], out[0])
    assert out[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("position", [-1, 3, 2**40])
@pytest.mark.parametrize("cropped", [False, True])
def test_a_sample_that_is_not_there(which, position, cropped):
    stack = np.zeros((3, 2, 4, 4), np.uint16)[..., : 3 if cropped else 4]
    with raises(IndexError, mentions=position, remedy=False):
        gather(Stacks([stack]), np.array([0, position]), np.empty((2, *stack.shape[1:]), np.float32), np.float32(9))


@pytest.mark.parametrize("parts", [1, 3])
def test_large_batches_are_shared_out_between_threads(which, parts):
    images = [image_of((1, 300, 400), np.uint16, number) for number in range(9)]
    rows = DecodedRows(Stacks(np.split(np.stack(images), parts)), [np.float32(65535)], FLOAT32)
    positions = [8, 0, 3, 3, 7, 1, 2] * 5
    out = np.empty((len(positions), 1, 300, 400), np.float32)
    rows.batch(positions, out, threads=3)
    for index, position in enumerate(positions):
        assert np.array_equal(out[index], images[position].astype(np.float32) / np.float32(65535))
    with pytest.raises(ImageIndexError):
        rows.batch([*positions[:-1], 9], out, threads=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_size": (5, 4)},
        {"axes": "YXC", "select": {"C": [2, 0]}},
        {"normalize": {"mean": [1, 20, 300], "std": [3, 2, 1.7]}},
        {"normalize": {"low": 100, "high": 40_000}, "illumination": [np.full((6, 7), 1.5)] * 3, "axes": "TCZYX"},
        {"normalize": False, "crop_size": (3, 7)},
    ],
    ids=str,
)
@pytest.mark.parametrize("preload", [True, False])
def test_datasets_give_the_same_bits_by_loops(stored, options, preload):
    path = stored("arrow", images_of([((1, 3, 1, 6, 7), "uint16")] * 5))
    bits = []
    for which in ("numpy", "numba"):
        with made_by(which):
            dataset = OMEArrowDataset(path, preload=preload, **options)
            batches = [collate(dataset.__getitems__(order)) for order in ([4, 0, -1, 0], [2])]
            loaded = list(OMEArrowDataLoader(dataset, 2, num_workers=0))
            bits.append([tensor.numpy().tobytes() for tensor in (*batches, dataset[3], *loaded)])
    assert bits[0] == bits[1]


@pytest.mark.parametrize("pad", ["constant", "edge", "reflect"])
@pytest.mark.parametrize(
    "options", [{}, {"normalize": {"mean": [1, 20, 300], "std": [3, 2, 1.7]}}, {"normalize": False}]
)
def test_objects_give_the_same_bits_by_loops(stored, options, pad):
    path = stored("arrow", images_of([((1, 3, 1, 20, 30), "uint16")] * 3), image_ids=["a", "b", "c"])
    objects = pa.table({"image_id": [*"abcab"], "y": [0.0, 10, 19, 5, 12], "x": [29.0, 15, 0, 3, 22]})
    bits = []
    for which in ("numpy", "numba"):
        with made_by(which):
            dataset = OMEArrowDataset(path, objects=objects, center=("y", "x"), crop_size=(8, 9), pad=pad, **options)
            batch = collate(dataset.__getitems__([4, 0, 2, 1, 3]))
            bits.append([batch.numpy().tobytes(), *(dataset[index].numpy().tobytes() for index in range(5))])
    assert bits[0] == bits[1]
