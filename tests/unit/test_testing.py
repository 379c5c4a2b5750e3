from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds.testing import synthetic_image, synthetic_images
from omearrow_ds.testing.conformance import image_of, same
from omearrow_ds.testing.synthetic import DTYPES
from tests.support.errors import raises

NF1 = Path(__file__).resolve().parents[3] / "shared/data/nf1"

# Raw bytes / zstd level-3 bytes of the NF1 fields' tiles, by edge in pixels; the module's docstring has the rest.
NF1_RATIO = {100: 2.82, 512: 3.11}

SHAPES = st.tuples(*[st.integers(1, 3)] * 3, *[st.integers(1, 40)] * 2)


def zstd_ratio(images: list[np.ndarray]) -> float:
    codec = pa.Codec("zstd", compression_level=3)
    packed = sum(len(codec.compress(image.astype("<u2").tobytes())) for image in images)
    return sum(image.nbytes for image in images) / packed


def tiles(field: np.ndarray, edge: int) -> list[np.ndarray]:
    rows, columns = (size // edge for size in field.shape)
    return [field[y * edge : (y + 1) * edge, x * edge : (x + 1) * edge] for y in range(rows) for x in range(columns)]


@given(index=st.integers(0, 2**40), shape=SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**40))
def test_an_image_depends_on_its_arguments_alone(index, shape, dtype, seed):
    image = synthetic_image(index, shape, dtype, seed)
    assert image.shape == shape
    assert image.dtype == dtype
    assert image.flags.c_contiguous
    assert image.flags.owndata
    np.testing.assert_array_equal(image, synthetic_image(index, shape, dtype, seed))


def test_streamed_images_are_those_made_alone():
    for index, image in enumerate(synthetic_images(4, (2, 2, 2, 30, 20), "int16", seed=7)):
        np.testing.assert_array_equal(image, synthetic_image(index, (2, 2, 2, 30, 20), "int16", seed=7))


def test_count_is_the_number_of_images_and_does_not_change_them():
    assert list(synthetic_images(0)) == []
    few, many = list(synthetic_images(2)), list(islice(synthetic_images(10**9), 2))
    np.testing.assert_array_equal(few, many)


def test_indices_and_seeds_differ():
    distinct = {
        synthetic_image(index, (1, 1, 1, 20, 20), seed=seed).tobytes() for index in range(5) for seed in range(5)
    }
    assert len(distinct) == 25


def test_every_dtype_shows_the_same_scene_over_its_whole_range():
    shape = (1, 1, 1, 100, 100)
    exact = synthetic_image(0, shape, "float64")
    assert 0 <= exact.min() < 0.2
    assert 0.5 < exact.max() <= 1
    for dtype in DTYPES:
        image = synthetic_image(0, shape, dtype)
        top = np.iinfo(dtype).max if image.dtype.kind in "iu" else 1
        np.testing.assert_allclose(image / top, exact, atol=1 / 127)


def test_a_byte_swap_shows():
    image = synthetic_image(0, (1, 1, 1, 100, 100))
    assert np.mean(image == image.byteswap()) < 0.05


def test_images_use_the_16_bit_range():
    pixels = np.stack(list(synthetic_images(50)))
    dim, bright = np.percentile(pixels, [5, 99])
    assert dim < 4000
    assert bright > 30_000
    assert len(np.unique(pixels)) > 200


def test_cells_persist_over_time_depth_and_channel():
    image = synthetic_image(1, (2, 2, 2, 100, 100), "float32")
    first = image[0, 0, 0].ravel()
    for plane in image.reshape(-1, first.size)[1:]:
        assert 0.5 < np.corrcoef(first, plane)[0, 1] < 0.999


@pytest.mark.parametrize(("edge", "count"), [(100, 300), (512, 15)])
def test_images_compress_like_nf1(edge, count):
    ratio = zstd_ratio(list(synthetic_images(count, (1, 1, 1, edge, edge))))
    assert ratio == pytest.approx(NF1_RATIO[edge], rel=0.15)


@pytest.mark.skipif(not NF1.is_dir(), reason=f"the NF1 fields are not at {NF1}")
@pytest.mark.parametrize("edge", NF1_RATIO)
def test_nf1_compresses_as_stated(edge):
    fields = [tifffile.imread(path) for path in sorted(NF1.glob("*.tif"))]
    assert zstd_ratio([tile for field in fields for tile in tiles(field, edge)]) == pytest.approx(
        NF1_RATIO[edge], rel=0.01
    )


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float16", "bool", "complex64", ">u2"])
def test_other_dtypes_are_refused(dtype):
    with raises(ValueError, option="dtype", mentions=("uint8", "uint16"), remedy=False):
        synthetic_image(0, (1, 1, 1, 4, 4), dtype)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<f4", ">f4", "<f8", ">f8"])
def test_images_for_conformance_have_the_requested_byte_order(dtype):
    image = image_of((1, 2, 1, 3, 4), dtype, 5)
    assert image.dtype.str == dtype
    assert same(image.astype(image.dtype.newbyteorder("=")), image_of((1, 2, 1, 3, 4), dtype[1:], 5))


@pytest.mark.parametrize(
    "shape", [(), (4, 4), (1, 1, 1, 0, 4), (1, 1, 1, -1, 4), (1, 1, 1, 4, 4, 1), (1, 1, 1, 4.0, 4)]
)
def test_other_shapes_are_refused(shape):
    with raises(ValueError, option="shape", mentions="(T, C, Z, Y, X)", remedy=False):
        synthetic_image(0, shape)


@pytest.mark.parametrize("name", ["index", "seed"])
def test_negative_numbers_are_refused(name):
    arguments = {"index": 0, "shape": (1, 1, 1, 4, 4), name: -1}
    with raises(ValueError, option=name, mentions=-1, remedy=False):
        synthetic_image(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"count": -1}, {"count": 1, "seed": -1}, {"count": 1, "dtype": "int64"}, {"count": 1, "shape": (4, 4)}],
)
def test_a_stream_refuses_at_the_call(arguments):
    with raises(ValueError, option=list(arguments)[-1], remedy=False):
        synthetic_images(**arguments)
